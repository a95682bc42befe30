// SPDX-License-Identifier: MIT OR Apache-2.0

//! Checks of the paths between devices: host bridge, IOMMU, ACS, and the sizes of BARs.

use p2pmem::inventory::MemoryDevice;
use p2pmem::{human_size, PciDevice, Walk};

use super::{Check, Level};
use crate::environment::Environment;

/// Devices at the start of a root bus for which the kernel (drivers/pci/p2pdma.c of 7.2) permits peer traffic through
/// the root complex: vendor, device, and whether only between devices of one host bridge.
const TRUSTED_HOST_BRIDGES: [(u16, u16, bool); 20] = [
    (0x8086, 0x3c00, true),
    (0x8086, 0x3c01, true),
    (0x8086, 0x2f00, true),
    (0x8086, 0x2f01, true),
    (0x8086, 0x2030, false),
    (0x8086, 0x2031, false),
    (0x8086, 0x2032, false),
    (0x8086, 0x2033, false),
    (0x8086, 0x2020, false),
    (0x8086, 0x09a2, false),
    (0x8086, 0x0b25, false),
    (0x8086, 0x0cfe, false),
    (0x8086, 0x11fb, false),
    (0x8086, 0x1212, false),
    (0x8086, 0x1216, false),
    (0x8086, 0x4940, false),
    (0x8086, 0x4942, false),
    (0x8086, 0x4944, false),
    (0x8086, 0x4946, false),
    (0x8086, 0x4948, false),
];
const GOOGLE: u16 = 0x1ae0;

/// What the kernel permits between devices below a host bridge and others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Permission {
    /// Peer traffic through the root complex.
    Yes,
    /// Peer traffic between devices of the same host bridge.
    SameBridge,
    /// No peer traffic.
    No,
}

impl Permission {
    /// Looks the first device of a root bus up.
    fn of(device: &PciDevice) -> Self {
        let listed = TRUSTED_HOST_BRIDGES
            .iter()
            .find(|t| (t.0, t.1) == (device.vendor, device.device));
        match listed {
            Some((_, _, true)) => Self::SameBridge,
            Some(_) => Self::Yes,
            None if device.vendor == GOOGLE => Self::Yes,
            None => Self::No,
        }
    }
}

