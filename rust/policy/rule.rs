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
    Path,
    PathClass,
    PciAddr, //
};

/// Most rules of the administrator.
pub(crate) const MOST: usize = 256;

/// The name of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name {
    bytes: [u8; Self::MOST],
    len: u8,
}

impl Name {
    /// Most bytes of a name: one less than the ABI has room for.
    pub(crate) const MOST: usize = 31;

    /// What stands for a name where there is none.
    pub(crate) const EMPTY: Self = Self {
        bytes: [0; Self::MOST],
        len: 0,
    };

    /// Letters, digits, `.`, `_` and `-`, at least one and at most [`Self::MOST`].
    pub(crate) fn new(text: &[u8]) -> Option<Self> {
        let fits = !text.is_empty() && text.len() <= Self::MOST;
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
pub(crate) struct Party {
    /// Where it is.
    pub(crate) addr: PciAddr,
    /// PCI vendor id.
    pub(crate) vendor: u16,
    /// PCI device id.
    pub(crate) device: u16,
}

/// Which functions a rule matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// All of them, and where a request has no client, that too.
    Any,
    /// The one at an address.
    At(PciAddr),
    /// Those of a vendor and device id.
    Ids(u16, u16),
}

impl Device {
    fn matches(self, party: Option<&Party>) -> bool {
        match (self, party) {
            (Self::Any, _) => true,
            (_, None) => false,
            (Self::At(addr), Some(party)) => addr == party.addr,
            (Self::Ids(vendor, device), Some(party)) => (vendor, device) == (party.vendor, party.device),
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
pub(crate) struct Users([Option<(u32, u32)>; Self::MOST]);

impl Users {
    /// Most ranges: a user's own id, and the ranges of his subordinate ids.
    pub(crate) const MOST: usize = 4;

    pub(crate) const NOBODY: Self = Self([None; Self::MOST]);

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
    pub(crate) name: Name,
    /// Whose memory.
    pub(crate) provider: Device,
    /// Who does DMA.
    pub(crate) client: Device,
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
pub(crate) enum Flaw {
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
    NobodysReserve,
    /// It sets memory aside for the kernel, and names a user or a group.
    KernelsReserve,
    /// It sets memory aside for a group, and names a user.
    UsersReserve,
    /// A rule of an application, which cannot name users or set memory aside.
    NotOwn,
    /// A rule of an application with a quota, which counts the file's buffers wherever they are.
    OwnQuota,
}

impl Flaw {
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
            Self::NobodysReserve => "reserve_for without a reserve: set how many bytes",
            Self::KernelsReserve => {
                "a reserve for the kernel is nobody's of user space: the rule cannot name uid or gid"
            }
            Self::UsersReserve => "a reserve is for a group or the kernel: the rule cannot name a uid",
            Self::NotOwn => "an application's rule is about its own file: it has no uid, gid, group_quota or reserve",
            Self::OwnQuota => "the quota of an application's rule counts all buffers of its file: it names no provider",
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
    pub(crate) const fn new(name: Name) -> Self {
        Self {
            id: 0,
            name,
            provider: Device::Any,
            client: Device::Any,
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
    pub(crate) fn check(&self) -> Result<(), Flaw> {
        let limits = self.max_class.is_some() || self.counts();
        if self.reserve.is_none() && self.reserve_for.is_some() {
            Err(Flaw::NobodysReserve)
        } else if self.action.is_none() && !limits {
            Err(Flaw::Empty)
        } else if self.action == Some(Action::Deny) && limits {
            Err(Flaw::DenyAndMore)
        } else if self.counts() && self.client != Device::Any {
            Err(Flaw::CountsClient)
        } else if self.group_quota.is_some() && self.gid.is_none() && self.uid.is_none() {
            Err(Flaw::NoGroup)
        } else if self.reserve.is_some() {
            match (self.reserve_for, self.uid, self.gid) {
                (None, _, _) => Err(Flaw::ReserveForNobody),
                (Some(Beneficiary::Kernel), None, None) | (Some(Beneficiary::Group), None, Some(_)) => Ok(()),
                (Some(Beneficiary::Kernel), _, _) => Err(Flaw::KernelsReserve),
                (Some(Beneficiary::Group), Some(_), _) => Err(Flaw::UsersReserve),
                (Some(Beneficiary::Group), None, None) => Err(Flaw::ReserveNoGroup),
            }
        } else {
            Ok(())
        }
    }

    /// As [`Self::check`], of a rule of an application.
    pub(crate) fn check_own(&self) -> Result<(), Flaw> {
        let others = self.uid.is_some() || self.gid.is_some() || self.group_quota.is_some();
        if others || self.reserve.is_some() || self.reserve_for.is_some() {
            Err(Flaw::NotOwn)
        } else if self.quota.is_some() && self.provider != Device::Any {
            Err(Flaw::OwnQuota)
        } else {
            self.check()
        }
    }

    fn is_for(&self, subject: &impl Subject) -> bool {
        self.uid.is_none_or(|users| users.has(subject.uid())) && self.gid.is_none_or(|gid| subject.is_member(gid))
    }

    fn matches(&self, provider: &Party, client: Option<&Party>) -> bool {
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
    fn same_beneficiary(&self, other: &Self) -> bool {
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

/// Which of the rules are for a subject: worked out once, not for each provider and client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Applicable([u64; MOST.div_ceil(64)]);

impl Applicable {
    /// All rules, whoever asks.
    pub(crate) const ALL: Self = Self([u64::MAX; MOST.div_ceil(64)]);

    const NONE: Self = Self([0; MOST.div_ceil(64)]);

    /// Those that are for `subject`.
    #[inline]
    pub(crate) fn to(rules: &[Rule], subject: &impl Subject) -> Self {
        if rules.is_empty() {
            return Self::NONE;
        }
        Self::of(rules, |rule| rule.is_for(subject))
    }

    /// Those of which `is` holds.
    pub(crate) fn of(rules: &[Rule], is: impl Fn(&Rule) -> bool) -> Self {
        let mut bits = [0u64; MOST.div_ceil(64)];
        for (chunk, word) in rules.chunks(64).zip(bits.iter_mut()) {
            for (at, rule) in indexed(chunk) {
                if is(rule) {
                    *word |= 1u64.checked_shl(u32::try_from(at).unwrap_or(64)).unwrap_or(0);
                }
            }
        }
        Self(bits)
    }

    /// Whether one rule is among both.
    pub(crate) fn meets(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).any(|(here, there)| here & there != 0)
    }

    pub(crate) fn has(&self, at: usize) -> bool {
        let word = self.0.get(at / 64).copied().unwrap_or(0);
        word.checked_shr((at % 64) as u32).is_some_and(|bits| bits & 1 == 1)
    }
}

/// Whose rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Set {
    /// The administrator's.
    Admin,
    /// The application's own.
    Own,
}

/// Which rule: an index into the rules of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ref {
    pub(crate) set: Set,
    pub(crate) at: usize,
}

/// How much a candidate is wanted; the smaller the more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Preference {
    Prefer,
    Neutral,
    Avoid,
}

/// A limit that a request would break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Over {
    /// The rule that limits.
    pub(crate) rule: Ref,
    /// Whether the limit is the group's, and not one user's or file's.
    pub(crate) group: bool,
    /// Bytes held already.
    pub(crate) used: u64,
    /// Bytes that may be held.
    pub(crate) limit: u64,
}

/// What the rules say of one provider for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RuleEffect {
    /// The rule that denies it.
    pub(crate) denied: Option<Ref>,
    /// The rule whose farthest class a path exceeds.
    pub(crate) too_far: Option<Ref>,
    /// The limit that the request would break.
    pub(crate) over: Option<Over>,
    /// Whether it would break a limit of the cgroup.
    pub(crate) over_cgroup: bool,
    /// Bytes that are set aside for others, and the first rule that does it.
    pub(crate) withheld: u64,
    pub(crate) withheld_by: Option<Ref>,
    /// What the administrator wants, and what the application wants.
    pub(crate) preference: Preference,
    pub(crate) preference_by: Option<Ref>,
    pub(crate) own_preference: Preference,
    pub(crate) own_preference_by: Option<Ref>,
}

impl RuleEffect {
    /// What no rule says.
    pub(crate) const NONE: Self = Self {
        denied: None,
        too_far: None,
        over: None,
        over_cgroup: false,
        withheld: 0,
        withheld_by: None,
        preference: Preference::Neutral,
        preference_by: None,
        own_preference: Preference::Neutral,
        own_preference_by: None,
    };

    /// Adds what a set of rules says of `provider` for `clients`, whose paths to it are `paths`. A rule of the second
    /// set can only narrow what the first one left.
    pub(crate) fn add(
        &mut self,
        set: Set,
        rules: &[Rule],
        who: &Applicable,
        provider: &Party,
        clients: &[Party],
        paths: &[Path],
    ) {
        if rules.is_empty() {
            return;
        }
        let (mut preference, mut by) = (Preference::Neutral, None);
        let mut pair = |client: Option<&Party>, path: Option<&Path>| {
            let first = |sets: fn(&Rule) -> bool| {
                indexed(rules).find(|(at, rule)| sets(rule) && who.has(*at) && rule.matches(provider, client))
            };
            if let Some((at, rule)) = first(|rule| rule.action.is_some()) {
                let rule_ref = Some(Ref { set, at });
                match rule.action {
                    Some(Action::Deny) => self.denied = self.denied.or(rule_ref),
                    // One client's need to avoid it counts for all.
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
                    self.too_far = self.too_far.or(Some(Ref { set, at }));
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
            Set::Admin => (self.preference, self.preference_by) = (preference, by),
            Set::Own => (self.own_preference, self.own_preference_by) = (preference, by),
        }
    }
}

/// The first rule that sets an attribute of memory of `provider`, and what it sets.
pub(crate) fn first<T>(
    rules: &[Rule],
    who: &Applicable,
    provider: &Party,
    get: impl Fn(&Rule) -> Option<T>,
) -> Option<(usize, T)> {
    indexed(rules)
        .filter(|(at, rule)| who.has(*at) && rule.matches(provider, None))
        .find_map(|(at, rule)| Some((at, get(rule)?)))
}

/// The reserves there are in `provider`: for each beneficiary the first rule, and how many bytes.
pub(crate) fn reserves<'a>(
    rules: &'a [Rule],
    provider: &'a Party,
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

/// Bytes that a rule sets aside for the kernel in `provider`.
pub(crate) fn kernel_reserve(rules: &[Rule], provider: &Party) -> Option<u64> {
    reserves(rules, provider)
        .find(|(_, rule, _)| rule.reserve_for == Some(Beneficiary::Kernel))
        .map(|(_, _, bytes)| bytes)
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_policy))]
mod tests {
    use super::*;

    const PROVIDER: Party = Party {
        addr: PciAddr {
            domain: 0,
            bus: 3,
            devfn: 0,
        },
        vendor: 0x1234,
        device: 0x5678,
    };
    const CLIENT: Party = Party {
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
            distance: 4,
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
        effect.add(Set::Admin, rules, &who, &PROVIDER, &[CLIENT], &paths);
        effect
    }

    #[test]
    fn the_first_rule_that_matches_and_sets_it_decides() {
        let any = Rule::new(Name::EMPTY);
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
                client: Device::At(PROVIDER.addr),
                action: Some(Action::Avoid),
                ..any
            },
            Rule {
                provider: Device::Ids(0x1234, 0x5678),
                action: Some(Action::Prefer),
                max_class: Some(PathClass::System),
                ..any
            },
        ];
        let by = |at| Some(Ref { set: Set::Admin, at });
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
    fn the_last_of_the_most_rules_counts_too() {
        // More than the kernel's stack takes.
        static RULES: [Rule; MOST] = {
            let mut rules = [Rule::new(Name::EMPTY); MOST];
            rules[MOST - 1].action = Some(Action::Deny);
            rules[MOST - 1].uid = Some(Users([Some((7, 7)), None, None, None]));
            rules
        };
        let at = MOST - 1;
        assert_eq!(ruled(&RULES, 7).denied, Some(Ref { set: Set::Admin, at }));
        assert_eq!(ruled(&RULES, 8).denied, None);
        assert!(!Applicable::to(&RULES, &User(8)).has(at) && Applicable::ALL.has(at));
        assert!(!Applicable::ALL.has(MOST));
    }

    #[test]
    fn rules_that_never_decide_are_found() {
        let any = Rule::new(Name::EMPTY);
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
        assert_eq!(any.check(), Err(Flaw::Empty));
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
            ..Rule::new(Name::EMPTY)
        });
        assert_eq!(shadowed(&two, 1), Some((Attribute::Action, 0)));
        let full = (0..4).try_fold(Users::NOBODY, |users, at| users.and(at, at));
        assert!(full.is_some_and(|users| users.and(5, 5).is_none()));
    }
}
