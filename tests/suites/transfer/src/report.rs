// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report of the demo: the matrix, several ports, calls, the parts of a WRITE, the cost of each path, and the aims.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use p2pmem_perf::matrix::{Entry, Matrix, Measured};
use p2pmem_perf::rpc::Cost;
use p2pmem_perf::stats::Latency;
use p2pmem_vm::demo::{self, Verdict};
use serde::Serialize;

use crate::decomposition::Decomposition;

/// The smallest ratio of accelerator to accelerator and host to host, by RDMA WRITE.
const ACCELERATOR_RATIO: f64 = 0.9;
/// The smallest ratio of the direct path and the path through host memory.
const STAGED_RATIO: f64 = 5.0;
/// The smallest ratio of two ports and one.
const PORTS_RATIO: f64 = 1.8;
/// The smallest part of the link's rate that RDMA between two memories reaches on links of a fixed rate.
const LINK_RATIO: f64 = 0.9;
/// The largest part. A link has a fixed rate, so a larger part shows that the link's rate was measured wrong.
const MOST_LINK_RATIO: f64 = 1.1;
/// From this number on, an excess of host bytes for a byte of payload is not 0. At most a hundred pairs and modes are counted together, so
/// this is at most a ten-thousandth of the bytes of one.
const NO_HOST_BYTES: f64 = 1e-6;
/// As [`NO_HOST_BYTES`], of UCX, which connects by messages in host memory: the 16 pairs together may have a hundredth of the bytes of one.
const NO_HOST_BYTES_BY_UCX: f64 = 0.01 / 16.0;
/// The part of a two-sided call's instructions up to which those of a one-sided call are 0.
const NO_INSTRUCTIONS: f64 = 0.01;
/// The least host bytes for a byte of payload that is staged or sent over TCP.
const STAGED_HOST_BYTES: f64 = 2.0;
/// Number of pairs of the four kinds of memory.
const ALL_PAIRS: usize = 16;
/// All modes.
const MODES: [&str; 7] = ["write", "read", "send", "write-imm", "tcp", "staged", "ucx"];
/// The modes whose instructions are counted.
const BUT_UCX: [&str; 6] = ["write", "read", "send", "write-imm", "tcp", "staged"];
/// The modes of the matrix within a node and of the latencies.
const ONE_SIDED: [&str; 2] = ["write", "read"];
/// Kind of memory of the host.
const HOST: &str = "cpu";

/// A pair of memories, and how bytes move between them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cell {
    /// The client's memory.
    pub from: String,
    /// The server's memory.
    pub to: String,
    /// The mode of `p2pmem-perf run`; `staged` for writes that both processors copy through host memory.
    pub mode: String,
    /// Bytes of a message.
    pub size: u64,
    /// Bandwidth in MiB per second.
    pub mib_per_s: f64,
    /// Bandwidth, divided by the link's: by that of WRITEs from host memory to host memory.
    pub ratio_to_link: f64,
    /// Bytes of host memory that NICs accessed, for a byte of payload. NICs count those of all pairs that are measured together: this is
    /// the least number for this pair, plus an equal share of what was counted beyond the least numbers of all pairs.
    pub host_bytes_per_byte: f64,
    /// Bytes that processors copied, for a byte of payload.
    pub copied_bytes_per_byte: f64,
    /// Whether every byte arrived.
    pub verified: bool,
}

/// Modes of pairs that are measured together, while the NICs count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// RDMA between two memories.
    Rdma,
    /// TCP, and writes through host memory.
    Copied,
    /// Puts of UCX.
    Ucx,
}

impl Group {
    /// Returns the options of `p2pmem-perf matrix`.
    pub fn options(self) -> &'static str {
        match self {
            Self::Rdma => "--mode write,read,send,write-imm",
            Self::Copied => "--mode tcp --staged",
            Self::Ucx => "--mode ucx",
        }
    }
}

/// Returns whether a mode is RDMA between the two memories.
fn is_rdma(mode: &str) -> bool {
    !["staged", "tcp", "ucx"].contains(&mode)
}

/// Payload of NICs, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct HostBytes {
    /// Host memory that connected queue pairs read and wrote, on all nodes.
    pub connected: u64,
    /// Host memory that datagrams read and wrote: IP over InfiniBand.
    pub datagrams: u64,
}

