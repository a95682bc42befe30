// SPDX-License-Identifier: MIT OR Apache-2.0

//! The other end of `ib_send_bw`: one queue pair that byte code drives sends to perftest's server, or receives from its client.
//!
//! perftest sends without flow control. Its server posts up to 512 receives (`-r`), and posts another one when it finds a
//! completion. Its client has up to 128 messages in its send queue (`-t`), which says nothing about the receiver's progress.
//! A receiver that has to post while messages arrive makes the sender wait and retry, and loses datagrams. So this side
//! posts the receives of all messages before the test starts.
//!
//! The functions are independent of the executor: [`Execute`] executes a program of byte code.

use std::net::TcpStream;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use p2pmem_async::bytecode::{Peer, Program};
use p2pmem_async::cqe::Failure;
use p2pmem_async::endpoint::{Address, EndpointOptions};
use p2pmem_async::queue::{AsyncQp, Completion, QpLayout};
use p2pmem_async::wqe::{AddressVector, Payload, ReceiveRequest, Segment, SendOperation, SendRequest, Transport};
use serde::Serialize;

use handshake::{Connection, Description, Role};

pub mod handshake;

/// Most messages of a test.
pub const MAX_ITERATIONS: u32 = 4096;
/// The queue key of perftest's datagrams.
const QUEUE_KEY: u32 = 0x1111_1111;

/// Executes a program of byte code, and returns when it has ended.
pub type Execute<'a> = &'a mut dyn FnMut(&Program) -> Result<()>;

/// The parameters of a test, which both sides have to know.
#[derive(Debug, Clone, Copy)]
pub struct Test {
    /// The transport.
    pub transport: Transport,
    /// Bytes of a message.
    pub size: u32,
    /// Number of messages: 1 to [`MAX_ITERATIONS`].
    pub iterations: u32,
    /// Messages that one program submits or waits for: at least 1, at most the send queue's 64.
    pub batch: u32,
}

impl Test {
    /// Returns the options of an endpoint for this test. Receives need an entry for each message.
    pub fn endpoint_options(&self, role: Role, peer: Peer) -> EndpointOptions {
        let options = EndpointOptions::new(self.transport, peer);
        let entries = match role {
            Role::Client => options.layout.receive_entries,
            Role::Server => self.iterations.next_power_of_two().max(64),
        };
        EndpointOptions {
            layout: QpLayout {
                receive_entries: entries,
                ..options.layout
            },
            completions: entries,
            qkey: QUEUE_KEY,
            ..options
        }
    }

    /// Returns the bytes that a message needs in this side's memory.
    pub fn payload_bytes(&self, role: Role) -> u32 {
        match role {
            Role::Client => self.size,
            Role::Server => self.size + self.transport.route_bytes(),
        }
    }
}

/// This side's queue pair.
pub struct Local<'a> {
    /// The queue pair.
    pub qp: &'a AsyncQp,
    /// What the other side needs to reach it.
    pub address: Address,
    /// Memory for one message ([`Test::payload_bytes`]). Each message is sent from here, or received here.
    pub payload: Segment,
    /// Makes the queue pair ready to send and receive.
    pub connect: &'a mut dyn FnMut(&Address) -> Result<()>,
}

/// The result of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// Messages that have completed.
    pub messages: u32,
    /// Bytes of these messages. For received messages, the NIC's completions say how many.
    pub bytes: u64,
    /// Programs of byte code that were executed.
    pub programs: u32,
    /// Operations of these programs.
    pub operations: usize,
}

/// Sends to a server: `ib_send_bw` without a host. `stream` is connected to it.
///
/// # Errors
///
/// The handshake, a work request, or a program failed.
pub fn send(
    local: &mut Local<'_>,
    test: &Test,
    stream: TcpStream,
    deadline: Instant,
    run: Execute<'_>,
) -> Result<Outcome> {
    let connection = Connection::new(stream, Role::Client, deadline)?;
    let mut session = Session::open(local, test, connection)?;
    let mut driver = Driver::new(local.qp, run);
    let to = session.datagram_address(test);
    while driver.outcome.messages < test.iterations {
        let first = driver.outcome.messages;
        let end = test.iterations.min(first + test.batch);
        for message in first..end {
            let payload = Payload::Memory(vec![local.payload]);
            let mut request = SendRequest::new(u64::from(message), SendOperation::Send, payload);
            request.to = to;
            // One completion for a batch.
            local.qp.post_send(&request.signaled(message + 1 == end))?;
        }
        let mut program = local.qp.commit_qp()?;
        program.append(local.qp.send_cq().peek_cq(1)?.program);
        driver.execute(&program)?;
        let completions = local.qp.send_cq().poll_cq(usize::MAX)?;
        succeeded(&completions)?;
        let ids: Vec<u64> = completions.iter().map(|completion| completion.id).collect();
        ensure!(
            ids == [u64::from(end - 1)],
            "messages {first} to {} completed as {ids:?}",
            end - 1
        );
        driver.outcome.messages = end;
        driver.outcome.bytes += u64::from(end - first) * u64::from(test.size);
    }
    session.end("all messages are sent")?;
    Ok(driver.outcome)
}

