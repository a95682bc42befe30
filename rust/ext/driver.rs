// SPDX-License-Identifier: GPL-2.0

//! The PCI driver that providers of ours are bound to, by `driver_override` and by nothing else.

use crate::ext::{
    compat::{
        pci_device_table,
        IdInfo, //
    },
    global::{
        self,
        initialised, //
    },
    p2pdma,
    pci::Function,
    vma::{
        AddressSpace,
        Mappable, //
    },
    window::{
        Window,
        Windows, //
    }, //
};
use crate::{
    policy::path::PciAddr,
    sys, //
};
use core::{marker::PhantomData, ptr};
use kernel::{
    bindings,
    device::{Bound, Core},
    error::to_result,
    ffi, pci,
    prelude::*,
    str::CStrExt,
    sync::Arc,
};

/// What the driver tells of its devices.
pub(crate) trait Hooks: Send + Sync + 'static {
    /// The device is being unbound, and [`with_bound`] does not find it any more. What was made of it has to end here.
    fn unbinding(function: &Function);
    /// What is stored in the device is lost soon, or was already: it is about to be reset, or an error was found of it. `why` says
    /// which, and `answers` whether its memory can be written still. It stays bound, and its pool is offered to nobody.
    fn losing(function: &Function, why: &CStr, answers: bool);
    /// The device answers again, after [`Self::losing`] of one that did not.
    fn recovered(function: &Function);
}

/// The driver.
pub(crate) struct Driver<H>(PhantomData<H>);

/// A device that is bound to the driver, which of its BARs were claimed since (a bit for each), the one range of it that was
/// given struct pages since (BAR, offset, size), and the windows of it.
struct BoundDevice {
    device: *mut bindings::pci_dev,
    claimed: u32,
    range: Option<(u32, u64, u64)>,
    windows: Arc<Windows>,
}

// SAFETY: A PCI device is not bound to a thread.
unsafe impl Send for BoundDevice {}

kernel::sync::global_lock! {
    // SAFETY: `init_lock()` initialises it, and all that uses it calls `initialised()` first.
    unsafe(uninit) static BOUND: Mutex<KVec<BoundDevice>> = KVec::new();
}

/// # Safety
///
/// Called once, before the static locks are said to be initialised.
pub(super) unsafe fn init_lock() {
    // SAFETY: By the requirement, as all that uses the lock calls `initialised()` first.
    unsafe { BOUND.init() };
}

/// Forgets a device that was bound to the driver.
fn forget_bound(device: *mut bindings::pci_dev) {
    initialised();
    global::drop_from(&mut BOUND.lock(), |d| ptr::eq(d.device, device));
}

/// What the driver core keeps of a bound device: its place in [`BOUND`], which ends with this at the latest.
pub(crate) struct Data(BoundDevice);

impl Drop for Data {
    fn drop(&mut self) {
        forget_bound(self.0.device);
    }
}

pci_device_table!(
    TABLE,
    (),
    // No device has a device id of more than 16 bits. The entry is there because the kernel crate looks up the id
    // that a device was matched by, and before 7.3 finds the first one for those matched by `driver_override`.
    [(pci::DeviceId::from_id(pci::Vendor::REDHAT, 0xffff_fffe), ())]
);