/// Checks whether the kernel permits peer traffic through the root complex, for each host bridge above a device that does
/// DMA or has memory. A machine can have several PCI domains, and several host bridges in each.
pub(super) fn host_bridges(machine: &Environment, devices: &[PciDevice]) -> Check {
    const NAME: &str = "host-bridge";
    let cpuinfo = machine.read("proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = cpuinfo
            .lines()
            .find(|l| l.split(':').next().is_some_and(|key| key.trim() == name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let family: u32 = field("cpu family").and_then(|f| f.parse().ok()).unwrap_or(0);
    if field("vendor_id").as_deref() == Some("AuthenticAMD") && family >= 0x17 {
        return Check::new(
            NAME,
            Level::Ok,
            format!("AMD family {family:#x}: peer traffic may cross the root complex"),
        );
    }
    let sys = machine.path("sys");
    let roots: Vec<_> = devices
        .iter()
        .filter_map(|device| Some((Walk::read(&sys, device.addr)?, device)))
        .collect();
    let is_of_interest = |device: &PciDevice| device.is_likely_client() || has_memory(device);
    let mut buses: Vec<_> = roots
        .iter()
        .filter(|(_, device)| is_of_interest(device))
        .map(|(walk, _)| walk.root.as_str())
        .collect();
    if buses.is_empty() {
        buses = roots.iter().map(|(walk, _)| walk.root.as_str()).collect();
    }
    buses.sort_unstable();
    buses.dedup();
    // The first device of a root bus identifies the host bridge.
    let first = |bus: &str| {
        let mut on_bus = roots
            .iter()
            .filter(|(walk, _)| walk.bridges().is_empty() && walk.root == bus);
        on_bus
            .find(|(_, device)| device.addr.devfn == 0)
            .map(|(_, device)| *device)
    };
    // Host bridges of one model are one group.
    let mut groups: Vec<(Permission, String, Vec<&str>)> = Vec::new();
    for bus in buses {
        let Some(device) = first(bus) else { continue };
        let (permission, id) = (
            Permission::of(device),
            format!("{:04x}:{:04x}", device.vendor, device.device),
        );
        match groups.iter_mut().find(|(_, other, _)| *other == id) {
            Some((_, _, buses)) => buses.push(bus),
            None => groups.push((permission, id, vec![bus])),
        }
    }
    let Some(worst) = groups.iter().map(|(permission, ..)| *permission).max() else {
        return Check::new(
            NAME,
            Level::Info,
            "no host bridge is visible; `p2pmemctl topo` with the module shows the kernel's verdicts",
        );
    };
    let one = groups.iter().map(|(_, _, buses)| buses.len()).sum::<usize>() == 1;
    let found: Vec<_> = groups
        .iter()
        .map(|(permission, id, buses)| {
            let of = if one {
                String::new()
            } else {
                format!(" ({})", buses.join(", "))
            };
            match permission {
                Permission::Yes => format!("{id}{of}: the kernel permits peer traffic"),
                Permission::SameBridge => format!("{id}{of}: the kernel permits peer traffic below one host bridge"),
                Permission::No => {
                    format!("{id}{of} is not on the kernel's list, so only devices below one switch reach each other")
                }
            }
        })
        .collect();
    let found = found.join("; ");
    match worst {
        Permission::Yes | Permission::SameBridge => Check::new(NAME, Level::Ok, found),
        Permission::No => Check::new(NAME, Level::Warning, found).remedy(
            "put provider and clients below one PCIe switch; `p2pmemctl topo` with the module shows the kernel's verdict for \
             each pair",
        ),
    }
}

/// Returns whether devices of this class have memory that is worth peer traffic: displays, co-processors, accelerators.
fn has_memory(device: &PciDevice) -> bool {
    matches!(device.class >> 16, 0x03 | 0x05 | 0x0b | 0x12)
}

pub(super) fn iommu(machine: &Environment) -> Check {
    const NAME: &str = "iommu";
    let mut modes: Vec<String> = machine
        .entries("sys/kernel/iommu_groups")
        .filter_map(|g| std::fs::read_to_string(g.path().join("type")).ok())
        .map(|t| t.trim().to_owned())
        .collect();
    modes.sort();
    modes.dedup();
    match modes.as_slice() {
        [] => Check::new(NAME, Level::Ok, "not active: devices use bus addresses"),
        [one] if one == "identity" => Check::new(NAME, Level::Ok, "passed through: devices use bus addresses"),
        modes => Check::new(
            NAME,
            Level::Warning,
            format!(
                "DMA translation is on ({}): peer traffic of isolated devices goes through the root complex",
                modes.join(", ")
            ),
        )
        .remedy("for the shortest paths, boot with iommu=pt if devices need no isolation from each other"),
    }
}

pub(super) fn acs(machine: &Environment, devices: &[PciDevice]) -> Check {
    const NAME: &str = "acs";
    let (mut redirecting, mut unknown) = (Vec::new(), 0);
    for bridge in devices.iter().filter(|d| d.class >> 8 == 0x0604) {
        let walk = Walk::read(&machine.path("sys"), bridge.addr);
        match walk.as_ref().and_then(|walk| walk.ports.first()?.acs_redirect) {
            Some(true) => redirecting.push(bridge.addr.to_string()),
            Some(false) => {}
            None => unknown += 1,
        }
    }
    if !redirecting.is_empty() {
        let list = redirecting.join(", ");
        let bridges = redirecting.join(";");
        Check::new(
            NAME,
            Level::Warning,
            format!("these ports send peer traffic up to the root complex: {list}"),
        )
        .remedy(format!(
            "if isolation is not needed, boot with pci=disable_acs_redir={bridges}"
        ))
    } else if unknown > 0 {
        Check::new(
            NAME,
            Level::Info,
            format!("the configuration space of {unknown} bridges is readable for root only"),
        )
        .remedy("run doctor as root")
    } else {
        Check::new(NAME, Level::Ok, "no port redirects peer traffic")
    }
}

/// Reports devices whose BAR shows only a part of the memory and could be larger.
pub(super) fn bars(memory_devices: &[MemoryDevice]) -> Check {
    const NAME: &str = "bar-sizes";
    let small: Vec<_> = memory_devices
        .iter()
        .filter_map(|memory_device| {
            let bar = memory_device.memory_bar()?;
            let most = bar.resizable_to.filter(|most| *most > bar.size)?;
            Some(format!(
                "{} BAR {} has {}, up to {}",
                memory_device.device.addr,
                bar.index,
                human_size(bar.size),
                human_size(most)
            ))
        })
        .collect();
    if small.is_empty() {
        return Check::new(NAME, Level::Ok, "no memory BAR is smaller than its device allows");
    }
    Check::new(NAME, Level::Info, small.join("; ")).remedy(
        "for more memory behind a BAR, enable Resizable BAR (above 4G decoding) in the firmware, or write the size to the \
         sysfs file resource<BAR>_resize while the device has no driver",
    )
}
