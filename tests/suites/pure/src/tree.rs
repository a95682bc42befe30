// SPDX-License-Identifier: MIT OR Apache-2.0

//! Random PCI trees, and the properties of the path between two functions, found by searching the graph.
//!
//! A tree has more information than a walk upwards: which functions form one physical device, and which ports form one
//! switch. The oracle counts these, and uses none of the shortcuts by which the code under test derives them from a
//! walk.

use crate::policy::path::{
    Between,
    Path,
    PathClass,
    PciAddr,
    Port,
    PortKind,
    classify,
    host_bridge_id, //
};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::{BTreeSet, VecDeque};

/// The index of a function in [`Tree::nodes`].
pub(crate) type NodeId = usize;

/// A host bridge.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host {
    /// Whether it has its own PCI domain, or shares that of the previous host bridge.
    new_domain: bool,
    /// The NUMA node, or -1 if it has none.
    pub(crate) numa: i32,
    /// Whether it forwards peer traffic, by the kernel's list.
    pub(crate) forwards: bool,
}

/// A step in the growth of a tree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    what: What,
    /// Selects the parent.
    place: usize,
    /// Selects a host bridge, if the parent is one.
    host: usize,
    /// The number of functions of a device, or of downstream ports of a switch.
    count: usize,
    /// One bit for each function: whether it redirects.
    acs: u32,
    /// The bandwidths of the links in turn, 0 for an unknown one.
    links: [u32; 2],
    /// Whether functions after the first are virtual functions with their own bus numbers.
    virtual_functions: bool,
}

#[derive(Clone, Copy, Debug)]
enum What {
    RootPort,
    Switch,
    Device,
    RootDevice,
    Bridge,
    BridgedDevice,
    SwitchDevice,
}

/// A function to add to a tree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct New {
    pub(crate) kind: PortKind,
    /// The slot on a bus with slots; `None` for the next free one.
    pub(crate) slot: Option<u8>,
    pub(crate) acs: bool,
    /// The bandwidth of the link above it, if there is one.
    pub(crate) link: u32,
    /// Whether it is a virtual function with its own bus number.
    pub(crate) own_bus: bool,
}

impl New {
    pub(crate) fn of(kind: PortKind) -> Self {
        Self {
            kind,
            slot: None,
            acs: false,
            link: 0,
            own_bus: false,
        }
    }
}

/// A function.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    pub(crate) parent: Option<NodeId>,
    pub(crate) host: usize,
    pub(crate) kind: PortKind,
    pub(crate) addr: PciAddr,
    pub(crate) acs: bool,
    /// The bandwidth by its Link Status register.
    link_status: u32,
    /// The bandwidth of the physical link above it; 0 if there is none or it is unknown.
    link_above: u32,
    /// The number of its physical device.
    pub(crate) device: usize,
    /// The number of its switch.
    switch: Option<usize>,
}

/// A machine.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    pub(crate) hosts: Vec<Host>,
    pub(crate) nodes: Vec<Node>,
    domains: Vec<u32>,
    root_buses: Vec<u8>,
    /// The bus below each function; 0 for functions that are not bridges.
    buses: Vec<u8>,
    /// The bus numbers in use, by domain.
    next_bus: Vec<u8>,
    next_switch: usize,
    /// The first function of each device, and the key that distinguishes devices: the parent and, if several devices
    /// can be below it, the slot.
    devices: Vec<(Option<NodeId>, usize, u8)>,
}

/// The properties of the path between two functions, found in the graph.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct GraphPath {
    pub(crate) hops: u32,
    pub(crate) acs_redirect: bool,
    pub(crate) through_root: bool,
    pub(crate) class: PathClass,
    pub(crate) bandwidth: u32,
    pub(crate) bridge: Option<PciAddr>,
}

