// SPDX-License-Identifier: MIT OR Apache-2.0

//! The transfer suite between two guests: every pair of memories by every mode, several ports, calls, the parts of a WRITE's
//! latency, and the cost of each path.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use p2pmem_perf::matrix::Matrix;
use p2pmem_perf::report::{Report as RunReport, SizeResult};
use p2pmem_perf::rpc::Rpc;
use p2pmem_transfer_suite::bed::{Bed, NODES};
use p2pmem_transfer_suite::decomposition::{Decomposition, median};
use p2pmem_transfer_suite::report::{
    Cell, Group, PathCost, Ports, Report, cells, costs, keep_nearest, message_latencies, slow_pairs,
};
use p2pmem_transfer_suite::tables;
use p2pmem_vm::demo::{self, Places, Step};
use p2pmem_vm::kernel;
use p2pmem_vm::qemu::utf8;
use p2pmem_vm::script::Script;

/// All pairs of memories, the client's and the server's, in groups with the same messages.
const GROUPS: [(&str, &str); 3] = [
    ("cpu,accelerator,fpga", "cpu,accelerator,fpga"),
    ("cpu,accelerator,fpga", "cmb"),
    ("cmb", "cpu,accelerator,cmb,fpga"),
];
/// All memories.
const ALL: &str = "cpu,accelerator,cmb,fpga";
/// The server's address on the network of the guests.
const HOST: &str = "\"$P2PMEM_ADDR_B\"";
/// The server's address on the network of the first NICs: IP over InfiniBand.
const OVER_NIC: &str = "\"$P2PMEM_RDMA_ADDR_B_NIC0\"";
/// Messages of the matrix.
const MESSAGES: Messages = Messages {
    bytes: 256 << 10,
    count: 8,
    depth: 4,
};
/// Messages from or to a CMB. Each access of a processor to the memory of an emulated drive traps, and processors fill and compare the
/// memory of all messages in flight.
const MESSAGES_OF_CMB: Messages = Messages {
    bytes: 256 << 10,
    count: 6,
    depth: 3,
};
/// Such messages that processors copy.
const COPIES_OF_CMB: Messages = Messages {
    bytes: 128 << 10,
    count: 4,
    depth: 2,
};
/// Bytes of a message between nodes whose clocks count instructions, and their number.
const SMALL: u64 = 64 << 10;
const FEW: u64 = 4;
/// Calls of the shorter run that measures the server's instructions.
const CALLS: u64 = 200;
/// How often a rate that misses its aim is measured, and the number of ratios of rates whose median counts.
const ROUNDS: usize = 3;

/// Measures transfers between two nodes, and compares them.
///
/// Exit codes: 0 all aims are met, 1 one is not or something failed, 2 bad usage.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// The module, for the stock kernel
    #[arg(long, value_name = "PATH")]
    module: PathBuf,
    /// Where the report goes, as JSON
    #[arg(long, value_name = "PATH")]
    report: PathBuf,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let places = Places {
        report: &cli.report,
        page: None,
    };
    demo::run(places, Report::default(), |report| run_demo(&cli, report))
}

/// A part of the demo.
type Part = fn(&mut Bed, &mut Report) -> Result<()>;

