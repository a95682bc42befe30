// SPDX-License-Identifier: MIT OR Apache-2.0

//! A playback session of the node: blocks are read from the drives, announced, and read by the other side by RDMA.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{bail, ensure, Context, Result};
use p2pmem_verbs::{Access, Address};
use rustix::io::Errno;

use super::setup::{check_block_size, next_request, reason, Ended, Port};
use crate::control::message::Message;
use crate::control::{unexpected, Connection, Play, Reply, Request, Window};
use crate::engine::PlayEngine;
use crate::memory::BlockMemory;
use crate::node::{Node, SessionHandle, SessionOptions};
use crate::pace::Pace;
use crate::rdma::{kind, Capacity, Endpoint, Kind, RegisteredBlocks};
use crate::session::{check_rate, open_recording, Cursor};
use crate::status::{Direction, Limit};
use crate::store::{Block, ChannelName, Error as StoreError, Files};
use crate::wait::{wait, CHECK_INTERVAL};

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
    cursor: Cursor,
    pace: Pace,
    free: Vec<u32>,
    /// Buffers that wait for the drives, in the order in which they are announced.
    order: VecDeque<u32>,
    /// Blocks that the drives have read, by buffer.
    read: BTreeMap<u32, Block>,
    /// Buffers that the other side has not released.
    announced: BTreeSet<u32>,
    /// Buffers whose announcement has no completion. The NIC may still send it, so its place cannot be used again.
    sending: BTreeSet<u32>,
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
    let name = ChannelName::from(&request.channel);
    let block_size = check_block_size(node, &name, request.block_size)?;
    check_rate(request.rate)?;
    let (number, reader) = open_recording(node.store(), &name, request.recording)?;
    let cursor = Cursor::new(&reader, request.start, request.blocks, request.repeat)?;
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
    let memory = blocks.describe();
    let devices = node.devices_of(&name, port, &blocks);
    let engine = PlayEngine::new(reader, Arc::clone(&blocks)).context("starting io_uring")?;
    let handle = node.begin_session(SessionOptions {
        direction: Direction::Play,
        channel: name.clone(),
        recording: number,
        peer: peer.to_owned(),
        nic: port.nic.name().to_owned(),
        memory: memory.clone(),
        devices,
        block_size,
        buffers,
    });
    let session = Playback {
        node,
        connection,
        handle,
        endpoint,
        _registered: registered,
        engine,
        blocks,
        cursor,
        pace: Pace::new(request.rate, block_size, Instant::now()),
        free: (0..buffers).rev().collect(),
        order: VecDeque::new(),
        read: BTreeMap::new(),
        announced: BTreeSet::new(),
        sending: BTreeSet::new(),
        played: 0,
        is_ready: false,
        end_sent: false,
        finishing: false,
    };
    let ready = Reply::PlayReady {
        session: session.handle.id(),
        recording: number,
        address: session.endpoint.address(),
        window: Window { address, rkey },
        credits: buffers,
        memory,
    };
    session.run(&request.address, &ready)
}

