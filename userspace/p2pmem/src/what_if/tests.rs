// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;
use crate::fake::{write_pci_function, Fake};
use std::fs;
use std::os::unix::fs::symlink;

const MIB: u64 = 1 << 20;

/// A machine of two root ports. Below the first: a switch with a NIC (05:00.0), an accelerator without a driver (03:00.0),
/// and a GPU of a vendor driver (04:00.0). Below the second: an accelerator (08:00.0) and a drive whose driver published
/// memory (09:00.0).
fn machine() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let put = |path: &str, text: &str| {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let device = |path: &str, class: &str, driver: &str, size: u64| {
        let folder = format!("sys/devices/pci0000:00/{path}");
        let files = [("vendor", "0x1de5"), ("device", "0x0001"), ("class", class)];
        let real = write_pci_function(&dir.path().join("sys"), &format!("pci0000:00/{path}"), &files).unwrap();
        if size > 0 {
            put(
                &format!("{folder}/resource"),
                &format!("0x3800000000 {:#x} 0x142204\n", 0x38_0000_0000 + size - 1),
            );
        }
        if !driver.is_empty() {
            symlink(Path::new("/drivers").join(driver), real.join("driver")).unwrap();
        }
        folder
    };
    use std::path::Path;
    put("proc/sys/kernel/osrelease", "7.2.0\n");
    let bridge = "0x060400";
    device("0000:00:01.0", bridge, "", 0);
    device("0000:00:01.0/0000:01:00.0", bridge, "", 0);
    for (port, below, class, driver, size) in [
        ("00", "03", "0x120000", "", 64 * MIB),
        ("01", "04", "0x030200", "nvidia", 1024 * MIB),
        ("02", "05", "0x020700", "mlx5_core", 32 * MIB),
    ] {
        let port = format!("0000:00:01.0/0000:01:00.0/0000:02:{port}.0");
        device(&port, bridge, "", 0);
        device(&format!("{port}/0000:{below}:00.0"), class, driver, size);
    }
    device("0000:00:02.0", bridge, "", 0);
    device("0000:00:02.0/0000:08:00.0", "0x120000", "", 128 * MIB);
    let drive = device("0000:00:02.0/0000:09:00.0", "0x010802", "nvme", 0);
    for (file, text) in [("size", "1048576"), ("available", "1048576"), ("published", "1")] {
        put(&format!("{drive}/p2pmem/{file}"), text);
    }
    dir
}

fn request(size: u64) -> Request {
    let nic: PciAddr = "0000:05:00.0".parse().unwrap();
    Request::new(size).near([nic])
}

fn codes(answer: &WhatIf) -> Vec<(String, u32, VerdictCode)> {
    let all = answer.candidates.iter();
    all.map(|c| {
        (
            c.verdict.addr.to_string()[5..7].to_owned(),
            c.verdict.provider,
            c.verdict.code,
        )
    })
    .collect()
}

fn row(bus: &str, provider: u32, code: VerdictCode) -> (String, u32, VerdictCode) {
    (bus.to_owned(), provider, code)
}

#[test]
fn without_module_the_nearest_device_with_memory_is_chosen() {
    let dir = machine();
    let decide = |request: &Request| WhatIf::decide_in(dir.path(), None, request).unwrap();
    let answer = decide(&request(MIB));
    use VerdictCode::{Chosen, Class, Space, TooSmall};
    // The GPU has more memory, and its driver hands it out.
    assert_eq!(
        codes(&answer),
        [
            row("03", 0, Space),
            row("04", 0, Chosen),
            row("08", 0, Class),
            row("09", 0, Class)
        ]
    );
    assert_eq!((answer.module, answer.errno), (false, None));
    assert_eq!(answer.text, "0000:04:00.0 would be chosen");
    let chosen = |device: &&CandidateDevice| device.verdict.code == VerdictCode::Chosen;
    let gpu = answer.candidates.iter().find(chosen).unwrap();
    assert_eq!(
        (gpu.source.backend, gpu.source.availability),
        (Backend::Driver, Availability::Ready)
    );
    assert_eq!(
        gpu.verdict.why,
        "chosen: below the same switch as 0000:05:00.0 (4 hops), 1 GiB free"
    );
    let accelerator = &answer.candidates[0];
    assert_eq!(accelerator.source.availability, Availability::Possible);
    assert!(accelerator.source.detail.contains("modprobe p2pmem"), "{accelerator:?}");

    // Memory that is not published, and a BAR with registers alone, are no memory.
    let folder = dir.path().join("sys/bus/pci/devices/0000:09:00.0/p2pmem");
    fs::remove_file(folder.join("available")).unwrap();
    let answer = decide(&request(100 * MIB));
    assert_eq!(
        codes(&answer),
        [row("03", 0, TooSmall), row("04", 0, Chosen), row("08", 0, Class)]
    );
    let resource = dir.path().join("sys/bus/pci/devices/0000:04:00.0/resource");
    fs::write(resource, "0x38000000 0x3800ffff 0x40200\n").unwrap();
    let driver = dir.path().join("sys/bus/pci/devices/0000:04:00.0/driver");
    fs::remove_file(&driver).unwrap();
    symlink("/drivers/nouveau", &driver).unwrap();
    assert_eq!(
        codes(&decide(&request(100 * MIB))),
        [row("03", 0, TooSmall), row("08", 0, Chosen)],
        "a device without a memory BAR is no device with memory"
    );
    let answer = decide(&request(1024 * MIB));
    assert_eq!((answer.chosen, answer.errno), (None, Some(libc::ENODEV)));
    assert_eq!(answer.text, "no device with memory could serve 1 GiB");
}

