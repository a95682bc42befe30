// SPDX-License-Identifier: MIT OR Apache-2.0

//! Rules: which rules are valid, which rule decides, and that a file's own rules never permit more than the
//! administrator's.

use crate::decision::decide;
use crate::policy::path::{
    Path,
    PathClass,
    PciAddr, //
};
use crate::policy::{
    placement::{
        Candidate,
        Named,
        Request,
        Strategy as Chooser, //
    },
    verdict::{
        Outcome,
        Verdict,
        VerdictCode, //
    }, //
};
use crate::policy::{
    rule::{
        Action,
        Attribute,
        Beneficiary,
        DeviceMatch,
        FunctionId,
        Rule,
        RuleError,
        RuleName,
        Subject,
        Users,
        shadowed, //
    },
    rule_effect::{
        Applicable,
        Preference,
        RuleEffect,
        RuleOrigin,
        RuleRef,
        kernel_reserve,
        reserves, //
    }, //
};
use p2pmem_proptest::config;
use proptest::collection::vec;
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

fn addr(bus: u8) -> PciAddr {
    PciAddr {
        domain: 0,
        bus,
        devfn: 0,
    }
}

fn function_id(bus: u8) -> FunctionId {
    FunctionId {
        addr: addr(bus),
        vendor: 0x1234,
        device: 0x1000 + u16::from(bus),
    }
}

