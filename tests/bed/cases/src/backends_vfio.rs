// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests without the module in a machine with an IOMMU and a NIC: BARs of devices that are bound to vfio-pci, and
//! dma-bufs of other drivers.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use p2pmem::rdma::{Nic, Queue};
use p2pmem::{
    Access, Backend, Buffer, BufferState, Capability, Device, DeviceOptions, DmaBuf, Error, ErrorKind, Mapping,
    PathClass, ProviderKind, Registration, RegistrationMethod, RemoteMemory, Request,
};
use p2pmem_accel_regs::reg;
use serde_json::Value;
use sideway::ibverbs::protection_domain::ProtectionDomain;

use super::backends::{Check, NOBODY, PART, client, counters, provider, refused};
use super::dmabuf_end::Log;
use super::life::{BOUND, Part, ready};
use super::rdma_programs::{finish, sibling, spawn, text};
use super::rdma_user::{MIB, REMOTE_ACCESS, check, ended, fill};
use super::share::{receive, send};
use super::{command, errno, read, write};
use crate::devices::{self, Devices};
use crate::limits::scaled;
use crate::{in_time, sys};

/// The topology of these tests. vfio-pci keeps the accelerators from test to test.
const IOMMU: &str = "vfio";

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "vfio-rdma",
        about: "a NIC transfers data between BARs of vfio-pci devices without host memory",
        topology: IOMMU,
        ruins: false,
        run: rdma,
    },
    Check {
        name: "vfio-any-bar",
        about: "a BAR that the program selects is mapped and exported, also a BAR with registers",
        topology: IOMMU,
        ruins: false,
        run: any_bar,
    },
    Check {
        name: "vfio-passed-on",
        about: "memory of a dma-buf is not allocated again while a descriptor or a registration uses it",
        topology: IOMMU,
        ruins: false,
        run: passed_on,
    },
    Check {
        name: "vfio-refused",
        about: "errors for devices that are not bound, not accessible, in use or full have a remedy",
        topology: IOMMU,
        ruins: false,
        run: refusals,
    },
    Check {
        name: "vfio-killed",
        about: "memory of a killed exporter is revoked from a NIC and freed; no write reaches the next owner",
        topology: IOMMU,
        ruins: false,
        run: killed,
    },
    Check {
        name: "vfio-unbind",
        about: "unbinding waits for the program that has the device; after that, no write of a NIC reaches the memory",
        topology: IOMMU,
        ruins: false,
        run: unbind,
    },
    Check {
        name: "vfio-remove",
        about: "removing the device waits for the program that has it, whose calls do not hang; afterwards the device is gone",
        topology: IOMMU,
        ruins: false,
        run: remove,
    },
    Check {
        name: "vfio-reset",
        about: "a NIC has no access while the device's memory is disabled, and has access after a reset",
        topology: IOMMU,
        ruins: false,
        run: reset,
    },
];

/// Binds the `wanted` accelerators to vfio-pci, and unbinds the other accelerators of the topology.
fn bind(devices: &Devices, wanted: &[&str]) -> Result<()> {
    command("modprobe", &["-a", "vfio-pci", "vfio_iommu_type1"])?;
    for name in ["accel0", "accel1"] {
        let (sysfs, bdf) = (devices[name].sysfs(), &devices[name].bdf);
        let driver = sysfs.join("driver");
        let is_wanted = wanted.contains(&name);
        if is_wanted == driver.exists() {
            continue;
        }
        if is_wanted {
            ensure!(
                read(&sysfs.join("iommu_group/type"))?.starts_with("DMA"),
                "the IOMMU does not translate for {name}"
            );
            write(&sysfs.join("driver_override"), "vfio-pci")?;
            write(Path::new("/sys/bus/pci/drivers_probe"), bdf)?;
            ensure!(driver.exists(), "vfio-pci was not bound to {name}");
        } else {
            write(&driver.join("unbind"), bdf)?;
            write(&sysfs.join("driver_override"), "\n")?;
        }
    }
    Ok(())
}

