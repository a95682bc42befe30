// SPDX-License-Identifier: MIT OR Apache-2.0

//! Errors of queue pairs that byte code drives, on a NIC: each case causes one, and verifies which error or completion reports it,
//! what still works, and that the kernel has no object left afterwards.
//!
//! Both queue pairs of a case are of one port. In `peer-dies`, the other one is of a process that is killed.

use std::fmt::Debug;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use p2pmem::rdma::Nic;
use p2pmem_async::Error;
use p2pmem_async::bytecode::{Peer, Program};
use p2pmem_async::cqe::{Direction, Syndrome};
use p2pmem_async::endpoint::{Address, Endpoint, EndpointOptions, Port};
use p2pmem_async::error::ExecutionFailure;
use p2pmem_async::interpreter::Interpreter;
use p2pmem_async::memory::{DataMemory, MemorySource};
use p2pmem_async::queue::{AsyncCq, AsyncQp};
use p2pmem_async::sys::uverbs::QpState;
use p2pmem_async::wqe::{Payload, ReceiveRequest, Remote, SendOperation, SendRequest, Transport};

/// Limit of programs that end. Far beyond what a loaded machine needs.
const LONG: Duration = Duration::from_secs(50);
/// Limit of programs whose poll never comes true.
const SHORT: Duration = Duration::from_millis(200);
/// Bytes of a message.
const SIZE: u32 = 256;
/// Bytes of a node's payload memory.
const MEMORY: usize = 1 << 16;
/// Receives of the process that is killed.
const RECEIVES: u64 = 3;

/// Cause errors of queue pairs, and verify how they are reported.
#[derive(Debug, Parser)]
#[command(name = "p2pmem-async-faults", version)]
struct Options {
    /// The NIC.
    #[arg(long, default_value = "mlx5_0")]
    nic: String,
    /// The other side's address, as JSON: be the process that is killed.
    #[arg(long, hide = true)]
    victim_of: Option<String>,
    /// The case; all by default.
    case: Option<Case>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Case {
    /// A poll that never comes true ends at the time limit.
    PollLimit,
    /// A queue pair in the error state refuses posts and commits.
    ErrorState,
    /// The other side has no such memory.
    RemoteAccess,
    /// The other side's process is killed in the middle of a batch.
    PeerDies,
    /// The executor ends in the middle of a program.
    ExecutorDies,
    /// A completion queue has fewer entries than work requests are posted.
    SmallCompletionQueue,
    /// A message is longer than the receive.
    SmallReceive,
}

/// What the cases share.
struct Bed {
    name: String,
    port: Arc<Port>,
    /// The NIC's objects before a case.
    before: String,
}

/// An endpoint and its payload memory.
struct End {
    endpoint: Endpoint,
    data: DataMemory,
}

/// What a completion reports.
type Report = (Direction, u64, Option<Syndrome>);

fn sent(id: u64, syndrome: Option<Syndrome>) -> Report {
    (Direction::Send, id, syndrome)
}

fn received(id: u64, syndrome: Option<Syndrome>) -> Report {
    (Direction::Receive, id, syndrome)
}

impl End {
    fn new(port: &Arc<Port>, change: impl FnOnce(&mut EndpointOptions)) -> Result<Self> {
        let mut options = EndpointOptions::new(Transport::Rc, Peer::cpu());
        change(&mut options);
        Ok(Self {
            endpoint: Endpoint::new(port, &options)?,
            data: MemorySource::Host.data_memory(port.domain(), MEMORY)?,
        })
    }

    fn qp(&self) -> &AsyncQp {
        self.endpoint.qp()
    }

    fn run(&self, program: &Program, limit: Duration) -> p2pmem_async::Result<()> {
        let interpreter = Interpreter::new(limit).map_all(self.endpoint.regions());
        interpreter.run(program)
    }

    /// Posts a signaled work request of [`SIZE`] bytes; 8 bytes for an atomic.
    fn post(&self, id: u64, operation: SendOperation) -> p2pmem_async::Result<()> {
        let bytes = match operation {
            SendOperation::FetchAdd { .. } => 8,
            _ => SIZE,
        };
        let payload = Payload::Memory(vec![self.data.segment(0, bytes)]);
        self.qp().post_send(&SendRequest::new(id, operation, payload))
    }

