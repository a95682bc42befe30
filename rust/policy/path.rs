// SPDX-License-Identifier: GPL-2.0

//! Classification of the path between a provider and a client.
//!
//! PCI is a tree: a function has at most one bridge above it, and the walk up ends at a host bridge. The caller collects
//! that walk for both functions ([`Chain`]). [`classify`] finds where both walks meet, whether peer traffic turns around
//! there or has to go up to the root complex, and the narrowest link of the path.
//!
//! The kernel routes the traffic as `calc_map_type_and_dist()` (drivers/pci/p2pdma.c) decides. The result agrees with it:
//! hops are counted in the same manner, and [`Path::bus_addr`] is set exactly where the kernel maps bus addresses. Whether the
//! root complex forwards peer traffic depends on the CPU and on the kernel's list of host bridges, so the caller passes
//! that verdict in.
//!
//! The file is pure: it needs nothing but `core`, allocates nothing, cannot panic, takes no lock, and has no `unsafe`. The
//! module and the host tests of tests/suites/pure compile the same source.

/// Address of a PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PciAddr {
    /// PCI domain (segment).
    pub(crate) domain: u32,
    /// Bus number.
    pub(crate) bus: u8,
    /// Device number << 3 | function number.
    pub(crate) devfn: u8,
}

impl PciAddr {
    /// Converts an address of user space: `struct p2pmem_pci_addr` as a number in native byte order. `None` if reserved
    /// bytes are not zero.
    pub(crate) fn from_raw(raw: u64) -> Option<Self> {
        let [d0, d1, d2, d3, bus, devfn, 0, 0] = raw.to_ne_bytes() else {
            return None;
        };
        Some(Self {
            domain: u32::from_ne_bytes([d0, d1, d2, d3]),
            bus,
            devfn,
        })
    }

    /// Whether both are functions of one slot on one bus.
    fn same_slot(self, other: Self) -> bool {
        self.domain == other.domain && self.bus == other.bus && self.devfn >> 3 == other.devfn >> 3
    }
}

/// The role of a function in a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortKind {
    /// Not a bridge: the first function of a walk.
    Endpoint,
    /// A root port: a bridge of the root complex.
    RootPort,
    /// The port of a switch towards the root complex. A switch has exactly one.
    Upstream,
    /// A port of a switch away from the root complex.
    Downstream,
    /// A bridge to or from conventional PCI.
    Bridge,
}

impl PortKind {
    /// Converts the Device/Port Type of the PCI Express capability (`PCI_EXP_TYPE_*`, `None` without that capability).
    /// `is_bridge` is whether the header type is that of a bridge.
    pub(crate) fn from_pcie_type(pcie_type: Option<u8>, is_bridge: bool) -> Self {
        match (pcie_type, is_bridge) {
            (_, false) => Self::Endpoint,
            (Some(0x4), true) => Self::RootPort,
            (Some(0x5), true) => Self::Upstream,
            (Some(0x6), true) => Self::Downstream,
            (_, true) => Self::Bridge,
        }
    }
}

/// One function of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    /// The function's address.
    pub(crate) addr: PciAddr,
    /// The function's role.
    pub(crate) kind: PortKind,
    /// Whether the ACS control redirects peer traffic: P2P Request Redirect, P2P Completion Redirect or P2P Egress Control
    /// is set. `false` for a function without the capability.
    pub(crate) acs_redirect: bool,
    /// Bandwidth of the link that the function's Link Status describes, in one direction in MB/s, 0 if unknown. For root
    /// ports and downstream ports that is the link *below* the port, which the function below describes too, so the value
    /// is ignored there. A virtual function's Link Status is reserved: pass that of the physical function.
    pub(crate) link: u32,
}

impl Port {
    /// Returns the bandwidth of the link above the function in MB/s, 0 if there is none or it is unknown.
    fn link_above(&self) -> u32 {
        match self.kind {
            PortKind::RootPort | PortKind::Downstream => 0,
            PortKind::Endpoint | PortKind::Upstream | PortKind::Bridge => self.link,
        }
    }
}

