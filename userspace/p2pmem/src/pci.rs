// SPDX-License-Identifier: MIT OR Apache-2.0

//! PCI functions and their names: addresses, RDMA devices, NVMe drives, directories in sysfs.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::addr::PciAddr;
use crate::error::{Error, Result};

impl FromStr for PciAddr {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text).ok_or_else(|| Error::Client {
            name: text.to_owned(),
            why: "a PCI address looks like 0000:03:00.0 or 03:00.0".into(),
        })
    }
}

/// A device that does DMA to or from a buffer.
///
/// ```no_run
/// use p2pmem::Client;
///
/// let drive = Client::resolve("nvme0")?;
/// let nic = Client::resolve("mlx5_0")?;
/// println!("{} is {}, {} is {}", drive.name(), drive.addr(), nic.name(), nic.addr());
/// # Ok::<(), p2pmem::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Client {
    addr: PciAddr,
    name: String,
}

/// Device classes in which a name is looked up, in this order.
const CLASSES: [&str; 6] = ["infiniband", "nvme", "block", "net", "accel", "drm"];

impl Client {
    /// A client with this address; the address is also its name.
    pub fn new(addr: PciAddr) -> Self {
        Self {
            addr,
            name: addr.to_string(),
        }
    }

    /// Finds the client `name` of this machine: a PCI address (`0000:03:00.0`, `03:00.0`), an RDMA device (`mlx5_0`),
    /// an NVMe controller, drive or partition (`nvme0`, `nvme0n1`, `/dev/nvme0n1`), a network interface, or a device's
    /// directory in `/sys`.
    ///
    /// # Errors
    ///
    /// [`Error::Client`], with the reason, if there is no such device, the device is on no PCI function, or the name is
    /// ambiguous because a drive has several controllers (multipath). Does not check that an address exists; the module
    /// does.
    pub fn resolve(name: &str) -> Result<Self> {
        Self::resolve_in(Path::new("/sys"), name)
    }

    /// As [`Client::resolve`], with sysfs at `sys`.
    ///
    /// # Errors
    ///
    /// Those of [`Client::resolve`].
    pub fn resolve_in(sys: &Path, name: &str) -> Result<Self> {
        if let Some(addr) = PciAddr::parse(name) {
            return Ok(Self::new(addr));
        }
        let fail = |why: String| Error::Client {
            name: name.to_owned(),
            why,
        };
        if name.is_empty() {
            return Err(fail("it is empty".into()));
        }
        if let Some(device) = name.strip_prefix("/dev/") {
            // Names such as /dev/disk/by-id/... are links to the name that sysfs has.
            let node = std::fs::canonicalize(name).ok();
            let node = node.as_ref().and_then(|n| n.file_name()).and_then(|n| n.to_str());
            let addr = Self::by_class_name(sys, node.unwrap_or(device)).map_err(fail)?;
            return Ok(Self {
                addr,
                name: device.to_owned(),
            });
        }
        if name.starts_with('/') {
            let path = Path::new(name);
            let real = path.canonicalize().map_err(|err| fail(format!("{err}")))?;
            let addr = pci_function_of(&real).ok_or_else(|| fail("no PCI function is on this path".into()))?;
            let name = path
                .file_name()
                .map_or_else(|| addr.to_string(), |n| n.to_string_lossy().into_owned());
            return Ok(Self { addr, name });
        }
        let addr = Self::by_class_name(sys, name).map_err(fail)?;
        Ok(Self {
            addr,
            name: name.to_owned(),
        })
    }

    fn by_class_name(sys: &Path, name: &str) -> std::result::Result<PciAddr, String> {
        if name.contains('/') || name == "." || name == ".." {
            return Err("it is not a device's name".into());
        }
        for class in CLASSES {
            let Ok(real) = sys.join("class").join(class).join(name).canonicalize() else {
                continue;
            };
            if let Some(addr) = pci_function_of(&real) {
                return Ok(addr);
            }
            // With multipath, an NVMe drive is below a virtual subsystem, which has links to its controllers.
            return match controllers_of(&real).as_slice() {
                [one] => Self::by_class_name(sys, one),
                [] => Err(format!("{} is on no PCI device", real.display())),
                several => Err(format!(
                    "it has several controllers, name one of them: {}",
                    several.join(", ")
                )),
            };
        }
        Err(format!(
            "there is no such device in {}/class/{{{}}}",
            sys.display(),
            CLASSES.join(",")
        ))
    }

    /// Returns the PCI function.
    pub fn addr(&self) -> PciAddr {
        self.addr
    }