/// What the PCI core tells the driver of resets and errors. The device is locked, or, in the recovery from an error, is kept
/// bound by the core.
impl<H: Hooks> Driver<H> {
    const ERROR_HANDLERS: &'static bindings::pci_error_handlers = &bindings::pci_error_handlers {
        error_detected: Some(Self::error_detected),
        mmio_enabled: None,
        slot_reset: Some(Self::slot_reset),
        reset_prepare: Some(Self::reset_prepare),
        reset_done: None,
        resume: None,
        cor_error_detected: None,
    };

    /// # Safety
    ///
    /// `device` is bound to the driver.
    unsafe extern "C" fn reset_prepare(device: *mut bindings::pci_dev) {
        // SAFETY: By the requirement.
        unsafe { Self::lose(device, c"it is about to be reset", true) };
    }

    /// # Safety
    ///
    /// As [`Self::reset_prepare`].
    unsafe fn lose(device: *mut bindings::pci_dev, why: &CStr, answers: bool) {
        // SAFETY: By the requirement it is a device, which lives during the call.
        let function = unsafe { Function::of_raw(ptr::NonNull::new_unchecked(device)) };
        // SAFETY: As above; the call only clears a flag, where there is one.
        unsafe { bindings::pci_p2pmem_publish(device, false) };
        H::losing(&function, why, answers);
    }

    /// # Safety
    ///
    /// As [`Self::reset_prepare`].
    unsafe extern "C" fn error_detected(
        device: *mut bindings::pci_dev,
        state: bindings::pci_channel_state_t,
    ) -> bindings::pci_ers_result_t {
        let (why, answer) = match state {
            // Nothing is lost, and nothing keeps it from going on.
            bindings::pci_channel_io_normal => return bindings::pci_ers_result_PCI_ERS_RESULT_CAN_RECOVER,
            bindings::pci_channel_io_frozen => (
                c"it had an error and is reset",
                bindings::pci_ers_result_PCI_ERS_RESULT_NEED_RESET,
            ),
            _ => (
                c"it had an error that it does not recover from",
                bindings::pci_ers_result_PCI_ERS_RESULT_DISCONNECT,
            ),
        };
        // SAFETY: By the requirement.
        unsafe { Self::lose(device, why, false) };
        answer
    }

    /// # Safety
    ///
    /// As [`Self::reset_prepare`].
    unsafe extern "C" fn slot_reset(device: *mut bindings::pci_dev) -> bindings::pci_ers_result_t {
        // SAFETY: By the requirement it is a device, whose configuration the core saved when it was found.
        unsafe { bindings::pci_restore_state(device) };
        // SAFETY: By the requirement it is a device, which lives during the call.
        let function = unsafe { Function::of_raw(ptr::NonNull::new_unchecked(device)) };
        H::recovered(&function);
        bindings::pci_ers_result_PCI_ERS_RESULT_RECOVERED
    }
}

impl<H: Hooks> pci::Driver for Driver<H> {
    type IdInfo = ();
    type Data<'bound> = Data;
    const ID_TABLE: pci::IdTable<Self::IdInfo> = &TABLE;

    fn probe<'bound>(
        dev: &'bound pci::Device<Core<'_>>,
        _info: IdInfo<'bound, Self::IdInfo>,
    ) -> impl PinInit<Data, Error> + 'bound {
        let add = || -> Result<Data> {
            initialised();
            dev.enable_device_mem()?;
            let device = Function::of(dev).as_raw();
            // SAFETY: The device is being bound to this driver, and the handlers live as long as the module's code.
            unsafe { sys::p2pmem_pci_set_error_handlers(device, Self::ERROR_HANDLERS) };
            let windows = Windows::new()?;
            let entry = || BoundDevice {
                device,
                claimed: 0,
                range: None,
                windows: windows.clone(),
            };
            BOUND.lock().push(entry(), GFP_KERNEL)?;
            Ok(Data(entry()))
        };
        add()
    }

    fn unbind<'bound>(dev: &'bound pci::Device<Core<'_>>, this: Pin<&Data>) {
        let function = Function::of(dev);
        // First of all, so that nothing is made of it any more.
        forget_bound(function.as_raw());
        H::unbinding(&function);
        this.0.windows.wait();
    }
}

/// A device that is bound to the driver, during a call of [`with_bound`], or to another one that publishes memory of it.
pub(crate) struct Published<'a> {
    device: &'a pci::Device<Bound>,
    /// Of a device that is bound to the driver: which of its BARs are claimed.
    claimed: Option<&'a mut u32>,
    range: &'a mut Option<(u32, u64, u64)>,
    windows: &'a Arc<Windows>,
}

impl<'a> Published<'a> {
    /// A device that is bound to another driver, which says so: of it the `range`, if any, has struct pages, and the
    /// unbinding of that driver waits for `windows`.
    pub(super) fn by_other(
        device: &'a pci::Device<Bound>,
        range: &'a mut Option<(u32, u64, u64)>,
        windows: &'a Arc<Windows>,
    ) -> Self {
        Self {
            device,
            claimed: None,
            range,
            windows,
        }
    }

