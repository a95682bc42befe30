// SPDX-License-Identifier: GPL-2.0

//! The choice of a provider for a buffer.
//!
//! [`decide`] gets a request and one [`Candidate`] per provider and answers two questions: which
//! provider serves the request, and, for each of the others, why not. A verdict carries the numbers
//! it was reached with, so that it can be checked by whoever reads it.
//!
//! The rules are written down in Documentation/design/placement.md. In short: a provider is
//! *eligible* when it is the named one (if one is required), is not leaving, can be reached by
//! every client over paths no farther than allowed, and has the space in one piece, and when no
//! rule ([`crate::policy::rule`]) stands against it. Among the eligible ones the criteria of [`Rank`]
//! decide, one after the other.
//!
//! Nothing is remembered and nothing is left to chance: equal input gives equal output, and the
//! order of the candidates does not matter.
//!
//! The file is pure: it needs nothing but `core` and [`Path`], allocates nothing, cannot panic, and
//! holds no `unsafe`. The same text is compiled into the module and into the host tests of
//! tests/suites/pure.

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

/// Which provider a request names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    /// None: any will do.
    Any,
    /// This one or none.
    Require(u32),
    /// This one if it is eligible, else the best of the others.
    Prefer(u32),
}

/// Who chooses among the eligible providers when naming one has not settled it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strategy {
    /// The criteria of [`Rank`].
    Nearest,
    /// The least loaded, and only then the criteria of [`Rank`].
    Spread,
    /// The most loaded, and only then the criteria of [`Rank`].
    Pack,
    /// The kernel: the provider that `pci_p2pmem_find_many()` returned, `None` where it returned
    /// none.
    Upstream(Option<u32>),
}

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Bytes, a multiple of the page size.
    pub(crate) size: u64,
    /// Alignment in bytes in the address space in which [`Candidate::start`] counts; 0 and 1 mean
    /// none.
    pub(crate) align: u64,
    /// How many clients there are, that is, how many paths every candidate has to have.
    pub(crate) clients: usize,
    /// Which provider is named.
    pub(crate) named: Named,
    /// Who chooses.
    pub(crate) strategy: Strategy,
    /// Farthest path class allowed; `None` for any that is reachable.
    pub(crate) max_class: Option<PathClass>,
}

/// A provider as far as the choice depends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<'a> {
    /// Its number. Smaller numbers came earlier; no two candidates have the same.
    pub(crate) id: u32,
    /// Whether buffers can be allocated from it at all: `false` while it is being revoked.
    pub(crate) live: bool,
    /// Where its memory begins in the BAR, bytes, 0 where that is not known.
    pub(crate) start: u64,
    /// Bytes it manages.
    pub(crate) size: u64,
    /// Bytes of `size` that are free.
    pub(crate) free: u64,
    /// Largest contiguous piece, bytes, that an allocation with the request's alignment could get.
    pub(crate) largest: u64,
    /// Its path to each client, in the order of the clients. A path that is missing is one that
    /// does not exist.
    pub(crate) paths: &'a [Path],
    /// What the rules say of it for this request.
    pub(crate) effect: RuleEffect,
}

impl Candidate<'_> {
    /// Notes that an allocation of `size` bytes failed although the numbers had promised it
    /// (another request was faster), so that the next [`decide`] looks elsewhere: the candidate
    /// counts as having no such piece. Every call takes one candidate out of the race, so that
    /// retrying ends after as many rounds as there are candidates.
    pub(crate) fn refused(&mut self, size: u64) {
        self.largest = self.largest.min(size.saturating_sub(1));
    }

    /// Whether it could hold the request were it empty.
    fn could_hold(&self, request: &Request) -> bool {
        let align = request.align.max(1);
        let past = self.start.checked_rem(align).unwrap_or(0);
        let skipped = if past == 0 { 0 } else { align.saturating_sub(past) };
        self.size.checked_sub(skipped).is_some_and(|room| room >= request.size)
    }

    /// Share of its bytes that is in use, in permille.
    fn load(&self) -> u64 {
        load(self.size, self.free)
    }
}

/// The criteria that decide among eligible candidates, in the order in which they are looked at;
/// the smaller rank wins.
struct Rank {
    /// What the administrator's rules want, then what the application's own want.
    preference: (Preference, Preference),
    /// What paths decide.
    distance: Distance,
    /// Load in permille.
    load: u64,
    /// Largest contiguous piece: larger is better, as it leaves more for the next one.
    largest: Reverse<u64>,
    /// Order in which the providers came.
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

    /// Compares, and names the criterion that decides.
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

/// Why a candidate cannot serve.
struct Objection {
    code: VerdictCode,
    rule: Option<RuleRef>,
    reason: Outcome,
}

/// Whether a candidate can serve the request, and if not, the first rule that forbids it. The rules
/// that no time will change come first: a provider that is out of reach *and* full is out of reach.
fn eligible(request: &Request, candidate: &Candidate<'_>, reach: &Reach) -> Result<(), Objection> {
    let class = reach.class();
    let effect = &candidate.effect;
    let (code, rule, reason) = if matches!(request.named, Named::Require(id) if id != candidate.id) {
        (VerdictCode::NotNamed, None, Outcome::NoSuchProvider)
    } else if !candidate.live {
        (VerdictCode::Leaving, None, Outcome::Leaving)
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
    } else if candidate.largest < request.size {
        (VerdictCode::Fragmented, None, Outcome::Fragmented)
    } else {
        return Ok(());
    };
    Err(Objection { code, rule, reason })
}

/// On whose word a candidate may win; the earlier variant beats the later one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum By {
    /// The request prefers it.
    AllocRequest,
    /// The kernel chose it.
    Kernel,
    /// Its rank.
    Rank,
}

