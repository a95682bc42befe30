// SPDX-License-Identifier: GPL-2.0

//! Memory for peer-to-peer DMA: a part of a BAR, with a `struct page` for each page, or as a window without pages, whose size costs
//! no memory.
//!
//! All functions are for process context and may sleep, except `phys`, `bus_addr`, `size` and `covers`. [`Backing::insert`] is
//! called in a page fault, with the area locked. This file has no locks.
//!
//! C headers: [`include/linux/pci-p2pdma.h`](srctree/include/linux/pci-p2pdma.h),
//! [`include/linux/io.h`](srctree/include/linux/io.h)

use crate::{
    ext::{
        abi,
        pci::Function,
        uses::{
            Use,
            Uses, //
        },
        vma::{
            Fault,
            Space, //
        }, //
    },
    sys, //
};
use core::{
    ops::Range,
    ptr::NonNull, //
};
use kernel::{
    bindings,
    error::to_result,
    ffi,
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    sync::{
        Arc,
        SetOnce, //
    },
};

/// A range of a BAR, in bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct BarRange {
    pub(crate) bar: u32,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

/// Returns whether `client` can reach the memory of `provider`. C: `pci_p2pdma_distance_many()`.
///
/// False if one of them is a removed virtual function. May sleep.
///
/// # Safety
///
/// The p2pdma data of `provider`, if there is any, stays valid during the call: the kernel reads and changes it without a lock, and
/// frees it without waiting for readers if it has no pool.
pub(super) unsafe fn is_reached_by(provider: &Function, client: &Function) -> bool {
    if !provider.has_hierarchy() || !client.has_hierarchy() {
        return false;
    }
    let mut clients = [client.as_raw_device()];
    // SAFETY: Both references keep their functions valid, and `has_hierarchy()` says that the bridges above them are valid too.
    // The caller keeps the p2pdma data valid. The array has one element.
    unsafe { bindings::pci_p2pdma_distance_many(provider.as_raw(), clients.as_mut_ptr(), 1, false) >= 0 }
}

/// A provider's memory.
///
/// # Invariants
///
/// - `range` is whole pages of a memory BAR of `function`, and begins at the physical address `phys`. `kaddr` is its address in
///   the kernel, which this object owns.
/// - `provider` is the kernel's handle of the BAR. The kernel frees a function's p2pdma data after the page map of its pages, and
///   when a driver is unbound, which waits for windows.
/// - Without a window, this object owns the pages, from one allocation from the function's pool, and the one reference to their
///   page map that the allocation took. The core waits for that reference before it removes the pages.
/// - Each address in `mappings` is that of a mapping of pages that this object owns: of [`MAPPING_PAGES`] pages, or of the rest of
///   the memory, from page `index * MAPPING_PAGES` on. A window has none.
/// - A window has no pages, and the device stays bound to its driver while the window exists.
pub(crate) struct Backing {
    function: Function,
    provider: NonNull<bindings::p2pdma_provider>,
    range: BarRange,
    phys: u64,
    kaddr: NonNull<ffi::c_void>,
    /// Whether the BAR is prefetchable, so that writes may be combined.
    combine: bool,
    /// The write-combining mappings for clearing pages. Each is made when it is first needed, and kept as long as the memory. Pages
    /// without one are cleared at `kaddr`, which is uncached.
    mappings: KVVec<SetOnce<usize>>,
    window: Option<Window>,
}

/// What memory without pages has in addition.
///
/// # Invariants
///
/// User mappings of the memory exist in `space` only, each page of the memory at the same place behind the page `first`.
struct Window {
    space: Arc<Space>,
    first: u64,
    /// Keeps the device bound.
    _use: Use,
}

// SAFETY: I/O memory and its mapping are not bound to a thread, and a `struct p2pdma_provider` does not change after its creation.
unsafe impl Send for Backing {}
// SAFETY: The memory is only accessed by functions of C, never through Rust references, so concurrent access is no data race. All
// other fields do not change, and are `Sync` or only read.
unsafe impl Sync for Backing {}

