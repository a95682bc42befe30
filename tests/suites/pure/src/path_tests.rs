// SPDX-License-Identifier: MIT OR Apache-2.0

//! Path classification: the kernel's own table, and random trees compared with a graph search. Cases that need no tree
//! are in `path.rs` itself.

use crate::policy::path::{
    Between,
    Path,
    PathClass,
    PciAddr,
    Port,
    PortKind,
    classify, //
};
use crate::tree::{
    Host,
    New,
    NodeId,
    Tree,
    tree, //
};
use p2pmem_proptest::config;
use proptest::prelude::*;

fn add(tree: &mut Tree, parent: Option<NodeId>, host: usize, kind: PortKind, link: u32) -> NodeId {
    tree.add(parent, host, New { link, ..New::of(kind) })
}

/// A machine with every case of the kernel's table: two sockets in one PCI domain.
struct Machine {
    tree: Tree,
    /// Endpoints on the root bus of socket 0.
    root_devices: [NodeId; 2],
    /// Endpoints below one root port each, on sockets 0 and 1.
    direct: [[NodeId; 2]; 2],
    /// Endpoints below one switch on each socket.
    switched: [[NodeId; 2]; 2],
    /// The switches' upstream ports.
    upstream: [NodeId; 2],
    /// Endpoints below a second switch, which is below the first switch of socket 0. They are functions of one device.
    nested: [NodeId; 2],
}

fn machine(nodes: [i32; 2]) -> Machine {
    use PortKind::{Downstream, Endpoint, RootPort, Upstream};
    let mut tree = Tree::new(&nodes.map(Host::on_node));
    let t = &mut tree;
    let root_devices = [0; 2].map(|host| add(t, None, host, Endpoint, 0));
    let direct = [0, 1].map(|host| {
        [8_000, 4_000].map(|link| {
            let port = add(t, None, host, RootPort, 0);
            add(t, Some(port), host, Endpoint, link)
        })
    });
    let mut upstream = [0; 2];
    let switched = [0, 1].map(|host| {
        let port = add(t, None, host, RootPort, 0);
        upstream[host] = add(t, Some(port), host, Upstream, 2_000);
        [16_000, 15_000].map(|link| {
            let down = add(t, Some(upstream[host]), host, Downstream, 0);
            add(t, Some(down), host, Endpoint, link)
        })
    });
    let down = add(t, Some(upstream[0]), 0, Downstream, 0);
    let lower = add(t, Some(down), 0, Upstream, 1_000);
    let down = add(t, Some(lower), 0, Downstream, 0);
    let nested = [500, 500].map(|link| add(t, Some(down), 0, Endpoint, link));
    Machine {
        tree,
        root_devices,
        direct,
        switched,
        upstream,
        nested,
    }
}

#[track_caller]
fn check(tree: &Tree, a: NodeId, b: NodeId, class: PathClass, hops: u32, bus_addr: bool, bandwidth: u32) {
    let path = tree.path(a, b);
    assert_eq!(
        (path.class, path.hops, path.bus_addr, path.bandwidth),
        (class, hops, bus_addr, bandwidth),
        "{path:?}"
    );
    assert_eq!(path.kernel_distance(), i32::try_from(hops).unwrap());
}

#[test]
fn paths_match_kernel() {
    use PathClass::{HostBridge, NumaNode, SameDevice, SameSwitch, Switches, System};
    let m = machine([0, 1]);
    let t = &m.tree;
    check(t, m.direct[0][0], m.direct[0][0], SameDevice, 0, true, 0);
    check(t, m.root_devices[0], m.root_devices[0], SameDevice, 0, true, 0);
    check(t, m.nested[0], m.nested[1], SameDevice, 2, true, 0);
    check(t, m.root_devices[0], m.root_devices[1], HostBridge, 2, false, 0);
    check(t, m.switched[0][0], m.switched[0][1], SameSwitch, 4, true, 15_000);
    check(t, m.switched[0][0], m.nested[0], Switches, 6, true, 500);
    check(t, m.direct[0][0], m.direct[0][1], HostBridge, 4, false, 4_000);
    check(t, m.direct[0][0], m.direct[1][0], System, 4, false, 8_000);
    check(t, m.switched[0][0], m.direct[0][0], HostBridge, 6, false, 2_000);
    check(t, m.switched[0][0], m.switched[1][0], System, 8, false, 2_000);
    check(t, m.root_devices[0], m.direct[0][0], HostBridge, 3, false, 8_000);
    let m = machine([1, 1]);
    check(&m.tree, m.switched[0][0], m.switched[1][0], NumaNode, 8, false, 2_000);
}

