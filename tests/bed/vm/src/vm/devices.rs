// SPDX-License-Identifier: MIT OR Apache-2.0

//! The devices of a running guest: requests of its programs, hot-plug, addresses, counters.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use p2pmem_guest::wire::{DeviceNote, DriveOperation, Request};
use serde_json::{Value, json};

use super::Vm;
use crate::bridges;
use crate::counters::{HOST, UNKNOWN};
use crate::models::Model;
use crate::qemu;
use crate::topology::Device;

/// The time limit of an orderly unplug.
const UNPLUG_LIMIT: Duration = Duration::from_secs(60);
/// The error of a drive's medium, as Linux numbers it.
const EIO: u32 = 5;

impl Vm {
    /// Serves a request of a program in the guest, or of a test.
    ///
    /// # Errors
    ///
    /// The device is unknown or of the wrong kind, or QEMU refuses.
    pub fn serve(&mut self, request: &Request) -> Result<Value> {
        match request {
            Request::Devices => Ok(serde_json::to_value(self.devices()?)?),
            Request::Snapshot => self.snapshot(),
            Request::Kill { name } => {
                self.known(name)?;
                let alone = self.models.get(name).is_some_and(Model::is_alone);
                ensure!(alone, "device {name} has no process of its own that still runs");
                self.models.remove(name);
                Ok(json!({}))
            }
            Request::Control { name, request } => {
                self.known(name)?;
                let model = self.models.get(name);
                let model = model.with_context(|| format!("device {name} has no process that runs"))?;
                model.ask(request).with_context(|| format!("device {name}"))
            }
            Request::DeviceDel { name } => self.unplug(name),
            Request::DeviceAdd { name } => self.plug(name),
            Request::DriveErrors { name, operations } => self.set_drive_errors(name, operations),
            Request::PortError { name, error } => {
                let line = format!("pcie_aer_inject_error {name} {error}");
                let answer = self
                    .qmp
                    .execute("human-monitor-command", json!({ "command-line": line }))?;
                let text = answer.as_str().unwrap_or_default().trim();
                ensure!(text.starts_with("OK "), "{line}: {text}");
                Ok(Value::Null)
            }
        }
    }

    fn known(&self, name: &str) -> Result<&Device> {
        self.topology
            .device(name)
            .with_context(|| format!("topology {} has no device {name:?}", self.topology.name))
    }

    fn unplug(&mut self, name: &str) -> Result<Value> {
        let device = self.known(name)?.clone();
        // QEMU 11.1 aborts (an assertion about memory regions) when a vfio-user device is unplugged.
        ensure!(
            !device.is_model(),
            "device {name}: QEMU cannot unplug a vfio-user device; remove and rescan it in the guest, or kill its process"
        );
        self.qmp.execute("device_del", json!({ "id": name }))?;
        let deadline = Instant::now() + UNPLUG_LIMIT * self.kernel.time_factor;
        self.qmp.wait_event(deadline, &format!("the end of {name}"), |event| {
            event["event"] == "DEVICE_DELETED" && event["data"]["device"] == name
        })?;
        if let Device::Ivshmem { .. } = device {
            // The removed device's name is still assigned to the memory, and the next device needs memory without a
            // name.
            self.qmp
                .execute("object-del", json!({ "id": qemu::backend_id(name) }))?;
        }
        Ok(json!({}))
    }

    fn plug(&mut self, name: &str) -> Result<Value> {
        let options = self.plan.devices.get(name).context("planned devices")?.clone();
        let size = match self.known(name)? {
            Device::Ivshmem { size, .. } => size.0,
            Device::Accel { .. } | Device::Fpga { .. } | Device::Nic { .. } => {
                bail!("device {name}: a vfio-user device cannot be unplugged, so it is there")
            }
            // QEMU cannot plug a namespace into a running drive, but it can plug a drive that has a namespace.
            Device::Nvme { .. } => {
                ensure!(
                    self.plan.drives.get(&1).is_some_and(|first| first == name),
                    "device {name}: of several drives QEMU can plug in the first alone: that one comes with its namespace"
                );
                return self.qmp.execute("device_add", options);
            }
        };
        self.qmp
            .execute("object-add", qemu::backend(&qemu::backend_id(name), size))?;
        self.qmp.execute("device_add", options)
    }

