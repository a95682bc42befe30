// SPDX-License-Identifier: MIT OR Apache-2.0

//! The module's answers as Rust types: providers, paths, counters.

use std::ffi::c_char;
use std::fmt;
use std::str::FromStr;

use p2pmem_sys as abi;

use crate::addr::PciAddr;

/// A NUL-terminated string in a fixed array. Without a NUL all of it; bytes that are no UTF-8 are replaced.
fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars
        .iter()
        .take_while(|c| **c != 0)
        .map(|c| c.to_ne_bytes()[0])
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Bytes for humans: exact where a unit divides them, else with one decimal.
///
/// ```
/// assert_eq!(p2pmem::human_size(16 << 20), "16 MiB");
/// assert_eq!(p2pmem::human_size(1500), "1.5 KiB");
/// ```
pub fn human_size(bytes: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = (bytes.max(1).ilog2() / 10) as usize;
    let whole = 1u64 << (10 * unit);
    if bytes % whole == 0 {
        format!("{} {}", bytes / whole, units[unit])
    } else {
        format!("{:.1} {}", bytes as f64 / whole as f64, units[unit])
    }
}

/// What the module is, and what it holds in all.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Info {
    /// Version of the ABI that the module speaks.
    pub abi_version: u32,
    /// Oldest version of the ABI whose programs work with the module.
    pub abi_compatible: u32,
    /// The module's version.
    pub version: String,
    /// Granularity of buffers and mappings in bytes.
    pub page_size: u32,
    /// `P2PMEM_FEATURE_*` bits.
    pub features: u64,
    /// Providers there are.
    pub providers: u32,
    /// Live buffers of all programs.
    pub buffers: u32,
    /// Bytes managed in all providers.
    pub size: u64,
    /// Bytes free in all providers.
    pub free: u64,
    /// Changes whenever a provider is added or removed, or paths were computed again.
    pub generation: u64,
}

impl Info {
    /// Whether a program of this version works with the module: a newer module reports the oldest version with which it is
    /// compatible; an older one, since version 5, has fewer features only.
    pub(crate) fn compatible(&self) -> bool {
        (self.abi_compatible..=u32::MAX).contains(&abi::P2PMEM_ABI_VERSION)
            && self.abi_version >= abi::P2PMEM_ABI_COMPATIBLE
    }

    /// Features of this library that the module does not have, by name.
    pub fn missing(&self) -> Vec<&'static str> {
        const KNOWN: [(u32, &str); 4] = [
            (abi::P2PMEM_FEATURE_DMABUF, "dma-buf export"),
            (abi::P2PMEM_FEATURE_RULES, "rules"),
            (abi::P2PMEM_FEATURE_IMPORT, "import"),
            (abi::P2PMEM_FEATURE_STRIPE, "stripes"),
        ];
        let missing = KNOWN.iter().filter(|(bit, _)| self.features & u64::from(*bit) == 0);
        missing.map(|(_, name)| *name).collect()
    }

    /// Whether `ibv_reg_mr()` takes mappings of buffers: the RDMA core has the peer-memory interface, and the module is
    /// a client of it.
    pub fn peer_memory(&self) -> bool {
        self.features & u64::from(abi::P2PMEM_FEATURE_PEER_MEMORY) != 0
    }
}

impl From<abi::p2pmem_info> for Info {
    fn from(raw: abi::p2pmem_info) -> Self {
        Self {
            abi_version: raw.abi_version,
            abi_compatible: raw.abi_compatible,
            version: text(&raw.version),
            page_size: raw.page_size,
            features: raw.features,
            providers: raw.providers,
            buffers: raw.buffers,
            size: raw.size,
            free: raw.free,
            generation: raw.generation,
        }
    }
}

/// How a provider came to be one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ProviderKind {
    /// A BAR of a device bound to the p2pmem driver, published by the administrator.
    Own,
    /// Memory that the device's own driver published.
    Adopted,
    /// Memory that the device's own driver handed to p2pmem.
    Registered,
    /// A kind that this version of the library does not know.
    Unknown,
}

impl fmt::Display for ProviderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Own => "own",
            Self::Adopted => "adopted",
            Self::Registered => "registered",
            Self::Unknown => "?",
        })
    }
}

/// What can be done with a provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ProviderState {
    /// Buffers can be allocated from it.
    Live,
    /// It is going away, its buffers are being revoked.
    Revoking,
    /// A state that this version of the library does not know.
    Unknown,
}

impl fmt::Display for ProviderState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Live => "live",
            Self::Revoking => "revoking",
            Self::Unknown => "?",
        })
    }
}

