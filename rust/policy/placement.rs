// SPDX-License-Identifier: GPL-2.0

//! The choice of a provider for a buffer.
//!
//! [`rank`] says whether a provider can serve a request, and how the request, the rules and the distance rank it.
//! [`best`](super::ranking::best) chooses from such a ranking. [`explain`] gives a [`Verdict`] for every
//! [`Candidate`], with the numbers that led to the choice.
//!
//! A provider is *eligible* if all of these hold:
//!
//! - the request requires no other provider, and the provider is not being removed;
//! - every client can reach the provider, over paths no farther than the request and the rules allow;
//! - the provider has the requested bytes free in one piece, and no rule ([`crate::policy::rule`]) forbids the allocation.
//!
//! The criteria of [`decisive`] choose among the eligible providers, one after the other. Documentation/design/placement.md
//! describes the rules.
//!
//! A decision depends on its arguments alone: equal input gives equal output, and the order of the candidates does not
//! matter.
//!
//! The file is pure: it needs nothing but `core` and the other pure files, allocates nothing, cannot panic, and holds no
//! `unsafe`. The same source is compiled into the module and into the host tests of tests/pure.

use crate::policy::{
    distance::Reach,
    path::{
        indexed,
        Path,
        PathClass, //
    },
    ranking::{
        load,
        By,
        Place,
        RankedProvider, //
    },
    rule_effect::{
        Preference,
        RuleEffect,
        RuleRef, //
    },
    verdict::{
        Outcome,
        Verdict,
        VerdictCode, //
    }, //
};

/// The provider that a request names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    /// No provider: every provider may serve the request.
    Any,
    /// The provider of this number. No other provider may serve the request.
    Require(u32),
    /// The provider of this number if it is eligible, otherwise the best of the others.
    Prefer(u32),
}

/// How to choose among the eligible providers, if the request does not name one of them. The values correspond to
/// `P2PMEM_STRATEGY_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strategy {
    /// By the criteria of [`decisive`].
    Nearest,
    /// The least loaded provider first, then by the criteria of [`decisive`].
    Spread,
    /// The most loaded provider first, then by the criteria of [`decisive`].
    Pack,
    /// The kernel's choice: the number of the provider that `pci_p2pmem_find_many()` returned, or `None` if the kernel
    /// chose no provider.
    Upstream(Option<u32>),
}

/// The part of an allocation request that the choice depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Requested bytes, a multiple of the page size.
    pub(crate) size: u64,
    /// Alignment in bytes, in the address space of [`Candidate::start`]. 0 and 1 mean no alignment.
    pub(crate) align: u64,
    /// Number of clients. Every candidate needs a path to each of them.
    pub(crate) clients: usize,
    /// The named provider.
    pub(crate) named: Named,
    /// How to choose among eligible providers.
    pub(crate) strategy: Strategy,
    /// Farthest allowed path class, or `None` to allow every reachable provider.
    pub(crate) max_class: Option<PathClass>,
}

impl Request {
    /// A request that excludes and prefers no provider, for a ranking that serves any request of the strategy *nearest*.
    pub(crate) fn any(clients: usize) -> Self {
        Self {
            size: 0,
            align: 0,
            clients,
            named: Named::Any,
            strategy: Strategy::Nearest,
            max_class: None,
        }
    }

    /// Returns whether the load of a provider counts before its distance.
    pub(crate) fn is_by_load(&self) -> bool {
        matches!(self.strategy, Strategy::Spread | Strategy::Pack)
    }
}

/// A provider as input of the choice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<'a> {
    /// The provider's number, unique among the candidates. A smaller number means an earlier publication.
    pub(crate) id: u32,
    /// Whether the provider accepts allocations; `false` while it is being removed.
    pub(crate) live: bool,
    /// Offset in bytes of the provider's memory in the BAR, or 0 if the offset is unknown.
    pub(crate) start: u64,
    /// Bytes that the provider manages.
    pub(crate) size: u64,
    /// Bytes of `size` that are free.
    pub(crate) free: u64,
    /// Size in bytes of the largest contiguous piece that an allocation with the request's alignment can get.
    pub(crate) largest: u64,
    /// Whether no piece is larger than `largest`. Without that, a candidate with enough free bytes counts as eligible.
    pub(crate) exact: bool,
    /// The paths to the clients, in the order of the clients. A missing path means that the client cannot reach the
    /// provider.
    pub(crate) paths: &'a [Path],
    /// The effect of the rules on the provider for this request.
    pub(crate) effect: RuleEffect,
}

