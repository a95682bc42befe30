// SPDX-License-Identifier: MIT OR Apache-2.0

//! What the accelerator node's program measures.

use serde::{Deserialize, Serialize};

/// One session, by one NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// The number of blocks.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Nanoseconds from the first block to the last.
    pub nanoseconds: u64,
    /// Blocks whose spectrum was compared with what the processor computes.
    pub verified: u64,
    /// Bytes of host memory that the processor read or wrote to copy blocks.
    pub copied: u64,
}

impl Session {
    /// Returns the rate in MB/s (10^6 bytes in a second).
    pub fn rate(&self) -> f64 {
        self.bytes as f64 * 1e3 / self.nanoseconds.max(1) as f64
    }
}
