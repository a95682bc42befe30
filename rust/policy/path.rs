// SPDX-License-Identifier: GPL-2.0

//! Classification of the way between a provider and a client.
//!
//! PCI is a tree: every function has at most one bridge above it, and the walk upwards ends at a
//! host bridge. Whoever asks collects that walk for both functions ([`Chain`]); this file says what
//! lies between them ([`classify`]): where the two walks meet, whether peer traffic turns around
//! there or has to go up to the root complex, and how narrow the way is.
//!
//! The kernel's `calc_map_type_and_dist()` (drivers/pci/p2pdma.c) routes the traffic. What is said
//! here agrees with it: hops are counted as it counts them, and a path has [`Path::bus_addr`]
//! exactly where it maps bus addresses. Whether the root complex forwards peer traffic at all
//! depends on the CPU and on a list of known root devices, so that verdict is not computed here but
//! passed in.
//!
//! The file is pure: it needs nothing but `core`, allocates nothing, cannot panic, and holds no
//! `unsafe`. The same text is compiled into the module and into the host tests of tests/suites/pure.

/// Where a PCI function is.
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
    /// An address as user space has it (`struct p2pmem_pci_addr`, as a number of the machine's byte order). None where the
    /// reserved bytes are not zero.
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

    /// Whether both are functions in one slot of one bus.
    fn same_slot(self, other: Self) -> bool {
        self.domain == other.domain && self.bus == other.bus && self.devfn >> 3 == other.devfn >> 3
    }
}

/// What a function on the way up is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortKind {
    /// No bridge: the function a chain begins with.
    Endpoint,
    /// A root port: a bridge of the root complex.
    RootPort,
    /// The port of a switch that faces the root complex. Every switch has exactly one.
    Upstream,
    /// A port of a switch that faces away from the root complex.
    Downstream,
    /// A bridge to or from conventional PCI.
    Bridge,
}

impl PortKind {
    /// From the Device/Port Type of the PCI Express capability (`PCI_EXP_TYPE_*`, `None` for a
    /// function without that capability) and from whether the header is one of a bridge.
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

/// One function on the way up from an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    /// Which function it is.
    pub(crate) addr: PciAddr,
    /// What it is.
    pub(crate) kind: PortKind,
    /// Whether its ACS control redirects peer traffic: P2P Request Redirect, P2P Completion
    /// Redirect or P2P Egress Control is set. `false` for a function without the capability.
    pub(crate) acs_redirect: bool,
    /// Bandwidth in one direction of the link that the function's own Link Status describes, MB/s,
    /// 0 where it does not tell. Root ports and downstream ports describe the link *below* them,
    /// which the function below describes as well: theirs is not looked at. A virtual function's
    /// Link Status is reserved: give the physical function's.
    pub(crate) link: u32,
}

impl Port {
    /// Bandwidth of the link above the function, 0 where there is none or it does not tell.
    fn link_above(&self) -> u32 {
        match self.kind {
            PortKind::RootPort | PortKind::Downstream => 0,
            PortKind::Endpoint | PortKind::Upstream | PortKind::Bridge => self.link,
        }
    }
}

/// The walk from a function up to the root bus.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chain<'a> {
    /// The function itself first, then each `pci_upstream_bridge()`, the last one on the root bus.
    /// A chain without a port stands for a function that is gone: nothing reaches it.
    pub(crate) ports: &'a [Port],
    /// Identity of the host bridge, see [`host_bridge_id`].
    pub(crate) host_bridge: u64,
    /// NUMA node of the function, negative where it is unknown. On a machine with one node online
    /// the caller passes that node for functions that have none, since there is no other they could
    /// belong to.
    pub(crate) numa_node: i32,
}

/// Identity of a host bridge: domain and number of its root bus.
pub(crate) fn host_bridge_id(domain: u32, root_bus: u8) -> u64 {
    (u64::from(domain) << 8) | u64::from(root_bus)
}