/// The NIC, with a protection domain.
struct Wire {
    nic: Nic,
    pd: Arc<ProtectionDomain>,
}

impl Wire {
    fn new(devices: &Devices) -> Result<Wire> {
        let name = devices["nic0"].rdma.clone().context("nic0 has no RDMA device")?;
        let nic = Nic::open(&name)?;
        let pd = nic.alloc_pd()?;
        Ok(Wire { nic, pd })
    }

    /// Connects the NIC with itself. Returns both ends; the test uses the first one.
    fn pair(&self) -> Result<(Queue, Queue)> {
        let (mut near, mut far) = (self.nic.queue(&self.pd)?, self.nic.queue(&self.pd)?);
        near.connect(&far.endpoint())?;
        far.connect(&near.endpoint())?;
        Ok((near, far))
    }

    /// Writes all of a registration to remote memory, through a new connection.
    fn write(&self, from: &Registration, to: &RemoteMemory) -> p2pmem::Result<()> {
        let (mut queue, _far) = self.pair().map_err(|error| Error::State(format!("{error:#}")))?;
        queue.write(from, 0..from.len(), to, 0)
    }
}

/// Returns the NIC's payload of a target in bytes: reads and writes.
fn payload(counters: &Value, target: &str) -> u64 {
    let bytes = &counters["nic0"]["counters"]["payload_by_target"][target];
    bytes["read"].as_u64().unwrap_or(0) + bytes["written"].as_u64().unwrap_or(0)
}

/// Returns the payload in bytes that the NIC transfers during `work`: of host memory, by messages (BARs of other
/// devices, behind an IOMMU), and of other memory.
fn moved(work: impl FnOnce() -> Result<()>) -> Result<[u64; 3]> {
    let before = counters()?;
    work()?;
    let after = counters()?;
    let delta = |target| payload(&after, target) - payload(&before, target);
    Ok([delta("host"), delta("message"), delta("mapped")])
}

/// Allocates a mebibyte of a device's BAR.
fn buffer_of(device: &Device, devices: &Devices, wire: &Wire, name: &str) -> Result<Buffer> {
    let id = provider(device, devices, name)?;
    Ok(device.alloc(&Request::new(MIB as u64).near([wire.nic.client().clone()]).provider(id))?)
}

/// Host memory that the NIC can read, as a dma-buf of another driver.
struct HostMemory {
    map: sys::Mapping,
    registration: Registration,
}

impl HostMemory {
    fn new(wire: &Wire) -> Result<HostMemory> {
        let fd = sys::host_dma_buf(MIB as u64)?;
        let map = sys::Mapping::shared(fd.as_fd(), 0, MIB).map_err(errno)?;
        let dmabuf = DmaBuf::from_fd(fd)?;
        ensure!(
            dmabuf.size() == MIB as u64 && dmabuf.exporter().as_deref() == Some("udmabuf"),
            "{dmabuf:?} of {:?}",
            dmabuf.exporter()
        );
        let registration = dmabuf.register(&wire.pd, Access::LOCAL_WRITE)?;
        Ok(HostMemory { map, registration })
    }

    fn fill(&self, seed: u64) {
        for at in (0..MIB).step_by(8) {
            self.map.set(at, super::rdma_user::word(seed, at));
        }
    }

    fn check(&self, seed: u64) -> Result<()> {
        for at in (0..MIB).step_by(8) {
            let (found, wanted) = (self.map.get(at), super::rdma_user::word(seed, at));
            ensure!(found == wanted, "byte {at:#x} is {found:#x} instead of {wanted:#x}");
        }
        Ok(())
    }
}

/// `p2pmemctl doctor --pair` gets memory by vfio-pci, and measures.
fn measured_by_doctor(devices: &Devices) -> Result<()> {
    let nic = devices["nic0"].rdma.as_deref().context("nic0 has no RDMA device")?;
    let accel = &devices["accel0"].bdf;
    let mut program = Command::new(sibling("p2pmemctl")?);
    let output = finish(spawn(program.args(["doctor", "--pair", nic, accel]))?)?;
    let said = text(&output);
    let moved = format!("{nic} moved 1 MiB by RDMA WRITE and READ, and all bytes arrived");
    ensure!(
        output.status.success() && said.contains(&moved) && said.contains(&format!("1 MiB of {accel}, by vfio-pci")),
        "{said}"
    );
    Ok(())
}

