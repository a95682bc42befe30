// SPDX-License-Identifier: MIT OR Apache-2.0

//! Playback: from slots of the store to buffers.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use super::queue::{Queue, Target};
use super::record::{check_size, payload, ring, use_buffer};
use crate::memory::BlockMemory;
use crate::store::{Block, Location, Reader, Result, System};
use crate::sys::Ring;

/// A block whose transfer to its buffer is complete.
#[derive(Debug)]
pub struct Played {
    /// The buffer.
    pub buffer: usize,
    /// The block. Compare the buffer with its checksum at the receiver.
    pub block: Block,
    /// The folder of the drive that has the block.
    pub drive: Arc<Path>,
    /// Whether the block is in the buffer, or the error of the drive.
    pub result: io::Result<()>,
}

/// What a read in flight keeps.
pub struct PlayToken<F> {
    buffer: usize,
    location: Location<F>,
}

/// Reads blocks of a recording to the buffers of block memory.
///
/// The file descriptor of [`AsFd`] is readable when [`progress`](Self::progress) has something to do. Dropping the engine
/// waits for the reads in flight.
pub struct PlayEngine<S: System, Q = Ring<PlayToken<File>>> {
    queue: Q,
    reader: Reader<S>,
    memory: Arc<BlockMemory>,
    buffers: BTreeSet<usize>,
}

impl<S: System<File = File>> PlayEngine<S> {
    /// Plays with io_uring. The buffers of `memory` have the size of the stream's blocks.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidValue`](crate::store::Error::InvalidValue) if the sizes differ;
    /// [`Error::Io`](crate::store::Error::Io) if the kernel does not permit io_uring.
    pub fn new(reader: Reader<S>, memory: Arc<BlockMemory>) -> Result<Self> {
        let queue = ring(memory.count())?;
        Self::with_queue(reader, memory, queue)
    }
}

impl<S: System, Q: Queue<S::File, PlayToken<S::File>>> PlayEngine<S, Q> {
    /// Plays with another queue than io_uring.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidValue`](crate::store::Error::InvalidValue) if the sizes of buffers and blocks differ.
    pub fn with_queue(reader: Reader<S>, memory: Arc<BlockMemory>, queue: Q) -> Result<Self> {
        check_size(&memory, reader.block_size())?;
        Ok(Self {
            queue,
            reader,
            memory,
            buffers: BTreeSet::new(),
        })
    }

    /// Returns the recording, to choose blocks.
    pub fn reader(&self) -> &Reader<S> {
        &self.reader
    }

    /// Returns the memory of the blocks.
    pub fn memory(&self) -> &Arc<BlockMemory> {
        &self.memory
    }

    /// Returns the number of blocks that are being read.
    pub fn in_flight(&self) -> usize {
        self.buffers.len()
    }

    /// Starts to read a block to a buffer. [`progress`](Self::progress) returns the buffer when the block is there.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`](crate::store::Error::NotFound) if the block is not recorded;
    /// [`Error::InvalidValue`](crate::store::Error::InvalidValue) if the memory does not have the buffer, or a block in flight
    /// has it; [`Error::Io`](crate::store::Error::Io) if the file of the block cannot be opened.
    pub fn fetch(&mut self, buffer: usize, sequence: u64) -> Result<()> {
        use_buffer(&mut self.buffers, &self.memory, buffer)?;
        let result = self.start(buffer, sequence);
        if result.is_err() {
            self.buffers.remove(&buffer);
        }
        result
    }

    fn start(&mut self, buffer: usize, sequence: u64) -> Result<()> {
        let location = self.reader.locate(sequence)?;
        let file = Arc::clone(&location.file);
        let from = Target {
            file: &file,
            offset: location.offset,
        };
        let token = PlayToken { buffer, location };
        let started = self.queue.read(&self.memory, buffer, from, token);
        started.map_err(|(_, error)| payload(sequence, error))
    }

    /// Returns the blocks whose transfer is complete since the last call, without waiting.
    pub fn progress(&mut self) -> Vec<Played> {
        self.queue.clear_event();
        let mut played = Vec::new();
        while let Some((PlayToken { buffer, location }, result)) = self.queue.completed() {
            self.buffers.remove(&buffer);
            played.push(Played {
                buffer,
                block: location.block,
                drive: location.drive,
                result,
            });
        }
        played
    }

    /// Waits for the blocks that are being read, and ends the playback.
    pub fn finish(mut self) -> Vec<Played> {
        let mut played = self.progress();
        while !self.buffers.is_empty() && self.queue.wait().is_ok() {
            played.append(&mut self.progress());
        }
        played
    }
}

impl<S: System, Q: Queue<S::File, PlayToken<S::File>>> AsFd for PlayEngine<S, Q> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.event()
    }
}
