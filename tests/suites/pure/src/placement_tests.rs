// SPDX-License-Identifier: MIT OR Apache-2.0

//! Placement: named cases, and properties of random providers and random machines.

use std::slice;

use crate::decision::{
    Choice,
    decide,
    fit,
    ranking, //
};
use crate::oracle::{
    Provider,
    choose, //
};
use crate::policy::path::{
    Path,
    PathClass, //
};
use crate::policy::rule_effect::{
    OverLimit,
    Preference,
    RuleEffect,
    RuleOrigin,
    RuleRef, //
};
use crate::policy::{
    placement::{
        Candidate,
        Named,
        Request,
        Strategy as Chooser, //
    },
    ranking::{
        RankedProvider,
        best, //
    },
    verdict::{
        Outcome,
        Verdict,
        VerdictCode, //
    }, //
};
use crate::tree::tree;
use p2pmem_proptest::config;
use proptest::collection::vec;
use proptest::prelude::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn run(request: &Request, providers: &[Provider]) -> (Choice, Vec<Verdict>) {
    let candidates: Vec<Candidate<'_>> = providers.iter().map(Provider::candidate).collect();
    let mut verdicts = vec![Verdict::EMPTY; providers.len()];
    let decision = decide(request, &candidates, &mut verdicts);
    (decision, verdicts)
}

fn path(class: PathClass, hops: u32) -> Path {
    Path {
        class,
        hops,
        acs_redirect: false,
        bus_addr: class <= PathClass::Switches,
        bandwidth: 7_876,
        numa_distance: 10,
        bridge: None,
    }
}

fn provider(id: u32, paths: &[Path]) -> Provider {
    Provider {
        id,
        live: true,
        start: 0,
        size: 256 * MIB,
        free: 256 * MIB,
        largest: 256 * MIB,
        paths: paths.to_vec(),
        effect: RuleEffect::NONE,
    }
}

fn request(clients: usize) -> Request {
    Request {
        size: 16 * MIB,
        align: 4 * KIB,
        clients,
        named: Named::Any,
        strategy: Chooser::Nearest,
        max_class: None,
    }
}

fn codes(verdicts: &[Verdict]) -> Vec<VerdictCode> {
    verdicts.iter().map(|verdict| verdict.code).collect()
}

#[track_caller]
fn check(request: &Request, providers: &[Provider], outcome: Outcome, expected: &[VerdictCode]) -> Vec<Verdict> {
    let (decision, verdicts) = run(request, providers);
    assert_eq!((decision.outcome, codes(&verdicts)), (outcome, expected.to_vec()));
    assert_eq!(
        decision.chosen,
        expected.iter().position(|code| *code == VerdictCode::Chosen)
    );
    verdicts
}

use VerdictCode as V;
/// Makes a provider a little worse.
type Worsen = fn(&mut Provider);
const NEAR: PathClass = PathClass::SameSwitch;
const FAR: PathClass = PathClass::HostBridge;

#[test]
fn criteria_decide_in_order() {
    // The largest piece is not all free memory.
    let at = |id| Provider {
        largest: 64 * MIB,
        ..provider(id, &[path(NEAR, 4)])
    };
    let chosen = at(9);
    let spoil: [(V, Worsen); 6] = [
        (V::Class, |p| p.paths[0].class = PathClass::Switches),
        (V::Hops, |p| p.paths[0].hops += 1),
        (V::Bandwidth, |p| p.paths[0].bandwidth -= 1),
        (V::Numa, |p| p.paths[0].numa_distance += 1),
        (V::Load, |p| p.free -= p.size / 1000 + 1),
        (V::Space, |p| p.largest -= 4 * KIB),
    ];
    for (ranked, (code, worsen)) in spoil.iter().enumerate() {
        let mut other = at(3);
        worsen(&mut other);
        // The other provider is better by all later criteria, which do not count.
        let mut chosen = chosen.clone();
        for (_, worsen) in &spoil[ranked + 1..] {
            worsen(&mut chosen);
        }
        check(
            &request(1),
            &[other.clone(), chosen.clone()],
            Outcome::Chosen,
            &[*code, V::Chosen],
        );
        check(&request(1), &[chosen, other], Outcome::Chosen, &[V::Chosen, *code]);
    }
    check(
        &request(1),
        &[provider(9, &[path(NEAR, 4)]), provider(3, &[path(NEAR, 4)])],
        Outcome::Chosen,
        &[V::Order, V::Chosen],
    );
}

