// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the library in a guest without the module: memory that a driver published, and, in
//! [`backends_vfio`](super::backends_vfio), BARs of devices that are bound to vfio-pci.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use p2pmem::{
    Backend, BufferState, Capability, Client, Device, DirectOptions, Error, ErrorKind, Mapping,
    Request as AllocRequest, VerdictCode,
};
use serde_json::Value;

use super::backends_vfio;
use super::life::{Part, ready};
use super::rdma_user::{check, fill};
use super::{Bed, command, read, write};
use crate::devices::{self, Devices};
use crate::limits::scaled;
use crate::wire::Request;
use crate::{host, in_time, sys};

/// A test.
pub struct Check {
    /// The name, for `without-module NAME`.
    pub name: &'static str,
    /// A one-line description of the test.
    pub about: &'static str,
    /// The topology that the test needs. Its guests start without the module; a test that loads it unloads it again.
    pub topology: &'static str,
    /// Whether no other test can use the guest afterwards.
    pub ruins: bool,
    pub(super) run: fn(&Devices) -> Result<()>,
}

/// The topology of the tests with memory that a driver published.
const DRIVES: &str = "backends";

const CHECKS: &[Check] = &[
    Check {
        name: "sysfs-direct-io",
        about: "memory near a drive is chosen, and the drive transfers data to it without host memory",
        topology: DRIVES,
        ruins: false,
        run: direct_io,
    },
    Check {
        name: "sysfs-full",
        about: "a full controller memory buffer is an error that names it; freed memory can be allocated again",
        topology: DRIVES,
        ruins: false,
        run: full,
    },
    Check {
        name: "sysfs-killed",
        about: "the memory of a killed process is freed",
        topology: DRIVES,
        ruins: false,
        run: killed,
    },
    Check {
        name: "sysfs-user",
        about: "a user without permission gets an error with the file and a remedy",
        topology: DRIVES,
        ruins: false,
        run: ordinary_user,
    },
    Check {
        name: "sysfs-unbind",
        about: "unbinding the drive ends mappings of its memory, and buffers are reported as gone",
        topology: DRIVES,
        ruins: false,
        run: unbind_drive,
    },
    Check {
        name: "sysfs-module",
        about: "an open device keeps its memory while the module is loaded and adopts the rest; new devices are the module's",
        topology: DRIVES,
        ruins: false,
        run: module_loaded,
    },
    Check {
        name: "sysfs-unplug",
        about: "unplugging the drive ends mappings of its memory, and calls for its buffers fail and do not hang",
        topology: DRIVES,
        // Only the first drive of a topology can be plugged in again.
        ruins: true,
        run: unplug_drive,
    },
    Check {
        name: "no-iommu",
        about: "without an IOMMU, the error of the backend vfio has a remedy",
        topology: DRIVES,
        ruins: false,
        run: no_iommu,
    },
];

/// The time limit for memory to be freed.
const LIMIT: Duration = Duration::from_secs(20);
/// A user without privileges.
pub(super) const NOBODY: u32 = 65_534;

/// The name of the processes that these tests start.
pub(super) const PART: &str = "backends";

/// Returns all tests.
pub fn checks() -> impl Iterator<Item = &'static Check> {
    CHECKS.iter().chain(backends_vfio::CHECKS)
}

/// Runs a test by name.
///
/// # Errors
///
/// The test does not exist or fails, or the module is loaded.
pub fn run(name: &str) -> Result<()> {
    let check = checks().find(|check| check.name == name);
    let check = check.with_context(|| format!("no test without the module has the name {name:?}"))?;
    without_module()?;
    (check.run)(&devices::load()?).context(check.about)?;
    without_module()
}

/// Fails if the module is loaded.
fn without_module() -> Result<()> {
    ensure!(
        !Path::new("/sys/module/p2pmem").exists() && !Path::new(p2pmem::DEFAULT_PATH).exists(),
        "the module is loaded"
    );
    Ok(())
}

/// Returns a device of the topology as a client.
pub(super) fn client(devices: &Devices, name: &str) -> Result<Client> {
    let device = devices
        .get(name)
        .with_context(|| format!("the topology has no {name}"))?;
    Ok(Client::new(device.bdf.parse()?))
}

