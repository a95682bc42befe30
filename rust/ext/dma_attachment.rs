// SPDX-License-Identifier: GPL-2.0

//! An importer of dma-bufs of any exporter: a device of the p2pmem driver is attached to a dma-buf and does DMA to it.
//!
//! The attachment is dynamic: the exporter can take its memory back at any time, and then calls back. The mapping ends in
//! this callback, because exporters wait for its end without a limit.
//!
//! All functions are for process context and may sleep. Lock order: the dma-buf's reservation lock, which [`DmaAttachment`]
//! takes itself, then `Inner::table`, a leaf. [`AttachmentOwner::revoked`] is called with the reservation locked, so its
//! implementation must not end the attachment.
//!
//! C header: [`include/linux/dma-buf.h`](srctree/include/linux/dma-buf.h)

use crate::{
    ext::{
        bus_master::DmaUse,
        compat::DMA_BIDIRECTIONAL,
        dma_buf::AnyDmaBuf, //
    },
    policy::ranges::Range,
    sys, //
};
use core::ptr::{self, NonNull};
use kernel::{
    bindings,
    error::{from_err_ptr, to_result},
    ffi, new_mutex,
    prelude::*,
    scatterlist::SGTable,
    sync::{
        Arc,
        Mutex, //
    },
};

/// The owner of an attachment.
pub(crate) trait AttachmentOwner: Send + Sync {
    /// The exporter takes its memory back, and the mapping is about to end. Called at most once for each mapping, with the
    /// dma-buf's reservation locked. If no IOMMU ends the device's access, the device must not access the memory any more
    /// when this returns. The attachment keeps another reference to the owner.
    fn revoked(self: Arc<Self>, device: &DmaUse);
}

/// A mapping of a dma-buf for DMA, and its properties.
pub(crate) struct DmaMapping {
    /// The addresses for the device, in the order of the dma-buf's offsets. Adjacent ranges are one.
    pub(crate) ranges: KVVec<Range>,
    /// Whether the end of the mapping also ends the device's access, at all addresses.
    pub(crate) translated: bool,
    /// Whether others see the device's DMA only after a `dma_sync_*()` call.
    pub(crate) bounced: bool,
}

/// A DMA mapping.
///
/// # Invariants
///
/// The pointer is a table that `dma_buf_map_attachment()` returned for the attachment of the [`Inner`] that has this
/// object, and that was not unmapped.
struct Table(NonNull<bindings::sg_table>);

// SAFETY: A DMA mapping can be used and ended on any thread.
unsafe impl Send for Table {}

/// The data that `importer_priv` of the attachment points to.
#[pin_data]
struct Inner {
    /// The mapping, if there is one. Changed with the reservation locked.
    #[pin]
    table: Mutex<Option<Table>>,
    device: DmaUse,
    owner: Arc<dyn AttachmentOwner>,
}

impl Inner {
    /// Ends the mapping, if there is one. Calls `before` first.
    ///
    /// # Safety
    ///
    /// `raw` is the attachment of `self`, and not detached. Its reservation is locked.
    unsafe fn unmap(&self, raw: *mut bindings::dma_buf_attachment, before: impl FnOnce()) {
        let table = self.table.lock().take();
        if let Some(table) = table {
            before();
            // SAFETY: By the type invariant of `Table` the table is mapped for the attachment, which the caller guarantees to
            // be `raw`, with its reservation locked. The table is not used afterwards.
            unsafe { bindings::dma_buf_unmap_attachment(raw, table.0.as_ptr(), DMA_BIDIRECTIONAL) };
        }
    }
}

/// The attachment of a bound device to a dma-buf. Dropping it ends the mapping and detaches, which takes the reservation.
///
/// # Invariants
///
/// `raw` is attached to `dma_buf`, its device is that of `inner.device`, and its `importer_priv` points to `inner`.
pub(crate) struct DmaAttachment {
    raw: NonNull<bindings::dma_buf_attachment>,
    dma_buf: AnyDmaBuf,
    inner: Pin<KBox<Inner>>,
}

