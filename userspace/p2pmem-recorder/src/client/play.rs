// SPDX-License-Identifier: MIT OR Apache-2.0

//! Playback: blocks are read from one or more storage nodes into the accelerator, and transformed there.

mod order;
mod session;

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};

use super::compute::Compute;
use super::link::{finish_all, timeout_of, wait_for, Link};
use super::target::Target;
use super::{SessionRequest, Verification, MAX_SESSIONS};
use crate::control::message::Message;
use crate::control::{unexpected, Start};
use crate::pace::Pace;
use crate::rdma::{kind, Kind, MAX_BLOCK};
use crate::store::Block;
use order::{Copy, Order, Taken};
use session::{Selection, Session};

pub use super::target::Played;

/// What is played.
#[derive(Debug, Clone)]
pub struct PlayOptions {
    /// The sessions: one for each storage node that has blocks of the recording.
    pub sessions: Vec<SessionRequest>,
    /// Whether each storage node has all blocks, so that playback continues when one fails.
    pub mirror: bool,
    /// The number of the recording on each storage node. None for the latest ones.
    pub recordings: Vec<u64>,
    /// Where playback starts.
    pub start: Start,
    /// The most blocks to play; `None` for all.
    pub blocks: Option<u64>,
    /// Whether playback starts again after the last block. Needs `blocks`.
    pub repeat: bool,
    /// The most bytes in a second.
    pub rate: Option<u64>,
    /// Which blocks are verified by the processor. The checksum of each block is compared with the recorded one.
    pub verify: Verification,
}

/// A block that is being read to a buffer.
#[derive(Debug)]
struct Reading {
    block: Block,
    /// The copy that is read.
    from: Copy,
    /// The copies of other nodes. They are given back when the block has arrived.
    others: Vec<Copy>,
}

/// The playback program.
struct Player<'a> {
    /// `None` for a session that failed. Before the target: no NIC accesses a buffer after the end of its session.
    sessions: Vec<Option<Session>>,
    target: Target<'a>,
    options: &'a PlayOptions,
    order: Order,
    /// Limits the rate of several nodes. A single node does this itself.
    pace: Pace,
    /// What is read to each buffer.
    reading: Vec<Option<Reading>>,
    /// Blocks that have arrived, and their buffers.
    arrived: Vec<(u32, Block)>,
    /// Sessions that failed, and are not ended yet.
    failing: Vec<(usize, anyhow::Error)>,
    /// The number of blocks whose reading began.
    taken: u64,
    last_progress: Instant,
}

/// Plays a recording to its end.
///
/// # Errors
///
/// A storage node cannot be reached, or refuses the session. It ends the session, or does nothing within its timeout, and there is
/// no mirror that has all blocks. The accelerator fails. The checksum of a block, or the spectrum of a verified block, is wrong.
pub fn play(compute: &mut dyn Compute, options: &PlayOptions) -> Result<Played> {
    ensure!(
        !options.repeat || options.blocks.is_some(),
        "playback that repeats needs a number of blocks"
    );
    let (buffers, block_size) = (compute.buffers(), compute.block_size());
    ensure!(block_size <= MAX_BLOCK, "a block has at most {MAX_BLOCK} bytes");
    let nodes = options.sessions.len();
    ensure!(
        (1..=MAX_SESSIONS).contains(&nodes),
        "specify 1 to {MAX_SESSIONS} storage nodes"
    );
    ensure!(
        options.recordings.is_empty() || options.recordings.len() == nodes,
        "specify the number of a recording for each of the {nodes} storage nodes, or none"
    );
    // A rate of 0 is refused by the node.
    let (node_rate, own_rate) = match options.rate {
        Some(rate) if nodes > 1 && rate > 0 => (None, Some(rate)),
        rate => (rate, None),
    };
    let sessions = options.sessions.iter().enumerate().map(|(number, request)| {
        let selection = Selection {
            recording: options.recordings.get(number).copied(),
            start: options.start,
            blocks: options.blocks,
            repeat: options.repeat,
            rate: node_rate,
        };
        Session::start(request, selection, compute)
    });
    let sessions: Vec<Session> = sessions.collect::<Result<_>>()?;
    let memory: Vec<&str> = sessions.iter().map(|session| session.memory.as_str()).collect();
    let recordings = sessions.iter().map(|session| session.recording).collect();
    let mut player = Player {
        target: Target::new(compute, options.verify, recordings, memory.join("; ")),
        order: Order::new(nodes, options.repeat),
        pace: Pace::new(own_rate, block_size, Instant::now()),
        sessions: sessions.into_iter().map(Some).collect(),
        options,
        reading: (0..buffers).map(|_| None).collect(),
        arrived: Vec::new(),
        failing: Vec::new(),
        taken: 0,
        last_progress: Instant::now(),
    };
    match player.run() {
        Ok(()) => Ok(player.target.result),
        Err(error) => bail!("{error:#}; {} blocks were played", player.target.result.blocks),
    }
}

