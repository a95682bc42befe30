// SPDX-License-Identifier: MIT OR Apache-2.0

//! In a guest: streams the samples of the emulated FPGA to a server, `p2pmem-perf serve` on another node.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use clap::Parser;
use p2pmem_payload::kind::MemoryKind;
use p2pmem_payload::memory::MemoryOptions;
use p2pmem_perf::stream::source::{Source, SourceOptions};
use p2pmem_perf::stream::{StreamArgs, client};
use p2pmem_transfer_suite::fpga::FpgaSource;
use p2pmem_verbs::Domain;

/// Stream the samples of an FPGA to `p2pmem-perf serve`, out of the FPGA's own memory.
///
/// --memory has no effect: frames are in the memory of the FPGA that --device selects, or of the FPGA nearest to the NIC.
#[derive(Debug, Parser)]
struct Cli {
    /// Print JSON.
    #[arg(short = 'J', long)]
    json: bool,

    #[command(flatten)]
    stream: StreamArgs,
}

fn run(cli: &Cli, out: &mut dyn Write) -> Result<bool> {
    let own = &cli.stream.own;
    let memory = MemoryOptions {
        kind: MemoryKind::Fpga,
        provider: own.device.as_deref(),
        device: &own.side.dev_path,
    };
    let open = |domain: &Arc<Domain>, options: &SourceOptions| -> Result<Box<dyn Source>> {
        Ok(Box::new(FpgaSource::open(memory, domain, options)?))
    };
    client::run_with(&cli.stream, MemoryKind::Fpga, &open, cli.json, out)
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut out = std::io::stdout().lock();
    let result = run(&cli, &mut out);
    p2pmem_perf::exit_code("p2pmem-perf-fpga", result, cli.json, &mut out)
}
