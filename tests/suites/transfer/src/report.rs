// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report of the demo: the matrix, several ports, calls, the parts of a WRITE, the cost of each path, and the aims.

use anyhow::{Context, Result, ensure};
use p2pmem_perf::matrix::{Entry, Matrix};
use p2pmem_perf::rpc::Cost;
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
/// From this number on, host bytes for a byte of payload are not 0: NICs also move the words that count handled messages.
const NO_HOST_BYTES: f64 = 0.001;
/// As [`NO_HOST_BYTES`], of UCX, which also connects by messages in host memory.
const NO_HOST_BYTES_BY_UCX: f64 = 0.01;
/// The part of a two-sided call's instructions up to which those of a one-sided call are 0.
const NO_INSTRUCTIONS: f64 = 0.01;
/// The least host bytes for a byte of payload that is staged or sent over TCP.
const STAGED_HOST_BYTES: f64 = 2.0;
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
    /// Bandwidth, divided by the link's, which was measured immediately before.
    pub ratio_to_link: f64,
    /// Bytes of host memory that NICs accessed, for a byte of payload: of all modes that were measured together, see [`Group`].
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

/// Returns the bytes of host memory that a message of these memories moves at its two ends, for a byte.
fn ends_in_host(from: &str, to: &str) -> f64 {
    f64::from(u8::from(from == HOST)) + f64::from(u8::from(to == HOST))
}

/// Returns the cells of a measured matrix. `host` is what the NICs moved meanwhile. `link_bytes` are the bytes that measured the
/// link, from host memory to host memory: before the pairs, unless the matrix has this pair.
///
/// # Errors
///
/// A pair was not measured or not verified.
pub fn cells(matrix: &Matrix, host: HostBytes, link_bytes: u64) -> Result<Vec<Cell>> {
    let mut measured = Vec::new();
    for entry in &matrix.entries {
        let numbers = entry.measured.as_ref().with_context(|| {
            let why = entry.error.as_deref().unwrap_or("no reason");
            format!("{} to {} by {}: not measured: {why}", entry.from, entry.to, entry.mode)
        })?;
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
    let per_byte = |over_tcp: bool| {
        let counted = if over_tcp {
            host.datagrams as f64
        } else {
            host.connected as f64 - link as f64
        };
        let of_mode = measured.iter().filter(|(entry, _)| (entry.mode == "tcp") == over_tcp);
        let moved: u64 = of_mode.map(|(_, numbers)| numbers.moved_bytes).sum();
        counted / moved.max(1) as f64
    };
    let (connected, datagrams) = (per_byte(false), per_byte(true));
    Ok(measured
        .into_iter()
        .map(|(entry, numbers)| Cell {
            from: entry.from.clone(),
            to: entry.to.clone(),
            mode: entry.mode.clone(),
            size: entry.size,
            mib_per_s: numbers.mib_per_s,
            ratio_to_link: numbers.ratio_to_link,
            host_bytes_per_byte: if entry.mode == "tcp" { datagrams } else { connected },
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

    /// Returns whether the rate is nearer to the link's than that of another measurement.
    pub fn is_nearer_to_link(&self, other: &Self) -> bool {
        (self.ratio_to_link - 1.0).abs() < (other.ratio_to_link - 1.0).abs()
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
    /// Median latency in microseconds of the client's clock, which counts instructions while the processor works, and follows the
    /// host's clock while it sleeps.
    pub p50_us: Option<f64>,
    /// Longest latency.
    pub max_us: Option<f64>,
    /// Instructions of the client's and the server's threads for a byte of payload, in program and kernel. Interrupts that arrive
    /// while the thread sleeps are not counted.
    pub instructions_per_byte: f64,
}

/// Returns the costs of a matrix whose nodes' clocks count instructions.
pub fn costs(matrix: &Matrix) -> Vec<MessageCost> {
    let entries = matrix.entries.iter();
    let measured = entries.filter_map(|entry| Some((entry, entry.measured.as_ref()?)));
    measured
        .map(|(entry, numbers)| MessageCost {
            from: entry.from.clone(),
            to: entry.to.clone(),
            mode: entry.mode.clone(),
            size: entry.size,
            p50_us: numbers.latency.map(|latency| latency.p50_us),
            max_us: numbers.latency.map(|latency| latency.max_us),
            // An instruction takes a nanosecond of these nodes' time.
            instructions_per_byte: (numbers.cpu_us_client + numbers.cpu_us_server) * 1e3 / entry.size as f64,
        })
        .collect()
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
    /// Accelerator to accelerator by RDMA WRITE, divided by host to host, on links without a rate.
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

impl Ratios {
    /// Returns whether accelerators reach the aims on links without a rate.
    pub fn reach_aims_of_accelerators(&self) -> bool {
        self.accelerator_to_host >= ACCELERATOR_RATIO && self.direct_to_staged >= STAGED_RATIO
    }
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
    /// Every pair by every mode, one message at a time.
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
        for cell in &self.matrix {
            let name = format!("{} to {} by {}", cell.from, cell.to, cell.mode);
            let is_rdma = is_rdma(&cell.mode);
            if is_rdma && !cell.has_links_rate() {
                missed.push(format!(
                    "{name}: {:.2} of the link's rate; the aim is {LINK_RATIO}",
                    cell.ratio_to_link
                ));
            }
            let is_ucx = cell.mode == "ucx";
            let is_direct = is_rdma || is_ucx;
            let expected = if is_direct {
                ends_in_host(&cell.from, &cell.to)
            } else {
                STAGED_HOST_BYTES
            };
            let host = cell.host_bytes_per_byte;
            let nothing = if is_ucx { NO_HOST_BYTES_BY_UCX } else { NO_HOST_BYTES };
            if is_direct && (host - expected).abs() >= nothing || !is_direct && host < expected - nothing {
                missed.push(format!(
                    "{name}: {host:.4} host bytes for a byte; {expected} are expected"
                ));
            }
        }
        if self.matrix.is_empty() {
            missed.push("no pair was measured".to_owned());
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
        let error = cells(&measured, host(0), 0).unwrap_err().to_string();
        assert!(error.contains("no provider"), "{error}");
    }

    #[test]
    fn a_microsecond_of_the_processor_is_a_thousand_instructions() {
        let found = costs(&matrix(&[("cpu", "cpu", "write")]));
        assert_eq!(found[0].instructions_per_byte, 1.0);
        assert_eq!((found[0].p50_us, found[0].max_us), (Some(5.0), Some(8.0)));
    }

    fn good() -> Report {
        let measured = matrix(&[("accelerator", "accelerator", "write")]);
        Report {
            matrix: cells(&measured, host(0), 0).unwrap(),
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
                .contains("0.0100 host bytes for a byte; 0 are expected")
        );
        assert!(words(&|report| report.matrix.clear()).contains("no pair"));
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
        assert_eq!(through_host(2.1, "tcp"), "");
        assert_eq!(through_host(0.009, "ucx"), "");
        assert!(through_host(0.02, "ucx").contains("0.0200 host bytes for a byte; 0 are expected"));
        assert!(through_host(1.9, "staged").contains("1.9000 host bytes for a byte; 2 are expected"));
    }
}
