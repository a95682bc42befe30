// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;
use crate::fake::write_pci_function;
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::symlink;

const BRIDGE: &str = "0x060400";
const ACCEL: &str = "0x120000";

/// Returns a configuration space of 4096 bytes with a PCI Express capability of this type, and with this ACS control.
fn config(port_type: u8, acs: Option<u16>) -> Vec<u8> {
    let mut config = vec![0u8; 4096];
    config[0x34] = 0x50;
    // The first capability is power management.
    config[0x50..0x52].copy_from_slice(&[0x01, 0x60]);
    config[0x60..0x63].copy_from_slice(&[0x10, 0x00, (port_type << 4) | 2]);
    if let Some(control) = acs {
        // Advanced Error Reporting is at 0x100, ACS at 0x140.
        config[0x100..0x104].copy_from_slice(&[0x01, 0x00, 0x02, 0x14]);
        config[0x140..0x144].copy_from_slice(&[0x0d, 0x00, 0x01, 0x00]);
        config[0x146..0x148].copy_from_slice(&control.to_le_bytes());
    }
    config
}

/// A sysfs with a two-level switch below a root port, further root ports, and further host bridges.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new() -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        let first = "pci0000:00";
        tree.add(first, "0000:00:01.0", BRIDGE, 0x4);
        let switch = format!("{first}/0000:00:01.0");
        tree.add(&switch, "0000:01:00.0", BRIDGE, 0x5);
        let up = format!("{switch}/0000:01:00.0");
        for (port, below) in [("00", "03"), ("01", "04"), ("02", "05")] {
            tree.add(&up, &format!("0000:02:{port}.0"), BRIDGE, 0x6);
            let down = format!("{up}/0000:02:{port}.0");
            let class = if below == "05" { BRIDGE } else { ACCEL };
            tree.add(
                &down,
                &format!("0000:{below}:00.0"),
                class,
                if class == BRIDGE { 0x5 } else { 0 },
            );
        }
        tree.add(&format!("{up}/0000:02:00.0"), "0000:03:00.1", ACCEL, 0);
        let second = format!("{up}/0000:02:02.0/0000:05:00.0");
        tree.add(&second, "0000:06:00.0", BRIDGE, 0x6);
        tree.add(&format!("{second}/0000:06:00.0"), "0000:07:00.0", ACCEL, 0);
        tree.add(first, "0000:00:02.0", BRIDGE, 0x4);
        tree.add(&format!("{first}/0000:00:02.0"), "0000:08:00.0", ACCEL, 0);
        for (root, bus) in [("pci0000:40", "41"), ("pci0000:80", "81")] {
            let port = format!("0000:{}:00.0", &root[8..]);
            tree.add(root, &port, BRIDGE, 0x4);
            tree.add(&format!("{root}/{port}"), &format!("0000:{bus}:00.0"), ACCEL, 0);
        }
        for (addr, node) in [("08", "0"), ("03", "0"), ("41", "0"), ("81", "1")] {
            tree.put(&format!("0000:{addr}:00.0"), "numa_node", node.as_bytes());
        }
        tree.nodes("0-1", &[("0", "10 21"), ("1", "21 10")]);
        tree
    }

    fn nodes(&self, online: &str, rows: &[(&str, &str)]) {
        let nodes = self.sys().join("devices/system/node");
        for (node, row) in rows {
            let folder = nodes.join(format!("node{node}"));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("distance"), format!("{row}\n")).unwrap();
        }
        fs::write(nodes.join("online"), format!("{online}\n")).unwrap();
    }

    fn sys(&self) -> &FsPath {
        self.0.path()
    }

    fn add(&self, parent: &str, addr: &str, class: &str, port_type: u8) {
        let files = [("class", class), ("numa_node", "-1")];
        let folder = write_pci_function(self.sys(), &format!("{parent}/{addr}"), &files).unwrap();
        fs::write(folder.join("config"), config(port_type, None)).unwrap();
    }

    fn put(&self, addr: &str, file: &str, content: &[u8]) {
        fs::write(self.sys().join("bus/pci/devices").join(addr).join(file), content).unwrap();
    }

    fn path(&self, a: &str, b: &str) -> Path {
        let client = Client::new(b.parse().unwrap());
        path_between_in(self.sys(), a.parse().unwrap(), &client).unwrap()
    }

    fn class(&self, a: &str, b: &str) -> (PathClass, u32) {
        let (there, back) = (self.path(a, b), self.path(b, a));
        assert_eq!(
            (there.class, there.hops, there.bridge),
            (back.class, back.hops, back.bridge)
        );
        (there.class, there.hops)
    }
}