/// The walk from a function up to its root bus.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chain<'a> {
    /// The function itself, then each `pci_upstream_bridge()` up to the root bus. Empty for a function that is gone:
    /// nothing reaches it.
    pub(crate) ports: &'a [Port],
    /// Identity of the host bridge, see [`host_bridge_id`].
    pub(crate) host_bridge: u64,
    /// NUMA node of the function, negative if unknown. On a machine with one online node the caller passes that node for
    /// functions without one.
    pub(crate) numa_node: i32,
}

/// Returns the identity of a host bridge, made of the domain and number of its root bus.
pub(crate) fn host_bridge_id(domain: u32, root_bus: u8) -> u64 {
    (u64::from(domain) << 8) | u64::from(root_bus)
}

/// The distance class of a path, smaller is nearer. The values are those of `enum p2pmem_path_class`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub(crate) enum PathClass {
    /// One function, or functions of one device whose traffic stays in the device.
    SameDevice = 1,
    /// Through one switch, or one conventional PCI bridge.
    SameSwitch = 2,
    /// Through several switches below one root port.
    Switches = 3,
    /// Through the root complex, below one host bridge.
    HostBridge = 4,
    /// Between two host bridges of one NUMA node.
    NumaNode = 5,
    /// Between two host bridges of different or unknown NUMA nodes.
    System = 6,
    /// The kernel refuses peer traffic between provider and client.
    Unreachable = 255,
}

impl PathClass {
    /// All classes, the nearest first.
    pub(crate) const ALL: [Self; 7] = [
        Self::SameDevice,
        Self::SameSwitch,
        Self::Switches,
        Self::HostBridge,
        Self::NumaNode,
        Self::System,
        Self::Unreachable,
    ];

    /// Returns the number that the ABI has for the class.
    pub(crate) fn as_raw(self) -> u32 {
        self as u32
    }

    /// Converts a number of the ABI. `None` if the number is no class.
    pub(crate) fn from_raw(raw: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|class| class.as_raw() == raw)
    }
}

/// The path between a provider and a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Path {
    /// The distance class.
    pub(crate) class: PathClass,
    /// Steps from both functions up to the lowest common bridge, or to the host bridges if there is none. As in the kernel,
    /// an ACS redirection does not change the number.
    pub(crate) hops: u32,
    /// The result of `pci_p2pdma_distance_many()` for the pair, negative if unreachable.
    pub(crate) distance: i32,
    /// Whether a port of the path redirects peer traffic upstream.
    pub(crate) acs_redirect: bool,
    /// Whether peer traffic uses bus addresses and stays below the common bridge.
    pub(crate) bus_addr: bool,
    /// Bandwidth of the narrowest link of the path, in one direction in MB/s, 0 if unknown. Traffic that turns around in
    /// the root complex crosses all links of both walks, traffic within a device none.
    pub(crate) bandwidth: u32,
    /// The kernel's NUMA distance between both nodes (10 is local), 0 if a node is unknown.
    pub(crate) numa_distance: u32,
    /// The lowest bridge above both functions, `None` if that is the root complex.
    pub(crate) bridge: Option<PciAddr>,
}

/// Iterates over elements and indexes. `enumerate()` and `position()` have an overflow check that can panic; a range of the
/// slice's length has none.
pub(crate) fn indexed<T>(slice: &[T]) -> impl Iterator<Item = (usize, &T)> {
    (0..slice.len()).zip(slice)
}

/// Returns the steps up to the lowest common function in both walks.
fn meet(a: &[Port], b: &[Port]) -> Option<(usize, usize)> {
    indexed(a).find_map(|(i, port)| {
        indexed(b)
            .find(|(_, other)| other.addr == port.addr)
            .map(|(j, _)| (i, j))
    })
}

/// Whether two functions, `up_a` and `up_b` steps below `bridge`, belong to one device.
fn same_device(a: &[Port], b: &[Port], (up_a, up_b): (usize, usize), bridge: &Port) -> bool {
    match (up_a, up_b) {
        (0, 0) => true,
        (1, 1) => match (bridge.kind, a.first(), b.first()) {
            // A link has one device at its lower end, even if ARI or SR-IOV gives the functions different bus or device
            // numbers.
            (PortKind::RootPort | PortKind::Downstream, _, _) => true,
            (_, Some(a), Some(b)) => a.addr.same_slot(b.addr),
            _ => false,
        },
        _ => false,
    }
}