#[test]
fn each_exclusion_has_its_verdict() {
    let good = provider(1, &[path(FAR, 6)]);
    let near = provider(2, &[path(NEAR, 4)]);
    let req = Request {
        max_class: Some(FAR),
        ..request(1)
    };
    let cases: [(V, Outcome, Provider); 6] = [
        (
            V::Removing,
            Outcome::Removing,
            Provider {
                live: false,
                ..near.clone()
            },
        ),
        (
            V::Unreachable,
            Outcome::Unreachable,
            Provider {
                paths: vec![path(PathClass::Unreachable, 4)],
                ..near.clone()
            },
        ),
        (
            V::TooFar,
            Outcome::TooFar,
            Provider {
                paths: vec![path(PathClass::NumaNode, 4)],
                ..near.clone()
            },
        ),
        (
            V::TooSmall,
            Outcome::TooSmall,
            Provider {
                size: 16 * MIB - 1,
                ..near.clone()
            },
        ),
        (
            V::Full,
            Outcome::Full,
            Provider {
                free: 16 * MIB - 1,
                ..near.clone()
            },
        ),
        (
            V::Fragmented,
            Outcome::Fragmented,
            Provider {
                largest: 16 * MIB - 1,
                ..near.clone()
            },
        ),
    ];
    for (code, outcome, bad) in cases {
        check(&req, &[bad.clone(), good.clone()], Outcome::Chosen, &[code, V::Chosen]);
        check(&req, &[bad], outcome, &[code]);
    }
    check(&req, &[], Outcome::NoProvider, &[]);
    let exact = Provider {
        size: 16 * MIB,
        free: 16 * MIB,
        largest: 16 * MIB,
        ..near
    };
    check(&req, &[exact], Outcome::Chosen, &[V::Chosen]);
}

#[test]
fn only_full_and_fragmented_are_out_of_space() {
    for (outcome, passes) in [
        (Outcome::NoProvider, false),
        (Outcome::NoSuchProvider, false),
        (Outcome::NotUpstream, false),
        (Outcome::Removing, false),
        (Outcome::Unreachable, false),
        (Outcome::TooFar, false),
        (Outcome::TooSmall, false),
        (Outcome::Full, true),
        (Outcome::Fragmented, true),
        (Outcome::Chosen, false),
    ] {
        assert_eq!(outcome.is_out_of_space(), passes, "{outcome:?}");
    }
    // A full provider is a better reason than many unreachable ones.
    let full = Provider {
        free: 0,
        largest: 0,
        ..provider(1, &[path(FAR, 6)])
    };
    let out_of_reach = provider(2, &[path(PathClass::Unreachable, 0)]);
    check(
        &request(1),
        &[full, out_of_reach],
        Outcome::Full,
        &[V::Full, V::Unreachable],
    );
}

#[test]
fn farthest_client_decides_class() {
    let lopsided = provider(1, &[path(PathClass::SameDevice, 0), path(FAR, 4)]);
    let middle = provider(2, &[path(PathClass::Switches, 6), path(PathClass::Switches, 6)]);
    let verdicts = check(
        &request(2),
        &[lopsided, middle],
        Outcome::Chosen,
        &[V::Class, V::Chosen],
    );
    assert_eq!((verdicts[0].worst_client, verdicts[0].class), (1, Some(FAR)));
    assert_eq!((verdicts[0].hops, verdicts[1].hops), (4, 12));
}

#[test]
fn required_provider_has_no_fallback() {
    let near = provider(1, &[path(NEAR, 4)]);
    let far = provider(2, &[path(FAR, 6)]);
    let both = [near.clone(), far.clone()];
    let req = Request {
        named: Named::Require(2),
        ..request(1)
    };
    check(&req, &both, Outcome::Chosen, &[V::NotNamed, V::Chosen]);
    let full = [near.clone(), Provider { free: 0, ..far.clone() }];
    check(&req, &full, Outcome::Full, &[V::NotNamed, V::Full]);
    let leaving = [Provider { live: false, ..near }, far];
    check(
        &Request {
            named: Named::Require(7),
            ..req
        },
        &leaving,
        Outcome::NoSuchProvider,
        &[V::NotNamed, V::NotNamed],
    );
    // With a required provider, the kernel's choice has no effect.
    let upstream = Request {
        strategy: Chooser::Upstream(Some(1)),
        ..req
    };
    check(&upstream, &both, Outcome::Chosen, &[V::NotNamed, V::Chosen]);
}

