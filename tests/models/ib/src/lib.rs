// SPDX-License-Identifier: MIT OR Apache-2.0

//! InfiniBand without hardware: the transport of a channel adapter, the links and switches between adapters, and the
//! subnet's administration.
//!
//! A model of a channel adapter owns an [`Engine`] and implements [`Host`] for it. The engine is the transport: it takes
//! work requests from the adapter's queues, cuts messages into packets, acknowledges, retransmits, places what arrives,
//! and completes work in order. It knows no registers and no layouts of queue entries: all that is the host's.
//!
//! Nothing here waits or reads a clock. The adapter's worker thread feeds the engine with what happens ([`doorbell`],
//! [`packets`], [`resume`], [`room`], changes of queue pairs), calls [`run`] as long as there is more to do, and then
//! sleeps until something happens or the time comes that `run` named:
//!
//! ```text
//! loop {
//!     let wait = match engine.run(&mut host) { Next::More => 0, Next::At(time) => time - now, Next::Idle => forever };
//!     match inbox.recv_timeout(wait) {
//!         Doorbell(qpn) => engine.doorbell(qpn),
//!         Delivery(Delivery::Packets(burst)) => engine.packets(&mut host, burst),
//!         Delivery(Delivery::Room) => engine.room(),
//!         ...
//!     }
//! }
//! ```
//!
//! A [`Fabric`] connects the adapters of one process: an adapter [joins](Fabric::join) with a function that puts a
//! [`Delivery`] into its inbox, and gets a [`Port`] to send bursts of packets by. It assigns LIDs, answers subnet
//! administration queries at the subnet manager's LID, and can delay, lose and cut.
//!
//! Numbers (queue pairs, keys, LIDs, packet sequence numbers) are plain integers in the processor's byte order, as the
//! verbs have them; bytes in packets' payload are never interpreted.
//!
//! [`doorbell`]: Engine::doorbell
//! [`packets`]: Engine::packets
//! [`resume`]: Engine::resume
//! [`room`]: Engine::room
//! [`run`]: Engine::run

// The README's example is compiled and run with the tests.
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
    AddressVector, Completion, Fence, Grh, Path, Payload, Piece, Queue, ReceiveWork, Received, Remote, SendFlags,
    SendOp, SendWork, Sge, Status, UdSource,
};