/// Returns the least bytes of host memory that NICs can access for a byte between these memories: those of its ends, or of the buffers
/// in host memory through which it moves.
fn expected_host_bytes(from: &str, to: &str, mode: &str) -> f64 {
    if ["staged", "tcp"].contains(&mode) {
        STAGED_HOST_BYTES
    } else {
        f64::from(u8::from(from == HOST)) + f64::from(u8::from(to == HOST))
    }
}

/// Returns the numbers of a pair.
fn numbers(entry: &Entry) -> Result<&Measured> {
    entry.measured.as_ref().with_context(|| {
        let why = entry.error.as_deref().unwrap_or("no reason");
        format!("{} to {} by {}: not measured: {why}", entry.from, entry.to, entry.mode)
    })
}

/// Returns the cells of a measured matrix. `host` is what the NICs moved meanwhile. Each pair has at least its expected host bytes. What all
/// have beyond that is shared equally. `link_bytes` are the bytes that measured the link, from host memory to host memory: before the
/// pairs, unless the matrix has this pair.
///
/// # Errors
///
/// A pair was not measured or not verified.
pub fn cells(matrix: &Matrix, host: HostBytes, link_bytes: u64) -> Result<Vec<Cell>> {
    let mut measured = Vec::new();
    for entry in &matrix.entries {
        let numbers = numbers(entry)?;
        ensure!(
            numbers.verified == Some(true) && numbers.moved_bytes > 0,
            "{} to {} by {}: not verified",
            entry.from,
            entry.to,
            entry.mode
        );
        measured.push((entry, numbers));
    }
    let is_link = |entry: &Entry| entry.from == HOST && entry.to == HOST && entry.mode == "write";
    let link = if matrix.entries.iter().any(is_link) {
        0
    } else {
        2 * link_bytes
    };
    // TCP goes over datagrams, all else over connected queue pairs.
    let excess = |over_tcp: bool| {
        let of_mode = measured.iter().filter(|(entry, _)| (entry.mode == "tcp") == over_tcp);
        let (mut moved, mut expected) = (0.0, 0.0);
        for (entry, numbers) in of_mode {
            moved += numbers.moved_bytes as f64;
            expected += numbers.moved_bytes as f64 * expected_host_bytes(&entry.from, &entry.to, &entry.mode);
        }
        let counted = if over_tcp {
            host.datagrams as f64
        } else {
            host.connected as f64 - link as f64
        };
        (counted - expected) / f64::max(moved, 1.0)
    };
    let (connected, datagrams) = (excess(false), excess(true));
    Ok(measured
        .into_iter()
        .map(|(entry, numbers)| Cell {
            from: entry.from.clone(),
            to: entry.to.clone(),
            mode: entry.mode.clone(),
            size: entry.size,
            mib_per_s: numbers.mib_per_s,
            ratio_to_link: numbers.ratio_to_link,
            host_bytes_per_byte: expected_host_bytes(&entry.from, &entry.to, &entry.mode)
                + if entry.mode == "tcp" { datagrams } else { connected },
            copied_bytes_per_byte: numbers.copied_bytes as f64 / numbers.moved_bytes as f64,
            verified: true,
        })
        .collect())
}

impl Cell {
    /// Returns whether the rate is that of the link. Both sides of the range show a measurement that something disturbed.
    pub fn has_links_rate(&self) -> bool {
        (LINK_RATIO..=MOST_LINK_RATIO).contains(&self.ratio_to_link)
    }

    fn is_of_same_pair(&self, other: &Self) -> bool {
        (&self.from, &self.to, &self.mode) == (&other.from, &other.to, &other.mode)
    }

    fn is_nearer_to_link(&self, other: &Self) -> bool {
        (self.ratio_to_link - 1.0).abs() < (other.ratio_to_link - 1.0).abs()
    }
}

/// Returns the pairs of memories of which a cell does not have the link's rate: the client's memory and the server's.
pub fn slow_pairs(cells: &[Cell]) -> BTreeSet<(String, String)> {
    let slow = cells.iter().filter(|cell| !cell.has_links_rate());
    slow.map(|cell| (cell.from.clone(), cell.to.clone())).collect()
}