#[test]
fn preferred_provider_is_tried_first() {
    let near = provider(1, &[path(NEAR, 4)]);
    let far = provider(2, &[path(FAR, 6)]);
    let full = Provider { free: 0, ..far.clone() };
    let req = Request {
        named: Named::Prefer(2),
        ..request(1)
    };
    check(
        &req,
        &[near.clone(), far.clone()],
        Outcome::Chosen,
        &[V::NotNamed, V::Chosen],
    );
    check(
        &req,
        &[far.clone(), near.clone()],
        Outcome::Chosen,
        &[V::Chosen, V::NotNamed],
    );
    check(
        &req,
        &[near.clone(), full.clone()],
        Outcome::Chosen,
        &[V::Chosen, V::Full],
    );
    // A preferred provider must meet the same conditions as others.
    let gone = Provider {
        live: false,
        ..near.clone()
    };
    check(&req, &[gone, far.clone()], Outcome::Chosen, &[V::Removing, V::Chosen]);
    // The caller's preference comes before the kernel's choice, and the kernel's choice before the rank.
    let best = provider(3, &[path(PathClass::SameDevice, 0)]);
    let req = Request {
        strategy: Chooser::Upstream(Some(1)),
        ..req
    };
    check(
        &req,
        &[near.clone(), far, best.clone()],
        Outcome::Chosen,
        &[V::NotNamed, V::Chosen, V::NotNamed],
    );
    check(
        &req,
        &[near.clone(), full.clone(), best.clone()],
        Outcome::Chosen,
        &[V::Chosen, V::Full, V::Upstream],
    );
    let near_full = Provider { largest: 0, ..near };
    check(
        &req,
        &[near_full, full, best],
        Outcome::Fragmented,
        &[V::Fragmented, V::Full, V::Upstream],
    );
}

#[test]
fn upstream_choice_has_no_fallback() {
    let near = provider(1, &[path(NEAR, 4)]);
    let far = provider(2, &[path(FAR, 6)]);
    let ask = |choice| Request {
        strategy: Chooser::Upstream(choice),
        ..request(1)
    };
    let both = [near.clone(), far.clone()];
    check(&ask(Some(2)), &both, Outcome::Chosen, &[V::Upstream, V::Chosen]);
    check(&ask(Some(1)), &both, Outcome::Chosen, &[V::Chosen, V::Upstream]);
    check(&ask(Some(7)), &both, Outcome::NotUpstream, &[V::Upstream, V::Upstream]);
    check(&ask(None), &both, Outcome::NotUpstream, &[V::Upstream, V::Upstream]);
    check(&ask(None), &[], Outcome::NoProvider, &[]);
    let full = Provider {
        free: MIB,
        ..far.clone()
    };
    check(
        &ask(Some(2)),
        &[near.clone(), full],
        Outcome::Full,
        &[V::Upstream, V::Full],
    );
    let small = Provider {
        size: MIB,
        free: MIB,
        largest: MIB,
        ..far
    };
    let near_full = Provider { free: MIB, ..near };
    check(
        &ask(Some(2)),
        &[near_full, small],
        Outcome::TooSmall,
        &[V::Full, V::TooSmall],
    );
}

#[test]
fn unknown_values_rank_below_known_ones() {
    let mut unknown = provider(1, &[path(NEAR, 4)]);
    let known = provider(2, &[path(NEAR, 4)]);
    unknown.paths[0].bandwidth = 0;
    check(
        &request(1),
        &[unknown.clone(), known.clone()],
        Outcome::Chosen,
        &[V::Bandwidth, V::Chosen],
    );
    unknown.paths[0].bandwidth = known.paths[0].bandwidth;
    unknown.paths[0].numa_distance = 0;
    check(&request(1), &[unknown, known], Outcome::Chosen, &[V::Numa, V::Chosen]);
    // A link of unknown bandwidth is not a narrow link, and a client without a node is near no provider.
    let mut half = provider(1, &[path(NEAR, 4), path(NEAR, 4)]);
    half.paths[0].bandwidth = 0;
    half.paths[1].numa_distance = 0;
    let verdicts = check(&request(2), &[half], Outcome::Chosen, &[V::Chosen]);
    assert_eq!((verdicts[0].bandwidth, verdicts[0].numa_distance), (7_876, 10));
}

#[test]
fn without_clients_load_and_space_decide() {
    let busy = Provider {
        free: 128 * MIB,
        largest: 128 * MIB,
        ..provider(1, &[])
    };
    let idle = Provider {
        size: 64 * MIB,
        free: 63 * MIB,
        largest: 32 * MIB,
        ..provider(2, &[])
    };
    let verdicts = check(&request(0), &[busy, idle], Outcome::Chosen, &[V::Load, V::Chosen]);
    assert_eq!(
        (verdicts[1].class, verdicts[1].class_raw(), verdicts[1].worst_client),
        (None, 0, 0)
    );
    // Paths to functions that are not clients do not count.
    let stray = provider(1, &[path(PathClass::Unreachable, 4)]);
    check(
        &Request {
            max_class: Some(NEAR),
            ..request(0)
        },
        &[stray],
        Outcome::Chosen,
        &[V::Chosen],
    );
}

