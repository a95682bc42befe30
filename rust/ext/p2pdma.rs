// SPDX-License-Identifier: GPL-2.0

//! Published BAR memory: the kernel's pool of it, its pages, and the kernel's word on who can reach it.
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
use core::ptr::NonNull;
use kernel::{
    bindings,
    device::Bound,
    error::to_result,
    ffi, new_mutex,
    page::PAGE_SIZE,
    pci,
    prelude::*,
    sync::{aref::ARef, Arc, Mutex},
};

/// Gives `size` bytes at `offset` of a BAR struct pages and puts them into the device's pool.
///
/// They stay until the driver is unbound. C: `pci_p2pdma_add_resource()`.
///
/// Errors: `EINVAL` when the range is not one of whole pages in a memory BAR, and those of the kernel.
pub(super) fn add_resource(dev: &pci::Device<Bound>, bar: u32, size: u64, offset: u64) -> Result {
    let function = Function::of(dev);
    within(function.bar(bar), offset, size)?;
    let (bar, size) = (i32::try_from(bar)?, usize::try_from(size)?);
    // SAFETY: The device is bound to a driver, whose unbinding releases what this call acquires; the BAR has the range.
    to_result(unsafe { bindings::pci_p2pdma_add_resource(function.as_raw(), bar, size, offset) })
}

/// Offers what is left in the device's pool to other drivers in the kernel.
///
/// # Safety
///
/// The device must have a pool. The kernel takes memory from what is offered without a look whether there is one.
pub(super) unsafe fn offer(dev: &pci::Device<Bound>) {
    // SAFETY: The device is bound and has a pool; the call only sets a flag.
    unsafe { bindings::pci_p2pmem_publish(Function::of(dev).as_raw(), true) };
}

/// Takes back what [`offer`] did.
pub(crate) fn withdraw(dev: &pci::Device<Bound>) {
    // SAFETY: The device is bound; the call only clears a flag, where there is one.
    unsafe { bindings::pci_p2pmem_publish(Function::of(dev).as_raw(), false) };
}

/// Hops between a provider and a client, or none where the client cannot reach it. C: `pci_p2pdma_distance_many()`.
pub(crate) fn distance(provider: &Function, client: &Function) -> Option<u32> {
    if !provider.is_placed() || !client.is_placed() {
        return None;
    }
    let mut clients = [client.as_raw_device()];
    // SAFETY: Both are valid, and so are the bridges above them; the array has as many elements as the call is told.
    let distance = unsafe { bindings::pci_p2pdma_distance_many(provider.as_raw(), clients.as_mut_ptr(), 1, false) };
    u32::try_from(distance).ok()
}

/// The published provider that the kernel itself would choose for these clients. C: `pci_p2pmem_find_many()`.
pub(crate) fn find_many(clients: &[Function]) -> Result<Option<Function>> {
    let mut devices = KVec::with_capacity(clients.len(), GFP_KERNEL)?;
    for client in clients {
        if !client.is_placed() {
            return Ok(None);
        }
        devices.push(client.as_raw_device(), GFP_KERNEL)?;
    }
    if devices.is_empty() {
        return Ok(None);
    }
    // SAFETY: All functions are valid, and so are the bridges above them; the array has as many elements as the call is told.
    let found = unsafe { bindings::pci_p2pmem_find_many(devices.as_mut_ptr(), i32::try_from(devices.len())?) };
    let Some(found) = NonNull::new(found.cast::<pci::Device>()) else {
        return Ok(None);
    };
    // SAFETY: A device was found, and its reference is ours.
    let found: ARef<pci::Device> = unsafe { ARef::from_raw(found) };
    Ok(Some(Function::of(&found)))
}

/// Whether a driver published memory of this function: nothing else is at distance 0 of it. Errors: `ENOMEM`.
fn has_published(function: &Function) -> Result<bool> {
    let ask = || -> Result<bool> {
        let found = find_many(core::slice::from_ref(function))?;
        Ok(found.is_some_and(|f| f.same(function)))
    };
    // The kernel's answer is the same where it gets no page for its list of candidates. It is asked twice, as it seldom fails to
    // get one twice in a row.
    Ok(ask()? || ask()?)
}

