// SPDX-License-Identifier: MIT OR Apache-2.0

//! Measures the instructions of registering memory with a NIC: an accelerator's memory by its dma-buf, and host memory
//! by `ibv_reg_mr()`, in the same guest. Writes `registration.json`.

use anyhow::{Context, Result, ensure};
use p2pmem_vm::cluster::Cluster;
use serde_json::{Value, json};

use crate::perf::{ctl, perf};
use crate::{Test, clean, module, write_report};

/// The tests.
pub const TESTS: &[Test] = &[Test {
    name: "registration::costs-the-same-for-every-size",
    topology: "registration",
    alone: true,
    run: costs,
}];

/// The smallest and the largest registration, in bytes.
const SIZES: [u64; 2] = [2 << 20, 256 << 20];
/// The limit for the largest registration of an accelerator's memory, relative to the smallest: the cost must not grow
/// with the size.
const FLAT: f64 = 1.2;
/// The lower bound for the largest registration of host memory, relative to the smallest. It has 128 times as many
/// pages; a smaller ratio means that the measurement is wrong.
const GROWS: f64 = 8.0;

fn costs(cluster: &mut Cluster) -> Result<()> {
    let module = module()?;
    let (perf, ctl, vm) = (perf()?, ctl()?, cluster.only()?);
    let script = format!(
        "insmod {module} && {ctl} publish $P2PMEM_DEV_ACCEL0 --kernel-reserve 0 >&2 &&
        {perf} --json register --nic $P2PMEM_RDMA_NIC0 --memory cpu,accelerator --size 2M-256M -n 3"
    );
    let outcome = clean(vm, &script)?;
    let measured: Value = serde_json::from_slice(&outcome.stdout).context("output of p2pmem-perf")?;
    let cost = |memory: &str, bytes: u64| -> Result<f64> {
        let costs = measured["costs"].as_array().context("no costs")?;
        let one = costs
            .iter()
            .find(|cost| cost["memory"] == memory && cost["bytes"] == bytes)
            .with_context(|| format!("no cost of {bytes} bytes of {memory}"))?;
        one["register_cpu_ns"].as_f64().context("a cost without a number")
    };
    let [small, large] = SIZES;
    let growth = |memory| Ok::<_, anyhow::Error>(cost(memory, large)? / cost(memory, small)?);
    let (accelerator, host) = (growth("accelerator")?, growth("cpu")?);
    let ratio = cost("cpu", large)? / cost("accelerator", large)?;
    write_report(
        "registration.json",
        json!({
            "unit": "instructions of the registering program, in user space and in the kernel",
            "smallest_bytes": small,
            "largest_bytes": large,
            "growth_accelerator": accelerator,
            "growth_host": host,
            "host_by_accelerator_at_largest": ratio,
            "measured": measured,
        }),
    )?;
    ensure!(
        accelerator <= FLAT,
        "registering {large} bytes of an accelerator costs {accelerator:.2} times what {small} bytes cost: {measured}"
    );
    ensure!(
        host >= GROWS,
        "registering host memory grows by {host:.2} only: {measured}"
    );
    Ok(())
}
