// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;
use crate::fake::write_pci_function;
use std::fs;
use std::os::unix::fs::symlink;

struct Machine(tempfile::TempDir);

/// Lines of `resource` with one BAR, number 2.
fn bar2(size: u64, flags: u64) -> String {
    let none = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
    let bar = format!(
        "{:#018x} {:#018x} {flags:#018x}\n",
        0x38_0000_0000u64,
        0x38_0000_0000 + size - 1
    );
    format!("{none}{none}{bar}{none}{none}{none}")
}

const MEMORY: u64 = IORESOURCE_MEM | IORESOURCE_PREFETCH | IORESOURCE_MEM_64;

impl Machine {
    fn new(kernel: &str) -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        machine.put("proc/sys/kernel/osrelease", kernel);
        fs::create_dir_all(machine.0.path().join("sys/bus/pci/devices")).unwrap();
        machine
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Adds a device. Returns its folder, relative to the root.
    fn device(&self, addr: &str, class: &str, driver: &str, resource: &str) -> String {
        let folder = format!("sys/devices/pci0000:00/{addr}");
        let files = [
            ("vendor", "0x15b3"),
            ("device", "0x1017"),
            ("class", class),
            ("resource", resource),
        ];
        let root = self.0.path();
        write_pci_function(&root.join("sys"), &format!("pci0000:00/{addr}"), &files).unwrap();
        if !driver.is_empty() {
            symlink(Path::new("/drivers").join(driver), root.join(&folder).join("driver")).unwrap();
        }
        folder
    }

    fn group(&self, folder: &str) {
        let groups = self.0.path().join("sys/kernel/iommu_groups/7");
        fs::create_dir_all(&groups).unwrap();
        symlink(&groups, self.0.path().join(folder).join("iommu_group")).unwrap();
    }

    fn read(&self, providers: Option<&[PciAddr]>) -> Inventory {
        Inventory::read_in(self.0.path(), providers).unwrap()
    }

    /// The source of the only device with memory.
    fn source(&self, backend: Backend) -> (Availability, String) {
        let inventory = self.read(Some(&[]));
        assert_eq!(inventory.memory_devices.len(), 1, "{inventory:#?}");
        let source = inventory.memory_devices[0]
            .sources
            .iter()
            .find(|source| source.backend == backend);
        let source = source.unwrap();
        (source.availability, source.detail.clone())
    }
}

use Availability::{Possible, Ready, Unavailable};

#[test]
fn a_bar_of_an_unbound_accelerator_can_be_published() {
    let machine = Machine::new("7.2.12-amd64");
    let folder = machine.device("0000:03:00.0", "0x120000", "", &bar2(1 << 30, MEMORY));
    machine.put(&format!("{folder}/resource2_resize"), "0000000000001c00\n");
    let inventory = machine.read(Some(&[]));
    let memory_device = &inventory.memory_devices[0];
    let bar = memory_device.memory_bar().unwrap();
    assert_eq!((bar.index, bar.size, bar.is_memory()), (2, 1 << 30, true));
    assert_eq!(bar.resizable_to, Some(4 << 30), "bits 10 to 12: up to 4096 MiB");
    assert_eq!(memory_device.best().unwrap().backend, Backend::Module);
    let (availability, detail) = machine.source(Backend::Module);
    assert!(
        availability == Possible && detail.contains("modprobe p2pmem"),
        "{detail}"
    );
    machine.put("sys/module/p2pmem/refcnt", "0");
    assert_eq!(
        machine.source(Backend::Module),
        (Possible, "p2pmemctl publish 0000:03:00.0".into())
    );
    assert_eq!(machine.source(Backend::Sysfs).0, Unavailable);
    assert_eq!(machine.source(Backend::Driver).0, Unavailable);
    let addr = "0000:03:00.0".parse().unwrap();
    let published = machine.read(Some(&[addr]));
    assert_eq!(published.memory_devices[0].best().unwrap().availability, Ready);
    assert!(published.module_loaded);
    let unknown = machine.read(None);
    let source = unknown.memory_devices[0].best().unwrap();
    assert!(
        source.availability == Possible && source.detail.contains("member of its group"),
        "{source:?}"
    );
    assert!(published.clients.len() == 1 && published.clients[0].dma_bufs.is_none());
}

#[test]
fn bound_device_needs_force() {
    let machine = Machine::new("7.2.12-amd64");
    machine.put("sys/module/p2pmem/refcnt", "0");
    machine.device("0000:03:00.0", "0x058000", "fpga", &bar2(1 << 20, MEMORY));
    let (availability, detail) = machine.source(Backend::Module);
    assert!(
        availability == Possible && detail.contains("--force") && detail.contains("fpga"),
        "{detail}"
    );
}

#[test]
fn vfio_needs_linux_6_19_and_an_iommu() {
    let old = Machine::new("6.18.44");
    old.device("0000:03:00.0", "0x120000", "vfio-pci", &bar2(1 << 30, MEMORY));
    assert_eq!(
        old.source(Backend::Vfio),
        (Unavailable, "the kernel is older than 6.19".into())
    );
    let new = Machine::new("6.19.0");
    let folder = new.device("0000:03:00.0", "0x120000", "vfio-pci", &bar2(1 << 30, MEMORY));
    assert!(new.source(Backend::Vfio).1.contains("IOMMU"));
    assert!(!new.read(Some(&[])).iommu);
    new.group(&folder);
    assert_eq!(
        new.source(Backend::Vfio),
        (Ready, "dma-bufs of its BARs by /dev/vfio/7".into())
    );
    assert!(new.read(Some(&[])).iommu);
    let other = Machine::new("7.0");
    let folder = other.device("0000:03:00.0", "0x120000", "fpga", &bar2(1 << 30, MEMORY));
    other.group(&folder);
    let (availability, detail) = other.source(Backend::Vfio);
    assert!(
        availability == Possible && detail.contains("takes it from the driver fpga"),
        "{detail}"
    );
}

