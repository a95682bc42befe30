// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;
use p2pmem::fake::{write_pci_function, Fake};
use std::fs;
use std::path::Path;

/// A configuration with all options that the module needs.
const CONFIG: &str = "CONFIG_PCI=y\nCONFIG_PCI_P2PDMA=y\nCONFIG_RUST=y\nCONFIG_GPU_BUDDY=m\nCONFIG_CONFIGFS_FS=m\nCONFIG_DMA_SHARED_BUFFER=y\n";

fn put(root: &Path, path: &str, content: impl AsRef<[u8]>) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

fn pci(root: &Path, addr: &str, vendor: &str, class: &str, config: &[u8]) {
    let files = [("vendor", vendor), ("device", "0x09a2"), ("class", class)];
    let folder = write_pci_function(&root.join("sys"), &format!("pci0000:00/{addr}"), &files).unwrap();
    fs::write(folder.join("config"), config).unwrap();
}

/// Returns a config space with AER as the first extended capability, then ACS with this control word.
fn config_with_acs(control: u16) -> Vec<u8> {
    let mut config = vec![0; 4096];
    config[0x100..0x104].copy_from_slice(&[0x01, 0, 0x01, 0x14]); // next at 0x140
    config[0x140..0x144].copy_from_slice(&[0x0d, 0, 0x01, 0]);
    config[0x146..0x148].copy_from_slice(&control.to_le_bytes());
    config
}

fn nic(root: &Path, name: &str, driver: Option<&str>) {
    put(root, &format!("sys/class/infiniband/{name}/node_type"), "1: CA\n");
    let Some(driver) = driver else { return };
    put(root, &format!("sys/bus/pci/drivers/{driver}/new_id"), "");
    let device = root.join("sys/class/infiniband").join(name).join("device");
    fs::create_dir_all(&device).unwrap();
    std::os::unix::fs::symlink(root.join("sys/bus/pci/drivers").join(driver), device.join("driver")).unwrap();
}

fn healthy(root: &Path) -> Environment {
    put(root, "sys/module/p2pmem/refcnt", "0\n");
    put(root, "proc/sys/kernel/osrelease", "7.2.0-test\n");
    put(root, "boot/config-7.2.0-test", CONFIG);
    put(root, "proc/mounts", "configfs /sys/kernel/config configfs rw 0 0\n");
    put(root, "proc/cpuinfo", "vendor_id\t: AuthenticAMD\ncpu family\t: 25\n");
    put(
        root,
        "proc/kallsyms",
        "0000000000000000 T ib_register_peer_memory_client\t[ib_core]\n",
    );
    put(
        root,
        "sys/kernel/debug/p2pmem/peer_memory",
        "interface /usr/src/ofa_kernel/default/Module.symvers\nregistered_as ex\nacquire 3\n",
    );
    nic(root, "mlx5_0", Some("mlx5_core"));
    fs::create_dir_all(root.join("sys/kernel/config/p2pmem/providers")).unwrap();
    pci(root, "0000:00:00.0", "0x8086", "0x060000", &[0; 256]);
    pci(root, "0000:00:01.0", "0x1b36", "0x060400", &config_with_acs(0));
    Environment {
        root: root.to_owned(),
        open: Box::new(|| Ok(Fake::example().device())),
    }
}

fn level(checks: &[Check], name: &str) -> (Level, String) {
    let check = checks
        .iter()
        .find(|c| c.check == name)
        .unwrap_or_else(|| panic!("no check {name}: {checks:?}"));
    (
        check.level,
        format!("{} -> {}", check.found, check.remedy.as_deref().unwrap_or_default()),
    )
}

#[test]
fn a_good_machine_passes() {
    let dir = tempfile::tempdir().unwrap();
    let checks = examine(&healthy(dir.path()));
    assert!(checks.iter().all(|c| c.level == Level::Ok), "{checks:#?}");
    assert_eq!(checks.len(), 15, "{checks:#?}");
}

