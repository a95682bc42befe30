// SPDX-License-Identifier: MIT OR Apache-2.0

//! A recording session of the node: blocks arrive by RDMA, go to the drives, and are acknowledged when they are durable.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{bail, ensure, Context, Result};
use p2pmem_verbs::{Access, Address, Nic};

use super::setup::{check_block_size, next_request, reason, Ended, Port};
use crate::control::message::{Message, MAX_ACKNOWLEDGED};
use crate::control::{unexpected, Connection, Record, Reply, Request};
use crate::engine::{Progress, RecordEngine};
use crate::memory::BlockMemory;
use crate::node::{Node, SessionHandle, SessionOptions};
use crate::rdma::{kind, Capacity, Endpoint, Kind, RegisteredBlocks};
use crate::status::{Direction, Limit};
use crate::store::{Block, ChannelName, Error as StoreError, Files};
use crate::wait::{wait, CHECK_INTERVAL};

/// A recording session.
///
/// Buffer *n* receives a message to place *n*, and then the payload. Both receives are posted together, so a pair belongs to
/// one block.
struct Recording<'a> {
    node: &'a Node,
    connection: &'a mut Connection,
    handle: SessionHandle,
    // Fields are dropped in this order: no request can access memory whose registration has ended.
    endpoint: Endpoint,
    registered: RegisteredBlocks,
    engine: RecordEngine<Files>,
    blocks: Arc<BlockMemory>,
    /// The buffers that have a block which the drives do not have yet.
    filled: u32,
    /// Sequence numbers to acknowledge, whose buffers can be used again.
    unsent: VecDeque<u64>,
    /// Places from which acknowledgements can be sent.
    places: Vec<u32>,
    recorded: u64,
    finishing: bool,
}

/// Serves a recording to its end.
pub(super) fn record(
    node: &Arc<Node>,
    connection: &mut Connection,
    peer: &str,
    port: &Port,
    request: &Record,
) -> Result<Ended> {
    let name = ChannelName::from(&request.channel);
    let block_size = check_block_size(node, &name, request.block_size)?;
    let nic: &Arc<Nic> = &port.nic;
    let buffers = node.options().buffers.min(request.buffers.max(1));
    let blocks = Arc::new(node.memory_for(&name, port, block_size, buffers)?);
    let endpoint = Endpoint::new(
        nic,
        port.gid_index,
        Capacity {
            sends: buffers,
            receives: 2 * buffers,
            messages_sent: buffers,
            messages_received: buffers,
        },
    )?;
    let registered = RegisteredBlocks::new(endpoint.domain(), &blocks, Access::LOCAL_WRITE)?;
    let writer = node.store().writer(&name, request.started)?;
    let recording = writer.recording();
    let memory = blocks.describe();
    let devices = node.devices_of(&name, port, &blocks);
    let engine = RecordEngine::new(writer, Arc::clone(&blocks)).context("starting io_uring")?;
    let handle = node.begin_session(SessionOptions {
        direction: Direction::Record,
        channel: name,
        recording,
        peer: peer.to_owned(),
        nic: nic.name().to_owned(),
        memory: memory.clone(),
        devices,
        block_size,
        buffers,
    });
    let session = Recording {
        node,
        connection,
        handle,
        endpoint,
        registered,
        engine,
        blocks,
        filled: 0,
        unsent: VecDeque::new(),
        places: (0..buffers).collect(),
        recorded: 0,
        finishing: false,
    };
    session.run(&request.address, memory)
}

