// SPDX-License-Identifier: MIT OR Apache-2.0

//! Explanations: why a provider was chosen, and why each other provider was not.

use p2pmem_sys as abi;

use crate::addr::PciAddr;
use crate::error::errno_text;
use crate::pci::Client;
use crate::types::{human_size, PathClass};

/// The reason why a provider was chosen or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum VerdictCode {
    /// The provider was chosen.
    Chosen,
    /// A client cannot reach the provider.
    Unreachable,
    /// A path is farther than the request or a rule allows.
    TooFar,
    /// The provider could not hold the buffer even if it were empty.
    TooSmall,
    /// The provider does not have enough free bytes.
    Full,
    /// The provider has enough free bytes, but not in one piece with the requested alignment.
    Fragmented,
    /// The provider is being removed.
    Removing,
    /// The request names another provider.
    NotNamed,
    /// Another provider's path class is nearer.
    Class,
    /// Another provider is fewer hops away.
    Hops,
    /// The narrowest link to another provider is wider.
    Bandwidth,
    /// Another provider has a smaller NUMA distance.
    Numa,
    /// Another provider is less loaded.
    Load,
    /// Another provider has a larger contiguous piece.
    Space,
    /// The provider equals the chosen one, which comes first in the order of ids.
    Order,
    /// The kernel's `pci_p2pmem_find_many()` returned another provider.
    Upstream,
    /// A rule denies the provider.
    Denied,
    /// The buffer would exceed a rule's quota.
    Quota,
    /// The free memory is reserved for others by rules.
    Reserved,
    /// A rule prefers another provider, or avoids this one.
    Preference,
    /// Another provider is more loaded, and the strategy is to pack.
    Packed,
    /// The buffer would exceed the limit of the cgroup.
    Cgroup,
    /// The provider can hold a part of the stripe, but too few other providers can.
    TooFew,
    /// No interface hands out the device's memory: only in [`WhatIf`](crate::WhatIf).
    NoSource,
    /// A code that this version of the library does not know.
    Unknown,
}

impl VerdictCode {
    fn from_raw(raw: u32) -> Self {
        match raw {
            abi::P2PMEM_VERDICT_CHOSEN => Self::Chosen,
            abi::P2PMEM_VERDICT_UNREACHABLE => Self::Unreachable,
            abi::P2PMEM_VERDICT_TOO_FAR => Self::TooFar,
            abi::P2PMEM_VERDICT_TOO_SMALL => Self::TooSmall,
            abi::P2PMEM_VERDICT_FULL => Self::Full,
            abi::P2PMEM_VERDICT_FRAGMENTED => Self::Fragmented,
            abi::P2PMEM_VERDICT_REMOVING => Self::Removing,
            abi::P2PMEM_VERDICT_NOT_NAMED => Self::NotNamed,
            abi::P2PMEM_VERDICT_CLASS => Self::Class,
            abi::P2PMEM_VERDICT_HOPS => Self::Hops,
            abi::P2PMEM_VERDICT_BANDWIDTH => Self::Bandwidth,
            abi::P2PMEM_VERDICT_NUMA => Self::Numa,
            abi::P2PMEM_VERDICT_LOAD => Self::Load,
            abi::P2PMEM_VERDICT_SPACE => Self::Space,
            abi::P2PMEM_VERDICT_ORDER => Self::Order,
            abi::P2PMEM_VERDICT_UPSTREAM => Self::Upstream,
            abi::P2PMEM_VERDICT_DENIED => Self::Denied,
            abi::P2PMEM_VERDICT_QUOTA => Self::Quota,
            abi::P2PMEM_VERDICT_RESERVED => Self::Reserved,
            abi::P2PMEM_VERDICT_PREFERENCE => Self::Preference,
            abi::P2PMEM_VERDICT_PACKED => Self::Packed,
            abi::P2PMEM_VERDICT_CGROUP => Self::Cgroup,
            abi::P2PMEM_VERDICT_TOO_FEW => Self::TooFew,
            _ => Self::Unknown,
        }
    }
}