/// The class and hops of each pair.
const PAIRS: [(&str, &str, PathClass, u32); 8] = [
    ("0000:03:00.0", "0000:03:00.0", PathClass::SameDevice, 0),
    ("0000:03:00.0", "0000:03:00.1", PathClass::SameDevice, 2),
    ("0000:03:00.0", "0000:04:00.0", PathClass::SameSwitch, 4),
    ("0000:03:00.0", "0000:07:00.0", PathClass::Switches, 6),
    ("0000:03:00.0", "0000:08:00.0", PathClass::HostBridge, 6),
    ("0000:08:00.0", "0000:41:00.0", PathClass::NumaNode, 4),
    ("0000:08:00.0", "0000:81:00.0", PathClass::System, 4),
    ("0000:04:00.0", "0000:41:00.0", PathClass::System, 6),
];

#[test]
fn classes_and_hops_equal_those_of_module() {
    let tree = Tree::new();
    for (a, b, class, hops) in PAIRS {
        assert_eq!(tree.class(a, b), (class, hops), "{a} {b}");
    }
    let path = tree.path("0000:03:00.0", "0000:04:00.0");
    assert_eq!(path.bridge, Some("0000:01:00.0".parse().unwrap()));
    assert!(path.bus_addr && path.distance == Some(4));
    let path = tree.path("0000:08:00.0", "0000:81:00.0");
    assert_eq!(
        (path.bridge, path.numa_distance, path.bus_addr),
        (None, Some(21), false)
    );
}

#[test]
fn roles_follow_from_depth_without_privileges() {
    let tree = Tree::new();
    for entry in fs::read_dir(tree.sys().join("bus/pci/devices")).unwrap() {
        let file = entry.unwrap().path().join("config");
        let start = fs::read(&file).unwrap()[..64].to_vec();
        fs::write(file, start).unwrap();
    }
    for (a, b, class, hops) in PAIRS {
        assert_eq!(tree.class(a, b), (class, hops), "{a} {b}");
    }
    let walk = Walk::read(tree.sys(), "0000:07:00.0".parse().unwrap()).unwrap();
    assert!(walk.ports.iter().all(|port| port.acs_redirect.is_none()), "{walk:?}");
}

#[test]
fn acs_is_found_in_any_configuration_space() {
    assert_eq!(acs_redirect(&config(0x6, Some(0x1d))), Some(true));
    assert_eq!(acs_redirect(&config(0x6, Some(0x01))), Some(false));
    assert_eq!(acs_redirect(&config(0x6, None)), Some(false));
    assert_eq!(acs_redirect(&[0; 256]), Some(false), "conventional PCI");
    assert_eq!(acs_redirect(&[0xff; 4096]), Some(false), "a function that was removed");
    assert_eq!(acs_redirect(&[0; 64]), None, "a read without privileges");
    assert_eq!(acs_redirect(&[]), None);
    let mut looping = vec![0; 4096];
    looping[0x100..0x104].copy_from_slice(&[0x01, 0, 0x01, 0x10]);
    assert_eq!(acs_redirect(&looping), Some(false));
}

#[test]
fn walk_has_the_bridges_above_a_function() {
    let tree = Tree::new();
    let walk = Walk::read(tree.sys(), "0000:07:00.0".parse().unwrap()).unwrap();
    let kinds: Vec<_> = walk.bridges().iter().map(|port| (port.addr.bus, port.kind)).collect();
    use PortKind::{Downstream, RootPort, Upstream};
    assert_eq!(
        kinds,
        [
            (6, Downstream),
            (5, Upstream),
            (2, Downstream),
            (1, Upstream),
            (0, RootPort)
        ]
    );
    assert_eq!(walk.root, "pci0000:00");
    assert!(Walk::read(tree.sys(), "0000:99:00.0".parse().unwrap()).is_none());
}