/// Replaces each cell for which another measurement has a rate that is nearer to the link's.
pub fn keep_nearest(cells: &mut [Cell], again: Vec<Cell>) {
    for found in again {
        let same = cells.iter_mut().find(|cell| cell.is_of_same_pair(&found));
        if let Some(cell) = same.filter(|cell| found.is_nearer_to_link(cell)) {
            *cell = found;
        }
    }
}

/// What a message costs on nodes whose clocks count instructions, one message at a time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MessageCost {
    /// The client's memory.
    pub from: String,
    /// The server's memory.
    pub to: String,
    /// The mode, as in [`Cell`].
    pub mode: String,
    /// Bytes of a message.
    pub size: u64,
    /// Instructions of the client's and the server's threads for a byte of payload, in program and kernel. Interrupts that arrive
    /// while the thread sleeps are not counted.
    pub instructions_per_byte: f64,
}

/// Returns the costs of a matrix whose nodes' clocks count instructions.
///
/// # Errors
///
/// A pair was not measured.
pub fn costs(matrix: &Matrix) -> Result<Vec<MessageCost>> {
    let cost = |entry: &Entry| {
        let numbers = numbers(entry)?;
        Ok(MessageCost {
            from: entry.from.clone(),
            to: entry.to.clone(),
            mode: entry.mode.clone(),
            size: entry.size,
            // An instruction takes a nanosecond of these nodes' time.
            instructions_per_byte: (numbers.cpu_us_client + numbers.cpu_us_server) * 1e3 / entry.size as f64,
        })
    };
    matrix.entries.iter().map(cost).collect()
}

/// The latency of messages that wait for each other.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MessageLatency {
    /// The client's memory.
    pub from: String,
    /// The server's memory.
    pub to: String,
    /// The mode, as in [`Cell`].
    pub mode: String,
    /// Bytes of a message.
    pub size: u64,
    /// Times in microseconds, of the emulation.
    #[serde(flatten)]
    pub latency: Latency,
}

/// Returns the latencies of a matrix.
///
/// # Errors
///
/// A pair was not measured.
pub fn message_latencies(matrix: &Matrix) -> Result<Vec<MessageLatency>> {
    let latency = |entry: &Entry| {
        Ok(MessageLatency {
            from: entry.from.clone(),
            to: entry.to.clone(),
            mode: entry.mode.clone(),
            size: entry.size,
            latency: numbers(entry)?.latency.context("no latency")?,
        })
    };
    matrix.entries.iter().map(latency).collect()
}

/// One port and two ports.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ports {
    /// Bandwidth of one port, in MiB per second.
    pub single_mib_per_s: f64,
    /// Bandwidth of one process with two ports.
    pub one_process_mib_per_s: f64,
    /// Bandwidth of two processes with one port each.
    pub two_processes_mib_per_s: f64,
    /// One process with two ports, divided by one port.
    pub ratio_one_process: f64,
    /// Two processes, divided by one port.
    pub ratio_two_processes: f64,
}

impl Ports {
    /// Returns the ratios of these bandwidths.
    pub fn new(single: f64, one_process: f64, two_processes: f64) -> Self {
        Self {
            single_mib_per_s: single,
            one_process_mib_per_s: one_process,
            two_processes_mib_per_s: two_processes,
            ratio_one_process: one_process / single,
            ratio_two_processes: two_processes / single,
        }
    }

    /// Returns the smaller ratio, for which there is an aim.
    fn ratio(&self) -> f64 {
        self.ratio_one_process.min(self.ratio_two_processes)
    }

    /// Returns whether both ratios reach the aim.
    pub fn reaches_aim(&self) -> bool {
        self.ratio() >= PORTS_RATIO
    }
}

/// What a path from an accelerator to an accelerator of another node costs, for a byte or a MiB of payload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PathCost {
    /// The path.
    pub name: String,
    /// Bytes of payload.
    pub bytes: u64,
    /// Bytes that the programs copied, for a byte. Over TCP they copy nothing: they send from and receive into the memory.
    pub copied_by_program: f64,
    /// Bytes that the kernel's tracepoints report as copied to programs or queued for a NIC, for a byte: what the network stack
    /// copies, with headers.
    pub copied_by_kernel: f64,
    /// Bytes that crossed a root complex, for a byte: NICs at host memory, and processors at accelerator memory.
    pub root_complex: f64,
    /// Translations of the NICs' memory keys, for a MiB.
    pub translations_per_mib: f64,
    /// Instructions of the client's and the server's threads, in program and kernel, for a byte. Interrupts that arrive while a
    /// thread sleeps are not counted.
    pub instructions: f64,
}

