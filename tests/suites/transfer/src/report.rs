// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report of the demo: the matrix, several ports, calls, the parts of a WRITE, the cost of each path, and the aims.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use p2pmem_perf::matrix::{Entry, Matrix};
use p2pmem_perf::rpc::{Call, Cost};
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
/// From this number on, host bytes for a byte of payload are not 0.
const NO_HOST_BYTES: f64 = 0.001;
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
    /// Bandwidth, divided by the link's.
    pub ratio_to_link: f64,
    /// Median latency of a single message, in microseconds; `None` where it was not measured.
    pub p50_us: Option<f64>,
    /// 99 % of the single messages took this long or less.
    pub p99_us: Option<f64>,
    /// 99.9 % of the single messages took this long or less.
    pub p999_us: Option<f64>,
    /// Bytes of host memory that NICs accessed, for a byte of payload.
    pub host_bytes_per_byte: f64,
    /// Bytes that processors copied, for a byte of payload.
    pub copied_bytes_per_byte: f64,
    /// Instructions of the client's and the server's program and kernel for a byte of payload; `None` where not measured.
    pub instructions_per_byte: Option<f64>,
    /// Whether every byte arrived.
    pub verified: bool,
}

/// Payload of NICs, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct HostBytes {
    /// Host memory that connected queue pairs read and wrote, on all nodes.
    pub connected: u64,
    /// Host memory that datagrams read and wrote: IP over InfiniBand.
    pub datagrams: u64,
}

/// Returns the bytes of host memory that a message of these memories moves at the two ends, for a byte.
fn ends_in_host(from: &str, to: &str) -> f64 {
    f64::from(u8::from(from == HOST)) + f64::from(u8::from(to == HOST))
}

/// Returns the cells of a measured matrix. `host` is what the NICs moved meanwhile. `link_bytes` are the bytes that measured the
/// link, from host memory to host memory: before the pairs, unless the matrix has this pair.
///
/// NICs count bytes of the whole measurement. What the ends of the pairs in host memory explain is each pair's own; the rest is
/// spread over all pairs.
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
    // Staged messages are in host memory at both ends, wherever they begin and end. Those over TCP are in the kernel's memory.
    let explained = |from: &str, to: &str, mode: &str| match mode {
        "staged" | "tcp" => 2.0,
        _ => ends_in_host(from, to),
    };
    let all: u64 = measured.iter().map(|(_, numbers)| numbers.moved_bytes).sum();
    let expected: f64 = measured
        .iter()
        .map(|(entry, numbers)| explained(&entry.from, &entry.to, &entry.mode) * numbers.moved_bytes as f64)
        .sum();
    let is_link = |cell: &Entry| cell.from == HOST && cell.to == HOST && cell.mode == "write";
    let link_bytes = if matrix.entries.iter().any(is_link) { 0 } else { link_bytes };
    let over_tcp = measured.iter().any(|(entry, _)| entry.mode == "tcp");
    let counted = host.connected + if over_tcp { host.datagrams } else { 0 };
    let rest = (counted as f64 - 2.0 * link_bytes as f64 - expected) / all.max(1) as f64;
    Ok(measured
        .into_iter()
        .map(|(entry, numbers)| Cell {
            from: entry.from.clone(),
            to: entry.to.clone(),
            mode: entry.mode.clone(),
            size: entry.size,
            mib_per_s: numbers.mib_per_s,
            ratio_to_link: numbers.ratio_to_link,
            p50_us: None,
            p99_us: None,
            p999_us: None,
            host_bytes_per_byte: explained(&entry.from, &entry.to, &entry.mode) + rest,
            copied_bytes_per_byte: numbers.copied_bytes as f64 / numbers.moved_bytes as f64,
            instructions_per_byte: None,
            verified: true,
        })
        .collect())
}