impl Backing {
    /// Takes over pages from a pool. Returns `None`, and the pages to the pool, if they are in no BAR.
    ///
    /// # Safety
    ///
    /// `kaddr` must be the result of one `pci_alloc_p2pmem()` of `size` bytes, whole pages, of the function's pool, which nobody has
    /// used.
    pub(super) unsafe fn of_pages(function: &Function, kaddr: NonNull<ffi::c_void>, size: u64) -> Option<Self> {
        // SAFETY: The caller guarantees an address of pages.
        let phys = unsafe { sys::p2pmem_page_phys(kaddr.as_ptr() as usize) };
        let found = function.bar_at(phys).and_then(|(bar, offset)| {
            // SAFETY: The page map exists, and with it the function's p2pdma data. `bar_at()` returned a standard BAR.
            let provider = unsafe { bindings::pcim_p2pdma_provider(function.as_raw(), bar as ffi::c_int) };
            Some((BarRange { bar, offset, size }, NonNull::new(provider)?))
        });
        let Some((range, provider)) = found else {
            // SAFETY: The caller guarantees unused pages of this function's pool.
            unsafe { bindings::pci_free_p2pmem(function.as_raw(), kaddr.as_ptr(), size as usize) };
            return None;
        };
        let (combine, mut mappings) = (function.prefetchable(range.bar), KVVec::new());
        while combine && mappings.len() < (size as usize / PAGE_SIZE).div_ceil(MAPPING_PAGES) {
            // Without memory, the rest is cleared without write combining.
            if mappings.push(SetOnce::new(), GFP_KERNEL).is_err() {
                break;
            }
        }
        // INVARIANT: The caller guarantees pages of its own. The page map of a chunk is in one BAR. No mapping was made.
        Some(Self {
            function: function.clone(),
            provider,
            range,
            phys,
            kaddr,
            combine,
            mappings,
            window: None,
        })
    }

    /// Maps a range of a BAR without pages. Programs map it in `space`, at the pages from `first` on. May sleep.
    ///
    /// Errors: `EINVAL` if the range is not within a memory BAR or not whole pages; `EOPNOTSUPP` if the device cannot do
    /// peer-to-peer DMA; `ENOMEM`.
    ///
    /// # Safety
    ///
    /// The device must be bound, to this driver or to one that registered the memory, and stay bound until this call
    /// returns. Its unbinding must wait for `uses`.
    pub(super) unsafe fn window(
        function: &Function,
        range: BarRange,
        space: Arc<Space>,
        first: u64,
        uses: &Arc<Uses>,
    ) -> Result<Self> {
        let phys = within(function.bar(range.bar), range.offset, range.size)?;
        // SAFETY: The caller guarantees a bound device, so the driver core releases the p2pdma data when the driver is
        // unbound.
        to_result(unsafe { bindings::pcim_p2pdma_init(function.as_raw()) })?;
        // SAFETY: The p2pdma data was initialised above, and `within()` has checked that the BAR is a standard one.
        let provider = unsafe { bindings::pcim_p2pdma_provider(function.as_raw(), range.bar as ffi::c_int) };
        let provider = NonNull::new(provider).ok_or(abi::errno(abi::EOPNOTSUPP))?;
        let combine = function.prefetchable(range.bar);
        // SAFETY: `within()` has checked that a memory BAR contains the range, so the range is I/O memory. The call maps
        // the range and does not access it.
        let kaddr = unsafe { sys::p2pmem_window_map(phys, usize::try_from(range.size)?, combine) };
        // INVARIANT: The range was mapped above, no user mapping exists, and the window is a use of the device.
        Ok(Self {
            function: function.clone(),
            provider,
            range,
            phys,
            kaddr: NonNull::new(kaddr).ok_or(ENOMEM)?,
            combine,
            mappings: KVVec::new(),
            window: Some(Window {
                space,
                first,
                _use: Use::new(uses),
            }),
        })
    }

