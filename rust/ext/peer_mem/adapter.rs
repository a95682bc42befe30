// SPDX-License-Identifier: GPL-2.0

//! The device that does an adapter's DMA, as the core passes it to a client.
//!
//! Context: process context; no locks.
//!
//! C headers: `rust/sys/peer_mem.h`, [`include/linux/device.h`](srctree/include/linux/device.h)

use crate::{
    ext::{
        device_name::DeviceName,
        p2pdma,
        pci::Function, //
    },
    sys, //
};
use core::{
    marker::PhantomData,
    ptr::{self, NonNull},
};
use kernel::bindings;

/// The device that does an adapter's DMA.
///
/// # Invariants
///
/// The pointer, if there is one, is a device that the core keeps valid for `'a`.
pub(crate) struct Adapter<'a>(Option<NonNull<bindings::device>>, PhantomData<&'a ()>);

impl<'a> Adapter<'a> {
    /// Wraps the core's pointer, which is null for a virtual adapter.
    ///
    /// # Safety
    ///
    /// `device` must be null, or valid as long as `'a`.
    pub(super) const unsafe fn from_raw(device: *mut bindings::device) -> Self {
        // INVARIANT: The caller guarantees that the device, if there is one, stays valid for `'a`.
        Self(NonNull::new(device), PhantomData)
    }

    /// Returns whether the adapter accesses memory with the CPU, at kernel addresses. Such an adapter has no DMA device.
    pub(crate) fn is_virtual(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the device, or null for a virtual adapter.
    pub(super) fn device(&self) -> *mut bindings::device {
        self.0.map_or(ptr::null_mut(), NonNull::as_ptr)
    }

    /// Returns the names of the device, or `None` for a virtual adapter.
    pub(crate) fn name(&self) -> Option<DeviceName> {
        self.0?;
        // SAFETY: By the type invariant the device is valid during the call.
        Some(unsafe { DeviceName::of(self.device()) })
    }

    /// Returns the device as a PCI function, or `None` if it is none.
    pub(crate) fn function(&self) -> Option<Function> {
        self.0?;
        // SAFETY: By the type invariant the device is valid, and a device holds references to the devices above it.
        let pdev = NonNull::new(unsafe { sys::p2pmem_dev_pci(self.device()) })?;
        // SAFETY: The device keeps `pdev` valid at least until `of_raw()` has taken its own reference.
        Some(unsafe { Function::of_raw(pdev) })
    }

    /// Returns whether the adapter can reach the provider. May sleep. C: `pci_p2pdma_distance_many()`.
    pub(crate) fn reaches(&self, provider: &Function) -> bool {
        self.function()
            .is_some_and(|client| p2pdma::distance(provider, &client).is_some())
    }
}
