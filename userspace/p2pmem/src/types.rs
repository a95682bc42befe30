// SPDX-License-Identifier: MIT OR Apache-2.0

//! Data that the module reports, as Rust types: providers, paths, counters, buffers.

use std::ffi::c_char;
use std::fmt;
use std::str::FromStr;

use p2pmem_sys as abi;

use crate::addr::PciAddr;

/// Returns the NUL-terminated string in a fixed array, or all of the array if it has no NUL. Replaces bytes that are
/// not UTF-8.
fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars
        .iter()
        .take_while(|c| **c != 0)
        .map(|c| c.to_ne_bytes()[0])
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Formats a number of bytes for people: exact if a binary unit divides it, else with one decimal.
///
/// ```
/// assert_eq!(p2pmem::human_size(16 << 20), "16 MiB");
/// assert_eq!(p2pmem::human_size(1500), "1.5 KiB");
/// ```
pub fn human_size(bytes: u64) -> String {
    let (number, unit) = scaled(bytes);
    format!("{number} {}", ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"][unit])
}

/// Formats a number of bytes as one word, for tables and for options that accept sizes: exact if a binary unit divides
/// it, else with one decimal.
///
/// ```
/// assert_eq!(p2pmem::short_size(16 << 20), "16M");
/// assert_eq!(p2pmem::short_size(1500), "1.5K");
/// ```
pub fn short_size(bytes: u64) -> String {
    let (number, unit) = scaled(bytes);
    format!("{number}{}", ["B", "K", "M", "G", "T", "P", "E"][unit])
}

/// Divides a number of bytes by the largest binary unit that does not exceed it. Returns the quotient and the unit's
/// power of 1024.
fn scaled(bytes: u64) -> (String, usize) {
    let unit = (bytes.max(1).ilog2() / 10) as usize;
    let whole = 1u64 << (10 * unit);
    let number = if bytes % whole == 0 {
        (bytes / whole).to_string()
    } else {
        format!("{:.1}", bytes as f64 / whole as f64)
    };
    (number, unit)
}

/// Version, features and totals of the module: [`Device::info`](crate::Device::info).
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Info {
    /// Version of the module's ABI.
    pub abi_version: u32,
    /// Oldest version of the ABI whose programs work with the module.
    pub abi_compatible: u32,
    /// The module's version.
    pub version: String,
    /// Granularity of buffers and mappings in bytes.
    pub page_size: u32,
    /// `P2PMEM_FEATURE_*` bits.
    pub features: u64,
    /// Number of providers.
    pub providers: u32,
    /// Number of live buffers of all programs.
    pub buffers: u32,
    /// Bytes that p2pmem manages, in all providers.
    pub size: u64,
    /// Free bytes, in all providers.
    pub free: u64,
    /// A number that changes when a provider is added or removed, and when paths are computed again.
    pub generation: u64,
}

impl Info {
    /// Returns whether this library works with the module. A newer module reports the oldest version that it is
    /// compatible with; an older module since version 5 only misses features.
    pub(crate) fn compatible(&self) -> bool {
        (self.abi_compatible..=u32::MAX).contains(&abi::P2PMEM_ABI_VERSION)
            && self.abi_version >= abi::P2PMEM_ABI_COMPATIBLE
    }

    /// Returns the names of this library's features that the module misses.
    ///
    /// ```
    /// # let device = p2pmem::fake::Fake::example().device();
    /// assert!(device.info()?.missing().is_empty());
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    pub fn missing(&self) -> Vec<&'static str> {
        const KNOWN: [(u32, &str); 5] = [
            (abi::P2PMEM_FEATURE_DMABUF, "dma-buf export"),
            (abi::P2PMEM_FEATURE_RULES, "rules"),
            (abi::P2PMEM_FEATURE_IMPORT, "import"),
            (abi::P2PMEM_FEATURE_STRIPE, "stripes"),
            (abi::P2PMEM_FEATURE_ATTACH, "attachments"),
        ];
        let missing = KNOWN.iter().filter(|(bit, _)| self.features & u64::from(*bit) == 0);
        missing.map(|(_, name)| *name).collect()
    }

    /// Returns whether `ibv_reg_mr()` accepts mappings of buffers: the RDMA core has the peer-memory interface, and the
    /// module is registered with it as a client.
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

/// The source of a provider's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ProviderKind {
    /// A BAR of a device bound to the p2pmem driver, published by the administrator.
    Own,
    /// Memory that the device's own driver published in the kernel's peer-to-peer pool.
    Adopted,
    /// Memory that the device's own driver registered with p2pmem.
    Registered,
    /// A BAR of a device bound to vfio-pci: [`Backend::Vfio`](crate::Backend::Vfio).
    Vfio,
    /// A kind that this version of the library does not know.
    Unknown,
}

