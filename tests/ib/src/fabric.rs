// SPDX-License-Identifier: MIT OR Apache-2.0

//! The subnet: switches, links with faults, and the ports that adapters join it by.
//!
//! A [`Fabric`] is shared by the threads of a process. Sending takes its lock for one burst, and delivers within it,
//! which keeps the order of packets on every way; so a function that takes a [`Delivery`] only puts it into a queue.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::packet::{Gid, Packet};

/// Switches and the links between them. Ports are added by [`Fabric::join`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// Names of the switches.
    pub switches: Vec<String>,
    /// Links between switches, by their names.
    pub links: Vec<(String, String)>,
}

/// What is wrong with a topology or a port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// There is no switch, or none of this name.
    #[error("no switch named \"{0}\"")]
    NoSwitch(String),
    /// Two have the same name.
    #[error("\"{0}\" is there twice")]
    Twice(String),
    /// No way leads from one switch to another.
    #[error("no way from switch \"{0}\" to switch \"{1}\"")]
    Apart(String, String),
    /// All LIDs are in use.
    #[error("no LID left")]
    NoLid,
}

/// A port that joins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortConfig {
    /// Name, for logs and counters.
    pub name: String,
    /// GUID; makes the port's GID.
    pub guid: u64,
    /// Name of the switch it hangs on.
    pub switch: String,
}

/// What goes wrong on a link, in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Faults {
    /// How long each packet takes.
    pub delay: Duration,
    /// Part of the packets that are lost, 0 to 1.
    pub loss: f64,
    /// The n-th packet from now on is lost; 0: none.
    pub lose_nth: u64,
    /// Part of the packets that arrive twice, 0 to 1.
    pub duplicate: f64,
    /// Part of the packets that change places with the next, 0 to 1.
    pub reorder: f64,
}

/// What a link has carried, as seen from one end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LinkCounters {
    /// Packets sent into it.
    pub tx_packets: u64,
    /// Bytes sent into it, headers included.
    pub tx_bytes: u64,
    /// Packets that came out of it.
    pub rx_packets: u64,
    /// Bytes that came out of it, headers included.
    pub rx_bytes: u64,
    /// Packets lost by injected faults, either direction.
    pub lost: u64,
    /// Packets dropped because the link was down or the destination unknown, either direction.
    pub dropped: u64,
    /// How often it went down.
    pub downs: u64,
}

/// Packets that arrive together. They count as being on their way until this is gone.
#[derive(Debug)]
pub struct Burst {
    pub(crate) packets: Vec<Packet>,
}

/// Something for an adapter's inbox.
#[derive(Debug)]
pub enum Delivery {
    /// Packets, for [`Engine::packets`](crate::Engine::packets).
    Packets(Burst),
    /// There is room again on a way that had none, for [`Engine::room`](crate::Engine::room).
    Room,
    /// The port's link came up (`true`) or went down.
    Link(bool),
}

/// The subnet of a process. Clones are the same subnet.
#[derive(Clone, Debug)]
pub struct Fabric {}

/// A port of the subnet, held by the adapter it belongs to. Dropping it leaves the subnet.
#[derive(Debug)]
pub struct Port {}

#[allow(unused_variables)]
impl Fabric {
    /// LID of the subnet manager, where subnet administration queries go.
    pub const SM_LID: u16 = 1;

    /// A subnet; `seed` decides which packets are lost where a link loses some.
    ///
    /// # Errors
    ///
    /// What is wrong with the topology.
    pub fn new(topology: &Topology, seed: u64) -> Result<Self, TopologyError> {
        todo!("the fabric")
    }

    /// Adds a port, whose link is up at once. `deliver` is called for everything that arrives, with the fabric's lock
    /// held and on any thread: it may queue and wake, but neither wait nor call the fabric.
    ///
    /// # Errors
    ///
    /// No such switch, a name that is in use, or no LID left.
    pub fn join(
        &self,
        config: &PortConfig,
        deliver: impl Fn(Delivery) + Send + Sync + 'static,
    ) -> Result<Port, TopologyError> {
        todo!("the fabric")
    }
}

#[allow(unused_variables)]
impl Port {
    /// The port's LID, from 2 on.
    pub fn lid(&self) -> u16 {
        todo!("the fabric")
    }

    /// The port's GID.
    pub fn gid(&self) -> Gid {
        todo!("the fabric")
    }

    /// Whether the link is up.
    pub fn is_up(&self) -> bool {
        todo!("the fabric")
    }

    /// Takes the link down or up; both ends are told.
    pub fn set_up(&self, up: bool) {
        todo!("the fabric")
    }

    /// What goes wrong on the link from now on.
    pub fn set_faults(&self, faults: Faults) {
        todo!("the fabric")
    }

    /// What the link has carried.
    pub fn counters(&self) -> LinkCounters {
        todo!("the fabric")
    }

    /// Sends packets into the link, in order. Never waits; [`has_room`](Self::has_room) is asked before.
    pub fn send(&self, packets: Vec<Packet>) {
        todo!("the fabric")
    }

    /// Whether the way to a LID takes more packets. After a `false`, [`Delivery::Room`] comes once it does.
    pub fn has_room(&self, dlid: u16) -> bool {
        todo!("the fabric")
    }

    /// Whether packets between this port and a LID, in either direction, are on their way or being worked on.
    pub fn in_flight(&self, dlid: u16) -> bool {
        todo!("the fabric")
    }
}
