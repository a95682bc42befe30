// SPDX-License-Identifier: MIT OR Apache-2.0

//! `p2pmemctl doctor --pair` while its provider is removed.

use std::fs;
use std::process::{Command, Output};
use std::thread;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::inflight::until;
use super::rdma_hold::{Hooks, joined};
use super::rdma_programs::{finish, sibling, spawn, text};
use super::{Bed, Case};

pub(super) const CASES: &[Case] = &[Case {
    name: "doctor-removed",
    about: "the provider is removed while doctor --pair measures, before it accesses the memory and during a transfer of the NIC: doctor reports this and exits with 1",
    topology: "nic",
    ruins: false,
    run: removed,
}];

/// The calls of doctor that strace recorded.
const CALLS: &str = "/tmp/p2pmem-doctor.strace";

fn removed(bed: &mut Bed) -> Result<()> {
    before_access(bed)?;
    bed.publish("accel0")?;
    during_transfer(bed)
}

/// Returns the words of `p2pmemctl doctor --pair` for nic0 and accel0.
fn doctor(bed: &Bed) -> Result<[String; 5]> {
    let program = sibling("p2pmemctl")?.display().to_string();
    let nic = bed.device("nic0")?.rdma.clone().context("nic0 has no RDMA device")?;
    let accel = bed.device("accel0")?.bdf.clone();
    Ok([program, "doctor".into(), "--pair".into(), nic, accel])
}

/// Fails unless doctor has reported the removal, and what it had found before.
fn reported(bed: &Bed, output: &Output) -> Result<()> {
    let (said, accel) = (text(output), &bed.device("accel0")?.bdf);
    let removed = format!("the provider {accel} was removed during the measurement");
    let registered = "registered the memory by dma-buf";
    println!("{said}");
    ensure!(
        output.status.code() == Some(1) && said.contains(&removed) && said.contains(registered),
        "{removed}: {said}"
    );
    Ok(())
}

/// Stops doctor after the registration, before its first access to the memory: there, the library installs its handler of
/// SIGBUS, which is the last call of this kind.
fn before_access(bed: &Bed) -> Result<()> {
    let words = doctor(bed)?;
    let traced = |stop: Option<usize>| {
        let mut strace = Command::new("strace");
        strace.args(["-qq", "-o", CALLS, "-e", "trace=rt_sigaction"]);
        if let Some(call) = stop {
            strace.args(["-e", &format!("inject=rt_sigaction:signal=SIGSTOP:when={call}")]);
        }
        strace.args(&words);
        strace
    };
    // A run without a removal counts the calls.
    let output = finish(spawn(&mut traced(None))?)?;
    ensure!(output.status.success(), "{}", text(&output));
    let calls = fs::read_to_string(CALLS)?;
    let calls = calls.lines().filter(|line| line.starts_with("rt_sigaction(")).count();
    fs::remove_file(CALLS)?;
    let before = bed.provider("accel0")?;

    let strace = spawn(&mut traced(Some(calls)))?;
    let result = (|| {
        until("doctor stops", || {
            Ok(fs::read_to_string(CALLS).is_ok_and(|calls| calls.contains("stopped by SIGSTOP")))
        })?;
        let stopped = bed.provider("accel0")?;
        ensure!(
            stopped.buffers == before.buffers + 1 && stopped.exports == before.exports + 1,
            "doctor has not registered a buffer: {stopped:?}"
        );
        bed.unpublish("accel0")
    })();
    let id = strace.id();
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
    for child in children.split_whitespace() {
        kill_process(Pid::from_raw(child.parse()?).context("a process id")?, Signal::CONT)?;
    }
    let output = finish(strace)?;
    result?;
    reported(bed, &output)
}

/// Holds a write of the NIC until the removal waits for it.
fn during_transfer(bed: &Bed) -> Result<()> {
    let hooks = Hooks::new(true)?;
    hooks.arm()?;
    let [program, arguments @ ..] = doctor(bed)?;
    let program = spawn(Command::new(program).args(arguments))?;
    let result = (|| {
        hooks.await_held()?;
        thread::scope(|scope| {
            let removing = scope.spawn(|| bed.unpublish("accel0"));
            let waiting = hooks.await_waiting();
            // Also after an error, nothing may wait for the write.
            hooks.release()?;
            waiting?;
            joined(removing)
        })
    })();
    drop(hooks);
    let output = finish(program)?;
    result?;
    reported(bed, &output)
}
