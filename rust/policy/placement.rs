// SPDX-License-Identifier: GPL-2.0

//! The choice of a provider for a buffer.
//!
//! [`decide`] gets a request and one [`Candidate`] per provider. The result is the provider that serves the request, and a
//! [`Verdict`] for every candidate, with the numbers that led to the verdict.
//!
//! A provider is *eligible* if all of these hold:
//!
//! - the request requires no other provider, and the provider is not being removed;
//! - every client can reach the provider, over paths no farther than the request and the rules allow;
//! - the provider has the requested bytes free in one piece, and no rule ([`crate::policy::rule`]) forbids the allocation.
//!
//! The criteria of [`Rank`] choose among the eligible providers, one after the other. Documentation/design/placement.md
//! describes the rules.
//!
//! A decision depends on its arguments alone: equal input gives equal output, and the order of the candidates does not
//! matter.
//!
//! The file is pure: it needs nothing but `core` and the other pure files, allocates nothing, cannot panic, and holds no
//! `unsafe`. The same source is compiled into the module and into the host tests of tests/pure.

use crate::policy::{
    distance::{
        Distance,
        Reach, //
    },
    path::{
        indexed,
        Path,
        PathClass, //
    },
    ranking::load,
    rule_effect::{
        Preference,
        RuleEffect,
        RuleRef, //
    },
    verdict::{
        Choice,
        Outcome,
        Verdict,
        VerdictCode, //
    }, //
};
use core::cmp::{Ordering, Reverse};

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
    /// By the criteria of [`Rank`].
    Nearest,
    /// The least loaded provider first, then by the criteria of [`Rank`].
    Spread,
    /// The most loaded provider first, then by the criteria of [`Rank`].
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
    /// Notes that an allocation of `size` bytes failed, because another request took the memory first.
    ///
    /// The next [`decide`] treats the candidate as if it had no contiguous piece of `size` bytes. Each call excludes one
    /// candidate, so retries end after as many rounds as there are candidates.
    pub(crate) fn refused(&mut self, size: u64) {
        self.largest = self.largest.min(size.saturating_sub(1));
    }

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

/// The criteria that choose among eligible candidates, in the order of their importance. The smaller rank wins.
struct Rank {
    /// The preference of the administrator's rules, then the preference of the file rules.
    preference: (Preference, Preference),
    /// The distance to the clients.
    distance: Distance,
    /// Load in permille.
    load: u64,
    /// Size of the largest contiguous piece. The larger piece wins: more space remains for the next request.
    largest: Reverse<u64>,
    /// The provider's number: the provider that was published first wins.
    id: u32,
}

impl Rank {
    fn of(candidate: &Candidate<'_>, reach: &Reach) -> Self {
        Self {
            preference: (candidate.effect.preference, candidate.effect.file_preference),
            distance: Distance::from(reach),
            load: candidate.load(),
            largest: Reverse(candidate.largest),
            id: candidate.id,
        }
    }

    /// Compares two ranks. Returns the order, and the verdict code of the criterion that decides.
    fn compare(&self, other: &Self, strategy: Strategy) -> (Ordering, VerdictCode) {
        let same = (Ordering::Equal, VerdictCode::Order);
        let (here, there) = (&self.distance, &other.distance);
        let criteria = [
            (self.preference.cmp(&other.preference), VerdictCode::Preference),
            match strategy {
                Strategy::Spread => (self.load.cmp(&other.load), VerdictCode::Load),
                Strategy::Pack => (other.load.cmp(&self.load), VerdictCode::Packed),
                Strategy::Nearest | Strategy::Upstream(_) => same,
            },
            (here.class.cmp(&there.class), VerdictCode::Class),
            (here.hops.cmp(&there.hops), VerdictCode::Hops),
            (here.bandwidth.cmp(&there.bandwidth), VerdictCode::Bandwidth),
            (here.numa.cmp(&there.numa), VerdictCode::Numa),
            (self.load.cmp(&other.load), VerdictCode::Load),
            (self.largest.cmp(&other.largest), VerdictCode::Space),
        ];
        criteria
            .into_iter()
            .find(|(ordering, _)| ordering.is_ne())
            .unwrap_or((self.id.cmp(&other.id), VerdictCode::Order))
    }
}