/// Returns the links of the sessions that have not failed, with their numbers.
fn links(sessions: &mut [Option<Session>]) -> impl Iterator<Item = (usize, &mut Link)> {
    let sessions = sessions.iter_mut().enumerate();
    sessions.filter_map(|(node, session)| Some((node, &mut session.as_mut()?.link)))
}

impl Player<'_> {
    fn run(&mut self) -> Result<()> {
        let started = Instant::now();
        self.last_progress = started;
        while !self.is_finished() {
            let mut progress = false;
            for node in 0..self.sessions.len() {
                match self.attend(node) {
                    Ok(busy) => progress |= busy,
                    Err(error) => self.failing.push((node, error)),
                }
            }
            progress |= self.end_failing()?;
            for (buffer, block) in std::mem::take(&mut self.arrived) {
                self.target.start(buffer, block)?;
            }
            progress |= self.start_reads()?;
            progress |= self.target.take_work()?;
            if progress {
                self.last_progress = Instant::now();
                continue;
            }
            self.wait()?;
        }
        self.target.result.nanoseconds = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        if let Some(last) = self.order.missing_end().filter(|_| !self.has_enough()) {
            bail!(
                "{}; it had blocks up to {last}, which the others do not have",
                self.target.result.failed.join("; ")
            );
        }
        self.failing = finish_all(links(&mut self.sessions));
        self.end_failing()?;
        Ok(())
    }

    /// Whether the requested number of blocks is read.
    fn has_enough(&self) -> bool {
        Some(self.taken) == self.options.blocks
    }

    /// Whether everything is played.
    fn is_finished(&self) -> bool {
        let idle = self.failing.is_empty() && self.target.computing() == 0 && self.reading.iter().all(Option::is_none);
        // A single node counts the blocks itself. Of several nodes, each has announced as many as it may.
        let enough = self.sessions.len() > 1 && self.has_enough();
        idle && (enough || self.order.is_finished())
    }

    /// Handles completions and messages of a session. Returns whether there was any. An error is that of the session.
    fn attend(&mut self, node: usize) -> Result<bool> {
        let Some(session) = &mut self.sessions[node] else {
            return Ok(false);
        };
        let mut completions = Vec::new();
        session.link.endpoint.poll(&mut completions)?;
        for completion in &completions {
            match kind(completion) {
                (Kind::MessageSent, _) => {}
                (Kind::MessageReceived, place) => self.received(node, place)?,
                (Kind::Payload, buffer) => self.arrived(node, buffer)?,
            }
        }
        if let Some(session) = &mut self.sessions[node] {
            if let Some(other) = session.link.connection.try_receive_reply()? {
                return Err(unexpected(&other).into());
            }
        }
        Ok(!completions.is_empty())
    }

    /// Handles a message of a node.
    fn received(&mut self, node: usize, place: u32) -> Result<()> {
        let Some(session) = &self.sessions[node] else {
            return Ok(());
        };
        let message = session.link.endpoint.received(place)?;
        session.link.endpoint.post_message_receive(place)?;
        match message {
            Message::Announced { buffer, block, bytes } => {
                ensure!(
                    buffer < session.credits && bytes == self.target.result.block_size,
                    "the node announced {bytes} bytes in buffer {buffer}"
                );
                self.order.announced(node, block, buffer)
            }
            Message::End { blocks } => self.order.ended(node, blocks),
            other => bail!("the node sent {other:?} instead of a block"),
        }
    }

    /// A block has arrived in a buffer: gives its copies back to the nodes.
    fn arrived(&mut self, node: usize, buffer: u32) -> Result<()> {
        let reading = self.reading[buffer as usize].take_if(|reading| reading.from.node == node);
        let Reading { block, from, others } = reading.context("a buffer without a block was read")?;
        self.arrived.push((buffer, block));
        for copy in others.into_iter().chain([from]) {
            let Some(session) = &mut self.sessions[copy.node] else {
                continue;
            };
            if copy == from {
                session.reading -= 1;
            }
            if let Err(error) = session.release(copy.buffer) {
                self.failing.push((copy.node, error));
            }
        }
        Ok(())
    }

    /// Starts to read blocks to free buffers, in their order. Returns whether there was any.
    fn start_reads(&mut self) -> Result<bool> {
        let mut progress = false;
        while !self.has_enough() && self.target.has_buffer() && self.pace.delay(Instant::now()).is_zero() {
            let Some(taken) = self.order.take()? else {
                break;
            };
            let Taken {
                block,
                starts_again,
                copies,
            } = taken;
            self.target.in_order(&block, starts_again)?;
            let buffer = self.target.take_buffer().context("no buffer is free")?;
            self.taken += 1;
            self.pace.advance(Instant::now());
            self.read_one_of(block, copies, buffer)?;
            progress = true;
        }
        Ok(progress)
    }

    /// Starts to read one of the copies of a block: that of the node with the fewest reads.
    ///
    /// # Errors
    ///
    /// No storage node has the block any more.
    fn read_one_of(&mut self, block: Block, mut copies: Vec<Copy>, buffer: u32) -> Result<()> {
        let load = |copy: &Copy| self.sessions[copy.node].as_ref().map(|session| session.reading);
        // Copies of a session that failed are gone.
        copies.retain(|copy| load(copy).is_some());
        let best = (0..copies.len()).min_by_key(|place| load(&copies[*place]));
        let best = best.with_context(|| {
            let reasons = self.target.result.failed.join("; ");
            format!("no storage node has block {} any more: {reasons}", block.sequence)
        })?;
        let from = copies.swap_remove(best);
        self.reading[buffer as usize] = Some(Reading {
            block,
            from,
            others: copies,
        });
        if let Some(session) = &mut self.sessions[from.node] {
            if let Err(error) = session.read(from.buffer, buffer) {
                // The block is read again, from another node, when this one is ended.
                self.failing.push((from.node, error));
            }
        }
        Ok(())
    }

    /// Ends the sessions that failed. With a mirror, playback continues with the other storage nodes, which read again what was
    /// being read. Returns whether there was any.
    ///
    /// # Errors
    ///
    /// No other storage node has the blocks.
    fn end_failing(&mut self) -> Result<bool> {
        let mut any = false;
        while let Some((node, error)) = self.failing.pop() {
            let Some(mut session) = self.sessions[node].take() else {
                continue;
            };
            any = true;
            let reason = session.link.reason(&error);
            // The queue pair ends with the session, so its NIC does not write to buffers any more.
            drop(session);
            if !self.options.mirror || self.sessions.iter().all(Option::is_none) {
                bail!("{reason}");
            }
            self.order.lost(node);
            self.target.result.failed.push(reason);
            for buffer in 0..self.reading.len() {
                let interrupted = self.reading[buffer].take_if(|reading| reading.from.node == node);
                if let Some(Reading { block, others, .. }) = interrupted {
                    self.read_one_of(block, others, buffer as u32)?;
                }
            }
        }
        Ok(any)
    }

    fn wait(&mut self) -> Result<()> {
        let timeout = timeout_of(&self.options.sessions);
        // A block may have to wait for its turn at the requested rate.
        let interval = Pace::new(self.options.rate, self.target.result.block_size, Instant::now()).interval();
        if self.last_progress.elapsed() > timeout + interval {
            return self.nothing_happens(timeout);
        }
        let mut limit = self.target.longest_wait();
        let delay = self.pace.delay(Instant::now());
        if !delay.is_zero() && self.target.has_buffer() {
            limit = limit.min(delay);
        }
        let failed = wait_for(links(&mut self.sessions), self.target.event(), limit)?;
        self.failing.extend(failed);
        Ok(())
    }

    /// Fails the sessions for which everything waits.
    fn nothing_happens(&mut self, timeout: Duration) -> Result<()> {
        ensure!(
            self.target.computing() == 0,
            "the accelerator did not complete {} blocks within {timeout:?}",
            self.target.computing()
        );
        for (node, session) in self.sessions.iter().enumerate() {
            let Some(session) = session else { continue };
            let reading = session.reading;
            // A node that keeps copies of what others are read from may have no buffer for its next block.
            let keeps = |reading: &Reading| reading.others.iter().any(|copy| copy.node == node);
            let is_waited_for = self.order.waits_for(node) && !self.reading.iter().flatten().any(keeps);
            if reading > 0 || is_waited_for {
                let error = anyhow::anyhow!("nothing happened for {timeout:?}; {reading} blocks are read");
                self.failing.push((node, error));
            }
        }
        ensure!(!self.failing.is_empty(), "nothing happened for {timeout:?}");
        Ok(())
    }
}
