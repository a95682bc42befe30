// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the library in guests that never load the module: memory that a driver published, and BARs of devices that
//! are bound to vfio-pci. `p2pmem_guest::cases::backends` has the tests.

use anyhow::{Context, Result};
use p2pmem_vm::cluster::Cluster;
use p2pmem_vm::vm::{Command, sibling};

use crate::{LIMIT, Test, describe, failure, run};

/// The topology of the tests with memory that a driver published.
const DRIVES: &str = "backends";
/// The topology of the tests with vfio-pci. No test of this topology loads the module, and vfio-pci keeps
/// the accelerators from test to test.
const IOMMU: &str = "vfio";

/// The tests.
pub const TESTS: &[Test] = &[
    Test {
        name: "backends::sysfs-direct-io",
        topology: DRIVES,
        alone: false,
        run: |cluster| check(cluster, "sysfs-direct-io"),
    },
    Test {
        name: "backends::sysfs-full",
        topology: DRIVES,
        alone: false,
        run: |cluster| check(cluster, "sysfs-full"),
    },
    Test {
        name: "backends::sysfs-killed",
        topology: DRIVES,
        alone: false,
        run: |cluster| check(cluster, "sysfs-killed"),
    },
    Test {
        name: "backends::sysfs-user",
        topology: DRIVES,
        alone: false,
        run: |cluster| check(cluster, "sysfs-user"),
    },
    Test {
        name: "backends::sysfs-unbind",
        topology: DRIVES,
        alone: false,
        run: |cluster| check(cluster, "sysfs-unbind"),
    },
    Test {
        name: "backends::no-iommu",
        topology: DRIVES,
        alone: false,
        run: |cluster| check(cluster, "no-iommu"),
    },
    Test {
        name: "backends::vfio-rdma",
        topology: IOMMU,
        alone: false,
        run: |cluster| check(cluster, "vfio-rdma"),
    },
    Test {
        name: "backends::vfio-any-bar",
        topology: IOMMU,
        alone: false,
        run: |cluster| check(cluster, "vfio-any-bar"),
    },
    Test {
        name: "backends::vfio-passed-on",
        topology: IOMMU,
        alone: false,
        run: |cluster| check(cluster, "vfio-passed-on"),
    },
    Test {
        name: "backends::vfio-refused",
        topology: IOMMU,
        alone: false,
        run: |cluster| check(cluster, "vfio-refused"),
    },
    Test {
        name: "backends::vfio-killed",
        topology: IOMMU,
        alone: false,
        run: |cluster| check(cluster, "vfio-killed"),
    },
    Test {
        name: "backends::vfio-unbind",
        topology: IOMMU,
        alone: false,
        run: |cluster| check(cluster, "vfio-unbind"),
    },
    Test {
        name: "backends::vfio-reset",
        topology: IOMMU,
        alone: false,
        run: |cluster| check(cluster, "vfio-reset"),
    },
];

fn check(cluster: &mut Cluster, name: &str) -> Result<()> {
    let vm = cluster.only()?;
    let program = sibling("p2pmem-guest-tests")?;
    let program = program.to_str().context("path")?;
    let outcome = run(vm, &Command::new([program, "without-module", name]).limit(LIMIT))?;
    if !outcome.is_clean() {
        return Err(failure(&[&outcome], format!("{name}: {}", describe(&outcome, vm))));
    }
    Ok(())
}
