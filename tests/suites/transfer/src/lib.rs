// SPDX-License-Identifier: MIT OR Apache-2.0

//! The transfer suite between guests.
//!
//! | module | contents |
//! |---|---|
//! | [`fpga`] | the stream of the emulated FPGA as a source of `p2pmem-perf stream` |
//! | [`bed`] | two nodes with p2pmem, and `p2pmem-perf` between them |
//! | [`decomposition`] | the parts of a WRITE's latency |
//! | [`report`] | the report of the demo |
//! | [`aims`] | the bounds of every number of the report |
//! | [`tables`] | the report as tables for a terminal |

pub mod aims;
pub mod bed;
pub mod decomposition;
pub mod fpga;
pub mod report;
pub mod tables;
