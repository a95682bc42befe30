// SPDX-License-Identifier: MIT OR Apache-2.0

//! The messages between two nodes.

use std::net::TcpStream;

use anyhow::{bail, ensure, Result};
use p2pmem::rdma::Nic;
use serde::Serialize;

use super::options::{Deadline, MemoryKind, Mode, Options};
use super::wire::{Parameters, Side, Wire};
use crate::bytecode::{Peer, Program};
use crate::channel::{wait_signal, Channel, Signal};
use crate::endpoint::{Endpoint, EndpointOptions, Port};
use crate::interpreter::Interpreter;
use crate::memory::DataMemory;
use crate::wqe::{Payload, ReceiveRequest, Remote, SendOperation, SendRequest, Transport, ROUTE_BYTES};

/// The result of a run.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    role: &'static str,
    transport: Transport,
    mode: Mode,
    queues: MemoryKind,
    memory: MemoryKind,
    messages: u64,
    size: u32,
    verified_bytes: u64,
    read_back_bytes: u64,
    programs: u64,
    operations: u64,
}

/// One node of a run.
struct Node {
    parameters: Parameters,
    channel: Channel,
    data: DataMemory,
    interpreter: Interpreter,
    deadline: Deadline,
    far: Side,
    /// Marks the messages of this side.
    side: u8,
    verified: u64,
    read_back: u64,
    programs: u64,
    operations: u64,
    /// Messages that were sent and received.
    sent: u64,
    received: u64,
}

/// Layout of the payload memory: messages to send, received messages, the signal.
fn slot(size: u32) -> usize {
    size.next_multiple_of(64) as usize + 64
}

fn byte(side: u8, message: u64, at: usize) -> u8 {
    // Truncated: a pattern.
    (message as u8)
        .wrapping_mul(31)
        .wrapping_add((at as u8).wrapping_mul(7))
        .wrapping_add(side)
}

pub(super) fn run(options: &Options, nic: &Nic, stream: TcpStream, deadline: Deadline) -> Result<Summary> {
    let mut wire = Wire::new(stream);
    let parameters = Parameters {
        transport: options.transport,
        mode: options.mode,
        size: options.size,
        messages: options.messages,
        batch: options.batch,
    };
    ensure!(
        parameters.transport == Transport::Rc || parameters.mode == Mode::Send,
        "datagrams support --mode send only"
    );
    wire.send(&parameters)?;
    let mut node = Node::new(options, nic, parameters, &mut wire, deadline, 0x11)?;
    while node.sent < parameters.messages {
        let count = node.batch();
        let program = node.send(count)?;
        node.execute(&program)?;
        node.read_back(count)?;
        let program = node.wait(count)?;
        node.execute(&program)?;
        node.verify(count)?;
    }
    wire.meet(deadline)?;
    Ok(node.summary("run", options))
}

pub(super) fn serve(options: &Options, nic: &Nic, stream: TcpStream, deadline: Deadline) -> Result<Summary> {
    let mut wire = Wire::new(stream);
    let parameters: Parameters = wire.receive(deadline)?;
    ensure!(
        (1..=16).contains(&parameters.batch) && (1..=1 << 20).contains(&parameters.size),
        "the other node requests a batch or a message size that this version does not support"
    );
    let mut node = Node::new(options, nic, parameters, &mut wire, deadline, 0x77)?;
    while node.sent < parameters.messages {
        let count = node.batch();
        let program = node.wait(count)?;
        node.execute(&program)?;
        node.verify(count)?;
        let program = node.send(count)?;
        node.execute(&program)?;
    }
    node.drain()?;
    wire.meet(deadline)?;
    Ok(node.summary("serve", options))
}

impl Node {
    fn new(
        options: &Options,
        nic: &Nic,
        parameters: Parameters,
        wire: &mut Wire,
        deadline: Deadline,
        side: u8,
    ) -> Result<Self> {
        let port = Port::open(nic)?;
        let endpoint = Endpoint::new(
            &port,
            &EndpointOptions {
                queues: options.source(options.queues, nic)?,
                ..EndpointOptions::new(parameters.transport, Peer::cpu())
            },
        )?;
        let slots = slot(parameters.size) * parameters.batch as usize;
        let data = options
            .source(options.memory, nic)?
            .data_memory(port.domain(), 2 * slots + 128 + slot(parameters.size))?;
        // The signal, and the value that an addition returns.
        data.region().store_qword(2 * slots, 0);
        data.region().store_qword(2 * slots + 64, 0);
        let near = Side {
            address: endpoint.address(),
            inbox: data.remote(slots),
            signal: data.remote(2 * slots),
        };
        wire.send(&near)?;
        let far: Side = wire.receive(deadline)?;
        endpoint.connect(&far.address)?;
        let interpreter = Interpreter::new(deadline.left()?);
        let interpreter = interpreter.map_all(endpoint.regions()).map(data.region());
        let mut node = Self {
            parameters,
            channel: Channel::new(endpoint),
            data,
            interpreter,
            deadline,
            far,
            side,
            verified: 0,
            read_back: 0,
            programs: 0,
            operations: 0,
            sent: 0,
            received: 0,
        };
        if !parameters.mode.is_put() {
            for index in 0..parameters.batch {
                node.post_receive(index)?;
            }
        }
        wire.meet(deadline)?;
        Ok(node)
    }