#[test]
fn unknown_numa_nodes_differ() {
    for nodes in [[-1, -1], [0, -1], [-1, 1]] {
        let m = machine(nodes);
        let path = m.tree.path(m.direct[0][0], m.direct[1][0]);
        assert_eq!((path.class, path.numa_distance), (PathClass::System, 0), "{nodes:?}");
    }
}

#[test]
fn common_bridge_is_found() {
    let m = machine([0, 1]);
    let t = &m.tree;
    let addr = |node: NodeId| t.nodes[node].addr;
    let upstream = m.upstream[0];
    assert_eq!(t.path(m.switched[0][0], m.switched[0][1]).bridge, Some(addr(upstream)));
    assert_eq!(t.path(m.switched[0][0], m.nested[1]).bridge, Some(addr(upstream)));
    assert_eq!(t.path(m.switched[0][0], m.direct[0][0]).bridge, None);
    assert_eq!(t.path(m.root_devices[0], m.root_devices[0]).bridge, None);
    // A function is not below itself, and neither is a port.
    let port = t.nodes[m.direct[0][0]].parent.unwrap();
    assert_eq!(t.path(m.direct[0][0], m.direct[0][0]).bridge, Some(addr(port)));
    assert_eq!(t.path(port, m.direct[0][0]).bridge, None);
    assert_eq!(t.path(m.nested[0], upstream).bridge, t.nodes[upstream].parent.map(addr));
}

