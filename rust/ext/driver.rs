// SPDX-License-Identifier: GPL-2.0

//! The p2pmem PCI driver, to which own providers are bound by `driver_override` alone.
//!
//! [`with_bound`] gives access to a bound device, [`Published`] claims BARs and makes pages or windows of ranges. The
//! driver reports unbinding, resets and errors to [`Hooks`].
//!
//! All functions are for process context and may sleep. A device's `Entry::inner` is locked during [`with_bound`] and nests inside
//! the device lock. The list of devices, `DEVICES`, is a leaf. [`Hooks`] are called with the device locked, and neither of the
//! other two.
//!
//! C header: [`include/linux/pci.h`](srctree/include/linux/pci.h)

use crate::ext::{
    bus_master::{
        BusMaster,
        DmaUse, //
    },
    compat::{
        pci_device_table,
        IdInfo, //
    },
    global::{
        self,
        initialised, //
    },
    p2pdma::{
        Backing,
        BarRange, //
    },
    pci::Function,
    pool::{
        self,
        Pool, //
    },
    uses::Uses,
    vma::{
        AddressSpace,
        Mappable, //
    }, //
};
use crate::policy::path::PciAddr;
use core::{marker::PhantomData, ptr};
use kernel::{
    bindings,
    device::{Bound, Core},
    error::to_result,
    ffi, new_mutex, pci,
    prelude::*,
    str::CStrExt,
    sync::{Arc, Mutex},
};

/// Callbacks for bound devices. All are called in process context with the device locked, and may sleep.
pub(crate) trait Hooks: Send + Sync + 'static {
    /// The device is being unbound; [`with_bound`] does not find the device any more.
    ///
    /// The provider must be removed before this returns. The driver waits for the device's uses afterwards.
    fn unbinding(function: &Function);
    /// The device is about to be reset, so its memory's contents will be lost. It can still be written. The provider must be removed
    /// before this returns.
    ///
    /// `why` is a clause that names the cause for the log. The device stays bound, and its pool is not published any more.
    fn losing(function: &Function, why: &CStr);
    /// The device's memory is lost. As [`Self::losing`], but the memory cannot be written, and the provider's removal only begins: the
    /// caller holds `pci_bus_sem`, for which every change of the bus waits. [`recover`] must be called when the removal has ended.
    fn lost(function: &Function, why: &CStr);
    /// Whether the device is a provider, also one that is being removed.
    fn is_provided(function: &Function) -> bool;
    /// The device works again. Its lost memory can be cleared.
    fn recovered(function: &Function);
}

/// The p2pmem PCI driver, with the callbacks `H`.
pub(crate) struct Driver<H>(PhantomData<H>);

/// What a device is ready for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// The device is bound, and its memory can be published.
    Ready,
    /// The device is bound, and a reset has begun.
    Resetting,
    /// The device is bound and works again after an error, but the removal of its provider has not ended.
    Answering,
    /// The device is bound. It reported an error, or its memory did not answer after a reset.
    Failed,
    /// The device is not bound to the driver, but may still use mappings from when it was.
    Unbound,
}

/// A device that is bound to the driver, or was.
///
/// # Invariants
///
/// While the state in `inner` is not [`State::Unbound`], the device of `master` is bound to the driver. Unbinding waits for `uses`,
/// which counts windows of the device and its uses for DMA.
#[pin_data]
struct Entry {
    uses: Arc<Uses>,
    /// Refers to the device, so that no other one has its address.
    master: Arc<BusMaster>,
    #[pin]
    inner: Mutex<Inner>,
}

/// What [`Entry::inner`] protects.
///
/// # Invariants
///
/// The BARs in the bit mask `claimed` were claimed since the device was bound.
struct Inner {
    state: State,
    claimed: u32,
}

impl Entry {
    fn is_of(&self, device: *mut bindings::pci_dev) -> bool {
        ptr::eq(self.master.function().as_raw(), device)
    }
}

