// SPDX-License-Identifier: MIT OR Apache-2.0

//! The checks that a debug kernel makes by itself: leaked memory, and whether lockdep is still enabled.
//!
//! All other errors that such a kernel finds are in its log: see [`crate::dmesg`].

use std::time::Duration;

use anyhow::{Result, ensure};
use p2pmem_guest::in_time;

use crate::command::{Command, Status};
use crate::vm::Vm;

/// Scans twice. kmemleak reports an object that had no reference in two scans and did not change in between. At the
/// second scan the object must be at least five seconds old; the kernel has no other sign of this than the time.
const SCAN: &str = "
    set -e
    leaks=/sys/kernel/debug/kmemleak
    sleep 6 &
    echo scan >$leaks
    wait
    echo scan >$leaks
    echo \"lockdep $(sed -n 's/^ debug_locks: *//p' /proc/lockdep_stats)\"
    cat $leaks
    # Reports each leak once.
    echo clear >$leaks";

/// The time limit of the checks, on a kernel that is not a slow one.
const LIMIT: Duration = Duration::from_secs(180);

/// Leaks of the kernel itself. Each entry lists functions; a leak matches if its backtrace has all of them.
const KNOWN: &[&[&str]] = &[
    // nvmet keeps the p2pdma device of each namespace in a radix tree of its controller. When nvmet frees a controller,
    // it puts the devices but does not free the nodes of the tree (`nvmet_release_p2p_ns_map()`).
    &["radix_tree_insert+", "[nvmet]"],
    // The RDMA core maps the dma-buf of a doorbell page by dma_buf_phys_vec_to_sgt(), whose table is not freed. Exports of
    // p2pmem avoid this (rust/sys/dma_buf.c).
    &["dma_buf_phys_vec_to_sgt+", "uverbs_dmabuf_map+"],
];

/// Runs the checks in a guest and returns their findings. A kernel without [`crate::kernel::Kernel::checks`] has none.
///
/// # Errors
///
/// The guest has ended, its kernel has no such checks, or the checks exceed their time limit ([`Overrun`]).
pub fn run(vm: &mut Vm) -> Result<Vec<String>> {
    if !vm.kernel().checks {
        return Ok(Vec::new());
    }
    let command = Command::new(["sh", "-c", SCAN]).limit(LIMIT);
    let outcome = vm.exec(&command, &mut |_, _| {})?;
    in_time!(
        outcome.status != Status::TimedOut,
        "scanning for leaks took more than {LIMIT:?}"
    );
    ensure!(
        outcome.status == Status::Exited { code: 0 },
        "scanning for leaks: {:?} {}",
        outcome.status,
        String::from_utf8_lossy(&outcome.stderr)
    );
    Ok(findings(&String::from_utf8_lossy(&outcome.stdout)))
}

/// Returns the findings in the output of [`SCAN`].
fn findings(said: &str) -> Vec<String> {
    let (lockdep, leaks) = said.split_once('\n').unwrap_or((said, ""));
    let mut findings = Vec::new();
    if lockdep.trim() != "lockdep 1" {
        findings.push(format!("lockdep is off, so it looks no more: {lockdep:?}"));
    }
    let mut objects: Vec<Vec<&str>> = Vec::new();
    for line in leaks.lines() {
        if line.starts_with("unreferenced object") {
            objects.push(Vec::new());
        }
        if let Some(object) = objects.last_mut() {
            object.push(line.trim_end());
        }
    }
    let names = |object: &Vec<&str>, name: &str| object.iter().any(|line| line.contains(name));
    let known = |object: &Vec<&str>| KNOWN.iter().any(|all| all.iter().all(|name| names(object, name)));
    let new = objects.iter().filter(|object| !known(object));
    findings.extend(new.map(|object| format!("leaked: {}", object.join("\n    "))));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enabled_lockdep_without_leaks_is_clean() {
        assert!(findings("lockdep 1\n").is_empty());
    }

    #[test]
    fn disabled_lockdep_is_a_finding() {
        assert_eq!(findings("lockdep 0\n").len(), 1);
        assert_eq!(findings("").len(), 1);
    }

    #[test]
    fn known_leaks_of_the_kernel_are_ignored() {
        let said = |caller: &str| {
            format!(
                "lockdep 1\nunreferenced object 0xffff888008b3e000 (size 576):\n  comm \"kworker/0:1\", pid 12, jiffies 1\n  \
                 backtrace (crc 0):\n    radix_tree_insert+0x10/0x20\n    {caller}\n"
            )
        };
        assert!(findings(&said("nvmet_alloc_ctrl+0x1/0x2 [nvmet]")).is_empty());
        assert_eq!(findings(&said("p2pmem_probe+0x1/0x2 [p2pmem]")).len(), 1);
    }

    #[test]
    fn each_leak_is_one_finding() {
        let said = "lockdep 1\nunreferenced object 0xffff888008b3e000 (size 64):\n  comm \"insmod\", pid 12, jiffies 1\n  \
                    backtrace (crc 0):\n    leak_it+0x10/0x20 [provoke]\nunreferenced object 0xffff888008b3e100 (size 8):\n  \
                    comm \"x\", pid 13, jiffies 1\n";
        let found = findings(said);
        assert_eq!(found.len(), 2);
        assert!(found[0].starts_with("leaked: unreferenced object 0xffff888008b3e000 (size 64):"));
        assert!(found[0].contains("leak_it"));
        assert!(!found[1].contains("leak_it"));
    }
}
