// SPDX-License-Identifier: GPL-2.0

//! The interface for other drivers that register memory of their devices with p2pmem.
//!
//! The C functions in `rust/sys/publisher.c` call the `p2pmem_rust_*` functions here. [`Registrar`] makes providers of the
//! registrations.
//!
//! All functions are for process context and may sleep. Locks: `REGISTRAR` is innermost. `RevokeCallback::called` is
//! locked during the driver's callback.
//!
//! C header: `include/linux/p2pmem.h`

use crate::{
    ext::{
        driver::Published,
        global::initialised,
        pci::Function,
        pool,
        refusal::{
            refuse,
            Answer, //
        },
        uses::Uses, //
    },
    policy::path::PciAddr,
    sys, //
};
use core::ptr::NonNull;
use kernel::{
    bindings,
    device::Bound,
    ffi, new_mutex, pci,
    prelude::*,
    sync::{Arc, Mutex},
};

/// The memory that the administrator or a driver wants to publish.
#[derive(Clone, Copy)]
pub(crate) struct Publication {
    /// The PCI function.
    pub(crate) addr: PciAddr,
    /// The BAR. `None` means the largest prefetchable 64-bit BAR.
    pub(crate) bar: Option<u32>,
    /// First byte in the BAR.
    pub(crate) offset: u64,
    /// Size in bytes. 0 means the rest of the BAR.
    pub(crate) size: u64,
    /// Bytes that stay in the kernel's pool. `None` means a sixteenth, at most 16 MiB; nothing without pages.
    pub(crate) kernel_reserve: Option<u64>,
    /// Whether the memory gets a `struct page` for each page.
    pub(crate) pages: bool,
    /// Whether importers that cannot be revoked may attach to exports.
    pub(crate) pinned_exports: bool,
    /// The group whose members may attach the function to dma-bufs. Unused for a registration of a driver.
    pub(crate) attach_gid: Option<u32>,
}

/// Makes providers of drivers' registrations. Called in process context; may sleep.
pub(crate) trait Registrar: Send + Sync {
    /// Returns whether the function is a provider.
    fn is_provided(&self, function: &Function) -> bool;
    /// Makes a provider of `wanted` and returns its id. `publisher` is notified when the provider is revoked.
    fn register(&self, wanted: &Publication, device: Published<'_>, publisher: Arc<RevokeCallback>) -> Answer<u32>;
    /// Removes a provider, if it still exists. The driver's callback has returned when this returns.
    fn unregister(&self, function: &Function, provider: u32);
}

kernel::sync::global_lock! {
    // SAFETY: `init_lock()` initialises the lock; every function that uses the lock calls `initialised()` first, which
    // panics before that.
    unsafe(uninit) static REGISTRAR: Mutex<Option<Arc<dyn Registrar>>> = None;
}

/// Initialises `REGISTRAR`.
///
/// # Safety
///
/// Must be called once, before [`global::set_initialised`].
pub(super) unsafe fn init_lock() {
    // SAFETY: The caller guarantees that this is the first call. No other code uses the lock before `set_initialised()`,
    // as `initialised()` panics.
    unsafe { REGISTRAR.init() };
}

/// Opens registration to drivers, until it is dropped.
pub(crate) struct Open(());

impl Open {
    /// Opens registration, with `registrar` to make the providers.
    pub(crate) fn new(registrar: Arc<dyn Registrar>) -> Self {
        initialised();
        let old = REGISTRAR.lock().replace(registrar);
        drop(old);
        Self(())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let old = REGISTRAR.lock().take();
        // Dropped outside the lock: this may be the last reference.
        drop(old);
    }
}

/// The callback of a driver that registered memory.
///
/// # Invariants
///
/// `revoked`, if any, can be called with `context` while `called` is false. Both a failed registration and an unregistration
/// set `called` before they return to the driver.
#[pin_data]
pub(crate) struct RevokeCallback {
    revoked: Option<unsafe extern "C" fn(*mut ffi::c_void)>,
    context: *mut ffi::c_void,
    uses: Arc<Uses>,
    /// True once the callback was called or is not to be called any more. Locked during the callback.
    #[pin]
    called: Mutex<bool>,
}

// SAFETY: By the contract of `p2pmem_register_provider()` the callback may be called on any thread, with `context`.
unsafe impl Send for RevokeCallback {}
// SAFETY: As for `Send`; `called` serialises the calls, of which there is one at most.
unsafe impl Sync for RevokeCallback {}

impl RevokeCallback {
    /// Creates the callback of a registration. Errors: `ENOMEM`.
    ///
    /// # Safety
    ///
    /// `revoked`, if any, must be callable with `context` until [`Self::revoked`] or [`Self::disarm`] has returned. The
    /// caller ensures that one of them returns before the registering or unregistering driver goes on.
    unsafe fn new(
        revoked: Option<unsafe extern "C" fn(*mut ffi::c_void)>,
        context: *mut ffi::c_void,
        uses: Arc<Uses>,
    ) -> Result<Arc<Self>> {
        // INVARIANT: The caller guarantees that the callback can be called; `called` is false.
        Arc::pin_init(
            pin_init!(Self {
                revoked,
                context,
                uses,
                called <- new_mutex!(false),
            }),
            GFP_KERNEL,
        )
    }

