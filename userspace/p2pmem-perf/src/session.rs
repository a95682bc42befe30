// SPDX-License-Identifier: MIT OR Apache-2.0

//! The part of a test that one NIC does: a queue pair, registered memory, and the messages.

mod calls;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use p2pmem::human_size;
use p2pmem_payload::kind::MemoryKind;
use p2pmem_payload::memory::{Memory, MemoryOptions, Window};
use p2pmem_verbs::{Completions, Domain, Nic, QueuePair, Remote, Request, Retries, Segment, Span, Work};
use rustix::time::{clock_gettime, ClockId};

use crate::cli::OwnArgs;
use crate::pattern::REVOKED;
use crate::pattern::{check_target, fill_source, fill_target, Checker, Comparison};
use crate::sizes::{Slots, GUARD, WORDS};
use crate::stats::Times;
use crate::tcp::Payload;
use crate::ucx::Port;
use crate::waiter::{Stop, Waiter};
use crate::wire::{Endpoint, Mode, Test};

/// Bytes of a handshake word.
const WORD: u64 = 8;
/// Offset in the handshake region at which an RDMA READ places the peer's handshake word.
const PEER_WORD: u64 = 64;
/// Work request id of the RDMA READ of the peer's handshake word.
const READ_WORD_ID: u64 = u64::MAX;
/// The NIC waits about 0.27 s for an acknowledgement, and retransmits up to seven times.
pub const RETRIES: Retries = Retries {
    timeout: 16,
    retries: 7,
};

/// The side of a test that this process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The client.
    Client,
    /// The server.
    Server,
}

/// Returns whether messages are placed in the memory of the side `role`.
pub fn is_target(mode: Mode, role: Role) -> bool {
    (mode == Mode::Read) == (role == Role::Client)
}

/// Returns the maximum number of chunks in flight that the server has not handled yet.
fn unhandled(test: &Test, size: u64, slots: &Slots) -> u64 {
    // The host memory for staged messages has as many slots as the source.
    let places = if test.staged { slots.source } else { slots.target };
    test.in_flight(size).min(places)
}

/// Returns the bytes of memory that a side needs for its slots, the guard region, and the handshake region.
pub fn payload_bytes(test: &Test, role: Role) -> u64 {
    let slots = test.sizes.iter().map(|size| test.slots(*size));
    let bytes = slots.map(|slots| {
        if is_target(test.mode, role) {
            slots.target_bytes()
        } else {
            slots.source_bytes()
        }
    });
    bytes.max().unwrap_or(0) + GUARD + WORDS
}

/// Returns the bytes of host memory through which a side copies staged messages.
///
/// The server of calls receives them in host memory, and copies the payload from there.
pub fn bounce_bytes(test: &Test, role: Role) -> u64 {
    let slots = test.sizes.iter().map(|size| test.slots(*size));
    let bytes = if test.staged {
        slots.map(|slots| slots.source_bytes()).max()
    } else if test.mode == Mode::Rpc && role == Role::Server {
        slots.map(|slots| slots.target_bytes()).max()
    } else {
        None
    };
    bytes.unwrap_or(0)
}

/// What the server did for the messages of one size.
#[derive(Debug, Clone, Default)]
pub struct Served {
    /// Comparison of the chunks that moved through a window; `None` if the test did not request one.
    pub checked: Option<Comparison>,
    /// Bytes that its processor copied.
    pub copied: u64,
    /// Processor time of its thread; `None` if no thread takes part.
    pub cpu: Option<Duration>,
}

/// What the client did for the messages of one size.
#[derive(Debug, Clone)]
pub struct Ran {
    /// Comparison of the chunks that moved through a window to this side; `None` if the test did not request one.
    pub checked: Option<Comparison>,
    /// The times of the messages.
    pub times: Times,
    /// Bytes that its processor copied.
    pub copied: u64,
    /// Processor time of its thread.
    pub cpu: Duration,
}

