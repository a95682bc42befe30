// SPDX-License-Identifier: MIT OR Apache-2.0

//! Collectives on emulated accelerators.
//!
//! | module | contents |
//! |---|---|
//! | [`engine`] | reductions and copies in the emulated accelerator |

pub mod engine;
