// SPDX-License-Identifier: MIT OR Apache-2.0

//! Collective operations on the memory of accelerators, by RDMA between the ranks of a job.

pub mod group;
pub mod local;
pub mod pmix;
