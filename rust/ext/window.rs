// SPDX-License-Identifier: GPL-2.0

//! Windows: ranges of a BAR that are mapped without `struct page`, so their size costs no memory.
//!
//! All functions are for process context. [`Window::insert`] is called in a page fault, with the area locked. No
//! locks of its own.
//!
//! C headers: [`include/linux/pci-p2pdma.h`](srctree/include/linux/pci-p2pdma.h),
//! [`include/linux/io.h`](srctree/include/linux/io.h)

use crate::ext::{
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
};
use crate::sys;
use core::ptr::NonNull;
use kernel::{
    bindings,
    error::to_result,
    ffi,
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc,
    },
};

/// An interval of pages of an address space that contains all pages that were ever mapped. It only grows. Lock-free.
struct MappedExtent {
    first: Atomic<u64>,
    end: Atomic<u64>,
}

impl MappedExtent {
    const fn new() -> Self {
        Self {
            first: Atomic::new(u64::MAX),
            end: Atomic::new(0),
        }
    }

    /// Extends the interval by `pages` pages from page `first` on.
    fn add(&self, first: u64, pages: u64) {
        let end = first.saturating_add(pages);
        let (mut known, mut last) = (self.first.load(Relaxed), self.end.load(Relaxed));
        while first < known {
            match self.first.cmpxchg(known, first, Relaxed) {
                Ok(_) => break,
                Err(now) => known = now,
            }
        }
        while end > last {
            match self.end.cmpxchg(last, end, Relaxed) {
                Ok(_) => break,
                Err(now) => last = now,
            }
        }
    }

    /// Returns the first page and the number of pages of the interval, or `None` if nothing was mapped.
    fn all(&self) -> Option<(u64, u64)> {
        let (first, end) = (self.first.load(Relaxed), self.end.load(Relaxed));
        (first < end).then(|| (first, end - first))
    }
}

/// A range of a BAR, mapped in the kernel as I/O memory.
///
/// # Invariants
///
/// - `kaddr` maps `size` bytes of I/O memory at the physical address `phys`, and `provider` is that of the BAR of `function`.
/// - The device stays bound to its driver while the window exists: the window is a use, and unbinding waits for the uses.
/// - User mappings of the memory exist in `space` only, at pages within `shown`.
pub(crate) struct Window {
    function: Function,
    space: Arc<Space>,
    shown: MappedExtent,
    provider: NonNull<bindings::p2pdma_provider>,
    phys: u64,
    size: u64,
    bar: u32,
    bar_offset: u64,
    combine: bool,
    kaddr: NonNull<ffi::c_void>,
    _use: Use,
}

// SAFETY: I/O memory and its mapping are not bound to a thread.
unsafe impl Send for Window {}
// SAFETY: The memory is only accessed by I/O functions of C, never through Rust references, so concurrent access is no data
// race. `shown` is atomic, and `space` is `Sync`.
unsafe impl Sync for Window {}

impl Window {
    /// Maps `size` bytes at `offset` of a BAR. May sleep.
    ///
    /// Errors: `EINVAL` if the range is not within a memory BAR or not whole pages; `EOPNOTSUPP` if the device cannot do
    /// peer-to-peer DMA; `ENOMEM`.
    ///
    /// # Safety
    ///
    /// The device must be bound, to this driver or to one that registered the memory, and stay bound until this call
    /// returns. Its unbinding must wait for `uses`.
    pub(super) unsafe fn new(
        function: &Function,
        bar: u32,
        offset: u64,
        size: u64,
        uses: &Arc<Uses>,
        space: Arc<Space>,
    ) -> Result<Self> {
        let phys = within(function.bar(bar), offset, size)?;
        // SAFETY: The caller guarantees a bound device, so the driver core releases the p2pdma data when the driver is
        // unbound.
        to_result(unsafe { bindings::pcim_p2pdma_init(function.as_raw()) })?;
        // SAFETY: The p2pdma data was initialised above, and `within()` has checked that `bar` is a standard BAR.
        let provider = unsafe { bindings::pcim_p2pdma_provider(function.as_raw(), bar as ffi::c_int) };
        let provider = NonNull::new(provider).ok_or(abi::errno(abi::EOPNOTSUPP))?;
        let combine = function.prefetchable(bar);
        // SAFETY: `within()` has checked that a memory BAR contains the range, so the range is I/O memory. The call maps
        // the range and does not access it.
        let kaddr = unsafe { sys::p2pmem_window_map(phys, usize::try_from(size)?, combine) };
        let kaddr = NonNull::new(kaddr).ok_or(ENOMEM)?;
        // INVARIANT: The range was mapped above, and the window is a use of the device. No user mapping exists, so `shown` is empty.
        Ok(Self {
            function: function.clone(),
            space,
            shown: MappedExtent::new(),
            provider,
            phys,
            size,
            bar,
            bar_offset: offset,
            combine,
            kaddr,
            _use: Use::new(uses),
        })
    }