    pub(crate) fn device(&self) -> &pci::Device<Bound> {
        self.device
    }

    /// Claims a BAR, so that nobody else in the kernel gets it, and `/proc/iomem` shows who has it. It is claimed until the device is
    /// unbound. The claim of a device that is bound to another driver is that driver's business.
    ///
    /// Errors: `EINVAL` when there is no such BAR, `EBUSY` when somebody else has claimed some of it (the kernel logs which part),
    /// `ENOMEM`.
    pub(crate) fn claim(&mut self, bar: u32) -> Result {
        let Some(claimed) = self.claimed.as_deref_mut() else {
            return Ok(());
        };
        let bit = 1_u32.checked_shl(bar).ok_or(EINVAL)?;
        if *claimed & bit != 0 {
            return Ok(());
        }
        let device = Function::of(self.device).as_raw();
        // SAFETY: The device is bound during this call, so that the driver core releases the claim when it is unbound; the name is a
        // static, which lives as long as the module, and the module's driver goes before it.
        to_result(unsafe { bindings::pcim_request_region(device, bar as ffi::c_int, c"p2pmem".as_char_ptr()) })?;
        *claimed |= bit;
        Ok(())
    }

    /// Gives a range of a BAR struct pages. It keeps them until the device is unbound, so a second range is refused.
    ///
    /// Errors: `EBUSY` when another range has them already, and those of `pci_p2pdma_add_resource()`.
    pub(crate) fn add_range(&mut self, bar: u32, offset: u64, size: u64) -> Result {
        match *self.range {
            Some(range) if range == (bar, offset, size) => return Ok(()),
            Some(_) => return Err(EBUSY),
            None => {}
        }
        p2pdma::add_resource(self.device, bar, size, offset)?;
        *self.range = Some((bar, offset, size));
        Ok(())
    }

    /// Offers what of the range with struct pages is left in the kernel's pool to other drivers in the kernel, until
    /// [`p2pdma::withdraw`].
    ///
    /// Errors: `ENODEV` when no range has struct pages.
    pub(crate) fn offer(&self) -> Result {
        if self.range.is_none() {
            return Err(ENODEV);
        }
        // SAFETY: The range was added to the device's pool since it was bound, by `add_range`.
        unsafe { p2pdma::offer(self.device) };
        Ok(())
    }

    /// A window of a range of a BAR, which gets no struct pages. Programs map it in `space`.
    ///
    /// Errors: `EBUSY` when a range has them already, `EINVAL` when the range is not in the BAR, `EOPNOTSUPP` when the
    /// device's BARs cannot be mapped, `ENOMEM`.
    pub(crate) fn window<T: Mappable>(
        &self,
        bar: u32,
        offset: u64,
        size: u64,
        space: &AddressSpace<T>,
    ) -> Result<Window> {
        if self.range.is_some() {
            return Err(EBUSY);
        }
        let space = space.hold()?;
        // SAFETY: The device is bound during this call, and whoever unbinds it waits for these windows.
        unsafe { Window::new(&Function::of(self.device), bar, offset, size, self.windows, space) }
    }
}

/// Calls `f` with the device at `addr` if it is bound to this driver. It stays bound during the call.
pub(crate) fn with_bound<R>(addr: PciAddr, f: impl FnOnce(Published<'_>) -> R) -> Option<R> {
    initialised();
    let mut bound = BOUND.lock();
    let function = Function::find(addr)?;
    let entry = bound.iter_mut().find(|d| ptr::eq(d.device, function.as_raw()))?;
    // SAFETY: The device is in the list, `unbind` takes it out before it is unbound, and the lock keeps `unbind` from
    // doing so during the call. `pci::Device` is a transparent wrapper of the C structure in every context.
    let device = unsafe { &*entry.device.cast::<pci::Device<Bound>>() };
    Some(f(Published {
        device,
        claimed: Some(&mut entry.claimed),
        range: &mut entry.range,
        windows: &entry.windows,
    }))
}