/// The aims.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Ratios {
    /// Accelerator to accelerator by RDMA WRITE, divided by host to host immediately before, on links without a rate: the median of several.
    pub accelerator_to_host: f64,
    /// Accelerator to accelerator by RDMA WRITE, divided by the same through host memory, on links without a rate.
    pub direct_to_staged: f64,
    /// The smaller one of the two ratios of two ports and one.
    pub multi_port: f64,
    /// Instructions of the server's whole process for one more RDMA WRITE of the client.
    pub one_sided_server_instructions: f64,
    /// Instructions of the server's whole process for one more two-sided call of the client.
    pub two_sided_server_instructions: f64,
}

/// The report.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// Whether all aims are met, and what failed.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// The link's rate in MiB per second: writes from host memory to host memory.
    pub link_mib_per_s: f64,
    /// Every pair by every mode.
    pub matrix: Vec<Cell>,
    /// Every pair within one node by WRITE and READ. Their rates are those of an emulator that boots other nodes meanwhile.
    pub within_node: Vec<Cell>,
    /// Every pair by WRITE and READ, one message at a time.
    pub latencies: Vec<MessageLatency>,
    /// Every pair by every mode but UCX, one message at a time.
    pub costs: Vec<MessageCost>,
    /// One port and two ports.
    pub multi_port: Option<Ports>,
    /// Calls, on nodes whose clocks count instructions: a microsecond of processor time is 1000 instructions.
    pub rpc: Vec<Cost>,
    /// The parts of a WRITE.
    pub decomposition: Vec<Decomposition>,
    /// The cost of each path.
    pub formula: Vec<PathCost>,
    /// The aims.
    pub ratios: Ratios,
}

impl Report {
    /// Adds the aims that are missed to the failures.
    pub fn judge(&mut self) {
        let mut missed = Vec::new();
        let between = self.matrix.iter().map(|cell| (cell, true));
        let within = self.within_node.iter().map(|cell| (cell, false));
        for (cell, uses_link) in between.chain(within) {
            let place = if uses_link { "" } else { " within a node" };
            let name = format!("{} to {} by {}{place}", cell.from, cell.to, cell.mode);
            let is_rdma = is_rdma(&cell.mode);
            if is_rdma && uses_link && !cell.has_links_rate() {
                missed.push(format!(
                    "{name}: {:.2} of the link's rate; the aim is {LINK_RATIO}",
                    cell.ratio_to_link
                ));
            }
            let is_ucx = cell.mode == "ucx";
            let is_direct = is_rdma || is_ucx;
            let expected = expected_host_bytes(&cell.from, &cell.to, &cell.mode);
            let host = cell.host_bytes_per_byte;
            let nothing = if is_ucx { NO_HOST_BYTES_BY_UCX } else { NO_HOST_BYTES };
            if is_direct && (host - expected).abs() >= nothing || !is_direct && host < expected - nothing {
                missed.push(format!(
                    "{name}: {host:.6} host bytes for a byte; {expected} are expected (the cause may be a pair that was counted \
                     together with this one)"
                ));
            }
        }
        let between = pairs(self.matrix.iter().map(|cell| [&cell.mode, &cell.from, &cell.to]));
        let within = pairs(self.within_node.iter().map(|cell| [&cell.mode, &cell.from, &cell.to]));
        let latencies = pairs(self.latencies.iter().map(|one| [&one.mode, &one.from, &one.to]));
        let costs = pairs(self.costs.iter().map(|one| [&one.mode, &one.from, &one.to]));
        for (name, modes, found) in [
            ("the matrix", &MODES[..], between),
            ("the matrix within a node", &ONE_SIDED, within),
            ("the latencies", &ONE_SIDED, latencies),
            ("the instructions", &BUT_UCX, costs),
        ] {
            for mode in modes {
                let count = found.get(*mode).map_or(0, BTreeSet::len);
                if count != ALL_PAIRS {
                    missed.push(format!("{name}: {count} pairs by {mode}, not {ALL_PAIRS}"));
                }
            }
        }
        self.ratios.multi_port = self.multi_port.as_ref().map_or(0.0, Ports::ratio);
        let ratios = self.ratios;
        for (name, value, aim) in [
            (
                "accelerator to accelerator, relative to host to host",
                ratios.accelerator_to_host,
                ACCELERATOR_RATIO,
            ),
            (
                "direct, relative to the path through host memory",
                ratios.direct_to_staged,
                STAGED_RATIO,
            ),
            ("two ports, relative to one", ratios.multi_port, PORTS_RATIO),
        ] {
            // Not a number misses the aim, too.
            if value.is_nan() || value < aim {
                missed.push(format!("{name}: {value:.2}; the aim is {aim}"));
            }
        }
        // Now and then, the server's process looks for messages on the connection to the client.
        let [one, two] = [
            ratios.one_sided_server_instructions,
            ratios.two_sided_server_instructions,
        ];
        if one.is_nan() || two.is_nan() || one.abs() > NO_INSTRUCTIONS * two {
            missed.push(format!(
                "{one:.0} instructions of the server for a one-sided call, {two:.0} for a two-sided one; the aim is 0"
            ));
        }
        self.verdict.failures.extend(missed);
    }
}

