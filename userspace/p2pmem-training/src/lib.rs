// SPDX-License-Identifier: MIT OR Apache-2.0

//! Training between the ranks of a job.

pub mod checkpoint;
pub mod digits;
#[cfg(test)]
mod local;
pub mod network;
pub mod outcome;
mod random;
pub mod reference;
pub mod settings;
pub mod state;
pub mod synchronous;
