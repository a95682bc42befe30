// SPDX-License-Identifier: GPL-2.0

//! The kernel's buddy allocator over the offsets of a BAR.
//!
//! [`kernel::gpu::buddy`] wraps the same allocator, but cannot return the size of the largest free block, which every
//! placement decision needs, and cannot free a part of an allocation, which clearing between owners needs.
//!
//! The allocator knows nothing about the contents of memory: its blocks are never marked as cleared, so all free neighbors
//! merge.
//!
//! Context: process context, may sleep, except for [`Buddy::hint`] and the accessors of [`Extent`]. `Buddy::lock` is a
//! mutex that protects the C structure. No other lock of p2pmem is taken under it.
//!
//! C header: [`include/linux/gpu_buddy.h`](srctree/include/linux/gpu_buddy.h)

use crate::{
    ext::{
        free_hint::FreeHint,
        task::{
            is_killed,
            is_oom_victim, //
        }, //
    },
    sys, //
};
use kernel::{
    bindings,
    error::to_result,
    new_mutex,
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    },
    types::Opaque, //
};

const CONTIGUOUS: usize = bindings::GPU_BUDDY_CONTIGUOUS_ALLOCATION;
const RANGE: usize = bindings::GPU_BUDDY_RANGE_ALLOCATION;

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
    hint: Arc<FreeHint>,
}

// SAFETY: Nothing in the C structure depends on the thread that initialised it.
unsafe impl Send for Buddy {}
// SAFETY: By the type invariant the C structure is accessed only with `lock` held, except for its constant size. All other
// fields are `Sync`.
unsafe impl Sync for Buddy {}