fn rule(name: &str) -> Rule {
    Rule::new(RuleName::new(name.as_bytes()).expect("a name"))
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

#[derive(Clone, Debug)]
struct User(u32, Vec<u32>);

impl Subject for User {
    fn uid(&self) -> u32 {
        self.0
    }

    fn is_member(&self, gid: u32) -> bool {
        self.1.contains(&gid)
    }
}

fn ruled(rules: &[Rule], user: &User, provider: u8, clients: &[(u8, PathClass)]) -> RuleEffect {
    let functions: Vec<FunctionId> = clients.iter().map(|(bus, _)| function_id(*bus)).collect();
    let paths: Vec<Path> = clients.iter().map(|(_, class)| path(*class)).collect();
    let mut effect = RuleEffect::NONE;
    let who = Applicable::to(rules, user);
    effect.add(
        RuleOrigin::Admin,
        rules,
        &who,
        &function_id(provider),
        &functions,
        &paths,
    );
    effect
}

const NEAR: PathClass = PathClass::SameSwitch;

#[test]
fn rule_names_are_validated() {
    for good in ["10-a", "99-Lab.GPU_users-2", "00--", "10-x.y"] {
        assert_eq!(
            RuleName::ordered(good.as_bytes())
                .map(|name| name.as_str().to_owned())
                .as_deref(),
            Some(good)
        );
    }
    let long = "10-".to_owned() + &"a".repeat(29);
    let bad = [
        "",
        "10-",
        "1-a",
        "a0-a",
        "10a",
        "-10-a",
        "10-a b",
        "10-a/b",
        "10-\u{e9}",
        "10-a\n",
        "10-\u{0}",
        "10-a%s",
        &long,
    ];
    for bad in bad {
        assert_eq!(RuleName::ordered(bad.as_bytes()), None, "{bad:?}");
    }
    assert!(RuleName::ordered(&long.as_bytes()[..31]).is_some());
    let sorted = |a: &str, b: &str| RuleName::new(a.as_bytes()) < RuleName::new(b.as_bytes());
    assert!(sorted("10-b", "20-a") && sorted("10-a", "10-b") && sorted("10-a", "10-aa"));
}

#[test]
fn invalid_rules_have_reasons() {
    let deny = Rule {
        action: Some(Action::Deny),
        ..rule("10-a")
    };
    let quota = Rule {
        quota: Some(GIB),
        ..rule("10-a")
    };
    let reserve = Rule {
        reserve: Some(GIB),
        ..rule("10-a")
    };
    let kernel = Rule {
        reserve_for: Some(Beneficiary::Kernel),
        ..reserve
    };
    let group = Rule {
        reserve_for: Some(Beneficiary::Group),
        ..reserve
    };
    let cases = [
        (rule("10-a"), Err(RuleError::Empty)),
        (deny, Ok(())),
        (Rule { quota: Some(0), ..deny }, Err(RuleError::DenyAndMore)),
        (
            Rule {
                max_class: Some(NEAR),
                ..deny
            },
            Err(RuleError::DenyAndMore),
        ),
        (
            Rule {
                client: DeviceMatch::At(addr(1)),
                ..deny
            },
            Ok(()),
        ),
        (quota, Ok(())),
        (
            Rule {
                client: DeviceMatch::At(addr(1)),
                ..quota
            },
            Err(RuleError::CountsClient),
        ),
        (
            Rule {
                group_quota: Some(1),
                ..rule("10-a")
            },
            Err(RuleError::NoGroup),
        ),
        (
            Rule {
                group_quota: Some(1),
                gid: Some(5),
                ..rule("10-a")
            },
            Ok(()),
        ),
        (reserve, Err(RuleError::ReserveForNobody)),
        (
            Rule {
                reserve_for: Some(Beneficiary::Kernel),
                ..quota
            },
            Err(RuleError::ReserveForWithoutReserve),
        ),
        (kernel, Ok(())),
        (Rule { gid: Some(5), ..kernel }, Err(RuleError::KernelReserveNamesUser)),
        (
            Rule {
                uid: Users::NOBODY.and(5, 5),
                ..kernel
            },
            Err(RuleError::KernelReserveNamesUser),
        ),
        (group, Err(RuleError::ReserveNoGroup)),
        (Rule { gid: Some(5), ..group }, Ok(())),
        (
            Rule {
                gid: Some(5),
                uid: Users::NOBODY.and(1, 1),
                ..group
            },
            Err(RuleError::ReserveNamesUser),
        ),
    ];
    for (rule, expected) in cases {
        assert_eq!(rule.check(), expected, "{rule:?}");
        if let Err(flaw) = expected {
            assert!(flaw.text().contains(' '));
        }
    }
    assert_eq!(quota.check_file_rule(), Ok(()));
    assert_eq!(
        Rule {
            provider: DeviceMatch::At(addr(1)),
            ..quota
        }
        .check_file_rule(),
        Err(RuleError::FileQuotaNamesProvider)
    );
    assert_eq!(
        Rule {
            uid: Users::NOBODY.and(1, 1),
            ..deny
        }
        .check_file_rule(),
        Err(RuleError::FileRuleNamesOthers)
    );
    assert_eq!(kernel.check_file_rule(), Err(RuleError::FileRuleNamesOthers));
    assert_eq!(rule("a").check_file_rule(), Err(RuleError::Empty));
}

#[test]
fn the_first_rule_decides_each_attribute() {
    let rules = [
        Rule {
            client: DeviceMatch::At(addr(9)),
            max_class: Some(NEAR),
            ..rule("10-near")
        },
        Rule {
            uid: Users::NOBODY.and(7, 7),
            action: Some(Action::Allow),
            ..rule("20-seven")
        },
        Rule {
            provider: DeviceMatch::Ids(0x1234, 0x1001),
            action: Some(Action::Deny),
            ..rule("30-not-one")
        },
        Rule {
            max_class: Some(PathClass::System),
            ..rule("40-any")
        },
    ];
    let admin = |at| {
        Some(RuleRef {
            set: RuleOrigin::Admin,
            at,
        })
    };
    let (seven, eight) = (User(7, vec![]), User(8, vec![]));
    assert_eq!(ruled(&rules, &seven, 1, &[]), RuleEffect::NONE);
    assert_eq!(ruled(&rules, &eight, 1, &[]).denied, admin(2));
    assert_eq!(ruled(&rules, &eight, 2, &[]).denied, None);
    let far = ruled(&rules, &seven, 2, &[(9, PathClass::HostBridge)]);
    assert_eq!((far.too_far, far.denied), (admin(0), None));
    // Rule 10 decides for client 9, and for no other client.
    assert_eq!(
        ruled(&rules, &seven, 2, &[(8, PathClass::System), (9, NEAR)]).too_far,
        None
    );
    assert_eq!(
        ruled(&rules, &seven, 2, &[(8, PathClass::System), (9, PathClass::Switches)]).too_far,
        admin(0)
    );
}

#[test]
fn effects_of_all_clients_are_combined() {
    let rules = [
        Rule {
            client: DeviceMatch::At(addr(1)),
            action: Some(Action::Allow),
            ..rule("10-this")
        },
        Rule {
            client: DeviceMatch::At(addr(2)),
            action: Some(Action::Prefer),
            ..rule("20-that")
        },
        Rule {
            client: DeviceMatch::At(addr(3)),
            action: Some(Action::Avoid),
            ..rule("30-third")
        },
        Rule {
            action: Some(Action::Deny),
            ..rule("99-nobody")
        },
    ];
    let anyone = User(0, vec![]);
    let of = |clients: &[u8]| {
        let clients: Vec<(u8, PathClass)> = clients.iter().map(|bus| (*bus, NEAR)).collect();
        ruled(&rules, &anyone, 5, &clients)
    };
    assert_eq!(of(&[1]), RuleEffect::NONE);
    // A permitted client does not permit another one.
    assert_eq!(
        of(&[1, 4]).denied,
        Some(RuleRef {
            set: RuleOrigin::Admin,
            at: 3
        })
    );
    assert_eq!(
        of(&[]).denied,
        Some(RuleRef {
            set: RuleOrigin::Admin,
            at: 3
        })
    );
    assert_eq!(
        (of(&[1, 2]).preference, of(&[3, 2]).preference, of(&[2, 3]).preference),
        (Preference::Prefer, Preference::Avoid, Preference::Avoid)
    );
    assert_eq!(
        of(&[2, 3]).preference_by,
        Some(RuleRef {
            set: RuleOrigin::Admin,
            at: 2
        })
    );
}

#[test]
fn groups_match_their_members() {
    let rules = [
        Rule {
            gid: Some(100),
            action: Some(Action::Allow),
            ..rule("10-lab")
        },
        Rule {
            action: Some(Action::Deny),
            ..rule("20-rest")
        },
    ];
    assert_eq!(ruled(&rules, &User(1, vec![5, 100]), 1, &[]).denied, None);
    assert!(ruled(&rules, &User(1, vec![5]), 1, &[]).denied.is_some());
}

#[test]
fn rules_without_effect_are_found() {
    let a = Rule {
        action: Some(Action::Allow),
        quota: Some(GIB),
        ..rule("10-a")
    };
    let rules = [
        a,
        Rule {
            uid: Users::NOBODY.and(1, 1),
            action: Some(Action::Deny),
            ..rule("20-b")
        },
        Rule {
            uid: Users::NOBODY.and(1, 1),
            max_class: Some(NEAR),
            ..rule("30-c")
        },
        Rule {
            gid: Some(2),
            uid: Users::NOBODY.and(1, 1),
            max_class: Some(NEAR),
            ..rule("40-d")
        },
        Rule {
            client: DeviceMatch::Ids(1, 2),
            max_class: Some(NEAR),
            ..rule("50-e")
        },
        Rule {
            gid: Some(2),
            reserve: Some(1),
            reserve_for: Some(Beneficiary::Group),
            ..rule("60-f")
        },
        Rule {
            gid: Some(3),
            reserve: Some(1),
            reserve_for: Some(Beneficiary::Group),
            ..rule("70-g")
        },
        Rule {
            gid: Some(2),
            reserve: Some(1),
            reserve_for: Some(Beneficiary::Group),
            provider: DeviceMatch::At(addr(1)),
            ..rule("80-h")
        },
    ];
    let found: Vec<_> = (0..9).map(|at| shadowed(&rules, at)).collect();
    assert_eq!(
        found,
        [
            None,
            Some((Attribute::Action, 0)),
            None,
            Some((Attribute::MaxClass, 2)),
            None,
            None,
            None,
            Some((Attribute::Reserve, 5)),
            None
        ]
    );
}

#[test]
fn one_reserve_per_beneficiary() {
    let rules = [
        Rule {
            reserve: Some(1),
            reserve_for: Some(Beneficiary::Kernel),
            provider: DeviceMatch::At(addr(1)),
            ..rule("10-k")
        },
        Rule {
            reserve: Some(2),
            reserve_for: Some(Beneficiary::Kernel),
            ..rule("20-k")
        },
        Rule {
            gid: Some(1),
            reserve: Some(3),
            reserve_for: Some(Beneficiary::Group),
            ..rule("30-g")
        },
        Rule {
            gid: Some(2),
            reserve: Some(4),
            reserve_for: Some(Beneficiary::Group),
            ..rule("40-g")
        },
        Rule {
            gid: Some(1),
            reserve: Some(5),
            reserve_for: Some(Beneficiary::Group),
            ..rule("50-g")
        },
    ];
    let (one, two) = (function_id(1), function_id(2));
    let of = |function: &FunctionId| -> Vec<(usize, u64)> {
        reserves(&rules, function).map(|(at, _, bytes)| (at, bytes)).collect()
    };
    assert_eq!(of(&one), [(0, 1), (2, 3), (3, 4)]);
    assert_eq!(of(&two), [(1, 2), (2, 3), (3, 4)]);
    assert_eq!(
        (kernel_reserve(&rules, &one), kernel_reserve(&rules, &two)),
        (Some(1), Some(2))
    );
}

// ---- Random rules ----

fn device() -> impl Strategy<Value = DeviceMatch> {
    prop_oneof![
        3 => Just(DeviceMatch::Any),
        2 => (1u8..4).prop_map(|bus| DeviceMatch::At(addr(bus))),
        1 => (1u8..4).prop_map(|bus| DeviceMatch::Ids(0x1234, 0x1000 + u16::from(bus))),
    ]
}

fn any_action() -> impl Strategy<Value = Option<Action>> {
    prop_oneof![
        Just(None),
        Just(Some(Action::Allow)),
        Just(Some(Action::Deny)),
        Just(Some(Action::Prefer)),
        Just(Some(Action::Avoid)),
    ]
}

fn class() -> impl Strategy<Value = PathClass> {
    prop_oneof![Just(NEAR), Just(PathClass::Switches), Just(PathClass::HostBridge)]
}

prop_compose! {
    fn any_rule()(
        provider in device(),
        client in device(),
        uid in prop::option::weighted(0.3, (0u32..3, 0u32..2)),
        gid in prop::option::weighted(0.3, 0u32..3),
        action in any_action(),
        max_class in prop::option::weighted(0.4, class()),
    ) -> Rule {
        let uid = uid.and_then(|(first, more)| Users::NOBODY.and(first, first + more));
        Rule { provider, client, uid, gid, action, max_class, ..rule("any") }
    }
}

fn own_rule() -> impl Strategy<Value = Rule> {
    any_rule().prop_map(|rule| Rule {
        uid: None,
        gid: None,
        ..rule
    })
}

fn matches(rule: &Rule, user: &User, provider: u8, client: Option<u8>) -> bool {
    let device = |device: DeviceMatch, bus: Option<u8>| match (device, bus) {
        (DeviceMatch::Any, _) => true,
        (DeviceMatch::At(a), Some(bus)) => a == addr(bus),
        (DeviceMatch::Ids(_, id), Some(bus)) => id == 0x1000 + u16::from(bus),
        _ => false,
    };
    device(rule.provider, Some(provider))
        && device(rule.client, client)
        && rule.uid.is_none_or(|users| users.has(user.0))
        && rule.gid.is_none_or(|gid| user.1.contains(&gid))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..config(3000) })]

    /// Compared with the text of the documentation, for each pair.
    #[test]
    fn rule_effects_match_oracle(
        rules in vec(any_rule(), 0..80),
        uid in 0u32..3,
        groups in vec(0u32..3, 0..3),
        provider in 1u8..4,
        clients in vec((1u8..5, class()), 0..4),
    ) {
        let user = User(uid, groups);
        let effect = ruled(&rules, &user, provider, &clients);
        let pairs: Vec<(Option<u8>, Option<PathClass>)> = if clients.is_empty() {
            vec![(None, None)]
        } else {
            clients.iter().map(|(bus, class)| (Some(*bus), Some(*class))).collect()
        };
        let deciding = |client, sets: fn(&Rule) -> bool| {
            rules.iter().position(|rule| sets(rule) && matches(rule, &user, provider, client))
        };
        let actions: Vec<Option<usize>> = pairs.iter().map(|(client, _)| deciding(*client, |rule| rule.action.is_some())).collect();
        let said = |what| actions.iter().flatten().copied().find(|at| rules[*at].action == Some(what));
        let admin = |at: usize| RuleRef { set: RuleOrigin::Admin, at };
        prop_assert_eq!(effect.denied, said(Action::Deny).map(admin));
        let (preference, by) = match (said(Action::Avoid), said(Action::Prefer)) {
            (Some(at), _) => (Preference::Avoid, Some(admin(at))),
            (None, Some(at)) => (Preference::Prefer, Some(admin(at))),
            (None, None) => (Preference::Neutral, None),
        };
        prop_assert_eq!((effect.preference, effect.preference_by), (preference, by));
        let too_far = pairs.iter().find_map(|(client, class)| {
            let at = deciding(*client, |rule| rule.max_class.is_some())?;
            (*class > rules[at].max_class).then_some(admin(at))
        });
        prop_assert_eq!(effect.too_far, too_far);
    }

    /// With rules of its own a file gets no provider that it would not get without them, if that were the only
    /// provider. It gets no provider that the administrator avoids if there is another one.
    #[test]
    fn file_rules_never_widen_access(
        rules in vec(any_rule(), 0..6),
        own in vec(own_rule(), 0..6),
        uid in 0u32..3,
        clients in vec((1u8..5, class()), 0..4),
        strategy in prop_oneof![Just(Chooser::Nearest), Just(Chooser::Spread), Just(Chooser::Pack)],
        free in vec(1u64..5, 3),
    ) {
        let user = User(uid, vec![]);
        let functions: Vec<FunctionId> = clients.iter().map(|(bus, _)| function_id(*bus)).collect();
        let paths: Vec<Path> = clients.iter().map(|(_, class)| path(*class)).collect();
        let who = Applicable::to(&rules, &user);
        let candidates = |with_own: bool| -> Vec<Candidate<'_>> {
            (1u8..4).map(|bus| {
                let mut effect = RuleEffect::NONE;
                effect.add(RuleOrigin::Admin, &rules, &who, &function_id(bus), &functions, &paths);
                if with_own {
                    effect.add(RuleOrigin::File, &own, &Applicable::ALL, &function_id(bus), &functions, &paths);
                }
                let free = free[usize::from(bus) - 1];
                Candidate { id: u32::from(bus), live: true, start: 0, size: 8, free, largest: free, exact: true, paths: &paths, effect }
            }).collect()
        };
        let request = Request { size: 1, align: 1, clients: clients.len(), named: Named::Any, strategy, max_class: None };
        let (with, without) = (candidates(true), candidates(false));
        let serves = |candidate: &Candidate<'_>| decide(&request, std::slice::from_ref(candidate), &mut []).chosen.is_some();
        for (narrow, wide) in with.iter().zip(&without) {
            prop_assert!(!serves(narrow) || serves(wide));
            prop_assert_eq!(narrow.effect.preference, wide.effect.preference);
        }
        let mut verdicts = [Verdict::EMPTY; 3];
        let decision = decide(&request, &with, &mut verdicts);
        if let Some(chosen) = decision.chosen {
            let best = with.iter().filter(|candidate| serves(candidate)).map(|candidate| candidate.effect.preference).min();
            prop_assert_eq!(Some(with[chosen].effect.preference), best);
        } else {
            prop_assert!(matches!(decision.outcome, Outcome::Denied | Outcome::TooFar), "{:?}", decision.outcome);
            // Every refusal names the rule that made it.
            for verdict in &verdicts {
                prop_assert!(verdict.rule.is_some() && matches!(verdict.code, VerdictCode::Denied | VerdictCode::TooFar));
            }
        }
    }
}