kernel::sync::global_lock! {
    // SAFETY: `init_lock()` initialises the lock; every function that uses the lock calls `initialised()` first, which
    // panics before that.
    unsafe(uninit) static DEVICES: Mutex<KVec<Arc<Entry>>> = KVec::new();
}

/// Initialises `DEVICES`.
///
/// # Safety
///
/// Must be called once, before [`global::set_initialised`].
pub(super) unsafe fn init_lock() {
    // SAFETY: The caller guarantees that this is the first call. No other code uses the lock before `set_initialised()`, as
    // `initialised()` panics.
    unsafe { DEVICES.init() };
}

/// Returns the entry of a device, if there is one.
fn entry_of(device: *mut bindings::pci_dev) -> Option<Arc<Entry>> {
    initialised();
    DEVICES.lock().iter().find(|entry| entry.is_of(device)).cloned()
}

/// Sets what a bound device is ready for. Waits for [`with_bound`] in progress.
fn set_state(device: *mut bindings::pci_dev, state: State) {
    if let Some(entry) = entry_of(device) {
        entry.inner.lock().state = state;
    }
}

/// Lets the memory of a device that works again after an error be published again, now that the removal of its provider has ended.
/// Calls `clear` before, if the device answers. Does nothing for other devices. May sleep; the caller does not have the device
/// locked.
pub(crate) fn recover(function: &Function, clear: impl FnOnce()) {
    function.while_bound(|_| {
        if entry_of(function.as_raw()).is_some_and(|entry| entry.inner.lock().state == State::Answering) {
            ready_if_it_answers(function, clear);
        }
    });
}

/// Sets the state of a bound device after a reset by whether its memory answers, which this returns. Calls `clear` before, if it
/// does.
fn ready_if_it_answers(function: &Function, clear: impl FnOnce()) -> bool {
    let answers = function.has_memory_space();
    if answers {
        clear();
    }
    set_state(function.as_raw(), if answers { State::Ready } else { State::Failed });
    answers
}

/// Makes [`with_bound`] find a device no more, and waits for calls in progress: no range is added, and no use begins, from now on.
/// The device's driver is about to be unbound.
pub(super) fn unbinding(function: &Function) {
    set_state(function.as_raw(), State::Unbound);
}

/// Forgets a device that is not bound, or is being unbound.
fn forget_device(device: *mut bindings::pci_dev) {
    initialised();
    global::drop_from(&mut DEVICES.lock(), |entry| entry.is_of(device));
}

/// Forgets a function that was removed from the machine.
pub(super) fn forget(function: &Function) {
    forget_device(function.as_raw());
}

/// Forgets which devices may still use mappings. The driver must not be registered.
pub(super) fn forget_all() {
    initialised();
    global::drop_from(&mut DEVICES.lock(), |_| true);
}

/// The driver data of a bound device, which [`pci::Device::enable_device_mem`] enabled.
///
/// Dropping it, also if `probe` fails later, ends the entry in [`DEVICES`], except for what has to be known of mappings that the
/// device may still use, and disables the device. The core counts how often a device was enabled: without this, the next driver's
/// disabling would not end bus mastering.
pub(crate) struct Data(*mut bindings::pci_dev);

// SAFETY: A `struct pci_dev` is not bound to a thread.
unsafe impl Send for Data {}
// SAFETY: A shared reference gives no access to the pointer.
unsafe impl Sync for Data {}

impl Drop for Data {
    fn drop(&mut self) {
        if let Some(entry) = entry_of(self.0) {
            entry.inner.lock().state = State::Unbound;
            if !entry.master.unbound() {
                forget_device(self.0);
            }
        }
        // SAFETY: The device was enabled, and the driver data does not outlive its binding.
        unsafe { bindings::pci_disable_device(self.0) };
    }
}

pci_device_table!(
    TABLE,
    (),
    // The entry matches no device: device ids have 16 bits. The kernel crate looks up the table entry of the matching id,
    // and before 7.3 uses the first entry for a device that `driver_override` matched, so the table must not be empty.
    [(pci::DeviceId::from_id(pci::Vendor::REDHAT, 0xffff_fffe), ())]
);