impl Playback<'_> {
    fn run(mut self, other: &Address, ready: &Reply) -> Result<Ended> {
        let result = self.begin(other, ready).and_then(|()| self.serve());
        if let Err(error) = &result {
            self.handle.failed(reason(error));
            // The other side gets the reason before the wait for the drives, which takes as long as their driver waits for them.
            self.connection.fail(&reason(error));
        }
        result?;
        Ok(Ended { blocks: self.played })
    }

    /// Connects, and lets the other side begin.
    fn begin(&mut self, other: &Address, ready: &Reply) -> Result<()> {
        self.endpoint.connect(other)?;
        for place in 0..self.blocks.count() as u32 {
            self.endpoint.post_message_receive(place)?;
        }
        self.connection.send(ready)?;
        Ok(())
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
                    (Kind::MessageSent, place) => self.sent(place),
                    (Kind::MessageReceived, place) => self.released(place)?,
                    (Kind::Payload, _) => bail!("a completion for a request that was not posted"),
                }
            }
            progress |= self.send_end()?;
            progress |= self.listen()?;
            if self.finishing {
                return Ok(());
            }
            let delay = self.pace.delay(Instant::now());
            let limit = if self.order.len() * 2 > self.blocks.count() {
                Limit::Drive
            } else if !self.free.is_empty() && !delay.is_zero() {
                Limit::Rate
            } else {
                Limit::Peer
            };
            self.handle.progress(self.order.len(), limit);
            if progress || limit == Limit::Rate {
                waiting_since = Instant::now();
            }
            if progress {
                continue;
            }
            // The other side may pause for any time: it may play what other nodes have.
            let outstanding = self.order.len() + self.sending.len();
            if outstanding > 0 && waiting_since.elapsed() > self.node.options().timeout {
                bail!(
                    "the drives did not read {} blocks, and the NIC did not send {} messages, within {:?}",
                    self.order.len(),
                    self.sending.len(),
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
        while self.is_ready && !self.free.is_empty() && self.pace.delay(Instant::now()).is_zero() {
            let Some(block) = self.cursor.peek() else { break };
            let Some(buffer) = self.free.pop() else { break };
            let fetched = self.engine.fetch(buffer as usize, block.sequence);
            fetched.map_err(|error| not_read(self.node, &self.handle, error, block.sequence))?;
            self.cursor.advance(self.engine.reader());
            self.pace.advance(Instant::now());
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
            if let Err(error) = fetched.result {
                return Err(read_failed(
                    self.node,
                    &self.handle,
                    &fetched.drive,
                    block.sequence,
                    error,
                ));
            }
            self.node.drive_worked(&self.handle, &fetched.drive);
            self.read.insert(fetched.buffer as u32, block);
        }
        Ok(progress)
    }

    /// Announces blocks in their order. Returns whether there was any.
    fn announce(&mut self) -> Result<bool> {
        let mut progress = false;
        while let Some((buffer, block)) = self.order.front().and_then(|buffer| self.read.remove_entry(buffer)) {
            self.order.pop_front();
            let message = Message::Announced {
                buffer,
                block,
                bytes: self.blocks.block_size() as u64,
            };
            self.endpoint.post(&[self.endpoint.message(buffer, &message, true)])?;
            self.announced.insert(buffer);
            self.sending.insert(buffer);
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
            self.announced.remove(&buffer),
            "the other side released buffer {buffer}, which was not announced"
        );
        if !self.sending.contains(&buffer) {
            self.free.push(buffer);
        }
        self.played += 1;
        self.handle.arrived();
        self.handle.acknowledged(1);
        Ok(())
    }

    /// The announcement of a buffer was sent.
    fn sent(&mut self, place: u32) {
        if self.sending.remove(&place) && !self.announced.contains(&place) {
            self.free.push(place);
        }
    }

    /// Sends the end after the last block. Returns whether it was sent.
    fn send_end(&mut self) -> Result<bool> {
        let idle = self.is_ready && self.order.is_empty() && self.announced.is_empty();
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
        match next_request(self.connection, "playback")? {
            None => return Ok(false),
            Some(Request::Ready) => self.is_ready = true,
            Some(Request::Finish) => self.finishing = true,
            Some(other) => return Err(unexpected(&other).into()),
        }
        Ok(true)
    }
}

/// Returns the reason why a playback ends whose drive did not read a block, with the drive. The node gets the error of the
/// drive.
fn read_failed(node: &Node, session: &SessionHandle, drive: &Path, sequence: u64, error: io::Error) -> anyhow::Error {
    let what = format!("reading block {sequence} from the drive {}", node.describe_drive(drive));
    // The memory of the buffer is gone, or the process or the machine is at a limit. This is no failure of the drive.
    let others = [Errno::FAULT, Errno::MFILE, Errno::NFILE, Errno::NOMEM];
    if !Errno::from_io_error(&error).is_some_and(|errno| others.contains(&errno)) {
        node.drive_failed(
            session,
            drive,
            &error,
            &format!("block {sequence} is not read, and the playback ends"),
        );
    }
    anyhow::Error::from(error).context(what)
}

/// Returns the reason why a playback ends that could not begin to read a block.
fn not_read(node: &Node, session: &SessionHandle, error: StoreError, sequence: u64) -> anyhow::Error {
    let drive = match &error {
        StoreError::Io { path, .. } => node.drive_of(path),
        _ => None,
    };
    match (error, drive) {
        (StoreError::Io { source, .. }, Some(drive)) => read_failed(node, session, drive, sequence, source),
        (error, _) => anyhow::Error::from(error).context(format!("reading block {sequence}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::setup::tests::{node, session};

    #[test]
    fn the_reason_of_a_playback_that_ends_names_the_drive() {
        let (folder, node) = node();
        let drive = folder.path().join("nvme1");
        let session = node.begin_session(session(Direction::Play));
        let name = format!("nvme1n1 at {}", drive.display());
        let revoked = read_failed(&node, &session, &drive, 5, io::Error::from_raw_os_error(14));
        assert!(reason(&revoked).contains("Bad address"), "{revoked:#}");
        assert_eq!(
            node.status().drives[1].error,
            None,
            "revoked memory is no failure of the drive"
        );

        let error = read_failed(&node, &session, &drive, 5, io::Error::from_raw_os_error(5));
        let expected = format!("reading block 5 from the drive {name}: Input/output error (os error 5)");
        assert_eq!(reason(&error), expected);
        let opening = StoreError::Io {
            what: "opening",
            path: drive.join("p2pmem-recorder/segment"),
            source: io::Error::from_raw_os_error(5),
        };
        assert_eq!(reason(&not_read(&node, &session, opening, 5)), expected);
        let status = node.status();
        let error = status.drives[1].error.clone().unwrap();
        assert_eq!((error.session, error.direction), (session.id(), Direction::Play));
        assert!(error.consequence.contains("block 5 is not read"), "{error:?}");
        assert!(status.sessions[0].warnings[0].contains(&name));
        assert_eq!(status.drives[0].error, None);

        let missing = StoreError::NotFound {
            what: "block",
            name: "5".into(),
        };
        assert_eq!(
            reason(&not_read(&node, &session, missing, 5)),
            "reading block 5: there is no block 5"
        );
    }
}
