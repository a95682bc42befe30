// SPDX-License-Identifier: MIT OR Apache-2.0

//! The recorder: streams of blocks from device memory to drives, and back.
//!
//! | module | contents |
//! |---|---|
//! | [`node`] | a storage node: its store, its sessions, and its state |
//! | [`store`] | LUNs, streams, channels, and recordings of a storage node, on the file systems of its drives |
//! | `web` | the management of a storage node in the browser (feature `web`) |
//!
//! `Documentation/design/recorder.md` describes the design.

pub mod node;
pub mod store;
#[cfg(feature = "web")]
pub mod web;