/// The rule that decided about a provider.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct DecidingRule {
    /// Name of the rule.
    pub name: String,
    /// Whether the rule is one of the file's own rules, not the administrator's.
    pub own: bool,
}

impl DecidingRule {
    fn of(raw: &abi::p2pmem_verdict) -> Option<Self> {
        let own = match raw.rule_set {
            abi::P2PMEM_RULES_ADMIN => false,
            abi::P2PMEM_RULES_FILE => true,
            _ => return None,
        };
        let name = raw
            .rule
            .iter()
            .take_while(|c| **c != 0)
            .map(|c| char::from(*c as u8))
            .collect();
        Some(Self { name, own })
    }
}

impl std::fmt::Display for DecidingRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let origin = if self.own { "this file's own rule" } else { "rule" };
        write!(f, "{origin} {}", self.name)
    }
}

/// The verdict of a decision on one provider, with the numbers that the verdict is based on.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Verdict {
    /// Id of the provider.
    pub provider: u32,
    /// PCI function of the provider.
    pub addr: PciAddr,
    /// Reason code.
    pub code: VerdictCode,
    /// The verdict as text, with the numbers that decided.
    pub why: String,
    /// The rule that decided, if any.
    pub rule: Option<DecidingRule>,
    /// Name of the client that is farthest from the provider, or cannot reach it.
    pub worst_client: Option<String>,
    /// Class of the path to that client.
    pub class: Option<PathClass>,
    /// Sum of hops to all clients.
    pub hops: u32,
    /// Bandwidth of the narrowest link on the paths in MB/s; `None` if no link reports one.
    pub bandwidth: Option<u32>,
    /// Largest NUMA distance to a client, if known.
    pub numa_distance: Option<u32>,
    /// Bytes that p2pmem manages in the provider.
    pub size: u64,
    /// Free bytes at the time of the decision.
    pub free: u64,
    /// Size of the largest contiguous piece in bytes.
    pub largest: u64,
}

/// The explanation of a decision: the chosen provider or the error, and a verdict for every provider.
///
/// ```
/// # let device = p2pmem::fake::Fake::example().device();
/// use p2pmem::{Request, VerdictCode};
///
/// let explanation = device.explain(&Request::new(100 << 20))?;
/// assert_eq!(explanation.chosen, Some(1));
/// assert_eq!(explanation.verdicts[1].code, VerdictCode::TooSmall);
/// assert_eq!(explanation.verdicts[1].why, "too small: 64 MiB in all, 100 MiB requested");
/// # Ok::<(), p2pmem::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Explanation {
    /// Id of the chosen provider.
    pub chosen: Option<u32>,
    /// The errno of the decision, positive, or of the dry run.
    pub errno: Option<i32>,
    /// The module's message.
    pub text: String,
    /// One verdict for each provider, in the order of their ids.
    pub verdicts: Vec<Verdict>,
}

impl Explanation {
    /// Converts the module's answer. `clients` are the clients of the request, if known: verdicts refer to them by
    /// index.
    pub(crate) fn new(
        raw: &abi::p2pmem_explain,
        verdicts: &[abi::p2pmem_verdict],
        text: String,
        clients: &[Client],
    ) -> Self {
        let chosen = verdicts.iter().find(|v| v.code == abi::P2PMEM_VERDICT_CHOSEN);
        Self {
            chosen: Some(raw.chosen).filter(|id| *id != 0),
            errno: i32::try_from(raw.error).ok().filter(|errno| *errno != 0),
            text,
            verdicts: verdicts
                .iter()
                .map(|v| verdict(v, chosen, raw.req.size, clients))
                .collect(),
        }
    }

