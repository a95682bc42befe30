// SPDX-License-Identifier: GPL-2.0

//! The kernel's buddy allocator over the offsets of a BAR.
//!
//! C header: [`include/linux/gpu_buddy.h`](srctree/include/linux/gpu_buddy.h)
//!
//! [`kernel::gpu::buddy`] wraps the same allocator, but it can neither tell the largest free piece, which placement
//! asks for in every decision, nor say which memory was cleared, which scrubbing between owners is built on.

use crate::{
    ext::{
        free_hint::FreeHint,
        task::is_killed, //
    },
    sys, //
};
use core::cell::Cell;
use kernel::{
    bindings,
    error::to_result,
    new_mutex,
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex, MutexGuard,
    },
    types::Opaque,
};

const CONTIGUOUS: usize = bindings::GPU_BUDDY_CONTIGUOUS_ALLOCATION;
const CLEAR: usize = bindings::GPU_BUDDY_CLEAR_ALLOCATION;
const RANGE: usize = bindings::GPU_BUDDY_RANGE_ALLOCATION;
const CLEARED: u32 = bindings::GPU_BUDDY_CLEARED as u32;

/// No size of a piece: it has to be worked out.
const UNKNOWN: u64 = u64::MAX;

/// An allocator of page-granular pieces of `0..size`, where what lies before `start` is never handed out.
///
/// # Invariants
///
/// `inner` is an initialised `struct gpu_buddy`, touched only with `lock` held, and not after it lost its trees.
#[pin_data(PinnedDrop)]
pub(crate) struct Buddy {
    #[pin]
    inner: Opaque<bindings::gpu_buddy>,
    #[pin]
    lock: Mutex<Locked>,
    /// The largest piece, or [`UNKNOWN`] since the last change. Touched only with `lock` held.
    longest: Atomic<u64>,
    hint: Arc<FreeHint>,
}

// SAFETY: The C structure is not bound to a thread.
unsafe impl Send for Buddy {}
// SAFETY: All access to the C structure is serialised by `lock`.
unsafe impl Sync for Buddy {}

/// What the lock of an allocator is for besides the allocator.
struct Locked {
    /// What lies before the managed range.
    below: Blocks,
    /// A block at least as large as this is free.
    block: Cell<u64>,
    /// The allocator lost its trees: it is not touched any more, and stays allocated.
    lost: Cell<bool>,
}

/// A list of allocated blocks; empty, or owned by one allocator.
struct Blocks(KBox<Opaque<bindings::list_head>>);

// SAFETY: The blocks are only touched with the lock of their allocator held.
unsafe impl Send for Blocks {}

impl Blocks {
    fn new() -> Result<Self> {
        let head = KBox::new(Opaque::new(bindings::list_head::default()), GFP_KERNEL_ACCOUNT)?;
        // SAFETY: The head is ours, and boxed, so that it does not move while it points to itself.
        unsafe {
            (*head.get()).next = head.get();
            (*head.get()).prev = head.get();
        }
        Ok(Self(head))
    }
}

/// One allocated piece. Dropping it gives it back, as memory that has to be cleared before its next owner sees it.
pub(crate) struct Extent {
    buddy: Arc<Buddy>,
    blocks: Blocks,
    offset: u64,
    size: u64,
    clear: bool,
}

impl Buddy {
    /// More than any BAR has, and the allocator can still add two such sizes.
    const MOST: u64 = 1 << 62;

    /// Manages `start..end`, both multiples of the page size.
    pub(crate) fn new(start: u64, end: u64) -> Result<Arc<Self>> {
        if start >= end || end > Self::MOST || (start | end) % PAGE_SIZE as u64 != 0 {
            return Err(EINVAL);
        }
        let lock = Locked {
            below: Blocks::new()?,
            block: Cell::new(0),
            lost: Cell::new(false),
        };
        let hint = FreeHint::new()?;
        let buddy: Arc<Self> = Arc::pin_init(
            // INVARIANT: `gpu_buddy_init()` initialised the structure.
            try_pin_init!(Self {
                inner <- Opaque::try_ffi_init(|slot| {
                    // SAFETY: `slot` is ours to initialise.
                    to_result(unsafe { bindings::gpu_buddy_init(slot, end, PAGE_SIZE as u64) })
                }),
                lock <- new_mutex!(lock),
                longest: Atomic::new(UNKNOWN),
                hint,
            }? Error),
            GFP_KERNEL,
        )?;
        let guard = buddy.lock.lock();
        if start > 0 {
            buddy.ask(&guard, &guard.below, start, start, PAGE_SIZE as u64, RANGE)?;
        }
        buddy.note(&guard);
        drop(guard);
        Ok(buddy)
    }