impl Tree {
    pub(crate) fn new(hosts: &[Host]) -> Self {
        let mut tree = Self {
            hosts: hosts.to_vec(),
            nodes: Vec::new(),
            domains: Vec::new(),
            root_buses: Vec::new(),
            buses: Vec::new(),
            next_bus: Vec::new(),
            next_switch: 0,
            devices: Vec::new(),
        };
        for (index, host) in hosts.iter().enumerate() {
            let last = tree.domains.last().copied().unwrap_or(0);
            tree.domains
                .push(if host.new_domain && index > 0 { last + 1 } else { last });
            let bus = tree.bus(index);
            tree.root_buses.push(bus);
        }
        tree
    }

    /// Returns a new bus number. Every domain starts at 0, so equal numbers stand for different functions.
    fn bus(&mut self, host: usize) -> u8 {
        let domain = self.domains[host] as usize;
        self.next_bus.resize(self.next_bus.len().max(domain + 1), 0);
        let bus = self.next_bus[domain];
        self.next_bus[domain] = bus.checked_add(1).expect("trees stay below 256 buses");
        bus
    }

    /// Adds a function below a bridge, or to the root bus of a host bridge.
    pub(crate) fn add(&mut self, parent: Option<NodeId>, host: usize, new: New) -> NodeId {
        let New {
            kind,
            slot,
            acs,
            link,
            own_bus,
        } = new;
        let host = parent.map_or(host, |parent| self.nodes[parent].host);
        let bus = match parent {
            _ if own_bus => self.bus(host),
            Some(parent) => self.buses[parent],
            None => self.root_buses[host],
        };
        let on_link = matches!(
            parent.map(|p| self.nodes[p].kind),
            Some(PortKind::RootPort | PortKind::Downstream)
        );
        let used: BTreeSet<u8> = self
            .nodes
            .iter()
            .filter(|node| node.host == host && node.addr.bus == bus)
            .map(|node| node.addr.devfn)
            .collect();
        let free = |from: u8, to: u8| (from..=to).find(|devfn| !used.contains(devfn));
        let devfn = match slot {
            // One device at the end of a link: its function numbers continue through the slots, as with ARI.
            _ if on_link => free(0, 255),
            Some(slot) => free(slot << 3, (slot << 3) | 7).or_else(|| free(0, 255)),
            None => (0..32)
                .map(|slot| slot << 3)
                .find(|devfn| !used.contains(devfn))
                .or_else(|| free(0, 255)),
        }
        .expect("trees stay below 256 functions on one bus");
        let device_key = (parent, host, if on_link { 0 } else { devfn >> 3 });
        let device = self
            .devices
            .iter()
            .position(|key| *key == device_key)
            .unwrap_or_else(|| {
                self.devices.push(device_key);
                self.devices.len() - 1
            });
        let switch = match (kind, parent) {
            (PortKind::Upstream, _) | (PortKind::Bridge, _) => {
                self.next_switch += 1;
                Some(self.next_switch)
            }
            (PortKind::Downstream, Some(parent)) => self.nodes[parent].switch,
            _ => None,
        };
        // Link Status of a port that faces downstream describes the link below it, so code that takes it for the link
        // above fails.
        let faces_down = matches!(kind, PortKind::RootPort | PortKind::Downstream);
        let link_above = if on_link { link } else { 0 };
        self.nodes.push(Node {
            parent,
            host,
            kind,
            addr: PciAddr {
                domain: self.domains[host],
                bus,
                devfn,
            },
            acs,
            link_status: if faces_down { 1 } else { link_above },
            link_above,
            device,
            switch,
        });
        let below = if kind == PortKind::Endpoint { 0 } else { self.bus(host) };
        self.buses.push(below);
        self.nodes.len() - 1
    }

    fn of_kind(&self, kinds: &[PortKind]) -> Vec<NodeId> {
        (0..self.nodes.len())
            .filter(|&node| kinds.contains(&self.nodes[node].kind))
            .collect()
    }

    /// Returns a port with a link below it: an empty one if there is one and the step's number is even.
    fn port(&mut self, step: &Step) -> NodeId {
        let ports = self.of_kind(&[PortKind::RootPort, PortKind::Downstream]);
        let empty: Vec<NodeId> = ports
            .iter()
            .copied()
            .filter(|&port| self.nodes.iter().all(|node| node.parent != Some(port)))
            .collect();
        let from = if step.place % 4 != 0 && !empty.is_empty() {
            empty
        } else {
            ports
        };
        if from.is_empty() {
            return self.add(None, step.host % self.hosts.len(), New::of(PortKind::RootPort));
        }
        from[step.place / 4 % from.len()]
    }

