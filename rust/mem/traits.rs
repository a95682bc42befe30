// SPDX-License-Identifier: GPL-2.0

//! The traits through which buffers and memory call into later layers.
//!
//! [`Revocable`]: a dma-buf or registration that a removal takes away (`rust/share`). [`DeviceAttachment`]: an attachment
//! of a provider's function to a dma-buf (`rust/share`).

use kernel::{fmt, sync::Arc};

/// The time, in ms, that a removal may still spend on waiting for fences of dma-bufs. All dma-bufs of a provider share it.
/// Mappings have no limit.
pub(crate) struct RevokeDeadline(u32);

impl RevokeDeadline {
    /// Starts with 2 s.
    pub(crate) const fn new() -> Self {
        Self(2_000)
    }

    /// Returns the length of the next wait in ms: `ms`, or less if less is left.
    pub(crate) fn next(&self, ms: u32) -> u32 {
        self.0.min(ms)
    }

    /// Subtracts a wait of `ms` milliseconds that ended without success.
    pub(crate) fn spend(&mut self, ms: u32) {
        self.0 = self.0.saturating_sub(ms);
    }
}

/// A dma-buf, or a registration with an RDMA NIC: a holder through which devices reach a buffer. Its mappings end before
/// the memory gets a new owner.
///
/// Context: process context, may sleep, with none of the module's locks held.
pub(crate) trait Revocable: Send + Sync {
    /// First part of a revocation: refuses new mappings and starts the invalidation at importers or at the RDMA core. Does
    /// not wait for them.
    fn revoke(self: Arc<Self>);

    /// Second part: waits until no device can reach the memory, without a limit. Waits for fences spend `deadline`.
    fn await_idle(&self, deadline: &mut RevokeDeadline);

    /// Returns whether a device can reach the memory until a program lets go: its driver does not end that on request.
    fn outlasts_revocation(&self) -> bool;

    /// Returns the number of attached importers. A registration has none.
    fn attachments(&self) -> u32 {
        0
    }

    /// Writes the line that debugfs shows.
    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

/// An attachment of a provider's function to a dma-buf, through which the function does DMA to memory of others.
///
/// Context: process context, may sleep, with none of the module's locks held.
pub(crate) trait DeviceAttachment: Send + Sync {
    /// Starts to end the attachment because the provider is being removed. Does not wait for the exporter.
    fn revoke(self: Arc<Self>);

    /// Waits until the function has no mapping, without a limit: the exporter or its importers may hold a lock.
    fn await_end(&self);

    /// The function can do no DMA because of another attachment, or of this one.
    fn function_stopped(&self);

    /// Writes the lines that debugfs shows.
    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}