#[test]
fn alignment_applies_to_bar_address() {
    let req = |align| Request { align, ..request(0) };
    let at = |start, size| Provider {
        start,
        size,
        free: size,
        largest: size,
        ..provider(1, &[])
    };
    check(&req(GIB), &[at(0, 16 * MIB)], Outcome::Chosen, &[V::Chosen]);
    check(&req(GIB), &[at(4 * KIB, GIB)], Outcome::TooSmall, &[V::TooSmall]);
    check(&req(GIB), &[at(GIB - MIB, 17 * MIB)], Outcome::Chosen, &[V::Chosen]);
    check(
        &req(GIB),
        &[at(GIB - MIB, 17 * MIB - 1)],
        Outcome::TooSmall,
        &[V::TooSmall],
    );
    for align in [0, 1] {
        check(&req(align), &[at(4 * KIB, 16 * MIB)], Outcome::Chosen, &[V::Chosen]);
    }
}

#[test]
fn missing_path_is_unreachable() {
    let short = provider(1, &[path(NEAR, 4)]);
    let whole = provider(2, &[path(FAR, 6), path(FAR, 6)]);
    let verdicts = check(
        &request(2),
        &[short, whole],
        Outcome::Chosen,
        &[V::Unreachable, V::Chosen],
    );
    assert_eq!(verdicts[0].worst_client, 1);
}

#[test]
fn refusal_selects_next_best() {
    let providers = [
        provider(1, &[path(FAR, 6)]),
        provider(2, &[path(NEAR, 4)]),
        provider(3, &[path(PathClass::Unreachable, 4)]),
    ];
    let mut candidates: Vec<Candidate<'_>> = providers.iter().map(Provider::candidate).collect();
    let mut verdicts = [Verdict::EMPTY; 3];
    let req = request(1);
    let mut order = Vec::new();
    for _ in &providers {
        if let Some(chosen) = decide(&req, &candidates, &mut verdicts).chosen {
            order.push(candidates[chosen].id);
            refuse(&mut candidates[chosen], req.size);
        }
    }
    assert_eq!(order, [2, 1]);
    let decision = decide(&req, &candidates, &mut verdicts);
    assert_eq!((decision.chosen, decision.outcome), (None, Outcome::Fragmented));
    assert_eq!(codes(&verdicts), [V::Fragmented, V::Fragmented, V::Unreachable]);
}

#[test]
fn extreme_values_do_not_overflow() {
    let everything = Provider {
        start: u64::MAX,
        size: u64::MAX,
        free: u64::MAX,
        largest: u64::MAX,
        ..provider(1, &[])
    };
    let huge = Request {
        size: u64::MAX,
        align: 1,
        ..request(0)
    };
    check(&huge, slice::from_ref(&everything), Outcome::Chosen, &[V::Chosen]);
    check(
        &Request { align: 1 << 63, ..huge },
        slice::from_ref(&everything),
        Outcome::TooSmall,
        &[V::TooSmall],
    );
    check(
        &Request {
            size: 0,
            align: u64::MAX,
            ..huge
        },
        &[everything],
        Outcome::Chosen,
        &[V::Chosen],
    );
    let nothing = Provider {
        size: 0,
        free: 0,
        largest: 0,
        ..provider(2, &[])
    };
    check(
        &request(0),
        slice::from_ref(&nothing),
        Outcome::TooSmall,
        &[V::TooSmall],
    );
    check(
        &Request { size: 0, ..request(0) },
        &[nothing],
        Outcome::Chosen,
        &[V::Chosen],
    );
    // More free bytes than the size: a caller's error, which counts as an idle provider.
    let odd = Provider {
        free: u64::MAX,
        ..provider(3, &[])
    };
    check(
        &request(0),
        &[odd, provider(4, &[])],
        Outcome::Chosen,
        &[V::Chosen, V::Order],
    );
    // One id twice: a caller's error too, with a single choice.
    check(
        &request(0),
        &[provider(1, &[]), provider(1, &[])],
        Outcome::Chosen,
        &[V::Chosen, V::Order],
    );
    // Loads of providers whose size times 1,000 does not fit into 64 bits.
    let large = |id, free| Provider {
        size: u64::MAX,
        free,
        largest: GIB,
        ..provider(id, &[])
    };
    check(
        &request(0),
        &[large(1, u64::MAX / 4), large(2, u64::MAX / 2)],
        Outcome::Chosen,
        &[V::Load, V::Chosen],
    );
    let far = vec![path(PathClass::System, u32::MAX); 64];
    let verdicts = check(&request(64), &[provider(5, &far)], Outcome::Chosen, &[V::Chosen]);
    assert_eq!(verdicts[0].hops, u32::MAX);
}