    /// Returns the size in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.range.size
    }

    /// Returns the physical address of the first byte.
    pub(crate) fn phys(&self) -> u64 {
        self.phys
    }

    /// Returns the BAR of the memory, and the offset of the first byte in it.
    pub(crate) fn place(&self) -> (u32, u64) {
        (self.range.bar, self.range.offset)
    }

    /// Returns whether user mappings are write-combining: the BAR is prefetchable.
    pub(crate) fn combine(&self) -> bool {
        self.combine
    }

    /// Returns whether the memory has pages.
    pub(crate) fn has_pages(&self) -> bool {
        self.window.is_none()
    }

    /// Returns the kernel's handle for DMA mappings, which is valid as long as `self`.
    pub(super) fn provider(&self) -> NonNull<bindings::p2pdma_provider> {
        self.provider
    }

    /// Returns the PCI bus address at `offset`.
    pub(crate) fn bus_addr(&self, offset: u64) -> u64 {
        // SAFETY: By the type invariant the handle is valid.
        let bus_offset = unsafe { self.provider.as_ref() }.bus_offset;
        // The bus offset may be negative in two's complement.
        (self.phys + offset).wrapping_add(bus_offset)
    }

    /// Returns whether `client` can reach the memory. May sleep.
    pub(crate) fn is_reached_by(&self, client: &Function) -> bool {
        // SAFETY: By the type invariant the p2pdma data is valid as long as `self`.
        unsafe { is_reached_by(&self.function, client) }
    }

    /// Returns whether a physical range of whole pages is part of the memory.
    pub(super) fn covers(&self, phys: u64, size: u64) -> bool {
        covers((self.phys, self.size()), phys, size)
    }

    /// Returns the kernel address and the size of a byte range, cut to the memory and to whole pages.
    fn part(&self, offset: u64, size: u64) -> (NonNull<ffi::c_void>, usize) {
        const WHOLE: u64 = !(PAGE_SIZE as u64 - 1);
        let offset = offset.min(self.size()) & WHOLE;
        let size = size.min(self.size() - offset) & WHOLE;
        // SAFETY: By the type invariant the memory has `size()` bytes from `kaddr` on, of which `offset` are at most all.
        (unsafe { self.kaddr.byte_add(offset as usize) }, size as usize)
    }

    /// Takes p2pmem's references to all pages of a buffer, so that other subsystems may refer to them. May sleep. Does nothing
    /// without pages.
    ///
    /// With the references held, a page never becomes free in the core when its users drop their references. Mapping a page
    /// includes this for the pages around it.
    pub(crate) fn hold(&self, offset: u64, size: u64) {
        let (kaddr, size) = self.part(offset, size);
        if self.has_pages() {
            // SAFETY: By the type invariant this object owns the pages; `part()` keeps the range within the memory.
            unsafe { sys::p2pmem_pages_hold(kaddr.as_ptr() as usize, size / PAGE_SIZE) };
        }
    }

    /// Returns how many pages of a range have references besides p2pmem's, as those of I/O in progress. 0 without pages.
    pub(crate) fn busy(&self, offset: u64, size: u64) -> usize {
        let (kaddr, size) = self.part(offset, size);
        if !self.has_pages() {
            return 0;
        }
        // SAFETY: By the type invariant this object owns the pages; `part()` keeps the range within the memory.
        unsafe { sys::p2pmem_pages_busy(kaddr.as_ptr() as usize, size / PAGE_SIZE) }
    }

    /// Zeroes a range, with write combining if the BAR allows it and there is memory for the mappings. May sleep.
    ///
    /// The caller ensures that nobody else uses the range; otherwise the contents are undefined.
    pub(crate) fn clear(&self, offset: u64, size: u64) {
        let (kaddr, size) = self.part(offset, size);
        let first = (kaddr.as_ptr() as usize - self.kaddr.as_ptr() as usize) / PAGE_SIZE;
        for (index, part) in by_mapping(first..first + size / PAGE_SIZE) {
            let kaddr = self.mapping(index) + part.start * PAGE_SIZE;
            // SAFETY: By the type invariant this object owns the memory, and `mapping()` returned a mapping of it as I/O memory.
            // `part()` keeps the range within the memory, and `by_mapping()` each part within its mapping.
            unsafe { sys::p2pmem_bar_clear(kaddr as *mut ffi::c_void, part.len()) };
        }
    }

    /// Returns the address at which the pages from `index * MAPPING_PAGES` on, the first of which is in the memory, are mapped:
    /// with write combining if the BAR allows it, and the mapping exists or can be made. May sleep.
    fn mapping(&self, index: usize) -> usize {
        let first = index * MAPPING_PAGES;
        let kaddr = self.kaddr.as_ptr() as usize + first * PAGE_SIZE;
        // The kernel maps a window with write combining already.
        let Some(kept) = self.mappings.get(index) else {
            return kaddr;
        };
        if kept.as_ref().is_none() {
            let pages = MAPPING_PAGES.min(self.size() as usize / PAGE_SIZE - first);
            // SAFETY: By the type invariant this object owns the pages; the range is within the memory.
            let made = unsafe { sys::p2pmem_pages_map(kaddr, pages) };
            // INVARIANT: The mapping was made above, of the pages for this index.
            if made != 0 && !kept.populate(made) {
                // SAFETY: Another thread was faster. Nobody else has this mapping, which was made above.
                unsafe { sys::p2pmem_pages_unmap(made) };
            }
        }
        kept.copy().unwrap_or(kaddr)
    }

    /// Maps memory of a buffer, which is `size` bytes from `start` on, at the address of the fault: from `offset` of the
    /// buffer on, as far as its end, page table and area reach, and pages as far as their block reaches. A large fault maps a folio,
    /// or a whole page table of a window, with one entry.
    ///
    /// Called in a page fault, with the area locked. Errors: `EFAULT` if the area is not one for such memory, `offset` is beyond
    /// the buffer, or nothing fits a large entry; `ENOMEM`.
    pub(crate) fn insert(&self, fault: &Fault<'_>, start: u64, size: u64, offset: u64) -> Result {
        let Some(window) = &self.window else {
            let (kaddr, size) = self.part(start, size);
            let (index, pages) = (usize::try_from(offset / PAGE_SIZE as u64)?, size / PAGE_SIZE);
            if index >= pages {
                return Err(EFAULT);
            }
            let kaddr = kaddr.as_ptr() as usize;
            // SAFETY: By the type invariant of `Fault` the fault is valid, its area is locked, and contains the page table of a
            // large fault. By the type invariant this object owns the pages, of which `index` is one. The C function maps within
            // the area and refuses areas that are not for pages. Mapped pages have references, for which the drop of this object
            // waits.
            return to_result(unsafe {
                sys::p2pmem_pages_insert(fault.as_raw(), kaddr, pages, index, fault.is_large())
            });
        };
        let at = start.saturating_add(offset);
        let (_, size) = self.part(at, size.saturating_sub(offset));
        let pages = (size / PAGE_SIZE).min(fault.room());
        if pages == 0 || !fault.is_in(&window.space) || fault.page_offset() != window.first + (at >> PAGE_SHIFT) {
            return Err(EFAULT);
        }
        let phys = self.phys + at;
        if fault.is_large() && (pages < fault.room() || phys % Fault::TABLE as u64 != 0) {
            return Err(EFAULT);
        }
        let pfn = usize::try_from(phys >> PAGE_SHIFT)?;
        // INVARIANT: The area is in `space`, and the pages are where the window has them.
        // SAFETY: By the type invariant of `Fault` the area is valid and locked, and contains the page table of a large fault,
        // for which `pfn` is aligned; `room()` says that it has space for the page frames, and the C function refuses areas
        // that are not for page frames. By the type invariant the frames belong to this object, whose drop unmaps all pages of
        // the window.
        to_result(unsafe { sys::p2pmem_pfns_insert(fault.as_raw(), pfn, pages, fault.is_large()) })
    }

    /// Returns physical start and length of the range that the driver added to the pool, which contains the memory. The memory
    /// itself without pages.
    pub(crate) fn published_range(&self) -> (u64, u64) {
        let (mut start, mut len) = (self.phys, self.size());
        if self.has_pages() {
            // SAFETY: By the type invariant the pages and their page map are valid, and both pointers are to local variables.
            unsafe { sys::p2pmem_pages_range(self.kaddr.as_ptr() as usize, &mut start, &mut len) };
        }
        (start, len)
    }
}

