// SPDX-License-Identifier: MIT OR Apache-2.0

//! Server of the vfio-user protocol: a PCI device as a process beside QEMU.
//!
//! A device model implements [`Device`]: its configuration space (built by [`ConfigBuilder`]), its regions, the effects
//! of register reads and writes, and reset. [`serve`] implements the protocol for the device on one connection. The
//! device's own activity uses its [`Bus`]: [`Dma`] transfers bytes to and from bus addresses, [`Irqs`] raises interrupts.
//!
//! Threads: the thread that calls [`serve`] replies to the client and calls the device's methods. DMA belongs on a thread
//! of the device: some memory is accessed by messages to the client, which may itself wait for the reply to a register
//! access. [`Dma`] rejects DMA by message on the serving thread, and delays it on other threads while an access is being
//! answered.
//!
//! The client is not trusted. The library checks every length, index and address in a message, replies to an invalid
//! message with an error, and closes a connection whose messages cannot be parsed.

// Doctests include the example of the README.
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

pub mod client;
mod config;
mod device;
mod dma;
mod irq;
mod memory;
mod peers;
mod posted;
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