/// The kernel's pool of a device's published memory.
///
/// # Invariants
///
/// While `open` is true, the device has a pool or no p2pdma data at all, which the kernel checks for itself. It is set
/// when there is a pool, and [`super::bus`] clears it when the driver that made the pool is unbound: before that, no
/// other driver can be bound that would leave p2pdma data without a pool, which is what the kernel does not check for.
#[pin_data]
pub(crate) struct Pool {
    function: Function,
    #[pin]
    open: Mutex<bool>,
}

impl Pool {
    /// The pool of a device, if its driver has published one.
    pub(super) fn find(function: &Function) -> Result<Option<Arc<Self>>> {
        if !has_published(function)? {
            return Ok(None);
        }
        // INVARIANT: What is published has a pool: other drivers publish what they added to theirs, and so does `offer()`.
        Arc::pin_init(
            pin_init!(Self {
                function: function.clone(),
                open <- new_mutex!(true),
            }),
            GFP_KERNEL,
        )
        .map(Some)
    }

    pub(crate) fn function(&self) -> &Function {
        &self.function
    }

    /// Ends taking from the pool. What was taken stays valid.
    pub(super) fn close(&self) {
        *self.open.lock() = false;
    }

    /// Takes `size` bytes, a multiple of the page size. None where the pool has not that much in one piece, or is gone.
    pub(crate) fn take(&self, size: u64) -> Option<PoolChunk> {
        let size = usize::try_from(size).ok().filter(|&n| n > 0 && n % PAGE_SIZE == 0)?;
        let open = self.open.lock();
        if !*open {
            return None;
        }
        // SAFETY: By the type invariant, and as `open` is locked and true, there is a pool or no p2pdma data.
        let kaddr = unsafe { bindings::pci_alloc_p2pmem(self.function.as_raw(), size) } as usize;
        // INVARIANT: The pool handed out these pages with one reference to their page map.
        (kaddr != 0).then(|| PoolChunk {
            function: self.function.clone(),
            kaddr,
            pages: size / PAGE_SIZE,
        })
    }
}

/// A piece of a device's pool that is ours, from one `pci_alloc_p2pmem()`.
///
/// # Invariants
///
/// `pages` pages, mapped in the kernel at `kaddr`, belong to this object alone, and so does the one reference to their
/// page map that came with them. The core waits for that reference before it takes the pages away, so they are there
/// as long as this object is.
pub(crate) struct PoolChunk {
    function: Function,
    kaddr: usize,
    pages: usize,
}

impl PoolChunk {
    /// Bytes.
    pub(crate) fn size(&self) -> u64 {
        (self.pages * PAGE_SIZE) as u64
    }

    /// Page number and count of a byte range of the chunk, cut to the chunk.
    fn part(&self, offset: u64, size: u64) -> (usize, usize) {
        let first = usize::try_from(offset / PAGE_SIZE as u64)
            .unwrap_or(usize::MAX)
            .min(self.pages);
        let count = usize::try_from(size / PAGE_SIZE as u64)
            .unwrap_or(usize::MAX)
            .min(self.pages - first);
        (self.kaddr + first * PAGE_SIZE, count)
    }

    /// Takes our reference on each page of a range, once, before its first user mapping.
    pub(crate) fn hold(&self, offset: u64, size: u64) {
        let (kaddr, pages) = self.part(offset, size);
        // SAFETY: By the type invariant the pages are ours.
        unsafe { sys::p2pmem_pages_hold(kaddr, pages) };
    }

    /// How many pages of a range others hold references to.
    pub(crate) fn busy(&self, offset: u64, size: u64) -> usize {
        let (kaddr, pages) = self.part(offset, size);
        // SAFETY: By the type invariant the pages are ours.
        unsafe { sys::p2pmem_pages_busy(kaddr, pages) }
    }

    /// Zeroes a range. No one else may be using it.
    pub(crate) fn clear(&self, offset: u64, size: u64, combine: bool) {
        let (kaddr, pages) = self.part(offset, size);
        // SAFETY: By the type invariant the pages are ours, and mapped as I/O memory at `kaddr`.
        unsafe { sys::p2pmem_pages_clear(kaddr, pages, combine) };
    }

