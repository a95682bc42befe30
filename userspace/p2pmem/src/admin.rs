// SPDX-License-Identifier: MIT OR Apache-2.0

//! Administration: publishing and unpublishing devices' memory, by sysfs and configfs.
//!
//! Publishing has four steps: set the device's `driver_override` to `p2pmem`, let the PCI core bind the device, create
//! a configfs group for it, and write the settings and `enable` there. If a step fails, the earlier steps are undone.
//!
//! ```no_run
//! use p2pmem::admin::{Admin, Publish, Unpublish};
//!
//! let admin = Admin::new();
//! let publish = Publish { bar: Some(2), ..Publish::new("0000:03:00.0".parse()?) };
//! admin.publish(&publish)?;
//! // ... and when the memory is not needed any more:
//! admin.unpublish(&Unpublish::new("0000:03:00.0".parse()?))?;
//! # Ok::<(), p2pmem::Error>(())
//! ```

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::addr::PciAddr;
use crate::error::{Error, Result};
use crate::pci::{driver_of, folder_of};

/// Name of the module's PCI driver.
const DRIVER: &str = "p2pmem";

/// Whether a provider's memory has struct pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Mode {
    /// With struct pages: mappings and O_DIRECT work.
    #[default]
    Paged,
    /// Without struct pages: a BAR of any size needs no host memory. Mappings and importers of dma-bufs work, O_DIRECT
    /// does not.
    Pageless,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Self::Paged => "paged",
            Self::Pageless => "pageless",
        }
    }
}

/// Parameters of [`Admin::publish`].
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Publish {
    /// The device.
    pub addr: PciAddr,
    /// The BAR; `None`: the largest 64-bit prefetchable one, which the module chooses.
    pub bar: Option<u32>,
    /// Offset of the first byte in the BAR; `None`: 0.
    pub offset: Option<u64>,
    /// Size in bytes; `None`: up to the end of the BAR.
    pub size: Option<u64>,
    /// Whether the memory has struct pages; `None`: the module's default.
    pub mode: Option<Mode>,
    /// Bytes that stay in the kernel's pool for other drivers, such as nvmet; `None`: the module's default.
    pub kernel_reserve: Option<u64>,
    /// Whether buffers may be exported to importers that cannot be revoked, which can delay unbinding of the device;
    /// `None`: unchanged, initially not allowed.
    pub pinned_exports: Option<bool>,
    /// Group whose members may attach the device's function to dma-bufs, such as the doorbell page of a NIC; `None`:
    /// unchanged, initially nobody but processes with CAP_SYS_ADMIN.
    pub attach_gid: Option<u32>,
    /// Unbind the device from its current driver.
    pub rebind: bool,
}

impl Publish {
    /// Publishes the whole default BAR of a device that has no driver.
    pub fn new(addr: PciAddr) -> Self {
        Self {
            addr,
            bar: None,
            offset: None,
            size: None,
            mode: None,
            kernel_reserve: None,
            pinned_exports: None,
            attach_gid: None,
            rebind: false,
        }
    }
}

/// Parameters of [`Admin::unpublish`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Unpublish {
    addr: PciAddr,
    reprobe: bool,
}

impl Unpublish {
    /// Unpublishes the memory of the device, which has no driver afterwards.
    pub fn new(addr: PciAddr) -> Self {
        Self { addr, reprobe: false }
    }

    /// Sets whether the PCI core then binds the device to its own driver.
    pub fn reprobe(mut self, reprobe: bool) -> Self {
        self.reprobe = reprobe;
        self
    }
}

/// A published device as configfs shows it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Published {
    /// The device.
    pub addr: PciAddr,
    /// Whether the device is enabled.
    pub enabled: bool,
    /// The module's message about the device, such as the reason of the last refusal.
    pub status: String,
}

/// Operations on files: those of the kernel, or of a test that behaves like the kernel.
pub(crate) trait Tree: Send + Sync {
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;
    fn make_dir(&self, path: &Path) -> io::Result<()>;
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
}

pub(crate) struct RealTree;

impl Tree for RealTree {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        // An attribute needs its value in one write() call. The file is not created: a missing attribute is an error.
        let mut file = fs::OpenOptions::new().write(true).open(path)?;
        file.write_all(text.as_bytes())
    }

    fn make_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }
}

/// Sysfs and configfs of a machine.
pub struct Admin {
    sys: PathBuf,
    config: PathBuf,
    tree: Box<dyn Tree>,
}

impl std::fmt::Debug for Admin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admin")
            .field("sys", &self.sys)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Default for Admin {
    fn default() -> Self {
        Self::new()
    }
}

impl Admin {
    /// This machine, with sysfs at `/sys` and configfs at `/sys/kernel/config`.
    pub fn new() -> Self {
        Self::with_roots("/sys", "/sys/kernel/config")
    }