    pub(super) fn function(&self) -> &Function {
        &self.function
    }

    /// Returns the size in bytes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Returns the physical address of the first byte.
    pub(super) fn phys(&self) -> u64 {
        self.phys
    }

    /// Returns the BAR, and the offset of the first byte in it.
    pub(super) fn place(&self) -> (u32, u64) {
        (self.bar, self.bar_offset)
    }

    /// Returns whether the BAR is prefetchable, so that writes may be combined.
    pub(super) fn combine(&self) -> bool {
        self.combine
    }

    /// Returns the kernel's handle for DMA mappings of the BAR, which is valid as long as `self`.
    pub(super) fn provider(&self) -> NonNull<bindings::p2pdma_provider> {
        self.provider
    }

    /// Returns the PCI bus address of the byte at `offset`.
    pub(super) fn bus_addr(&self, offset: u64) -> u64 {
        // SAFETY: By the type invariant the device is bound, and the kernel frees the p2pdma data when it is unbound.
        let bus_offset = unsafe { self.provider.as_ref() }.bus_offset;
        // The bus offset may be negative in two's complement.
        (self.phys + offset).wrapping_add(bus_offset)
    }

    /// Returns a byte range cut to the window, as offset and size.
    fn part(&self, offset: u64, size: u64) -> (u64, u64) {
        let offset = offset.min(self.size);
        (offset, size.min(self.size - offset))
    }

    /// Zeroes a range. May sleep. The caller ensures that nobody else uses the range.
    pub(super) fn clear(&self, offset: u64, size: u64) {
        let (offset, size) = self.part(offset, size);
        // SAFETY: By the type invariant `kaddr` maps the window as I/O memory; `part()` keeps the range within it.
        unsafe { sys::p2pmem_bar_clear(self.kaddr.as_ptr().byte_add(offset as usize), size as usize / PAGE_SIZE) };
    }

    /// Maps page frames from `offset` on at the address of the fault: at most `size` bytes, and no more than the page table
    /// and the area can hold. A large fault maps a whole page table with one entry.
    ///
    /// Called in a page fault, with the area locked. Errors: `EFAULT` if the area is not one for page frames or is in
    /// another address space, or the range is empty or does not fit a large entry; `ENOMEM`.
    pub(super) fn insert(&self, fault: &Fault<'_>, offset: u64, size: u64) -> Result {
        let (offset, size) = self.part(offset, size);
        let pages = usize::try_from(size / PAGE_SIZE as u64)?.min(fault.room());
        let at = self.phys + offset;
        let fits = !fault.is_large() || pages == fault.room() && at % Fault::TABLE as u64 == 0;
        if pages == 0 || !fits || !fault.is_in(&self.space) {
            return Err(EFAULT);
        }
        // INVARIANT: The area is in `space`, and its pages are added to `shown` before they are mapped.
        self.shown.add(fault.page_offset(), pages as u64);
        let pfn = usize::try_from(at >> PAGE_SHIFT)?;
        // SAFETY: By the type invariant of `Fault` the area is valid and locked, and contains the page table of a large fault,
        // for which `pfn` is aligned; `room()` says that it has space for the page frames, and the C function refuses areas
        // that are not for page frames. By the type invariant the frames belong to this window, whose drop unmaps everything
        // within `shown`.
        to_result(unsafe { sys::p2pmem_pfns_insert(fault.as_raw(), pfn, pages, fault.is_large()) })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // Usually nothing is mapped any more: the end of a buffer unmaps it. Mappings of other windows within this interval
        // are lost too, and come back by page faults.
        if let Some((first, pages)) = self.shown.all() {
            self.space.unmap(first, pages);
        }
        // SAFETY: By the type invariant this window owns the mapping at `kaddr`. The mapping is used through `self` alone. The use of
        // the device ends afterwards, when the fields are dropped.
        unsafe { bindings::iounmap(self.kaddr.as_ptr()) };
    }
}

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

#[kunit_tests(p2pmem_window)]
mod tests {
    use super::*;

    #[test]
    fn mapped_extent_covers_all_added_pages() {
        let shown = MappedExtent::new();
        assert!(shown.all().is_none());
        for (first, pages, all) in [
            (1 << 20, 16, (1 << 20, 16)),
            ((1 << 20) + 4, 4, (1 << 20, 16)),
            ((1 << 20) + 16, 1, (1 << 20, 17)),
            (1 << 19, 1, (1 << 19, (1 << 19) + 17)),
            // Beyond the last page that can be mapped.
            (u64::MAX - 1, 1, (1 << 19, u64::MAX - (1 << 19))),
        ] {
            shown.add(first, pages);
            assert!(shown.all() == Some(all));
        }
    }
}
