// SPDX-License-Identifier: MIT OR Apache-2.0

//! The subnet: switches, links with faults, and the ports by which adapters join it.
//!
//! The threads of a process share a [`Fabric`]. Sending takes its lock for one burst and delivers under the lock, which
//! keeps the order of packets on every path. A function that takes a [`Delivery`] therefore only puts it into a queue.

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
pub(crate) use transit::{Flight, Hold};

/// Switches and the links between them. Ports are added by [`Fabric::join`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// Names of the switches.
    pub switches: Vec<String>,
    /// Links between switches, by their names.
    pub links: Vec<(String, String)>,
}

/// An invalid topology or port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// There is no switch, or none of this name.
    #[error("no switch named \"{0}\"")]
    NoSwitch(String),
    /// Two switches or ports have the same name.
    #[error("\"{0}\" is there twice")]
    Twice(String),
    /// No path connects the two switches.
    #[error("no path from switch \"{0}\" to switch \"{1}\"")]
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
    /// GUID, the low half of the port's GID.
    pub guid: u64,
    /// Name of the switch that the port is linked to.
    pub switch: String,
}

/// Faults of a link, in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Faults {
    /// Delay of each packet.
    pub delay: Duration,
    /// Fraction of packets that are lost, 0 to 1.
    pub loss: f64,
    /// The n-th packet from now on is lost; 0: none.
    pub lose_nth: u64,
    /// Fraction of packets that arrive twice, 0 to 1.
    pub duplicate: f64,
    /// Fraction of packets that are swapped with the next one, 0 to 1.
    pub reorder: f64,
}

/// Counters of a link, seen from one end.
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
    /// Number of times that the link went down.
    pub downs: u64,
}

/// Packets that arrive together. They count as in flight until they have been processed.
#[derive(Debug)]
pub struct Burst {
    pub(crate) packets: Vec<Packet>,
    pub(crate) flight: Option<Flight>,
}

/// A message for an adapter's inbox.
#[derive(Debug)]
pub enum Delivery {
    /// Packets, for [`Engine::packets`](crate::Engine::packets).
    Packets(Burst),
    /// A path that was full takes packets again, for [`Engine::path_ready`](crate::Engine::path_ready).
    PathReady,
    /// The port's link came up (`true`) or went down.
    Link(bool),
}

/// The subnet of a process. Clones share it.
#[derive(Clone)]
pub struct Fabric {
    inner: Arc<Inner>,
}

struct Inner {
    network: Mutex<Network>,
    /// Signals a new delayed packet, or the end of the fabric.
    changed: Condvar,
    /// The zero of the fabric's clock.
    start: Instant,
    timer: OnceLock<()>,
}

/// A port of the subnet, owned by the port's adapter. Dropping the port removes it from the subnet.
pub struct Port {
    inner: Arc<Inner>,
    lid: u16,
    gid: Gid,
}

impl Inner {
    fn network(&self) -> MutexGuard<'_, Network> {
        // No operation on the network makes it inconsistent, not even one whose `deliver` panicked.
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
    /// LID of the subnet manager, the destination of subnet administration queries.
    pub const SM_LID: u16 = network::SM_LID;

    /// Creates a subnet. `seed` determines which packets are lost on links with losses.
    ///
    /// # Errors
    ///
    /// The topology is invalid.
    pub fn new(topology: &Topology, seed: u64) -> Result<Self, TopologyError> {
        let inner = Inner {
            network: Mutex::new(Network::new(topology, seed)?),
            changed: Condvar::new(),
            start: Instant::now(),
            timer: OnceLock::new(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Adds a port, whose link is up immediately. `deliver` is called for every delivery, with the fabric's lock held and on any
    /// thread: it may queue and wake, but must neither wait nor call the fabric.
    ///
    /// # Errors
    ///
    /// No such switch, a name or GUID that is in use, or no LID left.
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

    /// Sets the faults of the link between two switches.
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

    /// Returns the packets that the link between two switches has lost and dropped. (Packets and bytes are counted at ports.)
    ///
    /// # Errors
    ///
    /// There is no such link.
    pub fn switch_counters(&self, a: &str, b: &str) -> Result<LinkCounters, TopologyError> {
        self.inner.network().change_switch_link(a, b, |_| {})
    }
}

impl Port {
    /// Returns the port's LID. LIDs of ports start at 2.
    pub fn lid(&self) -> u16 {
        self.lid
    }

    /// Returns the port's GID.
    pub fn gid(&self) -> Gid {
        self.gid
    }

    /// Returns whether the link is up.
    pub fn is_up(&self) -> bool {
        self.inner.network().is_up(self.lid)
    }

    /// Takes the link down or up; [`Delivery::Link`] notifies the adapter.
    pub fn set_up(&self, up: bool) {
        self.inner.network().set_up(self.lid, up);
    }

    /// Sets the faults of the link.
    pub fn set_faults(&self, faults: Faults) {
        self.inner.network().set_faults(self.lid, faults);
    }

    /// Returns the counters of the link.
    pub fn counters(&self) -> LinkCounters {
        self.inner.network().counters(self.lid)
    }

    /// Sends packets into the link, in order. Never waits; the caller checks [`has_space`](Self::has_space) before.
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

    /// Returns whether the path to a LID takes more packets. After a `false`, [`Delivery::PathReady`] follows once it does.
    pub fn has_space(&self, dlid: u16) -> bool {
        self.inner.network().has_space(self.lid, dlid)
    }

    /// Returns whether packets between this port and a LID, in either direction, are in flight or being processed.
    pub fn in_flight(&self, dlid: u16) -> bool {
        self.inner.network().in_flight(self.lid, dlid)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.inner.network().leave(self.lid);
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.inner.changed.notify_all();
    }
}

/// Longest sleep of the timer's thread, which then checks whether the fabric still exists.
const TIMER_LOOKS: Duration = Duration::from_millis(200);

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
                .map_or(TIMER_LOOKS, |due| due.saturating_sub(now).min(TIMER_LOOKS));
            drop(inner.changed.wait_timeout(network, wait));
        }
    });
    if let Err(error) = started {
        warn!(%error, "no thread for delayed packets: they stay where they are");
    }
}