#[test]
fn each_fault_is_found_and_has_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let mut machine = healthy(root);
    let expect = |machine: &Environment, name: &str, expected: Level, words: &str| {
        let (level, text) = level(&examine(machine), name);
        assert!(level == expected && text.contains(words), "{name}: {level:?} {text}");
    };

    put(root, "boot/config-7.2.0-test", "# CONFIG_PCI_P2PDMA is not set\n");
    expect(&machine, "kernel-config", Level::Failure, "boot a kernel");
    put(
        root,
        "boot/config-7.2.0-test",
        CONFIG.replace("CONFIG_RUST=y", "# CONFIG_RUST is not set"),
    );
    expect(
        &machine,
        "kernel-config",
        Level::Failure,
        "without CONFIG_RUST (modules in Rust) ->",
    );
    fs::remove_file(root.join("boot/config-7.2.0-test")).unwrap();
    expect(&machine, "kernel-config", Level::Failure, "by its symbols");
    let peer = "sys/kernel/debug/p2pmem/peer_memory";
    expect(
        &machine,
        "rdma-peer-memory",
        Level::Ok,
        "ofa_kernel/default/Module.symvers",
    );
    put(root, peer, "interface /m\nregistered_as persistent\n");
    expect(&machine, "rdma-peer-memory", Level::Warning, "peer_memory=ex");
    put(root, peer, "interface /m\nregistered_as off\n");
    expect(&machine, "rdma-peer-memory", Level::Warning, "no client of");
    put(root, peer, "interface none\nregistered_as off\n");
    expect(&machine, "rdma-peer-memory", Level::Warning, "PEER_SYMVERS");
    fs::remove_file(root.join(peer)).unwrap();
    expect(&machine, "rdma-peer-memory", Level::Info, "as root");
    put(root, "proc/kallsyms", "0000000000000000 T pci_p2pdma_distance_many\n");
    expect(&machine, "kernel-config", Level::Ok, "by its symbols");
    expect(&machine, "rdma-peer-memory", Level::Info, "ibv_reg_dmabuf_mr()");
    put(root, "proc/kallsyms", "");
    expect(&machine, "kernel-config", Level::Info, "neither");
    expect(&machine, "rdma-peer-memory", Level::Info, "not readable");
    fs::remove_dir_all(root.join("sys/class/infiniband")).unwrap();
    expect(&machine, "rdma", Level::Info, "no RDMA devices");

    fs::remove_dir(root.join("sys/kernel/config/p2pmem/providers")).unwrap();
    expect(&machine, "configfs", Level::Failure, "modprobe p2pmem");
    put(root, "proc/mounts", "proc /proc proc rw 0 0\n");
    expect(&machine, "configfs", Level::Failure, "mount -t configfs");
    fs::remove_dir_all(root.join("sys/module")).unwrap();
    expect(&machine, "module", Level::Failure, "modprobe p2pmem");

    put(root, "proc/cpuinfo", "vendor_id\t: GenuineIntel\ncpu family\t: 6\n");
    expect(&machine, "host-bridge", Level::Ok, "8086:09a2");
    put(root, "sys/devices/pci0000:00/0000:00:00.0/vendor", "0x1234\n");
    expect(&machine, "host-bridge", Level::Warning, "below one PCIe switch");

    put(root, "sys/kernel/iommu_groups/0/type", "identity\n");
    expect(&machine, "iommu", Level::Ok, "passed through");
    put(root, "sys/kernel/iommu_groups/1/type", "DMA-FQ\n");
    expect(&machine, "iommu", Level::Warning, "iommu=pt");

    put(
        root,
        "sys/devices/pci0000:00/0000:00:01.0/config",
        config_with_acs(0x1d),
    );
    expect(&machine, "acs", Level::Warning, "disable_acs_redir=0000:00:01.0");
    put(root, "sys/devices/pci0000:00/0000:00:01.0/config", [0; 64]);
    expect(&machine, "acs", Level::Info, "as root");

    machine.open = Box::new(|| Ok(Fake::new().device()));
    expect(&machine, "providers", Level::Warning, "p2pmemctl publish");
    machine.open = Box::new(|| Err(p2pmem::Error::Abi { module: 9, program: 1 }));
    expect(&machine, "abi-version", Level::Failure, "one version");
    // The module is loaded, and its device file is missing.
    put(root, "sys/module/p2pmem/refcnt", "0\n");
    machine.open = Box::new(|| p2pmem::Device::open_path("/nonexistent/p2pmem"));
    expect(&machine, "device", Level::Failure, "modprobe p2pmem");
}

