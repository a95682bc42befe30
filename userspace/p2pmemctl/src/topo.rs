// SPDX-License-Identifier: MIT OR Apache-2.0

//! `topo`: the paths between providers and clients, as a matrix or as a list, and a drawing of the machine.

mod drawing;

use anstyle::Style;
use anyhow::bail;
use p2pmem::inventory::{Inventory, MemoryDevice};
use p2pmem::{devices_in, Client, Device, Path, PathClass, PciAddr, Provider, Walk};
use serde::Serialize;

use crate::cli::TopoArgs;
use crate::computed::{Access, Computed, Without};
use crate::list::NO_PROVIDERS;
use crate::table::{cell, number, on_request, optional, render, text, yes_or_no, Cell, Column, Content, Header, Row};
use crate::table::{BAD, FAINT, GOOD, WARNING};
use crate::{Context, Outcome};

#[derive(Serialize)]
struct Topology {
    /// How the answer can differ from the module's; none with the module.
    computed: Option<Computed>,
    /// The providers; empty without the module.
    providers: Vec<Provider>,
    /// Without the module, the devices with memory; else empty.
    memory_devices: Vec<MemoryDevice>,
    clients: Vec<Client>,
    /// Paths; `client` is an index into `clients`.
    paths: Vec<MemoryPath>,
}

/// A path between memory and a client.
#[derive(Serialize)]
struct MemoryPath {
    /// The device that has the memory.
    addr: PciAddr,
    /// The path. Its `provider` is 0 without the module.
    #[serde(flatten)]
    path: Path,
}

pub(crate) fn topo(context: &mut Context<'_>, args: &TopoArgs) -> anyhow::Result<Outcome> {
    let Some(table) = args.table.of::<PathRow>(context)? else {
        return Ok(Outcome::Done);
    };
    let clients = clients(context, args)?;
    if let Some(file) = &args.svg {
        return drawing::draw(context, &clients, file);
    }
    let topology = match context.access()? {
        Access::Module(device) => Topology::of_module(context, &device, args, clients)?,
        Access::Sysfs(without) => Topology::of_sysfs(context, &without, args, clients)?,
    };
    if context.json {
        context.print_json(&topology)?;
        return Ok(Outcome::Done);
    }
    let plain = args.table.is_plain();
    if topology.is_empty() {
        context.hint(if topology.computed.is_some() {
            NO_MEMORY
        } else {
            NO_PROVIDERS
        });
    } else if topology.clients.is_empty() {
        context.hint("This machine has no storage, network, or InfiniBand device and no accelerator: specify clients.");
    } else {
        let heading = topology.computed.as_ref().filter(|_| !plain).map(Computed::heading);
        write!(context.out, "{}", heading.unwrap_or_default())?;
        if args.list || args.table.selects() {
            write!(context.out, "{}", table.render(&topology.rows()))?;
        } else {
            let legend = if plain { String::new() } else { topology.legend() };
            write!(context.out, "{}{legend}", topology.matrix(!plain))?;
        }
    }
    if let Some(computed) = topology.computed.as_ref().filter(|_| !plain) {
        context.hint(&computed.advice());
    }
    Ok(Outcome::Done)
}

/// The hint for a machine without memory to share.
const NO_MEMORY: &str = "No device of this machine has memory to share: `p2pmemctl scan --all` shows why.";

/// Returns the clients that were specified, or all devices that are likely clients.
fn clients(context: &Context<'_>, args: &TopoArgs) -> anyhow::Result<Vec<Client>> {
    if !args.clients.is_empty() {
        return context.clients(&args.clients);
    }
    let devices = devices_in(&context.environment.path("sys"))?;
    let likely = devices.iter().filter(|d| d.is_likely_client());
    Ok(likely.map(p2pmem::PciDevice::client).collect())
}

/// A path in the list.
pub(crate) struct PathRow {
    provider: PciAddr,
    client: Client,
    path: Path,
}

