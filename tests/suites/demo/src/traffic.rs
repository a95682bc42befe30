// SPDX-License-Identifier: MIT OR Apache-2.0

//! The bytes that devices moved between two snapshots of their counters, by target.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The VM runner's name of host memory.
pub const HOST: &str = "host";

/// The VM runner's name of the target of payload whose address it cannot resolve.
pub const UNKNOWN: &str = "unknown";

/// Bytes by the name of their memory: a device of the topology, or [`HOST`].
pub type Bytes = BTreeMap<String, u64>;

/// The counters of one drive.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drive {
    /// Bytes from the drive, by target.
    pub read: Bytes,
    /// Bytes to the drive, by source.
    pub written: Bytes,
    /// Read and write commands.
    pub commands: u64,
    /// The commands of them that failed.
    pub failed: u64,
}

/// The counters of one accelerator.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accelerator {
    /// Bytes of host memory that its DMA engine accessed, in both directions.
    pub host: u64,
    /// Bytes its DMA engine moved from and to other devices.
    pub peers: u64,
    /// Bytes of its own memory that its compute kernels read and wrote.
    pub computed: u64,
    /// Completed commands.
    pub commands: u64,
    /// Commands that failed.
    pub failed: u64,
}

/// The counters of the bridges.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bridges {
    /// Payload that crossed each bridge: root ports, ports of switches, host bridges. Bridges without payload are
    /// missing.
    pub crossed: Bytes,
    /// Payload that crossed a root complex, on the path to host memory or to another root port.
    pub root_complex: u64,
    /// Payload on an unknown path.
    pub unknown: u64,
}

/// The bytes that all devices moved in a period.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Drives by name.
    pub drives: BTreeMap<String, Drive>,
    /// Accelerators by name.
    pub accelerators: BTreeMap<String, Accelerator>,
    /// The bytes of them that crossed each bridge.
    pub bridges: Bridges,
}

impl Traffic {
    /// Returns the difference between two snapshots of the VM runner.
    ///
    /// # Errors
    ///
    /// A snapshot has an unknown form, a device is missing in one, a counter decreased, or payload has a target that
    /// the runner cannot resolve: the number of host memory would be unknown then.
    pub fn between(before: &Value, after: &Value) -> Result<Traffic> {
        let (before, after) = (devices(before)?, devices(after)?);
        if !before.keys().eq(after.keys()) {
            bail!("the snapshots are of different devices");
        }
        let mut traffic = Traffic::default();
        let mut counted = false;
        for (name, later) in after {
            let earlier = &before[name];
            let context = || format!("counters of {name}");
            match later["kind"].as_str() {
                Some("nvme") => {
                    let moved = drive(earlier, later).with_context(context)?;
                    traffic.drives.insert(name.clone(), moved);
                }
                Some("accel") => {
                    let did = accelerator(earlier, later).with_context(context)?;
                    traffic.accelerators.insert(name.clone(), did);
                }
                Some("bridges") => {
                    traffic.bridges = Bridges {
                        crossed: bytes(earlier, later, "crossed").with_context(context)?,
                        root_complex: difference(earlier, later, "root_complex").with_context(context)?,
                        unknown: difference(earlier, later, "unknown").with_context(context)?,
                    };
                    counted = true;
                }
                kind => bail!("device {name} is of unknown kind {kind:?}"),
            }
        }
        // A test bed that does not count at bridges must not pass for one whose bridges were not crossed.
        ensure!(counted, "the snapshots do not say what crossed the bridges");
        match traffic.by_memory().get(UNKNOWN) {
            None | Some(0) => Ok(traffic),
            Some(bytes) => {
                bail!("{bytes} bytes moved from or to unknown addresses: nothing can be said of host memory")
            }
        }
    }