    /// Returns the verdicts of the chosen providers: a stripe has several.
    pub fn chosen_verdicts(&self) -> impl Iterator<Item = &Verdict> {
        self.verdicts.iter().filter(|v| v.code == VerdictCode::Chosen)
    }

    /// Returns the verdict of the chosen provider.
    pub fn chosen_verdict(&self) -> Option<&Verdict> {
        self.verdicts.iter().find(|v| v.code == VerdictCode::Chosen)
    }

    /// Returns the decision as lines of text: first the outcome, then each provider with its reason.
    pub fn lines(&self) -> Vec<String> {
        let outcome = match (self.errno, self.chosen_verdict()) {
            (Some(errno), _) if self.text.is_empty() => format!("refused: {}", errno_text(errno)),
            (Some(errno), _) => format!("refused: {}: {}", errno_text(errno), self.text),
            (None, _) if !self.text.is_empty() => self.text.clone(),
            (None, Some(chosen)) => format!("{} was chosen", chosen.addr),
            (None, None) => "nothing was chosen".into(),
        };
        let verdicts = self.verdicts.iter().map(|v| format!("{}: {}", v.addr, v.why));
        std::iter::once(outcome).chain(verdicts).collect()
    }
}

fn verdict(
    raw: &abi::p2pmem_verdict,
    chosen: Option<&abi::p2pmem_verdict>,
    wanted: u64,
    clients: &[Client],
) -> Verdict {
    let class = PathClass::from_raw(raw.class);
    // If the request's clients are not known (the last decision of this file), the index still identifies the client.
    let worst_client = class.map(|_| {
        let index = raw.worst_client as usize;
        clients
            .get(index)
            .map_or_else(|| format!("client {index}"), |c| c.name().to_owned())
    });
    let code = VerdictCode::from_raw(raw.code);
    let rule = DecidingRule::of(raw);
    Verdict {
        provider: raw.provider,
        addr: raw.addr.into(),
        code,
        why: describe(
            code,
            raw,
            chosen,
            worst_client.as_deref(),
            wanted,
            clients.len(),
            rule.as_ref(),
        ),
        rule,
        worst_client,
        class,
        hops: raw.hops,
        bandwidth: Some(raw.bandwidth).filter(|b| *b != 0),
        numa_distance: Some(raw.numa_distance).filter(|d| *d != 0),
        size: raw.size,
        free: raw.free,
        largest: raw.largest,
    }
}