/// One provider: a device with published memory.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Provider {
    /// Its number, never 0, never used twice while the module is loaded.
    pub id: u32,
    /// How it came to be one.
    pub kind: ProviderKind,
    /// The PCI function whose memory it is.
    pub addr: PciAddr,
    /// What can be done with it.
    pub state: ProviderState,
    /// The BAR, where it is known.
    pub bar: Option<u32>,
    /// NUMA node of the function, where the machine has any.
    pub numa_node: Option<u32>,
    /// Live buffers in it.
    pub buffers: u32,
    /// First published byte in the BAR.
    pub bar_offset: u64,
    /// Bytes that p2pmem manages; for an adopted provider the pool of the device's driver.
    pub size: u64,
    /// Bytes that are free.
    pub free: u64,
    /// Largest contiguous piece that an allocation could get now, in bytes.
    pub largest: u64,
    /// Bytes left to the kernel's own users.
    pub kernel_reserve: u64,
    /// Bytes of freed buffers that wait for DMA or page references of others to end.
    pub pinned: u64,
    /// Bytes of freed buffers that wait to be cleared.
    pub scrubbing: u64,
    /// PCI vendor id.
    pub vendor: u16,
    /// PCI device id.
    pub device: u16,
    /// PCI class code, 24 bits.
    pub class: u32,
    /// It has no struct pages: mappings are for the CPU alone, direct I/O does not work.
    pub pageless: bool,
    /// Buffers in it can be exported as dma-bufs, and so be registered with NICs.
    pub exportable: bool,
    /// The administrator allows exports to importers that cannot be revoked.
    pub pinned_exports: bool,
    /// Dma-bufs of buffers in it that are not closed yet.
    pub exports: u32,
    /// Driver that the function is bound to.
    pub driver: Option<String>,
}

impl Provider {
    /// The location of the memory, as part of a message.
    pub(crate) fn place(&self) -> String {
        match self.bar {
            Some(bar) => format!("{} BAR {bar}", self.addr),
            None => self.addr.to_string(),
        }
    }
}

impl From<&abi::p2pmem_provider> for Provider {
    fn from(raw: &abi::p2pmem_provider) -> Self {
        Self {
            id: raw.id,
            kind: match raw.kind {
                abi::P2PMEM_KIND_OWN => ProviderKind::Own,
                abi::P2PMEM_KIND_ADOPTED => ProviderKind::Adopted,
                abi::P2PMEM_KIND_REGISTERED => ProviderKind::Registered,
                _ => ProviderKind::Unknown,
            },
            addr: raw.addr.into(),
            state: match raw.state {
                abi::P2PMEM_PROVIDER_LIVE => ProviderState::Live,
                abi::P2PMEM_PROVIDER_REVOKING => ProviderState::Revoking,
                _ => ProviderState::Unknown,
            },
            bar: u32::try_from(raw.bar).ok(),
            numa_node: u32::try_from(raw.numa_node).ok(),
            buffers: raw.buffers,
            bar_offset: raw.bar_offset,
            size: raw.size,
            free: raw.free,
            largest: raw.largest,
            kernel_reserve: raw.kernel_reserve,
            pinned: raw.pinned,
            scrubbing: raw.scrubbing,
            vendor: raw.vendor,
            device: raw.device,
            class: raw.class,
            pageless: raw.flags & abi::P2PMEM_PROVIDER_PAGELESS != 0,
            exportable: raw.flags & abi::P2PMEM_PROVIDER_EXPORTABLE != 0,
            pinned_exports: raw.flags & abi::P2PMEM_PROVIDER_PINNED_EXPORTS != 0,
            exports: raw.exports,
            driver: Some(text(&raw.driver)).filter(|d| !d.is_empty()),
        }
    }
}

/// How far a provider is from a client; the smaller, the nearer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum PathClass {
    /// The same function, or functions of one device.
    SameDevice,
    /// Below one PCIe switch: traffic stays in that switch.
    SameSwitch,
    /// Below one root port, through more than one switch.
    Switches,
    /// Through the root complex, below one host bridge.
    HostBridge,
    /// Two host bridges of one NUMA node.
    NumaNode,
    /// Two host bridges of two NUMA nodes.
    System,
    /// The kernel says that the client cannot reach the provider.
    Unreachable,
}

impl PathClass {
    /// All classes, nearest first.
    pub const ALL: [Self; 7] = [
        Self::SameDevice,
        Self::SameSwitch,
        Self::Switches,
        Self::HostBridge,
        Self::NumaNode,
        Self::System,
        Self::Unreachable,
    ];

