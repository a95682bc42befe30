// SPDX-License-Identifier: MIT OR Apache-2.0

//! Counts payload bytes for each bridge that they cross. The topology determines the path of a transfer between two
//! ends.
//!
//! The path is that of a machine whose switches route peer traffic by address, as switches do unless access control
//! services (ACS) redirect the traffic: up from one end to the lowest bus that is also above the other end, and down
//! from there. If that bus is not inside a switch, the path crosses the root complex. QEMU copies bytes and models no
//! link, so these counts follow from the measured ends of each transfer. They are no second measurement.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::counters::{HOST, UNKNOWN};
use crate::topology::{BridgeKind, ROOT, Topology};

/// The key of the bridges' counts among a node's devices in a snapshot.
pub const BRIDGES: &str = "bridges";
/// The target under which an adapter counts bytes that QEMU moved for it (by messages, without a mapping).
const MESSAGE: &str = "message";
/// The target of bytes in a mapping that belongs to no device with a name.
const MAPPED: &str = "mapped";

/// The bridges between two ends of a transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Crossed {
    /// Root ports, switches' upstream ports (by the switch's name), their downstream ports (`sw0-port0`) and host bridges.
    pub bridges: BTreeSet<String>,
    /// Whether the path crosses a root complex: the ends are below different root ports, or one end is host memory.
    pub root_complex: bool,
}

/// Returns the bridges above a device, the nearest first. The last one is a host bridge.
fn chain(topology: &Topology, device: &str) -> Option<Vec<String>> {
    let mut chain = Vec::new();
    let mut child = device.to_owned();
    let mut parent = topology.device(device)?.parent().to_owned();
    loop {
        let Some(bridge) = topology.bridge(&parent) else {
            // The check of the topology file found every other parent.
            chain.push(ROOT.to_owned());
            return Some(chain);
        };
        match bridge.kind {
            BridgeKind::Switch => {
                let port = topology.below(&parent).iter().position(|name| *name == child)?;
                chain.push(format!("{parent}-port{port}"));
                chain.push(parent.clone());
            }
            BridgeKind::RootPort => chain.push(parent.clone()),
            BridgeKind::HostBridge => {
                chain.push(parent.clone());
                return Some(chain);
            }
        }
        child = parent;
        parent = bridge.parent.clone();
    }
}

/// Returns the bridges between a device and the target of its transfers: another device, [`HOST`], or the device
/// itself. Returns `None` if either is not a device of the topology.
pub fn crossed(topology: &Topology, initiator: &str, target: &str) -> Option<Crossed> {
    let up = chain(topology, initiator)?;
    if target == HOST {
        return Some(Crossed {
            bridges: up.into_iter().collect(),
            root_complex: true,
        });
    }
    let down = chain(topology, target)?;
    if initiator == target {
        return Some(Crossed {
            bridges: BTreeSet::new(),
            root_complex: false,
        });
    }
    // The lowest bridge above both, if there is one: a switch, whose upstream port is not crossed, or a host bridge,
    // which is.
    let meeting = up.iter().find(|bridge| down.contains(bridge));
    let is_switch = |name: &String| {
        let bridge = topology.bridge(name);
        bridge.is_some_and(|bridge| bridge.kind == BridgeKind::Switch)
    };
    let switched = meeting.filter(|name| is_switch(name));
    let part = |chain: &[String]| -> Vec<String> {
        let below = chain.iter().take_while(|name| Some(*name) != switched);
        below.cloned().collect()
    };
    Some(Crossed {
        bridges: part(&up).into_iter().chain(part(&down)).collect(),
        root_complex: switched.is_none(),
    })
}

/// Returns the payload in bytes by initiator and target, for the devices of a snapshot that have counted any.
fn payload(devices: &serde_json::Map<String, Value>) -> Vec<(String, String, u64)> {
    let mut all = Vec::new();
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    for (name, device) in devices {
        let by_target = match device["kind"].as_str() {
            Some("nvme") => &device["payload"],
            Some("nic") => &device["counters"]["payload_by_target"],
            Some("accel") => &device["counters"]["by_target"],
            _ => continue,
        };
        for (target, bytes) in by_target.as_object().into_iter().flatten() {
            let bytes = match bytes {
                Value::Object(_) => number(&bytes["read"]) + number(&bytes["written"]),
                bytes => number(bytes),
            };
            if bytes > 0 {
                all.push((name.clone(), target.clone(), bytes));
            }
        }
    }
    all
}

