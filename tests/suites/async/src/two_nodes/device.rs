// SPDX-License-Identifier: MIT OR Apache-2.0

//! A side that the accelerator drives: queues, completions, doorbell records, and payload are in its memory, and it rings the
//! NIC's doorbell by its own DMA. The processor posts work requests, submits byte code, and sleeps.

use std::collections::VecDeque;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use p2pmem::Attachment;
use p2pmem_async::endpoint::{Address, Endpoint, EndpointOptions, Port};
use p2pmem_async::memory::DataMemory;
use p2pmem_async::pingpong::options::Deadline;
use p2pmem_async::pingpong::wire::Wire;
use p2pmem_async::queue::{AsyncCq, QpLayout};
use p2pmem_async::wqe::{AddressVector, Payload, ReceiveRequest, SendOperation, SendRequest, Transport};

use super::usage::{self, Devices, Processor};
use super::{Parameters, Role, Side, Steady};
use crate::accel::AccelExecutor;
use crate::hardware::{AccelMemory, Hardware};

/// Largest number of iterations that are submitted at once.
pub const MAX_STEADY: u32 = 1000;
/// Entries of each queue. A datagram takes two blocks of the send queue.
const QUEUE: u32 = 4096;
/// Entries of the ring: an iteration takes 7, and a batch 2 more.
const ENTRIES: u32 = 16384;
/// Receives that are posted: for what was submitted, and for what the other node submits meanwhile.
const RECEIVES: u32 = 2 * MAX_STEADY;
/// Offset of the payload in its memory. The route of a datagram is before it.
const PAYLOAD: u32 = 64;
/// The time limit of each poll.
const POLL_LIMIT: Duration = Duration::from_secs(20);
/// Shortest and longest time between two looks at the accelerator's progress.
const PROGRESS_INTERVAL: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(500));

/// How a side is created.
#[derive(Debug, Clone, Copy)]
pub(super) struct Settings {
    pub(super) transport: Transport,
    pub(super) role: Role,
    /// Bytes of a message.
    pub(super) size: u32,
    /// Number of the accelerator's ring, and of its entries.
    pub(super) ring: u32,
    pub(super) entries: u32,
    /// Largest program that the queue pair gives.
    pub(super) operations: u32,
    /// Entries of the queues and of each completion queue.
    pub(super) queue: u32,
    pub(super) completions: u32,
    /// The time limit of each poll.
    pub(super) limit: Duration,
}

/// A side that the accelerator drives.
pub struct DeviceSide {
    // Fields are dropped in this order: the accelerator stops, and its access to the doorbell ends, before the queue pair.
    pub(super) executor: AccelExecutor,
    pub(super) attachment: Attachment,
    pub(super) endpoint: Endpoint,
    pub(super) data: DataMemory,
    ones: AccelMemory,
    role: Role,
    transport: Transport,
    size: u32,
    /// The other side, for datagrams.
    other: Option<AddressVector>,
    /// The time of an entry, by the last batch.
    per_entry: Duration,
}

impl DeviceSide {
    /// Creates a side.
    ///
    /// # Errors
    ///
    /// A device refuses an object: among others with EPERM if the administrator does not permit pinned exports.
    pub fn new(hardware: &Hardware, parameters: &Parameters, role: Role, deadline: Deadline) -> Result<Self> {
        Self::with(
            hardware,
            &Settings {
                transport: parameters.transport,
                role,
                size: parameters.size,
                ring: 0,
                entries: ENTRIES,
                operations: ENTRIES,
                queue: QUEUE,
                completions: QUEUE,
                limit: POLL_LIMIT.min(deadline.left()?),
            },
        )
    }

