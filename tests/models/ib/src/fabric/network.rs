// SPDX-License-Identifier: MIT OR Apache-2.0

//! The subnet without threads and without a clock: ports, switches, links, routes, and the rates and faults of links. The
//! caller passes the time.
//!
//! A packet on links with rates is in the queue of delayed packets at up to three [places](Place), one after another: on the
//! sender's link, in the switches if a fault delays it, and on the receiver's link. A switch forwards a packet when it
//! has arrived completely. Packets are handled in the order of their times, so the packets of several senders share the
//! receiver's link in the order in which they arrive at its switch.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use tracing::{debug, info};

use super::rate::Transmitter;
use super::sa::{PortRecord, SubnetAdministrator};
use super::transit::{Deliver, PortPath};
use super::{Burst, Delivery, Faults, LinkCounters, PortConfig, Topology, TopologyError};
use crate::packet::{Gid, MULTICAST_LID, PERMISSIVE_LID, Packet};

/// LID of the subnet manager.
pub(crate) const SM_LID: u16 = 1;

/// A link between a port and a switch, or between two switches.
#[derive(Debug)]
struct Link {
    /// Switches at both ends. For the link of a port, both are the port's switch.
    ends: (usize, usize),
    up: bool,
    faults: Faults,
    /// Packets since the faults were set, for [`Faults::lose_nth`].
    packets_seen: u64,
    counters: LinkCounters,
    random: Random,
    /// The two directions of a port's link, if it has a rate: [`TO_SWITCH`] and [`TO_PORT`].
    transmitters: Option<[Transmitter; 2]>,
}

/// The direction of a port's link from the port.
const TO_SWITCH: usize = 0;
/// The direction of a port's link to the port.
const TO_PORT: usize = 1;

/// A port that joined the subnet.
struct SubnetPort {
    name: String,
    gid: Gid,
    switch: usize,
    link: usize,
    deliver: Deliver,
}

/// A burst that a link delays.
struct Delayed {
    from: u16,
    to: u16,
    burst: Burst,
    place: Place,
}

/// Where a delayed burst is until it is due.
enum Place {
    /// On the sender's link, which has a rate. The links delay it by this time afterwards.
    SenderLink(Duration),
    /// Between the links of the two ports.
    Switches,
    /// On the receiver's link, which has a rate.
    ReceiverLink,
}

/// Accumulated effects of all links on the route of a packet.
struct LinkEffects {
    delay: Duration,
    copies: usize,
    swap: bool,
}

pub(crate) struct Network {
    switches: Vec<String>,
    /// Links by number. The number of a link never changes.
    links: BTreeMap<usize, Link>,
    /// Links of the shortest route between two switches; empty for a switch and itself.
    routes: HashMap<(usize, usize), Vec<usize>>,
    ports: BTreeMap<u16, SubnetPort>,
    paths: HashMap<(u16, u16), Arc<PortPath>>,
    delayed: BTreeMap<(Duration, u64), Delayed>,
    /// For each pair of ports with bursts in [`Place::Switches`]: their number, and when the last one is due.
    last_due: HashMap<(u16, u16), (usize, Duration)>,
    sequence: u64,
    sa: SubnetAdministrator,
    seed: u64,
}

impl Network {
    pub(crate) fn new(topology: &Topology, seed: u64) -> Result<Self, TopologyError> {
        let mut switches: Vec<String> = Vec::new();
        for name in &topology.switches {
            if switches.contains(name) {
                return Err(TopologyError::Duplicate(name.clone()));
            }
            switches.push(name.clone());
        }
        if switches.is_empty() {
            return Err(TopologyError::NoSwitch(String::new()));
        }
        let mut network = Self {
            switches,
            links: BTreeMap::new(),
            routes: HashMap::new(),
            ports: BTreeMap::new(),
            paths: HashMap::new(),
            delayed: BTreeMap::new(),
            last_due: HashMap::new(),
            sequence: 0,
            sa: SubnetAdministrator::default(),
            seed,
        };
        for (a, b) in &topology.links {
            let ends = (network.switch(a)?, network.switch(b)?);
            if ends.0 == ends.1 || network.find_link(ends).is_some() {
                return Err(TopologyError::Duplicate(format!("{a}-{b}")));
            }
            network.add_link(ends);
        }
        network.find_routes();
        for to in 1..network.switches.len() {
            if !network.routes.contains_key(&(0, to)) {
                let [first, last] = [0, to].map(|switch: usize| network.switches[switch].clone());
                return Err(TopologyError::Unconnected(first, last));
            }
        }
        Ok(network)
    }

