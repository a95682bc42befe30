// SPDX-License-Identifier: MIT OR Apache-2.0

//! Playing back a recording.

use std::collections::VecDeque;
use std::ops::{RangeBounds, RangeInclusive};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::{Context, Error, Result};
use super::layout::drive_of;
use super::state::{not_found, Block, ChannelName, Recording, Shared, Stored};
use super::system::System;

/// The number of files that a reader keeps open.
const OPEN_FILES: usize = 32;

/// Where the payload of a block is. The recording cannot be deleted as long as the location exists.
pub struct Location<F> {
    /// The file.
    pub file: Arc<F>,
    /// The byte of the file at which the payload begins. It is a multiple of 4 KiB.
    pub offset: u64,
    /// The number of bytes of the payload.
    pub length: u64,
    /// The block. Compare the payload with its checksum at the receiver.
    pub block: Block,
    /// The folder of the drive.
    pub drive: Arc<Path>,
    _recording: Arc<Recording>,
}

/// Reads a recording. The recording cannot be deleted while it has a reader. A reader of a recording that has a writer sees
/// each block from its acknowledgement on.
pub struct Reader<S: System> {
    shared: Arc<Shared<S>>,
    name: String,
    recording: Arc<Recording>,
    files: VecDeque<(u32, Arc<S::File>, Arc<Path>)>,
}

fn block(sequence: u64, stored: &Stored) -> Block {
    Block {
        sequence,
        time: stored.time,
        checksum: stored.checksum,
    }
}

impl<S: System> Reader<S> {
    pub(crate) fn new(shared: &Arc<Shared<S>>, name: &ChannelName, number: u64) -> Result<Self> {
        let state = shared.state();
        let recording = state.channel(name)?.recordings.get(&number);
        let name = format!("{name}/{number}");
        let recording = recording.ok_or_else(|| not_found("recording", &name))?;
        Ok(Self {
            shared: Arc::clone(shared),
            recording: Arc::clone(recording),
            name,
            files: VecDeque::new(),
        })
    }

    /// Returns the name, as LUN/STREAM/CHANNEL/NUMBER.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the bytes of a block.
    pub fn block_size(&self) -> u64 {
        self.recording.geometry.block_size
    }

    /// Returns the number of blocks.
    pub fn len(&self) -> usize {
        self.recording.read().blocks.len()
    }

    /// Whether the recording has no block.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the block with a sequence number, if it is recorded.
    pub fn block(&self, sequence: u64) -> Option<Block> {
        self.recording
            .read()
            .blocks
            .get(&sequence)
            .map(|stored| block(sequence, stored))
    }

    /// Returns the first block, in the order of sequence numbers, whose number is in `range`. `next(..)` is the first block
    /// of the recording, `next(n + 1..)` the one after block `n`.
    pub fn next(&self, range: impl RangeBounds<u64>) -> Option<Block> {
        let bounds = (range.start_bound().cloned(), range.end_bound().cloned());
        if is_empty(&bounds) {
            return None;
        }
        let content = self.recording.read();
        let found = content.blocks.range(bounds).next();
        found.map(|(sequence, stored)| block(*sequence, stored))
    }

    /// Returns the blocks in the order of sequence numbers, as they are now.
    pub fn blocks(&self) -> Vec<Block> {
        let content = self.recording.read();
        content
            .blocks
            .iter()
            .map(|(sequence, stored)| block(*sequence, stored))
            .collect()
    }

    /// Returns the first block, in the order of sequence numbers, whose time is in `times`. Looks at all blocks before it.
    pub fn at_time(&self, times: impl RangeBounds<u64>) -> Option<Block> {
        let content = self.recording.read();
        let found = content.blocks.iter().find(|(_, stored)| times.contains(&stored.time));
        found.map(|(sequence, stored)| block(*sequence, stored))
    }

    /// Returns the ranges of sequence numbers between the first and the last block that are not recorded, in ascending
    /// order. The recording is complete if there is none.
    pub fn missing(&self) -> Vec<RangeInclusive<u64>> {
        let content = self.recording.read();
        let sequences: Vec<u64> = content.blocks.keys().copied().collect();
        let gaps = sequences.windows(2).filter(|pair| pair[1] - pair[0] > 1);
        gaps.map(|pair| pair[0] + 1..=pair[1] - 1).collect()
    }

    /// Returns where the payload of a block is.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] if the block is not recorded; [`Error::Io`] if its file cannot be opened.
    pub fn locate(&mut self, sequence: u64) -> Result<Location<S::File>> {
        let content = self.recording.read();
        let stored = content.blocks.get(&sequence).copied();
        let stored = stored.ok_or_else(|| not_found("block", &sequence.to_string()))?;
        let path = content.segments[stored.segment as usize].clone();
        drop(content);
        let open = self.files.iter().find(|(segment, ..)| *segment == stored.segment);
        let (file, drive) = match open {
            Some((_, file, drive)) => (Arc::clone(file), Arc::clone(drive)),
            None => {
                let file = Arc::new(self.shared.system.open(&path).context("opening", &path)?);
                if self.files.len() == OPEN_FILES {
                    self.files.pop_front();
                }
                let drives = self.shared.drives.iter().map(PathBuf::as_path);
                let drive: Arc<Path> = drive_of(drives, &path).unwrap_or(&path).into();
                self.files
                    .push_back((stored.segment, Arc::clone(&file), Arc::clone(&drive)));
                (file, drive)
            }
        };
        Ok(Location {
            file,
            offset: self.recording.geometry.slot_offset(stored.slot),
            length: self.block_size(),
            block: block(sequence, &stored),
            drive,
            _recording: Arc::clone(&self.recording),
        })
    }

    /// Lets `payload` read a block from the offset of the file. `payload` can be
    /// `|file, offset| mapping.read_from(file, offset, range)` of the crate `p2pmem`. Returns the block and the result of
    /// `payload`. The store does not check the payload: compare it with [`Block::checksum`].
    ///
    /// # Errors
    ///
    /// Those of [`locate`](Self::locate); [`Error::Payload`] if `payload` fails.
    pub fn read<T, E>(
        &mut self,
        sequence: u64,
        payload: impl FnOnce(&S::File, u64) -> std::result::Result<T, E>,
    ) -> Result<(Block, T)>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let location = self.locate(sequence)?;
        let result = payload(&location.file, location.offset).map_err(|error| Error::Payload {
            sequence,
            source: error.into(),
        })?;
        Ok((location.block, result))
    }
}

/// Whether a range has no number. `BTreeMap::range()` panics for some of these ranges.
fn is_empty(bounds: &(std::ops::Bound<u64>, std::ops::Bound<u64>)) -> bool {
    use std::ops::Bound::{Excluded, Included, Unbounded};
    match *bounds {
        (Unbounded, _) | (_, Unbounded) => false,
        (Included(start), Included(end)) => start > end,
        (Included(start) | Excluded(start), Excluded(end)) | (Excluded(start), Included(end)) => start >= end,
    }
}
