// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;
use crate::backend::Capability;
use crate::device::Device;
use crate::fake::FakeNic;
use crate::standalone::tests::Machine;
use crate::standalone::Standalone;
use crate::sys::{memory_file, FAKE_DMABUF};
use crate::{Access, Buffer, BufferState, DmaBuf, ErrorKind, ExportOptions, ProviderKind, Request};
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{symlink, MetadataExt};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::OnceLock;

const ACCEL: &str = "0000:03:00.0";
const MIB: u64 = 1 << 20;

/// BAR, offset and length of a dma-buf.
type Export = (u8, u64, u64);

/// The state of the open functions of a test.
#[derive(Default)]
struct Log {
    open: AtomicUsize,
    exports: Mutex<Vec<Export>>,
    /// Inodes of the dma-bufs that count as used by others.
    used: Mutex<Vec<u64>>,
    fail: Mutex<Option<Failure>>,
    functions: OnceLock<Arc<OpenFunctions>>,
    /// For each function that was closed: whether the lock of the open functions was held.
    closed_with_lock: Mutex<Vec<bool>>,
}

/// A function whose BAR is a file.
struct Test {
    log: Arc<Log>,
    bar: File,
}

impl Drop for Test {
    fn drop(&mut self) {
        let is_locked = self.log.functions.get().is_some_and(|open| open.try_lock().is_err());
        lock(&self.log.closed_with_lock).push(is_locked);
        self.log.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl OpenFunction for Test {
    fn map(&self, _bar: u8, offset: u64, len: usize) -> io::Result<Region> {
        Region::map(&self.bar, offset, len)
    }

    fn export(&self, bar: u8, offset: u64, len: u64) -> io::Result<OwnedFd> {
        lock(&self.log.exports).push((bar, offset, len));
        let dmabuf = memory_file(FAKE_DMABUF, len)?;
        lock(&self.log.used).push(dmabuf.metadata()?.ino());
        Ok(dmabuf.into())
    }

    fn is_in_use(&self, dmabuf: &OwnedFd) -> bool {
        let inode = File::from(dmabuf.try_clone().unwrap()).metadata().unwrap().ino();
        lock(&self.log.used).contains(&inode)
    }
}

/// Returns a machine with an accelerator that is bound to vfio-pci.
fn machine() -> Machine {
    let machine = Machine::new("7.2.12");
    let folder = machine.function("pci0000:00", ACCEL, "0x120000", "vfio-pci", MIB);
    group(&machine, &folder, "7");
    machine
}

/// Puts a function into an IOMMU group, with a device node.
fn group(machine: &Machine, folder: &Path, number: &str) {
    let group = machine.root().join("sys/kernel/iommu_groups").join(number);
    let devices = group.join("devices");
    fs::create_dir_all(&devices).unwrap();
    symlink(folder, devices.join(folder.file_name().unwrap())).unwrap();
    symlink(&group, folder.join("iommu_group")).unwrap();
    machine.put(&format!("dev/vfio/{number}"), "");
    machine.put("dev/vfio/vfio", "");
}

fn device(machine: &Machine, bars: &[(PciAddr, u8)]) -> (Device, Arc<Log>) {
    let log = Arc::new(Log::default());
    let own = log.clone();
    let opener: Opener = Box::new(move |_, _| {
        if let Some(failure) = lock(&own.fail).take() {
            return Err(failure);
        }
        own.open.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(Test {
            log: own.clone(),
            bar: memory_file(c"bar", MIB).unwrap(),
        }))
    });
    let source = VfioSource::with(machine.root(), bars, opener).unwrap();
    log.functions.get_or_init(|| source.open.clone());
    let device = Device::with(Box::new(Standalone::new(Box::new(source)).unwrap()));
    (device, log)
}

fn unavailable_text(machine: &Machine) -> (String, &'static str) {
    match machine.open(Backend::Vfio) {
        Err(Error::Unavailable {
            backend: Backend::Vfio,
            why,
            remedy,
        }) => (why, remedy),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it was opened"),
    }
}

#[test]
fn bar_is_allocated_mapped_and_registered() {
    let machine = machine();
    let (device, log) = device(&machine, &[]);
    let provider = &device.providers().unwrap()[0];
    assert_eq!(
        (provider.kind, provider.bar, provider.size),
        (ProviderKind::Vfio, Some(2), MIB)
    );
    assert!(provider.pageless && provider.exportable);
    assert_eq!(log.open.load(Ordering::SeqCst), 0, "listing opens nothing");

    let first = device.alloc(&Request::new(4096)).unwrap();
    let second = device.alloc(&Request::new(8192).align(65536)).unwrap();
    assert_eq!((first.bar_offset(), second.bar_offset()), (Some(0), Some(65536)));
    assert_eq!(log.open.load(Ordering::SeqCst), 1);
    assert_eq!(device.providers().unwrap()[0].free, MIB - 12288);
    let (low, high) = (first.map().unwrap(), second.map().unwrap());
    low.write(0, 1u64).unwrap();
    high.write(0, 2u64).unwrap();
    assert_eq!((low.read::<u64>(0).unwrap(), high.read::<u64>(0).unwrap()), (1, 2));
    assert_eq!(second.info().unwrap().mappings, 1);

    let nic = FakeNic::new("mlx5_0");
    let registration = second.register(&nic.pd(), Access::ALL).unwrap();
    assert_eq!(registration.addr(), high.as_ptr() as u64);
    assert_eq!(registration.dmabuf().unwrap().device(), Some(ACCEL.parse().unwrap()));
    assert_eq!(*lock(&log.exports), [(2, 65536, 8192)]);
    assert_eq!(second.info().unwrap().exports, 1);

    // An export by the addresses of the mapping, after the buffer was freed.
    drop(second);
    let part = high.export(&ExportOptions::new().range(4096..8192)).unwrap();
    assert_eq!(part.size(), 4096);
    assert_eq!(lock(&log.exports)[1], (2, 65536 + 4096, 4096));
    assert_eq!(device.stats(None).unwrap().exports, 2);
    let error = low.export(&ExportOptions::new().range(0..100)).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EINVAL));
    // Adjacent ranges are one range. Other ranges are refused, because the kernel would map them to wrong addresses.
    let parts = ExportOptions::new().range(0..4096).range(4096..8192);
    assert_eq!(high.export(&parts).unwrap().size(), 8192);
    assert_eq!(lock(&log.exports)[2], (2, 65536, 8192));
    for parts in [
        ExportOptions::new().range(4096..8192).range(0..4096),
        ExportOptions::new().range(0..4096).range(0..4096),
    ] {
        let error = high.export(&parts).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EOPNOTSUPP));
        assert!(error.reason().unwrap().contains("one range"), "{error}");
    }
    let error = first.export(&ExportOptions::new().pinned(true)).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EOPNOTSUPP));
    assert!(error.reason().unwrap().contains("revoke"), "{error}");
}