impl Candidate<'_> {
    /// Returns whether an empty provider of this size could hold the request.
    fn could_hold(&self, request: &Request) -> bool {
        let align = request.align.max(1);
        let past = self.start.checked_rem(align).unwrap_or(0);
        let skipped = if past == 0 { 0 } else { align.saturating_sub(past) };
        self.size.checked_sub(skipped).is_some_and(|room| room >= request.size)
    }

    /// Returns the used part of the provider's bytes, in permille.
    fn load(&self) -> u64 {
        load(self.size, self.free)
    }
}

/// Returns the verdict code of the first criterion by which a candidate differs from another. The criteria choose among
/// eligible candidates, in the order of their importance.
fn decisive(
    strategy: Strategy,
    (one, here): (&Candidate<'_>, &Reach),
    (other, there): (&Candidate<'_>, &Reach),
) -> VerdictCode {
    let preference = |effect: &RuleEffect| (effect.preference, effect.file_preference);
    let other_load = one.load() != other.load();
    let criteria = [
        (
            preference(&one.effect) != preference(&other.effect),
            VerdictCode::Preference,
        ),
        (other_load && strategy == Strategy::Spread, VerdictCode::Load),
        (other_load && strategy == Strategy::Pack, VerdictCode::Packed),
        (here.class() != there.class(), VerdictCode::Class),
        (here.hops != there.hops, VerdictCode::Hops),
        (here.bandwidth != there.bandwidth, VerdictCode::Bandwidth),
        (here.numa_distance != there.numa_distance, VerdictCode::Numa),
        (other_load, VerdictCode::Load),
        // The larger piece wins: more space remains for the next request.
        (one.largest != other.largest, VerdictCode::Space),
    ];
    let decisive = criteria.into_iter().find(|(differs, _)| *differs);
    decisive.map_or(VerdictCode::Order, |(_, code)| code)
}

/// The reason why a candidate cannot serve a request.
struct Objection {
    code: VerdictCode,
    rule: Option<RuleRef>,
    reason: Outcome,
}

/// Returns the first objection to a candidate that does not depend on free memory.
fn exclusion(request: &Request, candidate: &Candidate<'_>, reach: &Reach) -> Option<Objection> {
    let class = reach.class();
    let effect = &candidate.effect;
    let (code, rule, reason) = if matches!(request.named, Named::Require(id) if id != candidate.id) {
        (VerdictCode::NotNamed, None, Outcome::NoSuchProvider)
    } else if !candidate.live {
        (VerdictCode::Removing, None, Outcome::Removing)
    } else if class == Some(PathClass::Unreachable) {
        (VerdictCode::Unreachable, None, Outcome::Unreachable)
    } else if effect.denied.is_some() {
        (VerdictCode::Denied, effect.denied, Outcome::Denied)
    } else if request.max_class.is_some_and(|max| class > Some(max)) {
        (VerdictCode::TooFar, None, Outcome::TooFar)
    } else if effect.too_far.is_some() {
        (VerdictCode::TooFar, effect.too_far, Outcome::TooFar)
    } else if !candidate.could_hold(request) {
        (VerdictCode::TooSmall, None, Outcome::TooSmall)
    } else if let Some(over) = effect.over {
        (VerdictCode::Quota, Some(over.rule), Outcome::Quota)
    } else if effect.over_cgroup {
        (VerdictCode::Cgroup, None, Outcome::Cgroup)
    } else {
        return None;
    };
    Some(Objection { code, rule, reason })
}

/// Returns the first objection to a candidate, or `None` if it can serve the request.
///
/// Permanent objections come first: a provider that is both unreachable and full is reported as unreachable.
fn objection(request: &Request, candidate: &Candidate<'_>, reach: &Reach) -> Option<Objection> {
    let effect = &candidate.effect;
    exclusion(request, candidate, reach).or_else(|| {
        let (code, rule, reason) = if candidate.free < request.size {
            (VerdictCode::Full, None, Outcome::Full)
        } else if candidate.free.saturating_sub(effect.reserved_for_others) < request.size {
            (VerdictCode::Reserved, effect.reserved_by, Outcome::Reserved)
        } else if candidate.exact && candidate.largest < request.size {
            (VerdictCode::Fragmented, None, Outcome::Fragmented)
        } else {
            return None;
        };
        Some(Objection { code, rule, reason })
    })
}

/// Returns the reason why a provider may win, or `None` if the kernel chose another provider.
///
/// The kernel has no choice if the request requires a provider.
fn contends(request: &Request, id: u32) -> Option<By> {
    match (request.named, request.strategy) {
        (Named::Prefer(other), _) if other == id => Some(By::AllocRequest),
        (Named::Require(_), _) | (_, Strategy::Nearest | Strategy::Spread | Strategy::Pack) => Some(By::Rank),
        (_, Strategy::Upstream(choice)) => (choice == Some(id)).then_some(By::Kernel),
    }
}

/// Returns whether the administrator's rules allow the candidate only if no other candidate can serve. This overrides the
/// request's and the kernel's choice.
fn avoided(effect: &RuleEffect) -> bool {
    effect.preference == Preference::Avoid
}

/// Returns the place of candidate number `index` in the ranking for a request. The free memory of the candidate does not count.
pub(crate) fn rank(request: &Request, index: usize, candidate: &Candidate<'_>) -> RankedProvider {
    let reach = Reach::of(request.clients, candidate.paths);
    let by = contends(request, candidate.id).filter(|_| exclusion(request, candidate, &reach).is_none());
    RankedProvider {
        index,
        size: candidate.size,
        place: Place::new(by, &candidate.effect, &reach),
        equal: 0,
    }
}

/// Returns the rule that made two candidates differ in preference. It either avoids the loser or prefers the winner.
fn preferring_rule(loser: &RuleEffect, winner: &RuleEffect) -> Option<RuleRef> {
    let (own, other, by, other_by) = if loser.preference == winner.preference {
        (
            loser.file_preference,
            winner.file_preference,
            loser.file_preference_by,
            winner.file_preference_by,
        )
    } else {
        (
            loser.preference,
            winner.preference,
            loser.preference_by,
            winner.preference_by,
        )
    };
    if own == Preference::Avoid && other != Preference::Avoid {
        by
    } else {
        other_by
    }
}

/// Returns why an eligible candidate lost against `winner`, and the rule that decided, if a rule did.
fn lost(
    request: &Request,
    (candidate, reach): (&Candidate<'_>, &Reach),
    winner: &Candidate<'_>,
) -> (VerdictCode, Option<RuleRef>) {
    if avoided(&candidate.effect) && !avoided(&winner.effect) {
        return (VerdictCode::Preference, candidate.effect.preference_by);
    }
    match contends(request, winner.id) {
        Some(By::AllocRequest) => (VerdictCode::NotNamed, None),
        Some(By::Kernel) => (VerdictCode::Upstream, None),
        _ => {
            let other = Reach::of(request.clients, winner.paths);
            match decisive(request.strategy, (candidate, reach), (winner, &other)) {
                VerdictCode::Preference => (
                    VerdictCode::Preference,
                    preferring_rule(&candidate.effect, &winner.effect),
                ),
                code => (code, None),
            }
        }
    }
}

/// Writes a verdict for each candidate, as many as `verdicts` has space for. Returns the outcome.
///
/// `picks` are the indexes of the providers that were chosen one after the other, the best one first. There are `wanted` of
/// them, or no other candidate is eligible: then the outcome says why there is no further provider.
pub(crate) fn explain(
    request: &Request,
    candidates: &[Candidate<'_>],
    picks: &[usize],
    wanted: usize,
    verdicts: &mut [Verdict],
) -> Outcome {
    let last = picks.last().filter(|_| picks.len() == wanted);
    let last = last.and_then(|&at| candidates.get(at));
    let mut outcome = Outcome::NoProvider;
    let mut slots = verdicts.iter_mut();
    for (index, candidate) in indexed(candidates) {
        let reach = Reach::of(request.clients, candidate.paths);
        let objection = objection(request, candidate, &reach);
        let reason = objection.as_ref().map(|objection| objection.reason);
        outcome = match contends(request, candidate.id) {
            None => outcome.max(Outcome::NotUpstream),
            Some(_) => outcome.max(reason.unwrap_or(outcome)),
        };
        let (code, rule) = match (objection, last) {
            (Some(objection), _) => (objection.code, objection.rule),
            (None, Some(_)) if picks.contains(&index) => {
                let effect = &candidate.effect;
                let preferred = effect.preference == Preference::Prefer;
                (VerdictCode::Chosen, effect.preference_by.filter(|_| preferred))
            }
            (None, Some(last)) => lost(request, (candidate, &reach), last),
            (None, None) if !picks.is_empty() => (VerdictCode::TooFew, None),
            // The candidate is eligible, but there is no winner: the kernel chose another provider.
            (None, None) => (VerdictCode::Upstream, None),
        };
        if let Some(slot) = slots.next() {
            *slot = Verdict {
                provider: candidate.id,
                code,
                rule,
                worst_client: u32::try_from(reach.worst_client).unwrap_or(u32::MAX),
                class: reach.class(),
                hops: reach.hops,
                bandwidth: reach.bandwidth,
                numa_distance: reach.numa_distance,
                size: candidate.size,
                free: candidate.free,
                largest: candidate.largest,
            };
        }
    }
    if last.is_some() {
        Outcome::Chosen
    } else {
        outcome
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_placement))]
mod tests {
    use super::*;

    use crate::policy::ranking::{
        best,
        group,
        Capacity, //
    };

    const PAGE: u64 = 4096;
    const NEAR: Path = Path {
        class: PathClass::SameSwitch,
        hops: 4,
        acs_redirect: false,
        bus_addr: true,
        bandwidth: 8_000,
        numa_distance: 10,
        bridge: None,
    };

    fn candidate(id: u32, paths: &[Path]) -> Candidate<'_> {
        Candidate {
            id,
            live: true,
            start: 0,
            size: 64 * PAGE,
            free: 32 * PAGE,
            largest: 16 * PAGE,
            exact: true,
            paths,
            effect: RuleEffect::NONE,
        }
    }

    const REQUEST: Request = Request {
        size: 4 * PAGE,
        align: PAGE,
        clients: 1,
        named: Named::Any,
        strategy: Strategy::Nearest,
        max_class: None,
    };

    /// Ranks the candidates and chooses up to `picks.len()` of them. Returns their number and the outcome.
    fn decide<const N: usize>(
        request: &Request,
        candidates: &[Candidate<'_>; N],
        picks: &mut [usize],
        verdicts: &mut [Verdict],
    ) -> (usize, Outcome) {
        let mut index = 0;
        let mut ranking = candidates.map(|candidate| {
            index += 1;
            rank(request, index - 1, &candidate)
        });
        // Few elements: objtool warns about a branch of core's sort.
        for at in 1..N {
            for at in (1..=at).rev() {
                if ranking[at - 1].place > ranking[at].place {
                    ranking.swap(at - 1, at);
                }
            }
        }
        group(&mut ranking, request.is_by_load());
        let mut found = 0;
        while found < picks.len() {
            let fit = |ranked: &RankedProvider| {
                let candidate = &candidates[ranked.index];
                let taken = picks[..found].contains(&ranked.index);
                (!taken && candidate.live && candidate.largest >= request.size).then_some(Capacity {
                    free: candidate.free,
                    largest: candidate.largest,
                })
            };
            let Some(next) = best(&ranking, request.strategy == Strategy::Pack, fit) else {
                break;
            };
            picks[found] = next.index;
            found += 1;
        }
        (
            found,
            explain(request, candidates, &picks[..found], picks.len(), verdicts),
        )
    }

    /// Returns the index of the chosen candidate and the verdict codes of two candidates.
    fn codes(request: &Request, candidates: &[Candidate<'_>; 2]) -> (Option<usize>, [VerdictCode; 2]) {
        let mut verdicts = [Verdict::EMPTY; 2];
        let mut pick = [0];
        let (found, _) = decide(request, candidates, &mut pick, &mut verdicts);
        ((found == 1).then_some(pick[0]), verdicts.map(|verdict| verdict.code))
    }

    #[test]
    fn criterion_decides_if_previous_ones_are_equal() {
        let worse = |change: fn(&mut Path)| {
            let mut path = NEAR;
            change(&mut path);
            [path]
        };
        let near = [NEAR];
        for (paths, code) in [
            (worse(|path| path.class = PathClass::Switches), VerdictCode::Class),
            (worse(|path| path.hops += 1), VerdictCode::Hops),
            (worse(|path| path.bandwidth -= 1), VerdictCode::Bandwidth),
            (worse(|path| path.bandwidth = 0), VerdictCode::Bandwidth),
            (worse(|path| path.numa_distance += 1), VerdictCode::Numa),
            (near, VerdictCode::Order),
        ] {
            // The earlier candidate loses, except if the order is the criterion.
            let (lost, won) = if code == VerdictCode::Order { (1, 0) } else { (0, 1) };
            let mut pair = [candidate(1, &near), candidate(2, &near)];
            pair[lost].paths = &paths;
            let (chosen, verdicts) = codes(&REQUEST, &pair);
            assert_eq!(
                (chosen, verdicts[lost], verdicts[won]),
                (Some(won), code, VerdictCode::Chosen)
            );
        }
        let mut pair = [candidate(1, &near), candidate(2, &near)];
        pair[0].free -= PAGE;
        assert_eq!(
            codes(&REQUEST, &pair),
            (Some(1), [VerdictCode::Load, VerdictCode::Chosen])
        );
        let pack = Request {
            strategy: Strategy::Pack,
            ..REQUEST
        };
        assert_eq!(
            codes(&pack, &pair),
            (Some(0), [VerdictCode::Chosen, VerdictCode::Packed])
        );
        let mut pair = [candidate(1, &near), candidate(2, &near)];
        pair[0].largest -= PAGE;
        assert_eq!(
            codes(&REQUEST, &pair),
            (Some(1), [VerdictCode::Space, VerdictCode::Chosen])
        );
    }

    #[test]
    fn each_exclusion_has_its_verdict() {
        let near = [NEAR];
        let gone = [Path {
            class: PathClass::Unreachable,
            ..NEAR
        }];
        type Spoil = fn(&mut Candidate<'_>);
        let cases: [(Spoil, VerdictCode, Outcome); 5] = [
            (|c| c.live = false, VerdictCode::Removing, Outcome::Removing),
            (|c| c.paths = &[], VerdictCode::Unreachable, Outcome::Unreachable),
            (|c| c.size = 3 * PAGE, VerdictCode::TooSmall, Outcome::TooSmall),
            (
                |c| (c.free, c.largest) = (3 * PAGE, 3 * PAGE),
                VerdictCode::Full,
                Outcome::Full,
            ),
            (
                |c| c.largest = 4 * PAGE - 1,
                VerdictCode::Fragmented,
                Outcome::Fragmented,
            ),
        ];
        for (spoil, code, outcome) in cases {
            let mut pair = [candidate(1, &near), candidate(2, &near)];
            spoil(&mut pair[0]);
            assert_eq!(codes(&REQUEST, &pair), (Some(1), [code, VerdictCode::Chosen]));
            spoil(&mut pair[1]);
            assert_eq!(decide(&REQUEST, &pair, &mut [0], &mut []), (0, outcome));
        }
        let pair = [candidate(1, &gone), candidate(2, &near)];
        assert_eq!(
            codes(&REQUEST, &pair),
            (Some(1), [VerdictCode::Unreachable, VerdictCode::Chosen])
        );
        let first = Request {
            named: Named::Require(1),
            ..REQUEST
        };
        assert_eq!(
            codes(&first, &pair),
            (None, [VerdictCode::Unreachable, VerdictCode::NotNamed])
        );
        assert_eq!(decide(&REQUEST, &[], &mut [0], &mut []), (0, Outcome::NoProvider));
    }

    #[test]
    fn several_picks_are_best_first() {
        let (near, far) = ([NEAR], [Path { hops: 9, ..NEAR }]);
        let mut all = [candidate(1, &far), candidate(2, &near), candidate(3, &near)];
        all[2].free -= PAGE;
        let mut verdicts = [Verdict::EMPTY; 3];
        let mut picks = [0; 2];
        let answer = decide(&REQUEST, &all, &mut picks, &mut verdicts);
        assert_eq!((answer, picks), ((2, Outcome::Chosen), [1, 2]));
        let codes = verdicts.map(|verdict| verdict.code);
        assert_eq!(codes, [VerdictCode::Hops, VerdictCode::Chosen, VerdictCode::Chosen]);
        // One provider is full. The free memory of the others does not suffice.
        (all[0].free, all[0].largest) = (0, 0);
        let mut three = [0; 3];
        let answer = decide(&REQUEST, &all, &mut three, &mut verdicts);
        assert_eq!(answer, (2, Outcome::Full));
        let codes = verdicts.map(|verdict| verdict.code);
        assert_eq!(codes, [VerdictCode::Full, VerdictCode::TooFew, VerdictCode::TooFew]);
        // A provider that the rules avoid comes last.
        all[1].effect.preference = Preference::Avoid;
        assert_eq!(decide(&REQUEST, &all, &mut picks, &mut []).0, 2);
        assert_eq!(picks, [2, 1]);
    }
}