    /// Allocates one contiguous piece; `size` a multiple of the page size, `align` a power of two of at least a page.
    pub(crate) fn alloc(self: &Arc<Self>, size: u64, align: u64) -> Result<Extent> {
        let blocks = Blocks::new()?;
        let guard = self.lock.lock();
        let (offset, size, clear) = self.take(&guard, &blocks, size, align)?;
        self.note(&guard);
        drop(guard);
        // From here on the piece goes back when it is dropped.
        Ok(Extent {
            buddy: self.clone(),
            blocks,
            offset,
            size,
            clear,
        })
    }

    /// Allocates one block that was not cleared, of `most` bytes at most, a power of two of at least a page. None where all that
    /// is free is clear.
    pub(crate) fn take_unclear(self: &Arc<Self>, most: u64) -> Result<Option<Extent>> {
        if most < PAGE_SIZE as u64 || !most.is_power_of_two() {
            return Err(EINVAL);
        }
        let blocks = Blocks::new()?;
        let guard = self.lock.lock();
        self.check(&guard)?;
        // SAFETY: By the type invariant the allocator is initialised and has its trees, and its lock is held.
        let largest = unsafe { sys::p2pmem_buddy_largest_dirty(self.inner.get()) };
        let size = largest.min(most);
        if size == 0 {
            return Ok(None);
        }
        // Where no clear memory is asked for it looks among the other first.
        self.ask(&guard, &blocks, self.end(), size, PAGE_SIZE as u64, 0)?;
        let (mut offset, mut len, mut clear) = (0, 0, false);
        // SAFETY: As above; the list holds the blocks of one allocation.
        let whole =
            unsafe { sys::p2pmem_buddy_extent(self.inner.get(), blocks.0.get(), &mut offset, &mut len, &mut clear) };
        if !whole {
            self.put_back(&guard, &blocks);
            return Err(ENOSPC);
        }
        self.note(&guard);
        drop(guard);
        Ok(Some(Extent {
            buddy: self.clone(),
            blocks,
            offset,
            size: len,
            clear,
        }))
    }

    /// Takes one contiguous piece into an empty list: its offset, its bytes, and whether it is all zeroes. Nothing is in
    /// the list after an error.
    fn take(&self, guard: &MutexGuard<'_, Locked>, blocks: &Blocks, size: u64, align: u64) -> Result<(u64, u64, bool)> {
        let page = PAGE_SIZE as u64;
        if size == 0 || size % page != 0 || align < page || !align.is_power_of_two() {
            return Err(EINVAL);
        }
        let Some(rounded) = size.checked_next_power_of_two() else {
            return Err(ENOSPC);
        };
        if align > self.end() {
            return Err(ENOSPC);
        }
        // The allocator aligns a contiguous piece to its rounded size. For more than that it has to be asked for a
        // power of two.
        let (ask, flags) = if align > rounded {
            (rounded, CLEAR)
        } else {
            (size, CLEAR | CONTIGUOUS)
        };
        // The range is named although it is all there is: cleared and other memory is only joined within the range.
        // It says EINVAL of a size beyond its own.
        let ask = || {
            let ret = self.ask(guard, blocks, self.end(), ask, align, flags);
            ret.map_err(|e| if e == EINVAL { ENOSPC } else { e })
        };
        match ask() {
            // Of a size that rounds up to more than there is, and of no other, it joins no cleared and other memory.
            Err(e) if e == ENOSPC && rounded > self.end() && size <= self.longest_run(guard) => {
                self.join(guard);
                ask()?;
            }
            done => done?,
        }
        let (mut offset, mut len, mut clear) = (0, 0, false);
        // SAFETY: As above; the list holds the blocks of one allocation.
        let whole =
            unsafe { sys::p2pmem_buddy_extent(self.inner.get(), blocks.0.get(), &mut offset, &mut len, &mut clear) };
        if !whole || offset & (align - 1) != 0 || len < size {
            self.put_back(guard, blocks);
            return Err(ENOSPC);
        }
        Ok((offset, len, clear))
    }

