// SPDX-License-Identifier: GPL-2.0

//! The choice of a provider from a ranking.
//!
//! A ranking has everything that does not change while nothing but free memory changes: which providers the request and the
//! rules exclude, which they prefer, and the distances. It is sorted once. [`best`] compares free memory among the first
//! providers of the ranking that have the same place.
//!
//! The file is pure: it needs nothing but `core` and the other pure files, allocates nothing, cannot panic, and holds no `unsafe`.
//! The same source is compiled into the module and into the host tests of tests/suites/pure.

use crate::policy::{
    distance::Reach,
    path::PathClass,
    rule_effect::{
        Preference,
        RuleEffect, //
    }, //
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
        // No BAR is as large.
        self.free >> 63 == 0
    }

    /// Returns the free bytes, at least [`Self::largest`]: a piece may have grown after the free bytes were counted.
    pub(crate) fn free(&self) -> u64 {
        self.free.max(self.largest)
    }
}

/// The reason why a provider may be chosen. An earlier variant beats a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum By {
    /// The request prefers the provider.
    AllocRequest,
    /// The kernel chose the provider.
    Kernel,
    /// The other criteria decide.
    Rank,
}

/// The place of a provider in a ranking. The smaller one is better.
///
/// All criteria but free memory are in one number, the most important ones in the highest bits: one number is compared faster
/// than a list of criteria.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place(u128);

impl Place {
    const AVOIDED: u32 = 1 << 6;
    const EXCLUDED: u32 = 1 << 7;

    /// Returns the place of a provider that may be chosen for the reason `by`; `None` if the provider cannot serve the request,
    /// however much memory is free.
    pub(super) fn new(by: Option<By>, effect: &RuleEffect, reach: &Reach) -> Self {
        let avoided = match effect.preference {
            Preference::Avoid => Self::AVOIDED,
            Preference::Prefer | Preference::Neutral => 0,
        };
        let preferences = ((effect.preference as u32) << 2) | effect.file_preference as u32;
        let standing = by.map_or(Self::EXCLUDED, |by| avoided | ((by as u32) << 4) | preferences);
        // An unknown value (0) loses.
        let numa = match reach.numa_distance {
            0 => u32::MAX,
            known => known,
        };
        let class = reach.class().map_or(0, PathClass::as_raw);
        let criteria = [(standing << 8) | class, reach.hops, !reach.bandwidth, numa];
        Self(criteria.into_iter().fold(0, |sum, word| (sum << 32) | u128::from(word)))
    }

    /// Returns the part that the request and the rules decide.
    fn standing(self) -> u32 {
        (self.0 >> 104) as u32
    }

    /// Whether the provider cannot serve the request.
    pub(crate) fn is_excluded(self) -> bool {
        self.standing() == Self::EXCLUDED
    }

    /// Whether the provider cannot serve the request, or the administrator's rules avoid the provider.
    pub(crate) fn is_avoided(self) -> bool {
        self.standing() >= Self::AVOIDED
    }

    /// Returns the class of the farthest path in the ABI; 0 without clients.
    pub(crate) fn class_raw(self) -> u32 {
        u32::from((self.0 >> 96) as u8)
    }
}

/// A provider in a ranking.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankedProvider {
    /// Index of the provider in the order of provider numbers.
    pub(crate) index: usize,
    /// Bytes that the provider manages.
    pub(crate) size: u64,
    pub(crate) place: Place,
    /// Number of providers from this one on that are compared by load, including this one. Set by [`group`].
    pub(crate) equal: usize,
}

impl RankedProvider {
    /// Returns whether a path to the provider is farther than `max_class` allows.
    #[inline(always)]
    pub(crate) fn is_beyond(&self, max_class: Option<PathClass>) -> bool {
        max_class.is_some_and(|max| self.place.class_raw() > max.as_raw())
    }
}

/// Sets [`RankedProvider::equal`] in a ranking that is sorted by [`Place`]. With `by_load`, load counts before the distance.
pub(crate) fn group(ranking: &mut [RankedProvider], by_load: bool) {
    let mut after: Option<(Place, usize)> = None;
    for ranked in ranking.iter_mut().rev() {
        let place = ranked.place;
        let same = |other: Place| other == place || by_load && other.standing() == place.standing();
        ranked.equal = after
            .filter(|(other, _)| same(*other))
            .map_or(0, |(_, equal)| equal)
            .saturating_add(1);
        after = Some((place, ranked.equal));
    }
}

/// Returns the best provider of a ranking for which `fit` returns a capacity, if there is one.
///
/// `ranking` is sorted by [`Place`], then by provider number, and is [grouped](group). With `pack`, the most loaded provider of a
/// group is the best one, else the least loaded. `fit` is called once for each provider, but not for those behind the
/// group of the result, or excluded ones.
#[inline(always)]
pub(crate) fn best(
    ranking: &[RankedProvider],
    pack: bool,
    mut fit: impl FnMut(&RankedProvider) -> Option<Capacity>,
) -> Option<&RankedProvider> {
    let mut best: Option<&RankedProvider> = None;
    // Load, size and capacity of `best`. Without `best`, no capacity is the same.
    let mut least = u64::MAX;
    let mut whole = 0;
    let mut its = Capacity::REMOVED;
    let mut left = ranking;
    while let Some(first) = left.first() {
        if best.is_some() || first.place.is_excluded() {
            break;
        }
        let (tier, farther) = left.split_at_checked(first.equal.max(1)).unwrap_or((left, &[]));
        left = farther;
        for ranked in tier {
            let Some(has) = fit(ranked) else {
                continue;
            };
            // Skip the division if the load cannot be better. This is common for idle providers of the same size.
            if has.free == its.free && ranked.size == whole && has.largest <= its.largest {
                continue;
            }
            let used = load(ranked.size, has.free());
            let load = if pack { u64::MAX.wrapping_sub(used) } else { used };
            let larger = || has.largest > its.largest && best.is_some_and(|best| best.place == ranked.place);
            if best.is_none() || load < least || load == least && larger() {
                best = Some(ranked);
                least = load;
                whole = ranked.size;
                its = has;
            }
        }
    }
    best
}
