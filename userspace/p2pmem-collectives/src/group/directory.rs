// SPDX-License-Identifier: MIT OR Apache-2.0

//! The directory of a job, by which its ranks find each other.

use std::time::Duration;

use anyhow::Result;

/// Gives small values of each rank of a job to all ranks. The directory is trusted: the secret of the job goes through it.
pub trait Directory: Send {
    /// Returns the number of this rank, less than [`ranks`](Self::ranks).
    fn rank(&self) -> usize;

    /// Returns the number of ranks of the job, at least 1.
    fn ranks(&self) -> usize;

    /// Gives `own` to all ranks, and returns the values of all ranks in their order. Every rank calls this function the same
    /// number of times.
    ///
    /// # Errors
    ///
    /// A rank did not call the function within the limit. The error names the missing ranks.
    fn exchange(&mut self, own: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>>;
}
