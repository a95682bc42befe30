// SPDX-License-Identifier: MIT OR Apache-2.0

//! Playback: blocks are read from one or more storage nodes into the accelerator, and transformed there.

mod order;
mod session;

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};

use super::compute::Compute;
use super::target::Target;
use super::{reason_of, SessionRequest, Verification, MAX_SESSIONS};
use crate::control::message::Message;
use crate::control::{unexpected, Start};
use crate::pace::Pace;
use crate::rdma::{kind, Kind, MAX_BLOCK};
use crate::store::Block;
use crate::wait::wait;
use order::{Copy, Order};
use session::{Selection, Session};

pub use super::target::Played;

/// What is played.
#[derive(Debug, Clone)]
pub struct PlayOptions {
    /// The sessions: one for each storage node that has blocks of the recording.
    pub sessions: Vec<SessionRequest>,
    /// Whether each storage node has all blocks, so that playback continues when one fails.
    pub mirror: bool,
    /// The number of the recording on each storage node. Nodes for which there is none play the latest one.
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
    /// The number of blocks whose reading began.
    taken: u64,
    last_progress: Instant,
}

/// Plays a recording to its end.
///
/// # Errors
///
/// A storage node cannot be reached, or refuses the session. It ends the session, or does nothing within its timeout, and there is
/// no mirror. The accelerator fails. The checksum of a block, or the spectrum of a verified block, is wrong.
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
        target: Target::new(compute, options.repeat, options.verify, recordings, memory.join("; ")),
        order: Order::new(nodes, options.repeat),
        pace: Pace::new(own_rate, block_size, Instant::now()),
        sessions: sessions.into_iter().map(Some).collect(),
        options,
        reading: (0..buffers).map(|_| None).collect(),
        taken: 0,
        last_progress: Instant::now(),
    };
    match player.run() {
        Ok(()) => Ok(player.target.result),
        Err(error) => bail!("{error:#}; {} blocks were played", player.target.result.blocks),
    }
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
                    Err(error) => self.session_failed(node, &error)?,
                }
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
        for node in 0..self.sessions.len() {
            if let Some(Err(error)) = self.sessions[node].as_mut().map(Session::finish) {
                self.session_failed(node, &error)?;
            }
        }
        Ok(())
    }

    /// Whether the requested number of blocks is read.
    fn has_enough(&self) -> bool {
        Some(self.taken) == self.options.blocks
    }

    /// Whether everything is played.
    fn is_finished(&self) -> bool {
        let idle = self.target.computing() == 0 && self.reading.iter().all(Option::is_none);
        // A single node counts the blocks itself. Of several nodes, each has announced as many as it may.
        let enough = self.sessions.len() > 1 && self.has_enough();
        idle && (enough || self.order.is_finished())
    }

    /// Handles completions and messages of a session. Returns whether there was any.
    fn attend(&mut self, node: usize) -> Result<bool> {
        let Some(session) = &mut self.sessions[node] else {
            return Ok(false);
        };
        let mut completions = Vec::new();
        session.endpoint.poll(&mut completions)?;
        for completion in &completions {
            match kind(completion) {
                (Kind::MessageSent, _) => {}
                (Kind::MessageReceived, place) => self.received(node, place)?,
                (Kind::Payload, buffer) => self.arrived(node, buffer)?,
            }
        }
        if let Some(session) = &mut self.sessions[node] {
            if let Some(other) = session.connection.try_receive_reply()? {
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
        let message = session.endpoint.received(place)?;
        session.endpoint.post_message_receive(place)?;
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

    /// Starts to read blocks to free buffers, in their order. Returns whether there was any.
    fn start_reads(&mut self) -> Result<bool> {
        let mut progress = false;
        while !self.has_enough() && self.target.has_buffer() && self.pace.delay(Instant::now()).is_zero() {
            let Some((block, copies)) = self.order.take()? else {
                break;
            };
            self.target.in_order(&block)?;
            let buffer = self.target.take_buffer().context("no buffer is free")?;
            self.taken += 1;
            self.pace.advance(Instant::now());
            self.read_one_of(block, copies, buffer)?;
            progress = true;
        }
        Ok(progress)
    }

    /// Starts to read one of the copies of a block: that of the node with the fewest reads.
    fn read_one_of(&mut self, block: Block, mut copies: Vec<Copy>, buffer: u32) -> Result<()> {
        let load = |copy: &Copy| self.sessions[copy.node].as_ref().map(|session| session.reading);
        // Copies of a session that failed are gone.
        copies.retain(|copy| load(copy).is_some());
        let best = (0..copies.len()).min_by_key(|place| load(&copies[*place]));
        let best = best.with_context(|| format!("no storage node has block {} any more", block.sequence))?;
        let from = copies.swap_remove(best);
        self.reading[buffer as usize] = Some(Reading {
            block,
            from,
            others: copies,
        });
        let read = self.sessions[from.node]
            .as_mut()
            .map(|session| session.read(from.buffer, buffer));
        match read {
            Some(Err(error)) => self.session_failed(from.node, &error),
            _ => Ok(()),
        }
    }

    /// A block has arrived in a buffer: gives its copies back to the nodes, and starts the work on it.
    fn arrived(&mut self, node: usize, buffer: u32) -> Result<()> {
        let reading = self.reading[buffer as usize].take();
        let Reading { block, from, others } = reading.context("a buffer without a block was read")?;
        ensure!(from.node == node, "a block of another node was read");
        self.target.start(buffer, block)?;
        let mut failed = Vec::new();
        for copy in others.into_iter().chain([from]) {
            let Some(session) = &mut self.sessions[copy.node] else {
                continue;
            };
            if copy == from {
                session.reading -= 1;
            }
            if let Err(error) = session.release(copy.buffer) {
                failed.push((copy.node, error));
            }
        }
        for (node, error) in failed {
            self.session_failed(node, &error)?;
        }
        Ok(())
    }

    /// A session has failed. With a mirror, playback continues with the other storage nodes, which have all blocks.
    fn session_failed(&mut self, node: usize, error: &anyhow::Error) -> Result<()> {
        let Some(mut session) = self.sessions[node].take() else {
            return Ok(());
        };
        let reason = format!(
            "storage node {}: {}",
            session.name,
            reason_of(&mut session.connection, error)
        );
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
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        let timeout = self.options.sessions.iter().map(|session| session.remote.timeout).max();
        let timeout = timeout.unwrap_or(Duration::from_secs(30));
        // A block may have to wait for its turn at the requested rate.
        let interval = Pace::new(self.options.rate, self.target.result.block_size, Instant::now()).interval();
        if self.last_progress.elapsed() > timeout + interval {
            return self.nothing_happens(timeout);
        }
        let mut again = false;
        for node in 0..self.sessions.len() {
            match self.sessions[node].as_mut().map(|session| session.endpoint.arm()) {
                Some(Ok(missed)) => again |= missed,
                Some(Err(error)) => {
                    self.session_failed(node, &error)?;
                    again = true;
                }
                None => {}
            }
        }
        if again {
            return Ok(());
        }
        let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
        for session in self.sessions.iter().flatten() {
            fds.extend([session.endpoint.as_fd(), session.connection.as_fd()]);
        }
        fds.extend(self.target.event());
        let mut limit = self.target.longest_wait();
        let delay = self.pace.delay(Instant::now());
        if !delay.is_zero() && self.target.has_buffer() {
            limit = limit.min(delay);
        }
        wait(&fds, limit)?;
        for node in 0..self.sessions.len() {
            let cleared = self.sessions[node]
                .as_mut()
                .map(|session| session.endpoint.clear_event());
            if let Some(Err(error)) = cleared {
                self.session_failed(node, &error)?;
            }
        }
        Ok(())
    }

    /// Ends the sessions for which everything waits.
    fn nothing_happens(&mut self, timeout: Duration) -> Result<()> {
        ensure!(
            self.target.computing() == 0,
            "the accelerator did not complete {} blocks within {timeout:?}",
            self.target.computing()
        );
        for node in 0..self.sessions.len() {
            let reading = self.sessions[node].as_ref().map_or(0, |session| session.reading);
            if reading > 0 || self.order.waits_for(node) {
                let error = anyhow::anyhow!("nothing happened for {timeout:?}; {reading} blocks are read");
                self.session_failed(node, &error)?;
            }
        }
        self.last_progress = Instant::now();
        Ok(())
    }
}
