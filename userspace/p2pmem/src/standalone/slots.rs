// SPDX-License-Identifier: MIT OR Apache-2.0

//! Allocation of ranges of a BAR: the first range that fits.

use std::collections::BTreeMap;

/// The used ranges of a BAR. Each range has a value of type `T`, by which [`Slots::sweep`] finds out whether the range
/// is still in use after it was freed.
#[derive(Debug)]
pub(super) struct Slots<T> {
    size: u64,
    used: BTreeMap<u64, Slot<T>>,
}

#[derive(Debug)]
struct Slot<T> {
    len: u64,
    freed: bool,
    value: T,
}

impl<T: Default> Slots<T> {
    pub(super) fn new(size: u64) -> Self {
        Self {
            size,
            used: BTreeMap::new(),
        }
    }

    /// Returns the free ranges: start and length.
    fn free_ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let starts = std::iter::once(0).chain(self.used.iter().map(|(start, slot)| start + slot.len));
        let ends = self.used.keys().copied().chain([self.size]);
        starts.zip(ends).map(|(start, end)| (start, end.saturating_sub(start)))
    }

    /// Returns the number of free bytes, and the size of the largest free range.
    pub(super) fn free(&self) -> (u64, u64) {
        self.free_ranges()
            .fold((0, 0), |(sum, largest), (_, len)| (sum + len, len.max(largest)))
    }

    /// Returns the number of freed bytes that are still in use.
    pub(super) fn pinned(&self) -> u64 {
        self.used.values().filter(|slot| slot.freed).map(|slot| slot.len).sum()
    }

    /// Takes the first free range of `len` bytes whose start is a multiple of `align`. Returns the start.
    pub(super) fn take(&mut self, len: u64, align: u64) -> Option<u64> {
        let start = self.free_ranges().find_map(|(start, available)| {
            let aligned = start.checked_next_multiple_of(align.max(1))?;
            let needed = (aligned - start).checked_add(len)?;
            (needed <= available).then_some(aligned)
        })?;
        let slot = Slot {
            len,
            freed: false,
            value: T::default(),
        };
        self.used.insert(start, slot);
        Some(start)
    }

    /// Returns the value of a used range.
    pub(super) fn value(&mut self, start: u64) -> Option<&mut T> {
        self.used.get_mut(&start).map(|slot| &mut slot.value)
    }

    /// Frees a range. [`Slots::sweep`] makes the range available.
    pub(super) fn free_slot(&mut self, start: u64) {
        if let Some(slot) = self.used.get_mut(&start) {
            slot.freed = true;
        }
    }

    /// Makes the freed ranges available that are not in use. `is_used` is called with the values of all ranges.
    pub(super) fn sweep(&mut self, mut is_used: impl FnMut(&mut T) -> bool) {
        self.used.retain(|_, slot| is_used(&mut slot.value) || !slot.freed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_are_aligned_and_reused_after_sweep() {
        let mut slots = Slots::<bool>::new(16 << 10);
        assert_eq!(slots.take(4096, 4096), Some(0));
        assert_eq!(slots.take(4096, 8192), Some(8192));
        assert_eq!(slots.free(), (8192, 4096));
        assert_eq!(slots.take(8192, 4096), None);
        assert_eq!(slots.take(4096, 4096), Some(4096));
        *slots.value(8192).unwrap() = true;
        slots.free_slot(8192);
        slots.free_slot(4096);
        slots.sweep(|used| *used);
        assert_eq!((slots.free(), slots.pinned()), ((8192, 4096), 4096));
        slots.sweep(|_| false);
        assert_eq!((slots.free(), slots.pinned()), ((12 << 10, 12 << 10), 0));
        assert_eq!(slots.take(u64::MAX, 1 << 30), None);
        assert!(slots.value(8192).is_none());
    }

    proptest! {
        #[test]
        fn ranges_do_not_overlap_and_free_bytes_are_exact(ops in prop::collection::vec((1u64..9, 0u32..4, any::<bool>()), 1..60)) {
            let mut slots = Slots::<()>::new(64);
            let mut model: Vec<(u64, u64)> = Vec::new();
            for (len, align, frees) in ops {
                if frees && !model.is_empty() {
                    let (start, _) = model.remove(len as usize % model.len());
                    slots.free_slot(start);
                    slots.sweep(|()| false);
                } else if let Some(start) = slots.take(len, 1 << align) {
                    prop_assert_eq!(start % (1 << align), 0);
                    prop_assert!(start + len <= 64);
                    prop_assert!(model.iter().all(|(s, l)| s + l <= start || start + len <= *s));
                    model.push((start, len));
                }
                let used: u64 = model.iter().map(|(_, len)| len).sum();
                let (free, largest) = slots.free();
                prop_assert_eq!(free, 64 - used);
                prop_assert!(largest <= free);
                // A request for the largest free range succeeds.
                if largest > 0 {
                    let start = slots.take(largest, 1).unwrap();
                    slots.free_slot(start);
                    slots.sweep(|()| false);
                }
            }
        }
    }
}