/// How far a provider is from a client; smaller is nearer. The values are those of `enum
/// p2pmem_path_class`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub(crate) enum PathClass {
    /// The same function, or functions of one device, and the traffic stays in that device.
    SameDevice = 1,
    /// Through one switch (or one conventional bridge).
    SameSwitch = 2,
    /// Below one root port, through more than one switch.
    Switches = 3,
    /// Through the root complex, below one host bridge.
    HostBridge = 4,
    /// Two host bridges of one NUMA node.
    NumaNode = 5,
    /// Two host bridges of two NUMA nodes, or of nodes that are not known.
    System = 6,
    /// The kernel says that the client cannot reach the provider.
    Unreachable = 255,
}

impl PathClass {
    /// All of them, the nearest first.
    pub(crate) const ALL: [Self; 7] = [
        Self::SameDevice,
        Self::SameSwitch,
        Self::Switches,
        Self::HostBridge,
        Self::NumaNode,
        Self::System,
        Self::Unreachable,
    ];

    /// The number the ABI has for it.
    pub(crate) fn as_raw(self) -> u32 {
        self as u32
    }

    /// From the number the ABI has for it; `None` for a number that is no class.
    pub(crate) fn from_raw(raw: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|class| class.as_raw() == raw)
    }
}

/// The way between one provider and one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Path {
    /// How far it is.
    pub(crate) class: PathClass,
    /// Steps from both functions to the lowest bridge both walks contain, or to the host bridges
    /// where there is none. ACS redirection does not change the number: the kernel does not count
    /// the detour either.
    pub(crate) hops: u32,
    /// What `pci_p2pdma_distance_many()` says of the pair, negative for unreachable.
    pub(crate) distance: i32,
    /// A port on the way redirects peer traffic upstream.
    pub(crate) acs_redirect: bool,
    /// Peer traffic uses bus addresses and stays below the common bridge.
    pub(crate) bus_addr: bool,
    /// Bandwidth of the narrowest link the traffic crosses, MB/s in one direction, 0 where none
    /// tells. Traffic that the root complex turns around crosses all links of both walks, traffic
    /// within a device none.
    pub(crate) bandwidth: u32,
    /// The kernel's NUMA distance between the two nodes (10 = local), 0 where one is not known.
    pub(crate) numa_distance: u32,
    /// The lowest bridge that both are below, `None` where that is the root complex.
    pub(crate) bridge: Option<PciAddr>,
}

/// The elements with their indexes. `enumerate()` and `position()` count with an overflow check that
/// panics, although no slice is long enough; a range that is as long as the slice needs none.
pub(crate) fn indexed<T>(slice: &[T]) -> impl Iterator<Item = (usize, &T)> {
    (0..slice.len()).zip(slice)
}

/// Where two walks meet: how many steps up in the first and in the second. The lowest such place.
fn meet(a: &[Port], b: &[Port]) -> Option<(usize, usize)> {
    indexed(a).find_map(|(i, port)| {
        indexed(b)
            .find(|(_, other)| other.addr == port.addr)
            .map(|(j, _)| (i, j))
    })
}

/// Whether two functions that are `up_a` and `up_b` steps below the bridge `bridge` belong to one
/// device.
fn same_device(a: &[Port], b: &[Port], (up_a, up_b): (usize, usize), bridge: &Port) -> bool {
    match (up_a, up_b) {
        (0, 0) => true,
        (1, 1) => match (bridge.kind, a.first(), b.first()) {
            // A link has one device at its lower end, whatever bus and device numbers its functions
            // have: with ARI and SR-IOV they need not share either.
            (PortKind::RootPort | PortKind::Downstream, _, _) => true,
            (_, Some(a), Some(b)) => a.addr.same_slot(b.addr),
            _ => false,
        },
        _ => false,
    }
}

