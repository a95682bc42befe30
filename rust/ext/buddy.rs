// SPDX-License-Identifier: GPL-2.0

//! The kernel's buddy allocator over the offsets of a BAR.
//!
//! [`kernel::gpu::buddy`] wraps the same allocator, but can neither return the size of the largest free piece, which every
//! placement decision needs, nor which memory is cleared, which clearing between owners needs.
//!
//! Context: process context, may sleep, except for [`Buddy::hint`] and the accessors of [`Extent`]. `Buddy::lock` is a
//! mutex that protects the C structure. No other lock of p2pmem is taken under it.
//!
//! C header: [`include/linux/gpu_buddy.h`](srctree/include/linux/gpu_buddy.h)

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

/// Placeholder for a largest piece that is not known.
const UNKNOWN: u64 = u64::MAX;

/// An allocator of contiguous, page-aligned pieces of `0..size`. Memory before `start` is never allocated to callers.
///
/// # Invariants
///
/// - `inner` is a `struct gpu_buddy` that `gpu_buddy_init()` initialised. It is accessed only with `lock` held, except for
///   its size, which never changes.
/// - If `lost` is set, the trees of `inner` may be corrupt, and no C function is called on `inner` any more.
/// - Every non-empty [`Blocks`] of an allocator, in `below` or in an [`Extent`], holds blocks that are allocated from
///   `inner`.
#[pin_data(PinnedDrop)]
pub(crate) struct Buddy {
    #[pin]
    inner: Opaque<bindings::gpu_buddy>,
    #[pin]
    lock: Mutex<Locked>,
    /// Size in bytes of the largest piece, or [`UNKNOWN`] after a change. Accessed only with `lock` held.
    longest: Atomic<u64>,
    hint: Arc<FreeHint>,
}

// SAFETY: Nothing in the C structure depends on the thread that initialised it.
unsafe impl Send for Buddy {}
// SAFETY: By the type invariant the C structure is accessed only with `lock` held, except for its constant size. All other
// fields are `Sync`.
unsafe impl Sync for Buddy {}

/// State that the allocator's lock protects.
struct Locked {
    /// The blocks before `start`, which stay allocated.
    below: Blocks,
    /// Size in bytes of a block that is free: a lower bound of the largest free block.
    block: Cell<u64>,
    /// Whether the allocator's trees may be corrupt. Then `inner` is not accessed any more, and its C memory is leaked.
    lost: Cell<bool>,
}

/// A list of blocks of one allocator.
///
/// # Invariants
///
/// The box contains an initialised list head. The list is empty, or contains only blocks that one allocator allocated and
/// that no other list contains.
struct Blocks(KBox<Opaque<bindings::list_head>>);

// SAFETY: The box owns the list head. By the invariant the list's blocks belong to one allocator, whose lock the functions
// of [`Buddy`] hold when they access the list, on any thread.
unsafe impl Send for Blocks {}

impl Blocks {
    fn new() -> Result<Self> {
        let head = KBox::new(Opaque::new(bindings::list_head::default()), GFP_KERNEL_ACCOUNT)?;
        // SAFETY: `head` is a new allocation, which nothing else refers to. It is boxed, so the address that it stores in
        // itself stays valid when the box moves.
        unsafe {
            (*head.get()).next = head.get();
            (*head.get()).prev = head.get();
        }
        Ok(Self(head))
    }
}

/// An allocated piece. Dropping the extent frees the piece, as cleared memory if [`Self::set_clear`] said so, otherwise as
/// memory that must be cleared before its next use.
///
/// # Invariants
///
/// `blocks` contains the blocks of one allocation from `buddy`, which are `size` contiguous bytes from `offset` on.
pub(crate) struct Extent {
    buddy: Arc<Buddy>,
    blocks: Blocks,
    offset: u64,
    size: u64,
    clear: bool,
}

impl Buddy {
    /// Maximum size: more than any BAR has, and the C code can add two such sizes without an overflow.
    const MOST: u64 = 1 << 62;