impl Drop for Backing {
    /// Returns pages to the pool, once nobody else refers to them, or unmaps a window. May sleep.
    fn drop(&mut self) {
        for kaddr in self.mappings.iter().filter_map(SetOnce::copy) {
            // SAFETY: By the type invariant this object owns the mapping, which nobody uses any more.
            unsafe { sys::p2pmem_pages_unmap(kaddr) };
        }
        let Some(window) = &self.window else {
            let (function, kaddr, pages) = (
                self.function.as_raw(),
                self.kaddr.as_ptr() as usize,
                self.size() as usize / PAGE_SIZE,
            );
            // SAFETY: By the type invariant this object owns the pages, which came from one allocation from the function's
            // pool, and the reference to the page map, which the call drops. Nobody uses the object any more.
            return unsafe { sys::p2pmem_pages_release(function, kaddr, pages) };
        };
        // Usually nothing is mapped any more: the end of a buffer unmaps it.
        window.space.unmap(window.first, self.size() >> PAGE_SHIFT);
        // SAFETY: By the type invariant this object owns the mapping at `kaddr`. The mapping is used through `self` alone. The device
        // stays bound until the fields are dropped afterwards.
        unsafe { bindings::iounmap(self.kaddr.as_ptr()) };
    }
}

/// The memory that DMA mappings are made of, which a reference keeps.
pub(crate) type Target = Arc<Backing>;

