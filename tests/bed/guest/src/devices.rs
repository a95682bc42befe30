// SPDX-License-Identifier: MIT OR Apache-2.0

//! The topology's devices in a guest: PCI address, block device, RDMA device and network interface by name.
//!
//! The identity of a device comes from the emulator, which knows the slot of each device, and never from probing order.
//! The init writes [`FILE`] and sets environment variables of commands: `P2PMEM_DEV_<NAME>` (PCI address),
//! `P2PMEM_BLOCK_<NAME>`, `P2PMEM_RDMA_<NAME>` and `P2PMEM_NET_<NAME>`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::host;
use crate::wire::{DeviceNote, Request};

/// The file with the list of devices.
pub const FILE: &str = "/run/p2pmem/devices.json";

/// A device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// `accel`, `nvme`, `ivshmem` or `nic`.
    pub kind: String,
    /// The PCI address, such as `0000:03:00.0`.
    pub bdf: String,
    /// Bytes of memory that the device can provide; 0 for none.
    pub memory: u64,
    /// The drive's block device, when its driver is bound.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub block: Option<PathBuf>,
    /// The NIC's RDMA device (`mlx5_0`), when its driver is bound.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rdma: Option<String>,
    /// The NIC's network interface (`ib0`), if it exists.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub net: Option<String>,
}

impl Device {
    /// The device's directory in sysfs.
    pub fn sysfs(&self) -> PathBuf {
        Path::new("/sys/bus/pci/devices").join(&self.bdf)
    }
}

/// Devices by name.
pub type Devices = BTreeMap<String, Device>;

/// Reads [`FILE`].
///
/// # Errors
///
/// The file is missing, because this is not a guest of the VM runner, or the file is invalid.
pub fn load() -> Result<Devices> {
    let text = fs::read_to_string(FILE)
        .with_context(|| format!("{FILE}: this program must run in a guest of the VM runner"))?;
    serde_json::from_str(&text).context(FILE)
}

/// Requests the current devices from the VM runner, after a hotplug, and rewrites [`FILE`].
///
/// # Errors
///
/// Those of [`host::request`] and of writing the file.
pub fn refresh() -> Result<Devices> {
    let notes: BTreeMap<String, DeviceNote> = serde_json::from_value(host::request(&Request::Devices)?)?;
    let devices = locate(&notes)?;
    store(&devices)?;
    Ok(devices)
}

/// Adds the facts that only the guest knows to the runner's notes: block device, RDMA device and network interface.
///
/// # Errors
///
/// The guest has no PCI function at a noted address, or sysfs cannot be read.
pub fn locate(notes: &BTreeMap<String, DeviceNote>) -> Result<Devices> {
    let mut devices = Devices::new();
    for (name, note) in notes {
        let mut device = Device {
            kind: note.kind.clone(),
            bdf: note.bdf.clone(),
            memory: note.memory,
            block: None,
            rdma: None,
            net: None,
        };
        if !device.sysfs().exists() {
            bail!("device {name}: the guest has no PCI function {}", note.bdf);
        }
        if note.kind == "nvme" {
            device.block = block_device(&device.sysfs())?;
        }
        if note.kind == "nic" {
            device.rdma = only_entry(&device.sysfs().join("infiniband"));
            device.net = only_entry(&device.sysfs().join("net"));
        }
        devices.insert(name.clone(), device);
    }
    Ok(devices)
}

/// The name of the first entry of a directory in sysfs; `None` if the directory is empty or missing.
fn only_entry(folder: &Path) -> Option<String> {
    let entry = fs::read_dir(folder).ok()?.next()?.ok()?;
    Some(entry.file_name().to_string_lossy().into_owned())
}

/// The first namespace of the NVMe controller of a PCI function; `None` if there is none yet.
fn block_device(sysfs: &Path) -> Result<Option<PathBuf>> {
    let Ok(controllers) = fs::read_dir(sysfs.join("nvme")) else {
        return Ok(None);
    };
    for controller in controllers {
        let controller = controller?;
        for entry in fs::read_dir(controller.path())? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let after = name.strip_prefix(&*controller.file_name().to_string_lossy());
            if after.is_some_and(|rest| rest.starts_with('n')) {
                return Ok(Some(Path::new("/dev").join(name)));
            }
        }
    }
    Ok(None)
}

/// Writes [`FILE`].
///
/// # Errors
///
/// Those of writing a file.
pub fn store(devices: &Devices) -> Result<()> {
    fs::write(FILE, serde_json::to_vec_pretty(devices)?).context(FILE)
}

/// The environment variables with the devices: `P2PMEM_DEV_ACCEL0=0000:03:00.0`, `P2PMEM_BLOCK_NVME0=/dev/nvme0n1`,
/// `P2PMEM_RDMA_NIC0=mlx5_0`, `P2PMEM_NET_NIC0=ib0`.
pub fn environment(devices: &Devices) -> BTreeMap<String, String> {
    let mut vars = BTreeMap::new();
    for (name, device) in devices {
        let upper = name.to_uppercase().replace('-', "_");
        vars.insert(format!("P2PMEM_DEV_{upper}"), device.bdf.clone());
        if let Some(block) = &device.block {
            vars.insert(format!("P2PMEM_BLOCK_{upper}"), block.display().to_string());
        }
        if let Some(rdma) = &device.rdma {
            vars.insert(format!("P2PMEM_RDMA_{upper}"), rdma.clone());
        }
        if let Some(net) = &device.net {
            vars.insert(format!("P2PMEM_NET_{upper}"), net.clone());
        }
    }
    vars
}
