// SPDX-License-Identifier: MIT OR Apache-2.0

//! Bytes each drive moved, by where its payload was: host memory or the memory of one of the topology's devices.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use crate::qmp::Function;
use crate::trace::{Direction, Event};

/// Name of host memory among the targets.
pub const HOST: &str = "host";
/// Name of addresses that are neither host memory nor a BAR of the topology's devices; nothing should ever be there.
pub const UNKNOWN: &str = "unknown";

/// Bytes by target.
pub type Bytes = BTreeMap<String, u64>;

/// Counters of one drive since the boot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Nvme {
    /// Payload in both directions, by target.
    pub payload: Bytes,
    /// Payload from the drive into the target.
    pub read: Bytes,
    /// Payload from the target to the drive.
    pub write: Bytes,
    /// Read and write commands.
    pub commands: u64,
    /// Commands that failed; their payload is counted though it may not have moved.
    pub failed: u64,
}

/// What was counted between two snapshots: the same tree, each number the difference. Numbers that are new are as they are,
/// and what is no number is that of the later one.
pub fn difference(before: &Value, after: &Value) -> Value {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            let null = Value::Null;
            let each = after.iter().map(|(key, value)| {
                let old = before.get(key).unwrap_or(&null);
                (key.clone(), difference(old, value))
            });
            Value::Object(each.collect())
        }
        (Value::Array(before), Value::Array(after)) if before.len() == after.len() => Value::Array(
            before
                .iter()
                .zip(after)
                .map(|(old, new)| difference(old, new))
                .collect(),
        ),
        _ => match (before.as_u64(), after.as_u64()) {
            (Some(old), Some(new)) => new.wrapping_sub(old).into(),
            _ => after.clone(),
        },
    }
}

/// First bus address above the memory that q35 places below 4 GiB.
const Q35_LOW_MAX: u64 = 0xb000_0000;
/// Where q35 splits larger memories.
const Q35_SPLIT: u64 = 0x8000_0000;
/// Where memory goes on above the hole for devices.
const HIGH: u64 = 1 << 32;

/// Sorts payload by target.
#[derive(Debug)]
pub struct Classifier {
    /// Host memory as half-open ranges.
    ram: Vec<(u64, u64)>,
    /// BARs as (first address, end, device), those seen last first.
    bars: Vec<(u64, u64, String)>,
    /// Drives by namespace number.
    drives: BTreeMap<u32, String>,
    counters: BTreeMap<String, Nvme>,
    other: u64,
}

impl Classifier {
    /// For a q35 machine with that much memory and these drives.
    pub fn new(memory: u64, drives: BTreeMap<u32, String>) -> Classifier {
        let low = if memory >= Q35_LOW_MAX { Q35_SPLIT } else { memory };
        let counters = drives.values().map(|name| (name.clone(), Nvme::default())).collect();
        Classifier {
            ram: vec![(0, low), (HIGH, HIGH + (memory - low))],
            bars: Vec::new(),
            drives,
            counters,
            other: 0,
        }
    }

    /// Learns where the devices' BARs are now. Former places stay known, behind the new ones.
    pub fn learn(&mut self, functions: &[Function], is_ours: impl Fn(&str) -> bool) {
        for function in functions.iter().filter(|f| is_ours(&f.id)) {
            for region in &function.regions {
                let bar = (
                    region.address,
                    region.address.saturating_add(region.size),
                    function.id.clone(),
                );
                self.bars.retain(|known| *known != bar);
                self.bars.insert(0, bar);
            }
        }
    }

    fn target(&self, address: u64, length: u64) -> &str {
        let end = address.saturating_add(length);
        if let Some((_, _, name)) = self
            .bars
            .iter()
            .find(|(from, to, _)| (*from..*to).contains(&address) && end <= *to)
        {
            return name;
        }
        if self
            .ram
            .iter()
            .any(|(from, to)| (*from..*to).contains(&address) && end <= *to)
        {
            HOST
        } else {
            UNKNOWN
        }
    }

    /// Counts one event.
    pub fn count(&mut self, event: Event) {
        let nsid = match event {
            Event::Command { nsid, .. } | Event::Payload { nsid, .. } | Event::Failed { nsid } => nsid,
            Event::Other { length } => {
                self.other += length;
                return;
            }
        };
        let target = match event {
            Event::Payload { address, length, .. } => Some(self.target(address, length).to_owned()),
            _ => None,
        };
        let Some(drive) = self.drives.get(&nsid).and_then(|name| self.counters.get_mut(name)) else {
            return;
        };
        match (event, target) {
            (Event::Command { .. }, _) => drive.commands += 1,
            (Event::Failed { .. }, _) => drive.failed += 1,
            (Event::Payload { direction, length, .. }, Some(target)) => {
                let by_direction = match direction {
                    Direction::Read => &mut drive.read,
                    Direction::Write => &mut drive.write,
                };
                *by_direction.entry(target.clone()).or_default() += length;
                *drive.payload.entry(target).or_default() += length;
            }
            _ => {}
        }
    }

