// SPDX-License-Identifier: MIT OR Apache-2.0

//! A ConnectX network adapter with an InfiniBand port, as the kernel's mlx5 drivers know it.
//!
//! The driver and the adapter talk through memory: a command queue, event queues, completion queues and work queues, whose
//! layouts are the kernel's own ([`layout`]). Register accesses are few (doorbells, a health counter) and are answered on
//! the thread that serves the emulator; everything else is the business of two workers per adapter: one for queue pairs and
//! the payload that they move, one for commands and changes of memory keys, so that payload can be in flight while the key
//! changes by which it is moved (`adapter.rs`). Each is fed by an inbox: doorbells, packets from the subnet, questions from
//! outside.
//!
//! What travels between adapters, and how it is made reliable, is in crate `p2pmem-ib`; this is its host.

// The README's example is compiled and run with the tests.
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
mod wqe;

pub use counters::{Machinery, Payload};
pub use front::{Bytes, DEVICE_ID, Handle, Nic, NoAnswer, Report, Settings, Status, VENDOR_ID};
pub use hold::{HoldRequest, HoldStatus};
pub use registers::VECTORS;