/// Returns the physical address of `size` bytes at `offset` of a BAR, given as physical address and size.
///
/// Errors: `EINVAL` if there is no such BAR, or the range is empty, not within the BAR, or not whole pages.
pub(super) fn within(bar: Option<(u64, u64)>, offset: u64, size: u64) -> Result<u64> {
    let (start, len) = bar.ok_or(EINVAL)?;
    if size == 0 || offset.checked_add(size).is_none_or(|end| end > len) {
        return Err(EINVAL);
    }
    let phys = start.checked_add(offset).ok_or(EINVAL)?;
    // Page frames are mapped as a whole: a partial one would expose bytes outside the range.
    if (phys | size) % PAGE_SIZE as u64 != 0 {
        return Err(EINVAL);
    }
    Ok(phys)
}

/// Pages of one write-combining mapping of the kernel: so many that a chunk of 64 GiB has 4,096 mappings, and so few that the
/// first owner of a page does not wait long for its mapping.
const MAPPING_PAGES: usize = (16 << 20) / PAGE_SIZE;

/// Splits pages of a chunk by the mappings for them. Returns the index of each mapping, and the pages counted from its first.
fn by_mapping(mut pages: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    core::iter::from_fn(move || {
        let (index, first) = (pages.start / MAPPING_PAGES, pages.start % MAPPING_PAGES);
        let count = pages.len().min(MAPPING_PAGES - first);
        pages.start += count;
        (count > 0).then_some((index, first..first + count))
    })
}

/// Returns whether memory of `has` bytes from `first` on contains a non-empty range of whole pages.
fn covers((first, has): (u64, u64), phys: u64, size: u64) -> bool {
    let left = phys.checked_sub(first).and_then(|into| has.checked_sub(into));
    size > 0 && (phys | size) % PAGE_SIZE as u64 == 0 && left.is_some_and(|left| size <= left)
}

