// SPDX-License-Identifier: MIT OR Apache-2.0

//! One NIC's part of a test: its connection, its memory, and messages through it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use p2pmem::human_size;

use crate::cli::{Kind, OwnArgs};
use crate::memory::{Memory, Place};
use crate::pattern::{check_target, fill_source, fill_target, Checked};
use crate::sizes::Slots;
use crate::stats::Times;
use crate::sys::verbs::{self, Completions, Domain, Limits, Nic, QueuePair, Remote, Request, Retries, Segment, Work};
use crate::sys::Span;
use crate::waiter::{Stop, Waiter};
use crate::wire::{Endpoint, Mode, Test, Window};

/// Bytes behind the slots that nobody may touch.
pub const GUARD: u64 = 4096;
/// Bytes for the two words behind the guard.
const WORDS: u64 = 4096;
/// Bytes of a word.
const WORD: u64 = 8;
/// Where the word is, from the words' start, that an RDMA READ of the other side's word brings.
const LANDING: u64 = 64;
/// Number of the request that reads the other side's word.
const ASK: u64 = u64::MAX;
/// An acknowledgement may take about a quarter of a second, and be missing eight times.
pub const RETRIES: Retries = Retries {
    timeout: 16,
    retries: 7,
};

/// Which side of a test this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The client.
    Client,
    /// The server.
    Server,
}

/// Whether a side's memory is where messages go.
pub fn is_target(mode: Mode, role: Role) -> bool {
    (mode == Mode::Read) == (role == Role::Client)
}

/// Places for messages of a size.
pub fn slots(test: &Test, size: u64) -> Slots {
    Slots::new(size, test.depth.into(), test.budget)
}

/// Messages that may be in flight before the server has handled the first of them.
fn window(test: &Test, slots: &Slots) -> u64 {
    // Staged ones have as many slots of host memory as there are in the source.
    let places = if test.staged { slots.source } else { slots.target };
    u64::from(test.depth).min(places)
}

/// Bytes of memory that a side needs for its payload, guard and words included.
pub fn payload_bytes(test: &Test, role: Role) -> u64 {
    let slots = test.sizes.iter().map(|size| slots(test, *size));
    let bytes = slots.map(|slots| {
        if is_target(test.mode, role) {
            slots.target_bytes()
        } else {
            slots.source_bytes()
        }
    });
    bytes.max().unwrap_or(0) + GUARD + WORDS
}

/// Bytes of host memory that a side copies its payload through.
pub fn bounce_bytes(test: &Test) -> u64 {
    if !test.staged {
        return 0;
    }
    let bytes = test.sizes.iter().map(|size| slots(test, *size).source_bytes());
    bytes.max().unwrap_or(0)
}

/// One NIC's part.
pub struct Lane {
    // Dropped in this order: the queue before the memory it works on.
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
}

impl Lane {
    /// Opens the NIC, gets memory near it, and makes a queue pair.
    ///
    /// # Errors
    ///
    /// Whatever of it is not possible, with what to do.
    pub fn new(nic: Arc<Nic>, index: usize, test: &Test, role: Role, own: &OwnArgs) -> Result<Self> {
        let name = nic.name().to_owned();
        let limits = limits(&nic)?;
        // With one request that asks for the other side's word, and with receives.
        let most = test.depth + 2;
        ensure!(
            most <= limits.queue,
            "{name} has queues of {} requests at most: set --depth to {} or less",
            limits.queue,
            limits.queue.saturating_sub(2)
        );
        let domain = Domain::new(nic.clone()).context("making a protection domain")?;
        let completions = Completions::new(&nic, 2 * most).context("making a completion queue")?;
        let queue = QueuePair::new(&domain, &completions, most, most)
            .with_context(|| format!("making a queue pair on {name} for {most} requests: try a smaller --depth"))?;
        let place = Place {
            kind: own.memory,
            provider: own.provider.as_deref(),
            device: &own.device,
        };
        let bytes = payload_bytes(test, role);
        let memory = Memory::new(place, &domain, bytes)?;
        let bounce = match bounce_bytes(test) {
            0 => None,
            bytes => {
                let kind = Kind::Cpu;
                Some(Memory::new(Place { kind, ..place }, &domain, bytes)?)
            }
        };
        // The other side may reach what it is to reach, and no more: when staged, only the host memory.
        let reached = bounce.as_ref().unwrap_or(&memory);
        let payload = if test.staged {
            reached.window(0, bounce_bytes(test))
        } else {
            reached.window(0, bytes - WORDS)
        };
        let endpoint = own_endpoint(&nic, &queue, own, payload, memory.window(bytes - WORDS, WORD))?;
        Ok(Self {
            queue,
            memory,
            bounce,
            nic,
            role,
            test: test.clone(),
            own: endpoint,
            other: None,
            gid_index: own.gid_index,
            seed: test.seed.wrapping_add(index as u64),
        })
    }