    /// Maps pages from `offset` on at the address that faulted, as many as `size` and the page table allow.
    pub(crate) fn insert(&self, fault: &Fault<'_>, offset: u64, size: u64) -> Result {
        let (kaddr, pages) = self.part(offset, size);
        let pages = pages.min(fault.room());
        if pages == 0 {
            return Err(EFAULT);
        }
        // SAFETY: The area is locked by the fault and has room for that many pages; by the type invariant they are
        // ours, and the caller took our reference on them (`hold`).
        to_result(unsafe { sys::p2pmem_pages_insert(fault.vma_raw(), fault.address(), kaddr, pages) })
    }

    /// The address of a byte on the device's PCI bus.
    pub(crate) fn bus_addr(&self, offset: u64) -> u64 {
        let (kaddr, _) = self.part(offset, 0);
        // SAFETY: By the type invariant the address belongs to the pool of this device, which is there.
        unsafe { bindings::pci_p2pmem_virt_to_bus(self.function.as_raw(), kaddr as *mut ffi::c_void) }
    }

    /// Physical address of the first byte.
    pub(crate) fn phys(&self) -> u64 {
        // SAFETY: By the type invariant the pages are there.
        unsafe { sys::p2pmem_page_phys(self.kaddr) }
    }

    /// What the kernel maps the chunk for DMA with; none where it lies in no BAR of the function.
    fn provider(&self) -> Option<NonNull<bindings::p2pdma_provider>> {
        let phys = self.phys();
        let bar = (0..6).find(|&bar| {
            let range = self.function.bar(bar);
            range.is_some_and(|(start, len)| phys.checked_sub(start).is_some_and(|offset| offset < len))
        })?;
        // SAFETY: By the type invariant the page map is there, and the kernel frees a device's p2pdma data after it.
        NonNull::new(unsafe { bindings::pcim_p2pdma_provider(self.function.as_raw(), bar as ffi::c_int) })
    }

    /// Physical start and length of the whole range whose driver published it.
    pub(crate) fn published_range(&self) -> (u64, u64) {
        let (mut start, mut len) = (0, 0);
        // SAFETY: By the type invariant the pages are there, and so is their page map.
        unsafe { sys::p2pmem_pages_range(self.kaddr, &mut start, &mut len) };
        (start, len)
    }
}

/// Memory of a provider: pages of its pool, or a window that has none.
pub(crate) enum Backing {
    Pages(PoolChunk),
    Window(Window),
}

impl Backing {
    /// Bytes.
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Pages(chunk) => chunk.size(),
            Self::Window(window) => window.size(),
        }
    }

    /// Physical address of the first byte.
    pub(crate) fn phys(&self) -> u64 {
        match self {
            Self::Pages(chunk) => chunk.phys(),
            Self::Window(window) => window.phys(),
        }
    }

    /// The address of a byte on the device's PCI bus.
    pub(crate) fn bus_addr(&self, offset: u64) -> u64 {
        match self {
            Self::Pages(chunk) => chunk.bus_addr(offset),
            Self::Window(window) => window.bus_addr(offset),
        }
    }

    /// Takes our reference on each page of a range, once, before its first user mapping.
    pub(crate) fn hold(&self, offset: u64, size: u64) {
        if let Self::Pages(chunk) = self {
            chunk.hold(offset, size);
        }
    }

    /// How many pages of a range others hold references to.
    pub(crate) fn busy(&self, offset: u64, size: u64) -> usize {
        match self {
            Self::Pages(chunk) => chunk.busy(offset, size),
            Self::Window(_) => 0,
        }
    }

    /// Zeroes a range. No one else may be using it.
    pub(crate) fn clear(&self, offset: u64, size: u64, combine: bool) {
        match self {
            Self::Pages(chunk) => chunk.clear(offset, size, combine),
            Self::Window(window) => window.clear(offset, size),
        }
    }

    /// Maps pages from `offset` on at the address that faulted, as many as `size` and the page table allow.
    pub(crate) fn insert(&self, fault: &Fault<'_>, offset: u64, size: u64) -> Result {
        match self {
            Self::Pages(chunk) => chunk.insert(fault, offset, size),
            Self::Window(window) => window.insert(fault, offset, size),
        }
    }

    /// Maps the page table's worth of memory that begins at `offset` as one entry where a fault wants it. Errors: `EAGAIN`
    /// where that cannot be.
    pub(crate) fn insert_table(&self, fault: &Fault<'_>, offset: u64) -> Result {
        match self {
            Self::Pages(_) => Err(EAGAIN),
            Self::Window(window) => window.insert_table(fault, offset),
        }
    }

    /// What mappings of it for devices are made with.
    pub(crate) fn target(self: &Arc<Self>) -> Target {
        let provider = match &**self {
            Self::Pages(chunk) => chunk.provider(),
            Self::Window(window) => Some(window.provider()),
        };
        // INVARIANT: The backing keeps the provider.
        Target {
            provider,
            backing: self.clone(),
        }
    }
}

