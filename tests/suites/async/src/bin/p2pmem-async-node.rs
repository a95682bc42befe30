// SPDX-License-Identifier: MIT OR Apache-2.0

//! One of two nodes that send messages to each other: each receives, computes in its accelerator, and sends. Prints what the
//! node measured as JSON.

use std::net::{Ipv4Addr, TcpListener};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand};
use p2pmem_async::pingpong::options::Deadline;
use p2pmem_async::pingpong::wire::Wire;
use p2pmem_async::pingpong::{accept, connect};
use p2pmem_async::wqe::Transport;
use p2pmem_async_suite::hardware::Hardware;
use p2pmem_async_suite::two_nodes::{self, Mode, Parameters, Role, abort};

/// Messages between two nodes, with a computation in the accelerator for each.
#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Wait for the other node
    Serve(Common),
    /// Connect to the node that waits
    Run(Run),
    /// On this node alone, end byte code in the middle, and print what the processor saw
    Abort(Common),
}

#[derive(Args)]
struct Common {
    /// The NIC
    #[arg(long)]
    nic: String,
    /// PCI address of the accelerator
    #[arg(long)]
    accel: String,
    /// TCP port
    #[arg(long, default_value_t = 18540)]
    port: u16,
    /// Time limit in seconds
    #[arg(long, default_value_t = 120)]
    timeout: u64,
}

#[derive(Args)]
struct Run {
    /// Host name or address of the other node
    host: String,
    #[command(flatten)]
    common: Common,
    /// What drives NIC and accelerator
    #[arg(long)]
    mode: Mode,
    /// Transport
    #[arg(long, default_value = "rc")]
    transport: Transport,
    /// Bytes of a message
    #[arg(long, default_value_t = 128)]
    size: u32,
    /// Iterations of a batch
    #[arg(long, default_value_t = 20)]
    batch: u32,
    /// Iterations
    #[arg(long, short = 'n', default_value_t = 1000)]
    iterations: u32,
    /// Iterations that are submitted at once, and during which the processor sleeps
    #[arg(long, default_value_t = 0)]
    steady: u32,
}

fn main() -> Result<()> {
    let measured = match Cli::parse().command {
        Command::Serve(common) => {
            let deadline = Deadline::after(Duration::from_secs(common.timeout));
            let hardware = Hardware::open(&common.nic, &common.accel)?;
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, common.port)).context("listening")?;
            let mut wire = Wire::new(accept(&listener, deadline)?);
            let parameters: Parameters = wire.receive(deadline)?;
            two_nodes::run(&hardware, &parameters, Role::Second, &mut wire, deadline)?
        }
        Command::Run(run) => {
            let deadline = Deadline::after(Duration::from_secs(run.common.timeout));
            let parameters = Parameters {
                mode: run.mode,
                transport: run.transport,
                size: run.size,
                batch: run.batch,
                iterations: run.iterations,
                steady: run.steady,
            };
            parameters.check()?;
            let hardware = Hardware::open(&run.common.nic, &run.common.accel)?;
            let mut wire = Wire::new(connect(&run.host, run.common.port, deadline)?);
            wire.send(&parameters)?;
            two_nodes::run(&hardware, &parameters, Role::First, &mut wire, deadline)?
        }
        Command::Abort(common) => {
            let deadline = Deadline::after(Duration::from_secs(common.timeout));
            let aborted = abort::run(&Hardware::open(&common.nic, &common.accel)?, deadline)?;
            println!("{}", serde_json::to_string(&aborted)?);
            return Ok(());
        }
    };
    println!("{}", serde_json::to_string(&measured)?);
    ensure!(measured.verified, "the payload has wrong values");
    Ok(())
}
