// SPDX-License-Identifier: MIT OR Apache-2.0

//! NICs and accelerators of one or more guests as one process: each device serves one emulator after another on a
//! vfio-user socket of its own.
//!
//! Devices of one guest reach each other's memory directly, wherever the guest puts their BARs; NICs of all guests reach
//! each other over the switches. Prints `ready` once all devices listen. Ends on SIGTERM or SIGINT. A device that breaks
//! down vanishes from its guest; the others go on.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};
use clap::Parser;
use p2pmem_accel::{Accel, Settings};
use p2pmem_fabric::config::{self, Config};
use p2pmem_fabric::control::Control;
use p2pmem_fabric::serving::{Ending, Seat};
use p2pmem_ib::Fabric;
use p2pmem_mlx5::Nic;
use p2pmem_vfio_user::{Bus, Device, Health, Peers};
use tracing::{error, info};

/// Emulated NICs and accelerators of several guests.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// File that names the switches, guests and devices, in TOML
    #[arg(long)]
    config: PathBuf,
}

/// A device that listens and is not served yet.
struct Ready {
    name: String,
    seat: Seat,
    device: Box<dyn Device + Send>,
    health: Health,
}

fn accel(node: &str, settings: &config::Accel, peers: &Peers) -> Result<Ready> {
    let pcie = settings.pcie().map_err(anyhow::Error::msg)?;
    let device = Accel::among(
        Settings {
            memory: settings.memory,
            speed: pcie.speed,
            lanes: pcie.lanes,
            serial: settings.serial,
        },
        &settings.name,
        peers,
    )?;
    let name = format!("{node}.{}", settings.name);
    Ok(Ready {
        seat: Seat::take(&name, settings.place(), Control::new(device.shared()))?,
        name,
        health: device.health(),
        device: Box::new(device),
    })
}

fn nic(node: &str, settings: &config::Nic, subnet: &Fabric, peers: &Peers) -> Result<Ready> {
    let pcie = settings.pcie().map_err(anyhow::Error::msg)?;
    let name = format!("{node}.{}", settings.name);
    let settings_here = p2pmem_mlx5::Settings {
        name: name.clone(),
        guid: settings.guid(),
        switch: settings.switch.clone(),
        speed: pcie.speed,
        lanes: pcie.lanes,
    };
    let device = Nic::new(settings_here, subnet, Bus::among(p2pmem_mlx5::VECTORS, peers))?;
    Ok(Ready {
        seat: Seat::take(&name, settings.place(), Control::new(Arc::new(device.handle())))?,
        name,
        health: device.health(),
        device: Box::new(device),
    })
}

/// Makes all devices and lets them listen.
fn make(config: &Config) -> Result<Vec<Ready>> {
    let subnet = config.subnet().context("the switches")?;
    let mut devices = Vec::new();
    for node in &config.node {
        let peers = Peers::new();
        for settings in &node.accel {
            let device = accel(&node.name, settings, &peers);
            devices.push(device.with_context(|| format!("node {:?}: device {:?}", node.name, settings.name))?);
        }
        for settings in &node.nic {
            let device = nic(&node.name, settings, &subnet, &peers);
            devices.push(device.with_context(|| format!("node {:?}: device {:?}", node.name, settings.name))?);
        }
    }
    Ok(devices)
}

fn main() -> Result<()> {
    let args = Args::parse();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let config = Config::load(&args.config).with_context(|| args.config.display().to_string())?;
    if config.devices() == 0 {
        bail!("{}: there are no devices in it", args.config.display());
    }
    let devices = make(&config)?;
    let ending = Arc::new(Ending::default());
    ending
        .on_signals(devices.iter().map(|ready| &ready.seat))
        .context("cannot watch for signals")?;
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    for ready in devices {
        let ending = Arc::clone(&ending);
        let thread = std::thread::Builder::new().name(ready.name.clone());
        threads.push(thread.spawn(move || {
            let Ready {
                name,
                seat,
                device,
                health,
            } = ready;
            match seat.serve(device, &health, &ending, false) {
                // The thread that got the signal asks the device's worker for the counters once more, and then exits.
                Ok(device) => std::mem::forget(device),
                Err(error) => error!(name, %error, "the device can have no more clients"),
            }
        })?);
    }
    println!("ready {}", args.config.display());
    std::io::stdout().flush()?;
    for thread in threads {
        // A panic was caught in the thread; whatever else ends it is the end of that device alone.
        let _ = thread.join();
    }
    if ending.has_begun() {
        info!("ended by a signal");
        // Which ends the process as soon as it is done with the counters.
        loop {
            std::thread::park();
        }
    }
    bail!("no device is left to be served")
}
