// SPDX-License-Identifier: MIT OR Apache-2.0

//! Decisions as the module makes them: candidates are ranked, the best are chosen from the ranking, and each gets a verdict.

use crate::policy::{
    placement::{
        Candidate,
        Request,
        Strategy,
        explain,
        rank, //
    },
    ranking::{
        Capacity,
        RankedProvider,
        best,
        group, //
    },
    verdict::{
        Outcome,
        Verdict, //
    }, //
};

/// The result of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    /// Index of the chosen candidate; `Some` if and only if `outcome` is [`Outcome::Chosen`].
    pub(crate) chosen: Option<usize>,
    pub(crate) outcome: Outcome,
}

/// Returns the candidates in the order in which the module considers them for `request`.
pub(crate) fn ranking(request: &Request, candidates: &[Candidate<'_>]) -> Vec<RankedProvider> {
    let ranked = |(index, candidate)| rank(request, index, candidate);
    let mut ranking: Vec<_> = candidates.iter().enumerate().map(ranked).collect();
    ranking.sort_by_key(|ranked| (ranked.place, candidates[ranked.index].id));
    group(&mut ranking, request.is_by_load());
    ranking
}

/// Returns the capacity of a candidate that has enough free memory for the request.
pub(crate) fn fit(request: &Request, candidate: &Candidate<'_>) -> Option<Capacity> {
    let usable = candidate.free.saturating_sub(candidate.effect.reserved_for_others);
    let fits =
        candidate.live && candidate.free >= request.size && usable >= request.size && candidate.largest >= request.size;
    fits.then_some(Capacity {
        free: candidate.free,
        largest: candidate.largest,
    })
}

/// Chooses up to `picks.len()` candidates, one after the other. Returns their number and the outcome.
pub(crate) fn decide_several(
    request: &Request,
    candidates: &[Candidate<'_>],
    skip_avoided: bool,
    picks: &mut [usize],
    verdicts: &mut [Verdict],
) -> (usize, Outcome) {
    let mut ranking = ranking(request, candidates);
    if skip_avoided {
        let end = ranking.partition_point(|ranked| !ranked.place.is_avoided());
        ranking.truncate(end);
    }
    let pack = request.strategy == Strategy::Pack;
    let mut found = 0;
    while found < picks.len() {
        let taken = &picks[..found];
        let free = |ranked: &RankedProvider| match taken.contains(&ranked.index) {
            true => None,
            false if ranked.is_beyond(request.max_class) => None,
            false => fit(request, &candidates[ranked.index]),
        };
        let Some(next) = best(&ranking, pack, free) else {
            break;
        };
        picks[found] = next.index;
        found += 1;
    }
    let outcome = explain(request, candidates, &picks[..found], picks.len(), verdicts);
    (found, outcome)
}

/// Chooses a candidate.
pub(crate) fn decide(request: &Request, candidates: &[Candidate<'_>], verdicts: &mut [Verdict]) -> Choice {
    let mut pick = [0];
    let (found, outcome) = decide_several(request, candidates, false, &mut pick, verdicts);
    let chosen = (found == 1).then_some(pick[0]);
    Choice { chosen, outcome }
}
