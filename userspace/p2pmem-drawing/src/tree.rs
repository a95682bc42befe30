// SPDX-License-Identifier: MIT OR Apache-2.0

//! The PCI functions of a drawing as a tree: host bridges, the bridges below them, and the devices.

use std::collections::BTreeMap;
use std::path::Path as FsPath;

use p2pmem::inventory::{Availability, MemoryDevice};
use p2pmem::{short_size, Holder, PciAddr, PciDevice, Port, PortKind, Provider, Walk};

use crate::Scene;

/// The most holders of one provider that are named.
const MAX_HOLDERS: usize = 3;
/// The name of the group of functions that sysfs does not have.
const NOT_IN_SYSFS: &str = "not in sysfs";

/// The role of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The root of a tree.
    HostBridge,
    /// A port of the root complex.
    RootPort,
    /// A switch: its upstream port.
    Switch,
    /// A downstream port of a switch.
    Port,
    /// A bridge to or from conventional PCI.
    Bridge,
    /// A device whose memory p2pmem hands out.
    Provider,
    /// A device with memory that is not a provider.
    Memory,
    /// A device without memory to share.
    Client,
}

/// A function, or a host bridge.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Node {
    /// The function; none for a host bridge.
    pub addr: Option<PciAddr>,
    /// The role.
    pub role: Role,
    /// Whether the device does bulk DMA.
    pub is_client: bool,
    /// The lines of text. The first one is the name.
    pub lines: Vec<String>,
    /// A property that needs attention.
    pub warning: Option<&'static str>,
    /// Used bytes and size of a provider's memory.
    pub usage: Option<(u64, u64)>,
    /// The names of the transfers for which the memory of the device was chosen.
    pub chosen_for: Vec<String>,
    /// Whether a transfer passes the link above the function.
    pub has_transfer: bool,
    /// The functions below.
    pub children: Vec<Node>,
}

impl Node {
    /// Returns whether a function is the node's, or below.
    fn has(&self, addr: PciAddr) -> bool {
        self.addr == Some(addr) || self.children.iter().any(|child| child.has(addr))
    }

    /// Marks the links that the hops pass: those with one end of a hop below them.
    fn mark(&mut self, hops: &[(PciAddr, PciAddr)]) {
        self.has_transfer = hops.iter().any(|(from, to)| self.has(*from) != self.has(*to));
        for child in &mut self.children {
            child.mark(hops);
        }
    }
}

/// Functions below a bus, by address.
#[derive(Default)]
struct Below {
    ports: BTreeMap<PciAddr, (Port, Below)>,
    /// The devices, with the bandwidth of their links if it is known.
    devices: Vec<(PciAddr, Option<u32>)>,
}

/// Returns the host bridges above the functions of a scene, in the order of their names.
pub(crate) fn roots(sys: &FsPath, devices: &[PciDevice], scene: &Scene) -> Vec<Node> {
    let providers = scene.providers.iter().map(|provider| provider.addr);
    let memory = scene
        .memory_devices
        .iter()
        .map(|memory_device| memory_device.device.addr);
    let clients = scene.clients.iter().map(p2pmem::Client::addr);
    let transfers = scene.transfers.iter().flat_map(|transfer| {
        let ends = transfer.sources.iter().chain(&transfer.targets).copied();
        ends.chain([transfer.memory])
    });
    let mut all: Vec<_> = providers.chain(memory).chain(clients).chain(transfers).collect();
    all.sort();
    all.dedup();
    let mut buses: BTreeMap<String, (Option<u32>, Below)> = BTreeMap::new();
    for addr in all {
        let Some(walk) = Walk::read(sys, addr) else {
            buses
                .entry(NOT_IN_SYSFS.into())
                .or_default()
                .1
                .devices
                .push((addr, None));
            continue;
        };
        let (numa, mut below) = {
            let (numa, below) = buses.entry(walk.root.clone()).or_default();
            (numa, below)
        };
        *numa = numa.or(walk.numa_node);
        for port in walk.bridges().iter().rev() {
            below = &mut below
                .ports
                .entry(port.addr)
                .or_insert_with(|| (port.clone(), Below::default()))
                .1;
        }
        let bandwidth = walk.ports.first().and_then(Port::bandwidth);
        below.devices.push((addr, bandwidth));
    }
    let leaf = |addr, bandwidth| device(addr, bandwidth, devices, scene);
    let hosts = buses.into_iter().map(|(name, (numa, below))| {
        let mut lines = vec!["Host bridge".to_owned(), name];
        lines.extend(numa.map(|numa| format!("NUMA node {numa}")));
        Node {
            lines,
            children: children(below, &leaf),
            ..node(None, Role::HostBridge)
        }
    });
    let mut hosts: Vec<_> = hosts.collect();
    let hops: Vec<_> = scene.transfers.iter().flat_map(crate::Transfer::hops).collect();
    for host in &mut hosts {
        host.mark(&hops);
        // A host bridge has no link above.
        host.has_transfer = false;
    }
    hosts
}

fn node(addr: Option<PciAddr>, role: Role) -> Node {
    Node {
        addr,
        role,
        is_client: false,
        lines: Vec::new(),
        warning: None,
        usage: None,
        chosen_for: Vec::new(),
        has_transfer: false,
        children: Vec::new(),
    }
}