    /// Returns the bytes of host memory that devices accessed. A byte counts once for each access.
    pub fn host_bytes(&self) -> u64 {
        let drives = self.by_memory().get(HOST).copied().unwrap_or(0);
        drives + self.accelerators.values().map(|a| a.host).sum::<u64>()
    }

    /// Returns the payload of the drives in both directions, by the memory on the other side.
    pub fn by_memory(&self) -> Bytes {
        let mut sum = Bytes::new();
        for drive in self.drives.values() {
            for (memory, bytes) in drive.read.iter().chain(&drive.written) {
                *sum.entry(memory.clone()).or_default() += bytes;
            }
        }
        sum
    }

    /// Returns the number of failed commands of all devices.
    pub fn failed(&self) -> u64 {
        let drives: u64 = self.drives.values().map(|d| d.failed).sum();
        drives + self.accelerators.values().map(|a| a.failed).sum::<u64>()
    }
}

type Devices = serde_json::Map<String, Value>;

fn devices(snapshot: &Value) -> Result<&Devices> {
    snapshot.as_object().context("a snapshot is a map of devices")
}

fn difference(earlier: &Value, later: &Value, key: &str) -> Result<u64> {
    let number = |from: &Value| from[key].as_u64().with_context(|| format!("no number {key:?}"));
    let (earlier, later) = (number(earlier)?, number(later)?);
    later
        .checked_sub(earlier)
        .with_context(|| format!("{key:?} went backwards: {earlier}, then {later}"))
}

fn bytes(earlier: &Value, later: &Value, key: &str) -> Result<Bytes> {
    let map = |from: &Value| -> Result<Bytes> { Ok(serde_json::from_value(from[key].clone())?) };
    let (earlier, later) = (
        map(earlier).context(key.to_owned())?,
        map(later).context(key.to_owned())?,
    );
    let mut moved = Bytes::new();
    for (memory, value) in &later {
        let before = earlier.get(memory).copied().unwrap_or(0);
        let more = value
            .checked_sub(before)
            .with_context(|| format!("{key:?} of {memory} went backwards"))?;
        if more > 0 {
            moved.insert(memory.clone(), more);
        }
    }
    if let Some(gone) = earlier.keys().find(|memory| !later.contains_key(*memory)) {
        bail!("{key:?} of {gone} is gone");
    }
    Ok(moved)
}

fn drive(earlier: &Value, later: &Value) -> Result<Drive> {
    Ok(Drive {
        read: bytes(earlier, later, "read")?,
        written: bytes(earlier, later, "write")?,
        commands: difference(earlier, later, "commands")?,
        failed: difference(earlier, later, "failed")?,
    })
}

