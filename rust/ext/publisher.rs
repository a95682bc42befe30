// SPDX-License-Identifier: GPL-2.0

//! Drivers in the kernel that publish memory of their devices through p2pmem.
//!
//! C header: `include/linux/p2pmem.h`

use crate::{
    ext::{
        driver::Published,
        global::{
            self,
            initialised, //
        },
        p2pdma,
        pci::Function,
        refusal::{
            refuse,
            Answer, //
        },
        window::Windows, //
    },
    policy::path::PciAddr,
    sys, //
};
use core::ptr::{self, NonNull};
use kernel::{
    bindings,
    device::Bound,
    ffi, new_mutex, pci,
    prelude::*,
    sync::{Arc, Mutex},
};

/// What the administrator, or the driver of a device, wants published.
#[derive(Clone, Copy)]
pub(crate) struct Publication {
    pub(crate) addr: PciAddr,
    /// None: the largest prefetchable 64-bit one.
    pub(crate) bar: Option<u32>,
    pub(crate) offset: u64,
    /// 0: all from `offset` on.
    pub(crate) size: u64,
    /// None: a sixteenth, 16 MiB at most; without pages nothing.
    pub(crate) kernel_reserve: Option<u64>,
    /// Whether it gets struct pages.
    pub(crate) pages: bool,
    /// Whether it may be exported to importers that cannot be revoked.
    pub(crate) pinned_exports: bool,
}

/// Who makes providers of what drivers publish.
pub(crate) trait Registrar: Send + Sync {
    /// Whether a function is a provider.
    fn is_provided(&self, function: &Function) -> bool;
    /// Makes a provider. Returns its number.
    fn register(&self, wanted: &Publication, device: Published<'_>, publisher: Arc<Publisher>) -> Answer<u32>;
    /// Removes a provider, if it is one still. When this returns the driver was told.
    fn unregister(&self, function: &Function, provider: u32);
}

kernel::sync::global_lock! {
    // SAFETY: `init_lock()` initialises it, and all that uses it calls `initialised()` first.
    unsafe(uninit) static REGISTRAR: Mutex<Option<Arc<dyn Registrar>>> = None;
}

/// A device that another driver is bound to and registered with us, and the range of it that was given struct pages then
/// (BAR, offset, size).
struct PagedDevice {
    device: *mut bindings::pci_dev,
    range: Option<(u32, u64, u64)>,
}

// SAFETY: A PCI device is not bound to a thread.
unsafe impl Send for PagedDevice {}

kernel::sync::global_lock! {
    // SAFETY: `init_lock()` initialises it, and all that uses it calls `initialised()` first.
    unsafe(uninit) static PAGED: Mutex<KVec<PagedDevice>> = KVec::new();
}

/// # Safety
///
/// Called once, before the static locks are said to be initialised.
pub(super) unsafe fn init_lock() {
    // SAFETY: By the requirement, as all that uses the locks calls `initialised()` first.
    unsafe {
        REGISTRAR.init();
        PAGED.init();
    }
}

/// Lets drivers register what they publish, until it is dropped.
pub(crate) struct Open(());

impl Open {
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
        // Outside the lock, as this may be the last reference.
        drop(old);
    }
}

/// A driver that wants to know when its memory was taken back.
///
/// # Invariants
///
/// `revoked`, where there is one, can be called with `context` as long as `told` is false: registering that fails and
/// unregistering set it before they return.
#[pin_data]
pub(crate) struct Publisher {
    revoked: Option<unsafe extern "C" fn(*mut ffi::c_void)>,
    context: *mut ffi::c_void,
    windows: Arc<Windows>,
    /// Whether it was called, or is not to be. Locked during the call.
    #[pin]
    told: Mutex<bool>,
}

// SAFETY: By the contract of `p2pmem_register_provider()` the callback may be called on any thread.
unsafe impl Send for Publisher {}
// SAFETY: As above; it is called once, with `told` locked.
unsafe impl Sync for Publisher {}

