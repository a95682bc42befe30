// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report of the demo: rates beside those of the links, bytes of host memory, and the aims.

use std::collections::BTreeMap;

use p2pmem_vm::demo::{self, Verdict};
use serde::Serialize;

use crate::measured::Session;

/// The program of the accelerator node compares the spectrum of each block whose number in the session, counted from 0, is a
/// multiple of this. All blocks would take time that the emulated processor needs to keep the links busy.
pub const VERIFY_EVERY: u64 = 16;

/// How often both ports transfer in each direction between devices, and through host memory. The two follow each other, and take turns to be
/// first, so that other work of the machine slows down both.
pub const ROUNDS: u64 = 3;

/// The smallest median of the ratios of these pairs. A transfer between devices does all that one through host memory does, without its
/// copies, and is not slower. The rest is for differences between two transfers of the same kind.
const TO_STAGED: f64 = 0.9;
/// The smallest part of the link's rate that the fastest transfer of a kind should have. It depends on the time that the machine has for
/// the emulated processors, so a smaller part is no failure.
const LINK_RATIO: f64 = 0.9;
/// The largest part of the rate that the topology gives a link. The model sends no byte earlier, so a larger part shows a wrong measurement.
pub const MOST_LINK_RATIO: f64 = 1.05;
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

impl Direction {
    /// Returns the name for people.
    pub fn name(self) -> &'static str {
        match self {
            Direction::Recording => "recording",
            Direction::Playback => "playback",
        }
    }
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
        let direction = self.direction.name();
        let ports: Vec<String> = self.ports.iter().map(u32::to_string).collect();
        let staged = if self.staged { ", through host memory" } else { "" };
        format!("{direction}, port {}{staged}", ports.join(" and "))
    }

    /// Returns the aims that the row misses. Each of its sessions has `session_blocks` blocks, and each link a rate of `link` MB/s.
    fn missed(&self, session_blocks: u64, link: f64) -> Vec<String> {
        let mut missed = Vec::new();
        let name = self.name();
        let most = MOST_LINK_RATIO * link * self.ports.len() as f64;
        if !(f64::MIN_POSITIVE..=most).contains(&self.aggregate_mb_per_s) || !self.ratio_to_link.is_finite() {
            missed.push(format!(
                "{name}: {:.1} MB/s, {:.2} of what perftest measured; the links have {link:.1} MB/s each",
                self.aggregate_mb_per_s, self.ratio_to_link
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

/// The rates of transfers between devices beside those through host memory, in one direction by all ports.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ToStaged {
    /// The direction.
    pub direction: Direction,
    /// The ratio of the rates of each pair of transfers that followed each other.
    pub ratios: Vec<f64>,
    /// The median of the ratios.
    pub median: f64,
}

impl ToStaged {
    /// Compares the transfers in one direction, which are in the order of measurement.
    fn new(direction: Direction, rows: &[Row]) -> Self {
        let rates = |staged: bool| {
            let of = move |row: &&Row| row.direction == direction && row.staged == staged && row.ports.len() > 1;
            rows.iter().filter(of).map(|row| row.aggregate_mb_per_s)
        };
        let ratios: Vec<f64> = rates(false)
            .zip(rates(true))
            .map(|(direct, staged)| direct / staged)
            .collect();
        let mut sorted = ratios.clone();
        sorted.sort_by(f64::total_cmp);
        Self {
            direction,
            median: sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN),
            ratios,
        }
    }

    /// Returns the aims that are missed.
    fn missed(&self) -> Vec<String> {
        let name = self.direction.name();
        let mut missed = Vec::new();
        if self.ratios.len() as u64 != ROUNDS {
            let pairs = self.ratios.len();
            missed.push(format!(
                "{name}: {pairs} comparisons with host memory instead of {ROUNDS}"
            ));
        }
        if !(TO_STAGED..f64::INFINITY).contains(&self.median) {
            missed.push(format!(
                "{name}: {:.2} of the rate through host memory (median of {:.2?}); the aim is {TO_STAGED}",
                self.median, self.ratios
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
    /// The rate that the topology gives each link, in MB/s.
    pub link_mb_per_s: f64,
    /// The transfers.
    pub tables: Vec<Row>,
    /// The comparisons with host memory.
    pub to_staged: Vec<ToStaged>,
    /// The transfers that were slower than they should be beside their links, which is no failure.
    pub slow: Vec<String>,
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
    /// Adds up what was verified, compares, and adds the aims that are missed. Each session has `blocks` blocks.
    pub fn judge(&mut self, blocks: u64) {
        for direction in [Direction::Recording, Direction::Playback] {
            let compared = ToStaged::new(direction, &self.tables);
            self.verdict.failures.extend(compared.missed());
            self.to_staged.push(compared);
        }
        self.slow = slow(&self.tables);
        for row in &self.tables {
            self.verdict.failures.extend(row.missed(blocks, self.link_mb_per_s));
            self.verified.spectra += row.spectra;
            if row.direction == Direction::Playback {
                self.verified.blocks += row.blocks;
            }
        }
    }
}

/// Returns a line for each kind of transfer between devices of which even the fastest one had less than [`LINK_RATIO`] of the link's rate.
fn slow(rows: &[Row]) -> Vec<String> {
    let mut fastest: BTreeMap<String, f64> = BTreeMap::new();
    for row in rows.iter().filter(|row| !row.staged) {
        let best = fastest.entry(row.name()).or_insert(row.ratio_to_link);
        *best = best.max(row.ratio_to_link);
    }
    let below = fastest.into_iter().filter(|(_, best)| *best < LINK_RATIO);
    below
        .map(|(name, best)| format!("{name}: {best:.2} of the link's rate; the target is {LINK_RATIO}"))
        .collect()
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
        assert_eq!(dual.missed(64, 100.0), Vec::<String>::new());
        assert_eq!(dual.name(), "recording, port 1 and 2");
    }

    #[test]
    fn each_aim_of_a_transfer_can_be_missed() {
        let words = |row: &Row| row.missed(64, 100.0).join("; ");
        // A slow transfer is no failure.
        assert_eq!(words(&row(&[40], false, 0)), "");
        assert!(words(&row(&[95], false, 1 << 20)).contains("the aim is 0"));
        assert!(words(&row(&[95], true, 64 << 20)).contains("through host memory"));
        assert!(
            words(&row(&[110], false, 0))
                .contains("110.0 MB/s, 1.10 of what perftest measured; the links have 100.0 MB/s")
        );
        assert!(words(&row(&[106, 109], true, 128 << 20)).contains("212.0 MB/s"));
        let mut without_link = row(&[95], false, 0);
        without_link.ratio_to_link = f64::NAN;
        assert!(words(&without_link).contains("NaN of what perftest measured"));
        let mut without_time = row(&[95], false, 0);
        without_time.aggregate_mb_per_s = 0.0;
        assert!(words(&without_time).contains("0.0 MB/s"));
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

    /// Returns the failures of pairs of recordings between devices and through host memory with these rates, and what was slow.
    fn judged(pairs: &[[u64; 2]]) -> (Vec<String>, Vec<String>) {
        let mut report = Report {
            link_mb_per_s: 100.0,
            ..Report::default()
        };
        for (number, [direct, staged]) in pairs.iter().enumerate() {
            let mut pair = [row(&[*direct; 2], false, 0), row(&[*staged; 2], true, 256 << 20)];
            if number % 2 == 1 {
                pair.reverse();
            }
            report.tables.extend(pair);
        }
        for recording in report.tables.clone() {
            let direction = Direction::Playback;
            report.tables.push(Row { direction, ..recording });
        }
        report.judge(64);
        assert_eq!(report.to_staged.len(), 2);
        (report.verdict.failures, report.slow)
    }

    #[test]
    fn other_work_of_the_machine_fails_no_aim() {
        assert_eq!(judged(&[[96, 92], [97, 93], [96, 92]]), (Vec::new(), Vec::new()));
        // Each transfer has another part of the processors.
        let (failures, slow) = judged(&[[60, 55], [40, 52], [81, 70]]);
        assert_eq!(failures, Vec::<String>::new());
        assert_eq!(slow.len(), 2);
        assert_eq!(
            slow[1],
            "recording, port 1 and 2: 0.81 of the link's rate; the target is 0.9"
        );
    }

    #[test]
    fn transfers_that_are_slower_than_through_host_memory_fail() {
        let (failures, slow) = judged(&[[80, 96], [97, 95], [79, 95]]);
        assert_eq!(failures.len(), 2);
        assert_eq!(
            failures[0],
            "recording: 0.83 of the rate through host memory (median of [0.83, 1.02, 0.83]); the aim is 0.9"
        );
        assert_eq!(slow, Vec::<String>::new());
        let (failures, _) = judged(&[]);
        assert!(
            failures[0].contains("0 comparisons") && failures[1].contains("NaN of the rate"),
            "{failures:?}"
        );
        let (failures, _) = judged(&[[96, 92], [96, 92]]);
        assert!(failures[0].contains("2 comparisons"), "{failures:?}");
    }
}
