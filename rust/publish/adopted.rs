// SPDX-License-Identifier: GPL-2.0

//! Adopted providers: memory that a device's own driver published in the kernel's pool, such as the CMB of an NVMe drive.
//!
//! C header: [`include/linux/pci-p2pdma.h`](srctree/include/linux/pci-p2pdma.h)
//!
//! Context: process context, may sleep, with the device locked.

use crate::{
    alloc::orchestrator::{
        Orchestrator,
        PAGE, //
    },
    ext::{
        pci::{
            driver_name,
            Function, //
        },
        pool, //
    },
    mem::{
        buffer::Provider,
        provider::ProviderConfig, //
    }, //
};
use kernel::{device::Bound, pci, prelude::*};

impl Orchestrator {
    /// Makes a provider of `device` if its driver published memory. Does nothing if the function is a provider already, or has no
    /// published memory but what p2pmem added. The device is locked, so its driver is not unbound meanwhile.
    ///
    /// Errors: `EBUSY` if the system is about to sleep, `ENOMEM`.
    pub(crate) fn adopt(&self, device: &pci::Device<Bound>) -> Result {
        let function = &Function::of(device);
        if self.find(function).is_some() {
            return Ok(());
        }
        let Some(pool) = pool::find(function)? else {
            return Ok(());
        };
        // One page suffices to look up the published range. How much of the range the driver uses itself shows when an
        // allocation fails: to probe for it would take memory from the driver.
        let Some(probe) = pool.take(PAGE) else {
            dev_notice!(
                function.device(),
                "p2pmem: its driver uses all memory that it published\n"
            );
            return Ok(());
        };
        let (phys, len) = probe.published_range();
        let (bar, offset) = probe.place();
        // The page may be anywhere in the range.
        let start = offset - (probe.phys() - phys);
        drop(probe);
        // An eighth of the memory stays for the driver.
        let reserve = (len / 8).next_multiple_of(PAGE);
        let size = len.saturating_sub(reserve);
        if size == 0 {
            return Ok(());
        }
        let (id, pages) = self.identity(function)?;
        let parts = ProviderConfig {
            id,
            pages,
            function: function.clone(),
            driver: driver_name(device),
            region: self.region(function, size)?,
            ledger: self.rules().clone(),
            place: (bar, start),
            kernel_reserve: reserve,
            pinned_exports: false,
            attach_gid: None,
            publisher: None,
        };
        let provider = Provider::adopted(parts, pool, size)?;
        self.add(&provider).map_err(|refusal| refusal.error)?;
        dev_info!(
            provider.function().device(),
            "p2pmem: adopted {} of the {} bytes that its driver published\n",
            size,
            len
        );
        Ok(())
    }

    /// Adopts the memory of all devices whose drivers published some. Logs devices that cannot be adopted.
    pub(crate) fn scan(&self) {
        let mut at = Function::next(None);
        while let Some(function) = at {
            if !function.is_bridge() {
                function.while_bound(|device| self.try_adopt(device));
            }
            at = Function::next(Some(function));
        }
    }

    /// Adopts as [`Self::adopt`] does, and logs an error.
    pub(crate) fn try_adopt(&self, device: &pci::Device<Bound>) {
        if let Err(e) = self.adopt(device) {
            dev_warn!(device, "p2pmem: cannot be adopted (errno {})\n", -e.to_errno());
        }
    }
}