#[test]
fn device_without_usable_source_is_not_chosen() {
    let dir = machine();
    // The module is loaded, and did not adopt the memory that the drive published; this kernel has no other interface.
    fs::create_dir_all(dir.path().join("sys/module/p2pmem")).unwrap();
    fs::write(dir.path().join("proc/sys/kernel/osrelease"), "5.10.0\n").unwrap();
    let device = Fake::new().device();
    let answer = WhatIf::decide_in(dir.path(), Some(&device), &Request::new(4096)).unwrap();
    let drive = answer.candidates.last().unwrap();
    assert_eq!(drive.verdict.code, VerdictCode::NoSource);
    assert!(
        drive.verdict.why.starts_with("no source: the module does not manage"),
        "{}",
        drive.verdict.why
    );
    assert_eq!(answer.chosen.map(|addr| addr.bus), Some(4));
}

#[test]
fn providers_keep_their_verdicts_and_compete_with_unpublished_devices() {
    let dir = machine();
    let at = |bus| PciAddr {
        domain: 0,
        bus,
        devfn: 0,
    };
    let fake = Fake::new().provider(at(8), 128 * MIB).provider(at(3), 64 * MIB).path(
        at(3),
        at(5),
        crate::PathClass::SameSwitch,
        4,
    );
    let device = fake.device();
    let decide = |request: &Request| WhatIf::decide_in(dir.path(), Some(&device), request).unwrap();
    use VerdictCode::{Bandwidth, Chosen, Class, Full, TooSmall};
    let answer = decide(&request(MIB));
    assert!(answer.module);
    // The link to the provider is known.
    assert_eq!(
        codes(&answer),
        [
            row("03", 2, Chosen),
            row("04", 0, Bandwidth),
            row("08", 1, Class),
            row("09", 0, Class)
        ]
    );
    assert_eq!(answer.candidates[0].source.backend, Backend::Module);
    // Used memory of a provider is not free for the decision either.
    let _held = device.alloc(&Request::new(32 * MIB).provider(2)).unwrap();
    assert_eq!(codes(&decide(&request(40 * MIB)))[0], row("03", 2, Full));
    let limited = request(100 * MIB).max_class(crate::PathClass::SameSwitch);
    assert_eq!(codes(&decide(&limited))[0], row("03", 2, TooSmall));
    fs::remove_dir_all(dir.path().join("sys/bus/pci/devices")).unwrap();
    fs::create_dir_all(dir.path().join("sys/bus/pci/devices")).unwrap();
    let answer = decide(&Request::new(120 * MIB));
    assert_eq!(answer.chosen, Some(at(8)), "a provider needs no entry in sysfs");
    let _more = device.alloc(&Request::new(32 * MIB).provider(1)).unwrap();
    let answer = decide(&Request::new(120 * MIB));
    assert_eq!(
        (answer.errno, answer.text.as_str()),
        (Some(libc::ENOSPC), "no device with memory has 120 MiB free")
    );
}

#[test]
fn requests_that_need_the_module_are_refused() {
    let dir = machine();
    let refused = |request: Request| WhatIf::decide_in(dir.path(), None, &request).unwrap_err().to_string();
    assert!(refused(Request::new(0)).contains("0 bytes"));
    assert!(refused(Request::new(1).provider(1)).contains("no provider is required"));
    assert!(refused(Request::new(1).strategy(Strategy::Spread)).contains("strategy nearest"));
    let missing: PciAddr = "0000:77:00.0".parse().unwrap();
    assert!(refused(Request::new(1).near([missing])).contains("no PCI function 0000:77:00.0"));
    assert!(WhatIf::decide_in(dir.path().join("none").as_path(), None, &Request::new(1)).is_err());
}
