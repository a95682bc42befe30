// SPDX-License-Identifier: GPL-2.0

//! What callbacks find that the kernel calls without a pointer of ours.

use super::{p2pdma::Pool, window::Windows, workqueue::OwnQueue};
use crate::orchestrator::Orchestrator;
use core::ptr;
use kernel::{
    bindings,
    prelude::*,
    sync::{
        atomic::{Acquire, AtomicFlag, Relaxed, Release},
        Arc,
    },
    workqueue::RawWorkItem,
};

kernel::sync::global_lock! {
    // SAFETY: `init()` initialises it, and all that uses it calls `initialised()` first.
    unsafe(uninit) static ORCHESTRATOR: Mutex<Option<Arc<Orchestrator>>> = None;
}

kernel::sync::global_lock! {
    // SAFETY: `init()` initialises it, and all that uses it calls `initialised()` first.
    pub(super) unsafe(uninit) static POOLS: Mutex<Option<KVec<Arc<Pool>>>> = None;
}

/// A device that is bound to our driver, which of its BARs were claimed since (a bit for each), the one range of it that was
/// given struct pages since (BAR, offset, size), and the windows of it.
pub(super) struct BoundDevice {
    pub(super) device: *mut bindings::pci_dev,
    pub(super) claimed: u32,
    pub(super) range: Option<(u32, u64, u64)>,
    pub(super) windows: Arc<Windows>,
}

// SAFETY: A PCI device is not bound to a thread.
unsafe impl Send for BoundDevice {}

kernel::sync::global_lock! {
    // SAFETY: `init()` initialises it, and all that uses it calls `initialised()` first.
    pub(super) unsafe(uninit) static BOUND: Mutex<KVec<BoundDevice>> = KVec::new();
}

/// Forgets a device that was bound to our driver.
pub(super) fn forget_bound(device: *mut bindings::pci_dev) {
    initialised();
    drop_from(&mut BOUND.lock(), |d| ptr::eq(d.device, device));
}

/// Takes out of a list what `is_it` says. After the last one nothing of the list stays allocated: a static is not dropped
/// when the module goes.
fn drop_from<T>(list: &mut KVec<T>, is_it: impl Fn(&T) -> bool) {
    list.retain(|entry| !is_it(entry));
    if list.is_empty() {
        *list = KVec::new();
    }
}

/// A device that another driver is bound to and registered with us, and the range of it that was given struct pages then
/// (BAR, offset, size).
pub(super) struct PagedDevice {
    pub(super) device: *mut bindings::pci_dev,
    pub(super) range: Option<(u32, u64, u64)>,
}

// SAFETY: A PCI device is not bound to a thread.
unsafe impl Send for PagedDevice {}

kernel::sync::global_lock! {
    // SAFETY: `init()` initialises it, and all that uses it calls `initialised()` first.
    pub(super) unsafe(uninit) static PAGED: Mutex<KVec<PagedDevice>> = KVec::new();
}

/// Forgets a device that another driver was bound to.
pub(super) fn forget_paged(device: *mut bindings::pci_dev) {
    initialised();
    drop_from(&mut PAGED.lock(), |d| ptr::eq(d.device, device));
}

#[cfg(p2pmem_peer)]
kernel::sync::global_lock! {
    // SAFETY: `init()` initialises it, and all that uses it calls `initialised()` first.
    pub(super) unsafe(uninit) static PEER_CLIENT: Mutex<Option<Arc<super::peer_mem::Gate>>> = None;
}

/// Whether the locks of this file are initialised.
static INITIALISED: AtomicFlag = AtomicFlag::new(false);

/// Initialises the locks of this file. The first thing that the module does.
pub(crate) fn init() {
    static BEGUN: AtomicFlag = AtomicFlag::new(false);
    if BEGUN.xchg(true, Relaxed) {
        return;
    }
    // SAFETY: Called once, as `BEGUN` ensures, and before anything uses the locks, as `initialised()` ensures.
    unsafe {
        ORCHESTRATOR.init();
        POOLS.init();
        BOUND.init();
        PAGED.init();
        QUEUE.init();
        #[cfg(p2pmem_peer)]
        PEER_CLIENT.init();
    }
    INITIALISED.store(true, Release);
}

/// What everything does first that uses a lock of this file. Panics before [`init`] is done.
pub(super) fn initialised() {
    assert!(INITIALISED.load(Acquire));
}

kernel::sync::global_lock! {
    // SAFETY: `init()` initialises it, and all that uses it calls `initialised()` first.
    unsafe(uninit) static QUEUE: Mutex<Option<OwnQueue>> = None;
}

/// Sets the queue that work is done on; with `None`, waits until all that was queued is done.
pub(crate) fn set_queue(queue: Option<OwnQueue>) {
    initialised();
    let old = core::mem::replace(&mut *QUEUE.lock(), queue);
    // Outside the lock, as it waits for work that may want to queue more.
    drop(old);
}

/// Queues work. False, and it is dropped, when there is no queue any more.
pub(crate) fn enqueue<W, const ID: u64>(work: W) -> bool
where
    W: RawWorkItem<ID> + Send + 'static,
{
    initialised();
    let queue = QUEUE.lock();
    let Some(queue) = &*queue else {
        return false;
    };
    let _ = queue.enqueue(work);
    true
}

/// Has the queue do at the next tick of the timer what it does later ([`OwnQueue::run_later`]).
pub(crate) fn run_later() {
    initialised();
    if let Some(queue) = &*QUEUE.lock() {
        queue.run_later();
    }
}

/// Whether the module is loaded and stays so, as long as somebody uses it.
static READY: AtomicFlag = AtomicFlag::new(false);

/// States that the module is loaded: nothing can fail any more. Or, with false, that it is going.
pub(crate) fn set_ready(ready: bool) {
    READY.store(ready, Release);
}

/// What everybody asks first who would keep the module in use: the kernel lets files be opened and directories be made while a
/// module is being loaded, and frees it all the same when loading fails. Errors: `ENODEV` while the module is being loaded.
pub(crate) fn ready() -> Result {
    if READY.load(Acquire) {
        Ok(())
    } else {
        Err(ENODEV)
    }
}

/// Sets, or with `None` forgets, the module's orchestrator.
pub(crate) fn set_orchestrator(orchestrator: Option<Arc<Orchestrator>>) {
    initialised();
    let old = core::mem::replace(&mut *ORCHESTRATOR.lock(), orchestrator);
    // Outside the lock, as this may be the last reference.
    drop(old);
}

/// The module's orchestrator. Errors: `ENODEV` while the module is being set up or taken down.
pub(crate) fn orchestrator() -> Result<Arc<Orchestrator>> {
    initialised();
    ORCHESTRATOR.lock().clone().ok_or(ENODEV)
}