/// Returns the narrowest known link above `ports` in MB/s, 0 if none is known.
fn narrowest<'a>(ports: impl Iterator<Item = &'a Port>) -> u32 {
    ports.map(Port::link_above).filter(|&link| link != 0).min().unwrap_or(0)
}

/// Classifies the path between a provider and a client.
///
/// `kernel_distance` is the result of `pci_p2pdma_distance_many()` for this client alone; if it is negative the path is
/// unreachable, whatever the walks are. `numa_distance` is the kernel's distance between the two nodes, ignored if one is
/// unknown.
///
/// The result is symmetric in `provider` and `client`.
pub(crate) fn classify(provider: &Chain<'_>, client: &Chain<'_>, kernel_distance: i32, numa_distance: u32) -> Path {
    let (a, b) = (provider.ports, client.ports);
    let common = meet(a, b);
    let (up_a, up_b) = common.unwrap_or((a.len(), b.len()));
    let bridge = common.and_then(|(i, _)| a.get(i));
    let below = || a.iter().take(up_a).chain(b.iter().take(up_b));

    // As in the kernel, the common bridge's own ACS control counts: a port that redirects does not turn peer traffic from
    // below around.
    let acs_redirect = below().chain(bridge).any(|port| port.acs_redirect);

    let class_below = match bridge {
        Some(bridge) if !acs_redirect => {
            // Each switch of the path has its one upstream port in it, unless the path ends in the downstream port above
            // the other function. A conventional bridge is crossed only if it is below the common bridge.
            let turns_in_switch = match bridge.kind {
                PortKind::Upstream => true,
                PortKind::Downstream => up_a == 0 || up_b == 0,
                PortKind::Endpoint | PortKind::RootPort | PortKind::Bridge => false,
            };
            let crossed = below()
                .filter(|port| matches!(port.kind, PortKind::Upstream | PortKind::Bridge))
                .fold(usize::from(turns_in_switch), |crossed, _| crossed.saturating_add(1));
            Some(if same_device(a, b, (up_a, up_b), bridge) {
                PathClass::SameDevice
            } else if crossed <= 1 {
                PathClass::SameSwitch
            } else {
                PathClass::Switches
            })
        }
        _ => None,
    };

    let nodes_known = provider.numa_node >= 0 && client.numa_node >= 0;
    let reachable = kernel_distance >= 0 && !a.is_empty() && !b.is_empty();
    let class = match class_below {
        _ if !reachable => PathClass::Unreachable,
        Some(class) => class,
        None if bridge.is_some() || provider.host_bridge == client.host_bridge => PathClass::HostBridge,
        None if nodes_known && provider.numa_node == client.numa_node => PathClass::NumaNode,
        None => PathClass::System,
    };

    let bandwidth = match class_below {
        Some(PathClass::SameDevice) => 0,
        Some(_) => narrowest(below()),
        None => narrowest(a.iter().chain(b)),
    };

    // If one function is above the other, or both are the same, the bridge above that function is the lowest bridge above
    // both.
    let lowest = common.and_then(|(i, j)| {
        let own = usize::from(i == 0 || j == 0);
        a.get(i.saturating_add(own))
    });

    Path {
        class,
        hops: u32::try_from(up_a.saturating_add(up_b)).unwrap_or(u32::MAX),
        distance: kernel_distance,
        acs_redirect,
        bus_addr: reachable && class_below.is_some(),
        bandwidth,
        numa_distance: if nodes_known { numa_distance } else { 0 },
        bridge: lowest.map(|port| port.addr),
    }
}

/// Returns the bandwidth of a link in one direction, in MB/s (10^6 bytes), rounded down, after line encoding and before
/// packet overhead. `speed` and `width` are the Current Link Speed and Negotiated Link Width fields of Link Status. 0 for
/// reserved codes, which a function that is gone returns.
pub(crate) fn link_bandwidth(speed: u8, width: u8) -> u32 {
    // Mbit/s per lane, multiplied by the dividend of the encoding's efficiency, and its divisor.
    let (per_lane, divisor) = match speed {
        1 => (2_500_u32 * 8, 10_u32),
        2 => (5_000 * 8, 10),
        3 => (8_000 * 128, 130),
        4 => (16_000 * 128, 130),
        5 => (32_000 * 128, 130),
        // FLIT mode: 242 of 256 bytes remain after CRC and forward error correction.
        6 => (64_000 * 242, 256),
        _ => return 0,
    };
    match width {
        1 | 2 | 4 | 8 | 12 | 16 | 32 => per_lane
            .saturating_mul(u32::from(width))
            .checked_div(divisor.saturating_mul(8))
            .unwrap_or(0),
        _ => 0,
    }
}

