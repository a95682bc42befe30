// SPDX-License-Identifier: MIT OR Apache-2.0

//! `scan`: devices with memory, the sources of that memory, and devices that can use it.

use p2pmem::human_size;
use p2pmem::inventory::{Availability, DmaBufSupport, DmaClient, Inventory, MemoryDevice, Source};

use crate::cli::ScanArgs;
use crate::table::{dash, number, render, text};
use crate::{Context, Outcome};

pub(crate) fn scan(context: &mut Context<'_>, args: &ScanArgs) -> anyhow::Result<Outcome> {
    // Without the module, or without access to it, the scan shows only the sources that are visible in sysfs.
    let providers = context.open().and_then(|device| Ok(device.providers()?)).ok();
    let providers: Option<Vec<_>> = providers.map(|all| all.iter().map(|provider| provider.addr).collect());
    let inventory = Inventory::read_in(&context.environment.root, providers.as_deref())?;
    if context.json {
        context.print_json(&inventory)?;
    } else {
        write!(context.out, "{}", render_inventory(&inventory, args.all))?;
    }
    Ok(Outcome::Done)
}

fn render_inventory(inventory: &Inventory, all: bool) -> String {
    let mut out = String::new();
    let module = match inventory.module.as_deref() {
        None => "not loaded".into(),
        Some("") => "loaded".to_owned(),
        Some(version) => format!("version {version}"),
    };
    let iommu = if inventory.iommu { "active" } else { "none" };
    out += &format!("Kernel {}, module p2pmem {module}, IOMMU {iommu}\n", inventory.kernel);
    out += "\nDevices with memory:\n";
    if inventory.memory_devices.is_empty() {
        out += "  none: no device has a 64-bit prefetchable BAR for memory or has published memory\n";
    } else {
        out += &render_memory_devices(&inventory.memory_devices, all);
    }
    out += "\nDevices that can use it by DMA:\n";
    if inventory.clients.is_empty() {
        out += "  none: no storage, network or InfiniBand device and no accelerator\n";
    } else {
        out += &render_clients(&inventory.clients);
    }
    out
}

fn render_memory_devices(memory_devices: &[MemoryDevice], all: bool) -> String {
    let columns = [
        text("DEVICE"),
        text("ID"),
        text("DRIVER"),
        text("BAR"),
        number("SIZE"),
        number("RESIZABLE"),
        text("SOURCE"),
        text("USABLE"),
        text("MISSING"),
        text("DETAIL"),
    ];
    let mut rows = Vec::new();
    for memory_device in memory_devices {
        let best = memory_device.best();
        let sources = memory_device
            .sources
            .iter()
            .filter(|source| all || source.availability != Availability::Unavailable || Some(*source) == best);
        for source in sources {
            let mut row = identity(memory_device);
            row.extend([
                source.backend.to_string(),
                source.availability.to_string(),
                missing(source),
                source.detail.clone(),
            ]);
            rows.push(row);
        }
    }
    render(&columns, &rows)
}

/// Returns the capabilities that the source misses, as one token.
fn missing(source: &Source) -> String {
    let names: Vec<_> = source.missing.iter().map(ToString::to_string).collect();
    dash(Some(names.join(",")).filter(|names| !names.is_empty()))
}

/// Returns the cells that describe the device.
fn identity(memory_device: &MemoryDevice) -> Vec<String> {
    let device = &memory_device.device;
    let bar = memory_device
        .memory_bar()
        .or_else(|| memory_device.bars.iter().max_by_key(|bar| bar.size));
    let size = memory_device.pool.map(|pool| pool.size).or(bar.map(|bar| bar.size));
    vec![
        device.addr.to_string(),
        format!("{:04x}:{:04x}", device.vendor, device.device),
        dash(device.driver.as_ref()),
        dash(bar.map(|bar| bar.index)),
        dash(size.map(human_size)),
        dash(bar.and_then(|bar| bar.resizable_to).map(human_size)),
    ]
}

fn render_clients(clients: &[DmaClient]) -> String {
    let columns = [
        text("DEVICE"),
        text("NAMES"),
        text("DRIVER"),
        text("NUMA"),
        text("DMABUF"),
    ];
    let rows: Vec<_> = clients
        .iter()
        .map(|client| {
            let device = &client.device;
            let names = if device.names.is_empty() {
                "-".into()
            } else {
                device.names.join(",")
            };
            vec![
                device.addr.to_string(),
                names,
                dash(device.driver.as_ref()),
                dash(device.numa_node),
                match client.dma_bufs {
                    None => "-",
                    Some(DmaBufSupport::Revocable) => "revocable",
                    Some(DmaBufSupport::Pinned) => "pinned",
                    Some(_) => "unknown",
                }
                .into(),
            ]
        })
        .collect();
    render(&columns, &rows)
}
