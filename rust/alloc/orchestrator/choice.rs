// SPDX-License-Identifier: GPL-2.0

//! The choice of providers for a request, and the allocation from them.
//!
//! A request is served by one provider, or, as a stripe, by several providers with one buffer each, all or none. The best
//! providers of a ranking are chosen by their free memory. If one of them then gives no memory, it is excluded, and the next
//! best one is chosen.
//!
//! Context: process context, may sleep, with no lock held. Locks: those of the rules and of the chosen provider, for short
//! sections.

use crate::{
    alloc::{
        explanation::Decision,
        orchestrator::{
            Orchestrator,
            PAGE, //
        },
        request::AllocRequest,
        rules::check::{
            NotCharged,
            RuleCheck, //
        },
        snapshot::TopologySnapshot, //
    },
    ext::{
        abi::consts,
        free_hint::FitBounds,
        pool,
        refusal::{
            refuse,
            Answer, //
        },
        trace, //
    },
    mem::buffer::{
        Buffer,
        Provider, //
    },
    policy::{
        placement::{
            Named,
            Strategy, //
        },
        ranking::{
            self,
            RankedProvider, //
        },
        split::Split, //
    }, //
};
use kernel::{
    prelude::*,
    sync::{
        atomic::Relaxed,
        Arc, //
    },
};

/// How a decision is made.
struct Mode {
    /// The number of the file that makes the request.
    file: u64,
    /// Whether nothing is allocated.
    dry: bool,
    /// The largest number of parts of a stripe.
    capacity: usize,
}

impl Orchestrator {
    /// The number of decisions for one request before `EAGAIN`, if the rules change during each of them.
    const RULE_CHANGES: u32 = 16;

    /// Makes `decision` on a request of `file`, and allocates its buffers, at most `capacity` parts of a stripe. Without buffers
    /// the decision says why, which is no error of this function.
    ///
    /// Errors: `EAGAIN` if the rules changed [`Self::RULE_CHANGES`] times, `EINVAL` if the size cannot be divided, `ENOMEM`,
    /// `EINTR`.
    pub(crate) fn alloc(
        &self,
        alloc_request: &AllocRequest,
        capacity: usize,
        file: u64,
        decision: &mut Decision,
    ) -> Answer {
        let mode = Mode {
            file,
            dry: false,
            capacity,
        };
        self.choose(alloc_request, &mode, decision)
    }

    /// Decides as [`Self::alloc`] would, without allocating.
    pub(crate) fn explain(&self, alloc_request: &AllocRequest, file: u64, decision: &mut Decision) -> Answer {
        let mode = Mode {
            file,
            dry: true,
            capacity: consts::MAX_PARTS,
        };
        self.choose(alloc_request, &mode, decision)
    }

    /// Returns the id of the provider that [`Self::explain`] would choose, if nothing has to be explained or charged and there
    /// are no rules. Allocates nothing. `None` if a decision is necessary.
    pub(crate) fn probe(&self, alloc_request: &AllocRequest, file: u64) -> Option<u32> {
        let ruled = !self.rules.are_none() || alloc_request.own.as_ref().is_some_and(|own| !own.is_empty());
        if ruled || alloc_request.strategy != consts::STRATEGY_NEAREST || alloc_request.named != Named::Any {
            return None;
        }
        let snapshot = &*alloc_request.snapshot;
        let need = FitBounds::of(alloc_request.size, alloc_request.align);
        let fit = |ranked: &RankedProvider| {
            let provider = &snapshot.providers[ranked.index];
            if ranked.is_beyond(alloc_request.max_class) {
                return None;
            }
            let has = provider.capacity_hint();
            if need.are_met(&has) {
                return Some(has);
            }
            let has = provider.exact_capacity(&need, alloc_request.size, alloc_request.align);
            (has.is_live() && has.largest >= alloc_request.size).then_some(has)
        };
        let provider = &snapshot.providers[ranking::best(&snapshot.unruled.order, false, fit)?.index];
        provider.try_charge_cgroup(alloc_request.size).ok()?;
        traced(alloc_request, file, || (provider.id, 0), true);
        Some(provider.id)
    }

    /// Decides, and allocates the buffers except in a dry run. Repeats the decision if the rules changed meanwhile.
    fn choose(&self, alloc_request: &AllocRequest, mode: &Mode, decision: &mut Decision) -> Answer {
        let strategy = match alloc_request.strategy {
            consts::STRATEGY_UPSTREAM => Strategy::Upstream(Self::upstream_choice(&alloc_request.snapshot)?),
            consts::STRATEGY_SPREAD => Strategy::Spread,
            consts::STRATEGY_PACK => Strategy::Pack,
            _ => Strategy::Nearest,
        };
        for _ in 0..Self::RULE_CHANGES {
            let rule_check = RuleCheck::new(self.rules(), alloc_request.own.clone(), mode.file);
            if !self.choose_by(&rule_check, alloc_request, strategy, mode, decision)? {
                continue;
            }
            decision.set_source(rule_check.into_source());
            let providers = &alloc_request.snapshot.providers;
            if !mode.dry && !decision.is_complete() {
                for provider in providers {
                    provider.counters.failed.fetch_add(1, Relaxed);
                }
            }
            traced(
                alloc_request,
                mode.file,
                || (decision.chosen(), decision.error()),
                mode.dry,
            );
            return Ok(());
        }
        Err(refuse!(EAGAIN, "the rules changed during every attempt: try again"))
    }