/// Returns the id of the provider that is a device of the topology.
pub(super) fn provider(device: &Device, devices: &Devices, name: &str) -> Result<u32> {
    let addr = client(devices, name)?.addr();
    let found = device.providers()?.into_iter().find(|provider| provider.addr == addr);
    Ok(found.with_context(|| format!("{name} is no provider"))?.id)
}

/// Returns the counters of all devices.
pub(super) fn counters() -> Result<Value> {
    host::request(&Request::Snapshot)
}

/// Returns the error in `result`, or fails if `result` is not an error.
pub(super) fn refused<T>(what: &str, result: p2pmem::Result<T>) -> Result<Error> {
    match result {
        Ok(_) => bail!("{what} succeeded"),
        Err(error) => Ok(error),
    }
}

/// Runs one of the processes.
pub(super) fn part(arguments: &[String]) -> Result<()> {
    match arguments {
        [what, name] if what == "hold" => hold(name),
        [what, name] if what == "touch" => touch(name),
        _ => backends_vfio::part(arguments),
    }
}

const MIB: usize = 1 << 20;

/// Returns the number of free bytes in the pool of a drive.
fn available(devices: &Devices, name: &str) -> Result<u64> {
    let device = devices
        .get(name)
        .with_context(|| format!("the topology has no {name}"))?;
    Ok(read(&device.sysfs().join("p2pmem/available"))?.parse()?)
}

/// Returns the path of a drive's block device.
fn block(devices: &Devices, name: &str) -> Result<PathBuf> {
    let device = devices
        .get(name)
        .with_context(|| format!("the topology has no {name}"))?;
    device
        .block
        .clone()
        .with_context(|| format!("{name} has no block device"))
}

