// SPDX-License-Identifier: GPL-2.0

//! The effect of rules on a provider and a request: which rules apply to the caller, and what they deny, prefer and
//! reserve.
//!
//! The file is pure: it needs nothing but `core` and the other pure files, allocates nothing, cannot panic, and holds no `unsafe`.
//! The same source is compiled into the module and into the host tests of tests/suites/pure.

use crate::policy::{
    path::{
        indexed,
        Path, //
    },
    rule::{
        Action,
        Beneficiary,
        FunctionId,
        Rule,
        Subject,
        MAX_RULES, //
    }, //
};

/// The set of rules that apply to a subject, computed once per request instead of once per provider and client.
///
/// Bit `i` stands for the rule with index `i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Applicable([u64; MAX_RULES.div_ceil(64)]);

impl Applicable {
    /// All rules, for any subject.
    pub(crate) const ALL: Self = Self([u64::MAX; MAX_RULES.div_ceil(64)]);

    const NONE: Self = Self([0; MAX_RULES.div_ceil(64)]);

    /// Returns the rules that apply to `subject`.
    #[inline]
    pub(crate) fn to(rules: &[Rule], subject: &impl Subject) -> Self {
        if rules.is_empty() {
            return Self::NONE;
        }
        Self::of(rules, |rule| rule.is_for(subject))
    }

    /// Returns the rules for which `is` returns true.
    pub(crate) fn of(rules: &[Rule], is: impl Fn(&Rule) -> bool) -> Self {
        let mut bits = [0u64; MAX_RULES.div_ceil(64)];
        for (chunk, word) in rules.chunks(64).zip(bits.iter_mut()) {
            for (at, rule) in indexed(chunk) {
                if is(rule) {
                    *word |= 1u64.checked_shl(u32::try_from(at).unwrap_or(64)).unwrap_or(0);
                }
            }
        }
        Self(bits)
    }

    /// Returns whether both sets have a rule in common.
    pub(crate) fn meets(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).any(|(here, there)| here & there != 0)
    }

    pub(crate) fn has(&self, at: usize) -> bool {
        let word = self.0.get(at / 64).copied().unwrap_or(0);
        word.checked_shr((at % 64) as u32).is_some_and(|bits| bits & 1 == 1)
    }
}

/// The origin of a set of rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RuleOrigin {
    /// The rules of the administrator.
    Admin,
    /// The file rules of the open file; see `P2PMEM_IOC_RULES`.
    File,
}

/// A rule, as an index into the rules of one origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RuleRef {
    pub(crate) set: RuleOrigin,
    pub(crate) at: usize,
}

/// How much rules prefer a candidate. The smaller value wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Preference {
    Prefer,
    Neutral,
    Avoid,
}

/// A quota that the request would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OverLimit {
    /// The rule with the quota.
    pub(crate) rule: RuleRef,
    /// Whether the quota is a group quota, not the quota of one user or file.
    pub(crate) group: bool,
    /// Bytes that are held already.
    pub(crate) used: u64,
    /// Maximum number of bytes.
    pub(crate) limit: u64,
}

/// The effect of the rules on one provider for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RuleEffect {
    /// The rule that denies the provider.
    pub(crate) denied: Option<RuleRef>,
    /// The rule whose maximum class a path exceeds.
    pub(crate) too_far: Option<RuleRef>,
    /// The quota that the request would exceed.
    pub(crate) over: Option<OverLimit>,
    /// Whether the request would exceed a limit of the cgroup.
    pub(crate) over_cgroup: bool,
    /// Bytes that rules reserve for others. `reserved_by` is the first such rule.
    pub(crate) reserved_for_others: u64,
    pub(crate) reserved_by: Option<RuleRef>,
    /// The administrator's preference. `file_preference` is the preference of the file rules; `*_by` are the rules that
    /// decide.
    pub(crate) preference: Preference,
    pub(crate) preference_by: Option<RuleRef>,
    pub(crate) file_preference: Preference,
    pub(crate) file_preference_by: Option<RuleRef>,
}

