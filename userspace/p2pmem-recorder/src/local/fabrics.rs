// SPDX-License-Identifier: MIT OR Apache-2.0

//! Drives that the kernel attached by NVMe over Fabrics, as sysfs has them.

use std::fmt;
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure, Context, Result};
use p2pmem::Client;
use serde::Serialize;

use super::route::interface_to;

/// A controller of the kernel: a connection to a subsystem of another machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Controller {
    /// The name, such as `nvme2`.
    pub name: String,
    /// The address of the machine that has the drive.
    pub address: String,
    /// The port of the address.
    pub port: String,
    /// The address of this machine that was requested for the connection.
    pub from: Option<String>,
}

/// A drive of another machine, which RDMA accesses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FabricsDrive {
    /// The folder where it is mounted.
    pub folder: PathBuf,
    /// The block device, such as `nvme2n1`.
    pub device: String,
    /// The name of the subsystem that exports it.
    pub subsystem: String,
    /// The controllers. With multipath, the drive has several.
    pub controllers: Vec<Controller>,
}

impl FabricsDrive {
    /// Finds the drive that is mounted at `folder`.
    ///
    /// # Errors
    ///
    /// The file system is not directly on an NVMe drive or a partition of one, or the drive is not attached by RDMA.
    pub fn find(folder: &Path) -> Result<Self> {
        let metadata = fs::metadata(folder).with_context(|| format!("reading {}", folder.display()))?;
        Self::find_in(Path::new("/sys"), folder, metadata.dev())
    }

    /// As [`find`](Self::find), with the number of the block device, and sysfs at `sys`.
    fn find_in(sys: &Path, folder: &Path, device: u64) -> Result<Self> {
        let found = Self::inspect(sys, folder, device);
        found.with_context(|| format!("{} cannot be used by --engine nvmeof", folder.display()))
    }

    fn inspect(sys: &Path, folder: &Path, device: u64) -> Result<Self> {
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let block = sys.join(format!("dev/block/{major}:{minor}")).canonicalize();
        let block = block.with_context(|| {
            format!("its file system is on no block device ({major}:{minor}); is the drive mounted there?")
        })?;
        let disk = match block.join("partition").exists() {
            true => block.parent().unwrap_or(&block),
            false => &block,
        };
        let name = name_of(&block);
        ensure!(
            !disk.join("dm").exists(),
            "{name} is a device of device mapper (LVM, dm-crypt), which does not accept device memory; \
             make the file system on the NVMe drive or on a partition of it"
        );
        let controllers = controllers_of(disk);
        ensure!(
            !controllers.is_empty(),
            "{name} is no NVMe drive; attach a drive with `nvme connect --transport rdma`, and make the file system on it or on a \
             partition of it"
        );
        for controller in &controllers {
            let transport = attribute(controller, "transport")?;
            if transport != "rdma" {
                let what = match transport.as_str() {
                    "pcie" => "a drive of this machine",
                    _ => "not attached by RDMA",
                };
                bail!(
                    "{name} is {what} (controller {}, transport {transport}); attach it with `nvme connect --transport rdma`, or \
                     record by a storage node (--engine rdma)",
                    name_of(controller)
                );
            }
        }
        let subsystem = attribute(&controllers[0], "subsysnqn")?;
        Ok(Self {
            folder: folder.to_owned(),
            device: name,
            subsystem,
            controllers: controllers
                .iter()
                .map(|folder| Controller::read(folder))
                .collect::<Result<_>>()?,
        })
    }
}

impl fmt::Display for FabricsDrive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "drive {} ({} of {}",
            self.folder.display(),
            self.device,
            self.subsystem
        )?;
        for (number, controller) in self.controllers.iter().enumerate() {
            let word = if number == 0 { " at" } else { " and" };
            write!(f, "{word} {controller}")?;
        }
        f.write_str(")")
    }
}

impl fmt::Display for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} port {}, controller {}", self.address, self.port, self.name)
    }
}

impl Controller {
    /// Reads a controller's folder in sysfs.
    fn read(folder: &Path) -> Result<Self> {
        let text = attribute(folder, "address")?;
        let field = |wanted: &str| {
            let fields = text.split(',').filter_map(|field| field.split_once('='));
            let found = fields.into_iter().find(|(name, _)| *name == wanted);
            found.map(|(_, value)| value.to_owned())
        };
        let missing = || format!("controller {} has the address {text:?}", name_of(folder));
        Ok(Self {
            name: name_of(folder),
            address: field("traddr").with_context(missing)?,
            port: field("trsvcid").with_context(missing)?,
            from: field("host_traddr"),
        })
    }

