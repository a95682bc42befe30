// SPDX-License-Identifier: MIT OR Apache-2.0

//! The example `broadcast`: several processes and devices read one buffer, and the devices' counters show that none of
//! the payload went through host memory.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Bed, Case};
use crate::host;
use crate::wire::Request;

pub(super) const CASES: &[Case] = &[Case {
    name: "broadcast",
    about: "three processes, two NICs and a drive read one buffer, and no payload goes through host memory",
    topology: "broadcast",
    ruins: false,
    run: broadcast,
}];

const SIZE: u64 = 8 << 20;

/// Returns the path of the example, which `make user` builds.
fn program() -> Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name("examples").join("broadcast");
    ensure!(path.exists(), "{} does not exist: run `make user`", path.display());
    Ok(path)
}

/// Returns the number at `path` in a snapshot of the devices' counters, or 0 if the last name is missing.
fn count(snapshot: &Value, path: &[&str]) -> Result<u64> {
    let (last, front) = path.split_last().context("the path is empty")?;
    let mut at = snapshot;
    for name in front {
        at = at.get(name).with_context(|| format!("{path:?}: no {name:?} in {at}"))?;
    }
    Ok(at.get(last).and_then(Value::as_u64).unwrap_or(0))
}

fn broadcast(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let id = bed.provider("accel0")?.id;
    let rdma = |name: &str| bed.device(name)?.rdma.clone().context("no RDMA device");
    let (first, second) = (rdma("nic0")?, rdma("nic1")?);
    let block = bed.block("nvme0")?;
    let before = host::request(&Request::Snapshot)?;
    let output = Command::new(program()?)
        .args([&SIZE.to_string(), "cpu", "cpu", "cpu", &first, &second])
        .arg(&block)
        .output()?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let after = host::request(&Request::Snapshot)?;
    print!("{printed}");
    ensure!(output.status.success(), "{}: {printed}", output.status);
    ensure!(printed.matches("is what was written").count() == 5, "{printed}");
    ensure!(printed.contains("by the drive"), "{printed}");
    let growth = |path: &[&str]| -> Result<u64> { Ok(count(&after, path)? - count(&before, path)?) };
    // Each NIC read the buffer from an accelerator and wrote the same number of bytes to an accelerator.
    for nic in ["nic0", "nic1"] {
        let of = |what: &str| growth(&[nic, "counters", "payload", what]);
        let numbers = (
            of("peer_read")?,
            of("peer_written")?,
            of("host_read")?,
            of("host_written")?,
        );
        println!("{nic}: {numbers:?} bytes read from and written to peers, read from and written to host memory");
        ensure!(numbers == (SIZE, SIZE, 0, 0), "{nic}: {numbers:?}: {}", after[nic]);
    }
    // The drive read the buffer from the accelerator that has it.
    let from = |target: &str| growth(&["nvme0", "write", target]);
    let (peer, ram) = (from("accel0")? + from("accel1")?, from("host")?);
    println!("nvme0: {peer} bytes from accelerators, {ram} from host memory");
    ensure!(
        from("unknown")? == 0,
        "payload at unknown addresses: {}",
        after["nvme0"]
    );
    ensure!(peer == SIZE && ram == 0, "nvme0: {peer} {ram}: {}", after["nvme0"]);
    for accel in ["accel0", "accel1"] {
        let host = growth(&[accel, "counters", "host_read"])? + growth(&[accel, "counters", "host_written"])?;
        ensure!(host == 0, "{accel} moved {host} bytes of host memory");
    }
    // The drive has the content of the buffer.
    let mut bytes = vec![0; SIZE as usize];
    File::open(&block)?.read_exact_at(&mut bytes, 0)?;
    for (n, word) in bytes.chunks_exact(8).enumerate() {
        let expected = ((8 * n as u64) ^ 0x5a).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ensure!(
            word == expected.to_ne_bytes(),
            "byte {:#x} of the drive differs from the buffer",
            8 * n
        );
    }
    // The last process freed the buffer.
    ensure!(bed.provider("accel0")?.id == id && bed.settled()?.1 == 0);
    bed.unpublish("accel1")
}
