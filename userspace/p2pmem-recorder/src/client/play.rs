// SPDX-License-Identifier: MIT OR Apache-2.0

//! Playback: blocks are read from a storage node into the accelerator, and transformed there.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use anyhow::{bail, ensure, Context, Result};
use p2pmem_verbs::{Access, Remote, Request as WorkRequest, Work};

use super::compute::{Compute, Registered};
use super::target::Target;
use super::{reason_of, SessionRequest, Verification};
use crate::control::message::Message;
use crate::control::{unexpected, Connection, Play, Reply, Request, Start, Window};
use crate::pace::Pace;
use crate::rdma::{id, kind, open_nic, Capacity, Endpoint, Kind, MAX_BLOCK};
use crate::store::Block;
use crate::wait::wait;

pub use super::target::Played;

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
    target: Target<'a>,
    options: &'a PlayOptions,
    block_size: u64,
    window: Window,
    credits: u32,
    /// Blocks that wait for a free buffer.
    announced: VecDeque<Announced>,
    /// What is read to each buffer.
    content: Vec<Option<Announced>>,
    reading: u32,
    /// The number of announcements, and of blocks that the node says it has announced.
    received: u64,
    end: Option<u64>,
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
        target: Target::new(compute, options.repeat, options.verify, recording, memory),
        content: vec![None; buffers as usize],
        options,
        block_size,
        window,
        credits,
        announced: VecDeque::new(),
        reading: 0,
        received: 0,
        end: None,
    };
    match player.run() {
        Ok(()) => Ok(player.target.result),
        Err(error) => {
            let reason = reason_of(&mut player.connection, &error);
            bail!("{reason}; {} blocks were played", player.target.result.blocks)
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
        let mut completions = Vec::new();
        while self.end != Some(self.target.result.blocks) {
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
            progress |= self.target.take_work()?;
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
                self.target.computing()
            );
            self.wait()?;
        }
        self.target.result.nanoseconds = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
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
                self.target.in_order(&block)?;
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

    /// Starts to read blocks to free buffers. Returns whether there was any.
    fn start_reads(&mut self) -> Result<bool> {
        let mut progress = false;
        while !self.announced.is_empty() {
            let Some(buffer) = self.target.take_buffer() else { break };
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
        let announced = self.content[buffer as usize]
            .take()
            .context("a buffer without a block was read")?;
        self.reading -= 1;
        let released = Message::Released {
            buffer: announced.remote,
        };
        // The place of the message has the number of the node's buffer, which is not announced again before the release.
        self.endpoint
            .post(&[self.endpoint.message(announced.remote, &released, true)])?;
        self.target.start(buffer, announced.block)
    }

    fn wait(&mut self) -> Result<()> {
        if self.endpoint.arm()? {
            return Ok(());
        }
        let mut fds: Vec<BorrowedFd<'_>> = vec![self.endpoint.as_fd(), self.connection.as_fd()];
        fds.extend(self.target.event());
        wait(&fds, self.target.longest_wait())?;
        self.endpoint.clear_event()
    }
}
