// SPDX-License-Identifier: MIT OR Apache-2.0

//! The C interface to p2pmem: `libp2pmem.so`, `p2pmem.h` and a pkg-config file.
//!
//! Functions return 0, a count or a descriptor, or a negative errno; [`sys::p2pmem_last_error`] says in words what failed
//! and why, for each thread. Handles are opaque. A handle may be used from any thread, but not while another one frees
//! it. No panic crosses the boundary: it ends as -EIO.
//!
//! The header is made from [`sys`] by the script `generate` and committed. Everything here that is safe Rust is in
//! `call`; `sys` is what C sees.

mod call;
pub mod sys;
