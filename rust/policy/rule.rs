// SPDX-License-Identifier: GPL-2.0

//! Rules: what the administrator allows, prefers and limits, and what a program restricts for its own open file.
//!
//! A [`Rule`] matches pairs of a provider and a client, for a user or a group, and sets attributes. Rules are read in the
//! order of their names. For each attribute, the first matching rule that sets the attribute decides. The effect on one
//! provider and one request is a [`RuleEffect`](super::rule_effect::RuleEffect); the quotas that a buffer counts against
//! are a [`ChargeSet`](super::quota::ChargeSet). Documentation/design/rules.md describes the rules.
//!
//! The file is pure: it needs nothing but `core` and the other pure files, allocates nothing, cannot panic, and holds no
//! `unsafe`. The same source is compiled into the module and into the host tests of tests/pure.

use crate::policy::path::{
    indexed,
    PathClass,
    PciAddr, //
};

/// Maximum number of the administrator's rules.
pub(crate) const MAX_RULES: usize = 256;

/// The name of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RuleName {
    bytes: [u8; Self::MAX_LEN],
    len: u8,
}

impl RuleName {
    /// Maximum length of a name in bytes. The ABI's field has one byte more.
    pub(crate) const MAX_LEN: usize = 31;

    /// The placeholder for a missing name.
    pub(crate) const EMPTY: Self = Self {
        bytes: [0; Self::MAX_LEN],
        len: 0,
    };

    /// Makes a name of letters, digits, `.`, `_` and `-`, with 1 to [`Self::MAX_LEN`] bytes. Returns `None` for other
    /// text.
    pub(crate) fn new(text: &[u8]) -> Option<Self> {
        let fits = !text.is_empty() && text.len() <= Self::MAX_LEN;
        let plain = |c: &u8| c.is_ascii_alphanumeric() || b"._-".contains(c);
        if !fits || !text.iter().all(plain) {
            return None;
        }
        let mut name = Self::EMPTY;
        for (to, from) in name.bytes.iter_mut().zip(text) {
            *to = *from;
        }
        name.len = u8::try_from(text.len()).unwrap_or(0);
        Some(name)
    }

    /// Makes the name of an administrator's rule: two digits, `-`, and at least one more character. Otherwise as
    /// [`Self::new`].
    pub(crate) fn ordered(text: &[u8]) -> Option<Self> {
        match text {
            [a, b, b'-', _, ..] if a.is_ascii_digit() && b.is_ascii_digit() => Self::new(text),
            _ => None,
        }
    }

    /// Returns the name as text.
    pub(crate) fn as_str(&self) -> &str {
        let bytes = self.bytes.get(..usize::from(self.len)).unwrap_or_default();
        core::str::from_utf8(bytes).unwrap_or_default()
    }
}

/// The identity of a PCI function, as rules match it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FunctionId {
    /// PCI address.
    pub(crate) addr: PciAddr,
    /// PCI vendor ID.
    pub(crate) vendor: u16,
    /// PCI device ID.
    pub(crate) device: u16,
}

/// The functions that a rule matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceMatch {
    /// All functions, and also a request without clients.
    Any,
    /// The function at this address.
    At(PciAddr),
    /// Functions with this vendor and device ID.
    Ids(u16, u16),
}

impl DeviceMatch {
    pub(super) fn matches(self, function: Option<&FunctionId>) -> bool {
        match (self, function) {
            (Self::Any, _) => true,
            (_, None) => false,
            (Self::At(addr), Some(function)) => addr == function.addr,
            (Self::Ids(vendor, device), Some(function)) => (vendor, device) == (function.vendor, function.device),
        }
    }

    /// Returns whether this match certainly includes everything that `other` matches. May return `false` although it does.
    fn covers(self, other: Self) -> bool {
        self == Self::Any || self == other
    }
}

/// What a rule does with a pair of provider and client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// The pair is allowed.
    Allow,
    /// The pair is not allowed.
    Deny,
    /// The pair is allowed, and the provider is chosen before others.
    Prefer,
    /// The pair is allowed, and the provider is chosen only if no other provider can serve.
    Avoid,
}

