// SPDX-License-Identifier: GPL-2.0

//! The kernel's pools of BAR memory: those of functions whose drivers published memory, and those of ranges that p2pmem added.
//!
//! Context: process context, may sleep. `POOLS` nests inside the device lock and the lock of a bound device
//! ([`with_bound`](super::driver::with_bound)), and a pool's own lock, `Pool::open`, inside `POOLS`. No other lock of p2pmem is
//! taken under them.
//!
//! C header: [`include/linux/pci-p2pdma.h`](srctree/include/linux/pci-p2pdma.h)

use crate::ext::{
    global::initialised,
    p2pdma::{
        is_reached_by,
        within,
        Backing,
        BarRange, //
    },
    pci::Function, //
};
use core::ptr::NonNull;
use kernel::{
    bindings,
    device::Bound,
    error::to_result,
    new_mutex,
    page::PAGE_SIZE,
    pci,
    prelude::*,
    sync::{aref::ARef, Arc, Mutex},
};

kernel::sync::global_lock! {
    // SAFETY: `init_lock()` initialises the lock; every function that uses the lock calls `initialised()` first, which
    // panics before that.
    unsafe(uninit) static POOLS: Mutex<Option<KVec<Arc<Pool>>>> = None;
}

/// Initialises `POOLS`.
///
/// # Safety
///
/// Must be called once, before [`crate::ext::global::set_initialised`].
pub(super) unsafe fn init_lock() {
    // SAFETY: The caller guarantees that this is the first call. No other code uses the lock before `set_initialised()`, as
    // `initialised()` panics.
    unsafe { POOLS.init() };
}

/// Allows pools. The caller calls [`close`] for every driver that is bound or unbound from now on, until [`close_all`].
pub(super) fn allow() {
    initialised();
    *POOLS.lock() = Some(KVec::new());
}

/// Closes and forgets the pools of a function whose driver is unbound or bound. The device is locked.
pub(super) fn close(function: &Function) {
    initialised();
    if let Some(pools) = POOLS.lock().as_mut() {
        pools.retain(|pool| {
            let stays = !pool.function.same(function);
            if !stays {
                *pool.open.lock() = false;
            }
            stays
        });
    }
}

/// Closes and forgets all pools, and allows no more.
pub(super) fn close_all() {
    initialised();
    if let Some(pools) = POOLS.lock().take() {
        for pool in &pools {
            *pool.open.lock() = false;
        }
    }
}

/// Returns the kernel's pool of a function, or `None` if no driver published memory of the function, or p2pmem added the memory.
///
/// The pool is closed when that driver is unbound. May sleep; takes `POOLS`.
///
/// Errors: `ENODEV` if pools are not allowed; `ENOMEM`.
pub(crate) fn find(function: &Function) -> Result<Option<Arc<Pool>>> {
    initialised();
    let mut pools = POOLS.lock();
    let pools = pools.as_mut().ok_or(ENODEV)?;
    if let Some(pool) = pools.iter().find(|pool| pool.function.same(function)) {
        return Ok(pool.range.is_none().then(|| pool.clone()));
    }
    if !has_published(function)? {
        return Ok(None);
    }
    // INVARIANT: Published memory is in a pool: drivers publish what they have added to the pool, and so does [`Pool::offer`].
    let pool = Pool::new(function, None, true)?;
    pools.push(pool.clone(), GFP_KERNEL)?;
    Ok(Some(pool))
}

/// Returns the pool to which p2pmem added a range since the driver of the function was bound.
pub(super) fn added(function: &Function) -> Option<Arc<Pool>> {
    initialised();
    added_in(POOLS.lock().as_ref()?, function).cloned()
}

fn added_in<'a>(pools: &'a [Arc<Pool>], function: &Function) -> Option<&'a Arc<Pool>> {
    pools
        .iter()
        .find(|pool| pool.range.is_some() && pool.function.same(function))
}

/// Adds a range of a BAR to the device's pool, with a `struct page` for each page, and returns the pool. Takes `POOLS`.
///
/// The range keeps its pages until the driver is unbound, so only the same range can be added again. C:
/// `pci_p2pdma_add_resource()`.
///
/// Errors: `EINVAL` if the range is not within a memory BAR or not whole pages; `EBUSY` if another range was added; `ENODEV` if
/// pools are not allowed; `ENOMEM`; those of the C function.
pub(super) fn add_range(device: &pci::Device<Bound>, range: BarRange) -> Result<Arc<Pool>> {
    initialised();
    let function = Function::of(device);
    within(function.bar(range.bar), range.offset, range.size)?;
    let (bar, size) = (i32::try_from(range.bar)?, usize::try_from(range.size)?);
    // The list gets the pool first: afterwards there may be no memory for an entry, and pages cannot be taken back.
    let pool = {
        let mut pools = POOLS.lock();
        let pools = pools.as_mut().ok_or(ENODEV)?;
        match added_in(pools, &function) {
            Some(known) if known.range == Some(range) => return Ok(known.clone()),
            Some(_) => return Err(EBUSY),
            None => {
                let pool = Pool::new(&function, Some(range), false)?;
                pools.push(pool.clone(), GFP_KERNEL)?;
                pool
            }
        }
    };
    // `POOLS` is not locked: every change of a driver on the bus waits for it, and making pages takes long.
    // SAFETY: The device is bound, so the driver core releases the pages when the driver is unbound. `within()` has checked that
    // the BAR contains the range.
    let made = to_result(unsafe { bindings::pci_p2pdma_add_resource(function.as_raw(), bar, size, range.offset) });
    let mut pools = POOLS.lock();
    let pools = pools.as_mut().ok_or(ENODEV)?;
    match made {
        // INVARIANT: The function has a pool now, which is in the list. `close()` comes later: the caller holds the
        // bound device's lock, for which the notifier waits first, or is the device's driver.
        Ok(()) => *pool.open.lock() = true,
        Err(_) => pools.retain(|other| !Arc::ptr_eq(other, &pool)),
    }
    made.map(|()| pool)
}

