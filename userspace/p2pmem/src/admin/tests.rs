// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

const ADDR: PciAddr = PciAddr {
    domain: 0,
    bus: 3,
    devfn: 0,
};

/// A tree in a temporary directory that behaves like the kernel: probing binds, unbinding unbinds, and a new group has
/// attributes. `refuse` is the file whose write fails, the module's status, and the errno.
struct FakeTree {
    root: PathBuf,
    log: Arc<Mutex<Vec<String>>>,
    refuse: Option<(&'static str, &'static str, i32)>,
    /// Number of times that disabling the provider fails because its memory is in use.
    held: Arc<AtomicU32>,
}

impl FakeTree {
    fn unbind(&self) -> io::Result<()> {
        fs::remove_file(self.root.join("bus/pci/devices/0000:03:00.0/driver"))
    }
}

impl Tree for FakeTree {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let name = path.file_name().unwrap().to_str().unwrap();
        let device = self.root.join("bus/pci/devices/0000:03:00.0");
        self.log.lock().unwrap().push(format!("{name}={}", text.trim()));
        if let Some((refused, status, errno)) = self.refuse {
            if name == refused {
                if !status.is_empty() {
                    fs::write(path.with_file_name("status"), format!("{status}\n"))?;
                }
                return Err(io::Error::from_raw_os_error(errno));
            }
        }
        let held = |n: u32| n.checked_sub(1);
        if (name, text) == ("enable", "0") && self.held.fetch_update(Relaxed, Relaxed, held).is_ok() {
            fs::write(path, "0\n")?;
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        match name {
            "unbind" => return self.unbind(),
            "drivers_probe" if driver_of(&device).is_none() => {
                let wanted = fs::read_to_string(device.join("driver_override"))?;
                let driver = if wanted.trim().is_empty() {
                    "xdma"
                } else {
                    wanted.trim()
                };
                return symlink(self.root.join("bus/pci/drivers").join(driver), device.join("driver"));
            }
            _ => {}
        }
        RealTree.write(path, text)?;
        // An attribute has only the last value; a regular file would keep the rest of a longer one.
        if path.is_file() && name != "drivers_probe" {
            fs::write(path, text)?;
        }
        Ok(())
    }

    fn make_dir(&self, path: &Path) -> io::Result<()> {
        self.log.lock().unwrap().push("mkdir".into());
        fs::create_dir(path)?;
        let attributes = [
            "bar",
            "offset",
            "size",
            "mode",
            "kernel_reserve",
            "pinned_exports",
            "attach_gid",
            "enable",
            "status",
        ];
        for name in attributes {
            fs::write(path.join(name), if name == "enable" { "0\n" } else { "\n" })?;
        }
        Ok(())
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.log.lock().unwrap().push("rmdir".into());
        fs::remove_dir_all(path)
    }
}

struct Machine {
    dir: tempfile::TempDir,
    admin: Admin,
    log: Arc<Mutex<Vec<String>>>,
    held: Arc<AtomicU32>,
}

impl Machine {
    fn new(driver: Option<&str>, refuse: Option<(&'static str, &'static str, i32)>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().to_owned();
        let device = root.join("bus/pci/devices/0000:03:00.0");
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("driver_override"), "\n").unwrap();
        fs::write(root.join("bus/pci/drivers_probe"), "").unwrap();
        for name in ["p2pmem", "xdma"] {
            let driver = root.join("bus/pci/drivers").join(name);
            fs::create_dir_all(&driver).unwrap();
            fs::write(driver.join("unbind"), "").unwrap();
        }
        if let Some(driver) = driver {
            symlink(root.join("bus/pci/drivers").join(driver), device.join("driver")).unwrap();
        }
        fs::create_dir_all(root.join("config/p2pmem/providers")).unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let held = Arc::new(AtomicU32::new(0));
        let admin = Admin {
            sys: root.clone(),
            config: root.join("config"),
            tree: Box::new(FakeTree {
                root,
                log: log.clone(),
                refuse,
                held: held.clone(),
            }),
        };
        Self { dir, admin, log, held }
    }

    fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock().unwrap())
    }

    fn driver(&self) -> Option<String> {
        driver_of(&self.admin.device(ADDR))
    }

    fn driver_override(&self) -> String {
        fs::read_to_string(self.admin.device(ADDR).join("driver_override"))
            .unwrap()
            .trim()
            .to_owned()
    }
}

#[test]
fn publish_and_unpublish() {
    let machine = Machine::new(None, None);
    let publish = Publish {
        bar: Some(2),
        size: Some(1 << 20),
        mode: Some(Mode::Pageless),
        pinned_exports: Some(true),
        attach_gid: Some(44),
        ..Publish::new(ADDR)
    };
    let published = machine.admin.publish(&publish).unwrap();
    assert!(published.enabled);
    let steps = [
        "driver_override=p2pmem",
        "drivers_probe=0000:03:00.0",
        "mkdir",
        "bar=2",
        "size=1048576",
        "mode=pageless",
        "pinned_exports=1",
        "attach_gid=44",
        "enable=1",
    ];
    assert_eq!(machine.log(), steps);
    assert_eq!(machine.driver().as_deref(), Some("p2pmem"));
    assert_eq!(machine.admin.published().unwrap(), [published]);
    assert!(matches!(machine.admin.publish(&publish), Err(Error::Exists(_))));

    machine.admin.unpublish(&Unpublish::new(ADDR).reprobe(true)).unwrap();
    let steps = [
        "enable=0",
        "rmdir",
        "unbind=0000:03:00.0",
        "driver_override=",
        "drivers_probe=0000:03:00.0",
    ];
    assert_eq!(machine.log(), steps);
    assert_eq!(
        (machine.driver().as_deref(), machine.driver_override().as_str()),
        (Some("xdma"), "")
    );
    assert!(matches!(
        machine.admin.unpublish(&Unpublish::new(ADDR)),
        Err(Error::Missing(_))
    ));
}