impl Recording<'_> {
    fn post_receives(&self, buffer: u32) -> Result<()> {
        self.endpoint.post_message_receive(buffer)?;
        self.endpoint
            .post_payload_receive(buffer, self.registered.segment(buffer))
    }

    /// Runs the session, and ends it. Blocks that arrived are recorded also if the session fails, as far as the drives permit.
    fn run(mut self, other: &Address, memory: String) -> Result<Ended> {
        let result = self.begin(other, memory).and_then(|()| self.serve());
        if let Err(error) = &result {
            self.handle.failed(reason(error));
            // The other side gets the reason before the wait for the drives, which takes as long as their driver waits for them.
            self.connection.fail(&reason(error));
            self.take_arrived();
        }
        let (done, finished) = self.engine.finish();
        self.handle.acknowledged(done.acknowledged.len() as u64);
        note_drives(self.node, &self.handle, &done);
        result?;
        if let Err(error) = finished.context("ending the recording") {
            self.handle.failed(reason(&error));
            return Err(error);
        }
        Ok(Ended { blocks: self.recorded })
    }

    /// Connects, posts receives for all buffers, and lets the other side begin.
    fn begin(&mut self, other: &Address, memory: String) -> Result<()> {
        self.endpoint.connect(other)?;
        let buffers = self.blocks.count() as u32;
        for buffer in 0..buffers {
            self.post_receives(buffer)?;
        }
        self.connection.send(&Reply::RecordReady {
            session: self.handle.id(),
            recording: self.engine.recording(),
            address: self.endpoint.address(),
            credits: buffers,
            memory,
        })?;
        Ok(())
    }

    /// Records blocks that arrived before the session failed. The failure stays the reason if one of them is refused, too.
    fn take_arrived(&mut self) {
        let mut completions = Vec::new();
        while self.endpoint.poll(&mut completions).is_ok() && !completions.is_empty() {
            for completion in &completions {
                if let (Kind::Payload, buffer) = kind(completion) {
                    let _ = self.arrived(buffer, completion.bytes);
                }
            }
        }
    }

    fn serve(&mut self) -> Result<()> {
        let mut completions = Vec::new();
        let mut waiting_since = Instant::now();
        loop {
            if self.handle.is_stopped() {
                bail!("the administrator stopped the session");
            }
            self.endpoint.poll(&mut completions)?;
            let mut progress = !completions.is_empty();
            for completion in &completions {
                match kind(completion) {
                    (Kind::MessageSent, place) => self.places.push(place),
                    // The payload follows, and the message is read then.
                    (Kind::MessageReceived, _) => {}
                    (Kind::Payload, buffer) => self.arrived(buffer, completion.bytes)?,
                }
            }
            progress |= self.collect()?;
            progress |= self.acknowledge()?;
            if self.finishing && self.filled == 0 && self.unsent.is_empty() {
                return Ok(());
            }
            progress |= self.listen()?;
            let limit = if self.filled * 2 > self.blocks.count() as u32 {
                Limit::Drive
            } else {
                Limit::Peer
            };
            self.handle.progress(self.filled as usize, limit);
            if progress {
                waiting_since = Instant::now();
                continue;
            }
            if waiting_since.elapsed() > self.node.options().timeout {
                self.check_progress()?;
            }
            if self.endpoint.arm()? {
                continue;
            }
            let fds = [self.endpoint.as_fd(), self.engine.as_fd(), self.connection.as_fd()];
            wait(&fds, CHECK_INTERVAL)?;
            self.endpoint.clear_event()?;
        }
    }

    /// Fails if something is outstanding, although nothing happened for the time limit. A source may pause for any time.
    fn check_progress(&self) -> Result<()> {
        let timeout = self.node.options().timeout;
        ensure!(
            self.filled == 0,
            "the drives did not complete {} blocks within {timeout:?}",
            self.filled
        );
        ensure!(
            self.places.len() == self.blocks.count(),
            "the other side did not receive an acknowledgement within {timeout:?}"
        );
        Ok(())
    }

    /// Handles a block that arrived.
    fn arrived(&mut self, buffer: u32, bytes: u32) -> Result<()> {
        let message = self.endpoint.received(buffer)?;
        let Message::Block {
            block,
            bytes: announced,
        } = message
        else {
            bail!("the other side sent {message:?} instead of a block");
        };
        let size = self.blocks.block_size() as u64;
        ensure!(
            announced == size && u64::from(bytes) == size,
            "block {} has {bytes} bytes, and its message says {announced}; the stream has blocks of {size} bytes",
            block.sequence
        );
        self.handle.arrived();
        self.filled += 1;
        self.submit(buffer, block)
    }

    fn submit(&mut self, buffer: u32, block: Block) -> Result<()> {
        let submitted = self.engine.submit(buffer as usize, block);
        submitted.map_err(|error| not_recorded(self.node, error, block.sequence))
    }

    /// Handles what the drives have completed. Returns whether there was anything.
    fn collect(&mut self) -> Result<bool> {
        let done = self.engine.progress();
        note_drives(self.node, &self.handle, &done);
        let progress = !done.acknowledged.is_empty() || !done.failures.is_empty();
        self.handle.acknowledged(done.acknowledged.len() as u64);
        for block in &done.acknowledged {
            self.filled -= 1;
            self.recorded += 1;
            self.unsent.push_back(block.sequence);
            // The receive is posted before the acknowledgement permits the next block.
            self.post_receives(block.buffer as u32)?;
        }
        if let Some(refused) = done.not_recorded.into_iter().next() {
            return Err(not_recorded(self.node, refused.error, refused.block.sequence));
        }
        Ok(progress)
    }

    /// Acknowledges blocks. Returns whether there was anything.
    fn acknowledge(&mut self) -> Result<bool> {
        let mut progress = false;
        while !self.unsent.is_empty() {
            let Some(place) = self.places.pop() else {
                break;
            };
            let count = self.unsent.len().min(MAX_ACKNOWLEDGED);
            let message = Message::Acknowledged(self.unsent.drain(..count).collect());
            self.endpoint.post(&[self.endpoint.message(place, &message, true)])?;
            progress = true;
        }
        Ok(progress)
    }

    /// Handles control messages. Returns whether there was any.
    fn listen(&mut self) -> Result<bool> {
        match next_request(self.connection, "recording")? {
            None => return Ok(false),
            Some(Request::Finish) => self.finishing = true,
            Some(other) => return Err(unexpected(&other).into()),
        }
        Ok(true)
    }
}