#[test]
fn verdict_array_may_have_any_length() {
    let providers = [provider(1, &[path(FAR, 6)]), provider(2, &[path(NEAR, 4)])];
    let candidates: Vec<Candidate<'_>> = providers.iter().map(Provider::candidate).collect();
    for len in 0..4 {
        let mut verdicts = vec![Verdict::EMPTY; len];
        assert_eq!(decide(&request(1), &candidates, &mut verdicts).chosen, Some(1), "{len}");
        assert_eq!(codes(&verdicts)[..len.min(2)], [V::Class, V::Chosen][..len.min(2)]);
        assert!(verdicts[len.min(2)..].iter().all(|verdict| *verdict == Verdict::EMPTY));
    }
}

// ---- Random requests ----

fn class() -> impl Strategy<Value = PathClass> {
    prop_oneof![
        2 => Just(PathClass::SameDevice),
        4 => Just(PathClass::SameSwitch),
        4 => Just(PathClass::Switches),
        4 => Just(PathClass::HostBridge),
        2 => Just(PathClass::NumaNode),
        2 => Just(PathClass::System),
        1 => Just(PathClass::Unreachable),
    ]
}

/// Returns one of few values, so that ties are frequent, or an extreme.
fn few(extreme: u64) -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0u64..4, 3 => Just(1000u64), 1 => Just(extreme), 1 => any::<u64>()]
}

prop_compose! {
    fn any_path()(class in class(), hops in prop_oneof![9 => 0u32..3, 1 => any::<u32>()],
                  bandwidth in prop_oneof![9 => 0u32..3, 1 => any::<u32>()],
                  numa_distance in prop_oneof![9 => prop::sample::select(vec![0u32, 10, 20]), 1 => any::<u32>()]) -> Path {
        Path { bandwidth, numa_distance, ..path(class, hops) }
    }
}

/// Paths to `clients` clients. In half of the cases all are equal, so that later criteria decide.
fn paths(clients: usize) -> impl Strategy<Value = Vec<Path>> {
    prop_oneof![
        4 => vec(any_path(), clients),
        4 => prop_oneof![Just(path(NEAR, 2)), any_path()].prop_map(move |path| vec![path; clients]),
        1 => vec(any_path(), 0..=clients),
    ]
}

fn preference() -> impl Strategy<Value = Preference> {
    prop_oneof![1 => Just(Preference::Prefer), 6 => Just(Preference::Neutral), 1 => Just(Preference::Avoid)]
}

/// Possible effects of rules on a provider; often none.
fn effect() -> impl Strategy<Value = RuleEffect> {
    let rule = |set| prop::option::weighted(0.08, (0usize..9).prop_map(move |at| RuleRef { set, at }));
    let some = (
        rule(RuleOrigin::Admin),
        rule(RuleOrigin::File),
        (rule(RuleOrigin::Admin), prop::bool::weighted(0.05)),
        (
            rule(RuleOrigin::Admin),
            prop_oneof![3 => Just(0u64), 1 => few(u64::MAX)],
        ),
        (preference(), preference()),
    )
        .prop_map(
            |(
                denied,
                too_far,
                (over, over_cgroup),
                (reserved_by, reserved_for_others),
                (preference, file_preference),
            )| {
                RuleEffect {
                    denied,
                    too_far,
                    over: over.map(|rule| OverLimit {
                        rule,
                        group: false,
                        used: 1,
                        limit: 1,
                    }),
                    over_cgroup,
                    reserved_for_others,
                    reserved_by,
                    preference,
                    preference_by: Some(RuleRef {
                        set: RuleOrigin::Admin,
                        at: 77,
                    }),
                    file_preference,
                    file_preference_by: Some(RuleRef {
                        set: RuleOrigin::File,
                        at: 78,
                    }),
                }
            },
        );
    prop_oneof![1 => Just(RuleEffect::NONE), 1 => some]
}

/// Providers with ids in a random order, some of them with equal properties.
fn providers(clients: usize) -> impl Strategy<Value = Vec<Provider>> {
    let shape = (
        prop::bool::weighted(0.9),
        prop_oneof![3 => Just(0u64), 1 => 0u64..9, 1 => any::<u64>()],
        few(u64::MAX),
        few(u64::MAX),
        few(u64::MAX),
        paths(clients),
        effect(),
    );
    vec((shape, any::<prop::sample::Index>(), prop::bool::weighted(0.3)), 0..12)
        .prop_map(|raw| {
            let mut made: Vec<Provider> = Vec::new();
            for ((live, start, size, free, largest, paths, effect), twin, copies) in raw {
                let id = u32::try_from(made.len() + 1).unwrap();
                let next = if copies && !made.is_empty() {
                    Provider {
                        id,
                        ..twin.get(&made).clone()
                    }
                } else {
                    let free = free.min(size);
                    Provider {
                        id,
                        live,
                        start,
                        size,
                        free,
                        largest: largest.min(free),
                        paths,
                        effect,
                    }
                };
                made.push(next);
            }
            made
        })
        .prop_shuffle()
}

