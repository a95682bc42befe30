// SPDX-License-Identifier: MIT OR Apache-2.0

//! The drawing of a machine: host bridges, switches, devices with memory, and clients, as an SVG document.
//!
//! A [`Scene`] says what is drawn, [`tree`] has its parts, and [`layout`] the places of the parts.
//!
//! ```no_run
//! use p2pmem_drawing::{Drawing, Scene};
//!
//! let sys = std::path::Path::new("/sys");
//! let devices = p2pmem::devices_in(sys)?;
//! let scene = Scene {
//!     clients: devices.iter().filter(|device| device.is_likely_client()).map(|device| device.client()).collect(),
//!     ..Scene::default()
//! };
//! println!("{}", Drawing::new(sys, &devices, &scene).svg());
//! # Ok::<(), p2pmem::Error>(())
//! ```

mod document;
pub mod layout;
pub mod tree;

#[cfg(test)]
mod tests;

use std::path::Path;

use p2pmem::inventory::MemoryDevice;
use p2pmem::{Client, Holder, PciAddr, PciDevice, Provider};

/// What a drawing shows.
#[derive(Debug, Clone, Default)]
pub struct Scene {
    /// Lines below the title.
    pub notes: Vec<String>,
    /// The providers.
    pub providers: Vec<Provider>,
    /// The holders of the providers' buffers; none if this user may not list them.
    pub holders: Option<Vec<(PciAddr, Holder)>>,
    /// Devices with memory that are not providers.
    pub memory_devices: Vec<MemoryDevice>,
    /// Devices that use memory of other devices.
    pub clients: Vec<Client>,
    /// Transfers by memory that was chosen for them.
    pub transfers: Vec<Transfer>,
}

/// A transfer between devices: through memory of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// What stands at the lines of the transfer.
    pub number: u64,
    /// The name in the box of the chosen memory, such as `session 0`.
    pub name: String,
    /// What the legend says about the transfer.
    pub about: String,
    /// The devices that write to the memory.
    pub sources: Vec<PciAddr>,
    /// The device with the memory.
    pub memory: PciAddr,
    /// The devices that read from the memory.
    pub targets: Vec<PciAddr>,
}

impl Transfer {
    /// Returns the pairs of devices between which data moves.
    pub(crate) fn hops(&self) -> impl Iterator<Item = (PciAddr, PciAddr)> + '_ {
        let into = self.sources.iter().map(|source| (*source, self.memory));
        into.chain(self.targets.iter().map(|target| (self.memory, *target)))
    }
}

/// A drawing.
#[derive(Debug)]
pub struct Drawing {
    /// The host bridges, with everything below them.
    pub roots: Vec<tree::Node>,
    /// The places of all parts.
    pub layout: layout::Layout,
}

impl Drawing {
    /// Draws a scene. `devices` are the functions of the machine whose sysfs is at `sys`, from [`p2pmem::devices_in`].
    pub fn new(sys: &Path, devices: &[PciDevice], scene: &Scene) -> Self {
        let roots = tree::roots(sys, devices, scene);
        let layout = layout::layout(&roots, scene);
        Self { roots, layout }
    }

    /// Returns the SVG document.
    pub fn svg(&self) -> String {
        document::document(&self.layout)
    }
}
