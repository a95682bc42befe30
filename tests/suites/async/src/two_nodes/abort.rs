// SPDX-License-Identifier: MIT OR Apache-2.0

//! Byte code that ends in the middle: what the processor sees, and that everything can be released and used again. A NIC sends
//! to itself, from one queue pair to another one; the accelerator drives both by a ring each.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use p2pmem::AttachmentState;
use p2pmem_async::Error;
use p2pmem_async::bytecode::wait_for;
use p2pmem_async::cqe::{OWNER, Syndrome};
use p2pmem_async::pingpong::options::Deadline;
use p2pmem_async::region::RegionKind;
use p2pmem_async::sys::uverbs::QpState;
use p2pmem_async::wqe::Transport;

use super::device::{DeviceSide, Settings};
use super::usage::Devices;
use super::{Role, Side};
use crate::hardware::Hardware;
use crate::report::{AbortCase, Aborted};

/// The time limit of a poll that does not come true, and of one that does.
const SHORT_POLL: Duration = Duration::from_millis(50);
const LONG_POLL: Duration = Duration::from_secs(30);
/// Receives of each queue pair.
const RECEIVES: u32 = 4;

fn settings(role: Role) -> Settings {
    Settings {
        transport: Transport::Rc,
        role,
        size: 128,
        ring: match role {
            Role::First => 1,
            Role::Second => 2,
        },
        entries: 64,
        operations: 64,
        queue: 16,
        completions: 32,
        limit: LONG_POLL,
    }
}

/// Creates two sides that are connected with each other.
fn pair(hardware: &Hardware, first: Settings) -> Result<(DeviceSide, DeviceSide)> {
    let a = DeviceSide::with(hardware, &first)?;
    let b = DeviceSide::with(hardware, &settings(Role::Second))?;
    a.receives(RECEIVES)?;
    b.receives(RECEIVES)?;
    a.endpoint.connect(&b.address())?;
    b.endpoint.connect(&a.address())?;
    Ok((a, b))
}

/// Sends a message from `a` to `b`, by the accelerator.
fn message(a: &mut DeviceSide, b: &mut DeviceSide) -> Result<()> {
    a.send(true)?;
    a.wait_for_sends(1)?;
    a.executor.start()?;
    a.executor.finish(LONG_POLL)?;
    // The message has arrived, so that the poll comes true at once, also with a short limit.
    b.receive()?;
    b.executor.start()?;
    b.executor.finish(LONG_POLL)?;
    for (queue, count) in [(a.endpoint.qp().send_cq(), 1), (b.endpoint.qp().receive_cq(), 1)] {
        let completions = queue.poll_cq(usize::MAX)?;
        ensure!(
            completions.len() == count && completions[0].failure.is_none(),
            "{completions:?}"
        );
    }
    b.receives(1)
}

/// A message that never comes: the ring stops at the poll, and works again after an abort.
fn no_message(hardware: &Hardware) -> Result<String> {
    let short = Settings {
        limit: SHORT_POLL,
        ..settings(Role::First)
    };
    let (mut a, mut b) = pair(hardware, short)?;
    let peek = a.endpoint.qp().receive_cq().peek_cq(1)?;
    a.executor.submit(peek.program)?;
    a.executor.start()?;
    let error = a.executor.finish(LONG_POLL).err().context("the poll came true")?;
    a.executor.abort(LONG_POLL)?;
    ensure!(
        a.endpoint.qp().receive_cq().abort_peek_cq(peek.id),
        "the peek has ended"
    );
    // The same queue pairs, in both directions.
    message(&mut b, &mut a)?;
    Ok(error.to_string())
}

/// More operations than the executor takes: the commit is refused, and the work request can be taken back.
fn too_long(hardware: &Hardware) -> Result<String> {
    let short = Settings {
        operations: 3,
        ..settings(Role::First)
    };
    let (mut a, _b) = pair(hardware, short)?;
    let error = a.send(true).err().context("the commit was not refused")?;
    ensure!(
        matches!(
            error.downcast_ref(),
            Some(Error::TooLong {
                operations: 4,
                limit: 3,
                ..
            })
        ),
        "{error:#}"
    );
    ensure!(
        a.endpoint.qp().rollback_qp().len() == 1,
        "the work request was not taken back"
    );
    Ok(error.to_string())
}

/// A ring without space refuses the program as a whole.
fn full_ring(hardware: &Hardware) -> Result<String> {
    let small = Settings {
        entries: 4,
        ..settings(Role::First)
    };
    let (mut a, _b) = pair(hardware, small)?;
    // Four entries, which are not started.
    a.send(true)?;
    let error = a.wait_for_sends(1).err().context("the ring was not full")?;
    Ok(error.to_string())
}

/// More work requests than the completion queue has entries: refused, so that it never overruns.
fn overrun(hardware: &Hardware) -> Result<String> {
    let few = Settings {
        completions: 4,
        ..settings(Role::First)
    };
    let (mut a, _b) = pair(hardware, few)?;
    for _ in 0..4 {
        a.send(true)?;
    }
    let error = a.send(true).err().context("the completion queue can overrun")?;
    ensure!(
        matches!(error.downcast_ref(), Some(Error::CompletionQueueFull { size: 4, .. })),
        "{error:#}"
    );
    Ok(error.to_string())
}

