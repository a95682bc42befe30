// SPDX-License-Identifier: MIT OR Apache-2.0

//! Processes that serve device models to QEMU guests: the configuration of a fabric, and the servers of its devices.
//!
//! [`config`] describes guests, their devices, and the switches between them. [`serving`] serves a device at a socket
//! to one client after another, and ends all connections in order on a signal. [`control`] handles requests about a
//! device from outside of its guest. [`logging`] starts the log. The programs `p2pmem-fabric` and `p2pmem-accel` use
//! these modules.
//! `Documentation/testbed/fabric.md` describes the formats.

// Doctests include the example of the README.
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

mod accel;
pub mod config;
pub mod control;
mod fpga;
pub mod logging;
mod nic;
pub mod serving;
pub mod size;
