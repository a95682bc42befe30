// SPDX-License-Identifier: MIT OR Apache-2.0

//! Shared by the guest and the VM runner: the [`wire`] protocol between the runner and the guest's init, the names of the
//! topology's [`devices`], the [`network`] of several guests, and the [`host`] channel by which a program in the guest sends
//! requests to the runner.

pub mod devices;
pub mod host;
pub mod limits;
pub mod network;
pub mod sys;
pub mod verbs;
pub mod wire;
