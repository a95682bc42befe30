// SPDX-License-Identifier: MIT OR Apache-2.0

//! The recorder: streams of blocks from device memory to drives, and back.
//!
//! | module | contents |
//! |---|---|
//! | [`store`] | LUNs, streams, channels, and recordings of a storage node, on the file systems of its drives |
//! | [`memory`] | buffers of blocks, in device memory or host memory |
//! | [`engine`] | between buffers and the store: io_uring, commits, acknowledgements |
//! | [`control`] | the control connection, and the messages by RDMA |
//! | [`status`] | the state of a storage node, as programs and people see it |
//! | [`node`] | the storage node: its store, and what it knows of its sessions |
//! | [`serve`] | the sessions of a storage node: recording and playback by RDMA |
//! | [`client`] | the accelerator node: recording and playback by a storage node |
//! | [`local`] | the accelerator node: recording and playback on drives that its kernel attached by NVMe over Fabrics |
//! | [`metrics`] | the state of a storage node for Prometheus |
//! | `web` | the management of a storage node in the browser (feature `web`) |
//! | [`cli`], `run` | the program |
//!
//! `Documentation/design/recorder.md` describes the design.

pub mod cli;
pub mod client;
pub mod control;
pub mod engine;
pub mod local;
pub mod memory;
pub mod metrics;
pub mod node;
mod pace;
mod rdma;
mod run;
pub mod serve;
mod session;
pub mod status;
pub mod store;
mod sys;
mod wait;
#[cfg(feature = "web")]
pub mod web;

pub use run::main;
