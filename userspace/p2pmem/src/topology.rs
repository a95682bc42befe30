// SPDX-License-Identifier: MIT OR Apache-2.0

//! Paths between PCI functions, computed from sysfs, for memory that the module does not manage.
//!
//! Classes and hops equal those of the module: [`classify`] compares the walks from both functions to the root. sysfs
//! does not report whether the root complex forwards peer traffic. A path through the root complex counts as reachable,
//! and a driver whose device cannot use the path fails with EREMOTEIO or EHOSTUNREACH.

use std::collections::BTreeMap;
use std::path::{Path as FsPath, PathBuf};
use std::sync::Arc;

use crate::addr::PciAddr;
use crate::error::{Error, Result};
use crate::pci::{folder_of, hex, read_attribute, Client};
use crate::types::{Path, PathClass};

/// The role of a function in a [`Walk`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum PortKind {
    /// Not a bridge.
    Endpoint,
    /// A bridge of the root complex.
    RootPort,
    /// A port of a switch, on the side of the root complex.
    Upstream,
    /// A port of a switch, on the side of the devices.
    Downstream,
    /// A bridge to or from conventional PCI.
    Bridge,
}

/// One function of a [`Walk`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Port {
    /// The function.
    pub addr: PciAddr,
    /// The function's role. Without a readable configuration space, the role follows from the depth.
    pub kind: PortKind,
    /// Whether ACS redirects peer traffic to the root complex; none if the program cannot read the extended configuration
    /// space, which needs root.
    pub acs_redirect: Option<bool>,
    /// Bandwidth in MB/s of the link that the function's attributes describe, 0 if unknown.
    link: u32,
}

impl Port {
    /// Returns the bandwidth in MB/s of the link between the function and the port above; none if it is unknown.
    pub fn bandwidth(&self) -> Option<u32> {
        Some(self.link_above()).filter(|link| *link != 0)
    }

    /// Returns the bandwidth of the link above the function, 0 if unknown. The attributes of root ports and downstream
    /// ports describe the link below.
    fn link_above(&self) -> u32 {
        match self.kind {
            PortKind::RootPort | PortKind::Downstream => 0,
            PortKind::Endpoint | PortKind::Upstream | PortKind::Bridge => self.link,
        }
    }
}

/// The walk from a function to its root bus: the function, and all bridges above it.
///
/// ```no_run
/// use p2pmem::Walk;
///
/// let walk = Walk::read("/sys".as_ref(), "0000:03:00.0".parse()?);
/// for port in walk.iter().flat_map(|walk| &walk.ports) {
///     println!("{} {:?}", port.addr, port.kind);
/// }
/// # Ok::<(), p2pmem::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Walk {
    /// The function's folder in sysfs. The path of the folder has all functions of the walk.
    folder: PathBuf,
    /// The function, then each bridge above it.
    pub ports: Vec<Port>,
    /// Name of the root bus, such as `pci0000:00`. Each host bridge has one.
    pub root: String,
    /// NUMA node of the function, if it is known.
    pub numa_node: Option<u32>,
}

impl Walk {
    /// Reads the walk of a function from sysfs at `sys`; none if the function does not exist.
    pub fn read(sys: &FsPath, addr: PciAddr) -> Option<Self> {
        let real = folder_of(sys, addr).canonicalize().ok()?;
        let mut functions = Vec::new();
        let mut root = String::new();
        for folder in real.ancestors() {
            let name = folder.file_name()?.to_str()?;
            match PciAddr::parse(name) {
                Some(addr) => functions.push((addr, folder)),
                None => {
                    root = name.to_owned();
                    break;
                }
            }
        }
        // Without a readable configuration space, kind() assumes a root port, then the two sides of each switch.
        let depth = functions.len();
        let ports = functions.iter().enumerate().map(|(up, (addr, folder))| {
            let config = std::fs::read(folder.join("config")).unwrap_or_default();
            Port {
                addr: *addr,
                kind: kind(folder, &config, depth - 1 - up),
                acs_redirect: acs_redirect(&config),
                link: link(folder),
            }
        });
        let node = |file: &FsPath| read_attribute(file).and_then(|node| node.parse().ok());
        // On a machine with one node, the kernel does not assign functions to the node. `online` is then one number.
        let numa_node = node(&real.join("numa_node")).or_else(|| node(&sys.join("devices/system/node/online")));
        Some(Self {
            ports: ports.collect(),
            folder: real.clone(),
            root,
            numa_node,
        })
    }

