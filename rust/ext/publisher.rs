// SPDX-License-Identifier: GPL-2.0

//! Drivers in the kernel that publish memory of their devices through p2pmem.
//!
//! C header: `include/linux/p2pmem.h`

use super::{
    driver::Published,
    global::{self, PagedDevice, PAGED},
    p2pdma,
    pci::Function,
    window::Windows,
};
use crate::{
    orchestrator::Orchestrator,
    publish::Publication,
    refusal::{refuse, Answer},
    sys,
};
use core::ptr::{self, NonNull};
use kernel::{
    bindings,
    device::Bound,
    ffi, pci,
    prelude::*,
    sync::{
        atomic::{AtomicFlag, Relaxed},
        Arc,
    },
};

/// A driver that wants to know when its memory was taken back.
///
/// # Invariants
///
/// `revoked`, where there is one, can be called with `context` until its driver has unregistered, which waits for the end of the
/// provider, and so for `told`.
pub(crate) struct Publisher {
    revoked: Option<unsafe extern "C" fn(*mut ffi::c_void)>,
    context: *mut ffi::c_void,
    windows: Arc<Windows>,
    /// Whether it was called.
    told: AtomicFlag,
}

// SAFETY: By the contract of `p2pmem_register_provider()` the callback may be called on any thread.
unsafe impl Send for Publisher {}
// SAFETY: As above; it is called once.
unsafe impl Sync for Publisher {}

impl Publisher {
    /// Nobody can reach the memory any more: waits until nothing of ours maps it, and tells the driver, the first time. Comes
    /// before unregistering or unbinding returns.
    pub(crate) fn revoked(&self) {
        self.windows.wait();
        if self.told.xchg(true, Relaxed) {
            return;
        }
        if let Some(revoked) = self.revoked {
            // SAFETY: By the type invariant; this is the one call, which the driver has not unregistered before.
            unsafe { revoked(self.context) };
        }
    }
}

/// What a driver gets for what it registered, and gives back when it unregisters.
struct Registration {
    orchestrator: Arc<Orchestrator>,
    function: Function,
    provider: u32,
}

/// What is known of the struct pages of a bound device, under a lock. The kernel cannot be asked: a device that it knows as
/// one for peer-to-peer DMA may have no pool, which it does not check for ([`super::p2pdma::Pool`]).
fn paged_range<R>(function: &Function, f: impl FnOnce(&mut Option<(u32, u64, u64)>) -> R) -> Result<R> {
    global::initialised();
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
    global::forget_paged(function.as_raw());
}

/// Publishes a part of a BAR of a bound device.
fn register(device: &pci::Device<Bound>, what: &sys::p2pmem_publication) -> Answer<KBox<Registration>> {
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
    let orchestrator = global::orchestrator()?;
    let windows = Windows::new()?;
    // INVARIANT: The driver promises that, see the header.
    let publisher = Publisher {
        revoked: what.revoked,
        context: what.context,
        windows: windows.clone(),
        told: AtomicFlag::new(false),
    };
    let publisher = Arc::new(publisher, GFP_KERNEL)?;
    // What may fail is done first.
    let registration = KBox::<Registration>::new_uninit(GFP_KERNEL)?;
    if orchestrator.is_provided(&function) {
        return Err(refuse!(EEXIST, "{} is a provider already", wanted.addr));
    }
    let mut range = paged_range(&function, |range| *range)?;
    let bound = Published::by_other(device, &mut range, &windows);
    let made = orchestrator.publish_registered(&wanted, bound, publisher);
    // It is in the list, so this cannot fail.
    let _ = paged_range(&function, |known| *known = range);
    if made.is_err() {
        p2pdma::publish(device, false);
    }
    Ok(registration.write(Registration {
        orchestrator: orchestrator.clone(),
        function,
        provider: made?,
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
    let registration = unsafe { KBox::from_raw(registration.cast::<Registration>()) };
    // SAFETY: The caller promises that the function is bound to his driver until he has unregistered. `pci::Device` is
    // a transparent wrapper of the C structure in every context.
    let device = unsafe { &*registration.function.as_raw().cast::<pci::Device<Bound>>() };
    p2pdma::publish(device, false);
    registration
        .orchestrator
        .unregister(&registration.function, registration.provider);
}

/// # Safety
///
/// `registration` must be what `p2pmem_rust_register` returned, and not be given back yet.
#[no_mangle]
unsafe extern "C" fn p2pmem_rust_registration_id(registration: *const sys::p2pmem_registration) -> u32 {
    // SAFETY: The caller's promise.
    unsafe { (*registration.cast::<Registration>()).provider }
}
