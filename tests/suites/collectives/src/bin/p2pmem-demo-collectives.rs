// SPDX-License-Identifier: MIT OR Apache-2.0

//! Collective operations between guests: the cost of each allreduce algorithm beside its formula, and Open MPI's beside them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use p2pmem_collectives::cost;
use p2pmem_collectives::element::{Element, Reduction};
use p2pmem_collectives::report::RunReport;
use p2pmem_collectives::schedule::{Algorithm, Call, Collective, Plan, Ring};
use p2pmem_collectives_suite::bed::Bed;
use p2pmem_collectives_suite::kv;
use p2pmem_collectives_suite::report::{Baseline, Cost, Report};
use p2pmem_vm::demo::{self, Places};
use p2pmem_vm::kernel;
use p2pmem_vm::qemu::utf8;
use p2pmem_vm::vm::tool;

/// Bytes of the payload of a node: whole elements for each of 2, 3, 4, and 8 segments.
const PAYLOAD: u64 = 3 << 20;
/// Bytes of a piece.
const CHUNK: u64 = 32 << 10;
/// Calls that are measured, after one that is not.
const CALLS: u32 = 3;
/// Numbers of nodes that are measured, and that is simulated.
const NODES: [usize; 3] = [2, 3, 4];
const SIMULATED: usize = 8;
/// Bytes of the messages that measure the link.
const LINK_PAYLOAD: u64 = 8 << 20;

/// Runs collective operations on the accelerators of two to four nodes, and compares their cost with the formulas.
///
/// Exit codes: 0 all aims are met, 1 one is not or something failed, 2 bad usage.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// The module, for the stock kernel
    #[arg(long, value_name = "PATH")]
    module: PathBuf,
    /// The folder with the scripts that start ranks in guests
    #[arg(long, value_name = "PATH")]
    clients: PathBuf,
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

fn run_demo(cli: &Cli, report: &mut Report) -> Result<()> {
    let module = fs::canonicalize(&cli.module)
        .with_context(|| format!("{}: build it by `make modules`", cli.module.display()))?;
    let clients = fs::canonicalize(&cli.clients).with_context(|| cli.clients.display().to_string())?;
    report.verdict.kernel_release = kernel::release()?;
    let mut bed = Bed::boot(&report.verdict.kernel_release, utf8(&module)?, &clients)?;
    let done = measure(&mut bed, report, &clients);
    report.verdict.failures.extend(bed.shut_down());
    done?;
    report.judge();
    Ok(())
}

