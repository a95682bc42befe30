// SPDX-License-Identifier: MIT OR Apache-2.0

//! Device models of the test bed. Each is a library, tested here without an emulator, and a process of its own.

pub mod accel;
pub mod control;
pub mod fabric;
pub mod mlx5;
pub mod serving;
pub mod size;
pub mod worker;