    /// Asks the allocator for blocks of `0..end`, into an empty list.
    ///
    /// Not for a task that is about to die. Where the kernel has no memory to split a block with, the allocator takes its
    /// steps back by freeing a block that is free already, and its trees are lost with that. Such small allocations wait for
    /// memory as long as it takes; only those of a task that was killed for want of memory fail, once the reserves are used
    /// up as well. What is left is a task that gets killed between here and there, with no reserves. It shows in that nothing is
    /// found although a block is there that has room for it, or of a new allocator that it does not have its first bytes: then it is
    /// not touched any more, by this or by anybody (`EIO`).
    fn ask(
        &self,
        guard: &MutexGuard<'_, Locked>,
        blocks: &Blocks,
        end: u64,
        size: u64,
        align: u64,
        flags: usize,
    ) -> Result {
        self.check(guard)?;
        if is_killed() {
            return Err(EINTR);
        }
        // SAFETY: By the type invariant the allocator is initialised and has its trees, its lock is held, and the list is empty.
        let ret =
            unsafe { bindings::gpu_buddy_alloc_blocks(self.inner.get(), 0, end, size, align, blocks.0.get(), flags) };
        let fits = size.max(align).checked_next_power_of_two();
        if ret != 0 && (flags & RANGE != 0 || fits.is_some_and(|block| block <= guard.block.get())) {
            self.remove_before_reset(guard);
            return Err(if ret == ENOMEM.to_errno() { ENOMEM } else { EIO });
        }
        to_result(ret)
    }

    /// Errors: `EIO` when the allocator lost its trees.
    fn check(&self, guard: &MutexGuard<'_, Locked>) -> Result {
        if guard.lost.get() {
            return Err(EIO);
        }
        Ok(())
    }

    /// The allocator lost its trees.
    fn remove_before_reset(&self, guard: &MutexGuard<'_, Locked>) {
        guard.lost.set(true);
        self.note(guard);
        pr_err!(
            "the kernel ran out of memory in its allocator of {} bytes, which loses track of them: nothing of them is allocated any more\n",
            self.end()
        );
    }

    /// Gives back what is in a list that came from this allocator.
    fn give(&self, guard: &MutexGuard<'_, Locked>, blocks: &Blocks, clear: bool) {
        if self.check(guard).is_err() {
            return;
        }
        let flags = if clear { CLEARED } else { 0 };
        // SAFETY: By the type invariant the allocator is initialised. Its lock is held, and the blocks came from it.
        unsafe { bindings::gpu_buddy_free_list(self.inner.get(), blocks.0.get(), flags) };
    }

    /// Joins all neighbours that are free. What was cleared is not known any more.
    fn join(&self, _: &MutexGuard<'_, Locked>) {
        // SAFETY: By the type invariant the allocator is initialised, and its lock is held.
        unsafe { bindings::gpu_buddy_reset_clear(self.inner.get(), false) };
    }

    /// The largest piece that can be had once neighbours were joined.
    fn longest_run(&self, guard: &MutexGuard<'_, Locked>) -> u64 {
        if self.check(guard).is_err() {
            return 0;
        }
        // SAFETY: By the type invariant the allocator is initialised, and its lock is held.
        unsafe { sys::p2pmem_buddy_longest(self.inner.get()) }
    }

    /// Gives back what is in a list that came from this allocator and was not used: what was cleared is known still.
    fn put_back(&self, _: &MutexGuard<'_, Locked>, blocks: &Blocks) {
        // SAFETY: By the type invariant the allocator is initialised. Its lock is held, and the blocks came from it.
        unsafe { sys::p2pmem_buddy_put_back(self.inner.get(), blocks.0.get()) };
    }