/// Returns [`link_bandwidth`] of a Link Status register.
pub(crate) fn link_bandwidth_of_status(link_status: u16) -> u32 {
    let [low, high] = link_status.to_le_bytes();
    link_bandwidth(low & 0xf, (low >> 4) | ((high & 0x3) << 4))
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_path))]
mod tests {
    use super::*;

    #[test]
    fn functions_of_one_device_share_slot_on_bus_with_slots() {
        let port = |domain, bus, devfn, kind| Port {
            addr: PciAddr { domain, bus, devfn },
            kind,
            acs_redirect: false,
            link: 0,
        };
        let classes = |above: PortKind| {
            [(0, 5, 0x81), (0, 5, 0x88), (0, 6, 0x81), (1, 5, 0x81)].map(|(domain, bus, devfn)| {
                let a = [port(0, 5, 0x80, PortKind::Endpoint), port(0, 1, 0, above)];
                let b = [port(domain, bus, devfn, PortKind::Endpoint), port(0, 1, 0, above)];
                let chain = |ports| Chain {
                    ports,
                    host_bridge: 0,
                    numa_node: 0,
                };
                classify(&chain(&a), &chain(&b), 2, 10).class
            })
        };
        let (one, two) = (PathClass::SameDevice, PathClass::SameSwitch);
        // Buses with slots: the second function is in another slot, the others are on another bus (virtual functions of any
        // device).
        for above in [PortKind::Bridge, PortKind::Upstream] {
            assert_eq!(classes(above), [one, two, two, two]);
        }
        // Below a link is one device, whatever the numbers are.
        for above in [PortKind::RootPort, PortKind::Downstream] {
            assert_eq!(classes(above), [one; 4]);
        }
    }

    #[test]
    fn removed_functions_are_unreachable() {
        let ports = [Port {
            addr: PciAddr {
                domain: 0,
                bus: 1,
                devfn: 0,
            },
            kind: PortKind::Endpoint,
            acs_redirect: false,
            link: 984,
        }];
        let here = Chain {
            ports: &ports,
            host_bridge: 0,
            numa_node: 0,
        };
        let gone = Chain { ports: &[], ..here };
        for (a, b) in [(&here, &gone), (&gone, &here), (&gone, &gone)] {
            let path = classify(a, b, 0, 10);
            assert_eq!(path.class, PathClass::Unreachable);
            assert!(!path.bus_addr);
            assert_eq!(path.bridge, None);
        }
    }

    #[test]
    fn bandwidth_of_links() {
        let lanes = |speed| [1, 2, 4, 8, 12, 16, 32].map(|width| link_bandwidth(speed, width));
        assert_eq!(lanes(1), [250, 500, 1_000, 2_000, 3_000, 4_000, 8_000]);
        assert_eq!(lanes(2), [500, 1_000, 2_000, 4_000, 6_000, 8_000, 16_000]);
        assert_eq!(lanes(3), [984, 1_969, 3_938, 7_876, 11_815, 15_753, 31_507]);
        assert_eq!(lanes(4), [1_969, 3_938, 7_876, 15_753, 23_630, 31_507, 63_015]);
        assert_eq!(lanes(5), [3_938, 7_876, 15_753, 31_507, 47_261, 63_015, 126_030]);
        assert_eq!(lanes(6), [7_562, 15_125, 30_250, 60_500, 90_750, 121_000, 242_000]);
    }

