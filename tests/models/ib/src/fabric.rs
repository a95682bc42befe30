// SPDX-License-Identifier: MIT OR Apache-2.0

//! The subnet: switches, links with injected faults, and the ports of adapters.
//!
//! Threads of one process share a [`Fabric`]. [`Port::send`] takes the lock for one burst and delivers the burst under
//! the lock, which keeps packets of each path in order. Therefore a function that takes a [`Delivery`] only queues the
//! delivery.

pub(crate) mod network;
mod rate;
mod sa;
mod transit;

use std::fmt;
use std::num::NonZeroU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::packet::{Gid, Packet};
use network::Network;
pub(crate) use transit::{BusyGuard, InFlight};

/// Switches and the links between switches. [`Fabric::join`] adds ports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// Names of the switches.
    pub switches: Vec<String>,
    /// Links between switches, as pairs of switch names.
    pub links: Vec<(String, String)>,
}

/// The reason for which a topology or a port is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// The topology has no switch, or none with this name.
    #[error("no switch named \"{0}\"")]
    NoSwitch(String),
    /// A name, a link or a GUID occurs twice.
    #[error("duplicate name, link or GUID: \"{0}\"")]
    Duplicate(String),
    /// No path connects the two switches.
    #[error("no path from switch \"{0}\" to switch \"{1}\"")]
    Unconnected(String, String),
    /// No link connects the two switches directly.
    #[error("there is no link between switch \"{0}\" and switch \"{1}\"")]
    NotLinked(String, String),
    /// All unicast LIDs are in use.
    #[error("all unicast LIDs are in use")]
    NoLid,
}

/// Configuration of a port for [`Fabric::join`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortConfig {
    /// Name for logs and counters.
    pub name: String,
    /// GUID: the lower 64 bits of the port's GID.
    pub guid: u64,
    /// Name of the switch that the port is connected to.
    pub switch: String,
    /// Rate of the port's link in each direction, in bytes of packets with their headers. `None` means that a packet takes
    /// no time.
    pub bytes_per_second: Option<NonZeroU64>,
}

/// Faults to inject on a link, in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Faults {
    /// Delay of each packet.
    pub delay: Duration,
    /// Probability that a packet is lost, 0 to 1.
    pub loss: f64,
    /// The n-th packet from now on is lost. 0 disables the fault.
    pub lose_nth: u64,
    /// Probability that a packet is duplicated, 0 to 1.
    pub duplicate: f64,
    /// Probability that a packet is exchanged with the next one, 0 to 1.
    pub reorder: f64,
}

/// Counters of a link, as seen from one end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LinkCounters {
    /// Packets sent to the link.
    pub tx_packets: u64,
    /// Bytes sent to the link, including headers.
    pub tx_bytes: u64,
    /// Packets received from the link.
    pub rx_packets: u64,
    /// Bytes received from the link, including headers.
    pub rx_bytes: u64,
    /// Packets that the port sent to itself. They do not use the link, and the other counters do not count them.
    pub loopback_packets: u64,
    /// Bytes of these packets, including headers.
    pub loopback_bytes: u64,
    /// Packets lost by injected faults, in both directions.
    pub lost: u64,
    /// Packets dropped because the link was down or the destination was unknown, in both directions.
    pub dropped: u64,
    /// Number of times that the link went down.
    pub downs: u64,
}

/// Packets that arrive together. They count as in flight until they are processed.
#[derive(Debug, Default)]
pub struct Burst {
    pub(crate) packets: Vec<Packet>,
    pub(crate) in_flight: Option<InFlight>,
}

/// An entry for the inbox of an adapter.
#[derive(Debug)]
pub enum Delivery {
    /// Packets, for [`Engine::packets`](crate::Engine::packets).
    Packets(Burst),
    /// A path that was full accepts packets again, for [`Engine::path_ready`](crate::Engine::path_ready).
    PathReady,
    /// The link of the port came up (`true`) or went down (`false`).
    Link(bool),
}

/// The subnet of a process. All clones refer to the same subnet.
#[derive(Clone)]
pub struct Fabric {
    inner: Arc<Inner>,
}

struct Inner {
    network: Mutex<Network>,
    /// Signaled when the next packet is due earlier, and when a handle of the fabric is dropped.
    changed: Condvar,
    /// Time 0 of the fabric.
    start: Instant,
    timer: OnceLock<()>,
}