    /// The ABI's number; what this version does not know counts as unreachable, the safe side. 0 means none.
    pub(crate) fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            0 => return None,
            abi::P2PMEM_PATH_SAME_DEVICE => Self::SameDevice,
            abi::P2PMEM_PATH_SAME_SWITCH => Self::SameSwitch,
            abi::P2PMEM_PATH_SWITCHES => Self::Switches,
            abi::P2PMEM_PATH_HOST_BRIDGE => Self::HostBridge,
            abi::P2PMEM_PATH_NUMA_NODE => Self::NumaNode,
            abi::P2PMEM_PATH_SYSTEM => Self::System,
            _ => Self::Unreachable,
        })
    }

    pub(crate) fn to_raw(self) -> u32 {
        match self {
            Self::SameDevice => abi::P2PMEM_PATH_SAME_DEVICE,
            Self::SameSwitch => abi::P2PMEM_PATH_SAME_SWITCH,
            Self::Switches => abi::P2PMEM_PATH_SWITCHES,
            Self::HostBridge => abi::P2PMEM_PATH_HOST_BRIDGE,
            Self::NumaNode => abi::P2PMEM_PATH_NUMA_NODE,
            Self::System => abi::P2PMEM_PATH_SYSTEM,
            Self::Unreachable => abi::P2PMEM_PATH_UNREACHABLE,
        }
    }

    /// The short name, as `p2pmemctl topo` prints it and [`PathClass::from_str`] takes it.
    pub fn short(self) -> &'static str {
        match self {
            Self::SameDevice => "DEV",
            Self::SameSwitch => "SW",
            Self::Switches => "SWS",
            Self::HostBridge => "PHB",
            Self::NumaNode => "NODE",
            Self::System => "SYS",
            Self::Unreachable => "--",
        }
    }

    /// What it means, for a legend.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::SameDevice => "another function of the same device",
            Self::SameSwitch => "one PCIe switch: traffic stays in it",
            Self::Switches => "several PCIe switches below one root port",
            Self::HostBridge => "through the root complex, one host bridge",
            Self::NumaNode => "two host bridges of one NUMA node",
            Self::System => "two host bridges of two NUMA nodes",
            Self::Unreachable => "the client cannot reach the provider",
        }
    }

    /// The path, as part of a message.
    pub(crate) fn way(self) -> &'static str {
        match self {
            Self::SameDevice => "in the same device as",
            Self::SameSwitch => "below the same switch as",
            Self::Switches => "through several switches to",
            Self::HostBridge => "through the host bridge to",
            Self::NumaNode => "through two host bridges of one NUMA node to",
            Self::System => "across NUMA nodes to",
            Self::Unreachable => "unreachable for",
        }
    }

    /// The route of the chosen provider's traffic, as part of a message.
    pub(crate) fn stays(self) -> &'static str {
        match self {
            Self::SameDevice => "is in the same device",
            Self::SameSwitch => "stays in the switch",
            Self::Switches => "stays below one root port",
            Self::HostBridge => "stays below one host bridge",
            Self::NumaNode => "stays in one NUMA node",
            Self::System => "crosses NUMA nodes",
            Self::Unreachable => "is unreachable",
        }
    }
}

impl fmt::Display for PathClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.short())
    }
}

impl FromStr for PathClass {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let reachable = &Self::ALL[..6];
        reachable
            .iter()
            .copied()
            .find(|c| c.short().eq_ignore_ascii_case(name))
            .ok_or_else(|| {
                let names: Vec<_> = reachable.iter().map(|c| c.short()).collect();
                format!("{name:?} is no path class: use one of {}", names.join(", "))
            })
    }
}

/// The path between one provider and one client.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Path {
    /// The provider's id.
    pub provider: u32,
    /// Index of the client in the request.
    pub client: usize,
    /// How far.
    pub class: PathClass,
    /// A port on the path has ACS redirect peer traffic upstream.
    pub acs_redirect: bool,
    /// Peer traffic stays below the common bridge and uses bus addresses.
    pub bus_addr: bool,
    /// Links crossed.
    pub hops: u32,
    /// What the kernel's own `pci_p2pdma_distance_many()` says; none for unreachable.
    pub distance: Option<u32>,
    /// Bandwidth of the slowest link on the path in MB/s in one direction, if a link reports its speed.
    pub bandwidth: Option<u32>,
    /// NUMA distance (10 = local), where both have a node.
    pub numa_distance: Option<u32>,
    /// The lowest bridge above both; none where that is the root complex.
    pub bridge: Option<PciAddr>,
}