    fn grow(&mut self, step: &Step) {
        if self.next_bus.iter().any(|&bus| bus > 200) || self.nodes.len() > 150 {
            return;
        }
        let host = step.host % self.hosts.len();
        let acs = |n: usize| (step.acs >> (n % 32)) & 1 != 0;
        let link = |n: usize| step.links[n % 2];
        match step.what {
            What::RootPort => {
                self.add(
                    None,
                    host,
                    New {
                        acs: acs(0),
                        ..New::of(PortKind::RootPort)
                    },
                );
            }
            What::Switch => {
                let port = self.port(step);
                let top = self.add(
                    Some(port),
                    0,
                    New {
                        acs: acs(0),
                        link: link(0),
                        ..New::of(PortKind::Upstream)
                    },
                );
                for n in 0..=step.count {
                    self.add(
                        Some(top),
                        0,
                        New {
                            acs: acs(n + 1),
                            link: link(n),
                            ..New::of(PortKind::Downstream)
                        },
                    );
                }
            }
            What::Device => {
                let port = self.port(step);
                for n in 0..step.count {
                    let vf = n > 0 && step.virtual_functions;
                    self.add(
                        Some(port),
                        0,
                        New {
                            slot: Some(0),
                            acs: acs(n),
                            link: link(n),
                            own_bus: vf,
                            ..New::of(PortKind::Endpoint)
                        },
                    );
                }
            }
            What::RootDevice => {
                for n in 0..step.count {
                    self.add(
                        None,
                        host,
                        New {
                            slot: Some(31),
                            acs: acs(n),
                            ..New::of(PortKind::Endpoint)
                        },
                    );
                }
            }
            What::Bridge => {
                let mut places: Vec<Option<NodeId>> = self
                    .of_kind(&[PortKind::RootPort, PortKind::Downstream, PortKind::Bridge])
                    .into_iter()
                    .map(Some)
                    .collect();
                places.push(None);
                let place = places[step.place % places.len()];
                self.add(
                    place,
                    host,
                    New {
                        acs: acs(0),
                        link: link(0),
                        ..New::of(PortKind::Bridge)
                    },
                );
            }
            What::BridgedDevice | What::SwitchDevice => {
                let kind = match step.what {
                    What::BridgedDevice => PortKind::Bridge,
                    _ => PortKind::Upstream,
                };
                let bridges = self.of_kind(&[kind]);
                if bridges.is_empty() {
                    return;
                }
                let bridge = bridges[step.place % bridges.len()];
                for n in 0..step.count {
                    // Slots 30 and 31: functions of one device and of two.
                    let slot = 30 + ((step.acs >> 16 >> n) & 1) as u8;
                    self.add(
                        Some(bridge),
                        0,
                        New {
                            slot: Some(slot),
                            acs: acs(n),
                            link: link(n),
                            ..New::of(PortKind::Endpoint)
                        },
                    );
                }
            }
        }
    }

    /// Returns the functions that are not bridges.
    pub(crate) fn endpoints(&self) -> Vec<NodeId> {
        self.of_kind(&[PortKind::Endpoint])
    }

    /// Returns all functions, as the module collects them. The index of a function is its [`NodeId`].
    pub(crate) fn ports(&self) -> Vec<Port> {
        let mut ports = Vec::<Port>::new();
        for node in &self.nodes {
            let port = Port {
                addr: node.addr,
                kind: node.kind,
                acs_redirect: node.acs,
                link: node.link_status,
                host_bridge: host_bridge_id(self.domains[node.host], self.root_buses[node.host]),
                numa_node: self.hosts[node.host].numa,
                ..Port::UNPLACED
            };
            ports.push(port.placed(ports.len(), node.parent.map(|parent| (parent, &ports[parent]))));
        }
        ports
    }

