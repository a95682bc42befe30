// SPDX-License-Identifier: GPL-2.0

//! Notifications of the PCI bus: functions are added and removed, drivers are bound and unbound.
//!
//! The notifier also closes the kernel's pool of a function ([`pool`]) before the driver is unbound.
//!
//! All functions may sleep. This file takes no locks; the callbacks are called with the notifier chain's semaphore held.
//!
//! C header: [`include/linux/device/bus.h`](srctree/include/linux/device/bus.h)

use crate::ext::{
    driver,
    pci::Function,
    pool, //
};
use kernel::{
    bindings,
    device::Bound,
    error::to_result,
    ffi, pci,
    prelude::*,
    sync::{
        atomic::{AtomicFlag, Relaxed},
        Arc,
    },
    types::Opaque,
};

/// Callbacks for changes on the PCI bus, called in process context. They may sleep.
pub(crate) trait Listener: Send + Sync + 'static {
    /// A driver was bound to the device, which is locked.
    fn bound(&self, device: &pci::Device<Bound>);
    /// The driver of the function is about to be unbound. The device is locked and the driver still works; the
    /// function's pool is closed, and [`driver::with_bound`] does not find the device any more.
    fn unbinding(&self, function: &Function);
    /// A function was added or removed. The device is not locked.
    fn changed(&self);
}

/// A registered notifier of the PCI bus.
///
/// # Invariants
///
/// `block` is registered with the PCI bus's notifier chain.
#[pin_data(PinnedDrop)]
pub(crate) struct Notifier<L: Listener> {
    #[pin]
    block: Opaque<bindings::notifier_block>,
    listener: Arc<L>,
}

// SAFETY: A notifier block is not bound to a thread, and `L` is `Send` and `Sync`.
unsafe impl<L: Listener> Send for Notifier<L> {}
// SAFETY: A shared reference gives access to `listener` alone, which is `Sync`. The core serialises its own use of `block`.
unsafe impl<L: Listener> Sync for Notifier<L> {}

/// True while a [`Notifier`] is registered.
static REGISTERED: AtomicFlag = AtomicFlag::new(false);

impl<L: Listener> Notifier<L> {
    /// Registers a notifier. May sleep.
    ///
    /// Errors: `EBUSY` if a notifier is registered already, since both would close the pools of one list.
    pub(crate) fn new(listener: Arc<L>) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            listener,
            block <- Opaque::try_ffi_init(|slot: *mut bindings::notifier_block| {
                if REGISTERED.xchg(true, Relaxed) {
                    return Err(EBUSY);
                }
                // SAFETY: `slot` is valid for writes and pinned. `listener`, which the callback uses, is initialised before
                // `block` and pinned with it.
                to_result(unsafe {
                    slot.write(bindings::notifier_block {
                        notifier_call: Some(Self::call),
                        ..pin_init::zeroed()
                    });
                    // INVARIANT: The block is registered if the call succeeds; otherwise there is no `Notifier`.
                    bindings::bus_register_notifier(&raw const bindings::pci_bus_type, slot)
                })
                .inspect_err(|_| REGISTERED.store(false, Relaxed))?;
                pool::allow();
                Ok::<(), Error>(())
            }),
        }? Error)
    }

    /// The notifier callback.
    ///
    /// # Safety
    ///
    /// `block` must be the block of a registered `Notifier<L>`, and `data` a valid `struct device` of the PCI bus. The core
    /// calls with both.
    unsafe extern "C" fn call(
        block: *mut bindings::notifier_block,
        action: ffi::c_ulong,
        data: *mut ffi::c_void,
    ) -> ffi::c_int {
        // SAFETY: `block` is a field of a pinned `Notifier`. The notifier lives until the callback returns:
        // `bus_unregister_notifier()` takes the chain's semaphore for writing, and the chain calls with the semaphore held.
        let this = unsafe { &*kernel::container_of!(Opaque::cast_from(block.cast_const()), Self, block) };
        // SAFETY: The caller guarantees a valid device of the PCI bus.
        let function = unsafe { Function::of_device(data.cast()) };
        match action as u32 {
            bindings::bus_notifier_event_BUS_NOTIFY_BOUND_DRIVER => {
                // SAFETY: The core has the device locked, and has bound it. `pci::Device` is a transparent wrapper of `struct
                // pci_dev` in every context.
                let device = unsafe { &*function.as_raw().cast::<pci::Device<Bound>>() };
                this.listener.bound(device);
            }
            bindings::bus_notifier_event_BUS_NOTIFY_UNBIND_DRIVER => {
                // First: a range that is added afterwards would have a pool that is never closed.
                driver::unbinding(&function);
                pool::close(&function);
                this.listener.unbinding(&function);
            }
            // A pool found between `UNBIND_DRIVER` and here belongs to the former driver: close it before the next one is
            // bound.
            bindings::bus_notifier_event_BUS_NOTIFY_BIND_DRIVER => pool::close(&function),
            bindings::bus_notifier_event_BUS_NOTIFY_ADD_DEVICE => this.listener.changed(),
            bindings::bus_notifier_event_BUS_NOTIFY_REMOVED_DEVICE => {
                driver::forget(&function);
                this.listener.changed();
            }
            _ => {}
        }
        0 // NOTIFY_DONE
    }
}

#[pinned_drop]
impl<L: Listener> PinnedDrop for Notifier<L> {
    fn drop(self: Pin<&mut Self>) {
        pool::close_all();
        // SAFETY: By the type invariant the block is registered with this chain. The call waits for callbacks that run.
        unsafe { bindings::bus_unregister_notifier(&raw const bindings::pci_bus_type, self.block.get()) };
        REGISTERED.store(false, Relaxed);
        // From here on nobody would report that a device is removed.
        driver::forget_all();
    }
}
