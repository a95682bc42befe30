// SPDX-License-Identifier: MIT OR Apache-2.0

//! `list` and `stats`.

use p2pmem::{human_size, Info, PciAddr, Provider, Stats};
use serde::Serialize;

use crate::cli::StatsArgs;
use crate::table::{dash, number, render, text};
use crate::{Context, Outcome};

#[derive(Serialize)]
struct List {
    info: Info,
    providers: Vec<Provider>,
}

pub(crate) fn list(context: &mut Context<'_>) -> anyhow::Result<Outcome> {
    let device = context.open()?;
    let list = List {
        info: device.info()?,
        providers: device.providers()?,
    };
    if context.json {
        context.print_json(&list)?;
    } else if list.providers.is_empty() {
        writeln!(
            context.out,
            "There are no providers. Make one: p2pmemctl publish DEVICE"
        )?;
    } else {
        write!(context.out, "{}", render_list(&list.providers))?;
    }
    Ok(Outcome::Done)
}

fn render_list(providers: &[Provider]) -> String {
    let columns = [
        number("ID"),
        text("DEVICE"),
        text("KIND"),
        text("MODE"),
        text("STATE"),
        text("DRIVER"),
        text("BAR"),
        text("NUMA"),
        number("SIZE"),
        number("FREE"),
        number("LARGEST"),
        number("BUFFERS"),
        number("DMABUFS"),
        number("PINNED"),
    ];
    let rows: Vec<_> = providers
        .iter()
        .map(|p| {
            vec![
                p.id.to_string(),
                p.addr.to_string(),
                p.kind.to_string(),
                if p.pageless { "pageless" } else { "paged" }.into(),
                p.state.to_string(),
                dash(p.driver.as_ref()),
                dash(p.bar.map(|b| format!("{b}+{:#x}", p.bar_offset))),
                dash(p.numa_node),
                human_size(p.size),
                human_size(p.free),
                human_size(p.largest),
                p.buffers.to_string(),
                p.exports.to_string(),
                if p.pinned == 0 {
                    "-".into()
                } else {
                    human_size(p.pinned)
                },
            ]
        })
        .collect();
    render(&columns, &rows)
}

#[derive(Serialize)]
struct OneStats {
    /// `None` for the sum over all providers since the module was loaded.
    provider: Option<u32>,
    addr: Option<PciAddr>,
    #[serde(flatten)]
    stats: Stats,
}

pub(crate) fn stats(context: &mut Context<'_>, args: &StatsArgs) -> anyhow::Result<Outcome> {
    let device = context.open()?;
    let each = match &args.provider {
        Some(name) => {
            let provider = context.provider(&device, name)?;
            let stats = device.stats(Some(provider.id))?;
            vec![(provider, stats)]
        }
        None => device.provider_stats()?,
    };
    let mut names: Vec<_> = each.iter().map(|(p, _)| format!("{} {}", p.id, p.addr)).collect();
    let mut all: Vec<_> = each
        .into_iter()
        .map(|(provider, stats)| OneStats {
            provider: Some(provider.id),
            addr: Some(provider.addr),
            stats,
        })
        .collect();
    if args.provider.is_none() {
        all.push(OneStats {
            provider: None,
            addr: None,
            stats: device.stats(None)?,
        });
        names.push("total".into());
    }
    if context.json {
        context.print_json(&all)?;
    } else {
        write!(context.out, "{}", render_stats(&names, &all))?;
    }
    Ok(Outcome::Done)
}

fn render_stats(names: &[String], all: &[OneStats]) -> String {
    let columns = [
        text("PROVIDER"),
        number("ALLOCS"),
        number("BYTES"),
        number("FREES"),
        number("BYTES"),
        number("FAILED"),
        number("MAPS"),
        number("SCRUBBED"),
        number("PINNED"),
        number("REVOKED"),
        number("DMABUFS"),
        number("IMPORTERS"),
        number("REFUSED"),
    ];
    let rows: Vec<_> = names
        .iter()
        .zip(all)
        .map(|(name, OneStats { stats: s, .. })| {
            vec![
                name.clone(),
                s.allocs.to_string(),
                human_size(s.alloc_bytes),
                s.frees.to_string(),
                human_size(s.free_bytes),
                s.failed.to_string(),
                s.maps.to_string(),
                human_size(s.scrubbed_bytes),
                s.pinned.to_string(),
                s.revoked.to_string(),
                s.exports.to_string(),
                s.attaches.to_string(),
                s.attach_failed.to_string(),
            ]
        })
        .collect();
    render(&columns, &rows)
}