fn named() -> impl Strategy<Value = Named> {
    prop_oneof![
        5 => Just(Named::Any),
        1 => (0u32..13).prop_map(Named::Require),
        2 => (0u32..13).prop_map(Named::Prefer),
    ]
}

fn chooser() -> impl Strategy<Value = Chooser> {
    prop_oneof![3 => Just(Chooser::Nearest), 1 => Just(Chooser::Spread), 1 => Just(Chooser::Pack), 1 => prop::option::of(0u32..13).prop_map(Chooser::Upstream)]
}

prop_compose! {
    fn any_request(clients: usize)(
        size in prop_oneof![2 => Just(1u64), 2 => few(u64::MAX)],
        align in prop_oneof![Just(0u64), Just(1), Just(2), Just(8), (0u32..64).prop_map(|shift| 1 << shift)],
        named in named(),
        strategy in chooser(),
        max_class in prop::option::weighted(0.3, class()),
    ) -> Request {
        Request { size, align, clients, named, strategy, max_class }
    }
}

fn clients() -> impl Strategy<Value = usize> {
    prop_oneof![2 => Just(0usize), 8 => 1usize..4, 1 => Just(64usize)]
}

pub(crate) fn cases() -> impl Strategy<Value = (Request, Vec<Provider>)> {
    clients().prop_flat_map(|clients| (any_request(clients), providers(clients)))
}

/// Checks that a verdict about a provider is true: the numbers, and the reason.
fn verdict_is_true(
    request: &Request,
    provider: &Provider,
    chosen: Option<&Provider>,
    verdict: &Verdict,
) -> Result<(), TestCaseError> {
    prop_assert_eq!(verdict.provider, provider.id);
    prop_assert_eq!(
        (verdict.size, verdict.free, verdict.largest),
        (provider.size, provider.free, provider.largest)
    );
    let known = &provider.paths;
    let hops: u64 = known.iter().map(|path| u64::from(path.hops)).sum();
    prop_assert_eq!(u64::from(verdict.hops), hops.min(u64::from(u32::MAX)));
    let narrowest = known.iter().map(|path| path.bandwidth).filter(|&link| link > 0).min();
    prop_assert_eq!(verdict.bandwidth, narrowest.unwrap_or(0));
    prop_assert_eq!(
        verdict.numa_distance,
        known.iter().map(|path| path.numa_distance).max().unwrap_or(0)
    );
    if known.len() == request.clients {
        let worst = known.iter().map(|path| (path.class, path.hops)).max();
        prop_assert_eq!(verdict.class, worst.map(|(class, _)| class));
        let first = known
            .iter()
            .position(|path| Some((path.class, path.hops)) == worst)
            .unwrap_or(0);
        prop_assert_eq!(verdict.worst_client as usize, first);
    } else {
        prop_assert_eq!(verdict.class, Some(PathClass::Unreachable));
    }

    let broken = provider.broken_rules(request);
    let is_chosen = chosen.is_some_and(|chosen| chosen.id == provider.id);
    prop_assert_eq!(verdict.code == V::Chosen, is_chosen);
    match verdict.code {
        V::Chosen => prop_assert!(broken.is_empty()),
        V::Unreachable
        | V::TooFar
        | V::TooSmall
        | V::Full
        | V::Fragmented
        | V::Removing
        | V::Denied
        | V::Quota
        | V::Reserved
        | V::Cgroup => {
            prop_assert_eq!(Some(&verdict.code), broken.first());
            let effect = &provider.effect;
            match verdict.code {
                V::Denied => prop_assert_eq!(verdict.rule, effect.denied),
                V::Quota => prop_assert_eq!(verdict.rule, effect.over.map(|over| over.rule)),
                V::Reserved => prop_assert_eq!(verdict.rule, effect.reserved_by),
                V::TooFar => prop_assert!(verdict.rule.is_none() || verdict.rule == effect.too_far),
                _ => prop_assert_eq!(verdict.rule, None),
            }
        }
        V::NotNamed => match request.named {
            Named::Require(id) => prop_assert_ne!(id, provider.id),
            Named::Prefer(id) => {
                prop_assert_eq!(chosen.map(|chosen| chosen.id), Some(id));
                prop_assert!(broken.is_empty());
            }
            Named::Any => prop_assert!(false, "no provider was named"),
        },
        V::Upstream => {
            let Chooser::Upstream(choice) = request.strategy else {
                return Err(TestCaseError::fail("the kernel was not called"));
            };
            prop_assert!(broken.is_empty());
            prop_assert_ne!(choice, Some(provider.id));
            prop_assert!(chosen.is_none() || chosen.map(|chosen| chosen.id) == choice);
        }
        code => {
            // It loses by this criterion, and ties by all previous ones.
            prop_assert!(broken.is_empty());
            let (mine, its) = (
                provider.figures(request.strategy),
                chosen.unwrap().figures(request.strategy),
            );
            let ranking = mine
                .iter()
                .zip(&its)
                .position(|((criterion, a), (_, b))| *criterion == code && a != b);
            let Some(ranked) = ranking else {
                return Err(TestCaseError::fail(format!("{mine:?} ties on {code:?}")));
            };
            // A verdict for a preference of a rule names the rule. No other verdict does.
            prop_assert_eq!(verdict.rule.is_some(), code == V::Preference);
            prop_assert_eq!(&mine[..ranked], &its[..ranked]);
            prop_assert!(mine[ranked].1 > its[ranked].1, "{:?} does not lose on {:?}", mine, code);
        }
    }
    Ok(())
}