/// Reports to the node which drives recorded blocks, and which failed.
fn note_drives(node: &Node, session: &SessionHandle, done: &Progress) {
    for drive in &done.drives {
        node.drive_worked(session, drive);
    }
    for failure in &done.failures {
        let others: Vec<String> = failure
            .remaining
            .iter()
            .map(|drive| node.describe_drive(drive))
            .collect();
        let consequence = if others.is_empty() {
            "no other drive of the LUN is left, so the recording ends".to_owned()
        } else {
            let others = others.join(", ");
            format!("its blocks that were not durable, and those that follow, go to {others}")
        };
        node.drive_failed(session, &failure.drive, &failure.error, &consequence);
    }
}

/// Returns the reason why a block is not recorded, with the drive if one failed.
fn not_recorded(node: &Node, error: StoreError, sequence: u64) -> anyhow::Error {
    let what = match &error {
        StoreError::DrivesFailed { drive, .. } => {
            format!("recording block {sequence} on the drive {}", node.describe_drive(drive))
        }
        _ => format!("recording block {sequence}"),
    };
    anyhow::Error::from(error).context(what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::DriveFailure;
    use crate::serve::setup::tests::{node, session};

    #[test]
    fn a_failed_drive_is_named_with_what_becomes_of_its_blocks() {
        let (folder, node) = node();
        let drives = ["nvme0", "nvme1"].map(|name| folder.path().join(name));
        let session = node.begin_session(session(Direction::Record));
        let failed = |drive: usize, remaining: &[usize]| Progress {
            failures: vec![DriveFailure {
                drive: drives[drive].clone(),
                error: std::io::Error::from_raw_os_error(5),
                remaining: remaining.iter().map(|drive| drives[*drive].clone()).collect(),
            }],
            ..Progress::default()
        };
        note_drives(&node, &session, &failed(1, &[0]));
        note_drives(&node, &session, &failed(0, &[]));
        let status = node.status();
        let warnings = &status.sessions[0].warnings;
        for (text, words) in warnings.iter().zip([
            [
                format!("nvme1n1 at {}", drives[1].display()),
                format!("go to nvme0n1 at {}", drives[0].display()),
            ],
            [
                format!("nvme0n1 at {}", drives[0].display()),
                "the recording ends".into(),
            ],
        ]) {
            assert!(words.iter().all(|word| text.contains(word)), "{text}: {words:?}");
            assert!(text.contains("Input/output error"), "{text}");
        }
        assert_eq!(warnings.len(), 2);
        // A block of another session on a drive removes the drive's error.
        let next = node.begin_session(super::super::setup::tests::session(Direction::Record));
        let worked = Progress {
            drives: [drives[1].clone()].into(),
            ..Progress::default()
        };
        note_drives(&node, &next, &worked);
        let errors = node.status().drives.into_iter().map(|drive| drive.error.is_some());
        assert_eq!(errors.collect::<Vec<_>>(), [true, false]);
    }

    #[test]
    fn the_reason_of_a_recording_that_ends_names_the_drive() {
        let (folder, node) = node();
        let drive = folder.path().join("nvme1");
        let error = StoreError::DrivesFailed {
            lun: "fast".into(),
            drive: drive.clone(),
            source: std::io::Error::from_raw_os_error(5),
        };
        let text = reason(&not_recorded(&node, error, 7));
        let start = format!(
            "recording block 7 on the drive nvme1n1 at {}: all drives of LUN fast failed",
            drive.display()
        );
        assert!(text.starts_with(&start), "{text}");
        let full = not_recorded(&node, StoreError::Full { lun: "fast".into() }, 7);
        assert_eq!(
            reason(&full),
            "recording block 7: LUN fast is full; delete recordings, or use another LUN"
        );
    }
}
