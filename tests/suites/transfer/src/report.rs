// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report of the demo: the matrix, several ports, calls, the parts of a WRITE, and the cost of each path. [`crate::aims`] checks it.

use anyhow::{Context, Result, ensure};
use p2pmem_perf::matrix::{Entry, Matrix, Measured};
use p2pmem_perf::report::SizeResult;
use p2pmem_perf::rpc::{Call, Cost};
use p2pmem_perf::stats::Latency;
use p2pmem_perf::waiter::How;
use p2pmem_vm::demo::{self, Verdict};
use serde::Serialize;

use crate::decomposition::{Decomposition, median};

/// Bytes of a MiB.
const MIB: f64 = (1 << 20) as f64;

/// What NICs did while one pair was measured, in bytes of all nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NicBytes {
    /// Host memory that connected queue pairs read and wrote.
    pub connected: u64,
    /// Host memory that datagrams read and wrote: IP over InfiniBand.
    pub datagrams: u64,
    /// Payload of connected queue pairs that crossed a root complex, as the bridges count it.
    pub connected_root_complex: u64,
    /// The part of `datagrams` that crossed a root complex.
    pub datagrams_root_complex: u64,
    /// Payload of connected queue pairs at memory whose place the bridges do not know: that of a drive.
    pub unknown: u64,
}

impl NicBytes {
    /// Returns the bytes of host memory. The kernel sends datagrams by itself, so those of RDMA are not in the sum.
    fn host(&self, mode: &str) -> u64 {
        self.connected + if is_rdma(mode) { 0 } else { self.datagrams }
    }

    /// Returns the bytes across a root complex, see [`NicBytes::host`].
    fn root_complex(&self, mode: &str) -> u64 {
        self.connected_root_complex + if is_rdma(mode) { 0 } else { self.datagrams_root_complex }
    }
}

/// Returns whether a mode is RDMA between the two memories.
pub fn is_rdma(mode: &str) -> bool {
    !["staged", "tcp", "ucx"].contains(&mode)
}

/// Returns the bytes that processors copied, if p2pmem-perf counts them: it counts the bytes of its own copies. Over TCP, it counts
/// the bytes of its calls to sockets instead, and it does not see what UCX copies.
fn copies(mode: &str, counted: u64) -> Option<u64> {
    (!["tcp", "ucx"].contains(&mode)).then_some(counted)
}

/// A pair of memories, and how bytes move between them. The pair is measured alone.
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
    /// How often the pair was measured. The rate is the median of the tries, and the bytes are those of the try with most.
    pub tries: usize,
    /// Bandwidth in MiB per second.
    pub mib_per_s: f64,
    /// Bandwidth, divided by the link's. `None` within a node, where nothing moves over the link.
    pub ratio_to_link: Option<f64>,
    /// Bytes of host memory that NICs accessed, for a byte of payload.
    pub host_bytes_per_byte: f64,
    /// Bytes of NICs that crossed a root complex, for a byte of payload.
    pub root_complex_bytes_per_byte: f64,
    /// Bytes of NICs at memory whose place the bridges do not know, for a byte of payload: the memory of a drive.
    pub unknown_bytes_per_byte: f64,
    /// Bytes that processors copied, for a byte of payload. `None` for modes whose copies p2pmem-perf does not count.
    pub copied_bytes_per_byte: Option<f64>,
    /// Whether every byte was compared and is correct, in each try.
    pub verified: bool,
}

/// Returns the numbers of a pair.
fn numbers(entry: &Entry) -> Result<&Measured> {
    entry.measured.as_ref().with_context(|| {
        let why = entry.error.as_deref().unwrap_or("no reason");
        format!("{} to {} by {}: not measured: {why}", entry.from, entry.to, entry.mode)
    })
}