    /// Returns the path between two functions, as the code under test finds it.
    pub(crate) fn path(&self, a: NodeId, b: NodeId) -> Path {
        let between = Between {
            numa_distance: self.numa_distance(a, b),
            forwards: Some(self.forwards(a, b)),
        };
        classify(&self.ports(), a, b, between).expect("a known verdict")
    }

    /// Returns whether both root complexes forward peer traffic.
    fn forwards(&self, a: NodeId, b: NodeId) -> bool {
        [a, b].iter().all(|&node| self.hosts[self.nodes[node].host].forwards)
    }

    /// Returns the kernel's NUMA distance in this model: 10 within a node, 21 for each step between nodes.
    pub(crate) fn numa_distance(&self, a: NodeId, b: NodeId) -> u32 {
        let (a, b) = (self.numa(a), self.numa(b));
        if a < 0 || b < 0 { 0 } else { 10 + 11 * a.abs_diff(b) }
    }

    fn numa(&self, node: NodeId) -> i32 {
        self.hosts[self.nodes[node].host].numa
    }

    /// Returns the kernel's answer for the pair: the distance, or -1 if a root complex on the path does not forward.
    pub(crate) fn kernel_distance(&self, a: NodeId, b: NodeId) -> i32 {
        let expected = self.graph_path(a, b);
        if expected.through_root && !self.forwards(a, b) {
            -1
        } else {
            i32::try_from(expected.hops).unwrap()
        }
    }

    /// Returns the vertices from `a` to `b`, found by a breadth-first search; `None` stands for the root complex.
    fn search(&self, a: NodeId, b: NodeId) -> Vec<Option<NodeId>> {
        let neighbours = |vertex: Option<NodeId>| -> Vec<Option<NodeId>> {
            let mut found: Vec<Option<NodeId>> = (0..self.nodes.len())
                .filter(|&node| self.nodes[node].parent == vertex)
                .map(Some)
                .collect();
            if let Some(node) = vertex {
                found.push(self.nodes[node].parent);
            }
            found
        };
        let mut trails = VecDeque::from([vec![Some(a)]]);
        let mut seen = BTreeSet::from([Some(a)]);
        while let Some(trail) = trails.pop_front() {
            let end = *trail.last().unwrap();
            if end == Some(b) {
                return trail;
            }
            for next in neighbours(end) {
                if seen.insert(next) {
                    let mut longer = trail.clone();
                    longer.push(next);
                    trails.push_back(longer);
                }
            }
        }
        unreachable!("a tree is connected");
    }

    /// Returns the function and all bridges above it, from the lowest to that on the root bus.
    pub(crate) fn walk(&self, node: NodeId) -> Vec<NodeId> {
        std::iter::successors(Some(node), |&node| self.nodes[node].parent).collect()
    }

    fn ancestors(&self, node: NodeId) -> Vec<NodeId> {
        self.walk(node).split_off(1)
    }