/// Checks the properties of every decision.
fn decision_is_right(request: &Request, providers: &[Provider]) -> Result<(), TestCaseError> {
    let (decision, verdicts) = run(request, providers);
    let chosen = decision.chosen.map(|index| &providers[index]);
    prop_assert_eq!(chosen.map(|chosen| chosen.id), choose(request, providers));
    prop_assert_eq!(decision.chosen.is_some(), decision.outcome == Outcome::Chosen);
    for (provider, verdict) in providers.iter().zip(&verdicts) {
        verdict_is_true(request, provider, chosen, verdict)?;
    }

    let contenders: Vec<&Provider> = providers
        .iter()
        .filter(|provider| match (request.named, request.strategy) {
            (Named::Require(id), _) => id == provider.id,
            (Named::Prefer(id), _) if id == provider.id => true,
            (_, Chooser::Upstream(choice)) => choice == Some(provider.id),
            _ => true,
        })
        .collect();
    if let Some(chosen) = chosen {
        // The same check without the oracle.
        prop_assert!(chosen.live && chosen.free >= request.size && chosen.largest >= request.size);
        prop_assert_eq!(chosen.paths.len(), request.clients);
        for path in &chosen.paths {
            prop_assert!(path.class != PathClass::Unreachable);
            prop_assert!(request.max_class.is_none_or(|max| path.class <= max));
        }
        prop_assert!(chosen.effect.denied.is_none() && chosen.effect.over.is_none());
        if request.named == Named::Any && request.strategy == Chooser::Nearest {
            let far = |provider: &Provider| provider.paths.iter().map(|path| path.class).max();
            let as_wanted = |other: &&Provider| {
                (other.effect.preference, other.effect.file_preference)
                    == (chosen.effect.preference, chosen.effect.file_preference)
            };
            for other in providers
                .iter()
                .filter(|provider| provider.eligible(request))
                .filter(as_wanted)
            {
                prop_assert!(far(chosen) <= far(other), "{} is nearer and fits", other.id);
            }
        }
    } else {
        prop_assert!(contenders.iter().all(|provider| !provider.eligible(request)));
        // The error is ENOSPC exactly if a provider has no other deficiency than space.
        let lacks_space = contenders.iter().any(|provider| {
            let broken = provider.broken_rules(request);
            broken
                .iter()
                .all(|code| matches!(code, V::Full | V::Reserved | V::Fragmented))
        });
        prop_assert_eq!(decision.outcome.is_out_of_space(), lacks_space);
    }
    Ok(())
}

