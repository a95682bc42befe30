// SPDX-License-Identifier: MIT OR Apache-2.0

//! The sources from which programs can get a device's memory, and what each of them needs.

use std::path::{Path, PathBuf};

use super::types::{Availability, MemoryDevice, Source};
use crate::addr::PciAddr;
use crate::backend::Backend;
use crate::pci::{folder_of, PciDevice};

/// The first two numbers of a kernel release.
pub type Release = (u32, u32);

/// The first kernel release with the sysfs file `p2pmem/allocate`.
const SYSFS_ALLOCATE: Release = (6, 2);
/// The first kernel release whose vfio-pci exports BARs as dma-bufs.
const VFIO_DMABUF: Release = (6, 19);

/// Interfaces of a driver that owns its device's memory; none for other drivers.
pub(super) fn vendor_interfaces(device: &PciDevice) -> Option<&'static str> {
    Some(match device.driver.as_deref()? {
        // NvidiaModules::detail() says more.
        "nvidia" => "dma-buf by cuMemGetHandleForAddressRange()",
        "amdgpu" => "dma-buf by hsa_amd_portable_export_dmabuf()",
        "xe" | "i915" => "dma-buf by Level Zero (ZE_EXTERNAL_MEMORY_TYPE_FLAG_DMA_BUF)",
        "habanalabs" => "dma-buf by the ioctl HL_MEM_OP_EXPORT_DMABUF_FD",
        _ => return None,
    })
}

/// The parts of the machine on which sources depend.
pub(super) struct Machine<'a> {
    pub(super) root: &'a Path,
    pub(super) release: Release,
    /// Whether the module is loaded.
    pub(super) module: bool,
    /// Addresses of the module's providers; none if they are not known.
    pub(super) providers: Option<&'a [PciAddr]>,
}

impl Machine<'_> {
    /// Whether a device is a provider of the module.
    pub(super) fn is_provider(&self, addr: PciAddr) -> bool {
        self.providers.is_some_and(|providers| providers.contains(&addr))
    }

    /// The folder of a device in sysfs.
    pub(super) fn folder(&self, device: &PciDevice) -> PathBuf {
        folder_of(&self.root.join("sys"), device.addr)
    }

    /// All sources of a device's memory, one for each backend.
    pub(super) fn sources(&self, memory_device: &MemoryDevice) -> Vec<Source> {
        let source = |backend: Backend, (availability, detail)| Source {
            backend,
            availability,
            missing: backend.missing().collect(),
            detail,
        };
        vec![
            source(Backend::Module, self.by_module(memory_device)),
            source(Backend::Sysfs, self.by_sysfs(memory_device)),
            source(Backend::Vfio, self.by_vfio(memory_device)),
            source(Backend::Driver, self.by_driver(memory_device)),
        ]
    }

    fn by_module(&self, memory_device: &MemoryDevice) -> (Availability, String) {
        use Availability::{Possible, Ready, Unavailable};
        let addr = memory_device.device.addr;
        let load = if self.module {
            ""
        } else {
            "load the module (modprobe p2pmem), then "
        };
        let driver = memory_device.device.driver.as_deref();
        if self.is_provider(addr) {
            return (Ready, "it is a provider: see p2pmemctl list".into());
        }
        if let (Some(_), Some(driver)) = (vendor_interfaces(&memory_device.device), driver) {
            return (Unavailable, format!("the driver {driver} owns the memory"));
        }
        if self.module && self.providers.is_none() {
            return (
                Possible,
                "the module is loaded, and its providers are not known: scan as root or as a member of its group"
                    .into(),
            );
        }
        if memory_device.pool.is_some() {
            return if self.module {
                (
                    Unavailable,
                    "the module does not manage the memory that the driver published: the kernel log says why".into(),
                )
            } else {
                (
                    Possible,
                    "load the module (modprobe p2pmem), which adopts the memory".into(),
                )
            };
        }
        match (memory_device.memory_bar(), driver) {
            (None, _) => (Unavailable, "it has no 64-bit prefetchable BAR".into()),
            (Some(_), None | Some("p2pmem")) => (Possible, format!("{load}p2pmemctl publish {addr}")),
            (Some(_), Some(driver)) => (
                Possible,
                format!("{load}p2pmemctl publish --force {addr}, which takes the device from the driver {driver}"),
            ),
        }
    }

    fn by_sysfs(&self, memory_device: &MemoryDevice) -> (Availability, String) {
        use Availability::{Ready, Unavailable};
        let file = self.folder(&memory_device.device).join("p2pmem/allocate");
        if memory_device.pool.is_none() {
            return (Unavailable, "its driver publishes no memory".into());
        }
        if !file.exists() {
            let (major, minor) = SYSFS_ALLOCATE;
            return (Unavailable, format!("the kernel is older than {major}.{minor}"));
        }
        (
            Ready,
            format!(
                "mmap() of /sys/bus/pci/devices/{}/p2pmem/allocate, as root",
                memory_device.device.addr
            ),
        )
    }

    /// Returns what a device needs until a program can use it by vfio-pci.
    pub(super) fn vfio_state(&self, memory_device: &MemoryDevice) -> VfioState {
        if self.release < VFIO_DMABUF {
            return VfioState::OldKernel;
        }
        if memory_device.bars.is_empty() {
            return VfioState::NoBar;
        }
        let Ok(group) = std::fs::read_link(self.folder(&memory_device.device).join("iommu_group")) else {
            return VfioState::NoIommu;
        };
        match memory_device.device.driver.as_deref() {
            Some("vfio-pci") => VfioState::Bound {
                group: group.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            },
            _ => VfioState::Unbound,
        }
    }

    fn by_vfio(&self, memory_device: &MemoryDevice) -> (Availability, String) {
        use Availability::{Possible, Ready, Unavailable};
        match self.vfio_state(memory_device) {
            VfioState::OldKernel => {
                let (major, minor) = VFIO_DMABUF;
                (Unavailable, format!("the kernel is older than {major}.{minor}"))
            }
            VfioState::NoBar => (Unavailable, "it has no memory BAR".into()),
            VfioState::NoIommu => (Unavailable, "vfio-pci needs an active IOMMU".into()),
            VfioState::Bound { group } => (Ready, format!("dma-bufs of its BARs by /dev/vfio/{group}")),
            VfioState::Unbound => {
                let driver = memory_device.device.driver.as_deref();
                let unbind = driver.map_or_else(String::new, |driver| {
                    format!(", which takes it from the driver {driver}")
                });
                (Possible, format!("bind it to vfio-pci{unbind}"))
            }
        }
    }

    fn by_driver(&self, memory_device: &MemoryDevice) -> (Availability, String) {
        use Availability::{Ready, Unavailable};
        match (
            vendor_interfaces(&memory_device.device),
            memory_device.device.driver.as_deref(),
        ) {
            (Some(interface), Some("nvidia")) => {
                let (availability, detail) = NvidiaModules::read(self.root).detail(interface);
                (availability, format!("nvidia: {detail}"))
            }
            (Some(interface), Some(driver)) => (Ready, format!("{driver}: {interface}")),
            (_, Some(driver)) => (Unavailable, format!("no interface of the driver {driver} is known")),
            (_, None) => (Unavailable, "it has no driver".into()),
        }
    }
}

