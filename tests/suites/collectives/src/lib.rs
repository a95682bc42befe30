// SPDX-License-Identifier: MIT OR Apache-2.0

//! Collectives on emulated accelerators.
//!
//! | module | contents |
//! |---|---|
//! | [`engine`] | reductions and copies in the emulated accelerator |
//! | [`bed`] | nodes with p2pmem, and the ranks of a job on them |
//! | [`kv`] | the cache of keys and values of an inference on two nodes |
//! | [`report`] | the report of the demo, and its aims |

pub mod bed;
pub mod engine;
pub mod kv;
pub mod report;