    /// Returns the number of messages of the next batch.
    fn batch(&self) -> u32 {
        let left = self.parameters.messages - self.sent;
        // Not truncated: at most the batch.
        u64::from(self.parameters.batch).min(left) as u32
    }

    /// Returns the place to which an addition to the other side's signal returns the old value.
    fn old_signal(&self) -> usize {
        2 * slot(self.parameters.size) * self.parameters.batch as usize + 64
    }

    /// Reads the messages of a batch back from the other side, and compares them. The other side does not change them before
    /// the next batch.
    fn read_back(&mut self, count: u32) -> Result<()> {
        if self.parameters.mode != Mode::PutAdd {
            return Ok(());
        }
        self.drain()?;
        let old = self.data.region().load_dword(self.old_signal());
        ensure!(
            u64::from(old) + 1 == self.sent,
            "the last addition to the signal returned {old} after {} messages",
            self.sent
        );
        let size = self.parameters.size;
        let at = self.old_signal() + 64;
        for index in 0..count {
            let remote = Remote {
                address: self.far.inbox.address + slot(size) as u64 * u64::from(index),
                ..self.far.inbox
            };
            self.data.region().write(at, &vec![0; size as usize]);
            self.channel.get(self.data.segment(at, size), remote)?;
            let mut program = self.channel.submit()?;
            if let Some(done) = self.channel.flush()? {
                program.append(done.program);
            }
            self.execute(&program)?;
            self.drain()?;
            let mut bytes = vec![0; size as usize];
            self.data.region().read(at, &mut bytes);
            let message = self.sent - u64::from(count - index);
            let wrong = (0..size as usize).find(|k| bytes[*k] != byte(self.side, message, *k));
            ensure!(
                wrong.is_none(),
                "byte {wrong:?} of message {message} was read back wrong"
            );
            self.read_back += u64::from(size);
        }
        Ok(())
    }

    fn inbox(&self, index: u32) -> usize {
        slot(self.parameters.size) * (self.parameters.batch + index) as usize
    }

    fn post_receive(&mut self, index: u32) -> Result<()> {
        let bytes = self.parameters.size + ROUTE_BYTES;
        let request = ReceiveRequest {
            id: u64::from(index),
            segments: vec![self.data.segment(self.inbox(index), bytes)],
        };
        self.channel.endpoint().qp().post_recv(&request)?;
        Ok(())
    }

    /// Posts a batch, and returns the byte code that submits it and waits until the memory can be used again.
    fn send(&mut self, count: u32) -> Result<Program> {
        self.drain()?;
        let size = self.parameters.size;
        for index in 0..count {
            let at = slot(size) * index as usize;
            let message = self.sent + u64::from(index);
            let bytes: Vec<u8> = (0..size as usize).map(|k| byte(self.side, message, k)).collect();
            self.data.region().write(at, &bytes);
        }
        self.data.region().fence();
        for index in 0..count {
            let at = slot(size) * index as usize;
            let message = self.sent + u64::from(index);
            let segment = self.data.segment(at, size);
            let inbox = Remote {
                address: self.far.inbox.address + at as u64,
                ..self.far.inbox
            };
            // Truncated: immediate data has 32 bits.
            let immediate = message as u32;
            let operation = match self.parameters.mode {
                Mode::Send => SendOperation::SendImm(immediate),
                Mode::WriteImm => SendOperation::WriteImm(inbox, immediate),
                Mode::Put | Mode::PutAdd => {
                    let signal = match self.parameters.mode {
                        Mode::PutAdd => Signal::Add(1, self.data.segment(self.old_signal(), 8)),
                        _ => Signal::Set(message + 1),
                    };
                    self.channel.put_with_signal(segment, inbox, self.far.signal, signal)?;
                    continue;
                }
            };
            let mut request = SendRequest::new(message, operation, Payload::Memory(vec![segment]));
            if self.parameters.transport == Transport::Ud {
                request = request.to(self.channel.endpoint().address_vector(&self.far.address));
            }
            // One completion for a batch.
            self.channel
                .endpoint()
                .qp()
                .post_send(&request.signaled(index + 1 == count))?;
        }
        self.sent += u64::from(count);
        let mut program = self.channel.submit()?;
        let done = match self.parameters.mode {
            Mode::Put | Mode::PutAdd => self.channel.flush()?,
            _ => Some(self.channel.endpoint().qp().send_cq().peek_cq(1)?),
        };
        if let Some(done) = done {
            program.append(done.program);
        }
        Ok(program)
    }

