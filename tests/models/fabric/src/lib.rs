// SPDX-License-Identifier: MIT OR Apache-2.0

//! Processes that serve device models to QEMU guests: the configuration of a fabric, and what serves its devices.
//!
//! [`config`] describes guests, their devices and the switches between them. [`serving`] serves a device at a socket to one
//! client after another and ends all of them in order. [`control`] answers questions about a device from outside of its
//! guest. The programs `p2pmem-fabric` and `p2pmem-accel` are made of these. `Documentation/testbed/fabric.md` has the
//! formats.

// The README's example is compiled and run with the tests.
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

mod accel;
pub mod config;
pub mod control;
mod nic;
pub mod serving;
pub mod size;