    /// Whether a piece can be had. `blocks` is an empty list. The lock is held all the time, so that nobody finds less free
    /// memory than there is. What was cleared is known afterwards, but for neighbours that can only be had together.
    fn fits(&self, guard: &MutexGuard<'_, Locked>, blocks: &Blocks, size: u64, align: u64) -> bool {
        let taken = self.take(guard, blocks, size, align);
        if taken.is_ok() {
            self.put_back(guard, blocks);
            guard.block.set(self.largest_block(guard));
        }
        taken.is_ok()
    }

    /// What it has, without its lock.
    pub(crate) fn hint(&self) -> Arc<FreeHint> {
        self.hint.clone()
    }

    /// Updates the hint.
    fn note(&self, guard: &MutexGuard<'_, Locked>) {
        let block = self.largest_block(guard);
        self.longest.store(UNKNOWN, Relaxed);
        guard.block.set(block);
        self.hint.set(self.free_bytes(guard), block);
    }

    /// Free bytes.
    pub(crate) fn free(&self) -> u64 {
        self.free_bytes(&self.lock.lock())
    }

    fn free_bytes(&self, guard: &MutexGuard<'_, Locked>) -> u64 {
        if self.check(guard).is_err() {
            return 0;
        }
        // SAFETY: By the type invariant the allocator is initialised, and its lock is held.
        unsafe { (*self.inner.get()).avail }
    }

    /// Where the managed range ends.
    fn end(&self) -> u64 {
        // SAFETY: By the type invariant the allocator is initialised; the size never changes.
        unsafe { (*self.inner.get()).size }
    }

    /// The largest block that is free without joining neighbours, a power of two.
    fn largest_block(&self, guard: &MutexGuard<'_, Locked>) -> u64 {
        if self.check(guard).is_err() {
            return 0;
        }
        // SAFETY: By the type invariant the allocator is initialised, and its lock is held.
        unsafe { sys::p2pmem_buddy_largest(self.inner.get()) }
    }

    /// A lower bound of the largest piece that can be had, which is exact as to whether `size` at `align` fits.
    pub(crate) fn largest_for(&self, size: u64, align: u64) -> u64 {
        let trial = Blocks::new();
        let guard = self.lock.lock();
        let block = self.largest_block(&guard);
        if size.max(align).checked_next_power_of_two().is_some_and(|n| n <= block) {
            return block;
        }
        let may = align <= block.max(size) && size <= self.free_bytes(&guard);
        if may && trial.is_ok_and(|blocks| self.fits(&guard, &blocks, size, align)) {
            return size.max(block);
        }
        // The block is large enough in bytes, but not with that alignment.
        block.min(size.saturating_sub(PAGE_SIZE as u64))
    }

    /// The largest piece that can be had at page alignment. It looks at every block, once for each change: for people to see, not
    /// to decide by. It changes nothing.
    pub(crate) fn largest(&self) -> u64 {
        let guard = self.lock.lock();
        let known = self.longest.load(Relaxed);
        if known != UNKNOWN {
            return known;
        }
        let longest = self.longest_run(&guard);
        self.longest.store(longest, Relaxed);
        drop(guard);
        longest
    }
}

#[pinned_drop]
impl PinnedDrop for Buddy {
    fn drop(self: Pin<&mut Self>) {
        let guard = self.lock.lock();
        if self.check(&guard).is_err() {
            return;
        }
        // SAFETY: By the type invariant the allocator is initialised. Extents keep it by a reference, so what is
        // still allocated is the part before `start` alone, which goes back here.
        unsafe {
            bindings::gpu_buddy_free_list(self.inner.get(), guard.below.0.get(), 0);
            bindings::gpu_buddy_fini(self.inner.get());
        }
    }
}

impl Extent {
    /// Offset in the BAR.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes; at least what was asked for.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Whether the memory was cleared since its last owner had it.
    pub(crate) fn is_clear(&self) -> bool {
        self.clear
    }

    /// States that the memory is all zeroes now.
    pub(crate) fn set_clear(&mut self, clear: bool) {
        self.clear = clear;
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        let guard = self.buddy.lock.lock();
        self.buddy.give(&guard, &self.blocks, self.clear);
        self.buddy.note(&guard);
    }
}

