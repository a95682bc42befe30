// SPDX-License-Identifier: MIT OR Apache-2.0

//! Playback: blocks are read from a storage node into the accelerator, and transformed there.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use anyhow::{bail, ensure, Context, Result};
use p2pmem_verbs::{Access, Remote, Request as WorkRequest, Work};

use super::compute::{Compute, Computed, Registered};
use super::{longest_wait, reason_of, SessionRequest, Verification, Verifier};
use crate::control::message::Message;
use crate::control::{unexpected, Connection, Play, Reply, Request, Start, Window};
use crate::pace::Pace;
use crate::rdma::{id, kind, open_nic, wait, Capacity, Endpoint, Kind, MAX_BLOCK};
use crate::store::Block;

/// What is played.
#[derive(Debug, Clone)]
pub struct PlayOptions {
    /// The session.
    pub session: SessionRequest,
    /// The number of the recording; `None` for the latest one.
    pub recording: Option<u64>,
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

/// What was played.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Played {
    /// The number of blocks.
    pub blocks: u64,
    /// The number of the recording.
    pub recording: u64,
    /// The memory that the storage node chose.
    pub memory: String,
    /// Bytes of a block.
    pub block_size: u64,
    /// The sequence number of the first block.
    pub first: Option<u64>,
    /// The sequence number of the last block.
    pub last: Option<u64>,
    /// Sequence numbers between two blocks that followed each other, without a block.
    pub missing: u64,
    /// Nanoseconds from the start to the last block.
    pub nanoseconds: u64,
    /// Blocks whose spectrum was compared with what the processor computes.
    pub verified: u64,
}

/// A block that was announced.
#[derive(Debug, Clone, Copy)]
struct Announced {
    remote: u32,
    block: Block,
}

/// The playback program.
struct Player<'a> {
    // Fields are dropped in this order: no request can access memory whose registration has ended.
    endpoint: Endpoint,
    registered: Registered,
    connection: Connection,
    compute: &'a mut dyn Compute,
    options: &'a PlayOptions,
    block_size: u64,
    window: Window,
    credits: u32,
    free: Vec<u32>,
    /// Blocks that wait for a free buffer.
    announced: VecDeque<Announced>,
    /// What is in each buffer.
    content: Vec<Option<Announced>>,
    reading: u32,
    computing: u32,
    /// The number of announcements, and of blocks that the node says it has announced.
    received: u64,
    end: Option<u64>,
    result: Played,
    verifier: Verifier,
}

/// Plays a recording to its end.
///
/// # Errors
///
/// The storage node cannot be reached, refuses the session, or ends it. The accelerator fails. The checksum of a block, or the
/// spectrum of a verified block, is wrong.
pub fn play(compute: &mut dyn Compute, options: &PlayOptions) -> Result<Played> {
    ensure!(
        !options.repeat || options.blocks.is_some(),
        "playback that repeats needs a number of blocks"
    );
    let block_size = compute.block_size();
    ensure!(block_size <= MAX_BLOCK, "a block has at most {MAX_BLOCK} bytes");
    let mut connection = options.session.remote.connect()?;
    let nic = open_nic(&options.session.nic)?;
    let buffers = compute.buffers();
    let endpoint = Endpoint::new(
        &nic,
        options.session.gid_index,
        Capacity {
            sends: 2 * buffers,
            receives: buffers,
            messages_sent: buffers,
            messages_received: buffers,
        },
    )?;
    let registered = compute.register(endpoint.domain(), Access::LOCAL_WRITE)?;
    connection.send(&Request::Play(Play {
        channel: options.session.channel.clone(),
        port: options.session.port,
        recording: options.recording,
        start: options.start,
        blocks: options.blocks,
        repeat: options.repeat,
        rate: options.rate,
        block_size,
        address: endpoint.address(),
        buffers,
    }))?;
    let (recording, address, window, credits, memory) = match connection.receive_reply()? {
        Reply::PlayReady {
            recording,
            address,
            window,
            credits,
            memory,
            ..
        } => (recording, address, window, credits, memory),
        other => return Err(unexpected(&other).into()),
    };
    ensure!(
        (1..=buffers).contains(&credits),
        "the node announces {credits} blocks at once, for {buffers} buffers"
    );
    endpoint.connect(&address)?;
    // The node announces a buffer again only after its release, so there are never more messages than credits.
    for place in 0..credits {
        endpoint.post_message_receive(place)?;
    }
    connection.send(&Request::Ready)?;
    let mut player = Player {
        endpoint,
        registered,
        connection,
        free: (0..buffers).rev().collect(),
        content: vec![None; buffers as usize],
        compute,
        options,
        block_size,
        window,
        credits,
        announced: VecDeque::new(),
        reading: 0,
        computing: 0,
        received: 0,
        end: None,
        result: Played {
            recording,
            memory,
            block_size,
            ..Played::default()
        },
        verifier: Verifier::new(options.verify, block_size),
    };
    match player.run() {
        Ok(()) => Ok(player.result),
        Err(error) => {
            let reason = reason_of(&mut player.connection, &error);
            bail!("{reason}; {} blocks were played", player.result.blocks)
        }
    }
}

