// SPDX-License-Identifier: MIT OR Apache-2.0

//! The recorder in guests: its demo, and its tests on real file systems.
//!
//! | module | contents |
//! |---|---|
//! | [`accel`] | the emulated accelerator as the source or the target of blocks |
//! | [`measured`] | what the accelerator node's program measures |
//! | [`report`] | the report of the demo |
//! | [`choices`] | random numbers from a seed, and the payload of blocks |
//! | [`log`] | the log of the kernel's device-mapper target `log-writes` |
//! | [`cut`] | what a drive can have after a power cut, from such a log |
//! | [`marks`] | what was acknowledged, written to the drive itself |
//! | [`recording`] | records blocks until the LUN is full, and checks what a store has |
//! | [`guest`] | file systems, devices, and traces in a guest |

pub mod accel;
pub mod choices;
pub mod cut;
pub mod guest;
pub mod log;
pub mod marks;
pub mod measured;
pub mod recording;
pub mod report;