/// Returns the processor time that this thread has used.
pub(crate) fn cpu_time() -> Duration {
    time_of(ClockId::ThreadCPUTime)
}

/// Returns the processor time that all threads of this process have used.
pub(crate) fn process_time() -> Duration {
    time_of(ClockId::ProcessCPUTime)
}

fn time_of(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    // These clocks start at zero.
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Queue pair, memory, and test parameters of one NIC.
pub struct NicSession {
    // Fields are dropped in this order: the queue pair before the memory that it uses.
    queue: QueuePair,
    memory: Memory,
    bounce: Option<Memory>,
    nic: Arc<Nic>,
    role: Role,
    test: Test,
    own: Endpoint,
    other: Option<Endpoint>,
    gid_index: u8,
    seed: u64,
    /// The connection of the payload, if it moves over TCP.
    payload: Option<Payload>,
    /// The part of UCX, if the payload moves by UCX.
    ucx: Option<Port>,
}

impl NicSession {
    /// Allocates memory near the NIC, registers the memory, and creates a queue pair.
    ///
    /// # Errors
    ///
    /// The NIC is too small for the test, or the memory is not available. The message says what to do.
    pub fn new(nic: Arc<Nic>, index: usize, test: &Test, role: Role, own: &OwnArgs) -> Result<Self> {
        let name = nic.name().to_owned();
        let limits = nic.limits().with_context(|| format!("querying the limits of {name}"))?;
        // The send queue also holds the RDMA READ of the peer's handshake word; the receive queue has the same size.
        let most = test.depth + 2;
        ensure!(
            most <= limits.queue,
            "{name} supports at most {} requests in a queue: set --depth to {} or less",
            limits.queue,
            limits.queue.saturating_sub(2)
        );
        let domain = Domain::new(nic.clone()).context("creating a protection domain")?;
        let completions = Completions::new(&nic, 2 * most).context("creating a completion queue")?;
        let queue = QueuePair::new(&domain, &completions, most, most)
            .with_context(|| format!("creating a queue pair on {name} for {most} requests: use a smaller --depth"))?;
        let options = MemoryOptions {
            kind: own.memory,
            provider: own.device.as_deref(),
            device: &own.side.dev_path,
        };
        let bytes = payload_bytes(test, role);
        let memory = Memory::new(options, &domain, bytes)?;
        let bounce = match bounce_bytes(test, role) {
            0 => None,
            bytes => {
                let kind = MemoryKind::Cpu;
                Some(Memory::new(MemoryOptions { kind, ..options }, &domain, bytes)?)
            }
        };
        // The peer gets access to the memory that messages use, and to nothing else: to the host memory if staged.
        let payload = if let (true, Some(reached)) = (test.staged, &bounce) {
            reached.window(0, bounce_bytes(test, role))
        } else {
            memory.window(0, bytes - WORDS)
        };
        let mut endpoint = own_endpoint(&queue, own, payload, memory.window(bytes - WORDS, WORD))?;
        let ucx = match test.mode {
            Mode::Ucx => Some(Port::open(&name, own.memory, memory.span(), bytes - WORDS)?),
            _ => None,
        };
        if let (Role::Server, Some(ucx)) = (role, &ucx) {
            endpoint.ucx = Some(ucx.own()?);
        }
        Ok(Self {
            queue,
            memory,
            bounce,
            nic,
            role,
            test: test.clone(),
            own: endpoint,
            other: None,
            gid_index: own.side.gid_index,
            seed: test.seed.wrapping_add(index as u64),
            payload: None,
            ucx,
        })
    }

    /// Sets the connection of the payload, if it moves over TCP.
    pub fn set_payload(&mut self, payload: Payload) {
        self.payload = Some(payload);
    }

    fn ucx(&self) -> Result<&Port> {
        self.ucx.as_ref().context("UCX is not open")
    }

    fn payload(&self) -> Result<&Payload> {
        self.payload.as_ref().context("no connection for the payload")
    }

    /// Returns the endpoint to send to the peer.
    pub fn endpoint(&self) -> &Endpoint {
        &self.own
    }

    /// Returns the registered memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Returns the parameters of the test.
    pub fn test(&self) -> &Test {
        &self.test
    }

    /// Returns the NIC.
    pub fn nic(&self) -> &Nic {
        &self.nic
    }

    /// Connects the queue pair to the peer's queue pair.
    ///
    /// # Errors
    ///
    /// The two NICs have different link layers, or the NIC rejects the address.
    pub fn connect(&mut self, other: Endpoint) -> Result<()> {
        connect_queue(&self.queue, &self.own, &other, self.gid_index)?;
        if let (Role::Client, Some(ucx)) = (self.role, &mut self.ucx) {
            ucx.connect(other.ucx.as_ref().context("the server sent no address of UCX")?)?;
        }
        self.other = Some(other);
        Ok(())
    }

    fn is_target(&self) -> bool {
        is_target(self.test.mode, self.role)
    }

    fn seed(&self, size: u64) -> u64 {
        self.seed ^ size.rotate_left(32)
    }

    /// Fills the memory for messages of `size` bytes, and posts the first receives.
    ///
    /// # Errors
    ///
    /// ENOMEM if the receive queue is full. The buffer was revoked.
    pub fn prepare(&self, size: u64) -> Result<()> {
        let (slots, span) = (self.test.slots(size), self.memory.span());
        if self.test.verify {
            if self.is_target() {
                fill_target(span, &slots, GUARD, self.seed(size))?;
            } else {
                fill_source(span, &slots, self.seed(size))?;
            }
        }
        self.set_handled(0)?;
        if self.role == Role::Server && self.takes_receives(size) {
            let first = self.chunks(size).min(self.receives(size, &slots));
            for chunk in 0..first {
                self.post_receive(&slots, chunk)?;
            }
        }
        Ok(())
    }

    /// Returns the offset of the handshake region. Its first word counts handled messages; an RDMA READ places the
    /// peer's word at offset `PEER_WORD` of the region.
    fn handled_at(&self) -> u64 {
        payload_bytes(&self.test, self.role) - WORDS
    }

    /// Sets the handshake word, after the writes before it.
    fn set_handled(&self, count: u64) -> Result<()> {
        let span = self.memory.span();
        // Copied bytes are visible before the client reads the handshake word.
        span.flush();
        span.try_write(self.handled_at() as usize, &count.to_le_bytes())
            .context(REVOKED)?;
        span.flush();
        Ok(())
    }

    /// Returns the number of chunks of all messages of `size` bytes.
    fn chunks(&self, size: u64) -> u64 {
        self.test.messages(size) * self.test.chunks(size)
    }

    /// Returns whether each chunk consumes a receive of the server.
    fn takes_receives(&self, size: u64) -> bool {
        self.test.has_handshake(size) || self.test.mode.takes_receives()
    }

    /// Returns the number of receives to post before the first chunk.
    fn receives(&self, size: u64, slots: &Slots) -> u64 {
        if self.test.has_handshake(size) {
            unhandled(&self.test, size, slots)
        } else {
            u64::from(self.test.depth).min(slots.target)
        }
    }

    fn post_receive(&self, slots: &Slots, chunk: u64) -> Result<()> {
        let (at, size) = (slots.target_at(chunk), slots.size);
        let (id, into) = match (self.test.mode, &self.bounce) {
            (Mode::Send, _) => (chunk, Some(self.memory.segment(at, size))),
            (Mode::Rpc, Some(received)) => (calls::RECEIVE | chunk, Some(received.segment(at, size))),
            _ => (chunk, None),
        };
        self.queue
            .post_receive(id, into)
            .with_context(|| format!("posting the receive for chunk {chunk}"))
    }

    fn waiter(&self, own: &OwnArgs, stop: &Stop) -> Waiter {
        Waiter::new(
            self.queue.completions().clone(),
            own.side.how(),
            own.side.timeout,
            stop.clone(),
        )
    }

    /// Runs the server's part of the test for messages of `size` bytes. Does nothing if messages do not consume
    /// receives. Otherwise waits for each chunk, copies staged chunks, and counts handled chunks in the handshake word.
    /// Over TCP, reads each chunk from the socket. By UCX, makes progress until `finished`: the client is done.
    ///
    /// # Errors
    ///
    /// A message does not arrive within the limit, or is not the expected one.
    pub fn serve(&self, size: u64, own: &OwnArgs, stop: &Stop, finished: &AtomicBool) -> Result<Served> {
        let before = cpu_time();
        if self.test.mode == Mode::Ucx {
            self.ucx()?.serve(finished, stop)?;
            return Ok(Served {
                cpu: Some(cpu_time() - before),
                ..Served::default()
            });
        }
        let (slots, chunks) = (self.test.slots(size), self.chunks(size));
        let mut checker = self.checker(size);
        if self.test.mode == Mode::Tcp {
            let span = self.memory.span();
            let handled = |chunk| {
                checker
                    .as_mut()
                    .map_or(Ok(()), |checker| checker.chunk(span, &slots, chunk))
            };
            let payload = self.payload()?;
            let copied = payload.receive(span, &slots, chunks, handled, own.side.timeout, stop)?;
            return Ok(Served {
                checked: checker.map(Checker::result),
                copied,
                cpu: Some(cpu_time() - before),
            });
        }
        if !self.takes_receives(size) {
            return Ok(Served::default());
        }
        if self.test.mode == Mode::Rpc {
            return self.serve_calls(size, &self.waiter(own, stop));
        }
        let has_handshake = self.test.has_handshake(size);
        let waiter = self.waiter(own, stop);
        let (mut came, mut posted, mut copied) = (0, chunks.min(self.receives(size, &slots)), 0);
        let mut completions = Vec::new();
        while came < chunks {
            waiter.next(&mut completions, &|| self.test.part(size, came))?;
            for done in &completions {
                if has_handshake {
                    // The low 32 bits are enough to distinguish a chunk from its neighbours.
                    ensure!(
                        done.immediate == Some(came as u32),
                        "expected chunk {came}, received a chunk with immediate data {:?}",
                        done.immediate
                    );
                    copied += self.copy_staged(&slots, came)?;
                } else if self.test.mode == Mode::WriteImmediate {
                    ensure!(
                        done.immediate == Some(came as u32),
                        "expected chunk {came}, received a chunk with immediate data {:?}",
                        done.immediate
                    );
                } else {
                    ensure!(
                        u64::from(done.bytes) == slots.size && done.id == came,
                        "chunk {came} has {} bytes and consumed receive {}",
                        done.bytes,
                        done.id
                    );
                }
                if let Some(checker) = &mut checker {
                    checker.chunk(self.memory.span(), &slots, came)?;
                }
                came += 1;
                if posted < chunks {
                    self.post_receive(&slots, posted)?;
                    posted += 1;
                }
            }
            if has_handshake {
                self.set_handled(came)?;
            }
        }
        Ok(Served {
            checked: checker.map(Checker::result),
            copied,
            cpu: Some(cpu_time() - before),
        })
    }

    /// Returns the checker of the chunks that this side receives through a window. The final content of the target has
    /// only the last ones.
    fn checker(&self, size: u64) -> Option<Checker> {
        let checks = self.test.verify && self.is_target() && self.test.has_window(size);
        checks.then(|| Checker::of_chunks(self.seed(size)))
    }

    /// Copies a staged chunk from host memory to its target slot. Returns the number of bytes copied.
    fn copy_staged(&self, slots: &Slots, chunk: u64) -> Result<u64> {
        let Some(bounce) = &self.bounce else { return Ok(0) };
        let to = slots.target_at(chunk) as usize;
        let from = slots.source_at(chunk) as usize;
        bounce
            .span()
            .try_copy_to(from, self.memory.span(), to, slots.size as usize)
            .context(REVOKED)?;
        Ok(slots.size)
    }

    /// Compares the target's bytes with the expected bytes; `before` is the comparison of chunks before that. Returns `None`
    /// if this side is not the target, or the test does not request a comparison.
    ///
    /// # Errors
    ///
    /// The buffer was revoked.
    pub fn check(&self, size: u64, before: Option<&Comparison>) -> Result<Option<Comparison>> {
        if !self.test.verify || !self.is_target() {
            return Ok(None);
        }
        let (slots, chunks) = (self.test.slots(size), self.chunks(size));
        let checked = check_target(self.memory.span(), &slots, GUARD, self.seed(size), chunks)?;
        Ok(Some(match before {
            Some(before) => before.clone().and(checked),
            None => checked,
        }))
    }

    /// Runs the client's part of the test for messages of `size` bytes. Times count from `start`; `progress` counts
    /// messages.
    ///
    /// # Errors
    ///
    /// A message fails, or does not complete within the limit.
    pub fn run(&self, size: u64, own: &OwnArgs, stop: &Stop, start: Instant, progress: &AtomicU64) -> Result<Ran> {
        let before = cpu_time();
        let other = self.other.as_ref().context("not connected")?;
        let slots = self.test.slots(size);
        let clock = Clock::new(self.test.messages(size), self.test.chunks(size), start, progress)?;
        if self.test.mode == Mode::Tcp {
            let depth = self.test.in_flight(size);
            let (payload, span) = (self.payload()?, self.memory.span());
            let (times, copied) = payload.send(span, &slots, depth, clock, own.side.timeout, stop)?;
            return Ok(Ran {
                checked: None,
                times,
                copied,
                cpu: cpu_time() - before,
            });
        }
        if self.test.mode == Mode::Ucx {
            let depth = self.test.in_flight(size);
            let times = self
                .ucx()?
                .send(&slots, depth, clock, own.side.how(), own.side.timeout, stop)?;
            return Ok(Ran {
                checked: None,
                times,
                copied: 0,
                cpu: cpu_time() - before,
            });
        }
        let mut checker = self.checker(size);
        let run = Run {
            session: self,
            size,
            waiter: self.waiter(own, stop),
            limit: own.side.timeout,
            other,
            slots,
            chunks: clock.chunks(),
            clock,
            requests: Vec::new(),
        };
        let (times, copied) = if self.test.has_handshake(size) {
            run.with_handshake(unhandled(&self.test, size, &slots))?
        } else if self.test.mode == Mode::Rpc {
            run.with_replies()?
        } else {
            run.without_handshake(checker.as_mut())?
        };
        Ok(Ran {
            checked: checker.map(Checker::result),
            times,
            copied,
            cpu: cpu_time() - before,
        })
    }
}

/// Records the times of messages, from the chunks that are posted and done.
pub(crate) struct Clock<'a> {
    start: Instant,
    /// Messages.
    messages: u64,
    /// Chunks of a message.
    each: u64,
    posted: u64,
    done: u64,
    times: Times,
    progress: &'a AtomicU64,
}