#[kunit_tests(p2pmem_buddy)]
mod tests {
    use super::*;
    use crate::{
        ext::free_hint::FitBounds,
        policy::ranking::{
            Capacity,
            FitHint, //
        }, //
    };

    const PAGE: u64 = PAGE_SIZE as u64;

    /// Single pages until there is none left.
    fn all_pages(buddy: &Arc<Buddy>) -> Result<KVec<Extent>> {
        let mut pages = KVec::new();
        while let Ok(page) = buddy.alloc(PAGE, PAGE) {
            pages.push(page, GFP_KERNEL)?;
        }
        Ok(pages)
    }

    #[test]
    fn a_range_is_whole_pages_and_not_empty() {
        for (start, end) in [
            (0, 0),
            (PAGE, PAGE),
            (2 * PAGE, PAGE),
            (0, PAGE + 1),
            (1, PAGE),
            (0, (1 << 62) + PAGE),
            (1 << 62, 1 << 63),
            (0, u64::MAX - PAGE + 1),
        ] {
            assert!(Buddy::new(start, end).is_err_and(|e| e == EINVAL));
        }
    }

    #[test]
    fn the_largest_range_is_one_to_work_with() -> Result {
        let buddy = Buddy::new(0, Buddy::MOST)?;
        assert_eq!(buddy.largest(), Buddy::MOST);
        let extent = buddy.alloc(3 * PAGE, 1 << 40)?;
        assert!(buddy.largest() >= Buddy::MOST / 2);
        drop(extent);
        assert_eq!(buddy.free(), Buddy::MOST);
        Ok(())
    }

    #[test]
    fn what_lost_its_trees_is_left_alone() -> Result {
        let buddy = Buddy::new(PAGE, 16 * PAGE)?;
        let extent = buddy.alloc(2 * PAGE, PAGE)?;
        buddy.remove_before_reset(&buddy.lock.lock());
        assert!(buddy.alloc(PAGE, PAGE).is_err_and(|e| e == EIO));
        assert!(buddy.take_unclear(PAGE).is_err_and(|e| e == EIO));
        assert_eq!(
            (buddy.free(), buddy.largest(), buddy.largest_for(PAGE, PAGE)),
            (0, 0, 0)
        );
        // Nothing was touched, so that it can be found again here.
        buddy.lock.lock().lost.set(false);
        assert_eq!(buddy.free(), 13 * PAGE);
        drop(extent);
        assert_eq!(buddy.free(), 15 * PAGE);
        Ok(())
    }

    #[test]
    fn every_page_is_handed_out_once() -> Result {
        let (start, end) = (3, 29);
        let buddy = Buddy::new(start * PAGE, end * PAGE)?;
        assert_eq!(buddy.free(), (end - start) * PAGE);
        let pages = all_pages(&buddy)?;
        assert_eq!(pages.len() as u64, end - start);
        assert_eq!(buddy.free(), 0);
        let mut seen = [false; 32];
        for page in &pages {
            assert_eq!(page.size(), PAGE);
            let at = (page.offset() / PAGE) as usize;
            assert!((start as usize..end as usize).contains(&at) && !seen[at]);
            seen[at] = true;
        }
        assert_eq!(buddy.largest(), 0);
        drop(pages);
        assert_eq!(buddy.free(), (end - start) * PAGE);
        Ok(())
    }

    #[test]
    fn sizes_and_alignments_at_the_ends() -> Result {
        let buddy = Buddy::new(0, 64 * PAGE)?;
        for pages in [1, 2, 3, 5, 7, 8, 33, 63, 64] {
            for align in [1, 2, 8, 32] {
                let extent = buddy.alloc(pages * PAGE, align * PAGE)?;
                assert!(extent.size() >= pages * PAGE);
                assert_eq!(extent.offset() % (align * PAGE), 0);
                assert!(extent.offset() + extent.size() <= 64 * PAGE);
                assert_eq!(buddy.free(), 64 * PAGE - extent.size());
            }
        }
        for (size, align) in [
            (0, PAGE),
            (1, PAGE),
            (PAGE + 1, PAGE),
            (PAGE, 0),
            (PAGE, 1),
            (PAGE, 3 * PAGE),
        ] {
            assert!(buddy.alloc(size, align).is_err_and(|e| e == EINVAL));
        }
        for (size, align) in [
            (65 * PAGE, PAGE),
            (PAGE, 128 * PAGE),
            (u64::MAX & !(PAGE - 1), PAGE),
            (1 << 63, PAGE),
        ] {
            assert!(buddy.alloc(size, align).is_err_and(|e| e == ENOSPC));
        }
        assert_eq!(buddy.free(), 64 * PAGE);
        Ok(())
    }