fn measure(bed: &mut Bed, report: &mut Report, clients: &Path) -> Result<()> {
    let program = tool("p2pmem-collectives-accel")?;
    // A broadcast to one node is traffic in one direction: the rate of the link.
    let (link, _) = collective(
        bed,
        &program,
        2,
        &format!("--collective broadcast --size {LINK_PAYLOAD}"),
    )?;
    let link_rate = LINK_PAYLOAD as f64 / (link.shortest_us / 1e6);
    report.link_mib_per_s = link_rate / f64::from(1 << 20);
    println!(
        "2. Allreduce of f32 in accelerators, {} KiB on each node; the link carries {:.1} MiB/s",
        PAYLOAD >> 10,
        report.link_mib_per_s
    );
    for nodes in NODES {
        for algorithm in Algorithm::ALL {
            let options = format!("--algorithm {} --size {PAYLOAD} --verify", algorithm.name());
            let (run, nics) = collective(bed, &program, nodes, &options)?;
            report.cost.push(Cost::measured(&run, &nics, CALLS + 1, link_rate));
        }
    }
    for algorithm in Algorithm::ALL {
        report.cost.push(simulate(algorithm)?);
    }
    print(table(report));
    println!(
        "   Bytes are those of the busiest node in a call; rows of {SIMULATED} nodes are counted from the schedules."
    );

    println!("3. MPI_Allreduce of Open MPI over UCX, on the same memory");
    for nodes in NODES {
        let python = clients.join("mpi-allreduce.py");
        let ctl = tool("p2pmemctl")?;
        let script = format!(
            "{ctl} run --near \"$P2PMEM_RDMA_NIC0\" -- python3 -m mpi4py {} {PAYLOAD} {CALLS}",
            python.display()
        );
        let (text, nics) = bed.run(nodes, &script)?;
        let time_ms: f64 = text
            .lines()
            .find_map(|line| line.strip_prefix("milliseconds "))
            .and_then(|time| time.parse().ok())
            .with_context(|| format!("no time in {text:?}"))?;
        let ring = report
            .cost
            .iter()
            .find(|cost| cost.nodes == nodes && cost.algorithm == "ring");
        let ring = ring.context("no ring")?.time_ms;
        let host: u64 = nics.iter().map(|nic| nic.host).sum();
        let payload = PAYLOAD * nodes as u64 * u64::from(CALLS + 1);
        let baseline = Baseline {
            nodes,
            bytes: PAYLOAD,
            time_ms,
            ratio_to_ring: time_ms / ring,
            host_bytes_per_byte: host as f64 / payload as f64,
        };
        println!(
            "   {nodes} nodes: {time_ms:.0} ms, {:.2} times the ring's time; {:.2} host bytes for a byte of payload",
            baseline.ratio_to_ring, baseline.host_bytes_per_byte
        );
        report.baseline.push(baseline);
    }

    println!("4. Inference on two nodes: the cache of keys and values goes from one accelerator to the other");
    report.kv = kv::measure(bed, clients)?;
    print(kv::table(&report.kv));
    Ok(())
}

fn collective(
    bed: &mut Bed,
    program: &str,
    nodes: usize,
    options: &str,
) -> Result<(RunReport, Vec<p2pmem_collectives_suite::bed::NicBytes>)> {
    let command = format!("{program} --json run --memory accelerator --chunk {CHUNK} -n {CALLS} {options}");
    let (text, nics) = bed.run(nodes, &command)?;
    let report = serde_json::from_str(&text).with_context(|| format!("the report of {command}: {text}"))?;
    Ok((report, nics))
}

fn simulate(algorithm: Algorithm) -> Result<Cost> {
    let call = Call {
        collective: Collective::Allreduce(algorithm),
        element: Element::F32,
        reduction: Reduction::Sum,
        at: 0,
        bytes: PAYLOAD,
        root: 0,
    };
    let plan = Plan::new(call, Ring::by_rank(SIMULATED), CHUNK).map_err(anyhow::Error::msg)?;
    let counted = cost::count(&plan);
    let formula = cost::formula(call.collective, SIMULATED, PAYLOAD);
    Ok(Cost::simulated(
        algorithm.name(),
        SIMULATED,
        PAYLOAD,
        &counted,
        &formula,
    ))
}

fn table(report: &Report) -> Vec<String> {
    let header = [
        "algorithm",
        "nodes",
        "rounds",
        "fan-in",
        "bytes",
        "formula",
        "ratio",
        "ms",
        "of the link",
        "host bytes/byte",
    ];
    let number = |value: f64, digits: usize| {
        if value.is_nan() {
            "-".to_owned()
        } else {
            format!("{value:.digits$}")
        }
    };
    let row = |cost: &Cost| {
        vec![
            cost.algorithm.clone(),
            cost.nodes.to_string(),
            cost.rounds.to_string(),
            cost.fan_in.to_string(),
            number(cost.bytes_measured, 0),
            number(cost.bytes_formula, 0),
            number(cost.ratio, 3),
            number(cost.time_ms, 0),
            number(cost.ratio_to_link, 2),
            number(cost.host_bytes_per_byte, 4),
        ]
    };
    demo::table(1, &header, report.cost.iter().map(row).collect())
}

fn print(table: Vec<String>) {
    for line in table {
        println!("   {line}");
    }
}
