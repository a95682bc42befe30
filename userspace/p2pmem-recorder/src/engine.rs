// SPDX-License-Identifier: MIT OR Apache-2.0

//! Between block memory and the store: recording and playback by io_uring, without a thread of their own.
//!
//! The program polls the file descriptor of an engine, and calls `progress()` when it is readable. No method waits for a
//! transfer, except `finish()` and dropping an engine.
//!
//! ```
//! use p2pmem_recorder::engine::{PlayEngine, RecordEngine};
//! use p2pmem_recorder::memory::BlockMemory;
//! use p2pmem_recorder::store::{Block, ChannelName, Files, LunOptions, Store, StreamOptions};
//! use std::sync::Arc;
//!
//! # let folder = tempfile::tempdir()?;
//! # let drive = folder.path();
//! # let files = Files::new().cached(true);
//! # Store::prepare(&files, drive)?;
//! # let store = Store::open(files, [drive])?;
//! # store.create_lun("fast", &LunOptions::new([drive]).segment_size(1 << 20).segments(4))?;
//! # store.create_stream("fast", "radar", &StreamOptions::new(64 << 10))?;
//! let channel = ChannelName::new("fast", "radar", 0);
//! let memory = Arc::new(BlockMemory::host(64 << 10, 4)?);
//! let mut engine = RecordEngine::new(store.writer(&channel, 0)?, Arc::clone(&memory))?;
//! let recording = engine.recording();
//! for sequence in 0..4 {
//!     let buffer = sequence as usize;
//!     memory.write(buffer, 0, b"payload")?;
//!     let checksum = memory.checksum(buffer)?;
//!     engine.submit(buffer, Block { sequence, time: 1000 + sequence, checksum })?;
//! }
//! let (progress, result) = engine.finish();
//! result?;
//! assert_eq!(progress.acknowledged.len(), 4);
//!
//! let mut player = PlayEngine::new(store.reader(&channel, recording)?, Arc::clone(&memory))?;
//! player.fetch(0, 3)?;
//! let played = player.finish();
//! assert_eq!(played[0].block.checksum, memory.checksum(0)?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod play;
mod queue;
mod record;

#[cfg(test)]
pub(crate) mod tests;

pub use play::{PlayEngine, PlayToken, Played};
pub use queue::{Queue, Target};
pub use record::{Acknowledged, DriveFailure, NotRecorded, Progress, RecordEngine, RecordToken};

pub use crate::sys::Ring;