#[test]
fn memory_published_by_driver_is_adopted_or_mapped_by_sysfs() {
    let machine = Machine::new("6.1.0");
    let folder = machine.device("0000:04:00.0", "0x010802", "nvme", &bar2(16 << 20, IORESOURCE_MEM));
    assert!(
        machine.read(Some(&[])).memory_devices.is_empty(),
        "registers are no memory"
    );
    for (file, value) in [("size", "1048576"), ("available", "4096"), ("published", "1")] {
        machine.put(&format!("{folder}/p2pmem/{file}"), value);
    }
    let pool = machine.read(Some(&[])).memory_devices[0].pool.unwrap();
    assert_eq!((pool.size, pool.available, pool.published), (1 << 20, 4096, true));
    assert_eq!(
        machine.source(Backend::Sysfs),
        (Unavailable, "the kernel is older than 6.2".into())
    );
    let (availability, detail) = machine.source(Backend::Module);
    assert!(availability == Possible && detail.contains("adopts"), "{detail}");
    machine.put(&format!("{folder}/p2pmem/allocate"), "");
    assert_eq!(machine.source(Backend::Sysfs).0, Ready);
    machine.put("sys/module/p2pmem/refcnt", "0");
    assert_eq!(
        machine.source(Backend::Module).0,
        Unavailable,
        "loaded, and not a provider"
    );
}

#[test]
fn memory_of_vendor_driver_uses_the_driver_backend() {
    let machine = Machine::new("7.2.12-amd64");
    machine.device("0000:05:00.0", "0x030000", "amdgpu", &bar2(64 << 30, MEMORY));
    assert_eq!(
        machine.source(Backend::Module),
        (Unavailable, "the driver amdgpu owns the memory".into())
    );
    assert_eq!(
        machine.source(Backend::Driver),
        (Ready, "amdgpu: dma-buf by hsa_amd_portable_export_dmabuf()".into())
    );
    assert_eq!(
        machine.read(Some(&[])).memory_devices[0].best().unwrap().backend,
        Backend::Driver
    );
}

#[test]
fn nvidia_exports_dma_bufs_with_the_open_modules_alone() {
    const INTERFACE: &str = "nvidia: dma-buf by cuMemGetHandleForAddressRange()";
    let machine = Machine::new("6.18.44");
    machine.device("0000:00:06.0", "0x030200", "nvidia", &bar2(128 << 30, MEMORY));
    let (availability, detail) = machine.source(Backend::Driver);
    assert!(
        availability == Ready && detail.contains("with the open kernel modules"),
        "{detail}"
    );
    machine.put(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Release Build\n",
    );
    let (availability, detail) = machine.source(Backend::Driver);
    assert!(
        availability == Possible && detail.contains("the proprietary ones are loaded"),
        "{detail}"
    );
    machine.put("sys/module/nvidia_peermem/refcnt", "0");
    let (availability, detail) = machine.source(Backend::Driver);
    assert!(
        availability == Ready && detail.starts_with("nvidia: peer memory by nvidia-peermem;"),
        "{detail}"
    );
    machine.put(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n",
    );
    assert_eq!(
        machine.source(Backend::Driver),
        (
            Ready,
            format!("{INTERFACE} (open kernel modules), peer memory by nvidia-peermem")
        )
    );
    fs::remove_dir_all(machine.0.path().join("sys/module/nvidia_peermem")).unwrap();
    assert_eq!(
        machine.source(Backend::Driver),
        (Ready, format!("{INTERFACE} (open kernel modules)"))
    );
}

#[test]
fn nic_has_no_memory_and_known_dma_buf_support() {
    let machine = Machine::new("7.2.12-amd64");
    let folder = machine.device("0000:06:00.0", "0x020700", "mlx5_core", &bar2(32 << 20, MEMORY));
    machine.put(&format!("{folder}/infiniband/mlx5_0/node_type"), "1: CA");
    let inventory = machine.read(Some(&[]));
    assert!(inventory.memory_devices.is_empty(), "{inventory:#?}");
    assert_eq!(inventory.clients[0].dma_bufs, Some(DmaBufSupport::Revocable));
    assert_eq!(inventory.clients[0].device.names, ["mlx5_0"]);
}

#[test]
fn malformed_sysfs_values_are_ignored() {
    let machine = Machine::new("");
    for (n, resource) in [
        "",
        "0x",
        "a b c\n",
        "0xffffffffffffffff 0x0 0x102200\n",
        "0x0 0xffffffffffffffff 0x102200\n",
    ]
    .iter()
    .enumerate()
    {
        machine.device(&format!("0000:0{n}:00.0"), "0x120000", "", resource);
    }
    assert!(machine.read(Some(&[])).memory_devices.is_empty());
    assert_eq!(kernel_release("v6"), (0, 6));
    assert_eq!(kernel_release("6.19.0-rc1+deb13"), (6, 19));
    assert!(Inventory::read_in(Path::new("/nonexistent"), None).is_err());
}