    /// Calls the driver's callback, the first time. Sleeps.
    ///
    /// Waits until no window maps the memory, and for a concurrent call: the callback has returned when this returns,
    /// whichever call made it. Must be called before the driver is unregistered or unbound, when nothing else reaches the
    /// memory. The callback must not call this.
    pub(crate) fn revoked(&self) {
        self.uses.wait();
        let mut called = self.called.lock();
        if core::mem::replace(&mut *called, true) {
            return;
        }
        if let Some(revoked) = self.revoked {
            // SAFETY: By the type invariant, as `called` was false and is locked, the callback can be called with `context`.
            unsafe { revoked(self.context) };
        }
    }

    /// Disarms the callback: it is not called from now on. Waits until no window maps the memory. Sleeps.
    fn disarm(&self) {
        self.uses.wait();
        *self.called.lock() = true;
    }
}

/// A driver's registration, which C code knows as `struct p2pmem_registration`.
struct DriverRegistration {
    registrar: Arc<dyn Registrar>,
    function: Function,
    provider: u32,
    publisher: Arc<RevokeCallback>,
}

/// Registers a part of a BAR of a bound device. Sleeps.
///
/// Errors: see `p2pmem_register_provider()` in the header.
fn register(device: &pci::Device<Bound>, what: &sys::p2pmem_publication) -> Answer<KBox<DriverRegistration>> {
    const KNOWN: u32 = sys::P2PMEM_PUBLISH_PAGELESS | sys::P2PMEM_PUBLISH_PINNED;
    let function = Function::of(device);
    if what.flags & !KNOWN != 0 {
        return Err(refuse!(EINVAL, "unknown flags {:#x}", what.flags & !KNOWN));
    }
    let bar = match what.bar {
        -1 => None,
        bar => Some(u32::try_from(bar).map_err(|_| refuse!(EINVAL, "{} is no BAR", bar))?),
    };
    let wanted = Publication {
        addr: function.address(),
        bar,
        offset: what.offset,
        size: what.size,
        kernel_reserve: Some(what.kernel_reserve),
        pages: what.flags & sys::P2PMEM_PUBLISH_PAGELESS == 0,
        pinned_exports: what.flags & sys::P2PMEM_PUBLISH_PINNED != 0,
        attach_gid: None,
    };
    initialised();
    let registrar = REGISTRAR.lock().clone().ok_or(ENODEV)?;
    let uses = Uses::new()?;
    // Allocate first, so that nothing can fail once there is a provider.
    let registration = KBox::<DriverRegistration>::new_uninit(GFP_KERNEL)?;
    // SAFETY: By the contract of the header the callback can be called until the driver has unregistered, which calls
    // `revoked()`. If registration fails after a provider was attempted, `disarm()` below comes first; before that, no
    // other code has the callback.
    let publisher = unsafe { RevokeCallback::new(what.revoked, what.context, uses.clone()) }?;
    if registrar.is_provided(&function) {
        return Err(refuse!(EEXIST, "{} is a provider already", wanted.addr));
    }
    // SAFETY: By the contract of the header the driver unregisters before it is unbound, and unregistering waits for `uses`.
    let bound = unsafe { Published::by_other(device, &uses) };
    let made = registrar.register(&wanted, bound, publisher.clone());
    if made.is_err() {
        pool::withdraw(device);
        publisher.disarm();
    }
    Ok(registration.write(DriverRegistration {
        registrar,
        function,
        provider: made?,
        publisher,
    }))
}

/// Implements `p2pmem_register_provider()`.
///
/// # Safety
///
/// The caller keeps the contract of `p2pmem_register_provider()` in the header.
#[no_mangle]
unsafe extern "C" fn p2pmem_rust_register(
    pdev: *mut bindings::pci_dev,
    what: *const sys::p2pmem_publication,
) -> *mut sys::p2pmem_registration {
    let (Some(pdev), false) = (NonNull::new(pdev), what.is_null()) else {
        return EINVAL.to_ptr();
    };
    // SAFETY: By the contract the function is bound to the calling driver during the call. `pci::Device` is a transparent
    // wrapper of `struct pci_dev` in every context.
    let device = unsafe { pdev.cast::<pci::Device<Bound>>().as_ref() };
    // SAFETY: By the contract the structure is valid during the call.
    match register(device, unsafe { &*what }) {
        Ok(registration) => KBox::into_raw(registration).cast(),
        Err(refusal) => {
            refusal.log("registration of a provider");
            refusal.error.to_ptr()
        }
    }
}

/// Implements `p2pmem_unregister_provider()`.
///
/// # Safety
///
/// The caller keeps the contract of `p2pmem_unregister_provider()` in the header.
#[no_mangle]
unsafe extern "C" fn p2pmem_rust_unregister(registration: *mut sys::p2pmem_registration) {
    if registration.is_null() {
        return;
    }
    // SAFETY: By the contract the pointer is from `p2pmem_rust_register()`, which returned `KBox::into_raw()`, and is given
    // back once.
    let registration = unsafe { KBox::from_raw(registration.cast::<DriverRegistration>()) };
    // SAFETY: By the contract the function stays bound to the calling driver until this function returns. `pci::Device` is
    // a transparent wrapper of `struct pci_dev` in every context.
    let device = unsafe { &*registration.function.as_raw().cast::<pci::Device<Bound>>() };
    pool::withdraw(device);
    registration
        .registrar
        .unregister(&registration.function, registration.provider);
    // Whatever removed the provider: after this no window maps the memory, and the callback has returned.
    registration.publisher.revoked();
}

/// Implements `p2pmem_registration_id()`.
///
/// # Safety
///
/// `registration` must be from `p2pmem_rust_register()` and not unregistered yet.
#[no_mangle]
unsafe extern "C" fn p2pmem_rust_registration_id(registration: *const sys::p2pmem_registration) -> u32 {
    // SAFETY: The caller guarantees a valid registration.
    unsafe { (*registration.cast::<DriverRegistration>()).provider }
}

#[kunit_tests(p2pmem_publisher)]
mod tests {
    use super::*;

