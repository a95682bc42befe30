// SPDX-License-Identifier: MIT OR Apache-2.0

//! The subnet: switches, links with faults, and the ports that adapters join it by.
//!
//! A [`Fabric`] is shared by the threads of a process. Sending takes its lock for one burst, and delivers within it,
//! which keeps the order of packets on every way; so a function that takes a [`Delivery`] only puts it into a queue.

pub(crate) mod network;
mod sa;
mod transit;

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::packet::{Gid, Packet};
use network::Network;
pub(crate) use transit::{BusyGuard, InFlight};

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
    #[error("duplicate name, link or GUID: \"{0}\"")]
    Duplicate(String),
    /// No way leads from one switch to another.
    #[error("no path from switch \"{0}\" to switch \"{1}\"")]
    Unconnected(String, String),
    /// All LIDs are in use.
    #[error("all unicast LIDs are in use")]
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

/// Packets that arrive together. They count as being on their way until they have been worked on.
#[derive(Debug)]
pub struct Burst {
    pub(crate) packets: Vec<Packet>,
    pub(crate) in_flight: Option<InFlight>,
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
#[derive(Clone)]
pub struct Fabric {
    inner: Arc<Inner>,
}

struct Inner {
    network: Mutex<Network>,
    /// Something is delayed, or the fabric goes.
    changed: Condvar,
    /// The moment that time is counted from.
    start: Instant,
    timer: OnceLock<()>,
}

/// A port of the subnet, held by the adapter it belongs to. Dropping it leaves the subnet.
pub struct Port {
    inner: Arc<Inner>,
    lid: u16,
    gid: Gid,
}

impl Inner {
    fn network(&self) -> MutexGuard<'_, Network> {
        // No operation on it leaves it half done, not even one whose `deliver` panicked.
        self.network.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").finish_non_exhaustive()
    }
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Port")
            .field("lid", &self.lid)
            .field("gid", &self.gid)
            .finish_non_exhaustive()
    }
}

impl Fabric {
    /// LID of the subnet manager, where subnet administration queries go.
    pub const SM_LID: u16 = network::SM_LID;

    /// A subnet; `seed` decides which packets are lost where a link loses some.
    ///
    /// # Errors
    ///
    /// What is wrong with the topology.
    pub fn new(topology: &Topology, seed: u64) -> Result<Self, TopologyError> {
        let inner = Inner {
            network: Mutex::new(Network::new(topology, seed)?),
            changed: Condvar::new(),
            start: Instant::now(),
            timer: OnceLock::new(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Adds a port, whose link is up at once. `deliver` is called for everything that arrives, with the fabric's lock
    /// held and on any thread: it may queue and wake, but neither wait nor call the fabric.
    ///
    /// # Errors
    ///
    /// No such switch, a name or GUID that is in use, or all unicast LIDs are in use.
    pub fn join(
        &self,
        config: &PortConfig,
        deliver: impl Fn(Delivery) + Send + Sync + 'static,
    ) -> Result<Port, TopologyError> {
        let (lid, gid) = self.inner.network().join(config, Arc::new(deliver))?;
        Ok(Port {
            inner: self.inner.clone(),
            lid,
            gid,
        })
    }

    /// Takes the link between two switches down or up.
    ///
    /// # Errors
    ///
    /// There is no such link.
    pub fn set_switch_link(&self, a: &str, b: &str, up: bool) -> Result<(), TopologyError> {
        self.inner
            .network()
            .change_switch_link(a, b, |link| link.set_up(up))
            .map(drop)
    }

    /// What goes wrong on the link between two switches from now on.
    ///
    /// # Errors
    ///
    /// There is no such link.
    pub fn set_switch_faults(&self, a: &str, b: &str, faults: Faults) -> Result<(), TopologyError> {
        self.inner
            .network()
            .change_switch_link(a, b, |link| link.set_faults(faults))
            .map(drop)
    }

    /// What the link between two switches has lost and dropped. (Packets and bytes are counted at ports.)
    ///
    /// # Errors
    ///
    /// There is no such link.
    pub fn switch_counters(&self, a: &str, b: &str) -> Result<LinkCounters, TopologyError> {
        self.inner.network().change_switch_link(a, b, |_| {})
    }
}

impl Port {
    /// The port's LID, from 2 on.
    pub fn lid(&self) -> u16 {
        self.lid
    }

    /// The port's GID.
    pub fn gid(&self) -> Gid {
        self.gid
    }

    /// Whether the link is up.
    pub fn is_up(&self) -> bool {
        self.inner.network().is_up(self.lid)
    }

    /// Takes the link down or up; the adapter is told by [`Delivery::Link`].
    pub fn set_up(&self, up: bool) {
        self.inner.network().set_up(self.lid, up);
    }

    /// What goes wrong on the link from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.inner.network().set_faults(self.lid, faults);
    }

    /// What the link has carried.
    pub fn counters(&self) -> LinkCounters {
        self.inner.network().counters(self.lid)
    }

    /// Sends packets into the link, in order. Never waits; [`has_room`](Self::has_room) is asked before.
    pub fn send(&self, packets: Vec<Packet>) {
        let delayed = {
            let mut network = self.inner.network();
            let before = network.next_due();
            network.send(self.lid, packets, self.inner.start.elapsed());
            before != network.next_due()
        };
        if delayed {
            self.inner.timer.get_or_init(|| start_timer(&self.inner));
            self.inner.changed.notify_all();
        }
    }

    /// Whether the way to a LID takes more packets. After a `false`, [`Delivery::Room`] comes once it does.
    pub fn has_room(&self, dlid: u16) -> bool {
        self.inner.network().has_room(self.lid, dlid)
    }

    /// Whether packets between this port and a LID, in either direction, are on their way or being worked on.
    pub fn in_flight(&self, dlid: u16) -> bool {
        self.inner.network().in_flight(self.lid, dlid)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.inner.network().remove_port(self.lid);
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.inner.changed.notify_all();
    }
}

/// Longest sleep of the timer's thread: then it sees whether the fabric is still there.
const MAX_TIMER_SLEEP: Duration = Duration::from_millis(200);

/// Starts the thread that delivers delayed packets. It ends with the fabric.
fn start_timer(inner: &Arc<Inner>) {
    let weak = Arc::downgrade(inner);
    let thread = std::thread::Builder::new().name("ib-delay".to_owned());
    let started = thread.spawn(move || {
        while let Some(inner) = weak.upgrade() {
            let mut network = inner.network();
            let now = inner.start.elapsed();
            network.deliver_due(now);
            let wait = network
                .next_due()
                .map_or(MAX_TIMER_SLEEP, |due| due.saturating_sub(now).min(MAX_TIMER_SLEEP));
            drop(inner.changed.wait_timeout(network, wait));
        }
    });
    if let Err(error) = started {
        warn!(%error, "cannot start the thread for delayed packets; delayed packets are not delivered");
    }
}
