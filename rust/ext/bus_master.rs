// SPDX-License-Identifier: GPL-2.0

//! DMA of a device that is bound to the p2pmem driver: its bus mastering, and the uses for which the device stays bound.
//!
//! Context: process context, may sleep. The one lock is the mutex `BusMaster::inner`, a leaf. It may be taken with a
//! dma-buf's reservation locked, and is held while bus mastering changes: up to 0.7 s.
//!
//! C header: [`include/linux/pci.h`](srctree/include/linux/pci.h)

use crate::{
    ext::{
        dma_device::DmaDevice,
        pci::Function,
        uses::{
            Use,
            Uses, //
        }, //
    },
    policy::bus_master::{
        BusMastering,
        Stale, //
    },
    sys, //
};
use core::ptr::NonNull;
use kernel::{
    bindings, new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    },
};

/// Bus mastering of one device, from its first binding until it is unbound with no mapping left that it may still use.
#[pin_data]
pub(super) struct BusMaster {
    function: Function,
    #[pin]
    inner: Mutex<Inner>,
}

struct Inner {
    mastering: BusMastering,
    /// Whether the device is bound to the driver. Only then is its bus mastering changed.
    is_bound: bool,
}

impl BusMaster {
    /// Creates the state of a device that is being bound. Errors: `ENOMEM`.
    pub(super) fn new(function: Function) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                function,
                inner <- new_mutex!(Inner {
                    mastering: BusMastering::new(),
                    is_bound: false,
                }),
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the device's function.
    pub(super) fn function(&self) -> &Function {
        &self.function
    }

    /// The device was bound.
    pub(super) fn bound(&self) {
        self.inner.lock().is_bound = true;
    }

    /// The device is being unbound, and no use exists. Returns whether it may still use mappings.
    pub(super) fn unbound(&self) -> bool {
        let mut inner = self.inner.lock();
        inner.is_bound = false;
        inner.mastering.unbound()
    }

    /// Forgets stale mappings, because the device was reset.
    pub(super) fn was_reset(&self) {
        self.inner.lock().mastering.forget_stale();
    }

    /// Enables or disables bus mastering. Called with `inner` locked.
    ///
    /// When this has disabled bus mastering, the device's posted writes have left the device, and its reads have completed
    /// or 0.7 s have passed.
    fn set(&self, enable: bool) {
        let (pdev, device) = (self.function.as_raw(), self.function.as_raw_device());
        if enable {
            // SAFETY: `function` keeps the device valid, and with it the bus whose configuration space the call accesses. The
            // device is not a removed virtual function: it is present when it is bound, and `self` is used while it is bound.
            unsafe {
                // Endpoints of PCI Express have to generate addresses of 64 bits; other functions keep the kernel's default of 32
                // bits. Cannot fail: no device has a limit above 64 bits, and the DMA API of a PCI function accepts all masks.
                if self.function.pcie_type() == Some(bindings::PCI_EXP_TYPE_ENDPOINT as u8) {
                    bindings::dma_set_mask_and_coherent(device, u64::MAX);
                }
                // Addresses and sizes go to programs, so segments have no largest size.
                bindings::dma_set_max_seg_size(device, u32::MAX);
                bindings::pci_set_master(pdev);
            }
        } else if self.is_enabled() {
            // Not again if it is disabled: the wait for pending reads can take long, and callers hold others' locks.
            // SAFETY: As above.
            unsafe { bindings::pci_clear_master(pdev) };
            // The completion of a read does not pass the posted writes that the function sent before. A function that is gone reads
            // as all ones, and its pending transactions never end.
            if self.function.command().is_some() {
                // SAFETY: As above.
                unsafe { bindings::pci_wait_for_pending_transaction(pdev) };
            }
        }
    }

    /// Returns whether bus mastering is enabled. Reads configuration space, as programs may have changed it.
    fn is_enabled(&self) -> bool {
        self.function
            .command()
            .is_some_and(|command| command & bindings::PCI_COMMAND_MASTER != 0)
    }
}

/// A use of a bound device for DMA. The device stays bound to the p2pmem driver while the use exists.
///
/// # Invariants
///
/// The unbinding of the device waits for `_use`.
pub(crate) struct DmaUse {
    master: Arc<BusMaster>,
    _use: Use,
    /// Whether bus mastering counts this use as an attachment.
    started: bool,
}

impl DmaUse {
    /// Creates a use that does no DMA yet.
    ///
    /// # Safety
    ///
    /// The device of `master` must be bound during the call, and its unbinding must wait for `uses` afterwards.
    pub(super) unsafe fn new(master: &Arc<BusMaster>, uses: &Arc<Uses>) -> Self {
        // INVARIANT: The caller guarantees that unbinding waits for the use.
        Self {
            master: master.clone(),
            _use: Use::new(uses),
            started: false,
        }
    }

    /// Enables bus mastering until the use ends. Called once. `quiesced` says that the device uses no stale mapping any more.
    /// Returns false if stale mappings keep the device from DMA.
    #[must_use]
    pub(crate) fn start(&mut self, quiesced: bool) -> bool {
        let mut inner = self.master.inner.lock();
        if !inner.mastering.attach(self.master.is_enabled(), quiesced) {
            return false;
        }
        self.started = true;
        self.master.set(true);
        true
    }

    /// A mapping is about to end that the device may still use. Keeps the device from DMA, unless `translated` says that an
    /// IOMMU ends the access. Returns the mapping for its confirmation, and whether this stopped the device.
    pub(crate) fn end_unconfirmed(&self, translated: bool) -> (Unconfirmed, bool) {
        let mut inner = self.master.inner.lock();
        let first = !translated && !inner.mastering.is_stopped();
        let stale = inner.mastering.add_stale(translated);
        if !translated {
            self.master.set(false);
        }
        let master = self.master.clone();
        (Unconfirmed { master, stale }, first)
    }

    /// Returns whether the end of a DMA mapping at `address` also ends the device's access.
    pub(crate) fn translates(&self, address: u64) -> bool {
        // SAFETY: The device is bound while `self` exists.
        unsafe { sys::p2pmem_dma_is_translated(self.device().as_raw(), address) }
    }

    /// Returns whether stale mappings keep the device from DMA.
    pub(crate) fn is_stopped(&self) -> bool {
        self.master.inner.lock().mastering.is_stopped()
    }

    /// Returns the device, which is bound to the p2pmem driver while `self` exists.
    pub(super) fn device(&self) -> DmaDevice<'_> {
        // SAFETY: `function` keeps the device valid as long as `self`. The device of a function is not null.
        unsafe { DmaDevice::from_raw(NonNull::new_unchecked(self.master.function.as_raw_device())) }
    }
}

impl Drop for DmaUse {
    fn drop(&mut self) {
        let mut inner = self.master.inner.lock();
        if self.started {
            if let Some(enable) = inner.mastering.detach() {
                self.master.set(enable);
            }
        }
    }
}

/// A mapping that has ended although nobody has said that the device stopped using it.
pub(crate) struct Unconfirmed {
    master: Arc<BusMaster>,
    stale: Stale,
}

impl Unconfirmed {
    /// The device does not use the mapping any more. The device can do DMA again if this was the last one.
    pub(crate) fn confirm(self) {
        let mut inner = self.master.inner.lock();
        let setting = inner.mastering.confirm(self.stale);
        if let Some(enable) = setting.filter(|_| inner.is_bound) {
            self.master.set(enable);
        }
    }
}
