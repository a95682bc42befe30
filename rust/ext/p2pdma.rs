// SPDX-License-Identifier: GPL-2.0

//! The kernel's peer-to-peer DMA core: pools of BAR memory, their pages, and the distance between functions.
//!
//! A [`Pool`] hands out [`PoolChunk`]s; a [`Backing`] is a provider's memory, as a chunk or as a window without pages; a
//! [`Target`] keeps a backing for DMA mappings.
//!
//! All functions are for process context and may sleep, except `phys`, `bus_addr`, `size` and `covers`. The one lock is
//! `Pool::open`; no other lock of p2pmem is taken under it. [`PoolChunk::insert`] is called in a page fault, with the area
//! locked.
//!
//! C header: [`include/linux/pci-p2pdma.h`](srctree/include/linux/pci-p2pdma.h)

use crate::{
    ext::{
        pci::Function,
        vma::Fault,
        window::{
            within,
            Window, //
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
    device::Bound,
    error::to_result,
    ffi, new_mutex,
    page::PAGE_SIZE,
    pci,
    prelude::*,
    sync::{aref::ARef, Arc, Mutex, SetOnce},
};

/// Adds `size` bytes at `offset` of a BAR to the device's pool, with a `struct page` for each page.
///
/// The pages exist until the driver is unbound. May sleep. C: `pci_p2pdma_add_resource()`.
///
/// Errors: `EINVAL` if the range is not within a memory BAR or not whole pages; those of the C function.
pub(super) fn add_resource(dev: &pci::Device<Bound>, bar: u32, size: u64, offset: u64) -> Result {
    let function = Function::of(dev);
    within(function.bar(bar), offset, size)?;
    let (bar, size) = (i32::try_from(bar)?, usize::try_from(size)?);
    // SAFETY: The device is bound, so the driver core releases the pages when the driver is unbound. `within()` has checked
    // that the BAR contains the range.
    to_result(unsafe { bindings::pci_p2pdma_add_resource(function.as_raw(), bar, size, offset) })
}

/// Publishes the device's pool: other drivers in the kernel can allocate from it.
///
/// # Safety
///
/// The device must have a pool. The kernel allocates from a published device without checking for a pool.
pub(super) unsafe fn offer(dev: &pci::Device<Bound>) {
    // SAFETY: The device is bound, and the caller guarantees that it has a pool. The call only sets a flag.
    unsafe { bindings::pci_p2pmem_publish(Function::of(dev).as_raw(), true) };
}

/// Ends what [`offer`] did. Does nothing for a device without a pool. Does not sleep.
pub(crate) fn withdraw(dev: &pci::Device<Bound>) {
    // SAFETY: The device is bound. The call only clears a flag if the device has p2pdma data.
    unsafe { bindings::pci_p2pmem_publish(Function::of(dev).as_raw(), false) };
}

/// Returns whether `client` can reach the memory of `provider`. C: `pci_p2pdma_distance_many()`.
///
/// False if one of them is a removed virtual function. May sleep.
///
/// # Safety
///
/// The p2pdma data of `provider`, if there is any, stays valid during the call: the kernel reads and changes it without a lock, and
/// frees it without waiting for readers if it has no pool.
unsafe fn is_reached_by(provider: &Function, client: &Function) -> bool {
    if !provider.has_hierarchy() || !client.has_hierarchy() {
        return false;
    }
    let mut clients = [client.as_raw_device()];
    // SAFETY: Both references keep their functions valid, and `has_hierarchy()` says that the bridges above them are valid too.
    // The caller keeps the p2pdma data valid. The array has one element.
    unsafe { bindings::pci_p2pdma_distance_many(provider.as_raw(), clients.as_mut_ptr(), 1, false) >= 0 }
}

/// Returns the published provider that the kernel chooses for the clients, or `None` if there is none. C:
/// `pci_p2pmem_find_many()`.
///
/// The result belongs to any driver. May sleep. Errors: `ENOMEM`.
pub(crate) fn find_many(clients: &[Function]) -> Result<Option<Function>> {
    let mut devices = KVec::with_capacity(clients.len(), GFP_KERNEL)?;
    for client in clients {
        if !client.has_hierarchy() {
            return Ok(None);
        }
        devices.push(client.as_raw_device(), GFP_KERNEL)?;
    }
    if devices.is_empty() {
        return Ok(None);
    }
    // SAFETY: The references in `clients` keep the functions valid, and `has_hierarchy()` says that the bridges above them are
    // valid too. The array has as many elements as the call gets.
    let found = unsafe { bindings::pci_p2pmem_find_many(devices.as_mut_ptr(), i32::try_from(devices.len())?) };
    let Some(found) = NonNull::new(found.cast::<pci::Device>()) else {
        return Ok(None);
    };
    // SAFETY: The call returned a device with a reference for the caller. `pci::Device` is a transparent wrapper of `struct
    // pci_dev`.
    let found: ARef<pci::Device> = unsafe { ARef::from_raw(found) };
    Ok(Some(Function::of(&found)))
}

/// Returns whether memory of this function is published: only the function itself is at distance 0. Errors: `ENOMEM`.
fn has_published(function: &Function) -> Result<bool> {
    let ask = || -> Result<bool> {
        let found = find_many(core::slice::from_ref(function))?;
        Ok(found.is_some_and(|f| f.same(function)))
    };
    // The kernel also finds nothing if it cannot allocate a page for its list of candidates. Ask twice, as two failures in
    // a row are unlikely.
    Ok(ask()? || ask()?)
}

/// The kernel's pool of a function's published memory.
///
/// # Invariants
///
/// While `open` is true, the function has a pool, or no p2pdma data at all, which `pci_alloc_p2pmem()` checks for. `open`
/// becomes true when there is a pool. [`super::bus`] sets it to false when the driver that made the pool is unbound, and,
/// for a pool that was found during the unbinding, before the next driver is bound: that driver may create p2pdma data
/// without a pool, which the kernel does not check for.
#[pin_data]
pub(crate) struct Pool {
    function: Function,
    #[pin]
    open: Mutex<bool>,
}

impl Pool {
    /// Finds the pool of a function, or returns `None` if no memory of the function is published. May sleep. Errors:
    /// `ENOMEM`.
    ///
    /// The caller closes the pool before the function's driver is unbound.
    pub(super) fn find(function: &Function) -> Result<Option<Arc<Self>>> {
        if !has_published(function)? {
            return Ok(None);
        }
        // INVARIANT: Published memory is in a pool: drivers publish what they have added to the pool, and so does
        // `offer()`.
        Arc::pin_init(
            pin_init!(Self {
                function: function.clone(),
                open <- new_mutex!(true),
            }),
            GFP_KERNEL,
        )
        .map(Some)
    }

    /// Returns the function that the pool belongs to.
    pub(crate) fn function(&self) -> &Function {
        &self.function
    }

    /// Closes the pool: [`Self::take`] returns `None` from now on. Chunks stay valid. Takes `open`.
    pub(super) fn close(&self) {
        *self.open.lock() = false;
    }

    /// Returns whether `client` can reach the pool's memory, or `None` if the pool is closed. May sleep; takes `open`.
    pub(crate) fn is_reached_by(&self, client: &Function) -> Option<bool> {
        let open = self.open.lock();
        // SAFETY: While `open` is locked and true, the driver that made the pool is bound, and p2pdma data lives until the driver
        // is unbound.
        open.then(|| unsafe { is_reached_by(&self.function, client) })
    }

    /// Allocates `size` bytes, a multiple of the page size, in one piece. May sleep; takes `open`.
    ///
    /// Returns `None` if the pool is closed or gone, has no such piece free or one that is in no BAR, or `size` is invalid.
    pub(crate) fn take(&self, size: u64) -> Option<PoolChunk> {
        let size = usize::try_from(size).ok().filter(|&n| n > 0 && n % PAGE_SIZE == 0)?;
        let open = self.open.lock();
        if !*open {
            return None;
        }
        // SAFETY: By the type invariant, and as `open` is locked and true, the function has a pool or no p2pdma data.
        let kaddr = unsafe { bindings::pci_alloc_p2pmem(self.function.as_raw(), size) } as usize;
        if kaddr == 0 {
            return None;
        }
        // INVARIANT: The pool allocated these pages to this caller, and took one reference to their page map.
        let mut chunk = PoolChunk {
            function: self.function.clone(),
            kaddr,
            pages: size / PAGE_SIZE,
            bar: 0,
            bar_offset: 0,
            combine: false,
            mappings: KVVec::new(),
        };
        (chunk.bar, chunk.bar_offset) = self.function.bar_at(chunk.phys())?;
        chunk.combine = self.function.prefetchable(chunk.bar);
        while chunk.combine && chunk.mappings.len() < chunk.pages.div_ceil(MAPPING_PAGES) {
            // Without memory, the rest of the chunk is cleared without write combining.
            if chunk.mappings.push(SetOnce::new(), GFP_KERNEL).is_err() {
                break;
            }
        }
        Some(chunk)
    }
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

/// A chunk of a function's pool, from one `pci_alloc_p2pmem()`.
///
/// # Invariants
///
/// - This object owns `pages` pages, mapped in the kernel at `kaddr`, and the one reference to their page map that the
///   allocation took. The core waits for that reference before it removes the pages, so pages and page map are valid as long
///   as this object.
/// - Each address in `mappings` is that of a mapping that this object owns: of [`MAPPING_PAGES`] pages, or of the rest of the
///   chunk, from page `index * MAPPING_PAGES` on.
pub(crate) struct PoolChunk {
    function: Function,
    kaddr: usize,
    pages: usize,
    /// The BAR of the chunk, and the offset in it. A driver may publish several BARs.
    bar: u32,
    bar_offset: u64,
    /// Whether the BAR is prefetchable, so that writes may be combined.
    combine: bool,
    /// The write-combining mappings for clearing. Each is made when it is first needed, and kept as long as the chunk. Pages
    /// without one are cleared at `kaddr`, which is uncached.
    mappings: KVVec<SetOnce<usize>>,
}

impl PoolChunk {
    /// Returns the size in bytes.
    pub(crate) fn size(&self) -> u64 {
        (self.pages * PAGE_SIZE) as u64
    }

    /// Returns the kernel address and the number of pages of a byte range, cut to the chunk and rounded down to pages.
    fn part(&self, offset: u64, size: u64) -> (usize, usize) {
        let first = usize::try_from(offset / PAGE_SIZE as u64)
            .unwrap_or(usize::MAX)
            .min(self.pages);
        let count = usize::try_from(size / PAGE_SIZE as u64)
            .unwrap_or(usize::MAX)
            .min(self.pages - first);
        (self.kaddr + first * PAGE_SIZE, count)
    }

    /// Takes p2pmem's references to all pages of a buffer, so that other subsystems may refer to them. May sleep.
    ///
    /// With the references held, a page never becomes free in the core when its users drop their references. Mapping a page
    /// includes this for the pages around it.
    pub(crate) fn hold(&self, offset: u64, size: u64) {
        let (kaddr, pages) = self.part(offset, size);
        // SAFETY: By the type invariant this object owns the pages; `part()` keeps the range within the chunk.
        unsafe { sys::p2pmem_pages_hold(kaddr, pages) };
    }

    /// Returns how many pages of a range have references besides p2pmem's, as those of I/O in progress.
    pub(crate) fn busy(&self, offset: u64, size: u64) -> usize {
        let (kaddr, pages) = self.part(offset, size);
        // SAFETY: By the type invariant this object owns the pages; `part()` keeps the range within the chunk.
        unsafe { sys::p2pmem_pages_busy(kaddr, pages) }
    }

    /// Zeroes a range, with write combining if the BAR allows it and there is memory for the mappings. May sleep.
    ///
    /// The caller ensures that nobody else uses the range; otherwise the contents are undefined.
    pub(crate) fn clear(&self, offset: u64, size: u64) {
        let (kaddr, pages) = self.part(offset, size);
        let first = (kaddr - self.kaddr) / PAGE_SIZE;
        for (index, part) in by_mapping(first..first + pages) {
            let kaddr = self.mapping(index) + part.start * PAGE_SIZE;
            // SAFETY: By the type invariant this object owns the pages, and `mapping()` returned a mapping of them as I/O memory.
            // `part()` keeps the range within the chunk, and `by_mapping()` each part within its mapping.
            unsafe { sys::p2pmem_bar_clear(kaddr as *mut ffi::c_void, part.len()) };
        }
    }

    /// Returns the address at which the pages from `index * MAPPING_PAGES` on, the first of which is in the chunk, are mapped:
    /// with write combining if the BAR allows it, and the mapping exists or can be made. May sleep.
    fn mapping(&self, index: usize) -> usize {
        let first = index * MAPPING_PAGES;
        let kaddr = self.kaddr + first * PAGE_SIZE;
        let Some(kept) = self.mappings.get(index) else {
            return kaddr;
        };
        if kept.as_ref().is_none() {
            // SAFETY: By the type invariant this object owns the pages; the range is within the chunk.
            let made = unsafe { sys::p2pmem_pages_map(kaddr, MAPPING_PAGES.min(self.pages - first)) };
            // INVARIANT: The mapping was made above, of the pages for this index.
            if made != 0 && !kept.populate(made) {
                // SAFETY: Another thread was faster. Nobody else has this mapping, which was made above.
                unsafe { sys::p2pmem_pages_unmap(made) };
            }
        }
        kept.copy().unwrap_or(kaddr)
    }

    /// Maps the page at `offset` of a buffer, which is `size` bytes from `start` on, at the address of the fault, and the pages
    /// after it as far as block, page table and area reach. A large fault maps one folio.
    ///
    /// Called in a page fault, with the area locked. Errors: `EFAULT` if the area is not one for pages, the buffer has no such
    /// page, or no folio for a large fault; `ENOMEM`.
    pub(crate) fn insert(&self, fault: &Fault<'_>, start: u64, size: u64, offset: u64) -> Result {
        let (kaddr, pages) = self.part(start, size);
        let index = usize::try_from(offset / PAGE_SIZE as u64)?;
        if index >= pages {
            return Err(EFAULT);
        }
        // SAFETY: By the type invariant of `Fault` the fault is valid, its area is locked, and contains the page table of a
        // large fault. By the type invariant this object owns the pages, of which `index` is one. The C function maps within
        // the area and refuses areas that are not for pages. Mapped pages have references, for which the drop of this object
        // waits.
        to_result(unsafe { sys::p2pmem_pages_insert(fault.as_raw(), kaddr, pages, index, fault.is_large()) })
    }

    /// Returns the PCI bus address of the page at `offset`.
    pub(crate) fn bus_addr(&self, offset: u64) -> u64 {
        let (kaddr, _) = self.part(offset, 0);
        // SAFETY: By the type invariant the pages are valid, and so the function has a pool. The call only looks up the
        // address in it.
        unsafe { bindings::pci_p2pmem_virt_to_bus(self.function.as_raw(), kaddr as *mut ffi::c_void) }
    }

    /// Returns the physical address of the first byte.
    pub(crate) fn phys(&self) -> u64 {
        // SAFETY: By the type invariant the page at `kaddr` is valid.
        unsafe { sys::p2pmem_page_phys(self.kaddr) }
    }

    /// Returns the BAR that contains the chunk, and the offset of the chunk in it.
    pub(crate) fn place(&self) -> (u32, u64) {
        (self.bar, self.bar_offset)
    }

    /// Returns the kernel's handle for DMA mappings of the BAR that contains the chunk.
    fn provider(&self) -> Option<NonNull<bindings::p2pdma_provider>> {
        // SAFETY: By the type invariant the page map exists, and the kernel frees the function's p2pdma data after the page
        // map. `bar_at()` returned a standard BAR.
        NonNull::new(unsafe { bindings::pcim_p2pdma_provider(self.function.as_raw(), self.bar as ffi::c_int) })
    }

    /// Returns physical start and length of the range that the chunk's driver published.
    pub(crate) fn published_range(&self) -> (u64, u64) {
        let (mut start, mut len) = (0, 0);
        // SAFETY: By the type invariant the pages and their page map are valid, and both pointers are to local variables.
        unsafe { sys::p2pmem_pages_range(self.kaddr, &mut start, &mut len) };
        (start, len)
    }
}

/// A provider's memory: a chunk of the pool, with pages, or a window without pages.
pub(crate) enum Backing {
    Pages(PoolChunk),
    Window(Window),
}

impl Backing {
    /// Returns the size in bytes.
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Pages(chunk) => chunk.size(),
            Self::Window(window) => window.size(),
        }
    }

    /// Returns the physical address of the first byte.
    pub(crate) fn phys(&self) -> u64 {
        match self {
            Self::Pages(chunk) => chunk.phys(),
            Self::Window(window) => window.phys(),
        }
    }

    /// Returns the BAR of the memory, and the offset of the first byte in it.
    pub(crate) fn place(&self) -> (u32, u64) {
        match self {
            Self::Pages(chunk) => chunk.place(),
            Self::Window(window) => window.place(),
        }
    }

    /// Returns whether user mappings are write-combining: the BAR is prefetchable.
    pub(crate) fn combine(&self) -> bool {
        match self {
            Self::Pages(chunk) => chunk.combine,
            Self::Window(window) => window.combine(),
        }
    }

    /// Returns the PCI bus address at `offset`, which must be a multiple of the page size.
    pub(crate) fn bus_addr(&self, offset: u64) -> u64 {
        match self {
            Self::Pages(chunk) => chunk.bus_addr(offset),
            Self::Window(window) => window.bus_addr(offset),
        }
    }

    /// Returns whether `client` can reach the memory. May sleep.
    pub(crate) fn is_reached_by(&self, client: &Function) -> bool {
        let function = match self {
            Self::Pages(chunk) => &chunk.function,
            Self::Window(window) => window.function(),
        };
        // SAFETY: The kernel frees a function's p2pdma data after the page map of a chunk, and when a driver is unbound, which waits
        // for windows.
        unsafe { is_reached_by(function, client) }
    }

    /// Takes p2pmem's references to all pages of a buffer; see [`PoolChunk::hold`]. Does nothing without pages.
    pub(crate) fn hold(&self, offset: u64, size: u64) {
        if let Self::Pages(chunk) = self {
            chunk.hold(offset, size);
        }
    }

    /// Returns how many pages of a range have other references; see [`PoolChunk::busy`]. 0 without pages.
    pub(crate) fn busy(&self, offset: u64, size: u64) -> usize {
        match self {
            Self::Pages(chunk) => chunk.busy(offset, size),
            Self::Window(_) => 0,
        }
    }

    /// Zeroes a range, for which nobody else may use the range. May sleep.
    pub(crate) fn clear(&self, offset: u64, size: u64) {
        match self {
            Self::Pages(chunk) => chunk.clear(offset, size),
            Self::Window(window) => window.clear(offset, size),
        }
    }

    /// Maps memory of a buffer, which is `size` bytes from `start` on, at the address of the fault: from `offset` of the
    /// buffer on, as far as its end, page table and area reach.
    ///
    /// Called in a page fault, with the area locked. Errors: see [`PoolChunk::insert`] and [`Window::insert`].
    pub(crate) fn insert(&self, fault: &Fault<'_>, start: u64, size: u64, offset: u64) -> Result {
        match self {
            Self::Pages(chunk) => chunk.insert(fault, start, size, offset),
            Self::Window(window) => window.insert(fault, start + offset, size.saturating_sub(offset)),
        }
    }

    /// Returns the target for DMA mappings of this memory. The target keeps the memory.
    pub(crate) fn target(self: &Arc<Self>) -> Target {
        let provider = match &**self {
            Self::Pages(chunk) => chunk.provider(),
            Self::Window(window) => Some(window.provider()),
        };
        // INVARIANT: The provider is that of `backing`, which keeps it valid.
        Target {
            provider,
            backing: self.clone(),
        }
    }
}

/// The memory that DMA mappings are made of: the kernel's handle of the BAR, and a reference that keeps the memory.
///
/// # Invariants
///
/// `provider`, if any, is valid as long as `backing`: the kernel frees a function's p2pdma data after the page map of a
/// chunk, and when a driver is unbound, which waits for windows.
#[derive(Clone)]
pub(crate) struct Target {
    /// None if no BAR of the function contains the memory.
    provider: Option<NonNull<bindings::p2pdma_provider>>,
    backing: Arc<Backing>,
}

// SAFETY: A `struct p2pdma_provider` is not bound to a thread and does not change after its creation. `Backing` is `Send`
// and `Sync`.
unsafe impl Send for Target {}
// SAFETY: A shared reference only reads fields that do not change, and `Backing` is `Sync`.
unsafe impl Sync for Target {}

impl Target {
    /// Returns whether the memory can be mapped for DMA: a BAR of its function contains it.
    pub(crate) fn is_for_dma(&self) -> bool {
        self.provider.is_some()
    }

    /// Returns the kernel's handle for DMA mappings, which is valid as long as `self`.
    pub(super) fn provider(&self) -> Option<NonNull<bindings::p2pdma_provider>> {
        self.provider
    }

    /// Returns whether the memory has pages.
    pub(super) fn has_pages(&self) -> bool {
        matches!(*self.backing, Backing::Pages(_))
    }

    /// Returns whether a physical range of whole pages is part of the memory that this target keeps.
    pub(super) fn covers(&self, phys: u64, size: u64) -> bool {
        covers((self.backing.phys(), self.backing.size()), phys, size)
    }
}

/// Returns whether memory of `has` bytes from `first` on contains a non-empty range of whole pages.
fn covers((first, has): (u64, u64), phys: u64, size: u64) -> bool {
    let left = phys.checked_sub(first).and_then(|into| has.checked_sub(into));
    size > 0 && (phys | size) % PAGE_SIZE as u64 == 0 && left.is_some_and(|left| size <= left)
}

impl Drop for PoolChunk {
    /// Returns the pages to the pool, once nobody else refers to them. May sleep.
    fn drop(&mut self) {
        for kaddr in self.mappings.iter().filter_map(SetOnce::copy) {
            // SAFETY: By the type invariant this object owns the mapping, which nobody uses any more.
            unsafe { sys::p2pmem_pages_unmap(kaddr) };
        }
        // SAFETY: By the type invariant this object owns the pages, which came from one allocation from the function's
        // pool, and the reference to the page map, which the call drops. Nobody uses the object any more.
        unsafe { sys::p2pmem_pages_release(self.function.as_raw(), self.kaddr, self.pages) };
    }
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