impl Cell {
    /// Returns the cell of a pair whose messages have the result `result`, while the NICs moved `nics`. `link` is the link's rate in MiB
    /// per second, if messages use the link.
    ///
    /// # Errors
    ///
    /// No byte moved.
    pub fn new(pair: [&str; 2], mode: &str, result: &SizeResult, nics: &NicBytes, link: Option<f64>) -> Result<Self> {
        let [from, to] = pair.map(str::to_owned);
        let moved: u64 = result
            .nics
            .iter()
            .map(|nic| nic.speed.bytes * nic.speed.iterations)
            .sum();
        let copied = result
            .nics
            .iter()
            .map(|nic| nic.copied_client + nic.copied_server)
            .sum();
        ensure!(moved > 0, "{from} to {to} by {mode}: no byte moved");
        let per_byte = |bytes: u64| bytes as f64 / moved as f64;
        Ok(Self {
            from,
            to,
            mode: mode.to_owned(),
            size: result.speed.bytes,
            tries: 1,
            mib_per_s: result.speed.average_mib_per_s,
            ratio_to_link: link.map(|link| result.speed.average_mib_per_s / link),
            host_bytes_per_byte: per_byte(nics.host(mode)),
            root_complex_bytes_per_byte: per_byte(nics.root_complex(mode)),
            unknown_bytes_per_byte: per_byte(nics.unknown),
            copied_bytes_per_byte: copies(mode, copied).map(per_byte),
            verified: result.verified == Some(true),
        })
    }

    /// Returns the cell of several tries of a pair: the try with the median rate, with the most bytes of all.
    ///
    /// # Errors
    ///
    /// There is no try.
    pub fn of_tries(mut tries: Vec<Self>) -> Result<Self> {
        tries.sort_by(|one, other| one.mib_per_s.total_cmp(&other.mib_per_s));
        let most = |value: fn(&Self) -> f64| tries.iter().map(value).fold(0.0, f64::max);
        let middle = tries.get(tries.len() / 2).context("no try")?;
        Ok(Self {
            tries: tries.len(),
            host_bytes_per_byte: most(|cell| cell.host_bytes_per_byte),
            root_complex_bytes_per_byte: most(|cell| cell.root_complex_bytes_per_byte),
            unknown_bytes_per_byte: most(|cell| cell.unknown_bytes_per_byte),
            verified: tries.iter().all(|cell| cell.verified),
            ..middle.clone()
        })
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
    /// Instructions of the client's thread for a byte of payload, in program and kernel. Interrupts that arrive while the thread sleeps are
    /// not counted.
    pub client_instructions_per_byte: f64,
    /// The same of the server's thread. `None` if no thread of the server takes part.
    pub server_instructions_per_byte: Option<f64>,
}

impl MessageCost {
    /// Returns the instructions of both threads.
    pub fn instructions_per_byte(&self) -> f64 {
        self.client_instructions_per_byte + self.server_instructions_per_byte.unwrap_or(0.0)
    }
}

/// Returns the costs of a matrix whose nodes' clocks count instructions.
///
/// # Errors
///
/// A pair was not measured.
pub fn costs(matrix: &Matrix) -> Result<Vec<MessageCost>> {
    let cost = |entry: &Entry| {
        let numbers = numbers(entry)?;
        // An instruction takes a nanosecond of these nodes' time.
        let per_byte = |us: f64| us * 1e3 / entry.size as f64;
        Ok(MessageCost {
            from: entry.from.clone(),
            to: entry.to.clone(),
            mode: entry.mode.clone(),
            size: entry.size,
            client_instructions_per_byte: per_byte(numbers.cpu_us_client),
            server_instructions_per_byte: numbers.cpu_us_server.map(per_byte),
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

/// The cost of a call, on nodes whose clocks count instructions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CallCost {
    /// The call.
    pub name: Call,
    /// Bytes of payload.
    pub bytes: u64,
    /// How client and server waited.
    pub waiting: How,
    /// Number of requests with one doorbell.
    pub batch: u32,
    /// Half of the calls took this long or less, in microseconds. In a batch, this includes the wait for those before.
    pub p50_us: f64,
    /// 99 % of the calls took this long or less.
    pub p99_us: f64,
    /// 99.9 % of the calls took this long or less.
    pub p999_us: f64,
    /// Processor time of the client for a call, in microseconds: 1000 instructions each.
    pub cpu_us_client: f64,
    /// Processor time of the server's thread for a call. Absent for a one-sided call: no thread of the server takes part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_us_server: Option<f64>,
    /// Processor time of the server's whole process for a call: also that of the connection to the client.
    pub process_us_server: f64,
}

impl From<&Cost> for CallCost {
    fn from(cost: &Cost) -> Self {
        Self {
            name: cost.name,
            bytes: cost.bytes,
            waiting: cost.waiting,
            batch: cost.batch,
            p50_us: cost.p50_us,
            p99_us: cost.p99_us,
            p999_us: cost.p999_us,
            cpu_us_client: cost.cpu_us_client,
            cpu_us_server: cost.cpu_us_server,
            process_us_server: cost.process_us_server,
        }
    }
}

/// One measurement of one port and of two, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PortsRound {
    /// Bandwidth of one port, in MiB per second.
    pub single_mib_per_s: f64,
    /// Bandwidth of one process with two ports.
    pub one_process_mib_per_s: f64,
    /// Bandwidth of two processes with one port each.
    pub two_processes_mib_per_s: f64,
}

/// One port and two ports: medians of several rounds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ports {
    /// The rounds.
    pub rounds: Vec<PortsRound>,
    /// Median bandwidth of one port, in MiB per second.
    pub single_mib_per_s: f64,
    /// Median bandwidth of one process with two ports.
    pub one_process_mib_per_s: f64,
    /// Median bandwidth of two processes with one port each.
    pub two_processes_mib_per_s: f64,
    /// Median of the rounds' ratios of one process with two ports to one port.
    pub ratio_one_process: f64,
    /// Median of the rounds' ratios of two processes to one port.
    pub ratio_two_processes: f64,
}

impl Ports {
    /// Returns the medians of these rounds.
    pub fn new(rounds: Vec<PortsRound>) -> Self {
        let middle = |value: fn(&PortsRound) -> f64| median(rounds.iter().map(value).collect());
        Self {
            single_mib_per_s: middle(|round| round.single_mib_per_s),
            one_process_mib_per_s: middle(|round| round.one_process_mib_per_s),
            two_processes_mib_per_s: middle(|round| round.two_processes_mib_per_s),
            ratio_one_process: middle(|round| round.one_process_mib_per_s / round.single_mib_per_s),
            ratio_two_processes: middle(|round| round.two_processes_mib_per_s / round.single_mib_per_s),
            rounds,
        }
    }
}

/// Rates from accelerator to accelerator and from host to host by RDMA WRITE, on links without a rate.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AcceleratorRate {
    /// Bytes of a message.
    pub size: u64,
    /// Median bandwidth from host to host, in MiB per second.
    pub host_mib_per_s: f64,
    /// Median bandwidth from accelerator to accelerator.
    pub accelerator_mib_per_s: f64,
    /// Accelerator to accelerator, divided by host to host immediately before: one ratio for each round.
    pub ratios: Vec<f64>,
    /// Median of the ratios.
    pub ratio: f64,
    /// Bytes of host memory that NICs accessed for a byte from accelerator to accelerator, in all rounds.
    pub host_bytes_per_byte: f64,
}

/// One measurement of accelerators relative to hosts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AcceleratorRound {
    /// Bandwidth from host to host, in MiB per second.
    pub host_mib_per_s: f64,
    /// Bandwidth from accelerator to accelerator.
    pub accelerator_mib_per_s: f64,
    /// Bytes from accelerator to accelerator.
    pub bytes: u64,
    /// Bytes of host memory that NICs accessed meanwhile.
    pub host_bytes: u64,
}