    /// As [`Walk::read`], with an error that names the device `name` if the function does not exist.
    ///
    /// # Errors
    ///
    /// [`Error::Client`] if the function does not exist.
    pub fn of_device(sys: &FsPath, addr: PciAddr, name: &str) -> Result<Self> {
        Self::read(sys, addr).ok_or_else(|| no_function(addr, name))
    }

    /// Returns the bridges above the function, the nearest first.
    pub fn bridges(&self) -> &[Port] {
        self.ports.get(1..).unwrap_or_default()
    }

    /// Returns the path between memory of this function and a client, with sysfs at `sys`. The field `provider` of the
    /// result is 0.
    pub fn path_to(&self, sys: &FsPath, client: &Walk) -> Path {
        classify(self, client, numa_distance(sys, self.numa_node, client.numa_node))
    }
}

/// A cache of walks: reading the configuration spaces of all bridges above a function takes milliseconds. A cached walk
/// does not show a later change of ACS; [`Walks::forget`] empties the cache.
#[derive(Debug, Default)]
pub(crate) struct Walks(BTreeMap<PciAddr, Arc<Walk>>);

impl Walks {
    /// Returns the walk of a function; none if the function does not exist.
    pub(crate) fn get(&mut self, sys: &FsPath, addr: PciAddr) -> Option<Arc<Walk>> {
        let now = folder_of(sys, addr).canonicalize().ok()?;
        if let Some(walk) = self.0.get(&addr).filter(|walk| walk.folder == now) {
            return Some(walk.clone());
        }
        let walk = Arc::new(Walk::read(sys, addr)?);
        self.0.insert(addr, walk.clone());
        Some(walk)
    }

    /// Empties the cache.
    pub(crate) fn forget(&mut self) {
        self.0.clear();
    }
}

/// Returns the role of the function in a folder of sysfs, which is `depth` bridges below the root bus.
fn kind(folder: &FsPath, config: &[u8], depth: usize) -> PortKind {
    let class = read_attribute(&folder.join("class")).and_then(|class| hex(&class));
    if class.map(|class| class >> 8) != Some(0x0604) {
        return PortKind::Endpoint;
    }
    match (pcie_type(config), depth) {
        (PcieType::Is(0x4), _) | (PcieType::Unreadable, 0) => PortKind::RootPort,
        (PcieType::Is(0x5), _) => PortKind::Upstream,
        (PcieType::Is(0x6), _) => PortKind::Downstream,
        (PcieType::Unreadable, depth) if depth % 2 == 1 => PortKind::Upstream,
        (PcieType::Unreadable, _) => PortKind::Downstream,
        (PcieType::Is(_) | PcieType::None, _) => PortKind::Bridge,
    }
}

/// The field Device/Port Type of the PCI Express capability.
#[derive(Debug, PartialEq, Eq)]
enum PcieType {
    Is(u8),
    /// The function has no PCI Express capability.
    None,
    /// The program has no privileges: it can read the first 64 bytes only.
    Unreadable,
}

/// Returns the PCI Express type of the function with this configuration space.
fn pcie_type(config: &[u8]) -> PcieType {
    const PCI_EXPRESS: u8 = 0x10;
    let byte = |at: usize| config.get(at).copied();
    if config.len() < 256 {
        return PcieType::Unreadable;
    }
    let mut at = usize::from(byte(0x34).unwrap_or(0) & !3);
    // The number of steps has a limit, because the list of a defective device can be a loop.
    for _ in 0..(256 - 0x40) / 4 {
        let (Some(id), Some(next), Some(flags)) = (byte(at), byte(at + 1), byte(at + 2)) else {
            break;
        };
        if at < 0x40 {
            break;
        }
        if id == PCI_EXPRESS {
            return PcieType::Is(flags >> 4);
        }
        at = usize::from(next & !3);
    }
    PcieType::None
}

