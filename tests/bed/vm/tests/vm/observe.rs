// SPDX-License-Identifier: MIT OR Apache-2.0

//! Observation: `p2pmemctl scan` without and with the module, p2pmemctl on a terminal, and p2pmem-exporter, whose output
//! a Prometheus parser reads and Prometheus itself scrapes.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use p2pmem_vm::cluster::Cluster;

use crate::perf::perf;
use crate::{Test, clean, module};

/// The tests.
pub const TESTS: &[Test] = &[
    Test {
        name: "observe::scan",
        topology: "demo",
        alone: true,
        run: |cluster| {
            script(
                cluster,
                "scan.py",
                "",
                &format!("{} $P2PMEM_DEV_ACCEL0 $P2PMEM_DEV_NVME1 $P2PMEM_DEV_NVME0", module()?),
            )
        },
    },
    Test {
        name: "observe::terminal",
        topology: "demo",
        alone: true,
        run: |cluster| with_provider(cluster, "terminal.py", ""),
    },
    Test {
        name: "observe::metrics",
        topology: "demo",
        alone: true,
        run: |cluster| with_provider(cluster, "metrics.py", ""),
    },
    Test {
        name: "observe::prometheus",
        topology: "demo",
        alone: true,
        run: |cluster| with_provider(cluster, "prometheus.py", ALERTS),
    },
];

/// The alert rules for Prometheus.
const ALERTS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../../userspace/p2pmem-exporter/alerts.yml"
);

/// Runs a script of tests/suites/observe with an accelerator published, its address, and a further argument.
fn with_provider(cluster: &mut Cluster, name: &str, argument: &str) -> Result<()> {
    let before = format!(
        "ip link set lo up && insmod {} && {}/p2pmemctl publish $P2PMEM_DEV_ACCEL0 >&2 &&",
        module()?,
        programs()?.display()
    );
    script(cluster, name, &before, &format!("$P2PMEM_DEV_ACCEL0 {argument}"))
}

/// Runs shell commands, and then a script of tests/suites/observe with the folder of programs and further arguments.
fn script(cluster: &mut Cluster, name: &str, before: &str, arguments: &str) -> Result<()> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../suites/observe")
        .join(name);
    let command = format!(
        "{before} python3 {} {} {arguments}",
        script.display(),
        programs()?.display()
    );
    clean(cluster.only()?, &command)?;
    Ok(())
}

/// Returns the folder of user space's programs.
fn programs() -> Result<PathBuf> {
    Ok(Path::new(&perf()?).parent().context("a folder of programs")?.to_owned())
}