/// Adds what was measured on nodes whose clocks count instructions, one message at a time.
pub fn add_instructions(cells: &mut [Cell], matrix: &Matrix) {
    for cell in cells {
        let same = |mode: &str| mode == cell.mode;
        let mut entries = matrix.entries.iter();
        let entry = entries.find(|entry| entry.from == cell.from && entry.to == cell.to && same(&entry.mode));
        let Some((entry, measured)) = entry.and_then(|entry| Some((entry, entry.measured.as_ref()?))) else {
            continue;
        };
        // An instruction takes a nanosecond of these nodes' time.
        let instructions = (measured.cpu_us_client + measured.cpu_us_server) * 1e3;
        cell.instructions_per_byte = Some(instructions / entry.size as f64);
        cell.p50_us = measured.latency.map(|latency| latency.p50_us);
        cell.p99_us = measured.latency.map(|latency| latency.p99_us);
        cell.p999_us = measured.latency.map(|latency| latency.p999_us);
    }
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
}

/// What a path from an accelerator to an accelerator of another node costs, for a byte or a MiB of payload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PathCost {
    /// The path.
    pub name: String,
    /// Bytes of payload.
    pub bytes: u64,
    /// Bytes that the programs' processors copied, for a byte.
    pub copied_by_program: f64,
    /// Bytes that the kernel's tracepoints report as copied or queued by the network stack, for a byte.
    pub copied_by_kernel: f64,
    /// Bytes that crossed a root complex, for a byte: NICs at host memory, and processors at accelerator memory.
    pub root_complex: f64,
    /// Translations of the NICs' memory keys, for a MiB.
    pub translations_per_mib: f64,
    /// Instructions of the client's and the server's program and kernel, for a byte.
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
    /// Instructions of the server for a one-sided call.
    pub one_sided_server_instructions: f64,
}

/// The report.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// Whether all aims are met and nothing failed.
    pub passed: bool,
    /// What failed.
    pub failures: Vec<String>,
    /// The kernel of the guests.
    pub kernel_release: String,
    /// The link's rate in MiB per second: writes from host memory to host memory.
    pub link_mib_per_s: f64,
    /// Every pair by every mode.
    pub matrix: Vec<Cell>,
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
    /// Seconds of the whole run.
    pub seconds: f64,
}

impl Report {
    /// Adds the aims that are missed to the failures.
    pub fn judge(&mut self) {
        let mut missed = Vec::new();
        for cell in &self.matrix {
            let name = format!("{} to {} by {}", cell.from, cell.to, cell.mode);
            let is_rdma = cell.mode != "tcp" && cell.mode != "staged";
            if is_rdma && !(LINK_RATIO..=MOST_LINK_RATIO).contains(&cell.ratio_to_link) {
                missed.push(format!(
                    "{name}: {:.2} of the link's rate; the aim is {LINK_RATIO}",
                    cell.ratio_to_link
                ));
            }
            let rest = cell.host_bytes_per_byte - ends_in_host(&cell.from, &cell.to);
            if is_rdma && rest.abs() >= NO_HOST_BYTES {
                missed.push(format!(
                    "{name}: {rest:.4} host bytes for a byte beside those of its ends; the aim is 0"
                ));
            }
        }
        if self.matrix.is_empty() {
            missed.push("no pair was measured".to_owned());
        }
        self.ratios.multi_port = self
            .multi_port
            .as_ref()
            .map_or(0.0, |ports| ports.ratio_one_process.min(ports.ratio_two_processes));
        let one_sided = self.rpc.iter().filter(|cost| cost.name != Call::TwoSided);
        self.ratios.one_sided_server_instructions = one_sided
            .map(|cost| cost.cpu_us_server * 1e3)
            .fold(f64::NAN, f64::max);
        let ratios = self.ratios;
        for (name, value, aim) in [
            ("accelerator to accelerator, relative to host to host", ratios.accelerator_to_host, ACCELERATOR_RATIO),
            ("direct, relative to the path through host memory", ratios.direct_to_staged, STAGED_RATIO),
            ("two ports, relative to one", ratios.multi_port, PORTS_RATIO),
        ] {
            // Not a number misses the aim, too.
            if value.is_nan() || value < aim {
                missed.push(format!("{name}: {value:.2}; the aim is {aim}"));
            }
        }
        if ratios.one_sided_server_instructions != 0.0 {
            missed.push(format!(
                "{} instructions of the server for a one-sided call; the aim is 0",
                ratios.one_sided_server_instructions
            ));
        }
        self.failures.extend(missed);
    }

