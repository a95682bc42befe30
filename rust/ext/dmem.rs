// SPDX-License-Identifier: GPL-2.0

//! The dmem cgroup controller: a region for the memory of each function, and charges to the current task's cgroup.
//!
//! Without the controller in the kernel, regions exist but charges do nothing ([`Region::COUNTS`]). All functions may
//! sleep, in process context. `Region::trial` is a mutex with nothing taken inside.
//!
//! C header: [`include/linux/cgroup_dmem.h`](srctree/include/linux/cgroup_dmem.h)

use crate::{
    ext::pci::Function,
    policy::path::PciAddr,
    sys, //
};
use core::ptr;
use kernel::{
    error::{from_err_ptr, to_result},
    ffi, new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};

/// The regions of functions. A region stays when its provider is removed, because administrators set limits on the region.
pub(crate) struct Regions(KVec<(Function, u64, Arc<Region>)>);

impl Regions {
    pub(crate) const NONE: Self = Self(KVec::new());

    /// Returns the region of a function of whose memory `size` bytes are published. Forgets the regions of functions that were removed
    /// from the machine. Errors: `ENOMEM`.
    pub(crate) fn of(&mut self, function: &Function, size: u64) -> Result<Arc<Region>> {
        let stays = |(of, bytes, _): &(Function, u64, Arc<Region>)| match of.same(function) {
            true => *bytes == size,
            false => Function::find(of.address()).is_some_and(|found| found.same(of)),
        };
        self.0.retain(|known| stays(known));
        if let Some((.., region)) = self.0.iter().find(|(of, ..)| of.same(function)) {
            return Ok(region.clone());
        }
        let region = Arc::pin_init(Region::new(size, function.address()), GFP_KERNEL)?;
        self.0.push((function.clone(), size, region.clone()), GFP_KERNEL)?;
        Ok(region)
    }
}

/// A region of device memory, named `p2pmem/` and the PCI address of the function.
///
/// # Invariants
///
/// `region` is registered, or null if the kernel has no controller.
#[pin_data(PinnedDrop)]
pub(crate) struct Region {
    region: *mut ffi::c_void,
    /// Locked while the region has a charge that only tries whether it fits.
    #[pin]
    trial: Mutex<()>,
}

// SAFETY: A region is not bound to a thread.
unsafe impl Send for Region {}
// SAFETY: A shared reference gives access to charging alone, which the controller synchronises.
unsafe impl Sync for Region {}

impl Region {
    /// True if the kernel has the controller.
    pub(crate) const COUNTS: bool = cfg!(CONFIG_CGROUP_DMEM);

    /// Registers a region of `size` bytes for the function at `addr`. Errors: `ENOMEM`.
    fn new(size: u64, addr: PciAddr) -> impl PinInit<Self, Error> {
        let PciAddr { domain, bus, devfn } = addr;
        try_pin_init!(Self {
            // SAFETY: The function takes no pointers.
            // INVARIANT: The region is registered, or null without the controller.
            region: from_err_ptr(unsafe { sys::p2pmem_dmem_region(size, domain, bus, devfn) })?,
            trial <- new_mutex!(()),
        }? Error)
    }

    /// Charges `bytes` to the cgroup of the current task. Process context; may sleep.
    ///
    /// Errors: `EAGAIN` if the charge exceeds a limit (`dmem.max`) of the cgroup or of an ancestor; `ENOMEM`.
    pub(crate) fn charge(&self, bytes: u64) -> Result<CgroupCharge> {
        self.charge_once(bytes).or_else(|e| {
            if e != EAGAIN {
                return Err(e);
            }
            // A trial may have had the bytes for a moment.
            let _no_trial = self.trial.lock();
            self.charge_once(bytes)
        })
    }

    /// Tries whether [`Self::charge`] would succeed. The controller has no call that only checks: the charge is made and dropped.
    /// Errors: as for `charge`.
    pub(crate) fn try_charge(&self, bytes: u64) -> Result {
        let _trial = self.trial.lock();
        self.charge_once(bytes).map(drop)
    }

    fn charge_once(&self, bytes: u64) -> Result<CgroupCharge> {
        let mut pool = ptr::null_mut();
        // SAFETY: By the type invariant the region is registered or null. `pool` is valid for the write.
        to_result(unsafe { sys::p2pmem_dmem_charge(self.region, bytes, &mut pool) })?;
        // INVARIANT: The pool was charged `bytes`, or is null without the controller.
        Ok(CgroupCharge { pool, bytes })
    }
}

#[pinned_drop]
impl PinnedDrop for Region {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant the region is null or registered, and it is unregistered once. A charge holds a
        // reference to its pool, and the pool one to the region.
        unsafe { sys::p2pmem_dmem_region_end(self.region) };
    }
}

/// A charge to a cgroup. Dropping it ends the charge.
///
/// # Invariants
///
/// `pool` is null, or was charged `bytes` bytes that were not uncharged.
pub(crate) struct CgroupCharge {
    pool: *mut ffi::c_void,
    bytes: u64,
}

impl CgroupCharge {
    /// No charge, as in a kernel without the controller.
    // INVARIANT: `pool` is null.
    pub(crate) const NOTHING: Self = Self {
        pool: ptr::null_mut(),
        bytes: 0,
    };
}

// SAFETY: A charge can be ended on any thread: the pool refers to the cgroup, not to the task.
unsafe impl Send for CgroupCharge {}
// SAFETY: A shared reference has no methods.
unsafe impl Sync for CgroupCharge {}

impl Drop for CgroupCharge {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the pool is null or was charged `bytes`, which are uncharged once, here.
        unsafe { sys::p2pmem_dmem_uncharge(self.pool, self.bytes) };
    }
}
