// SPDX-License-Identifier: GPL-2.0

//! Rules: what the administrator, or an application for itself, allows, wants and limits.
//!
//! A [`Rule`] matches pairs of a provider and a client, for a user, and sets attributes. Rules are looked at in the
//! order of their names, and for each attribute the first rule that matches and sets it decides. What a request's
//! pairs come to together, for one provider, is a [`RuleEffect`]; what a buffer in it counts against is a
//! [`crate::policy::quota::ChargeSet`]. All of it is written down in Documentation/design/rules.md.
//!
//! The file is pure: it needs nothing but `core` and the other pure files, allocates nothing, cannot panic, and holds
//! no `unsafe`. The same text is compiled into the module and into the host tests of tests/suites/pure.

use crate::policy::path::{
    indexed,
    PathClass,
    PciAddr, //
};

/// Most rules of the administrator.
pub(crate) const MAX_RULES: usize = 256;

/// The name of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RuleName {
    bytes: [u8; Self::MAX_LEN],
    len: u8,
}

impl RuleName {
    /// Most bytes of a name: one less than the ABI has room for.
    pub(crate) const MAX_LEN: usize = 31;

    /// What stands for a name where there is none.
    pub(crate) const EMPTY: Self = Self {
        bytes: [0; Self::MAX_LEN],
        len: 0,
    };

    /// Letters, digits, `.`, `_` and `-`, at least one and at most [`Self::MAX_LEN`].
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

    /// As [`Self::new`], of an administrator's rule: two digits, `-`, and what it is about.
    pub(crate) fn ordered(text: &[u8]) -> Option<Self> {
        match text {
            [a, b, b'-', _, ..] if a.is_ascii_digit() && b.is_ascii_digit() => Self::new(text),
            _ => None,
        }
    }

    /// The name as text.
    pub(crate) fn as_str(&self) -> &str {
        let bytes = self.bytes.get(..usize::from(self.len)).unwrap_or_default();
        core::str::from_utf8(bytes).unwrap_or_default()
    }
}

/// A PCI function, as far as a rule can tell it from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FunctionId {
    /// Where it is.
    pub(crate) addr: PciAddr,
    /// PCI vendor id.
    pub(crate) vendor: u16,
    /// PCI device id.
    pub(crate) device: u16,
}

/// Which functions a rule matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceMatch {
    /// All of them, and where a request has no client, that too.
    Any,
    /// The one at an address.
    At(PciAddr),
    /// Those of a vendor and device id.
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

    /// Whether all that `other` matches is certainly matched by this.
    fn covers(self, other: Self) -> bool {
        self == Self::Any || self == other
    }
}

/// What a rule says of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// It may be.
    Allow,
    /// It may not be.
    Deny,
    /// It may be, and comes before those that are not preferred.
    Prefer,
    /// It may be, where nothing else serves.
    Avoid,
}

/// For whom memory is set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beneficiary {
    /// Other drivers of the kernel.
    Kernel,
    /// The members of the rule's group.
    Group,
}

/// Users: ranges of user ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Users([Option<(u32, u32)>; Self::MAX_RANGES]);

impl Users {
    /// Most ranges: a user's own id, and the ranges of his subordinate ids.
    pub(crate) const MAX_RANGES: usize = 4;

    pub(crate) const NOBODY: Self = Self([None; Self::MAX_RANGES]);

    /// Users of one range of ids, from the first to the last.
    #[cfg(any(test, CONFIG_KUNIT))]
    pub(super) const fn one(first: u32, last: u32) -> Self {
        Self([Some((first, last)), None, None, None])
    }

    /// One range more, from its first id to its last. None when it is empty or there are too many.
    pub(crate) fn and(mut self, first: u32, last: u32) -> Option<Self> {
        let free = self.0.iter_mut().find(|range| range.is_none())?;
        *free = Some((first, last));
        (first <= last).then_some(self)
    }

    /// The first and the last id of each range.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.0.iter().flatten().copied()
    }

    pub(crate) fn has(&self, uid: u32) -> bool {
        self.ranges().any(|(first, last)| (first..=last).contains(&uid))
    }

    /// Whether each range of the other ones is in one of these.
    fn covers(&self, other: &Self) -> bool {
        other
            .ranges()
            .all(|(from, to)| self.ranges().any(|(first, last)| first <= from && to <= last))
    }
}