impl fmt::Display for ProviderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Own => "own",
            Self::Adopted => "adopted",
            Self::Registered => "registered",
            Self::Vfio => "vfio",
            Self::Unknown => "?",
        })
    }
}

/// The number of [`ProviderKind::Vfio`] inside this crate. The ABI has no number for this kind.
pub(crate) const KIND_VFIO: u32 = u32::MAX;

/// The state of a provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ProviderState {
    /// The provider serves allocations.
    Live,
    /// The provider is being removed, and its buffers are being revoked.
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

/// A provider: a PCI function with published memory.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Provider {
    /// Number of the provider: never 0, and never used again while the module is loaded.
    pub id: u32,
    /// Source of the memory.
    pub kind: ProviderKind,
    /// PCI function that has the memory.
    pub addr: PciAddr,
    /// State of the provider.
    pub state: ProviderState,
    /// Number of the BAR, if known.
    pub bar: Option<u32>,
    /// NUMA node of the function, if it is known.
    pub numa_node: Option<u32>,
    /// Number of live buffers in the provider.
    pub buffers: u32,
    /// Offset of the first published byte in the BAR.
    pub bar_offset: u64,
    /// Bytes that p2pmem manages; for an adopted provider, the size of its driver's pool.
    pub size: u64,
    /// Free bytes.
    pub free: u64,
    /// Size in bytes of the largest contiguous piece that one allocation can get now.
    pub largest: u64,
    /// Bytes that stay in the kernel's pool for other drivers.
    pub kernel_reserve: u64,
    /// Bytes of freed buffers that DMA or page references still pin.
    pub pinned: u64,
    /// Bytes of freed buffers that wait to be cleared.
    pub scrubbing: u64,
    /// PCI vendor id.
    pub vendor: u16,
    /// PCI device id.
    pub device: u16,
    /// PCI class code, 24 bits.
    pub class: u32,
    /// The memory has no struct pages: the CPU can access mappings, direct I/O does not work.
    pub pageless: bool,
    /// Buffers in the provider can be exported as dma-bufs, and so be registered with NICs.
    pub exportable: bool,
    /// The administrator allows exports to importers that cannot be revoked.
    pub pinned_exports: bool,
    /// Number of dma-bufs of the provider's buffers that are not closed yet.
    pub exports: u32,
    /// Driver that the function is bound to, if any.
    pub driver: Option<String>,
}

impl Provider {
    /// Returns the place of the memory, as part of a message: the PCI address, and the BAR if known.
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
                KIND_VFIO => ProviderKind::Vfio,
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

/// The distance between a provider and a client. A smaller class is nearer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum PathClass {
    /// The same function, or functions of one device.
    SameDevice,
    /// Below one PCIe switch. Traffic stays in the switch.
    SameSwitch,
    /// Below one root port, through more than one switch.
    Switches,
    /// Through the root complex, below one host bridge.
    HostBridge,
    /// Through two host bridges of one NUMA node.
    NumaNode,
    /// Through host bridges of two NUMA nodes.
    System,
    /// The kernel reports that the client cannot reach the provider.
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