#[test]
fn the_kernel_must_load_the_module() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let machine = healthy(root);
    let check = |name: &str| level(&examine(&machine), name);
    put(root, "sys/module/module/parameters/sig_enforce", "Y\n");
    let (found, text) = check("module-signatures");
    assert!(found == Level::Ok && text.contains("has loaded p2pmem"), "{text}");
    fs::remove_dir_all(root.join("sys/module/p2pmem")).unwrap();
    let (found, text) = check("module-signatures");
    assert!(
        found == Level::Warning && text.contains("mokutil") && !text.contains("Secure Boot"),
        "{text}"
    );
    put(root, super::kernel::SECURE_BOOT, [6, 0, 0, 0, 1]);
    assert!(check("module-signatures").1.contains("Secure Boot is on"));
    put(root, "sys/module/module/parameters/sig_enforce", "N\n");
    assert_eq!(check("module-signatures").0, Level::Ok);
    put(
        root,
        "sys/kernel/security/lockdown",
        "none [integrity] confidentiality\n",
    );
    assert_eq!(check("module-signatures").0, Level::Warning);

    assert_eq!(check("kernel").0, Level::Ok);
    put(root, "proc/sys/kernel/osrelease", "6.18.4-test\n");
    let (found, text) = check("kernel");
    assert!(found == Level::Failure && text.contains("p2pmemctl scan"), "{text}");
}

#[test]
fn bars_that_could_be_larger_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let machine = healthy(root);
    pci(root, "0000:03:00.0", "0x1de5", "0x120000", &[0; 256]);
    let folder = "sys/devices/pci0000:00/0000:03:00.0";
    put(
        root,
        &format!("{folder}/resource"),
        "0x3800000000 0x380fffffff 0x102200\n",
    );
    assert_eq!(level(&examine(&machine), "bar-sizes").0, Level::Ok);
    put(root, &format!("{folder}/resource0_resize"), "0000000000004100\n");
    let (found, text) = level(&examine(&machine), "bar-sizes");
    assert!(
        found == Level::Info && text.contains("0000:03:00.0 BAR 0 has 256 MiB, up to 16 GiB"),
        "{text}"
    );
}

#[test]
fn each_nic_s_driver_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    let machine = healthy(dir.path());
    nic(dir.path(), "rxe0", None);
    nic(dir.path(), "bnxt_re0", Some("bnxt_en"));
    nic(dir.path(), "irdma0", Some("ice"));
    nic(dir.path(), "cxgb4_0", Some("cxgb4"));
    let all: Vec<_> = examine(&machine)
        .into_iter()
        .filter(|c| c.check == "rdma-dma-buf")
        .map(|c| (c.level, c.found, c.remedy.unwrap_or_default()))
        .collect();
    let wanted = [
        (Level::Warning, "bnxt_re0 (bnxt_en)", "pinned_exports"),
        (
            Level::Warning,
            "cxgb4_0 (cxgb4)",
            "selftest --device PROVIDER --nic cxgb4_0",
        ),
        (Level::Ok, "irdma0 (ice)", ""),
        (Level::Ok, "mlx5_0 (mlx5_core)", ""),
        (Level::Warning, "rxe0 is not a PCI device", "hardware NIC"),
    ];
    assert_eq!(all.len(), wanted.len(), "{all:#?}");
    for ((level, found, remedy), wanted) in all.iter().zip(wanted) {
        assert!(
            *level == wanted.0 && found.starts_with(wanted.1) && remedy.contains(wanted.2),
            "{found} -> {remedy}"
        );
    }
}

#[test]
fn an_empty_machine_is_reported_without_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    let machine = Environment {
        root: dir.path().to_owned(),
        open: Box::new(|| p2pmem::Device::open_path("/nonexistent/p2pmem")),
    };
    let checks = examine(&machine);
    let report = Report {
        ok: false,
        checks,
        pair: None,
    };
    let text = render_report(&report, &Table::default());
    let text = anstream::adapter::strip_str(&text).to_string();
    assert!(
        text.contains("FAIL   module") && text.contains("  module: modprobe p2pmem"),
        "{text}"
    );
    assert!(text.contains("2 failures"), "{text}");
}