    /// Returns byte code that waits for a batch from the other side.
    fn wait(&mut self, count: u32) -> Result<Program> {
        Ok(match self.parameters.mode {
            Mode::Put | Mode::PutAdd => {
                let slots = slot(self.parameters.size) * self.parameters.batch as usize;
                // Truncated: the low 4 bytes of the signal.
                let value = (self.received + u64::from(count)) as u32;
                wait_signal(self.data.region(), 2 * slots as u64, value)?
            }
            _ => self.channel.endpoint().qp().receive_cq().peek_cq(count)?.program,
        })
    }

    fn execute(&mut self, program: &Program) -> Result<()> {
        self.deadline.left()?;
        self.programs += 1;
        self.operations += program.operations().len() as u64;
        let Err(error) = self.interpreter.run(program) else {
            return Ok(());
        };
        // A failure of a work request is the cause, if there is one.
        if let Some((completion, failure)) = self.channel.endpoint().qp().first_failure()? {
            bail!(
                "{:?} {} failed: {failure}; {error}",
                completion.direction,
                completion.id
            );
        }
        let state = self.channel.endpoint().refresh()?;
        bail!(
            "{error}; outstanding: {:?}; state: {state:?}",
            self.channel.endpoint().qp().outstanding()
        )
    }

    /// Consumes the completions of sends that the byte code has waited for.
    fn drain(&mut self) -> Result<()> {
        for completion in self.channel.poll(usize::MAX)? {
            if let Some(failure) = completion.failure {
                bail!("message {} failed: {failure}", completion.id);
            }
        }
        Ok(())
    }

    /// Consumes and verifies a batch from the other side, which the byte code has waited for.
    fn verify(&mut self, count: u32) -> Result<()> {
        self.drain()?;
        let size = self.parameters.size as usize;
        let datagram = self.parameters.transport == Transport::Ud;
        let far = if self.side == 0x11 { 0x77 } else { 0x11 };
        let route = self.parameters.transport.route_bytes() as usize;
        let mut slots: Vec<u32> = (0..count).collect();
        if !self.parameters.mode.is_put() {
            let completions = self.channel.endpoint().qp().receive_cq().poll_cq(count as usize)?;
            ensure!(
                completions.len() == count as usize,
                "{} completions of {count}",
                completions.len()
            );
            for (number, completion) in completions.iter().enumerate() {
                let message = self.received + number as u64;
                if let Some(failure) = completion.failure {
                    bail!("receiving message {message} failed: {failure}");
                }
                ensure!(
                    completion.immediate == Some(message as u32) && completion.bytes as usize == size + route,
                    "message {message}: {completion:?}"
                );
                ensure!(
                    !datagram || completion.source.qpn == self.far.address.qpn,
                    "message {message} has another sender: {completion:?}"
                );
                if self.parameters.mode == Mode::Send {
                    // Not truncated: IDs of receives are slots.
                    slots[number] = completion.id as u32;
                }
            }
        }
        for (number, slot) in slots.iter().enumerate() {
            let message = self.received + number as u64;
            let mut bytes = vec![0; size];
            self.data.region().read(self.inbox(*slot) + route, &mut bytes);
            let wrong = (0..size).find(|k| bytes[*k] != byte(far, message, *k));
            if let Some(at) = wrong {
                bail!(
                    "byte {at} of message {message} is {:#x}, not {:#x}",
                    bytes[at],
                    byte(far, message, at)
                );
            }
            self.verified += size as u64;
        }
        if !self.parameters.mode.is_put() {
            for slot in slots {
                self.post_receive(slot)?;
            }
        }
        self.received += u64::from(count);
        Ok(())
    }

    fn summary(&self, role: &'static str, options: &Options) -> Summary {
        Summary {
            role,
            transport: self.parameters.transport,
            mode: self.parameters.mode,
            queues: options.queues,
            memory: options.memory,
            messages: self.parameters.messages,
            size: self.parameters.size,
            verified_bytes: self.verified,
            read_back_bytes: self.read_back,
            programs: self.programs,
            operations: self.operations,
        }
    }
}
