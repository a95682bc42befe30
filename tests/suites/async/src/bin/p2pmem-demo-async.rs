// SPDX-License-Identifier: MIT OR Apache-2.0

//! Measures accelerators that drive NICs, beside processors that do: boots two guests with the stock kernel, lets them send
//! messages to each other, and reports instructions, accesses to registers, and bytes of host memory for each message.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use p2pmem_async::wqe::Transport;
use p2pmem_async_suite::page::page;
use p2pmem_async_suite::report::{Aborted, Report, Row, STEADY_SIZE, missed, missed_aborts};
use p2pmem_async_suite::two_nodes::{Measured, Mode, Parameters};
use p2pmem_guest::wire::Listen;
use p2pmem_vm::command::Command;
use p2pmem_vm::demo::{self, Places};
use p2pmem_vm::kernel;
use p2pmem_vm::qemu::utf8;
use p2pmem_vm::script::Script;
use p2pmem_vm::vm::{sibling, tool};

/// The nodes.
const NODES: [&str; 2] = ["a", "b"];
/// TCP port of the node that waits.
const PORT: u16 = 18540;
/// The time limit of a measurement.
const LONG_LIMIT: Duration = Duration::from_secs(180);
/// Iterations of a batch.
const BATCH: u32 = 20;
/// The minimum of iterations of a measurement, whatever divides their number. The NIC's driver reads a few registers each
/// second, and the accelerator's clock is read at the begin and the end. With fewer messages, these accesses would be a large
/// part of those that are compared.
const MIN_ITERATIONS: u32 = 100;
/// Iterations that the accelerator executes while the processor sleeps.
const STEADY: u32 = 1000;

/// Measures accelerators that drive NICs, beside processors that do.
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
    /// Where the report goes as an HTML page
    #[arg(long, value_name = "PATH")]
    page: PathBuf,
    /// Divide the numbers of iterations, down to 100
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    shorter: u32,
}

/// Returns the messages of each measurement: transport, bytes, iterations.
fn messages(shorter: u32) -> Vec<(Transport, u32, u32)> {
    [
        (Transport::Rc, STEADY_SIZE, 10_000),
        (Transport::Ud, STEADY_SIZE, 10_000),
        (Transport::Rc, 64 << 10, 1000),
        (Transport::Rc, 1 << 20, 100),
    ]
    .map(|(transport, size, iterations)| (transport, size, (iterations / shorter).max(MIN_ITERATIONS)))
    .into()
}

struct Bed {
    script: Script,
    node: String,
}

impl Bed {
    /// Returns the options that name the devices of a node.
    fn hardware(&self, node: &str) -> Result<[String; 4]> {
        let accel = self.script.device(node, "accel0")?.bdf.clone();
        Ok(["--nic".into(), self.script.nic(node, "nic0")?, "--accel".into(), accel])
    }

    /// Runs one measurement on both nodes.
    fn measure(&mut self, parameters: &Parameters) -> Result<Row> {
        let address = self.script.run(NODES[0], &["printenv", "P2PMEM_ADDR_B"])?;
        let mut serve = vec![self.node.clone(), "serve".into()];
        serve.extend(self.hardware(NODES[1])?);
        let mut run = vec![self.node.clone(), "run".into()];
        run.extend(self.hardware(NODES[0])?);
        for (option, value) in [
            ("--mode", option_value(&parameters.mode)),
            ("--transport", option_value(&parameters.transport)),
            ("--size", parameters.size.to_string()),
            ("--batch", parameters.batch.to_string()),
            ("--iterations", parameters.iterations.to_string()),
            ("--steady", parameters.steady.to_string()),
        ] {
            run.extend([option.to_owned(), value]);
        }
        run.push(address);
        let server = Command::new(serve).limit(LONG_LIMIT).listen(Listen::Tcp(PORT));
        let client = Command::new(run).limit(LONG_LIMIT);
        let [second, first] = self.script.run_pair((NODES[1], &server), (NODES[0], &client))?;
        let parse = |text: &str| serde_json::from_str::<Measured>(text).with_context(|| format!("output {text:?}"));
        Row::new(parameters, &[parse(&first)?, parse(&second)?]).context("the kernel does not count the time of tasks")
    }
}

