// SPDX-License-Identifier: GPL-2.0

//! A device that does DMA for another subsystem: the importer of a dma-buf, or the NIC that a peer-memory client serves.
//!
//! Context: process context, may sleep; no locks.
//!
//! C header: [`include/linux/device.h`](srctree/include/linux/device.h)

use crate::{
    ext::{
        device_name::DeviceName,
        pci::Function, //
    },
    sys, //
};
use core::{
    marker::PhantomData,
    ptr::NonNull, //
};
use kernel::bindings;

/// A device that does DMA, borrowed for `'a`.
///
/// # Invariants
///
/// The pointer is a valid device for `'a`.
#[derive(Clone, Copy)]
pub(crate) struct DmaDevice<'a>(NonNull<bindings::device>, PhantomData<&'a ()>);

impl DmaDevice<'_> {
    /// Wraps a device.
    ///
    /// # Safety
    ///
    /// `device` must be valid as long as `'a`.
    pub(super) const unsafe fn from_raw(device: NonNull<bindings::device>) -> Self {
        // INVARIANT: The caller guarantees that the device stays valid for `'a`.
        Self(device, PhantomData)
    }

    /// Returns the raw pointer, which is valid for `'a`.
    pub(super) const fn as_raw(&self) -> *mut bindings::device {
        self.0.as_ptr()
    }

    /// Returns the names of the device and its driver.
    pub(crate) fn name(&self) -> DeviceName {
        // SAFETY: By the type invariant the device is valid during the call.
        unsafe { DeviceName::of(self.as_raw()) }
    }

    /// Returns the PCI function that does the device's DMA, or `None` if the device is neither a PCI function nor below
    /// one.
    pub(crate) fn function(&self) -> Option<Function> {
        // SAFETY: By the type invariant the device is valid, and a device holds references to the devices above it.
        let pdev = NonNull::new(unsafe { sys::p2pmem_dev_pci(self.as_raw()) })?;
        // SAFETY: The device keeps `pdev` valid at least until `of_raw()` has taken its own reference.
        Some(unsafe { Function::of_raw(pdev) })
    }
}