/// What a mapping of a provider's memory for a device is made with, and what keeps the memory while it is there.
///
/// # Invariants
///
/// `provider`, where there is one, is valid as long as `backing` is there: the kernel frees it after the page map of a chunk, and when the
/// driver is unbound from a device with windows, which waits for them.
#[derive(Clone)]
pub(crate) struct Target {
    /// None where the memory lies in no BAR of its function.
    provider: Option<NonNull<bindings::p2pdma_provider>>,
    backing: Arc<Backing>,
}

// SAFETY: What is behind the pointer is not bound to a thread, and does not change.
unsafe impl Send for Target {}
// SAFETY: As above.
unsafe impl Sync for Target {}

impl Target {
    /// Whether it can be mapped for DMA: not where it lies in no BAR of its function.
    pub(crate) fn is_for_dma(&self) -> bool {
        self.provider.is_some()
    }

    pub(super) fn provider(&self) -> Option<NonNull<bindings::p2pdma_provider>> {
        self.provider
    }

    #[cfg(p2pmem_peer)]
    pub(super) fn has_pages(&self) -> bool {
        matches!(*self.backing, Backing::Pages(_))
    }

    /// Whether all of a physical range, of whole pages, is memory that this keeps.
    pub(super) fn covers(&self, phys: u64, size: u64) -> bool {
        covers((self.backing.phys(), self.backing.size()), phys, size)
    }
}

/// Whether memory, given by its first byte and its size, has all of a range of whole pages.
fn covers((first, has): (u64, u64), phys: u64, size: u64) -> bool {
    let left = phys.checked_sub(first).and_then(|into| has.checked_sub(into));
    size > 0 && (phys | size) % PAGE_SIZE as u64 == 0 && left.is_some_and(|left| size <= left)
}

impl Drop for PoolChunk {
    /// Gives all back to the pool. Pages that others still hold go back when they let go.
    fn drop(&mut self) {
        // SAFETY: By the type invariant the pages came from one allocation from this device's pool and are ours.
        unsafe { sys::p2pmem_pages_release(self.function.as_raw(), self.kaddr, self.pages) };
    }
}

#[kunit_tests(p2pmem_p2pdma)]
mod tests {
    use super::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    #[test]
    fn a_range_is_whole_pages_of_a_bar() {
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
        // A BAR that is not, that begins within a page, and one whose end no address has.
        assert!(within(None, 0, PAGE).is_err_and(|e| e == EINVAL));
        assert!(within(Some((start + 1, len)), 0, PAGE).is_err_and(|e| e == EINVAL));
        assert!(within(Some((u64::MAX - PAGE + 1, len)), PAGE, PAGE).is_err_and(|e| e == EINVAL));
    }

    #[test]
    fn a_function_has_six_bars() {
        // Whatever the guest has: it has at least a host bridge.
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
    fn a_target_covers_its_own_pages_alone() {
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
        // Memory that ends with the last address there is.
        let top = u64::MAX - PAGE + 1;
        assert!(covers((top, PAGE), top, PAGE) && !covers((top, PAGE), top, 2 * PAGE));
    }
}
