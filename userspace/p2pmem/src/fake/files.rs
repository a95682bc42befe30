// SPDX-License-Identifier: MIT OR Apache-2.0

//! Files as those of sysfs and of the module's configfs, for tests of programs that read them.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::rules::Rule;

/// Adds a PCI function to a sysfs at `sys`. `path` is the path of the function below `devices`, `files` are its attributes.
/// Returns the function's folder.
///
/// # Errors
///
/// Those of writing files.
pub fn write_pci_function(sys: &Path, path: &str, files: &[(&str, &str)]) -> io::Result<PathBuf> {
    let folder = sys.join("devices").join(path);
    fs::create_dir_all(&folder)?;
    for (attribute, value) in files {
        fs::write(folder.join(attribute), format!("{value}\n"))?;
    }
    let bus = sys.join("bus/pci/devices");
    fs::create_dir_all(&bus)?;
    symlink(&folder, bus.join(folder.file_name().unwrap_or_default()))?;
    Ok(folder)
}

/// Writes a rule below `configfs`, as the module shows an enabled rule without conditions and settings. `attributes` are
/// files of the rule with other contents.
///
/// # Errors
///
/// Those of writing files.
pub fn write_rule(configfs: &Path, name: &str, attributes: &[(&str, &str)]) -> io::Result<()> {
    let folder = configfs.join("p2pmem/rules").join(name);
    fs::create_dir_all(&folder)?;
    for (attribute, value) in Rule::new(name).attributes() {
        fs::write(folder.join(attribute), format!("{value}\n"))?;
    }
    let fixed = [("enable", "1"), ("status", "in force"), ("usage", "")];
    for (attribute, value) in fixed.iter().chain(attributes) {
        fs::write(folder.join(attribute), format!("{value}\n"))?;
    }
    Ok(())
}
