// SPDX-License-Identifier: MIT OR Apache-2.0

//! Bytes that each drive moved, by the place of the payload: host memory, or the memory of one of the topology's
//! devices.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use crate::qmp::Function;
use crate::trace::{self, Direction, Event};

/// The name of host memory among the targets.
pub const HOST: &str = "host";
/// The target of addresses that are neither host memory nor a BAR of the topology's devices, and of IOVAs without a
/// known translation. Expected to stay 0: any other value may belong to any of the other targets.
pub const UNKNOWN: &str = "unknown";

/// Bytes by target.
pub type Bytes = BTreeMap<String, u64>;

/// Counters of one drive since the boot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Nvme {
    /// Payload in bytes in both directions, by target.
    pub payload: Bytes,
    /// Payload in bytes from the drive into the target.
    pub read: Bytes,
    /// Payload in bytes from the target to the drive.
    pub write: Bytes,
    /// The number of read and write commands.
    pub commands: u64,
    /// The number of commands that failed. Their payload is counted although it may not have moved.
    pub failed: u64,
}

/// Returns the difference between two snapshots: a tree of the same form. A number that is missing in `before` stays as
/// it is; a value that is no number is the one of `after`.
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

/// The first bus address above the memory that q35 places below 4 GiB.
const Q35_LOW_MAX: u64 = 0xb000_0000;
/// The bytes that q35 places below 4 GiB if the memory is larger.
const Q35_SPLIT: u64 = 0x8000_0000;
/// The address at which memory continues above the hole for devices.
const HIGH: u64 = 1 << 32;

/// Assigns payload to targets.
#[derive(Debug)]
pub struct Classifier {
    /// Host memory as half-open ranges.
    ram: Vec<(u64, u64)>,
    /// BARs as (first address, end, device). Newer entries come first.
    bars: Vec<(u64, u64, String)>,
    /// Names of the drives by namespace number.
    drives: BTreeMap<u32, String>,
    counters: BTreeMap<String, Nvme>,
    other: u64,
    /// Whether the addresses of payload are IOVAs.
    translated: bool,
    /// Namespace numbers by the requester ID of the drive.
    functions: BTreeMap<u16, u32>,
    /// Payload that was announced and is not translated yet.
    pending: Vec<PayloadPart>,
}

/// A part of the payload, at one IOVA.
#[derive(Debug, Clone, Copy)]
struct PayloadPart {
    nsid: u32,
    direction: Direction,
    address: u64,
    end: u64,
}

impl Nvme {
    fn add(&mut self, direction: Direction, target: &str, length: u64) {
        let by_direction = match direction {
            Direction::Read => &mut self.read,
            Direction::Write => &mut self.write,
        };
        *by_direction.entry(target.to_owned()).or_default() += length;
        *self.payload.entry(target.to_owned()).or_default() += length;
    }
}

impl Classifier {
    /// Makes a classifier for a q35 machine with `memory` bytes and these drives.
    pub fn new(memory: u64, drives: BTreeMap<u32, String>) -> Classifier {
        let low = if memory >= Q35_LOW_MAX { Q35_SPLIT } else { memory };
        let counters = drives.values().map(|name| (name.clone(), Nvme::default())).collect();
        Classifier {
            ram: vec![(0, low), (HIGH, HIGH + (memory - low))],
            bars: Vec::new(),
            drives,
            counters,
            other: 0,
            translated: false,
            functions: BTreeMap::new(),
            pending: Vec::new(),
        }
    }

    /// Sets that the machine has a translating IOMMU: the addresses of payload are IOVAs, and the payload is `unknown`
    /// until the IOMMU has translated them.
    pub fn translated(self) -> Classifier {
        Classifier {
            translated: true,
            ..self
        }
    }

