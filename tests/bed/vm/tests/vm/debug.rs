// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the debug kernel: it finds the errors that it is built to find.

use std::path::Path;

use anyhow::{Result, ensure};
use p2pmem_guest::in_time;
use p2pmem_vm::cluster::Cluster;
use p2pmem_vm::vm::Status;

use crate::{Test, clean, describe, module, sh};

/// The tests.
pub const TESTS: &[Test] = &[Test {
    name: "checks::find-what-is-wrong",
    topology: "small",
    alone: true,
    run: find,
}];

/// An error that a test module makes, and a word of the report about it. Lockdep comes first, because any report about
/// a lock disables lockdep. A task that sleeps with a spinlock held may wake up on another processor and cause such a
/// report ("spinlock wrong CPU").
const WRONG: &[(&str, &str)] = &[
    ("locks", "possible circular locking"),
    ("sleep", "scheduling while atomic"),
    ("after-free", "KASAN: slab-use-after-free"),
];

fn find(cluster: &mut Cluster) -> Result<()> {
    let module = module()?;
    let module = Path::new(&module).with_file_name("debug/p2pmem_provoke.ko");
    let load = |what: &str| format!("insmod {} what={what} && rmmod p2pmem_provoke", module.display());
    clean(cluster.only()?, &load("leak"))?;
    let leaks = cluster.check()?;
    let [leak] = leaks.as_slice() else {
        anyhow::bail!("not one finding for one leak: {leaks:?}")
    };
    ensure!(leak.contains("size 1024") && leak.contains("insmod"), "{leak}");
    for (what, word) in WRONG {
        let vm = cluster.only()?;
        let outcome = sh(vm, &load(what))?;
        in_time!(outcome.status != Status::TimedOut, "{what}: {}", describe(&outcome, vm));
        ensure!(
            outcome.status == Status::Exited { code: 0 } && outcome.findings.iter().any(|line| line.contains(word)),
            "{what}, no {word:?}: {}",
            describe(&outcome, vm)
        );
    }
    let blind = cluster.check()?;
    ensure!(blind.iter().any(|line| line.contains("lockdep is off")), "{blind:?}");
    // Other findings of this kernel are expected and not reported.
    let vm = cluster.only()?;
    let outcome = sh(vm, "echo c >/proc/sysrq-trigger; sleep 100")?;
    ensure!(!vm.is_alive(), "{}", describe(&outcome, vm));
    Ok(())
}
