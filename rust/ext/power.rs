// SPDX-License-Identifier: GPL-2.0

//! What happens to the machine's power: it is about to sleep, it woke up.
//!
//! C header: [`include/linux/suspend.h`](srctree/include/linux/suspend.h)

use crate::sys;
use kernel::{bindings, error::to_result, ffi, prelude::*, sync::Arc, types::Opaque};

/// What is told. All are called in process context, while programs and drivers work still, or again.
pub(crate) trait Listener: Send + Sync + 'static {
    /// The machine is about to sleep. With an error it does not, and [`Self::after_sleep`] follows at once.
    fn before_sleep(&self) -> Result;
    /// It woke up, or did not come to sleep.
    fn after_sleep(&self);
}

/// A registration for what happens to the machine's power.
///
/// # Invariants
///
/// `block` is registered.
#[pin_data(PinnedDrop)]
pub(crate) struct Notifier<L: Listener> {
    #[pin]
    block: Opaque<bindings::notifier_block>,
    listener: Arc<L>,
}

// SAFETY: A notifier can be unregistered from any thread.
unsafe impl<L: Listener> Send for Notifier<L> {}
// SAFETY: All that is done through a shared reference is synchronised by the listener.
unsafe impl<L: Listener> Sync for Notifier<L> {}

impl<L: Listener> Notifier<L> {
    pub(crate) fn new(listener: Arc<L>) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            listener,
            // INVARIANT: It is registered here.
            block <- Opaque::try_ffi_init(|slot: *mut bindings::notifier_block| {
                // SAFETY: `slot` is ours to initialise. The other field is initialised already, and pinned with it.
                to_result(unsafe {
                    slot.write(bindings::notifier_block {
                        notifier_call: Some(Self::call),
                        ..pin_init::zeroed()
                    });
                    sys::p2pmem_pm_register(slot)
                })
            }),
        }? Error)
    }

    /// # Safety
    ///
    /// Called by the core with the block of a registered `Notifier`.
    unsafe extern "C" fn call(
        block: *mut bindings::notifier_block,
        action: ffi::c_ulong,
        _data: *mut ffi::c_void,
    ) -> ffi::c_int {
        // SAFETY: `block` is part of a notifier, which stays where it is while it is registered.
        let this = unsafe { &*kernel::container_of!(Opaque::cast_from(block.cast_const()), Self, block) };
        // SAFETY: It compares a number.
        if unsafe { sys::p2pmem_pm_is_prepare(action) } {
            if let Err(e) = this.listener.before_sleep() {
                // The core tells those alone that it does not come to sleep who had no error.
                this.listener.after_sleep();
                // notifier_from_errno()
                return bindings::NOTIFY_STOP_MASK as ffi::c_int | (bindings::NOTIFY_OK as ffi::c_int - e.to_errno());
            }
        // SAFETY: As above.
        } else if unsafe { sys::p2pmem_pm_is_post(action) } {
            this.listener.after_sleep();
        }
        bindings::NOTIFY_OK as ffi::c_int
    }
}

#[pinned_drop]
impl<L: Listener> PinnedDrop for Notifier<L> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant the block is registered.
        unsafe { sys::p2pmem_pm_unregister(self.block.get()) };
    }
}
