// SPDX-License-Identifier: MIT OR Apache-2.0

//! The drawing of a machine: host bridges, switches, devices with memory, and clients, as an SVG document.

use std::path::Path as FsPath;

use anyhow::Context as _;
use p2pmem::inventory::Inventory;
use p2pmem::{devices_in, Client};
use p2pmem_drawing::{Drawing, Scene};

use crate::computed::{Access, Computed};
use crate::{Context, Outcome, UsageError};

/// Draws the machine with these clients. Writes the drawing to a file, or to the output if the file is `-`.
pub(super) fn draw(context: &mut Context<'_>, clients: &[Client], file: &FsPath) -> anyhow::Result<Outcome> {
    if context.json {
        return Err(UsageError("--svg writes a drawing, not JSON: use one of --svg and --json".into()).into());
    }
    let (scene, advice) = scene(context, clients)?;
    let devices = devices_in(&context.environment.path("sys"))?;
    let drawing = Drawing::new(&context.environment.path("sys"), &devices, &scene).svg();
    if file == FsPath::new("-") {
        write!(context.out, "{drawing}")?;
    } else {
        std::fs::write(file, drawing).with_context(|| format!("cannot write {}", file.display()))?;
    }
    if let Some(advice) = advice {
        context.hint(&advice);
    }
    Ok(Outcome::Done)
}

/// Returns what to draw, and a message for the user.
fn scene(context: &Context<'_>, clients: &[Client]) -> anyhow::Result<(Scene, Option<String>)> {
    let access = context.access()?;
    let (providers, holders) = match &access {
        Access::Module(device) => (device.providers()?, device.holders()),
        Access::Sysfs(_) => (Vec::new(), None),
    };
    let addrs: Vec<_> = providers.iter().map(|provider| provider.addr).collect();
    let known = matches!(access, Access::Module(_)).then_some(addrs.as_slice());
    let inventory = Inventory::read_in(&context.environment.root, known)?;
    let module = match (&access, inventory.module_loaded) {
        (Access::Module(_), _) => "loaded",
        (_, true) => "loaded, not accessible",
        (_, false) => "not loaded",
    };
    let iommu = if inventory.iommu { "active" } else { "none" };
    let mut notes = vec![format!(
        "Kernel {}, module p2pmem {module}, IOMMU {iommu}",
        inventory.kernel
    )];
    let mut memory_devices = inventory.memory_devices;
    memory_devices.retain(|memory_device| !addrs.contains(&memory_device.device.addr));
    let advice = match access {
        Access::Module(_) => {
            let held = holders.is_none() && providers.iter().any(|provider| provider.buffers > 0);
            held.then(|| "Run as root to see who holds the buffers.".to_owned())
        }
        Access::Sysfs(without) => {
            let memory = memory_devices.iter().map(|memory_device| memory_device.device.addr);
            let all: Vec<_> = memory.chain(clients.iter().map(Client::addr)).collect();
            let computed = without.computed(context.environment, &all);
            notes.push(computed.reason().to_owned());
            notes.extend(computed.caveats().iter().map(|caveat| format!("- {caveat}")));
            Some(Computed::advice(&computed))
        }
    };
    let scene = Scene {
        notes,
        providers,
        holders,
        memory_devices,
        clients: clients.to_vec(),
        transfers: Vec::new(),
    };
    Ok((scene, advice))
}

#[cfg(test)]
mod tests;
