// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the module in machines whose IOMMU translates all DMA. Most are cases of other topologies, run here by
//! name. The hardening report gets the number of bytes that were moved and compared, by vendor.

use anyhow::{Context, Result, ensure};
use p2pmem_guest::limits::Overrun;
use p2pmem_guest::wire::Listen;
use p2pmem_vm::cluster::Cluster;
use p2pmem_vm::vm::{Command, Status, Vm};
use serde_json::{Value, json};

use crate::perf::{ctl, perf};
use crate::{LIMIT, Test, both_clean, case_command, clean, describe, failure, hardening, module, run, sh};

/// The tests.
pub const TESTS: &[Test] = &[
    Test {
        name: "iommu::drive",
        topology: "iommu",
        alone: false,
        run: |cluster| drive(cluster.only()?),
    },
    Test {
        name: "iommu::module",
        topology: "iommu",
        alone: false,
        run: |cluster| cases(cluster.only()?, MODULE),
    },
    Test {
        name: "iommu::tools",
        topology: "iommu",
        alone: false,
        run: |cluster| tools(cluster.only()?),
    },
    Test {
        name: "iommu::pageless-vfio",
        topology: "iommu",
        alone: true,
        run: |cluster| vfio(cluster.only()?),
    },
    Test {
        name: "iommu::amd-drive",
        topology: "iommu-amd",
        alone: false,
        run: |cluster| amd(cluster.only()?),
    },
    Test {
        name: "iommu::selftest-finds-wrong-bytes",
        topology: "iommu-wrong",
        alone: false,
        run: |cluster| wrong_bytes(cluster.only()?),
    },
    Test {
        name: "iommu::rdma",
        topology: "iommu-pair",
        alone: false,
        run: rdma,
    },
    Test {
        name: "iommu::stale-writes",
        topology: "iommu-pair",
        alone: false,
        run: |cluster| cases(cluster.node("a")?, STALE),
    },
];

/// Cases of one machine with a drive: I/O, ends under load, output of the tools.
const MODULE: &[&str] = &[
    "list",
    "mmap",
    "fio",
    "unbind",
    "unbind-under-io",
    "dmabuf-revoke",
    "scrub",
];
/// Cases in which none of 20 writes may reach memory that has been freed or removed.
const STALE: &[&str] = &["rdma-stale-unbind", "rdma-stale-free"];

/// Fails unless the DMA of a device is translated. `device` is its name in the environment.
pub fn translated(vm: &mut Vm, device: &str) -> Result<()> {
    let outcome = clean(
        vm,
        &format!("cat /sys/bus/pci/devices/$P2PMEM_DEV_{device}/iommu_group/type"),
    )?;
    let kind = String::from_utf8_lossy(&outcome.stdout).trim().to_owned();
    ensure!(
        kind == "DMA",
        "the IOMMU group of {device} is of type {kind:?}, not DMA"
    );
    Ok(())
}

fn case(vm: &mut Vm, name: &str) -> Result<()> {
    let outcome = run(vm, &case_command(name, &module()?)?)?;
    if !outcome.is_clean() {
        return Err(failure(&[&outcome], format!("{name}: {}", describe(&outcome, vm))));
    }
    Ok(())
}

fn cases(vm: &mut Vm, names: &[&str]) -> Result<()> {
    translated(vm, "ACCEL0")?;
    names.iter().try_for_each(|name| case(vm, name))
}

/// O_DIRECT from drive to accelerator and back: each byte is compared, and none goes through host memory.
fn drive(vm: &mut Vm) -> Result<()> {
    translated(vm, "NVME0")?;
    let before = payload(vm, "accel0")?;
    case(vm, "o-direct")?;
    let moved = payload(vm, "accel0")? - before;
    ensure!(moved > 0, "the drive moved nothing");
    verified("intel", moved)
}