/// The beneficiary of a reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beneficiary {
    /// Other drivers, which allocate from the kernel's pool.
    Kernel,
    /// Members of the rule's group.
    Group,
}

/// A set of user IDs: up to [`Self::MAX_RANGES`] ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Users([Option<(u32, u32)>; Self::MAX_RANGES]);

impl Users {
    /// Maximum number of ranges: the user's own ID, and the ranges of subordinate IDs.
    pub(crate) const MAX_RANGES: usize = 4;

    pub(crate) const NOBODY: Self = Self([None; Self::MAX_RANGES]);

    /// Makes a set of one range, `first` and `last` included.
    #[cfg(any(test, CONFIG_KUNIT))]
    pub(super) const fn one(first: u32, last: u32) -> Self {
        Self([Some((first, last)), None, None, None])
    }

    /// Adds a range, `first` and `last` included. Returns `None` if the range is empty or the set is full.
    pub(crate) fn and(mut self, first: u32, last: u32) -> Option<Self> {
        let free = self.0.iter_mut().find(|range| range.is_none())?;
        *free = Some((first, last));
        (first <= last).then_some(self)
    }

    /// Returns the first and the last ID of each range.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.0.iter().flatten().copied()
    }

    pub(crate) fn has(&self, uid: u32) -> bool {
        self.ranges().any(|(first, last)| (first..=last).contains(&uid))
    }

    /// Returns whether each range of `other` is part of one range of this set.
    fn covers(&self, other: &Self) -> bool {
        other
            .ranges()
            .all(|(from, to)| self.ranges().any(|(first, last)| first <= from && to <= last))
    }
}

/// A rule. An attribute that is `None` is not set; a matcher that is `None` matches everyone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    /// Identifies the rule. Unlike a name, an ID is never used again.
    pub(crate) id: u64,
    /// Determines the order of the rules.
    pub(crate) name: RuleName,
    /// Matches the provider of the memory.
    pub(crate) provider: DeviceMatch,
    /// Matches the function that does DMA.
    pub(crate) client: DeviceMatch,
    /// Matches the effective user ID of the caller.
    pub(crate) uid: Option<Users>,
    /// Matches callers that are members of this group.
    pub(crate) gid: Option<u32>,
    /// Attribute: allow, deny, prefer or avoid.
    pub(crate) action: Option<Action>,
    /// Attribute: farthest allowed path class.
    pub(crate) max_class: Option<PathClass>,
    /// Attribute: bytes that each matching user may hold.
    pub(crate) quota: Option<u64>,
    /// Attribute: bytes that all members of the group, or all matching users, may hold together.
    pub(crate) group_quota: Option<u64>,
    /// Attribute: bytes of each matching provider that are reserved.
    pub(crate) reserve: Option<u64>,
    /// The beneficiary of `reserve`.
    pub(crate) reserve_for: Option<Beneficiary>,
}

/// An error in a rule, independent of other rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RuleError {
    /// The rule sets no attribute.
    Empty,
    /// The rule denies, and also sets a limit.
    DenyAndMore,
    /// The rule has a quota or a reserve, and names a client.
    CountsClient,
    /// The rule has a group quota, but names neither a group nor users.
    NoGroup,
    /// The rule has a reserve for a group, but names no group.
    ReserveNoGroup,
    /// The rule has a reserve, but no beneficiary.
    ReserveForNobody,
    /// The rule has a beneficiary, but no reserve.
    ReserveForWithoutReserve,
    /// The rule has a reserve for the kernel, and names a user or a group.
    KernelReserveNamesUser,
    /// The rule has a reserve for a group, and names a user.
    ReserveNamesUser,
    /// A file rule names a user or a group, or has a group quota or a reserve.
    FileRuleNamesOthers,
    /// A file rule has a quota and names a provider. The quota counts the file's buffers in all providers.
    FileQuotaNamesProvider,
}

