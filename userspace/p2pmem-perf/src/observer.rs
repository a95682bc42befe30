// SPDX-License-Identifier: MIT OR Apache-2.0

//! What a measurement reports while it runs, and how its caller stops it.

use anyhow::Result;

use crate::report::{Report, SizeResult};

/// Receives what a measurement reports. A method that fails ends the measurement with its error: the other side is
/// notified, and all memory is given back. All methods are called on the thread that measures, and should return soon: messages
/// stay in flight meanwhile, but the other side waits for signs of life.
pub trait Observer {
    /// The measurement waits, or messages are in flight. Called several times a second, so that a caller who wants to end
    /// the measurement returns an error here; the error says who stopped it.
    ///
    /// # Errors
    ///
    /// The measurement must end.
    fn proceed(&self) -> Result<()> {
        Ok(())
    }

    /// Both sides are ready. `report` has no results yet.
    ///
    /// # Errors
    ///
    /// The measurement must end.
    fn ready(&self, report: &Report) -> Result<()> {
        let _ = report;
        Ok(())
    }

    /// Messages of `bytes` bytes start: `messages` of them on each NIC.
    ///
    /// # Errors
    ///
    /// The measurement must end.
    fn size_starts(&self, bytes: u64, messages: u64) -> Result<()> {
        let _ = (bytes, messages);
        Ok(())
    }

    /// So many messages of the size are done on each NIC, in the order of the report's NICs. Called several times a second.
    ///
    /// # Errors
    ///
    /// The measurement must end.
    fn progress(&self, done: &[u64]) -> Result<()> {
        let _ = done;
        Ok(())
    }

    /// All messages of a size are done.
    ///
    /// # Errors
    ///
    /// The measurement must end.
    fn size_ends(&self, result: &SizeResult) -> Result<()> {
        let _ = result;
        Ok(())
    }
}

/// Observes nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unobserved;

impl Observer for Unobserved {}
