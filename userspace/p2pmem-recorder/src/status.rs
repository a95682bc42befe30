// SPDX-License-Identifier: MIT OR Apache-2.0

//! The state of a storage node, as programs and people see it.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::path::PathBuf;

use p2pmem::PciAddr;
use serde::Serialize;

use crate::store::{ChannelName, LunInfo, RecordingInfo, StreamInfo};

/// Everything that a node knows at one moment. Counters count from the start of the program, or of the session.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Status {
    /// The name of the node.
    pub name: String,
    /// The version of the program.
    pub version: &'static str,
    /// Seconds since the program started.
    pub uptime: u64,
    /// The memory that the node uses for blocks in transit.
    pub memory: MemoryKind,
    /// The drives, in the order of the configuration.
    pub drives: Vec<Drive>,
    /// The LUNs, in the order of their names.
    pub luns: Vec<Lun>,
    /// The LUN that is being created, or whose creation failed last.
    pub creation: Option<Creation>,
    /// The sessions that run, and the latest that ended, in the order of their numbers.
    pub sessions: Vec<Session>,
    /// What the store could not repair when it was opened.
    pub problems: Vec<String>,
}

/// Where blocks are between NIC and drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryKind {
    /// Memory of an accelerator or a drive, chosen near the NIC and the drives of the LUN.
    #[default]
    Device,
    /// Host memory.
    Host,
}

/// A drive.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Drive {
    /// The folder where its file system is mounted.
    pub folder: PathBuf,
    /// The block device, such as `nvme0n1`; `None` if the file system has none.
    pub device: Option<String>,
    /// Bytes of the file system.
    pub size: u64,
    /// Bytes of the file system that are free for LUNs.
    pub free: u64,
    /// Bytes that the drive has written since the machine started.
    pub written: u64,
    /// Bytes that the drive has read since the machine started.
    pub read: u64,
    /// The number of reads and writes in progress.
    pub in_flight: u64,
    /// The number of errors since the program started.
    pub errors: u64,
    /// The last error of a session that used the drive. It goes away when a later session succeeds on the drive, or when a
    /// person acknowledges it.
    pub error: Option<DriveError>,
}

/// An error of a drive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DriveError {
    /// The number of the session that used the drive.
    pub session: u64,
    /// What the session did.
    pub direction: Direction,
    /// The channel of the session, such as `fast/radar/0`.
    pub channel: String,
    /// When the drive failed, in seconds since 1970.
    pub time: u64,
    /// The error of the drive.
    pub message: String,
    /// What became of the session.
    pub consequence: String,
}

/// A LUN.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Lun {
    /// The name.
    pub name: String,
    /// The bytes of a segment.
    pub segment_size: u64,
    /// The bytes of all segments.
    pub total: u64,
    /// The bytes of the free segments.
    pub free: u64,
    /// The folders of its drives.
    pub drives: Vec<PathBuf>,
    /// Its streams, in the order of their names.
    pub streams: Vec<Stream>,
}

/// The creation of a LUN, which writes all of its bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Creation {
    /// The name of the LUN.
    pub lun: String,
    /// The bytes of the LUN.
    pub total: u64,
    /// The bytes that are written.
    pub written: u64,
    /// Why the creation failed. Without an error, it is in progress.
    pub error: Option<String>,
}

/// A stream.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Stream {
    /// The name.
    pub name: String,
    /// The bytes of a block.
    pub block_size: u64,
    /// The channels, in the order of their numbers.
    pub channels: Vec<Channel>,
}

/// A channel.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Channel {
    /// The number in the stream.
    pub number: u32,
    /// The recordings, in the order of their numbers.
    pub recordings: Vec<Recording>,
}

/// A recording.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Recording {
    /// The number in the channel.
    pub number: u64,
    /// The time that the recording program gave for the start, in nanoseconds since 1970.
    pub started: u64,
    /// The number of acknowledged blocks.
    pub blocks: u64,
    /// The sequence number of the first block.
    pub first: Option<u64>,
    /// The sequence number of the last block.
    pub last: Option<u64>,
    /// The time of the first block, in nanoseconds.
    pub first_time: Option<u64>,
    /// The time of the last block, in nanoseconds.
    pub last_time: Option<u64>,
    /// Whether the recording has a writer.
    pub writing: bool,
}

/// The direction of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the accelerator node to the drives.
    Record,
    /// From the drives to the accelerator node.
    Play,
}

