// SPDX-License-Identifier: MIT OR Apache-2.0

//! What a guest and the VM runner share: the [`wire`] protocol between the runner and the guest's init, the names of
//! the topology's [`devices`] as the guest sees them, the [`network`] of several guests, and the [`host`] channel by which a program in the guest asks the
//! runner for things only the host can do.

pub mod cases;
pub mod devices;
pub mod host;
pub mod limits;
pub mod network;
pub mod sys;
pub mod verbs;
pub mod wire;
