// SPDX-License-Identifier: MIT OR Apache-2.0

//! InfiniBand without hardware: the transport of a channel adapter, the links and switches between adapters, and subnet
//! administration.
//!
//! A model of a channel adapter owns an [`Engine`] and implements [`Host`] for it. The engine is the transport: it
//! takes work requests from the adapter's queues, segments messages into packets, acknowledges, retransmits, places
//! received data in memory, and completes work requests in order. The engine knows no registers and no layouts of queue
//! entries: these belong to the host.
//!
//! No call waits or reads a clock. The adapter's worker thread passes events to the engine ([`doorbell`], [`packets`],
//! [`resume`], [`path_ready`], changes of queue pairs), calls [`run`] while more work is pending, and then sleeps until
//! the next event or until the time that `run` returned:
//!
//! ```text
//! loop {
//!     let wait = match engine.run(&mut host) { Next::More => 0, Next::At(time) => time - now, Next::Idle => forever };
//!     match inbox.recv_timeout(wait) {
//!         Doorbell(qpn) => engine.doorbell(qpn),
//!         Delivery(Delivery::Packets(burst)) => engine.packets(&mut host, burst),
//!         Delivery(Delivery::PathReady) => engine.path_ready(),
//!         ...
//!     }
//! }
//! ```
//!
//! A [`Fabric`] connects the adapters of one process. An adapter [joins](Fabric::join) with a function that puts a
//! [`Delivery`] into the adapter's inbox, and gets a [`Port`] that sends bursts of packets. The fabric assigns LIDs,
//! answers subnet administration queries at the subnet manager's LID, and can delay packets, lose packets and cut
//! links.
//!
//! Numbers (queue pairs, keys, LIDs, packet sequence numbers) are plain integers in the processor's byte order, as in
//! the verbs. The engine never interprets payload bytes.
//!
//! [`doorbell`]: Engine::doorbell
//! [`packets`]: Engine::packets
//! [`resume`]: Engine::resume
//! [`path_ready`]: Engine::path_ready
//! [`run`]: Engine::run

// The tests compile and run the example in the README.
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

mod attributes;
mod engine;
mod fabric;
mod host;
mod packet;
mod psn;
#[cfg(test)]
mod sim;
mod work;

pub use attributes::{
    AccessFlags, Modify, ModifyError, Mtu, PortAttributes, QpAttributes, QpConfig, ReceiveFrom, Service, SrqConfig,
    State,
};
pub use engine::{Counters, Engine, Next};
pub use fabric::{Burst, Delivery, Fabric, Faults, LinkCounters, Port, PortConfig, Topology, TopologyError};
pub use host::{Access, Atomic, Event, Fault, Fetched, Host, Rights};
pub use packet::{Gid, Packet};
pub use work::{
    AddressVector, Completion, Fence, Grh, Path, Payload, Queue, ReceiveWork, Received, Remote, Segment, SendFlags,
    SendOp, SendWork, Sge, Status, UdSource,
};