impl RuleError {
    /// Returns the message for the administrator or the program.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Empty => "the rule says nothing: set action, max_class, quota, group_quota or reserve",
            Self::DenyAndMore => "the rule contradicts itself: what it denies has no max_class, quota or reserve",
            Self::CountsClient => "a quota and a reserve count memory of all devices: the rule cannot name a client",
            Self::NoGroup => {
                "a group_quota is what several users hold together: name their group by gid, or them by uid"
            }
            Self::ReserveNoGroup => "a reserve for a group needs the group: name it by gid",
            Self::ReserveForNobody => "a reserve is for somebody: set reserve_for to kernel or group",
            Self::ReserveForWithoutReserve => "reserve_for without a reserve: set how many bytes",
            Self::KernelReserveNamesUser => "a reserve for the kernel names no user: remove uid and gid from the rule",
            Self::ReserveNamesUser => "a reserve is for a group or the kernel: the rule cannot name a uid",
            Self::FileRuleNamesOthers => {
                "an application's rule is about its own file: it has no uid, gid, group_quota or reserve"
            }
            Self::FileQuotaNamesProvider => {
                "the quota of an application's rule counts all buffers of its file: it names no provider"
            }
        }
    }
}

/// An attribute of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attribute {
    Action,
    MaxClass,
    Quota,
    GroupQuota,
    Reserve,
}

impl Attribute {
    const ALL: [Self; 5] = [
        Self::Action,
        Self::MaxClass,
        Self::Quota,
        Self::GroupQuota,
        Self::Reserve,
    ];

    /// Returns the name of the attribute in the rule text and in configfs.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Action => "action",
            Self::MaxClass => "max_class",
            Self::Quota => "quota",
            Self::GroupQuota => "group_quota",
            Self::Reserve => "reserve",
        }
    }
}

impl Rule {
    /// Makes a rule that matches everything and sets no attribute.
    pub(crate) const fn new(name: RuleName) -> Self {
        Self {
            id: 0,
            name,
            provider: DeviceMatch::Any,
            client: DeviceMatch::Any,
            uid: None,
            gid: None,
            action: None,
            max_class: None,
            quota: None,
            group_quota: None,
            reserve: None,
            reserve_for: None,
        }
    }

    fn sets(&self, attribute: Attribute) -> bool {
        match attribute {
            Attribute::Action => self.action.is_some(),
            Attribute::MaxClass => self.max_class.is_some(),
            Attribute::Quota => self.quota.is_some(),
            Attribute::GroupQuota => self.group_quota.is_some(),
            Attribute::Reserve => self.reserve.is_some(),
        }
    }

    /// Returns whether the rule depends on byte counts.
    pub(crate) fn counts(&self) -> bool {
        self.limits_holders() || self.reserve.is_some()
    }

    /// Returns whether the rule limits the bytes that users may hold.
    pub(crate) fn limits_holders(&self) -> bool {
        self.quota.is_some() || self.group_quota.is_some()
    }

    /// Checks the rule by itself. An error is the first problem of the rule.
    pub(crate) fn check(&self) -> Result<(), RuleError> {
        let limits = self.max_class.is_some() || self.counts();
        if self.reserve.is_none() && self.reserve_for.is_some() {
            Err(RuleError::ReserveForWithoutReserve)
        } else if self.action.is_none() && !limits {
            Err(RuleError::Empty)
        } else if self.action == Some(Action::Deny) && limits {
            Err(RuleError::DenyAndMore)
        } else if self.counts() && self.client != DeviceMatch::Any {
            Err(RuleError::CountsClient)
        } else if self.group_quota.is_some() && self.gid.is_none() && self.uid.is_none() {
            Err(RuleError::NoGroup)
        } else if self.reserve.is_some() {
            match (self.reserve_for, self.uid, self.gid) {
                (None, _, _) => Err(RuleError::ReserveForNobody),
                (Some(Beneficiary::Kernel), None, None) | (Some(Beneficiary::Group), None, Some(_)) => Ok(()),
                (Some(Beneficiary::Kernel), _, _) => Err(RuleError::KernelReserveNamesUser),
                (Some(Beneficiary::Group), Some(_), _) => Err(RuleError::ReserveNamesUser),
                (Some(Beneficiary::Group), None, None) => Err(RuleError::ReserveNoGroup),
            }
        } else {
            Ok(())
        }
    }