impl<'a> Clock<'a> {
    /// Creates a clock for `messages` messages of `each` chunks. Times count from `start`; `progress` counts messages.
    pub(crate) fn new(messages: u64, each: u64, start: Instant, progress: &'a AtomicU64) -> Result<Self> {
        Ok(Self {
            start,
            messages,
            each: each.max(1),
            posted: 0,
            done: 0,
            times: Times::with_capacity(usize::try_from(messages)?),
            progress,
        })
    }

    /// Returns the number of chunks of all messages.
    pub(crate) fn chunks(&self) -> u64 {
        self.messages * self.each
    }

    /// Returns the number of chunks posted.
    pub(crate) fn posted(&self) -> u64 {
        self.posted
    }

    /// The next chunk is posted: the message's time starts with its first chunk.
    pub(crate) fn post(&mut self) {
        if self.posted % self.each == 0 {
            self.times.posted.push(self.start.elapsed());
        }
        self.posted += 1;
    }

    /// `count` more chunks are done: a message is done with its last chunk.
    pub(crate) fn finish(&mut self, count: u64) {
        let before = self.done / self.each;
        self.done += count;
        let messages = self.done / self.each;
        let now = self.start.elapsed();
        self.times.done.extend((before..messages).map(|_| now));
        self.progress.store(messages, Ordering::Relaxed);
    }