    /// Decides as [`Self::choose`] does, with the rules of `rule_check`. Returns `false` if the rules changed meanwhile.
    ///
    /// For a stripe, tries the largest number of parts first, and all numbers without providers that rules avoid before any
    /// number with them.
    fn choose_by(
        &self,
        rule_check: &RuleCheck<'_>,
        alloc_request: &AllocRequest,
        strategy: Strategy,
        mode: &Mode,
        decision: &mut Decision,
    ) -> Answer<bool> {
        let snapshot = &*alloc_request.snapshot;
        let (least, most) = match alloc_request.parts {
            _ if !alloc_request.is_stripe() => (1, 1),
            0 => (
                1,
                snapshot.providers.len().min(mode.capacity).clamp(1, consts::MAX_PARTS),
            ),
            parts => (parts, parts),
        };
        let mut divided = false;
        for skip_avoided in [true, false] {
            if skip_avoided && !alloc_request.is_stripe() {
                continue;
            }
            for parts in (least..=most).rev() {
                let Some(split) = Split::new(alloc_request.size, parts as u64, PAGE, alloc_request.align) else {
                    continue;
                };
                divided = true;
                let mut request = alloc_request.request(strategy);
                request.size = split.share();
                let ranking = snapshot.ranking(rule_check, &request)?;
                decision.begin(alloc_request, (request, parts), ranking)?;
                let is_current = self.attempt(rule_check, alloc_request, mode, (&split, skip_avoided), decision)?;
                // If too few providers can serve a part of that size, fewer parts may do.
                if !is_current || decision.is_complete() {
                    return Ok(is_current);
                }
            }
        }
        if divided {
            return Ok(true);
        }
        Err(refuse!(
            EINVAL,
            "{} bytes are not divided into {} equal parts of whole pages without one being empty",
            alloc_request.size,
            least
        ))
    }

    /// Chooses providers for the parts of `split`, and allocates from them except in a dry run. Returns `false` if the rules
    /// changed meanwhile. There are either all buffers or none.
    fn attempt(
        &self,
        rule_check: &RuleCheck<'_>,
        alloc_request: &AllocRequest,
        mode: &Mode,
        (split, skip_avoided): (&Split, bool),
        decision: &mut Decision,
    ) -> Answer<bool> {
        let providers = &alloc_request.snapshot.providers;
        // Each round that ends without memory excludes one provider, so the loop ends.
        loop {
            decision.choose(providers, skip_avoided)?;
            if !decision.is_complete() {
                return Ok(true);
            }
            let mut parts = 0..decision.picks().len();
            let stopped = parts.find_map(|part| {
                let at = decision.picks()[part].index;
                let size = split.part(part).1;
                let taken = self.take(rule_check, alloc_request, size, &providers[at], mode, decision);
                taken.err().map(|why| (at, why))
            });
            let Some((at, why)) = stopped else {
                return Ok(true);
            };
            decision.holders.clear();
            if let NotCharged::Stale = why {
                return Ok(false);
            }
            decision.exclude(at, why)?;
        }
    }

    /// Allocates and charges a buffer of `size` bytes in `provider`. In a dry run, only tries the charge to the cgroup.
    ///
    /// Errors: [`NotCharged`]. Nothing stays charged or allocated then.
    fn take(
        &self,
        rule_check: &RuleCheck<'_>,
        alloc_request: &AllocRequest,
        size: u64,
        provider: &Arc<Provider>,
        mode: &Mode,
        decision: &mut Decision,
    ) -> core::result::Result<(), NotCharged> {
        if mode.dry {
            return match provider.try_charge_cgroup(size) {
                Err(e) if e == EAGAIN => Err(NotCharged::Cgroup),
                _ => Ok(()),
            };
        }
        let cgroup_charge = provider.charge_cgroup(size).map_err(|e| match e {
            e if e == EAGAIN => NotCharged::Cgroup,
            e => NotCharged::Error(e),
        })?;
        let holder = provider
            .alloc(size, alloc_request.align, alloc_request.clearing)
            .and_then(|mut memory| {
                memory.cgroup_charge = Some(cgroup_charge);
                Buffer::create(provider.clone(), memory, size, mode.file)
            })
            .map_err(NotCharged::Error)?;
        rule_check.register(holder.buffer())?;
        let kept = decision.holders.push(holder, GFP_KERNEL_ACCOUNT);
        kept.map_err(|e| NotCharged::Error(e.into()))
    }

    /// Returns the id of the provider that `pci_p2pmem_find_many()` chooses, or `None` if the kernel finds none or a device
    /// that is no provider.
    fn upstream_choice(snapshot: &TopologySnapshot) -> Result<Option<u32>> {
        let found = pool::find_many(&snapshot.clients)?;
        Ok(found.and_then(|f| snapshot.providers.iter().find(|p| p.function().same(&f)).map(|p| p.id)))
    }
}

/// Emits the trace event of a decision. `result` returns the id of the chosen provider and a positive errno, 0 for none; `dry`
/// says that nothing was to be allocated.
fn traced(alloc_request: &AllocRequest, file: u64, result: impl FnOnce() -> (u32, i32), dry: bool) {
    trace::decision(|| {
        let (chosen, error) = result();
        trace::DecisionEvent {
            size: alloc_request.size,
            align: alloc_request.align,
            file,
            clients: alloc_request.snapshot.clients.len(),
            providers: alloc_request.snapshot.providers.len(),
            strategy: alloc_request.strategy,
            chosen,
            error: error as u32,
            dry,
        }
    });
}
