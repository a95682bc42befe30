// SPDX-License-Identifier: MIT OR Apache-2.0

//! Recording: from buffers to slots of the store.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;

use super::queue::{Queue, Target};
use crate::memory::BlockMemory;
use crate::store::{Block, ChannelName, Error, Result, Slot, System, Writer};
use crate::sys::Ring;

/// The number of written blocks after which they are committed although more completions are waiting: one page of the index.
const BATCH: usize = 64;

/// A block that is durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Acknowledged {
    /// The buffer of the block, which can be used again.
    pub buffer: usize,
    /// The sequence number of the block.
    pub sequence: u64,
}

/// A block that is not recorded.
#[derive(Debug)]
pub struct NotRecorded {
    /// The buffer of the block, which can be used again.
    pub buffer: usize,
    /// The block. It can be submitted again.
    pub block: Block,
    /// Why it is not recorded: [`Error::Full`], [`Error::DrivesFailed`]; [`Error::Payload`] if the memory of the buffer was
    /// revoked.
    pub error: Error,
}

/// A drive that the engine does not use any more.
#[derive(Debug)]
pub struct DriveFailure {
    /// The folder of the drive.
    pub drive: PathBuf,
    /// Its error.
    pub error: io::Error,
    /// The folders of the drives to which the failed drive's blocks go that are not durable. Without one, blocks are not
    /// recorded.
    pub remaining: Vec<PathBuf>,
}

/// What happened since the last call.
#[derive(Debug, Default)]
#[must_use]
pub struct Progress {
    /// The blocks that are durable from now on, in the order of commits. Those of one commit are in the order in which they were
    /// submitted.
    pub acknowledged: Vec<Acknowledged>,
    /// The blocks that are not recorded.
    pub not_recorded: Vec<NotRecorded>,
    /// The drives that failed, each once.
    pub failures: Vec<DriveFailure>,
    /// The folders of the drives on which the acknowledged blocks are.
    pub drives: BTreeSet<PathBuf>,
}

impl Progress {
    fn append(&mut self, mut other: Self) {
        self.acknowledged.append(&mut other.acknowledged);
        self.not_recorded.append(&mut other.not_recorded);
        self.failures.append(&mut other.failures);
        self.drives.append(&mut other.drives);
    }
}

/// What a write in flight keeps.
pub struct RecordToken<F>(Slot<F>);

/// A block that was submitted and has no result.
struct Pending {
    buffer: usize,
    block: Block,
    /// Counts the blocks in the order in which they were submitted.
    number: u64,
    /// The number of the drive in the LUN to which the block goes.
    member: usize,
}

/// Records blocks from the buffers of block memory. A block goes to the next drive of the LUN in turn. If a drive fails, its
/// blocks that are not durable are written again, to another drive.
///
/// The file descriptor of [`AsFd`] is readable when [`progress`](Self::progress) has something to do.
///
/// Dropping the engine waits for the writes in flight. What is not acknowledged then is not recorded.
pub struct RecordEngine<S: System, Q = Ring<RecordToken<File>>> {
    // Dropped first: its tokens have slots of the recording.
    queue: Q,
    writer: Writer<S>,
    memory: Arc<BlockMemory>,
    /// By sequence number.
    pending: BTreeMap<u64, Pending>,
    buffers: BTreeSet<usize>,
    submitted: u64,
    /// Blocks that are written and wait for the next commit.
    written: usize,
    reported: BTreeSet<PathBuf>,
}

impl<S: System<File = File>> RecordEngine<S> {
    /// Records with io_uring. The buffers of `memory` have the size of the stream's blocks.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidValue`] if the sizes differ; [`Error::Io`] if the kernel does not permit io_uring.
    pub fn new(writer: Writer<S>, memory: Arc<BlockMemory>) -> Result<Self> {
        let queue = ring(memory.count())?;
        Self::with_queue(writer, memory, queue)
    }
}

/// Creates a ring for as many transfers as there are buffers.
pub(super) fn ring<T>(count: usize) -> Result<Ring<T>> {
    Ring::new(count).map_err(|source| Error::Io {
        what: "setting up io_uring for",
        path: PathBuf::from("the engine"),
        source,
    })
}