fn rdma(devices: &Devices) -> Result<()> {
    bind(devices, &["accel0", "accel1"])?;
    measured_by_doctor(devices)?;
    let mut log = Log::new()?;
    let wire = Wire::new(devices)?;
    let device = Device::open()?;
    ensure!(device.backend() == Backend::Vfio, "{:?}", device.backend());
    let request = Request::new(MIB as u64).near([wire.nic.client().clone()]);
    let explanation = device.explain(&request)?;
    println!("{}", explanation.lines().join("\n"));
    ensure!(
        explanation.chosen.is_some() && explanation.verdicts.len() == 2,
        "{explanation:?}"
    );
    let kinds: Vec<_> = device
        .providers()?
        .iter()
        .map(|p| (p.kind, p.bar, p.exportable))
        .collect();
    ensure!(kinds == [(ProviderKind::Vfio, Some(2), true); 2], "{kinds:?}");

    let (source, target) = (
        buffer_of(&device, devices, &wire, "accel1")?,
        buffer_of(&device, devices, &wire, "accel0")?,
    );
    ensure!(source.class() == Some(PathClass::HostBridge), "{:?}", source.class());
    let (from, to) = (source.map()?, target.map()?);
    let sent = source.register(&wire.pd, Access::LOCAL_WRITE)?;
    let received = target.register(&wire.pd, Access::ALL)?;
    ensure!(
        received.method() == RegistrationMethod::DmaBuf && received.addr() == to.as_ptr() as u64,
        "{received:?}"
    );
    fill(&from, 1)?;
    fill(&to, 2)?;
    let bytes = moved(|| {
        let (mut queue, _far) = wire.pair()?;
        queue.write(&sent, 0..MIB, &received.remote(), 0)?;
        check(&to, 1).context("RDMA WRITE")?;
        fill(&to, 3)?;
        queue.read(&sent, 0..MIB, &received.remote(), 0)?;
        check(&from, 3).context("RDMA READ")
    })?;
    println!("payload of 2 transfers of {MIB} bytes, in host memory, by messages, other: {bytes:?}");
    ensure!(bytes == [0, 4 * MIB as u64, 0], "{bytes:?}");
    // The counters count host memory, which has half of this payload.
    let host = HostMemory::new(&wire)?;
    host.fill(4);
    let bytes = moved(|| Ok(wire.write(&host.registration, &received.remote())?))?;
    check(&to, 4)?;
    ensure!(bytes == [MIB as u64, MIB as u64, 0], "{bytes:?}");

    // The device is closed after its last user is gone. Another `Device` can then open it.
    let error = refused(
        "direct I/O",
        from.read_from(&std::fs::File::open("/dev/null")?, 0, 0..4096),
    )?;
    ensure!(
        matches!(
            error,
            Error::NotSupported {
                capability: Capability::DirectIo,
                ..
            }
        ),
        "{error}"
    );
    drop((from, to, source, target, device));
    Device::open_backend(Backend::Vfio)?
        .alloc(&request)
        .err()
        .filter(|error| error.kind() == ErrorKind::Busy)
        .context("accel0 was opened twice, although registrations hold it")?;
    received.deregister()?;
    drop(sent);
    buffer_of(&Device::open()?, devices, &wire, "accel0")?;
    let faults = log.lines(&["fault addr"]);
    ensure!(faults.is_empty(), "{faults:#?}");
    Ok(())
}

