// SPDX-License-Identifier: MIT OR Apache-2.0

//! Collectives on emulated accelerators.
//!
//! | module | contents |
//! |---|---|
//! | [`engine`] | reductions and copies in the emulated accelerator |
//! | [`bed`] | nodes with p2pmem, and the ranks of a job on them |
//! | [`sgd`] | trainings between nodes, beside the same training on one processor |
//! | [`pipeline`] | pipeline-parallel trainings: bytes and bubble beside the formulas |
//! | [`kv`] | the cache of keys and values of an inference on two nodes |
//! | [`slurm`] | jobs of a Slurm cluster, which hands out bytes of the accelerators |
//! | [`report`], [`page`] | the report of the demo and its aims, as JSON and as an HTML page |

pub mod bed;
pub mod engine;
pub mod kv;
pub mod page;
pub mod pipeline;
pub mod report;
pub mod sgd;
pub mod slurm;
