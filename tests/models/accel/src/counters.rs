// SPDX-License-Identifier: MIT OR Apache-2.0

//! Counters of the accelerator.

use std::sync::atomic::{AtomicU64, Ordering};

use p2pmem_accel_regs::Counter;
use p2pmem_vfio_user::DmaCounts;

/// One value per [`Counter`]. The bus keeps the counters of bus traffic, those of polls included; `snapshot` merges them.
#[derive(Debug, Default)]
pub struct Counters {
    values: [AtomicU64; Counter::COUNT],
}

impl Counters {
    pub(super) fn add(&self, counter: Counter, amount: u64) {
        self.values[counter as usize].fetch_add(amount, Ordering::Relaxed);
    }

    pub(super) fn reset(&self) {
        self.values.iter().for_each(|value| value.store(0, Ordering::Relaxed));
    }

    /// Returns all counters. `polls` is the part of the bus traffic that polls caused; it must be read before `bus`.
    pub(super) fn snapshot(&self, polls: &DmaCounts, bus: &DmaCounts) -> [u64; Counter::COUNT] {
        let mut values = std::array::from_fn(|i| self.values[i].load(Ordering::Relaxed));
        for (counter, value) in [
            (Counter::HostRead, bus.host_read.saturating_sub(polls.host_read)),
            (Counter::HostWritten, bus.host_written),
            (Counter::PeerRead, bus.peer_read.saturating_sub(polls.peer_read)),
            (Counter::PeerWritten, bus.peer_written),
            (
                Counter::MessageRead,
                bus.message_read.saturating_sub(polls.message_read),
            ),
            (Counter::MessageWritten, bus.message_written),
            (Counter::PollHostRead, polls.host_read),
            (Counter::PollPeerRead, polls.peer_read),
            (Counter::PollMessageRead, polls.message_read),
        ] {
            values[counter as usize] = value;
        }
        values
    }
}