    /// Writes the report as JSON.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        fs::write(path, text + "\n").with_context(|| path.display().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use p2pmem_perf::waiter::How;
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
    fn host_bytes_are_those_of_the_ends_and_a_rest() {
        let measured = matrix(&[("cpu", "cpu", "send"), ("cpu", "cmb", "read"), ("fpga", "accelerator", "write")]);
        // The link's measurement moved 2 MiB, the pairs 4 MiB each.
        let exact = cells(&measured, host((2 * 2 + 2 * 4 + 4) * MIB), 2 * MIB).unwrap();
        let bytes: Vec<f64> = exact.iter().map(|cell| cell.host_bytes_per_byte).collect();
        assert_eq!(bytes, [2.0, 1.0, 0.0]);
        assert_eq!(exact[0].copied_bytes_per_byte, 0.25);
        let more = cells(&measured, host((2 * 2 + 2 * 4 + 4 + 3) * MIB), 2 * MIB).unwrap();
        assert_eq!(more[2].host_bytes_per_byte, 0.25);
        // The pair that measures the link is not measured again.
        let measured = matrix(&[("cpu", "cpu", "write"), ("fpga", "accelerator", "write")]);
        let with_link = cells(&measured, host(2 * 4 * MIB), 4 * MIB).unwrap();
        assert_eq!(with_link[1].host_bytes_per_byte, 0.0);
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
        let measured = matrix(&[("cpu", "cpu", "write")]);
        let mut all = cells(&measured, host(8 * MIB), 0).unwrap();
        add_instructions(&mut all, &measured);
        assert_eq!(all[0].instructions_per_byte, Some(1.0));
        assert_eq!(all[0].p99_us, Some(6.0));
    }

    fn cost(name: Call, cpu_us_server: f64) -> Cost {
        Cost {
            name,
            bytes: 8,
            waiting: How::Events,
            batch: 1,
            calls: 100,
            calls_per_s: 1000.0,
            p50_us: 1.0,
            p99_us: 2.0,
            p999_us: 3.0,
            cpu_us_client: 1.0,
            cpu_us_server,
            copied_server: 0.0,
        }
    }

    fn good() -> Report {
        let measured = matrix(&[("accelerator", "accelerator", "write")]);
        Report {
            matrix: cells(&measured, host(0), 0).unwrap(),
            multi_port: Some(Ports::new(10.0, 20.0, 19.0)),
            rpc: vec![cost(Call::TwoSided, 5.0), cost(Call::Write, 0.0)],
            ratios: Ratios {
                accelerator_to_host: 0.95,
                direct_to_staged: 6.0,
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
            report.failures.join("; ")
        };
        assert_eq!(words(&|_| {}), "");
        assert!(words(&|report| report.matrix[0].ratio_to_link = 0.8).contains("0.80 of the link's rate"));
        assert!(words(&|report| report.matrix[0].ratio_to_link = 1.2).contains("1.20 of the link's rate"));
        assert!(words(&|report| report.matrix[0].host_bytes_per_byte = 0.01).contains("0.0100 host bytes"));
        assert!(words(&|report| report.matrix.clear()).contains("no pair"));
        assert!(words(&|report| report.multi_port = None).contains("two ports"));
        assert!(words(&|report| report.multi_port = Some(Ports::new(10.0, 20.0, 17.0))).contains("1.70; the aim is 1.8"));
        assert!(words(&|report| report.ratios.accelerator_to_host = f64::NAN).contains("NaN; the aim is 0.9"));
        assert!(words(&|report| report.ratios.direct_to_staged = 4.0).contains("4.00; the aim is 5"));
        assert!(words(&|report| report.rpc[1].cpu_us_server = 0.001).contains("1 instructions of the server"));
        assert!(words(&|report| report.rpc.clear()).contains("NaN instructions of the server"));
    }
}
