// SPDX-License-Identifier: MIT OR Apache-2.0

//! The subnet without threads: ports, links and routes, and the faults of links. The caller passes the time.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tracing::{debug, info};

use super::sa::{Record, SubnetAdministrator};
use super::transit::{Deliver, PortPath};
use super::{Burst, Delivery, Faults, LinkCounters, PortConfig, Topology, TopologyError};
use crate::packet::{Gid, MULTICAST_LID, PERMISSIVE_LID, Packet};

/// LID of the subnet manager.
pub(crate) const SM_LID: u16 = 1;

/// A link between a port and a switch, or between switches.
#[derive(Debug)]
struct Link {
    /// The switches at its ends; the same one twice for a port's link.
    ends: (usize, usize),
    up: bool,
    faults: Faults,
    /// Packets that [`Faults::lose_nth`] counted.
    counted: u64,
    counters: LinkCounters,
    random: Random,
}

/// A port that has joined.
struct Member {
    name: String,
    gid: Gid,
    switch: usize,
    link: usize,
    deliver: Deliver,
}

/// Packets that a link delays.
struct Delayed {
    from: u16,
    to: u16,
    burst: Burst,
}

/// What a link does to a packet.
struct Fate {
    delay: Duration,
    copies: usize,
    swap: bool,
}

pub(crate) struct Network {
    switches: Vec<String>,
    /// Links by their numbers, which stay the same.
    links: BTreeMap<usize, Link>,
    /// Links from switch to switch; none for the same switch.
    routes: HashMap<(usize, usize), Vec<usize>>,
    members: BTreeMap<u16, Member>,
    paths: HashMap<(u16, u16), Arc<PortPath>>,
    delayed: BTreeMap<(Duration, u64), Delayed>,
    /// For each path with delayed packets, their number, and the time when the last of them is due.
    last_due: HashMap<(u16, u16), (usize, Duration)>,
    sequence: u64,
    administrator: SubnetAdministrator,
    seed: u64,
}

