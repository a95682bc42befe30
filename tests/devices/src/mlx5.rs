// SPDX-License-Identifier: MIT OR Apache-2.0

//! A ConnectX network adapter with an InfiniBand port, as the kernel's mlx5 drivers know it.

pub mod layout;
pub mod mkey;
// The commands use the rest of it.
#[allow(dead_code)]
mod table;
