// SPDX-License-Identifier: MIT OR Apache-2.0

//! Measurements of a device that drives the NIC.
//!
//! | module | contents |
//! |---|---|
//! | [`node`] | a NIC in this process, with a queue pair for a peer |
//! | [`executor`] | the executors of byte code: the CPU, and a GPU |
//! | [`pingpong`] | the ping-pong of two nodes |

pub mod executor;
pub mod node;
pub mod pingpong;