#[test]
fn acs_redirection_makes_path_class_host_bridge() {
    let tree = Tree::new();
    tree.put("0000:02:00.0", "config", &config(0x6, Some(0x01)));
    assert_eq!(tree.class("0000:03:00.0", "0000:04:00.0").0, PathClass::SameSwitch);
    tree.put("0000:02:00.0", "config", &config(0x6, Some(0x1d)));
    let path = tree.path("0000:03:00.0", "0000:04:00.0");
    assert_eq!(
        (path.class, path.hops, path.acs_redirect),
        (PathClass::HostBridge, 4, true)
    );
    assert!(!path.bus_addr);
    assert_eq!(tree.class("0000:03:00.0", "0000:03:00.1").0, PathClass::HostBridge);
}

#[test]
fn bandwidth_is_that_of_narrowest_link() {
    let tree = Tree::new();
    for (addr, speed, width) in [
        ("0000:03:00.0", "16.0 GT/s PCIe", "16"),
        ("0000:04:00.0", "8.0 GT/s PCIe", "4"),
        ("0000:01:00.0", "2.5 GT/s PCIe", "1"),
        ("0000:02:01.0", "2.5 GT/s PCIe", "1"),
        ("0000:08:00.0", "Unknown", "255"),
    ] {
        tree.put(addr, "current_link_speed", speed.as_bytes());
        tree.put(addr, "current_link_width", width.as_bytes());
    }
    assert_eq!(tree.path("0000:03:00.0", "0000:04:00.0").bandwidth, Some(3938));
    // The link above the switch is on the path. The attributes of a downstream port describe the device's link.
    assert_eq!(tree.path("0000:03:00.0", "0000:08:00.0").bandwidth, Some(250));
    assert_eq!(tree.path("0000:03:00.0", "0000:03:00.1").bandwidth, None);
    assert_eq!(tree.path("0000:08:00.0", "0000:81:00.0").bandwidth, None);
}

#[test]
fn numa_distance_is_read_from_column_of_online_node() {
    let tree = Tree::new();
    tree.nodes("0,2-3", &[("0", "10 21 31"), ("2", "21 10 41"), ("3", "31 41 10")]);
    let distance = |from, to| numa_distance(tree.sys(), Some(from), Some(to));
    assert_eq!(
        (distance(0, 2), distance(0, 3), distance(3, 2)),
        (Some(21), Some(31), Some(41))
    );
    assert_eq!((distance(0, 1), distance(5, 0), distance(0, 4)), (None, None, None));
    assert_eq!(
        (index_in("", 0), index_in("3-1,5", 5), index_in("x", 0)),
        (None, None, None)
    );
    tree.nodes("0-1", &[("0", "10")]);
    assert_eq!(distance(0, 1), None);
}

#[test]
fn path_to_missing_function_is_refused() {
    let tree = Tree::new();
    let client = Client::new("0000:99:00.0".parse().unwrap());
    let error = path_between_in(tree.sys(), "0000:03:00.0".parse().unwrap(), &client).unwrap_err();
    assert!(error.to_string().contains("no PCI function 0000:99:00.0"), "{error}");
}

proptest! {
    #[test]
    fn capability_lists_of_any_bytes_are_parsed(mut bytes in prop::collection::vec(any::<u8>(), 0..4097), at in 0usize..4096) {
        let _ = (pcie_type(&bytes), acs_control(&bytes));
        // A pointer of the list is replaced, so that the list can be a loop.
        if let Some(byte) = bytes.get_mut(at) {
            *byte = 0x50;
        }
        let _ = (pcie_type(&bytes), acs_control(&bytes));
    }
}

