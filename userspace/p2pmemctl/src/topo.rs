// SPDX-License-Identifier: MIT OR Apache-2.0

//! `topo`: the paths between providers and clients, as a matrix or as a list.

use anstyle::Style;
use p2pmem::{devices_in, Client, Path, PathClass, PciAddr, Provider};
use serde::Serialize;

use crate::cli::TopoArgs;
use crate::list::NO_PROVIDERS;
use crate::table::{cell, number, on_request, optional, render, text, yes_or_no, Cell, Column, Content, Header, Row};
use crate::table::{BAD, FAINT, GOOD, WARNING};
use crate::{Context, Outcome};

#[derive(Serialize)]
struct Topology {
    providers: Vec<Provider>,
    clients: Vec<Client>,
    /// Paths; `client` is an index into `clients`.
    paths: Vec<Path>,
}

pub(crate) fn topo(context: &mut Context<'_>, args: &TopoArgs) -> anyhow::Result<Outcome> {
    let Some(table) = args.table.of::<PathRow>(context)? else {
        return Ok(Outcome::Done);
    };
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
    let providers = context.providers(&device, args.device.as_deref())?;
    let mut paths = if clients.is_empty() {
        Vec::new()
    } else if args.rescan {
        device.rescan_paths(&clients)?
    } else {
        device.paths(&clients)?
    };
    paths.retain(|path| providers.iter().any(|provider| provider.id == path.provider));
    let topology = Topology {
        providers,
        clients,
        paths,
    };
    if context.json {
        context.print_json(&topology)?;
    } else if topology.providers.is_empty() {
        context.hint(NO_PROVIDERS);
    } else if topology.clients.is_empty() {
        context.hint("This machine has no storage, network, or InfiniBand device and no accelerator: specify clients.");
    } else if args.list || args.table.selects() {
        write!(context.out, "{}", table.render(&topology.rows()))?;
    } else {
        let matrix = topology.matrix(!args.table.is_plain());
        let legend = if args.table.is_plain() {
            String::new()
        } else {
            topology.legend()
        };
        write!(context.out, "{matrix}{legend}")?;
    }
    Ok(Outcome::Done)
}

/// A path in the list.
pub(crate) struct PathRow {
    provider: PciAddr,
    client: Client,
    path: Path,
}

impl Row for PathRow {
    const COLUMNS: &'static [Column<Self>] = &[
        number("ID", "id of the provider", |row, _| cell(row.path.provider)),
        text("DEVICE", "PCI address of the provider", |row, _| cell(row.provider)),
        text("CLIENT", "name of the client", |row, _| cell(row.client.name())),
        text("ADDRESS", "PCI address of the client", |row, _| cell(row.client.addr())),
        text("CLASS", "path class; X: the provider itself", |row, _| row.class()),
        number("HOPS", "links on the path", |row, _| {
            optional((row.path.class != PathClass::Unreachable).then_some(row.path.hops))
        }),
        number("BANDWIDTH", "MB/s of the narrowest link", |row, _| {
            optional(row.path.bandwidth)
        }),
        text("ACS", "whether a port on the path redirects by ACS", |row, _| {
            yes_or_no(row.path.acs_redirect)
        }),
        on_request(text(
            "BUSADDR",
            "whether traffic stays below a bridge, with bus addresses",
            |row, _| yes_or_no(row.path.bus_addr),
        )),
        on_request(number(
            "DISTANCE",
            "the kernel's pci_p2pdma_distance_many()",
            |row, _| optional(row.path.distance),
        )),
        on_request(number("NUMA-DISTANCE", "NUMA distance; 10 is local", |row, _| {
            optional(row.path.numa_distance)
        })),
        on_request(text("BRIDGE", "the lowest bridge above both devices", |row, _| {
            optional(row.path.bridge)
        })),
    ];
}

impl PathRow {
    fn is_same(&self) -> bool {
        self.provider == self.client.addr()
    }

    fn class(&self) -> Cell {
        if self.is_same() {
            return cell("X").style(FAINT);
        }
        cell(self.path.class).style(style(self.path.class))
    }

    /// Returns the cell of the matrix.
    fn cell(&self) -> Cell {
        let acs = if self.path.acs_redirect { "*" } else { "" };
        match self.path.class {
            _ if self.is_same() => self.class(),
            class @ PathClass::Unreachable => cell(format!("{class}{acs}")).style(style(class)),
            class => cell(format!("{class}:{}{acs}", self.path.hops)).style(style(class)),
        }
    }
}

/// Returns the style of a class: traffic below switches is good, traffic through the processor is slower.
fn style(class: PathClass) -> Style {
    match class {
        PathClass::SameDevice | PathClass::SameSwitch | PathClass::Switches => GOOD,
        PathClass::Unreachable => BAD,
        _ => WARNING,
    }
}

impl Topology {
    /// Returns the paths: first all of the first provider.
    fn rows(&self) -> Vec<PathRow> {
        let rows = self.paths.iter().filter_map(|path| {
            let provider = self.providers.iter().find(|provider| provider.id == path.provider)?;
            Some(PathRow {
                provider: provider.addr,
                client: self.clients.get(path.client)?.clone(),
                path: path.clone(),
            })
        });
        rows.collect()
    }

    fn matrix(&self, header: bool) -> String {
        let column = |name: &str, content| Header {
            name: name.to_owned(),
            content,
            width: 0,
        };
        let mut headers = vec![column("ID", Content::Number), column("DEVICE", Content::Text)];
        headers.extend(self.clients.iter().map(|c| column(c.name(), Content::Text)));
        headers.push(column("NUMA", Content::Text));
        let paths = self.rows();
        let rows: Vec<_> = self
            .providers
            .iter()
            .map(|provider| {
                let mut row = vec![cell(provider.id), cell(provider.addr)];
                row.extend((0..self.clients.len()).map(|client| {
                    let mut paths = paths.iter();
                    let path = paths.find(|row| row.path.provider == provider.id && row.path.client == client);
                    path.map_or_else(|| cell("?"), PathRow::cell)
                }));
                row.push(optional(provider.numa_node));
                row
            })
            .collect();
        render(&headers, &rows, header)
    }

    fn legend(&self) -> String {
        let mut out = String::new();
        let names: Vec<_> = self
            .clients
            .iter()
            .filter(|c| c.name() != c.addr().to_string())
            .collect();
        if !names.is_empty() {
            out.push_str("\nClients:\n");
            for client in names {
                out.push_str(&format!("  {:<10} {}\n", client.name(), client.addr()));
            }
        }
        out.push_str("\nLegend (a number after the class: links crossed; *: a port on the path redirects by ACS):\n");
        out.push_str("  X     the provider itself\n");
        for class in PathClass::ALL {
            out.push_str(&format!("  {class:<5} {}\n", class.meaning()));
        }
        out
    }
}