fn children(below: Below, leaf: &impl Fn(PciAddr, Option<u32>) -> Node) -> Vec<Node> {
    let mut all: Vec<_> = below
        .ports
        .into_iter()
        .map(|(addr, (port, below))| (addr, bridge(&port, children(below, leaf))))
        .collect();
    all.extend(
        below
            .devices
            .into_iter()
            .map(|(addr, bandwidth)| (addr, leaf(addr, bandwidth))),
    );
    all.sort_by_key(|(addr, _)| *addr);
    all.into_iter().map(|(_, node)| node).collect()
}

fn bridge(port: &Port, children: Vec<Node>) -> Node {
    let (role, name) = match port.kind {
        PortKind::RootPort => (Role::RootPort, "Root port"),
        PortKind::Upstream => (Role::Switch, "PCIe switch"),
        PortKind::Downstream => (Role::Port, "Switch port"),
        _ => (Role::Bridge, "Bridge"),
    };
    let mut lines = vec![name.to_owned(), port.addr.to_string()];
    lines.extend(port.bandwidth().map(|bandwidth| format!("link {}", speed(bandwidth))));
    Node {
        lines,
        warning: (port.acs_redirect == Some(true)).then_some("redirects by ACS"),
        children,
        ..node(Some(port.addr), role)
    }
}

/// Returns the bandwidth of a link with one decimal.
fn speed(megabytes: u32) -> String {
    format!("{:.1} GB/s", f64::from(megabytes) / 1000.0)
}

/// Returns what a device is, by its PCI class.
fn kind(class: u32) -> &'static str {
    match (class >> 16, class >> 8) {
        (_, 0x0108) => "NVMe drive",
        (0x01, _) => "storage",
        (_, 0x0207) => "InfiniBand NIC",
        (0x02, _) => "NIC",
        (0x03, _) => "GPU",
        (0x05, _) => "memory",
        (_, 0x0b40) => "co-processor",
        (0x12, _) => "accelerator",
        _ => "device",
    }
}

fn device(addr: PciAddr, bandwidth: Option<u32>, devices: &[PciDevice], scene: &Scene) -> Node {
    let provider = scene.providers.iter().find(|provider| provider.addr == addr);
    let memory_device = scene.memory_devices.iter().find(|m| m.device.addr == addr);
    let client = scene.clients.iter().find(|client| client.addr() == addr);
    let found = devices.iter().find(|device| device.addr == addr);
    let class = found
        .map(|device| device.class)
        .or(provider.map(|provider| provider.class));
    let kind = class.map_or("device", kind);
    let names = match found.map(|device| device.names.as_slice()) {
        Some(names) if !names.is_empty() => Some(names.join(", ")),
        _ => client
            .map(|client| client.name().to_owned())
            .filter(|name| *name != addr.to_string()),
    };
    let ids = found.map(|device| (device.vendor, device.device));
    let name = match (names, ids) {
        (Some(names), _) => format!("{names} ({kind})"),
        (None, Some((vendor, device))) => format!("{kind} {vendor:04x}:{device:04x}"),
        (None, None) => kind.to_owned(),
    };
    let driver = found.and_then(|device| device.driver.as_deref());
    let driver = driver.or(provider.and_then(|provider| provider.driver.as_deref()));
    let mut facts = vec![addr.to_string(), driver.unwrap_or("no driver").to_owned()];
    facts.extend(bandwidth.map(speed));
    let mut lines = vec![name, facts.join(", ")];
    let role = match (provider, memory_device) {
        (Some(provider), _) => {
            lines.extend(of_provider(provider, scene.holders.as_deref()));
            Role::Provider
        }
        (None, Some(memory_device)) => {
            lines.push(of_memory_device(memory_device));
            Role::Memory
        }
        (None, None) => Role::Client,
    };
    let chosen_for = scene.transfers.iter().filter(|transfer| transfer.memory == addr);
    Node {
        is_client: client.is_some() || found.is_some_and(PciDevice::is_likely_client),
        lines,
        usage: provider.map(|provider| (provider.size.saturating_sub(provider.free), provider.size)),
        chosen_for: chosen_for.map(|transfer| transfer.name.clone()).collect(),
        ..node(Some(addr), role)
    }
}

/// Returns the state of a provider's memory, and the holders of its buffers.
fn of_provider(provider: &Provider, holders: Option<&[(PciAddr, Holder)]>) -> Vec<String> {
    let used = provider.size.saturating_sub(provider.free);
    let mut lines = vec![format!(
        "provider {}: {} of {} used",
        provider.id,
        short_size(used),
        short_size(provider.size)
    )];
    match holders {
        Some(all) => {
            let here: Vec<_> = all.iter().filter(|(addr, _)| *addr == provider.addr).collect();
            let named = here.iter().take(MAX_HOLDERS);
            lines.extend(named.map(|(_, holder)| format!("{} {}", short_size(holder.size), holder.owner)));
            match here.len().saturating_sub(MAX_HOLDERS) {
                0 => {}
                more => lines.push(format!("and {more} more")),
            }
        }
        None if provider.buffers > 0 => lines.push(format!("buffers: {}", provider.buffers)),
        None => {}
    }
    lines
}

/// Returns the size of memory that is not a provider's, and its source.
fn of_memory_device(memory_device: &MemoryDevice) -> String {
    let size = memory_device.size().map_or_else(|| "memory".to_owned(), short_size);
    match memory_device.best() {
        Some(source) if source.availability != Availability::Unavailable => {
            let state = if source.availability == Availability::Ready {
                "ready"
            } else {
                "possible"
            };
            format!("{size}, {state} by {}", source.backend)
        }
        _ => format!("{size}, no source"),
    }
}
