// SPDX-License-Identifier: GPL-2.0

//! Memory: providers, their memory and how it is cleared, and buffers; and the traits by which later layers are told of them.

pub(crate) mod buffer;
pub(crate) mod memory;
pub(crate) mod provider;
pub(crate) mod traits;
pub(crate) mod walk;