    /// What the other side needs to know.
    pub fn endpoint(&self) -> &Endpoint {
        &self.own
    }

    /// Its memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Its NIC.
    pub fn nic(&self) -> &Nic {
        &self.nic
    }

    /// Connects to the other side's queue pair.
    ///
    /// # Errors
    ///
    /// The two do not fit, or the NIC refuses.
    pub fn connect(&mut self, other: Endpoint) -> Result<()> {
        let name = self.nic.name();
        ensure!(
            self.own.link == other.link,
            "{name} is on {:?}, {} of the other side on {:?}: choose NICs that reach each other (--nic)",
            self.own.link,
            other.nic,
            other.link
        );
        self.queue
            .connect(&self.own, self.gid_index, &other, RETRIES)
            .with_context(|| {
                format!(
                    "connecting {name} to {} of the other side: on Ethernet both need GIDs that reach each other (--gid-index)",
                    other.nic
                )
            })?;
        self.other = Some(other);
        Ok(())
    }

    fn is_target(&self) -> bool {
        is_target(self.test.mode, self.role)
    }

    fn seed(&self, size: u64) -> u64 {
        self.seed ^ size.rotate_left(32)
    }

    /// Makes the memory ready for messages of a size, and posts the first receives.
    ///
    /// # Errors
    ///
    /// The queue is full.
    pub fn prepare(&self, size: u64) -> Result<()> {
        let (slots, span) = (slots(&self.test, size), self.memory.span());
        if self.test.verify {
            if self.is_target() {
                fill_target(span, &slots, GUARD, self.seed(size));
            } else {
                fill_source(span, &slots, self.seed(size));
            }
        }
        span.write(self.handled_at() as usize, &0u64.to_le_bytes());
        span.flush();
        if self.role == Role::Server && self.takes_receives() {
            let first = self.test.messages(size).min(self.receives(&slots));
            for message in 0..first {
                self.post_receive(&slots, message)?;
            }
        }
        Ok(())
    }

    /// First byte of the words: the one that counts handled messages, and the one that the other side's comes to.
    fn handled_at(&self) -> u64 {
        payload_bytes(&self.test, self.role) - WORDS
    }

    /// Whether messages take receives of the server.
    fn takes_receives(&self) -> bool {
        self.test.is_handed_over() || self.test.mode == Mode::Send
    }

    /// Receives that are posted at once.
    fn receives(&self, slots: &Slots) -> u64 {
        if self.test.is_handed_over() {
            window(&self.test, slots)
        } else {
            u64::from(self.test.depth).min(slots.target)
        }
    }

    fn post_receive(&self, slots: &Slots, message: u64) -> Result<()> {
        let into = (self.test.mode == Mode::Send).then(|| self.memory.piece(slots.target_at(message), slots.size));
        self.queue
            .post_receive(message, into)
            .with_context(|| format!("posting the receive for message {message}"))
    }

    fn waiter(&self, own: &OwnArgs, stop: &Stop) -> Waiter {
        Waiter::new(self.queue.completions().clone(), own.events, own.timeout, stop.clone())
    }