    pub(super) fn with(hardware: &Hardware, settings: &Settings) -> Result<Self> {
        let source = hardware.source();
        let port = Port::open(&hardware.nic)?;
        let endpoint = Endpoint::new(
            &port,
            &EndpointOptions {
                queues: source.clone(),
                layout: QpLayout {
                    send_blocks: settings.queue,
                    receive_entries: settings.queue,
                },
                completions: settings.completions,
                peeks: settings.queue as usize,
                ..EndpointOptions::new(settings.transport, AccelExecutor::peer(settings.operations))
            },
        )?;
        let data = source.data_memory(port.domain(), (PAYLOAD + settings.size) as usize)?;
        // Bytes of 0 are the value 0.0.
        data.region().write(0, &vec![0; data.region().len()]);
        let ones = hardware.ones(settings.size)?;
        let mut executor = AccelExecutor::new(hardware, settings.ring, settings.entries, settings.limit)?;
        let attachment = executor.map_endpoint(&endpoint, &hardware.device)?;
        Ok(Self {
            executor,
            attachment,
            endpoint,
            data,
            ones,
            role: settings.role,
            transport: settings.transport,
            size: settings.size,
            other: None,
            per_entry: Duration::ZERO,
        })
    }

    /// Posts receives.
    pub(super) fn receives(&self, count: u32) -> Result<()> {
        let route = self.transport.route_bytes();
        let request = ReceiveRequest {
            id: 0,
            segments: vec![self.data.segment((PAYLOAD - route) as usize, self.size + route)],
        };
        for _ in 0..count {
            self.endpoint.qp().post_recv(&request)?;
        }
        Ok(())
    }

    /// Submits the byte code that waits for a message, and the computation.
    pub(super) fn receive(&mut self) -> Result<()> {
        let peek = self.endpoint.qp().receive_cq().peek_cq(1)?;
        self.executor.submit(peek.program)?;
        let payload = self
            .data
            .region()
            .bar_offset()
            .context("the payload's place is unknown")?;
        let payload = payload + u64::from(PAYLOAD);
        self.executor.add(payload, self.size.into(), self.ones.offset)
    }

    /// Posts a message, and submits the byte code that sends it. Only the last message of a batch is signaled.
    pub(super) fn send(&mut self, last: bool) -> Result<()> {
        let segment = self.data.segment(PAYLOAD as usize, self.size);
        let mut request = SendRequest::new(0, SendOperation::Send, Payload::Memory(vec![segment])).signaled(last);
        request.to = self.other;
        self.endpoint.qp().post_send(&request)?;
        let program = self.endpoint.qp().commit_qp()?;
        self.executor.submit(program)
    }

    /// Adds iterations to the accelerator's ring.
    fn submit(&mut self, count: u32) -> Result<()> {
        for number in 1..=count {
            let last = number == count;
            if self.role == Role::First {
                self.send(last)?;
                self.receive()?;
            } else {
                self.receive()?;
                self.send(last)?;
            }
        }
        self.wait_for_sends(1)
    }

    /// Submits the byte code that waits for completions of sends.
    pub(super) fn wait_for_sends(&mut self, count: u32) -> Result<()> {
        let peek = self.endpoint.qp().send_cq().peek_cq(count)?;
        self.executor.submit(peek.program)
    }

    /// Sleeps until the entries before the index `end` have completed: about as long as that will take.
    fn sleep(&mut self, end: u32, deadline: Deadline) -> Result<()> {
        let started = Instant::now();
        let (mut first, mut measured) = (None, None);
        loop {
            let left = match self.executor.left(end) {
                Ok(0) => break,
                Ok(left) => left,
                Err(error) => return Err(self.explain(error)),
            };
            match first {
                None => first = Some(left),
                Some(first) if first > left => measured = Some(started.elapsed() / (first - left)),
                Some(_) => {}
            }
            let most = deadline.left().context("waiting for the accelerator")?;
            let time = self.per_entry * left;
            thread::sleep(time.clamp(PROGRESS_INTERVAL.0, PROGRESS_INTERVAL.1).min(most));
        }
        self.per_entry = match measured {
            // The accelerator may also have waited for this program, which slept too long.
            None => self.per_entry * 7 / 8,
            Some(measured) if self.per_entry.is_zero() => measured,
            // It may have waited for the other node, whose program slept too long. Without a limit, both would sleep ever longer.
            Some(measured) => measured.min(self.per_entry * 9 / 8),
        };
        Ok(())
    }

