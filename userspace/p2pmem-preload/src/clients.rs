// SPDX-License-Identifier: MIT OR Apache-2.0

//! The devices in `P2PMEM_NEAR`: PCI addresses, and names that sysfs has.
//!
//! `p2pmemctl run` writes PCI addresses, and accepts more names (`Client::resolve()` of the library p2pmem). The shim does
//! not use this library, because the library may be built with functions of the names that the shim replaces.

use std::path::Path;

use p2pmem_sys::{p2pmem_pci_addr, P2PMEM_MAX_CLIENTS};

/// Device classes in which a name is looked up, in this order.
const CLASSES: [&str; 4] = ["infiniband", "nvme", "block", "net"];

/// Resolves names of devices, separated by commas, with sysfs at `sys`. An error is a message with the reason.
pub(crate) fn resolve(sys: &Path, text: &str) -> Result<Vec<p2pmem_pci_addr>, String> {
    let names: Vec<_> = text.split(',').collect();
    let most = P2PMEM_MAX_CLIENTS as usize;
    if names.len() > most {
        return Err(format!("{} devices, at most {most} are possible", names.len()));
    }
    names.into_iter().map(|name| resolve_one(sys, name)).collect()
}

fn resolve_one(sys: &Path, name: &str) -> Result<p2pmem_pci_addr, String> {
    if let Some(addr) = p2pmem_pci_addr::parse(name) {
        return Ok(addr);
    }
    if name.is_empty() || name.starts_with('.') || name.contains('/') {
        return Err(format!("{name:?} is not the name of a device"));
    }
    let class = |class| sys.join("class").join(class).join(name).canonicalize().ok();
    let Some(folder) = CLASSES.into_iter().find_map(class) else {
        return Err(format!("there is no device {name}"));
    };
    let function = |folder: &Path| p2pmem_pci_addr::parse(folder.file_name()?.to_str()?);
    folder.ancestors().find_map(function).ok_or_else(|| {
        let folder = folder.display();
        format!("{name} ({folder}) is not on a PCI device: use its controller's name or PCI address")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn addr(bus: u8, devfn: u8) -> p2pmem_pci_addr {
        p2pmem_pci_addr {
            bus,
            devfn,
            ..Default::default()
        }
    }

    #[test]
    fn addresses_are_parsed() {
        let none = Path::new("/nonexistent");
        assert_eq!(
            resolve(none, "0000:03:00.0,04:1f.7").unwrap(),
            [addr(3, 0), addr(4, 0xff)]
        );
        assert_eq!(resolve(none, "10000:e1:00.0").unwrap()[0].domain, 0x10000);
        for bad in ["3:00.0", "03:00", "03:20.0", "03:00.8", "0000:03:00.0 ", "000:03:00.0"] {
            assert!(p2pmem_pci_addr::parse(bad).is_none(), "{bad:?}");
            assert!(resolve(none, bad).is_err(), "{bad:?}");
        }
        assert!(resolve(none, "03:00.0,").unwrap_err().contains("\"\" is not the name"));
        let many = vec!["03:00.0"; 65].join(",");
        assert!(resolve(none, &many).unwrap_err().contains("at most 64"));
        assert_eq!(resolve(none, &many[..many.len() - 8]).unwrap().len(), 64);
    }

    #[test]
    fn names_are_found_in_sysfs() {
        let dir = tempfile::tempdir().unwrap();
        let sys = dir.path();
        let device = |path: &str, class: &str| {
            let (folder, classes) = (sys.join("devices").join(path), sys.join("class").join(class));
            fs::create_dir_all(&folder).unwrap();
            fs::create_dir_all(&classes).unwrap();
            symlink(&folder, classes.join(folder.file_name().unwrap())).unwrap();
        };
        device("pci0000:00/0000:00:01.0/0000:01:00.0/nvme/nvme0", "nvme");
        device("pci0000:00/0000:00:01.0/0000:01:00.0/nvme/nvme0/nvme0n1", "block");
        device("pci0000:00/0000:00:03.0/infiniband/mlx5_0", "infiniband");
        device("virtual/block/loop0", "block");
        assert_eq!(resolve(sys, "nvme0,mlx5_0").unwrap(), [addr(1, 0), addr(0, 0x18)]);
        assert_eq!(resolve(sys, "nvme0n1").unwrap(), [addr(1, 0)]);
        assert!(resolve(sys, "loop0").unwrap_err().contains("not on a PCI device"));
        assert_eq!(resolve(sys, "nvme7").unwrap_err(), "there is no device nvme7");
        assert!(resolve(sys, "../nvme0").unwrap_err().contains("not the name"));
    }
}