#[test]
fn unpublish_waits_for_held_memory() {
    let machine = Machine::new(None, None);
    machine.admin.publish(&Publish::new(ADDR)).unwrap();
    machine.log();
    machine.held.store(2, Relaxed);
    machine.admin.unpublish(&Unpublish::new(ADDR)).unwrap();
    let steps = [
        "enable=0",
        "enable=0",
        "enable=0",
        "rmdir",
        "unbind=0000:03:00.0",
        "driver_override=",
    ];
    assert_eq!(machine.log(), steps);
}

#[test]
fn bound_device_needs_force() {
    let machine = Machine::new(Some("xdma"), None);
    let publish = Publish::new(ADDR);
    let error = machine.admin.publish(&publish).unwrap_err();
    assert_eq!(error.to_string(), "0000:03:00.0 is bound to the driver xdma");
    assert!(error.remedy().unwrap().contains("--force"));
    assert!(machine.log().is_empty(), "nothing was touched");
    machine
        .admin
        .publish(&Publish {
            rebind: true,
            ..publish
        })
        .unwrap();
    let steps = [
        "driver_override=p2pmem",
        "unbind=0000:03:00.0",
        "drivers_probe=0000:03:00.0",
        "mkdir",
        "enable=1",
    ];
    assert_eq!(machine.log(), steps);
    assert_eq!(machine.driver().as_deref(), Some("p2pmem"));
}

#[test]
fn refused_setting_is_explained_and_undone() {
    let refuse = Some(("enable", "BAR 2 has no prefetchable memory", libc::EINVAL));
    let machine = Machine::new(Some("xdma"), refuse);
    let error = machine
        .admin
        .publish(&Publish {
            rebind: true,
            ..Publish::new(ADDR)
        })
        .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("write \"1\" to"), "{text}");
    assert!(
        text.contains("providers/0000:03:00.0/enable: Invalid argument (EINVAL): BAR 2 has no"),
        "{text}"
    );
    assert_eq!(error.reason(), Some("BAR 2 has no prefetchable memory"));
    let steps = [
        "driver_override=p2pmem",
        "unbind=0000:03:00.0",
        "drivers_probe=0000:03:00.0",
        "mkdir",
        "enable=1",
        "rmdir",
        "unbind=0000:03:00.0",
        "driver_override=",
        "drivers_probe=0000:03:00.0",
    ];
    assert_eq!(machine.log(), steps);
    assert_eq!(machine.driver().as_deref(), Some("xdma"), "its own driver has it again");
    assert!(machine.admin.published().unwrap().is_empty());
}

#[test]
fn any_failed_step_restores_the_device() {
    for driver in [None, Some("xdma"), Some("p2pmem")] {
        for file in ["driver_override", "unbind", "drivers_probe", "bar", "offset", "enable"] {
            let machine = Machine::new(driver, Some((file, "", libc::EIO)));
            let publish = Publish {
                bar: Some(1),
                offset: Some(0),
                rebind: true,
                ..Publish::new(ADDR)
            };
            let result = machine.admin.publish(&publish);
            // Undo writes "unbind" and "drivers_probe" too, so the device cannot be restored if one of them fails.
            let undoable = !["unbind", "drivers_probe", "driver_override"].contains(&file);
            if undoable {
                assert!(
                    matches!(result, Err(Error::Admin { .. })),
                    "{driver:?} {file} {result:?}"
                );
                assert_eq!(machine.driver().as_deref(), driver, "{file}");
                assert!(machine.admin.published().unwrap().is_empty(), "{driver:?} {file}");
            }
            if result.is_err() && file != "driver_override" {
                assert_eq!(machine.driver_override(), "", "{driver:?} {file}");
            }
        }
    }
}

#[test]
fn missing_prerequisites_are_named() {
    let machine = Machine::new(None, None);
    let absent = PciAddr { bus: 9, ..ADDR };
    let error = machine.admin.publish(&Publish::new(absent)).unwrap_err();
    assert_eq!(error.to_string(), "there is no PCI device 0000:09:00.0");
    fs::remove_dir(machine.dir.path().join("config/p2pmem/providers")).unwrap();
    let error = machine.admin.publish(&Publish::new(ADDR)).unwrap_err();
    assert!(error.remedy().unwrap().contains("configfs"), "{error}");
    assert!(machine.admin.published().is_err());
    let nowhere = Admin::with_roots("/nonexistent", "/nonexistent");
    assert!(nowhere.publish(&Publish::new(ADDR)).is_err());
}