#[test]
fn acs_on_any_port_routes_switch_path_through_root_complex() {
    let m = machine([0, 1]);
    let (a, b) = (m.switched[0][0], m.switched[0][1]);
    let on_the_way: Vec<NodeId> = vec![
        a,
        b,
        m.tree.nodes[a].parent.unwrap(),
        m.tree.nodes[b].parent.unwrap(),
        m.upstream[0],
    ];
    for port in on_the_way {
        let mut tree = m.tree.clone();
        tree.nodes[port].acs = true;
        let path = tree.path(a, b);
        assert!(path.acs_redirect && !path.bus_addr, "{path:?}");
        assert_eq!((path.class, path.hops), (PathClass::HostBridge, 4));
        // The link between the switch and the root port is now the narrowest one.
        assert_eq!(path.bandwidth, 2_000);
        assert_eq!(path.bridge, Some(tree.nodes[m.upstream[0]].addr));
    }
    // A port above the common bridge has no effect.
    let mut tree = m.tree.clone();
    let root_port = tree.nodes[m.upstream[0]].parent.unwrap();
    tree.nodes[root_port].acs = true;
    assert_eq!(tree.path(a, b), m.tree.path(a, b));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..config(3000) })]

    /// Every number of a path is the one that a search of the graph finds, for any two functions, bridges included.
    #[test]
    fn paths_agree_with_graph_search(
        tree in tree(),
        picks in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 12),
    ) {
        let endpoints = tree.endpoints();
        for (n, (a, b)) in picks.into_iter().enumerate() {
            let (a, b) = if n < 9 {
                (*a.get(&endpoints), *b.get(&endpoints))
            } else {
                (a.index(tree.nodes.len()), b.index(tree.nodes.len()))
            };
            let expected = tree.graph_path(a, b);
            let path = tree.path(a, b);
            let reachable = tree.kernel_distance(a, b) >= 0;
            prop_assert_eq!(path.hops, expected.hops);
            prop_assert_eq!(path.acs_redirect, expected.acs_redirect);
            prop_assert_eq!(path.bus_addr, reachable && !expected.through_root);
            prop_assert_eq!(path.class, if reachable { expected.class } else { PathClass::Unreachable });
            prop_assert_eq!(path.bandwidth, expected.bandwidth);
            prop_assert_eq!(path.bridge, expected.bridge);
            prop_assert_eq!(path.kernel_distance(), tree.kernel_distance(a, b));
            prop_assert_eq!(path.numa_distance, tree.numa_distance(a, b));
            prop_assert_eq!(path, tree.path(b, a), "the reverse path");
        }
    }

    /// Setting ACS redirection on a port of a path below a bridge moves the path to the root complex, and clearing all
    /// redirections moves it back. Nothing else of the path changes, except the bandwidth.
    #[test]
    fn acs_redirection_moves_path_to_root_complex(tree in tree(), a: prop::sample::Index, b: prop::sample::Index, port: prop::sample::Index) {
        let mut tree = tree;
        for node in &mut tree.nodes {
            node.acs = false;
        }
        for host in &mut tree.hosts {
            host.forwards = true;
        }
        let endpoints = tree.endpoints();
        let (a, b) = (*a.get(&endpoints), *b.get(&endpoints));
        let before = tree.path(a, b);
        prop_assert!(!before.acs_redirect);
        prop_assert_ne!(before.bus_addr, before.class >= PathClass::HostBridge);

        let walk = tree.walk(a);
        let steps = if before.bus_addr {
            // Up to and including the common bridge. For one and the same function, the common bridge is the function
            // itself.
            let other = tree.walk(b);
            1 + walk.iter().position(|node| other.contains(node)).unwrap()
        } else {
            walk.len()
        };
        tree.nodes[walk[port.index(steps)]].acs = true;
        let after = tree.path(a, b);
        prop_assert!(after.acs_redirect && !after.bus_addr);
        prop_assert!(after.class >= PathClass::HostBridge);
        prop_assert!(after.class == PathClass::HostBridge || after.class == before.class);
        let known = |bandwidth: u32| if bandwidth == 0 { u32::MAX } else { bandwidth };
        prop_assert!(known(after.bandwidth) <= known(before.bandwidth));
        let same = Path {
            class: before.class,
            acs_redirect: false,
            bus_addr: before.bus_addr,
            bandwidth: before.bandwidth,
            ..after
        };
        prop_assert_eq!(same, before);
    }

    /// A path is unreachable exactly if the traffic goes to a root complex that does not forward it. Only then is the
    /// verdict on the root complex needed.
    #[test]
    fn root_complex_that_does_not_forward_is_unreachable(tree in tree(), a: prop::sample::Index, b: prop::sample::Index) {
        let endpoints = tree.endpoints();
        let (a, b) = (*a.get(&endpoints), *b.get(&endpoints));
        let through_root = tree.graph_path(a, b).through_root;
        let path = |forwards| classify(&tree.ports(), a, b, Between { numa_distance: 10, forwards });
        let refused = path(Some(false)).expect("a known verdict");
        prop_assert_eq!(refused.class == PathClass::Unreachable, through_root);
        prop_assert_eq!(refused.bus_addr, !through_root);
        prop_assert_eq!(path(None), (!through_root).then_some(refused));
    }

    /// Tables that no machine has (bridges that are no bridges, any kinds in any order, a place that is wrong) give an answer.
    #[test]
    fn arbitrary_tables_are_classified(
        raw in prop::collection::vec((0u8..6, 0u8..5, any::<bool>(), any::<u32>(), prop::option::of(0usize..40), 0usize..40), 0..40),
        a in 0usize..40,
        b in 0usize..40,
        forwards: bool,
    ) {
        let mut ports = Vec::<Port>::new();
        for (bus, kind, acs_redirect, link, bridge, at) in raw {
            let port = Port {
                addr: PciAddr { domain: 0, bus, devfn: 0 },
                kind: [
                    PortKind::Endpoint,
                    PortKind::RootPort,
                    PortKind::Upstream,
                    PortKind::Downstream,
                    PortKind::Bridge,
                ][usize::from(kind)],
                acs_redirect,
                link,
                ..Port::UNPLACED
            };
            ports.push(port.placed(at, bridge.and_then(|bridge| Some((bridge, ports.get(bridge)?)))));
        }
        let path = classify(&ports, a, b, Between { numa_distance: u32::MAX, forwards: Some(forwards) }).expect("a known verdict");
        prop_assert!(path.hops as usize <= 2 * ports.len());
        prop_assert!(path.class != PathClass::Unreachable || !path.bus_addr);
    }
}
