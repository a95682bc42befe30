// SPDX-License-Identifier: MIT OR Apache-2.0

//! `scan`: devices with memory, the sources of that memory, and devices that can use it.

use p2pmem::inventory::{Availability, DmaBufSupport, DmaClient, Inventory, MemoryDevice, Source};

use crate::cli::ScanArgs;
use crate::table::{self, cell, message, number, on_request, optional, text, Cell, Column, Row, FAINT, GOOD, WARNING};
use crate::{Context, Outcome};

pub(crate) fn scan(context: &mut Context<'_>, args: &ScanArgs) -> anyhow::Result<Outcome> {
    // Only the requested table has the columns that are requested; both are checked if none are.
    let (mut memory, mut clients) = (None, None);
    if !args.clients || !args.table.selects() {
        memory = args.table.of::<SourceRow>(context)?;
    }
    if args.clients || !args.table.selects() {
        clients = args.table.of::<DmaClient>(context)?;
    }
    if memory.is_none() && clients.is_none() {
        return Ok(Outcome::Done);
    }
    // Without the module, or without access to it, the scan shows only the sources that are visible in sysfs.
    let providers = context.open().and_then(|device| Ok(device.providers()?)).ok();
    let providers: Option<Vec<_>> = providers.map(|all| all.iter().map(|provider| provider.addr).collect());
    let inventory = Inventory::read_in(&context.environment.root, providers.as_deref())?;
    if context.json {
        context.print_json(&inventory)?;
        return Ok(Outcome::Done);
    }
    let memory = memory.map_or_else(String::new, |table| {
        table.render(&source_rows(&inventory.memory_devices, args.all))
    });
    let clients = clients.map_or_else(String::new, |table| table.render(&inventory.clients));
    if args.table.is_plain() {
        write!(context.out, "{}", if args.clients { clients } else { memory })?;
        return Ok(Outcome::Done);
    }
    let mut out = heading(&inventory);
    out += "\nDevices with memory:\n";
    out += if inventory.memory_devices.is_empty() {
        "  none: no device has a 64-bit prefetchable BAR for memory or has published memory\n"
    } else {
        &memory
    };
    out += "\nDevices that can use it by DMA:\n";
    out += if inventory.clients.is_empty() {
        "  none: no storage, network or InfiniBand device and no accelerator\n"
    } else {
        &clients
    };
    write!(context.out, "{out}")?;
    Ok(Outcome::Done)
}

/// Returns the columns of both tables, for the help.
pub(crate) fn columns_help() -> String {
    let memory = table::help::<SourceRow>("Columns of devices with memory");
    let clients = table::help::<DmaClient>("Columns of devices that can use it, with --clients");
    format!("{memory}\n\n{clients}")
}

fn heading(inventory: &Inventory) -> String {
    let module = if inventory.module_loaded {
        "loaded"
    } else {
        "not loaded"
    };
    let iommu = if inventory.iommu { "active" } else { "none" };
    format!("Kernel {}, module p2pmem {module}, IOMMU {iommu}\n", inventory.kernel)
}

/// A source of a device's memory.
pub(crate) struct SourceRow {
    memory_device: MemoryDevice,
    source: Source,
}

fn source_rows(memory_devices: &[MemoryDevice], all: bool) -> Vec<SourceRow> {
    let rows = memory_devices.iter().flat_map(|memory_device| {
        let best = memory_device.best();
        let sources = memory_device.sources.iter();
        let shown = sources
            .filter(move |source| all || source.availability != Availability::Unavailable || Some(*source) == best);
        shown.map(|source| SourceRow {
            memory_device: memory_device.clone(),
            source: source.clone(),
        })
    });
    rows.collect()
}

/// Joins names to one word.
fn list_of(names: &[impl ToString]) -> String {
    let names: Vec<_> = names.iter().map(ToString::to_string).collect();
    names.join(",")
}

pub(crate) fn usable(availability: Availability) -> Cell {
    cell(availability).style(match availability {
        Availability::Ready => GOOD,
        Availability::Possible => WARNING,
        _ => FAINT,
    })
}

impl Row for SourceRow {
    const COLUMNS: &'static [Column<Self>] = &[
        text("DEVICE", "PCI address of the device", |row, _| {
            cell(row.memory_device.device.addr)
        }),
        text("PCI-ID", "vendor and device id", |row, _| {
            let device = &row.memory_device.device;
            cell(format!("{:04x}:{:04x}", device.vendor, device.device))
        }),
        text("DRIVER", "driver of the device", |row, _| {
            optional(row.memory_device.device.driver.as_ref())
        }),
        text("BAR", "number of the BAR", |row, _| {
            optional(row.memory_device.main_bar().map(|bar| bar.index))
        }),
        number(
            "SIZE",
            "size of the published memory, or else of the BAR",
            |row, sizes| optional(row.memory_device.size().map(|size| sizes.show(size))),
        ),
        number(
            "RESIZABLE",
            "largest size of the BAR, if it is resizable",
            |row, sizes| {
                let largest = row.memory_device.main_bar().and_then(|bar| bar.resizable_to);
                optional(largest.map(|size| sizes.show(size)))
            },
        ),
        text("SOURCE", "interface that hands out the memory", |row, _| {
            cell(row.source.backend)
        }),
        text(
            "USABLE",
            "ready, possible after a step of the administrator, or no",
            |row, _| usable(row.source.availability),
        ),
        on_request(text("NUMA", "NUMA node of the device", |row, _| {
            optional(row.memory_device.device.numa_node)
        })),
        text(
            "MISSING",
            "capabilities that the source does not have, separated by commas",
            |row, _| cell(list_of(&row.source.missing)),
        ),
        message("DETAIL", "how to use the source, or why it cannot be used", |row, _| {
            cell(&row.source.detail)
        }),
    ];
}

impl Row for DmaClient {
    const COLUMNS: &'static [Column<Self>] = &[
        text("DEVICE", "PCI address of the device", |client, _| {
            cell(client.device.addr)
        }),
        text("NAMES", "names of the device, separated by commas", |client, _| {
            cell(list_of(&client.device.names))
        }),
        text("DRIVER", "driver of the device", |client, _| {
            optional(client.device.driver.as_ref())
        }),
        text("NUMA", "NUMA node of the device", |client, _| {
            optional(client.device.numa_node)
        }),
        text(
            "DMABUF",
            "how the driver registers dma-bufs: revocable, pinned, or unknown",
            |client, _| {
                optional(client.dma_bufs.map(|support| match support {
                    DmaBufSupport::Revocable => "revocable",
                    DmaBufSupport::Pinned => "pinned",
                    _ => "unknown",
                }))
            },
        ),
    ];
}