    /// Makes an allocator of `start..end`. May sleep.
    ///
    /// Errors: `EINVAL` if the range is empty, not whole pages or larger than [`Self::MOST`]; `ENOMEM`; `EINTR` if the
    /// task is being killed; `EIO` if the allocator failed.
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
            // INVARIANT: `gpu_buddy_init()` initialises the structure, or the initialiser fails. `below` is empty.
            try_pin_init!(Self {
                inner <- Opaque::try_ffi_init(|slot| {
                    // SAFETY: `slot` is valid for writes of the structure, which is pinned from here on. `end` is not 0,
                    // and a multiple of the page size, which is a power of two.
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

    /// Allocates one contiguous piece of at least `size` bytes. Cleared memory is preferred. May sleep.
    ///
    /// `size` is a multiple of the page size, `align` a power of two that is at least the page size. Errors: `EINVAL` for
    /// other arguments; `ENOSPC` if no such piece is free; `ENOMEM`; `EINTR` if the task is being killed; `EIO` if the
    /// allocator failed.
    pub(crate) fn alloc(self: &Arc<Self>, size: u64, align: u64) -> Result<Extent> {
        let blocks = Blocks::new()?;
        let guard = self.lock.lock();
        let (offset, size, clear) = self.take(&guard, &blocks, size, align)?;
        self.note(&guard);
        drop(guard);
        // INVARIANT: `take()` put the blocks of one allocation into the list, with this offset and size.
        Ok(Extent {
            buddy: self.clone(),
            blocks,
            offset,
            size,
            clear,
        })
    }

    /// Allocates one block that is not cleared, of at most `most` bytes. Returns `None` if all free memory is cleared.
    ///
    /// `most` is a power of two that is at least the page size. May sleep. Errors: as [`Self::alloc`].
    pub(crate) fn take_unclear(self: &Arc<Self>, most: u64) -> Result<Option<Extent>> {
        if most < PAGE_SIZE as u64 || !most.is_power_of_two() {
            return Err(EINVAL);
        }
        let blocks = Blocks::new()?;
        let guard = self.lock.lock();
        self.check(&guard)?;
        // SAFETY: By the type invariant the structure is initialised; the lock is held, and `check()` says that its trees
        // are valid.
        let largest = unsafe { sys::p2pmem_buddy_largest_dirty(self.inner.get()) };
        let size = largest.min(most);
        if size == 0 {
            return Ok(None);
        }
        // Without `CLEAR`, the allocator looks among memory that is not cleared first.
        self.ask(&guard, &blocks, self.end(), size, PAGE_SIZE as u64, 0)?;
        let (mut offset, mut len, mut clear) = (0, 0, false);
        // SAFETY: By the type invariant the structure is initialised, and the lock is held. `ask()` succeeded, so the list
        // contains the blocks of one allocation. The other pointers are those of local variables.
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

    /// Allocates one contiguous piece into `blocks`, an empty list. Returns the offset, the size in bytes, and whether the
    /// piece is all zeroes. The list is empty after an error. Errors: as [`Self::alloc`].
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
        // The allocator aligns a contiguous allocation to its size, rounded up to a power of two. For a larger alignment,
        // request a power of two without `CONTIGUOUS`.
        let (ask, flags) = if align > rounded {
            (rounded, CLEAR)
        } else {
            (size, CLEAR | CONTIGUOUS)
        };
        // The range contains all memory, but must be given: the allocator joins cleared and other memory only within a
        // range. It returns `EINVAL` if the size exceeds the range.
        let ask = || {
            let ret = self.ask(guard, blocks, self.end(), ask, align, flags);
            ret.map_err(|e| if e == EINVAL { ENOSPC } else { e })
        };
        match ask() {
            // If the rounded size exceeds all memory, the allocator does not join cleared with other memory. Join them
            // here and try again.
            Err(e) if e == ENOSPC && rounded > self.end() && size <= self.longest_run(guard) => {
                self.join(guard);
                ask()?;
            }
            done => done?,
        }
        let (mut offset, mut len, mut clear) = (0, 0, false);
        // SAFETY: By the type invariant the structure is initialised, and the lock is held. `ask()` succeeded, so the list
        // contains the blocks of one allocation. The other pointers are those of local variables.
        let whole =
            unsafe { sys::p2pmem_buddy_extent(self.inner.get(), blocks.0.get(), &mut offset, &mut len, &mut clear) };
        if !whole || offset & (align - 1) != 0 || len < size {
            self.put_back(guard, blocks);
            return Err(ENOSPC);
        }
        Ok((offset, len, clear))
    }

    /// Requests blocks within `0..end` from the allocator, into an empty list.
    ///
    /// If the kernel has no memory to split a block, the error path of `gpu_buddy_alloc_blocks()` frees a block that is
    /// free already, and corrupts its trees. Such small allocations normally wait until memory is free. They fail only in
    /// a task that was killed, after the memory reserves are used up. So a task that is being killed gets `EINTR` here.
    ///
    /// A task that is killed after this check can still corrupt the trees. The symptom is an error although a block of a
    /// sufficient size is free, or an error of the first request of a new allocator (`RANGE`). After the symptom,
    /// [`Self::lose`] stops all use of the allocator. Errors: `EIO` then, or `ENOMEM`; `ENOSPC` and `EINVAL` of the C
    /// function.
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
        // SAFETY: By the type invariant the structure is initialised; the lock is held, and `check()` says that its trees
        // are valid. The list is initialised and empty. The C function checks the range, the size and the alignment.
        let ret =
            unsafe { bindings::gpu_buddy_alloc_blocks(self.inner.get(), 0, end, size, align, blocks.0.get(), flags) };
        let fits = size.max(align).checked_next_power_of_two();
        if ret != 0 && (flags & RANGE != 0 || fits.is_some_and(|block| block <= guard.block.get())) {
            self.give_up(guard);
            return Err(if ret == ENOMEM.to_errno() { ENOMEM } else { EIO });
        }
        to_result(ret)
    }

    /// Checks that the allocator's trees are valid. Errors: `EIO` if they may be corrupt.
    fn check(&self, guard: &MutexGuard<'_, Locked>) -> Result {
        if guard.lost.get() {
            return Err(EIO);
        }
        Ok(())
    }

    /// Stops all use of the allocator, whose trees may be corrupt, and logs that.
    fn give_up(&self, guard: &MutexGuard<'_, Locked>) {
        guard.lost.set(true);
        self.note(guard);
        pr_err!(
            "the kernel ran out of memory in its allocator of {} bytes, which loses track of them: nothing of them is allocated any more\n",
            self.end()
        );
    }

    /// Frees the blocks of a list of this allocator, as cleared memory if `clear`. The blocks leak if the trees may be
    /// corrupt.
    fn give(&self, guard: &MutexGuard<'_, Locked>, blocks: &Blocks, clear: bool) {
        if self.check(guard).is_err() {
            return;
        }
        let flags = if clear { CLEARED } else { 0 };
        // SAFETY: By the type invariant the structure is initialised; the lock is held, and `check()` says that its trees
        // are valid. By the invariant of `Blocks` the blocks are allocated, from this allocator as the callers guarantee.
        unsafe { bindings::gpu_buddy_free_list(self.inner.get(), blocks.0.get(), flags) };
    }

    /// Joins all free neighbours, cleared or not. Afterwards no memory counts as cleared. The trees must be valid.
    fn join(&self, _: &MutexGuard<'_, Locked>) {
        // SAFETY: By the type invariant the structure is initialised; the lock is held. The caller has seen a
        // `longest_run()` above 0, which is 0 if the trees may be corrupt.
        unsafe { bindings::gpu_buddy_reset_clear(self.inner.get(), false) };
    }

    /// Returns the size in bytes of the largest piece that can be allocated after neighbours are joined. Reads every
    /// block.
    fn longest_run(&self, guard: &MutexGuard<'_, Locked>) -> u64 {
        if self.check(guard).is_err() {
            return 0;
        }
        // SAFETY: By the type invariant the structure is initialised; the lock is held, and `check()` says that its trees
        // are valid.
        unsafe { sys::p2pmem_buddy_longest(self.inner.get()) }
    }

    /// Frees the blocks of a list of this allocator that were not used. Cleared blocks stay cleared.
    fn put_back(&self, _: &MutexGuard<'_, Locked>, blocks: &Blocks) {
        // SAFETY: By the type invariant the structure is initialised; the lock is held. The blocks come from an `ask()`
        // that succeeded under this lock, so they are allocated and the trees are valid.
        unsafe { sys::p2pmem_buddy_put_back(self.inner.get(), blocks.0.get()) };
    }

    /// Returns whether a piece can be allocated, by a trial. `blocks` is an empty list.
    ///
    /// The caller holds the lock during the trial, so no other request finds less free memory than there is. Cleared
    /// memory stays known as cleared, except for neighbours that had to be joined for the piece.
    fn fits(&self, guard: &MutexGuard<'_, Locked>, blocks: &Blocks, size: u64, align: u64) -> bool {
        let taken = self.take(guard, blocks, size, align);
        if taken.is_ok() {
            self.put_back(guard, blocks);
            guard.block.set(self.largest_block(guard));
        }
        taken.is_ok()
    }

    /// Returns the free-space hint, which is readable without the lock.
    pub(crate) fn hint(&self) -> Arc<FreeHint> {
        self.hint.clone()
    }

    /// Updates the free-space hint after a change.
    fn note(&self, guard: &MutexGuard<'_, Locked>) {
        let block = self.largest_block(guard);
        self.longest.store(UNKNOWN, Relaxed);
        guard.block.set(block);
        self.hint.set(self.free_bytes(guard), block);
    }

    /// Returns the number of free bytes. May sleep.
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

    /// Returns the end of the managed range.
    fn end(&self) -> u64 {
        // SAFETY: By the type invariant the structure is initialised. Its size never changes, so no lock is needed.
        unsafe { (*self.inner.get()).size }
    }

    /// Returns the size in bytes of the largest free block, a power of two, without joining neighbours.
    fn largest_block(&self, guard: &MutexGuard<'_, Locked>) -> u64 {
        if self.check(guard).is_err() {
            return 0;
        }
        // SAFETY: By the type invariant the structure is initialised; the lock is held, and `check()` says that its trees
        // are valid.
        unsafe { sys::p2pmem_buddy_largest(self.inner.get()) }
    }

    /// Returns a lower bound in bytes of the largest free piece. May sleep.
    ///
    /// If the result is at least `size`, an allocation of `size` bytes with alignment `align` would succeed now. Otherwise
    /// the allocation would fail, or there was no memory for the trial.
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
        // The block has enough bytes, but not the alignment.
        block.min(size.saturating_sub(PAGE_SIZE as u64))
    }

    /// Returns the size in bytes of the largest piece that can be allocated with page alignment. Changes nothing. May
    /// sleep.
    ///
    /// Reads every block once after each change, so this is for display, not for decisions.
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
        // SAFETY: By the type invariant the structure is initialised, and `check()` says that its trees are valid. Each
        // extent holds a reference to the allocator, so none exists any more: only the blocks in `below` are allocated,
        // and they are freed first, as `gpu_buddy_fini()` requires. The C structure is not used afterwards.
        unsafe {
            bindings::gpu_buddy_free_list(self.inner.get(), guard.below.0.get(), 0);
            bindings::gpu_buddy_fini(self.inner.get());
        }
    }
}

impl Extent {
    /// Returns the offset in bytes in the BAR.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the size in bytes, which is at least the requested size.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Returns whether the memory is known to be all zeroes.
    pub(crate) fn is_clear(&self) -> bool {
        self.clear
    }

