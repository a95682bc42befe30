// SPDX-License-Identifier: MIT OR Apache-2.0

//! Checks of the paths between devices: host bridge, IOMMU, ACS, and the sizes of BARs.

use p2pmem::inventory::Inventory;
use p2pmem::{human_size, PciDevice};

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

pub(super) fn host_bridge(machine: &Environment, devices: &[PciDevice]) -> Check {
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
    // The first device of each root bus identifies the host bridge.
    let root = devices.iter().find(|d| d.addr.devfn == 0 && machine_root(machine, d));
    let Some(root) = root else {
        return Check::new(
            NAME,
            Level::Info,
            "no host bridge is visible; `p2pmemctl topo` shows the kernel's verdicts",
        );
    };
    let id = format!("{:04x}:{:04x}", root.vendor, root.device);
    match TRUSTED_HOST_BRIDGES
        .iter()
        .find(|t| (t.0, t.1) == (root.vendor, root.device))
    {
        Some((_, _, true)) => Check::new(
            NAME,
            Level::Ok,
            format!("{id}: the kernel permits peer traffic below one host bridge"),
        ),
        Some(_) => Check::new(NAME, Level::Ok, format!("{id}: the kernel permits peer traffic")),
        None if root.vendor == GOOGLE => Check::new(NAME, Level::Ok, format!("{id}: the kernel permits peer traffic")),
        None => Check::new(
            NAME,
            Level::Warning,
            format!("{id} is not on the kernel's list, so only devices below one switch reach each other"),
        )
        .remedy(
            "put provider and clients below one PCIe switch; `p2pmemctl topo` shows the kernel's verdict for each pair",
        ),
    }
}

/// Returns whether a device is directly on a root bus.
fn machine_root(machine: &Environment, device: &PciDevice) -> bool {
    let link = machine.path("sys/bus/pci/devices").join(device.addr.to_string());
    let parent = link
        .canonicalize()
        .ok()
        .and_then(|p| Some(p.parent()?.file_name()?.to_str()?.to_owned()));
    parent.is_some_and(|name| name.starts_with("pci"))
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

/// ACS control bits that send peer traffic up to the root complex: request redirect, completion redirect, egress
/// control.
const ACS_REDIRECT: u16 = 0x04 | 0x08 | 0x20;

/// Returns the ACS control word in a PCI function's config space; `None` without an ACS capability.
///
/// # Errors
///
/// Only a part of the config space is readable.
pub(super) fn acs_control(config: &[u8]) -> Result<Option<u16>, ()> {
    if config.len() < 4096 {
        // Unprivileged reads return 64 bytes. Conventional PCI has 256 bytes and no ACS.
        return if config.len() == 256 { Ok(None) } else { Err(()) };
    }
    let word = |at: usize| u16::from_le_bytes([config[at], config[at + 1]]);
    let mut at = 0x100;
    // Limit the number of capabilities: the list of a broken device may be a loop.
    for _ in 0..(4096 - 0x100) / 8 {
        let (id, next) = (word(at), word(at + 2) >> 4);
        if id == 0x000d {
            return Ok(Some(word(at + 6)));
        }
        at = usize::from(next) & !3;
        if !(0x100..=4096 - 8).contains(&at) {
            break;
        }
    }
    Ok(None)
}

pub(super) fn acs(machine: &Environment, devices: &[PciDevice]) -> Check {
    const NAME: &str = "acs";
    let (mut redirecting, mut unknown) = (Vec::new(), 0);
    for bridge in devices.iter().filter(|d| d.class >> 8 == 0x0604) {
        let path = machine
            .path("sys/bus/pci/devices")
            .join(bridge.addr.to_string())
            .join("config");
        match acs_control(&std::fs::read(path).unwrap_or_default()) {
            Ok(Some(control)) if control & ACS_REDIRECT != 0 => redirecting.push(bridge.addr.to_string()),
            Ok(_) => {}
            Err(()) => unknown += 1,
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
            format!("the config space of {unknown} bridges is not readable"),
        )
        .remedy("run doctor as root")
    } else {
        Check::new(NAME, Level::Ok, "no port redirects peer traffic")
    }
}

/// Reports devices whose BAR shows only a part of the memory and could be larger.
pub(super) fn bars(machine: &Environment) -> Check {
    const NAME: &str = "bar-sizes";
    let memory_devices =
        Inventory::read_in(&machine.root, None).map_or_else(|_| Vec::new(), |inventory| inventory.memory_devices);
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