/// `topo`, `explain` and `doctor` report that the drive reaches the accelerator through the root complex, with
/// translation.
fn tools(vm: &mut Vm) -> Result<()> {
    translated(vm, "NVME0")?;
    let ctl = load_and_publish(vm)?;
    for (command, wanted) in [
        ("topo $P2PMEM_DEV_NVME0", "PHB"),
        (
            "explain 1M --near $P2PMEM_DEV_NVME0",
            "chosen: through the host bridge to ",
        ),
        ("doctor", "DMA translation is on ("),
    ] {
        // Other warnings of doctor do not matter here.
        let outcome = sh(vm, &format!("{ctl} {command}"))?;
        let said = String::from_utf8_lossy(&outcome.stdout);
        if !said.contains(wanted) || !outcome.findings.is_empty() {
            let text = format!(
                "{wanted:?} is not in the output of {command}: {}",
                describe(&outcome, vm)
            );
            return Err(failure(&[&outcome], text));
        }
    }
    clean(vm, &format!("{ctl} unpublish $P2PMEM_DEV_ACCEL0 && rmmod p2pmem"))?;
    Ok(())
}

/// Loads the module and publishes accel0, unless an earlier test did. Returns the path of p2pmemctl.
fn load_and_publish(vm: &mut Vm) -> Result<String> {
    let (module, ctl) = (module()?, ctl()?);
    clean(
        vm,
        &format!(
            "grep -q '^p2pmem ' /proc/modules || insmod {module}
            [ -e /sys/kernel/config/p2pmem/providers/$P2PMEM_DEV_ACCEL0 ] || {ctl} publish $P2PMEM_DEV_ACCEL0 --kernel-reserve 0"
        ),
    )?;
    Ok(ctl)
}

/// VFIO type1 maps host memory for a device's DMA, and refuses memory without struct pages.
fn vfio(vm: &mut Vm) -> Result<()> {
    translated(vm, "NVME0")?;
    let (module, ctl) = (module()?, ctl()?);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../suites/clients/vfio-map.py");
    let outcome = clean(
        vm,
        &format!(
            "set -e
            device=/sys/bus/pci/devices/$P2PMEM_DEV_NVME0
            modprobe -a vfio-pci vfio_iommu_type1
            echo $P2PMEM_DEV_NVME0 >$device/driver/unbind
            echo vfio-pci >$device/driver_override
            echo $P2PMEM_DEV_NVME0 >/sys/bus/pci/drivers_probe
            insmod {module}
            {ctl} publish $P2PMEM_DEV_ACCEL0 --mode pageless >&2
            python3 {script} $P2PMEM_DEV_NVME0 host p2pmem untouched host
            {ctl} unpublish $P2PMEM_DEV_ACCEL0 >&2
            rmmod p2pmem"
        ),
    )?;
    let said = String::from_utf8_lossy(&outcome.stdout);
    let wanted = "host: mapped\np2pmem: EFAULT\nuntouched: EFAULT\nhost: mapped\n";
    ensure!(said == wanted, "{said}");
    Ok(())
}

/// The bytes that fio writes and compares.
const COMPARED: u64 = 8 << 20;

/// QEMU's trace of the AMD IOMMU cannot resolve the drive's addresses. The bytes are compared nevertheless, and a
/// condition on host memory fails.
fn amd(vm: &mut Vm) -> Result<()> {
    translated(vm, "NVME0")?;
    let before = payload(vm, "unknown")?;
    let (module, ctl) = (module()?, ctl()?);
    let fio = format!(
        "fio --name=t --ioengine=psync --direct=1 --bs=64k --size={COMPARED} --rw=write --verify=crc32c --do_verify=1"
    );
    let script = format!(
        "set -e
        insmod {module}
        {ctl} publish $P2PMEM_DEV_ACCEL0 --kernel-reserve 0 >&2
        {fio} --mem=mmapshared:/dev/p2pmem --filename=$P2PMEM_BLOCK_NVME0
        {ctl} unpublish $P2PMEM_DEV_ACCEL0 >&2
        rmmod p2pmem"
    );
    clean(vm, &script)?;
    let moved = payload(vm, "unknown")? - before;
    ensure!(
        moved >= 2 * COMPARED,
        "the drive moved {moved} bytes, not {COMPARED} in each direction"
    );
    let claim = match case(vm, "o-direct") {
        Ok(()) => "it held".to_owned(),
        Err(e) if Overrun::is(&e) => return Err(e),
        Err(e) => format!("{e:#}"),
    };
    ensure!(
        claim.contains("the drive accessed unknown addresses, so the count of host memory proves nothing"),
        "a claim of no byte in host memory, with {moved} unknown: {claim}"
    );
    verified("amd", COMPARED)
}

