// SPDX-License-Identifier: MIT OR Apache-2.0

//! Random PCI trees, and what lies between two of their functions, found by searching the graph.
//!
//! A tree knows more than a walk upwards tells: which functions form one physical device, which ports form one switch.
//! The oracle counts those, and takes none of the shortcuts by which the code under test tells them from a walk.

use crate::policy::path::{
    Chain,
    PathClass,
    PciAddr,
    Port,
    PortKind,
    host_bridge_id, //
};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::{BTreeSet, VecDeque};

/// Number of a function in [`Tree::nodes`].
pub(crate) type NodeId = usize;

/// A host bridge.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host {
    /// Whether it has a PCI domain of its own, or shares the one of the host bridge before it.
    new_domain: bool,
    /// NUMA node, -1 where it has none.
    pub(crate) numa: i32,
    /// Whether the kernel trusts it to forward peer traffic.
    pub(crate) forwards: bool,
}

/// One step of growing a tree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    what: What,
    /// Picks the place.
    place: usize,
    /// Picks a host bridge where the place is one.
    host: usize,
    /// Functions of a device, or downstream ports of a switch.
    count: usize,
    /// Bits, consumed one per function: does it redirect?
    acs: u32,
    /// Bandwidths of the links in turn, 0 for one that does not tell.
    links: [u32; 2],
    /// Whether functions after the first are virtual ones with bus numbers of their own.
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

/// A function to be added to a tree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct New {
    pub(crate) kind: PortKind,
    /// Where to put it on a bus that has slots, `None` for the next free one.
    pub(crate) slot: Option<u8>,
    pub(crate) acs: bool,
    /// Bandwidth of the link above it, where there is one.
    pub(crate) link: u32,
    /// A virtual function, with a bus number of its own.
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
    /// What its Link Status tells.
    link_status: u32,
    /// The physical link above it, 0 where there is none or it does not tell.
    link_above: u32,
    /// Number of the physical device it belongs to.
    pub(crate) device: usize,
    /// Number of the switch it belongs to.
    switch: Option<usize>,
}

/// A machine.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    pub(crate) hosts: Vec<Host>,
    pub(crate) nodes: Vec<Node>,
    domains: Vec<u32>,
    root_buses: Vec<u8>,
    /// Bus below each function, 0 for those that are no bridge.
    buses: Vec<u8>,
    /// Bus numbers given out, per domain.
    next_bus: Vec<u8>,
    next_switch: usize,
    /// First function of each device and what tells devices apart: the parent and, where a parent can have several
    /// devices below it, the slot.
    devices: Vec<(Option<NodeId>, usize, u8)>,
}

/// What the graph says of the way between two functions.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Way {
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

    /// A new bus number. Every domain counts from 0, so that the same numbers stand for different functions.
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
            // One device at the end of a link: function numbers run on through the slots, as with ARI.
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
        // Ports that face down tell of the link below them: a trap for whoever takes it for the one above.
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

    /// A port with a link below it: an empty one if there is one and the step's place is even.
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

    /// The functions that are no bridges.
    pub(crate) fn endpoints(&self) -> Vec<NodeId> {
        self.of_kind(&[PortKind::Endpoint])
    }

    /// The walk upwards, as the module would collect it.
    pub(crate) fn ports(&self, node: NodeId) -> Vec<Port> {
        std::iter::successors(Some(node), |&node| self.nodes[node].parent)
            .map(|node| {
                let node = &self.nodes[node];
                Port {
                    addr: node.addr,
                    kind: node.kind,
                    acs_redirect: node.acs,
                    link: node.link_status,
                }
            })
            .collect()
    }

    /// The chain over a walk.
    pub(crate) fn chain<'a>(&self, node: NodeId, ports: &'a [Port]) -> Chain<'a> {
        let host = self.nodes[node].host;
        Chain {
            ports,
            host_bridge: host_bridge_id(self.domains[host], self.root_buses[host]),
            numa_node: self.hosts[host].numa,
        }
    }

    /// The kernel's NUMA distance, made up: 10 within a node, 21 per step between nodes.
    pub(crate) fn numa_distance(&self, a: NodeId, b: NodeId) -> u32 {
        let (a, b) = (self.numa(a), self.numa(b));
        if a < 0 || b < 0 { 0 } else { 10 + 11 * a.abs_diff(b) }
    }

    fn numa(&self, node: NodeId) -> i32 {
        self.hosts[self.nodes[node].host].numa
    }

    /// What the kernel would say of the pair: the distance, or -1 where a root complex on the way does not forward.
    pub(crate) fn kernel_distance(&self, a: NodeId, b: NodeId) -> i32 {
        let way = self.way(a, b);
        let forwards = |node: NodeId| self.hosts[self.nodes[node].host].forwards;
        if way.through_root && !(forwards(a) && forwards(b)) {
            -1
        } else {
            i32::try_from(way.hops).unwrap()
        }
    }

    /// The vertices from `a` to `b`, found by a breadth-first search; `None` stands for the root complex.
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

    fn ancestors(&self, node: NodeId) -> Vec<NodeId> {
        std::iter::successors(self.nodes[node].parent, |&node| self.nodes[node].parent).collect()
    }

    /// What lies between two functions, for a kernel that says they reach each other.
    pub(crate) fn way(&self, a: NodeId, b: NodeId) -> Way {
        let trail = self.search(a, b);
        let functions: Vec<NodeId> = trail.iter().copied().flatten().collect();
        let acs_redirect = functions.iter().any(|&node| self.nodes[node].acs);
        let over_root = trail.contains(&None);
        let through_root = over_root || acs_redirect;
        let one_device = self.nodes[a].device == self.nodes[b].device;

        // Edges are named by their lower end.
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
                    _ => unreachable!("the root complex is not on this way"),
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
            // A switch is crossed where the way runs over the bus between its ports, or ends in one of them. A
            // conventional bridge is a bus: only who passes from one side of it to the other crosses it.
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
        Way {
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
        // Most steps redirect nowhere, else nearly every way would.
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