    /// Converts the ABI's number; 0 means none. A class that this version does not know counts as unreachable, so that
    /// it is not used.
    pub fn from_raw(raw: u32) -> Option<Self> {
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

    /// Returns the short name, as `p2pmemctl topo` prints it and [`PathClass::from_str`] accepts it.
    ///
    /// ```
    /// use p2pmem::PathClass;
    ///
    /// assert_eq!("phb".parse::<PathClass>(), Ok(PathClass::HostBridge));
    /// assert_eq!(PathClass::HostBridge.short(), "PHB");
    /// ```
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

    /// Returns a description of the class, for a legend.
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

    /// Returns the path's relation to a client, as part of a message.
    pub(crate) fn relation(self) -> &'static str {
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

    /// Returns where the traffic of the chosen provider stays, as part of a message.
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
                format!("{name:?} is not a path class: use one of {}", names.join(", "))
            })
    }
}

/// The path between one provider and one client.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Path {
    /// Id of the provider.
    pub provider: u32,
    /// Index of the client in the argument of [`Device::paths`](crate::Device::paths).
    pub client: usize,
    /// Class of the path.
    pub class: PathClass,
    /// A port on the path redirects peer traffic upstream (ACS).
    pub acs_redirect: bool,
    /// Peer traffic stays below the common bridge and uses bus addresses.
    pub bus_addr: bool,
    /// Number of links on the path.
    pub hops: u32,
    /// Result of the kernel's `pci_p2pdma_distance_many()`; `None` if the provider is unreachable.
    pub distance: Option<u32>,
    /// Bandwidth of the narrowest link on the path in MB/s in one direction; `None` if no link reports one.
    pub bandwidth: Option<u32>,
    /// NUMA distance (10 = local), if both devices have a NUMA node.
    pub numa_distance: Option<u32>,
    /// The lowest bridge above both devices; `None` if only the root complex is above both.
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

/// Counters of one provider since it was added, or of the whole module: [`Device::stats`](crate::Device::stats).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Number of buffers allocated.
    pub allocs: u64,
    /// Number of buffers whose memory was returned to a provider.
    pub frees: u64,
    /// Number of requests that no provider served.
    pub failed: u64,
    /// Bytes of the buffers in `allocs`.
    pub alloc_bytes: u64,
    /// Bytes of the buffers in `frees`.
    pub free_bytes: u64,
    /// Number of mappings created in user space.
    pub maps: u64,
    /// Bytes cleared between owners.
    pub scrubbed_bytes: u64,
    /// Number of freed buffers that page references pinned.
    pub pinned: u64,
    /// Number of buffers that were revoked.
    pub revoked: u64,
    /// Number of dma-bufs created.
    pub exports: u64,
    /// Number of importers that attached to dma-bufs.
    pub attaches: u64,
    /// Number of importers that were refused.
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

/// The state of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum BufferState {
    /// The buffer can be mapped and used.
    Live,
    /// The buffer is being revoked: its mappings are being removed.
    Revoking,
    /// The buffer has no memory any more. An access to a mapping raises SIGBUS.
    Gone,
    /// A state that this version of the library does not know.
    Unknown,
}

/// State and holders of a buffer: [`Buffer::info`](crate::Buffer::info).
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct BufferInfo {
    /// Id of the buffer's provider.
    pub provider: u32,
    /// Size in bytes.
    pub size: u64,
    /// Offset of the first byte in the provider's BAR, if the BAR is known.
    pub bar_offset: Option<u64>,
    /// Address on the provider's PCI bus; `None` for callers without CAP_SYS_ADMIN.
    pub bus_addr: Option<u64>,
    /// State of the buffer.
    pub state: BufferState,
    /// Number of mappings in user space, in all processes.
    pub mappings: u32,
    /// Number of the buffer's dma-bufs that are not closed yet.
    pub exports: u32,
    /// Number of importers, such as memory regions of NICs, that are attached to these dma-bufs now.
    pub attachments: u32,
    /// Number of handles in all open files: more than one if the buffer was imported.
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

/// Converts an offset; the ABI reports an unknown offset as all ones.
pub(crate) fn known_offset(raw: u64) -> Option<u64> {
    Some(raw).filter(|o| *o != u64::MAX)
}

/// The method by which memory is registered with a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum RegistrationMethod {
    /// A dma-buf and `ibv_reg_dmabuf_mr()`: the method of a stock kernel.
    DmaBuf,
    /// The addresses of a mapping and `ibv_reg_mr()`. Needs an RDMA core with the peer-memory interface.
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
