// SPDX-License-Identifier: MIT OR Apache-2.0

//! Recording: blocks are computed in the accelerator, and sent from there to one or more storage nodes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use p2pmem_verbs::{Access, Request as Work, Work as Operation};

use super::compute::Compute;
use super::link::{finish_all, timeout_of, wait_for, Link};
use super::source::{Source, SourceOptions};
use super::{now, SessionRequest, Verification, MAX_SESSIONS};
use crate::control::message::Message;
use crate::control::{unexpected, Record, Reply, Request};
use crate::rdma::{id, kind, Kind, MAX_BLOCK};
use crate::store::Block;

/// What is recorded.
#[derive(Debug, Clone)]
pub struct RecordOptions {
    /// The sessions: one for each storage node.
    pub sessions: Vec<SessionRequest>,
    /// Whether each block goes to all storage nodes. Otherwise they take turns.
    pub mirror: bool,
    /// The number of blocks.
    pub blocks: u64,
    /// The sequence number of the first block.
    pub first: u64,
    /// The most bytes in a second that the source has; `None` for no limit.
    pub rate: Option<u64>,
    /// Which blocks are verified.
    pub verify: Verification,
}

/// What was recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Recorded {
    /// Blocks that are durable on all storage nodes that should have them, or on a drive.
    pub acknowledged: u64,
    /// The number of the recording on each storage node.
    pub recordings: Vec<u64>,
    /// The memory that each storage node chose, or that of the accelerator if drives access it.
    pub memory: Vec<String>,
    /// Bytes of a block.
    pub block_size: u64,
    /// Nanoseconds from the first block to the last acknowledgement.
    pub nanoseconds: u64,
    /// Blocks whose spectrum was compared with what the processor computes.
    pub verified: u64,
    /// Storage nodes or drives that failed, with the reason. The others have all blocks that were not acknowledged before.
    pub failed: Vec<String>,
}

/// The session with one storage node.
struct Session {
    link: Link,
    recording: u64,
    memory: String,
    credits: u32,
    /// Places of messages that can be sent.
    places: Vec<u32>,
    /// Sent blocks that are not acknowledged.
    unacknowledged: u64,
}

/// A block between its computation and its acknowledgement.
struct Pending {
    buffer: u32,
    /// Sessions that still read the buffer, a bit each.
    sending: u64,
    /// Sessions that have not acknowledged the block, a bit each.
    waiting: u64,
}

impl Session {
    fn start(request: &SessionRequest, compute: &dyn Compute, started: u64) -> Result<Self> {
        let buffers = compute.buffers();
        // The NIC only reads the blocks.
        let mut link = Link::open(request, compute, Access::LOCAL_READ)?;
        link.connection.send(&Request::Record(Record {
            channel: request.channel.clone(),
            port: request.port,
            block_size: compute.block_size(),
            started,
            address: link.endpoint.address(),
            buffers,
        }))?;
        let (recording, address, credits, memory) = match link.connection.receive_reply()? {
            Reply::RecordReady {
                recording,
                address,
                credits,
                memory,
                ..
            } => (recording, address, credits, memory),
            other => return Err(unexpected(&other).into()),
        };
        // Each acknowledgement has at least one block, so there are never more of them than credits.
        link.connect(&address, credits, buffers)?;
        Ok(Self {
            link,
            recording,
            memory,
            credits,
            places: (0..buffers).collect(),
            unacknowledged: 0,
        })
    }

    fn is_ready(&self) -> bool {
        self.credits > 0 && !self.places.is_empty()
    }

    /// Sends a block: its description, and the payload from the accelerator's memory.
    fn send(&mut self, buffer: u32, block: Block, block_size: u64) -> Result<()> {
        let place = self.places.pop().context("no place for a message")?;
        self.credits -= 1;
        self.unacknowledged += 1;
        let description = Message::Block {
            block,
            bytes: block_size,
        };
        let payload = Work {
            // The completion of the payload frees the buffer, and the place of the message before it.
            id: id(Kind::Payload, (buffer << 16) | place),
            local: self.link.registered.segment(buffer, block_size),
            work: Operation::Send,
            signaled: true,
        };
        let endpoint = &self.link.endpoint;
        endpoint.post(&[endpoint.message(place, &description, false), payload])
    }
}

/// Returns the links of the sessions that have not failed, with their numbers.
fn links(sessions: &mut [Option<Session>]) -> impl Iterator<Item = (usize, &mut Link)> {
    let sessions = sessions.iter_mut().enumerate();
    sessions.filter_map(|(number, session)| Some((number, &mut session.as_mut()?.link)))
}

