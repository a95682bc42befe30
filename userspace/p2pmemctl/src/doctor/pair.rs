// SPDX-License-Identifier: MIT OR Apache-2.0

//! `doctor --pair`: measures whether a NIC reaches the memory of a device, by a registration and transfers.

use anyhow::{bail, Context as _};
use p2pmem::inventory::{Availability, Inventory, MemoryDevice};
use p2pmem::{
    human_size, path_between_in, Backend, Buffer, BufferState, Client, Device, Path, PathClass, PciAddr, Provider,
    Request,
};
use serde::Serialize;

use super::{Check, Level};
use crate::computed::Access;
use crate::environment::Environment;
use crate::selftest::{LoopbackNic, RegistrationReport};
use crate::Context;

/// The name of the checks of the memory.
const MEMORY: &str = "pair-memory";
/// The most bytes of the test.
const MOST: u64 = 1 << 20;

/// What was measured.
#[derive(Debug, Serialize)]
pub(super) struct Pair {
    nic: String,
    /// The device that has the memory.
    addr: PciAddr,
    class: PathClass,
    /// IOMMU mode of the NIC, such as `DMA-FQ` or `identity`; none without an IOMMU.
    iommu_of_nic: Option<String>,
    /// IOMMU mode of the device; none without an IOMMU.
    iommu_of_device: Option<String>,
    /// The interface that handed the memory out; none if no interface did.
    backend: Option<Backend>,
    /// Size of the tested memory.
    bytes: Option<u64>,
    registration: Option<RegistrationReport>,
}

/// The memory of the test.
enum Memory {
    /// A buffer, and its place as part of a message.
    Buffer(Device, Buffer, String),
    /// No interface hands out memory that a NIC can register.
    Missing(Check),
}

/// Measures a pair. Returns the checks and the numbers.
pub(super) fn measure(context: &Context<'_>, nic: &str, device: &str) -> anyhow::Result<(Vec<Check>, Pair)> {
    let machine = context.environment;
    let client = context.client(nic)?;
    let opened = match context.access()? {
        Access::Module(device) => Some(device),
        Access::Sysfs(_) => None,
    };
    let (addr, provider) = match (&opened, device.parse::<u32>()) {
        (Some(opened), Ok(_)) => {
            let provider = context.provider(opened, device)?;
            (provider.addr, Some(provider))
        }
        (None, Ok(_)) => bail!("{device} is the id of a provider, which only the module knows: name the device"),
        (_, Err(_)) => {
            let addr = context.client(device)?.addr();
            let providers = opened.as_ref().map(Device::providers).transpose()?.unwrap_or_default();
            (addr, providers.into_iter().find(|provider| provider.addr == addr))
        }
    };
    let path = path(machine, opened.as_ref().zip(provider.as_ref()), addr, &client)?;
    let mut pair = Pair {
        nic: nic.to_owned(),
        addr,
        class: path.class,
        iommu_of_nic: iommu_mode(machine, client.addr()),
        iommu_of_device: iommu_mode(machine, addr),
        backend: None,
        bytes: None,
        registration: None,
    };
    let mut checks = vec![of_path(&path, nic, addr), of_iommu(&pair)];
    match memory(machine, opened, provider, addr)? {
        Memory::Missing(check) => checks.push(check),
        Memory::Buffer(device, buffer, place) => {
            checks.push(Check::new(MEMORY, Level::Ok, place));
            pair.backend = Some(device.backend());
            pair.bytes = Some(buffer.size());
            // The NIC is opened last, so that a machine without RDMA libraries still learns the rest.
            match LoopbackNic::open(nic).and_then(|opened| Ok((opened, buffer.map()?))) {
                Ok((opened, mapping)) => {
                    let report = opened.measure(&buffer, &mapping);
                    checks.extend(of_registration(&report, addr));
                    pair.registration = Some(report);
                }
                Err(error) => checks.push(failed("pair-registration", &error)),
            }
            checks.extend(of_removal(&buffer, addr));
        }
    }
    Ok((checks, pair))
}