impl Publisher {
    /// # Safety
    ///
    /// `revoked`, where there is one, must be callable with `context` until the driver was told once, by [`Self::revoked`], or
    /// is not to be told any more, by [`Self::disarm`]. One of both has to come before the driver is let go.
    unsafe fn new(
        revoked: Option<unsafe extern "C" fn(*mut ffi::c_void)>,
        context: *mut ffi::c_void,
        windows: Arc<Windows>,
    ) -> Result<Arc<Self>> {
        // INVARIANT: By the requirement.
        Arc::pin_init(
            pin_init!(Self {
                revoked,
                context,
                windows,
                told <- new_mutex!(false),
            }),
            GFP_KERNEL,
        )
    }

    /// Nobody can reach the memory any more: waits until nothing of ours maps it, and tells the driver, the first time. When
    /// this returns the driver was told, whoever did it. Comes before unregistering or unbinding returns.
    pub(crate) fn revoked(&self) {
        self.windows.wait();
        let mut told = self.told.lock();
        if core::mem::replace(&mut *told, true) {
            return;
        }
        if let Some(revoked) = self.revoked {
            // SAFETY: By the type invariant, as nobody was told before.
            unsafe { revoked(self.context) };
        }
    }

    /// The driver is told no more. Waits until nothing of ours maps the memory.
    fn disarm(&self) {
        self.windows.wait();
        *self.told.lock() = true;
    }
}

/// What a driver gets for what it registered, and gives back when it unregisters.
struct DriverRegistration {
    registrar: Arc<dyn Registrar>,
    function: Function,
    provider: u32,
    publisher: Arc<Publisher>,
}

/// What is known of the struct pages of a bound device, under a lock. The kernel cannot be asked: a device that it knows as
/// one for peer-to-peer DMA may have no pool, which it does not check for ([`super::p2pdma::Pool`]).
fn paged_range<R>(function: &Function, f: impl FnOnce(&mut Option<(u32, u64, u64)>) -> R) -> Result<R> {
    initialised();
    let mut all = PAGED.lock();
    let device = function.as_raw();
    if !all.iter().any(|d| ptr::eq(d.device, device)) {
        all.push(PagedDevice { device, range: None }, GFP_KERNEL)?;
    }
    let found = all.iter_mut().find(|d| ptr::eq(d.device, device)).ok_or(ENODEV)?;
    Ok(f(&mut found.range))
}

/// A device is unbound: its driver's struct pages go.
pub(super) fn forget(function: &Function) {
    initialised();
    let device = function.as_raw();
    global::drop_from(&mut PAGED.lock(), |d| ptr::eq(d.device, device));
}

/// Publishes a part of a BAR of a bound device.
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
    };
    initialised();
    let registrar = REGISTRAR.lock().clone().ok_or(ENODEV)?;
    let windows = Windows::new()?;
    // What may fail is done first.
    let registration = KBox::<DriverRegistration>::new_uninit(GFP_KERNEL)?;
    // SAFETY: The driver promises that of the callback until it has unregistered, see the header. It is told there at the
    // latest; where registering fails, it is disarmed below, or nobody else has it.
    let publisher = unsafe { Publisher::new(what.revoked, what.context, windows.clone()) }?;
    if registrar.is_provided(&function) {
        return Err(refuse!(EEXIST, "{} is a provider already", wanted.addr));
    }
    let mut range = paged_range(&function, |range| *range)?;
    let bound = Published::by_other(device, &mut range, &windows);
    let made = registrar.register(&wanted, bound, publisher.clone());
    if range.is_some() {
        // It is in the list, so this cannot fail.
        let _ = paged_range(&function, |known| *known = range);
    }
    if made.is_err() {
        p2pdma::withdraw(device);
        publisher.disarm();
    }
    Ok(registration.write(DriverRegistration {
        registrar,
        function,
        provider: made?,
        publisher,
    }))
}