impl RuleEffect {
    /// The effect if there are no rules.
    pub(crate) const NONE: Self = Self {
        denied: None,
        too_far: None,
        over: None,
        over_cgroup: false,
        reserved_for_others: 0,
        reserved_by: None,
        preference: Preference::Neutral,
        preference_by: None,
        file_preference: Preference::Neutral,
        file_preference_by: None,
    };

    /// Adds the effect of the rules of origin `set` on `provider` for `clients`; `paths` are the paths to the clients, in
    /// the same order.
    ///
    /// Call this for the administrator's rules first, so that their objection is the one that is reported. A file rule can
    /// only add a restriction: it never resets `denied` or `too_far`, and its preference is separate.
    pub(crate) fn add(
        &mut self,
        set: RuleOrigin,
        rules: &[Rule],
        who: &Applicable,
        provider: &FunctionId,
        clients: &[FunctionId],
        paths: &[Path],
    ) {
        if rules.is_empty() {
            return;
        }
        let (mut preference, mut by) = (Preference::Neutral, None);
        let mut pair = |client: Option<&FunctionId>, path: Option<&Path>| {
            let first = |sets: fn(&Rule) -> bool| {
                indexed(rules).find(|(at, rule)| sets(rule) && who.has(*at) && rule.matches(provider, client))
            };
            if let Some((at, rule)) = first(|rule| rule.action.is_some()) {
                let rule_ref = Some(RuleRef { set, at });
                match rule.action {
                    Some(Action::Deny) => self.denied = self.denied.or(rule_ref),
                    // If one client's rule avoids the provider, the provider is avoided for all clients.
                    Some(Action::Avoid) if preference != Preference::Avoid => {
                        (preference, by) = (Preference::Avoid, rule_ref)
                    }
                    Some(Action::Prefer) if preference == Preference::Neutral => {
                        (preference, by) = (Preference::Prefer, rule_ref)
                    }
                    _ => {}
                }
            }
            if let (Some(path), Some((at, rule))) = (path, first(|rule| rule.max_class.is_some())) {
                if rule.max_class.is_some_and(|max| path.class > max) {
                    self.too_far = self.too_far.or(Some(RuleRef { set, at }));
                }
            }
        };
        if clients.is_empty() {
            pair(None, None);
        }
        for (at, client) in indexed(clients) {
            pair(Some(client), paths.get(at));
        }
        match set {
            RuleOrigin::Admin => (self.preference, self.preference_by) = (preference, by),
            RuleOrigin::File => (self.file_preference, self.file_preference_by) = (preference, by),
        }
    }
}

/// Returns the first applicable rule that sets an attribute of the memory of `provider`, as an index, and the attribute's
/// value.
pub(crate) fn first<T>(
    rules: &[Rule],
    who: &Applicable,
    provider: &FunctionId,
    get: impl Fn(&Rule) -> Option<T>,
) -> Option<(usize, T)> {
    indexed(rules)
        .filter(|(at, rule)| who.has(*at) && rule.matches(provider, None))
        .find_map(|(at, rule)| Some((at, get(rule)?)))
}

/// Returns the reserves in `provider`: for each beneficiary the first rule, with its index and the reserved bytes.
pub(crate) fn reserves<'a>(
    rules: &'a [Rule],
    provider: &'a FunctionId,
) -> impl Iterator<Item = (usize, &'a Rule, u64)> + 'a {
    let is_one = move |rule: &Rule| rule.reserve.is_some() && rule.provider.matches(Some(provider));
    indexed(rules).filter_map(move |(at, rule)| {
        let bytes = rule.reserve.filter(|_| is_one(rule))?;
        let decided = rules
            .iter()
            .take(at)
            .any(|earlier| is_one(earlier) && earlier.same_beneficiary(rule));
        (!decided).then_some((at, rule, bytes))
    })
}

/// Returns the bytes of `provider` that a rule reserves for the kernel, or `None` if no rule does.
pub(crate) fn kernel_reserve(rules: &[Rule], provider: &FunctionId) -> Option<u64> {
    reserves(rules, provider)
        .find(|(_, rule, _)| rule.reserve_for == Some(Beneficiary::Kernel))
        .map(|(_, _, bytes)| bytes)
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_rule_effect))]
mod tests {
    use super::*;