/// Fails if the buffers do not have the size of the blocks.
pub(super) fn check_size(memory: &BlockMemory, block_size: u64) -> Result<()> {
    if memory.block_size() as u64 == block_size {
        return Ok(());
    }
    Err(Error::InvalidValue {
        what: "size of buffers",
        value: memory.block_size() as u64,
        remedy: "use the block size of the stream",
    })
}

/// Adds a buffer to those in use.
pub(super) fn use_buffer(buffers: &mut BTreeSet<usize>, memory: &BlockMemory, buffer: usize) -> Result<()> {
    if buffer >= memory.count() || !buffers.insert(buffer) {
        return Err(Error::InvalidValue {
            what: "buffer",
            value: buffer as u64,
            remedy: "use a buffer of the memory that no block in flight has",
        });
    }
    Ok(())
}

impl<S: System, Q: Queue<S::File, RecordToken<S::File>>> RecordEngine<S, Q> {
    /// Records with another queue than io_uring.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidValue`] if the sizes of buffers and blocks differ.
    pub fn with_queue(writer: Writer<S>, memory: Arc<BlockMemory>, queue: Q) -> Result<Self> {
        check_size(&memory, writer.block_size())?;
        Ok(Self {
            queue,
            writer,
            memory,
            pending: BTreeMap::new(),
            buffers: BTreeSet::new(),
            submitted: 0,
            written: 0,
            reported: BTreeSet::new(),
        })
    }

    /// Returns the channel.
    pub fn name(&self) -> &ChannelName {
        self.writer.name()
    }

    /// Returns the number of the recording in its channel.
    pub fn recording(&self) -> u64 {
        self.writer.recording()
    }

    /// Returns the memory of the blocks.
    pub fn memory(&self) -> &Arc<BlockMemory> {
        &self.memory
    }

    /// Returns the number of blocks that were submitted and are neither acknowledged nor reported as not recorded.
    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// Starts to record the block in a buffer. The buffer must not change until [`progress`](Self::progress) returns it.
    ///
    /// # Errors
    ///
    /// [`Error::Duplicate`] if the recording has the sequence number, or a block in flight has it; [`Error::InvalidValue`] if
    /// the memory does not have the buffer, or a block in flight has it; [`Error::Full`], [`Error::DrivesFailed`]. The block
    /// is not recorded then. [`progress`](Self::progress) returns the drives that failed.
    pub fn submit(&mut self, buffer: usize, block: Block) -> Result<()> {
        let sequence = block.sequence;
        if self.pending.contains_key(&sequence) {
            return Err(Error::Duplicate { sequence });
        }
        use_buffer(&mut self.buffers, &self.memory, buffer)?;
        let number = self.submitted;
        let mut pending = Pending {
            buffer,
            block,
            number,
            member: 0,
        };
        match self.start(&mut pending) {
            Ok(()) => {
                self.submitted += 1;
                self.pending.insert(sequence, pending);
                Ok(())
            }
            Err(error) => {
                self.buffers.remove(&buffer);
                Err(error)
            }
        }
    }

    /// Starts the write of a block, on any drive that has space.
    fn start(&mut self, pending: &mut Pending) -> Result<()> {
        let slot = self.writer.reserve(pending.block)?;
        pending.member = slot.member();
        let file = Arc::clone(slot.file());
        let to = Target {
            file: &file,
            offset: slot.offset(),
        };
        let token = RecordToken(slot);
        match self.queue.write(&self.memory, pending.buffer, to, token) {
            Ok(()) => Ok(()),
            Err((RecordToken(slot), error)) => {
                self.writer.abandon(slot);
                Err(payload(pending.block.sequence, error))
            }
        }
    }