impl Row for PathRow {
    const COLUMNS: &'static [Column<Self>] = &[
        number("ID", "id of the provider; - without the module", |row, _| {
            optional(Some(row.path.provider).filter(|id| *id != 0))
        }),
        text("DEVICE", "PCI address of the device with the memory", |row, _| {
            cell(row.provider)
        }),
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
    fn of_module(
        context: &Context<'_>,
        device: &Device,
        args: &TopoArgs,
        clients: Vec<Client>,
    ) -> anyhow::Result<Self> {
        let providers = context.providers(device, args.device.as_deref())?;
        let paths = if clients.is_empty() {
            Vec::new()
        } else if args.rescan {
            device.rescan_paths(&clients)?
        } else {
            device.paths(&clients)?
        };
        let paths = paths.into_iter().filter_map(|path| {
            let provider = providers.iter().find(|provider| provider.id == path.provider)?;
            Some(MemoryPath {
                addr: provider.addr,
                path,
            })
        });
        Ok(Self {
            computed: None,
            paths: paths.collect(),
            providers,
            memory_devices: Vec::new(),
            clients,
        })
    }

    /// Computes the paths from sysfs. Nothing is cached, so `--rescan` changes nothing.
    fn of_sysfs(
        context: &Context<'_>,
        without: &Without,
        args: &TopoArgs,
        clients: Vec<Client>,
    ) -> anyhow::Result<Self> {
        let mut memory_devices = Inventory::read_in(&context.environment.root, None)?.memory_devices;
        if let Some(name) = &args.device {
            let addr = match name.parse::<u32>() {
                Ok(_) => bail!("{name} is the id of a provider, which only the module knows: name the device"),
                Err(_) => context.client(name)?.addr(),
            };
            memory_devices.retain(|memory_device| memory_device.device.addr == addr);
            if memory_devices.is_empty() {
                bail!("{name} has no memory to share: see `p2pmemctl scan`");
            }
        }
        let sys = context.environment.path("sys");
        // Reading the bridges above a function takes milliseconds.
        let walk = |client: &Client| Walk::of_device(&sys, client.addr(), client.name());
        let walks: Vec<_> = clients.iter().map(walk).collect::<Result<_, _>>()?;
        let mut paths = Vec::new();
        for memory_device in &memory_devices {
            let addr = memory_device.device.addr;
            let memory = Walk::of_device(&sys, addr, &addr.to_string())?;
            for (n, client) in walks.iter().enumerate() {
                let mut path = memory.path_to(&sys, client);
                path.client = n;
                paths.push(MemoryPath { addr, path });
            }
        }
        let memory = memory_devices.iter().map(|memory_device| memory_device.device.addr);
        let addrs: Vec<_> = memory.chain(clients.iter().map(Client::addr)).collect();
        Ok(Self {
            computed: Some(without.computed(context.environment, &addrs)),
            providers: Vec::new(),
            memory_devices,
            clients,
            paths,
        })
    }

    fn is_empty(&self) -> bool {
        self.providers.is_empty() && self.memory_devices.is_empty()
    }

    /// Returns the paths: first all of the first provider.
    fn rows(&self) -> Vec<PathRow> {
        let rows = self.paths.iter().filter_map(|MemoryPath { addr, path }| {
            Some(PathRow {
                provider: *addr,
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
        let providers = self
            .providers
            .iter()
            .map(|p| (Some(p.id), p.addr, optional(p.numa_node)));
        let memory_devices = self.memory_devices.iter().map(|m| &m.device);
        let memory_devices = memory_devices.map(|d| (None, d.addr, optional(d.numa_node)));
        let rows: Vec<_> = providers
            .chain(memory_devices)
            .map(|(id, addr, numa)| {
                let mut row = vec![optional(id), cell(addr)];
                row.extend((0..self.clients.len()).map(|client| {
                    let mut paths = paths.iter();
                    let path = paths.find(|row| row.provider == addr && row.path.client == client);
                    path.map_or_else(|| cell("?"), PathRow::cell)
                }));
                row.push(numa);
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