    fn post_receive(&self, id: u64, bytes: u32) -> p2pmem_async::Result<()> {
        let segments = vec![self.data.segment(0, bytes)];
        self.qp().post_recv(&ReceiveRequest { id, segments })
    }

    /// Submits what is posted.
    fn submit(&self) -> Result<()> {
        Ok(self.run(&self.qp().commit_qp()?, LONG)?)
    }

    /// Waits for completions by byte code, consumes them, and compares them.
    fn expect(&self, queue: &AsyncCq, wanted: &[Report]) -> Result<()> {
        let peek = queue.peek_cq(wanted.len() as u32)?;
        self.run(&peek.program, LONG)?;
        let reports: Vec<Report> = queue.poll_cq(usize::MAX)?.iter().map(report).collect();
        same("the completions", &reports[..], wanted)
    }

    /// Verifies that posts and commits are refused with a reason.
    fn is_refused(&self, reason: &str) -> Result<()> {
        let qp = self.qp();
        for (what, result) in [
            ("a send", self.post(90, SendOperation::Send)),
            ("a receive", self.post_receive(91, SIZE)),
            ("a commit", qp.commit_qp().map(drop)),
        ] {
            match result {
                Err(Error::QueuePairError { qpn, why }) if qpn == qp.qpn() && why.contains(reason) => {}
                other => bail!("{what}: {other:?}; a refusal is expected because of {reason:?}"),
            }
        }
        Ok(())
    }
}

fn report(completion: &p2pmem_async::queue::Completion) -> Report {
    let syndrome = completion.failure.map(|failure| failure.syndrome);
    (completion.direction, completion.id, syndrome)
}

fn same<T: PartialEq + Debug + ?Sized>(what: &str, got: &T, wanted: &T) -> Result<()> {
    ensure!(got == wanted, "{what}: {got:?}, expected {wanted:?}");
    Ok(())
}

/// Returns the numbers of the NIC's objects in the kernel.
fn objects(nic: &str) -> Result<String> {
    let output = Command::new("rdma").args(["resource", "show", nic]).output();
    let output = output.context("running rdma (package iproute2)")?;
    ensure!(output.status.success(), "rdma resource show failed: {output:?}");
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

impl Bed {
    fn pair(&self) -> Result<(End, End)> {
        self.pair_with(|_| {})
    }

    /// Creates two connected endpoints.
    fn pair_with(&self, change: impl Fn(&mut EndpointOptions)) -> Result<(End, End)> {
        let (near, far) = (End::new(&self.port, &change)?, End::new(&self.port, &change)?);
        near.endpoint.connect(&far.endpoint.address())?;
        far.endpoint.connect(&near.endpoint.address())?;
        // Else the comparison after the case would say nothing.
        ensure!(
            objects(&self.name)? != self.before,
            "the kernel does not count the objects of endpoints"
        );
        Ok((near, far))
    }

    fn run(&self, case: Case) -> Result<()> {
        match case {
            Case::PollLimit => poll_limit(self),
            Case::ErrorState => error_state(self),
            Case::RemoteAccess => remote_access(self),
            Case::PeerDies => peer_dies(self),
            Case::ExecutorDies => executor_dies(self),
            Case::SmallCompletionQueue => small_completion_queue(self),
            Case::SmallReceive => small_receive(self),
        }?;
        same("the NIC's objects at the end", &objects(&self.name)?, &self.before)
    }
}

/// Runs a program whose operation 4 is a poll that does not come true.
fn ends_at_the_limit(end: &End, program: &Program, operation: &str) -> Result<()> {
    match end.run(program, SHORT) {
        Err(Error::Execution {
            index: 4,
            operation: text,
            why: ExecutionFailure::TimeLimit { limit: SHORT, last },
        }) if text.starts_with(operation) && last == u32::MAX => Ok(()),
        other => bail!("{other:?}; the time limit of operation 4, {operation}, is expected"),
    }
}

fn poll_limit(bed: &Bed) -> Result<()> {
    let (near, far) = bed.pair()?;
    // The other side has no receive, so the message cannot complete.
    near.post(1, SendOperation::Send)?;
    let mut program = near.qp().commit_qp()?;
    let peek = near.qp().send_cq().peek_cq(1)?;
    program.append(peek.program);
    ends_at_the_limit(&near, &program, "POLL_NOR")?;
    ensure!(near.qp().send_cq().abort_peek_cq(peek.id), "the peek has ended");
    // The operations before the poll were executed: the message arrives as soon as there is a receive.
    far.post_receive(2, SIZE)?;
    far.expect(far.qp().receive_cq(), &[received(2, None)])?;
    near.expect(near.qp().send_cq(), &[sent(1, None)])?;
    // At the end, a message is in flight, and a peek has not ended.
    near.post(3, SendOperation::Send)?;
    let mut program = near.qp().commit_qp()?;
    program.append(near.qp().send_cq().peek_cq(1)?.program);
    ends_at_the_limit(&near, &program, "POLL_NOR")?;
    same(
        "outstanding work requests",
        &near.qp().outstanding(),
        &(vec![3], vec![]),
    )
}

fn error_state(bed: &Bed) -> Result<()> {
    const WHY: &str = "the test wants it";
    let (near, far) = bed.pair()?;
    for id in [1, 2] {
        near.post_receive(id, SIZE)?;
    }
    near.post(3, SendOperation::Send)?;
    let late = near.qp().commit_qp()?;
    near.post(4, SendOperation::Send)?;
    near.endpoint.fail(WHY)?;
    near.is_refused(WHY)?;
    same("the state", &near.endpoint.refresh()?, &Some(QpState::Error))?;
    near.is_refused(WHY)?;
    let flushed = Some(Syndrome::Flushed);
    near.expect(near.qp().receive_cq(), &[received(1, flushed), received(2, flushed)])?;
    // An executor may execute what was committed before.
    near.run(&late, LONG)?;
    near.expect(near.qp().send_cq(), &[sent(3, flushed)])?;
    same("what was not committed", &near.qp().rollback_qp(), &vec![4])?;
    same("outstanding work requests", &near.qp().outstanding(), &(vec![], vec![]))?;
    // The other side does not notice until it sends.
    same("the other state", &far.endpoint.refresh()?, &Some(QpState::ReadyToSend))
}

fn remote_access(bed: &Bed) -> Result<()> {
    let kinds: [fn(Remote) -> SendOperation; 3] = [SendOperation::Write, SendOperation::Read, |remote| {
        SendOperation::FetchAdd { remote, add: 1 }
    }];
    let places: [fn(Remote) -> Remote; 3] = [
        // An index that no key has.
        |remote| Remote {
            rkey: remote.rkey ^ 0x00ff_0000,
            ..remote
        },
        // The key of an earlier registration with the same index.
        |remote| Remote {
            rkey: remote.rkey ^ 1,
            ..remote
        },
        // After the memory.
        |remote| Remote {
            address: remote.address + MEMORY as u64,
            ..remote
        },
    ];
    for kind in kinds {
        for place in places {
            let (near, far) = bed.pair()?;
            near.data.region().write(0, &[0x11; SIZE as usize]);
            let at = |number: usize| far.data.remote(number * SIZE as usize);
            near.post(10, SendOperation::Write(at(0)))?;
            near.post(11, kind(place(at(1))))?;
            near.post(12, SendOperation::Write(at(2)))?;
            near.post(13, SendOperation::Send)?;
            near.submit()?;
            near.expect(
                near.qp().send_cq(),
                &[
                    sent(10, None),
                    sent(11, Some(Syndrome::RemoteAccess)),
                    sent(12, Some(Syndrome::Flushed)),
                    sent(13, Some(Syndrome::Flushed)),
                ],
            )?;
            let mut bytes = [0; 3 * SIZE as usize];
            far.data.region().read(0, &mut bytes);
            let (written, rest) = bytes.split_at(SIZE as usize);
            same("the memory of the first WRITE", written, &[0x11; SIZE as usize])?;
            same("the memory after it", rest, &[0; 2 * SIZE as usize])?;
            near.is_refused("send 0xb failed: remote access error")?;
            // The other side has no completion. It finds the error state by a query.
            same("the other completions", &far.qp().receive_cq().poll_cq(8)?.len(), &0)?;
            same("the other state", &far.endpoint.refresh()?, &Some(QpState::Error))?;
            far.is_refused("the NIC reports the error state")?;
        }
    }
    Ok(())
}

/// Ends a process if the case fails.
struct Victim(Child);

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn peer_dies(bed: &Bed) -> Result<()> {
    let near = End::new(&bed.port, |_| {})?;
    let address = serde_json::to_string(&near.endpoint.address())?;
    let mut victim = Command::new(std::env::current_exe()?);
    victim.args(["--nic", &bed.name, "--victim-of", &address]);
    let mut victim = Victim(victim.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?);
    let output = victim.0.stdout.take().context("the process has no output")?;
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    let far: Address = serde_json::from_str(&line).with_context(|| format!("the process printed {line:?}"))?;
    near.endpoint.connect(&far)?;
    // The process has posted receives for half of the batch.
    let ids = 0..2 * RECEIVES;
    for id in ids.clone() {
        near.post(id, SendOperation::Send)?;
    }
    near.submit()?;
    let arrived: Vec<_> = ids.clone().take(RECEIVES as usize).map(|id| sent(id, None)).collect();
    near.expect(near.qp().send_cq(), &arrived)?;
    // An executor waits while the process is killed.
    let peek = near.qp().send_cq().peek_cq(1)?;
    std::thread::scope(|scope| {
        let executor = scope.spawn(|| near.run(&peek.program, LONG));
        victim.0.kill().context("killing the process")?;
        victim.0.wait().context("waiting for the end of the process")?;
        executor
            .join()
            .expect("the executor does not panic")
            .context("the peek")
    })?;
    let mut failed = vec![sent(RECEIVES, Some(Syndrome::RetryExceeded))];
    failed.extend(
        ids.skip(RECEIVES as usize + 1)
            .map(|id| sent(id, Some(Syndrome::Flushed))),
    );
    // The peek was for the first of them.
    let rest = near.qp().send_cq().peek_cq(failed.len() as u32 - 1)?;
    near.run(&rest.program, LONG)?;
    let reports: Vec<_> = near.qp().send_cq().poll_cq(usize::MAX)?.iter().map(report).collect();
    same("the completions", &reports, &failed)?;
    near.endpoint.fail("the other side died")?;
    near.is_refused("send 0x3 failed: transport retry counter exceeded")?;
    same("outstanding work requests", &near.qp().outstanding(), &(vec![], vec![]))
}

/// The process that is killed.
fn victim(port: &Arc<Port>, other: &str) -> Result<()> {
    let far = End::new(port, |_| {})?;
    far.endpoint.connect(&serde_json::from_str(other)?)?;
    for id in 0..RECEIVES {
        far.post_receive(id, SIZE)?;
    }
    println!("{}", serde_json::to_string(&far.endpoint.address())?);
    // The other process writes nothing. If it ends, this one does.
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}

fn executor_dies(bed: &Bed) -> Result<()> {
    const WHY: &str = "the executor died";
    // The operations of a commit and of a peek.
    for executed in 0..=6 {
        let (near, far) = bed.pair()?;
        far.post_receive(2, SIZE)?;
        near.post(1, SendOperation::Send)?;
        let mut program = near.qp().commit_qp()?;
        let peek = near.qp().send_cq().peek_cq(1)?;
        program.append(peek.program);
        let operations = program.operations();
        same("the length of the program", &operations.len(), &6)?;
        let mut part = Program::new();
        for operation in &operations[..executed] {
            part.push(operation.clone())?;
        }
        near.run(&part, LONG)?;
        near.endpoint.fail(WHY)?;
        near.is_refused(WHY)?;
        // The last operation reports the end of the peek.
        let aborted = near.qp().send_cq().abort_peek_cq(peek.id);
        same("the peek was aborted", &aborted, &(executed < 6))?;
        match executed {
            // Without the doorbell, the message was not sent.
            0..4 => same("messages", &far.qp().receive_cq().poll_cq(1)?.len(), &0)?,
            // It was sent, or flushed before.
            4 => {}
            _ => far.expect(far.qp().receive_cq(), &[received(2, None)])?,
        }
    }
    Ok(())
}

fn small_completion_queue(bed: &Bed) -> Result<()> {
    const ENTRIES: u32 = 4;
    let (near, far) = bed.pair_with(|options| options.completions = ENTRIES)?;
    let full = |result: p2pmem_async::Result<()>, queue: &AsyncCq| match result {
        Err(Error::CompletionQueueFull {
            cqn,
            outstanding: ENTRIES,
            size: ENTRIES,
            held,
        }) if cqn == queue.cqn() => Ok(held),
        other => bail!("{other:?}; a full completion queue is expected"),
    };
    // Several laps of the queue.
    for lap in 0..5 {
        let ids = || (0..u64::from(ENTRIES)).map(move |number| lap * 100 + number);
        for id in ids() {
            far.post_receive(id, SIZE)?;
            near.post(id, SendOperation::Send)?;
        }
        same(
            "held",
            &full(far.post_receive(99, SIZE), far.qp().receive_cq())?,
            &String::new(),
        )?;
        let refused = full(near.post(99, SendOperation::Send), near.qp().send_cq())?;
        same("held", &refused, &String::new())?;
        let all: Vec<u64> = ids().collect();
        same("outstanding", &near.qp().outstanding(), &(all.clone(), vec![]))?;
        same("outstanding", &far.qp().outstanding(), &(vec![], all))?;
        near.submit()?;
        far.expect(
            far.qp().receive_cq(),
            &ids().map(|id| received(id, None)).collect::<Vec<_>>(),
        )?;
        // The CPU has consumed the completions, but the executor has not seen them: the entries are not free.
        let peek = near.qp().send_cq().peek_cq(ENTRIES)?;
        let mut completed = Vec::new();
        while completed.len() < ENTRIES as usize {
            completed.extend(near.qp().send_cq().poll_cq(1)?.iter().map(report));
        }
        same("the completions", &completed, &ids().map(|id| sent(id, None)).collect())?;
        // The peek holds its last entry, and so all entries but the earlier ones.
        near.post(98, SendOperation::Send)
            .context("the entries before the peek's are free")?;
        same("not submitted", &near.qp().rollback_qp(), &vec![98])?;
        near.run(&peek.program, LONG)?;
    }
    Ok(())
}

fn small_receive(bed: &Bed) -> Result<()> {
    let (near, far) = bed.pair()?;
    near.data.region().write(0, &[0x11; SIZE as usize]);
    far.post_receive(1, SIZE)?;
    far.post_receive(2, SIZE - 1)?;
    far.post_receive(3, SIZE)?;
    for id in [10, 11, 12] {
        near.post(id, SendOperation::Send)?;
    }
    near.submit()?;
    far.expect(
        far.qp().receive_cq(),
        &[
            received(1, None),
            received(2, Some(Syndrome::LocalLength)),
            received(3, Some(Syndrome::Flushed)),
        ],
    )?;
    near.expect(
        near.qp().send_cq(),
        &[
            sent(10, None),
            sent(11, Some(Syndrome::RemoteInvalidRequest)),
            sent(12, Some(Syndrome::Flushed)),
        ],
    )?;
    far.is_refused("receive 0x2 failed: local length error")?;
    near.is_refused("send 0xb failed: remote invalid request")
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("p2pmem-async-faults: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let nic = Nic::open(&options.nic)?;
    let port = Port::open(&nic)?;
    if let Some(other) = &options.victim_of {
        return victim(&port, other);
    }
    // The driver creates a completion queue of its own for the first registration, and keeps it.
    drop(End::new(&port, |_| {})?);
    let bed = Bed {
        name: options.nic.clone(),
        port,
        before: objects(&options.nic)?,
    };
    for case in Case::value_variants() {
        if options.case.is_some_and(|selected| selected != *case) {
            continue;
        }
        bed.run(*case).with_context(|| format!("{case:?}"))?;
        println!("{case:?}: as expected");
    }
    Ok(())
}
