// SPDX-License-Identifier: MIT OR Apache-2.0

//! A PCI function in sysfs, and mappings of its registers and memory, for drivers in user space.

mod sys;

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

pub use sys::{Mapping, OutOfBounds};

/// A function cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FunctionError {
    /// No PCI device has this address.
    #[error("no PCI device {0}")]
    NoDevice(String),
    /// The device is another one: its address and its PCI IDs.
    #[error("{0} is another device: {1}")]
    OtherDevice(String, String),
    /// Access to a file of sysfs failed.
    #[error("{}: {error}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system call.
        error: io::Error,
    },
    /// A size exceeds the address space.
    #[error("the size exceeds the address space")]
    TooLarge,
}

/// A PCI function.
#[derive(Debug)]
pub struct PciFunction {
    folder: PathBuf,
}

fn read_text(path: PathBuf) -> Result<String, FunctionError> {
    std::fs::read_to_string(&path)
        .map(|text| text.trim().to_owned())
        .map_err(|error| FunctionError::File { path, error })
}

impl PciFunction {
    /// Opens the function `bdf`, such as `0000:03:00.0`, in the folder of PCI devices, usually `/sys/bus/pci/devices`. Enables
    /// the device if no driver has enabled it. Requires root.
    ///
    /// # Errors
    ///
    /// No such device exists, it has other PCI IDs, or its files cannot be accessed.
    pub fn open(devices: &Path, bdf: &str, vendor: u16, device: u16) -> Result<Self, FunctionError> {
        let folder = devices.join(bdf);
        if bdf.is_empty() || bdf.contains('/') || !folder.is_dir() {
            return Err(FunctionError::NoDevice(bdf.to_owned()));
        }
        let ids = (read_text(folder.join("vendor"))?, read_text(folder.join("device"))?);
        if ids != (format!("{vendor:#06x}"), format!("{device:#06x}")) {
            let what = format!("PCI IDs {} {}", ids.0, ids.1);
            return Err(FunctionError::OtherDevice(bdf.to_owned(), what));
        }
        let enable = folder.join("enable");
        if read_text(enable.clone())? == "0" {
            let result = std::fs::write(&enable, "1");
            result.map_err(|error| FunctionError::File { path: enable, error })?;
        }
        Ok(Self { folder })
    }

    /// Returns the path of a file of the function.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Opens a file of the function for reading, and for writing if `write` is set.
    ///
    /// # Errors
    ///
    /// [`FunctionError::File`].
    pub fn file(&self, name: &str, write: bool) -> Result<File, FunctionError> {
        let path = self.path(name);
        let file = OpenOptions::new().read(true).write(write).open(&path);
        file.map_err(|error| FunctionError::File { path, error })
    }

    /// Maps the first `len` bytes of BAR `bar`. Returns the file too: its lock belongs to the program that takes it.
    ///
    /// # Errors
    ///
    /// [`FunctionError::File`], for instance if a driver has claimed the BAR; [`FunctionError::TooLarge`].
    pub fn map(&self, bar: u32, len: u64) -> Result<(File, Mapping), FunctionError> {
        let len = usize::try_from(len).map_err(|_| FunctionError::TooLarge)?;
        let name = format!("resource{bar}");
        let file = self.file(&name, true)?;
        match Mapping::file(&file, len) {
            Ok(mapping) => Ok((file, mapping)),
            Err(error) => Err(FunctionError::File {
                path: self.path(&name),
                error,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BDF: &str = "0000:01:00.0";

    fn devices(enable: &str) -> tempfile::TempDir {
        let devices = tempfile::tempdir().unwrap();
        let folder = devices.path().join(BDF);
        std::fs::create_dir(&folder).unwrap();
        for (name, text) in [("vendor", "0x1234\n"), ("device", "0xa2c1\n"), ("enable", enable)] {
            std::fs::write(folder.join(name), text).unwrap();
        }
        std::fs::write(folder.join("resource2"), [7; 8192]).unwrap();
        devices
    }

    #[test]
    fn a_function_is_enabled_and_mapped() {
        let devices = devices("0\n");
        let function = PciFunction::open(devices.path(), BDF, 0x1234, 0xa2c1).unwrap();
        assert_eq!(std::fs::read_to_string(function.path("enable")).unwrap(), "1");
        let (_file, map) = function.map(2, 8192).unwrap();
        map.store32(4, 0x1122_3344).unwrap();
        assert_eq!(map.load64(0).unwrap(), 0x1122_3344_0707_0707);
        for offset in [8192, 8186, 3, u64::MAX] {
            assert!(map.load32(offset).is_err(), "{offset}");
        }
    }

    #[test]
    fn other_devices_and_missing_files_are_errors() {
        let devices = devices("1\n");
        let open = |bdf, device| PciFunction::open(devices.path(), bdf, 0x1234, device);
        for bdf in ["0000:02:00.0", "", "../x"] {
            assert!(matches!(open(bdf, 0xa2c1), Err(FunctionError::NoDevice(_))), "{bdf}");
        }
        let error = open(BDF, 0xa2c2).unwrap_err().to_string();
        assert_eq!(error, "0000:01:00.0 is another device: PCI IDs 0x1234 0xa2c1");
        let error = open(BDF, 0xa2c1).unwrap().map(0, 4096).unwrap_err().to_string();
        assert!(error.contains("resource0"), "{error}");
    }
}
