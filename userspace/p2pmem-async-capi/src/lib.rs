// SPDX-License-Identifier: MIT OR Apache-2.0

//! The C interface to p2pmem-async: `libp2pmem-async.so`, `p2pmem-async.h` and a pkg-config file.
//!
//! Functions return 0, a count or a descriptor, or a negative errno. [`sys::p2pmem_async_last_error`] returns a message
//! about the last failure of the calling thread. Handles are opaque. A handle may be used from any thread, but not while
//! another thread frees or changes it. A panic does not cross the boundary; the call returns -EIO.
//!
//! The script `generate` creates the header from [`sys`], and the header is committed. `sys` has the C interface,
//! `call` all parts that are safe Rust.

mod call;
pub mod sys;