    use crate::policy::{
        path::{
            PathClass,
            PciAddr, //
        },
        rule::{
            DeviceMatch,
            RuleName,
            Users, //
        }, //
    };

    const PROVIDER: FunctionId = FunctionId {
        addr: PciAddr {
            domain: 0,
            bus: 3,
            devfn: 0,
        },
        vendor: 0x1234,
        device: 0x5678,
    };
    const CLIENT: FunctionId = FunctionId {
        addr: PciAddr {
            domain: 0,
            bus: 4,
            devfn: 0,
        },
        ..PROVIDER
    };

    struct User(u32);

    impl Subject for User {
        fn uid(&self) -> u32 {
            self.0
        }

        fn is_member(&self, gid: u32) -> bool {
            gid == self.0 + 1
        }
    }

    fn path(class: PathClass) -> Path {
        Path {
            class,
            hops: 4,
            acs_redirect: false,
            bus_addr: true,
            bandwidth: 0,
            numa_distance: 0,
            bridge: None,
        }
    }

    fn ruled(rules: &[Rule], uid: u32) -> RuleEffect {
        let mut effect = RuleEffect::NONE;
        let who = Applicable::to(rules, &User(uid));
        let paths = [path(PathClass::HostBridge)];
        effect.add(RuleOrigin::Admin, rules, &who, &PROVIDER, &[CLIENT], &paths);
        effect
    }

    #[test]
    fn first_matching_rule_with_attribute_decides() {
        let any = Rule::new(RuleName::EMPTY);
        let rules = [
            Rule {
                uid: Users::NOBODY.and(7, 7),
                action: Some(Action::Deny),
                ..any
            },
            Rule {
                gid: Some(9),
                max_class: Some(PathClass::SameSwitch),
                ..any
            },
            Rule {
                client: DeviceMatch::At(PROVIDER.addr),
                action: Some(Action::Avoid),
                ..any
            },
            Rule {
                provider: DeviceMatch::Ids(0x1234, 0x5678),
                action: Some(Action::Prefer),
                max_class: Some(PathClass::System),
                ..any
            },
        ];
        let by = |at| {
            Some(RuleRef {
                set: RuleOrigin::Admin,
                at,
            })
        };
        let denied = ruled(&rules, 7);
        assert_eq!((denied.denied, denied.too_far), (by(0), None));
        assert_eq!(denied.preference, Preference::Neutral);
        let far = ruled(&rules, 8);
        assert_eq!((far.denied, far.too_far), (None, by(1)));
        assert_eq!((far.preference, far.preference_by), (Preference::Prefer, by(3)));
        let fine = ruled(&rules, 1);
        assert_eq!((fine.denied, fine.too_far), (None, None));
        assert_eq!(ruled(&[], 7), RuleEffect::NONE);
    }

    #[test]
    fn last_of_max_rules_decides() {
        // The array is too large for the kernel's stack.
        static RULES: [Rule; MAX_RULES] = {
            let mut rules = [Rule::new(RuleName::EMPTY); MAX_RULES];
            rules[MAX_RULES - 1].action = Some(Action::Deny);
            rules[MAX_RULES - 1].uid = Some(Users::one(7, 7));
            rules
        };
        let at = MAX_RULES - 1;
        assert_eq!(
            ruled(&RULES, 7).denied,
            Some(RuleRef {
                set: RuleOrigin::Admin,
                at
            })
        );
        assert_eq!(ruled(&RULES, 8).denied, None);
        assert!(!Applicable::to(&RULES, &User(8)).has(at) && Applicable::ALL.has(at));
        assert!(!Applicable::ALL.has(MAX_RULES));
    }
}