/// On whose word the candidate may win, `None` if it may not because the kernel wants another one.
/// A required provider leaves the kernel nothing to choose.
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

/// Whether the administrator wants a candidate only where no other serves, whoever else wants it.
fn avoided(effect: &RuleEffect) -> bool {
    effect.preference == Preference::Avoid
}

/// Why an eligible candidate lost, and the rule that decided where a rule did.
fn lost(request: &Request, effect: &RuleEffect, rank: &Rank, winner: &Winner) -> (VerdictCode, Option<RuleRef>) {
    if avoided(effect) && !avoided(&winner.effect) {
        return (VerdictCode::Preference, effect.preference_by);
    }
    match winner.by {
        By::AllocRequest => (VerdictCode::NotNamed, None),
        By::Kernel => (VerdictCode::Upstream, None),
        By::Rank => match rank.compare(&winner.rank, request.strategy).1 {
            VerdictCode::Preference => {
                // Either this one is avoided, or the other one preferred.
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

/// Finds the best candidate that is not among `taken`, and with `skip_avoided` none that rules avoid; and how that ended.
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
        if let Err(denying_rule) = eligible(request, candidate, &reach) {
            outcome = outcome.max(denying_rule.reason);
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

/// Says of each candidate what became of it: `chosen` were chosen, of which `last` was the worst. Where `last` is none
/// the kernel wanted another one, or, where there are some in `chosen`, too few could be.
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
            (Err(denying_rule), _) => (denying_rule.code, denying_rule.rule),
            (Ok(()), Some(_)) if chosen.contains(&index) => {
                let effect = &candidate.effect;
                let preferred = effect.preference == Preference::Prefer;
                (VerdictCode::Chosen, effect.preference_by.filter(|_| preferred))
            }
            (Ok(()), Some(last)) => lost(request, &candidate.effect, &Rank::of(candidate, &reach), last),
            (Ok(()), None) if !chosen.is_empty() => (VerdictCode::Alone, None),
            // Eligible, and yet there is no winner: the kernel wants another one.
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
/// `verdicts[i]` is what the decision says of `candidates[i]`; where `verdicts` is shorter only
/// that many are written, where it is longer the rest is left alone. The decision itself does not
/// depend on it.
///
/// Takes time in proportion to candidates times clients, and a constant amount of stack.
pub(crate) fn decide(request: &Request, candidates: &[Candidate<'_>], verdicts: &mut [Verdict]) -> Choice {
    let (winner, outcome) = best(request, candidates, &[], false);
    let chosen = winner.as_ref().map(|winner| winner.index);
    say(request, candidates, chosen.as_slice(), winner.as_ref(), verdicts);
    Choice { chosen, outcome }
}

/// Chooses as many providers as `picks` has room for, each for a part of the requested size, the best one first. Either
/// all are found or the answer says how many were, and why no other one is; with `skip_avoided` only such that rules do not
/// avoid.
///
/// Takes as many times the time of [`decide`] as there are picks.
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
        distance: 4,
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

    /// The codes of two candidates, and which one was chosen.
    fn codes(request: &Request, candidates: &[Candidate<'_>; 2]) -> (Option<usize>, [VerdictCode; 2]) {
        let mut verdicts = [Verdict::EMPTY; 2];
        let decision = decide(request, candidates, &mut verdicts);
        (decision.chosen, verdicts.map(|verdict| verdict.code))
    }

    #[test]
    fn each_criterion_decides_where_those_before_it_are_equal() {
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
            // The one that came earlier loses, except where nothing else decides.
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
    fn each_rule_excludes() {
        let near = [NEAR];
        let gone = [Path {
            class: PathClass::Unreachable,
            ..NEAR
        }];
        type Spoil = fn(&mut Candidate<'_>);
        let cases: [(Spoil, VerdictCode, Outcome); 5] = [
            (|c| c.live = false, VerdictCode::Leaving, Outcome::Leaving),
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
    fn several_are_the_best_ones_in_their_order() {
        let (near, far) = ([NEAR], [Path { hops: 9, ..NEAR }]);
        let mut all = [candidate(1, &far), candidate(2, &near), candidate(3, &near)];
        all[2].free -= PAGE;
        let mut verdicts = [Verdict::EMPTY; 3];
        let mut picks = [0; 2];
        let answer = decide_several(&REQUEST, &all, false, &mut picks, &mut verdicts);
        assert_eq!((answer, picks), ((2, Outcome::Chosen), [1, 2]));
        let codes = verdicts.map(|verdict| verdict.code);
        assert_eq!(codes, [VerdictCode::Hops, VerdictCode::Chosen, VerdictCode::Chosen]);
        // One pick is what a plain decision chooses.
        let mut one = [9];
        assert_eq!(decide_several(&REQUEST, &all, false, &mut one, &mut []).0, 1);
        assert_eq!(decide(&REQUEST, &all, &mut []).chosen, Some(one[0]));
        // One is full: what the others could do is of no use.
        all[0].free = 0;
        let mut three = [0; 3];
        let answer = decide_several(&REQUEST, &all, false, &mut three, &mut verdicts);
        assert_eq!(answer, (2, Outcome::Full));
        let codes = verdicts.map(|verdict| verdict.code);
        assert_eq!(codes, [VerdictCode::Full, VerdictCode::Alone, VerdictCode::Alone]);
        // One that rules avoid comes last, or not at all.
        all[1].effect.preference = Preference::Avoid;
        assert_eq!(decide_several(&REQUEST, &all, false, &mut picks, &mut []).0, 2);
        assert_eq!(picks, [2, 1]);
        assert_eq!(decide_several(&REQUEST, &all, true, &mut picks, &mut []).0, 1);
    }
}
