// SPDX-License-Identifier: MIT OR Apache-2.0

//! The Python package with the module: the tests in tests/suites/python, which pytest runs in a guest.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use p2pmem_vm::cluster::Cluster;

use crate::perf::perf;
use crate::{Test, clean, module};

/// The tests.
pub const TESTS: &[Test] = &[Test {
    name: "python::package",
    topology: "nic",
    alone: false,
    run: package,
}];

/// Runs the tests, and prints pytest's last line, which run-tests counts.
fn package(cluster: &mut Cluster) -> Result<()> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let site = here.join("../../../build/python/site");
    ensure!(
        site.join("p2pmem").exists(),
        "{} has no package: make user",
        site.display()
    );
    let perf = perf()?;
    let programs = Path::new(&perf).parent().context("a folder of programs")?;
    let suite = here.join("../../suites/python").display().to_string();
    let command = format!(
        "export PYTHONPATH={} P2PMEM_BIN={} P2PMEM_MODULE={} PYTHONDONTWRITEBYTECODE=1 &&
        exec python3 -m pytest -c /dev/null --rootdir={suite} -p no:cacheprovider -q --color=no --tb=short {suite}",
        site.display(),
        programs.display(),
        module()?,
    );
    let outcome = clean(cluster.only()?, &command)?;
    let said = String::from_utf8_lossy(&outcome.stdout).into_owned();
    let last = said.lines().last().context("pytest printed nothing")?;
    ensure!(last.contains(" passed") && !last.contains("skipped"), "{said}");
    println!("{last}");
    Ok(())
}