fn describe(
    code: VerdictCode,
    own: &abi::p2pmem_verdict,
    chosen: Option<&abi::p2pmem_verdict>,
    worst_client: Option<&str>,
    wanted: u64,
    nr_clients: usize,
    rule: Option<&DecidingRule>,
) -> String {
    let class = PathClass::from_raw(own.class);
    let hops = |n: u32| match (n, nr_clients) {
        (1, 0 | 1) => "1 hop".to_owned(),
        (n, 0 | 1) => format!("{n} hops"),
        (n, _) => format!("{n} hops in all"),
    };
    let path = match (class, worst_client) {
        (Some(class), Some(client)) => format!("{} {client}", class.relation()),
        _ => "without clients".into(),
    };
    let wanted = if wanted == 0 {
        "the buffer".to_owned()
    } else {
        human_size(wanted)
    };
    let bandwidth = |mbps: u32| {
        if mbps == 0 {
            "unknown".to_owned()
        } else {
            format!("{mbps} MB/s")
        }
    };
    let by = rule.map_or_else(|| "a rule".to_owned(), DecidingRule::to_string);
    // The same number of the chosen provider, if a provider was chosen and the number is known.
    let versus = |text: &dyn Fn(&abi::p2pmem_verdict) -> String| chosen.map(text).unwrap_or_default();
    // Used bytes of this provider and of the chosen one.
    let in_use = || {
        let of = |c: &abi::p2pmem_verdict| {
            let used = human_size(c.size.saturating_sub(c.free));
            format!("{used} of {}", human_size(c.size))
        };
        let chosen = versus(&|c| format!(", of the chosen one {}", of(c)));
        format!("{} in use{chosen}", of(own))
    };

    match code {
        VerdictCode::Chosen if class.is_none() => format!("chosen: {} free", human_size(own.free)),
        VerdictCode::Chosen if rule.is_some() => {
            format!(
                "chosen: {path} ({}), {} free, preferred by {by}",
                hops(own.hops),
                human_size(own.free)
            )
        }
        VerdictCode::Chosen => format!("chosen: {path} ({}), {} free", hops(own.hops), human_size(own.free)),
        VerdictCode::Unreachable => match worst_client {
            Some(client) => format!("unreachable: {client} cannot reach it"),
            None => "unreachable: a client cannot reach it".into(),
        },
        VerdictCode::TooFar if rule.is_some() => format!("too far: {path} ({}), {by} allows less", hops(own.hops)),
        VerdictCode::TooFar => format!("too far: {path} ({}), the request allows less", hops(own.hops)),
        VerdictCode::TooSmall => format!("too small: {} in all, {wanted} requested", human_size(own.size)),
        VerdictCode::Full => format!(
            "full: {} of {} free, {wanted} requested",
            human_size(own.free),
            human_size(own.size)
        ),
        VerdictCode::Fragmented => format!(
            "fragmented: {} free, but the largest aligned piece is {}, {wanted} requested",
            human_size(own.free),
            human_size(own.largest)
        ),
        VerdictCode::Removing => "removing: the provider is being removed".into(),
        VerdictCode::NotNamed => "not named: the request names another provider".into(),
        VerdictCode::Class => {
            let nearer = versus(&|c| {
                PathClass::from_raw(c.class)
                    .map(|c| format!(", the chosen one {}", c.stays()))
                    .unwrap_or_default()
            });
            format!("farther: {path} ({}){nearer}", hops(own.hops))
        }
        VerdictCode::Hops => {
            format!(
                "more hops: {path} ({}){}",
                hops(own.hops),
                versus(&|c| format!(", the chosen one has {}", c.hops))
            )
        }
        VerdictCode::Bandwidth => format!(
            "narrower link: {}{}",
            bandwidth(own.bandwidth),
            versus(&|c| format!(", the chosen one has {}", bandwidth(c.bandwidth)))
        ),
        VerdictCode::Numa => format!(
            "farther in NUMA distance: {}{}",
            own.numa_distance,
            versus(&|c| format!(", the chosen one has {}", c.numa_distance))
        ),
        VerdictCode::Load => format!("busier: {}", in_use()),
        VerdictCode::Space => format!(
            "less space: its largest piece is {}{}",
            human_size(own.largest),
            versus(&|c| format!(", the chosen one's {}", human_size(c.largest)))
        ),
        VerdictCode::Order => "equal: as good as the chosen one, which came earlier".into(),
        VerdictCode::Upstream => "not the kernel's pick: pci_p2pmem_find_many() returned another one".into(),
        VerdictCode::Denied => format!("denied: by {by}"),
        VerdictCode::Quota => format!("over quota: {by} does not allow {wanted} more"),
        VerdictCode::Reserved => format!(
            "reserved: {by} reserves the {} of free memory for others",
            human_size(own.free)
        ),
        VerdictCode::Preference => format!("not preferred: {by} prefers the chosen one, or avoids this one"),
        VerdictCode::Packed => format!("emptier: {}", in_use()),
        VerdictCode::Cgroup => format!("over the cgroup's limit: dmem.max does not allow {wanted} more"),
        VerdictCode::TooFew => "one of too few: it could hold a part, but not enough others can".into(),
        // The backends have no such verdict.
        VerdictCode::NoSource => "no source: no interface hands out its memory".into(),
        VerdictCode::Unknown => format!("verdict {}, which this program does not know", own.code),
    }
}

#[cfg(test)]
mod tests;
