// SPDX-License-Identifier: MIT OR Apache-2.0

//! `stream`: a continuous flow of frames from a source to the server's memory.
//!
//! A [`source::Source`] produces frames ([`frame`]) in registered memory of the client. The client ([`client`]) writes
//! each frame to a ring of slots in the server's memory, by RDMA WRITE with immediate data. The server ([`server`])
//! gets a completion for each frame, verifies the frame on request, and writes the number of frames that it has handled,
//! its credit, to a word of the client's memory by RDMA WRITE. The client never writes to a slot that the server has
//! not handled. The slots of the source are the queue between the source and the sender: a source that has no free
//! slot drops frames and counts them, or waits if it has no rate.
//!
//! [`synthetic`] is the built-in source. Other programs pass their own source to [`client::send`].

mod args;
pub mod client;
pub mod frame;
pub mod pace;
pub mod protocol;
pub mod rate;
pub mod report;
pub mod server;
pub mod source;
pub mod synthetic;

pub use args::StreamArgs;

/// What an error of an access to the memory of frames means.
const REVOKED: &str = "the memory of the frames was revoked: was its provider unpublished, or its device removed?";