fn accelerator(earlier: &Value, later: &Value) -> Result<Accelerator> {
    let (earlier, later) = (&earlier["counters"], &later["counters"]);
    let sum = |keys: &[&str]| -> Result<u64> { keys.iter().map(|key| difference(earlier, later, key)).sum() };
    Ok(Accelerator {
        host: sum(&["host_read", "host_written"])?,
        peers: sum(&["peer_read", "peer_written", "message_read", "message_written"])?,
        computed: sum(&["compute_read", "compute_written"])?,
        commands: sum(&["commands_ok"])?,
        failed: sum(&["commands_failed"])?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use p2pmem_accel_regs::Counter;
    use serde_json::json;

    fn accel(count: impl Fn(&str) -> u64) -> Value {
        let counters = Counter::ALL
            .iter()
            .map(|(_, name)| ((*name).to_owned(), json!(count(name))));
        json!({ "kind": "accel", "counters": counters.collect::<Devices>() })
    }

    fn drive(read: Value, write: Value, commands: u64, failed: u64) -> Value {
        json!({ "kind": "nvme", "payload": {}, "read": read, "write": write, "commands": commands, "failed": failed })
    }

    fn bridges(port: u64, root_complex: u64) -> Value {
        json!({ "kind": "bridges", "crossed": { "sw0-port0": port, "rp0": 3 }, "root_complex": root_complex, "unknown": 0 })
    }

    #[test]
    fn only_traffic_between_snapshots_counts() {
        let before = json!({
            "nvme0": drive(json!({ "host": 4096 }), json!({ "host": 100 }), 10, 1),
            "accel0": accel(|_| 5),
            "bridges": bridges(4, 1),
        });
        let after = json!({
            "nvme0": drive(json!({ "host": 4096, "accel0": 8192 }), json!({ "host": 612, "accel0": 1 }), 14, 1),
            "accel0": accel(|name| if name == "host_read" { 12 } else { 5 }),
            "bridges": bridges(8, 10),
        });
        let traffic = Traffic::between(&before, &after).unwrap();
        let nvme0 = &traffic.drives["nvme0"];
        assert_eq!(nvme0.read, Bytes::from([("accel0".into(), 8192)]));
        assert_eq!(nvme0.written, Bytes::from([("host".into(), 512), ("accel0".into(), 1)]));
        assert_eq!((nvme0.commands, nvme0.failed), (4, 0));
        assert_eq!(traffic.accelerators["accel0"].host, 7);
        assert_eq!(traffic.accelerators["accel0"].computed, 0);
        let crossed = Bridges {
            crossed: Bytes::from([("sw0-port0".into(), 4)]),
            root_complex: 9,
            unknown: 0,
        };
        assert_eq!(traffic.bridges, crossed);
        assert_eq!(traffic.host_bytes(), 519);
        assert_eq!(
            traffic.by_memory(),
            Bytes::from([("host".into(), 512), ("accel0".into(), 8193)])
        );
    }

    #[test]
    fn unknown_bytes_are_an_error() {
        let snapshot = |read: u64, write: u64| {
            let nvme0 = drive(json!({ "unknown": read }), json!({ "unknown": write }), 1, 0);
            json!({ "nvme0": nvme0, "bridges": bridges(0, 0) })
        };
        let before = snapshot(7, 0);
        assert!(Traffic::between(&before, &before).is_ok());
        for (read, write) in [(8, 0), (7, 1)] {
            let error = Traffic::between(&before, &snapshot(read, write)).unwrap_err();
            assert!(
                error
                    .to_string()
                    .starts_with("1 bytes moved from or to unknown addresses"),
                "{error}"
            );
        }
    }

    #[test]
    fn failed_commands_are_counted() {
        let before =
            json!({ "nvme0": drive(json!({}), json!({}), 0, 0), "accel0": accel(|_| 0), "bridges": bridges(0, 0) });
        let after =
            json!({ "nvme0": drive(json!({}), json!({}), 2, 2), "accel0": accel(|_| 1), "bridges": bridges(0, 0) });
        assert_eq!(Traffic::between(&before, &after).unwrap().failed(), 3);
    }

    #[test]
    fn impossible_snapshots_are_refused() {
        let nvme = |n: u64| json!({ "nvme0": drive(json!({ "host": n }), json!({}), n, 0) });
        for (before, after) in [
            (nvme(2), nvme(1)),
            // The counters of bridges are missing.
            (nvme(1), nvme(1)),
            (json!({ "bridges": bridges(2, 2) }), json!({ "bridges": bridges(1, 2) })),
            (json!({ "bridges": bridges(2, 2) }), json!({ "bridges": bridges(2, 1) })),
            (json!({}), nvme(1)),
            (nvme(1), json!({})),
            (json!([]), json!([])),
            (
                json!({ "accel0": accel(|_| 0) }),
                json!({ "accel0": { "kind": "accel", "gone": true } }),
            ),
            (
                json!({ "x": { "kind": "toaster" } }),
                json!({ "x": { "kind": "toaster" } }),
            ),
            (nvme(1), json!({ "nvme0": drive(json!({}), json!({}), 1, 0) })),
        ] {
            assert!(Traffic::between(&before, &after).is_err(), "{before} {after}");
        }
    }
}