#[test]
fn function_is_open_while_its_memory_is_held() {
    let machine = machine();
    let (device, log) = device(&machine, &[]);
    let open = || log.open.load(Ordering::SeqCst);
    let buffer = device.alloc(&Request::new(4096)).unwrap();
    let mapping = buffer.map().unwrap();
    drop(buffer);
    assert_eq!(open(), 1, "the mapping holds it");
    let dmabuf = mapping.export(&ExportOptions::new()).unwrap();
    drop(mapping);
    let nic = FakeNic::new("mlx5_0");
    let registration = dmabuf.register(&nic.pd(), Access::ALL).unwrap();
    drop((dmabuf, device));
    assert_eq!(open(), 1, "the registration holds it");
    drop(registration);
    assert_eq!(open(), 0);
}

#[test]
fn memory_of_open_dma_buf_is_not_allocated_again() {
    let machine = machine();
    let (device, log) = device(&machine, &[]);
    let _holds_the_function = device.alloc(&Request::new(4096)).unwrap();
    let buffer = device.alloc(&Request::new(MIB / 2)).unwrap();
    // The descriptor stands for a descriptor of another process.
    let passed = OwnedFd::from(buffer.share().unwrap());
    drop(buffer);
    let provider = &device.providers().unwrap()[0];
    assert_eq!((provider.free, provider.pinned), (MIB / 2 - 4096, MIB / 2));
    let error = device.alloc(&Request::new(MIB / 2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(
        error.to_string().contains("512 KiB of freed buffers still in use"),
        "{error}"
    );
    // The other process closes the descriptor.
    lock(&log.used).clear();
    drop(passed);
    device.alloc(&Request::new(MIB / 2)).unwrap();
}

#[test]
fn selected_bar_is_used_instead_of_largest() {
    let machine = machine();
    let addr: PciAddr = ACCEL.parse().unwrap();
    let folder = machine.root().join("sys/bus/pci/devices").join(ACCEL);
    // BAR 0: 64 KiB that are not prefetchable.
    let bars = "0x1000 0x10fff 0x200\n0x0 0x0 0x0\n0x3800000000 0x38000fffff 0x102200\n";
    fs::write(folder.join("resource"), bars).unwrap();
    let (device, log) = device(&machine, &[(addr, 0), (addr, 0)]);
    let providers = device.providers().unwrap();
    assert_eq!(providers.len(), 1);
    assert_eq!((providers[0].bar, providers[0].size), (Some(0), 65536));
    let buffer: Buffer = device.alloc(&Request::new(4096)).unwrap();
    buffer.share().unwrap();
    assert_eq!(lock(&log.exports)[0].0, 0);
    let refused = VfioSource::new(machine.root(), &[(addr, 4)]).err().unwrap();
    assert!(refused.to_string().contains("whose memory BARs are 0, 2"), "{refused}");
    let missing = VfioSource::new(machine.root(), &[("0000:99:00.0".parse().unwrap(), 0)])
        .err()
        .unwrap();
    assert_eq!(missing.kind(), ErrorKind::InvalidRequest);
}

#[test]
fn error_names_device_that_is_not_bound_and_remedy() {
    let machine = machine();
    let folder = machine.root().join("sys/bus/pci/devices").join(ACCEL);
    machine.bind(&folder, "fpga");
    let (why, remedy) = unavailable_text(&machine);
    assert_eq!(why, "0000:03:00.0 is bound to the driver fpga, not to vfio-pci");
    assert!(remedy.contains("driver_override"), "{remedy}");
    machine.bind(&folder, "");
    assert_eq!(unavailable_text(&machine).0, "0000:03:00.0 is not bound to vfio-pci");
    fs::remove_file(folder.join("iommu_group")).unwrap();
    let (why, remedy) = unavailable_text(&machine);
    assert!(
        why.contains("no IOMMU group") && remedy.contains("intel_iommu=on"),
        "{why} {remedy}"
    );
    machine.put("proc/sys/kernel/osrelease", "6.18.3");
    assert!(unavailable_text(&machine).0.contains("older than 6.19"));
    let empty = Machine::new("7.2.12");
    let (why, remedy) = unavailable_text(&empty);
    assert!(
        why.contains("no IOMMU is active") && remedy.contains("intel_iommu=on"),
        "{why}"
    );
}

#[test]
fn node_of_function_is_preferred_to_node_of_group() {
    let machine = machine();
    let addr = ACCEL.parse().unwrap();
    let root = machine.root();
    let by_group = Nodes::Group {
        node: root.join("dev/vfio/7"),
        container: root.join("dev/vfio/vfio"),
    };
    assert_eq!(nodes(root, addr).unwrap(), by_group);
    machine.put(&format!("sys/bus/pci/devices/{ACCEL}/vfio-dev/vfio3/dev"), "511:3");
    machine.put("dev/vfio/devices/vfio3", "");
    assert_eq!(nodes(root, addr).unwrap(), by_group, "without iommufd");
    machine.put("dev/iommu", "");
    let by_device = Nodes::Device {
        node: root.join("dev/vfio/devices/vfio3"),
        iommufd: root.join("dev/iommu"),
    };
    assert_eq!(nodes(root, addr).unwrap(), by_device);
}

#[test]
fn failures_of_vfio_have_a_remedy() {
    let machine = machine();
    let folder = machine.root().join("sys/bus/pci/devices").join(ACCEL);
    let other = machine.function("pci0000:00", "0000:03:00.1", "0x0c0330", "xhci_hcd", 0);
    symlink(&other, folder.join("iommu_group/devices/0000:03:00.1")).unwrap();
    let (device, log) = device(&machine, &[]);
    let os = io::Error::from_raw_os_error;
    let cases = [
        (
            Failure::NotViable,
            "other drivers: 0000:03:00.1 (xhci_hcd)",
            "bind all devices",
        ),
        (
            Failure::Iommu(os(libc::EPERM)),
            "other drivers: 0000:03:00.1 (xhci_hcd)",
            "bind all devices",
        ),
        (Failure::Iommu(os(libc::ENODEV)), "ENODEV", "vfio_iommu_type1"),
        (
            Failure::Call("VFIO_GROUP_GET_STATUS", os(libc::ENOTTY)),
            "VFIO_GROUP_GET_STATUS",
            "kernel log",
        ),
        (
            Failure::Node("/dev/vfio/7".into(), os(libc::EBUSY)),
            "/dev/vfio/7",
            "another program",
        ),
        (
            Failure::Node("/dev/vfio/7".into(), os(libc::EACCES)),
            "EACCES",
            "run as root",
        ),
    ];
    for (failure, wanted, remedy) in cases {
        *lock(&log.fail) = Some(failure);
        let error = device.alloc(&Request::new(4096)).unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
        assert!(
            error.remedy().unwrap().contains(remedy),
            "{error}: {:?}",
            error.remedy()
        );
        assert!(device.explain_last().unwrap().text.contains("cannot be used"));
    }
    device.alloc(&Request::new(4096)).unwrap();
    fs::remove_file(folder.join("iommu_group/devices/0000:03:00.1")).unwrap();
    *lock(&log.fail) = Some(Failure::Iommu(os(libc::EPERM)));
    let error = device.alloc(&Request::new(4096)).unwrap_err();
    assert!(error.to_string().contains("EPERM"), "{error}");
    assert!(error.remedy().unwrap().contains("interrupt remapping"), "{error}");
}

#[test]
fn all_device_nodes_must_be_accessible() {
    let machine = machine();
    let container = machine.root().join("dev/vfio/vfio");
    fs::remove_file(&container).unwrap();
    let error = machine.open(Backend::Vfio).unwrap_err();
    assert!(
        matches!(&error, Error::Open { path, .. } if *path == container),
        "{error}"
    );
}

#[test]
fn functions_are_closed_with_lock_held() {
    let machine = machine();
    let (device, log) = device(&machine, &[]);
    let request = Request::new(4096);
    device.alloc(&request).unwrap();
    let mapping = device.alloc(&request).unwrap().map().unwrap();
    drop(mapping);
    let dmabuf = device.alloc(&request).unwrap().share().unwrap();
    drop(dmabuf);
    assert_eq!(log.open.load(Ordering::SeqCst), 0);
    assert_eq!(*lock(&log.closed_with_lock), [true; 3]);
    // An entry of a closed function is removed.
    assert!(log.functions.get().is_some_and(|functions| lock(functions).is_empty()));
}

#[test]
fn cached_values_are_shared_while_in_use() {
    let cache = Mutex::default();
    let get = |key, value| shared(&cache, &key, || Ok::<u32, ()>(value)).unwrap();
    let first = get("7", 1);
    assert_eq!((*get("7", 2), *get("8", 3)), (1, 3));
    drop(first);
    assert_eq!(*get("7", 2), 2);
    assert_eq!(shared(&cache, &"9", || Err(4)), Err(4));
}

#[test]
fn memory_is_gone_after_device_is_unbound() {
    let machine = machine();
    let (device, _log) = device(&machine, &[]);
    let buffer = device.alloc(&Request::new(4096)).unwrap();
    assert_eq!(buffer.info().unwrap().state, BufferState::Live);
    machine.bind(&machine.root().join("sys/bus/pci/devices").join(ACCEL), "");
    assert_eq!(buffer.info().unwrap().state, BufferState::Gone);
    assert!(device.providers().unwrap().is_empty());
    assert!(!Backend::Vfio.supports(Capability::Revoke));
}

#[test]
fn reference_count_is_read_from_fdinfo() {
    let text = "pos:\t0\nflags:\t02000002\nmnt_id:\t11\nino:\t45\nsize:\t4096\ncount:\t3\nexp_name:\tvfio_pci_core\n";
    assert_eq!(references(text), Some(3));
    assert_eq!(references("pos:\t0\n"), None);
    let shared = DmaBuf::from_fd(memory_file(FAKE_DMABUF, 4096).unwrap()).unwrap();
    assert!(shared.as_fd().try_clone_to_owned().is_ok() && shared.exporter().is_none());
}
