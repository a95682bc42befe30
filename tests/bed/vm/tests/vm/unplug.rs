// SPDX-License-Identifier: MIT OR Apache-2.0

//! Unplugs a drive while another machine writes to it, through an accelerator's memory.

use anyhow::{Context, Result, ensure};
use p2pmem_guest::limits::rounds;
use p2pmem_guest::wire::Listen;
use p2pmem_vm::cluster::Cluster;
use p2pmem_vm::vm::{Command, Vm};
use serde_json::json;

use crate::bed::{DEBUG, STOCK};
use crate::perf::ctl;
use crate::{LIMIT, Test, both_clean, clean, hardening, module};

/// The tests.
pub const TESTS: &[Test] = &[Test {
    name: "unplug::nvmet",
    topology: "rdma",
    alone: true,
    run: nvmet,
}];

/// The port by which both sides coordinate.
const PORT: u16 = 18530;

/// Returns the bytes that the drive has read from the memory `from`.
fn written(vm: &mut Vm, from: &str) -> Result<u64> {
    Ok(vm.snapshot()?["nvme0"]["write"][from].as_u64().unwrap_or(0))
}

/// Returns the name of the guests' kernel.
fn kernel(cluster: &mut Cluster) -> Result<&'static str> {
    let checks = cluster.node("a")?.kernel().checks;
    Ok(if checks { DEBUG } else { STOCK })
}

fn nvmet(cluster: &mut Cluster) -> Result<()> {
    let (module, ctl) = (module()?, ctl()?);
    let clients = concat!(env!("CARGO_MANIFEST_DIR"), "/../../suites/clients");
    let script = format!("{clients}/nvmet-unplug.py");
    for node in ["a", "b"] {
        let load = format!(
            "set -e
            module={module}
            case $(uname -r) in
                *-p2pmem-debug) module=${{module%/*}}/debug/${{module##*/}} ;;
            esac
            insmod $module
            {ctl} publish $P2PMEM_DEV_ACCEL0 --kernel-reserve 64M >&2
            modprobe nvme-rdma
            [ $P2PMEM_NODE = a ] || {clients}/nvmet-target.sh p2pmem $P2PMEM_RDMA_ADDR_B_NIC0"
        );
        clean(cluster.node(node)?, &load)?;
    }
    let shell = |line: String| Command::new(["sh", "-c", line.as_str()]).limit(LIMIT);
    let target = shell(format!("exec {script} target p2pmem {PORT}")).listen(Listen::Tcp(PORT));
    let host = shell(format!(
        "exec {script} host p2pmem {PORT} $P2PMEM_RDMA_ADDR_B_NIC0 $P2PMEM_ADDR_B"
    ));
    let rounds = rounds(2);
    for round in 0..rounds {
        let vm = cluster.node("b")?;
        let (before, astray) = (written(vm, "accel0")?, written(vm, "host")?);
        let served = cluster.serve_to_the_end(("b", &target), ("a", &host))?;
        both_clean(served).with_context(|| format!("round {round}"))?;
        let vm = cluster.node("b")?;
        let (through, astray) = (written(vm, "accel0")? - before, written(vm, "host")? - astray);
        ensure!(
            through >= 32 * (64 << 10) && astray == 0,
            "round {round}: the drive read {through} bytes of the accelerator's memory and {astray} of the host's"
        );
    }
    // Nobody holds the memory any more: nvmet has given its part back.
    for node in ["a", "b"] {
        let leave = format!(
            "set -e
            if [ $P2PMEM_NODE = b ]; then
                cd /sys/kernel/config/nvmet
                rm ports/1/subsystems/p2pmem
                rmdir ports/1 subsystems/p2pmem/namespaces/1 subsystems/p2pmem
            fi
            {ctl} unpublish $P2PMEM_DEV_ACCEL0 >&2
            rmmod p2pmem"
        );
        clean(cluster.node(node)?, &leave)?;
    }
    let kernel = kernel(cluster)?;
    hardening::add(json!({ (hardening::ROUNDS): { "nvmet": { kernel: rounds } } }));
    Ok(())
}
