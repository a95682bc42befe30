// SPDX-License-Identifier: GPL-2.0

//! Adopted providers: memory that a device's own driver has published in the kernel's pool.

use crate::{
    alloc::orchestrator::{
        Orchestrator,
        PAGE, //
    },
    ext::{
        bus,
        driver,
        pci::Function, //
    },
    mem::{
        buffer::Provider,
        provider::ProviderConfig, //
    }, //
};
use kernel::prelude::*;

impl Orchestrator {
    /// Makes a provider of a device whose own driver has published memory, if there is one that is not known yet.
    pub(crate) fn adopt(&self, function: &Function) -> Result {
        if self.find(function).is_some() || driver::with_bound(function.address(), |_| ()).is_some() {
            return Ok(());
        }
        let Some(pool) = bus::pool(function)? else {
            return Ok(());
        };
        // One page tells what was published. How much of that its driver uses itself shows when an allocation fails: to try it
        // out would take from the driver, for a moment, what it may want just then.
        let Some(probe) = pool.take(PAGE) else {
            pr_notice!("{}: its driver uses all memory that it published\n", function.address());
            return Ok(());
        };
        let (phys, len) = probe.published_range();
        drop(probe);
        let bar = (0..6).find_map(|bar| {
            let (start, size) = function.bar(bar)?;
            let offset = phys.checked_sub(start)?;
            (offset < size).then_some((bar, offset))
        });
        // An eighth stays for the driver, whose memory it is.
        let reserve = (len / 8).next_multiple_of(PAGE);
        let size = len.saturating_sub(reserve);
        if size == 0 {
            return Ok(());
        }
        let parts = ProviderConfig {
            id: self.new_id(),
            function: function.clone(),
            bar: bar.map(|(bar, _)| bar),
            start: bar.map_or(0, |(_, offset)| offset),
            kernel_reserve: reserve,
            combine: bar.is_some_and(|(bar, _)| function.prefetchable(bar)),
            pinned_exports: false,
            publisher: None,
        };
        let provider = Provider::adopted(parts, pool, size)?;
        self.add(&provider).map_err(|refusal| refusal.error)?;
        pr_info!(
            "{}: adopted {} of the {} bytes that its driver published\n",
            provider.addr,
            size,
            len
        );
        Ok(())
    }

    /// Looks for devices whose drivers have published memory. One that cannot be adopted is named in the log.
    pub(crate) fn scan(&self) {
        let mut at = Function::next(None);
        while let Some(function) = at {
            if !function.is_bridge() {
                self.try_adopt(&function);
            }
            at = Function::next(Some(function));
        }
    }

    /// As [`Self::adopt`]; what goes wrong is said in the log.
    pub(crate) fn try_adopt(&self, function: &Function) {
        if let Err(e) = self.adopt(function) {
            pr_warn!("{}: cannot be adopted (errno {})\n", function.address(), -e.to_errno());
        }
    }
}
