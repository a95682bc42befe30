// SPDX-License-Identifier: MIT OR Apache-2.0

//! `topo`: the matrix of paths between providers and clients.

use p2pmem::{devices_in, Client, Path, PathClass, Provider};
use serde::Serialize;

use crate::cli::TopoArgs;
use crate::table::{dash, number, render, text, Column};
use crate::{Context, Outcome};

#[derive(Serialize)]
struct Topology {
    providers: Vec<Provider>,
    clients: Vec<Client>,
    /// Paths; `client` is an index into `clients`.
    paths: Vec<Path>,
}

pub(crate) fn topo(context: &mut Context<'_>, args: &TopoArgs) -> anyhow::Result<Outcome> {
    let clients = if args.clients.is_empty() {
        let devices = devices_in(&context.environment.path("sys"))?;
        devices
            .iter()
            .filter(|d| d.is_likely_client())
            .map(p2pmem::PciDevice::client)
            .collect()
    } else {
        context.clients(&args.clients)?
    };
    let device = context.open()?;
    let providers = device.providers()?;
    let paths = if clients.is_empty() {
        Vec::new()
    } else if args.rescan {
        device.rescan_paths(&clients)?
    } else {
        device.paths(&clients)?
    };
    let topology = Topology {
        providers,
        clients,
        paths,
    };
    if context.json {
        context.print_json(&topology)?;
    } else if topology.providers.is_empty() {
        writeln!(
            context.out,
            "There are no providers. Make one: p2pmemctl publish DEVICE"
        )?;
    } else if topology.clients.is_empty() {
        writeln!(
            context.out,
            "This machine has no storage, network, or InfiniBand device and no accelerator: specify clients."
        )?;
    } else {
        write!(context.out, "{}", render_topology(&topology))?;
    }
    Ok(Outcome::Done)
}

fn render_topology(topology: &Topology) -> String {
    let mut columns = vec![number("ID"), text("PROVIDER")];
    columns.extend(topology.clients.iter().map(|c| Column(c.name().to_owned(), false)));
    columns.push(text("NUMA"));
    let rows: Vec<_> = topology
        .providers
        .iter()
        .map(|provider| {
            let mut row = vec![provider.id.to_string(), provider.addr.to_string()];
            row.extend(topology.clients.iter().enumerate().map(|(n, client)| {
                let path = topology
                    .paths
                    .iter()
                    .find(|p| p.provider == provider.id && p.client == n);
                path.map_or_else(|| "?".into(), |path| cell(provider, client, path))
            }));
            row.push(dash(provider.numa_node));
            row
        })
        .collect();
    let mut out = render(&columns, &rows);

    let names: Vec<_> = topology
        .clients
        .iter()
        .filter(|c| c.name() != c.addr().to_string())
        .collect();
    if !names.is_empty() {
        out.push_str("\nClients:\n");
        for client in names {
            out.push_str(&format!("  {client:<10} {}\n", client.addr()));
        }
    }
    out.push_str("\nLegend (a number after the class: links crossed; *: a port on the path redirects by ACS):\n");
    out.push_str("  X     the provider itself\n");
    for class in PathClass::ALL {
        out.push_str(&format!("  {class:<5} {}\n", class.meaning()));
    }
    out
}

fn cell(provider: &Provider, client: &Client, path: &Path) -> String {
    let acs = if path.acs_redirect { "*" } else { "" };
    match path.class {
        _ if provider.addr == client.addr() => "X".into(),
        PathClass::Unreachable => format!("{}{acs}", path.class),
        class => format!("{class} {}{acs}", path.hops),
    }
}
