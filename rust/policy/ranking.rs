// SPDX-License-Identifier: GPL-2.0

//! The fast path of a decision.
//!
//! [`nearest`] chooses from a ranking that is sorted once, and from one free-space hint per provider. If the hints of the
//! providers that matter do not suffice, [`nearest`] returns nothing and the caller falls back to
//! [`decide`](super::placement::decide), which gives the same answer.
//!
//! The file is pure: it needs nothing but `core` and the other pure files, allocates nothing, cannot panic, and holds no `unsafe`.
//! The same source is compiled into the module and into the host tests of tests/suites/pure.

use crate::policy::{
    distance::Distance,
    path::PathClass,
    rule_effect::Preference, //
};

/// Returns the used part of `size` bytes of which `free` are free, in permille, rounded down. Returns 1000 if `size` is 0.
pub(super) fn load(size: u64, free: u64) -> u64 {
    let used = size.saturating_sub(free);
    // `used * 1000` must not overflow. Providers of petabytes are counted in KiB.
    let unit = if size > u64::MAX / 1000 { 10 } else { 0 };
    (used >> unit)
        .saturating_mul(1000)
        .checked_div(size >> unit)
        .unwrap_or(1000)
}

/// The free memory of a provider. The two numbers may be from different moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capacity {
    /// Free bytes as counted. Use [`Self::free()`], as [`Self::largest`] may be more.
    pub(crate) free: u64,
    /// Size in bytes of the largest contiguous piece.
    pub(crate) largest: u64,
}

impl Capacity {
    /// No free memory.
    pub(crate) const EMPTY: Self = Self { free: 0, largest: 0 };

    /// The provider is being removed. No request fits.
    pub(crate) const REMOVED: Self = Self {
        free: u64::MAX,
        largest: 0,
    };

    /// Returns whether the provider was not being removed.
    pub(crate) fn is_live(&self) -> bool {
        *self != Self::REMOVED
    }

    /// Returns the free bytes, at least [`Self::largest`]: a piece may have grown after the free bytes were counted.
    pub(crate) fn free(&self) -> u64 {
        self.free.max(self.largest)
    }
}

/// What a free-space hint says about a request: whether size and alignment fit, and the provider's capacity. `Unknown` if
/// the hint can prove neither: more than [`Capacity::largest`] may be in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FitHint {
    Fits(Capacity),
    Short(Capacity),
    Unknown(Capacity),
}

/// A provider in the ranking of [`nearest`]. `G` is the type of its free-space hint.
#[derive(Clone, Debug)]
pub(crate) struct RankedProvider<G> {
    /// Index of the provider in the order of provider numbers.
    pub(crate) index: usize,
    /// Bytes that the provider manages.
    pub(crate) size: u64,
    /// Preference of the administrator's rules; `None` if rules deny the provider or a client cannot reach it.
    pub(crate) preference: Option<Preference>,
    /// Distance from the clients.
    pub(crate) distance: Distance,
    /// Number of providers of the same order from this one on, including this one. Set by [`group`].
    pub(crate) equal: usize,
    pub(crate) hint: G,
}

/// Sets [`RankedProvider::equal`] in a ranking that is sorted by [`RankedProvider::order`].
pub(crate) fn group<G>(ranking: &mut [RankedProvider<G>]) {
    let mut after: Option<(Order, usize)> = None;
    for ranked in ranking.iter_mut().rev() {
        let order = ranked.order();
        let others = after.filter(|(other, _)| *other == order);
        ranked.equal = others.map_or(0, |(_, count)| count).saturating_add(1);
        after = Some((order, ranked.equal));
    }
}

/// The position in the ranking. Providers without a preference come last.
type Order = (bool, Option<Preference>, Distance);

impl<G> RankedProvider<G> {
    /// Returns the sort key; a smaller key comes earlier in the ranking.
    pub(crate) fn order(&self) -> Order {
        (self.preference.is_none(), self.preference, self.distance)
    }

    /// Returns the value of the class in the ABI; 0 without clients.
    pub(crate) fn class_raw(&self) -> u32 {
        self.distance.class.map_or(0, PathClass::as_raw)
    }
}

/// Returns the provider that [`decide`](super::placement::decide) would choose for a request that names no provider and
/// has the strategy *nearest*, if no rule affects the choice except by [`RankedProvider::preference`].
///
/// Returns `None` if no provider can serve, if rules prefer a provider that is too far to one that can serve, or if `fit`
/// returns [`FitHint::Unknown`] for a provider that might be the result. Providers that rank behind the result do not matter.
///
/// `ranking` is sorted by [`RankedProvider::order`], then by provider number, and is [grouped](group). `fit` is called
/// once for each hint. The result is stored in `capacities`, which has the length and the order of `ranking`.
///
/// Compares only the first provider that can serve and those of the same order, and reads no path. There are no verdicts:
/// a caller that needs them calls `decide()`.
pub(crate) fn nearest<'a, G>(
    max_class: Option<PathClass>,
    ranking: &'a [RankedProvider<G>],
    capacities: &mut [Capacity],
    mut fit: impl FnMut(&G) -> FitHint,
) -> Option<&'a RankedProvider<G>> {
    let mut best = None;
    // Load, size and capacity of `best`. Without `best`, the capacity is empty: no request fits in it.
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
                FitHint::Unknown(_) => return None,
            };
            *slot = has;
            // Skip the division if the load cannot be less. This is common for idle providers of the same size.
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
    // The remaining providers are less preferred or too far. Only their capacity is stored.
    for (ranked, slot) in left.iter().zip(slots) {
        let (FitHint::Fits(has) | FitHint::Short(has) | FitHint::Unknown(has)) = fit(&ranked.hint);
        *slot = has;
    }
    best
}
