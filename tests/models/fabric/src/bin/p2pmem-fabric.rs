// SPDX-License-Identifier: MIT OR Apache-2.0

//! Serves NICs, accelerators and FPGAs of one or more guests. Each device serves one QEMU after another on a vfio-user socket
//! of its own.
//!
//! Devices of one guest access each other's memory directly, at the addresses that the guest assigns to the BARs. NICs
//! of all guests exchange packets over the switches. Prints `ready` once all devices listen. Ends on SIGTERM or SIGINT.
//! A device that panics disappears from its guest; the others continue.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};
use clap::Parser;
use p2pmem_accel::{Accel, Settings};
use p2pmem_fabric::config::{self, Config};
use p2pmem_fabric::control::Control;
use p2pmem_fabric::logging;
use p2pmem_fabric::serving::{DeviceServer, ProcessShutdown};
use p2pmem_fpga::Fpga;
use p2pmem_ib::Fabric;
use p2pmem_mlx5::Nic;
use p2pmem_vfio_user::{Bus, Device, Health, Peers};
use tracing::{error, info};

/// Emulated NICs, accelerators and FPGAs of several guests.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Configuration file in TOML: switches, guests and devices
    #[arg(long)]
    config: PathBuf,
}

/// A device whose sockets listen, but which is not served yet.
struct ListeningDevice {
    name: String,
    server: DeviceServer,
    device: Box<dyn Device + Send>,
    health: Health,
}

fn accel(node: &str, settings: &config::Accel, peers: &Peers) -> Result<ListeningDevice> {
    let pcie = settings.pcie().map_err(anyhow::Error::msg)?;
    let device = Accel::among(
        Settings {
            memory: settings.memory,
            second_memory: settings.second_memory,
            delayed_writes: settings.delayed_writes,
            speed: pcie.speed,
            lanes: pcie.lanes,
            serial: settings.serial,
        },
        &settings.name,
        peers,
    )?;
    let name = format!("{node}.{}", settings.name);
    Ok(ListeningDevice {
        server: DeviceServer::bind(&name, settings.paths(), Control::new(device.shared()))?,
        name,
        health: device.health(),
        device: Box::new(device),
    })
}

fn fpga(node: &str, settings: &config::Fpga, peers: &Peers) -> Result<ListeningDevice> {
    let pcie = settings.pcie().map_err(anyhow::Error::msg)?;
    let device = Fpga::among(
        p2pmem_fpga::Settings {
            memory: settings.memory,
            speed: pcie.speed,
            lanes: pcie.lanes,
            serial: settings.serial,
            ..p2pmem_fpga::Settings::default()
        },
        &settings.name,
        peers,
    )?;
    let name = format!("{node}.{}", settings.name);
    Ok(ListeningDevice {
        server: DeviceServer::bind(&name, settings.paths(), Control::new(device.shared()))?,
        name,
        health: device.health(),
        device: Box::new(device),
    })
}

fn nic(node: &str, settings: &config::Nic, subnet: &Fabric, peers: &Peers) -> Result<ListeningDevice> {
    let pcie = settings.pcie().map_err(anyhow::Error::msg)?;
    let name = format!("{node}.{}", settings.name);
    let settings_here = p2pmem_mlx5::Settings {
        name: name.clone(),
        guid: settings.guid(),
        switch: settings.switch.clone(),
        bytes_per_second: settings.bytes_per_second,
        speed: pcie.speed,
        lanes: pcie.lanes,
    };
    let device = Nic::new(settings_here, subnet, Bus::among(p2pmem_mlx5::VECTORS, peers))?;
    Ok(ListeningDevice {
        server: DeviceServer::bind(&name, settings.paths(), Control::new(Arc::new(device.handle())))?,
        name,
        health: device.health(),
        device: Box::new(device),
    })
}

/// Creates all devices and their sockets.
fn create_devices(config: &Config) -> Result<Vec<ListeningDevice>> {
    let subnet = config.subnet().context("switches")?;
    let mut devices = Vec::new();
    for node in &config.node {
        let peers = Peers::new();
        for settings in &node.accel {
            let device = accel(&node.name, settings, &peers);
            devices.push(device.with_context(|| format!("node {:?}: device {:?}", node.name, settings.name))?);
        }
        for settings in &node.fpga {
            let device = fpga(&node.name, settings, &peers);
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
    logging::start()?;
    let config = Config::load(&args.config).with_context(|| args.config.display().to_string())?;
    if config.devices() == 0 {
        bail!("{}: the configuration has no devices", args.config.display());
    }
    let devices = create_devices(&config)?;
    let shutdown = Arc::new(ProcessShutdown::default());
    shutdown
        .on_signals(devices.iter().map(|listening| &listening.server))
        .context("cannot handle signals")?;
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    for listening in devices {
        let shutdown = Arc::clone(&shutdown);
        let thread = std::thread::Builder::new().name(listening.name.clone());
        threads.push(thread.spawn(move || {
            let ListeningDevice {
                name,
                server,
                device,
                health,
            } = listening;
            match server.serve(device, &health, &shutdown, false) {
                // The signal thread reads the counters from the device's worker once more and then exits, so the device
                // must not be dropped.
                Ok(device) => std::mem::forget(device),
                Err(error) => error!(name, %error, "cannot accept another client of the device"),
            }
        })?);
    }
    println!("ready {}", args.config.display());
    std::io::stdout().flush()?;
    for thread in threads {
        // `serve` catches panics of the device. Any other panic ends only the thread of that device.
        let _ = thread.join();
    }
    if shutdown.is_requested() {
        info!("ending after a signal");
        // The signal thread exits the process once it has written the counters.
        loop {
            std::thread::park();
        }
    }
    bail!("all devices have failed")
}