#[test]
fn missing_module_is_one_failure() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let mut machine = healthy(root);
    fs::remove_dir_all(root.join("sys/module/p2pmem")).unwrap();
    fs::remove_dir_all(root.join("sys/kernel/config/p2pmem")).unwrap();
    machine.open = Box::new(|| p2pmem::Device::open_path("/nonexistent/p2pmem"));
    pci(root, "0000:03:00.0", "0x1de5", "0x120000", &[0; 256]);
    let bar = "0x3800000000 0x380fffffff 0x142204\n";
    put(root, "sys/devices/pci0000:00/0000:03:00.0/resource", bar);
    let checks = examine(&machine);
    let failures: Vec<_> = checks
        .iter()
        .filter(|c| c.level == Level::Failure)
        .map(|c| c.check)
        .collect();
    assert_eq!(failures, ["module"], "{checks:#?}");
    assert!(checks.iter().all(|c| c.check != "device" && c.check != "abi-version"));
    let (found, text) = level(&checks, "providers");
    assert!(
        found == Level::Info && text.contains("could be providers: 0000:03:00.0 (256 MiB)"),
        "{text}"
    );
    assert_eq!(level(&checks, "configfs").0, Level::Ok);
    put(root, "proc/mounts", "proc /proc proc rw 0 0\n");
    let (found, text) = level(&examine(&machine), "configfs");
    assert!(found == Level::Warning && text.contains("mount -t configfs"), "{text}");
    put(root, "sys/devices/pci0000:00/0000:03:00.0/resource", "");
    let (_, text) = level(&examine(&machine), "providers");
    assert!(
        text.contains("no device has memory") && text.contains("scan --all"),
        "{text}"
    );
    // The module is missing, and its device cannot be opened for another reason.
    machine.open = Box::new(|| Err(p2pmem::Error::Abi { module: 9, program: 1 }));
    assert_eq!(level(&examine(&machine), "abi-version").0, Level::Failure);
}

#[test]
fn drivers_that_own_memory_are_listed() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let machine = healthy(root);
    for (addr, class, driver) in [
        ("0000:03:00.0", "0x030200", "nvidia"),
        ("0000:04:00.0", "0x030000", "amdgpu"),
        ("0000:05:00.0", "0x030000", "xe"),
        ("0000:06:00.0", "0x120000", "fpga"),
    ] {
        pci(root, addr, "0x1234", class, &[0; 256]);
        let folder = root.join("sys/devices/pci0000:00").join(addr);
        std::os::unix::fs::symlink(Path::new("/drivers").join(driver), folder.join("driver")).unwrap();
    }
    let lines = || -> Vec<_> {
        let checks = examine(&machine).into_iter().filter(|c| c.check == "driver-memory");
        checks.map(|c| (c.level, c.found)).collect()
    };
    let all = lines();
    let words = [
        [
            "0000:03:00.0: nvidia: dma-buf",
            "with the open kernel modules",
            "nvidia-peermem",
        ],
        ["0000:04:00.0: amdgpu: dma-buf", "hsa_amd_portable_export_dmabuf", ""],
        ["0000:05:00.0: xe: dma-buf", "Level Zero", ""],
    ];
    assert_eq!(all.len(), words.len(), "{all:#?}");
    for ((level, text), words) in all.iter().zip(words) {
        assert!(
            *level == Level::Info && words.iter().all(|word| text.contains(word)),
            "{text}"
        );
    }
    put(root, "sys/module/nvidia_peermem/refcnt", "0");
    let version = "proc/driver/nvidia/version";
    put(
        root,
        version,
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.1\n",
    );
    // The modules are read once, by the inventory: the line says once what is loaded.
    let text = lines().remove(0).1;
    assert!(
        text.ends_with("(open kernel modules), peer memory by nvidia-peermem") && text.matches("open").count() == 1,
        "{text}"
    );
    put(root, version, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1\n");
    let text = lines().remove(0).1;
    assert!(
        text.contains("the proprietary ones are loaded") && text.matches("peermem").count() == 1,
        "{text}"
    );
}

#[test]
fn host_bridges_of_all_domains_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let machine = healthy(root);
    put(root, "proc/cpuinfo", "vendor_id\t: GenuineIntel\ncpu family\t: 6\n");
    let add = |bus: &str, addr: &str, ids: (&str, &str), class: &str| {
        let files = [("vendor", ids.0), ("device", ids.1), ("class", class)];
        write_pci_function(&root.join("sys"), &format!("{bus}/{addr}"), &files).unwrap();
    };
    let check = || level(&examine(&machine), "host-bridge");
    // Without a device of interest, all host bridges are checked.
    add("pci0001:00", "0001:00:00.0", ("0x1234", "0x0001"), "0x060000");
    let (found, text) = check();
    assert!(
        found == Level::Warning
            && text.contains("8086:09a2 (pci0000:00): the kernel permits")
            && text.contains("1234:0001 (pci0001:00) is not on the kernel's list"),
        "{text}"
    );
    // A drive below the first host bridge is the only device of interest.
    add(
        "pci0000:00",
        "0000:00:01.0/0000:01:00.0",
        ("0x144d", "0xa80a"),
        "0x010802",
    );
    assert_eq!(check().0, Level::Ok);
    add("pci0001:00", "0001:00:04.0", ("0x15b3", "0x1021"), "0x020700");
    assert_eq!(check().0, Level::Warning);
}
