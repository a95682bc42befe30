// SPDX-License-Identifier: GPL-2.0

//! Memory: providers, how their memory is allocated and cleared, and buffers.
//!
//! The traits by which later layers are notified of buffers are in [`traits`].

pub(crate) mod buffer;
pub(crate) mod memory;
pub(crate) mod own;
pub(crate) mod provider;
pub(crate) mod traits;
pub(crate) mod walk;
