// SPDX-License-Identifier: GPL-2.0

//! An importer that attaches to a dma-buf: its device, and what it can do.
//!
//! Context: the callback [`Exporter::attach`](super::Exporter::attach), without the reservation lock; may sleep.
//!
//! C header: [`include/linux/dma-buf.h`](srctree/include/linux/dma-buf.h)

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
    ptr::NonNull, //
};
use kernel::bindings;

/// An importer that attaches.
///
/// # Invariants
///
/// The pointer is a valid attachment for `'a`, with `dev` and the flags set, whose device lives as long as the attachment.
pub(crate) struct Importer<'a>(
    pub(super) NonNull<bindings::dma_buf_attachment>,
    pub(super) PhantomData<&'a ()>,
);

impl Importer<'_> {
    /// Returns the importer's device, which is valid as long as `self`.
    fn device(&self) -> *mut bindings::device {
        // SAFETY: By the type invariant the attachment is valid; `dev` does not change.
        unsafe { (*self.0.as_ptr()).dev }
    }

    /// Returns the names of the importer's device and driver.
    pub(crate) fn name(&self) -> DeviceName {
        // SAFETY: By the type invariant the device is valid.
        unsafe { DeviceName::of(self.device()) }
    }

    /// Returns whether the importer can do DMA to memory of other devices without `struct page`.
    pub(crate) fn peer_to_peer(&self) -> bool {
        // SAFETY: By the type invariant the attachment is valid, and the core sets the field before it calls the exporter.
        unsafe { (*self.0.as_ptr()).peer2peer }
    }

    /// Returns whether the importer ends its mappings when they are invalidated. C: `dma_buf_attach_revocable()`.
    pub(crate) fn revocable(&self) -> bool {
        // SAFETY: By the type invariant the attachment is valid. The call only reads it.
        unsafe { bindings::dma_buf_attach_revocable(self.0.as_ptr()) }
    }

    /// Returns the PCI function that does the importer's DMA, or `None` if the device is not below a PCI function.
    pub(crate) fn function(&self) -> Option<Function> {
        // SAFETY: By the type invariant the device is valid, and a device keeps its ancestors.
        let pdev = NonNull::new(unsafe { sys::p2pmem_dev_pci(self.device()) })?;
        // SAFETY: The function is the importer's device or one of its ancestors, which that device keeps during the call.
        Some(unsafe { Function::of_raw(pdev) })
    }

    /// Returns whether the importer can reach the provider. C: `pci_p2pdma_distance_many()`. False if the importer is no
    /// PCI device.
    pub(crate) fn reaches(&self, provider: &Function) -> bool {
        self.function()
            .is_some_and(|client| p2pdma::distance(provider, &client).is_some())
    }
}
