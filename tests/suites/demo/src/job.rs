// SPDX-License-Identifier: MIT OR Apache-2.0

//! The results of the guest's program, which it prints as JSON for the host's program.

use serde::{Deserialize, Serialize};

use crate::compare::Comparison;
use crate::traffic::Traffic;

/// The number of samples of one transform.
pub const POINTS: usize = 1024;

/// The bytes of one sample: two f32.
pub const SAMPLE: usize = 8;

/// The two methods of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Drive to accelerator to drive.
    P2p,
    /// Every transfer goes through host memory, with a copy by the processor.
    Staged,
}

/// The durations of the parts of a run, in seconds of the guest's monotonic clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Seconds {
    /// From the drive into the accelerator's memory.
    pub read: f64,
    /// The transforms.
    pub compute: f64,
    /// From the accelerator's memory to the other drive.
    pub write: f64,
}

impl Seconds {
    /// Returns the sum.
    pub fn total(&self) -> f64 {
        self.read + self.compute + self.write
    }
}

/// One run of the job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Time by part.
    pub seconds: Seconds,
    /// Bytes that the processor copied between host memory and the accelerator's memory.
    pub cpu_copied_bytes: u64,
    /// The bytes that devices moved, from their own counters.
    pub traffic: Traffic,
    /// CRC-32C of the result, read back from the drive.
    pub checksum: u32,
    /// CRC-32C of the buffer, which the accelerator computes over its own memory.
    pub checksum_device: u32,
    /// The result from the drive, compared with the transform that the guest's processor computed.
    pub comparison: Comparison,
}

impl Run {
    /// Returns whether the result is correct, on the drive and in the accelerator.
    pub fn is_verified(&self) -> bool {
        self.comparison.is_equal() && self.checksum == self.checksum_device
    }
}

/// All results of the guest's program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Bytes transformed.
    pub payload_bytes: u64,
    /// The name of the device whose memory the orchestrator chose.
    pub provider: String,
    /// The module's verdicts about all providers for this buffer, by device name.
    pub verdicts: Vec<(String, String)>,
    /// CRC-32C of the samples.
    pub checksum_samples: u32,
    /// The seconds of the guest's processor for the same transforms.
    pub seconds_cpu: f64,
    /// Peer to peer.
    pub p2p: Run,
    /// Through host memory.
    pub staged: Run,
}
