// SPDX-License-Identifier: MIT OR Apache-2.0

//! What the guest's program is told to do, and what it tells the host's of it: JSON on its standard output.

use serde::{Deserialize, Serialize};

use crate::compare::Comparison;
use crate::traffic::Traffic;

/// Samples in one transform.
pub const POINTS: usize = 1024;

/// Bytes of one sample: two f32.
pub const SAMPLE: usize = 8;

/// The two ways to do the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// Drive to accelerator to drive.
    P2p,
    /// Each transfer through host memory, with a copy by the processor.
    Staged,
}

/// How long the parts of a run took, in seconds of the guest's monotonic clock.
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
    /// All of it.
    pub fn total(&self) -> f64 {
        self.read + self.compute + self.write
    }
}

/// One run of the job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Time by part.
    pub seconds: Seconds,
    /// Bytes the program copied by processor between host memory and the accelerator's.
    pub cpu_copied_bytes: u64,
    /// What the devices moved, from their own counters.
    pub traffic: Traffic,
    /// CRC-32C of the result as read back from the drive.
    pub checksum: u32,
    /// CRC-32C of the buffer as the accelerator computes it over its own memory.
    pub checksum_device: u32,
    /// The result as read back against the transform computed by the guest's processor.
    pub comparison: Comparison,
}

impl Run {
    /// Tells whether the result is right, on the drive and in the accelerator.
    pub fn is_verified(&self) -> bool {
        self.comparison.is_equal() && self.checksum == self.checksum_device
    }
}

/// All that the guest's program has to say.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Bytes transformed.
    pub payload_bytes: u64,
    /// Name of the device whose memory the orchestrator chose for them.
    pub provider: String,
    /// The module's verdicts on all providers for that buffer, by device name.
    pub verdicts: Vec<(String, String)>,
    /// CRC-32C of the samples.
    pub checksum_samples: u32,
    /// Seconds the guest's processor took for the same transforms.
    pub seconds_cpu: f64,
    /// Peer to peer.
    pub p2p: Run,
    /// Through host memory.
    pub staged: Run,
}
