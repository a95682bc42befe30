// SPDX-License-Identifier: MIT OR Apache-2.0

//! A device that drives the NIC: measurements, and programs of others as the other end.
//!
//! | module | contents |
//! |---|---|
//! | [`node`] | a NIC in this process, without a guest |
//! | [`executor`] | executors: the CPU, and a GPU |
//! | [`pingpong`] | the measurement with these |
//! | [`hardware`] | the NIC and the accelerator of a guest |
//! | [`accel`] | the executor on the emulated accelerator, in a guest |
//! | [`perftest`] | the other end of `ib_send_bw` of perftest |
//! | [`two_nodes`] | the measurement of two guests: driven by the processor, or by the accelerator |
//! | [`report`], [`page`] | its report, as JSON and as an HTML page |

pub mod accel;
pub mod executor;
pub mod hardware;
pub mod node;
pub mod page;
pub mod perftest;
pub mod pingpong;
pub mod report;
pub mod two_nodes;
