// SPDX-License-Identifier: GPL-2.0

//! Classification of the path between a provider and a client.
//!
//! PCI is a tree: a function has at most one bridge above it, and the walk up ends at a host bridge. The caller collects
//! all functions of the machine in a table ([`Port`]). [`classify`] walks up from both functions to the lowest bridge above
//! both, and finds whether peer traffic turns around there or has to go up to the root complex, and the narrowest link of the
//! path.
//!
//! The kernel routes the traffic as `calc_map_type_and_dist()` (drivers/pci/p2pdma.c) decides. The result agrees with it:
//! hops are counted in the same manner, and [`Path::bus_addr`] is set exactly where the kernel maps bus addresses. Whether the
//! root complex forwards peer traffic depends on the CPU and on the kernel's list of host bridges, so the caller gives
//! that verdict.
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

    /// Returns the address as a number, by which a table of functions is sorted.
    pub(crate) fn number(self) -> u64 {
        (u64::from(self.domain) << 16) | (u64::from(self.bus) << 8) | u64::from(self.devfn)
    }

    /// Whether both are functions of one slot on one bus.
    fn same_slot(self, other: Self) -> bool {
        self.domain == other.domain && self.bus == other.bus && self.devfn >> 3 == other.devfn >> 3
    }
}

/// The role of a function in the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortKind {
    /// Not a bridge.
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

    /// Whether Link Status describes the link above the function, not the one below.
    pub(crate) fn has_link_above(self) -> bool {
        match self {
            Self::RootPort | Self::Downstream => false,
            Self::Endpoint | Self::Upstream | Self::Bridge => true,
        }
    }
}

/// One function in the table of all functions. [`Port::placed`] sets the fields that follow from the bridge above.
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
    /// Index of the bridge above in the table, smaller than the function's own index. `None` on a root bus.
    pub(crate) bridge: Option<usize>,
    /// Number of bridges above.
    pub(crate) depth: u32,
    /// Index of the highest bridge above, or of the function itself on a root bus.
    pub(crate) root: usize,
    /// The walk up to the root bus.
    pub(crate) up: Walk,
    /// Identity of the host bridge, see [`host_bridge_id`].
    pub(crate) host_bridge: u64,
    /// NUMA node of the function, negative if unknown. On a machine with one online node the caller passes that node for
    /// functions without one.
    pub(crate) numa_node: i32,
}

impl Port {
    /// A function on a root bus, without the properties of any.
    pub(crate) const UNPLACED: Self = Self {
        addr: PciAddr {
            domain: 0,
            bus: 0,
            devfn: 0,
        },
        kind: PortKind::Endpoint,
        acs_redirect: false,
        link: 0,
        bridge: None,
        depth: 0,
        root: 0,
        up: Walk::NONE,
        host_bridge: 0,
        numa_node: -1,
    };

    /// Returns the function as the element `at` of a table, below the bridge with that index and entry, if there is one.
    pub(crate) fn placed(mut self, at: usize, bridge: Option<(usize, &Self)>) -> Self {
        let (above, depth, root, mut up) = match bridge {
            Some((index, bridge)) => (Some(index), bridge.depth.saturating_add(1), bridge.root, bridge.up),
            None => (None, 0, at, Walk::NONE),
        };
        up.pass(&self);
        (self.bridge, self.depth, self.root, self.up) = (above, depth, root, up);
        self
    }

    /// Returns the bandwidth of the link above the function in MB/s, 0 if there is none or it is unknown.
    fn link_above(&self) -> u32 {
        match self.kind.has_link_above() {
            true => self.link,
            false => 0,
        }
    }
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

impl Path {
    /// The path to or from a function that is gone.
    pub(crate) const NONE: Self = Self {
        class: PathClass::Unreachable,
        hops: 0,
        acs_redirect: false,
        bus_addr: false,
        bandwidth: 0,
        numa_distance: 0,
        bridge: None,
    };

    /// Returns the result of `pci_p2pdma_distance_many()` for the pair: the hops, or -1 if unreachable.
    pub(crate) fn kernel_distance(&self) -> i32 {
        match self.class {
            PathClass::Unreachable => -1,
            _ => i32::try_from(self.hops).unwrap_or(i32::MAX),
        }
    }
}

/// What a walk up the tree has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    /// Whether the ACS control of a port redirects.
    acs_redirect: bool,
    /// Number of upstream ports and conventional bridges: each switch of a path has its one upstream port in it.
    switches: u32,
    /// Bandwidth of the narrowest link in MB/s, 0 if none is known.
    bandwidth: u32,
}

impl Walk {
    const NONE: Self = Self {
        acs_redirect: false,
        switches: 0,
        bandwidth: 0,
    };

