// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;
use crate::device::Device;
use crate::fake::{write_pci_function, FakeNic};
use crate::sys::memory_file;
use crate::{
    open_direct, Access, BufferState, Client, ErrorKind, ExportOptions, FileRule, PathClass, ProviderKind, Request,
    Strategy, VerdictCode,
};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::time::Duration;

/// Flags of a 64-bit prefetchable memory BAR in `resource`.
const MEMORY: u64 = 0x200 | 0x2000 | 0x10_0000;

/// The file system of a machine with PCI functions.
pub(crate) struct Machine(tempfile::TempDir);

impl Machine {
    pub(crate) fn new(kernel: &str) -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        machine.put("proc/sys/kernel/osrelease", kernel);
        fs::create_dir_all(machine.root().join("sys/bus/pci/devices")).unwrap();
        machine
    }

    pub(crate) fn root(&self) -> &FsPath {
        self.0.path()
    }

    pub(crate) fn put(&self, path: &str, text: &str) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Adds a function below a parent, such as `pci0000:00/0000:00:01.0`, with a BAR 2 of `size` bytes. Returns the
    /// function's folder.
    pub(crate) fn function(&self, parent: &str, addr: &str, class: &str, driver: &str, size: u64) -> PathBuf {
        let none = "0x0 0x0 0x0\n";
        let resource = if size == 0 {
            none.to_owned()
        } else {
            format!(
                "{none}{none}{:#x} {:#x} {MEMORY:#x}\n",
                0x38_0000_0000u64,
                0x38_0000_0000 + size - 1
            )
        };
        let files = [
            ("vendor", "0x1de5"),
            ("device", "0x0001"),
            ("class", class),
            ("resource", &resource),
        ];
        let folder = write_pci_function(&self.root().join("sys"), &format!("{parent}/{addr}"), &files).unwrap();
        self.bind(&folder, driver);
        folder
    }

    pub(crate) fn bind(&self, folder: &FsPath, driver: &str) {
        let link = folder.join("driver");
        let _ = fs::remove_file(&link);
        if !driver.is_empty() {
            symlink(FsPath::new("/drivers").join(driver), link).unwrap();
        }
    }

    /// Publishes memory of a function, as its driver does.
    pub(crate) fn publish(&self, folder: &FsPath, size: u64, available: u64) {
        let pool = folder.join("p2pmem");
        fs::create_dir_all(&pool).unwrap();
        for (file, value) in [("size", size), ("available", available), ("published", 1)] {
            fs::write(pool.join(file), format!("{value}\n")).unwrap();
        }
        fs::File::create(pool.join("allocate")).unwrap().set_len(size).unwrap();
    }

    /// Creates a machine with two drives with published memory, at 03:00.0 and 05:00.0, and a drive without memory at
    /// 04:00.0. The drives at 03:00.0 and 04:00.0 are below one switch.
    fn with_drives() -> Self {
        let machine = Self::new("7.2.12");
        let bridge = |parent: &str, addr: &str| machine.function(parent, addr, "0x060400", "pcieport", 0);
        bridge("pci0000:00", "0000:00:01.0");
        bridge("pci0000:00/0000:00:01.0", "0000:01:00.0");
        let switch = "pci0000:00/0000:00:01.0/0000:01:00.0";
        bridge(switch, "0000:02:00.0");
        bridge(switch, "0000:02:01.0");
        bridge("pci0000:00", "0000:00:02.0");
        let near = machine.function(&format!("{switch}/0000:02:00.0"), "0000:03:00.0", "0x010802", "nvme", 0);
        machine.function(&format!("{switch}/0000:02:01.0"), "0000:04:00.0", "0x010802", "nvme", 0);
        let far = machine.function("pci0000:00/0000:00:02.0", "0000:05:00.0", "0x010802", "nvme", 0);
        machine.publish(&near, 1 << 20, 1 << 20);
        machine.publish(&far, 8 << 20, 8 << 20);
        machine
    }

    pub(crate) fn open(&self, backend: Backend) -> Result<Device> {
        open(self.root(), backend, &[]).map(Device::with)
    }
}

fn client(text: &str) -> Client {
    Client::new(text.parse().unwrap())
}

