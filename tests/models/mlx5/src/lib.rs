// SPDX-License-Identifier: MIT OR Apache-2.0

//! Model of a ConnectX network adapter with one InfiniBand port, for the kernel's mlx5 drivers.
//!
//! The driver and the adapter share a command queue, event queues (EQs), completion queues (CQs) and work queues in
//! host memory. Their layouts come from the kernel's headers ([`layout`]). The thread that serves the emulator answers
//! register accesses (doorbells, health counter). Two workers per adapter do the rest: the transport worker handles
//! queue pairs and moves payload, the command worker handles commands and UMR work requests. Two workers are necessary
//! because a memory key can change while payload that uses the key is in flight (`adapter.rs`). Each worker reads an
//! inbox with doorbells, packets from the subnet, and requests from outside of the guest.
//!
//! Crate `p2pmem-ib` implements the InfiniBand transport; this crate implements its `Host` trait.

// Compile and run the README's example as a doctest.
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

mod adapter;
mod caps;
mod command;
mod counters;
mod cq;
mod cqe;
mod eq;
mod front;
mod hold;
mod host;
mod inbox;
pub mod layout;
pub mod mkey;
mod model;
mod qp;
mod registers;
mod ring;
mod srq;
mod table;
mod trace;
mod wqe;

pub use counters::AdapterCounters;
pub use front::{DEVICE_ID, Handle, Nic, NoAnswer, Report, Settings, Status, VENDOR_ID};
pub use hold::{HoldRequest, HoldStatus};
pub use registers::VECTORS;
pub use trace::{MAX_STEPS, Point, Step, Steps};
