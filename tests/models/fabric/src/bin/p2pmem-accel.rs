// SPDX-License-Identifier: MIT OR Apache-2.0

//! Serves one accelerator on a vfio-user socket, to one QEMU after another.
//!
//! Prints `ready` and the socket's path once the socket listens. Ends on SIGTERM or SIGINT, or with `--once` when its
//! client disconnects.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Parser;
use p2pmem_accel::{Accel, Settings};
use p2pmem_fabric::control::Control;
use p2pmem_fabric::logging;
use p2pmem_fabric::serving::{DevicePaths, DeviceServer, ProcessShutdown};
use p2pmem_fabric::size::parse_size;
use p2pmem_vfio_user::LinkSpeed;

/// Emulated accelerator: a PCI device with memory behind a BAR, compute operations and a DMA engine.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// UNIX domain socket for QEMU's vfio-user client
    #[arg(long)]
    socket: PathBuf,
    /// Size of the memory behind BAR2: a power of two
    #[arg(long, default_value = "256M", value_parser = parse_size)]
    memory: u64,
    /// Size of more memory behind BAR5: a power of two. Default: no BAR5
    #[arg(long, value_parser = parse_size)]
    second_memory: Option<u64>,
    /// UNIX domain socket for requests about counters and state
    #[arg(long)]
    control: Option<PathBuf>,
    /// File for the counters in JSON, written when a client has disconnected and at the end
    #[arg(long)]
    counters: Option<PathBuf>,
    /// PCIe generation of the link
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=5))]
    link_gen: u8,
    /// Link width in lanes: 1, 2, 4, 8, 12, 16 or 32
    #[arg(long, default_value_t = 16)]
    link_width: u8,
    /// Device serial number
    #[arg(long, default_value_t = 0)]
    serial: u64,
    /// End when the first client has disconnected
    #[arg(long)]
    once: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    logging::start()?;
    let settings = Settings {
        memory: args.memory,
        second_memory: args.second_memory,
        // Devices of other processes write through the emulator, as the processor does, and so not earlier.
        delayed_writes: false,
        speed: LinkSpeed::from_generation(args.link_gen).context("--link-gen: PCIe generations are 1 to 5")?,
        lanes: args.link_width,
        serial: args.serial,
    };
    let accel = Accel::new(settings).context("cannot create the accelerator")?;
    let paths = DevicePaths {
        socket: args.socket.clone(),
        control: args.control,
        counters: args.counters,
    };
    let server = DeviceServer::bind("accel", paths, Control::new(accel.shared()))?;
    let shutdown = Arc::new(ProcessShutdown::default());
    shutdown.on_signals([&server]).context("cannot handle signals")?;
    println!("ready {}", args.socket.display());
    std::io::stdout().flush()?;
    let health = accel.health();
    server
        .serve(Box::new(accel), &health, &shutdown, args.once)
        .context("cannot accept a client")?;
    Ok(())
}