#[test]
fn walk_cache_follows_moved_functions() {
    let tree = Tree::new();
    let mut walks = Walks::default();
    let addr = "0000:03:00.0".parse().unwrap();
    let redirects = |walks: &mut Walks| walks.get(tree.sys(), addr).unwrap().ports[1].acs_redirect == Some(true);
    assert!(!redirects(&mut walks));
    tree.put("0000:02:00.0", "config", &config(0x6, Some(0x1d)));
    assert!(!redirects(&mut walks), "the walk is cached");
    walks.forget();
    assert!(redirects(&mut walks));
    // The function is hot-plugged into another slot.
    fs::remove_file(tree.sys().join("bus/pci/devices/0000:03:00.0")).unwrap();
    assert!(walks.get(tree.sys(), addr).is_none());
    tree.add("pci0000:80", "0000:03:00.0", ACCEL, 0);
    assert_eq!(walks.get(tree.sys(), addr).unwrap().root, "pci0000:80");
}

#[test]
fn bandwidths_equal_those_of_module() {
    let tree = Tree::new();
    tree.add("pci0000:00", "0000:00:1e.0", ACCEL, 0);
    let widths = ["1", "2", "4", "8", "12", "16", "32"];
    for (speed, expected) in [
        ("2.5", [250, 500, 1_000, 2_000, 3_000, 4_000, 8_000]),
        ("5.0", [500, 1_000, 2_000, 4_000, 6_000, 8_000, 16_000]),
        ("8.0", [984, 1_969, 3_938, 7_876, 11_815, 15_753, 31_507]),
        ("16.0", [1_969, 3_938, 7_876, 15_753, 23_630, 31_507, 63_015]),
        ("32.0", [3_938, 7_876, 15_753, 31_507, 47_261, 63_015, 126_030]),
        ("64.0", [7_562, 15_125, 30_250, 60_500, 90_750, 121_000, 242_000]),
        ("Unknown", [0; 7]),
    ] {
        for (width, bandwidth) in widths.iter().zip(expected) {
            let text = format!("{speed} GT/s PCIe\n");
            tree.put("0000:00:1e.0", "current_link_speed", text.as_bytes());
            tree.put("0000:00:1e.0", "current_link_width", width.as_bytes());
            let walk = Walk::read(tree.sys(), "0000:00:1e.0".parse().unwrap()).unwrap();
            assert_eq!(walk.ports[0].link, bandwidth, "{speed} x{width}");
        }
    }
}

#[test]
fn virtual_functions_have_the_link_of_the_physical_function() {
    let tree = Tree::new();
    tree.add("pci0000:00", "0000:00:1e.0", ACCEL, 0);
    tree.add("pci0000:00", "0000:00:1e.1", ACCEL, 0);
    tree.put("0000:00:1e.0", "current_link_speed", b"8.0 GT/s PCIe\n");
    tree.put("0000:00:1e.0", "current_link_width", b"4\n");
    tree.put("0000:00:1e.1", "current_link_speed", b"Unknown\n");
    tree.put("0000:00:1e.1", "current_link_width", b"0\n");
    let functions = tree.sys().join("devices/pci0000:00");
    symlink(functions.join("0000:00:1e.0"), functions.join("0000:00:1e.1/physfn")).unwrap();
    let walk = Walk::read(tree.sys(), "0000:00:1e.1".parse().unwrap()).unwrap();
    assert_eq!(walk.ports[0].link, 3_938);
}

#[test]
fn functions_without_a_node_are_on_the_only_node() {
    let tree = Tree::new();
    tree.add("pci0000:00", "0000:00:1e.0", ACCEL, 0);
    let node = || {
        let walk = Walk::read(tree.sys(), "0000:00:1e.0".parse().unwrap()).unwrap();
        walk.numa_node
    };
    let online = tree.sys().join("devices/system/node/online");
    fs::create_dir_all(online.parent().unwrap()).unwrap();
    fs::write(&online, "0-1\n").unwrap();
    assert_eq!(node(), None);
    fs::write(&online, "0\n").unwrap();
    assert_eq!(node(), Some(0));
}
