// SPDX-License-Identifier: GPL-2.0

//! The fast path of a decision: the nearest provider of a ranking that was sorted once, from one hint of free space per provider.
//!
//! [`nearest`] gives the answer of [`decide`](super::placement::decide) or none at all.
//!
//! The file is pure: it needs nothing but `core` and the other pure files, allocates nothing, cannot panic, and holds no `unsafe`.
//! The same source is compiled into the module and into the host tests of tests/suites/pure.

use crate::policy::{
    distance::Distance,
    path::PathClass,
    rule_effect::Preference, //
};

/// Share of `size` bytes that is not among the `free` ones, in permille, rounded down; 1000 of nothing.
pub(super) fn load(size: u64, free: u64) -> u64 {
    let used = size.saturating_sub(free);
    // A thousandfold has to fit; KiB do for providers of petabytes.
    let unit = if size > u64::MAX / 1000 { 10 } else { 0 };
    (used >> unit)
        .saturating_mul(1000)
        .checked_div(size >> unit)
        .unwrap_or(1000)
}

/// What a provider has that is not being revoked, as two numbers that may be of different moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capacity {
    /// Free bytes, unless [`Self::largest`] is more.
    pub(crate) free: u64,
    /// [`Candidate::largest`].
    pub(crate) largest: u64,
}

impl Capacity {
    /// Nothing.
    pub(crate) const EMPTY: Self = Self { free: 0, largest: 0 };

    /// [`Candidate::free`]: a piece may have grown since the free bytes were counted.
    pub(crate) fn free(&self) -> u64 {
        self.free.max(self.largest)
    }
}

/// What is said of a provider at a fit: what it has, and whether the request fits, its alignment
/// thought of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FitHint {
    Fits(Capacity),
    Short(Capacity),
    Unknown,
}

/// A provider in the ranking that [`nearest`] goes through. `G` tells what it has.
#[derive(Clone, Debug)]
pub(crate) struct RankedProvider<G> {
    /// Its index in the order of numbers.
    pub(crate) index: usize,
    /// [`Candidate::size`].
    pub(crate) size: u64,
    /// How much the administrator's rules want it; `None` where they forbid it, or a client cannot reach it.
    pub(crate) preference: Option<Preference>,
    /// How far it is.
    pub(crate) distance: Distance,
    /// How many are wanted as much and are as far, this one and those after it; see [`group`].
    pub(crate) equal: usize,
    pub(crate) hint: G,
}

/// Notes in a ranking that is in the order of [`RankedProvider::order`] how many are as far.
pub(crate) fn group<G>(ranking: &mut [RankedProvider<G>]) {
    let mut after: Option<(Order, usize)> = None;
    for ranked in ranking.iter_mut().rev() {
        let order = ranked.order();
        let others = after.filter(|(other, _)| *other == order);
        ranked.equal = others.map_or(0, |(_, count)| count).saturating_add(1);
        after = Some((order, ranked.equal));
    }
}

/// Where a provider stands in the ranking: those without a preference come last.
type Order = (bool, Option<Preference>, Distance);

impl<G> RankedProvider<G> {
    /// The smaller, the earlier in the ranking.
    pub(crate) fn order(&self) -> Order {
        (self.preference.is_none(), self.preference, self.distance)
    }

    /// The number the ABI has for the class: 0 without clients.
    pub(crate) fn class_raw(&self) -> u32 {
        self.distance.class.map_or(0, PathClass::as_raw)
    }
}

/// The provider that [`decide`] would choose where none is named,
/// [`Strategy::Nearest`] chooses, and rules say no more than [`RankedProvider::preference`]. `None` where none can
/// serve, where rules want one that is too far more than one that can serve, or where `fit` cannot
/// tell what one has. `ranking` are in their [order](RankedProvider::order), those of the same order in that of
/// numbers, and [grouped](group).
///
/// Each hint is asked once, and what it says is kept in `capacities`, which is as long as `ranking` and
/// in their order.
///
/// Compares the first that can serve and those that are as far, and looks at no path. So this is
/// for the many decisions nobody will ask about; who asks is told by [`decide`].
pub(crate) fn nearest<'a, G>(
    max_class: Option<PathClass>,
    ranking: &'a [RankedProvider<G>],
    capacities: &mut [Capacity],
    mut fit: impl FnMut(&G) -> FitHint,
) -> Option<&'a RankedProvider<G>> {
    let mut best = None;
    // The best one's load, its size and what it has; none has nothing, where no request fits.
    let mut least = u64::MAX;
    let mut whole = 0;
    let mut its = Capacity::EMPTY;
    let mut left = ranking;
    let mut slots = capacities;
    while let Some(first) = left.first() {
        let class = first.distance.class;
        let too_far = class == Some(PathClass::Unreachable) || max_class.is_some_and(|max| class > Some(max));
        if best.is_some() || too_far || first.preference.is_none() {
            break;
        }
        let (tier, farther) = left.split_at_checked(first.equal.max(1)).unwrap_or((left, &[]));
        let (own, others) = slots.split_at_mut_checked(tier.len())?;
        left = farther;
        slots = others;
        for (ranked, slot) in tier.iter().zip(own) {
            let has = match fit(&ranked.hint) {
                FitHint::Fits(has) => has,
                FitHint::Short(has) => {
                    *slot = has;
                    continue;
                }
                FitHint::Unknown => return None,
            };
            *slot = has;
            // No less a load, without a division: idle providers of one kind.
            if has.free == its.free && ranked.size == whole && has.largest <= its.largest {
                continue;
            }
            let load = load(ranked.size, has.free());
            if load < least || load == least && has.largest > its.largest {
                best = Some(ranked);
                least = load;
                whole = ranked.size;
                its = has;
            }
        }
    }
    // The others are wanted less, or too far. What they have is kept for who asks.
    for (ranked, slot) in left.iter().zip(slots) {
        *slot = match fit(&ranked.hint) {
            FitHint::Fits(has) | FitHint::Short(has) => has,
            FitHint::Unknown => return None,
        };
    }
    best
}