#[test]
fn published_memory_is_listed_allocated_mapped_and_freed() {
    let machine = Machine::with_drives();
    let device = machine.open(Backend::Sysfs).unwrap();
    assert_eq!(device.backend(), Backend::Sysfs);
    let providers = device.providers().unwrap();
    let summary: Vec<_> = providers
        .iter()
        .map(|p| (p.id, p.addr.to_string(), p.size, p.kind, p.exportable))
        .collect();
    assert_eq!(
        summary,
        [
            (1, "0000:03:00.0".into(), 1 << 20, ProviderKind::Adopted, false),
            (2, "0000:05:00.0".into(), 8 << 20, ProviderKind::Adopted, false)
        ]
    );
    assert_eq!(providers[0].driver.as_deref(), Some("nvme"));
    let info = device.info().unwrap();
    assert_eq!(
        (info.providers, info.size, info.version.as_str()),
        (2, 9 << 20, "Linux 7.2.12")
    );

    let request = Request::new(5000).near([client("0000:04:00.0")]);
    let buffer = device.alloc(&request).unwrap();
    assert_eq!((buffer.provider(), buffer.size(), buffer.bar_offset()), (1, 8192, None));
    assert_eq!(buffer.class(), Some(PathClass::SameSwitch));
    let mapping = buffer.map().unwrap();
    let again = buffer.map().unwrap();
    assert_eq!(mapping.as_ptr(), again.as_ptr(), "an allocation is one mapping");
    mapping.write(8, 42u64).unwrap();
    assert_eq!(again.read::<u64>(8).unwrap(), 42);
    let info = buffer.info().unwrap();
    assert_eq!((info.state, info.mappings, info.handles), (BufferState::Live, 2, 1));
    drop(again);
    assert_eq!(buffer.info().unwrap().mappings, 1);
    assert_eq!(device.providers().unwrap()[0].buffers, 1);
    let holders = device.holders().unwrap();
    assert_eq!((holders[0].1.owner.as_str(), holders[0].1.size), ("this program", 8192));
    buffer.free().unwrap();
    mapping.write(16, 43u64).unwrap();
    let stats = device.stats(None).unwrap();
    assert_eq!(
        (stats.allocs, stats.frees, stats.maps, stats.free_bytes),
        (1, 1, 2, 8192)
    );
    assert_eq!(device.stats(Some(2)).unwrap().allocs, 0);
    assert_eq!(device.stats(Some(3)).unwrap_err().errno(), Some(libc::ENOENT));
}

#[test]
fn decisions_are_explained() {
    let machine = Machine::with_drives();
    let device = machine.open(Backend::Sysfs).unwrap();
    let near = || Request::new(4096).near([client("0000:04:00.0")]);
    let explanation = device.explain(&near()).unwrap();
    assert_eq!(explanation.chosen, Some(1));
    let codes: Vec<_> = explanation.verdicts.iter().map(|verdict| verdict.code).collect();
    assert_eq!(codes, [VerdictCode::Chosen, VerdictCode::Class]);
    assert!(
        explanation.lines()[2].contains("through the host bridge to 0000:04:00.0"),
        "{explanation:?}"
    );
    assert_eq!(
        device.explain_last().unwrap_err().errno(),
        Some(libc::ENODATA),
        "a dry run is no decision"
    );

    let far = device.alloc(&near().provider(2)).unwrap();
    assert_eq!(far.provider(), 2);
    assert_eq!(device.explain_last().unwrap().chosen, Some(2));
    let paths = device.paths(&[client("0000:04:00.0"), client("0000:03:00.0")]).unwrap();
    let classes: Vec<_> = paths
        .iter()
        .map(|path| (path.provider, path.client, path.class))
        .collect();
    let (switch, bridge) = (PathClass::SameSwitch, PathClass::HostBridge);
    assert_eq!(
        classes,
        [
            (1, 0, switch),
            (1, 1, PathClass::SameDevice),
            (2, 0, bridge),
            (2, 1, bridge)
        ]
    );

    let error = device.alloc(&near().max_class(PathClass::SameDevice)).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENODEV));
    assert_eq!(device.explain_last().unwrap().verdicts[0].code, VerdictCode::TooFar);
    let error = device
        .alloc(&Request::new(4096).near([client("0000:99:00.0")]))
        .unwrap_err();
    assert!(error.to_string().contains("0000:99:00.0 does not exist"), "{error}");
}

#[test]
fn error_names_providers_without_enough_space() {
    let machine = Machine::with_drives();
    let device = machine.open(Backend::Sysfs).unwrap();
    let error = device.alloc(&Request::new(16 << 20)).unwrap_err();
    assert_eq!(
        (error.errno(), error.kind()),
        (Some(libc::ENODEV), ErrorKind::NoProvider)
    );
    assert!(
        error.to_string().contains("0000:05:00.0 has 8 MiB, all free"),
        "{error}"
    );
    let _held = device.alloc(&Request::new(1 << 20).provider(2)).unwrap();
    for (folder, size) in [
        (
            "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0",
            1 << 20,
        ),
        ("pci0000:00/0000:00:02.0/0000:05:00.0", 8 << 20),
    ] {
        machine.publish(&machine.root().join("sys/devices").join(folder), size, 4096);
    }
    let error = device.alloc(&Request::new(8192)).unwrap_err();
    assert_eq!((error.errno(), error.kind()), (Some(libc::ENOSPC), ErrorKind::NoSpace));
    assert!(error.to_string().contains("used by this program 1 MiB"), "{error}");
    assert_eq!(device.stats(None).unwrap().failed, 2);
}