/// What limits a session at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Limit {
    /// The other side: buffers are free, or blocks are announced, and it does not use them.
    Peer,
    /// The drives: most buffers wait for them.
    Drive,
    /// The rate that the other side requested.
    Rate,
}

/// A session: one accelerator node records or plays one channel through one port.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Session {
    /// The number of the session.
    pub id: u64,
    /// The direction.
    pub direction: Direction,
    /// The LUN.
    pub lun: String,
    /// The stream.
    pub stream: String,
    /// The number of the channel.
    pub channel: u32,
    /// The number of the recording.
    pub recording: u64,
    /// The name that the other side gave.
    pub peer: String,
    /// The NIC of this node.
    pub nic: String,
    /// The memory that was chosen, and its path to the NIC: such as `0000:04:00.0, one PCIe switch: traffic
    /// stays in it`.
    pub memory: String,
    /// The PCI functions between which the payload moves.
    pub devices: SessionDevices,
    /// When the session started, in seconds since 1970.
    pub started: u64,
    /// Blocks that have arrived, or that the other side has read.
    pub blocks: u64,
    /// Blocks that are durable; equal to `blocks` for playback.
    pub acknowledged: u64,
    /// Bytes of a block.
    pub block_size: u64,
    /// Blocks that were received and are not recorded, because the session ended before they were durable.
    pub dropped: u64,
    /// The number of buffers.
    pub buffers: u32,
    /// Buffers that wait for the drives.
    pub in_flight: u32,
    /// What limits the session.
    pub limit: Limit,
    /// Whether the session runs.
    pub running: bool,
    /// Drives that failed while the session used them, and what became of their blocks.
    pub warnings: Vec<String>,
    /// Why the session ended early.
    pub error: Option<String>,
}

/// Counters of all sessions since the program started, also of those that [`Status`] does not have any more. They never
/// decrease.
#[derive(Debug, Clone, Default)]
pub struct Totals {
    /// Counters by direction and NIC.
    pub nics: BTreeMap<(Direction, String), Counters>,
    /// Counters by direction and channel. A channel may be deleted.
    pub channels: BTreeMap<(Direction, ChannelName), Counters>,
}

/// Counters of sessions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Sessions that began.
    pub sessions: u64,
    /// Sessions that ended with an error, without those that an administrator stopped.
    pub failed: u64,
    /// Blocks that arrived, or that the other side has read.
    pub blocks: u64,
    /// Bytes of `blocks`.
    pub bytes: u64,
    /// Blocks that are durable; equal to `blocks` for playback.
    pub acknowledged: u64,
    /// Bytes of `acknowledged`.
    pub acknowledged_bytes: u64,
    /// Blocks that arrived, and were not durable when their session ended.
    pub dropped: u64,
    /// Bytes of `dropped`.
    pub dropped_bytes: u64,
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.sessions += other.sessions;
        self.failed += other.failed;
        self.blocks += other.blocks;
        self.bytes += other.bytes;
        self.acknowledged += other.acknowledged;
        self.acknowledged_bytes += other.acknowledged_bytes;
        self.dropped += other.dropped;
        self.dropped_bytes += other.dropped_bytes;
    }
}

/// The PCI functions between which the payload of a session moves.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SessionDevices {
    /// The NIC, if it is known.
    pub nic: Option<PciAddr>,
    /// The device whose memory was chosen; none for host memory.
    pub memory: Option<PciAddr>,
    /// The drives of the LUN.
    pub drives: Vec<PciAddr>,
}

impl Lun {
    /// Returns a LUN with its streams.
    pub fn new(info: &LunInfo, streams: Vec<Stream>) -> Self {
        Self {
            name: info.name.clone(),
            segment_size: info.segment_size,
            total: info.total(),
            free: info.free(),
            drives: info.drives.iter().map(|(folder, _)| folder.clone()).collect(),
            streams,
        }
    }
}

impl Stream {
    /// Returns a stream with its channels.
    pub fn new(info: &StreamInfo, channels: Vec<Channel>) -> Self {
        Self {
            name: info.name.clone(),
            block_size: info.block_size,
            channels,
        }
    }
}

impl From<&RecordingInfo> for Recording {
    fn from(info: &RecordingInfo) -> Self {
        let (first, last) = info.range.unzip();
        Self {
            number: info.number,
            started: info.started,
            blocks: info.blocks,
            first: first.map(|block| block.sequence),
            last: last.map(|block| block.sequence),
            first_time: first.map(|block| block.time),
            last_time: last.map(|block| block.time),
            writing: info.writing,
        }
    }
}
