// SPDX-License-Identifier: MIT OR Apache-2.0

//! A playback session of the node: blocks are read from the drives, announced, and read by the other side by RDMA.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use p2pmem_verbs::Access;

use super::setup::{Ended, Port, CHECK_INTERVAL};
use crate::control::message::Message;
use crate::control::{unexpected, Connection, Error as ControlError, Play, Reply, Request, Start, Window};
use crate::engine::PlayEngine;
use crate::memory::BlockMemory;
use crate::node::{Node, SessionHandle, SessionOptions};
use crate::rdma::{kind, wait, Capacity, Endpoint, Kind, RegisteredBlocks};
use crate::status::{Direction, Limit};
use crate::store::{Block, ChannelName, Files, Reader};

/// Which blocks follow.
struct Cursor {
    first: Option<Block>,
    next: Option<Block>,
    repeat: bool,
    left: u64,
}

impl Cursor {
    fn new(reader: &Reader<Files>, request: &Play) -> Self {
        let first = match request.start {
            Start::First => reader.next(..),
            Start::Block(sequence) => reader.next(sequence..),
            Start::Time(time) => reader.at_time(time..),
        };
        Self {
            first,
            next: first,
            repeat: request.repeat,
            left: request.blocks.unwrap_or(u64::MAX),
        }
    }

    /// Returns the next block, if any follows.
    fn peek(&self) -> Option<Block> {
        self.next.filter(|_| self.left > 0)
    }

    /// Goes on behind the block that [`Cursor::peek`] returned.
    fn advance(&mut self, reader: &Reader<Files>) {
        let Some(block) = self.next else { return };
        self.left -= 1;
        self.next = block.sequence.checked_add(1).and_then(|next| reader.next(next..));
        if self.next.is_none() && self.repeat {
            self.next = self.first;
        }
    }
}

/// Limits the bytes in a second.
struct Pace {
    started: Instant,
    rate: Option<u64>,
    bytes: u64,
}

impl Pace {
    /// Returns how long the next block has to wait.
    fn delay(&self) -> Duration {
        let Some(rate) = self.rate else {
            return Duration::ZERO;
        };
        let due = Duration::from_secs_f64(self.bytes as f64 / rate as f64);
        due.saturating_sub(self.started.elapsed())
    }
}

/// A playback session. Message *n* and buffer *n* belong to one block at a time.
struct Playback<'a> {
    node: &'a Node,
    connection: &'a mut Connection,
    handle: SessionHandle,
    // Fields are dropped in this order: no request can access memory whose registration has ended.
    endpoint: Endpoint,
    _registered: RegisteredBlocks,
    engine: PlayEngine<Files>,
    blocks: Arc<BlockMemory>,
    reader: Reader<Files>,
    cursor: Cursor,
    pace: Pace,
    free: Vec<u32>,
    /// Buffers that wait for the drives, in the order in which they are announced.
    order: VecDeque<u32>,
    /// Blocks that the drives have read, by buffer.
    read: BTreeMap<u32, Block>,
    /// Buffers that the other side has not released.
    announced: BTreeMap<u32, Block>,
    played: u64,
    /// Whether the other side has posted receives for announcements.
    is_ready: bool,
    end_sent: bool,
    finishing: bool,
}

/// Serves a playback to its end.
pub(super) fn play(
    node: &Arc<Node>,
    connection: &mut Connection,
    peer: &str,
    port: &Port,
    request: &Play,
) -> Result<Ended> {
    let name = ChannelName::new(&request.channel.lun, &request.channel.stream, request.channel.channel);
    let block_size = node.check_block_size(&name, request.block_size)?;
    ensure!(request.rate != Some(0), "a rate of 0 bytes in a second plays nothing");
    let number = match request.recording {
        Some(number) => number,
        None => {
            let latest = node.store().recordings(&name)?.last().map(|recording| recording.number);
            latest.with_context(|| format!("channel {name} has no recording"))?
        }
    };
    let reader = node.store().reader(&name, number)?;
    let cursor = Cursor::new(&reader, request);
    ensure!(
        cursor.first.is_some(),
        "recording {name}/{number} has no block at or after the requested start"
    );
    let buffers = node.options().buffers.min(request.buffers.max(1));
    let blocks = Arc::new(node.memory_for(&name, port, block_size, buffers)?);
    let endpoint = Endpoint::new(
        &port.nic,
        port.gid_index,
        Capacity {
            sends: buffers + 1,
            receives: buffers,
            messages_sent: buffers + 1,
            messages_received: buffers,
        },
    )?;
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let registered = RegisteredBlocks::new(endpoint.domain(), &blocks, access)?;
    let (address, rkey) = registered.window();
    let memory = node.describe_memory(&blocks);
    let handle = node.begin_session(SessionOptions {
        direction: Direction::Play,
        channel: name.clone(),
        recording: number,
        peer: peer.to_owned(),
        nic: port.nic.name().to_owned(),
        memory: memory.clone(),
        block_size,
        buffers,
    });
    endpoint.connect(&request.address)?;
    let engine_reader = node.store().reader(&name, number)?;
    let engine = PlayEngine::new(engine_reader, Arc::clone(&blocks)).context("starting io_uring")?;
    let session = Playback {
        node,
        connection,
        handle,
        endpoint,
        _registered: registered,
        engine,
        blocks,
        reader,
        cursor,
        pace: Pace {
            started: Instant::now(),
            rate: request.rate,
            bytes: 0,
        },
        free: (0..buffers).rev().collect(),
        order: VecDeque::new(),
        read: BTreeMap::new(),
        announced: BTreeMap::new(),
        played: 0,
        is_ready: false,
        end_sent: false,
        finishing: false,
    };
    for place in 0..buffers {
        session.endpoint.post_message_receive(place)?;
    }
    session.connection.send(&Reply::PlayReady {
        session: session.handle.id(),
        recording: number,
        address: session.endpoint.address(),
        window: Window { address, rkey },
        credits: buffers,
        memory,
    })?;
    session.run()
}

