// SPDX-License-Identifier: MIT OR Apache-2.0

//! The ABI of `/dev/p2pmem`: structures, constants and ioctl numbers, and nothing else.
//!
//! Everything but the ioctl numbers is generated from `include/uapi/linux/p2pmem.h` (see the script `generate` beside
//! this crate's manifest) and carries compile-time asserts of its layout; the ioctl numbers, which are C macros that
//! bindgen cannot evaluate, are computed from the same types here. The tests compare all of it with what a C compiler
//! makes of the header.
//!
//! Programs want the crate `p2pmem` rather than this one.
//!
//! ```
//! use p2pmem_sys as sys;
//!
//! let request = sys::p2pmem_request { size: 16 << 20, strategy: sys::P2PMEM_STRATEGY_NEAREST, ..Default::default() };
//! assert_eq!(request.nr_clients, 0);
//! assert_eq!(sys::ioc_size(sys::P2PMEM_IOC_ALLOC) as usize, size_of::<sys::p2pmem_alloc>());
//! ```
#![no_std]

// Names and comments are the C header's own.
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