/// Returns the path as the module computes it, else from sysfs.
fn path(
    machine: &Environment,
    module: Option<(&Device, &Provider)>,
    addr: PciAddr,
    client: &Client,
) -> anyhow::Result<Path> {
    if let Some((device, provider)) = module {
        let paths = device.paths(std::slice::from_ref(client))?;
        let path = paths.into_iter().find(|path| path.provider == provider.id);
        return path.context("the provider was removed");
    }
    Ok(path_between_in(&machine.path("sys"), addr, client)?)
}

/// Returns the mode of a device's IOMMU group; none without an IOMMU.
fn iommu_mode(machine: &Environment, addr: PciAddr) -> Option<String> {
    machine.read(format!("sys/bus/pci/devices/{addr}/iommu_group/type"))
}

/// Gets memory of a device: of the module's provider, else by vfio-pci.
fn memory(
    machine: &Environment,
    module: Option<Device>,
    provider: Option<Provider>,
    addr: PciAddr,
) -> anyhow::Result<Memory> {
    if let (Some(device), Some(provider)) = (module, provider) {
        return allocate(device, &provider);
    }
    let memory_devices = Inventory::read_in(&machine.root, None)?.memory_devices;
    let memory_device = memory_devices.iter().find(|found| found.device.addr == addr);
    let by_vfio = |memory_device: &&MemoryDevice| {
        let mut sources = memory_device.sources.iter();
        sources.any(|source| source.backend == Backend::Vfio && source.availability == Availability::Ready)
    };
    if memory_device.filter(by_vfio).is_none() {
        return Ok(Memory::Missing(no_memory(memory_device, addr)));
    }
    let device = match Device::open_backend(Backend::Vfio) {
        Ok(device) => device,
        Err(error) => return Ok(Memory::Missing(failed(MEMORY, &error))),
    };
    let provider = device.providers()?.into_iter().find(|provider| provider.addr == addr);
    match provider {
        Some(provider) => allocate(device, &provider),
        None => Ok(Memory::Missing(no_memory(memory_device, addr))),
    }
}

fn allocate(device: Device, provider: &Provider) -> anyhow::Result<Memory> {
    let size = provider.largest.min(MOST);
    if size == 0 {
        let check = Check::new(MEMORY, Level::Failure, format!("{} has no free memory", provider.addr));
        return Ok(Memory::Missing(
            check.remedy("free buffers of this provider: see `p2pmemctl top`"),
        ));
    }
    let buffer = match device.alloc(&Request::new(size).provider(provider.id)) {
        Ok(buffer) => buffer,
        Err(error) => return Ok(Memory::Missing(failed(MEMORY, &error))),
    };
    let interface = match device.backend() {
        Backend::Module => "the module",
        _ => "vfio-pci",
    };
    let place = format!("{} of {}, by {interface}", human_size(size), provider.addr);
    Ok(Memory::Buffer(device, buffer, place))
}

/// Returns the check for an error: its name, and the error.
fn failed(name: &'static str, error: &p2pmem::Error) -> Check {
    let check = Check::new(name, Level::Failure, error.to_string());
    Check {
        remedy: error.remedy().map(str::to_owned),
        ..check
    }
}

/// Returns a failed check if the provider was removed since the allocation. The other failures are then a result of this.
fn of_removal(buffer: &Buffer, addr: PciAddr) -> Option<Check> {
    let is_live = buffer.info().is_ok_and(|info| info.state == BufferState::Live);
    (!is_live).then(|| {
        Check::new(
            MEMORY,
            Level::Failure,
            format!("the provider {addr} was removed during the measurement"),
        )
        .remedy("publish the device again, and repeat the measurement")
    })
}