    /// The server's part while messages of a size arrive. Does nothing if the server does not notice messages; otherwise
    /// takes each message, copies it if the test requests that, and reports that it is handled. Returns the bytes copied.
    ///
    /// # Errors
    ///
    /// Messages do not arrive, or are not the expected ones.
    pub fn serve(&self, size: u64, own: &OwnArgs, stop: &Stop) -> Result<u64> {
        if !self.takes_receives() {
            return Ok(0);
        }
        let slots = slots(&self.test, size);
        let messages = self.test.messages(size);
        let waiter = self.waiter(own, stop);
        let (mut came, mut posted, mut copied) = (0, messages.min(self.receives(&slots)), 0);
        let mut completions = Vec::new();
        while came < messages {
            waiter.next(&mut completions, &|| format!("message {came} of {messages}"))?;
            for done in &completions {
                if self.test.is_handed_over() {
                    // The low 32 bits are enough to distinguish a message from its neighbours.
                    ensure!(
                        done.immediate == Some(came as u32),
                        "message {came} came with the number {:?}",
                        done.immediate
                    );
                    copied += self.land(&slots, came);
                } else {
                    ensure!(
                        u64::from(done.bytes) == size && done.id == came,
                        "message {came} has {} bytes and came in receive {}",
                        done.bytes,
                        done.id
                    );
                }
                came += 1;
                if posted < messages {
                    self.post_receive(&slots, posted)?;
                    posted += 1;
                }
            }
            if self.test.is_handed_over() {
                let span = self.memory.span();
                // What was copied is there before the other side hears of it.
                span.flush();
                span.write(self.handled_at() as usize, &came.to_le_bytes());
                span.flush();
            }
        }
        Ok(copied)
    }

    /// Copies a staged message to where it belongs.
    fn land(&self, slots: &Slots, message: u64) -> u64 {
        let Some(bounce) = &self.bounce else { return 0 };
        let to = slots.target_at(message) as usize;
        bounce.span().copy_to(
            slots.source_at(message) as usize,
            self.memory.span(),
            to,
            slots.size as usize,
        );
        slots.size
    }

    /// Compares the target's bytes with what they must be.
    pub fn check(&self, size: u64) -> Option<Checked> {
        (self.test.verify && self.is_target()).then(|| {
            let slots = slots(&self.test, size);
            let messages = self.test.messages(size);
            check_target(self.memory.span(), &slots, GUARD, self.seed(size), messages)
        })
    }

    /// The client's part: moves all messages of a size. Times count from `start`; `progress` counts messages.
    /// Returns the times, and the bytes copied.
    ///
    /// # Errors
    ///
    /// A message fails, or is not done in time.
    pub fn run(
        &self,
        size: u64,
        own: &OwnArgs,
        stop: &Stop,
        start: Instant,
        progress: &AtomicU64,
    ) -> Result<(Times, u64)> {
        let other = self.other.as_ref().context("not connected")?;
        let slots = slots(&self.test, size);
        let messages = self.test.messages(size);
        let run = Run {
            lane: self,
            waiter: self.waiter(own, stop),
            other,
            slots,
            messages,
            start,
            progress,
            times: Times::with_capacity(usize::try_from(messages)?),
            requests: Vec::new(),
        };
        if self.test.is_handed_over() {
            run.handed_over(window(&self.test, &slots))
        } else {
            run.one_sided()
        }
    }
}

/// The client's messages of one size.
struct Run<'a> {
    lane: &'a Lane,
    waiter: Waiter,
    other: &'a Endpoint,
    slots: Slots,
    messages: u64,
    start: Instant,
    progress: &'a AtomicU64,
    times: Times,
    requests: Vec<Request>,
}