/// One rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    /// Tells it from all others there ever were, unlike its name.
    pub(crate) id: u64,
    /// Its name.
    pub(crate) name: RuleName,
    /// Whose memory.
    pub(crate) provider: DeviceMatch,
    /// Who does DMA.
    pub(crate) client: DeviceMatch,
    /// Effective user id of who asks.
    pub(crate) uid: Option<Users>,
    /// A group that who asks is a member of.
    pub(crate) gid: Option<u32>,
    /// Attribute: what is said of it.
    pub(crate) action: Option<Action>,
    /// Attribute: farthest path class.
    pub(crate) max_class: Option<PathClass>,
    /// Attribute: bytes that each user may hold.
    pub(crate) quota: Option<u64>,
    /// Attribute: bytes that the members of the group, or the users, may hold together.
    pub(crate) group_quota: Option<u64>,
    /// Attribute: bytes of each provider that are set aside.
    pub(crate) reserve: Option<u64>,
    /// For whom.
    pub(crate) reserve_for: Option<Beneficiary>,
}

/// What is wrong with a rule by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RuleError {
    /// It sets nothing.
    Empty,
    /// It denies, and limits what it denies.
    DenyAndMore,
    /// It counts bytes and names a client.
    CountsClient,
    /// It has a quota for several users together, and does not say for whom.
    NoGroup,
    /// It has a reserve for a group, and names no group.
    ReserveNoGroup,
    /// It sets memory aside, and does not say for whom.
    ReserveForNobody,
    /// It says for whom, and sets nothing aside.
    ReserveForWithoutReserve,
    /// It sets memory aside for the kernel, and names a user or a group.
    KernelReserveNamesUser,
    /// It sets memory aside for a group, and names a user.
    ReserveNamesUser,
    /// A rule of an application, which cannot name users or set memory aside.
    FileRuleNamesOthers,
    /// A rule of an application with a quota, which counts the file's buffers wherever they are.
    FileQuotaNamesProvider,
}

impl RuleError {
    /// The flaw as a sentence.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Empty => "the rule says nothing: set action, max_class, quota, group_quota or reserve",
            Self::DenyAndMore => "the rule contradicts itself: what it denies has no max_class, quota or reserve",
            Self::CountsClient => "a quota and a reserve count memory, whoever does DMA: the rule cannot name a client",
            Self::NoGroup => {
                "a group_quota is what several users hold together: name their group by gid, or them by uid"
            }
            Self::ReserveNoGroup => "a reserve for a group needs the group: name it by gid",
            Self::ReserveForNobody => "a reserve is for somebody: set reserve_for to kernel or group",
            Self::ReserveForWithoutReserve => "reserve_for without a reserve: set how many bytes",
            Self::KernelReserveNamesUser => {
                "a reserve for the kernel is nobody's of user space: the rule cannot name uid or gid"
            }
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

    /// Its name.
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
    /// A rule that matches everything and sets nothing.
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

    fn counts(&self) -> bool {
        self.limits_holders() || self.reserve.is_some()
    }

    /// Whether it limits what those whom it is for may hold.
    pub(crate) fn limits_holders(&self) -> bool {
        self.quota.is_some() || self.group_quota.is_some()
    }

    /// Whether the rule makes sense by itself.
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

    /// As [`Self::check`], of a rule of an application.
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

    /// Whether all that `other` matches is certainly matched by this rule.
    fn covers(&self, other: &Self) -> bool {
        self.provider.covers(other.provider)
            && self.client.covers(other.client)
            && self
                .uid
                .is_none_or(|users| other.uid.is_some_and(|others| users.covers(&others)))
            && self.gid.is_none_or(|gid| other.gid == Some(gid))
    }

    /// Whether a reserve of this rule and one of `other` are for the same.
    pub(super) fn same_beneficiary(&self, other: &Self) -> bool {
        (self.reserve_for, self.gid) == (other.reserve_for, other.gid)
    }
}

/// The first attribute of a rule that never decides, and the earlier rule that always does.
pub(crate) fn shadowed(rules: &[Rule], at: usize) -> Option<(Attribute, usize)> {
    let rule = rules.get(at)?;
    Attribute::ALL.into_iter().find_map(|attribute| {
        if !rule.sets(attribute) {
            return None;
        }
        let always = |earlier: &Rule| match attribute {
            // Reserves are for different beneficiaries side by side, and match providers alone.
            Attribute::Reserve => earlier.same_beneficiary(rule) && earlier.provider.covers(rule.provider),
            _ => earlier.covers(rule),
        };
        indexed(rules)
            .take(at)
            .find(|(_, earlier)| earlier.sets(attribute) && always(earlier))
            .map(|(before, _)| (attribute, before))
    })
}

/// Who asks.
pub(crate) trait Subject {
    /// Effective user id.
    fn uid(&self) -> u32;
    /// Whether a group is the effective one or one of the others.
    fn is_member(&self, gid: u32) -> bool;
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_rule))]
mod tests {
    use super::*;

    #[test]
    fn rules_that_never_decide_are_found() {
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
    fn users_are_ranges() {
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