    #[test]
    fn the_largest_piece_is_one_that_can_be_had() -> Result {
        let buddy = Buddy::new(0, 64 * PAGE)?;
        assert_eq!(buddy.largest(), 64 * PAGE);
        let mut pages = all_pages(&buddy)?;
        // Every second page is free: half of the bytes, in pieces of one page.
        pages.retain(|page| (page.offset() / PAGE) % 2 == 0);
        assert_eq!(buddy.free(), 32 * PAGE);
        assert_eq!(buddy.largest(), PAGE);
        assert_eq!(buddy.largest_for(2 * PAGE, PAGE), PAGE);
        assert!(buddy.largest_for(PAGE, PAGE) >= PAGE);
        assert!(buddy.alloc(2 * PAGE, PAGE).is_err_and(|e| e == ENOSPC));
        // Pages 8 to 15 are free as well, and with 7 nine in a row.
        pages.retain(|page| !(8..16).contains(&(page.offset() / PAGE)));
        assert_eq!(buddy.largest_for(8 * PAGE, 8 * PAGE), 8 * PAGE);
        assert!(buddy.largest_for(8 * PAGE, 16 * PAGE) < 8 * PAGE);
        let largest = buddy.largest();
        assert!(largest >= 8 * PAGE && buddy.alloc(largest, PAGE).is_ok());
        drop(pages);
        assert_eq!(buddy.largest(), 64 * PAGE);
        Ok(())
    }

    #[test]
    fn the_gauge_says_what_the_allocator_has() -> Result {
        let buddy = Buddy::new(PAGE, 64 * PAGE)?;
        let hint = buddy.hint();
        let one = FitBounds::of(PAGE, PAGE).ok_or(EINVAL)?;
        let has = |free: u64, largest: u64| Capacity {
            free: free * PAGE,
            largest: largest * PAGE,
        };
        let is = |free, largest| hint.fit(&one) == FitHint::Fits(has(free, largest));
        assert!(is(63, 32));
        let half = buddy.alloc(32 * PAGE, PAGE)?;
        assert!(is(31, 16));
        let page = buddy.alloc(PAGE, PAGE)?;
        // Who asks what would fit changes nothing.
        assert!(buddy.largest() >= 16 * PAGE && is(30, 16));
        assert!(buddy.alloc(40 * PAGE, PAGE).is_err() && is(30, 16));
        drop(half);
        assert!(is(62, 32));
        drop(page);
        assert!(is(63, 32));
        Ok(())
    }

    #[test]
    fn what_was_cleared_is_known() -> Result {
        let buddy = Buddy::new(0, 16 * PAGE)?;
        let mut extent = buddy.alloc(4 * PAGE, PAGE)?;
        assert!(!extent.is_clear());
        let at = extent.offset();
        extent.set_clear(true);
        drop(extent);
        // Clear memory is taken first, and is dirty when it comes back without having been cleared.
        let mut extent = buddy.alloc(4 * PAGE, PAGE)?;
        assert!(extent.is_clear() && extent.offset() == at);
        extent.set_clear(false);
        drop(extent);
        assert!(!buddy.alloc(16 * PAGE, PAGE)?.is_clear());
        Ok(())
    }