    #[test]
    fn link_status_registers() {
        assert_eq!(link_bandwidth_of_status(0x0011), 250);
        assert_eq!(link_bandwidth_of_status(0x1103), 15_753);
        assert_eq!(link_bandwidth_of_status(0x7083), 7_876);
        assert_eq!(link_bandwidth_of_status(0x0204), 63_015);
        assert_eq!(link_bandwidth_of_status(0), 0);
        // The value that a function returns when it is gone.
        assert_eq!(link_bandwidth_of_status(0xffff), 0);
        for status in 0..=u16::MAX {
            let (speed, width) = (u32::from(status & 0xf), u32::from((status >> 4) & 0x3f));
            let valid = (1..=6).contains(&speed) && [1, 2, 4, 8, 12, 16, 32].contains(&width);
            let told = link_bandwidth_of_status(status) != 0;
            assert_eq!(told, valid);
        }
    }

    #[test]
    fn kinds_of_ports() {
        for (pcie_type, is_bridge, kind) in [
            (Some(0x0), false, PortKind::Endpoint),
            (Some(0x1), false, PortKind::Endpoint),
            (Some(0x9), false, PortKind::Endpoint),
            (None, false, PortKind::Endpoint),
            (Some(0x4), true, PortKind::RootPort),
            (Some(0x5), true, PortKind::Upstream),
            (Some(0x6), true, PortKind::Downstream),
            (Some(0x7), true, PortKind::Bridge),
            (Some(0x8), true, PortKind::Bridge),
            (None, true, PortKind::Bridge),
            (Some(0xff), false, PortKind::Endpoint),
        ] {
            assert_eq!(PortKind::from_pcie_type(pcie_type, is_bridge), kind);
        }
    }

    #[test]
    fn host_bridges_of_different_domains_differ() {
        assert!(host_bridge_id(0, 1) != host_bridge_id(1, 0));
        assert!(host_bridge_id(0x0100_0000, 0) != host_bridge_id(0, 0));
        assert_eq!(host_bridge_id(u32::MAX, 255), 0xff_ffff_ffff);
    }

    #[test]
    fn class_numbers_round_trip() {
        for raw in 0..=1000 {
            let known = PathClass::from_raw(raw);
            assert_eq!(known.is_some(), (1..=6).contains(&raw) || raw == 255);
            assert!(known.is_none_or(|class| class.as_raw() == raw));
        }
        assert!(PathClass::SameDevice < PathClass::SameSwitch && PathClass::System < PathClass::Unreachable);
    }

    /// Two host bridges. The first has a switch with two endpoints, and a root port with one endpoint. The second has a
    /// root port with one endpoint.
    #[test]
    fn distances_match_kernel() {
        let port = |bus, devfn, kind, link| Port {
            addr: PciAddr { domain: 0, bus, devfn },
            kind,
            acs_redirect: false,
            link,
        };
        let (root, down) = (port(0, 0x08, PortKind::RootPort, 0), PortKind::Downstream);
        let up = port(1, 0, PortKind::Upstream, 2_000);
        let a = [port(3, 0, PortKind::Endpoint, 16_000), port(2, 0x00, down, 0), up, root];
        let b = [port(4, 0, PortKind::Endpoint, 15_000), port(2, 0x08, down, 0), up, root];
        let c = [
            port(5, 0, PortKind::Endpoint, 8_000),
            port(0, 0x10, PortKind::RootPort, 0),
        ];
        let d = [
            port(0x81, 0, PortKind::Endpoint, 4_000),
            port(0x80, 0, PortKind::RootPort, 0),
        ];
        let chain = |ports, bus: u8| Chain {
            ports,
            host_bridge: host_bridge_id(0, bus),
            numa_node: i32::from(bus >> 7),
        };
        let (a, b, c, d) = (chain(&a, 0), chain(&b, 0), chain(&c, 0), chain(&d, 0x80));
        for (one, other, class, hops, bandwidth) in [
            (&a, &a, PathClass::SameDevice, 0, 0),
            (&a, &b, PathClass::SameSwitch, 4, 15_000),
            (&a, &c, PathClass::HostBridge, 6, 2_000),
            (&c, &d, PathClass::System, 4, 4_000),
            (&a, &d, PathClass::System, 6, 2_000),
        ] {
            let path = classify(one, other, 7, 10);
            assert_eq!((path.class, path.hops, path.bandwidth), (class, hops, bandwidth));
            let below = class <= PathClass::Switches;
            assert_eq!(path.bus_addr, below);
            assert_eq!(classify(other, one, 7, 10), path);
            assert_eq!(classify(one, other, -1, 10).class, PathClass::Unreachable);
        }
    }
}