    /// Adds what the NIC and the module know about a failure.
    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let qp = self.endpoint.qp();
        let mut text = format!("state of the queue pair: {:?}", self.endpoint.refresh());
        if let Ok(Some((_, failure))) = qp.first_failure() {
            text += &format!("; a work request failed: {failure}");
        }
        if let Ok(state) = self.attachment.state() {
            text += &format!("; access to the doorbell: {state:?}");
        }
        error.context(text)
    }

    /// Consumes the completions of a batch, which the accelerator has seen.
    fn consume(&mut self, count: u32) -> Result<()> {
        let qp = self.endpoint.qp();
        let take = |queue: &AsyncCq, count: u32| -> Result<()> {
            let completions = queue.poll_cq(count as usize)?;
            ensure!(
                completions.len() == count as usize,
                "{} completions of {count}",
                completions.len()
            );
            for completion in completions {
                ensure!(completion.failure.is_none(), "a work request failed: {completion:?}");
            }
            Ok(())
        };
        take(qp.receive_cq(), count)?;
        take(qp.send_cq(), 1)?;
        self.receives(count)
    }
}

impl Side for DeviceSide {
    fn address(&self) -> Address {
        self.endpoint.address()
    }

    fn connect(&mut self, other: &Address) -> Result<()> {
        self.receives(RECEIVES)?;
        self.endpoint.connect(other)?;
        if self.transport == Transport::Ud {
            self.other = Some(self.endpoint.address_vector(other));
        }
        Ok(())
    }

    fn iterate(&mut self, iterations: u32, batch: u32, deadline: Deadline) -> Result<()> {
        let mut left = iterations;
        // The accelerator has the next batch already when one ends.
        let mut submitted = VecDeque::new();
        loop {
            while left > 0 && submitted.len() < 2 {
                let count = batch.min(left);
                self.submit(count)?;
                self.executor.start()?;
                left -= count;
                submitted.push_back((self.executor.next(), count));
            }
            let Some((end, count)) = submitted.pop_front() else {
                return Ok(());
            };
            self.sleep(end, deadline)?;
            self.consume(count)?;
        }
    }

    fn clock(&mut self, deadline: Deadline) -> Result<u64> {
        self.executor.clock(deadline.left()?)
    }

    fn payload(&self) -> Result<Vec<f32>> {
        let mut bytes = vec![0; self.size as usize];
        self.data.region().read(PAYLOAD as usize, &mut bytes);
        let words = bytes.chunks_exact(4).map(|word| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(word);
            f32::from_le_bytes(bytes)
        });
        Ok(words.collect())
    }

    fn steady(&mut self, count: u32, expected: Duration, wire: &mut Wire, deadline: Deadline) -> Result<Steady> {
        let time = expected + expected / 2;
        self.submit(count)?;
        let end = self.executor.next();
        let before = Devices::read()?;
        wire.meet(deadline)?;
        let begin = Processor::read()?;
        self.executor.start()?;
        // From here on, the processor has nothing to do. Usually it sleeps once.
        let (mut sleeps, mut slept) = (0, 0);
        loop {
            slept += sleep(time);
            sleeps += 1;
            match self.executor.left(end) {
                Ok(0) => break,
                Ok(_) => deadline.left().context("waiting for the accelerator")?,
                Err(error) => return Err(self.explain(error)),
            };
        }
        let busy = Processor::read()?.since(begin);
        let devices = Devices::read()?.since(before)?;
        self.consume(count)?;
        wire.meet(deadline)?;
        // The same without work.
        let begin = Processor::read()?;
        let idle_slept = (0..sleeps).map(|_| sleep(time)).sum();
        let idle = Processor::read()?.since(begin);
        Ok(Steady {
            messages: 2 * u64::from(count),
            program_instructions: slept,
            idle_program_instructions: idle_slept,
            instructions: busy.instructions,
            idle_instructions: idle.instructions,
            interrupts: busy.interrupts,
            accesses: devices.accesses,
            rung: devices.rung,
            host_bytes: devices.host,
        })
    }
}

/// Sleeps. Returns the instructions of this thread, and of the kernel for it, meanwhile.
fn sleep(time: Duration) -> u64 {
    let before = usage::thread_instructions();
    thread::sleep(time);
    usage::thread_instructions() - before
}
