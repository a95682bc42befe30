// SPDX-License-Identifier: GPL-2.0

//! An importer that attaches to a dma-buf: its device, and what it can do.
//!
//! Context: the callback [`Exporter::attach`](super::Exporter::attach), without the reservation lock; may sleep.
//!
//! C header: [`include/linux/dma-buf.h`](srctree/include/linux/dma-buf.h)

use crate::ext::dma_device::DmaDevice;
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

impl<'a> Importer<'a> {
    /// Returns the importer's device.
    pub(crate) fn device(&self) -> DmaDevice<'a> {
        // SAFETY: By the type invariant the attachment is valid, and its `dev` is set and does not change.
        let device = unsafe { NonNull::new_unchecked((*self.0.as_ptr()).dev) };
        // SAFETY: By the type invariant the device lives as long as the attachment, which is valid for `'a`.
        unsafe { DmaDevice::from_raw(device) }
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
}