impl AcceleratorRate {
    /// Returns the medians of rounds with messages of `size` bytes.
    pub fn new(size: u64, rounds: &[AcceleratorRound]) -> Self {
        let each = |value: fn(&AcceleratorRound) -> f64| -> Vec<f64> { rounds.iter().map(value).collect() };
        let sum = |value: fn(&AcceleratorRound) -> u64| rounds.iter().map(value).sum::<u64>() as f64;
        let ratios = each(|round| round.accelerator_mib_per_s / round.host_mib_per_s);
        Self {
            size,
            host_mib_per_s: median(each(|round| round.host_mib_per_s)),
            accelerator_mib_per_s: median(each(|round| round.accelerator_mib_per_s)),
            ratio: median(ratios.clone()),
            ratios,
            host_bytes_per_byte: sum(|round| round.host_bytes) / sum(|round| round.bytes),
        }
    }
}

/// What a path from an accelerator to an accelerator of another node costs, for a byte or a MiB of payload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PathCost {
    /// The path.
    pub name: String,
    /// The mode, as in [`Cell`].
    pub mode: String,
    /// Bytes that the programs copied, for a byte. `None` over TCP: the programs send from and receive into the memory.
    pub copied_by_program: Option<f64>,
    /// Bytes that the kernel's tracepoints report as copied to programs or queued for a NIC, for a byte: what the network stack
    /// copies, with headers.
    pub copied_by_kernel: f64,
    /// Bytes that crossed a root complex, for a byte: those of NICs and of processors.
    pub root_complex: f64,
    /// Bytes of NICs that crossed a root complex, for a byte, as the bridges count them.
    pub root_complex_by_nics: f64,
    /// Bytes that processors read from and wrote to the accelerators' memory, for a byte: the bytes of the programs' copies, or over TCP of
    /// their calls to sockets. A root complex is between a processor and every accelerator.
    pub root_complex_by_processors: f64,
    /// Bytes of NICs at memory whose place the bridges do not know, for a byte.
    pub unknown: f64,
    /// Translations of the NICs' memory keys, for a MiB.
    pub translations_per_mib: f64,
    /// Instructions of the client's thread, in program and kernel, for a byte. Interrupts that arrive while the thread sleeps are not counted.
    pub client_instructions: f64,
    /// The same of the server's thread. `None` if no thread of the server takes part.
    pub server_instructions: Option<f64>,
}