// SAFETY: An attachment can be used and detached on any thread, and the owner is `Send`.
unsafe impl Send for DmaAttachment {}
// SAFETY: All methods change the attachment with the reservation locked, and the owner is `Sync`.
unsafe impl Sync for DmaAttachment {}

impl DmaAttachment {
    /// The callbacks of the importer.
    const OPERATIONS: &'static bindings::dma_buf_attach_ops = &bindings::dma_buf_attach_ops {
        allow_peer2peer: true,
        invalidate_mappings: Some(Self::invalidate),
    };

    /// Attaches the device of `device` to a dma-buf, without a mapping. Takes the reservation.
    ///
    /// Errors: `ENOMEM`; those of the exporter, such as `EOPNOTSUPP`.
    pub(crate) fn new(dma_buf: AnyDmaBuf, device: DmaUse, owner: Arc<dyn AttachmentOwner>) -> Result<Self> {
        let inner = KBox::pin_init(
            pin_init!(Inner {
                table <- new_mutex!(None),
                device,
                owner,
            }),
            GFP_KERNEL_ACCOUNT,
        )?;
        let private = ptr::from_ref::<Inner>(&inner).cast_mut();
        // SAFETY: `dma_buf` is a valid dma-buf. The device is valid and stays bound as long as `inner`. The operations are
        // a static, and `inner` is pinned and lives until after `dma_buf_detach()`.
        let raw = from_err_ptr(unsafe {
            bindings::dma_buf_dynamic_attach(
                dma_buf.as_raw(),
                inner.device.device().as_raw(),
                Self::OPERATIONS,
                private.cast(),
            )
        })?;
        // INVARIANT: The attachment was made with these objects.
        Ok(Self {
            raw: NonNull::new(raw).ok_or(ENOMEM)?,
            dma_buf,
            inner,
        })
    }

    /// Returns the attached device's use for DMA.
    pub(crate) fn device(&self) -> &DmaUse {
        &self.inner.device
    }

    /// Returns the reservation of the dma-buf.
    fn reservation(&self) -> *mut bindings::dma_resv {
        // SAFETY: The dma-buf is valid as long as `dma_buf`. Its reservation does not change.
        unsafe { (*self.dma_buf.as_raw()).resv }
    }

    /// Maps the dma-buf, waits until the exporter has finished moving the memory, and calls `admit`. Takes the
    /// reservation, also for `admit`: the exporter cannot revoke the mapping meanwhile.
    ///
    /// Errors, after which there is no mapping: `EBUSY` if there was a mapping, `ERESTARTSYS` if a signal arrived, `E2BIG`
    /// if there are more than `most` ranges, `ENOMEM`; those of `admit`, of the exporter, and of the DMA API.
    pub(crate) fn map(&self, most: usize, admit: impl FnOnce(DmaMapping) -> Result) -> Result {
        // SAFETY: The reservation is valid as long as `self`. Without an acquire context, locking cannot fail.
        unsafe { bindings::dma_resv_lock(self.reservation(), ptr::null_mut()) };
        let mapped = self.map_locked(most, admit);
        // SAFETY: This thread locked the reservation above.
        unsafe { bindings::dma_resv_unlock(self.reservation()) };
        mapped
    }

    /// As [`Self::map`], with the reservation locked.
    fn map_locked(&self, most: usize, admit: impl FnOnce(DmaMapping) -> Result) -> Result {
        if self.inner.table.lock().is_some() {
            return Err(EBUSY);
        }
        // SAFETY: By the type invariant `raw` is attached. The reservation is locked.
        let table = from_err_ptr(unsafe { bindings::dma_buf_map_attachment(self.raw.as_ptr(), DMA_BIDIRECTIONAL) })?;
        // INVARIANT: The table was just mapped for the attachment of `inner`.
        let table = Table(NonNull::new(table).ok_or(ENOMEM)?);
        match self.settled(&table, most).and_then(admit) {
            Ok(()) => {
                *self.inner.table.lock() = Some(table);
                Ok(())
            }
            Err(e) => {
                // SAFETY: By the type invariant `raw` is attached, and by that of `Table` the table is mapped for it. The
                // reservation is locked, and the table is not used afterwards.
                unsafe { bindings::dma_buf_unmap_attachment(self.raw.as_ptr(), table.0.as_ptr(), DMA_BIDIRECTIONAL) };
                Err(e)
            }
        }
    }

    /// Waits until the exporter has finished moving the memory. Returns the properties of the mapping. Called with the
    /// reservation locked.
    fn settled(&self, table: &Table, most: usize) -> Result<DmaMapping> {
        // SAFETY: The reservation is valid as long as `self`, and locked, so no fence is added meanwhile.
        let waited = unsafe {
            bindings::dma_resv_wait_timeout(
                self.reservation(),
                bindings::dma_resv_usage_DMA_RESV_USAGE_KERNEL,
                true,
                ffi::c_long::MAX as ffi::c_ulong,
            )
        };
        if waited < 0 {
            to_result(waited as ffi::c_int)?;
        }
        // SAFETY: By the type invariant of `Table` the table is mapped. The reservation is locked, so it does not change.
        let table = unsafe { SGTable::from_raw(table.0.as_ptr()) };
        let mut mapping = DmaMapping {
            ranges: KVVec::new(),
            translated: true,
            bounced: false,
        };
        let device = self.inner.device.device().as_raw();
        for entry in table.iter() {
            let range = Range {
                offset: entry.dma_address(),
                size: entry.dma_len(),
            };
            mapping.translated &= self.inner.device.translates(range.offset);
            // SAFETY: The device is valid and has a DMA mask, as every PCI function.
            mapping.bounced |= unsafe { sys::p2pmem_dma_is_bounced(device, range.offset) };
            if let Some(last) = mapping.ranges.last_mut() {
                if let Some(both) = last.join(range) {
                    *last = both;
                    continue;
                }
            }
            if mapping.ranges.len() >= most {
                return Err(E2BIG);
            }
            mapping.ranges.push(range, GFP_KERNEL_ACCOUNT)?;
        }
        Ok(mapping)
    }

    /// Ends the mapping. Takes the reservation. Calls `before` first, with the reservation locked, if there is a mapping.
    pub(crate) fn unmap(&self, before: impl FnOnce()) {
        // SAFETY: As in `map`.
        unsafe { bindings::dma_resv_lock(self.reservation(), ptr::null_mut()) };
        // SAFETY: By the type invariant `raw` is the attachment of `inner`. The reservation is locked.
        unsafe { self.inner.unmap(self.raw.as_ptr(), before) };
        // SAFETY: This thread locked the reservation above.
        unsafe { bindings::dma_resv_unlock(self.reservation()) };
    }

    /// `invalidate_mappings` of `struct dma_buf_attach_ops`. The reservation is locked.
    ///
    /// # Safety
    ///
    /// Only for exporters, which call with an attachment that [`Self::new`] made and that is not detached.
    unsafe extern "C" fn invalidate(attachment: *mut bindings::dma_buf_attachment) {
        // SAFETY: `new()` set `importer_priv` to an `Inner`, which lives until `dma_buf_detach()` has returned. That
        // function takes the reservation, which the caller holds.
        let inner = unsafe { &*(*attachment).importer_priv.cast::<Inner>() };
        // SAFETY: `inner` is that of the attachment, which is not detached. The caller has the reservation locked.
        unsafe { inner.unmap(attachment, || inner.owner.clone().revoked(&inner.device)) };
    }
}

impl Drop for DmaAttachment {
    fn drop(&mut self) {
        self.unmap(|| {});
        // SAFETY: By the type invariant `raw` is attached to `dma_buf`. It has no mapping, and is not used afterwards.
        unsafe { bindings::dma_buf_detach(self.dma_buf.as_raw(), self.raw.as_ptr()) };
    }
}
