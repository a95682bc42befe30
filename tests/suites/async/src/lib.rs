// SPDX-License-Identifier: MIT OR Apache-2.0

//! Measurements of a device that drives the NIC.
//!
//! | module | contents |
//! |---|---|
//! | [`node`] | a NIC in this process, without a guest |
//! | [`executor`] | executors: the CPU, and a GPU |
//! | [`pingpong`] | the measurement with these |
//! | [`accel`] | the executor on the emulated accelerator, in a guest |
//! | [`two_nodes`] | the measurement of two guests: driven by the processor, or by the accelerator |
//! | [`report`], [`page`] | its report, as JSON and as an HTML page |

pub mod accel;
pub mod executor;
pub mod node;
pub mod page;
pub mod pingpong;
pub mod report;
pub mod two_nodes;