/// Notes that an allocation of `size` bytes failed, because another request took the memory first.
fn refuse(candidate: &mut Candidate<'_>, size: u64) {
    candidate.largest = candidate.largest.min(size.saturating_sub(1));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..config(6000) })]

    #[test]
    fn decisions_match_oracle((request, providers) in cases()) {
        decision_is_right(&request, &providers)?;
    }

    /// Equal input gives equal output. The order of the candidates changes only their indexes.
    #[test]
    fn candidate_order_does_not_matter(
        (request, providers, shuffled) in cases().prop_flat_map(|(request, providers)| {
            (Just(request), Just(providers.clone()), Just(providers).prop_shuffle())
        }),
    ) {
        let (decision, mut verdicts) = run(&request, &providers);
        let again = run(&request, &providers);
        prop_assert_eq!((decision, &verdicts), (again.0, &again.1));
        let (other, mut others) = run(&request, &shuffled);
        prop_assert_eq!(decision.outcome, other.outcome);
        prop_assert_eq!(decision.chosen.map(|at| providers[at].id), other.chosen.map(|at| shuffled[at].id));
        verdicts.sort_by_key(|verdict| verdict.provider);
        others.sort_by_key(|verdict| verdict.provider);
        prop_assert_eq!(verdicts, others);
    }

    /// A ranking without the request's size, alignment and class serves any request of the strategy *nearest*. Only the free
    /// memory of providers that may be the result is read, once each.
    #[test]
    fn shared_ranking_gives_the_same_choice((request, providers) in cases()) {
        let request = Request { size: request.size.max(1), named: Named::Any, strategy: Chooser::Nearest, ..request };
        let mut providers = providers;
        for provider in &mut providers {
            // No allocator has a block in which the request would not fit even if all memory were free.
            if !provider.could_hold(&request) {
                provider.largest = provider.largest.min(request.size - 1);
            }
        }
        let candidates: Vec<Candidate<'_>> = providers.iter().map(Provider::candidate).collect();
        let shared = ranking(&Request::any(request.clients), &candidates);
        let mut asked = vec![0; providers.len()];
        let chosen = best(&shared, false, |ranked| {
            asked[ranked.index] += 1;
            fit(&request, &candidates[ranked.index]).filter(|_| !ranked.is_beyond(request.max_class))
        });
        prop_assert_eq!(chosen.map(|ranked| ranked.index), run(&request, &providers).0.chosen);
        for (at, ranked) in shared.iter().enumerate() {
            let same = |other: &&RankedProvider| other.place == ranked.place;
            prop_assert_eq!(ranked.equal, shared[at..].iter().take_while(same).count());
            let behind = chosen.is_some_and(|chosen| ranked.place > chosen.place);
            let useless = behind || ranked.place.is_excluded();
            prop_assert_eq!(asked[ranked.index], u32::from(!useless));
        }
    }

    /// Removing a provider that was not chosen, or adding one that cannot serve the request, changes no choice.
    #[test]
    fn rejected_providers_do_not_matter((request, providers) in cases(), gone: prop::sample::Index) {
        let chosen = |providers: &[Provider]| run(&request, providers).0.chosen.map(|at| providers[at].id);
        if !providers.is_empty() {
            let gone = gone.index(providers.len());
            let mut fewer = providers.clone();
            let removed = fewer.remove(gone);
            if chosen(&providers) != Some(removed.id) {
                prop_assert_eq!(chosen(&providers), chosen(&fewer));
            }
        }
    }

    /// Refusing every choice goes through all eligible providers once, from the best to the worst, and ends.
    #[test]
    fn refusals_visit_all_candidates_in_order((request, providers) in cases()) {
        // No provider can refuse zero bytes.
        let request = Request { size: request.size.max(1), ..request };
        let mut remaining = providers.clone();
        let mut candidates: Vec<Candidate<'_>> = providers.iter().map(Provider::candidate).collect();
        let mut rounds = 0;
        loop {
            let decision = decide(&request, &candidates, &mut []);
            prop_assert_eq!(decision.chosen.map(|at| candidates[at].id), choose(&request, &remaining));
            let Some(chosen) = decision.chosen else { break };
            refuse(&mut candidates[chosen], request.size);
            let id = candidates[chosen].id;
            remaining.retain(|provider| provider.id != id);
            rounds += 1;
            prop_assert!(rounds <= providers.len());
        }
        if request.strategy == Chooser::Nearest {
            prop_assert_eq!(rounds, providers.iter().filter(|provider| provider.eligible(&request)).count());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..config(3000) })]

    /// From the machine to the decision: any endpoints as providers, and any as clients.
    #[test]
    fn decisions_in_random_machines_match_oracle(
        tree in tree(),
        at in vec((any::<prop::sample::Index>(), 0u64..4, 0u64..4, prop::bool::weighted(0.9)), 1..8),
        by in vec(any::<prop::sample::Index>(), 0..5),
        request in any_request(0),
    ) {
        let endpoints = tree.endpoints();
        let clients: Vec<usize> = by.iter().map(|by| *by.get(&endpoints)).collect();
        let request = Request { clients: clients.len(), size: 1 + request.size % 3, align: 1, ..request };
        let providers: Vec<Provider> = (1..)
            .zip(&at)
            .map(|(id, (place, free, holes, live))| {
                let node = *place.get(&endpoints);
                let paths = clients.iter().map(|&client| tree.path(node, client)).collect();
                Provider { id, live: *live, start: 0, size: 4, free: *free, largest: free.saturating_sub(*holes), paths, effect: RuleEffect::NONE }
            })
            .collect();
        decision_is_right(&request, &providers)?;
        // Every client reaches the chosen provider in the graph.
        if let Some(chosen) = run(&request, &providers).0.chosen {
            let node = *at[chosen].0.get(&endpoints);
            for &client in &clients {
                prop_assert!(tree.kernel_distance(node, client) >= 0);
            }
        }
    }
}