/// Returns the different pairs of memories of each mode. Each item has the mode and the two memories.
fn pairs<'a>(measured: impl Iterator<Item = [&'a String; 3]>) -> BTreeMap<&'a str, BTreeSet<[&'a str; 2]>> {
    let mut pairs: BTreeMap<&str, BTreeSet<_>> = BTreeMap::new();
    for [mode, from, to] in measured {
        pairs.entry(mode).or_default().insert([from.as_str(), to.as_str()]);
    }
    pairs
}

impl demo::Report for Report {
    fn verdict(&mut self) -> &mut Verdict {
        &mut self.verdict
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const MIB: u64 = 1 << 20;

    fn matrix(pairs: &[(&str, &str, &str)]) -> Matrix {
        let entries: Vec<_> = pairs
            .iter()
            .map(|(from, to, mode)| {
                json!({
                    "from": from, "to": to, "mode": mode, "size": MIB, "mib_per_s": 11.0, "ratio_to_link": 1.0,
                    "latency": {"p50_us": 5.0, "p99_us": 6.0, "p999_us": 7.0, "max_us": 8.0},
                    "cpu_us_client": 1000.0, "cpu_us_server": 48.576, "copied_bytes": MIB, "moved_bytes": 4 * MIB,
                    "verified": true
                })
            })
            .collect();
        serde_json::from_value(json!({
            "memory": ["cpu"], "peer_memory": ["cpu"], "modes": ["write"], "nics": 1, "link": [], "entries": entries
        }))
        .unwrap()
    }

    fn host(connected: u64) -> HostBytes {
        HostBytes {
            connected,
            datagrams: 1 << 30,
        }
    }

    #[test]
    fn host_bytes_are_those_that_nics_counted() {
        // The link's measurement moved 2 MiB, the pair 4 MiB by each mode.
        let measured = matrix(&[("fpga", "accelerator", "write"), ("fpga", "accelerator", "read")]);
        let bytes = |measured, connected, link| -> Vec<f64> {
            let cells = cells(measured, host(connected), link).unwrap();
            cells.iter().map(|cell| cell.host_bytes_per_byte).collect()
        };
        assert_eq!(bytes(&measured, 2 * 2 * MIB, 2 * MIB), [0.0, 0.0]);
        assert_eq!(bytes(&measured, (2 * 2 + 2) * MIB, 2 * MIB), [0.25, 0.25]);
        // The pair that measures the link is not measured again.
        let measured = matrix(&[("cpu", "cpu", "write"), ("cpu", "cpu", "read")]);
        assert_eq!(bytes(&measured, 4 * 4 * MIB, 4 * MIB), [2.0, 2.0]);
        // All share what is beyond the expected bytes.
        let measured = matrix(&[("cpu", "cpu", "write"), ("cpu", "cmb", "write"), ("fpga", "cmb", "ucx")]);
        assert_eq!(bytes(&measured, (8 + 4) * MIB, 0), [2.0, 1.0, 0.0]);
        assert_eq!(bytes(&measured, (8 + 4 + 3) * MIB, 0), [2.25, 1.25, 0.25]);
        // TCP beside writes through host memory.
        let measured = matrix(&[("cpu", "fpga", "tcp"), ("cpu", "fpga", "staged")]);
        assert_eq!(bytes(&measured, (2 * 2 + 8) * MIB, 2 * MIB), [256.0, 2.0]);
        // The link's measurement beside puts of UCX.
        let measured = matrix(&[("accelerator", "accelerator", "ucx")]);
        assert_eq!(bytes(&measured, (2 * 2 + 4) * MIB, 2 * MIB), [1.0]);
    }

    #[test]
    fn a_pair_without_numbers_is_an_error() {
        let mut measured = matrix(&[("cpu", "cpu", "write")]);
        measured.entries[0].measured.as_mut().unwrap().verified = None;
        let error = cells(&measured, host(0), 0).unwrap_err().to_string();
        assert!(error.contains("not verified"), "{error}");
        measured.entries[0].measured = None;
        measured.entries[0].error = Some("no provider".into());
        for error in [
            cells(&measured, host(0), 0).unwrap_err(),
            message_latencies(&measured).unwrap_err(),
            costs(&measured).unwrap_err(),
        ] {
            assert!(error.to_string().contains("no provider"), "{error}");
        }
    }

    #[test]
    fn latencies_are_those_of_every_entry() {
        let found = message_latencies(&matrix(&[("cpu", "cmb", "read"), ("cpu", "cmb", "send")])).unwrap();
        assert_eq!(
            (found.len(), found[0].to.as_str(), found[1].mode.as_str()),
            (2, "cmb", "send")
        );
        assert_eq!((found[0].latency.p50_us, found[0].latency.p999_us), (5.0, 7.0));
        let mut without = matrix(&[("cpu", "cpu", "write")]);
        without.entries[0].measured.as_mut().unwrap().latency = None;
        assert!(
            message_latencies(&without)
                .unwrap_err()
                .to_string()
                .contains("no latency")
        );
    }

    #[test]
    fn a_microsecond_of_the_processor_is_a_thousand_instructions() {
        let found = costs(&matrix(&[("cpu", "cpu", "write")])).unwrap();
        assert_eq!(found[0].instructions_per_byte, 1.0);
    }

    const MEMORIES: [&str; 4] = ["accelerator", "cpu", "cmb", "fpga"];

    /// Returns a matrix of all pairs, and what NICs count for it if all is as expected.
    fn all_pairs(modes: &[&'static str]) -> (Matrix, HostBytes) {
        let mut pairs = Vec::new();
        let mut host = HostBytes::default();
        for mode in modes {
            for from in MEMORIES {
                for to in MEMORIES {
                    pairs.push((from, to, *mode));
                    let bytes = expected_host_bytes(from, to, mode) as u64 * 4 * MIB;
                    if *mode == "tcp" {
                        host.datagrams += bytes;
                    } else {
                        host.connected += bytes;
                    }
                }
            }
        }
        (matrix(&pairs), host)
    }

    fn expected(modes: &[&'static str]) -> Vec<Cell> {
        let (measured, host) = all_pairs(modes);
        cells(&measured, host, 0).unwrap()
    }

    #[test]
    fn a_pair_is_measured_again_until_all_its_modes_have_the_links_rate() {
        let measured = matrix(&[("cpu", "cmb", "write"), ("cpu", "cmb", "read"), ("cpu", "cpu", "read")]);
        let mut cells = cells(&measured, host(0), 0).unwrap();
        assert!(slow_pairs(&cells).is_empty());
        for (cell, ratio) in cells.iter_mut().zip([0.8, 0.95, 1.2]) {
            cell.ratio_to_link = ratio;
        }
        let pair = |from: &str, to: &str| (from.to_owned(), to.to_owned());
        assert_eq!(
            slow_pairs(&cells),
            BTreeSet::from([pair("cpu", "cmb"), pair("cpu", "cpu")])
        );
        let mut again = cells[..2].to_vec();
        (again[0].ratio_to_link, again[1].ratio_to_link) = (0.92, 0.91);
        keep_nearest(&mut cells, again);
        let ratios: Vec<f64> = cells.iter().map(|cell| cell.ratio_to_link).collect();
        assert_eq!(ratios, [0.92, 0.95, 1.2]);
        assert_eq!(slow_pairs(&cells), BTreeSet::from([pair("cpu", "cpu")]));
    }

    #[test]
    fn host_bytes_of_one_pair_among_many_miss_the_aim() {
        let judged = |beyond: u64| {
            let (measured, host) = all_pairs(&["write", "read", "send", "write-imm"]);
            let connected = host.connected + beyond;
            let mut report = good();
            report.matrix.retain(|cell| !is_rdma(&cell.mode));
            report
                .matrix
                .extend(cells(&measured, HostBytes { connected, ..host }, 0).unwrap());
            report.judge();
            report.verdict.failures.len()
        };
        assert_eq!(judged(0), 0);
        // A thousandth of the bytes of one pair by one mode.
        assert_eq!(judged(4 * MIB / 1000), 64);
    }

    fn good() -> Report {
        Report {
            matrix: expected(&MODES),
            within_node: expected(&ONE_SIDED),
            latencies: message_latencies(&all_pairs(&ONE_SIDED).0).unwrap(),
            costs: costs(&all_pairs(&BUT_UCX).0).unwrap(),
            multi_port: Some(Ports::new(10.0, 20.0, 19.0)),
            ratios: Ratios {
                accelerator_to_host: 0.95,
                direct_to_staged: 6.0,
                one_sided_server_instructions: 20.0,
                two_sided_server_instructions: 20_000.0,
                ..Ratios::default()
            },
            ..Report::default()
        }
    }

    #[test]
    fn each_aim_can_be_missed() {
        let words = |change: &dyn Fn(&mut Report)| {
            let mut report = good();
            change(&mut report);
            report.judge();
            report.verdict.failures.join("; ")
        };
        assert_eq!(words(&|_| {}), "");
        assert!(words(&|report| report.matrix[0].ratio_to_link = 0.8).contains("0.80 of the link's rate"));
        assert!(words(&|report| report.matrix[0].ratio_to_link = 1.2).contains("1.20 of the link's rate"));
        assert!(
            words(&|report| report.matrix[0].host_bytes_per_byte = 0.01)
                .contains("0.010000 host bytes for a byte; 0 are expected")
        );
        assert!(words(&|report| drop(report.matrix.pop())).contains("the matrix: 15 pairs by ucx, not 16"));
        assert!(words(&|report| report.within_node.clear()).contains("within a node: 0 pairs by write, not 16"));
        assert!(words(&|report| report.latencies.truncate(16)).contains("the latencies: 0 pairs by read, not 16"));
        assert!(words(&|report| drop(report.costs.pop())).contains("the instructions: 15 pairs by staged, not 16"));
        assert_eq!(words(&|report| report.within_node[0].ratio_to_link = 0.8), "");
        assert!(
            words(&|report| report.within_node[0].host_bytes_per_byte = 0.01).contains("within a node: 0.010000 host")
        );
        assert!(words(&|report| report.multi_port = None).contains("two ports"));
        assert!(
            words(&|report| report.multi_port = Some(Ports::new(10.0, 20.0, 17.0))).contains("1.70; the aim is 1.8")
        );
        assert!(words(&|report| report.ratios.accelerator_to_host = f64::NAN).contains("NaN; the aim is 0.9"));
        assert!(words(&|report| report.ratios.direct_to_staged = 4.0).contains("4.00; the aim is 5"));
        let instructions = |one, two| {
            words(&|report| {
                report.ratios.one_sided_server_instructions = one;
                report.ratios.two_sided_server_instructions = two;
            })
        };
        assert!(instructions(201.0, 20_000.0).contains("201 instructions of the server"));
        assert!(instructions(f64::NAN, 20_000.0).contains("NaN instructions"));
        assert!(instructions(0.0, f64::NAN).contains("NaN for a two-sided"));
        let through_host = |host, mode: &str| {
            words(&|report| {
                report.matrix[0].mode = mode.into();
                report.matrix[0].host_bytes_per_byte = host;
                report.matrix[0].ratio_to_link = 0.1;
            })
        };
        let missing = "the matrix: 15 pairs by write, not 16";
        assert_eq!(through_host(2.1, "tcp"), missing);
        assert_eq!(through_host(0.0006, "ucx"), missing);
        assert!(through_host(0.0007, "ucx").contains("0.000700 host bytes for a byte; 0 are expected"));
        assert!(through_host(1.9, "staged").contains("1.900000 host bytes for a byte; 2 are expected"));
    }
}
