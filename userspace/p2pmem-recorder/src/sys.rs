// SPDX-License-Identifier: MIT OR Apache-2.0

//! All unsafe code of this crate: memory that devices and the kernel access, and io_uring.

#![allow(unsafe_code)]

mod memory;
mod ring;

pub use memory::Memory;
pub use ring::Ring;