impl Playback<'_> {
    fn run(mut self) -> Result<Ended> {
        let result = self.serve();
        if let Err(error) = &result {
            self.handle.failed(format!("{error:#}"));
        }
        result?;
        Ok(Ended { blocks: self.played })
    }

    fn serve(&mut self) -> Result<()> {
        let mut completions = Vec::new();
        let mut waiting_since = Instant::now();
        loop {
            if self.handle.is_stopped() {
                bail!("the administrator stopped the session");
            }
            let mut progress = self.fetch()?;
            progress |= self.collect()?;
            progress |= self.announce()?;
            self.endpoint.poll(&mut completions)?;
            progress |= !completions.is_empty();
            for completion in &completions {
                match kind(completion) {
                    (Kind::MessageSent, _) => {}
                    (Kind::MessageReceived, place) => self.released(place)?,
                    (Kind::Payload, _) => bail!("a completion for a request that was not posted"),
                }
            }
            progress |= self.send_end()?;
            progress |= self.listen()?;
            if self.finishing {
                return Ok(());
            }
            let delay = self.pace.delay();
            let limit = if self.order.len() * 2 > self.blocks.count() {
                Limit::Drive
            } else if !self.free.is_empty() && !delay.is_zero() {
                Limit::Rate
            } else {
                Limit::Peer
            };
            self.handle.progress(self.order.len(), limit);
            if progress {
                waiting_since = Instant::now();
                continue;
            }
            if waiting_since.elapsed() > self.node.options().timeout && limit != Limit::Rate {
                bail!(
                    "neither the drives nor the other side did anything for {:?}",
                    self.node.options().timeout
                );
            }
            if self.endpoint.arm()? {
                continue;
            }
            let fds = [self.endpoint.as_fd(), self.engine.as_fd(), self.connection.as_fd()];
            let longest = if self.free.is_empty() || delay.is_zero() {
                CHECK_INTERVAL
            } else {
                delay.min(CHECK_INTERVAL)
            };
            wait(&fds, longest)?;
            self.endpoint.clear_event()?;
        }
    }

    /// Starts to read blocks to the free buffers. Returns whether there was any.
    fn fetch(&mut self) -> Result<bool> {
        let mut progress = false;
        while !self.free.is_empty() && self.pace.delay().is_zero() {
            let Some(block) = self.cursor.peek() else { break };
            let Some(buffer) = self.free.pop() else { break };
            self.engine.fetch(buffer as usize, block.sequence)?;
            self.cursor.advance(&self.reader);
            self.pace.bytes += self.blocks.block_size() as u64;
            self.order.push_back(buffer);
            progress = true;
        }
        Ok(progress)
    }

    /// Handles what the drives have read. Returns whether there was anything.
    fn collect(&mut self) -> Result<bool> {
        let done = self.engine.progress();
        let progress = !done.is_empty();
        for fetched in done {
            let block = fetched.block;
            fetched
                .result
                .with_context(|| format!("reading block {} from its drive", block.sequence))?;
            self.read.insert(fetched.buffer as u32, block);
        }
        Ok(progress)
    }

    /// Announces blocks in their order. Returns whether there was any.
    fn announce(&mut self) -> Result<bool> {
        let mut progress = false;
        if !self.is_ready {
            return Ok(false);
        }
        while let Some((buffer, block)) = self.order.front().and_then(|buffer| self.read.remove_entry(buffer)) {
            self.order.pop_front();
            let message = Message::Announced {
                buffer,
                block,
                bytes: self.blocks.block_size() as u64,
            };
            self.endpoint.post(&[self.endpoint.message(buffer, &message, true)])?;
            self.announced.insert(buffer, block);
            progress = true;
        }
        Ok(progress)
    }

    /// Handles a message of the other side.
    fn released(&mut self, place: u32) -> Result<()> {
        let message = self.endpoint.received(place)?;
        self.endpoint.post_message_receive(place)?;
        let Message::Released { buffer } = message else {
            bail!("the other side sent {message:?} instead of the release of a buffer");
        };
        ensure!(
            self.announced.remove(&buffer).is_some(),
            "the other side released buffer {buffer}, which was not announced"
        );
        self.free.push(buffer);
        self.played += 1;
        self.handle.arrived();
        self.handle.acknowledged(1);
        Ok(())
    }

    /// Sends the end after the last block. Returns whether it was sent.
    fn send_end(&mut self) -> Result<bool> {
        let idle = self.order.is_empty() && self.announced.is_empty();
        if self.end_sent || !idle || self.cursor.peek().is_some() {
            return Ok(false);
        }
        let message = Message::End { blocks: self.played };
        let place = self.blocks.count() as u32;
        self.endpoint.post(&[self.endpoint.message(place, &message, true)])?;
        self.end_sent = true;
        Ok(true)
    }

    /// Handles control messages. Returns whether there was any.
    fn listen(&mut self) -> Result<bool> {
        match self.connection.try_receive::<Request>() {
            Ok(None) => Ok(false),
            Ok(Some(Request::Ready)) => {
                self.is_ready = true;
                Ok(true)
            }
            Ok(Some(Request::Finish)) => {
                self.finishing = true;
                Ok(true)
            }
            Ok(Some(other)) => Err(unexpected(&other).into()),
            Err(ControlError::Closed) => bail!("the other side vanished in the middle of the playback"),
            Err(error) => Err(error.into()),
        }
    }
}