    /// Handles what is complete, without waiting for transfers. Writes the index of blocks that are written, which makes them
    /// durable, when no further completion is waiting or after 64 blocks.
    pub fn progress(&mut self) -> Progress {
        let mut progress = Progress::default();
        self.queue.clear_event();
        // Completions after this have an event of their own, so none is left behind.
        while let Some((RecordToken(slot), result)) = self.queue.completed() {
            self.completed(slot, result, &mut progress);
            if self.written >= BATCH {
                self.commit(&mut progress);
            }
        }
        if self.written > 0 {
            self.commit(&mut progress);
        }
        for (drive, error) in self.writer.drive_errors() {
            if self.reported.insert(drive.to_owned()) {
                progress.failures.push(DriveFailure {
                    drive: drive.to_owned(),
                    error: crate::store::copy_of(error),
                    remaining: self.writer.working_drives().map(Path::to_owned).collect(),
                });
            }
        }
        progress
    }

    fn completed(&mut self, slot: Slot<S::File>, result: io::Result<()>, progress: &mut Progress) {
        let sequence = slot.block().sequence;
        match result {
            Ok(()) => match self.writer.written(slot) {
                Ok(()) => self.written += 1,
                Err(Error::DriveFailed { .. }) => self.write_again(sequence, progress),
                Err(error) => self.give_up(sequence, error, progress),
            },
            // The memory of the buffer is gone. This is no failure of the drive.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::FAULT) => {
                self.writer.abandon(slot);
                self.give_up(sequence, payload(sequence, error), progress);
            }
            Err(error) => {
                self.writer.failed(slot, error);
                self.write_again(sequence, progress);
            }
        }
    }

    /// Writes a block again, which is still in its buffer.
    fn write_again(&mut self, sequence: u64, progress: &mut Progress) {
        let Some(mut pending) = self.pending.remove(&sequence) else {
            return;
        };
        let result = self.start(&mut pending);
        self.pending.insert(sequence, pending);
        if let Err(error) = result {
            self.give_up(sequence, error, progress);
        }
    }

    fn give_up(&mut self, sequence: u64, error: Error, progress: &mut Progress) {
        let Some(Pending { buffer, block, .. }) = self.pending.remove(&sequence) else {
            return;
        };
        self.buffers.remove(&buffer);
        progress.not_recorded.push(NotRecorded { buffer, block, error });
    }

    fn commit(&mut self, progress: &mut Progress) {
        self.written = 0;
        let commit = self.writer.commit();
        let mut done: Vec<Pending> = commit
            .acknowledged
            .iter()
            .filter_map(|sequence| self.pending.remove(sequence))
            .collect();
        done.sort_by_key(|pending| pending.number);
        for pending in done {
            self.buffers.remove(&pending.buffer);
            let drive = self.writer.drive(pending.member);
            if !progress.drives.contains(drive) {
                progress.drives.insert(drive.to_owned());
            }
            progress.acknowledged.push(Acknowledged {
                buffer: pending.buffer,
                sequence: pending.block.sequence,
            });
        }
        for failure in commit.failures {
            for sequence in failure.sequences {
                self.write_again(sequence, progress);
            }
        }
    }

    /// Waits until all blocks are acknowledged or not recorded.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the kernel does not let the engine wait. The transfers continue.
    pub fn drain(&mut self) -> (Progress, Result<()>) {
        let mut progress = self.progress();
        while !self.pending.is_empty() {
            if let Err(source) = self.queue.wait() {
                let error = Error::Io {
                    what: "waiting for",
                    path: PathBuf::from("transfers"),
                    source,
                };
                return (progress, Err(error));
            }
            progress.append(self.progress());
        }
        (progress, Ok(()))
    }

    /// Waits for all blocks, and ends the recording.
    ///
    /// # Errors
    ///
    /// Those of [`Writer::finish`].
    pub fn finish(mut self) -> (Progress, Result<()>) {
        let (progress, drained) = self.drain();
        let Self { queue, writer, .. } = self;
        // The slots of the queue must be gone before the writer ends.
        drop(queue);
        (progress, drained.and(writer.finish()))
    }
}

/// The error of a transfer that is no failure of the drive.
pub(super) fn payload(sequence: u64, error: io::Error) -> Error {
    Error::Payload {
        sequence,
        source: error.into(),
    }
}

impl<S: System, Q: Queue<S::File, RecordToken<S::File>>> AsFd for RecordEngine<S, Q> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.event()
    }
}
