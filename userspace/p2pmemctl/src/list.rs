// SPDX-License-Identifier: MIT OR Apache-2.0

//! `list` and `stats`.

use p2pmem::{Info, PciAddr, Provider, ProviderState, Stats};
use serde::Serialize;

use crate::cli::{ListArgs, StatsArgs};
use crate::table::{cell, number, on_request, optional, text, yes_or_no, Cell, Column, Row, GOOD, WARNING};
use crate::{Context, Outcome};

/// The hint for a list without providers.
pub(crate) const NO_PROVIDERS: &str = "There are no providers. Make one: p2pmemctl publish DEVICE";

#[derive(Serialize)]
struct List {
    info: Info,
    providers: Vec<Provider>,
}

pub(crate) fn list(context: &mut Context<'_>, args: &ListArgs) -> anyhow::Result<Outcome> {
    let Some(table) = args.table.of::<Provider>(context)? else {
        return Ok(Outcome::Done);
    };
    let device = context.open()?;
    let list = List {
        info: device.info()?,
        providers: context.providers(&device, args.device.as_deref())?,
    };
    if context.json {
        context.print_json(&list)?;
    } else if list.providers.is_empty() {
        context.hint(NO_PROVIDERS);
    } else {
        write!(context.out, "{}", table.render(&list.providers))?;
    }
    Ok(Outcome::Done)
}

fn state(state: ProviderState) -> Cell {
    cell(state).style(match state {
        ProviderState::Live => GOOD,
        _ => WARNING,
    })
}

/// Returns the cell of a size that is usually 0.
fn unusual(text: Cell, bytes: u64) -> Cell {
    if bytes == 0 {
        text
    } else {
        text.style(WARNING)
    }
}

fn used(provider: &Provider) -> u64 {
    provider.size.saturating_sub(provider.free)
}

impl Row for Provider {
    const COLUMNS: &'static [Column<Self>] = &[
        number("ID", "id of the provider", |p, _| cell(p.id)),
        text("DEVICE", "PCI address of the device", |p, _| cell(p.addr)),
        text("KIND", "source of the memory: own, adopted, or registered", |p, _| {
            cell(p.kind)
        }),
        text("MODE", "paged or pageless", |p, _| {
            cell(if p.pageless { "pageless" } else { "paged" })
        }),
        text(
            "STATE",
            "live, or revoking while the provider is being removed",
            |p, _| state(p.state),
        ),
        text("DRIVER", "driver of the device", |p, _| optional(p.driver.as_ref())),
        text("BAR", "number of the BAR, and offset of the memory in it", |p, _| {
            optional(p.bar.map(|bar| format!("{bar}+{:#x}", p.bar_offset)))
        }),
        text("NUMA", "NUMA node of the device", |p, _| optional(p.numa_node)),
        number("SIZE", "size of the memory", |p, sizes| sizes.cell(p.size)),
        on_request(number("USED", "bytes in use", |p, sizes| sizes.cell(used(p)))),
        on_request(number("USE%", "bytes in use, in percent of the size", |p, _| {
            optional((100 * u128::from(used(p))).checked_div(u128::from(p.size)))
        })),
        number("FREE", "free bytes", |p, sizes| sizes.cell(p.free)),
        number("LARGEST", "largest contiguous free piece", |p, sizes| {
            sizes.cell(p.largest)
        }),
        number("BUFFERS", "live buffers", |p, _| cell(p.buffers)),
        number("DMABUFS", "dma-bufs that are not closed", |p, _| cell(p.exports)),
        number("PINNED", "freed bytes whose pages I/O still refers to", |p, sizes| {
            unusual(sizes.cell(p.pinned), p.pinned)
        }),
        on_request(number("DIRTY", "freed bytes that wait to be cleared", |p, sizes| {
            sizes.cell(p.scrubbing)
        })),
        on_request(number(
            "RESERVE",
            "bytes that stay with drivers of the kernel",
            |p, sizes| sizes.cell(p.kernel_reserve),
        )),
        on_request(text("PCI-ID", "vendor and device id", |p, _| {
            cell(format!("{:04x}:{:04x}", p.vendor, p.device))
        })),
        on_request(text("CLASS", "PCI class code", |p, _| cell(format!("{:06x}", p.class)))),
        on_request(text(
            "EXPORTABLE",
            "whether buffers can be exported as dma-bufs",
            |p, _| yes_or_no(p.exportable),
        )),
        on_request(text(
            "PINNED-EXPORTS",
            "whether importers without support for revocation are allowed",
            |p, _| yes_or_no(p.pinned_exports),
        )),
    ];
}