/// The reason why a candidate cannot serve a request.
struct Objection {
    code: VerdictCode,
    rule: Option<RuleRef>,
    reason: Outcome,
}

/// Returns whether a candidate can serve the request, or the first objection.
///
/// Permanent objections come first: a provider that is both unreachable and full is reported as unreachable.
fn eligible(request: &Request, candidate: &Candidate<'_>, reach: &Reach) -> Result<(), Objection> {
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
    } else if candidate.free < request.size {
        (VerdictCode::Full, None, Outcome::Full)
    } else if candidate.free.saturating_sub(effect.reserved_for_others) < request.size {
        (VerdictCode::Reserved, effect.reserved_by, Outcome::Reserved)
    } else if candidate.exact && candidate.largest < request.size {
        (VerdictCode::Fragmented, None, Outcome::Fragmented)
    } else {
        return Ok(());
    };
    Err(Objection { code, rule, reason })
}

/// The reason why a candidate may win. An earlier variant beats a later one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum By {
    /// The request prefers the candidate.
    AllocRequest,
    /// The kernel chose the candidate.
    Kernel,
    /// The candidate's rank decides.
    Rank,
}

/// Returns the reason why the candidate may win, or `None` if the kernel chose another provider.
///
/// The kernel has no choice if the request requires a provider.
fn contends(request: &Request, candidate: &Candidate<'_>) -> Option<By> {
    match (request.named, request.strategy) {
        (Named::Prefer(id), _) if id == candidate.id => Some(By::AllocRequest),
        (Named::Require(_), _) | (_, Strategy::Nearest | Strategy::Spread | Strategy::Pack) => Some(By::Rank),
        (_, Strategy::Upstream(choice)) => (choice == Some(candidate.id)).then_some(By::Kernel),
    }
}

/// The best candidate found so far.
struct Winner {
    index: usize,
    rank: Rank,
    by: By,
    effect: RuleEffect,
}

/// Returns whether the administrator's rules allow the candidate only if no other candidate can serve. This overrides the
/// request's and the kernel's choice.
fn avoided(effect: &RuleEffect) -> bool {
    effect.preference == Preference::Avoid
}

/// Returns why an eligible candidate lost, and the rule that decided, if a rule did.
fn lost(request: &Request, effect: &RuleEffect, rank: &Rank, winner: &Winner) -> (VerdictCode, Option<RuleRef>) {
    if avoided(effect) && !avoided(&winner.effect) {
        return (VerdictCode::Preference, effect.preference_by);
    }
    match winner.by {
        By::AllocRequest => (VerdictCode::NotNamed, None),
        By::Kernel => (VerdictCode::Upstream, None),
        By::Rank => match rank.compare(&winner.rank, request.strategy).1 {
            VerdictCode::Preference => {
                // The rules either avoid this candidate or prefer the winner.
                let (own, other, by, other_by) = if effect.preference == winner.effect.preference {
                    let other = &winner.effect;
                    (
                        effect.file_preference,
                        other.file_preference,
                        effect.file_preference_by,
                        other.file_preference_by,
                    )
                } else {
                    let other = &winner.effect;
                    (
                        effect.preference,
                        other.preference,
                        effect.preference_by,
                        other.preference_by,
                    )
                };
                let decided = if own == Preference::Avoid && other != Preference::Avoid {
                    by
                } else {
                    other_by
                };
                (VerdictCode::Preference, decided)
            }
            code => (code, None),
        },
    }
}

