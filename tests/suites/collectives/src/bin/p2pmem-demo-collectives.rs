// SPDX-License-Identifier: MIT OR Apache-2.0

//! Collective operations between guests: the cost of each allreduce algorithm beside its formula, and Open MPI's beside them; training,
//! and inference, whose payload stays in accelerators.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use p2pmem_collectives::report::RunReport;
use p2pmem_collectives::schedule::Algorithm;
use p2pmem_collectives_suite::bed::{Bed, NicBytes};
use p2pmem_collectives_suite::page::page;
use p2pmem_collectives_suite::report::{Baseline, Cost, Report};
use p2pmem_collectives_suite::{kv, pipeline, sgd, slurm};
use p2pmem_vm::demo::{self, Places, Step, Table};
use p2pmem_vm::kernel;
use p2pmem_vm::qemu::utf8;
use p2pmem_vm::vm::tool;

/// Bytes of the payload of a node: whole elements for each of 2, 3, and 4 segments.
const PAYLOAD: u64 = 3 << 20;
/// Bytes of a piece.
const CHUNK: u64 = 32 << 10;
/// Calls that are measured, after one that is not.
const CALLS: u32 = 3;
/// Numbers of nodes.
const NODES: [usize; 3] = [2, 3, 4];
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
    /// Where the report goes as an HTML page
    #[arg(long, value_name = "PATH")]
    page: PathBuf,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let places = Places {
        report: &cli.report,
        page: Some((&cli.page, page)),
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
    costs(bed, report)?;
    open_mpi(bed, report, clients)?;
    training(bed, report)?;
    inference(bed, report, clients)?;
    slurm_jobs(bed, report, clients)
}

/// Measures the cost of each allreduce algorithm.
fn costs(bed: &mut Bed, report: &mut Report) -> Result<()> {
    let program = tool("p2pmem-collectives-accel")?;
    // A broadcast to one node is traffic in one direction: the rate of the link.
    let (link, _) = collective(
        bed,
        &program,
        2,
        &format!("--collective broadcast --size {LINK_PAYLOAD}"),
    )?;
    let link_rate = LINK_PAYLOAD as f64 / (link.time_us / 1e6);
    report.link_mib_per_s = link_rate / f64::from(1 << 20);
    let _step = Step::begin(&format!(
        "2. Allreduce of f32 in accelerators, {} KiB on each node; the link carries {:.1} MiB/s",
        PAYLOAD >> 10,
        report.link_mib_per_s
    ));
    for nodes in NODES {
        for algorithm in Algorithm::ALL {
            let options = format!("--algorithm {} --size {PAYLOAD} --verify", algorithm.name());
            let (run, nics) = collective(bed, &program, nodes, &options)?;
            report.cost.push(Cost::measured(&run, &nics, CALLS + 1, link_rate));
        }
    }
    print(&report.costs());
    println!("   Bytes are those of the busiest node in a call.");
    Ok(())
}

/// Measures the allreduce of Open MPI.
fn open_mpi(bed: &mut Bed, report: &mut Report, clients: &Path) -> Result<()> {
    let _step = Step::begin("3. MPI_Allreduce of Open MPI over UCX, on the same memory");
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
        let host: u64 = nics.iter().map(NicBytes::host).sum();
        let peer: u64 = nics.iter().map(|nic| nic.peer_read).sum();
        let host_read: u64 = nics.iter().map(|nic| nic.host_read).sum();
        let calls = u64::from(CALLS + 1);
        let payload = PAYLOAD * nodes as u64 * calls;
        let baseline = Baseline {
            nodes,
            bytes: PAYLOAD,
            time_ms,
            ratio_to_ring: time_ms / ring,
            sent: peer + host_read,
            least_sent: 2 * (nodes as u64 - 1) * PAYLOAD * calls,
            host_bytes_per_byte: host as f64 / payload as f64,
        };
        println!(
            "   {nodes} nodes: {time_ms:.0} ms, {:.2} times the ring's time; {:.2} host bytes for a byte of payload",
            baseline.ratio_to_ring, baseline.host_bytes_per_byte
        );
        report.baseline.push(baseline);
    }
    Ok(())
}

/// Trains a network on several nodes.
fn training(bed: &mut Bed, report: &mut Report) -> Result<()> {
    let _step = Step::begin("4. Training: gradients and parameters in accelerators, which add them");
    report.sgd = sgd::measure(bed)?;
    print(&sgd::table(&report.sgd));
    println!("   The same with a stage of the network on each node:");
    report.pipeline = pipeline::measure(bed)?;
    print(&pipeline::table(&report.pipeline));
    Ok(())
}

/// Moves the cache of keys and values of an inference.
fn inference(bed: &mut Bed, report: &mut Report, clients: &Path) -> Result<()> {
    let _step =
        Step::begin("5. Inference on two nodes: the cache of keys and values goes from one accelerator to the other");
    report.kv = kv::measure(bed, clients)?;
    print(&kv::table(&report.kv));
    Ok(())
}

/// Runs jobs of a Slurm cluster.
fn slurm_jobs(bed: &mut Bed, report: &mut Report, clients: &Path) -> Result<()> {
    let _step = Step::begin("6. Slurm on two nodes: jobs that get bytes of the accelerators");
    report.slurm = slurm::measure(bed, clients)?;
    print(&slurm::table(&report.slurm));
    Ok(())
}

fn collective(bed: &mut Bed, program: &str, nodes: usize, options: &str) -> Result<(RunReport, Vec<NicBytes>)> {
    let command = format!("{program} --json run --memory accelerator --chunk {CHUNK} -n {CALLS} {options}");
    let (text, nics) = bed.run(nodes, &command)?;
    let report = serde_json::from_str(&text).with_context(|| format!("the report of {command}: {text}"))?;
    Ok((report, nics))
}

fn print(table: &Table) {
    for line in table.lines() {
        println!("   {line}");
    }
}
