// SPDX-License-Identifier: MIT OR Apache-2.0

//! What a session needs from the store, on a storage node and on the node with the accelerator: a stream with blocks of the
//! right size, a recording, and the order of its blocks.

use anyhow::{ensure, Context, Result};

use crate::control::Start;
use crate::store::{Block, ChannelName, Reader, Store, System};

/// Fails unless the stream of a channel has blocks of this size.
pub(crate) fn check_block_size<S: System>(store: &Store<S>, name: &ChannelName, block_size: u64) -> Result<()> {
    let streams = store.streams(&name.lun)?;
    let stream = streams.iter().find(|stream| stream.name == name.stream);
    let stream = stream.with_context(|| format!("there is no stream {}/{}", name.lun, name.stream))?;
    ensure!(
        stream.block_size == block_size,
        "stream {}/{} has blocks of {} bytes, not {block_size}",
        name.lun,
        name.stream,
        stream.block_size
    );
    Ok(())
}

/// Fails if a playback at this rate would never begin.
pub(crate) fn check_rate(rate: Option<u64>) -> Result<()> {
    ensure!(rate != Some(0), "a rate of 0 bytes in a second plays nothing");
    Ok(())
}

/// Opens a recording of a channel: the one with a number, or the latest one. Returns its number, too.
pub(crate) fn open_recording<S: System>(
    store: &Store<S>,
    name: &ChannelName,
    number: Option<u64>,
) -> Result<(u64, Reader<S>)> {
    let number = match number {
        Some(number) => number,
        None => {
            let latest = store.recordings(name)?.last().map(|recording| recording.number);
            latest.with_context(|| format!("channel {name} has no recording"))?
        }
    };
    Ok((number, store.reader(name, number)?))
}

/// Which blocks follow.
pub(crate) struct Cursor {
    first: Option<Block>,
    next: Option<Block>,
    repeat: bool,
    left: u64,
}

impl Cursor {
    /// Starts at the first block at or after `start`. `blocks` is the most blocks; `None` for all. With `repeat`, the first block
    /// follows the last one.
    ///
    /// # Errors
    ///
    /// No block is at or after `start`.
    pub(crate) fn new<S: System>(reader: &Reader<S>, start: Start, blocks: Option<u64>, repeat: bool) -> Result<Self> {
        let first = match start {
            Start::First => reader.next(..),
            Start::Block(sequence) => reader.next(sequence..),
            Start::Time(time) => reader.at_time(time..),
        };
        ensure!(
            first.is_some(),
            "recording {} has no block at or after the requested start",
            reader.name()
        );
        Ok(Self {
            first,
            next: first,
            repeat,
            left: blocks.unwrap_or(u64::MAX),
        })
    }

    /// Returns the next block, if any follows.
    pub(crate) fn peek(&self) -> Option<Block> {
        self.next.filter(|_| self.left > 0)
    }

    /// Goes on behind the block that [`Cursor::peek`] returned.
    pub(crate) fn advance<S: System>(&mut self, reader: &Reader<S>) {
        let Some(block) = self.next else { return };
        self.left -= 1;
        self.next = block.sequence.checked_add(1).and_then(|next| reader.next(next..));
        if self.next.is_none() && self.repeat {
            self.next = self.first;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Files, LunOptions, StreamOptions};

    /// Returns a recording of the blocks 10, 11, and 15, with the times 100, 110, and 150.
    fn recording(folder: &std::path::Path) -> Reader<Files> {
        use std::os::unix::fs::FileExt;

        let files = Files::new().cached(true);
        Store::prepare(&files, folder).unwrap();
        let store = Store::open(files, [folder]).unwrap();
        let lun = LunOptions::new([folder]).segment_size(1 << 20).segments(1);
        store.create_lun("fast", &lun).unwrap();
        store.create_stream("fast", "radar", &StreamOptions::new(4096)).unwrap();
        let name = ChannelName::new("fast", "radar", 0);
        let mut writer = store.writer(&name, 0).unwrap();
        for sequence in [10, 11, 15] {
            let block = Block {
                sequence,
                time: 10 * sequence,
                checksum: 0,
            };
            writer
                .write(block, |file, offset| file.write_all_at(&[0; 4096], offset))
                .unwrap();
        }
        assert_eq!(writer.commit().acknowledged.len(), 3);
        store.reader(&name, writer.recording()).unwrap()
    }

    fn played(reader: &Reader<Files>, start: Start, blocks: Option<u64>, repeat: bool) -> Vec<u64> {
        let Ok(mut cursor) = Cursor::new(reader, start, blocks, repeat) else {
            return Vec::new();
        };
        let mut all = Vec::new();
        while let Some(block) = cursor.peek() {
            all.push(block.sequence);
            cursor.advance(reader);
        }
        all
    }

    #[test]
    fn cursor_seeks_limits_and_repeats() {
        let folder = tempfile::tempdir().unwrap();
        let reader = recording(folder.path());
        for (start, blocks, repeat, expected) in [
            (Start::First, None, false, vec![10, 11, 15]),
            (Start::First, Some(2), false, vec![10, 11]),
            (Start::First, Some(0), false, vec![]),
            (Start::Block(11), None, false, vec![11, 15]),
            (Start::Block(12), None, false, vec![15]),
            (Start::Block(16), None, false, vec![]),
            (Start::Time(101), None, false, vec![11, 15]),
            (Start::Time(151), None, false, vec![]),
            (Start::First, Some(7), true, vec![10, 11, 15, 10, 11, 15, 10]),
            (Start::Block(11), Some(3), true, vec![11, 15, 11]),
        ] {
            assert_eq!(
                played(&reader, start, blocks, repeat),
                expected,
                "{start:?} {blocks:?} {repeat}"
            );
        }
    }
}
