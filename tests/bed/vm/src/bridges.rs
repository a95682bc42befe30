// SPDX-License-Identifier: MIT OR Apache-2.0

//! Bytes of payload by the bridge they crossed: which way a transfer takes follows from where its two ends are in the
//! topology.
//!
//! The way is that of a machine whose switches route peer traffic by address, as they do unless access control services
//! redirect it: up from one end to the first bus that is above the other end as well, and down from there. Where that bus
//! is no switch's, the way leads through the root complex. The emulator itself copies bytes and models no link, so this
//! is what a transfer between these two ends costs, not a second measurement of which ends it had.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::counters::{HOST, UNKNOWN};
use crate::topology::{BridgeKind, ROOT, Topology};

/// Name among a node's devices under which a snapshot has what bridges carried.
pub const BRIDGES: &str = "bridges";
/// Name of the target that an adapter counts bytes under for which it asked the emulator.
const MESSAGE: &str = "message";
/// Name of the target of bytes in a mapping that is no device's by name.
const MAPPED: &str = "mapped";

/// The bridges between two ends of a transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Crossed {
    /// Root ports, switches' upstream ports (by the switch's name), their downstream ports (`sw0-port0`) and host bridges.
    pub bridges: BTreeSet<String>,
    /// Whether the way leads through a root complex: between root ports, or to host memory.
    pub root_complex: bool,
}

/// The bridges above a device, the nearest first. The last one is a host bridge.
fn chain(topology: &Topology, device: &str) -> Option<Vec<String>> {
    let mut chain = Vec::new();
    let mut child = device.to_owned();
    let mut parent = topology.device(device)?.parent().to_owned();
    loop {
        let Some(bridge) = topology.bridge(&parent) else {
            // Every other parent was checked when the file was read.
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

/// The bridges between a device and what its transfers reach: another device, [`HOST`], or itself. None if either is no
/// device of the topology.
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
    // The lowest bridge above both: a switch, whose upstream port is not crossed, or a host bridge, which is; or none.
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

/// Payload by initiator and target, as far as a snapshot's devices have counted it.
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

/// What bridges carried, of what the devices of a snapshot have counted: `{"kind": "bridges", "crossed": {"rp0": N, ..},
/// "root_complex": N, "unknown": N}`. `unknown` is payload whose way cannot be told, because its target is not known:
/// while that is not 0, no other number can be relied on.
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
    fn ways() {
        let topology = tree();
        for (from, to, bridges, root_complex) in [
            // The first port of the outer switch has the inner one.
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
    fn the_ports_are_those_of_the_emulator() {
        let topology = tree();
        let mut names: BTreeSet<String> = topology.device.iter().map(|d| d.name().to_owned()).collect();
        names.extend(topology.bridge.iter().map(|bridge| bridge.name.clone()));
        for device in &topology.device {
            let port = &chain(&topology, device.name()).unwrap()[0];
            assert!(names.insert(port.clone()) || port.starts_with("rp"), "{port} twice");
        }
    }

    #[test]
    fn payload_is_added_up_by_bridge() {
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