    fn switch(&self, name: &str) -> Result<usize, TopologyError> {
        let place = self.switches.iter().position(|switch| switch == name);
        place.ok_or_else(|| TopologyError::NoSwitch(name.to_owned()))
    }

    fn add_link(&mut self, ends: (usize, usize)) -> usize {
        let number = self.links.last_key_value().map_or(0, |(last, _)| last + 1);
        let random = Random::new(self.seed ^ (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let link = Link {
            ends,
            up: true,
            faults: Faults::default(),
            packets_seen: 0,
            counters: LinkCounters::default(),
            random,
            transmitters: None,
        };
        self.links.insert(number, link);
        number
    }

    fn find_link(&self, (a, b): (usize, usize)) -> Option<usize> {
        let mut links = self.links.iter();
        links
            .find(|(_, link)| a != b && (link.ends == (a, b) || link.ends == (b, a)))
            .map(|(number, _)| *number)
    }

    /// Computes the shortest routes between switches over links that are up.
    fn find_routes(&mut self) {
        self.routes.clear();
        for from in 0..self.switches.len() {
            self.routes.insert((from, from), Vec::new());
            let mut next = VecDeque::from([from]);
            while let Some(at) = next.pop_front() {
                let so_far = self.routes.get(&(from, at)).cloned().unwrap_or_default();
                for (number, link) in &self.links {
                    let to = match link.ends {
                        (a, b) if a == at => b,
                        (a, b) if b == at => a,
                        _ => continue,
                    };
                    if link.up && !self.routes.contains_key(&(from, to)) {
                        let mut route = so_far.clone();
                        route.push(*number);
                        self.routes.insert((from, to), route);
                        next.push_back(to);
                    }
                }
            }
        }
    }

    pub(crate) fn join(&mut self, config: &PortConfig, deliver: Deliver) -> Result<(u16, Gid), TopologyError> {
        let switch = self.switch(&config.switch)?;
        let gid = Gid::new(Gid::DEFAULT_PREFIX, config.guid);
        if self
            .ports
            .values()
            .any(|port| port.name == config.name || port.gid == gid)
        {
            return Err(TopologyError::Duplicate(config.name.clone()));
        }
        let mut lids = SM_LID + 1..MULTICAST_LID;
        let lid = lids
            .find(|lid| !self.ports.contains_key(lid))
            .ok_or(TopologyError::NoLid)?;
        let link = self.add_link((switch, switch));
        if let Some(link) = self.links.get_mut(&link) {
            link.transmitters = Transmitter::pair(config.bytes_per_second);
        }
        info!(port = config.name, lid, %gid, switch = config.switch, "port joined the subnet");
        self.ports.insert(
            lid,
            SubnetPort {
                name: config.name.clone(),
                gid,
                switch,
                link,
                deliver,
            },
        );
        self.sa.add(PortRecord { lid, gid });
        Ok((lid, gid))
    }

    pub(crate) fn remove_port(&mut self, lid: u16) {
        let Some(port) = self.ports.remove(&lid) else {
            return;
        };
        info!(port = port.name, lid, "port removed from the subnet");
        if let Some(link) = self.links.remove(&port.link) {
            for mut transmitter in link.transmitters.into_iter().flatten() {
                self.wake(transmitter.take_waiting());
            }
        }
        self.sa.remove(lid);
        self.drop_delayed(lid);
        self.paths.retain(|(from, to), _| *from != lid && *to != lid);
    }

    fn port_link(&mut self, lid: u16) -> Option<&mut Link> {
        let link = self.ports.get(&lid)?.link;
        self.links.get_mut(&link)
    }

    pub(crate) fn is_up(&self, lid: u16) -> bool {
        let link = self.ports.get(&lid).and_then(|port| self.links.get(&port.link));
        link.is_some_and(|link| link.up)
    }

    pub(crate) fn counters(&mut self, lid: u16) -> LinkCounters {
        self.port_link(lid).map(|link| link.counters).unwrap_or_default()
    }

    pub(crate) fn set_faults(&mut self, lid: u16, faults: Faults) {
        if let Some(link) = self.port_link(lid) {
            link.set_faults(faults);
        }
    }

    pub(crate) fn set_rate(&mut self, lid: u16, bytes_per_second: Option<NonZeroU64>) {
        let Some(link) = self.port_link(lid) else { return };
        info!(lid, ?bytes_per_second, "link rate changed");
        match (&mut link.transmitters, bytes_per_second) {
            (Some(transmitters), Some(rate)) => transmitters.iter_mut().for_each(|one| one.set_rate(rate)),
            (transmitters, rate) => {
                let before = std::mem::replace(transmitters, Transmitter::pair(rate));
                for mut transmitter in before.into_iter().flatten() {
                    self.wake(transmitter.take_waiting());
                }
            }
        }
    }

    pub(crate) fn set_up(&mut self, lid: u16, up: bool) {
        let Some(link) = self.port_link(lid) else { return };
        if link.set_up(up) {
            info!(lid, up, "link state changed");
            if !up {
                self.drop_delayed(lid);
                for direction in [TO_SWITCH, TO_PORT] {
                    let waiting = self.transmitter(lid, direction).map(Transmitter::clear);
                    self.wake(waiting.unwrap_or_default());
                }
            }
            if let Some(port) = self.ports.get(&lid) {
                (port.deliver)(Delivery::Link(up));
            }
        }
    }

    /// Changes the link between two switches, recomputes all routes and returns the link's counters.
    pub(crate) fn change_switch_link(
        &mut self,
        a: &str,
        b: &str,
        change: impl FnOnce(&mut LinkChange<'_>),
    ) -> Result<LinkCounters, TopologyError> {
        let ends = (self.switch(a)?, self.switch(b)?);
        let number = self
            .find_link(ends)
            .ok_or_else(|| TopologyError::NotLinked(a.to_owned(), b.to_owned()))?;
        let mut counters = LinkCounters::default();
        if let Some(link) = self.links.get_mut(&number) {
            change(&mut LinkChange(link));
            counters = link.counters;
        }
        self.find_routes();
        Ok(counters)
    }

    /// Drops the delayed bursts from and to a port that was removed or whose link went down. Bursts on the link of another port
    /// keep their time on this link, without their packets.
    fn drop_delayed(&mut self, lid: u16) {
        let concerned = |delayed: &Delayed| delayed.from == lid || delayed.to == lid;
        let keys: Vec<_> = self
            .delayed
            .iter()
            .filter(|(_, delayed)| concerned(delayed))
            .map(|(key, _)| *key)
            .collect();
        for key in keys {
            let Some(delayed) = self.delayed.get_mut(&key) else {
                continue;
            };
            let (from, to) = (delayed.from, delayed.to);
            let dropped = delayed.burst.packets.len() as u64;
            match delayed.place {
                Place::SenderLink(_) if from != lid => delayed.burst = Burst::default(),
                Place::ReceiverLink if to != lid => delayed.burst = Burst::default(),
                Place::SenderLink(_) | Place::ReceiverLink => drop(self.delayed.remove(&key)),
                Place::Switches => {
                    self.delayed.remove(&key);
                    self.count_delayed_out(from, to);
                }
            }
            for lid in [from, to] {
                if let Some(link) = self.port_link(lid) {
                    link.counters.dropped += dropped;
                }
            }
        }
    }

    /// Notifies ports: a link for which they waited accepts packets again.
    fn wake(&self, lids: BTreeSet<u16>) {
        for port in lids.iter().filter_map(|lid| self.ports.get(lid)) {
            (port.deliver)(Delivery::PathReady);
        }
    }

    /// Returns one direction of a port's link, if the link has a rate.
    fn transmitter(&mut self, lid: u16, direction: usize) -> Option<&mut Transmitter> {
        self.port_link(lid)?.transmitters.as_mut()?.get_mut(direction)
    }

    /// Handles that a packet left one direction of a port's link at the time `at`.
    fn left_link(&mut self, lid: u16, direction: usize, at: Duration) {
        let ready = self.transmitter(lid, direction).map(|link| link.take_ready(at));
        self.wake(ready.unwrap_or_default());
    }

    fn count_delayed_out(&mut self, from: u16, to: u16) {
        if let Some((count, _)) = self.last_due.get_mut(&(from, to)) {
            *count -= 1;
            if *count == 0 {
                self.last_due.remove(&(from, to));
            }
        }
    }

    fn path(&mut self, from: u16, to: u16) -> Option<&Arc<PortPath>> {
        let port = self.ports.get(&from);
        if port.is_none() && from != SM_LID || !self.ports.contains_key(&to) {
            return None;
        }
        let path = self.paths.entry((from, to)).or_insert_with(|| {
            let deliver = port.map_or_else(|| Arc::new(|_| {}) as Deliver, |port| port.deliver.clone());
            Arc::new(PortPath::new(deliver))
        });
        Some(path)
    }

    pub(crate) fn has_space(&mut self, from: u16, to: u16, now: Duration) -> bool {
        let mut has_space = self.paths.get(&(from, to)).is_none_or(|path| path.has_space());
        if from != to {
            for (lid, direction) in [(from, TO_SWITCH), (to, TO_PORT)] {
                let link = self.transmitter(lid, direction);
                has_space &= link.is_none_or(|link| link.has_space(from, now));
            }
        }
        has_space
    }

    pub(crate) fn in_flight(&self, a: u16, b: u16) -> bool {
        [(a, b), (b, a)]
            .iter()
            .any(|ends| self.paths.get(ends).is_some_and(|path| path.is_busy()))
    }

    /// Returns when the next delayed burst is due.
    pub(crate) fn next_due(&self) -> Option<Duration> {
        self.delayed.first_key_value().map(|((due, _), _)| *due)
    }

    /// Advances the delayed bursts that are due, up to their delivery. What happens at a time in the past has the effects
    /// that it would have had in time.
    pub(crate) fn deliver_due(&mut self, now: Duration) {
        while let Some(entry) = self.delayed.first_entry() {
            let (due, _) = *entry.key();
            if due > now {
                break;
            }
            let Delayed { from, to, burst, place } = entry.remove();
            match place {
                Place::SenderLink(delay) => {
                    self.left_link(from, TO_SWITCH, due);
                    // The packets of an empty burst were dropped.
                    if !burst.packets.is_empty() {
                        self.cross_switches(from, to, delay, burst, due);
                    }
                }
                Place::Switches => {
                    self.count_delayed_out(from, to);
                    self.send_to_port(from, to, burst, due);
                }
                Place::ReceiverLink => {
                    self.left_link(to, TO_PORT, due);
                    if !burst.packets.is_empty() {
                        self.deliver(from, to, burst);
                    }
                }
            }
        }
    }

    fn deliver(&mut self, from: u16, to: u16, burst: Burst) {
        let Some(port) = self.ports.get(&to) else { return };
        if let Some(link) = self.links.get_mut(&port.link) {
            let counters = &mut link.counters;
            let (packets, bytes) = match from == to {
                true => (&mut counters.loopback_packets, &mut counters.loopback_bytes),
                false => (&mut counters.rx_packets, &mut counters.rx_bytes),
            };
            *packets += burst.packets.len() as u64;
            *bytes += burst.packets.iter().map(Packet::wire_bytes).sum::<u64>();
        }
        (port.deliver)(Delivery::Packets(burst));
    }

    /// Sends packets from a port.
    pub(crate) fn send(&mut self, from: u16, packets: Vec<Packet>, now: Duration) {
        if let Some(link) = self.port_link(from) {
            let sent = || packets.iter().filter(|packet| packet.dlid != from);
            link.counters.tx_packets += sent().count() as u64;
            link.counters.tx_bytes += sent().map(Packet::wire_bytes).sum::<u64>();
        }
        // Consecutive packets with the same destination and delay form one burst.
        let mut group: Option<(u16, Duration, Vec<Packet>)> = None;
        let mut swap_next = false;
        for packet in packets {
            for to in self.destinations(from, &packet) {
                if to == SM_LID {
                    self.handle_sa_packet(from, &packet, now);
                    continue;
                }
                let Some(effects) = self.link_effects(from, to) else {
                    continue;
                };
                if group
                    .as_ref()
                    .is_none_or(|(port, delay, _)| (*port, *delay) != (to, effects.delay))
                {
                    if let Some((to, delay, packets)) = group.take() {
                        self.forward(from, to, delay, packets, now);
                    }
                    swap_next = false;
                }
                let (_, _, packets) = group.get_or_insert_with(|| (to, effects.delay, Vec::new()));
                for _ in 0..effects.copies {
                    packets.push(packet.clone());
                }
                if let (true, [.., a, b]) = (std::mem::replace(&mut swap_next, effects.swap), &mut packets[..]) {
                    std::mem::swap(a, b);
                }
            }
        }
        if let Some((to, delay, packets)) = group {
            self.forward(from, to, delay, packets, now);
        }
    }

    /// Returns the destination ports of a packet. Counts a packet without a destination as dropped.
    fn destinations(&mut self, from: u16, packet: &Packet) -> Destinations {
        match packet.dlid {
            SM_LID => Destinations::One(Some(SM_LID)),
            PERMISSIVE_LID | 0 => self.drop_unroutable(from, packet),
            lid if lid >= MULTICAST_LID => Destinations::Many(self.sa.members(lid)),
            lid if self.ports.contains_key(&lid) => Destinations::One(Some(lid)),
            _ => self.drop_unroutable(from, packet),
        }
    }

    fn drop_unroutable(&mut self, from: u16, packet: &Packet) -> Destinations {
        debug!(from, ?packet, "no port has this LID");
        if let Some(link) = self.port_link(from) {
            link.counters.dropped += 1;
        }
        Destinations::One(None)
    }

    /// Returns the effects of the links between two ports on a packet, or `None` if the packet is lost or dropped.
    fn link_effects(&mut self, from: u16, to: u16) -> Option<LinkEffects> {
        let mut effects = LinkEffects {
            delay: Duration::ZERO,
            copies: 1,
            swap: false,
        };
        let attachment = |lid| match self.ports.get(&lid) {
            Some(port) => Some((port.switch, Some(port.link))),
            None => (lid == SM_LID).then_some((0, None)),
        };
        let ((from_switch, from_link), (to_switch, to_link)) = (attachment(from)?, attachment(to)?);
        if let Some(link) = from_link {
            self.links.get_mut(&link)?.pass(&mut effects)?;
        }
        if from == to {
            return Some(effects);
        }
        if from_switch != to_switch {
            match self.routes.get(&(from_switch, to_switch)) {
                Some(route) => {
                    for number in route {
                        self.links.get_mut(number)?.pass(&mut effects)?;
                    }
                }
                None => {
                    self.links.get_mut(&from_link?)?.counters.dropped += 1;
                    return None;
                }
            }
        }
        if let Some(link) = to_link {
            self.links.get_mut(&link)?.pass(&mut effects)?;
        }
        Some(effects)
    }

    /// Sends packets that no link loses from one port to another. A multicast packet takes time on the sender's link for
    /// each receiver.
    fn forward(&mut self, from: u16, to: u16, delay: Duration, packets: Vec<Packet>, now: Duration) {
        let Some(path) = self.path(from, to).cloned() else {
            return;
        };
        let burst = |packets: Vec<Packet>| Burst {
            in_flight: Some(path.enqueue(packets.len())),
            packets,
        };
        // Packets to the own port do not use the link.
        if from == to || self.transmitter(from, TO_SWITCH).is_none() {
            return self.cross_switches(from, to, delay, burst(packets), now);
        }
        for packet in packets {
            if let Some(link) = self.transmitter(from, TO_SWITCH) {
                let due = link.send(now, packet.wire_bytes());
                self.delay(due, from, to, burst(vec![packet]), Place::SenderLink(delay));
            }
        }
    }

    /// Adds a burst to the delayed ones.
    fn delay(&mut self, due: Duration, from: u16, to: u16, burst: Burst, place: Place) {
        self.sequence += 1;
        let delayed = Delayed { from, to, burst, place };
        self.delayed.insert((due, self.sequence), delayed);
    }

    /// Takes a burst that left the sender's link at the time `at` to the receiver's link.
    fn cross_switches(&mut self, from: u16, to: u16, delay: Duration, burst: Burst, at: Duration) {
        // Delayed bursts are not overtaken.
        let before = self.last_due.get(&(from, to)).copied();
        if delay.is_zero() && before.is_none() {
            return self.send_to_port(from, to, burst, at);
        }
        let (count, last) = before.unwrap_or_default();
        let due = last.max(at + delay);
        self.last_due.insert((from, to), (count + 1, due));
        self.delay(due, from, to, burst, Place::Switches);
    }

    /// Takes a burst that reached the receiver's link at the time `at` over this link.
    fn send_to_port(&mut self, from: u16, to: u16, burst: Burst, at: Duration) {
        if from == to || self.transmitter(to, TO_PORT).is_none() {
            return self.deliver(from, to, burst);
        }
        let Some(path) = self.path(from, to).cloned() else {
            return;
        };
        let Burst { packets, in_flight } = burst;
        for packet in packets {
            if let Some(link) = self.transmitter(to, TO_PORT) {
                let due = link.send(at, packet.wire_bytes());
                let burst = Burst {
                    packets: vec![packet],
                    in_flight: Some(path.enqueue(1)),
                };
                self.delay(due, from, to, burst, Place::ReceiverLink);
            }
        }
        // Dropped only now, so that the path is never idle in between.
        drop(in_flight);
    }

    /// Handles a packet for the subnet manager.
    fn handle_sa_packet(&mut self, from: u16, packet: &Packet, now: Duration) {
        // The packet is lost, or no route to the subnet manager is up.
        if self.link_effects(from, SM_LID).is_none() {
            return;
        }
        let up: BTreeSet<u16> = self.ports.keys().copied().filter(|lid| self.is_up(*lid)).collect();
        if let Some(response) = self.sa.respond(packet, &up) {
            self.send(SM_LID, vec![response], now);
        }
    }
}

/// Destination LIDs of a packet.
enum Destinations {
    One(Option<u16>),
    Many(Vec<u16>),
}

impl Iterator for Destinations {
    type Item = u16;

    fn next(&mut self) -> Option<u16> {
        match self {
            Destinations::One(lid) => lid.take(),
            Destinations::Many(lids) => lids.pop(),
        }
    }
}

/// A link that is being changed.
pub(crate) struct LinkChange<'a>(&'a mut Link);

impl LinkChange<'_> {
    pub(crate) fn set_up(&mut self, up: bool) {
        self.0.set_up(up);
    }

    pub(crate) fn set_faults(&mut self, faults: Faults) {
        self.0.set_faults(faults);
    }
}

impl Link {
    fn set_faults(&mut self, faults: Faults) {
        self.faults = faults;
        self.packets_seen = 0;
    }

    /// Returns whether the state changed.
    fn set_up(&mut self, up: bool) -> bool {
        if self.up == up {
            return false;
        }
        self.up = up;
        if !up {
            self.counters.downs += 1;
        }
        true
    }

    /// Adds the effects of this link to `effects`. Returns `None` if the packet is lost or dropped.
    fn pass(&mut self, effects: &mut LinkEffects) -> Option<()> {
        if !self.up {
            self.counters.dropped += 1;
            return None;
        }
        if self.faults == Faults::default() {
            return Some(());
        }
        self.packets_seen += 1;
        if self.packets_seen == self.faults.lose_nth || self.random.happens(self.faults.loss) {
            self.counters.lost += 1;
            return None;
        }
        effects.delay += self.faults.delay;
        if self.random.happens(self.faults.duplicate) {
            effects.copies += 1;
        }
        effects.swap |= self.random.happens(self.faults.reorder);
        Some(())
    }
}

/// A small random number generator (splitmix64). The same seed gives the same faults.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns true with this probability. Does not advance the generator for 0.
    fn happens(&mut self, probability: f64) -> bool {
        probability > 0.0 && ((self.next() >> 11) as f64) < probability * (1_u64 << 53) as f64
    }
}
