// SPDX-License-Identifier: MIT OR Apache-2.0

//! Observation: `p2pmemctl top` on a terminal, and p2pmem-exporter, whose output a Prometheus parser reads.

use std::path::Path;

use anyhow::{Context, Result};
use p2pmem_vm::cluster::Cluster;

use crate::perf::perf;
use crate::{Test, clean, module};

/// The tests.
pub const TESTS: &[Test] = &[
    Test {
        name: "observe::top",
        topology: "demo",
        alone: true,
        run: |cluster| with_provider(cluster, "top.py"),
    },
    Test {
        name: "observe::metrics",
        topology: "demo",
        alone: true,
        run: |cluster| with_provider(cluster, "metrics.py"),
    },
];

/// Runs a script of tests/suites/observe with an accelerator published.
fn with_provider(cluster: &mut Cluster, script: &str) -> Result<()> {
    let module = module()?;
    let perf = perf()?;
    let bin = Path::new(&perf).parent().context("a folder of programs")?.display();
    let script = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../suites/observe")
        .join(script);
    clean(
        cluster.only()?,
        &format!(
            "ip link set lo up && insmod {module} && {bin}/p2pmemctl publish $P2PMEM_DEV_ACCEL0 >&2 &&
            python3 {} {bin} $P2PMEM_DEV_ACCEL0",
            script.display()
        ),
    )?;
    Ok(())
}