/// ACS control bits that send peer traffic up to the root complex: request redirect, completion redirect, egress
/// control.
const ACS_REDIRECT: u16 = 0x04 | 0x08 | 0x20;

/// Returns whether the function with this configuration space redirects peer traffic; none if the program cannot read the
/// extended space. Functions of conventional PCI have 256 bytes and no ACS.
fn acs_redirect(config: &[u8]) -> Option<bool> {
    match config.len() {
        256 | 4096.. => Some(acs_control(config).is_some_and(|control| control & ACS_REDIRECT != 0)),
        _ => None,
    }
}

/// Returns the ACS control register of the function with this configuration space; none without the capability, or if
/// the extended space cannot be read.
fn acs_control(config: &[u8]) -> Option<u16> {
    const ACS: u16 = 0x000d;
    let word = |at: usize| Some(u16::from_le_bytes(config.get(at..at + 2)?.try_into().ok()?));
    let mut at = 0x100;
    for _ in 0..(4096 - 0x100) / 8 {
        let (id, next) = (word(at)?, word(at + 2)? >> 4);
        if id == ACS {
            return word(at + 6);
        }
        at = usize::from(next) & !3;
        if at < 0x100 {
            break;
        }
    }
    None
}

/// Returns the bandwidth of a function's link in MB/s (10^6 bytes), rounded down, without line encoding; 0 if the function
/// does not report a link.
fn link(folder: &FsPath) -> u32 {
    // The Link Status of a virtual function is reserved.
    let physical = folder.join("physfn");
    let folder = if physical.exists() { &physical } else { folder };
    let speed = read_attribute(&folder.join("current_link_speed")).unwrap_or_default();
    let width = read_attribute(&folder.join("current_link_width")).and_then(|width| width.parse().ok());
    let giga_transfers = speed.split(' ').next().unwrap_or_default();
    // Megabits per second of a lane, multiplied by the dividend of the encoding's efficiency, and its divisor.
    let (lane, divisor): (u64, u64) = match giga_transfers {
        "2.5" => (2_500 * 8, 10),
        "5.0" => (5_000 * 8, 10),
        "8.0" => (8_000 * 128, 130),
        "16.0" => (16_000 * 128, 130),
        "32.0" => (32_000 * 128, 130),
        "64.0" => (64_000 * 242, 256),
        _ => return 0,
    };
    let bytes = lane * width.unwrap_or(0) / (divisor * 8);
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Returns the error for a device without a PCI function.
pub(crate) fn no_function(addr: PciAddr, name: &str) -> Error {
    Error::Client {
        name: name.to_owned(),
        why: format!("there is no PCI function {addr}"),
    }
}

/// Returns the kernel's distance between two NUMA nodes (10 = local).
fn numa_distance(sys: &FsPath, from: Option<u32>, to: Option<u32>) -> Option<u32> {
    let (from, to) = (from?, to?);
    let nodes = sys.join("devices/system/node");
    // A row has one column for each node that is online.
    let column = index_in(&read_attribute(&nodes.join("online"))?, to)?;
    let row = read_attribute(&nodes.join(format!("node{from}/distance")))?;
    row.split_whitespace().nth(column)?.parse().ok()
}

/// Returns the index of a number in a list of sysfs, such as `0-1,4`; none if the list does not have the number.
fn index_in(list: &str, number: u32) -> Option<usize> {
    let mut index = 0usize;
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if (first..=last).contains(&number) {
            return index.checked_add(usize::try_from(number - first).ok()?);
        }
        let len = last.checked_sub(first)?.checked_add(1)?;
        index = index.checked_add(usize::try_from(len).ok()?)?;
    }
    None
}