/// A port of the subnet, owned by an adapter. Dropping a `Port` removes the port from the subnet.
pub struct Port {
    inner: Arc<Inner>,
    lid: u16,
    gid: Gid,
}

impl Inner {
    fn network(&self) -> MutexGuard<'_, Network> {
        // A poisoned lock is usable: every operation keeps the network consistent, even if `deliver` panics.
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

    /// Creates a subnet. `seed` initializes the random decisions of injected faults.
    ///
    /// # Errors
    ///
    /// [`TopologyError`] if the topology is invalid.
    pub fn new(topology: &Topology, seed: u64) -> Result<Self, TopologyError> {
        let inner = Inner {
            network: Mutex::new(Network::new(topology, seed)?),
            changed: Condvar::new(),
            start: Instant::now(),
            timer: OnceLock::new(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Adds a port. Its link is up at once. `deliver` is called for every delivery, on any thread and with the fabric's
    /// lock held: it may queue the delivery and wake a thread, but must not wait or call the fabric.
    ///
    /// # Errors
    ///
    /// Unknown switch, name or GUID in use, or no free LID.
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

    /// Takes the link between two switches up or down.
    ///
    /// # Errors
    ///
    /// No such link.
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
    /// No such link.
    pub fn set_switch_faults(&self, a: &str, b: &str, faults: Faults) -> Result<(), TopologyError> {
        self.inner
            .network()
            .change_switch_link(a, b, |link| link.set_faults(faults))
            .map(drop)
    }

    /// Returns the counters of lost and dropped packets of the link between two switches. (Ports count packets and
    /// bytes.)
    ///
    /// # Errors
    ///
    /// No such link.
    pub fn switch_counters(&self, a: &str, b: &str) -> Result<LinkCounters, TopologyError> {
        self.inner.network().change_switch_link(a, b, |_| {})
    }
}

impl Port {
    /// Returns the LID of the port, which is at least 2.
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

    /// Takes the link up or down. [`Delivery::Link`] notifies the adapter.
    pub fn set_up(&self, up: bool) {
        self.inner.network().set_up(self.lid, up);
    }

    /// Sets the faults of the link.
    pub fn set_faults(&self, faults: Faults) {
        self.inner.network().set_faults(self.lid, faults);
    }

    /// Sets the rate of the link in each direction, see [`PortConfig::bytes_per_second`]. Packets that are on the link keep their times. On a
    /// link that has no rate any more, later packets can overtake them.
    pub fn set_rate(&self, bytes_per_second: Option<NonZeroU64>) {
        let mut network = self.inner.network();
        // Packets that are due came first, also if the timer's thread is late.
        network.deliver_due(self.inner.start.elapsed());
        network.set_rate(self.lid, bytes_per_second);
    }

    /// Returns the counters of the link.
    pub fn counters(&self) -> LinkCounters {
        self.inner.network().counters(self.lid)
    }

    /// Sends packets in order, without waiting. The caller checks [`has_space`](Self::has_space) first.
    pub fn send(&self, packets: Vec<Packet>) {
        let is_earlier = {
            let mut network = self.inner.network();
            let now = self.inner.start.elapsed();
            // Packets that are due came first, also if the timer's thread is late.
            network.deliver_due(now);
            let before = network.next_due();
            network.send(self.lid, packets, now);
            let due = network.next_due();
            due.is_some_and(|due| before.is_none_or(|before| due < before))
        };
        if is_earlier {
            self.inner.timer.get_or_init(|| start_timer(&self.inner));
            self.inner.changed.notify_all();
        }
    }

    /// Returns whether the path to a LID accepts packets. After `false`, [`Delivery::PathReady`] arrives when the path
    /// accepts packets again.
    pub fn has_space(&self, dlid: u16) -> bool {
        // Read with the lock held, so that the times of all calls are in order.
        let mut network = self.inner.network();
        let now = self.inner.start.elapsed();
        network.has_space(self.lid, dlid, now)
    }

    /// Returns whether packets between this port and a LID, in either direction, are in flight or being processed.
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

/// Longest sleep of the timer thread. After each sleep the thread checks whether the fabric still exists.
const MAX_TIMER_SLEEP: Duration = Duration::from_millis(200);

/// Starts the thread that delivers delayed packets. The thread ends with the fabric.
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
