// SPDX-License-Identifier: MIT OR Apache-2.0

//! The rules for a topology, which are checked before anything starts.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};

use super::{Bridge, BridgeKind, Device, ROOT, Size, Topology};
use crate::bridges::BRIDGES;

/// The largest number of downstream ports of a switch: device numbers on its internal bus.
const MAX_PORTS: u8 = 32;

/// The largest number of bridges on the root complex. The other device numbers are for the runner's own devices.
const MAX_ON_ROOT: usize = 24;

impl Topology {
    /// Checks the whole description.
    pub(super) fn check(&self) -> Result<()> {
        self.check_machine()?;
        let mut seen: BTreeMap<&str, &str> = BTreeMap::new();
        seen.insert(ROOT, "root complex");
        let mut children: BTreeMap<&str, usize> = BTreeMap::new();
        for bridge in &self.bridge {
            self.check_bridge(bridge, &seen)
                .with_context(|| format!("bridge {:?}", bridge.name))?;
            seen.insert(&bridge.name, "bridge");
            *children.entry(&bridge.parent).or_default() += 1;
        }
        for device in &self.device {
            let (name, parent) = (device.name(), device.parent());
            check_device(device, &seen)
                .and_then(|()| self.check_delay(device))
                .with_context(|| format!("device {name:?}"))?;
            let Some(bridge) = self.bridge(parent) else {
                bail!("device {name:?}: unknown parent {parent:?}; a device is below a root port or a switch");
            };
            ensure!(
                bridge.kind != BridgeKind::HostBridge,
                "device {name:?}: parent {parent:?} is a host bridge; put a root port between them"
            );
            seen.insert(name, "device");
            *children.entry(parent).or_default() += 1;
        }
        for bridge in &self.bridge {
            let held = children.get(bridge.name.as_str()).copied().unwrap_or(0);
            let capacity = match bridge.kind {
                BridgeKind::RootPort => 1,
                BridgeKind::Switch => usize::from(bridge.ports.unwrap_or(0)),
                BridgeKind::HostBridge => usize::from(MAX_PORTS),
            };
            ensure!(
                held <= capacity,
                "bridge {:?}: {held} children, at most {capacity}",
                bridge.name
            );
        }
        let on_root = children.get(ROOT).copied().unwrap_or(0);
        ensure!(
            on_root <= MAX_ON_ROOT,
            "{on_root} bridges on {ROOT}, at most {MAX_ON_ROOT}"
        );
        Ok(())
    }

    /// Checks that only the processor's writes to a device are delayed.
    fn check_delay(&self, device: &Device) -> Result<()> {
        if !device.delays_writes() {
            return Ok(());
        }
        ensure!(
            self.machine.iommu.is_none(),
            "delayed_writes with an IOMMU: other devices reach the memory at its own bus address only"
        );
        for other in &self.device {
            ensure!(
                !matches!(other, Device::Nvme { .. }),
                "delayed_writes beside drive {:?}: the emulator's own devices write as the processor does",
                other.name()
            );
        }
        Ok(())
    }

    fn check_machine(&self) -> Result<()> {
        let machine = &self.machine;
        ensure!(!machine.cpu.is_empty(), "machine: empty cpu model");
        ensure!(
            (1..=64).contains(&machine.smp),
            "machine: smp {} is not in 1..=64",
            machine.smp
        );
        ensure!(
            machine.smp == 1 || !machine.count_instructions,
            "machine: count_instructions with smp {}, but only one processor's can be counted",
            machine.smp
        );
        if machine.numa.is_empty() {
            return Ok(());
        }
        let sum: u64 = machine.numa.iter().map(|node| node.memory.0).sum();
        ensure!(
            sum == machine.memory.0,
            "machine: memory is {}, but its NUMA nodes have {sum}",
            machine.memory.0
        );
        let nodes = machine.numa.len() as u32;
        ensure!(
            machine.smp % nodes == 0,
            "machine: smp {} cannot be split over {nodes} NUMA nodes",
            machine.smp
        );
        let each = machine.smp / nodes;
        for (number, node) in (0..).zip(&machine.numa) {
            // Each NUMA node is one socket, and the processors are numbered in the order of the sockets.
            let own: Vec<u32> = (number * each..(number + 1) * each).collect();
            ensure!(
                node.cpus == own,
                "machine: the cpus of NUMA node {number} have to be {own:?}, not {:?}",
                node.cpus
            );
        }
        Ok(())
    }