/// The counters of one provider.
#[derive(Serialize)]
pub(crate) struct OneStats {
    /// `None` for the sum over all providers since the module was loaded.
    provider: Option<u32>,
    addr: Option<PciAddr>,
    #[serde(flatten)]
    stats: Stats,
}

#[derive(Serialize)]
struct AllStats {
    stats: Vec<OneStats>,
}

pub(crate) fn stats(context: &mut Context<'_>, args: &StatsArgs) -> anyhow::Result<Outcome> {
    let Some(table) = args.table.of::<OneStats>(context)? else {
        return Ok(Outcome::Done);
    };
    let device = context.open()?;
    let each = match &args.device {
        Some(name) => {
            let provider = context.provider(&device, name)?;
            let stats = device.stats(Some(provider.id))?;
            vec![(provider, stats)]
        }
        None => device.provider_stats()?,
    };
    let mut stats: Vec<_> = each
        .into_iter()
        .map(|(provider, stats)| OneStats {
            provider: Some(provider.id),
            addr: Some(provider.addr),
            stats,
        })
        .collect();
    if args.device.is_none() {
        stats.push(OneStats {
            provider: None,
            addr: None,
            stats: device.stats(None)?,
        });
    }
    if context.json {
        context.print_json(&AllStats { stats })?;
    } else {
        write!(context.out, "{}", table.render(&stats))?;
    }
    Ok(Outcome::Done)
}

impl Row for OneStats {
    const COLUMNS: &'static [Column<Self>] = &[
        number("ID", "id of the provider", |s, _| optional(s.provider)),
        text(
            "DEVICE",
            "PCI address of the device; total: the sum since the module was loaded, with removed providers",
            |s, _| s.addr.map_or_else(|| cell("total"), cell),
        ),
        number("ALLOCS", "buffers allocated", |s, _| cell(s.stats.allocs)),
        number("ALLOCATED", "bytes of the buffers allocated", |s, sizes| {
            sizes.cell(s.stats.alloc_bytes)
        }),
        number("FREES", "buffers freed", |s, _| cell(s.stats.frees)),
        number("FREED", "bytes of the buffers freed", |s, sizes| {
            sizes.cell(s.stats.free_bytes)
        }),
        number("FAILED", "requests that the provider did not serve", |s, _| {
            cell(s.stats.failed)
        }),
        number("MAPS", "mappings created", |s, _| cell(s.stats.maps)),
        number("CLEARED", "bytes cleared between owners", |s, sizes| {
            sizes.cell(s.stats.scrubbed_bytes)
        }),
        number("PINNED", "freed buffers whose pages I/O still referred to", |s, _| {
            cell(s.stats.pinned)
        }),
        number("REVOKED", "buffers revoked", |s, _| cell(s.stats.revoked)),
        number("DMABUFS", "dma-bufs created", |s, _| cell(s.stats.exports)),
        number("IMPORTERS", "importers that attached to dma-bufs", |s, _| {
            cell(s.stats.attaches)
        }),
        number("REFUSED", "importers that were refused", |s, _| {
            unusual(cell(s.stats.attach_failed), s.stats.attach_failed)
        }),
    ];
}
