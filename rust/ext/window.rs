// SPDX-License-Identifier: GPL-2.0

//! Parts of a BAR without struct pages: as large as they may be, they cost no memory.
//!
//! C headers: [`include/linux/pci-p2pdma.h`](srctree/include/linux/pci-p2pdma.h),
//! [`include/linux/io.h`](srctree/include/linux/io.h)

use crate::ext::{
    abi,
    pci::Function,
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
    ffi, new_condvar, new_mutex,
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, CondVar, Mutex,
    },
};

/// How many windows there are of a device that is bound. Its unbinding waits until there is none.
#[pin_data]
pub(super) struct Windows {
    #[pin]
    count: Mutex<usize>,
    #[pin]
    none: CondVar,
}

impl Windows {
    pub(super) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                count <- new_mutex!(0),
                none <- new_condvar!(),
            }),
            GFP_KERNEL,
        )
    }

    /// Waits until all windows are gone. Who holds them on is named by those who end the provider, before.
    pub(super) fn wait(&self) {
        let mut count = self.count.lock();
        while *count > 0 {
            self.none.wait(&mut count);
        }
    }
}

/// Pages of an address space that all that was ever put there is among.
struct Shown {
    first: Atomic<u64>,
    end: Atomic<u64>,
}

impl Shown {
    const fn new() -> Self {
        Self {
            first: Atomic::new(u64::MAX),
            end: Atomic::new(0),
        }
    }

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

    /// The first one, and how many there are from there on. None where there is none.
    fn all(&self) -> Option<(u64, u64)> {
        let (first, end) = (self.first.load(Relaxed), self.end.load(Relaxed));
        (first < end).then(|| (first, end - first))
    }
}

/// A part of a BAR.
///
/// # Invariants
///
/// `kaddr` maps `size` bytes of I/O memory at `phys`, and `provider` belongs to the BAR. The device is bound to its driver
/// as long as this is there: it is counted in `windows`, for which unbinding waits. User mappings of the memory are in `space`
/// alone, and there among the pages that `shown` has.
pub(crate) struct Window {
    space: Space,
    shown: Shown,
    provider: NonNull<bindings::p2pdma_provider>,
    phys: u64,
    size: u64,
    kaddr: NonNull<ffi::c_void>,
    windows: Arc<Windows>,
}

// SAFETY: I/O memory is not bound to a thread.
unsafe impl Send for Window {}
// SAFETY: All access to the memory is such that others may access it too.
unsafe impl Sync for Window {}

impl Window {
    /// A window of `size` bytes at `offset` of a BAR, both whole pages within it.
    ///
    /// # Safety
    ///
    /// The device must be bound, to our driver or to one that published it, and stay so until this call returns; its
    /// unbinding must wait for `windows`.
    pub(super) unsafe fn new(
        function: &Function,
        bar: u32,
        offset: u64,
        size: u64,
        windows: &Arc<Windows>,
        space: Space,
    ) -> Result<Self> {
        let phys = within(function.bar(bar), offset, size)?;
        // SAFETY: The device is bound, and unbinding its driver releases what this call acquires.
        to_result(unsafe { bindings::pcim_p2pdma_init(function.as_raw()) })?;
        // SAFETY: It was initialised just now.
        let provider = unsafe { bindings::pcim_p2pdma_provider(function.as_raw(), bar as ffi::c_int) };
        let provider = NonNull::new(provider).ok_or(abi::errno(abi::EOPNOTSUPP))?;
        // SAFETY: The range is one of the device's BAR, which is enabled while its driver is bound to it.
        let kaddr = unsafe { sys::p2pmem_window_map(phys, usize::try_from(size)?, function.prefetchable(bar)) };
        let kaddr = NonNull::new(kaddr).ok_or(ENOMEM)?;
        *windows.count.lock() += 1;
        // INVARIANT: Mapped and counted just now.
        Ok(Self {
            space,
            shown: Shown::new(),
            provider,
            phys,
            size,
            kaddr,
            windows: windows.clone(),
        })
    }

    /// Bytes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Physical address of the first byte.
    pub(super) fn phys(&self) -> u64 {
        self.phys
    }

    pub(super) fn provider(&self) -> NonNull<bindings::p2pdma_provider> {
        self.provider
    }

    /// The address of a byte on the device's PCI bus.
    pub(super) fn bus_addr(&self, offset: u64) -> u64 {
        // SAFETY: By the type invariant the provider is there.
        let bus_offset = unsafe { self.provider.as_ref() }.bus_offset;
        // It may be "negative".
        (self.phys + offset).wrapping_add(bus_offset)
    }

    /// A byte range, cut to the window.
    fn part(&self, offset: u64, size: u64) -> (u64, u64) {
        let offset = offset.min(self.size);
        (offset, size.min(self.size - offset))
    }

