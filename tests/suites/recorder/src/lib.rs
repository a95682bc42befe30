// SPDX-License-Identifier: MIT OR Apache-2.0

//! The recorder in guests.

pub mod accel;
pub mod measured;
pub mod report;
