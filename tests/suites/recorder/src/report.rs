// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report of the demo: rates beside those of the links, bytes of host memory, and the aims.

use p2pmem_vm::demo::{self, Verdict};
use serde::Serialize;

use crate::measured::Session;

/// The program of the accelerator node compares the spectrum of each block whose number in the session, counted from 0, is a
/// multiple of this. All blocks would take time that the emulated processor needs to keep the links busy.
pub const VERIFY_EVERY: u64 = 16;

/// The smallest part of the link's rate.
const LINK_RATIO: f64 = 0.9;
/// The largest part. A link has a fixed rate, so a larger part shows that the link's rate was measured wrong.
const MOST_LINK_RATIO: f64 = 1.05;
/// From this number on, bytes of host memory that NICs and the accelerator accessed for a byte of payload are not 0: for each block,
/// they access a few messages of 256 bytes.
const NO_HOST_BYTES: f64 = 0.002;
/// Host bytes for a byte of payload that a transfer through host memory takes on both nodes.
const STAGED_HOST_BYTES: f64 = 4.0;

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the accelerator to the drives.
    Recording,
    /// From the drives to the accelerator.
    Playback,
}

/// Bytes that devices moved during a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MovedBytes {
    /// Bytes of host memory that NICs and the accelerator of the accelerator node accessed, and that its processor copied.
    pub accelerator_node_host: u64,
    /// Bytes of host memory that NICs and the accelerator of the storage node accessed.
    pub storage_node_host: u64,
    /// Bytes that the drives moved from or to host memory: payload if it is there, the store's index, and the file system.
    pub drives_host: u64,
    /// Bytes that the drives moved from or to the memory of the storage node's accelerator, which are payload only.
    pub drives_device: u64,
}

/// A transfer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The direction.
    pub direction: Direction,
    /// The ports, counted from 1.
    pub ports: Vec<u32>,
    /// Whether both nodes moved the payload through host memory.
    pub staged: bool,
    /// The rate of each port, in MB/s.
    pub mb_per_s: Vec<f64>,
    /// The rate of each port in perftest, in MB/s.
    pub link_mb_per_s: Vec<f64>,
    /// All bytes by the time of the slowest session, in MB/s.
    pub aggregate_mb_per_s: f64,
    /// The aggregate, divided by the sum of the links' rates.
    pub ratio_to_link: f64,
    /// Bytes of payload.
    pub bytes: u64,
    /// Bytes that devices moved.
    pub moved: MovedBytes,
    /// Bytes of host memory for a byte of payload, on the accelerator node and on the storage node. Those of the drives are those
    /// of payload: what they move beside it is the store's index and the file system.
    pub host_bytes_per_byte: [f64; 2],
    /// Blocks whose checksum was right after playback; for recordings, blocks that are durable.
    pub blocks: u64,
    /// Blocks whose spectrum was compared with what the processor computes.
    pub spectra: u64,
}

impl Row {
    /// Returns the row of a transfer.
    pub fn new(
        direction: Direction,
        ports: Vec<u32>,
        staged: bool,
        sessions: &[Session],
        link: Vec<f64>,
        moved: MovedBytes,
    ) -> Self {
        let bytes: u64 = sessions.iter().map(|session| session.bytes).sum();
        let rates: Vec<f64> = sessions.iter().map(Session::rate).collect();
        // Sessions begin at the same time. The aggregate counts the time of the slowest one.
        let longest = sessions.iter().map(|session| session.nanoseconds).max().unwrap_or(0);
        let aggregate = bytes as f64 * 1e3 / longest.max(1) as f64;
        let per_byte = |host: u64| host as f64 / bytes.max(1) as f64;
        Self {
            direction,
            ports,
            staged,
            aggregate_mb_per_s: aggregate,
            ratio_to_link: aggregate / link.iter().sum::<f64>(),
            mb_per_s: rates,
            link_mb_per_s: link,
            bytes,
            moved,
            host_bytes_per_byte: [
                per_byte(moved.accelerator_node_host),
                per_byte(moved.storage_node_host + bytes.saturating_sub(moved.drives_device)),
            ],
            blocks: sessions.iter().map(|session| session.blocks).sum(),
            spectra: sessions.iter().map(|session| session.verified).sum(),
        }
    }

    /// Returns the name for people.
    pub fn name(&self) -> String {
        let direction = match self.direction {
            Direction::Recording => "recording",
            Direction::Playback => "playback",
        };
        let ports: Vec<String> = self.ports.iter().map(u32::to_string).collect();
        let staged = if self.staged { ", through host memory" } else { "" };
        format!("{direction}, port {}{staged}", ports.join(" and "))
    }