#[test]
fn operations_that_sysfs_does_not_support_are_refused_with_remedy() {
    let machine = Machine::with_drives();
    let device = machine.open(Backend::Sysfs).unwrap();
    let buffer = device.alloc(&Request::new(4096)).unwrap();
    let mapping = buffer.map().unwrap();
    let pd = FakeNic::new("mlx5_0").pd();
    let null = fs::File::open("/dev/null").unwrap();
    let other = |strategy| Request::new(4096).strategy(strategy);
    let refused = [
        (Capability::DmaBuf, buffer.export(&ExportOptions::new()).err()),
        (Capability::DmaBuf, mapping.export(&ExportOptions::new()).err()),
        (Capability::DmaBuf, buffer.share().err()),
        (Capability::DmaBuf, buffer.register(&pd, Access::ALL).err()),
        (Capability::DmaBuf, mapping.register(&pd, Access::ALL).err()),
        (Capability::Rules, device.set_rules(&[FileRule::new("x")]).err()),
        (Capability::Sharing, device.import(&null).err()),
        (Capability::Revoke, device.events().try_next().err()),
        (
            Capability::Revoke,
            device.events().next_within(Some(Duration::ZERO)).err(),
        ),
        (Capability::Placement, device.alloc(&other(Strategy::Spread)).err()),
        (Capability::Placement, device.explain(&other(Strategy::Upstream)).err()),
        (
            Capability::Placement,
            device.alloc_stripe(&other(Strategy::Stripe)).err(),
        ),
        (
            Capability::Placement,
            device.alloc(&Request::new(4096).align(2 << 20)).err(),
        ),
    ];
    for (n, (wanted, error)) in refused.into_iter().enumerate() {
        let error = error.unwrap_or_else(|| panic!("case {n} succeeded"));
        assert!(
            matches!(error, Error::NotSupported { backend: Backend::Sysfs, capability } if capability == wanted),
            "case {n}: {error}"
        );
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.remedy().unwrap().contains("modprobe p2pmem"), "{error}");
    }
    device.alloc(&Request::new(4096).align(4096)).unwrap();
}

#[test]
fn direct_io_is_refused_with_vfio_memory() {
    let fake = crate::fake::Fake::example();
    let mapping = |backend| {
        fake.device_of(backend)
            .alloc(&Request::new(4096))
            .unwrap()
            .map()
            .unwrap()
    };
    let file = open_direct("/dev/null").unwrap_or_else(|_| fs::File::open("/dev/null").unwrap());
    let vfio = mapping(Backend::Vfio);
    for error in [
        vfio.read_from(&file, 0, 0..4096).err().unwrap(),
        vfio.write_to(&file, 0, 0..4096).err().unwrap(),
    ] {
        assert!(
            matches!(
                error,
                Error::NotSupported {
                    backend: Backend::Vfio,
                    capability: Capability::DirectIo
                }
            ),
            "{error}"
        );
        assert!(error.remedy().unwrap().contains("Capability::DirectIo"), "{error}");
    }
    let sysfs = mapping(Backend::Sysfs).read_from(&file, 0, 0..4096);
    assert!(!matches!(sysfs, Err(Error::NotSupported { .. })), "{sysfs:?}");
}

#[test]
fn memory_is_gone_after_driver_is_unbound() {
    let machine = Machine::with_drives();
    let device = machine.open(Backend::Sysfs).unwrap();
    let buffer = device.alloc(&Request::new(4096).provider(2)).unwrap();
    assert_eq!(buffer.info().unwrap().state, BufferState::Live);
    let folder = machine.root().join("sys/bus/pci/devices/0000:05:00.0");
    fs::rename(folder.join("p2pmem"), folder.join("old")).unwrap();
    assert_eq!(buffer.info().unwrap().state, BufferState::Gone);
    assert_eq!(device.providers().unwrap().len(), 1);
    machine.publish(&folder, 8 << 20, 8 << 20);
    assert_eq!(buffer.info().unwrap().state, BufferState::Gone, "another file");
    // The ids are as before.
    assert_eq!(device.providers().unwrap()[1].id, 2);
}

