// SPDX-License-Identifier: MIT OR Apache-2.0

//! Why a provider was chosen and each other one was not, in sentences.

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
    Leaving,
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
    Alone,
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
            abi::P2PMEM_VERDICT_LEAVING => Self::Leaving,
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
            abi::P2PMEM_VERDICT_ALONE => Self::Alone,
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
            abi::P2PMEM_RULES_OWN => true,
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
    /// The verdict as a sentence, with the numbers that matter for it.
    pub why: String,
    /// The rule that decided, where a rule did.
    pub rule: Option<DecidingRule>,
    /// Name of the client that is farthest from it, or cannot reach it.
    pub worst_client: Option<String>,
    /// Class of the path to that client.
    pub class: Option<PathClass>,
    /// Sum of hops to all clients.
    pub hops: u32,
    /// Narrowest link on any of the paths in MB/s, where a link tells.
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
    /// The module's own sentence.
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
    // Without the request's clients at hand (the last decision of this file) their number still tells them apart.
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
        VerdictCode::Leaving => "leaving: it is being revoked".into(),
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
            "less room: its largest piece is {}{}",
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
        VerdictCode::Alone => "one of too few: it could hold a part, but not enough others can".into(),
        VerdictCode::Unknown => format!("verdict {}, which this program does not know", own.code),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(provider: u32, code: u32) -> abi::p2pmem_verdict {
        abi::p2pmem_verdict {
            provider,
            code,
            addr: abi::p2pmem_pci_addr {
                bus: provider as u8 + 3,
                ..Default::default()
            },
            ..Default::default()
        }
    }

    #[test]
    fn sentences_name_the_rule_that_decided() {
        let mut rule = [0; abi::P2PMEM_RULE_NAME as usize];
        for (to, from) in rule.iter_mut().zip(b"20-lab") {
            *to = *from as std::ffi::c_char;
        }
        let explain = abi::p2pmem_explain {
            req: abi::p2pmem_request {
                size: 16 << 20,
                ..Default::default()
            },
            ..Default::default()
        };
        let say = |code, rule_set| {
            let of_rule = abi::p2pmem_verdict {
                rule_set,
                rule,
                free: 1 << 20,
                ..raw(1, code)
            };
            Explanation::new(&explain, &[of_rule], String::new(), &[])
                .verdicts
                .remove(0)
        };
        let admin = abi::P2PMEM_RULES_ADMIN;
        assert_eq!(say(abi::P2PMEM_VERDICT_DENIED, admin).why, "denied: by rule 20-lab");
        assert_eq!(
            say(abi::P2PMEM_VERDICT_QUOTA, abi::P2PMEM_RULES_OWN).why,
            "over quota: this file's own rule 20-lab does not allow 16 MiB more"
        );
        assert_eq!(
            say(abi::P2PMEM_VERDICT_RESERVED, admin).why,
            "reserved: rule 20-lab sets aside for others what is free of its 1 MiB"
        );
        assert_eq!(
            say(abi::P2PMEM_VERDICT_PREFERENCE, admin).why,
            "not preferred: rule 20-lab prefers the chosen one, or avoids this one"
        );
        let far = say(abi::P2PMEM_VERDICT_TOO_FAR, admin);
        assert!(far.why.ends_with("rule 20-lab allows less"), "{}", far.why);
        let json = serde_json::to_value(&far).unwrap();
        assert_eq!(json["rule"], serde_json::json!({ "name": "20-lab", "own": false }));
        assert_eq!(say(abi::P2PMEM_VERDICT_FULL, abi::P2PMEM_RULES_NONE).rule, None);
    }

    #[test]
    fn sentences_carry_the_numbers_that_decided() {
        let chosen = abi::p2pmem_verdict {
            class: abi::P2PMEM_PATH_SAME_SWITCH,
            hops: 4,
            bandwidth: 16000,
            numa_distance: 10,
            size: 256 << 20,
            free: 240 << 20,
            largest: 128 << 20,
            ..raw(1, abi::P2PMEM_VERDICT_CHOSEN)
        };
        let other = |code| abi::p2pmem_verdict {
            class: abi::P2PMEM_PATH_HOST_BRIDGE,
            hops: 6,
            bandwidth: 4000,
            numa_distance: 21,
            size: 64 << 20,
            free: 8 << 20,
            largest: 4 << 20,
            ..raw(2, code)
        };
        let request = abi::p2pmem_request {
            size: 16 << 20,
            ..Default::default()
        };
        let explain = abi::p2pmem_explain {
            req: request,
            chosen: 1,
            ..Default::default()
        };
        let clients = [Client::resolve_in(std::path::Path::new("/nonexistent"), "0000:01:00.0").unwrap()];
        let say = |code| {
            Explanation::new(&explain, &[chosen, other(code)], String::new(), &clients).verdicts[1]
                .why
                .clone()
        };

        let expected = [
            (
                abi::P2PMEM_VERDICT_UNREACHABLE,
                "unreachable: 0000:01:00.0 cannot reach it",
            ),
            (
                abi::P2PMEM_VERDICT_TOO_FAR,
                "too far: through the host bridge to 0000:01:00.0 (6 hops), the request allows less",
            ),
            (abi::P2PMEM_VERDICT_TOO_SMALL, "too small: 64 MiB in all, 16 MiB wanted"),
            (abi::P2PMEM_VERDICT_FULL, "full: 8 MiB of 64 MiB free, 16 MiB wanted"),
            (
                abi::P2PMEM_VERDICT_FRAGMENTED,
                "fragmented: 8 MiB free, but the largest aligned piece is 4 MiB, 16 MiB wanted",
            ),
            (abi::P2PMEM_VERDICT_LEAVING, "leaving: it is being revoked"),
            (
                abi::P2PMEM_VERDICT_NOT_NAMED,
                "not named: the request names another provider",
            ),
            (
                abi::P2PMEM_VERDICT_CLASS,
                "farther: through the host bridge to 0000:01:00.0 (6 hops), the chosen one stays in the switch",
            ),
            (
                abi::P2PMEM_VERDICT_HOPS,
                "more hops: through the host bridge to 0000:01:00.0 (6 hops), the chosen one has 4",
            ),
            (
                abi::P2PMEM_VERDICT_BANDWIDTH,
                "narrower link: 4000 MB/s, the chosen one has 16000 MB/s",
            ),
            (
                abi::P2PMEM_VERDICT_NUMA,
                "farther in NUMA distance: 21, the chosen one has 10",
            ),
            (
                abi::P2PMEM_VERDICT_LOAD,
                "busier: 56 MiB of 64 MiB in use, of the chosen one 16 MiB of 256 MiB",
            ),
            (
                abi::P2PMEM_VERDICT_SPACE,
                "less room: its largest piece is 4 MiB, the chosen one's 128 MiB",
            ),
            (
                abi::P2PMEM_VERDICT_ORDER,
                "equal: as good as the chosen one, which came earlier",
            ),
            (
                abi::P2PMEM_VERDICT_UPSTREAM,
                "not the kernel's pick: pci_p2pmem_find_many() returned another one",
            ),
            (abi::P2PMEM_VERDICT_DENIED, "denied: by a rule"),
            (
                abi::P2PMEM_VERDICT_CGROUP,
                "over the cgroup's limit: dmem.max does not allow 16 MiB more",
            ),
            (
                abi::P2PMEM_VERDICT_PACKED,
                "emptier: 56 MiB of 64 MiB in use, of the chosen one 16 MiB of 256 MiB",
            ),
            (
                abi::P2PMEM_VERDICT_ALONE,
                "one of too few: it could hold a part, but not enough others can",
            ),
            (999, "verdict 999, which this program does not know"),
        ];
        for (code, text) in expected {
            assert_eq!(say(code), text);
        }
        let explanation = Explanation::new(&explain, &[chosen], String::new(), &clients);
        assert_eq!(explanation.chosen, Some(1));
        assert_eq!(
            explanation.lines(),
            [
                "0000:04:00.0 was chosen",
                "0000:04:00.0: chosen: below the same switch as 0000:01:00.0 (4 hops), 240 MiB free"
            ]
        );
    }

    #[test]
    fn a_refusal_leads_with_its_reason_and_unknown_clients_are_numbered() {
        let explain = abi::p2pmem_explain {
            error: libc::ENODEV as u32,
            ..Default::default()
        };
        let far = abi::p2pmem_verdict {
            worst_client: 2,
            class: abi::P2PMEM_PATH_UNREACHABLE,
            ..raw(1, abi::P2PMEM_VERDICT_UNREACHABLE)
        };
        let explanation = Explanation::new(&explain, &[far], "nobody is near".into(), &[]);
        assert_eq!(
            explanation.lines(),
            [
                "refused: No such device (ENODEV): nobody is near",
                "0000:04:00.0: unreachable: client 2 cannot reach it"
            ]
        );
        let json = serde_json::to_value(&explanation).unwrap();
        assert_eq!(json["verdicts"][0]["code"], "unreachable");
        assert_eq!(json["errno"], libc::ENODEV);
    }
}