    /// Puts a node that fails operations between the format and the image of a drive, or removes it.
    fn set_drive_errors(&mut self, name: &str, operations: &BTreeSet<DriveOperation>) -> Result<Value> {
        ensure!(
            matches!(self.known(name)?, Device::Nvme { .. }),
            "device {name} is not a drive"
        );
        let image = &self.plan.images[name];
        let (file, faulty) = (image.file.clone(), image.faulty());
        if self.faulty.remove(name) {
            self.qmp
                .execute("blockdev-reopen", json!({ "options": [image.format] }))?;
            self.qmp.execute("blockdev-del", json!({ "node-name": faulty }))?;
        }
        if operations.is_empty() {
            return Ok(json!({}));
        }
        let errors: Vec<Value> = operations
            .iter()
            .map(|operation| json!({ "event": "none", "iotype": operation, "errno": EIO }))
            .collect();
        let node = json!({ "driver": "blkdebug", "node-name": faulty, "image": file, "inject-error": errors });
        self.qmp.execute("blockdev-add", node)?;
        self.faulty.insert(name.to_owned());
        let mut format = image.format.clone();
        format["file"] = json!(faulty);
        self.qmp.execute("blockdev-reopen", json!({ "options": [format] }))
    }

    /// Returns the present addresses of the topology's devices.
    ///
    /// # Errors
    ///
    /// QEMU does not answer.
    pub fn devices(&mut self) -> Result<BTreeMap<String, DeviceNote>> {
        let functions = self.qmp.functions()?;
        let topology = &self.topology;
        self.classifier.learn(&functions, |id| topology.device(id).is_some());
        let notes = functions.into_iter().filter_map(|function| {
            let device = topology.device(&function.id)?;
            let note = DeviceNote {
                kind: device.kind().to_owned(),
                bdf: function.bdf,
                memory: device.memory(),
            };
            Some((function.id, note))
        });
        Ok(notes.collect())
    }

    /// Returns the present counters of all devices, by name.
    ///
    /// A drive: `{"kind": "nvme", "payload": {"host": N, "accel0": N}, "read": {..}, "write": {..}, "commands": N,
    /// "failed": N}`, see [`crate::counters::Nvme`]. An accelerator or a NIC: `{"kind": "accel", "counters": ..}` with
    /// the counters of its process, or `{"kind": "accel", "gone": true}`. The key `bridges` has the result of
    /// [`bridges::count`] for all of them. The counters include all I/O that the caller has seen complete.
    ///
    /// # Errors
    ///
    /// The trace cannot be read, or QEMU or a device process does not answer.
    pub fn snapshot(&mut self) -> Result<Value> {
        self.devices()?;
        let classifier = &mut self.classifier;
        self.trace
            .read(|event| classifier.count(event))
            .context("QEMU's trace")?;
        let mut all = serde_json::Map::new();
        for (name, counters) in self.classifier.counters() {
            let mut value = serde_json::to_value(counters)?;
            value["kind"] = json!("nvme");
            // A target without bytes has an entry of 0, so that a condition on it differs from one with a wrong name.
            for by_target in ["payload", "read", "write"] {
                let memory_devices = self.topology.device.iter().filter(|device| device.memory() > 0);
                for target in memory_devices.map(Device::name).chain([HOST, UNKNOWN]) {
                    if value[by_target].get(target).is_none() {
                        value[by_target][target] = json!(0);
                    }
                }
            }
            all.insert(name.clone(), value);
        }
        for device in &self.topology.device {
            if !device.is_model() {
                continue;
            }
            let (name, kind) = (device.name(), device.kind());
            let value = match self.models.get(name) {
                Some(model) => {
                    let counters = model.counters().with_context(|| format!("counters of {name}"))?;
                    json!({ "kind": kind, "counters": counters })
                }
                None => json!({ "kind": kind, "gone": true }),
            };
            all.insert(name.to_owned(), value);
        }
        let bridges = bridges::count(&self.topology, &all);
        all.insert(bridges::BRIDGES.to_owned(), bridges);
        Ok(Value::Object(all))
    }
}