/// The narrowest of the links above `ports` that tell, 0 where none does.
fn narrowest<'a>(ports: impl Iterator<Item = &'a Port>) -> u32 {
    ports.map(Port::link_above).filter(|&link| link != 0).min().unwrap_or(0)
}

/// Says what lies between a provider and a client.
///
/// `kernel_distance` is what `pci_p2pdma_distance_many()` says of this one client; where it is
/// negative the path is unreachable, whatever the walks look like. `numa_distance` is the kernel's
/// distance between the two nodes; it is not looked at where one of them is unknown.
///
/// The result does not depend on which of the two is the provider.
pub(crate) fn classify(provider: &Chain<'_>, client: &Chain<'_>, kernel_distance: i32, numa_distance: u32) -> Path {
    let (a, b) = (provider.ports, client.ports);
    let common = meet(a, b);
    let (up_a, up_b) = common.unwrap_or((a.len(), b.len()));
    let bridge = common.and_then(|(i, _)| a.get(i));
    let below = || a.iter().take(up_a).chain(b.iter().take(up_b));

    // The common bridge's own control counts too, as it does for the kernel: a port that redirects
    // does not turn around what comes from below it.
    let acs_redirect = below().chain(bridge).any(|port| port.acs_redirect);

    let class_below = match bridge {
        Some(bridge) if !acs_redirect => {
            // Each switch on the way has its one upstream port on the way, except where the way ends
            // in the downstream port above the other end. A conventional bridge is crossed only if
            // it is below the place where the walks meet.
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

    // A bridge is not below itself: where one of the two is on the other's way up, or they are the
    // same function, the bridge above counts.
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

/// Bandwidth in one direction of a link, MB/s (10^6 bytes), rounded down, after line encoding and
/// before packet overhead. `speed` and `width` are the Current Link Speed and Negotiated Link Width
/// of a Link Status register; 0 for codes that are reserved, which is what a function that is gone
/// reads as.
pub(crate) fn link_bandwidth(speed: u8, width: u8) -> u32 {
    // Million bits per second and lane times the share of them (over the divisor) that is left
    // after the encoding.
    let (per_lane, divisor) = match speed {
        1 => (2_500_u32 * 8, 10_u32),
        2 => (5_000 * 8, 10),
        3 => (8_000 * 128, 130),
        4 => (16_000 * 128, 130),
        5 => (32_000 * 128, 130),
        // Flit mode: 242 of 256 bytes are left after CRC and error correction.
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

/// [`link_bandwidth`] of a Link Status register.
pub(crate) fn link_bandwidth_of_status(link_status: u16) -> u32 {
    let [low, high] = link_status.to_le_bytes();
    link_bandwidth(low & 0xf, (low >> 4) | ((high & 0x3) << 4))
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_path))]
mod tests {
    use super::*;

    #[test]
    fn functions_of_one_device_share_a_slot_where_there_are_several() {
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
        // Buses with slots: the second is in another slot, the others on another bus (virtual functions of anyone).
        for above in [PortKind::Bridge, PortKind::Upstream] {
            assert_eq!(classes(above), [one, two, two, two]);
        }
        // The lower end of a link is one device, whatever the numbers.
        for above in [PortKind::RootPort, PortKind::Downstream] {
            assert_eq!(classes(above), [one; 4]);
        }
    }

    #[test]
    fn functions_that_are_gone_are_unreachable() {
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
        // As a function reads that is gone.
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
    fn numbers_of_classes() {
        for raw in 0..=1000 {
            let known = PathClass::from_raw(raw);
            assert_eq!(known.is_some(), (1..=6).contains(&raw) || raw == 255);
            assert!(known.is_none_or(|class| class.as_raw() == raw));
        }
        assert!(PathClass::SameDevice < PathClass::SameSwitch && PathClass::System < PathClass::Unreachable);
    }

    /// A machine with two host bridges: on the first one a switch with two endpoints, and an endpoint on a root port of
    /// its own; on the second one an endpoint on a root port.
    #[test]
    fn the_kernels_distances() {
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