    /// Sets whether the memory is all zeroes now.
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

    /// Allocates single pages until none is free.
    fn all_pages(buddy: &Arc<Buddy>) -> Result<KVec<Extent>> {
        let mut pages = KVec::new();
        while let Ok(page) = buddy.alloc(PAGE, PAGE) {
            pages.push(page, GFP_KERNEL)?;
        }
        Ok(pages)
    }

    #[test]
    fn invalid_ranges_are_rejected() {
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
    fn largest_range_is_usable() -> Result {
        let buddy = Buddy::new(0, Buddy::MOST)?;
        assert_eq!(buddy.largest(), Buddy::MOST);
        let extent = buddy.alloc(3 * PAGE, 1 << 40)?;
        assert!(buddy.largest() >= Buddy::MOST / 2);
        drop(extent);
        assert_eq!(buddy.free(), Buddy::MOST);
        Ok(())
    }

    #[test]
    fn allocator_with_lost_trees_refuses_requests() -> Result {
        let buddy = Buddy::new(PAGE, 16 * PAGE)?;
        let extent = buddy.alloc(2 * PAGE, PAGE)?;
        buddy.give_up(&buddy.lock.lock());
        assert!(buddy.alloc(PAGE, PAGE).is_err_and(|e| e == EIO));
        assert!(buddy.take_unclear(PAGE).is_err_and(|e| e == EIO));
        assert_eq!(
            (buddy.free(), buddy.largest(), buddy.largest_for(PAGE, PAGE)),
            (0, 0, 0)
        );
        // `give_up()` does not change the allocator, so the test can use it again.
        buddy.lock.lock().lost.set(false);
        assert_eq!(buddy.free(), 13 * PAGE);
        drop(extent);
        assert_eq!(buddy.free(), 15 * PAGE);
        Ok(())
    }

    #[test]
    fn every_page_is_allocated_once() -> Result {
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
    fn sizes_and_alignments_at_limits() -> Result {
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
    fn largest_free_range_can_be_allocated() -> Result {
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
        // Pages 8 to 15 are free as well, and page 7: nine pages in a row.
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
    fn hint_agrees_with_allocator() -> Result {
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
        // A query does not change the hint.
        assert!(buddy.largest() >= 16 * PAGE && is(30, 16));
        assert!(buddy.alloc(40 * PAGE, PAGE).is_err() && is(30, 16));
        drop(half);
        assert!(is(62, 32));
        drop(page);
        assert!(is(63, 32));
        Ok(())
    }

    #[test]
    fn clear_state_is_tracked() -> Result {
        let buddy = Buddy::new(0, 16 * PAGE)?;
        let mut extent = buddy.alloc(4 * PAGE, PAGE)?;
        assert!(!extent.is_clear());
        let at = extent.offset();
        extent.set_clear(true);
        drop(extent);
        // Cleared memory is allocated first. It is dirty if it is freed without having been cleared.
        let mut extent = buddy.alloc(4 * PAGE, PAGE)?;
        assert!(extent.is_clear() && extent.offset() == at);
        extent.set_clear(false);
        drop(extent);
        assert!(!buddy.alloc(16 * PAGE, PAGE)?.is_clear());
        Ok(())
    }

    #[test]
    fn query_of_largest_range_has_no_side_effects() -> Result {
        let buddy = Buddy::new(0, 60 * PAGE)?;
        // Cleared and other pieces of two pages alternate. One of the pieces stays in use.
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
        // The query kept the state of cleared memory.
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
    fn query_of_fit_has_no_side_effects() -> Result {
        let buddy = Buddy::new(0, 4 * PAGE)?;
        // Page 0 is in use, page 1 is cleared, pages 2 and 3 are not. The three free pages are in two blocks.
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
    fn allocation_spans_clear_and_dirty_blocks() -> Result {
        // Rounded up, 50 pages are more than 60 pages, and exactly 64 pages.
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
    fn take_unclear_finds_all_dirty_memory() -> Result {
        let buddy = Buddy::new(0, 64 * PAGE)?;
        for most in [0, 1, PAGE - 1, PAGE + 1, 3 * PAGE, u64::MAX] {
            assert!(buddy.take_unclear(most).is_err_and(|e| e == EINVAL));
        }
        // New memory is not cleared.
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
        // One page is not cleared, all others are.
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
    fn extent_keeps_allocator_alive() -> Result {
        let buddy = Buddy::new(PAGE, 8 * PAGE)?;
        let extent = buddy.alloc(2 * PAGE, PAGE)?;
        drop(buddy);
        assert_eq!(extent.buddy.free(), 5 * PAGE);
        Ok(())
    }
}