impl From<&abi::p2pmem_path> for Path {
    fn from(raw: &abi::p2pmem_path) -> Self {
        Self {
            provider: raw.provider,
            client: raw.client as usize,
            class: PathClass::from_raw(raw.class).unwrap_or(PathClass::Unreachable),
            acs_redirect: raw.flags & abi::P2PMEM_PATH_ACS_REDIRECT != 0,
            bus_addr: raw.flags & abi::P2PMEM_PATH_BUS_ADDR != 0,
            hops: raw.hops,
            distance: u32::try_from(raw.distance).ok(),
            bandwidth: Some(raw.bandwidth).filter(|b| *b != 0),
            numa_distance: Some(raw.numa_distance).filter(|d| *d != 0),
            bridge: Some(PciAddr::from(raw.bridge)).filter(|b| *b != PciAddr::default()),
        }
    }
}

/// Counters of one provider since it came, or of the whole module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Buffers allocated.
    pub allocs: u64,
    /// Buffers whose memory came back.
    pub frees: u64,
    /// Requests that got no memory from anyone.
    pub failed: u64,
    /// Bytes of `allocs`.
    pub alloc_bytes: u64,
    /// Bytes of `frees`.
    pub free_bytes: u64,
    /// User mappings made.
    pub maps: u64,
    /// Bytes cleared between owners.
    pub scrubbed_bytes: u64,
    /// Times a freed buffer had to wait for others' page references.
    pub pinned: u64,
    /// Buffers ended by a revocation.
    pub revoked: u64,
    /// Dma-bufs made.
    pub exports: u64,
    /// Importers attached to them.
    pub attaches: u64,
    /// Importers that were refused.
    pub attach_failed: u64,
}

impl From<abi::p2pmem_stats> for Stats {
    fn from(raw: abi::p2pmem_stats) -> Self {
        Self {
            allocs: raw.allocs,
            frees: raw.frees,
            failed: raw.failed,
            alloc_bytes: raw.alloc_bytes,
            free_bytes: raw.free_bytes,
            maps: raw.maps,
            scrubbed_bytes: raw.scrubbed_bytes,
            pinned: raw.pinned,
            revoked: raw.revoked,
            exports: raw.exports,
            attaches: raw.attaches,
            attach_failed: raw.attach_failed,
        }
    }
}

/// A buffer's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum BufferState {
    /// It can be mapped and used.
    Live,
    /// The buffer is being revoked: its mappings are being removed.
    Revoking,
    /// Its memory is another's: touching a mapping of it ends in SIGBUS.
    Gone,
    /// A state that this version of the library does not know.
    Unknown,
}

/// What the module says of a buffer.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct BufferInfo {
    /// Id of its provider.
    pub provider: u32,
    /// Its size in bytes.
    pub size: u64,
    /// Its first byte in the provider's BAR, where the BAR is known.
    pub bar_offset: Option<u64>,
    /// Its address on the provider's PCI bus; none for callers without CAP_SYS_ADMIN.
    pub bus_addr: Option<u64>,
    /// Whether it can be used.
    pub state: BufferState,
    /// Mappings of it in user space, of all processes.
    pub mappings: u32,
    /// Dma-bufs of it that are not closed yet.
    pub exports: u32,
    /// Importers, such as memory regions of NICs, that are attached to these dma-bufs now.
    pub attachments: u32,
    /// Handles of it on all open files: more than one where it was imported.
    pub handles: u32,
}

impl From<abi::p2pmem_buffer> for BufferInfo {
    fn from(raw: abi::p2pmem_buffer) -> Self {
        Self {
            provider: raw.provider,
            size: raw.size,
            bar_offset: known_offset(raw.bar_offset),
            bus_addr: Some(raw.bus_addr).filter(|a| *a != 0),
            state: match raw.state {
                abi::P2PMEM_BUFFER_LIVE => BufferState::Live,
                abi::P2PMEM_BUFFER_REVOKING => BufferState::Revoking,
                abi::P2PMEM_BUFFER_GONE => BufferState::Gone,
                _ => BufferState::Unknown,
            },
            mappings: raw.mappings,
            exports: raw.exports,
            attachments: raw.attachments,
            handles: raw.handles,
        }
    }
}

/// The ABI says "not known" with all ones.
pub(crate) fn known_offset(raw: u64) -> Option<u64> {
    Some(raw).filter(|o| *o != u64::MAX)
}

/// How memory comes to a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum RegistrationMethod {
    /// A dma-buf and `ibv_reg_dmabuf_mr()`: the method of a stock kernel.
    DmaBuf,
    /// The addresses of a mapping and `ibv_reg_mr()`, which needs an RDMA core with the peer-memory interface.
    PeerMemory,
}

impl fmt::Display for RegistrationMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::DmaBuf => "dma-buf",
            Self::PeerMemory => "peer memory",
        })
    }
}

#[cfg(test)]
mod tests;