/// State that the allocator's lock protects. A reference to it shows that the lock is held.
struct Locked {
    /// The blocks before `start`, which stay allocated.
    below: Blocks,
    /// Whether the allocator's trees may be corrupt. Then `inner` is not accessed any more, and its C memory is leaked.
    lost: bool,
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

/// An allocated piece. Dropping the extent frees the piece.
///
/// # Invariants
///
/// `blocks` contains blocks of one allocation from `buddy` in ascending order, which are `size` contiguous bytes from
/// `offset` on; fewer if `buddy` is lost.
pub(crate) struct Extent {
    buddy: Arc<Buddy>,
    blocks: Blocks,
    offset: u64,
    size: u64,
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
            lost: false,
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
                hint,
            }? Error),
            GFP_KERNEL,
        )?;
        let mut locked = buddy.lock.lock();
        if start > 0 {
            let below = Blocks::new()?;
            buddy.request(&mut locked, &below, start, PAGE_SIZE as u64, RANGE, true)?;
            locked.below = below;
        }
        buddy.note(&locked);
        drop(locked);
        Ok(buddy)
    }

    /// Allocates one contiguous piece of at least `size` bytes. May sleep.
    ///
    /// `size` is a multiple of the page size, `align` a power of two that is at least the page size. Errors: `EINVAL` for
    /// other arguments; `ENOSPC` if no such piece is free; `ENOMEM`; `EINTR` if the task is being killed; `EIO` if the
    /// allocator failed.
    pub(crate) fn alloc(self: &Arc<Self>, size: u64, align: u64) -> Result<Extent> {
        let blocks = Blocks::new()?;
        let mut locked = self.lock.lock();
        let (offset, size) = self.take(&mut locked, &blocks, size, align)?;
        self.note(&locked);
        drop(locked);
        // INVARIANT: `take()` put the blocks of one allocation into the list, with this offset and size.
        Ok(Extent {
            buddy: self.clone(),
            blocks,
            offset,
            size,
        })
    }

    /// Allocates one contiguous piece into `blocks`, an empty list. Returns the offset and the size in bytes. The list is
    /// empty after an error, unless the allocator is lost. Errors: as [`Self::alloc`].
    fn take(&self, locked: &mut Locked, blocks: &Blocks, size: u64, align: u64) -> Result<(u64, u64)> {
        let page = PAGE_SIZE as u64;
        if size == 0 || size % page != 0 || align < page || !align.is_power_of_two() {
            return Err(EINVAL);
        }
        let rounded = size.checked_next_power_of_two().ok_or(ENOSPC)?;
        if size.max(align) > self.end() {
            return Err(ENOSPC);
        }
        // A block of this size is free. The allocator takes one, and a block is aligned to its size.
        let must_fit = rounded.max(align) <= self.largest_block(locked);
        // The allocator aligns a contiguous allocation to its size, rounded up to a power of two. For a larger alignment,
        // request a power of two without `CONTIGUOUS`.
        let (wanted, flags) = if align > rounded {
            (rounded, 0)
        } else {
            (size, CONTIGUOUS)
        };
        self.request(locked, blocks, wanted, align, flags, must_fit)?;
        let (mut offset, mut len) = (0, 0);
        // SAFETY: By the type invariant the structure is initialised, and the lock is held. `request()` succeeded, so the
        // list contains the blocks of one allocation. The other pointers are those of local variables.
        let in_order = unsafe { sys::p2pmem_buddy_extent(self.inner.get(), blocks.0.get(), &mut offset, &mut len) };
        // The allocator returns more than `wanted` bytes, or other blocks than the free one, if it had no memory to split one.
        let align = if must_fit { align.max(rounded) } else { align };
        if !in_order || len != wanted || offset & (align - 1) != 0 {
            self.lose(locked);
            return Err(EIO);
        }
        Ok((offset, len))
    }

    /// Requests blocks from the allocator, into an empty list; with `RANGE` exactly `0..size`. `must_fit` says that enough memory
    /// is free.
    ///
    /// If the kernel has no memory to split a block, the error path of `gpu_buddy_alloc_blocks()` frees a block that is
    /// free already, and corrupts its trees. Such small allocations normally wait until memory is free. They fail only in
    /// a task that was killed, after the memory reserves are used up. So a task that is being killed gets `EINTR` here.
    ///
    /// A task that is killed after this check can still corrupt the trees. The symptom is an error in a task that the OOM
    /// killer chose, or an error although the request must fit. After the symptom, [`Self::lose`] stops all use of the
    /// allocator. Errors: `EIO` then; `ENOSPC`.
    fn request(
        &self,
        locked: &mut Locked,
        blocks: &Blocks,
        size: u64,
        align: u64,
        flags: usize,
        must_fit: bool,
    ) -> Result {
        if locked.lost {
            return Err(EIO);
        }
        if is_killed() {
            return Err(EINTR);
        }
        let end = if flags == RANGE { size } else { 0 };
        // SAFETY: By the type invariant the structure is initialised; the lock is held, and `lost` is not set, so the trees
        // are valid. The list is initialised and empty. The C function checks the range, the size and the alignment.
        let ret =
            unsafe { bindings::gpu_buddy_alloc_blocks(self.inner.get(), 0, end, size, align, blocks.0.get(), flags) };
        if ret == 0 {
            return Ok(());
        }
        if must_fit || ret == ENOMEM.to_errno() || is_oom_victim() {
            self.lose(locked);
            return Err(EIO);
        }
        Err(ENOSPC)
    }

    /// Stops all use of the allocator, whose trees may be corrupt, and logs that.
    fn lose(&self, locked: &mut Locked) {
        locked.lost = true;
        self.note(locked);
        pr_err!(
            "the kernel ran out of memory in its allocator of {} bytes, which loses track of them: nothing of them is allocated any more\n",
            self.end()
        );
    }

    /// Frees the blocks of a list of this allocator. The blocks leak if the trees may be corrupt.
    fn give(&self, locked: &Locked, blocks: &Blocks) {
        if locked.lost {
            return;
        }
        // SAFETY: By the type invariant the structure is initialised; the lock is held, and `lost` is not set, so the trees
        // are valid. By the invariant of `Blocks` the blocks are allocated, from this allocator as the callers guarantee.
        unsafe { bindings::gpu_buddy_free_list(self.inner.get(), blocks.0.get(), 0) };
    }

    /// Returns the free-space hint, which is readable without the lock.
    pub(crate) fn hint(&self) -> Arc<FreeHint> {
        self.hint.clone()
    }

    /// Updates the free-space hint after a change.
    fn note(&self, locked: &Locked) {
        self.hint.set(self.free_bytes(locked), self.largest_block(locked));
    }

    /// Returns the number of free bytes. May sleep.
    pub(crate) fn free(&self) -> u64 {
        self.free_bytes(&self.lock.lock())
    }

    fn free_bytes(&self, locked: &Locked) -> u64 {
        if locked.lost {
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

    /// Returns the size in bytes of the largest free block, a power of two.
    fn largest_block(&self, locked: &Locked) -> u64 {
        if locked.lost {
            return 0;
        }
        // SAFETY: By the type invariant the structure is initialised; the lock is held, and `lost` is not set, so the trees
        // are valid.
        unsafe { sys::p2pmem_buddy_largest(self.inner.get()) }
    }

    /// Returns a lower bound in bytes of the largest free piece. May sleep.
    ///
    /// If the result is at least `size`, an allocation of `size` bytes with alignment `align` would succeed now. Otherwise
    /// the allocation would fail, or there was no memory for the trial.
    pub(crate) fn largest_for(&self, size: u64, align: u64) -> u64 {
        let trial = Blocks::new();
        let mut locked = self.lock.lock();
        let block = self.largest_block(&locked);
        if size.max(align).checked_next_power_of_two().is_some_and(|n| n <= block) {
            return block;
        }
        // The piece may consist of adjacent blocks, or begin at an aligned smaller block. Only a trial shows that. The lock
        // is held, so no other request finds less free memory than there is. Freeing merges what the trial split.
        if let Ok(blocks) = trial {
            if size <= self.free_bytes(&locked) && self.take(&mut locked, &blocks, size, align).is_ok() {
                self.give(&locked, &blocks);
                return size.max(block);
            }
        }
        // The block has enough bytes, but not the alignment.
        block.min(size.saturating_sub(PAGE_SIZE as u64))
    }

    /// Returns the size in bytes of a piece that can be allocated now with page alignment: all free memory if one allocation
    /// can get it, otherwise the largest block. May sleep.
    pub(crate) fn largest(&self) -> u64 {
        self.largest_for(self.free(), PAGE_SIZE as u64)
    }
}

#[pinned_drop]
impl PinnedDrop for Buddy {
    fn drop(self: Pin<&mut Self>) {
        let locked = self.lock.lock();
        if locked.lost {
            return;
        }
        // SAFETY: By the type invariant the structure is initialised, and `lost` is not set, so the trees are valid. Each
        // extent holds a reference to the allocator, so none exists any more: only the blocks in `below` are allocated,
        // and they are freed first, as `gpu_buddy_fini()` requires. The C structure is not used afterwards.
        unsafe {
            bindings::gpu_buddy_free_list(self.inner.get(), locked.below.0.get(), 0);
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

    /// Frees the first `size` bytes of the piece. May sleep.
    ///
    /// Errors: `EINVAL` if `size` is not a multiple of the page size or larger than the piece; `EINTR` if the task is being
    /// killed, see [`Buddy::request`]. Nothing is freed then.
    pub(crate) fn free_front(&mut self, size: u64) -> Result {
        if size > self.size || size % PAGE_SIZE as u64 != 0 {
            return Err(EINVAL);
        }
        if is_killed() {
            return Err(EINTR);
        }
        let mut locked = self.buddy.lock.lock();
        if !locked.lost {
            // SAFETY: By the type invariants the structure is initialised, and the list has this allocator's blocks in
            // ascending order, which are at least `size` bytes; the lock is held, and `lost` is not set, so the trees are
            // valid.
            let ret = unsafe { sys::p2pmem_buddy_free_front(self.buddy.inner.get(), self.blocks.0.get(), size) };
            if ret != 0 {
                self.buddy.lose(&mut locked);
            }
            self.buddy.note(&locked);
        }
        // INVARIANT: The C function freed the first `size` bytes, or the allocator is lost.
        self.offset += size;
        self.size -= size;
        Ok(())
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        let locked = self.buddy.lock.lock();
        self.buddy.give(&locked, &self.blocks);
        self.buddy.note(&locked);
    }
}

#[kunit_tests(p2pmem_buddy)]
mod tests {
    use super::*;
    use crate::{
        ext::free_hint::{
            FitBounds,
            FitHint, //
        },
        policy::ranking::Capacity, //
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
        let mut extent = buddy.alloc(4 * PAGE, PAGE)?;
        buddy.lose(&mut buddy.lock.lock());
        assert!(buddy.alloc(PAGE, PAGE).is_err_and(|e| e == EIO));
        // What is freed leaks, so that nobody waits for the memory.
        extent.free_front(PAGE)?;
        assert_eq!(extent.size(), 3 * PAGE);
        assert_eq!(
            (buddy.free(), buddy.largest(), buddy.largest_for(PAGE, PAGE)),
            (0, 0, 0)
        );
        // `lose()` does not change the allocator, so the test can use it again.
        buddy.lock.lock().lost = false;
        assert_eq!(buddy.free(), 11 * PAGE);
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
        assert_eq!(buddy.largest_for(9 * PAGE, PAGE), 9 * PAGE);
        let largest = buddy.largest();
        assert!(largest >= 8 * PAGE && buddy.alloc(largest, PAGE).is_ok());
        drop(pages);
        assert_eq!(buddy.largest(), 64 * PAGE);
        Ok(())
    }

    #[test]
    fn contiguous_free_memory_is_the_largest_piece() -> Result {
        // In the last two cases, the blocks at the ends are too small for one allocation of all free memory.
        for (start, end, largest) in [(0, 60, 60), (8, 64, 56), (1, 15, 4), (3, 29, 8)] {
            let buddy = Buddy::new(start * PAGE, end * PAGE)?;
            assert_eq!(buddy.largest(), largest * PAGE);
            // Queries take nothing.
            assert_eq!(buddy.free(), (end - start) * PAGE);
            assert_eq!(buddy.alloc(largest * PAGE, PAGE)?.size(), largest * PAGE);
        }
        Ok(())
    }

    #[test]
    fn hint_agrees_with_allocator() -> Result {
        let buddy = Buddy::new(PAGE, 64 * PAGE)?;
        let hint = buddy.hint();
        let one = FitBounds::of(PAGE, PAGE);
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
    fn front_of_extent_is_freed_alone() -> Result {
        // One block, a part of one, several blocks, and several blocks that begin at page 30.
        for (start, end, size) in [(0, 64, 64), (0, 64, 21), (0, 60, 60), (5, 61, 31)] {
            for step in [1, 3, 8, 64] {
                let buddy = Buddy::new(start * PAGE, end * PAGE)?;
                let mut extent = buddy.alloc(size * PAGE, PAGE)?;
                let (first, last) = (extent.offset(), extent.offset() + extent.size());
                while extent.size() > 0 {
                    let front = extent.size().min(step * PAGE);
                    extent.free_front(front)?;
                    assert_eq!(extent.offset() + extent.size(), last);
                    assert_eq!(buddy.free(), (end - start) * PAGE - extent.size());
                    // Nobody gets a page that the extent still has.
                    let pages = all_pages(&buddy)?;
                    assert_eq!(buddy.free(), 0);
                    assert!(pages
                        .iter()
                        .all(|page| !(extent.offset()..last).contains(&page.offset())));
                    assert!(pages.iter().any(|page| page.offset() == first));
                }
                drop(extent);
                assert_eq!(buddy.free(), (end - start) * PAGE);
                assert_eq!(buddy.alloc(size * PAGE, PAGE)?.offset(), first);
            }
        }
        let buddy = Buddy::new(0, 8 * PAGE)?;
        let mut extent = buddy.alloc(3 * PAGE, PAGE)?;
        for size in [1, PAGE + 1, 4 * PAGE, u64::MAX, u64::MAX - PAGE + 1] {
            assert!(extent.free_front(size).is_err_and(|e| e == EINVAL));
        }
        extent.free_front(0)?;
        assert_eq!((extent.size(), buddy.free()), (3 * PAGE, 5 * PAGE));
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
