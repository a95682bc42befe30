// SPDX-License-Identifier: MIT OR Apache-2.0

//! Writes of the processor that have not arrived at a device yet: PCIe calls them posted, as the processor does not wait
//! for their end.
//!
//! A posted write may arrive late, for it waits in root ports and switches. It is never passed by a later posted write or a
//! later read of the processor to the same device, so these push it: they arrive after it. What another device sends to the
//! memory takes another path and is not ordered with it. QEMU executes a write before the processor continues, so this
//! delay is modeled here: writes to delayed regions are kept until a later access pushes them.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::memory::Memory;

/// The most bytes that wait. If there are more, the oldest writes arrive.
const CAPACITY: usize = 1 << 20;
/// The most bytes of consecutive writes that are kept as one.
const COMBINED: usize = 4096;

/// Writes to the delayed regions of a device that have not arrived yet, in the order in which the processor sent them.
#[derive(Debug, Default)]
pub(crate) struct PostedWrites {
    writes: VecDeque<PostedWrite>,
    /// Bytes of all writes.
    bytes: usize,
}

#[derive(Debug)]
struct PostedWrite {
    memory: Arc<Memory>,
    offset: u64,
    data: Vec<u8>,
}

impl PostedWrite {
    /// Whether a write to `offset` continues this one.
    fn continues(&self, memory: &Arc<Memory>, offset: u64, len: usize) -> bool {
        Arc::ptr_eq(&self.memory, memory)
            && self.offset + self.data.len() as u64 == offset
            && self.data.len() + len <= COMBINED
    }

    fn arrive(self) {
        // The server has checked that the range is in the region.
        let _ = self.memory.write(self.offset, &self.data);
    }
}

impl PostedWrites {
    /// Sends a write within `memory`.
    pub(crate) fn post(&mut self, memory: &Arc<Memory>, offset: u64, data: &[u8]) {
        self.bytes += data.len();
        match self.writes.back_mut() {
            Some(last) if last.continues(memory, offset, data.len()) => last.data.extend_from_slice(data),
            _ => self.writes.push_back(PostedWrite {
                memory: Arc::clone(memory),
                offset,
                data: data.to_vec(),
            }),
        }
        while self.bytes > CAPACITY {
            let Some(oldest) = self.writes.pop_front() else { return };
            self.bytes -= oldest.data.len();
            oldest.arrive();
        }
    }

    /// All writes arrive, because of an access that does not pass them.
    pub(crate) fn arrive(&mut self) {
        self.bytes = 0;
        self.writes.drain(..).for_each(PostedWrite::arrive);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(memory: &Memory, offset: u64) -> u64 {
        let mut data = [0; 8];
        memory.read(offset, &mut data).unwrap();
        u64::from_le_bytes(data)
    }

    #[test]
    fn writes_arrive_in_order_when_pushed() {
        let memory = Arc::new(Memory::new("posted", 8192).unwrap());
        let mut posted = PostedWrites::default();
        for offset in (0..8192).step_by(8) {
            posted.post(&memory, offset, &1_u64.to_le_bytes());
        }
        assert_eq!(posted.writes.len(), 2);
        posted.post(&memory, 16, &2_u64.to_le_bytes());
        assert_eq!((word(&memory, 8), word(&memory, 16)), (0, 0));
        posted.arrive();
        assert_eq!((word(&memory, 8), word(&memory, 16), word(&memory, 8184)), (1, 2, 1));
        // What has arrived does not arrive again.
        memory.write(8, &3_u64.to_le_bytes()).unwrap();
        posted.arrive();
        assert_eq!(word(&memory, 8), 3);
    }

    #[test]
    fn oldest_writes_arrive_if_there_are_too_many() {
        let memory = Arc::new(Memory::new("posted", 2 << 20).unwrap());
        let mut posted = PostedWrites::default();
        let block = [1; COMBINED];
        for offset in (0..2 << 20).step_by(COMBINED) {
            posted.post(&memory, offset, &block);
        }
        assert_eq!(posted.bytes, CAPACITY);
        assert_ne!(word(&memory, (1 << 20) - 8), 0);
        assert_eq!(word(&memory, 1 << 20), 0);
    }
}
