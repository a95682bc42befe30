// SPDX-License-Identifier: MIT OR Apache-2.0

//! RDMA that a device drives. The CPU posts work requests. Byte code submits them and waits for completions, and the
//! device that made the data executes the byte code.
//!
//! | module | contents |
//! |---|---|
//! | [`bytecode`] | operations, programs, capabilities of an executor |
//! | [`region`] | the memory that byte code names |
//! | [`interpreter`] | the executor on the CPU, which is the meaning of the byte code |
//! | `gpu` | the executor on an NVIDIA GPU, with the feature `cuda` |
//! | [`wqe`], [`cqe`] | work requests and completions in the NIC's format |
//! | [`queue`] | queue pairs and completion queues: post, commit, roll back, peek, poll |
//! | [`memory`] | memory for queues and payload, in the host or in an accelerator |
//! | [`endpoint`] | queue pairs of a NIC |
//! | [`channel`] | put, put with a signal, get, counters, wait, flush |
//! | [`sys`] | host memory, and the kernel's objects |
//!
//! `Documentation/design/async.md` describes the design.

pub mod bytecode;
#[cfg(feature = "verbs")]
pub mod channel;
pub mod cqe;
#[cfg(feature = "verbs")]
pub mod endpoint;
pub mod error;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod interpreter;
#[cfg(feature = "verbs")]
pub mod memory;
#[cfg(feature = "verbs")]
#[doc(hidden)]
pub mod pingpong;
pub mod queue;
pub mod region;
pub mod sys;
pub mod wqe;

pub use error::{Error, Result};