/// The recording program.
struct Recorder<'a> {
    source: Source<'a>,
    options: &'a RecordOptions,
    block_size: u64,
    /// `None` for a session that failed.
    sessions: Vec<Option<Session>>,
    pending: BTreeMap<u64, Pending>,
    result: Recorded,
    last_progress: Instant,
}

/// Records blocks, until all are acknowledged.
///
/// # Errors
///
/// A storage node cannot be reached or refuses the session. It ends the session, or does nothing within its timeout, and there is
/// no mirror. The accelerator fails. A verified block is wrong.
pub fn record(compute: &mut dyn Compute, options: &RecordOptions) -> Result<Recorded> {
    let block_size = compute.block_size();
    ensure!(block_size <= MAX_BLOCK, "a block has at most {MAX_BLOCK} bytes");
    ensure!(
        (1..=MAX_SESSIONS).contains(&options.sessions.len()),
        "specify 1 to {MAX_SESSIONS} storage nodes"
    );
    ensure!(compute.buffers() <= 4096, "an accelerator has at most 4096 buffers");
    let started = now();
    let sessions = options
        .sessions
        .iter()
        .map(|request| Session::start(request, compute, started));
    let sessions: Vec<Session> = sessions.collect::<Result<_>>()?;
    let source = Source::new(
        compute,
        SourceOptions {
            first: options.first,
            blocks: options.blocks,
            rate: options.rate,
            verify: options.verify,
        },
    )?;
    let recorder = Recorder {
        source,
        options,
        block_size,
        result: Recorded {
            recordings: sessions.iter().map(|session| session.recording).collect(),
            memory: sessions.iter().map(|session| session.memory.clone()).collect(),
            block_size,
            ..Recorded::default()
        },
        sessions: sessions.into_iter().map(Some).collect(),
        pending: BTreeMap::new(),
        last_progress: Instant::now(),
    };
    recorder.run()
}