impl Run<'_> {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// `bytes` of the other side's memory.
    fn remote(&self, window: &Window, at: u64, bytes: u64) -> Result<Remote> {
        Ok(Remote {
            address: window.at(at, bytes)?,
            rkey: window.rkey,
        })
    }

    /// Posts what was collected.
    fn post(&mut self) -> Result<()> {
        let count = self.requests.len();
        self.lane
            .queue
            .post(&self.requests)
            .with_context(|| format!("posting {count} requests"))?;
        self.requests.clear();
        Ok(())
    }

    /// Messages that are done when the NIC says so.
    fn one_sided(mut self) -> Result<(Times, u64)> {
        let depth = u64::from(self.lane.test.depth);
        let (mut posted, mut done) = (0, 0);
        let mut completions = Vec::new();
        while done < self.messages {
            while posted < self.messages && posted - done < depth {
                let request = self.message(posted)?;
                self.requests.push(request);
                self.times.posted.push(self.now());
                posted += 1;
            }
            self.post()?;
            self.waiter
                .next(&mut completions, &|| format!("message {done} of {}", self.messages))?;
            let now = self.now();
            for completion in &completions {
                ensure!(
                    completion.id == done && done < posted,
                    "completion {} came in place of {done}",
                    completion.id
                );
                self.times.done.push(now);
                done += 1;
            }
            self.progress.store(done, Ordering::Relaxed);
        }
        Ok((self.times, 0))
    }

    /// A message that no one hands over.
    fn message(&self, message: u64) -> Result<Request> {
        let (size, slots) = (self.slots.size, &self.slots);
        let (source, target) = (slots.source_at(message), slots.target_at(message));
        let memory = &self.lane.memory;
        let (local, work) = match self.lane.test.mode {
            Mode::Write => {
                let to = self.remote(&self.other.payload, target, size)?;
                (memory.piece(source, size), Work::Write(to, None))
            }
            Mode::Read => {
                let from = self.remote(&self.other.payload, source, size)?;
                (memory.piece(target, size), Work::Read(from))
            }
            Mode::Send => (memory.piece(source, size), Work::Send),
        };
        Ok(Request {
            id: message,
            local,
            work,
        })
    }

    /// Writes that are complete when the server has handled them: an RDMA READ of the server's word reports that.
    fn handed_over(mut self, window: u64) -> Result<(Times, u64)> {
        let lane = self.lane;
        let (mut posted, mut written, mut handled, mut copied) = (0, 0, 0, 0);
        let mut asking = false;
        let mut completions = Vec::new();
        let landing = lane.handled_at() + LANDING;
        let ask = Request {
            id: ASK,
            local: lane.memory.piece(landing, WORD),
            work: Work::Read(self.remote(&self.other.handled, 0, WORD)?),
        };
        while handled < self.messages {
            while posted < self.messages && posted - handled < window {
                self.times.posted.push(self.now());
                let request = self.write(posted, &mut copied)?;
                self.requests.push(request);
                posted += 1;
                if lane.test.staged {
                    // The NIC works while the processor copies the next.
                    self.post()?;
                }
            }
            if !asking && handled < posted && (posted - handled == window || posted == self.messages) {
                self.requests.push(ask);
                asking = true;
            }
            self.post()?;
            self.waiter
                .next(&mut completions, &|| format!("message {written} of {}", self.messages))?;
            for completion in &completions {
                if completion.id == ASK {
                    asking = false;
                    let now_handled = word(lane.memory.span(), landing);
                    ensure!(
                        (handled..=written).contains(&now_handled),
                        "the other side says that {now_handled} messages are handled, after {handled}, of {written} written"
                    );
                    let now = self.now();
                    self.times.done.extend((handled..now_handled).map(|_| now));
                    handled = now_handled;
                } else if completion.id == written {
                    written += 1;
                } else {
                    bail!("completion {} came in place of {written}", completion.id);
                }
            }
            self.progress.store(handled, Ordering::Relaxed);
        }
        Ok((self.times, copied))
    }

    /// A write with its number, from host memory where it is staged.
    fn write(&self, message: u64, copied: &mut u64) -> Result<Request> {
        let (lane, size) = (self.lane, self.slots.size);
        let source = self.slots.source_at(message);
        let (local, at): (Segment, u64) = match &lane.bounce {
            Some(bounce) => {
                let place = source as usize;
                lane.memory.span().copy_to(place, bounce.span(), place, size as usize);
                bounce.span().flush();
                *copied += size;
                (bounce.piece(source, size), source)
            }
            None => (lane.memory.piece(source, size), self.slots.target_at(message)),
        };
        let to = self.remote(&self.other.payload, at, size)?;
        Ok(Request {
            id: message,
            local,
            // The low 32 bits are enough to distinguish a message from its neighbours.
            work: Work::Write(to, Some(message as u32)),
        })
    }
}