/// Returns the check of a device whose memory a NIC cannot register now, with the steps that would change this.
fn no_memory(memory_device: Option<&MemoryDevice>, addr: PciAddr) -> Check {
    let Some(memory_device) = memory_device else {
        return Check::new(MEMORY, Level::Failure, format!("{addr} has no memory to share"))
            .remedy("`p2pmemctl scan` lists the devices with memory");
    };
    let steps: Vec<_> = memory_device
        .sources
        .iter()
        .filter(|source| matches!(source.backend, Backend::Module | Backend::Vfio))
        .filter(|source| source.availability != Availability::Unavailable)
        .map(|source| source.detail.clone())
        .collect();
    let driver = memory_device
        .sources
        .iter()
        .find(|source| source.backend == Backend::Driver && source.availability == Availability::Ready);
    let check = Check::new(
        MEMORY,
        Level::Failure,
        format!("no interface hands out memory of {addr} that a NIC can register"),
    );
    match (steps.as_slice(), driver) {
        ([], Some(driver)) => check.remedy(format!(
            "a program has to export the memory by the driver's interface: {}",
            driver.detail
        )),
        ([], None) => check.remedy("`p2pmemctl scan --all` shows what each source of memory needs"),
        (steps, _) => check.remedy(steps.join("; or: ")),
    }
}

fn of_path(path: &Path, nic: &str, addr: PciAddr) -> Check {
    let level = match path.class {
        PathClass::SameDevice | PathClass::SameSwitch | PathClass::Switches => Level::Ok,
        PathClass::Unreachable => Level::Failure,
        _ => Level::Warning,
    };
    let acs = if path.acs_redirect {
        ", a port redirects by ACS"
    } else {
        ""
    };
    let found = format!(
        "{nic} and {addr}: {} ({}), {} links{acs}",
        path.class,
        path.class.meaning(),
        path.hops
    );
    Check::new("pair-path", level, found)
}

fn of_iommu(pair: &Pair) -> Check {
    let mode = |mode: &Option<String>| mode.clone().unwrap_or_else(|| "none".into());
    let (nic, device) = (mode(&pair.iommu_of_nic), mode(&pair.iommu_of_device));
    let translated = pair.iommu_of_nic.as_deref().is_some_and(|mode| mode != "identity");
    let effect = if translated {
        "addresses of the NIC are translated"
    } else {
        "the NIC uses bus addresses"
    };
    let found = format!("{} has {nic}, {} has {device}: {effect}", pair.nic, pair.addr);
    Check::new("pair-iommu", if translated { Level::Info } else { Level::Ok }, found)
}

/// Returns the checks of a registration and its transfers.
fn of_registration(report: &RegistrationReport, addr: PciAddr) -> Vec<Check> {
    const REMEDY: &str =
        "see pair-path and pair-iommu here, and host-bridge, iommu, and acs of `p2pmemctl doctor`; boot with \
                          iommu=pt if devices need no isolation from each other";
    let nic = &report.nic;
    let Some(method) = report.method else {
        let error = report.error.clone().unwrap_or_default();
        let check = Check::new("pair-registration", Level::Failure, error);
        return vec![Check {
            remedy: report.remedy.map(str::to_owned),
            ..check
        }];
    };
    let registration = Check::new(
        "pair-registration",
        Level::Ok,
        format!("{nic} registered the memory by {method} in {} us", report.microseconds),
    );
    const NAME: &str = "pair-transfer";
    let transfer = match &report.transfer {
        Some(transfer) if transfer.ok() => Check::new(
            NAME,
            Level::Ok,
            format!(
                "{nic} moved {} by RDMA WRITE and READ, and all bytes arrived",
                human_size(transfer.bytes)
            ),
        ),
        Some(transfer) if transfer.error.is_none() => Check::new(
            NAME,
            Level::Failure,
            format!(
                "{nic} does not reach the memory of {addr}: {} words did not arrive, the first at byte {:#x}",
                transfer.wrong_words,
                transfer.first_wrong.unwrap_or(0)
            ),
        )
        .remedy(REMEDY),
        Some(transfer) => {
            let error = transfer.error.clone().unwrap_or_default();
            Check::new(NAME, Level::Failure, error).remedy(REMEDY)
        }
        None => Check::new(NAME, Level::Failure, "there was no transfer"),
    };
    vec![registration, transfer]
}

#[cfg(test)]
mod tests;