    /// Counters of all drives by name.
    pub fn counters(&self) -> &BTreeMap<String, Nvme> {
        &self.counters
    }

    /// Bytes of identify data, log pages and the like, of all drives.
    pub fn other(&self) -> u64 {
        self.other
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmp::Region;

    fn function(id: &str, address: u64, size: u64) -> Function {
        Function {
            id: id.into(),
            bdf: "0000:01:00.0".into(),
            regions: vec![Region { bar: 2, address, size }],
        }
    }

    #[test]
    fn payload_is_sorted_by_target() {
        let mut classifier = Classifier::new(1 << 30, BTreeMap::from([(1, "nvme0".into()), (2, "nvme1".into())]));
        classifier.learn(
            &[
                function("accel0", 0x3_8000_0000, 1 << 20),
                function("rp0", 0x2000, 1 << 20),
            ],
            |id| id == "accel0",
        );
        let payload = |nsid, direction, address| Event::Payload {
            nsid,
            direction,
            address,
            length: 4096,
        };
        classifier.count(Event::Command {
            nsid: 1,
            direction: Direction::Read,
        });
        classifier.count(payload(1, Direction::Read, 0x3_8000_0000));
        classifier.count(payload(1, Direction::Write, 0x3_800f_f000));
        classifier.count(payload(1, Direction::Write, 0x3000));
        // The last byte is beyond the BAR, beyond memory, and in the hole.
        classifier.count(payload(2, Direction::Read, 0x3_800f_f001));
        classifier.count(payload(2, Direction::Read, (1 << 30) - 1));
        classifier.count(payload(2, Direction::Read, 1 << 32));
        classifier.count(Event::Failed { nsid: 2 });
        classifier.count(Event::Other { length: 5 });
        classifier.count(payload(3, Direction::Read, 0x3000));
        let nvme0 = &classifier.counters()["nvme0"];
        assert_eq!(
            nvme0.payload,
            Bytes::from([("accel0".into(), 8192), ("host".into(), 4096)])
        );
        assert_eq!(nvme0.read, Bytes::from([("accel0".into(), 4096)]));
        assert_eq!(
            nvme0.write,
            Bytes::from([("accel0".into(), 4096), ("host".into(), 4096)])
        );
        assert_eq!((nvme0.commands, nvme0.failed), (1, 0));
        let nvme1 = &classifier.counters()["nvme1"];
        assert_eq!(nvme1.payload, Bytes::from([("unknown".into(), 12288)]));
        assert_eq!((nvme1.commands, nvme1.failed), (0, 1));
        assert_eq!(classifier.other(), 5);
    }

    #[test]
    fn differences() {
        use serde_json::json;
        let before = json!({"n": {"x": 5, "list": [1, 2], "kind": "nic"}});
        let after = json!({"n": {"x": 7, "list": [1, 5], "kind": "nic", "new": 3, "gone": true}});
        let expected = json!({"n": {"x": 2, "list": [0, 3], "kind": "nic", "new": 3, "gone": true}});
        assert_eq!(difference(&before, &after), expected);
    }

    #[test]
    fn memory_is_split_as_q35_does() {
        let classifier = Classifier::new(4 << 30, BTreeMap::new());
        assert_eq!(classifier.target(0x7fff_f000, 4096), HOST);
        assert_eq!(classifier.target(0x8000_0000, 4096), UNKNOWN);
        assert_eq!(classifier.target((6 << 30) - 4096, 4096), HOST);
        assert_eq!(classifier.target(6 << 30, 4096), UNKNOWN);
    }

    #[test]
    fn the_newest_place_of_a_bar_counts() {
        let mut classifier = Classifier::new(1 << 30, BTreeMap::new());
        classifier.learn(&[function("accel0", 0xe000_0000, 4096)], |_| true);
        classifier.learn(
            &[
                function("accel1", 0xe000_0000, 4096),
                function("accel0", 0xf000_0000, 4096),
            ],
            |_| true,
        );
        assert_eq!(classifier.target(0xe000_0000, 4096), "accel1");
        assert_eq!(classifier.target(0xf000_0000, 4096), "accel0");
    }
}
