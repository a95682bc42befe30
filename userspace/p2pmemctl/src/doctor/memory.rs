// SPDX-License-Identifier: MIT OR Apache-2.0

//! Checks of devices with memory: which ones could become providers, and what the drivers that own memory offer.

use p2pmem::human_size;
use p2pmem::inventory::{Availability, Backend, MemoryDevice, Source};

use super::{Check, Level};

fn source(memory_device: &MemoryDevice, backend: Backend) -> Option<&Source> {
    let usable = |source: &&Source| source.backend == backend && source.availability != Availability::Unavailable;
    memory_device.sources.iter().find(usable)
}

/// Lists the devices that would be providers, or could be published, if the module were loaded.
pub(super) fn publishable(memory_devices: &[MemoryDevice]) -> Check {
    const NAME: &str = "providers";
    let all: Vec<_> = memory_devices
        .iter()
        .filter(|memory_device| source(memory_device, Backend::Module).is_some())
        .map(|memory_device| {
            let size = memory_device.size();
            let size = size.map_or_else(String::new, |size| format!(" ({})", human_size(size)));
            format!("{}{size}", memory_device.device.addr)
        })
        .collect();
    if all.is_empty() {
        return Check::new(NAME, Level::Info, "no device has memory that the module could manage")
            .remedy("`p2pmemctl scan --all` shows the devices with memory and what each source of memory needs");
    }
    Check::new(
        NAME,
        Level::Info,
        format!("with the module, these devices could be providers: {}", all.join(", ")),
    )
    .remedy("`p2pmemctl scan` shows the command for each device")
}

/// Lists the interfaces of drivers that own their devices' memory, one line for each device.
pub(super) fn of_drivers(memory_devices: &[MemoryDevice]) -> Vec<Check> {
    let owned = memory_devices.iter().filter_map(|memory_device| {
        let source = source(memory_device, Backend::Driver)?;
        Some(Check::new(
            "driver-memory",
            Level::Info,
            format!("{}: {}", memory_device.device.addr, source.detail),
        ))
    });
    owned.collect()
}
