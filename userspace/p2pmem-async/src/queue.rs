// SPDX-License-Identifier: MIT OR Apache-2.0

//! Queue pairs and completion queues that a peer drives. The code is independent of the memory in which the queues are,
//! and of the kernel: `endpoint` creates the objects of the NIC.

mod cq;
mod qp;

pub use cq::{cq_record_bytes, AsyncCq, Completion, Peek, PeekId};
pub use qp::{AsyncQp, QpLayout, QpParts, DOORBELL_OFFSET, QP_RECORD_BYTES};

#[cfg(test)]
mod tests;
