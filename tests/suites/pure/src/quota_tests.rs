// SPDX-License-Identifier: MIT OR Apache-2.0

//! Quotas: after any sequence of charges, refusals, ends and changes of the rules, the byte counts are those of the
//! live buffers.

use crate::policy::path::PciAddr;
use crate::policy::quota::{
    Broken,
    ChargeError,
    ChargeKey,
    ChargeSet,
    ChargeTarget,
    Charged,
    Requester,
    Store,
    charge,
    charge_unlimited,
    reserved_for_others,
    uncharge, //
};
use crate::policy::{
    rule::{
        Beneficiary,
        DeviceMatch,
        FunctionId,
        Rule,
        RuleName,
        Subject,
        Users, //
    },
    rule_effect::{
        Applicable,
        RuleOrigin,
        RuleRef, //
    }, //
};
use p2pmem_proptest::config;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::BTreeMap;

const MIB: u64 = 1 << 20;

/// Byte counts that can run out of memory: `fails` counts down to the new key that cannot be stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ByteCounts {
    keys: BTreeMap<ChargeKey, u64>,
    fails: Option<u32>,
}

impl Store for ByteCounts {
    type Error = &'static str;

    fn used(&self, key: ChargeKey) -> u64 {
        self.keys.get(&key).copied().unwrap_or(0)
    }

    fn set(&mut self, key: ChargeKey, bytes: u64) -> Result<(), Self::Error> {
        if bytes == 0 {
            self.keys.remove(&key);
            return Ok(());
        }
        if !self.keys.contains_key(&key) {
            match &mut self.fails {
                Some(0) => return Err("no memory"),
                Some(left) => *left -= 1,
                None => {}
            }
        }
        self.keys.insert(key, bytes);
        Ok(())
    }
}

#[derive(Clone, Debug)]
struct User {
    uid: u32,
    groups: Vec<u32>,
}

impl Subject for User {
    fn uid(&self) -> u32 {
        self.uid
    }

    fn is_member(&self, gid: u32) -> bool {
        self.groups.contains(&gid)
    }
}

fn function_id(id: u32) -> FunctionId {
    FunctionId {
        addr: PciAddr {
            domain: 0,
            bus: id as u8,
            devfn: 0,
        },
        vendor: 0x1234,
        device: 0x11e8,
    }
}

fn charge_target(id: u32, function: &FunctionId, size: u64) -> ChargeTarget<'_> {
    ChargeTarget {
        id,
        function,
        size,
        kernel_reserve: u64::MAX,
    }
}

fn rule(id: u64, name: &str) -> Rule {
    Rule {
        id,
        ..Rule::new(RuleName::new(name.as_bytes()).expect("a name"))
    }
}

fn requester<'a>(rules: &'a [Rule], user: &User) -> Requester<'a> {
    Requester {
        rules,
        applicable: Applicable::to(rules, user),
        uid: user.uid,
        file: 1,
        file_rules: &[],
    }
}

fn user(uid: u32, groups: &[u32]) -> User {
    User {
        uid,
        groups: groups.to_vec(),
    }
}

#[test]
fn quota_is_per_user() {
    let rules = [Rule {
        quota: Some(2 * MIB),
        ..rule(7, "50-everybody")
    }];
    let mut counts = ByteCounts::default();
    let p = function_id(1);
    for uid in [1000, 1001] {
        let user = user(uid, &[]);
        let charge_set = ChargeSet::of(&counts, &requester(&rules, &user), &charge_target(1, &p, 8 * MIB));
        let first = charge(&mut counts, &charge_set, 2 * MIB).expect("the first two");
        let Err(ChargeError::Broken(Broken::Quota(over))) = charge(&mut counts, &charge_set, 1) else {
            panic!("one byte more fits");
        };
        assert_eq!((over.used, over.limit, over.group), (2 * MIB, 2 * MIB, false));
        assert_eq!(
            over.rule,
            RuleRef {
                set: RuleOrigin::Admin,
                at: 0
            }
        );
        uncharge(&mut counts, first);
        charge(&mut counts, &charge_set, MIB).expect("after the first were given back");
    }
    assert_eq!(counts.used(ChargeKey::User(7, 1000)), MIB);
    assert_eq!(counts.used(ChargeKey::Provider(1)), 2 * MIB);
}