    /// Goes from `port` to the bridge above it.
    fn pass(&mut self, port: &Port) {
        let is_crossed = matches!(port.kind, PortKind::Upstream | PortKind::Bridge);
        self.acs_redirect |= port.acs_redirect;
        self.switches = self.switches.saturating_add(u32::from(is_crossed));
        self.bandwidth = narrowest(self.bandwidth, port.link_above());
    }
}

/// Returns the smaller one of two bandwidths, of which 0 is unknown.
pub(super) fn narrowest(one: u32, other: u32) -> u32 {
    match (one, other) {
        (0, link) | (link, 0) => link,
        (one, other) => one.min(other),
    }
}

/// Returns the bridge above `port`, which has the index `at`, with its index.
fn above<'a>(ports: &'a [Port], at: usize, port: &Port) -> Option<(usize, &'a Port)> {
    // Smaller indexes make every walk end, whatever the table is.
    let bridge = port.bridge.filter(|&bridge| bridge < at)?;
    Some((bridge, ports.get(bridge)?))
}

/// Walks up from two functions to the lowest common bridge. Returns what both walks have passed, and the bridge with its index;
/// `None` if there is none.
fn meet<'a>(
    ports: &'a [Port],
    mut one: (usize, &'a Port),
    mut other: (usize, &'a Port),
) -> Option<(Walk, usize, &'a Port)> {
    let mut walk = Walk::NONE;
    while one.0 != other.0 {
        // The lower one goes up.
        if one.1.depth < other.1.depth {
            core::mem::swap(&mut one, &mut other);
        }
        walk.pass(one.1);
        one = above(ports, one.0, one.1)?;
    }
    Some((walk, one.0, one.1))
}

/// Returns whether two functions, `up_a` and `up_b` steps below `bridge`, belong to one device.
fn same_device((a, up_a): (&Port, u32), (b, up_b): (&Port, u32), bridge: &Port) -> bool {
    match (up_a, up_b) {
        (0, 0) => true,
        // A link has one device at its lower end, even if ARI or SR-IOV gives the functions different bus or device
        // numbers.
        (1, 1) => matches!(bridge.kind, PortKind::RootPort | PortKind::Downstream) || a.addr.same_slot(b.addr),
        _ => false,
    }
}

/// What a path takes from outside of the table of functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Between {
    /// The kernel's distance between the two NUMA nodes, 0 if one is unknown.
    pub(crate) numa_distance: u32,
    /// Whether the root complex forwards traffic between the two host bridges. `None` if this is not known.
    pub(crate) forwards: Option<bool>,
}

