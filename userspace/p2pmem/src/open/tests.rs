// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;
use crate::error::ErrorKind;
use crate::standalone::tests::Machine;
use std::fs;
use std::os::unix::fs::symlink;

fn open(machine: &Machine) -> Result<Device> {
    DeviceOptions::new().of_machine(machine.root()).open()
}

/// Returns a machine with a drive that published memory, or a device that is bound to vfio-pci, or both.
fn machine(sysfs: bool, vfio: bool) -> Machine {
    let machine = Machine::new("7.2.12");
    if sysfs {
        let folder = machine.function("pci0000:00", "0000:00:03.0", "0x010802", "nvme", 0);
        machine.publish(&folder, 1 << 20, 1 << 20);
    }
    if vfio {
        let folder = machine.function("pci0000:00", "0000:00:04.0", "0x120000", "vfio-pci", 1 << 20);
        let group = machine.root().join("sys/kernel/iommu_groups/9");
        fs::create_dir_all(&group).unwrap();
        symlink(group, folder.join("iommu_group")).unwrap();
        machine.put("dev/vfio/9", "");
        machine.put("dev/vfio/vfio", "");
    }
    machine
}

#[test]
fn next_backend_with_memory_is_opened_without_module() {
    assert_eq!(open(&machine(true, true)).unwrap().backend(), Backend::Sysfs);
    let vfio = machine(false, true);
    assert_eq!(open(&vfio).unwrap().backend(), Backend::Vfio);
    let both = machine(true, true);
    let with_nic = DeviceOptions::new().needs(Capability::DmaBuf).of_machine(both.root());
    assert_eq!(with_nic.open().unwrap().backend(), Backend::Vfio);
    let named = DeviceOptions::new().backend(Backend::Vfio).of_machine(both.root());
    assert_eq!(named.open().unwrap().backend(), Backend::Vfio);
}

#[test]
fn loaded_module_is_not_bypassed() {
    let machine = machine(true, true);
    machine.put("dev/p2pmem", "");
    let error = open(&machine).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENOTTY), "{error}");
    fs::remove_file(machine.root().join("dev/p2pmem")).unwrap();
    fs::create_dir(machine.root().join("dev/p2pmem")).unwrap();
    assert_eq!(open(&machine).unwrap_err().errno(), Some(libc::EISDIR));
}

#[test]
fn error_has_reason_of_each_backend() {
    let machine = machine(false, false);
    let error = open(&machine).unwrap_err();
    let Error::NoBackend { module, others } = &error else {
        panic!("{error}")
    };
    assert!(matches!(**module, Error::Open { .. }) && others.len() == 2);
    assert_eq!(error.errno(), Some(libc::ENOENT));
    let text = error.to_string();
    for part in [
        "dev/p2pmem: No such file",
        "; the backend sysfs has no memory",
        "; the backend vfio has no memory",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert!(error.remedy().unwrap().contains("p2pmemctl scan"));
    let module = Error::NoBackend {
        module: Box::new(Error::Open {
            path: DEFAULT_PATH.into(),
            error: std::io::Error::from_raw_os_error(libc::ENOENT),
        }),
        others: Vec::new(),
    };
    assert_eq!(module.kind(), ErrorKind::ModuleMissing);
}

#[test]
fn selected_backend_must_have_capability_and_bar() {
    let options = DeviceOptions::new().backend(Backend::Sysfs).needs(Capability::DmaBuf);
    let error = options.of_machine(machine(true, false).root()).open().unwrap_err();
    assert!(
        matches!(
            error,
            Error::NotSupported {
                backend: Backend::Sysfs,
                capability: Capability::DmaBuf
            }
        ),
        "{error}"
    );
    let bar = DeviceOptions::new().bar("0000:00:04.0".parse().unwrap(), 5);
    let error = bar.of_machine(machine(true, true).root()).open().unwrap_err();
    assert!(matches!(error, Error::Request(_)), "{error}");
    let bar = DeviceOptions::new().bar("0000:00:04.0".parse().unwrap(), 2);
    let error = bar
        .backend(Backend::Sysfs)
        .of_machine(machine(true, true).root())
        .open()
        .unwrap_err();
    assert!(error.to_string().contains("only the backend vfio"), "{error}");
}