    /// Checks a file rule by itself, which has more restrictions than a rule of the administrator.
    pub(crate) fn check_file_rule(&self) -> Result<(), RuleError> {
        let others = self.uid.is_some() || self.gid.is_some() || self.group_quota.is_some();
        if others || self.reserve.is_some() || self.reserve_for.is_some() {
            Err(RuleError::FileRuleNamesOthers)
        } else if self.quota.is_some() && self.provider != DeviceMatch::Any {
            Err(RuleError::FileQuotaNamesProvider)
        } else {
            self.check()
        }
    }

    pub(super) fn is_for(&self, subject: &impl Subject) -> bool {
        self.uid.is_none_or(|users| users.has(subject.uid())) && self.gid.is_none_or(|gid| subject.is_member(gid))
    }

    pub(super) fn matches(&self, provider: &FunctionId, client: Option<&FunctionId>) -> bool {
        self.provider.matches(Some(provider)) && self.client.matches(client)
    }

    /// Returns whether this rule certainly matches everything that `other` matches. May return `false` although it does.
    fn covers(&self, other: &Self) -> bool {
        self.provider.covers(other.provider)
            && self.client.covers(other.client)
            && self
                .uid
                .is_none_or(|users| other.uid.is_some_and(|others| users.covers(&others)))
            && self.gid.is_none_or(|gid| other.gid == Some(gid))
    }

    /// Returns whether reserves of both rules have the same beneficiary.
    pub(super) fn same_beneficiary(&self, other: &Self) -> bool {
        (self.reserve_for, self.gid) == (other.reserve_for, other.gid)
    }
}

/// Returns the first attribute of rule `at` that never takes effect, and the index of the earlier rule that always
/// decides.
///
/// Returns `None` if there is no such attribute or no rule `at`.
pub(crate) fn shadowed(rules: &[Rule], at: usize) -> Option<(Attribute, usize)> {
    let rule = rules.get(at)?;
    Attribute::ALL.into_iter().find_map(|attribute| {
        if !rule.sets(attribute) {
            return None;
        }
        let always = |earlier: &Rule| match attribute {
            // Reserves of different beneficiaries exist side by side. A reserve depends on the provider only.
            Attribute::Reserve => earlier.same_beneficiary(rule) && earlier.provider.covers(rule.provider),
            _ => earlier.covers(rule),
        };
        indexed(rules)
            .take(at)
            .find(|(_, earlier)| earlier.sets(attribute) && always(earlier))
            .map(|(before, _)| (attribute, before))
    })
}

/// The user that sends a request.
pub(crate) trait Subject {
    /// Returns the effective user ID.
    fn uid(&self) -> u32;
    /// Returns whether `gid` is the effective group or one of the supplementary groups.
    fn is_member(&self, gid: u32) -> bool;
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_rule))]
mod tests {
    use super::*;

    #[test]
    fn rules_without_effect_are_found() {
        let any = Rule::new(RuleName::EMPTY);
        let deny = Rule {
            action: Some(Action::Deny),
            ..any
        };
        let rules = [
            Rule {
                uid: Users::NOBODY.and(7, 7),
                ..deny
            },
            deny,
            Rule { gid: Some(9), ..deny },
        ];
        assert_eq!(shadowed(&rules, 1), None);
        assert_eq!(shadowed(&rules, 2), Some((Attribute::Action, 1)));
        assert_eq!(shadowed(&rules, 3), None);
        assert_eq!(any.check(), Err(RuleError::Empty));
    }

    #[test]
    fn users_match_ranges() {
        let some = Users::NOBODY
            .and(1000, 1000)
            .and_then(|users| users.and(100_000, 165_535));
        let all = some.filter(|users| users.has(1000) && users.has(100_000) && users.has(165_535));
        assert!(all.is_some_and(|users| !users.has(999) && !users.has(1001) && !users.has(165_536)));
        assert!(Users::NOBODY.and(2, 1).is_none() && !Users::NOBODY.has(0));
        let part = Users::NOBODY.and(100_010, 100_020);
        let two = [some, part].map(|uid| Rule {
            uid,
            action: Some(Action::Deny),
            ..Rule::new(RuleName::EMPTY)
        });
        assert_eq!(shadowed(&two, 1), Some((Attribute::Action, 0)));
        let full = (0..4).try_fold(Users::NOBODY, |users, at| users.and(at, at));
        assert!(full.is_some_and(|users| users.and(5, 5).is_none()));
    }
}