/// Receives from a client: `ib_send_bw` with this side as its host. `stream` is the connection that it opened.
///
/// # Errors
///
/// The handshake, a work request, or a program failed; a message has another size, or its sender is another queue pair.
pub fn receive(
    local: &mut Local<'_>,
    test: &Test,
    stream: TcpStream,
    deadline: Instant,
    run: Execute<'_>,
) -> Result<Outcome> {
    for message in 0..test.iterations {
        let request = ReceiveRequest {
            id: u64::from(message),
            segments: vec![local.payload],
        };
        local.qp.post_recv(&request)?;
    }
    let connection = Connection::new(stream, Role::Server, deadline)?;
    let mut session = Session::open(local, test, connection)?;
    let mut driver = Driver::new(local.qp, run);
    while driver.outcome.messages < test.iterations {
        let first = driver.outcome.messages;
        let count = test.batch.min(test.iterations - first);
        driver.execute(&local.qp.receive_cq().peek_cq(count)?.program)?;
        let completions = local.qp.receive_cq().poll_cq(count as usize)?;
        succeeded(&completions)?;
        ensure!(
            completions.len() == count as usize,
            "{} messages of {count} have arrived, although the program has waited for all",
            completions.len()
        );
        for (message, completion) in (first..).zip(&completions) {
            let bytes = completion.bytes.checked_sub(test.transport.route_bytes());
            ensure!(
                completion.id == u64::from(message) && bytes == Some(test.size),
                "message {message} is not one of {} bytes: {completion:?}",
                test.size
            );
            ensure!(
                test.transport == Transport::Rc || completion.source.qpn == session.far.qpn,
                "message {message} is not from queue pair {:#x}: {completion:?}",
                session.far.qpn
            );
            driver.outcome.bytes += u64::from(test.size);
        }
        driver.outcome.messages += count;
    }
    session.end("all messages have arrived")?;
    let more = local.qp.receive_cq().poll_cq(usize::MAX)?;
    ensure!(more.is_empty(), "more messages than {} have arrived", test.iterations);
    Ok(driver.outcome)
}

/// Describes a work request that failed.
fn failed(completion: &Completion, failure: Failure) -> anyhow::Error {
    anyhow!("{:?} {} failed: {failure}", completion.direction, completion.id)
}

/// Fails if a work request failed.
fn succeeded(completions: &[Completion]) -> Result<()> {
    for completion in completions {
        if let Some(failure) = completion.failure {
            return Err(failed(completion, failure));
        }
    }
    Ok(())
}

/// A handshake in progress.
struct Session {
    connection: Connection,
    near: Description,
    far: Description,
}

impl Session {
    /// Does everything up to the first message.
    fn open(local: &mut Local<'_>, test: &Test, mut connection: Connection) -> Result<Self> {
        ensure!(
            local.address.lid != 0,
            "the port has no LID: this program knows perftest's handshake on InfiniBand only"
        );
        let mtu = connection.greet(local.address.mtu)?;
        let most = 128_u32 << mtu.min(local.address.mtu);
        ensure!(
            test.transport == Transport::Rc || test.size <= most,
            "a datagram of {} bytes: the path of both sides permits {most}",
            test.size
        );
        let near = Description {
            lid: local.address.lid,
            reads: 1,
            qpn: local.address.qpn,
            psn: local.address.psn,
            rkey: 0,
            address: 0,
            srqn: 0,
        };
        let far = connection.describe(&near)?;
        (local.connect)(&Address {
            qpn: far.qpn,
            lid: far.lid,
            gid: [0; 16],
            qkey: QUEUE_KEY,
            mtu,
            psn: far.psn,
        })?;
        for point in [
            "the queue pairs are connected",
            "the queue pairs are shown",
            "receives are posted",
        ] {
            connection.meet(point, &near, &far)?;
        }
        Ok(Self { connection, near, far })
    }

    /// Returns the receiver of datagrams.
    fn datagram_address(&self, test: &Test) -> Option<AddressVector> {
        (test.transport == Transport::Ud).then_some(AddressVector {
            dlid: self.far.lid,
            sl: 0,
            path_bits: 0,
            qpn: self.far.qpn,
            qkey: QUEUE_KEY,
            grh: None,
        })
    }

    /// Waits until the other side has ended the test, too.
    fn end(&mut self, point: &str) -> Result<()> {
        self.connection.meet(point, &self.near, &self.far)
    }
}

/// Executes programs and counts.
struct Driver<'a> {
    qp: &'a AsyncQp,
    run: Execute<'a>,
    outcome: Outcome,
}

impl<'a> Driver<'a> {
    fn new(qp: &'a AsyncQp, run: Execute<'a>) -> Self {
        let outcome = Outcome {
            messages: 0,
            bytes: 0,
            programs: 0,
            operations: 0,
        };
        Self { qp, run, outcome }
    }

    fn execute(&mut self, program: &Program) -> Result<()> {
        self.outcome.programs += 1;
        self.outcome.operations += program.operations().len();
        let Err(error) = (self.run)(program) else {
            return Ok(());
        };
        // A failure of a work request is the cause, if there is one.
        if let Some((completion, failure)) = self.qp.first_failure()? {
            return Err(failed(&completion, failure)).with_context(|| format!("{error:#}"));
        }
        Err(error.context(format!(
            "message {} did not complete: do both sides have the same number of iterations, size, and transport?",
            self.outcome.messages
        )))
    }
}