fn any_bar(devices: &Devices) -> Result<()> {
    bind(devices, &["accel0", "accel1"])?;
    let addr = client(devices, "accel1")?.addr();
    let device = DeviceOptions::new().bar(addr, 0).open()?;
    let registers = device.alloc(&Request::new(4096).provider(provider(&device, devices, "accel1")?))?;
    ensure!(registers.bar_offset() == Some(0), "{:?}", registers.bar_offset());
    let id = registers.map()?.read::<u32>(usize::try_from(reg::ID)?)?;
    ensure!(id == p2pmem_accel_regs::ID, "register ID is {id:#x}");
    let dmabuf = registers.share()?;
    ensure!(dmabuf.size() == 4096 && dmabuf.device() == Some(addr), "{dmabuf:?}");
    let exporter = dmabuf.exporter();
    ensure!(
        exporter.as_deref().is_some_and(|name| name.contains("vfio")),
        "{exporter:?}"
    );
    // The library uses the BAR for memory of the other device.
    let other = provider(&device, devices, "accel0")?;
    let bars: Vec<_> = device.providers()?.iter().map(|p| (p.id == other, p.bar)).collect();
    ensure!(
        bars.contains(&(true, Some(2))) && bars.contains(&(false, Some(0))),
        "{bars:?}"
    );
    let error = refused("a BAR that does not exist", DeviceOptions::new().bar(addr, 3).open())?;
    ensure!(error.kind() == ErrorKind::InvalidRequest, "{error}");
    let drive = client(devices, "nvme0")?.addr();
    let error = refused("a BAR of a bound drive", DeviceOptions::new().bar(drive, 0).open())?;
    ensure!(error.to_string().contains("bound to the driver nvme"), "{error}");
    Ok(())
}

fn passed_on(devices: &Devices) -> Result<()> {
    bind(devices, &["accel0"])?;
    let wire = Wire::new(devices)?;
    let device = Device::open_backend(Backend::Vfio)?;
    // The library keeps the function open while this buffer exists.
    let _held = device.alloc(&Request::new(4096))?;
    let buffer = buffer_of(&device, devices, &wire, "accel0")?;
    let place = buffer.bar_offset();
    let pinned = || -> Result<u64> { Ok(device.providers()?.iter().map(|p| p.pinned).sum()) };
    let fd = OwnedFd::from(buffer.share()?);
    drop(buffer);
    ensure!(
        pinned()? == MIB as u64,
        "{} bytes are pinned by a descriptor",
        pinned()?
    );
    let other = buffer_of(&device, devices, &wire, "accel0")?;
    ensure!(
        other.bar_offset() != place,
        "memory of an open descriptor was allocated again"
    );
    drop(other);
    let registration = DmaBuf::from_fd(fd)?.register(&wire.pd, Access::ALL)?;
    ensure!(
        pinned()? == MIB as u64,
        "{} bytes are pinned by a registration",
        pinned()?
    );
    registration.deregister()?;
    ensure!(pinned()? == 0, "{} bytes are pinned at the end", pinned()?);
    let again = buffer_of(&device, devices, &wire, "accel0")?;
    ensure!(again.bar_offset() == place, "{:?}", again.bar_offset());
    Ok(())
}

/// Fails unless the text of an error has `words`, and its remedy has `remedy`.
fn said(error: &Error, words: &str, remedy: &str) -> Result<()> {
    println!("{error}\n  {}", error.remedy().unwrap_or_default());
    ensure!(error.to_string().contains(words), "{words:?} is not in: {error}");
    ensure!(
        error.remedy().is_some_and(|text| text.contains(remedy)),
        "{remedy:?} is not in: {:?}",
        error.remedy()
    );
    Ok(())
}

