// SPDX-License-Identifier: MIT OR Apache-2.0

//! What programs that move a payload by RDMA share: the kinds of memory, memory of a kind near a NIC and its registration, the
//! NICs that a user names, and values of options.
//!
//! | module | contents |
//! |---|---|
//! | [`kind`] | the kinds of memory |
//! | [`memory`] | memory near a NIC, its registration, and the memory that is available |
//! | [`nic`] | opens NICs by name |
//! | [`value`] | sizes and times on the command line |

pub mod kind;
pub mod memory;
pub mod nic;
pub mod value;