/// Ends the publication of the device's pool to other drivers in the kernel. Does nothing for a device without a pool. Does not
/// sleep.
pub(crate) fn withdraw(dev: &pci::Device<Bound>) {
    // SAFETY: The device is bound. The call only clears a flag if the device has p2pdma data.
    unsafe { bindings::pci_p2pmem_publish(Function::of(dev).as_raw(), false) };
}

/// Returns the published provider that the kernel chooses for the clients, or `None` if there is none. C:
/// `pci_p2pmem_find_many()`.
///
/// The result belongs to any driver. May sleep. Errors: `ENOMEM`.
pub(crate) fn find_many(clients: &[Function]) -> Result<Option<Function>> {
    let mut devices = KVec::with_capacity(clients.len(), GFP_KERNEL)?;
    for client in clients {
        if !client.has_hierarchy() {
            return Ok(None);
        }
        devices.push(client.as_raw_device(), GFP_KERNEL)?;
    }
    if devices.is_empty() {
        return Ok(None);
    }
    // SAFETY: The references in `clients` keep the functions valid, and `has_hierarchy()` says that the bridges above them are
    // valid too. The array has as many elements as the call gets.
    let found = unsafe { bindings::pci_p2pmem_find_many(devices.as_mut_ptr(), i32::try_from(devices.len())?) };
    let Some(found) = NonNull::new(found.cast::<pci::Device>()) else {
        return Ok(None);
    };
    // SAFETY: The call returned a device with a reference for the caller. `pci::Device` is a transparent wrapper of `struct
    // pci_dev`.
    let found: ARef<pci::Device> = unsafe { ARef::from_raw(found) };
    Ok(Some(Function::of(&found)))
}

/// Returns whether memory of this function is published: only the function itself is at distance 0. Errors: `ENOMEM`.
fn has_published(function: &Function) -> Result<bool> {
    let ask = || -> Result<bool> {
        let found = find_many(core::slice::from_ref(function))?;
        Ok(found.is_some_and(|f| f.same(function)))
    };
    // The kernel also finds nothing if it cannot allocate a page for its list of candidates. Ask twice, as two failures in
    // a row are unlikely.
    Ok(ask()? || ask()?)
}

/// The kernel's pool of a function's memory.
///
/// # Invariants
///
/// While `open` is true, the function has a pool, or no p2pdma data at all, which the C functions check for, and this object is in
/// `POOLS`. `open` becomes false when the driver that made the pool is unbound, and, for a pool
/// that was found during the unbinding, before the next driver is bound: that driver may create p2pdma data without a pool, which
/// the kernel does not check for.
#[pin_data]
pub(crate) struct Pool {
    function: Function,
    /// What p2pmem added to the pool. `None` if the pool is another driver's.
    range: Option<BarRange>,
    #[pin]
    open: Mutex<bool>,
}

impl Pool {
    /// Makes the object of a pool, which the caller puts into `POOLS`. With `open`, the pool exists.
    fn new(function: &Function, range: Option<BarRange>, open: bool) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                function: function.clone(),
                range,
                open <- new_mutex!(open),
            }),
            GFP_KERNEL,
        )
    }

    /// Publishes the pool to other drivers in the kernel, until [`withdraw`]. Does nothing if the pool is closed. Takes `open`.
    pub(crate) fn offer(&self) {
        let open = self.open.lock();
        if *open {
            // SAFETY: By the type invariant, and as `open` is locked and true, the function has a pool, without which it must not
            // be published, or no p2pdma data. The call only sets a flag in p2pdma data.
            unsafe { bindings::pci_p2pmem_publish(self.function.as_raw(), true) };
        }
    }

    /// Returns whether `client` can reach the pool's memory, or `None` if the pool is closed. May sleep; takes `open`.
    pub(crate) fn is_reached_by(&self, client: &Function) -> Option<bool> {
        let open = self.open.lock();
        // SAFETY: While `open` is locked and true, the driver that made the pool is bound, and p2pdma data lives until the driver
        // is unbound.
        open.then(|| unsafe { is_reached_by(&self.function, client) })
    }

    /// Allocates `size` bytes, a multiple of the page size, in one piece. May sleep; takes `open`.
    ///
    /// Returns `None` if the pool is closed or gone, has no such piece free or one that is in no BAR, or `size` is invalid.
    pub(crate) fn take(&self, size: u64) -> Option<Backing> {
        let bytes = usize::try_from(size).ok().filter(|&n| n > 0 && n % PAGE_SIZE == 0)?;
        let open = self.open.lock();
        if !*open {
            return None;
        }
        // SAFETY: By the type invariant, and as `open` is locked and true, the function has a pool or no p2pdma data.
        let kaddr = NonNull::new(unsafe { bindings::pci_alloc_p2pmem(self.function.as_raw(), bytes) })?;
        // SAFETY: The pool allocated the pages to this caller, and took one reference to their page map.
        unsafe { Backing::of_pages(&self.function, kaddr, size) }
    }
}
