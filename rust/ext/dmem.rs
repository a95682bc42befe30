// SPDX-License-Identifier: GPL-2.0

//! The dmem controller of cgroups: a region for each provider's memory, and what is charged to the caller's cgroup.
//!
//! A kernel without the controller has regions that nothing is charged to.
//!
//! C header: [`include/linux/cgroup_dmem.h`](srctree/include/linux/cgroup_dmem.h)

use crate::{
    policy::path::PciAddr,
    sys, //
};
use core::ptr;
use kernel::{
    error::{from_err_ptr, to_result},
    ffi,
    prelude::*, //
};

/// A region, named `p2pmem/` and the function's address.
///
/// # Invariants
///
/// `region` is null or registered.
pub(crate) struct Region {
    region: *mut ffi::c_void,
}

// SAFETY: A region is not bound to a thread.
unsafe impl Send for Region {}
// SAFETY: The controller synchronises charges itself.
unsafe impl Sync for Region {}

impl Region {
    /// Whether the kernel has the controller.
    pub(crate) const COUNTS: bool = cfg!(CONFIG_CGROUP_DMEM);

    /// Registers `size` bytes of a function's memory.
    pub(crate) fn new(size: u64, addr: PciAddr) -> Result<Self> {
        let PciAddr { domain, bus, devfn } = addr;
        // SAFETY: The function takes numbers.
        let region = from_err_ptr(unsafe { sys::p2pmem_dmem_region(size, domain, bus, devfn) })?;
        // INVARIANT: Registered just now, or null.
        Ok(Self { region })
    }

    /// Charges the calling task's cgroup. Errors: `EAGAIN` where a limit would be broken.
    pub(crate) fn charge(&self, bytes: u64) -> Result<Held> {
        let mut pool = ptr::null_mut();
        // SAFETY: By the type invariant the region is null or registered.
        to_result(unsafe { sys::p2pmem_dmem_charge(self.region, bytes, &mut pool) })?;
        // INVARIANT: Charged just now.
        Ok(Held { pool, bytes })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: By the type invariant it is null or registered. Pools that are charged keep what they need of it.
        unsafe { sys::p2pmem_dmem_region_end(self.region) };
    }
}

/// What a cgroup was charged; dropping it gives that back.
///
/// # Invariants
///
/// `pool` is null or was charged `bytes` bytes.
pub(crate) struct Held {
    pool: *mut ffi::c_void,
    bytes: u64,
}

impl Held {
    /// What is charged where there is no controller.
    // INVARIANT: Null.
    pub(crate) const NOTHING: Self = Self {
        pool: ptr::null_mut(),
        bytes: 0,
    };
}

// SAFETY: A charge is not bound to a thread.
unsafe impl Send for Held {}
// SAFETY: There are no methods on a shared reference.
unsafe impl Sync for Held {}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: By the type invariant this is what was charged, and as it is given back here only, once.
        unsafe { sys::p2pmem_dmem_uncharge(self.pool, self.bytes) };
    }
}
