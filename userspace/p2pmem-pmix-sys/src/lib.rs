// SPDX-License-Identifier: MIT OR Apache-2.0

//! The part of PMIx by which the ranks of a job find each other, loaded at run time: the rank, the number of ranks, and values that a
//! rank publishes for the others.
//!
//! Every function of this crate is safe to call, and every wait has a limit.
#![allow(unsafe_code)]

mod abi;
mod client;
mod error;
#[cfg(test)]
mod header;
mod request;

pub use client::{Client, Pending};
pub use error::{Error, Result};
