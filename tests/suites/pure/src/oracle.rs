// SPDX-License-Identifier: MIT OR Apache-2.0

//! The oracle for the choice of a provider: lists and sorting.

use crate::policy::path::{
    Path,
    PathClass, //
};
use crate::policy::rule_effect::{
    Preference,
    RuleEffect, //
};
use crate::policy::{
    placement::{
        Candidate,
        Named,
        Request,
        Strategy, //
    },
    verdict::VerdictCode, //
};

const KIB: u64 = 1024;

/// A candidate that owns its paths.
#[derive(Clone, Debug)]
pub(crate) struct Provider {
    pub(crate) id: u32,
    pub(crate) live: bool,
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) free: u64,
    pub(crate) largest: u64,
    pub(crate) paths: Vec<Path>,
    pub(crate) effect: RuleEffect,
}

impl Provider {
    pub(crate) fn candidate(&self) -> Candidate<'_> {
        Candidate {
            id: self.id,
            live: self.live,
            start: self.start,
            size: self.size,
            free: self.free,
            largest: self.largest,
            exact: true,
            paths: &self.paths,
            effect: self.effect,
        }
    }

    /// Returns whether a buffer would fit into the empty provider, at the first aligned offset.
    pub(crate) fn could_hold(&self, request: &Request) -> bool {
        let align = u128::from(request.align.max(1));
        let (start, size) = (u128::from(self.start), u128::from(self.size));
        let first = start.div_ceil(align) * align;
        first + u128::from(request.size) <= start + size
    }

    /// Returns all rules that the provider breaks.
    pub(crate) fn broken_rules(&self, request: &Request) -> Vec<VerdictCode> {
        let mut broken = Vec::new();
        if let Named::Require(id) = request.named {
            if id != self.id {
                broken.push(VerdictCode::NotNamed);
            }
        }
        if !self.live {
            broken.push(VerdictCode::Removing);
        }
        let unreachable =
            self.paths.len() < request.clients || self.paths.iter().any(|path| path.class == PathClass::Unreachable);
        if unreachable {
            broken.push(VerdictCode::Unreachable);
        }
        if self.effect.denied.is_some() {
            broken.push(VerdictCode::Denied);
        }
        if self.effect.too_far.is_some() {
            broken.push(VerdictCode::TooFar);
        }
        if let Some(max) = request.max_class {
            if unreachable && request.clients > 0 || self.paths.iter().any(|path| path.class > max) {
                broken.push(VerdictCode::TooFar);
            }
        }
        if !self.could_hold(request) {
            broken.push(VerdictCode::TooSmall);
        }
        if self.effect.over.is_some() {
            broken.push(VerdictCode::Quota);
        }
        if self.effect.over_cgroup {
            broken.push(VerdictCode::Cgroup);
        }
        if self.free < request.size {
            broken.push(VerdictCode::Full);
        }
        let set_aside = u128::from(self.free) < u128::from(request.size) + u128::from(self.effect.reserved_for_others);
        if request.size > 0 && set_aside {
            broken.push(VerdictCode::Reserved);
        }
        if self.largest < request.size {
            broken.push(VerdictCode::Fragmented);
        }
        broken
    }

    pub(crate) fn eligible(&self, request: &Request) -> bool {
        self.broken_rules(request).is_empty()
    }

    /// Returns the criteria in their order, as numbers of which the smaller one is better.
    pub(crate) fn figures(&self, strategy: Strategy) -> Vec<(VerdictCode, i128)> {
        let class = self.paths.iter().map(|path| path.class.as_raw()).max().unwrap_or(0);
        let hops: i128 = self.paths.iter().map(|path| i128::from(path.hops)).sum();
        let links: Vec<u32> = self
            .paths
            .iter()
            .map(|path| path.bandwidth)
            .filter(|&link| link != 0)
            .collect();
        let bandwidth = links.iter().min().copied().unwrap_or(0);
        let numa = self.paths.iter().map(|path| path.numa_distance).max().unwrap_or(0);
        // If the size times 1,000 does not fit into 64 bits, the unit is KiB.
        let unit = if u128::from(self.size) * 1000 > u128::from(u64::MAX) {
            KIB
        } else {
            1
        };
        let used = u128::from(self.size.saturating_sub(self.free) / unit);
        let load = (used * 1000).checked_div(u128::from(self.size / unit)).unwrap_or(1000);
        let load = i128::try_from(load).unwrap();
        let preference = |preference: Preference| match preference {
            Preference::Prefer => 0,
            Preference::Neutral => 1,
            Preference::Avoid => 2,
        };
        let first = match strategy {
            Strategy::Spread => Some((VerdictCode::Load, load)),
            Strategy::Pack => Some((VerdictCode::Packed, -load)),
            Strategy::Nearest | Strategy::Upstream(_) => None,
        };
        let wanted = [
            (VerdictCode::Preference, preference(self.effect.preference)),
            (VerdictCode::Preference, preference(self.effect.file_preference)),
        ];
        let rest = vec![
            (VerdictCode::Class, i128::from(class)),
            (VerdictCode::Hops, hops.min(i128::from(u32::MAX))),
            (VerdictCode::Bandwidth, -i128::from(bandwidth)),
            (VerdictCode::Numa, if numa == 0 { i128::MAX } else { i128::from(numa) }),
            (VerdictCode::Load, load),
            (VerdictCode::Space, -i128::from(self.largest)),
            (VerdictCode::Order, i128::from(self.id)),
        ];
        wanted.into_iter().chain(first).chain(rest).collect()
    }
}

/// Returns the id of the provider that serves the request.
pub(crate) fn choose(request: &Request, providers: &[Provider]) -> Option<u32> {
    let mut eligible: Vec<&Provider> = providers.iter().filter(|provider| provider.eligible(request)).collect();
    // Providers that the administrator avoids count only if there are no others.
    let choices = |provider: &&Provider| match (request.named, request.strategy) {
        (Named::Prefer(id), Strategy::Upstream(choice)) => provider.id == id || choice == Some(provider.id),
        (Named::Any, Strategy::Upstream(choice)) => choice == Some(provider.id),
        _ => true,
    };
    if eligible
        .iter()
        .filter(|p| choices(p))
        .any(|p| p.effect.preference != Preference::Avoid)
    {
        eligible.retain(|provider| provider.effect.preference != Preference::Avoid);
    }
    eligible.sort_by_key(|provider| {
        provider
            .figures(request.strategy)
            .into_iter()
            .map(|(_, figure)| figure)
            .collect::<Vec<_>>()
    });
    if let Named::Prefer(id) = request.named {
        if eligible.iter().any(|provider| provider.id == id) {
            return Some(id);
        }
    }
    match (request.named, request.strategy) {
        (Named::Any | Named::Prefer(_), Strategy::Upstream(choice)) => {
            choice.filter(|&id| eligible.iter().any(|provider| provider.id == id))
        }
        _ => eligible.first().map(|provider| provider.id),
    }
}