/// Waits until `now` returns `wanted`. Fails after [`LIMIT`].
fn becomes(what: &str, wanted: u64, now: impl Fn() -> Result<u64>) -> Result<()> {
    let deadline = Instant::now() + scaled(LIMIT);
    loop {
        let found = now()?;
        if found == wanted {
            return Ok(());
        }
        in_time!(
            Instant::now() < deadline,
            "after {LIMIT:?}, {what} is {found}, not {wanted}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn direct_io(devices: &Devices) -> Result<()> {
    let device = Device::open()?;
    ensure!(device.backend() == Backend::Sysfs, "{:?}", device.backend());
    let nvme0 = client(devices, "nvme0")?;
    let request = AllocRequest::new(MIB as u64).near([nvme0.clone()]);
    // nvme1 is below the switch of nvme0, nvme2 below another root port.
    let explanation = device.explain(&request)?;
    println!("{}", explanation.lines().join("\n"));
    ensure!(
        explanation.chosen == Some(provider(&device, devices, "nvme1")?),
        "{explanation:?}"
    );
    let far = explanation
        .verdicts
        .iter()
        .find(|verdict| verdict.code == VerdictCode::Class);
    ensure!(
        far.is_some_and(|far| far.why.contains("through the host bridge")),
        "{explanation:?}"
    );
    let free = available(devices, "nvme1")?;
    let buffer = device.alloc(&request)?;
    ensure!(
        available(devices, "nvme1")? == free - MIB as u64,
        "the memory is not of nvme1"
    );

    let memory = buffer.map()?;
    let drive = block(devices, "nvme0")?;
    let file = DirectOptions::new().read(true).write(true).open(&drive)?;
    let before = counters()?;
    fill(&memory, 1)?;
    memory.write_to(&file, 0, 0..MIB)?;
    memory.fill(0..MIB, 0)?;
    ensure!(memory.read_from(&file, 0, 0..MIB)? == MIB, "a short read");
    check(&memory, 1).context("the data that the drive wrote and read")?;
    let after = counters()?;
    let moved = |target: &str| {
        let bytes = |value: &Value| value["nvme0"]["payload"][target].as_u64().unwrap_or(0);
        bytes(&after) - bytes(&before)
    };
    let (near, host, unknown) = (moved("nvme1"), moved("host"), moved("unknown"));
    ensure!(
        (near, host, unknown) == (2 * MIB as u64, 0, 0),
        "the drive transferred {near} bytes of nvme1, {host} of the host, and {unknown} of unknown memory"
    );
    // The drive has the pattern: read a block of it into other memory, and copy the block to host memory.
    let mut indirect = vec![0u64; 512];
    let second = device.alloc(&request.clone().provider(provider(&device, devices, "nvme2")?))?;
    let far = second.map()?;
    far.read_from(&file, 4096, 0..4096)?;
    far.copy_to_slice(0, &mut indirect)?;
    let wanted: Vec<u64> = super::rdma_user::pattern(1, 8192)[512..].to_vec();
    super::rdma_user::compare(&indirect, &wanted)?;

    let error = refused("a dma-buf of sysfs memory", buffer.share())?;
    ensure!(
        matches!(
            error,
            Error::NotSupported {
                backend: Backend::Sysfs,
                capability: Capability::DmaBuf
            }
        ),
        "{error}"
    );
    drop((memory, buffer));
    becomes("what nvme1 has free", free, || available(devices, "nvme1"))
}

fn full(devices: &Devices) -> Result<()> {
    let device = Device::open_backend(Backend::Sysfs)?;
    let id = provider(&device, devices, "nvme2")?;
    let request = |bytes: u64| AllocRequest::new(bytes).provider(id);
    let free = available(devices, "nvme2")?;
    let mut held = Vec::new();
    // Fill the pool with large pieces, then with smaller ones.
    for piece in [MIB as u64, 64 << 10, 4096] {
        while available(devices, "nvme2")? >= piece {
            held.push(device.alloc(&request(piece))?);
        }
    }
    let error = refused("an allocation of a full pool", device.alloc(&request(4096)))?;
    println!("{error}");
    ensure!(
        error.kind() == ErrorKind::NoSpace && error.errno() == Some(libc::ENOSPC),
        "{error}"
    );
    let address = &devices["nvme2"].bdf;
    ensure!(
        error.to_string().contains(address) && error.to_string().contains("used by this program"),
        "{error}"
    );
    // A request that only prefers the pool gets other memory.
    let other = device.alloc(&AllocRequest::new(4096).prefer(id))?;
    ensure!(other.provider() != id, "memory of a full pool");
    let error = refused("more than there is", device.alloc(&AllocRequest::new(1 << 40)))?;
    ensure!(error.kind() == ErrorKind::NoProvider, "{error}");
    held.truncate(1);
    becomes("what nvme2 has free", free - MIB as u64, || available(devices, "nvme2"))?;
    drop(held);
    device.alloc(&request(MIB as u64))?.map()?.write(0, 1u64)?;
    becomes("what nvme2 has free", free, || available(devices, "nvme2"))
}

/// The process `hold`: holds a mebibyte of a drive's memory.
fn hold(name: &str) -> Result<()> {
    let (_buffer, _memory) = held(name)?;
    ready()
}

/// Allocates a mebibyte of a drive's memory and fills it.
fn held(name: &str) -> Result<(p2pmem::Buffer, Mapping)> {
    let devices = devices::load()?;
    let device = Device::open_backend(Backend::Sysfs)?;
    let buffer = device.alloc(&AllocRequest::new(MIB as u64).provider(provider(&device, &devices, name)?))?;
    let memory = buffer.map()?;
    fill(&memory, 3)?;
    Ok((buffer, memory))
}

fn killed(devices: &Devices) -> Result<()> {
    let free = available(devices, "nvme1")?;
    let part = Part::start(PART, &["hold", "nvme1"])?;
    ensure!(
        available(devices, "nvme1")? == free - MIB as u64,
        "the process has no memory"
    );
    part.kill()?;
    becomes("what nvme1 has free", free, || available(devices, "nvme1"))
}

fn ordinary_user(_devices: &Devices) -> Result<()> {
    let opened = sys::as_user(NOBODY, NOBODY, &[], || Device::open_backend(Backend::Sysfs)).map_err(super::errno)?;
    let error = refused("opening without permission", opened)?;
    println!("{error}\n  {}", error.remedy().unwrap_or_default());
    ensure!(
        matches!(&error, Error::Open { path, .. } if path.ends_with("p2pmem/allocate")),
        "{error}"
    );
    ensure!(error.kind() == ErrorKind::PermissionDenied, "{error}");
    ensure!(
        error.remedy().is_some_and(|remedy| remedy.contains("run as root")),
        "{error}"
    );
    // The inventory needs no privileges.
    let read = sys::as_user(NOBODY, NOBODY, &[], || p2pmem::inventory::Inventory::read(None)).map_err(super::errno)?;
    let has_sysfs =
        |device: &p2pmem::inventory::MemoryDevice| device.best().is_some_and(|best| best.backend == Backend::Sysfs);
    ensure!(
        read?.memory_devices.iter().any(has_sysfs),
        "no device has sysfs as its best source"
    );
    Ok(())
}

/// The process `touch`: accesses a drive's memory after the drive was unbound.
fn touch(name: &str) -> Result<()> {
    let (buffer, memory) = held(name)?;
    ensure!(buffer.info()?.state == BufferState::Live, "{:?}", buffer.info()?);
    ready()?;
    ensure!(buffer.info()?.state == BufferState::Gone, "{:?}", buffer.info()?);
    println!("ready");
    memory.read::<u64>(0)?;
    bail!("memory of a drive without a driver was read")
}

/// Has a process `touch` access its memory. Fails unless the process ends by SIGBUS.
fn touched(part: Part) -> Result<()> {
    let mut part = part.go_on()?;
    part.await_ready()?;
    let status = part.end()?;
    ensure!(status.signal() == Some(libc::SIGBUS), "the process ended with {status}");
    Ok(())
}

fn unbind_drive(devices: &Devices) -> Result<()> {
    let free = available(devices, "nvme2")?;
    let sysfs = devices["nvme2"].sysfs();
    let part = Part::start(PART, &["touch", "nvme2"])?;
    write(&sysfs.join("driver/unbind"), &devices["nvme2"].bdf)?;
    ensure!(!sysfs.join("p2pmem").exists(), "the drive still publishes memory");
    let device = Device::open_backend(Backend::Sysfs)?;
    ensure!(device.providers()?.len() == 1, "{:?}", device.providers()?);
    touched(part)?;
    write(Path::new("/sys/bus/pci/drivers/nvme/bind"), &devices["nvme2"].bdf)?;
    becomes("what nvme2 has free", free, || available(devices, "nvme2"))
}

fn unplug_drive(devices: &Devices) -> Result<()> {
    let (drive, sysfs) = (client(devices, "nvme2")?, devices["nvme2"].sysfs());
    let device = Device::open()?;
    let id = provider(&device, devices, "nvme2")?;
    let request = AllocRequest::new(MIB as u64);
    let buffer = device.alloc(&request.clone().provider(id))?;
    let memory = buffer.map()?;
    fill(&memory, 4)?;
    let part = Part::start(PART, &["touch", "nvme2"])?;
    host::request(&Request::DeviceDel { name: "nvme2".into() })?;
    ensure!(!sysfs.exists(), "nvme2 is still there");
    touched(part)?;

    ensure!(buffer.info()?.state == BufferState::Gone, "{:?}", buffer.info()?);
    let error = refused(
        "a read of memory that was unplugged",
        memory.try_copy_to_slice(0, &mut [0; 8]),
    )?;
    ensure!(error.kind() == ErrorKind::Removed, "{error}");
    let error = refused(
        "memory of an unplugged drive",
        device.alloc(&request.clone().provider(id)),
    )?;
    println!("{error}");
    ensure!(error.kind() == ErrorKind::NoProvider, "{error}");
    let error = refused(
        "memory near an unplugged drive",
        device.alloc(&request.clone().near([drive])),
    )?;
    println!("{error}");
    ensure!(error.errno() == Some(libc::ENODEV), "{error}");
    ensure!(device.providers()?.len() == 1, "{:?}", device.providers()?);
    drop((memory, buffer));
    // The other drive is not affected.
    let free = available(devices, "nvme1")?;
    let other = device.alloc(&request)?;
    let memory = other.map()?;
    fill(&memory, 5)?;
    check(&memory, 5)?;
    drop((memory, other));
    becomes("what nvme1 has free", free, || available(devices, "nvme1"))
}

/// The module, which is unloaded when the value is dropped.
struct Loaded;

impl Loaded {
    fn load(devices: &Devices) -> Result<Loaded> {
        let bed = Bed {
            devices: devices.clone(),
        };
        bed.load_module()?;
        Ok(Loaded)
    }

    fn unload(self) -> Result<()> {
        std::mem::forget(self);
        command("rmmod", &["p2pmem"])
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // An error before this one matters more.
        let _ = command("rmmod", &["p2pmem"]);
    }
}

fn module_loaded(devices: &Devices) -> Result<()> {
    let free = available(devices, "nvme2")?;
    let device = Device::open()?;
    ensure!(device.backend() == Backend::Sysfs, "{:?}", device.backend());
    let request = AllocRequest::new(MIB as u64).provider(provider(&device, devices, "nvme2")?);
    let buffer = device.alloc(&request)?;
    let memory = buffer.map()?;
    fill(&memory, 6)?;
    let module = Loaded::load(devices)?;

    // The open device goes on.
    ensure!(device.backend() == Backend::Sysfs, "{:?}", device.backend());
    ensure!(buffer.info()?.state == BufferState::Live, "{:?}", buffer.info()?);
    check(&memory, 6)?;
    device.alloc(&request)?.map()?.write(0, 1u64)?;

    // A new device is the module's, which adopts what the drives published. It gives out only memory that is free.
    let new = Device::open()?;
    ensure!(new.backend() == Backend::Module, "{:?}", new.backend());
    let adopted = AllocRequest::new(MIB as u64).provider(provider(&new, devices, "nvme2")?);
    let mut taken = Vec::new();
    let error = loop {
        match new.alloc(&adopted) {
            Ok(buffer) => {
                let mapping = buffer.map()?;
                mapping.fill(0..MIB, 0xee)?;
                taken.push((buffer, mapping));
            }
            Err(error) => break error,
        }
    };
    println!("{} buffers of the module, then {error}", taken.len());
    ensure!(!taken.is_empty() && error.kind() == ErrorKind::NoSpace, "{error}");
    check(&memory, 6).context("the module gave out memory of an open device")?;
    let error = refused("memory that the module gave out", device.alloc(&request))?;
    println!("{error}");
    ensure!(error.kind() == ErrorKind::NoSpace, "{error}");
    drop(taken);
    drop(new);
    module.unload()?;

    check(&memory, 6)?;
    let again = Device::open()?;
    ensure!(again.backend() == Backend::Sysfs, "{:?}", again.backend());
    drop((memory, buffer));
    becomes("what nvme2 has free", free, || available(devices, "nvme2"))
}

fn no_iommu(devices: &Devices) -> Result<()> {
    let error = refused("opening vfio", Device::open_backend(Backend::Vfio))?;
    println!("{error}\n  {}", error.remedy().unwrap_or_default());
    ensure!(error.kind() == ErrorKind::BackendUnavailable, "{error}");
    ensure!(error.to_string().contains("IOMMU"), "{error}");
    ensure!(
        error.remedy().is_some_and(|remedy| remedy.contains("intel_iommu=on")),
        "{error}"
    );
    // vfio-pci of this kernel does not bind to a device without an IOMMU.
    let accel = devices["accel0"].sysfs();
    command("modprobe", &["vfio-pci"])?;
    write(&accel.join("driver_override"), "vfio-pci")?;
    write(Path::new("/sys/bus/pci/drivers_probe"), &devices["accel0"].bdf)?;
    ensure!(!accel.join("driver").exists(), "vfio-pci was bound without an IOMMU");
    write(&accel.join("driver_override"), "\n")?;
    // If no backend has a needed capability, the error has the reason of each backend.
    let error = refused(
        "dma-bufs",
        p2pmem::DeviceOptions::new().needs(Capability::DmaBuf).open(),
    )?;
    println!("{error}");
    let Error::NoBackend { others, .. } = &error else {
        bail!("{error}")
    };
    ensure!(others.len() == 2 && error.kind() == ErrorKind::ModuleMissing, "{error}");
    // The module is not loaded.
    let plain = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(p2pmem::DEFAULT_PATH);
    ensure!(plain.is_err(), "{} is there", p2pmem::DEFAULT_PATH);
    ensure!(
        Command::new("grep")
            .args(["-qw", "p2pmem", "/proc/modules"])
            .status()?
            .code()
            == Some(1)
    );
    Ok(())
}
