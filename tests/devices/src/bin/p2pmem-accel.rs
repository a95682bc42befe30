// SPDX-License-Identifier: MIT OR Apache-2.0

//! The accelerator as a process: serves one emulator after another on a vfio-user socket.
//!
//! Prints `ready` and the socket's path once it listens. Ends on SIGTERM or SIGINT, or with `--once` when its client does.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Parser;
use p2pmem_devices::accel::{Accel, Control, Settings};
use p2pmem_devices::size::parse_size;
use p2pmem_vfio_user::{LinkSpeed, Listener, serve};
use tracing::{error, info};

/// Emulated accelerator: a PCI device with memory behind a BAR, compute operations and a DMA engine.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Unix socket to listen on for the emulator
    #[arg(long)]
    socket: PathBuf,
    /// Size of the memory behind BAR2: a power of two
    #[arg(long, default_value = "256M", value_parser = parse_size)]
    memory: u64,
    /// Unix socket that answers questions about counters and state
    #[arg(long)]
    control: Option<PathBuf>,
    /// File to write the counters to, as JSON, whenever a client has gone and at the end
    #[arg(long)]
    counters: Option<PathBuf>,
    /// PCIe generation of the link
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=5))]
    link_gen: u8,
    /// Lanes of the link: 1, 2, 4, 8, 12, 16 or 32
    #[arg(long, default_value_t = 16)]
    link_width: u8,
    /// Device serial number
    #[arg(long, default_value_t = 0)]
    serial: u64,
    /// End when the first client has gone
    #[arg(long)]
    once: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let speed = match args.link_gen {
        1 => LinkSpeed::Gen1,
        2 => LinkSpeed::Gen2,
        3 => LinkSpeed::Gen3,
        4 => LinkSpeed::Gen4,
        _ => LinkSpeed::Gen5,
    };
    let settings = Settings {
        memory: args.memory,
        speed,
        lanes: args.link_width,
        serial: args.serial,
    };
    let mut accel = Accel::new(settings).context("cannot make the accelerator")?;
    let shared = accel.shared();
    let control = Control::new(accel.shared());
    if let Some(path) = &args.control {
        control
            .clone()
            .listen(path)
            .with_context(|| format!("cannot listen on {}", path.display()))?;
    }
    let listener =
        Listener::bind(&args.socket).with_context(|| format!("cannot listen on {}", args.socket.display()))?;
    end_on_signals(&args, control.clone())?;
    println!("ready {}", listener.path().display());
    std::io::stdout().flush()?;
    loop {
        let stream = listener.accept().context("cannot accept a client")?;
        info!("client connected");
        shared.set_connected(true);
        let result = serve(stream, &mut accel);
        shared.set_connected(false);
        if let Err(error) = result {
            error!(%error, "connection lost");
        }
        save_counters(args.counters.as_deref(), &control);
        if args.once {
            remove_sockets(&args);
            return Ok(());
        }
    }
}

/// Ends the process in good order when it is told to.
fn end_on_signals(args: &Args, control: Control) -> Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT])
        .context("cannot watch for signals")?;
    let counters = args.counters.clone();
    let sockets: Vec<PathBuf> = std::iter::once(&args.socket).chain(&args.control).cloned().collect();
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        if signals.forever().next().is_some() {
            save_counters(counters.as_deref(), &control);
            for socket in sockets {
                let _ = std::fs::remove_file(socket);
            }
            std::process::exit(0);
        }
    })?;
    Ok(())
}

fn remove_sockets(args: &Args) {
    for socket in std::iter::once(&args.socket).chain(&args.control) {
        // Gone already is as good.
        let _ = std::fs::remove_file(socket);
    }
}

/// Writes the counters beside the file and moves them into place, so that nobody reads half of them.
fn save_counters(path: Option<&Path>, control: &Control) {
    let Some(path) = path else { return };
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let text = format!("{:#}\n", control.counters());
    if let Err(error) = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, path)) {
        error!(%error, path = %path.display(), "cannot write the counters");
    }
}