#[test]
fn sysfs_is_unavailable_without_published_memory() {
    let machine = Machine::new("7.2.12");
    machine.function("pci0000:00", "0000:00:03.0", "0x010802", "nvme", 0);
    let error = machine.open(Backend::Sysfs).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Unavailable {
                backend: Backend::Sysfs,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(error.kind(), ErrorKind::BackendUnavailable);
    assert!(error.remedy().unwrap().contains("CMB"), "{error}");
    let error = machine.open(Backend::Driver).unwrap_err();
    assert!(error.remedy().unwrap().contains("DmaBuf::from_fd()"), "{error}");
}

/// A source that refuses memory of some functions.
struct Reluctant {
    root: tempfile::TempDir,
    full: Vec<PciAddr>,
    unusable: Vec<PciAddr>,
}

struct Plain(Arc<Region>);

impl Piece for Plain {
    fn bar_offset(&self) -> Option<u64> {
        None
    }
    fn is_live(&self) -> bool {
        true
    }
    fn mappings(&self) -> u32 {
        0
    }
    fn exports(&self) -> u32 {
        0
    }
    fn map(self: Arc<Self>) -> io::Result<Arc<Region>> {
        Ok(self.0.clone())
    }
    fn export(self: Arc<Self>, _offset: u64, _len: u64) -> io::Result<Exported> {
        Err(errno(libc::EOPNOTSUPP))
    }
}

impl Source for Reluctant {
    fn backend(&self) -> Backend {
        Backend::Sysfs
    }

    fn root(&self) -> &FsPath {
        self.root.path()
    }

    fn survey(&self) -> Result<Vec<Found>> {
        let devices = crate::pci::devices_in(&self.root.path().join("sys"))?;
        let found = devices.into_iter().map(|device| Found {
            place: Place {
                addr: device.addr,
                bar: None,
            },
            size: 1 << 20,
            free: 1 << 20,
            largest: 1 << 20,
            pinned: 0,
            device,
        });
        Ok(found.collect())
    }

    fn take(&self, place: Place, len: u64, _align: u64) -> std::result::Result<Arc<dyn Piece>, Refusal> {
        if self.full.contains(&place.addr) {
            return Err(Refusal::Full);
        }
        if self.unusable.contains(&place.addr) {
            return Err(Refusal::Unusable(Error::Open {
                path: "/dev/vfio/7".into(),
                error: errno(libc::EBUSY),
            }));
        }
        let file = memory_file(c"test", len).unwrap();
        Ok(Arc::new(Plain(Arc::new(Region::map(&file, 0, len as usize).unwrap()))))
    }
}

fn reluctant(full: &[&str], unusable: &[&str]) -> Device {
    let machine = Machine::new("7.2.12");
    for addr in ["0000:00:03.0", "0000:00:04.0", "0000:00:05.0"] {
        machine.function("pci0000:00", addr, "0x120000", "", 0);
    }
    let parse = |all: &[&str]| all.iter().map(|addr| addr.parse().unwrap()).collect();
    let source = Reluctant {
        root: machine.0,
        full: parse(full),
        unusable: parse(unusable),
    };
    Device::with(Box::new(Standalone::new(Box::new(source)).unwrap()))
}

#[test]
fn next_candidate_serves_if_memory_cannot_be_taken() {
    let device = reluctant(&["0000:00:03.0"], &["0000:00:04.0"]);
    let buffer = device.alloc(&Request::new(4096)).unwrap();
    assert_eq!(buffer.provider(), 3);
    let last = device.explain_last().unwrap();
    let codes: Vec<_> = last.verdicts.iter().map(|verdict| verdict.code).collect();
    assert_eq!(codes, [VerdictCode::Fragmented, VerdictCode::Full, VerdictCode::Chosen]);
    assert!(
        last.text
            .contains("0000:00:04.0 cannot be used: cannot open /dev/vfio/7"),
        "{}",
        last.text
    );

    let device = reluctant(&["0000:00:03.0", "0000:00:04.0", "0000:00:05.0"], &[]);
    let error = device.alloc(&Request::new(4096)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");

    // The error is that of the device node, not too little space.
    let device = reluctant(&["0000:00:03.0"], &["0000:00:04.0", "0000:00:05.0"]);
    let error = device.alloc(&Request::new(4096)).unwrap_err();
    assert!(
        matches!(&error, Error::Open { path, .. } if path == FsPath::new("/dev/vfio/7")),
        "{error}"
    );
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.remedy().unwrap().contains("virtual machine"), "{error}");
}