/// Finds the best candidate that is not among `taken`. With `skip_avoided`, excludes candidates that the rules avoid.
///
/// Returns the winner and the outcome. Without a winner, the outcome is the reason of the candidate that came closest to
/// being eligible.
fn best(
    request: &Request,
    candidates: &[Candidate<'_>],
    taken: &[usize],
    skip_avoided: bool,
) -> (Option<Winner>, Outcome) {
    let mut winner: Option<Winner> = None;
    let mut outcome = Outcome::NoProvider;

    for (index, candidate) in indexed(candidates) {
        if taken.contains(&index) || skip_avoided && avoided(&candidate.effect) {
            continue;
        }
        let Some(by) = contends(request, candidate) else {
            outcome = outcome.max(Outcome::NotUpstream);
            continue;
        };
        let reach = Reach::of(request.clients, candidate.paths);
        if let Err(objection) = eligible(request, candidate, &reach) {
            outcome = outcome.max(objection.reason);
            continue;
        }
        let rank = Rank::of(candidate, &reach);
        let claim = (avoided(&candidate.effect), by);
        let wins = winner
            .as_ref()
            .is_none_or(|winner| match claim.cmp(&(avoided(&winner.effect), winner.by)) {
                Ordering::Less => true,
                Ordering::Equal => rank.compare(&winner.rank, request.strategy).0.is_lt(),
                Ordering::Greater => false,
            });
        if wins {
            winner = Some(Winner {
                index,
                rank,
                by,
                effect: candidate.effect,
            });
        }
        outcome = Outcome::Chosen;
    }
    (winner, outcome)
}

/// Writes a verdict for each candidate.
///
/// `chosen` are the indices of the chosen candidates, and `last` is the worst of them. If `last` is `None`, the kernel
/// chose another provider (`chosen` is empty), or too few candidates can hold a part (`chosen` is not empty).
fn say(
    request: &Request,
    candidates: &[Candidate<'_>],
    chosen: &[usize],
    last: Option<&Winner>,
    verdicts: &mut [Verdict],
) {
    for ((index, candidate), slot) in indexed(candidates).zip(verdicts) {
        let reach = Reach::of(request.clients, candidate.paths);
        let (code, rule) = match (eligible(request, candidate, &reach), last) {
            (Err(objection), _) => (objection.code, objection.rule),
            (Ok(()), Some(_)) if chosen.contains(&index) => {
                let effect = &candidate.effect;
                let preferred = effect.preference == Preference::Prefer;
                (VerdictCode::Chosen, effect.preference_by.filter(|_| preferred))
            }
            (Ok(()), Some(last)) => lost(request, &candidate.effect, &Rank::of(candidate, &reach), last),
            (Ok(()), None) if !chosen.is_empty() => (VerdictCode::TooFew, None),
            // The candidate is eligible, but there is no winner: the kernel chose another provider.
            (Ok(()), None) => (VerdictCode::Upstream, None),
        };
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

/// Chooses a provider.
///
/// Writes the verdict of `candidates[i]` to `verdicts[i]`. If `verdicts` is shorter than `candidates`, writes only that
/// many verdicts; if it is longer, keeps the rest as it is. The choice does not depend on `verdicts`.
///
/// The time is proportional to candidates times clients, the stack usage is constant.
pub(crate) fn decide(request: &Request, candidates: &[Candidate<'_>], verdicts: &mut [Verdict]) -> Choice {
    let (winner, outcome) = best(request, candidates, &[], false);
    let chosen = winner.as_ref().map(|winner| winner.index);
    say(request, candidates, chosen.as_slice(), winner.as_ref(), verdicts);
    Choice { chosen, outcome }
}

/// Chooses up to `picks.len()` providers, the best one first, each for a part of the requested size.
///
/// Returns the number of chosen providers, and the outcome of the last step. If the number is less than `picks.len()`, the
/// outcome says why there is no further provider. With `skip_avoided`, excludes providers that the rules avoid.
///
/// The time is that of [`decide`], multiplied by the number of picks.
pub(crate) fn decide_several(
    request: &Request,
    candidates: &[Candidate<'_>],
    skip_avoided: bool,
    picks: &mut [usize],
    verdicts: &mut [Verdict],
) -> (usize, Outcome) {
    let mut found = 0;
    let mut last = None;
    let mut end = Outcome::NoProvider;
    while found < picks.len() {
        let taken = picks.get(..found).unwrap_or_default();
        let (winner, outcome) = best(request, candidates, taken, skip_avoided);
        end = outcome;
        last = winner;
        let (Some(winner), Some(slot)) = (&last, picks.get_mut(found)) else {
            break;
        };
        *slot = winner.index;
        found = found.saturating_add(1);
    }
    say(
        request,
        candidates,
        picks.get(..found).unwrap_or_default(),
        last.as_ref(),
        verdicts,
    );
    (found, end)
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_placement))]
mod tests {
    use super::*;

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

    /// Returns the index of the chosen candidate and the verdict codes of two candidates.
    fn codes(request: &Request, candidates: &[Candidate<'_>; 2]) -> (Option<usize>, [VerdictCode; 2]) {
        let mut verdicts = [Verdict::EMPTY; 2];
        let decision = decide(request, candidates, &mut verdicts);
        (decision.chosen, verdicts.map(|verdict| verdict.code))
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
            (|c| c.free = 3 * PAGE, VerdictCode::Full, Outcome::Full),
            (|c| c.refused(4 * PAGE), VerdictCode::Fragmented, Outcome::Fragmented),
        ];
        for (spoil, code, outcome) in cases {
            let mut pair = [candidate(1, &near), candidate(2, &near)];
            spoil(&mut pair[0]);
            assert_eq!(codes(&REQUEST, &pair), (Some(1), [code, VerdictCode::Chosen]));
            spoil(&mut pair[1]);
            let decision = decide(&REQUEST, &pair, &mut []);
            assert!(decision.chosen.is_none() && decision.outcome == outcome);
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
        assert!(decide(&REQUEST, &[], &mut []).outcome == Outcome::NoProvider);
    }

    #[test]
    fn several_picks_are_best_first() {
        let (near, far) = ([NEAR], [Path { hops: 9, ..NEAR }]);
        let mut all = [candidate(1, &far), candidate(2, &near), candidate(3, &near)];
        all[2].free -= PAGE;
        let mut verdicts = [Verdict::EMPTY; 3];
        let mut picks = [0; 2];
        let answer = decide_several(&REQUEST, &all, false, &mut picks, &mut verdicts);
        assert_eq!((answer, picks), ((2, Outcome::Chosen), [1, 2]));
        let codes = verdicts.map(|verdict| verdict.code);
        assert_eq!(codes, [VerdictCode::Hops, VerdictCode::Chosen, VerdictCode::Chosen]);
        // With one pick, the result is the choice of `decide()`.
        let mut one = [9];
        assert_eq!(decide_several(&REQUEST, &all, false, &mut one, &mut []).0, 1);
        assert_eq!(decide(&REQUEST, &all, &mut []).chosen, Some(one[0]));
        // One provider is full. The free memory of the others does not suffice.
        all[0].free = 0;
        let mut three = [0; 3];
        let answer = decide_several(&REQUEST, &all, false, &mut three, &mut verdicts);
        assert_eq!(answer, (2, Outcome::Full));
        let codes = verdicts.map(|verdict| verdict.code);
        assert_eq!(codes, [VerdictCode::Full, VerdictCode::TooFew, VerdictCode::TooFew]);
        // A provider that the rules avoid comes last, and is excluded with `skip_avoided`.
        all[1].effect.preference = Preference::Avoid;
        assert_eq!(decide_several(&REQUEST, &all, false, &mut picks, &mut []).0, 2);
        assert_eq!(picks, [2, 1]);
        assert_eq!(decide_several(&REQUEST, &all, true, &mut picks, &mut []).0, 1);
    }
}
