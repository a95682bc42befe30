// SPDX-License-Identifier: MIT OR Apache-2.0

//! The accelerator node without a storage node's program: its kernel attached drives of other machines by NVMe over Fabrics,
//! and file systems on them are mounted. The [store](crate::store) is on these file systems, and io_uring transfers blocks
//! between the drives and the buffers of the accelerator, by RDMA.
//!
//! [`record`](record::record) writes each block from the buffer in which the accelerator computed it; [`play`](play::play)
//! reads each block to a buffer, and the accelerator computes on it there. Neither copies a block.

mod drives;
mod fabrics;
pub mod play;
pub mod record;
mod route;

#[cfg(test)]
mod tests;

pub use drives::LocalStore;
pub use fabrics::{Controller, FabricsDrive};
