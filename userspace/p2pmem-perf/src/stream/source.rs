// SPDX-License-Identifier: MIT OR Apache-2.0

//! What produces the frames of a stream.

use std::sync::Arc;

use anyhow::Result;
use p2pmem_payload::memory::Memory;
use p2pmem_verbs::Domain;

use super::protocol::Layout;

/// Parameters of a source.
#[derive(Debug, Clone, Copy)]
pub struct SourceOptions {
    /// Slots for frames, each of the size of a frame.
    pub layout: Layout,
    /// Bytes per second; `None` for as many as the sender takes.
    pub rate: Option<u64>,
    /// Seed of the samples.
    pub seed: u64,
}

/// A frame in the source's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceFrame {
    /// Offset of its first byte in the memory.
    pub at: u64,
    /// Sequence number. A gap means that the source has dropped frames.
    pub sequence: u64,
}

/// What a source has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// A frame.
    Frame(SourceFrame),
    /// No frame yet.
    NotYet,
    /// No frame, and none will follow.
    End,
}

/// What a source has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Frames produced, those included that were not sent.
    pub produced: u64,
    /// Frames dropped, because there was no free memory.
    pub dropped: u64,
}

/// Produces frames ([`super::frame`]) in memory that is registered with the NIC, independently of the sender.
///
/// The memory has [`Layout::frames_bytes`] bytes for slots and [`super::protocol::WORDS`] bytes behind them, which belong
/// to the sender.
pub trait Source {
    /// Returns its name for reports.
    fn name(&self) -> &'static str;

    /// Returns its memory.
    fn memory(&self) -> &Memory;

    /// Returns the slots of its memory.
    fn layout(&self) -> Layout;

    /// Starts to produce frames. Called once, when the server is ready.
    ///
    /// # Errors
    ///
    /// The source cannot start, for example because another program uses its device.
    fn start(&mut self) -> Result<()>;

    /// Returns the next frame, and does not wait for it. The frame does not change until it is released.
    ///
    /// # Errors
    ///
    /// The source has failed, for example because its device was removed. The message says what to do.
    fn next(&mut self) -> Result<Next>;

    /// Gives the memory of the `frames` oldest frames back to the source.
    ///
    /// # Errors
    ///
    /// The source has failed.
    fn release(&mut self, frames: u64) -> Result<()>;

    /// Stops producing frames, also if it was not started. Frames that were produced and not returned are lost.
    ///
    /// # Errors
    ///
    /// The source has failed.
    fn stop(&mut self) -> Result<Totals>;
}

/// Makes a source. If there is no memory for its layout, it is called again with a smaller one.
pub type OpenSource<'a> = dyn Fn(&Arc<Domain>, &SourceOptions) -> Result<Box<dyn Source>> + 'a;