#[kunit_tests(p2pmem_p2pdma)]
mod tests {
    use super::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    #[test]
    fn pages_are_split_by_mappings() {
        let last = MAPPING_PAGES - 1;
        assert!(by_mapping(7..7).eq([]));
        assert!(by_mapping(MAPPING_PAGES..MAPPING_PAGES).eq([]));
        assert!(by_mapping(0..1).eq([(0, 0..1)]));
        assert!(by_mapping(last..MAPPING_PAGES).eq([(0, last..MAPPING_PAGES)]));
        assert!(by_mapping(MAPPING_PAGES..MAPPING_PAGES + 2).eq([(1, 0..2)]));
        assert!(by_mapping(last..2 * MAPPING_PAGES + 1).eq([
            (0, last..MAPPING_PAGES),
            (1, 0..MAPPING_PAGES),
            (2, 0..1)
        ]));
    }

    #[test]
    fn range_must_be_whole_pages_inside_bar() {
        let (start, len) = (1 << 38, 16 * PAGE);
        let bar = Some((start, len));
        for (offset, size) in [(0, PAGE), (0, len), (PAGE, len - PAGE), (len - PAGE, PAGE)] {
            assert!(within(bar, offset, size).is_ok_and(|phys| phys == start + offset));
        }
        for (offset, size) in [
            (0, 0),
            (len, 0),
            (len, PAGE),
            (0, len + PAGE),
            (PAGE, len),
            (1, PAGE),
            (0, PAGE + 1),
            (u64::MAX, 1),
            (u64::MAX - PAGE + 1, PAGE),
            (PAGE, u64::MAX - PAGE + 1),
            (u64::MAX - PAGE + 1, 2 * PAGE),
        ] {
            assert!(within(bar, offset, size).is_err_and(|e| e == EINVAL));
        }
        // No BAR, a BAR that does not begin at a page, and a BAR that wraps around.
        assert!(within(None, 0, PAGE).is_err_and(|e| e == EINVAL));
        assert!(within(Some((start + 1, len)), 0, PAGE).is_err_and(|e| e == EINVAL));
        assert!(within(Some((u64::MAX - PAGE + 1, len)), PAGE, PAGE).is_err_and(|e| e == EINVAL));
    }

    #[test]
    fn bar_numbers_above_5_are_rejected() {
        // Every guest has at least a host bridge.
        let mut at = Function::next(None);
        assert!(at.is_some());
        while let Some(function) = at {
            for bar in [6, 7, 12, u32::MAX - 1, u32::MAX] {
                assert!(function.bar(bar).is_none());
            }
            at = Function::next(Some(function));
        }
    }

    #[test]
    fn target_covers_only_its_own_pages() {
        let (phys, size) = (1 << 38, 4 * PAGE);
        for (at, len) in [
            (phys, size),
            (phys, PAGE),
            (phys + 3 * PAGE, PAGE),
            (phys + PAGE, 3 * PAGE),
        ] {
            assert!(covers((phys, size), at, len));
        }
        for (at, len) in [
            (phys, 0),
            (phys + size, 0),
            (phys + size, PAGE),
            (phys - PAGE, PAGE),
            (phys - PAGE, 2 * PAGE),
            (phys, size + PAGE),
            (phys + PAGE, size),
            (phys + 1, PAGE),
            (phys, PAGE - 1),
            (0, PAGE),
            (phys, u64::MAX - PAGE + 1),
            (u64::MAX - PAGE + 1, PAGE),
            (phys + PAGE, u64::MAX - phys - PAGE + 1),
        ] {
            assert!(!covers((phys, size), at, len));
        }
        // Memory that ends at the last address.
        let top = u64::MAX - PAGE + 1;
        assert!(covers((top, PAGE), top, PAGE) && !covers((top, PAGE), top, 2 * PAGE));
    }
}