    /// Returns the times.
    pub(crate) fn times(self) -> Times {
        self.times
    }
}

/// State of the client during the messages of one size.
struct Run<'a> {
    session: &'a NicSession,
    size: u64,
    waiter: Waiter,
    /// Longest wait until the server has handled one more chunk.
    limit: Duration,
    other: &'a Endpoint,
    slots: Slots,
    /// Number of chunks of all messages.
    chunks: u64,
    clock: Clock<'a>,
    requests: Vec<Request>,
}

impl Run<'_> {
    /// Returns the address and key of `bytes` of the peer's memory at offset `at`.
    fn remote(&self, window: &Window, at: u64, bytes: u64) -> Result<Remote> {
        Ok(Remote {
            address: window.at(at, bytes)?,
            rkey: window.rkey,
        })
    }

    /// Posts the collected requests.
    fn post(&mut self) -> Result<()> {
        let count = self.requests.len();
        self.session
            .queue
            .post(&self.requests)
            .with_context(|| format!("posting {count} requests"))?;
        self.requests.clear();
        Ok(())
    }

    /// Runs messages that are done when the completion of their last chunk arrives.
    fn without_handshake(mut self, mut checker: Option<&mut Checker>) -> Result<(Times, u64)> {
        let depth = self.session.test.in_flight(self.size);
        let batch = u64::from(self.session.test.batch.unwrap_or(1)).min(depth);
        let (mut posted, mut done) = (0, 0);
        let mut completions = Vec::new();
        while done < self.chunks {
            // A doorbell waits until its requests may be in flight.
            while posted < self.chunks && posted - done + batch.min(self.chunks - posted) <= depth {
                for _ in 0..batch.min(self.chunks - posted) {
                    let request = self.chunk(posted)?;
                    self.requests.push(request);
                    self.clock.post();
                    posted += 1;
                }
                if self.session.test.batch.is_some() {
                    self.post()?;
                }
            }
            self.post()?;
            self.waiter
                .next(&mut completions, &|| self.session.test.part(self.size, done))?;
            let before = done;
            for completion in &completions {
                ensure!(
                    completion.id == done && done < posted,
                    "expected the completion of request {done}, received that of {}",
                    completion.id
                );
                if let Some(checker) = &mut checker {
                    checker.chunk(self.session.memory.span(), &self.slots, done)?;
                }
                done += 1;
            }
            self.clock.finish(done - before);
        }
        Ok((self.clock.times(), 0))
    }

    /// Returns the request for a chunk without handshake.
    fn chunk(&self, chunk: u64) -> Result<Request> {
        let (size, slots) = (self.slots.size, &self.slots);
        let (source, target) = (slots.source_at(chunk), slots.target_at(chunk));
        let memory = &self.session.memory;
        let (local, work) = match self.session.test.mode {
            Mode::Write => {
                let to = self.remote(&self.other.payload, target, size)?;
                (memory.segment(source, size), Work::Write(to, None))
            }
            Mode::WriteImmediate => {
                let to = self.remote(&self.other.payload, target, size)?;
                (memory.segment(source, size), Work::Write(to, Some(chunk as u32)))
            }
            Mode::Read => {
                let from = self.remote(&self.other.payload, source, size)?;
                (memory.segment(target, size), Work::Read(from))
            }
            Mode::Send | Mode::Rpc => (memory.segment(source, size), Work::Send),
            Mode::Tcp | Mode::Ucx => bail!("messages by {} have no work requests", self.session.test.mode.name()),
        };
        Ok(Request {
            id: chunk,
            local,
            work,
            signaled: true,
        })
    }

    /// Runs writes with handshake: a chunk is done when an RDMA READ of the server's handshake word says so. `most` chunks
    /// are in flight at most.
    fn with_handshake(mut self, most: u64) -> Result<(Times, u64)> {
        let session = self.session;
        let (mut posted, mut written, mut handled, mut copied) = (0, 0, 0, 0);
        let mut reading = false;
        let mut handling = Handling::new(self.limit);
        let mut completions = Vec::new();
        let peer_word = session.handled_at() + PEER_WORD;
        let read_word = Request {
            id: READ_WORD_ID,
            local: session.memory.segment(peer_word, WORD),
            work: Work::Read(self.remote(&self.other.handled, 0, WORD)?),
            signaled: true,
        };
        while handled < self.chunks {
            while posted < self.chunks && posted - handled < most {
                self.clock.post();
                let request = self.write(posted, &mut copied)?;
                self.requests.push(request);
                posted += 1;
                if session.test.staged {
                    // Posts each copied chunk immediately: the NIC transmits while the processor copies the next chunk.
                    self.post()?;
                }
            }
            if !reading && handled < posted && (posted - handled == most || posted == self.chunks) {
                self.requests.push(read_word);
                reading = true;
            }
            self.post()?;
            self.waiter
                .next(&mut completions, &|| session.test.part(self.size, written))?;
            for completion in &completions {
                if completion.id == READ_WORD_ID {
                    reading = false;
                    let now_handled = word(session.memory.span(), peer_word)?;
                    ensure!(
                        (handled..=written).contains(&now_handled),
                        "the other side reports {now_handled} handled chunks: at least {handled} and at most {written} \
                         are possible"
                    );
                    handling.check(now_handled > handled, Instant::now(), &|| {
                        session.test.part(self.size, handled)
                    })?;
                    self.clock.finish(now_handled - handled);
                    handled = now_handled;
                } else if completion.id == written {
                    written += 1;
                } else {
                    bail!(
                        "expected the completion of request {written}, received that of {}",
                        completion.id
                    );
                }
            }
        }
        Ok((self.clock.times(), copied))
    }

    /// Returns the request for a write with handshake; copies the payload to host memory first if the test is staged.
    fn write(&self, chunk: u64, copied: &mut u64) -> Result<Request> {
        let (session, size) = (self.session, self.slots.size);
        let source = self.slots.source_at(chunk);
        let (local, at): (Segment, u64) = match &session.bounce {
            Some(bounce) => {
                let offset = source as usize;
                session
                    .memory
                    .span()
                    .try_copy_to(offset, bounce.span(), offset, size as usize)
                    .context(REVOKED)?;
                bounce.span().flush();
                *copied += size;
                (bounce.segment(source, size), source)
            }
            None => (session.memory.segment(source, size), self.slots.target_at(chunk)),
        };
        let to = self.remote(&self.other.payload, at, size)?;
        Ok(Request {
            id: chunk,
            local,
            // The low 32 bits are enough to distinguish a chunk from its neighbours.
            work: Work::Write(to, Some(chunk as u32)),
            signaled: true,
        })
    }
}