    /// Returns the properties of the path between two functions that reach each other by the kernel's answer.
    pub(crate) fn graph_path(&self, a: NodeId, b: NodeId) -> GraphPath {
        let trail = self.search(a, b);
        let functions: Vec<NodeId> = trail.iter().copied().flatten().collect();
        let acs_redirect = functions.iter().any(|&node| self.nodes[node].acs);
        let over_root = trail.contains(&None);
        let through_root = over_root || acs_redirect;
        let one_device = self.nodes[a].device == self.nodes[b].device;

        // An edge has the name of its lower end.
        let edges: Vec<NodeId> = if through_root {
            [a, b]
                .into_iter()
                .flat_map(|end| [vec![end], self.ancestors(end)].concat())
                .collect()
        } else if one_device {
            Vec::new()
        } else {
            trail
                .windows(2)
                .map(|pair| match (pair[0], pair[1]) {
                    (Some(x), Some(y)) if self.nodes[x].parent == Some(y) => x,
                    (_, Some(y)) => y,
                    _ => unreachable!("the root complex is not on this path"),
                })
                .collect()
        };
        let links: Vec<u32> = edges
            .iter()
            .map(|&node| self.nodes[node].link_above)
            .filter(|&link| link > 0)
            .collect();

        let (host_a, host_b) = (self.nodes[a].host, self.nodes[b].host);
        let class = if through_root {
            if host_a == host_b {
                PathClass::HostBridge
            } else if self.numa(a) == self.numa(b) && self.numa(a) != -1 {
                PathClass::NumaNode
            } else {
                PathClass::System
            }
        } else if one_device {
            PathClass::SameDevice
        } else {
            // A path crosses a switch if it uses the bus between the switch's ports, or ends in one of them. A
            // conventional bridge is a bus: a path crosses the bridge only from one of its sides to the other.
            let crossed: BTreeSet<usize> = functions
                .iter()
                .filter(|&&node| {
                    let passes = |other: Option<NodeId>| other.is_some_and(|other| functions.contains(&other));
                    let child = functions.iter().any(|&other| self.nodes[other].parent == Some(node));
                    match self.nodes[node].kind {
                        PortKind::Upstream => child || node == a || node == b,
                        PortKind::Downstream => passes(self.nodes[node].parent) || node == a || node == b,
                        _ => passes(self.nodes[node].parent),
                    }
                })
                .filter_map(|&node| self.nodes[node].switch)
                .collect();
            if crossed.len() <= 1 {
                PathClass::SameSwitch
            } else {
                PathClass::Switches
            }
        };

        let above_b = self.ancestors(b);
        let bridge = self.ancestors(a).into_iter().find(|node| above_b.contains(node));
        GraphPath {
            hops: u32::try_from(trail.len() - 1).unwrap(),
            acs_redirect,
            through_root,
            class,
            bandwidth: links.into_iter().min().unwrap_or(0),
            bridge: bridge.map(|node| self.nodes[node].addr),
        }
    }
}

prop_compose! {
    fn host()(
        new_domain in any::<bool>(),
        numa in prop_oneof![1 => Just(-1), 5 => 0..3],
        forwards in prop::bool::weighted(0.8),
    ) -> Host {
        Host { new_domain, numa, forwards }
    }
}

fn what() -> impl Strategy<Value = What> {
    prop_oneof![
        3 => Just(What::RootPort),
        4 => Just(What::Switch),
        9 => Just(What::Device),
        1 => Just(What::RootDevice),
        1 => Just(What::Bridge),
        1 => Just(What::BridgedDevice),
        1 => Just(What::SwitchDevice),
    ]
}

prop_compose! {
    fn step()(
        what in what(),
        place in 0usize..1000,
        host in 0usize..4,
        count in 1usize..4,
        // Most steps redirect nothing; otherwise nearly every path would be redirected.
        acs in prop_oneof![6 => Just(0u32), 1 => any::<u32>(), 2 => (0u32..8).prop_map(|bit| 1 << bit)],
        slots in any::<u16>(),
        links in prop::array::uniform2(prop_oneof![Just(0u32), Just(250), Just(984), Just(15_753), 1u32..100_000]),
        virtual_functions in prop::bool::weighted(0.2),
    ) -> Step {
        Step { what, place, host, count, acs: (acs & 0xffff) | (u32::from(slots) << 16), links, virtual_functions }
    }
}

/// Random machines with at least one endpoint.
pub(crate) fn tree() -> impl Strategy<Value = Tree> {
    (vec(host(), 1..5), vec(step(), 2..24)).prop_map(|(hosts, steps)| {
        let mut tree = Tree::new(&hosts);
        for step in &steps {
            tree.grow(step);
        }
        if tree.endpoints().is_empty() {
            let port = tree.add(None, 0, New::of(PortKind::RootPort));
            tree.add(
                Some(port),
                0,
                New {
                    link: 984,
                    ..New::of(PortKind::Endpoint)
                },
            );
        }
        tree
    })
}

impl Host {
    /// A host bridge that forwards peer traffic.
    pub(crate) fn on_node(numa: i32) -> Self {
        Self {
            new_domain: false,
            numa,
            forwards: true,
        }
    }
}
