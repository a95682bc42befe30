// SPDX-License-Identifier: MIT OR Apache-2.0

//! Collective operations between the ranks of a job, with the payload in accelerator memory.
//!
//! | module | contents |
//! |---|---|
//! | [`element`] | the types of elements, the reductions, and the result of a reduction bit for bit |
//! | [`engine`] | what executes reductions and copies: the interface, and the processor |

pub mod element;
pub mod engine;