fn refusals(devices: &Devices) -> Result<()> {
    bind(devices, &[])?;
    let error = refused("a device without a driver", Device::open_backend(Backend::Vfio))?;
    said(&error, "is not bound to vfio-pci", "driver_override")?;
    ensure!(error.kind() == ErrorKind::BackendUnavailable, "{error}");

    bind(devices, &["accel0"])?;
    let opened = sys::as_user(NOBODY, NOBODY, &[], || Device::open_backend(Backend::Vfio)).map_err(errno)?;
    let error = refused("opening without permission", opened)?;
    said(&error, "cannot open /dev/vfio/", "run as root")?;
    ensure!(error.kind() == ErrorKind::PermissionDenied, "{error}");

    let (part, fd) = holder("accel0")?;
    let device = Device::open_backend(Backend::Vfio)?;
    let error = refused("a device of another program", device.alloc(&Request::new(4096)))?;
    said(&error, "cannot open /dev/vfio/", "another program")?;
    ensure!(error.kind() == ErrorKind::Busy, "{error}");
    bind(devices, &["accel0", "accel1"])?;
    let buffer = device.alloc(&Request::new(4096))?;
    ensure!(buffer.provider() == provider(&device, devices, "accel1")?, "{buffer:?}");
    let text = device.explain_last()?.text;
    ensure!(
        text.contains(&devices["accel0"].bdf) && text.contains("cannot be used"),
        "{text}"
    );
    drop((buffer, fd));
    part.finish()?;

    let id = provider(&device, devices, "accel0")?;
    let size = device.providers()?.iter().find(|p| p.id == id).map_or(0, |p| p.size);
    let held = device.alloc(&Request::new(size - 4096).provider(id))?;
    let error = refused("a full BAR", device.alloc(&Request::new(8192).provider(id)))?;
    ensure!(error.kind() == ErrorKind::NoSpace, "{error}");
    said(&error, "used by this program", "free buffers")?;
    drop(held);
    device.alloc(&Request::new(size).provider(id))?;
    let error = refused("more than there is", device.alloc(&Request::new(size + 1).provider(id)))?;
    ensure!(error.kind() == ErrorKind::NoProvider, "{error}");
    Ok(())
}

/// Seed of the pattern in the memory of [`holder`].
const HELD: u64 = 7;

/// Starts a process that allocates a mebibyte of a device's BAR. Returns the process and its dma-buf of the memory.
fn holder(name: &str) -> Result<(Part, OwnedFd)> {
    let path = format!("/run/p2pmem/backends-{}.sock", std::process::id());
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).with_context(|| path.clone())?;
    let result = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| receive(&listener.accept()?.0));
        // If the process ends early, this connection ends the receiver's wait.
        let part = Part::start(PART, &["export", &path, name]).inspect_err(|_| drop(UnixStream::connect(&path)))?;
        let fd = receiver
            .join()
            .map_err(|_| anyhow::anyhow!("the receiver panicked"))??;
        Ok((part, fd))
    });
    let _ = std::fs::remove_file(&path);
    result
}

/// Runs one of the processes.
pub(super) fn part(arguments: &[String]) -> Result<()> {
    let [what, path, name] = arguments else {
        bail!("{arguments:?}")
    };
    ensure!(what == "export", "{arguments:?}");
    let stream = UnixStream::connect(path).with_context(|| path.clone())?;
    let devices = devices::load()?;
    let device = Device::open_backend(Backend::Vfio)?;
    let buffer = device.alloc(&Request::new(MIB as u64).provider(provider(&device, &devices, name)?))?;
    let memory = buffer.map()?;
    fill(&memory, HELD)?;
    let shared = buffer.share()?;
    send(&stream, shared.as_fd())?;
    ready()
}

/// A registration of another process's memory, and host memory as the source of writes.
struct Foreign {
    wire: Wire,
    host: HostMemory,
    registration: Registration,
}

impl Foreign {
    /// Registers the dma-buf of another process, and transfers data to and from it.
    fn new(devices: &Devices, name: &str, fd: OwnedFd) -> Result<Foreign> {
        let wire = Wire::new(devices)?;
        let dmabuf = DmaBuf::from_fd(fd)?;
        let unknown = refused("the path to an unknown device", dmabuf.path_to(wire.nic.client()))?;
        ensure!(matches!(unknown, Error::DmaBuf { .. }), "{unknown}");
        let dmabuf = dmabuf.of_device(client(devices, name)?.addr());
        let path = dmabuf.path_to(wire.nic.client())?;
        ensure!(path.class == PathClass::HostBridge && path.hops == 4, "{path:?}");
        ensure!(dmabuf.size() == MIB as u64, "{dmabuf:?}");
        let registration = dmabuf.register(&wire.pd, Access::ALL)?;
        let host = HostMemory::new(&wire)?;
        let (mut queue, _far) = wire.pair()?;
        queue.read(&host.registration, 0..MIB, &registration.remote(), 0)?;
        host.check(HELD).context("another process's bytes")?;
        host.fill(8);
        queue.write(&host.registration, 0..MIB, &registration.remote(), 0)?;
        Ok(Foreign {
            wire,
            host,
            registration,
        })
    }

