// SPDX-License-Identifier: MIT OR Apache-2.0

//! The topology's devices for programs in the guest: names, PCI addresses and block devices.
//!
//! The emulator determines which device has which address; the order of probing does not matter. The init writes
//! [`FILE`] and sets `P2PMEM_DEV_<NAME>` (PCI address), `P2PMEM_BLOCK_<NAME>`, `P2PMEM_RDMA_<NAME>` and
//! `P2PMEM_NET_<NAME>` in the environment of commands.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::host;
use crate::wire::{DeviceNote, Request};

/// Path of the list of devices.
pub const FILE: &str = "/run/p2pmem/devices.json";

/// One device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// `accel`, `nvme`, `ivshmem` or `nic`.
    pub kind: String,
    /// PCI address, `0000:03:00.0`.
    pub bdf: String,
    /// Bytes of memory that the device can publish; 0 for none.
    pub memory: u64,
    /// The drive's block device, once its driver is bound.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub block: Option<PathBuf>,
    /// The NIC's RDMA device (`mlx5_0`), once its driver is bound.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rdma: Option<String>,
    /// The NIC's network interface (`ib0`), once there is one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub net: Option<String>,
}

impl Device {
    /// Its folder in sysfs.
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
/// The file is missing (not in a guest of the VM runner) or not readable.
pub fn load() -> Result<Devices> {
    let text = fs::read_to_string(FILE).with_context(|| format!("{FILE}: not in a guest of the VM runner"))?;
    serde_json::from_str(&text).context(FILE)
}

/// Requests the present addresses of the devices from the runner (after a hotplug), and rewrites [`FILE`].
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

/// Adds the names that only the guest knows, such as block devices, to the runner's notes.
///
/// # Errors
///
/// A device of the emulator is missing, or sysfs cannot be read.
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
            bail!("device {name}: there is no PCI function {} in the guest", note.bdf);
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

/// Returns the name of the entry of a folder in sysfs, or `None` while there is none.
fn only_entry(folder: &Path) -> Option<String> {
    let entry = fs::read_dir(folder).ok()?.next()?.ok()?;
    Some(entry.file_name().to_string_lossy().into_owned())
}

/// Returns the first namespace of the NVMe controller at a PCI function, or `None` while there is none.
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

/// The environment variables that name the devices: `P2PMEM_DEV_ACCEL0=0000:03:00.0`, `P2PMEM_BLOCK_NVME0=/dev/nvme0n1`,
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
