// SPDX-License-Identifier: MIT OR Apache-2.0

//! Server side of the vfio-user protocol: a PCI device as a process beside the emulator.
//!
//! A device model implements [`Device`]: its configuration space (made with [`ConfigBuilder`]), its regions, what reads
//! and writes of registers do, and reset. [`serve`] speaks the protocol for it over one connection. What the device
//! does by itself goes through its [`Bus`]: [`Dma`] moves bytes to and from bus addresses, [`Irqs`] raises interrupts.
//!
//! Threads: the thread that calls [`serve`] answers the client and calls the device's methods. DMA belongs on a thread
//! of the device's own, because some targets are reached by asking the client, which may itself be waiting for the
//! answer to a register access; [`Dma`] refuses such a request from the serving thread and holds it back while an
//! access is being answered.
//!
//! The client is not trusted: every length, index and address in a message is checked, a bad message is answered with an
//! error, and a stream that cannot be understood any more is closed.

// The README's example is compiled and run with the tests.
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

pub mod client;
mod config;
mod device;
mod dma;
mod irq;
mod memory;
mod peers;
pub mod proto;
mod server;
mod stream;
mod sys;
mod worker;

pub use config::{BarKind, ConfigBuilder, ConfigError, ConfigSpace, LinkSpeed, Msix};
pub use device::{Bus, Device, Region};
pub use dma::{Dma, DmaCounts, DmaError, Extent, HOST, MESSAGE, Moved, OTHER_MAPPED, Segment, Target};
pub use irq::{Irqs, Raised};
pub use memory::{Memory, OutOfBounds};
pub use peers::{NameTaken, Peer, Peers};
pub use server::{Listener, ServeError, serve};
pub use worker::{Health, Worker};