    /// Returns the aims that the row misses. Each of its sessions has `session_blocks` blocks.
    fn missed(&self, session_blocks: u64) -> Vec<String> {
        let mut missed = Vec::new();
        let name = self.name();
        if !self.staged && !(LINK_RATIO..=MOST_LINK_RATIO).contains(&self.ratio_to_link) {
            missed.push(format!(
                "{name}: {:.2} of the link's rate; the aim is {LINK_RATIO}",
                self.ratio_to_link
            ));
        }
        let host = self.host_bytes_per_byte;
        if !self.staged && host.iter().any(|bytes| *bytes >= NO_HOST_BYTES) {
            missed.push(format!(
                "{name}: {host:?} host bytes for a byte of payload; the aim is 0"
            ));
        }
        let device = if self.staged { 0 } else { self.bytes };
        if self.moved.drives_device != device {
            missed.push(format!(
                "{name}: the drives moved {} bytes of payload from or to device memory; {device} are expected",
                self.moved.drives_device
            ));
        }
        if self.staged && host.iter().sum::<f64>() < STAGED_HOST_BYTES {
            missed.push(format!(
                "{name}: {host:?} host bytes for a byte of payload; through host memory, at least {STAGED_HOST_BYTES} are counted"
            ));
        }
        let sessions = self.ports.len() as u64;
        let blocks = sessions * session_blocks;
        let spectra = sessions * session_blocks.div_ceil(VERIFY_EVERY);
        if (self.blocks, self.spectra) != (blocks, spectra) {
            missed.push(format!(
                "{name}: {} of {blocks} blocks, {} of {spectra} spectra verified",
                self.blocks, self.spectra
            ));
        }
        missed
    }
}

/// The report.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// Whether all aims are met, and what failed.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// The transfers.
    pub tables: Vec<Row>,
    /// Blocks that were played back, each with the right checksum and in order, and spectra that were verified.
    pub verified: Verified,
}

/// What was verified.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// Blocks that were played back, each with the checksum that was computed before it was sent, and in order.
    pub blocks: u64,
    /// Spectra that were compared with what the processor computes.
    pub spectra: u64,
}

impl Report {
    /// Adds up what was verified, and adds the aims that are missed. Each session has `blocks` blocks.
    pub fn judge(&mut self, blocks: u64) {
        for row in &self.tables {
            self.verdict.failures.extend(row.missed(blocks));
            self.verified.spectra += row.spectra;
            if row.direction == Direction::Playback {
                self.verified.blocks += row.blocks;
            }
        }
    }
}

impl demo::Report for Report {
    fn verdict(&mut self) -> &mut Verdict {
        &mut self.verdict
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(mb_per_s: u64) -> Session {
        Session {
            blocks: 64,
            bytes: 64 << 20,
            nanoseconds: (64 << 20) * 1000 / mb_per_s,
            verified: 4,
            copied: 0,
        }
    }

    fn row(rates: &[u64], staged: bool, each: u64) -> Row {
        let sessions: Vec<Session> = rates.iter().map(|rate| session(*rate)).collect();
        let link = rates.iter().map(|_| 100.0).collect();
        let ports = (1..=rates.len() as u32).collect();
        let moved = MovedBytes {
            accelerator_node_host: each,
            storage_node_host: each / 2,
            drives_host: 1 << 20,
            drives_device: if staged { 0 } else { rates.len() as u64 * (64 << 20) },
        };
        Row::new(Direction::Recording, ports, staged, &sessions, link, moved)
    }

    #[test]
    fn ratios_compare_with_the_links() {
        let dual = row(&[95, 91], false, 0);
        assert!((dual.ratio_to_link - 0.91).abs() < 1e-3, "{}", dual.ratio_to_link);
        assert_eq!(dual.missed(64), Vec::<String>::new());
        assert_eq!(dual.name(), "recording, port 1 and 2");
    }

    #[test]
    fn each_aim_can_be_missed() {
        let words = |row: &Row| row.missed(64).join("; ");
        assert!(words(&row(&[89], false, 0)).contains("0.89 of the link's rate"));
        assert!(words(&row(&[95], false, 1 << 20)).contains("the aim is 0"));
        assert!(words(&row(&[95], true, 64 << 20)).contains("through host memory"));
        let mut too_fast = row(&[95], false, 0);
        too_fast.ratio_to_link = 1.93;
        assert!(words(&too_fast).contains("1.93 of the link's rate"));
        let mut without_link = row(&[95], false, 0);
        without_link.ratio_to_link = f64::NAN;
        assert!(words(&without_link).contains("NaN of the link's rate"));
        assert_eq!(words(&row(&[5], true, 128 << 20)), "");
        let mut through_host = row(&[95], false, 0);
        through_host.moved.drives_device -= 4096;
        assert!(words(&through_host).contains("67104768 bytes of payload"));
        let mut lost = row(&[95], false, 0);
        lost.blocks = 63;
        assert!(words(&lost).contains("63 of 64 blocks"));
        let mut unverified = row(&[95], false, 0);
        unverified.spectra = 3;
        assert!(words(&unverified).contains("3 of 4 spectra"));
    }
}