/// Two devices below a switch, whose DMA moves wrong bytes, because QEMU does not model the switch's routing.
/// Registration succeeds, and either other bytes arrive or the IOMMU refuses the address.
fn wrong_bytes(vm: &mut Vm) -> Result<()> {
    translated(vm, "NIC0")?;
    let (module, ctl) = (module()?, ctl()?);
    clean(
        vm,
        &format!("insmod {module} && {ctl} publish $P2PMEM_DEV_ACCEL0 --kernel-reserve 0"),
    )?;
    let outcome = sh(
        vm,
        &format!("{ctl} selftest --device $P2PMEM_DEV_ACCEL0 --size 256K --nic $P2PMEM_RDMA_NIC0"),
    )?;
    let said = String::from_utf8_lossy(&outcome.stdout).into_owned();
    let pair = sh(vm, &format!("{ctl} doctor --pair $P2PMEM_RDMA_NIC0 $P2PMEM_DEV_ACCEL0"))?;
    clean(vm, &format!("{ctl} unpublish $P2PMEM_DEV_ACCEL0 && rmmod p2pmem"))?;
    let reported = String::from_utf8_lossy(&pair.stdout).into_owned();
    let found_by_pair = pair.findings.is_empty()
        && matches!(pair.status, Status::Exited { code: 1 })
        && reported.contains("addresses of the NIC are translated")
        && reported.contains("ok     pair-registration")
        && reported.contains("FAIL   pair-transfer")
        && reported.contains("iommu=pt");
    if !found_by_pair {
        let text = format!("doctor --pair did not find wrong bytes: {}", describe(&pair, vm));
        return Err(failure(&[&pair], text));
    }
    let found = outcome.findings.is_empty()
        && matches!(outcome.status, Status::Exited { code } if code != 0)
        && said.contains("by dma-buf in ")
        && said.contains("-> see the results of `p2pmemctl doctor` for");
    if !found {
        let text = format!("wrong bytes were not found: {}", describe(&outcome, vm));
        return Err(failure(&[&outcome], text));
    }
    Ok(())
}

/// Returns the bytes of the drive's payload so far, by target.
fn payload(vm: &mut Vm, target: &str) -> Result<u64> {
    let snapshot = vm.snapshot()?;
    let bytes = snapshot["nvme0"]["payload"][target].as_u64();
    bytes.with_context(|| format!("no {target}: {snapshot}"))
}

/// RDMA from the accelerator of one node to that of the other.
fn rdma(cluster: &mut Cluster) -> Result<()> {
    let (ctl, perf) = (ctl()?, perf()?);
    for node in ["a", "b"] {
        let vm = cluster.node(node)?;
        translated(vm, "NIC0")?;
        load_and_publish(vm)?;
    }
    let shell = |script: String| Command::new(["sh", "-c", script.as_str()]).limit(LIMIT);
    let server = shell(format!(
        "{perf} serve --nic $P2PMEM_RDMA_NIC0 --memory accelerator --events --timeout 150"
    ));
    let client = shell(format!(
        "{perf} run $P2PMEM_ADDR_B --json --nic $P2PMEM_RDMA_NIC0 --memory accelerator --timeout 150 --verify -n 8 --size 1M"
    ));
    let served = cluster.serve_to_the_end(("b", &server.listen(Listen::Tcp(PORT))), ("a", &client))?;
    let result = (|| {
        let outcome = both_clean(served)?;
        let measured: Value = serde_json::from_slice(&outcome.stdout).context("output of p2pmem-perf")?;
        let results = measured["results"].as_array().context("no results")?;
        let mut bytes = 0;
        for result in results {
            ensure!(result["verified"] == true, "not every byte is right: {result}");
            let checked = result["nics"][0]["checked"]["bytes"].as_u64();
            bytes += checked.context("nothing was checked")?;
        }
        ensure!(bytes >= 2 << 20, "only {bytes} bytes were checked: {measured}");
        verified("intel", bytes)
    })();
    for node in ["a", "b"] {
        clean(
            cluster.node(node)?,
            &format!("{ctl} unpublish $P2PMEM_DEV_ACCEL0 && rmmod p2pmem"),
        )?;
    }
    result
}

/// The port of p2pmem-perf.
const PORT: u16 = 18520;

/// Adds bytes that were moved through a vendor's IOMMU and compared to the hardening report.
fn verified(vendor: &str, bytes: u64) -> Result<()> {
    hardening::add(json!({ "iommu": { vendor: bytes } }));
    Ok(())
}