impl Recorder<'_> {
    fn run(mut self) -> Result<Recorded> {
        let started = Instant::now();
        self.record()
            .with_context(|| format!("{} blocks are acknowledged; recording failed", self.result.acknowledged))?;
        self.result.verified = self.source.verified();
        self.result.nanoseconds = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        for (number, error) in finish_all(links(&mut self.sessions)) {
            self.session_failed(number, &error)?;
        }
        Ok(self.result)
    }

    /// Records until all blocks are acknowledged.
    fn record(&mut self) -> Result<()> {
        while self.result.acknowledged < self.source.total() {
            let mut progress = self.source.advance()?;
            progress |= self.send()?;
            for number in 0..self.sessions.len() {
                match self.attend(number) {
                    Ok(busy) => progress |= busy,
                    Err(error) => self.session_failed(number, &error)?,
                }
            }
            if progress {
                self.last_progress = Instant::now();
                continue;
            }
            self.wait()?;
        }
        Ok(())
    }

    /// Returns the sessions that get a block, a bit each; `None` if one of them is not ready.
    fn targets(&self, sequence: u64) -> Option<u64> {
        let all = self.sessions.len();
        let turn = ((sequence - self.options.first) % all as u64) as usize;
        let mut targets = 0;
        for (number, session) in self.sessions.iter().enumerate() {
            let Some(session) = session else { continue };
            if self.options.mirror || number == turn {
                if !session.is_ready() {
                    return None;
                }
                targets |= 1 << number;
            }
        }
        Some(targets)
    }

    /// Sends blocks in order. Returns whether there was any.
    fn send(&mut self) -> Result<bool> {
        let mut progress = false;
        while let Some(targets) = self.source.peek().and_then(|sequence| self.targets(sequence)) {
            let Some((buffer, block)) = self.source.take() else {
                break;
            };
            let pending = Pending {
                buffer,
                sending: targets,
                waiting: targets,
            };
            self.pending.insert(block.sequence, pending);
            for number in (0..self.sessions.len()).filter(|number| targets & (1 << number) != 0) {
                let Some(session) = &mut self.sessions[number] else {
                    continue;
                };
                if let Err(error) = session.send(buffer, block, self.block_size) {
                    self.session_failed(number, &error)?;
                }
            }
            progress = true;
        }
        Ok(progress)
    }

    /// Handles completions and messages of a session. Returns whether there was any.
    fn attend(&mut self, number: usize) -> Result<bool> {
        let Some(session) = &mut self.sessions[number] else {
            return Ok(false);
        };
        let mut completions = Vec::new();
        session.link.endpoint.poll(&mut completions)?;
        let (mut sent, mut acknowledged) = (Vec::new(), Vec::new());
        for completion in &completions {
            match kind(completion) {
                (Kind::MessageSent, _) => {}
                (Kind::Payload, buffer_and_place) => {
                    session.places.push(buffer_and_place & 0xffff);
                    sent.push(buffer_and_place >> 16);
                }
                (Kind::MessageReceived, place) => {
                    let message = session.link.endpoint.received(place)?;
                    session.link.endpoint.post_message_receive(place)?;
                    let Message::Acknowledged(sequences) = message else {
                        bail!("the node sent {message:?} instead of an acknowledgement");
                    };
                    let count = sequences.len() as u64;
                    let left = session.unacknowledged.checked_sub(count);
                    session.unacknowledged = left.context("the node acknowledged blocks that were not sent")?;
                    session.credits += count as u32;
                    acknowledged.extend(sequences);
                }
            }
        }
        let control = session.link.connection.try_receive_reply();
        // Acknowledgements that arrived count, also if the session has ended.
        for buffer in sent {
            self.sent(number, self.source.sequence(buffer));
        }
        for sequence in acknowledged {
            self.acknowledged(number, sequence)?;
        }
        if let Some(other) = control? {
            return Err(unexpected(&other).into());
        }
        Ok(!completions.is_empty())
    }

    /// A session does not read the buffer of a block any more.
    fn sent(&mut self, number: usize, sequence: u64) {
        let Some(pending) = self.pending.get_mut(&sequence) else {
            return;
        };
        let before = pending.sending;
        pending.sending &= !(1 << number);
        if before != 0 && pending.sending == 0 {
            self.source.release(pending.buffer);
            self.forget_if_done(sequence);
        }
    }

    /// A session has a block durably.
    fn acknowledged(&mut self, number: usize, sequence: u64) -> Result<()> {
        let pending = self
            .pending
            .get(&sequence)
            .filter(|pending| pending.waiting & (1 << number) != 0);
        ensure!(
            pending.is_some(),
            "the node acknowledged block {sequence}, which it was not sent or acknowledged before"
        );
        self.not_waiting(number, sequence);
        Ok(())
    }

    /// Nobody waits for the acknowledgement of a block by this session any more.
    fn not_waiting(&mut self, number: usize, sequence: u64) {
        let Some(pending) = self.pending.get_mut(&sequence) else {
            return;
        };
        let before = pending.waiting;
        pending.waiting &= !(1 << number);
        if before != 0 && pending.waiting == 0 {
            self.result.acknowledged += 1;
            self.forget_if_done(sequence);
        }
    }

    fn forget_if_done(&mut self, sequence: u64) {
        if self
            .pending
            .get(&sequence)
            .is_some_and(|pending| pending.sending == 0 && pending.waiting == 0)
        {
            self.pending.remove(&sequence);
        }
    }

    /// A session has failed. With a mirror, recording goes on to the other storage nodes, which have or get all blocks.
    fn session_failed(&mut self, number: usize, error: &anyhow::Error) -> Result<()> {
        let Some(mut session) = self.sessions[number].take() else {
            return Ok(());
        };
        let reason = session.link.reason(error);
        // The queue pair ends with the session, so its NIC does not read buffers any more.
        drop(session);
        let sequences: Vec<u64> = self.pending.keys().copied().collect();
        let others = self.sessions.iter().flatten().count();
        if !self.options.mirror || others == 0 {
            bail!("{reason}");
        }
        for sequence in sequences {
            self.sent(number, sequence);
            self.not_waiting(number, sequence);
        }
        self.result.failed.push(reason);
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        let timeout = timeout_of(&self.options.sessions);
        if self.last_progress.elapsed() > timeout + self.source.interval() {
            return self.nothing_happens(timeout);
        }
        let links = links(&mut self.sessions);
        for (number, error) in wait_for(links, self.source.event(), self.source.longest_wait())? {
            self.session_failed(number, &error)?;
        }
        Ok(())
    }

    /// Ends the sessions whose acknowledgements do not come.
    fn nothing_happens(&mut self, timeout: Duration) -> Result<()> {
        let computing = self.source.computing();
        ensure!(
            computing == 0,
            "the accelerator did not complete {computing} blocks within {timeout:?}"
        );
        for number in 0..self.sessions.len() {
            if let Some(session) = self.sessions[number]
                .as_ref()
                .filter(|session| session.unacknowledged > 0)
            {
                let missing = session.unacknowledged;
                let error = anyhow::anyhow!("{missing} blocks were not acknowledged within {timeout:?}");
                self.session_failed(number, &error)?;
            }
        }
        self.last_progress = Instant::now();
        Ok(())
    }
}
