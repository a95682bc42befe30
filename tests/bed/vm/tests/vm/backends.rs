// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the library in guests without the module: memory that a driver published, and BARs of devices that are bound to
//! vfio-pci. `p2pmem_cases::backends` has the tests. One of them loads the module and unloads it again.

use anyhow::{Context, Result};
use p2pmem_cases::backends::Check;
use p2pmem_vm::vm::{Command, sibling};

use crate::bed::{Attempt, Bed};
use crate::{LIMIT, describe, failure, run};

/// Runs a test.
pub fn run_check(bed: &Bed, check: &Check, attempt: Attempt) -> Result<()> {
    let mut guests = bed.guests(check.topology, attempt)?;
    let vm = guests.cluster.only()?;
    let program = sibling("p2pmem-guest-tests")?;
    let program = program.to_str().context("path")?;
    let command = Command::new([program, "without-module", check.name]).limit(LIMIT);
    let outcome = run(vm, &command.env("P2PMEM_MODULE", bed.module()?))?;
    if !outcome.is_clean() {
        return Err(failure(
            &[&outcome],
            format!("{}: {}", check.name, describe(&outcome, vm)),
        ));
    }
    bed.give_back(guests, check.ruins, check.name)
}
