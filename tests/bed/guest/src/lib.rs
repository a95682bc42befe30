// SPDX-License-Identifier: MIT OR Apache-2.0

//! The part of the test bed that runs in guests: the [`wire`] protocol between VM runner and init, the topology's
//! [`devices`], the [`network`] of several guests, requests to the [`host`], and the test [`cases`].

pub mod cases;
pub mod devices;
pub mod host;
pub mod network;
pub mod patience;
pub mod sys;
pub mod verbs;
pub mod wire;