/// A word of memory.
fn word(span: &Span, at: u64) -> u64 {
    let mut word = [0; WORD as usize];
    span.read(at as usize, &mut word);
    u64::from_le_bytes(word)
}

fn limits(nic: &Nic) -> Result<Limits> {
    nic.limits()
        .with_context(|| format!("asking {} for its limits", nic.name()))
}

/// What the other side needs to know of a queue pair and its memory.
///
/// # Errors
///
/// The NIC's port is not active, or has no such GID.
pub fn own_endpoint(nic: &Nic, queue: &QueuePair, own: &OwnArgs, payload: Window, handled: Window) -> Result<Endpoint> {
    let name = nic.name();
    let port = nic.port().with_context(|| format!("asking {name} for its port"))?;
    ensure!(
        port.is_active,
        "the port of {name} is not active: see `ibv_devinfo -d {name}`, and whether the link is up"
    );
    let gid = nic.gid(own.gid_index).with_context(|| {
        format!(
            "{name} has no GID {}: see `ibv_devinfo -v`, and set --gid-index",
            own.gid_index
        )
    })?;
    let limits = limits(nic)?;
    Ok(Endpoint {
        nic: name.to_owned(),
        link: port.link,
        lid: port.lid,
        gid,
        qpn: queue.number(),
        // Any will do, if only it differs from run to run.
        psn: (std::process::id() ^ (queue.number() << 8)) & 0xff_ffff,
        mtu: port.mtu,
        reads: limits.reads_answered.min(limits.reads_asked).max(1),
        payload,
        handled,
    })
}

/// Opens the NICs of those names; without names, the first with an active port.
///
/// # Errors
///
/// There is no such NIC; with the names of those there are.
pub fn open_nics(names: &[String]) -> Result<Vec<Arc<Nic>>> {
    let all = verbs::nics().map_err(|error| match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => {
            anyhow::anyhow!("libibverbs is not installed (Debian: apt-get install libibverbs1 ibverbs-providers)")
        }
        _ => anyhow::Error::new(error).context("looking for NICs: is the module ib_uverbs loaded?"),
    })?;
    ensure!(
        !all.is_empty(),
        "this machine has no RDMA NIC with a driver: see `rdma link`, and whether modules such as mlx5_ib are loaded"
    );
    let open = |name: &String| {
        let nic =
            verbs::Nic::open(name).with_context(|| format!("opening {name}: may this user open /dev/infiniband?"))?;
        nic.with_context(|| format!("there is no NIC {name}; this machine has {}", all.join(", ")))
    };
    if !names.is_empty() {
        return names.iter().map(open).collect();
    }
    for name in &all {
        let nic = open(name)?;
        if nic.port().is_ok_and(|port| port.is_active) {
            return Ok(vec![nic]);
        }
    }
    bail!("no NIC of {} has an active port: see `rdma link`", all.join(", "))
}

/// Returns the bytes of this side's memory that a test needs for each NIC.
pub fn needs(test: &Test, role: Role) -> u64 {
    payload_bytes(test, role) + bounce_bytes(test)
}

/// Describes the memory of a lane in one message.
pub fn describe(lane: &Lane) -> String {
    let memory = lane.memory();
    let size = human_size(memory.span().len() as u64);
    match memory.provider() {
        Some(provider) => format!(
            "{size} of {} near {}, by {}",
            provider.addr,
            lane.nic().name(),
            memory.method()
        ),
        None => format!("{size} of host memory for {}", lane.nic().name()),
    }
}