    fn write(&self) -> p2pmem::Result<()> {
        self.wire.write(&self.host.registration, &self.registration.remote())
    }

    /// Fails unless writes to the revoked memory fail, and do not change the memory of the next owner.
    fn is_revoked(&self, devices: &Devices, name: &str) -> Result<()> {
        ended("a write to revoked memory", self.write(), REMOTE_ACCESS)?;
        let device = Device::open_backend(Backend::Vfio)?;
        let id = provider(&device, devices, name)?;
        let size = device.providers()?.iter().find(|p| p.id == id).map_or(0, |p| p.free);
        ensure!(size >= MIB as u64, "{size} bytes are free");
        let buffer = device.alloc(&Request::new(MIB as u64).provider(id))?;
        ensure!(buffer.bar_offset() == Some(0), "{:?}", buffer.bar_offset());
        let memory: Mapping = buffer.map()?;
        fill(&memory, 9)?;
        for _ in 0..3 {
            ended("a write to another's memory", self.write(), REMOTE_ACCESS)?;
        }
        check(&memory, 9).context("a write to revoked memory changed the next owner's memory")
    }
}

fn killed(devices: &Devices) -> Result<()> {
    bind(devices, &["accel0"])?;
    let (part, fd) = holder("accel0")?;
    let foreign = Foreign::new(devices, "accel0", fd)?;
    part.kill()?;
    foreign.is_revoked(devices, "accel0")
}

fn unbind(devices: &Devices) -> Result<()> {
    bind(devices, &["accel0"])?;
    let (part, fd) = holder("accel0")?;
    let foreign = Foreign::new(devices, "accel0", fd)?;
    let sysfs = devices["accel0"].sysfs();
    let mut log = Log::new()?;
    std::thread::scope(|scope| {
        let unbinding = scope.spawn(|| write(&sysfs.join("driver/unbind"), &devices["accel0"].bdf));
        let waits = log.wait(&[&devices["accel0"].bdf, "blocked until released by user"]);
        // Unbinding waits, and the program still has the device.
        let write = foreign.write();
        let start = Instant::now();
        part.finish()?;
        unbinding.join().map_err(|_| anyhow::anyhow!("the thread panicked"))??;
        in_time!(
            start.elapsed() < scaled(BOUND),
            "unbinding took {:?} after the program had ended",
            start.elapsed()
        );
        waits?;
        write.context("a write while unbinding waits")
    })?;
    ensure!(!sysfs.join("driver").exists(), "accel0 still has a driver");
    ended("a write to an unbound device", foreign.write(), REMOTE_ACCESS)?;
    bind(devices, &["accel0"])?;
    foreign.is_revoked(devices, "accel0")
}

