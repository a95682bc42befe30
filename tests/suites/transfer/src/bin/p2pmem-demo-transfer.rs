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
use p2pmem_perf::stats::Speed;
use p2pmem_transfer_suite::aims::{self, ACCELERATOR_SIZES, MODES, ONE_SIDED, ROUNDS, SPLIT, TRIES};
use p2pmem_transfer_suite::bed::{Bed, NODES, link_rate};
use p2pmem_transfer_suite::decomposition::{Decomposition, median};
use p2pmem_transfer_suite::report::{
    AcceleratorRate, AcceleratorRound, CallCost, Cell, MessageCost, PathCost, PathCounts, Ports, PortsRound, Report,
    ServerInstructions, costs, message_latencies,
};
use p2pmem_transfer_suite::tables;
use p2pmem_vm::demo::{self, Places, Step};
use p2pmem_vm::kernel;
use p2pmem_vm::qemu::utf8;
use p2pmem_vm::script::Script;

/// All memories.
const MEMORIES: [&str; 4] = ["cpu", "accelerator", "cmb", "fpga"];
/// All memories, as an option.
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
/// Bytes of a run that compares accelerators with hosts. Most of such a run is after the page faults of the first accesses.
const COMPARED: u64 = 512 << 20;

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
    let layout = Script::layout("transfer")?;
    let rate = link_rate(&layout)?.context("the links have no rate")?;
    report.link_topology_mib_per_s = rate as f64 / f64::from(1 << 20);
    let mut bed = Bed::new(Script::boot(&layout.name, &release)?, &layout, module)?;
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
    let mut bed = Bed::new(next, &layout, module)?;
    let done = do_all(&[instructions, calls, formula], &mut bed, report);
    report.verdict.failures.extend(bed.shut_down());
    done?;
    let missed = aims::missed(report);
    report.verdict.failures.extend(missed);
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
    let mut rates = Vec::new();
    for _ in 0..ROUNDS {
        rates.push(measure(bed, ["cpu", "cpu"], "write", None)?.mib_per_s);
    }
    let link = median(rates);
    report.link_mib_per_s = link;
    let mut pairs = Vec::new();
    for mode in MODES {
        for from in MEMORIES {
            for to in MEMORIES {
                let first = measure(bed, [from, to], mode, Some(link))?;
                pairs.push(([from, to], mode, vec![first]));
            }
        }
    }
    // Another program of the emulator's machine disturbs pairs for some seconds now and then, so the other tries are not right after
    // the first.
    for _ in 1..TRIES {
        for (pair, mode, tries) in &mut pairs {
            if !aims::has_links_rate(&tries[0]) {
                tries.push(measure(bed, *pair, mode, Some(link))?);
            }
        }
    }
    for (_, _, tries) in pairs {
        report.matrix.push(Cell::of_tries(tries)?);
    }
    println!(
        "   The emulator throttles the links to {:.0} MiB/s, a small part of what its NICs can do. A ratio near 1 shows that nothing but \
         the link\n   limits a pair in this emulator. It says nothing about the rate of silicon.",
        report.link_topology_mib_per_s
    );
    print(
        &format!(
            "Ratio to the link's {link:.1} MiB/s / host bytes / bytes of NICs across a root complex / bytes copied by processors, for a \
             byte; rows: the client's memory; x{TRIES}: the median of {TRIES} tries"
        ),
        tables::matrices(&report.matrix),
    );
    Ok(())
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
    /// Returns the messages of a pair of memories.
    fn of(mode: &str, pair: [&str; 2]) -> &'static Self {
        match (pair.contains(&"cmb"), mode) {
            (true, "tcp" | "staged") => &COPIES_OF_CMB,
            (true, _) => &MESSAGES_OF_CMB,
            (false, _) => &MESSAGES,
        }
    }
}

/// Returns the options of `p2pmem-perf run` for a mode.
fn mode_options(mode: &str) -> String {
    match mode {
        "staged" => "--mode write --staged".into(),
        mode => format!("--mode {mode}"),
    }
}

/// Returns the result of a run of messages of one size.
fn only(report: &RunReport) -> Result<&SizeResult> {
    report.results.first().context("no result")
}

/// Measures a pair by a mode once, relative to the link's rate, while the NICs count.
fn measure(bed: &mut Bed, [from, to]: [&str; 2], mode: &str, link: Option<f64>) -> Result<Cell> {
    let Messages { bytes, count, depth } = Messages::of(mode, [from, to]);
    let arguments = format!(
        "run HOST --memory {from} --peer-memory {to} --size {bytes} -n {count} --depth {depth} --events --verify {}",
        mode_options(mode)
    );
    let host = if mode == "tcp" { OVER_NIC } else { HOST };
    let (report, counted) = bed.counted(|bed| bed.perf_by::<RunReport>(host, &arguments))?;
    Cell::new([from, to], mode, only(&report)?, &counted.moved()?, link)
}