/// Limits the time in which the server handles no chunk. The server's NIC answers the RDMA READs of the handshake word also if
/// the server's program is stopped, so the limit on the wait for a completion does not end such a test.
struct Handling {
    limit: Duration,
    since: Instant,
}

impl Handling {
    fn new(limit: Duration) -> Self {
        Self {
            limit,
            since: Instant::now(),
        }
    }

    /// Checks the limit after a read of the handshake word at `now`. `moved` says whether the word has changed; `what`
    /// describes the awaited chunk.
    ///
    /// # Errors
    ///
    /// The word has not changed for the limit.
    fn check(&mut self, moved: bool, now: Instant, what: &dyn Fn() -> String) -> Result<()> {
        if moved {
            self.since = now;
            return Ok(());
        }
        ensure!(
            now.saturating_duration_since(self.since) < self.limit,
            "the other side did not handle {} within {:?}, but its NIC answers: is its p2pmem-perf stopped? --timeout sets \
             the limit",
            what(),
            self.limit
        );
        Ok(())
    }
}

/// Reads a handshake word.
fn word(span: &Span, at: u64) -> Result<u64> {
    let mut word = [0; WORD as usize];
    span.try_read(at as usize, &mut word).context(REVOKED)?;
    Ok(u64::from_le_bytes(word))
}