#[test]
fn group_quota_is_shared_and_first_rule_applies() {
    let rules = [
        Rule {
            uid: Users::NOBODY.and(1, 1),
            quota: Some(8 * MIB),
            ..rule(1, "10-one")
        },
        Rule {
            gid: Some(50),
            group_quota: Some(3 * MIB),
            ..rule(2, "20-group")
        },
        Rule {
            quota: Some(MIB),
            ..rule(3, "30-all")
        },
    ];
    let mut counts = ByteCounts::default();
    let p = function_id(1);
    let (one, two) = (user(1, &[50]), user(2, &[50]));
    let of = |counts: &ByteCounts, user: &User| {
        ChargeSet::of(counts, &requester(&rules, user), &charge_target(1, &p, 64 * MIB))
    };
    let charge_set = of(&counts, &one);
    charge(&mut counts, &charge_set, 2 * MIB).expect("rule 30 does not count for user 1");
    let charge_set = of(&counts, &two);
    charge(&mut counts, &charge_set, MIB).expect("the group's third");
    let charge_set = of(&counts, &one);
    match charge(&mut counts, &charge_set, MIB) {
        Err(ChargeError::Broken(Broken::Quota(over))) => {
            assert_eq!((over.group, over.used, over.rule.at), (true, 3 * MIB, 1));
        }
        other => panic!("{other:?}"),
    }
    let charge_set = of(&counts, &two);
    match charge(&mut counts, &charge_set, 1) {
        Err(ChargeError::Broken(Broken::Quota(over))) => assert_eq!((over.group, over.rule.at), (false, 2)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn reserve_is_kept_for_its_group() {
    let rules = [Rule {
        gid: Some(50),
        reserve: Some(4 * MIB),
        reserve_for: Some(Beneficiary::Group),
        ..rule(9, "10-reserve")
    }];
    let p = function_id(1);
    let f = charge_target(1, &p, 8 * MIB);
    let (member, stranger) = (user(1, &[50]), user(2, &[]));
    let mut counts = ByteCounts::default();
    assert_eq!(
        reserved_for_others(&counts, &requester(&rules, &stranger), &f).0,
        4 * MIB
    );
    assert_eq!(reserved_for_others(&counts, &requester(&rules, &member), &f).0, 0);
    let charge_set = ChargeSet::of(&counts, &requester(&rules, &stranger), &f);
    charge(&mut counts, &charge_set, 4 * MIB).expect("what is not set aside");
    let refused = charge(&mut counts, &charge_set, 1);
    let by = RuleRef {
        set: RuleOrigin::Admin,
        at: 0,
    };
    assert_eq!(refused, Err(ChargeError::Broken(Broken::Reserve(by))));
    let charge_set = ChargeSet::of(&counts, &requester(&rules, &member), &f);
    charge(&mut counts, &charge_set, 3 * MIB).expect("the member's");
    assert_eq!(
        reserved_for_others(&counts, &requester(&rules, &stranger), &f),
        (MIB, Some(by))
    );
    // No bytes of another rule's provider are reserved.
    let q = function_id(2);
    let elsewhere = [Rule {
        provider: DeviceMatch::At(p.addr),
        ..rules[0]
    }];
    assert_eq!(
        reserved_for_others(&counts, &requester(&elsewhere, &stranger), &charge_target(2, &q, MIB)).0,
        0
    );
}

#[test]
fn kernel_reserve_counts_kernel_use() {
    let rules = [Rule {
        reserve: Some(4 * MIB),
        reserve_for: Some(Beneficiary::Kernel),
        ..rule(9, "10-kernel")
    }];
    let p = function_id(1);
    let mut f = charge_target(1, &p, 8 * MIB);
    let anyone = user(0, &[]);
    assert_eq!(
        reserved_for_others(&ByteCounts::default(), &requester(&rules, &anyone), &f).0,
        0
    );
    f.kernel_reserve = MIB;
    assert_eq!(
        reserved_for_others(&ByteCounts::default(), &requester(&rules, &anyone), &f).0,
        3 * MIB
    );
}

#[test]
fn file_quota_counts_per_file() {
    let own = [Rule {
        quota: Some(MIB),
        ..rule(0, "mine")
    }];
    let p = function_id(1);
    let mut counts = ByteCounts::default();
    let of = |counts: &ByteCounts, file| {
        let requester = Requester {
            file,
            file_rules: &own,
            ..requester(&[], &user(5, &[]))
        };
        ChargeSet::of(counts, &requester, &charge_target(1, &p, 8 * MIB))
    };
    let charge_set = of(&counts, 1);
    charge(&mut counts, &charge_set, MIB).expect("the quota");
    match charge(&mut counts, &charge_set, 1) {
        Err(ChargeError::Broken(Broken::Quota(over))) => assert_eq!(
            over.rule,
            RuleRef {
                set: RuleOrigin::File,
                at: 0
            }
        ),
        other => panic!("{other:?}"),
    }
    let charge_set = of(&counts, 2);
    charge(&mut counts, &charge_set, MIB).expect("another file");
}

/// A change of the byte counts.
#[derive(Clone, Debug)]
enum Step {
    /// A user allocates in a provider.
    Charge {
        user: usize,
        provider: u32,
        bytes: u64,
        fails: Option<u32>,
    },
    /// The buffer with this index among the live ones ends.
    End(usize),
    /// The rules change, and all buffers are charged again. Memory may run out.
    Rules { rules: Vec<Rule>, fails: Option<u32> },
}

fn any_rules() -> impl Strategy<Value = Vec<Rule>> {
    let one = (
        proptest::option::of(0u32..3),
        proptest::option::of((0u32..3, 0u32..2)),
        proptest::option::of(0u32..3),
        proptest::option::of(0u64..40),
        proptest::option::of(0u64..60),
        proptest::option::of(0u64..30),
    );
    (vec(one, 0..6), 1u64..1_000_000).prop_map(|(rules, id)| {
        rules
            .into_iter()
            .enumerate()
            .map(|(i, (provider, uid, gid, quota, group_quota, reserve))| Rule {
                provider: provider.map_or(DeviceMatch::Any, |id| DeviceMatch::At(function_id(id).addr)),
                uid: uid.and_then(|(first, more)| Users::NOBODY.and(first, first + more)),
                gid,
                quota,
                group_quota: group_quota.filter(|_| gid.is_some() || uid.is_some()),
                reserve: reserve.filter(|_| gid.is_some()),
                reserve_for: reserve.and(gid).map(|_| Beneficiary::Group),
                ..rule(id * 10 + i as u64, "any")
            })
            .collect()
    })
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0usize..4, 0u32..3, 0u64..25, proptest::option::weighted(0.1, 0u32..5))
            .prop_map(|(user, provider, bytes, fails)| Step::Charge { user, provider, bytes, fails }),
        4 => any::<usize>().prop_map(Step::End),
        1 => (any_rules(), proptest::option::weighted(0.3, 0u32..8))
            .prop_map(|(rules, fails)| Step::Rules { rules, fails }),
    ]
}

/// A live buffer.
struct Live {
    user: usize,
    provider: u32,
    bytes: u64,
    charged: Charged,
}

const SIZE: u64 = 100;

/// Returns the expected byte counts, added up from the live buffers by the definition of the rules.
fn expected(rules: &[Rule], users: &[User], live: &[Live]) -> BTreeMap<ChargeKey, u64> {
    let mut sums = BTreeMap::new();
    for buffer in live.iter().filter(|b| b.bytes > 0) {
        let user = &users[buffer.user];
        let here = |rule: &&Rule| {
            rule.provider == DeviceMatch::Any || rule.provider == DeviceMatch::At(function_id(buffer.provider).addr)
        };
        let mine = |rule: &&Rule| {
            here(rule)
                && rule.uid.is_none_or(|users| users.has(user.uid))
                && rule.gid.is_none_or(|g| user.groups.contains(&g))
        };
        let mut add = |key| *sums.entry(key).or_insert(0) += buffer.bytes;
        add(ChargeKey::Provider(buffer.provider));
        add(ChargeKey::File(buffer.user as u64));
        if let Some(rule) = rules.iter().filter(mine).find(|rule| rule.quota.is_some()) {
            add(ChargeKey::User(rule.id, user.uid));
        }
        if let Some(rule) = rules.iter().filter(mine).find(|rule| rule.group_quota.is_some()) {
            add(ChargeKey::Group(rule.id));
        }
        // For each group, the first reserve decides. Of the reserves for the user's groups, the first one counts.
        let mut seen = Vec::new();
        let mut reserve = None;
        for rule in rules.iter().filter(here).filter(|rule| rule.reserve.is_some()) {
            if !seen.contains(&rule.gid) {
                seen.push(rule.gid);
                // `mine` would check the uid too, and nothing else.
                let matches = rule.uid.is_none_or(|users| users.has(user.uid));
                if reserve.is_none() && matches && rule.gid.is_some_and(|g| user.groups.contains(&g)) {
                    reserve = Some(rule.id);
                }
            }
        }
        if let Some(id) = reserve {
            add(ChargeKey::Reserve(id, buffer.provider));
        }
    }
    sums
}

proptest! {
    #![proptest_config(config(512))]

    #[test]
    fn counts_match_live_buffers(
        first in any_rules(),
        groups in vec(vec(0u32..3, 0..3), 4),
        steps in vec(any_step(), 1..60),
    ) {
        let users: Vec<User> = groups.into_iter().enumerate().map(|(uid, groups)| User { uid: uid as u32, groups }).collect();
        let mut rules = first;
        let mut counts = ByteCounts::default();
        let mut live: Vec<Live> = Vec::new();
        for step in steps {
            match step {
                Step::Charge { user, provider, bytes, fails } => {
                    let before = counts.clone();
                    let p = function_id(provider);
                    let requester = Requester { file: user as u64, ..requester(&rules, &users[user]) };
                    let charge_set = ChargeSet::of(&counts, &requester, &charge_target(provider, &p, SIZE));
                    counts.fails = fails;
                    let charged = charge(&mut counts, &charge_set, bytes);
                    counts.fails = None;
                    match charged {
                        Ok(charged) => {
                            live.push(Live { user, provider, bytes, charged });
                            // No limit for this user is broken now.
                            prop_assert_eq!(charge_set.broken(&counts, 0), None);
                        }
                        Err(_) => prop_assert_eq!(&counts, &before, "a refusal left its mark"),
                    }
                }
                Step::End(n) if !live.is_empty() => {
                    let buffer = live.swap_remove(n % live.len());
                    uncharge(&mut counts, buffer.charged);
                }
                Step::End(_) => {}
                Step::Rules { rules: new, fails } => {
                    let mut anew = ByteCounts { fails, ..Default::default() };
                    let all: Result<Vec<Charged>, _> = live.iter().map(|buffer| {
                        let p = function_id(buffer.provider);
                        let requester = Requester { file: buffer.user as u64, ..requester(&new, &users[buffer.user]) };
                        let charge_set = ChargeSet::of(&anew, &requester, &charge_target(buffer.provider, &p, SIZE));
                        charge_unlimited(&mut anew, &charge_set, buffer.bytes)
                    }).collect();
                    if let Ok(all) = all {
                        anew.fails = None;
                        (counts, rules) = (anew, new);
                        for (buffer, charged) in live.iter_mut().zip(all) {
                            buffer.charged = charged;
                        }
                    }
                }
            }
            prop_assert_eq!(&counts.keys, &expected(&rules, &users, &live));
        }
        for buffer in live {
            uncharge(&mut counts, buffer.charged);
        }
        prop_assert_eq!(counts, ByteCounts::default());
    }
}