impl Network {
    pub(crate) fn new(topology: &Topology, seed: u64) -> Result<Self, TopologyError> {
        let mut switches: Vec<String> = Vec::new();
        for name in &topology.switches {
            if switches.contains(name) {
                return Err(TopologyError::Twice(name.clone()));
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
            members: BTreeMap::new(),
            paths: HashMap::new(),
            delayed: BTreeMap::new(),
            last_due: HashMap::new(),
            sequence: 0,
            administrator: SubnetAdministrator::default(),
            seed,
        };
        for (a, b) in &topology.links {
            let ends = (network.switch(a)?, network.switch(b)?);
            if ends.0 == ends.1 || network.find_link(ends).is_some() {
                return Err(TopologyError::Twice(format!("{a}-{b}")));
            }
            network.add_link(ends);
        }
        network.find_routes();
        for to in 1..network.switches.len() {
            if !network.routes.contains_key(&(0, to)) {
                let [first, last] = [0, to].map(|switch: usize| network.switches[switch].clone());
                return Err(TopologyError::Apart(first, last));
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
            counted: 0,
            counters: LinkCounters::default(),
            random,
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

    /// Finds the shortest paths between switches along links that are up.
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
            .members
            .values()
            .any(|member| member.name == config.name || member.gid == gid)
        {
            return Err(TopologyError::Twice(config.name.clone()));
        }
        let mut lids = SM_LID + 1..MULTICAST_LID;
        let lid = lids
            .find(|lid| !self.members.contains_key(lid))
            .ok_or(TopologyError::NoLid)?;
        let link = self.add_link((switch, switch));
        info!(port = config.name, lid, %gid, switch = config.switch, "port joins the subnet");
        self.members.insert(
            lid,
            Member {
                name: config.name.clone(),
                gid,
                switch,
                link,
                deliver,
            },
        );
        self.administrator.add(Record { lid, gid });
        Ok((lid, gid))
    }

    pub(crate) fn leave(&mut self, lid: u16) {
        let Some(member) = self.members.remove(&lid) else {
            return;
        };
        info!(port = member.name, lid, "port is removed from the subnet");
        self.links.remove(&member.link);
        self.administrator.remove(lid);
        self.forget_delayed(|delayed| delayed.from == lid || delayed.to == lid);
        self.paths.retain(|(from, to), _| *from != lid && *to != lid);
    }

    fn port_link(&mut self, lid: u16) -> Option<&mut Link> {
        let link = self.members.get(&lid)?.link;
        self.links.get_mut(&link)
    }

    pub(crate) fn is_up(&self, lid: u16) -> bool {
        let link = self.members.get(&lid).and_then(|member| self.links.get(&member.link));
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

    pub(crate) fn set_up(&mut self, lid: u16, up: bool) {
        let Some(link) = self.port_link(lid) else { return };
        if link.set_up(up) {
            info!(lid, up, "link changes");
            if !up {
                self.forget_delayed(|delayed| delayed.from == lid || delayed.to == lid);
            }
            if let Some(member) = self.members.get(&lid) {
                (member.deliver)(Delivery::Link(up));
            }
        }
    }

    /// Returns the link between two switches, for a change. The caller finds the routes again after it.
    pub(crate) fn change_switch_link(
        &mut self,
        a: &str,
        b: &str,
        change: impl FnOnce(&mut LinkChange<'_>),
    ) -> Result<LinkCounters, TopologyError> {
        let ends = (self.switch(a)?, self.switch(b)?);
        let number = self
            .find_link(ends)
            .ok_or_else(|| TopologyError::Apart(a.to_owned(), b.to_owned()))?;
        let mut counters = LinkCounters::default();
        if let Some(link) = self.links.get_mut(&number) {
            change(&mut LinkChange(link));
            counters = link.counters;
        }
        self.find_routes();
        Ok(counters)
    }

    /// Drops delayed packets, whose link is cut.
    fn forget_delayed(&mut self, is_gone: impl Fn(&Delayed) -> bool) {
        let gone: Vec<_> = self
            .delayed
            .iter()
            .filter(|(_, delayed)| is_gone(delayed))
            .map(|(key, _)| *key)
            .collect();
        for key in gone {
            if let Some(delayed) = self.delayed.remove(&key) {
                self.count_delayed_out(delayed.from, delayed.to);
                let dropped = delayed.burst.packets.len() as u64;
                for lid in [delayed.from, delayed.to] {
                    if let Some(link) = self.port_link(lid) {
                        link.counters.dropped += dropped;
                    }
                }
            }
        }
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
        let member = self.members.get(&from);
        if member.is_none() && from != SM_LID || !self.members.contains_key(&to) {
            return None;
        }
        let path = self.paths.entry((from, to)).or_insert_with(|| {
            let deliver = member.map_or_else(|| Arc::new(|_| {}) as Deliver, |member| member.deliver.clone());
            Arc::new(PortPath::new(deliver))
        });
        Some(path)
    }

    pub(crate) fn has_space(&mut self, from: u16, to: u16) -> bool {
        self.paths.get(&(from, to)).is_none_or(|path| path.has_space())
    }

    pub(crate) fn in_flight(&self, a: u16, b: u16) -> bool {
        [(a, b), (b, a)]
            .iter()
            .any(|ends| self.paths.get(ends).is_some_and(|path| path.is_busy()))
    }

    /// When the next delayed packets are due.
    pub(crate) fn next_due(&self) -> Option<Duration> {
        self.delayed.first_key_value().map(|((due, _), _)| *due)
    }

    /// Delivers the delayed packets that are due.
    pub(crate) fn deliver_due(&mut self, now: Duration) {
        while let Some(entry) = self.delayed.first_entry() {
            if entry.key().0 > now {
                break;
            }
            let Delayed { from, to, burst } = entry.remove();
            self.count_delayed_out(from, to);
            self.deliver(to, burst);
        }
    }

    fn deliver(&mut self, to: u16, burst: Burst) {
        let Some(member) = self.members.get(&to) else { return };
        if let Some(link) = self.links.get_mut(&member.link) {
            link.counters.rx_packets += burst.packets.len() as u64;
            link.counters.rx_bytes += burst.packets.iter().map(Packet::wire_bytes).sum::<u64>();
        }
        (member.deliver)(Delivery::Packets(burst));
    }

    /// Sends packets from a port.
    pub(crate) fn send(&mut self, from: u16, packets: Vec<Packet>, now: Duration) {
        if let Some(link) = self.port_link(from) {
            link.counters.tx_packets += packets.len() as u64;
            link.counters.tx_bytes += packets.iter().map(Packet::wire_bytes).sum::<u64>();
        }
        // Packets one after the other to the same port and as late as each other travel together.
        let mut group: Option<(u16, Duration, Vec<Packet>)> = None;
        let mut swap_next = false;
        for packet in packets {
            for to in self.destinations(from, &packet) {
                if to == SM_LID {
                    self.administer(from, &packet, now);
                    continue;
                }
                let Some(fate) = self.fate(from, to) else { continue };
                if group
                    .as_ref()
                    .is_none_or(|(port, delay, _)| (*port, *delay) != (to, fate.delay))
                {
                    if let Some((to, delay, packets)) = group.take() {
                        self.depart(from, to, delay, packets, now);
                    }
                    swap_next = false;
                }
                let (_, _, packets) = group.get_or_insert_with(|| (to, fate.delay, Vec::new()));
                for _ in 0..fate.copies {
                    packets.push(packet.clone());
                }
                if let (true, [.., a, b]) = (std::mem::replace(&mut swap_next, fate.swap), &mut packets[..]) {
                    std::mem::swap(a, b);
                }
            }
        }
        if let Some((to, delay, packets)) = group {
            self.depart(from, to, delay, packets, now);
        }
    }

    /// The ports that a packet is for.
    fn destinations(&mut self, from: u16, packet: &Packet) -> Destinations {
        match packet.dlid {
            SM_LID => Destinations::One(Some(SM_LID)),
            PERMISSIVE_LID | 0 => self.lost_way(from, packet),
            lid if lid >= MULTICAST_LID => Destinations::Many(self.administrator.members(lid)),
            lid if self.members.contains_key(&lid) => Destinations::One(Some(lid)),
            _ => self.lost_way(from, packet),
        }
    }

    fn lost_way(&mut self, from: u16, packet: &Packet) -> Destinations {
        debug!(from, ?packet, "no port has this LID");
        if let Some(link) = self.port_link(from) {
            link.counters.dropped += 1;
        }
        Destinations::One(None)
    }

    /// What the links between two ports do to a packet; `None`: it is lost.
    fn fate(&mut self, from: u16, to: u16) -> Option<Fate> {
        let mut fate = Fate {
            delay: Duration::ZERO,
            copies: 1,
            swap: false,
        };
        let place = |lid| match self.members.get(&lid) {
            Some(member) => Some((member.switch, Some(member.link))),
            None => (lid == SM_LID).then_some((0, None)),
        };
        let ((from_switch, from_link), (to_switch, to_link)) = (place(from)?, place(to)?);
        if let Some(link) = from_link {
            self.links.get_mut(&link)?.pass(&mut fate)?;
        }
        if from == to {
            return Some(fate);
        }
        if from_switch != to_switch {
            match self.routes.get(&(from_switch, to_switch)) {
                Some(route) => {
                    for number in route {
                        self.links.get_mut(number)?.pass(&mut fate)?;
                    }
                }
                None => {
                    self.links.get_mut(&from_link?)?.counters.dropped += 1;
                    return None;
                }
            }
        }
        if let Some(link) = to_link {
            self.links.get_mut(&link)?.pass(&mut fate)?;
        }
        Some(fate)
    }

    fn depart(&mut self, from: u16, to: u16, delay: Duration, packets: Vec<Packet>, now: Duration) {
        let Some(path) = self.path(from, to) else { return };
        let flight = path.depart(packets.len());
        let burst = Burst {
            packets,
            flight: Some(flight),
        };
        // What was delayed before is not overtaken.
        let before = self.last_due.get(&(from, to)).copied();
        if delay.is_zero() && before.is_none() {
            return self.deliver(to, burst);
        }
        let (count, last) = before.unwrap_or_default();
        let due = last.max(now + delay);
        self.last_due.insert((from, to), (count + 1, due));
        self.sequence += 1;
        self.delayed.insert((due, self.sequence), Delayed { from, to, burst });
    }

    /// A packet for the subnet manager.
    fn administer(&mut self, from: u16, packet: &Packet, now: Duration) {
        // All links of the path have to be up.
        if self.fate(from, SM_LID).is_none() {
            return;
        }
        let up: BTreeSet<u16> = self.members.keys().copied().filter(|lid| self.is_up(*lid)).collect();
        if let Some(answer) = self.administrator.answer(packet, &up) {
            self.send(SM_LID, vec![answer], now);
        }
    }
}

/// Where a packet goes.
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
        self.counted = 0;
    }

    /// Returns whether that is a change.
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

    /// A packet passes; `None`: it is lost.
    fn pass(&mut self, fate: &mut Fate) -> Option<()> {
        if !self.up {
            self.counters.dropped += 1;
            return None;
        }
        if self.faults == Faults::default() {
            return Some(());
        }
        self.counted += 1;
        if self.counted == self.faults.lose_nth || self.random.happens(self.faults.loss) {
            self.counters.lost += 1;
            return None;
        }
        fate.delay += self.faults.delay;
        if self.random.happens(self.faults.duplicate) {
            fate.copies += 1;
        }
        fate.swap |= self.random.happens(self.faults.reorder);
        Some(())
    }
}

/// A small random generator (splitmix64): the same seed gives the same losses.
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

    /// True with this probability. Never draws for 0.
    fn happens(&mut self, probability: f64) -> bool {
        probability > 0.0 && ((self.next() >> 11) as f64) < probability * (1_u64 << 53) as f64
    }
}
