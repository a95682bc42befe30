// SPDX-License-Identifier: GPL-2.0

//! The device that does an adapter's DMA, as the core passes it to a client.
//!
//! Context: process context; no locks.
//!
//! C headers: `rust/sys/peer_mem.h`, [`include/linux/device.h`](srctree/include/linux/device.h)

use crate::ext::dma_device::DmaDevice;
use core::ptr::{
    self,
    NonNull, //
};
use kernel::bindings;

/// The device that does an adapter's DMA, or none for a virtual adapter.
pub(crate) struct Adapter<'a>(Option<DmaDevice<'a>>);

impl<'a> Adapter<'a> {
    /// Wraps the core's pointer, which is null for a virtual adapter.
    ///
    /// # Safety
    ///
    /// `device` must be null, or valid as long as `'a`.
    pub(super) const unsafe fn from_raw(device: *mut bindings::device) -> Self {
        match NonNull::new(device) {
            // SAFETY: The caller guarantees that the device stays valid for `'a`.
            Some(device) => Self(Some(unsafe { DmaDevice::from_raw(device) })),
            None => Self(None),
        }
    }

    /// Returns the device, or `None` for a virtual adapter: one that accesses memory with the CPU, at kernel addresses.
    pub(crate) fn device(&self) -> Option<DmaDevice<'a>> {
        self.0
    }

    /// Returns the device's pointer, or null for a virtual adapter.
    pub(super) fn as_raw(&self) -> *mut bindings::device {
        self.0.map_or(ptr::null_mut(), |device| device.as_raw())
    }
}