    /// A machine with sysfs at `sys` and configfs at `config`.
    pub fn with_roots(sys: impl Into<PathBuf>, config: impl Into<PathBuf>) -> Self {
        Self {
            sys: sys.into(),
            config: config.into(),
            tree: Box::new(RealTree),
        }
    }

    fn device(&self, addr: PciAddr) -> PathBuf {
        folder_of(&self.sys, addr)
    }

    fn groups(&self) -> PathBuf {
        self.config.join("p2pmem/providers")
    }

    fn group(&self, addr: PciAddr) -> PathBuf {
        self.groups().join(addr.to_string())
    }

    fn write(&self, path: PathBuf, text: &str) -> Result<()> {
        self.tree.write(&path, text).map_err(|error| {
            // Only groups in configfs have an attribute "status".
            let status = path
                .parent()
                .filter(|_| path.starts_with(&self.config))
                .and_then(read_status);
            let shown = text.trim_end();
            let action = if shown.is_empty() {
                "clear".into()
            } else {
                format!("write \"{shown}\" to")
            };
            Error::Admin {
                action,
                path,
                error,
                status,
            }
        })
    }

    /// Publishes a device's memory, and returns the state in configfs.
    ///
    /// # Errors
    ///
    /// [`Error::Bound`] if another driver has the device and [`Publish::rebind`] is false; [`Error::Exists`] if the
    /// device is published already; [`Error::Missing`] if the device does not exist; [`Error::State`] if the PCI core
    /// did not bind the device to p2pmem; [`Error::Admin`] if a file cannot be written: EACCES (not root), ENOENT (the
    /// module is not loaded, or configfs is not mounted), or the errno of the module's refusal, with its message. After
    /// an error, all steps are undone.
    pub fn publish(&self, publish: &Publish) -> Result<Published> {
        let addr = publish.addr;
        let device = self.device(addr);
        if !device.exists() {
            return Err(Error::Missing(format!("there is no PCI device {addr}")));
        }
        if !self.groups().exists() {
            let error = io::Error::from_raw_os_error(libc::ENOENT);
            return Err(Error::Admin {
                action: "open".into(),
                path: self.groups(),
                error,
                status: None,
            });
        }
        if self.group(addr).exists() && self.is_enabled(addr) {
            return Err(Error::Exists(format!("{addr} is published already")));
        }
        let driver = driver_of(&device);
        if let Some(driver) = driver.as_deref().filter(|d| *d != DRIVER && !publish.rebind) {
            return Err(Error::Bound {
                addr,
                driver: driver.to_owned(),
            });
        }

        let mut undo = Undo {
            admin: self,
            steps: Vec::new(),
        };
        self.bind(addr, driver.as_deref(), &mut undo)?;
        self.configure(publish, &mut undo)?;
        undo.steps.clear();
        self.published_one(addr)
    }

    fn bind(&self, addr: PciAddr, driver: Option<&str>, undo: &mut Undo<'_>) -> Result<()> {
        if driver == Some(DRIVER) {
            return Ok(());
        }
        let device = self.device(addr);
        // Undo runs in reverse order. Probing is the last step of undo: the PCI core then binds the device to its
        // former driver.
        undo.steps.push(Step::Probe(addr));
        self.write(device.join("driver_override"), DRIVER)?;
        undo.steps.push(Step::ClearOverride(addr));
        if driver.is_some() {
            self.write(device.join("driver/unbind"), &addr.to_string())?;
        } else {
            undo.steps.remove(0); // the device had no driver before
        }
        self.write(self.sys.join("bus/pci/drivers_probe"), &addr.to_string())?;
        match driver_of(&device).as_deref() {
            Some(DRIVER) => undo.steps.push(Step::Unbind(addr)),
            Some(other) => {
                return Err(Error::State(format!(
                    "{addr} was bound to the driver {other} at the same time"
                )))
            }
            None => {
                return Err(Error::State(format!(
                    "the p2pmem driver did not bind {addr}: check that the module is loaded, and see dmesg"
                )))
            }
        }
        Ok(())
    }

    fn configure(&self, publish: &Publish, undo: &mut Undo<'_>) -> Result<()> {
        let group = self.group(publish.addr);
        if !group.exists() {
            self.tree.make_dir(&group).map_err(|error| Error::Admin {
                action: "make".into(),
                path: group.clone(),
                error,
                status: None,
            })?;
            undo.steps.push(Step::RemoveGroup(publish.addr));
        }
        let settings = [
            ("bar", publish.bar.map(|v| v.to_string())),
            ("offset", publish.offset.map(|v| v.to_string())),
            ("size", publish.size.map(|v| v.to_string())),
            ("mode", publish.mode.map(|v| v.name().to_owned())),
            ("kernel_reserve", publish.kernel_reserve.map(|v| v.to_string())),
            (
                "pinned_exports",
                publish.pinned_exports.map(|v| u32::from(v).to_string()),
            ),
            ("attach_gid", publish.attach_gid.map(|v| v.to_string())),
            ("enable", Some("1".to_owned())),
        ];
        for (name, value) in settings {
            if let Some(value) = value {
                self.write(group.join(name), &value)?;
            }
        }
        Ok(())
    }