/// # Safety
///
/// As `p2pmem_register_provider()` in the header.
#[no_mangle]
unsafe extern "C" fn p2pmem_rust_register(
    pdev: *mut bindings::pci_dev,
    what: *const sys::p2pmem_publication,
) -> *mut sys::p2pmem_registration {
    let (Some(pdev), false) = (NonNull::new(pdev), what.is_null()) else {
        return EINVAL.to_ptr();
    };
    // SAFETY: The caller promises a function that is bound to his driver during the call. `pci::Device` is a transparent
    // wrapper of the C structure in every context.
    let device = unsafe { pdev.cast::<pci::Device<Bound>>().as_ref() };
    // SAFETY: The caller promises a valid structure.
    match register(device, unsafe { &*what }) {
        Ok(registration) => KBox::into_raw(registration).cast(),
        Err(refusal) => {
            refusal.log("registration of a provider");
            refusal.error.to_ptr()
        }
    }
}

/// # Safety
///
/// As `p2pmem_unregister_provider()` in the header.
#[no_mangle]
unsafe extern "C" fn p2pmem_rust_unregister(registration: *mut sys::p2pmem_registration) {
    if registration.is_null() {
        return;
    }
    // SAFETY: The caller promises what `p2pmem_rust_register` returned, and gives it back.
    let registration = unsafe { KBox::from_raw(registration.cast::<DriverRegistration>()) };
    // SAFETY: The caller promises that the function is bound to his driver until he has unregistered. `pci::Device` is
    // a transparent wrapper of the C structure in every context.
    let device = unsafe { &*registration.function.as_raw().cast::<pci::Device<Bound>>() };
    p2pdma::withdraw(device);
    registration
        .registrar
        .unregister(&registration.function, registration.provider);
    // Whatever ended the provider: from here on nothing of ours maps the memory, and the callback has returned.
    registration.publisher.revoked();
}

/// # Safety
///
/// `registration` must be what `p2pmem_rust_register` returned, and not be given back yet.
#[no_mangle]
unsafe extern "C" fn p2pmem_rust_registration_id(registration: *const sys::p2pmem_registration) -> u32 {
    // SAFETY: The caller's promise.
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

    /// A driver whose callback takes its time.
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

        fn publisher(self: &Arc<Self>) -> Result<Arc<Publisher>> {
            let context = Arc::as_ptr(self).cast_mut().cast();
            // SAFETY: The tests keep the context longer than the publisher.
            unsafe { Publisher::new(Some(revoked), context, Windows::new()?) }
        }
    }

    /// # Safety
    ///
    /// `context` is a `FakeDriver`.
    unsafe extern "C" fn revoked(context: *mut ffi::c_void) {
        // SAFETY: By the requirement.
        let told = unsafe { &*context.cast::<FakeDriver>() };
        told.calls.fetch_add(1, Relaxed);
        told.begun.complete();
        told.end.wait(60_000);
        told.ended.fetch_add(1, Relaxed);
    }

    #[test]
    fn who_comes_second_waits_for_the_callback() -> Result {
        let told = FakeDriver::new()?;
        let publisher = told.publisher()?;
        let returned = Arc::pin_init(Completion::new(), GFP_KERNEL)?;
        // Two works of one queue run at once, as neither needs the processor while it waits.
        let queue = OwnQueue::new(c"p2pmem-kunit", || {})?;
        let first = publisher.clone();
        queue.try_spawn(move || first.revoked())?;
        assert!(told.begun.wait(60_000));
        let (second, done) = (publisher.clone(), returned.clone());
        queue.try_spawn(move || {
            second.revoked();
            done.complete();
        })?;
        assert!(!returned.wait(20));
        told.end.complete();
        assert!(returned.wait(60_000));
        assert_eq!(told.ended.load(Relaxed), 1);
        publisher.revoked();
        // Waits for both.
        drop(queue);
        assert_eq!(told.calls.load(Relaxed), 1);
        Ok(())
    }

    #[test]
    fn a_driver_that_is_let_go_is_not_told() -> Result {
        let told = FakeDriver::new()?;
        let publisher = told.publisher()?;
        publisher.disarm();
        publisher.revoked();
        assert_eq!(told.calls.load(Relaxed), 0);
        Ok(())
    }
}
