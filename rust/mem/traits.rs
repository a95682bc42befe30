// SPDX-License-Identifier: GPL-2.0

//! The traits by which buffers and their memory reach later layers: what can be revoked, and where charges are kept.

use crate::ext::dmem::Held;
use kernel::{fmt, sync::Arc};

/// How long the revocation of a provider still waits for fences of dma-bufs, ms. All dma-bufs of the provider share it.
pub(crate) struct RevokeDeadline(u32);

impl RevokeDeadline {
    pub(crate) const fn new() -> Self {
        Self(2_000)
    }

    /// The next wait: `ms` milliseconds, or what is left.
    pub(crate) fn next(&self, ms: u32) -> u32 {
        self.0.min(ms)
    }

    /// A wait of `ms` milliseconds was in vain.
    pub(crate) fn spend(&mut self, ms: u32) {
        self.0 = self.0.saturating_sub(ms);
    }
}

/// What lets devices reach a buffer: a dma-buf, or a registration with an RDMA adapter. It ends before the memory of the buffer
/// can be anybody else's.
///
/// Context: a task that can sleep; none of the module's locks is held.
pub(crate) trait Revocable: Send + Sync {
    /// First part of a revocation: nothing new is mapped from here on, and devices are told to let go.
    fn revoke(self: Arc<Self>);

    /// Second part: waits until no device can reach the memory.
    fn await_idle(&self, deadline: &mut RevokeDeadline);

    /// Importers that are attached: only a dma-buf has any.
    fn attachments(&self) -> u32 {
        0
    }

    /// What debugfs shows of it.
    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

/// Where charges are kept.
pub(crate) trait Ledger: Send + Sync {
    /// Gives back what was counted under a number.
    fn uncharge(&self, id: u64);
}

/// What memory was charged; dropping it gives that back.
pub(crate) struct Charge {
    ledger: Arc<dyn Ledger>,
    id: u64,
    /// What its cgroup was charged.
    _cgroup: Held,
}

impl Charge {
    /// A charge that `ledger` knows by the number `id`.
    pub(crate) fn new(ledger: Arc<dyn Ledger>, id: u64, cgroup: Held) -> Self {
        Self {
            ledger,
            id,
            _cgroup: cgroup,
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.ledger.uncharge(self.id);
    }
}
