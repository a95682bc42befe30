// SPDX-License-Identifier: GPL-2.0

//! Notifications of system sleep: suspend and hibernation.
//!
//! All functions are for process context and may sleep. This file takes no locks; the callbacks are called with the PM
//! notifier chain's semaphore held.
//!
//! C header: [`include/linux/suspend.h`](srctree/include/linux/suspend.h)

use crate::sys;
use kernel::{bindings, error::to_result, ffi, prelude::*, sync::Arc, types::Opaque};

/// Callbacks for system sleep. They are called in process context, before user space is frozen or after it is thawed, and
/// may sleep.
pub(crate) trait Listener: Send + Sync + 'static {
    /// The system is about to suspend or hibernate. An error cancels that, and [`Self::after_sleep`] follows at once.
    fn before_sleep(&self) -> Result;
    /// The system has resumed, or the transition was cancelled.
    fn after_sleep(&self);
}

/// A registered PM notifier.
///
/// # Invariants
///
/// `block` is registered with the PM notifier chain.
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

impl<L: Listener> Notifier<L> {
    /// Registers a notifier. May sleep. Errors: those of `register_pm_notifier()`.
    pub(crate) fn new(listener: Arc<L>) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            listener,
            // INVARIANT: The block is registered if the call succeeds; otherwise there is no `Notifier`.
            block <- Opaque::try_ffi_init(|slot: *mut bindings::notifier_block| {
                // SAFETY: `slot` is valid for writes and pinned. `listener`, which the callback uses, is initialised before
                // `block` and pinned with it.
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

    /// The notifier callback.
    ///
    /// # Safety
    ///
    /// `block` must be the block of a registered `Notifier<L>`. Only the core calls.
    unsafe extern "C" fn call(
        block: *mut bindings::notifier_block,
        action: ffi::c_ulong,
        _data: *mut ffi::c_void,
    ) -> ffi::c_int {
        // SAFETY: `block` is a field of a pinned `Notifier`. The notifier lives until the callback returns:
        // `unregister_pm_notifier()` takes the chain's semaphore for writing, and the chain calls with the semaphore held.
        let this = unsafe { &*kernel::container_of!(Opaque::cast_from(block.cast_const()), Self, block) };
        match action as u32 {
            bindings::PM_SUSPEND_PREPARE | bindings::PM_HIBERNATION_PREPARE => {
                if let Err(e) = this.listener.before_sleep() {
                    // The core calls the notifiers that did not fail for the cancelled transition, and not this one.
                    this.listener.after_sleep();
                    // `notifier_from_errno()` is an inline function of C.
                    return bindings::NOTIFY_STOP_MASK as ffi::c_int
                        | (bindings::NOTIFY_OK as ffi::c_int - e.to_errno());
                }
            }
            bindings::PM_POST_SUSPEND | bindings::PM_POST_HIBERNATION => this.listener.after_sleep(),
            _ => {}
        }
        bindings::NOTIFY_OK as ffi::c_int
    }
}

#[pinned_drop]
impl<L: Listener> PinnedDrop for Notifier<L> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant the block is registered with the PM notifier chain. The call waits for callbacks
        // that run.
        unsafe { sys::p2pmem_pm_unregister(self.block.get()) };
    }
}