/// Returns the bytes that crossed each bridge, from the counts of a snapshot's devices: `{"kind": "bridges", "crossed":
/// {"rp0": N, ..}, "root_complex": N, "unknown": N}`. `unknown` is payload to an unknown target, so its path is unknown
/// too. If `unknown` is not 0, the other numbers are too small.
pub fn count(topology: &Topology, devices: &serde_json::Map<String, Value>) -> Value {
    let mut by_bridge: BTreeMap<String, u64> = BTreeMap::from([(ROOT.to_owned(), 0)]);
    for bridge in &topology.bridge {
        by_bridge.insert(bridge.name.clone(), 0);
        for port in 0..bridge.ports.unwrap_or(0) {
            by_bridge.insert(format!("{}-port{port}", bridge.name), 0);
        }
    }
    let (mut root_complex, mut unknown) = (0, 0);
    for (initiator, target, bytes) in payload(devices) {
        let known = ![UNKNOWN, MESSAGE, MAPPED].contains(&&*target);
        let Some(way) = known.then(|| crossed(topology, &initiator, &target)).flatten() else {
            unknown += bytes;
            continue;
        };
        for bridge in way.bridges {
            *by_bridge.entry(bridge).or_default() += bytes;
        }
        if way.root_complex {
            root_complex += bytes;
        }
    }
    json!({ "kind": BRIDGES, "crossed": by_bridge, "root_complex": root_complex, "unknown": unknown })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Layout;

    const TREE: &str = r#"
        description = "a switch below a switch, a second root port, a second host bridge"
        [machine]
        numa = [{ memory = "512M", cpus = [0] }, { memory = "512M", cpus = [1] }]
        [[bridge]]
        name = "rp0"
        kind = "root-port"
        [[bridge]]
        name = "sw0"
        kind = "switch"
        parent = "rp0"
        ports = 3
        [[bridge]]
        name = "sw1"
        kind = "switch"
        parent = "sw0"
        ports = 2
        [[bridge]]
        name = "rp1"
        kind = "root-port"
        [[bridge]]
        name = "hb1"
        kind = "host-bridge"
        numa_node = 1
        [[bridge]]
        name = "rp2"
        kind = "root-port"
        parent = "hb1"
        [[device]]
        kind = "accel"
        name = "near"
        parent = "sw0"
        memory = "16M"
        [[device]]
        kind = "nvme"
        name = "drive"
        parent = "sw0"
        image = "16M"
        cmb_size_mb = 1
        [[device]]
        kind = "accel"
        name = "deep"
        parent = "sw1"
        memory = "16M"
        [[device]]
        kind = "nvme"
        name = "deeper"
        parent = "sw1"
        image = "16M"
        [[device]]
        kind = "ivshmem"
        name = "shm"
        parent = "rp1"
        size = "16M"
        [[device]]
        kind = "accel"
        name = "far"
        parent = "rp2"
        memory = "16M"
    "#;

    fn tree() -> Topology {
        Layout::parse("tree", TREE).unwrap().nodes.remove(0).topology
    }

    #[test]
    fn bridges_on_paths() {
        let topology = tree();
        for (from, to, bridges, root_complex) in [
            // The inner switch is below the first port of the outer switch.
            ("drive", "near", &["sw0-port1", "sw0-port2"][..], false),
            ("deeper", "deep", &["sw1-port0", "sw1-port1"], false),
            ("deeper", "near", &["sw1-port1", "sw1", "sw0-port0", "sw0-port1"], false),
            ("drive", "drive", &[], false),
            ("drive", "host", &["sw0-port2", "sw0", "rp0", "pcie.0"], true),
            (
                "deeper",
                "host",
                &["sw1-port1", "sw1", "sw0-port0", "sw0", "rp0", "pcie.0"],
                true,
            ),
            ("drive", "shm", &["sw0-port2", "sw0", "rp0", "pcie.0", "rp1"], true),
            (
                "drive",
                "far",
                &["sw0-port2", "sw0", "rp0", "pcie.0", "hb1", "rp2"],
                true,
            ),
            ("far", "host", &["rp2", "hb1"], true),
        ] {
            let expected = Crossed {
                bridges: bridges.iter().map(|name| (*name).to_owned()).collect(),
                root_complex,
            };
            assert_eq!(crossed(&topology, from, to), Some(expected.clone()), "{from} to {to}");
            if to != "host" {
                assert_eq!(crossed(&topology, to, from), Some(expected), "{to} to {from}");
            }
        }
        assert_eq!(crossed(&topology, "drive", "nothing"), None);
        assert_eq!(crossed(&topology, "rp0", "near"), None);
    }

    #[test]
    fn downstream_ports_have_unique_names() {
        let topology = tree();
        let mut names: BTreeSet<String> = topology.device.iter().map(|d| d.name().to_owned()).collect();
        names.extend(topology.bridge.iter().map(|bridge| bridge.name.clone()));
        for device in &topology.device {
            let port = &chain(&topology, device.name()).unwrap()[0];
            assert!(names.insert(port.clone()) || port.starts_with("rp"), "{port} twice");
        }
    }

    #[test]
    fn payload_is_summed_by_bridge() {
        let devices = json!({
            "drive": { "kind": "nvme", "payload": { "near": 100, "host": 0, "shm": 7 }, "read": { "near": 1 } },
            "far": { "kind": "accel", "counters": { "host_read": 9, "by_target": {
                "host": { "read": 1000, "written": 2000 }, "message": { "read": 0, "written": 5 } } } },
            "deep": { "kind": "accel", "gone": true },
            "nic": { "kind": "nic", "counters": { "payload_by_target": {} } },
        });
        let counted = count(&tree(), devices.as_object().unwrap());
        let crossed = &counted["crossed"];
        assert_eq!(crossed["sw0-port2"], 107);
        assert_eq!(crossed["sw0-port1"], 100);
        assert_eq!(
            (&crossed["sw0"], &crossed["rp0"], &crossed["rp1"]),
            (&json!(7), &json!(7), &json!(7))
        );
        assert_eq!((&crossed["hb1"], &crossed["pcie.0"]), (&json!(3000), &json!(7)));
        assert_eq!(
            (&counted["root_complex"], &counted["unknown"]),
            (&json!(3007), &json!(5))
        );
        assert_eq!(crossed["sw1"], 0);
    }
}
