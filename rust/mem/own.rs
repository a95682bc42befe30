// SPDX-License-Identifier: GPL-2.0

//! The memory of an own or registered provider: its backing, its allocator, and the pages whose contents are known.
//!
//! Memory that was in use is cleared before it returns to the allocator. So all memory in the allocator is zero, with two
//! exceptions, whose contents are *unknown* until an allocation clears them: pages that nobody had since the memory was
//! published, and pages that an allocation needed while the mmap lock was held ([`OwnMemory::release`]). A bitmap remembers them.
//! An interval would not do: the allocator takes the smallest block that fits, wherever it is.
//!
//! Context: process context, may sleep. `OwnMemory::known` is a leaf lock.

use crate::ext::{
    buddy::{
        Buddy,
        Extent, //
    },
    p2pdma::Backing, //
};
use core::ops::Range;
use kernel::{
    new_mutex,
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        atomic::{AtomicFlag, Relaxed},
        Arc, Mutex,
    },
};

/// The memory of an own or registered provider.
#[pin_data]
pub(crate) struct OwnMemory {
    backing: Arc<Backing>,
    buddy: Arc<Buddy>,
    /// The backing's first byte in the BAR.
    start: u64,
    /// The pages of the backing that are zero whenever they are free.
    #[pin]
    known: Mutex<PageSet>,
    /// Whether [`Self::release`] was ever called.
    released: AtomicFlag,
}

impl OwnMemory {
    /// Makes the memory of a provider. All contents are unknown. Errors: `ENOMEM`, and those of [`Buddy::new`].
    pub(crate) fn new(backing: Backing) -> Result<Arc<Self>> {
        let (size, (_, start)) = (backing.size(), backing.place());
        let known = PageSet::new(usize::try_from(size / PAGE_SIZE as u64)?)?;
        let buddy = Buddy::new(start, start + size)?;
        let backing = Arc::new(backing, GFP_KERNEL)?;
        Arc::pin_init(
            pin_init!(Self {
                backing,
                buddy,
                start,
                known <- new_mutex!(known),
                released: AtomicFlag::new(false),
            }),
            GFP_KERNEL,
        )
    }

    pub(crate) fn backing(&self) -> &Arc<Backing> {
        &self.backing
    }

    pub(crate) fn buddy(&self) -> &Arc<Buddy> {
        &self.buddy
    }

    /// Returns the offset of an extent in the backing, in bytes.
    pub(crate) fn offset_of(&self, extent: &Extent) -> u64 {
        extent.offset() - self.start
    }

    /// Clears the first pages within the range `part` of an extent whose contents are unknown, up to `step` bytes. Returns what
    /// was cleared, as a range of the extent; all pages in front of it are zero. Returns the empty range at the end if no page is
    /// unknown. The caller owns the extent and did not use it. All numbers are bytes in whole pages.
    pub(crate) fn clear_unknown(&self, extent: &Extent, part: Range<u64>, step: u64) -> Range<u64> {
        let page = PAGE_SIZE as u64;
        let base = self.offset_of(extent) / page;
        let pages = (base + part.start / page) as usize..(base + part.end / page) as usize;
        let Some(gap) = self.known.lock().first_gap(pages, (step / page) as usize) else {
            return part.end..part.end;
        };
        let (first, count) = (gap.start as u64, gap.len() as u64);
        self.backing.clear(first * page, count * page);
        self.known.lock().insert(gap);
        let offset = (first - base) * page;
        offset..offset + count * page
    }

    /// Marks the contents of an extent as unknown, so that the extent can return to the allocator with what its last owner had.
    pub(crate) fn release(&self, extent: &Extent) {
        let page = PAGE_SIZE as u64;
        let first = self.offset_of(extent) / page;
        let pages = first as usize..(first + extent.size() / page) as usize;
        self.released.store(true, Relaxed);
        self.known.lock().remove(pages);
    }

    /// Clears all unknown pages if memory that was in use may be among them. The caller knows that all memory is free, and stays
    /// free.
    pub(crate) fn clear_released(&self, step: u64) {
        let page = PAGE_SIZE as u64;
        let pages = (self.backing.size() / page) as usize;
        let mut at = if self.released.load(Relaxed) { 0 } else { pages };
        loop {
            let Some(gap) = self.known.lock().first_gap(at..pages, (step / page) as usize) else {
                return;
            };
            self.backing.clear(gap.start as u64 * page, gap.len() as u64 * page);
            at = gap.end;
        }
    }
}

/// A set of pages, one bit for each: 4 MiB for 128 GiB.
struct PageSet(KVVec<u64>);

impl PageSet {
    /// Makes the empty set for pages `0..pages`. Errors: `ENOMEM`.
    fn new(pages: usize) -> Result<Self> {
        Ok(Self(KVVec::from_elem(0, pages.div_ceil(64), GFP_KERNEL)?))
    }

    fn contains(&self, page: usize) -> bool {
        self.0[page / 64] & 1 << (page % 64) != 0
    }

    fn insert(&mut self, pages: Range<usize>) {
        for page in pages {
            self.0[page / 64] |= 1 << (page % 64);
        }
    }

    fn remove(&mut self, pages: Range<usize>) {
        for page in pages {
            self.0[page / 64] &= !(1 << (page % 64));
        }
    }

    /// Returns the first pages of `pages` that are not in the set, at most `most` in a row, or `None` if all are in it.
    fn first_gap(&self, pages: Range<usize>, most: usize) -> Option<Range<usize>> {
        let mut first = pages.start;
        while first < pages.end && self.contains(first) {
            // A whole word at once, as a buffer may have millions of pages.
            let word = self.0[first / 64] >> (first % 64);
            first += word.trailing_ones() as usize;
        }
        let last = pages.end.min(first.saturating_add(most));
        let end = (first..last).find(|&page| self.contains(page)).unwrap_or(last);
        (first < end).then_some(first..end)
    }
}

#[kunit_tests(p2pmem_own)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_found_in_order() -> Result {
        let mut set = PageSet::new(200)?;
        assert!(set.first_gap(0..200, 200) == Some(0..200));
        assert!(set.first_gap(3..200, 64) == Some(3..67));
        assert!(set.first_gap(5..5, 64).is_none());
        set.insert(0..130);
        set.insert(140..199);
        assert!(set.first_gap(0..200, 200) == Some(130..140));
        assert!(set.first_gap(0..135, 200) == Some(130..135));
        assert!(set.first_gap(0..200, 1) == Some(130..131));
        assert!(set.first_gap(0..130, 200).is_none());
        assert!(set.first_gap(139..200, 200) == Some(139..140));
        assert!(set.first_gap(140..200, 200) == Some(199..200));
        set.insert(130..140);
        set.insert(199..200);
        assert!(set.first_gap(0..200, 200).is_none());
        set.remove(60..70);
        assert!(set.first_gap(0..200, 200) == Some(60..70));
        Ok(())
    }

    #[test]
    fn every_page_is_a_gap_once() -> Result {
        for step in [1, 7, 64, 65, 500] {
            let mut set = PageSet::new(300)?;
            set.insert(100..170);
            let mut found = 0;
            while let Some(gap) = set.first_gap(10..290, step) {
                assert!(gap.len() <= step && gap.clone().all(|page| !set.contains(page)));
                found += gap.len();
                set.insert(gap);
            }
            assert_eq!(found, 280 - 70);
            assert!(!set.contains(9) && !set.contains(290));
        }
        Ok(())
    }
}