/// What was counted while a path was measured.
#[derive(Debug, Clone, Copy)]
pub struct PathCounts {
    /// Bytes of the NICs.
    pub nics: NicBytes,
    /// Translations of the NICs' memory keys.
    pub translations: u64,
    /// Bytes of the kernel's tracepoints, in a run of their own.
    pub by_kernel: u64,
}

impl PathCost {
    /// Returns the costs of a path from a run on one NIC.
    ///
    /// # Errors
    ///
    /// The run has no NIC, or not every byte arrived.
    pub fn new(name: &str, mode: &str, result: &SizeResult, counts: &PathCounts) -> Result<Self> {
        let nic = result.nics.first().context("no NIC")?;
        ensure!(result.verified == Some(true), "{name}: not every byte arrived");
        let messages = result.speed.iterations as f64;
        let bytes = (result.speed.bytes * result.speed.iterations) as f64;
        let copied = nic.copied_client + nic.copied_server;
        let by_nics = counts.nics.root_complex(mode);
        // An instruction takes a nanosecond of these nodes' time.
        let instructions = |us: f64| us * 1e3 * messages / bytes;
        Ok(Self {
            name: name.to_owned(),
            mode: mode.to_owned(),
            copied_by_program: copies(mode, copied).map(|copied| copied as f64 / bytes),
            copied_by_kernel: counts.by_kernel as f64 / bytes,
            root_complex: (by_nics + copied) as f64 / bytes,
            root_complex_by_nics: by_nics as f64 / bytes,
            root_complex_by_processors: copied as f64 / bytes,
            unknown: counts.nics.unknown as f64 / bytes,
            translations_per_mib: counts.translations as f64 / (bytes / MIB),
            client_instructions: instructions(nic.cpu_us_client),
            server_instructions: nic.cpu_us_server.map(instructions),
        })
    }

    /// Returns the instructions of both threads.
    pub fn instructions(&self) -> f64 {
        self.client_instructions + self.server_instructions.unwrap_or(0.0)
    }
}

/// Instructions of the server's whole process for one more call of the client: the difference of a long run and a short one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ServerInstructions {
    /// For an RDMA WRITE.
    pub one_sided: f64,
    /// For a call that the server answers.
    pub two_sided: f64,
}

/// The report.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// Whether all aims are met, and what failed.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// The link's rate in MiB per second: the median of several WRITEs from host memory to host memory.
    pub link_mib_per_s: f64,
    /// The rate that the topology sets, in MiB per second.
    pub link_topology_mib_per_s: f64,
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
    pub rpc: Vec<CallCost>,
    /// The parts of a WRITE.
    pub decomposition: Vec<Decomposition>,
    /// Accelerators relative to hosts, by the messages' size.
    pub accelerators: Vec<AcceleratorRate>,
    /// Instructions of the server for one more call.
    pub server_instructions: Option<ServerInstructions>,
    /// The cost of each path.
    pub formula: Vec<PathCost>,
}

impl demo::Report for Report {
    fn verdict(&mut self) -> &mut Verdict {
        &mut self.verdict
    }
}

#[cfg(test)]
mod tests;