    /// Records the present addresses of the devices' BARs. Former addresses stay known, after the new ones.
    pub fn learn(&mut self, functions: &[Function], is_ours: impl Fn(&str) -> bool) {
        for function in functions.iter().filter(|f| is_ours(&f.id)) {
            let drive = self.drives.iter().find(|(_, name)| **name == function.id);
            // In each machine that the runner starts, the domain is 0.
            let requester = function.bdf.strip_prefix("0000:").and_then(trace::requester);
            if let (Some((nsid, _)), Some(requester)) = (drive, requester) {
                self.functions.retain(|_, known| *known != *nsid);
                self.functions.insert(requester, *nsid);
            }
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
        match event {
            Event::Other { length } => self.other += length,
            Event::Command { nsid, .. } => {
                if let Some(drive) = self.drive(nsid) {
                    drive.commands += 1;
                }
            }
            Event::Failed { nsid } => {
                if let Some(drive) = self.drive(nsid) {
                    drive.failed += 1;
                }
            }
            Event::Payload {
                nsid,
                direction,
                address,
                length,
            } if self.translated => {
                let end = address.saturating_add(length);
                self.give_up(|part| part.nsid == nsid && part.address < end && address < part.end);
                self.pending.push(PayloadPart {
                    nsid,
                    direction,
                    address,
                    end,
                });
            }
            Event::Payload {
                nsid,
                direction,
                address,
                length,
            } => self.add(nsid, direction, address, length),
            Event::Translation {
                function,
                iova,
                address,
                length,
            } => self.resolve(function, iova, address, length),
        }
    }

    fn drive(&mut self, nsid: u32) -> Option<&mut Nvme> {
        self.counters.get_mut(self.drives.get(&nsid)?)
    }

    fn add(&mut self, nsid: u32, direction: Direction, address: u64, length: u64) {
        let target = self.target(address, length).to_owned();
        if let Some(drive) = self.drive(nsid) {
            drive.add(direction, &target, length);
        }
    }

    /// Counts parts that were never translated as `unknown`. An IOVA that is used again has a new translation.
    fn give_up(&mut self, which: impl Fn(&PayloadPart) -> bool) {
        let (gone, pending): (Vec<_>, Vec<_>) = std::mem::take(&mut self.pending).into_iter().partition(which);
        self.pending = pending;
        for part in gone {
            if let Some(drive) = self.drive(part.nsid) {
                drive.add(part.direction, UNKNOWN, part.end - part.address);
            }
        }
    }

    /// Counts the parts of a function's payload in one page, by the address of the page. The first translation after a
    /// part was announced belongs to its transfer.
    fn resolve(&mut self, function: u16, iova: u64, address: u64, length: u64) {
        let Some(nsid) = self.functions.get(&function).copied() else {
            return;
        };
        let end = iova.saturating_add(length);
        for part in std::mem::take(&mut self.pending) {
            let (from, to) = (part.address.max(iova), part.end.min(end));
            if part.nsid != nsid || from >= to {
                self.pending.push(part);
                continue;
            }
            self.add(nsid, part.direction, address + (from - iova), to - from);
            let rest = [(part.address, from), (to, part.end)];
            let rest = rest.into_iter().filter(|(from, to)| from < to);
            self.pending
                .extend(rest.map(|(address, end)| PayloadPart { address, end, ..part }));
        }
    }

    /// Returns the counters of all drives by name. Payload that is not translated yet is `unknown`.
    pub fn counters(&self) -> BTreeMap<String, Nvme> {
        let mut counters = self.counters.clone();
        for part in &self.pending {
            let drive = self.drives.get(&part.nsid).and_then(|name| counters.get_mut(name));
            if let Some(drive) = drive {
                drive.add(part.direction, UNKNOWN, part.end - part.address);
            }
        }
        counters
    }

    /// Returns the bytes of identify data, log pages and other data that is no payload, of all drives.
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
    fn payload_is_counted_by_target() {
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
        let counters = classifier.counters();
        let nvme0 = &counters["nvme0"];
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
        let nvme1 = &counters["nvme1"];
        assert_eq!(nvme1.payload, Bytes::from([("unknown".into(), 12288)]));
        assert_eq!((nvme1.commands, nvme1.failed), (0, 1));
        assert_eq!(classifier.other(), 5);
    }

    #[test]
    fn translated_payload_is_unknown_until_page_is_known() {
        let drives = BTreeMap::from([(1, "nvme0".into())]);
        let mut classifier = Classifier::new(1 << 30, drives).translated();
        let mut nvme = function("nvme0", 0xf000_0000, 4096);
        nvme.bdf = "0000:02:00.0".into();
        classifier.learn(&[function("accel0", 0x3_8000_0000, 1 << 20), nvme], |_| true);
        let payload = |address, length| Event::Payload {
            nsid: 1,
            direction: Direction::Read,
            address,
            length,
        };
        let page = |function, iova, address| Event::Translation {
            function,
            iova,
            address,
            length: 4096,
        };
        let read = |classifier: &Classifier| classifier.counters()["nvme0"].read.clone();
        // An IOVA that looks like an address of host memory is not host memory.
        classifier.count(payload(0x1800, 0x1000));
        assert_eq!(read(&classifier), Bytes::from([("unknown".into(), 0x1000)]));
        // The translation for another function does not count.
        classifier.count(page(0x0300, 0x1000, 0x5000));
        assert_eq!(read(&classifier), Bytes::from([("unknown".into(), 0x1000)]));
        classifier.count(page(0x0200, 0x2000, 0x3_8000_0000));
        classifier.count(page(0x0200, 0x1000, 0x5000));
        let moved = Bytes::from([("accel0".into(), 0x800), ("host".into(), 0x800)]);
        assert_eq!(read(&classifier), moved);
        // Each transfer is counted once, by its own translation.
        classifier.count(page(0x0200, 0x1000, 0x3_8000_0000));
        assert_eq!(read(&classifier), moved);
        // A part that was never translated stays unknown when its IOVA is used again.
        classifier.count(payload(0x9000, 0x1000));
        classifier.count(payload(0x9000, 0x1000));
        classifier.count(page(0x0200, 0x9000, 0x6000));
        let mut moved = moved;
        moved.insert("unknown".into(), 0x1000);
        moved.insert("host".into(), 0x1800);
        assert_eq!(read(&classifier), moved);
    }

    #[test]
    fn difference_of_snapshots() {
        use serde_json::json;
        let before = json!({"n": {"x": 5, "list": [1, 2], "kind": "nic"}});
        let after = json!({"n": {"x": 7, "list": [1, 5], "kind": "nic", "new": 3, "gone": true}});
        let expected = json!({"n": {"x": 2, "list": [0, 3], "kind": "nic", "new": 3, "gone": true}});
        assert_eq!(difference(&before, &after), expected);
    }

    #[test]
    fn memory_is_split_like_q35() {
        let classifier = Classifier::new(4 << 30, BTreeMap::new());
        assert_eq!(classifier.target(0x7fff_f000, 4096), HOST);
        assert_eq!(classifier.target(0x8000_0000, 4096), UNKNOWN);
        assert_eq!(classifier.target((6 << 30) - 4096, 4096), HOST);
        assert_eq!(classifier.target(6 << 30, 4096), UNKNOWN);
    }

    #[test]
    fn latest_address_of_bar_is_used() {
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
