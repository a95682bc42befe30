// SPDX-License-Identifier: MIT OR Apache-2.0

//! How the payload gets to other ranks: writes from the memory of one rank to the memory of another one, with immediate data.
//!
//! All ranks have memory of the same size. A place is an offset in it.

pub mod local;
pub mod verbs;

use std::time::Duration;

use anyhow::Result;

use crate::message::ANNOUNCEMENT;

/// What happened on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The oldest write to this rank whose event was not returned yet has completed: its source is not needed any more.
    Sent {
        /// The rank.
        to: usize,
    },
    /// A write of this rank has arrived. Writes of a rank arrive in their order.
    Arrived {
        /// The rank.
        from: usize,
        /// The immediate data.
        immediate: u32,
    },
}

/// A write of a piece of the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    /// The rank whose memory is written.
    pub to: usize,
    /// Place of the source in this rank's memory.
    pub from: u64,
    /// Bytes, at least 1.
    pub bytes: u64,
    /// Place in the other rank's memory.
    pub into: u64,
    /// The immediate data.
    pub immediate: u32,
}

/// Connections of a rank to all other ranks.
pub trait Transport {
    /// Starts a write. Returns false if the queue to this rank is full.
    ///
    /// # Errors
    ///
    /// The connection has failed.
    fn write(&mut self, write: &Write) -> Result<bool>;

    /// Starts to write immediate data only, or with an announcement, which the other rank reads by
    /// [`announcement`](Self::announcement). Returns false if the queue is full, or an earlier announcement is still needed.
    ///
    /// # Errors
    ///
    /// The connection has failed.
    fn notify(&mut self, to: usize, announcement: Option<&[u8; ANNOUNCEMENT]>, immediate: u32) -> Result<bool>;

    /// Reads the last announcement of a rank.
    fn announcement(&self, from: usize) -> [u8; ANNOUNCEMENT];

    /// Adds what has happened to `events`. Does not wait.
    ///
    /// # Errors
    ///
    /// A connection has failed. The message names the rank.
    fn poll(&mut self, events: &mut Vec<Event>) -> Result<()>;

    /// Waits until an event may be there, or until the limit.
    ///
    /// # Errors
    ///
    /// Those of the operating system.
    fn wait(&mut self, limit: Duration) -> Result<()>;
}
