// SPDX-License-Identifier: MIT OR Apache-2.0

//! Devices of this machine whose memory programs can use, and devices that can use such memory, read from sysfs alone.
//!
//! Reading the inventory needs neither the module nor privileges.

mod sources;
mod types;

use std::path::Path;

use crate::addr::PciAddr;
pub use crate::backend::Backend;
use crate::error::Result;
use crate::pci::{device_at, devices_in, hex, read_attribute, PciDevice};

pub use sources::Release;
pub(crate) use sources::VfioState;
use sources::{vendor_interfaces, Machine};
pub use types::{Availability, Bar, DmaBufSupport, DmaClient, MemoryDevice, Pool, Source};

/// Bits of the flags in the sysfs file `resource` (`include/linux/ioport.h`).
const IORESOURCE_MEM: u64 = 0x200;
const IORESOURCE_PREFETCH: u64 = 0x2000;
const IORESOURCE_MEM_64: u64 = 0x10_0000;
/// The number of BARs of a function. The other lines of `resource` are the ROM and bridge windows.
const BARS: usize = 6;

/// The devices of a machine.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Inventory {
    /// Release of the running kernel.
    pub kernel: String,
    /// Whether the module is loaded.
    pub module_loaded: bool,
    /// Whether an IOMMU is active.
    pub iommu: bool,
    /// Devices with memory, by address.
    pub memory_devices: Vec<MemoryDevice>,
    /// Devices that can use the memory, by address.
    pub clients: Vec<DmaClient>,
}

impl Inventory {
    /// Reads the inventory of this machine. `providers` are the addresses of the module's providers, from
    /// [`Device::providers`](crate::Device::providers); none if the device cannot be opened.
    ///
    /// # Errors
    ///
    /// [`Error::Admin`](crate::Error::Admin) if sysfs has no PCI bus.
    ///
    /// ```no_run
    /// use p2pmem::inventory::Inventory;
    ///
    /// for memory_device in Inventory::read(None)?.memory_devices {
    ///     if let Some(source) = memory_device.best() {
    ///         println!("{}: {} ({})", memory_device.device.addr, source.detail, source.backend);
    ///     }
    /// }
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    pub fn read(providers: Option<&[PciAddr]>) -> Result<Self> {
        Self::read_in(Path::new("/"), providers)
    }

    /// As [`Inventory::read`], with the machine's file system at `root`.
    ///
    /// # Errors
    ///
    /// Those of [`Inventory::read`].
    pub fn read_in(root: &Path, providers: Option<&[PciAddr]>) -> Result<Self> {
        let sys = root.join("sys");
        let kernel = kernel_name(root);
        let module_loaded = sys.join("module/p2pmem").exists();
        let mut groups = sys.join("kernel/iommu_groups").read_dir().into_iter().flatten();
        let iommu = groups.next().is_some();
        let machine = Machine {
            root,
            release: kernel_release(&kernel),
            module: module_loaded,
            providers,
        };
        let devices = devices_in(&sys)?;
        let memory_devices = devices
            .iter()
            .filter_map(|device| memory_device(&machine, device))
            .collect();
        let clients = devices
            .into_iter()
            .filter(PciDevice::is_likely_client)
            .map(|device| DmaClient {
                dma_bufs: machine.folder(&device).join("infiniband").exists().then(|| {
                    device
                        .driver
                        .as_deref()
                        .map_or(DmaBufSupport::Unknown, DmaBufSupport::of_driver)
                }),
                device,
            })
            .collect();
        Ok(Self {
            kernel,
            module_loaded,
            iommu,
            memory_devices,
            clients,
        })
    }
}

/// Returns the function at an address with its sources, whatever its class is; none if there is no such function.
pub(crate) fn memory_device_at(root: &Path, addr: PciAddr) -> Option<MemoryDevice> {
    let device = device_at(&root.join("sys"), addr)?;
    Some(described(&without_module(root), &device))
}

/// Returns what a device needs until a program can use it by vfio-pci.
pub(crate) fn vfio_state(root: &Path, memory_device: &MemoryDevice) -> VfioState {
    without_module(root).vfio_state(memory_device)
}

fn without_module(root: &Path) -> Machine<'_> {
    Machine {
        root,
        release: kernel_release(&kernel_name(root)),
        module: false,
        providers: None,
    }
}

/// Returns the release of the running kernel of the machine whose file system is at `root`.
pub(crate) fn kernel_name(root: &Path) -> String {
    read_attribute(&root.join("proc/sys/kernel/osrelease")).unwrap_or_default()
}

/// Returns the device with its sources.
fn described(machine: &Machine<'_>, device: &PciDevice) -> MemoryDevice {
    let folder = machine.folder(device);
    let mut memory_device = MemoryDevice {
        device: device.clone(),
        bars: bars_in(&folder),
        pool: pool_in(&folder),
        sources: Vec::new(),
    };
    memory_device.sources = machine.sources(&memory_device);
    memory_device
}

/// Returns the device with its sources, or none if it has no memory that a program could use.
fn memory_device(machine: &Machine<'_>, device: &PciDevice) -> Option<MemoryDevice> {
    let memory_device = described(machine, device);
    let has_memory = memory_device.pool.is_some()
        || vendor_interfaces(device).is_some()
        || machine.is_provider(device.addr)
        || memory_device.has_memory_bar();
    has_memory.then_some(memory_device)
}

impl MemoryDevice {
    /// Returns whether a BAR of the device is for memory.
    pub(crate) fn has_memory_bar(&self) -> bool {
        self.memory_bar().is_some() && !has_registers_alone(self.device.class)
    }
}

/// Whether the BARs of this class of devices hold registers: storage, network, bridges, communication, system
/// peripherals, input, serial buses, wireless. Memory of such devices is published by their drivers.
fn has_registers_alone(class: u32) -> bool {
    matches!(class >> 16, 0x01 | 0x02 | 0x06..=0x09 | 0x0c | 0x0d)
}

/// Reads the memory BARs of the function in a folder of sysfs.
fn bars_in(folder: &Path) -> Vec<Bar> {
    let text = read_attribute(&folder.join("resource")).unwrap_or_default();
    let lines = text.lines().take(BARS).zip(0u8..);
    lines
        .filter_map(|(line, index)| {
            let mut numbers = line.split_whitespace().map(hex);
            let (start, end, flags) = (numbers.next()??, numbers.next()??, numbers.next()??);
            if flags & IORESOURCE_MEM == 0 || end <= start {
                return None;
            }
            Some(Bar {
                index,
                size: (end - start).checked_add(1)?,
                is_64bit: flags & IORESOURCE_MEM_64 != 0,
                prefetchable: flags & IORESOURCE_PREFETCH != 0,
                resizable_to: resizable_to(folder, index),
            })
        })
        .collect()
}

/// The largest size that the file `resourceN_resize` offers: bit N of its number is a size of 2^N MiB.
fn resizable_to(folder: &Path, index: u8) -> Option<u64> {
    let sizes = hex(&read_attribute(&folder.join(format!("resource{index}_resize")))?)?;
    1u64.checked_shl(sizes.checked_ilog2()? + 20)
}

fn pool_in(folder: &Path) -> Option<Pool> {
    let folder = folder.join("p2pmem");
    let number = |name: &str| read_attribute(&folder.join(name))?.parse().ok();
    Some(Pool {
        size: number("size")?,
        available: number("available")?,
        published: number("published")? != 0,
    })
}

/// The first two numbers of a kernel release, such as (6, 19); zeros if it has none.
pub fn kernel_release(text: &str) -> Release {
    let mut numbers = text
        .split(|c: char| !c.is_ascii_digit())
        .map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests;