    /// Unpublishes a device's memory: buffers are revoked, and the device is unbound.
    ///
    /// Waits without a limit until nobody uses the memory. The kernel log and [`Published::status`] name the users that
    /// are waited for.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if the device is not published; [`Error::Admin`] if a file cannot be written, with EACCES if
    /// the caller is not root.
    pub fn unpublish(&self, unpublish: &Unpublish) -> Result<()> {
        let addr = unpublish.addr;
        let group = self.group(addr);
        let device = self.device(addr);
        let bound = driver_of(&device).as_deref() == Some(DRIVER);
        if !group.exists() && !bound {
            return Err(Error::Missing(format!("{addr} is not published by p2pmem")));
        }
        if group.exists() {
            if self.is_enabled(addr) {
                self.disable(&group)?;
            }
            self.step(Step::RemoveGroup(addr))?;
        }
        if bound {
            self.step(Step::Unbind(addr))?;
        }
        // The device may have been removed (surprise removal).
        if device.exists() {
            self.step(Step::ClearOverride(addr))?;
            if unpublish.reprobe {
                self.step(Step::Probe(addr))?;
            }
        }
        Ok(())
    }

    /// Disables a provider and waits for the end of its removal. Each write waits at most a second in the module, and
    /// then fails with EBUSY.
    fn disable(&self, group: &Path) -> Result<()> {
        loop {
            match self.write(group.join("enable"), "0") {
                Err(Error::Admin { error, .. }) if error.raw_os_error() == Some(libc::EBUSY) => {}
                done => return done,
            }
        }
    }

    /// Returns the devices that have a group in configfs, enabled or not, ordered by address.
    ///
    /// # Errors
    ///
    /// [`Error::Admin`] with ENOENT if configfs has no group of the module.
    pub fn published(&self) -> Result<Vec<Published>> {
        let path = self.groups();
        let failed = |error| Error::Admin {
            action: "list".into(),
            path: path.clone(),
            error,
            status: None,
        };
        let mut all = Vec::new();
        for entry in fs::read_dir(&path).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            if let Some(addr) = name.to_str().and_then(|n| n.parse().ok()) {
                all.push(self.published_one(addr)?);
            }
        }
        all.sort_by_key(|p| p.addr);
        Ok(all)
    }

    fn is_enabled(&self, addr: PciAddr) -> bool {
        fs::read_to_string(self.group(addr).join("enable")).is_ok_and(|t| t.trim() == "1")
    }

    fn published_one(&self, addr: PciAddr) -> Result<Published> {
        let status = read_status(&self.group(addr)).unwrap_or_default();
        Ok(Published {
            addr,
            enabled: self.is_enabled(addr),
            status,
        })
    }

    fn step(&self, step: Step) -> Result<()> {
        match step {
            Step::Probe(addr) => self.write(self.sys.join("bus/pci/drivers_probe"), &addr.to_string()),
            // An empty line clears driver_override.
            Step::ClearOverride(addr) => self.write(self.device(addr).join("driver_override"), "\n"),
            Step::Unbind(addr) => self.write(
                self.sys.join("bus/pci/drivers").join(DRIVER).join("unbind"),
                &addr.to_string(),
            ),
            Step::RemoveGroup(addr) => {
                let path = self.group(addr);
                self.tree.remove_dir(&path).map_err(|error| {
                    let status = read_status(&path);
                    Error::Admin {
                        action: "remove".into(),
                        path,
                        error,
                        status,
                    }
                })
            }
        }
    }
}

/// A step of undo.
#[derive(Clone, Copy)]
enum Step {
    Probe(PciAddr),
    ClearOverride(PciAddr),
    Unbind(PciAddr),
    RemoveGroup(PciAddr),
}

/// Undoes the steps in reverse order when dropped, unless `steps` was cleared.
struct Undo<'a> {
    admin: &'a Admin,
    steps: Vec<Step>,
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        for step in self.steps.drain(..).rev() {
            // An error while undoing is ignored: the caller gets the first error.
            let _ = self.admin.step(step);
        }
    }
}

/// Returns the message in a group's attribute `status`, if any.
pub(crate) fn read_status(group: &Path) -> Option<String> {
    let text = fs::read_to_string(group.join("status")).ok()?;
    Some(text.trim().to_owned()).filter(|t| !t.is_empty())
}

#[cfg(test)]
mod tests;
