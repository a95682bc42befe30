// SPDX-License-Identifier: MIT OR Apache-2.0

//! DMA of one source of operations: the commands that registers submit, or a ring.

use p2pmem_vfio_user::Dma;

/// DMA handles with counters of their own, because sources run concurrently. Clones share them. Polls have their own
/// counters, because the number of their reads says nothing about the work that was done.
#[derive(Clone, Debug)]
pub(super) struct Port {
    /// For all accesses except polls.
    pub(super) data: Dma,
    /// For polls.
    pub(super) polls: Dma,
}

impl Port {
    pub(super) fn new(dma: &Dma) -> Self {
        let own = dma.separate();
        Self {
            data: own.tallied(),
            polls: own.tallied(),
        }
    }

    /// Returns handles that fail permanently after the next [`Port::abort`] or reset.
    pub(super) fn pinned(&self) -> Self {
        Self {
            data: self.data.pinned(),
            polls: self.polls.pinned(),
        }
    }

    /// Ends the accesses of this port, and makes later ones of existing [`Port::pinned`] handles fail.
    pub(super) fn abort(&self) {
        // Both handles are clones of one separate handle, so this ends the accesses of both.
        self.data.abort_separate();
    }

    pub(super) fn reset_counts(&self) {
        self.data.reset_counts();
        self.polls.reset_counts();
    }
}