/// The other queue pair is destroyed in the middle of a batch, after the first of three messages: the NIC gives up, and the
/// processor sees which work request failed.
fn other_side_dies(hardware: &Hardware) -> Result<String> {
    let (mut a, mut b) = pair(hardware, settings(Role::First))?;
    a.send(true)?;
    // The rest of the batch waits for a word of memory, which the processor writes after the other side's end.
    let memory = a.data.region().clone();
    a.executor.map(&memory)?;
    memory.store_dword(0, 0);
    memory.fence();
    a.executor.submit(wait_for(&memory, 0, 1)?)?;
    a.executor.start()?;
    b.receive()?;
    b.executor.start()?;
    b.executor.finish(LONG_POLL)?;
    drop(b);
    for _ in 0..2 {
        a.send(true)?;
    }
    // A failure is a completion, too, so the byte code ends.
    a.wait_for_sends(3)?;
    a.executor.start()?;
    memory.store_dword(0, 1);
    memory.fence();
    a.executor.finish(LONG_POLL)?;
    let completions = a.endpoint.qp().send_cq().poll_cq(usize::MAX)?;
    let failures: Vec<_> = completions.iter().filter_map(|done| done.failure).collect();
    ensure!(
        completions.len() == 3
            && completions[0].failure.is_none()
            && failures.len() == 2
            && failures[0].syndrome == Syndrome::RetryExceeded
            && failures[1..].iter().all(|other| other.syndrome == Syndrome::Flushed),
        "{completions:?}"
    );
    ensure!(
        a.endpoint.refresh()? == Some(QpState::Error),
        "the queue pair is not in the error state"
    );
    let refused = a.send(true).err().context("a post in the error state")?;
    ensure!(
        matches!(refused.downcast_ref(), Some(Error::QueuePairError { .. })),
        "{refused:#}"
    );
    Ok(format!("{}; afterwards: {refused}", failures[0]))
}

/// The processor ends the queue pair between post and commit: the commit is refused with the reason.
fn error_state(hardware: &Hardware) -> Result<String> {
    let (a, _b) = pair(hardware, settings(Role::First))?;
    a.endpoint.fail("the program gave up")?;
    let error = a
        .endpoint
        .qp()
        .commit_qp()
        .err()
        .context("a commit in the error state")?;
    ensure!(matches!(error, Error::QueuePairError { .. }), "{error}");
    Ok(error.to_string())
}

/// The doorbell page is destroyed while the accelerator waits: its doorbell does not arrive.
fn doorbell_revoked(hardware: &Hardware) -> Result<String> {
    let (mut a, b) = pair(hardware, settings(Role::First))?;
    let peek = a.endpoint.qp().receive_cq().peek_cq(1)?;
    let completions = a
        .endpoint
        .qp()
        .receive_cq()
        .regions()
        .into_iter()
        .find(|region| region.kind() == RegionKind::Completions)
        .context("a completion queue without entries")?
        .clone();
    // The memory of the queues stays for the accelerator.
    let kept: Vec<_> = a.endpoint.regions().cloned().collect();
    a.executor.submit(peek.program)?;
    a.send(true)?;
    a.executor.start()?;
    let before = Devices::read()?;
    let DeviceSide {
        mut executor,
        attachment,
        endpoint,
        ..
    } = a;
    drop(endpoint);
    let state = attachment.state()?;
    ensure!(
        matches!(state, AttachmentState::Stopped | AttachmentState::Revoked),
        "the attachment is {state:?}"
    );
    // What the accelerator waits for: an entry with the owner bit of the first lap.
    let entry = completions.load_dword(60);
    completions.store_dword(60, entry & !OWNER);
    completions.fence();
    let error = executor.finish(LONG_POLL).err().context("the doorbell was written")?;
    let devices = Devices::read()?.since(before)?;
    ensure!(devices.rung == 0, "{} doorbells were rung", devices.rung);
    drop((executor, attachment, kept, b));
    Ok(format!("{error}; access to the doorbell: {state:?}"))
}

/// Runs all cases. Each uses the devices after the one before. [`crate::report::missed_aborts`] checks the errors.
///
/// # Errors
///
/// A case did not end as it must.
pub fn run(hardware: &Hardware, deadline: Deadline) -> Result<Vec<Aborted>> {
    let before = hardware.device.info()?.buffers;
    let mut all = Vec::new();
    for case in AbortCase::ALL {
        deadline.left()?;
        let error = match case {
            AbortCase::NoMessage | AbortCase::NoMessageAgain => no_message(hardware),
            AbortCase::TooLong => too_long(hardware),
            AbortCase::FullRing => full_ring(hardware),
            AbortCase::Overrun => overrun(hardware),
            AbortCase::ErrorState => error_state(hardware),
            AbortCase::OtherSideDies => other_side_dies(hardware),
            AbortCase::DoorbellRevoked => doorbell_revoked(hardware),
        };
        let error = error.with_context(|| case.about())?;
        all.push(Aborted { case, error });
    }
    let after = hardware.device.info()?.buffers;
    ensure!(after == before, "{before} buffers before, {after} afterwards");
    Ok(all)
}