    /// Returns the name that the program used for the client.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl From<PciAddr> for Client {
    fn from(addr: PciAddr) -> Self {
        Self::new(addr)
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

/// Returns the PCI function that is nearest to `path`, from `path` up to the root.
fn pci_function_of(path: &Path) -> Option<PciAddr> {
    path.ancestors().find_map(|folder| {
        let addr = PciAddr::parse(folder.file_name()?.to_str()?)?;
        folder.join("vendor").exists().then_some(addr)
    })
}

/// Returns the names of the NVMe controllers of the subsystem that has the drive or partition `real`.
fn controllers_of(real: &Path) -> Vec<String> {
    let subsystem = real.ancestors().find(|folder| {
        folder
            .file_name()
            .and_then(|n| n.to_str())
            .is_some_and(|n| n.starts_with("nvme-subsys") && n != "nvme-subsystem")
    });
    let entries = subsystem.and_then(|folder| folder.read_dir().ok());
    let names = entries
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok());
    let controller = |n: &String| {
        n.strip_prefix("nvme")
            .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    let mut names: Vec<String> = names.filter(controller).collect();
    names.sort();
    names
}

/// A PCI function as sysfs shows it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct PciDevice {
    /// Address.
    pub addr: PciAddr,
    /// PCI vendor id.
    pub vendor: u16,
    /// PCI device id.
    pub device: u16,
    /// Class code, 24 bits: base class, subclass, interface.
    pub class: u32,
    /// Name of the driver that the function is bound to, if any.
    pub driver: Option<String>,
    /// NUMA node, if it is known.
    pub numa_node: Option<i32>,
    /// Names from its drivers: `nvme0`, `mlx5_0`, `eth0`.
    pub names: Vec<String>,
}

impl PciDevice {
    /// Returns whether the device is of a class that does bulk DMA: storage, network and InfiniBand, 3D controllers,
    /// co-processors, and processing accelerators.
    pub fn is_likely_client(&self) -> bool {
        matches!(self.class >> 16, 0x01 | 0x02 | 0x12) || matches!(self.class >> 8, 0x0302 | 0x0b40)
    }

    /// Returns the function as a client, named by the first of [`PciDevice::names`], else by its address.
    pub fn client(&self) -> Client {
        Client {
            addr: self.addr,
            name: self.names.first().cloned().unwrap_or_else(|| self.addr.to_string()),
        }
    }
}

/// Returns all PCI functions that sysfs at `sys` shows, ordered by address.
///
/// # Errors
///
/// [`Error::Admin`] with ENOENT if `sys` has no PCI bus.
pub fn devices_in(sys: &Path) -> Result<Vec<PciDevice>> {
    // A device that is removed during the call is omitted.
    let all = addresses_in(sys)?;
    Ok(all.into_iter().filter_map(|addr| device_at(sys, addr)).collect())
}

/// Returns the addresses of all PCI functions, in order.
pub(crate) fn addresses_in(sys: &Path) -> Result<Vec<PciAddr>> {
    let path = sys.join("bus/pci/devices");
    let failed = |error| Error::Admin {
        action: "list".into(),
        path: path.clone(),
        error,
        status: None,
    };
    let mut all = Vec::new();
    for entry in path.read_dir().map_err(failed)? {
        all.extend(entry.map_err(failed)?.file_name().to_str().and_then(PciAddr::parse));
    }
    all.sort();
    Ok(all)
}

/// Returns the PCI function at an address; none if it does not exist.
pub(crate) fn device_at(sys: &Path, addr: PciAddr) -> Option<PciDevice> {
    let folder = folder_of(sys, addr);
    let numa = read_attribute(&folder.join("numa_node")).and_then(|text| text.parse().ok());
    Some(PciDevice {
        addr,
        vendor: hex_attribute(&folder, "vendor")? as u16,
        device: hex_attribute(&folder, "device")? as u16,
        class: hex_attribute(&folder, "class")?,
        driver: driver_of(&folder),
        numa_node: numa.filter(|n| *n >= 0),
        names: names_of(&folder),
    })
}

/// Returns the name of the driver that the device in `folder` is bound to.
pub(crate) fn driver_of(folder: &Path) -> Option<String> {
    let link: PathBuf = std::fs::read_link(folder.join("driver")).ok()?;
    Some(link.file_name()?.to_str()?.to_owned())
}

/// The folder of a PCI function in sysfs at `sys`.
pub(crate) fn folder_of(sys: &Path, addr: PciAddr) -> PathBuf {
    sys.join("bus/pci/devices").join(addr.to_string())
}

/// A file of sysfs, configfs or procfs, without surrounding white space.
pub(crate) fn read_attribute(path: &Path) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

/// A hexadecimal number, with or without `0x`.
pub(crate) fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()
}

fn hex_attribute(folder: &Path, name: &str) -> Option<u32> {
    u32::try_from(hex(&read_attribute(&folder.join(name))?)?).ok()
}

