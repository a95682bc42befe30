// SPDX-License-Identifier: MIT OR Apache-2.0

//! Messages that explain the choice of a provider, and why each other provider was not chosen.

use p2pmem_sys as abi;

use crate::addr::PciAddr;
use crate::error::errno_text;
use crate::pci::Client;
use crate::types::{human_size, PathClass};

/// Why a provider was or was not chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum VerdictCode {
    /// It was chosen.
    Chosen,
    /// A client cannot reach it.
    Unreachable,
    /// A path is farther than the request allows.
    TooFar,
    /// It could not hold the buffer were it empty.
    TooSmall,
    /// It has not enough free bytes.
    Full,
    /// It has the bytes, but not in one piece with that alignment.
    Fragmented,
    /// It is being revoked.
    Removing,
    /// The request names another provider.
    NotNamed,
    /// Another one's path class is nearer.
    Class,
    /// Another one is fewer hops away.
    Hops,
    /// Another one has a wider narrowest link.
    Bandwidth,
    /// Another one is nearer in NUMA distance.
    Numa,
    /// Another one is less loaded.
    Load,
    /// Another one has a larger contiguous piece left.
    Space,
    /// Equal in everything to the chosen one, which came earlier.
    Order,
    /// The kernel's `pci_p2pmem_find_many()` returned another one.
    Upstream,
    /// A rule denies it.
    Denied,
    /// The buffer would break a rule's quota.
    Quota,
    /// Rules set aside for others what is free.
    Reserved,
    /// A rule prefers another one, or avoids this one.
    Preference,
    /// Another one is more loaded, and memory was to be packed.
    Packed,
    /// The buffer would break the cgroup's limit for it.
    Cgroup,
    /// It could hold a part of the stripe, but too few others can.
    TooFew,
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

/// The rule that decided over a provider.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct DecidingRule {
    /// Its name.
    pub name: String,
    /// Whether it is one of the file's own, and not the administrator's.
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
        let whose = if self.own { "this file's own rule" } else { "rule" };
        write!(f, "{whose} {}", self.name)
    }
}

/// What a decision said of one provider, and the numbers it said it from.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Verdict {
    /// The provider's id.
    pub provider: u32,
    /// Its PCI function.
    pub addr: PciAddr,
    /// The verdict.
    pub code: VerdictCode,
    /// The verdict as a message, with the relevant numbers.
    pub why: String,
    /// The rule that decided, where a rule did.
    pub rule: Option<DecidingRule>,
    /// Name of the client that is farthest from it, or cannot reach it.
    pub worst_client: Option<String>,
    /// Class of the path to that client.
    pub class: Option<PathClass>,
    /// Sum of hops to all clients.
    pub hops: u32,
    /// Bandwidth of the slowest link on any of the paths in MB/s, if a link reports its speed.
    pub bandwidth: Option<u32>,
    /// Largest NUMA distance to a client, where one is known.
    pub numa_distance: Option<u32>,
    /// Bytes the provider manages.
    pub size: u64,
    /// Bytes that were free.
    pub free: u64,
    /// Largest contiguous piece in bytes.
    pub largest: u64,
}

/// A decision explained: what was chosen or why not, and a verdict for every provider.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Explanation {
    /// Id of the provider chosen.
    pub chosen: Option<u32>,
    /// The errno that the decision ended with, or would, positive.
    pub errno: Option<i32>,
    /// The module's message.
    pub text: String,
    /// One verdict for each provider, in the order of their ids.
    pub verdicts: Vec<Verdict>,
}

impl Explanation {
    /// Makes sense of what the module said. `clients` are those of the request, where they are known: verdicts name
    /// them by index.
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

    /// The verdicts of the providers chosen: of a stripe there are several.
    pub fn chosen_verdicts(&self) -> impl Iterator<Item = &Verdict> {
        self.verdicts.iter().filter(|v| v.code == VerdictCode::Chosen)
    }

    /// The verdict of the provider chosen.
    pub fn chosen_verdict(&self) -> Option<&Verdict> {
        self.verdicts.iter().find(|v| v.code == VerdictCode::Chosen)
    }

    /// The decision in lines for a reader: the outcome first, then each provider with its reason.
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
    // Without the request's clients (for the last decision of this file) their number still distinguishes them.
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
        why: sentence(
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

fn sentence(
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
    let way = match (class, worst_client) {
        (Some(class), Some(client)) => format!("{} {client}", class.way()),
        _ => "near nothing in particular".into(),
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
    // What the chosen one has in place of this, where one was chosen and its number is known.
    let versus = |text: &dyn Fn(&abi::p2pmem_verdict) -> String| chosen.map(text).unwrap_or_default();
    // How much of it is in use, and of the chosen one.
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
                "chosen: {way} ({}), {} free, preferred by {by}",
                hops(own.hops),
                human_size(own.free)
            )
        }
        VerdictCode::Chosen => format!("chosen: {way} ({}), {} free", hops(own.hops), human_size(own.free)),
        VerdictCode::Unreachable => match worst_client {
            Some(client) => format!("unreachable: {client} cannot reach it"),
            None => "unreachable: a client cannot reach it".into(),
        },
        VerdictCode::TooFar if rule.is_some() => format!("too far: {way} ({}), {by} allows less", hops(own.hops)),
        VerdictCode::TooFar => format!("too far: {way} ({}), the request allows less", hops(own.hops)),
        VerdictCode::TooSmall => format!("too small: {} in all, {wanted} wanted", human_size(own.size)),
        VerdictCode::Full => format!(
            "full: {} of {} free, {wanted} wanted",
            human_size(own.free),
            human_size(own.size)
        ),
        VerdictCode::Fragmented => format!(
            "fragmented: {} free, but the largest aligned piece is {}, {wanted} wanted",
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
            format!("farther: {way} ({}){nearer}", hops(own.hops))
        }
        VerdictCode::Hops => {
            format!(
                "more hops: {way} ({}){}",
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
            "reserved: {by} sets aside for others what is free of its {}",
            human_size(own.free)
        ),
        VerdictCode::Preference => format!("not preferred: {by} prefers the chosen one, or avoids this one"),
        VerdictCode::Packed => format!("emptier: {}", in_use()),
        VerdictCode::Cgroup => format!("over the cgroup's limit: dmem.max does not allow {wanted} more"),
        VerdictCode::TooFew => "one of too few: it could hold a part, but not enough others can".into(),
        VerdictCode::Unknown => format!("verdict {}, which this program does not know", own.code),
    }
}

#[cfg(test)]
mod tests;