/// Returns the endpoint that the peer needs: address and memory.
///
/// # Errors
///
/// The NIC's port is not active, or has no GID at this index.
pub fn own_endpoint(queue: &QueuePair, own: &OwnArgs, payload: Window, handled: Window) -> Result<Endpoint> {
    let name = queue.domain().nic().name();
    let address = queue.address(own.side.gid_index).with_context(|| {
        format!(
            "the address of a queue pair on {name}, with --gid-index {}",
            own.side.gid_index
        )
    })?;
    Ok(Endpoint {
        nic: name.to_owned(),
        address,
        payload,
        handled,
        ucx: None,
    })
}

/// Connects a queue pair to the peer's queue pair.
///
/// # Errors
///
/// The two NICs have different link layers, or the NIC rejects the address.
pub fn connect_queue(queue: &QueuePair, own: &Endpoint, other: &Endpoint, gid_index: u8) -> Result<()> {
    let name = &own.nic;
    ensure!(
        own.address.link == other.address.link,
        "{name} is on {:?}, but {} of the other side is on {:?}: select NICs on the same network (--nic)",
        own.address.link,
        other.nic,
        other.address.link
    );
    queue
        .connect(&own.address, gid_index, &other.address, RETRIES)
        .with_context(|| {
            format!(
                "connecting {name} to {} of the other side: on Ethernet, select GIDs on the same network (--gid-index)",
                other.nic
            )
        })
}