fn names_of(folder: &Path) -> Vec<String> {
    let mut all = Vec::new();
    for class in CLASSES {
        let entries = folder.join(class).read_dir().into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort();
        all.append(&mut names);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::write_pci_function;
    use proptest::prelude::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// Creates a sysfs with two NVMe drives, one of them multipath, and an RDMA NIC.
    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let sys = dir.path();
        let device = |path: &str, class: &str| {
            let files = [
                ("vendor", "0x15b3"),
                ("device", "0x1017"),
                ("class", class),
                ("numa_node", "-1"),
            ];
            write_pci_function(sys, &format!("pci0000:00/{path}"), &files).unwrap()
        };
        let class = |class: &str, target: &Path| {
            let folder = sys.join("class").join(class);
            fs::create_dir_all(&folder).unwrap();
            fs::create_dir_all(target).unwrap();
            symlink(target, folder.join(target.file_name().unwrap())).unwrap();
        };
        device("0000:00:01.0", "0x060400");
        let nvme0 = device("0000:00:01.0/0000:01:00.0", "0x010802");
        class("nvme", &nvme0.join("nvme/nvme0"));
        class("block", &nvme0.join("nvme/nvme0/nvme0n1"));
        class("block", &nvme0.join("nvme/nvme0/nvme0n1/nvme0n1p1"));
        let nvme1 = device("0000:00:02.0", "0x010802");
        class("nvme", &nvme1.join("nvme/nvme1"));
        let subsystem = sys.join("devices/virtual/nvme-subsystem/nvme-subsys1");
        class("block", &subsystem.join("nvme1n1"));
        symlink(nvme1.join("nvme/nvme1"), subsystem.join("nvme1")).unwrap();
        let nic = device("0000:00:03.0", "0x020700");
        class("infiniband", &nic.join("infiniband/mlx5_0"));
        class("block", &sys.join("devices/virtual/block/loop0"));
        dir
    }

    fn resolve(dir: &tempfile::TempDir, name: &str) -> std::result::Result<String, String> {
        Client::resolve_in(dir.path(), name)
            .map(|c| c.addr().to_string())
            .map_err(|e| e.to_string())
    }

    #[test]
    fn names_of_all_kinds_are_resolved() {
        let dir = tree();
        assert_eq!(resolve(&dir, "0000:03:00.0").unwrap(), "0000:03:00.0");
        assert_eq!(resolve(&dir, "nvme0").unwrap(), "0000:01:00.0");
        assert_eq!(resolve(&dir, "nvme0n1").unwrap(), "0000:01:00.0");
        assert_eq!(resolve(&dir, "nvme0n1p1").unwrap(), "0000:01:00.0");
        assert_eq!(resolve(&dir, "/dev/nvme0n1").unwrap(), "0000:01:00.0");
        assert_eq!(resolve(&dir, "mlx5_0").unwrap(), "0000:00:03.0");
        assert_eq!(
            resolve(&dir, "nvme1n1").unwrap(),
            "0000:00:02.0",
            "through the multipath subsystem"
        );
        let folder = dir.path().join("class/nvme/nvme0");
        assert_eq!(resolve(&dir, folder.to_str().unwrap()).unwrap(), "0000:01:00.0");
    }

    #[test]
    fn a_drive_with_two_controllers_is_ambiguous() {
        let dir = tree();
        let subsystem = dir.path().join("devices/virtual/nvme-subsystem/nvme-subsys1");
        symlink(dir.path().join("class/nvme/nvme0"), subsystem.join("nvme0")).unwrap();
        let error = resolve(&dir, "nvme1n1").unwrap_err();
        assert!(error.contains("name one of them: nvme0, nvme1"), "{error}");
    }

    #[test]
    fn other_names_are_refused_with_message() {
        let dir = tree();
        assert!(resolve(&dir, "nvme7").unwrap_err().contains("no such device"));
        assert!(resolve(&dir, "loop0").unwrap_err().contains("on no PCI device"));
        assert!(resolve(&dir, "").unwrap_err().contains("empty"));
        assert!(resolve(&dir, "../x").unwrap_err().contains("not a device's name"));
        assert!(resolve(&dir, "/nonexistent/place")
            .unwrap_err()
            .contains("No such file"));
        assert!(resolve(&dir, "/").unwrap_err().contains("no PCI function"));
    }

    #[test]
    fn devices_are_listed_from_sysfs() {
        let dir = tree();
        let devices = devices_in(dir.path()).unwrap();
        let clients: Vec<_> = devices
            .iter()
            .filter(|d| d.is_likely_client())
            .map(|d| (d.addr.to_string(), d.client().to_string()))
            .collect();
        let expected = [
            ("0000:00:02.0", "nvme1"),
            ("0000:00:03.0", "mlx5_0"),
            ("0000:01:00.0", "nvme0"),
        ];
        assert_eq!(clients, expected.map(|(a, n)| (a.to_owned(), n.to_owned())));
        assert_eq!(devices[0].numa_node, None);
        assert!(devices_in(Path::new("/nonexistent")).is_err());
    }

    #[test]
    fn invalid_addresses_are_refused() {
        for text in [
            "",
            "3:00.0",
            "03:00",
            "03:20.0",
            "03:00.8",
            "0000:03:00.0 ",
            "00:03:00.0",
            "+3:00.0",
            "000:03:00.0",
            "a.b",
        ] {
            assert!(text.parse::<PciAddr>().is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn addresses_survive_a_round_trip(domain: u32, bus: u8, devfn: u8) {
            let addr = PciAddr { domain, bus, devfn };
            prop_assert_eq!(addr.to_string().parse::<PciAddr>().unwrap(), addr);
            prop_assert_eq!(PciAddr::from(p2pmem_sys::p2pmem_pci_addr::from(addr)), addr);
        }

        #[test]
        fn parsing_never_panics(text in ".{0,20}") {
            let _ = text.parse::<PciAddr>();
        }
    }
}