/// Classifies the path between a provider and a client, given by their indexes in the table of all functions. An index
/// outside of the table stands for a function that is gone, which nothing reaches.
///
/// Returns `None` if the path goes through the root complex, and [`Between::forwards`] is not known.
///
/// The result is symmetric in `provider` and `client`.
// A call for each path of a snapshot would take a fifth more instructions.
#[inline(always)]
pub(crate) fn classify(ports: &[Port], provider: usize, client: usize, between: Between) -> Option<Path> {
    let (Some(a), Some(b)) = (ports.get(provider), ports.get(client)) else {
        return Some(Path::NONE);
    };
    // Traffic that turns around in the root complex crosses all links above both functions.
    let through_root = |hops, acs_redirect, bridge| {
        let class = match between.forwards? {
            false => PathClass::Unreachable,
            true if a.host_bridge == b.host_bridge => PathClass::HostBridge,
            true if a.numa_node >= 0 && a.numa_node == b.numa_node => PathClass::NumaNode,
            true => PathClass::System,
        };
        Some(Path {
            class,
            hops,
            acs_redirect,
            bus_addr: false,
            bandwidth: narrowest(a.up.bandwidth, b.up.bandwidth),
            numa_distance: between.numa_distance,
            bridge,
        })
    };
    let common = match a.root == b.root {
        true => meet(ports, (provider, a), (client, b)),
        false => None,
    };
    let Some((walk, at, bridge)) = common else {
        let hops = a.depth.saturating_add(b.depth).saturating_add(2);
        return through_root(hops, a.up.acs_redirect || b.up.acs_redirect, None);
    };
    let (up_a, up_b) = (
        a.depth.saturating_sub(bridge.depth),
        b.depth.saturating_sub(bridge.depth),
    );
    let hops = up_a.saturating_add(up_b);
    // If one function is above the other, or both are the same, the bridge above that function is the lowest bridge above
    // both.
    let lowest = match at == provider || at == client {
        true => above(ports, at, bridge).map(|(_, port)| port.addr),
        false => Some(bridge.addr),
    };
    // As in the kernel, the common bridge's own ACS control counts: a port that redirects does not turn peer traffic from
    // below around.
    if walk.acs_redirect || bridge.acs_redirect {
        return through_root(hops, true, lowest);
    }
    // A path that ends in the downstream port above the other function has that switch's upstream port not in it. A
    // conventional bridge is crossed only if it is below the common bridge.
    let turns_in_switch = match bridge.kind {
        PortKind::Upstream => true,
        PortKind::Downstream => up_a == 0 || up_b == 0,
        PortKind::Endpoint | PortKind::RootPort | PortKind::Bridge => false,
    };
    let (class, bandwidth) = if same_device((a, up_a), (b, up_b), bridge) {
        (PathClass::SameDevice, 0)
    } else if walk.switches.saturating_add(u32::from(turns_in_switch)) <= 1 {
        (PathClass::SameSwitch, walk.bandwidth)
    } else {
        (PathClass::Switches, walk.bandwidth)
    };
    Some(Path {
        class,
        hops,
        acs_redirect: false,
        bus_addr: true,
        bandwidth,
        numa_distance: between.numa_distance,
        bridge: lowest,
    })
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

    /// Returns the path if the root complex forwards.
    fn through(ports: &[Port], one: usize, other: usize) -> Path {
        let between = Between {
            numa_distance: 10,
            forwards: Some(true),
        };
        // With a known verdict there is a path.
        classify(ports, one, other, between).unwrap_or(Path::NONE)
    }

    const PORT: Port = Port {
        kind: PortKind::RootPort,
        numa_node: 0,
        ..Port::UNPLACED
    };

    fn function((bus, devfn): (u8, u8), kind: PortKind, link: u32) -> Port {
        let addr = PciAddr { domain: 0, bus, devfn };
        Port {
            addr,
            kind,
            link,
            ..PORT
        }
    }

    #[test]
    fn functions_of_one_device_share_slot_on_bus_with_slots() {
        let classes = |above: PortKind| {
            [(0, 5, 0x81), (0, 5, 0x88), (0, 6, 0x81), (1, 5, 0x81)].map(|(domain, bus, devfn)| {
                let mut other = function((bus, devfn), PortKind::Endpoint, 0);
                other.addr.domain = domain;
                let one = function((5, 0x80), PortKind::Endpoint, 0);
                let bridge = Port { kind: above, ..PORT }.placed(0, None);
                let below = |port: Port, at| port.placed(at, Some((0, &bridge)));
                through(&[bridge, below(one, 1), below(other, 2)], 1, 2).class
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
        for (a, b) in [(0, 1), (1, 0), (1, 1)] {
            let path = through(&[PORT], a, b);
            assert_eq!((path.class, path.kernel_distance()), (PathClass::Unreachable, -1));
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
        let far = |port| Port {
            host_bridge: host_bridge_id(0, 0x80),
            numa_node: 1,
            ..port
        };
        // Each function with the index of the bridge above.
        let functions = [
            (None, PORT),
            (Some(0), function((1, 0), PortKind::Upstream, 2_000)),
            (Some(1), function((2, 0x00), PortKind::Downstream, 0)),
            (Some(1), function((2, 0x08), PortKind::Downstream, 0)),
            (Some(2), function((3, 0), PortKind::Endpoint, 16_000)),
            (Some(3), function((4, 0), PortKind::Endpoint, 15_000)),
            (None, PORT),
            (Some(6), function((5, 0), PortKind::Endpoint, 8_000)),
            (None, far(PORT)),
            (Some(8), far(function((0x81, 0), PortKind::Endpoint, 4_000))),
        ];
        let mut ports = [PORT; 10];
        for (at, (bridge, port)) in functions.into_iter().enumerate() {
            ports[at] = port.placed(at, bridge.map(|bridge| (bridge, &ports[bridge])));
        }
        let (a, b, c, d) = (4, 5, 7, 9);
        for (one, other, class, hops, bandwidth) in [
            (a, a, PathClass::SameDevice, 0, 0),
            (a, b, PathClass::SameSwitch, 4, 15_000),
            (a, c, PathClass::HostBridge, 6, 2_000),
            (c, d, PathClass::System, 4, 4_000),
            (a, d, PathClass::System, 6, 2_000),
        ] {
            let path = through(&ports, one, other);
            assert_eq!((path.class, path.hops, path.bandwidth), (class, hops, bandwidth));
            assert_eq!(path.kernel_distance(), hops as i32);
            let below = class <= PathClass::Switches;
            assert_eq!(path.bus_addr, below);
            assert_eq!(through(&ports, other, one), path);
            // Only traffic that goes to the root complex needs its verdict.
            let between = |forwards| Between {
                numa_distance: 10,
                forwards,
            };
            let unknown = classify(&ports, one, other, between(None));
            assert_eq!(unknown, below.then_some(path));
            let refused = classify(&ports, one, other, between(Some(false))).map(|path| path.class);
            assert!((refused == Some(PathClass::Unreachable)) != below);
        }
    }
}
