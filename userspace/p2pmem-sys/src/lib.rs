// SPDX-License-Identifier: MIT OR Apache-2.0

//! The ABI of `/dev/p2pmem`: structures, constants and ioctl numbers.
//!
//! The script `generate` beside this crate's manifest creates all but the ioctl numbers from
//! `include/uapi/linux/p2pmem.h`, with compile-time asserts of the layout. Ioctl numbers are C macros that bindgen
//! cannot evaluate; this crate computes them from the same types. The tests compare everything with the values of a C
//! compiler.
//!
//! Programs use the crate `p2pmem` instead.
//!
//! ```
//! use p2pmem_sys as sys;
//!
//! let request = sys::p2pmem_request { size: 16 << 20, strategy: sys::P2PMEM_STRATEGY_NEAREST, ..Default::default() };
//! assert_eq!(request.nr_clients, 0);
//! assert_eq!(sys::ioc_size(sys::P2PMEM_IOC_ALLOC) as usize, size_of::<sys::p2pmem_alloc>());
//! ```
#![no_std]

mod addr;
// Names and comments are those of the C header.
#[allow(
    missing_docs,
    non_camel_case_types,
    rustdoc::broken_intra_doc_links,
    rustdoc::invalid_html_tags,
    clippy::all,
    clippy::pedantic
)]
mod bindings;
mod ioctl;

pub use bindings::*;
pub use ioctl::*;