/// NVIDIA's kernel modules that are loaded. The driver of both kinds has the name nvidia, but CUDA exports dma-bufs only
/// with the open ones.
struct NvidiaModules {
    /// Whether the modules are the open ones; none if `/proc/driver/nvidia/version` does not exist.
    open: Option<bool>,
    /// Whether nvidia-peermem is loaded.
    peermem: bool,
}

impl NvidiaModules {
    fn read(root: &Path) -> Self {
        let version = std::fs::read_to_string(root.join("proc/driver/nvidia/version"));
        Self {
            open: version.ok().map(|text| text.contains("Open Kernel Module")),
            peermem: root.join("sys/module/nvidia_peermem").exists(),
        }
    }

    /// Returns whether the driver gives memory to NICs, and how. `interface` exports dma-bufs.
    fn detail(&self, interface: &str) -> (Availability, String) {
        use Availability::{Possible, Ready};
        let peermem = "peer memory by nvidia-peermem";
        match (self.open, self.peermem) {
            (Some(true), false) => (Ready, format!("{interface} (open kernel modules)")),
            (Some(true), true) => (Ready, format!("{interface} (open kernel modules), {peermem}")),
            (Some(false), true) => (
                Ready,
                format!("{peermem}; {interface} needs the open kernel modules, and the proprietary ones are loaded"),
            ),
            (Some(false), false) => (
                Possible,
                format!("{interface} needs the open kernel modules, and the proprietary ones are loaded; {peermem} needs that module"),
            ),
            (None, _) => (Ready, format!("{interface} with the open kernel modules, {peermem}")),
        }
    }
}

/// What a device needs until a program can use it by vfio-pci.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum VfioState {
    /// A newer kernel: vfio-pci of this kernel exports no dma-bufs.
    OldKernel,
    /// A memory BAR, which this device does not have.
    NoBar,
    /// An IOMMU: the device is in no IOMMU group.
    NoIommu,
    /// The driver vfio-pci: the device has another driver, or none.
    Unbound,
    /// Nothing: the device is bound to vfio-pci.
    Bound {
        /// The number of the IOMMU group.
        group: String,
    },
}