/// Returns the path between two functions. The fields `provider` and `client` of the result are 0.
fn classify(provider: &Walk, client: &Walk, numa_distance: Option<u32>) -> Path {
    let (a, b) = (&provider.ports, &client.ports);
    let meet = a.iter().enumerate().find_map(|(up_a, port)| {
        let up_b = b.iter().position(|other| other.addr == port.addr)?;
        Some((up_a, up_b))
    });
    let (up_a, up_b) = meet.unwrap_or((a.len(), b.len()));
    let bridge = meet.and_then(|(up, _)| a.get(up));
    let below = || a.iter().take(up_a).chain(b.iter().take(up_b));
    let acs_redirect = below().chain(bridge).any(|port| port.acs_redirect == Some(true));
    let turned = bridge
        .filter(|_| !acs_redirect)
        .map(|bridge| class_below(provider, client, (up_a, up_b), bridge));
    let nodes = (provider.numa_node, client.numa_node);
    let class = match turned {
        Some(class) => class,
        None if bridge.is_some() || provider.root == client.root => PathClass::HostBridge,
        None if nodes.0.is_some() && nodes.0 == nodes.1 => PathClass::NumaNode,
        None => PathClass::System,
    };
    let bandwidth = match turned {
        Some(PathClass::SameDevice) => None,
        Some(_) => narrowest(below()),
        None => narrowest(a.iter().chain(b)),
    };
    // If one function is above the other, or both are the same, the bridge above that function is above both.
    let lowest = meet.and_then(|(up_a, up_b)| a.get(up_a + usize::from(up_a == 0 || up_b == 0)));
    let hops = u32::try_from(up_a + up_b).unwrap_or(u32::MAX);
    Path {
        provider: 0,
        client: 0,
        class,
        acs_redirect,
        bus_addr: turned.is_some(),
        hops,
        distance: Some(hops),
        bandwidth,
        numa_distance,
        bridge: lowest.map(|port| port.addr),
    }
}

/// Returns the class of a path whose traffic turns around in `bridge`, `up` steps above each function.
fn class_below(provider: &Walk, client: &Walk, up: (usize, usize), bridge: &Port) -> PathClass {
    let (a, b) = (&provider.ports, &client.ports);
    let same_device = match (up, a.first(), b.first()) {
        ((0, 0), _, _) => true,
        // The lower end of a link is one device.
        ((1, 1), _, _) if matches!(bridge.kind, PortKind::RootPort | PortKind::Downstream) => true,
        ((1, 1), Some(a), Some(b)) => {
            let slot = |port: &Port| (port.addr.domain, port.addr.bus, port.addr.device());
            slot(a) == slot(b)
        }
        _ => false,
    };
    let turns_in_switch = match bridge.kind {
        PortKind::Upstream => true,
        PortKind::Downstream => up.0 == 0 || up.1 == 0,
        PortKind::Endpoint | PortKind::RootPort | PortKind::Bridge => false,
    };
    let crossed = a.iter().take(up.0).chain(b.iter().take(up.1));
    let crossed = crossed.filter(|port| matches!(port.kind, PortKind::Upstream | PortKind::Bridge));
    match crossed.count() + usize::from(turns_in_switch) {
        _ if same_device => PathClass::SameDevice,
        0 | 1 => PathClass::SameSwitch,
        _ => PathClass::Switches,
    }
}

/// Returns the bandwidth of the narrowest link; none if no port reports a link.
fn narrowest<'a>(ports: impl Iterator<Item = &'a Port>) -> Option<u32> {
    ports.map(Port::link_above).filter(|link| *link != 0).min()
}

/// Returns the path between memory of the PCI function `memory` and a client, computed from sysfs. For a provider of
/// the module, [`Device::paths`](crate::Device::paths) also reports the kernel's decision.
///
/// A path through the root complex counts as reachable. Some root complexes do not forward peer traffic: the client's
/// driver then refuses the memory with EREMOTEIO or EHOSTUNREACH. Without privileges, the path does not show
/// redirection by ACS.
///
/// The field `provider` of the result is 0.
///
/// # Errors
///
/// [`Error::Client`] if a PCI function does not exist.
pub fn path_between(memory: PciAddr, client: &Client) -> Result<Path> {
    path_between_in(FsPath::new("/sys"), memory, client)
}

/// As [`path_between`], with sysfs at `sys`.
///
/// # Errors
///
/// Those of [`path_between`].
pub fn path_between_in(sys: &FsPath, memory: PciAddr, client: &Client) -> Result<Path> {
    let provider = Walk::of_device(sys, memory, &memory.to_string())?;
    let client = Walk::of_device(sys, client.addr(), client.name())?;
    Ok(provider.path_to(sys, &client))
}

#[cfg(test)]
mod tests;