    /// Zeroes a range. No one else may be using it.
    pub(super) fn clear(&self, offset: u64, size: u64) {
        let (offset, size) = self.part(offset, size);
        // SAFETY: By the type invariant the range is mapped as I/O memory.
        unsafe { sys::p2pmem_window_clear(self.kaddr.as_ptr().byte_add(offset as usize), size as usize) };
    }

    /// Maps pages from `offset` on at the address that faulted, as many as `size` and the page table allow.
    pub(super) fn insert(&self, fault: &Fault<'_>, offset: u64, size: u64) -> Result {
        let (offset, size) = self.part(offset, size);
        let pages = usize::try_from(size / PAGE_SIZE as u64)?.min(fault.room());
        if pages == 0 || !fault.is_in(&self.space) {
            return Err(EFAULT);
        }
        let pfn = usize::try_from((self.phys + offset) >> PAGE_SHIFT)?;
        self.shown.add(fault.page_offset(), pages as u64);
        // SAFETY: The area is locked by the fault and has room for that many; the call refuses one that is not for page
        // frames. By the type invariant they belong to the window, and are found when it is dropped.
        to_result(unsafe { sys::p2pmem_pfns_insert(fault.vma_raw(), fault.address(), pfn, pages) })
    }
}

impl Window {
    /// Maps the page table's worth of memory that begins at `offset` where a fault wants it. Errors: `EAGAIN` where
    /// that cannot be one entry.
    pub(super) fn insert_table(&self, fault: &Fault<'_>, offset: u64) -> Result {
        let at = self.phys + offset;
        if at % Fault::TABLE as u64 != 0 || self.part(offset, Fault::TABLE as u64).1 < Fault::TABLE as u64 {
            return Err(EAGAIN);
        }
        let first = fault
            .table_offset()
            .filter(|_| fault.is_in(&self.space))
            .ok_or(EAGAIN)?;
        self.shown.add(first, (Fault::TABLE >> PAGE_SHIFT) as u64);
        // SAFETY: By the type invariant the frames belong to the window, and are found when it is dropped.
        unsafe { fault.insert_table(usize::try_from(at >> PAGE_SHIFT)?) }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // Who ends a buffer takes its mappings down, so nothing of the window is left here. Others' mappings among these pages
        // come back by faults.
        if let Some((first, pages)) = self.shown.all() {
            self.space.unmap(first, pages);
        }
        // SAFETY: By the type invariant the mapping is ours, and nobody uses it any more.
        unsafe { sys::p2pmem_window_unmap(self.kaddr.as_ptr()) };
        *self.windows.count.lock() -= 1;
        self.windows.none.notify_all();
    }
}

/// Where `size` bytes at `offset` of a BAR, given by address and size, lie in physical memory.
///
/// Errors: `EINVAL` when there is no such BAR, when it has not all of them, or when they are not whole pages.
pub(super) fn within(bar: Option<(u64, u64)>, offset: u64, size: u64) -> Result<u64> {
    let (start, len) = bar.ok_or(EINVAL)?;
    if size == 0 || offset.checked_add(size).is_none_or(|end| end > len) {
        return Err(EINVAL);
    }
    let phys = start.checked_add(offset).ok_or(EINVAL)?;
    // Page frames are mapped whole: one that is not all of the range's would show a neighbour's bytes.
    if (phys | size) % PAGE_SIZE as u64 != 0 {
        return Err(EINVAL);
    }
    Ok(phys)
}

#[kunit_tests(p2pmem_window)]
mod tests {
    use super::*;

    use crate::ext::{
        completion::Completion,
        workqueue::OwnQueue, //
    };

    #[test]
    fn what_was_shown_is_among_the_pages() {
        let shown = Shown::new();
        assert!(shown.all().is_none());
        for (first, pages, all) in [
            (1 << 20, 16, (1 << 20, 16)),
            ((1 << 20) + 4, 4, (1 << 20, 16)),
            ((1 << 20) + 16, 1, (1 << 20, 17)),
            (1 << 19, 1, (1 << 19, (1 << 19) + 17)),
            // Behind all that can be mapped.
            (u64::MAX - 1, 1, (1 << 19, u64::MAX - (1 << 19))),
        ] {
            shown.add(first, pages);
            assert!(shown.all() == Some(all));
        }
    }

    #[test]
    fn unbinding_waits_for_the_last_window() -> Result {
        let windows = Windows::new()?;
        // None is there: nothing to wait for.
        windows.wait();
        *windows.count.lock() = 2;
        let waited = Arc::pin_init(Completion::new(), GFP_KERNEL)?;
        let queue = OwnQueue::new(c"p2pmem-kunit", || {})?;
        let (other, told) = (windows.clone(), waited.clone());
        queue.try_spawn(move || {
            other.wait();
            told.complete();
        })?;
        let one_less = || {
            *windows.count.lock() -= 1;
            windows.none.notify_all();
        };
        one_less();
        assert!(!waited.wait(20));
        one_less();
        assert!(waited.wait(60_000));
        Ok(())
    }
}