/// The error and reset callbacks of the driver. The PCI core calls them with the device locked and bound.
impl<H: Hooks> Driver<H> {
    const ERROR_HANDLERS: &'static bindings::pci_error_handlers = &bindings::pci_error_handlers {
        error_detected: Some(Self::error_detected),
        mmio_enabled: None,
        slot_reset: Some(Self::slot_reset),
        reset_prepare: Some(Self::reset_prepare),
        reset_done: Some(Self::reset_done),
        resume: None,
        cor_error_detected: None,
    };

    /// `reset_prepare` of `struct pci_error_handlers`.
    ///
    /// # Safety
    ///
    /// `device` must be bound to the driver during the call. The PCI core guarantees that by the device lock.
    unsafe extern "C" fn reset_prepare(device: *mut bindings::pci_dev) {
        // First: what is published from here on would not be removed.
        set_state(device, State::Resetting);
        // SAFETY: The caller guarantees a bound device.
        let function = unsafe { Self::withdraw(device) };
        H::losing(&function, c"the device is about to be reset");
    }

    /// `reset_done` of `struct pci_error_handlers`. The PCI core calls it also if the reset failed, so the device may still use
    /// mappings that have ended.
    ///
    /// # Safety
    ///
    /// `device` must be bound to the driver during the call. The PCI core guarantees that by the device lock.
    unsafe extern "C" fn reset_done(device: *mut bindings::pci_dev) {
        // SAFETY: The caller guarantees a bound device.
        unsafe { Self::ready_again(device) };
    }

    /// Lets the device's memory be published again after a reset, if it answers. Returns whether it does.
    ///
    /// # Safety
    ///
    /// `device` must be bound to the driver during the call.
    unsafe fn ready_again(device: *mut bindings::pci_dev) -> bool {
        // SAFETY: The caller guarantees a bound device, which is valid and not null.
        let function = unsafe { Function::of_raw(ptr::NonNull::new_unchecked(device)) };
        // The removal ends after it took the provider off the list, and `recover()` waits for the device lock.
        if H::is_provided(&function) && function.has_memory_space() {
            set_state(device, State::Answering);
            return true;
        }
        ready_if_it_answers(&function, || H::recovered(&function))
    }

    /// Withdraws the device's pool. Returns the function.
    ///
    /// # Safety
    ///
    /// `device` must be bound to the driver during the call.
    unsafe fn withdraw(device: *mut bindings::pci_dev) -> Function {
        // SAFETY: The caller guarantees a bound device. `pci::Device` is a transparent wrapper of `struct pci_dev` in every
        // context.
        let device = unsafe { &*device.cast::<pci::Device<Bound>>() };
        pool::withdraw(device);
        Function::of(device)
    }

    /// `error_detected` of `struct pci_error_handlers`.
    ///
    /// # Safety
    ///
    /// `device` must be bound to the driver during the call.
    unsafe extern "C" fn error_detected(
        device: *mut bindings::pci_dev,
        state: bindings::pci_channel_state_t,
    ) -> bindings::pci_ers_result_t {
        let (why, answer) = match state {
            // The memory's contents are intact.
            bindings::pci_channel_io_normal => return bindings::pci_ers_result_PCI_ERS_RESULT_CAN_RECOVER,
            bindings::pci_channel_io_frozen => (
                c"the device reported an error and is being reset",
                bindings::pci_ers_result_PCI_ERS_RESULT_NEED_RESET,
            ),
            _ => (
                c"the device reported an unrecoverable error",
                bindings::pci_ers_result_PCI_ERS_RESULT_DISCONNECT,
            ),
        };
        set_state(device, State::Failed);
        // SAFETY: The caller guarantees a bound device.
        let function = unsafe { Self::withdraw(device) };
        H::lost(&function, why);
        answer
    }

    /// `slot_reset` of `struct pci_error_handlers`.
    ///
    /// # Safety
    ///
    /// `device` must be bound to the driver during the call.
    unsafe extern "C" fn slot_reset(device: *mut bindings::pci_dev) -> bindings::pci_ers_result_t {
        // SAFETY: The caller guarantees a bound device, whose configuration `probe` saved.
        unsafe { bindings::pci_restore_state(device) };
        // The PCI core calls only after it has reset the link.
        if let Some(entry) = entry_of(device) {
            entry.master.was_reset();
        }
        // Another device below the port may have requested the reset after an error that left this device's memory intact.
        // SAFETY: The caller guarantees a bound device.
        let function = unsafe { Self::withdraw(device) };
        H::lost(&function, c"the device was reset with others below its port");
        // SAFETY: The caller guarantees a bound device.
        match unsafe { Self::ready_again(device) } {
            true => bindings::pci_ers_result_PCI_ERS_RESULT_RECOVERED,
            false => bindings::pci_ers_result_PCI_ERS_RESULT_DISCONNECT,
        }
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
            let data = Data(device);
            // SAFETY: The device is being bound. The saved state is restored after an error, with Memory Space enabled.
            to_result(unsafe { bindings::pci_save_state(device) })?;
            // The kernel crate's registration of PCI drivers has no error handlers.
            // SAFETY: `probe` binds the device to this driver, so `driver` is set and the device locked. Every other access is a
            // read by a holder of the lock of a bound device, or of a device whose probe has returned, and every write has this
            // value. The handlers are a static, which lives longer than the driver's registration.
            unsafe { (&raw mut (*(*device).driver).err_handler).write_volatile(Self::ERROR_HANDLERS) };
            let master = match entry_of(device) {
                Some(former) => former.master.clone(),
                None => BusMaster::new(Function::of(dev))?,
            };
            let uses = Uses::new()?;
            // INVARIANT: The device is being bound. Nothing was claimed, and no use exists.
            let entry = Arc::pin_init(
                pin_init!(Entry {
                    uses,
                    master,
                    inner <- new_mutex!(Inner {
                        state: State::Ready,
                        claimed: 0,
                    }),
                }),
                GFP_KERNEL,
            )?;
            let mut devices = DEVICES.lock();
            match devices.iter_mut().find(|former| former.is_of(device)) {
                Some(former) => *former = entry.clone(),
                None => devices.push(entry.clone(), GFP_KERNEL)?,
            }
            entry.master.bound();
            Ok(data)
        };
        add()
    }

    fn unbind<'bound>(dev: &'bound pci::Device<Core<'_>>, _this: Pin<&Data>) {
        let function = Function::of(dev);
        // The bus's notifier did this before, but the core does not notify if it gives up a device that it has just bound. After
        // this, no range is added, and no use begins.
        unbinding(&function);
        H::unbinding(&function);
        if let Some(entry) = entry_of(function.as_raw()) {
            entry.uses.wait();
        }
    }
}

