// SPDX-License-Identifier: MIT OR Apache-2.0

//! The recorder: streams of blocks from device memory to drives, and back.
//!
//! | module | contents |
//! |---|---|
//! | [`engine`] | recording and playback between block memory and the store, by io_uring |
//! | [`memory`] | buffers of blocks, in device memory near NIC and drives or in host memory |
//! | [`store`] | LUNs, streams, channels, and recordings of a storage node, on the file systems of its drives |
//!
//! `Documentation/design/recorder.md` describes the design.

pub mod engine;
pub mod memory;
pub mod store;
mod sys;
