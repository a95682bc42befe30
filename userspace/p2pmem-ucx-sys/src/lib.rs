// SPDX-License-Identifier: MIT OR Apache-2.0

//! The part of UCX's protocol library (ucp) that one-sided transfers take, loaded at run time.
//!
//! | type | contents |
//! |---|---|
//! | [`Context`] | UCX with a choice of devices and transports |
//! | [`Memory`] | a part of a [`Span`](p2pmem_verbs::Span) that UCX has registered, and its key for other nodes |
//! | [`Worker`] | progress of all transfers, and the address for other nodes |
//! | [`Endpoint`] | the connection to a worker of another node |
//! | [`RemoteKey`] | registered memory of that node: put and get |
//! | [`Request`] | a put, get, or flush that is in progress |
//!
//! The library libucp is loaded by the first context, and is never unloaded. UCX's own messages are off unless the environment
//! has `UCX_LOG_LEVEL`: UCX prints them on standard output. The library sets handlers of signals when it is loaded, and this
//! crate puts the program's own handlers back.
//!
//! # Threads
//!
//! A lock of the context serializes all calls, so all types may be used by several threads. UCX has a thread of its own for
//! the events of connections.
//!
//! # Both nodes must trust each other
//!
//! UCX parses an address ([`Endpoint::new`]) and a key ([`Endpoint::key`]) without a length, and trusts what they say. The
//! bytes that this crate exchanges have a limit, the version of UCX, and a checksum, so bytes that are damaged, cut off, or of
//! another version are refused. A node that forges them can corrupt the memory of the process. So both functions are unsafe:
//! exchange the bytes only with nodes that may have the rights of this process.
//!
//! # Example
//!
//! ```no_run
//! use p2pmem_ucx_sys::{Context, Endpoint, Memory, Options, Worker};
//! use p2pmem_verbs::Span;
//!
//! # fn exchange(own: Vec<u8>) -> Vec<u8> { own }
//! # fn receive() -> (Vec<u8>, u64) { (Vec::new(), 0) }
//! let context = Context::new(&Options::new("mlx5_0:1", "rc"))?;
//! let memory = Memory::map(&context, &Span::host(4096)?, 0, 4096)?;
//! let worker = Worker::new(&context)?;
//! // SAFETY: the other node is trusted, and sends what its worker and its memory return.
//! let endpoint = unsafe { Endpoint::new(&worker, &exchange(worker.address()?))? };
//! let (key, address) = receive(); // the other node's Memory::key() and Memory::address()
//! // SAFETY: as above.
//! let key = unsafe { endpoint.key(&key)? };
//!
//! key.put(&memory, 0, 4096, address)?;
//! let flush = endpoint.flush();
//! while flush.result().is_none() {
//!     worker.progress();
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![allow(unsafe_code)]

mod abi;
mod context;
mod endpoint;
mod error;
mod functions;
mod memory;
mod packed;
mod worker;

#[cfg(test)]
mod tests;

pub use context::{Context, Options};
pub use endpoint::{Endpoint, RemoteKey, Request};
pub use error::UcxError;
pub use memory::Memory;
pub use packed::MAX_PACKED;
pub use worker::Worker;

/// A result with an error of UCX.
pub type Result<T> = std::result::Result<T, UcxError>;
