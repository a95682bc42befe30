// SPDX-License-Identifier: GPL-2.0

//! What happens on the PCI bus: functions that come and go, drivers that are bound and unbound.
//!
//! C header: [`include/linux/device/bus.h`](srctree/include/linux/device/bus.h)

use crate::ext::{
    global::initialised,
    p2pdma::Pool,
    pci::Function,
    publisher, //
};
use crate::sys;
use kernel::{
    bindings,
    error::to_result,
    ffi,
    prelude::*,
    sync::{
        atomic::{AtomicFlag, Relaxed},
        Arc,
    },
    types::Opaque,
};

/// What is told of the bus. All are called with the device locked, in process context.
pub(crate) trait Listener: Send + Sync + 'static {
    /// A driver was bound.
    fn bound(&self, function: &Function);
    /// The driver is about to be unbound, and can still be used; its pool can be taken from no more.
    fn unbinding(&self, function: &Function);
    /// A function came or went.
    fn changed(&self);
}

/// A registration for what happens on the PCI bus.
///
/// # Invariants
///
/// `block` is registered with the PCI bus.
#[pin_data(PinnedDrop)]
pub(crate) struct Notifier<L: Listener> {
    #[pin]
    block: Opaque<bindings::notifier_block>,
    listener: Arc<L>,
}

// SAFETY: A notifier can be unregistered from any thread.
unsafe impl<L: Listener> Send for Notifier<L> {}
// SAFETY: All that is done through a shared reference is synchronised by the listener or by the core.
unsafe impl<L: Listener> Sync for Notifier<L> {}

kernel::sync::global_lock! {
    // SAFETY: `init_lock()` initialises it, and all that uses it calls `initialised()` first.
    unsafe(uninit) static POOLS: Mutex<Option<KVec<Arc<Pool>>>> = None;
}

/// # Safety
///
/// Called once, before the static locks are said to be initialised.
pub(super) unsafe fn init_lock() {
    // SAFETY: By the requirement, as all that uses the lock calls `initialised()` first.
    unsafe { POOLS.init() };
}

/// The pool of a device, if its driver has published one. It is closed when that driver is unbound.
///
/// Errors: `ENODEV` while no [`Notifier`] is registered that could close it.
pub(crate) fn pool(function: &Function) -> Result<Option<Arc<Pool>>> {
    initialised();
    let mut pools = POOLS.lock();
    let pools = pools.as_mut().ok_or(ENODEV)?;
    if let Some(pool) = pools.iter().find(|p| p.function().same(function)) {
        return Ok(Some(pool.clone()));
    }
    let Some(pool) = Pool::find(function)? else {
        return Ok(None);
    };
    pools.push(pool.clone(), GFP_KERNEL)?;
    Ok(Some(pool))
}

/// Closes the pool of a device whose driver is unbound.
fn close(function: &Function) {
    publisher::forget(function);
    if let Some(pools) = POOLS.lock().as_mut() {
        pools.retain(|pool| {
            let stays = !pool.function().same(function);
            if !stays {
                pool.close();
            }
            stays
        });
    }
}

/// Whether there is a notifier.
static REGISTERED: AtomicFlag = AtomicFlag::new(false);

impl<L: Listener> Notifier<L> {
    /// Errors: `EBUSY` while there is another one, as both would close the pools of one list.
    pub(crate) fn new(listener: Arc<L>) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            listener,
            block <- Opaque::try_ffi_init(|slot: *mut bindings::notifier_block| {
                initialised();
                if REGISTERED.xchg(true, Relaxed) {
                    return Err(EBUSY);
                }
                // SAFETY: `slot` is ours to initialise. The other fields are initialised already, and pinned with it.
                to_result(unsafe {
                    slot.write(bindings::notifier_block {
                        notifier_call: Some(Self::call),
                        ..pin_init::zeroed()
                    });
                    bindings::bus_register_notifier(sys::p2pmem_pci_bus_type(), slot)
                })
                .inspect_err(|_| REGISTERED.store(false, Relaxed))?;
                *POOLS.lock() = Some(KVec::new());
                Ok::<(), Error>(())
            }),
        }? Error)
    }

    /// # Safety
    ///
    /// Called by the core with the block of a registered `Notifier` and a device of the PCI bus.
    unsafe extern "C" fn call(
        block: *mut bindings::notifier_block,
        action: ffi::c_ulong,
        data: *mut ffi::c_void,
    ) -> ffi::c_int {
        // SAFETY: `block` is part of a notifier, which stays where it is while it is registered.
        let this = unsafe { &*kernel::container_of!(Opaque::cast_from(block.cast_const()), Self, block) };
        // SAFETY: The PCI bus only has PCI devices.
        let function = unsafe { Function::of_device(data.cast()) };
        match action as u32 {
            bindings::bus_notifier_event_BUS_NOTIFY_BOUND_DRIVER => this.listener.bound(&function),
            bindings::bus_notifier_event_BUS_NOTIFY_UNBIND_DRIVER => {
                close(&function);
                this.listener.unbinding(&function);
            }
            // Whatever was found of a driver that is gone must not outlast the next one's binding.
            bindings::bus_notifier_event_BUS_NOTIFY_BIND_DRIVER => close(&function),
            bindings::bus_notifier_event_BUS_NOTIFY_ADD_DEVICE
            | bindings::bus_notifier_event_BUS_NOTIFY_REMOVED_DEVICE => this.listener.changed(),
            _ => {}
        }
        0 // NOTIFY_DONE
    }
}

#[pinned_drop]
impl<L: Listener> PinnedDrop for Notifier<L> {
    fn drop(self: Pin<&mut Self>) {
        if let Some(pools) = POOLS.lock().take() {
            for pool in &pools {
                pool.close();
            }
        }
        // SAFETY: By the type invariant the block is registered.
        unsafe { bindings::bus_unregister_notifier(sys::p2pmem_pci_bus_type(), self.block.get()) };
        REGISTERED.store(false, Relaxed);
    }
}