/// Returns a one-line description of the memory.
pub fn describe(session: &NicSession) -> String {
    let memory = session.memory();
    let size = human_size(memory.span().len() as u64);
    match memory.provider() {
        Some(provider) => format!(
            "{size} of {} near {}, by {}",
            provider.addr,
            session.nic().name(),
            memory.method()
        ),
        None => format!("{size} of host memory for {}", session.nic().name()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_takes_from_its_first_chunk_to_its_last() {
        let progress = AtomicU64::new(0);
        let mut clock = Clock::new(2, 3, Instant::now(), &progress).unwrap();
        assert_eq!(clock.chunks(), 6);
        (0..4).for_each(|_| clock.post());
        clock.finish(2);
        assert_eq!((clock.times.posted.len(), clock.times.done.len()), (2, 0));
        clock.finish(3);
        assert_eq!((clock.times.done.len(), progress.load(Ordering::Relaxed)), (1, 1));
        (0..2).for_each(|_| clock.post());
        clock.finish(1);
        let times = clock.times();
        assert_eq!((times.posted.len(), times.done.len()), (2, 2));
        assert!(times.posted[0] <= times.done[0] && times.posted[1] <= times.done[1]);
    }

    #[test]
    fn a_server_that_handles_nothing_is_reported() {
        let limit = Duration::from_secs(30);
        let mut handling = Handling::new(limit);
        let start = handling.since;
        let what = || "message 3 of 9".to_owned();
        handling.check(false, start + limit / 2, &what).unwrap();
        // A chunk that is handled starts the limit again.
        handling.check(true, start + limit, &what).unwrap();
        handling.check(false, start + limit * 3 / 2, &what).unwrap();
        let error = handling.check(false, start + limit * 2, &what).unwrap_err().to_string();
        assert!(
            error.contains("message 3 of 9") && error.contains("the other side") && error.contains("--timeout"),
            "{error}"
        );
    }
}