    #[test]
    fn who_asks_for_the_largest_piece_changes_nothing() -> Result {
        let buddy = Buddy::new(0, 60 * PAGE)?;
        // Clear memory and other by turns, in pieces of two pages, one of which is in use.
        let mut pieces = KVec::new();
        while let Ok(mut piece) = buddy.alloc(2 * PAGE, PAGE) {
            piece.set_clear((piece.offset() / (2 * PAGE)) % 2 == 0);
            pieces.push(piece, GFP_KERNEL)?;
        }
        assert_eq!(buddy.largest(), 0);
        pieces.retain(|piece| piece.offset() == 20 * PAGE);
        assert_eq!(buddy.free(), 58 * PAGE);
        // Pages 22 to 59, of which 32 to 47 are the largest block.
        assert_eq!(buddy.largest(), 31 * PAGE);
        assert_eq!(buddy.largest(), 31 * PAGE);
        // What is clear is known as before.
        let mut unclear = 0;
        while let Some(mut extent) = buddy.take_unclear(64 * PAGE)? {
            unclear += extent.size();
            extent.set_clear(true);
        }
        assert_eq!(unclear, 30 * PAGE);
        drop(pieces);
        assert_eq!(buddy.largest(), 60 * PAGE);
        Ok(())
    }

    #[test]
    fn who_asks_whether_it_fits_changes_nothing() -> Result {
        let buddy = Buddy::new(0, 4 * PAGE)?;
        // Page 0 is in use, page 1 is clear, pages 2 and 3 are not: three pages are there in two blocks.
        let mut pages = all_pages(&buddy)?;
        for page in pages.iter_mut() {
            page.set_clear(page.offset() == PAGE);
        }
        pages.retain(|page| page.offset() == 0);
        assert_eq!(buddy.largest_for(3 * PAGE, PAGE), 3 * PAGE);
        let mut unclear = 0;
        while let Some(mut extent) = buddy.take_unclear(4 * PAGE)? {
            unclear += extent.size();
            extent.set_clear(true);
        }
        assert_eq!(unclear, 2 * PAGE);
        Ok(())
    }

    #[test]
    fn cleared_and_other_memory_is_one_piece() -> Result {
        // 50 pages round up to more than there is, or to all of it.
        for all in [60, 64] {
            let buddy = Buddy::new(0, all * PAGE)?;
            let mut pieces = KVec::new();
            while let Ok(mut piece) = buddy.alloc(2 * PAGE, PAGE) {
                piece.set_clear((piece.offset() / (2 * PAGE)) % 2 == 0);
                pieces.push(piece, GFP_KERNEL)?;
            }
            drop(pieces);
            assert!(buddy.largest_for(50 * PAGE, PAGE) >= 50 * PAGE);
            let most = buddy.alloc(50 * PAGE, PAGE)?;
            assert!(most.size() >= 50 * PAGE && !most.is_clear());
            drop(most);
            assert!(buddy.alloc(all * PAGE, PAGE).is_ok());
        }
        Ok(())
    }

    #[test]
    fn what_was_not_cleared_is_found() -> Result {
        let buddy = Buddy::new(0, 64 * PAGE)?;
        for most in [0, 1, PAGE - 1, PAGE + 1, 3 * PAGE, u64::MAX] {
            assert!(buddy.take_unclear(most).is_err_and(|e| e == EINVAL));
        }
        // Nobody cleared what is new.
        let first = buddy.take_unclear(16 * PAGE)?.ok_or(EINVAL)?;
        assert!(first.size() == 16 * PAGE && !first.is_clear());
        drop(first);
        let mut steps = 0;
        while let Some(mut extent) = buddy.take_unclear(16 * PAGE)? {
            assert!(extent.size() <= 16 * PAGE && !extent.is_clear());
            extent.set_clear(true);
            steps += 1;
        }
        assert_eq!(steps, 4);
        // One page among clear ones.
        let mut all = all_pages(&buddy)?;
        for (at, page) in all.iter_mut().enumerate() {
            page.set_clear(at != 20);
        }
        drop(all);
        let page = buddy.take_unclear(16 * PAGE)?.ok_or(EINVAL)?;
        assert!(page.size() == PAGE && !page.is_clear());
        assert!(buddy.take_unclear(16 * PAGE)?.is_none());
        Ok(())
    }

    #[test]
    fn an_extent_outlives_the_allocators_owner() -> Result {
        let buddy = Buddy::new(PAGE, 8 * PAGE)?;
        let extent = buddy.alloc(2 * PAGE, PAGE)?;
        drop(buddy);
        assert_eq!(extent.buddy.free(), 5 * PAGE);
        Ok(())
    }
}