fn run_demo(cli: &Cli, report: &mut Report) -> Result<()> {
    let module = fs::canonicalize(&cli.module)
        .with_context(|| format!("{}: build it by `make modules`", cli.module.display()))?;
    report.verdict.kernel_release = kernel::release()?;
    let (release, module) = (report.verdict.kernel_release.clone(), utf8(&module)?);
    let mut bed = Bed::new(Script::boot("transfer", &release)?, module)?;
    let done = do_all(&[matrix, two_ports], &mut bed, report)
        .and_then(|()| bed.remove_rates())
        .and_then(|()| do_all(&[latencies, decomposition, accelerators], &mut bed, report));
    if done.is_err() {
        report.verdict.failures.extend(bed.shut_down());
        return done;
    }
    // No rate within a node has an aim, so the next nodes boot meanwhile.
    let layout = Script::layout("transfer-count")?;
    let next = thread::scope(|scope| {
        let next = scope.spawn(|| Script::boot_layout(&layout, &release));
        let done = within(&mut bed, report);
        report
            .verdict
            .failures
            .extend(done.err().map(|error| format!("{error:#}")));
        report.verdict.failures.extend(bed.shut_down());
        next.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    println!("1. Booted meanwhile: {}", layout.description);
    let mut bed = Bed::new(next, module)?;
    let done = do_all(&[instructions, calls, formula], &mut bed, report);
    report.verdict.failures.extend(bed.shut_down());
    done?;
    report.judge();
    Ok(())
}

/// Does the parts one after another.
fn do_all(parts: &[Part], bed: &mut Bed, report: &mut Report) -> Result<()> {
    parts.iter().try_for_each(|part| part(bed, report))
}

fn print(title: &str, lines: Vec<String>) {
    println!("   {title}");
    for line in lines {
        println!("   {line}");
    }
}

/// Measures the matrix on links of a fixed rate.
fn matrix(bed: &mut Bed, report: &mut Report) -> Result<()> {
    let _step = Step::begin("2. Every pair of memories by every mode, on links of a fixed rate");
    for group in [Group::Rdma, Group::Copied] {
        for (from, to) in GROUPS {
            let found = cells_of(bed, group, from, to, &mut report.link_mib_per_s)?;
            report.matrix.extend(found);
        }
    }
    let found = cells_of(bed, Group::Ucx, ALL, ALL, &mut report.link_mib_per_s)?;
    report.matrix.extend(found);
    report.matrix.sort_by_key(by_memories);
    print(
        &format!(
            "Ratio to the link's {:.1} MiB/s / host bytes / bytes copied by processors, for a byte; rows: the client's memory",
            report.link_mib_per_s
        ),
        tables::matrices(&report.matrix),
    );
    Ok(())
}

/// Returns the key that sorts the cells of a mode by their memories.
fn by_memories(cell: &Cell) -> [usize; 2] {
    [&cell.from, &cell.to].map(|memory| {
        let place = ALL.split(',').position(|known| known == memory);
        place.unwrap_or(usize::MAX)
    })
}

/// Messages of one size.
struct Messages {
    bytes: u64,
    /// Number of messages.
    count: u64,
    /// Number of messages in flight.
    depth: u64,
}

impl Messages {
    /// Returns the messages from a memory of the list `from` to one of the list `to`.
    fn of(group: Group, from: &str, to: &str) -> &'static Self {
        match (from.contains("cmb") || to.contains("cmb"), group) {
            (true, Group::Copied) => &COPIES_OF_CMB,
            (true, _) => &MESSAGES_OF_CMB,
            (false, _) => &MESSAGES,
        }
    }
}

/// Measures one port and two, on links of a fixed rate.
fn two_ports(bed: &mut Bed, report: &mut Report) -> Result<()> {
    let _step = Step::begin("3. Two ports, from accelerator to accelerator");
    let mut all = vec![ports(bed)?];
    // The best counts: another program of the emulator's machine makes a measurement slower, never faster.
    while all.len() < ROUNDS && !all.last().is_some_and(Ports::reaches_aim) {
        all.push(ports(bed)?);
    }
    let best = |value: fn(&Ports) -> f64| all.iter().map(value).fold(0.0, f64::max);
    let ports = Ports::new(
        best(|ports| ports.single_mib_per_s),
        best(|ports| ports.one_process_mib_per_s),
        best(|ports| ports.two_processes_mib_per_s),
    );
    println!(
        "   one port {:.1} MiB/s; two ports of one process {:.2} times, of two processes {:.2} times as much",
        ports.single_mib_per_s, ports.ratio_one_process, ports.ratio_two_processes
    );
    report.multi_port = Some(ports);
    Ok(())
}

/// Measures each pair of a memory of the list `from` and one of the list `to` by the modes of a group, and the link, unless its rate
/// is known. Another program of the emulator's machine disturbs a measurement now and then, so a pair whose RDMA does not have the link's
/// rate is measured again, with the link, and the result that is nearest to that rate counts.
fn cells_of(bed: &mut Bed, group: Group, from: &str, to: &str, link: &mut f64) -> Result<Vec<Cell>> {
    let known = (*link > 0.0).then_some(*link);
    let mut cells = measure(bed, group, from, to, known, link)?;
    if group == Group::Rdma {
        for _ in 1..ROUNDS {
            for (from, to) in slow_pairs(&cells) {
                keep_nearest(&mut cells, measure(bed, group, &from, &to, None, link)?);
            }
        }
    }
    Ok(cells)
}

/// Measures each pair of a memory of the list `from` and one of the list `to` by the modes of a group, once. `known` is the link's rate.
/// Without it, the link is measured, and `link` is the largest rate so far.
fn measure(bed: &mut Bed, group: Group, from: &str, to: &str, known: Option<f64>, link: &mut f64) -> Result<Vec<Cell>> {
    let Messages { bytes, count, depth } = Messages::of(group, from, to);
    let link_rate = known.map(|rate| format!("--link-rate {rate}")).unwrap_or_default();
    let arguments = format!(
        "matrix HOST --memory {from} --peer-memory {to} --size {bytes} -n {count} --depth {depth} --events --verify {} {link_rate}",
        group.options()
    );
    let host = if group == Group::Copied { OVER_NIC } else { HOST };
    let (matrix, counted) = bed.counted(|bed| bed.perf_by::<Matrix>(host, &arguments))?;
    *link = link.max(matrix.link.first().context("no rate of the link")?.mib_per_s);
    // The link's messages are not part of the pair, but the counters of the NICs have them.
    let beside = if known.is_none() { bytes * count } else { 0 };
    cells(&matrix, counted.host()?, beside)
}

/// Measures one port, and two ports of one process and of two.
fn ports(bed: &mut Bed) -> Result<Ports> {
    // Processes do not start at the same time. With many messages, this is a small part of the time.
    let run = "run HOST --memory accelerator --peer-memory accelerator --size 256K --events -n 128";
    let mut rate = |runs: &[(&[usize], &str)]| -> Result<f64> {
        let reports: Vec<RunReport> = bed.perf_together(HOST, runs)?;
        let results: Vec<_> = reports.iter().filter_map(|report| report.results.first()).collect();
        ensure!(results.len() == runs.len(), "a run without a result");
        // From the first start to the last end.
        let start = results.iter().map(|result| result.started_unix_ns).min().unwrap_or(0);
        let end = |result: &&SizeResult| result.started_unix_ns as f64 + result.speed.seconds * 1e9;
        let end = results.iter().map(end).fold(0.0, f64::max);
        let bytes: u64 = results
            .iter()
            .map(|result| result.speed.bytes * result.speed.iterations)
            .sum();
        Ok(bytes as f64 / f64::from(1 << 20) / ((end - start as f64) / 1e9))
    };
    Ok(Ports::new(
        rate(&[(&[0], run)])?,
        rate(&[(&[0, 1], run)])?,
        rate(&[(&[0], run), (&[1], run)])?,
    ))
}

/// Counts the instructions of every pair.
fn instructions(bed: &mut Bed, report: &mut Report) -> Result<()> {
    let _step = Step::begin("8. Instructions of every pair, one message at a time");
    let options = format!("--memory {ALL} --peer-memory {ALL} --size {SMALL} -n {FEW} --depth 1 --events --verify");
    for (host, modes) in [
        (HOST, "--mode write,read,send,write-imm --staged"),
        (OVER_NIC, "--mode tcp"),
    ] {
        let matrix: Matrix = bed.perf_by(host, &format!("matrix HOST {options} {modes}"))?;
        report.costs.extend(costs(&matrix)?);
    }
    for mode in ["write", "read", "send", "write-imm", "staged", "tcp"] {
        let of = |memory: &str| {
            let mut costs = report.costs.iter();
            let cost = costs.find(|cost| cost.mode == mode && cost.from == memory && cost.to == memory);
            cost.map_or(f64::NAN, |cost| cost.instructions_per_byte)
        };
        println!(
            "   {mode:<10} {:.3} instructions for a byte between hosts, {:.3} between accelerators",
            of("cpu"),
            of("accelerator")
        );
    }
    Ok(())
}

/// Counts the instructions of calls.
fn calls(bed: &mut Bed, report: &mut Report) -> Result<()> {
    let _step = Step::begin("9. Calls to another node's memory: two-sided and one-sided, polling and events");
    let rpc: Rpc = bed.perf("rpc HOST --size 8,4K -n 100")?;
    report.rpc = rpc.rpc;
    print(
        "The clocks count instructions while a processor works, and follow that of the host while it sleeps.",
        tables::calls(report),
    );
    report.ratios.one_sided_server_instructions = server_instructions(bed, "write")?;
    report.ratios.two_sided_server_instructions = server_instructions(bed, "rpc")?;
    println!(
        "   One more call takes {:.0} instructions of the server's whole process if it is two-sided, {:.0} if it is one-sided.",
        report.ratios.two_sided_server_instructions, report.ratios.one_sided_server_instructions
    );
    Ok(())
}

/// Measures the cost of each path.
fn formula(bed: &mut Bed, report: &mut Report) -> Result<()> {
    let _step = Step::begin("10. The cost of each path from accelerator to accelerator");
    for (name, host, mode) in [
        ("kernel buffers: TCP", OVER_NIC, "--mode tcp"),
        ("registered host memory: staged", HOST, "--mode write --staged"),
        ("p2pmem: RDMA WRITE", HOST, "--mode write"),
    ] {
        report.formula.push(path_cost(bed, name, host, mode)?);
    }
    print(
        "Root complex: bytes of NICs at host memory, and of processors at accelerator memory.",
        tables::formula(report),
    );
    println!("   An emulator has no caches: what a copy evicts from them is not in these numbers.");
    Ok(())
}

/// Returns the instructions of the server's whole process for one more call, from a short run and a long one.
fn server_instructions(bed: &mut Bed, mode: &str) -> Result<f64> {
    let mut run = |calls: u64| -> Result<f64> {
        let measured: RunReport = bed.perf(&format!(
            "run HOST --mode {mode} --size 8 -n {calls} --depth 1 --events"
        ))?;
        let nic = measured.results.first().and_then(|result| result.nics.first());
        Ok(nic.context("no result")?.process_us_server * 1e3 * calls as f64)
    };
    let (few, many) = (CALLS, 5 * CALLS);
    Ok((run(many)? - run(few)?) / (many - few) as f64)
}

/// Measures a path from accelerator to accelerator.
fn path_cost(bed: &mut Bed, name: &str, host: &str, mode: &str) -> Result<PathCost> {
    let run = format!(
        "run HOST --memory accelerator --peer-memory accelerator {mode} --size {SMALL} -n 16 --events --verify"
    );
    let (measured, counted) = bed.counted(|bed| bed.perf_by::<RunReport>(host, &run))?;
    let result = measured.results.first().context("no result")?;
    let nic = result.nics.first().context("no NIC")?;
    let bytes = result.speed.bytes * result.speed.iterations;
    let per_byte = |value: f64| value / bytes as f64;
    // Tracepoints cost instructions, so they are on during a run of their own.
    for node in NODES {
        bed.shell(node, TRACEPOINTS_ON)?;
    }
    let _: RunReport = bed.perf_by(host, &run)?;
    let mut by_kernel = 0;
    for node in NODES {
        let text = bed.shell(node, TRACEPOINTS_OFF)?;
        by_kernel += text
            .trim()
            .parse::<u64>()
            .with_context(|| format!("bytes of tracepoints: {text:?}"))?;
    }
    let host_bytes = counted.host()?;
    let over_tcp = mode.contains("tcp");
    let moved = host_bytes.connected + if over_tcp { host_bytes.datagrams } else { 0 };
    let copied = nic.copied_client + nic.copied_server;
    ensure!(result.verified == Some(true), "{name}: not every byte arrived");
    Ok(PathCost {
        name: name.to_owned(),
        bytes,
        // Over TCP, the copies that the program reports are those of the kernel from and to its memory.
        copied_by_program: per_byte(if over_tcp { 0.0 } else { copied as f64 }),
        copied_by_kernel: per_byte(by_kernel as f64),
        root_complex: per_byte((moved + copied) as f64),
        translations_per_mib: counted.nics("adapter", "translations")? as f64 / (bytes as f64 / f64::from(1 << 20)),
        // An instruction takes a nanosecond of these nodes' time.
        instructions: per_byte((nic.cpu_us_client + nic.cpu_us_server) * 1e3 * result.speed.iterations as f64),
    })
}

/// Switches on the tracepoints of bytes that the network stack copies to programs, and of those that it queues for a device, which
/// it has copied from programs.
const TRACEPOINTS_ON: &str = "
    set -e
    cd /sys/kernel/tracing
    [ -e trace ] || mount -t tracefs none .
    cd /sys/kernel/tracing
    echo 16384 >buffer_size_kb
    echo >trace
    for event in skb/skb_copy_datagram_iovec net/net_dev_queue; do echo 1 >events/$event/enable; done";
/// Switches the tracepoints off, and prints the sum of their bytes.
const TRACEPOINTS_OFF: &str = "
    set -e
    cd /sys/kernel/tracing
    for event in skb/skb_copy_datagram_iovec net/net_dev_queue; do echo 0 >events/$event/enable; done
    awk 'match($0, /len=[0-9]+/) { sum += substr($0, RSTART + 4, RLENGTH - 4) } END { print sum + 0 }' trace";

/// Measures the latency of every pair, on links without a rate.
fn latencies(bed: &mut Bed, report: &mut Report) -> Result<()> {
    let _step = Step::begin(
        "4. Latency of every pair by WRITE and READ, for 4 KiB, one message at a time, on links without a rate",
    );
    let matrix: Matrix = bed.perf(&format!(
        "matrix HOST --memory {ALL} --peer-memory {ALL} --mode write,read --size 4K -n 1000 --depth 1 --link-rate 1"
    ))?;
    report.latencies = message_latencies(&matrix)?;
    print(
        "Microseconds: median / 99 % / 99.9 %; rows: the client's memory. Times of the emulation, not of silicon",
        tables::latencies(report),
    );
    Ok(())
}

/// Measures every pair within one node, on links without a rate.
fn within(bed: &mut Bed, report: &mut Report) -> Result<()> {
    let _step = Step::begin(
        "7. Every pair of memories of one node by WRITE and READ, through its NIC, while the next nodes boot",
    );
    let arguments = format!(
        "matrix HOST --memory {ALL} --peer-memory {ALL} --mode write,read --size {SMALL} -n 16 --depth 4 --events --verify"
    );
    let (matrix, counted) = bed.counted(|bed| bed.perf_within::<Matrix>(&arguments))?;
    let host_to_host = matrix.link.first().context("no rate from host to host")?.mib_per_s;
    report.within_node = cells(&matrix, counted.host()?, 0)?;
    report.within_node.sort_by_key(by_memories);
    print(
        &format!(
            "Ratio to the {host_to_host:.0} MiB/s from host to host / host bytes / bytes copied by processors, for a byte"
        ),
        tables::matrices(&report.within_node),
    );
    Ok(())
}

/// Splits the latency of a WRITE.
fn decomposition(bed: &mut Bed, report: &mut Report) -> Result<()> {
    let _step = Step::begin("5. The parts of a WRITE of 4 KiB, from the NICs' clocks");
    for memory in ["cpu", "accelerator"] {
        let run = format!("run HOST --memory {memory} --peer-memory {memory} --size 4K -n 300 --depth 1");
        let (measured, [own, peer]) = bed.traced(|bed| bed.perf::<RunReport>(&run))?;
        let result = measured.results.first().context("no result")?;
        let total = result.latency.context("no latency")?.p50_us;
        let name = format!("{memory} to {memory}");
        report
            .decomposition
            .push(Decomposition::new(&name, &own, &peer, total)?);
    }
    print("Times of the emulation, not of silicon", tables::decompositions(report));
    Ok(())
}

/// Compares rates of accelerators and hosts on links without a rate.
fn accelerators(bed: &mut Bed, report: &mut Report) -> Result<()> {
    let _step =
        Step::begin("6. Accelerators, relative to hosts and to the path through host memory, on links without a rate");
    // The rate of larger messages is that at which the emulator's machine copies memory, which changes from second to second. These
    // fit its caches.
    let mut rate = |memory: &str, options: &str| -> Result<f64> {
        let measured: RunReport = bed.perf(&format!(
            "run HOST --memory {memory} --peer-memory {memory} --size 64K --depth 4 --events {options}"
        ))?;
        let result = measured.results.first().context("no result")?;
        Ok(result.speed.average_mib_per_s)
    };
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        rounds.push([rate("cpu", "-n 8192")?, rate("accelerator", "-n 8192")?]);
    }
    let staged = rate("accelerator", "-n 512 --staged")?;
    let middle = |value: fn(&[f64; 2]) -> f64| median(rounds.iter().map(value).collect());
    let [host, direct] = [middle(|[host, _]| *host), middle(|[_, direct]| *direct)];
    report.ratios.accelerator_to_host = middle(|[host, direct]| direct / host);
    report.ratios.direct_to_staged = direct / staged;
    println!(
        "   host to host {host:.0} MiB/s; accelerator to accelerator {direct:.0} MiB/s, {:.2} times that; through host memory \
         {staged:.0} MiB/s, {:.1} times slower",
        report.ratios.accelerator_to_host, report.ratios.direct_to_staged
    );
    Ok(())
}