    /// Returns the NIC of the connection: that of the route to the requested address of this machine, or to the other machine.
    ///
    /// # Errors
    ///
    /// There is no such route, or its interface is on no PCI function.
    pub fn nic(&self) -> Result<Client> {
        self.nic_in(Path::new("/sys"), Path::new("/proc"))
    }

    fn nic_in(&self, sys: &Path, proc: &Path) -> Result<Client> {
        let unknown = || {
            format!(
                "cannot find the NIC by which {} is attached; name the provider of the memory (--provider)",
                self.name
            )
        };
        let address = self.from.as_ref().unwrap_or(&self.address);
        let address: IpAddr = address.parse().with_context(unknown)?;
        let interface = interface_to(proc, address);
        let interface = interface
            .with_context(|| format!("there is no route to {address}"))
            .with_context(unknown)?;
        Client::resolve_in(sys, &interface).with_context(unknown)
    }
}

/// Returns the last part of a path.
fn name_of(folder: &Path) -> String {
    folder
        .file_name()
        .map_or_else(|| "?".into(), |name| name.to_string_lossy().into_owned())
}

/// Reads an attribute of sysfs.
fn attribute(folder: &Path, name: &str) -> Result<String> {
    let path = folder.join(name);
    let text =
        fs::read_to_string(&path).with_context(|| format!("reading {}; is the drive attached?", path.display()))?;
    Ok(text.trim().to_owned())
}