/// Access to the BARs of a bound device: one of this driver, during [`with_bound`], or one of another driver that registers
/// memory.
///
/// # Invariants
///
/// The unbinding of the device waits for `uses`. `own`, if any, is the device's.
pub(crate) struct Published<'a> {
    device: &'a pci::Device<Bound>,
    uses: &'a Arc<Uses>,
    /// `None` for a device of another driver.
    own: Option<(&'a Arc<BusMaster>, &'a mut Inner)>,
}

impl<'a> Published<'a> {
    /// Access to a device of another driver that registers memory.
    ///
    /// # Safety
    ///
    /// The driver must not be unbound before `uses` counts no use.
    pub(super) unsafe fn by_other(device: &'a pci::Device<Bound>, uses: &'a Arc<Uses>) -> Self {
        // INVARIANT: The caller guarantees that unbinding waits for `uses`.
        Self {
            device,
            uses,
            own: None,
        }
    }

    /// Returns the bound device.
    pub(crate) fn device(&self) -> &pci::Device<Bound> {
        self.device
    }

    /// Returns why the memory cannot be published now, as a clause about the device; `None` if it can be.
    pub(crate) fn unready(&self) -> Option<&'static str> {
        match self.own.as_ref()?.1.state {
            State::Ready => None,
            State::Resetting | State::Answering => Some("is being reset"),
            State::Failed | State::Unbound => Some("has failed, and no reset has made its memory answer"),
        }
    }

    /// Claims a BAR, as shown in `/proc/iomem`, until the device is unbound. Does nothing for a device of another driver.
    ///
    /// Errors: `EINVAL` if there is no such BAR; `EBUSY` if part of it is claimed already (the kernel logs which part);
    /// `ENOMEM`.
    pub(crate) fn claim(&mut self, bar: u32) -> Result {
        let Some((_, inner)) = &mut self.own else {
            return Ok(());
        };
        let bit = 1_u32.checked_shl(bar).ok_or(EINVAL)?;
        if inner.claimed & bit != 0 {
            return Ok(());
        }
        let device = Function::of(self.device).as_raw();
        // SAFETY: The device is bound during this call, so the driver core releases the claim when the device is unbound.
        // The name is a static of this module, whose driver is unregistered before the module goes.
        to_result(unsafe { bindings::pcim_request_region(device, bar as ffi::c_int, c"p2pmem".as_char_ptr()) })?;
        // INVARIANT: The BAR was claimed above.
        inner.claimed |= bit;
        Ok(())
    }

    /// Returns a use of the device for DMA, for which the device stays bound. `None` for a device of another driver.
    pub(crate) fn dma_use(&self) -> Option<DmaUse> {
        self.own
            .as_ref()
            // SAFETY: The device is bound during this call, and by the type invariant its unbinding waits for `uses`.
            .map(|(master, _)| unsafe { DmaUse::new(master, self.uses) })
    }

    /// Adds a range of a BAR to the device's pool, with a `struct page` for each page, and publishes the pool to other drivers in the
    /// kernel until [`pool::withdraw`]. Returns the pool. Errors: those of [`pool::add_range`].
    pub(crate) fn add_range(&self, range: BarRange) -> Result<Arc<Pool>> {
        let pool = pool::add_range(self.device, range)?;
        pool.offer();
        Ok(pool)
    }

    /// Maps a range of a BAR as a window without `struct page`. Programs map the window in `space`, at the pages from `first` on. May
    /// sleep.
    ///
    /// Errors: `EBUSY` if a range of the device has pages; `EINVAL` if the range is not in the BAR; `EOPNOTSUPP` if the
    /// device cannot do peer-to-peer DMA; `ENOMEM`.
    pub(crate) fn window<T: Mappable>(&self, range: BarRange, space: &AddressSpace<T>, first: u64) -> Result<Backing> {
        let function = Function::of(self.device);
        if pool::added(&function).is_some() {
            return Err(EBUSY);
        }
        // SAFETY: The device is bound during this call, and by the type invariant its unbinding waits for `uses`.
        unsafe { Backing::window(&function, range, space.hold(), first, self.uses) }
    }
}

/// Calls `f` with the device at `addr`, or returns `None` if no device of this driver is there.
///
/// The device stays bound during the call: its entry is locked, so `f` must not call this function or wait for an unbinding.
/// May sleep.
pub(crate) fn with_bound<R>(addr: PciAddr, f: impl FnOnce(Published<'_>) -> R) -> Option<R> {
    let function = Function::find(addr)?;
    let entry = entry_of(function.as_raw())?;
    let mut inner = entry.inner.lock();
    if inner.state == State::Unbound {
        return None;
    }
    // SAFETY: By the type invariant of `Entry` the device is bound while the state is not Unbound. `unbinding()` sets the state
    // before the device is unbound, and waits for the lock. `pci::Device` is a transparent wrapper of `struct pci_dev` in every
    // context.
    let device = unsafe { &*function.as_raw().cast::<pci::Device<Bound>>() };
    // INVARIANT: `unbind` waits for the entry's uses.
    Some(f(Published {
        device,
        uses: &entry.uses,
        own: Some((&entry.master, &mut inner)),
    }))
}