    use crate::ext::{
        completion::Completion,
        workqueue::OwnQueue, //
    };
    use kernel::sync::atomic::{Atomic, Relaxed};

    /// A driver whose callback blocks until the test lets it go on.
    #[pin_data]
    struct FakeDriver {
        #[pin]
        begun: Completion,
        #[pin]
        end: Completion,
        calls: Atomic<u32>,
        ended: Atomic<u32>,
    }

    impl FakeDriver {
        fn new() -> Result<Arc<Self>> {
            Arc::pin_init(
                pin_init!(Self {
                    begun <- Completion::new(),
                    end <- Completion::new(),
                    calls: Atomic::new(0),
                    ended: Atomic::new(0),
                }),
                GFP_KERNEL,
            )
        }

        fn publisher(self: &Arc<Self>) -> Result<Arc<RevokeCallback>> {
            let context = Arc::as_ptr(self).cast_mut().cast();
            // SAFETY: The tests keep the context longer than the publisher.
            unsafe { RevokeCallback::new(Some(revoked), context, Uses::new()?) }
        }
    }

    /// The callback.
    ///
    /// # Safety
    ///
    /// `context` must be a valid `FakeDriver`.
    unsafe extern "C" fn revoked(context: *mut ffi::c_void) {
        // SAFETY: The caller guarantees a valid `FakeDriver`.
        let driver = unsafe { &*context.cast::<FakeDriver>() };
        driver.calls.fetch_add(1, Relaxed);
        driver.begun.complete();
        driver.end.wait(60_000);
        driver.ended.fetch_add(1, Relaxed);
    }

    #[test]
    fn second_revocation_waits_for_callback() -> Result {
        let driver = FakeDriver::new()?;
        let publisher = driver.publisher()?;
        let returned = Arc::pin_init(Completion::new(), GFP_KERNEL)?;
        // Both work items of the queue run at the same time, since neither occupies the CPU while it waits.
        let queue = OwnQueue::new(c"p2pmem-kunit", || {})?;
        let first = publisher.clone();
        queue.try_spawn(move || first.revoked())?;
        assert!(driver.begun.wait(60_000));
        let (second, done) = (publisher.clone(), returned.clone());
        queue.try_spawn(move || {
            second.revoked();
            done.complete();
        })?;
        assert!(!returned.wait(20));
        driver.end.complete();
        assert!(returned.wait(60_000));
        assert_eq!(driver.ended.load(Relaxed), 1);
        publisher.revoked();
        // Waits for both work items.
        drop(queue);
        assert_eq!(driver.calls.load(Relaxed), 1);
        Ok(())
    }

    #[test]
    fn disarmed_publisher_calls_no_callback() -> Result {
        let driver = FakeDriver::new()?;
        let publisher = driver.publisher()?;
        publisher.disarm();
        publisher.revoked();
        assert_eq!(driver.calls.load(Relaxed), 0);
        Ok(())
    }
}
