// SPDX-License-Identifier: MIT OR Apache-2.0

//! Opens a device: the module, or another backend.

use std::path::PathBuf;

use crate::addr::PciAddr;
use crate::backend::{Backend, Capability};
use crate::device::{Device, DEFAULT_PATH};
use crate::error::{Error, Result};
use crate::standalone;

/// Options of opening a device: the backend, and the capabilities that the backend must have.
///
/// ```no_run
/// use p2pmem::{Backend, Capability, DeviceOptions};
///
/// // The first backend that has memory which can be registered with a NIC.
/// let device = DeviceOptions::new().needs(Capability::DmaBuf).open()?;
/// // BAR 0 of a device by vfio-pci, although the device has a larger BAR for memory.
/// let registers = DeviceOptions::new().bar("0000:03:00.0".parse()?, 0).open()?;
/// assert_eq!(registers.backend(), Backend::Vfio);
/// # let _ = device;
/// # Ok::<(), p2pmem::Error>(())
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct DeviceOptions {
    backend: Option<Backend>,
    needs: Vec<Capability>,
    bars: Vec<(PciAddr, u8)>,
    path: PathBuf,
    root: PathBuf,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl DeviceOptions {
    /// Options for the first backend of [`Backend::OF_DEVICES`] that has memory on this machine.
    pub fn new() -> Self {
        Self {
            backend: None,
            needs: Vec::new(),
            bars: Vec::new(),
            path: DEFAULT_PATH.into(),
            root: "/".into(),
        }
    }

    /// Uses this backend and no other.
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = Some(backend);
        self
    }

    /// Uses a backend only if the backend has a capability.
    pub fn needs(mut self, capability: Capability) -> Self {
        self.needs.push(capability);
        self
    }

    /// Uses this BAR of a device by vfio-pci, instead of the largest BAR for memory. Selects [`Backend::Vfio`]. Writes
    /// to a BAR with registers can make the device or the machine fail.
    pub fn bar(mut self, device: PciAddr, bar: u8) -> Self {
        self.bars.push((device, bar));
        self.backend(Backend::Vfio)
    }

    /// Sets the machine's file system for tests: `root` has the folders `sys`, `proc` and `dev`.
    #[cfg(test)]
    pub(crate) fn of_machine(mut self, root: &std::path::Path) -> Self {
        root.clone_into(&mut self.root);
        self.path = root.join("dev/p2pmem");
        self
    }

    /// Opens the device.
    ///
    /// # Errors
    ///
    /// Those of [`Device::open`]; [`Error::NotSupported`] if the selected backend does not have a needed capability;
    /// [`Error::Unavailable`] or [`Error::Open`] if the selected backend has no memory that the program can use;
    /// [`Error::Client`] or [`Error::Request`] if a selected BAR does not exist.
    pub fn open(&self) -> Result<Device> {
        if let Some(backend) = self.backend {
            return self.open_backend(backend);
        }
        let [module, others @ ..] = Backend::OF_DEVICES;
        let module = match self.open_backend(module) {
            // If the module is loaded, its rules apply. Another backend would bypass the rules.
            Err(error @ Error::Open { .. })
                if matches!(error.errno(), Some(libc::ENOENT | libc::ENXIO | libc::ENODEV)) =>
            {
                error
            }
            result => return result,
        };
        let mut errors = Vec::new();
        for backend in others {
            match self.open_backend(backend) {
                Ok(device) => return Ok(device),
                Err(error) => errors.push(error),
            }
        }
        Err(Error::NoBackend {
            module: Box::new(module),
            others: errors,
        })
    }

    fn open_backend(&self, backend: Backend) -> Result<Device> {
        if backend != Backend::Vfio && !self.bars.is_empty() {
            return Err(Error::Request(format!(
                "a BAR with the backend {backend}: only the backend vfio opens BARs that the program selects"
            )));
        }
        if let Some(capability) = self.needs.iter().find(|needed| !backend.supports(**needed)) {
            return Err(Error::NotSupported {
                backend,
                capability: *capability,
            });
        }
        match backend {
            Backend::Module => Device::open_path(&self.path),
            _ => standalone::open(&self.root, backend, &self.bars).map(Device::with),
        }
    }
}

impl Device {
    /// Opens `/dev/p2pmem`. If the module is not loaded, opens the next backend that has memory on this machine: memory
    /// that a driver published ([`Backend::Sysfs`]), then BARs of devices that are bound to vfio-pci
    /// ([`Backend::Vfio`]). [`Device::backend`] returns the backend. [`DeviceOptions`] selects a backend, by name or by
    /// capability.
    ///
    /// An operation that the backend does not support fails with [`Error::NotSupported`].
    ///
    /// # Errors
    ///
    /// [`Error::NoBackend`] if the module is not loaded and no other backend has memory; [`Error::Open`] with EACCES if
    /// the caller may not open the module's device; [`Error::Abi`] if module and library have no version of the ABI in
    /// common.
    pub fn open() -> Result<Self> {
        DeviceOptions::new().open()
    }

    /// Opens a backend.
    ///
    /// # Errors
    ///
    /// Those of [`DeviceOptions::open`].
    pub fn open_backend(backend: Backend) -> Result<Self> {
        DeviceOptions::new().backend(backend).open()
    }
}

#[cfg(test)]
mod tests;