impl Player<'_> {
    fn run(&mut self) -> Result<()> {
        let started = Instant::now();
        let mut last_progress = started;
        let timeout = self.options.session.remote.timeout;
        // A block may have to wait for its turn at the requested rate.
        let timeout = timeout + Pace::new(self.options.rate, self.block_size, started).interval();
        let (mut completions, mut computed) = (Vec::new(), Vec::new());
        while self.end != Some(self.result.blocks) {
            self.endpoint.poll(&mut completions)?;
            let mut progress = !completions.is_empty();
            for completion in &completions {
                match kind(completion) {
                    (Kind::MessageSent, _) => {}
                    (Kind::MessageReceived, place) => self.received(place)?,
                    (Kind::Payload, buffer) => self.read(buffer)?,
                }
            }
            progress |= self.start_reads()?;
            progress |= self.take_work(&mut computed)?;
            if let Some(other) = self.connection.try_receive_reply()? {
                return Err(unexpected(&other).into());
            }
            if progress {
                last_progress = Instant::now();
                continue;
            }
            ensure!(
                last_progress.elapsed() <= timeout,
                "nothing happened for {timeout:?}; {} blocks are read, {} are in computation",
                self.reading,
                self.computing
            );
            self.wait()?;
        }
        self.result.verified = self.verifier.verified;
        self.result.nanoseconds = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.connection.send(&Request::Finish)?;
        match self.connection.receive_reply()? {
            Reply::Finished { .. } => Ok(()),
            other => Err(unexpected(&other).into()),
        }
    }

    /// Handles a message of the node.
    fn received(&mut self, place: u32) -> Result<()> {
        let message = self.endpoint.received(place)?;
        self.endpoint.post_message_receive(place)?;
        match message {
            Message::Announced { buffer, block, bytes } => {
                ensure!(
                    buffer < self.credits && bytes == self.block_size,
                    "the node announced {bytes} bytes in buffer {buffer}"
                );
                self.received += 1;
                self.in_order(&block)?;
                self.announced.push_back(Announced { remote: buffer, block });
                Ok(())
            }
            Message::End { blocks } => {
                ensure!(
                    blocks == self.received,
                    "the node announced {blocks} blocks, and {} announcements arrived",
                    self.received
                );
                self.end = Some(blocks);
                Ok(())
            }
            other => bail!("the node sent {other:?} instead of a block"),
        }
    }

    /// Checks the order of blocks, and counts sequence numbers without a block.
    fn in_order(&mut self, block: &Block) -> Result<()> {
        if let Some(last) = self.result.last {
            if block.sequence <= last {
                let starts_again = self.options.repeat && self.result.first == Some(block.sequence);
                ensure!(starts_again, "block {} follows block {last}", block.sequence);
            } else {
                self.result.missing += block.sequence - last - 1;
            }
        }
        self.result.first.get_or_insert(block.sequence);
        self.result.last = Some(block.sequence);
        Ok(())
    }

    /// Starts to read blocks to free buffers. Returns whether there was any.
    fn start_reads(&mut self) -> Result<bool> {
        let mut progress = false;
        while !self.announced.is_empty() {
            let Some(buffer) = self.free.pop() else { break };
            let Some(announced) = self.announced.pop_front() else {
                break;
            };
            self.content[buffer as usize] = Some(announced);
            self.endpoint.post(&[WorkRequest {
                id: id(Kind::Payload, buffer),
                local: self.registered.segment(buffer, self.block_size),
                work: Work::Read(Remote {
                    address: self.window.address + u64::from(announced.remote) * self.block_size,
                    rkey: self.window.rkey,
                }),
                signaled: true,
            }])?;
            self.reading += 1;
            progress = true;
        }
        Ok(progress)
    }

    /// A block has arrived in a buffer: releases it at the node, and starts the work on it.
    fn read(&mut self, buffer: u32) -> Result<()> {
        let announced = self.content[buffer as usize].context("a buffer without a block was read")?;
        self.reading -= 1;
        let released = Message::Released {
            buffer: announced.remote,
        };
        // The place of the message has the number of the node's buffer, which is not announced again before the release.
        self.endpoint
            .post(&[self.endpoint.message(announced.remote, &released, true)])?;
        self.compute
            .start(buffer, announced.block.sequence)
            .context("starting work of the accelerator")?;
        self.computing += 1;
        Ok(())
    }

    /// Checks blocks on which the work has ended. Returns whether there was any.
    fn take_work(&mut self, computed: &mut Vec<Computed>) -> Result<bool> {
        computed.clear();
        self.compute.poll(computed).context("the accelerator failed")?;
        for done in computed.iter() {
            let announced = self.content[done.buffer as usize]
                .take()
                .context("work on a buffer without a block")?;
            let Block { sequence, checksum, .. } = announced.block;
            ensure!(
                done.checksum == checksum,
                "block {sequence} has the checksum {:#010x}, and {checksum:#010x} was recorded",
                done.checksum
            );
            self.verifier
                .verify(self.compute, done.buffer, self.result.blocks, sequence)?;
            self.computing -= 1;
            self.result.blocks += 1;
            self.free.push(done.buffer);
        }
        Ok(!computed.is_empty())
    }

    fn wait(&mut self) -> Result<()> {
        if self.endpoint.arm()? {
            return Ok(());
        }
        let event = self.compute.event();
        let limit = longest_wait(self.compute, self.computing);
        let mut fds: Vec<BorrowedFd<'_>> = vec![self.endpoint.as_fd(), self.connection.as_fd()];
        fds.extend(event);
        wait(&fds, limit)?;
        self.endpoint.clear_event()
    }
}