/// Returns the folders of the controllers of a drive. The drive is below its controller or, with multipath, below its
/// subsystem, which has links to its controllers.
fn controllers_of(disk: &Path) -> Vec<PathBuf> {
    let Ok(device) = disk.join("device").canonicalize() else {
        return Vec::new();
    };
    if device.join("transport").exists() {
        return vec![device];
    }
    let is_controller = |folder: &PathBuf| {
        let name = name_of(folder);
        let number = name.strip_prefix("nvme").unwrap_or_default();
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) && folder.join("transport").exists()
    };
    let entries = fs::read_dir(&device).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_controller).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A sysfs with drives of all kinds.
    struct Sys(tempfile::TempDir);

    impl Sys {
        fn new() -> Self {
            let sys = Self(tempfile::tempdir().unwrap());
            let pcie = sys.controller("devices/pci0000:00/0000:00:01.0/nvme/nvme0", "pcie", "0000:00:01.0");
            sys.block("259:0", &pcie.join("nvme0n1"), &pcie);
            let remote = "traddr=10.78.0.2,trsvcid=4420";
            let single = sys.controller("devices/virtual/nvme-fabrics/ctl/nvme1", "rdma", remote);
            let disk = sys.block("259:1", &single.join("nvme1n1"), &single);
            sys.block("259:2", &disk.join("nvme1n1p1"), &single);
            fs::write(disk.join("nvme1n1p1/partition"), "1\n").unwrap();
            let remote = "traddr=10.78.1.2,trsvcid=4421,host_traddr=10.78.1.1";
            let third = sys.controller("devices/virtual/nvme-fabrics/ctl/nvme3", "rdma", remote);
            sys.multipath("nvme-subsys2", "nvme2n1", "259:3", &[&single, &third]);
            let tcp = sys.controller(
                "devices/virtual/nvme-fabrics/ctl/nvme4",
                "tcp",
                "traddr=10.0.0.1,trsvcid=4420",
            );
            sys.multipath("nvme-subsys4", "nvme4n1", "259:4", &[&single, &tcp]);
            let virtual_device = sys.path("devices/virtual/block");
            let mapped = sys.block("253:0", &virtual_device.join("dm-0"), &virtual_device);
            fs::create_dir_all(mapped.join("dm")).unwrap();
            sys.block("7:0", &virtual_device.join("loop0"), &virtual_device);
            sys
        }

        fn path(&self, path: &str) -> PathBuf {
            let path = self.0.path().canonicalize().unwrap().join(path);
            fs::create_dir_all(&path).unwrap();
            path
        }

        fn controller(&self, path: &str, transport: &str, address: &str) -> PathBuf {
            let folder = self.path(path);
            for (name, value) in [
                ("transport", transport),
                ("address", address),
                ("subsysnqn", "nqn.2026-01.example:drive"),
            ] {
                fs::write(folder.join(name), format!("{value}\n")).unwrap();
            }
            folder
        }

        fn block(&self, number: &str, folder: &Path, device: &Path) -> PathBuf {
            fs::create_dir_all(folder).unwrap();
            symlink(device, folder.join("device")).unwrap();
            symlink(folder, self.path("dev/block").join(number)).unwrap();
            folder.to_owned()
        }

        fn multipath(&self, subsystem: &str, disk: &str, number: &str, controllers: &[&Path]) {
            let folder = self.path(&format!("devices/virtual/nvme-subsystem/{subsystem}"));
            for controller in controllers {
                symlink(controller, folder.join(controller.file_name().unwrap())).unwrap();
            }
            self.block(number, &folder.join(disk), &folder);
        }

        fn find(&self, major: u32, minor: u32) -> Result<FabricsDrive> {
            FabricsDrive::find_in(self.0.path(), Path::new("/mnt/a"), rustix::fs::makedev(major, minor))
        }

        fn refused(&self, major: u32, minor: u32) -> String {
            format!("{:#}", self.find(major, minor).unwrap_err())
        }
    }

    #[test]
    fn drives_by_rdma_are_found_with_their_machines() {
        let sys = Sys::new();
        let drive = sys.find(259, 1).unwrap();
        assert_eq!(
            drive.to_string(),
            "drive /mnt/a (nvme1n1 of nqn.2026-01.example:drive at 10.78.0.2 port 4420, controller nvme1)"
        );
        let partition = sys.find(259, 2).unwrap();
        assert_eq!(
            (partition.device.as_str(), &partition.controllers),
            ("nvme1n1p1", &drive.controllers)
        );
        let paths = sys.find(259, 3).unwrap();
        assert_eq!(
            paths.to_string(),
            "drive /mnt/a (nvme2n1 of nqn.2026-01.example:drive at 10.78.0.2 port 4420, controller nvme1 and 10.78.1.2 port \
             4421, controller nvme3)"
        );
    }

    #[test]
    fn other_drives_are_refused_with_the_reason() {
        let sys = Sys::new();
        for (major, minor, reason) in [
            (
                259,
                0,
                "nvme0n1 is a drive of this machine (controller nvme0, transport pcie)",
            ),
            (
                259,
                4,
                "nvme4n1 is not attached by RDMA (controller nvme4, transport tcp)",
            ),
            (
                253,
                0,
                "device mapper (LVM, dm-crypt), which does not accept device memory",
            ),
            (7, 0, "loop0 is no NVMe drive"),
            (0, 40, "its file system is on no block device (0:40)"),
        ] {
            let error = sys.refused(major, minor);
            assert!(
                error.starts_with("/mnt/a cannot be used by --engine nvmeof: "),
                "{error}"
            );
            assert!(error.contains(reason), "{error}");
        }
        fs::write(sys.path("devices/virtual/nvme-fabrics/ctl/nvme1").join("address"), "\n").unwrap();
        let error = sys.refused(259, 1);
        assert!(error.contains("controller nvme1 has the address"), "{error}");
        let error = FabricsDrive::find(Path::new("/does/not/exist")).unwrap_err();
        assert!(format!("{error:#}").starts_with("reading /does/not/exist: "));
    }

    #[test]
    fn the_nic_is_that_of_the_route() {
        let sys = Sys::new();
        let proc = tempfile::tempdir().unwrap();
        for (interface, function) in [("ib0", "0000:00:02.0"), ("ib1", "0000:00:03.0")] {
            let folder = sys.path(&format!("devices/pci0000:00/{function}/net/{interface}"));
            fs::write(folder.join("../../vendor"), "0x15b3\n").unwrap();
            symlink(&folder, sys.path("class/net").join(interface)).unwrap();
        }
        fs::create_dir(proc.path().join("net")).unwrap();
        let mask = u32::from_ne_bytes([255, 255, 255, 0]);
        let route = |interface: &str, network: [u8; 4]| {
            let network = u32::from_ne_bytes(network);
            format!("{interface} {network:08X} 00000000 0001 0 0 0 {mask:08X} 0 0 0\n")
        };
        let routes = route("ib0", [10, 78, 0, 0]) + &route("ib1", [10, 78, 1, 0]) + &route("ib7", [10, 78, 7, 0]);
        fs::write(proc.path().join("net/route"), routes).unwrap();
        let nic = |controller: &Controller| controller.nic_in(sys.0.path(), proc.path());
        let controllers = sys.find(259, 3).unwrap().controllers;
        assert_eq!(nic(&controllers[0]).unwrap().addr().to_string(), "0000:00:02.0");
        assert_eq!(nic(&controllers[1]).unwrap().addr().to_string(), "0000:00:03.0");
        for (from, reason) in [
            ("10.79.0.2", "there is no route to 10.79.0.2"),
            ("fc:00", "invalid IP address"),
            ("10.78.7.2", "no such device"),
        ] {
            let from = Some(from.to_owned());
            let controller = Controller {
                from,
                ..controllers[0].clone()
            };
            let error = format!("{:#}", nic(&controller).unwrap_err());
            assert!(error.contains("--provider") && error.contains(reason), "{error}");
        }
    }
}