    fn check_bridge(&self, bridge: &Bridge, seen: &BTreeMap<&str, &str>) -> Result<()> {
        check_name(&bridge.name, seen)?;
        let parent = bridge.parent.as_str();
        let parent_kind = match (parent, self.bridge(parent)) {
            (ROOT, _) => None,
            (_, Some(above)) if seen.contains_key(parent) => Some(above.kind),
            (_, Some(_)) => bail!("parent {parent:?} comes later in the file; parents come first"),
            (_, None) => bail!("unknown parent {parent:?}"),
        };
        match (bridge.kind, parent_kind) {
            (BridgeKind::RootPort, None | Some(BridgeKind::HostBridge))
            | (BridgeKind::HostBridge, None)
            | (BridgeKind::Switch, Some(BridgeKind::RootPort | BridgeKind::Switch)) => {}
            (BridgeKind::RootPort, _) => bail!("a root port is on {ROOT} or a host bridge, not on {parent:?}"),
            (BridgeKind::HostBridge, _) => bail!("a host bridge is on {ROOT}, not on {parent:?}"),
            (BridgeKind::Switch, _) => bail!("a switch is below a root port or another switch, not on {parent:?}"),
        }
        // Linux gives devices below one switch each other's bus addresses. QEMU takes these addresses for IOVAs.
        ensure!(
            bridge.kind != BridgeKind::Switch || self.machine.iommu.is_none() || self.machine.wrong_bytes,
            "a switch below a translating IOMMU moves wrong bytes, because the emulator does not model traffic that \
             stays in a switch; put each device on a root port of its own"
        );
        match (bridge.kind, bridge.ports) {
            (BridgeKind::Switch, None) => bail!("a switch needs ports = N"),
            (BridgeKind::Switch, Some(n)) => {
                ensure!((1..=MAX_PORTS).contains(&n), "ports {n} is not in 1..={MAX_PORTS}")
            }
            (_, Some(_)) => bail!("only a switch has ports"),
            (_, None) => {}
        }
        if let Some(node) = bridge.numa_node {
            ensure!(
                bridge.kind == BridgeKind::HostBridge,
                "only a host bridge has a numa_node"
            );
            let nodes = self.machine.numa.len();
            ensure!(
                usize::from(node) < nodes,
                "numa_node {node}, but the machine has {nodes} NUMA nodes"
            );
        }
        Ok(())
    }
}

/// Checks a name that is not yet in `seen`. Names become QEMU identifiers, file names and environment variables.
pub(super) fn check_name(name: &str, seen: &BTreeMap<&str, &str>) -> Result<()> {
    let mut chars = name.chars();
    let fine = chars.next().is_some_and(|c| c.is_ascii_lowercase())
        && chars.all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
        && name.len() <= 20;
    ensure!(
        fine,
        "a name is up to 20 lower-case letters, digits and hyphens, a letter first"
    );
    ensure!(name != "host", "the name \"host\" means host memory in the counters");
    ensure!(
        name != "unknown",
        "the name \"unknown\" means unresolved addresses in the counters"
    );
    ensure!(
        name != BRIDGES,
        "the name {BRIDGES:?} means all bridges in the counters"
    );
    if let Some(what) = seen.get(name) {
        bail!("there is a {what} of that name already");
    }
    Ok(())
}

fn check_bar(size: Size) -> Result<()> {
    ensure!(
        size.0.is_power_of_two() && size.0 >= 1 << 20,
        "a BAR's size is a power of two from 1M up"
    );
    Ok(())
}

fn check_device(device: &Device, seen: &BTreeMap<&str, &str>) -> Result<()> {
    check_name(device.name(), seen)?;
    match device {
        Device::Nic { switch, .. } => {
            check_name(switch, &BTreeMap::new()).with_context(|| format!("switch {switch:?}"))?;
        }
        Device::Accel {
            memory, second_memory, ..
        } => {
            check_bar(*memory)?;
            if let Some(size) = second_memory {
                check_bar(*size)?;
                ensure!(size.0 <= 1 << 30, "the second memory has a 32-bit BAR, at most 1G");
            }
        }
        Device::Fpga { memory: size, .. } | Device::Ivshmem { size, .. } => check_bar(*size)?,
        Device::Nvme {
            image,
            serial,
            cmb_size_mb,
            name,
            ..
        } => {
            ensure!(
                image.0 % 4096 == 0 && image.0 >= 1 << 20,
                "a drive's size is a multiple of 4K from 1M up"
            );
            let serial = serial.as_ref().unwrap_or(name);
            let fine =
                (1..=20).contains(&serial.len()) && serial.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
            ensure!(fine, "serial {serial:?}: 1 to 20 letters, digits and hyphens");
            if let Some(mb) = cmb_size_mb {
                ensure!(
                    mb.is_power_of_two() && *mb <= 1024,
                    "cmb_size_mb {mb} is no power of two up to 1024"
                );
            }
        }
    }
    Ok(())
}