/// Measures one port and two, on links of a fixed rate.
fn two_ports(bed: &mut Bed, report: &mut Report) -> Result<()> {
    let _step = Step::begin("3. Two ports, from accelerator to accelerator: MiB/s");
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        rounds.push(ports(bed)?);
    }
    let ports = Ports::new(rounds);
    for line in tables::ports(&ports) {
        println!("   {line}");
    }
    report.multi_port = Some(ports);
    Ok(())
}

/// Measures one port, and two ports of one process and of two.
fn ports(bed: &mut Bed) -> Result<PortsRound> {
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
    Ok(PortsRound {
        single_mib_per_s: rate(&[(&[0], run)])?,
        one_process_mib_per_s: rate(&[(&[0, 1], run)])?,
        two_processes_mib_per_s: rate(&[(&[0], run), (&[1], run)])?,
    })
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
            cost.map_or(f64::NAN, MessageCost::instructions_per_byte)
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
    report.rpc = rpc.rpc.iter().map(CallCost::from).collect();
    print(
        "The clocks count instructions while a processor works, and follow that of the host while it sleeps.",
        tables::calls(report),
    );
    let server = ServerInstructions {
        one_sided: server_instructions(bed, "write")?,
        two_sided: server_instructions(bed, "rpc")?,
    };
    println!(
        "   One more call takes {:.0} instructions of the server's whole process if it is two-sided, {:.0} if it is one-sided.",
        server.two_sided, server.one_sided
    );
    report.server_instructions = Some(server);
    Ok(())
}

/// Measures the cost of each path.
fn formula(bed: &mut Bed, report: &mut Report) -> Result<()> {
    let _step = Step::begin("10. The cost of each path from accelerator to accelerator");
    for (name, host, mode) in [
        ("kernel buffers: TCP", OVER_NIC, "tcp"),
        ("registered host memory: staged", HOST, "staged"),
        ("p2pmem: RDMA WRITE", HOST, "write"),
    ] {
        report.formula.push(path_cost(bed, name, host, mode)?);
    }
    print(
        "Root complex: bytes of NICs as the bridges count them, and of processors at accelerator memory.",
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
        "run HOST --memory accelerator --peer-memory accelerator {} --size {SMALL} -n 16 --events --verify",
        mode_options(mode)
    );
    let (measured, counted) = bed.counted(|bed| bed.perf_by::<RunReport>(host, &run))?;
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
    let counts = PathCounts {
        nics: counted.moved()?,
        translations: counted.nics("adapter", "translations")?,
        by_kernel,
    };
    PathCost::new(name, mode, only(&measured)?, &counts)
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
    for mode in ONE_SIDED {
        for from in MEMORIES {
            for to in MEMORIES {
                let arguments = format!(
                    "run HOST --memory {from} --peer-memory {to} --mode {mode} --size {SMALL} -n 16 --depth 4 --events --verify"
                );
                let (measured, counted) = bed.counted(|bed| bed.perf_within::<RunReport>(&arguments))?;
                let found = Cell::new([from, to], mode, only(&measured)?, &counted.moved()?, None)?;
                report.within_node.push(found);
            }
        }
    }
    print(
        "MiB/s of the emulation / host bytes / bytes of the NIC across a root complex / bytes copied by processors, for a byte",
        tables::matrices(&report.within_node),
    );
    Ok(())
}

/// Splits the latency of a WRITE.
fn decomposition(bed: &mut Bed, report: &mut Report) -> Result<()> {
    let _step = Step::begin("5. The parts of a WRITE of 4 KiB, from the NICs' clocks");
    for memory in SPLIT {
        let run = format!("run HOST --memory {memory} --peer-memory {memory} --size 4K -n 300 --depth 1");
        let (measured, [own, peer]) = bed.traced(|bed| bed.perf::<RunReport>(&run))?;
        let total = only(&measured)?.latency.context("no latency")?.p50_us;
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
    let _step = Step::begin("6. Accelerators, relative to hosts, on links without a rate");
    for size in ACCELERATOR_SIZES {
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            let host = compared_run(bed, "cpu", size)?;
            let (accelerator, counted) = bed.counted(|bed| compared_run(bed, "accelerator", size))?;
            rounds.push(AcceleratorRound {
                host_mib_per_s: host.average_mib_per_s,
                accelerator_mib_per_s: accelerator.average_mib_per_s,
                bytes: accelerator.bytes * accelerator.iterations,
                host_bytes: counted.moved()?.connected,
            });
        }
        report.accelerators.push(AcceleratorRate::new(size, &rounds));
    }
    print(
        "MiB/s of the emulation: the rate at which its machine copies bytes, which depends on the machine's other load",
        tables::accelerators(report),
    );
    Ok(())
}

/// Runs the WRITEs of a comparison between two memories of a kind.
fn compared_run(bed: &mut Bed, memory: &str, size: u64) -> Result<Speed> {
    let measured: RunReport = bed.perf(&format!(
        "run HOST --memory {memory} --peer-memory {memory} --size {size} -n {} --depth 4 --events",
        COMPARED / size
    ))?;
    Ok(only(&measured)?.speed)
}