/// Returns a value of an option as the command line has it.
fn option_value(value: &impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map(|value| value.get_name().to_owned()).unwrap_or_default()
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let places = Places {
        report: &cli.report,
        page: Some((&cli.page, page)),
    };
    demo::run(places, Report::default(), |report| {
        run_demo(&cli, report)?;
        report.verdict.failures.extend(missed(&report.table));
        report.verdict.failures.extend(missed_aborts(&report.aborted));
        Ok(())
    })
}

fn run_demo(cli: &Cli, report: &mut Report) -> Result<()> {
    let module = fs::canonicalize(&cli.module)
        .with_context(|| format!("{}: build it by `make modules`", cli.module.display()))?;
    report.verdict.kernel_release = kernel::release()?;
    let mut bed = Bed {
        script: Script::boot("async", &report.verdict.kernel_release)?,
        node: utf8(&sibling("p2pmem-async-node")?)?.to_owned(),
    };
    let done = measure_all(cli, &module, &mut bed, report);
    report.verdict.failures.extend(bed.script.shut_down());
    done
}

fn measure_all(cli: &Cli, module: &Path, bed: &mut Bed, report: &mut Report) -> Result<()> {
    println!("2. Load the module, and publish the accelerators; pinned exports are permitted for queues");
    let ctl = tool("p2pmemctl")?;
    for name in NODES {
        // IP over InfiniBand sends messages of its own, which are in host memory.
        bed.script
            .run(name, &["sh", "-c", "! [ -e /sys/module/ib_ipoib ] || rmmod ib_ipoib"])?;
        bed.script
            .load(name, utf8(module)?, &ctl, &["accel0"], &["--pinned-exports"])?;
    }

    println!("3. Messages: receive, compute, send");
    for (transport, size, iterations) in messages(cli.shorter) {
        for mode in [Mode::CpuPolling, Mode::CpuEvents, Mode::Device] {
            let steady = match mode {
                Mode::Device if size == STEADY_SIZE => STEADY,
                _ => 0,
            };
            let row = bed.measure(&Parameters {
                mode,
                transport,
                size,
                batch: BATCH,
                iterations,
                steady,
            })?;
            println!("   {}: {:.1} us per iteration", row.name(), row.us_per_iteration);
            report.table.push(row);
        }
    }
    print(&report.table);

    println!("4. Byte code that ends in the middle");
    let mut abort = vec![bed.node.clone(), "abort".into()];
    abort.extend(bed.hardware(NODES[0])?);
    let command = Command::new(abort).limit(LONG_LIMIT);
    let text = bed.script.run_command(NODES[0], &command)?;
    let aborted: Vec<Aborted> = serde_json::from_str(&text).context("output of p2pmem-async-node abort")?;
    for aborted in &aborted {
        println!("   {}: {}", aborted.case.about(), aborted.error);
    }
    report.aborted = aborted;

    println!("5. Take all down");
    for name in NODES {
        bed.script.unload(name, &ctl, &["accel0"])?;
    }
    Ok(())
}

/// Prints the rows as a table.
fn print(rows: &[Row]) {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header([
        "DRIVEN BY",
        "US/ITERATION",
        "INSTRUCTIONS",
        "CPU US",
        "REGISTERS",
        "INTERRUPTS",
        "HOST BYTES",
        "VERIFIED",
    ]);
    for column in 1..=6 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for row in rows {
        table.add_row([
            row.name(),
            format!("{:.1}", row.us_per_iteration),
            format!("{:.0}", row.cpu_instructions_per_message),
            format!("{:.1}", row.cpu_us_per_message),
            format!("{:.2}", row.trapped_per_message),
            format!("{:.2}", row.interrupts_per_message),
            row.host_bytes.to_string(),
            if row.verified { "yes" } else { "NO" }.into(),
        ]);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    println!("   Numbers are those of both nodes for each message; host bytes are those of all messages.");
    for line in table.trim_fmt().lines() {
        println!("   {line}");
    }
    for row in rows {
        if let Some(between) = &row.between_batches {
            println!(
                "   {}: while the processors slept, {} messages, {:.1} instructions for each, {} interrupts of the NICs, {} register \
                 accesses, {} bytes of host memory",
                row.name(),
                between.messages,
                between.cpu_instructions_per_message,
                between.nic_interrupts,
                between.trapped,
                between.host_bytes
            );
        }
    }
}