fn remove(devices: &Devices) -> Result<()> {
    bind(devices, &["accel0"])?;
    let wire = Wire::new(devices)?;
    let device = Device::open_backend(Backend::Vfio)?;
    let buffer = buffer_of(&device, devices, &wire, "accel0")?;
    let id = buffer.provider();
    let memory = buffer.map()?;
    let registration = buffer.register(&wire.pd, Access::ALL)?;
    let host = HostMemory::new(&wire)?;
    host.fill(1);
    let (sysfs, addr) = (devices["accel0"].sysfs(), &devices["accel0"].bdf);
    let mut log = Log::new()?;
    std::thread::scope(|scope| {
        // The removal ends after the device is closed, also after an error.
        let (buffer, memory, registration) = (buffer, memory, registration);
        let removing = scope.spawn(|| write(&sysfs.join("remove"), "1"));
        log.wait(&[addr, "blocked until released by user"])?;
        // The memory is still there, and the library reports that it has to be released.
        ensure!(buffer.info()?.state == BufferState::Gone, "{:?}", buffer.info()?);
        wire.write(&host.registration, &registration.remote())?;
        check(&memory, 1)?;
        ensure!(!removing.is_finished(), "the device was removed under its user");
        let error = refused(
            "memory of a device that is being removed",
            device.alloc(&Request::new(4096).provider(id)),
        )?;
        println!("{error}");
        ensure!(error.kind() == ErrorKind::NoProvider, "{error}");
        ensure!(device.providers()?.is_empty(), "{:?}", device.providers()?);
        let start = Instant::now();
        drop((memory, buffer));
        registration.deregister()?;
        removing.join().map_err(|_| anyhow::anyhow!("the thread panicked"))??;
        in_time!(
            start.elapsed() < scaled(BOUND),
            "the removal took {:?} after the program had released the device",
            start.elapsed()
        );
        anyhow::Ok(())
    })?;
    ensure!(!sysfs.exists(), "accel0 is still there");
    let error = refused("a removed device", Device::open_backend(Backend::Vfio))?;
    println!("{error}");
    ensure!(error.kind() == ErrorKind::BackendUnavailable, "{error}");
    write(Path::new("/sys/bus/pci/rescan"), "1")?;
    bind(devices, &["accel0"])?;
    // The device that was open before the removal finds it again.
    let memory = buffer_of(&device, devices, &wire, "accel0")?.map()?;
    fill(&memory, 2)?;
    check(&memory, 2)
}

/// `PCI_COMMAND` in the configuration space, and its bit `PCI_COMMAND_MEMORY`.
const COMMAND: u64 = 4;
const COMMAND_MEMORY: u16 = 2;

fn reset(devices: &Devices) -> Result<()> {
    bind(devices, &["accel0"])?;
    let wire = Wire::new(devices)?;
    let device = Device::open_backend(Backend::Vfio)?;
    let buffer = buffer_of(&device, devices, &wire, "accel0")?;
    let memory = buffer.map()?;
    let registration = buffer.register(&wire.pd, Access::ALL)?;
    let host = HostMemory::new(&wire)?;
    host.fill(1);
    wire.write(&host.registration, &registration.remote())?;
    check(&memory, 1)?;

    // The test uses the library's descriptor of the function to disable the memory.
    let function = vfio_function()?;
    let config = sys::vfio_config(function.as_fd()).map_err(errno)?;
    let file = std::fs::File::from(function.try_clone()?);
    let set = |memory: bool| -> Result<()> {
        let mut bytes = [0; 2];
        file.read_exact_at(&mut bytes, config + COMMAND)?;
        let command = u16::from_le_bytes(bytes);
        let command = if memory {
            command | COMMAND_MEMORY
        } else {
            command & !COMMAND_MEMORY
        };
        Ok(file.write_all_at(&command.to_le_bytes(), config + COMMAND)?)
    };
    set(false)?;
    host.fill(2);
    ended(
        "a write to disabled memory",
        wire.write(&host.registration, &registration.remote()),
        REMOTE_ACCESS,
    )?;
    set(true)?;
    check(&memory, 1).context("a write to disabled memory changed the memory")?;
    wire.write(&host.registration, &registration.remote())?;
    check(&memory, 2)?;

    sys::vfio_reset(function.as_fd())
        .map_err(errno)
        .context("VFIO_DEVICE_RESET")?;
    host.fill(3);
    wire.write(&host.registration, &registration.remote())?;
    check(&memory, 3)
}

/// Duplicates this process's descriptor of the function that is open by VFIO. Fails unless one function is open.
fn vfio_function() -> Result<OwnedFd> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        let link = std::fs::read_link(entry.path()).unwrap_or_default();
        if link.to_string_lossy().contains("[vfio-device]") {
            found.push(entry.file_name().to_string_lossy().parse::<i32>()?);
        }
    }
    let [fd] = found.as_slice() else {
        bail!("{} functions are open", found.len())
    };
    sys::duplicate(*fd).map_err(errno)
}
