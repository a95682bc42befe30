// SPDX-License-Identifier: MIT OR Apache-2.0

//! The transport of one adapter: its queue pairs and their work.

mod answers;
mod datagram;
mod flush;
mod pool;
mod qp;
mod receive;
mod requester;
mod responder;

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use serde::Serialize;
use tracing::debug;

use crate::attributes::{Modify, ModifyError, PortAttributes, QpConfig, QpView, ReceiveFrom, Service, SrqConfig};
use crate::fabric::{Burst, Flight, Hold};
use crate::host::{Event, Host};
use crate::packet::{Extended, Gid, MULTICAST_QPN, Packet, operation, service};
use crate::work::Status;
use datagram::pkeys_match;
use pool::Pool;
use qp::{GSI_QPN, Qp, Step};
use receive::Srq;

/// Maximum number of packets that a queue pair keeps in either direction while it waits. No window sends more.
const BACKLOG: usize = 8192;
/// Steps of queue pairs in one call of [`Engine::run`].
const TURNS: usize = 32;
/// Packets that are sent without waiting for the other queue pairs' steps.
const SEND_AT: usize = 32;

/// When [`Engine::run`] has to be called again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Immediately, after a check of the inbox that does not wait.
    More,
    /// At this time, on the clock of [`Host::now`].
    At(Duration),
    /// After the next event.
    Idle,
}

/// Counters of the transport since the engine was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Packets sent.
    pub packets_sent: u64,
    /// Packets received.
    pub packets_received: u64,
    /// Payload bytes sent, retransmissions included.
    pub bytes_sent: u64,
    /// Payload bytes received and accepted.
    pub bytes_received: u64,
    /// Packets retransmitted.
    pub retransmissions: u64,
    /// Acknowledgement timeouts.
    pub timeouts: u64,
    /// Sequence error NAKs sent.
    pub sequence_naks_sent: u64,
    /// Sequence error NAKs received.
    pub sequence_naks_received: u64,
    /// Receiver-not-ready NAKs sent.
    pub rnr_naks_sent: u64,
    /// Receiver-not-ready NAKs received.
    pub rnr_naks_received: u64,
    /// Duplicate requests.
    pub duplicates: u64,
    /// Requests refused as invalid.
    pub invalid_requests: u64,
    /// Requests refused because of access rights.
    pub remote_access_errors: u64,
    /// Requests that failed at this responder.
    pub remote_operation_errors: u64,
    /// Accesses that waited for a page.
    pub page_faults: u64,
    /// Datagrams dropped because there was no receive.
    pub datagrams_dropped: u64,
    /// Packets dropped for a wrong P_Key.
    pub pkey_violations: u64,
    /// Packets dropped for a wrong Q_Key.
    pub qkey_violations: u64,
    /// Packets dropped for other reasons: no such queue pair, wrong state, malformed.
    pub packets_dropped: u64,
    /// Completions with an error, except flush errors.
    pub error_completions: u64,
    /// Work requests flushed.
    pub flushed: u64,
}

/// The transport of one adapter.
///
/// Only [`packets`](Self::packets), [`modify`](Self::modify) and [`run`](Self::run) call the host. The other methods record
/// an event, which `run` processes.
#[derive(Debug)]
pub struct Engine {
    qps: HashMap<u32, Qp>,
    /// The queue pair that serves as queue pair 1.
    gsi: Option<u32>,
    /// Multicast groups and the queue pairs attached to them.
    groups: HashMap<Gid, Vec<u32>>,
    /// Queue pairs with pending work, each at most once.
    ready: VecDeque<u32>,
    /// Times at which queue pairs have to be checked, each queue pair at most once.
    timers: BTreeSet<(Duration, u32)>,
    shared: Shared,
}

/// State that queue pairs share.
#[derive(Debug)]
pub(crate) struct Shared {
    port: PortAttributes,
    srqs: HashMap<u32, Srq>,
    /// Packets to send.
    out: Vec<Packet>,
    pool: Pool,
    counters: Counters,
    /// Page faults, by token, and the queue pairs that wait for them.
    pages: HashMap<u64, Vec<u32>>,
    /// Queue pairs that wait until their path takes more packets.
    blocked: Vec<u32>,
    /// Queue pairs that have found more work.
    wake: Vec<u32>,
    /// Dropped when the packets are sent: until then, the packets that these answer count as in flight.
    released: Vec<Hold>,
}

impl Shared {
    fn wait_for_page(&mut self, token: u64, qpn: u32) {
        self.counters.page_faults += 1;
        let waiting = self.pages.entry(token).or_default();
        if !waiting.contains(&qpn) {
            waiting.push(qpn);
        }
    }

    fn send_out(&mut self, host: &mut dyn Host) {
        if !self.out.is_empty() {
            let next = Vec::with_capacity(self.out.len());
            host.transmit(std::mem::replace(&mut self.out, next));
        }
        self.released.clear();
    }
}

/// The environment of a queue pair during a step.
pub(crate) struct Context<'a> {
    host: &'a mut dyn Host,
    shared: &'a mut Shared,
    /// The burst of the packets that are being processed.
    flight: Option<&'a Flight>,
    now: Option<Duration>,
}

impl<'a> Context<'a> {
    fn new(host: &'a mut dyn Host, shared: &'a mut Shared, flight: Option<&'a Flight>) -> Self {
        Self {
            host,
            shared,
            flight,
            now: None,
        }
    }

    /// The time, read once for each step.
    fn now(&mut self) -> Duration {
        *self.now.get_or_insert_with(|| self.host.now())
    }

    fn send(&mut self, packet: Packet) {
        self.shared.counters.packets_sent += 1;
        self.shared.counters.bytes_sent += packet.payload.len() as u64;
        self.shared.out.push(packet);
    }

    /// Keeps the received packets: they count as in flight until `hold` is dropped.
    fn hold(&self, hold: &mut Option<Hold>) {
        if hold.is_none() {
            *hold = self.flight.map(Flight::hold);
        }
    }

    /// Records that a receive was taken from a shared queue.
    fn check_limit(&mut self, srqn: u32, left: u32) {
        if let Some(srq) = self.shared.srqs.get_mut(&srqn) {
            if left < srq.config.limit {
                srq.config.limit = 0;
                self.host.event(Event::SrqLimit { srqn });
            }
        }
    }

    fn count_completion(&mut self, status: Status) {
        match status {
            Status::Success => {}
            Status::Flushed => self.shared.counters.flushed += 1,
            _ => self.shared.counters.error_completions += 1,
        }
    }
}

impl Engine {
    /// Creates an engine without queue pairs.
    pub fn new(port: PortAttributes) -> Self {
        Self {
            qps: HashMap::new(),
            gsi: None,
            groups: HashMap::new(),
            ready: VecDeque::new(),
            timers: BTreeSet::new(),
            shared: Shared {
                port,
                srqs: HashMap::new(),
                out: Vec::new(),
                pool: Pool::default(),
                counters: Counters::default(),
                pages: HashMap::new(),
                blocked: Vec::new(),
                wake: Vec::new(),
                released: Vec::new(),
            },
        }
    }

    /// Changes the port's attributes.
    pub fn set_port(&mut self, port: PortAttributes) {
        self.shared.port = port;
        for qp in self.qps.values_mut() {
            qp.set_route(&self.shared.port);
        }
    }

    /// Creates a queue pair in the state RESET. The numbers 0 and 1 and those above 0xfffffe are reserved.
    ///
    /// # Errors
    ///
    /// The number is in use or out of range, or the shared receive queue does not exist.
    pub fn create_qp(&mut self, qpn: u32, config: QpConfig) -> Result<(), ModifyError> {
        if !(2..MULTICAST_QPN).contains(&qpn) {
            return Err(ModifyError::Range("queue pair"));
        }
        if self.qps.contains_key(&qpn) || config.service == Service::Gsi && self.gsi.is_some() {
            return Err(ModifyError::InUse);
        }
        if let ReceiveFrom::Shared(srqn) = config.receive {
            self.shared.srqs.get_mut(&srqn).ok_or(ModifyError::NoQueue)?.users += 1;
        }
        if config.service == Service::Gsi {
            self.gsi = Some(qpn);
        }
        self.qps.insert(qpn, Qp::new(qpn, config));
        Ok(())
    }

    /// Changes attributes and state of a queue pair. A change to ERR flushes its work (in [`run`](Self::run)); a change to RESET
    /// drops its work without completions.
    ///
    /// # Errors
    ///
    /// The reason of the refusal; nothing was changed then.
    pub fn modify(&mut self, host: &mut dyn Host, qpn: u32, change: &Modify) -> Result<(), ModifyError> {
        let qp = self.qps.get_mut(&qpn).ok_or(ModifyError::NoQueue)?;
        qp.modify(&mut Context::new(host, &mut self.shared, None), change)?;
        self.schedule(qpn);
        self.after(host);
        Ok(())
    }

    /// Returns a queue pair's state and attributes.
    pub fn query(&self, qpn: u32) -> Option<QpView> {
        self.qps.get(&qpn).map(Qp::view)
    }

    /// Destroys a queue pair. Its work gets no completions.
    ///
    /// # Errors
    ///
    /// There is no queue pair of this number.
    pub fn destroy_qp(&mut self, qpn: u32) -> Result<(), ModifyError> {
        let qp = self.qps.remove(&qpn).ok_or(ModifyError::NoQueue)?;
        if let ReceiveFrom::Shared(srqn) = qp.config.receive {
            if let Some(srq) = self.shared.srqs.get_mut(&srqn) {
                srq.users -= 1;
            }
        }
        if self.gsi == Some(qpn) {
            self.gsi = None;
        }
        if let Some(time) = qp.timer {
            self.timers.remove(&(time, qpn));
        }
        // The number may be used again: no reference to this queue pair may remain.
        self.ready.retain(|ready| *ready != qpn);
        self.shared.wake.retain(|wake| *wake != qpn);
        self.shared.blocked.retain(|blocked| *blocked != qpn);
        self.groups.retain(|_, members| {
            members.retain(|member| *member != qpn);
            !members.is_empty()
        });
        self.shared.pages.retain(|_, waiting| {
            waiting.retain(|waiting| *waiting != qpn);
            !waiting.is_empty()
        });
        Ok(())
    }

    /// Creates a shared receive queue.
    ///
    /// # Errors
    ///
    /// The number is in use.
    pub fn create_srq(&mut self, srqn: u32, config: SrqConfig) -> Result<(), ModifyError> {
        match self.shared.srqs.entry(srqn) {
            Entry::Occupied(_) => Err(ModifyError::InUse),
            Entry::Vacant(entry) => {
                entry.insert(Srq { config, users: 0 });
                Ok(())
            }
        }
    }

    /// Arms the limit event of a shared receive queue. It is reported once, when a work request is taken and fewer than the limit
    /// are left.
    ///
    /// # Errors
    ///
    /// There is no queue of this number.
    pub fn arm_srq(&mut self, srqn: u32, limit: u32) -> Result<(), ModifyError> {
        self.shared
            .srqs
            .get_mut(&srqn)
            .ok_or(ModifyError::NoQueue)?
            .config
            .limit = limit;
        Ok(())
    }

    /// Returns the limit of a shared receive queue; 0 if it is not armed.
    pub fn srq_limit(&self, srqn: u32) -> Option<u32> {
        self.shared.srqs.get(&srqn).map(|srq| srq.config.limit)
    }

    /// Destroys a shared receive queue.
    ///
    /// # Errors
    ///
    /// There is no queue of this number, or a queue pair uses it.
    pub fn destroy_srq(&mut self, srqn: u32) -> Result<(), ModifyError> {
        match self.shared.srqs.get(&srqn) {
            None => Err(ModifyError::NoQueue),
            Some(srq) if srq.users > 0 => Err(ModifyError::Busy),
            Some(_) => {
                self.shared.srqs.remove(&srqn);
                Ok(())
            }
        }
    }

    /// Attaches a datagram queue pair to a multicast group: it then receives packets to the group. (Its port joins the group
    /// through subnet administration.)
    ///
    /// # Errors
    ///
    /// There is no such queue pair, or it is attached already.
    pub fn attach(&mut self, qpn: u32, group: Gid) -> Result<(), ModifyError> {
        if !self.qps.contains_key(&qpn) {
            return Err(ModifyError::NoQueue);
        }
        let members = self.groups.entry(group).or_default();
        if members.contains(&qpn) {
            return Err(ModifyError::InUse);
        }
        members.push(qpn);
        Ok(())
    }

    /// Detaches a queue pair from a multicast group.
    ///
    /// # Errors
    ///
    /// The queue pair is not attached.
    pub fn detach(&mut self, qpn: u32, group: Gid) -> Result<(), ModifyError> {
        let members = self.groups.get_mut(&group).ok_or(ModifyError::NoQueue)?;
        let place = members
            .iter()
            .position(|member| *member == qpn)
            .ok_or(ModifyError::NoQueue)?;
        members.remove(place);
        if members.is_empty() {
            self.groups.remove(&group);
        }
        Ok(())
    }

    /// Records that a send queue has new work. Unknown numbers are ignored.
    pub fn doorbell(&mut self, qpn: u32) {
        if let Some(qp) = self.qps.get_mut(&qpn) {
            qp.requester.ring();
            self.schedule(qpn);
        }
    }

    /// Returns whether a queue pair sent the multicast packet itself, and does not receive its own packets.
    fn is_deaf_to(&self, qpn: u32, packet: &Packet) -> bool {
        let port = &self.shared.port;
        self.qps.get(&qpn).is_some_and(|qp| {
            qp.config.deaf_to_itself
                && matches!(packet.extended, Extended::Deth(deth) if deth.source_qpn == qpn)
                && packet.slid >> port.lmc == port.lid >> port.lmc
        })
    }

    /// Processes packets that arrived.
    pub fn packets(&mut self, host: &mut dyn Host, burst: Burst) {
        let Burst { packets, flight } = burst;
        let mut touched = Vec::new();
        for packet in packets {
            self.shared.counters.packets_received += 1;
            if packet.dest_qpn == MULTICAST_QPN {
                let group = packet.grh.as_ref().map(|grh| grh.dgid).unwrap_or_default();
                for qpn in self.groups.get(&group).cloned().unwrap_or_default() {
                    if self.is_deaf_to(qpn, &packet) {
                        continue;
                    }
                    self.arrive(host, flight.as_ref(), qpn, packet.clone(), &mut touched);
                }
            } else {
                let qpn = if packet.dest_qpn == GSI_QPN {
                    self.gsi.unwrap_or(GSI_QPN)
                } else {
                    packet.dest_qpn
                };
                self.arrive(host, flight.as_ref(), qpn, packet, &mut touched);
            }
        }
        touched.sort_unstable();
        touched.dedup();
        for qpn in touched {
            let Some(qp) = self.qps.get_mut(&qpn) else { continue };
            let mut cx = Context::new(host, &mut self.shared, flight.as_ref());
            if qp.receives() {
                qp.settle_requests(&mut cx);
            }
            if qp.sends() {
                qp.settle_answers(&mut cx);
            }
            if qp.requester.wants_step() {
                self.schedule(qpn);
            }
            self.set_timer(qpn);
        }
        self.after(host);
        // Dropped after the answers are in flight.
        drop(flight);
    }

    /// Processes a packet for a queue pair.
    fn arrive(
        &mut self,
        host: &mut dyn Host,
        flight: Option<&Flight>,
        qpn: u32,
        packet: Packet,
        touched: &mut Vec<u32>,
    ) {
        let shared = &mut self.shared;
        let Some(qp) = self.qps.get_mut(&qpn) else {
            debug!(?packet, "packet for a queue pair that is not there");
            shared.counters.packets_dropped += 1;
            return;
        };
        if packet.opcode & service::MASK != qp.opcode_service() || !qp.receives() {
            debug!(qpn, state = ?qp.state, ?packet, "packet that the queue pair cannot take");
            shared.counters.packets_dropped += 1;
            return;
        }
        let accepted = match qp.config.service {
            Service::Gsi => shared.port.pkeys.iter().any(|own| pkeys_match(*own, packet.pkey)),
            _ => pkeys_match(qp.pkey(&shared.port), packet.pkey),
        };
        if !accepted {
            debug!(qpn, ?packet, "packet of another partition");
            shared.counters.pkey_violations += 1;
            return;
        }
        let mut cx = Context::new(host, shared, flight);
        qp.note_arrival(&mut cx);
        let answers = operation::READ_RESPONSE_FIRST..=operation::ATOMIC_ACKNOWLEDGE;
        if answers.contains(&(packet.opcode & operation::MASK)) {
            qp.take_answer(&mut cx, packet);
        } else {
            qp.take_request(&mut cx, packet);
        }
        if touched.last() != Some(&qpn) {
            touched.push(qpn);
        }
    }

    /// Repeats the accesses that wait for this page, or (`ok` is false) fails them. Unknown tokens are ignored.
    pub fn resume(&mut self, token: u64, ok: bool) {
        for qpn in self.shared.pages.remove(&token).unwrap_or_default() {
            if let Some(qp) = self.qps.get_mut(&qpn) {
                qp.resume(token, ok);
                self.schedule(qpn);
            }
        }
    }

    /// Continues queue pairs whose path was full and takes packets again.
    pub fn path_ready(&mut self) {
        for qpn in std::mem::take(&mut self.shared.blocked) {
            self.schedule(qpn);
        }
    }

    /// Processes pending work, for a bounded time.
    pub fn run(&mut self, host: &mut dyn Host) -> Next {
        if !self.timers.is_empty() {
            let now = host.now();
            while let Some(&(time, qpn)) = self.timers.first().filter(|(time, _)| *time <= now) {
                self.timers.remove(&(time, qpn));
                if let Some(qp) = self.qps.get_mut(&qpn) {
                    qp.timer = None;
                    qp.tick(&mut Context::new(host, &mut self.shared, None), now);
                    self.set_timer(qpn);
                }
            }
        }
        self.take_wakes();
        for _ in 0..TURNS {
            let Some(qpn) = self.ready.pop_front() else { break };
            let Some(qp) = self.qps.get_mut(&qpn) else { continue };
            qp.scheduled = false;
            let step = qp.step(&mut Context::new(host, &mut self.shared, None));
            self.set_timer(qpn);
            if step == Step::More {
                self.schedule(qpn);
            }
            self.take_wakes();
            if self.shared.out.len() >= SEND_AT {
                self.shared.send_out(host);
            }
        }
        self.after(host);
        if !self.ready.is_empty() {
            return Next::More;
        }
        self.timers.first().map_or(Next::Idle, |(time, _)| Next::At(*time))
    }

    /// Returns the counters.
    pub fn counters(&self) -> Counters {
        self.shared.counters
    }

    /// Sends the pending packets, and queues the queue pairs that have more work.
    fn after(&mut self, host: &mut dyn Host) {
        self.shared.send_out(host);
        self.take_wakes();
    }

    fn take_wakes(&mut self) {
        while let Some(qpn) = self.shared.wake.pop() {
            self.schedule(qpn);
        }
    }

    fn schedule(&mut self, qpn: u32) {
        if let Some(qp) = self.qps.get_mut(&qpn) {
            if !qp.scheduled {
                qp.scheduled = true;
                self.ready.push_back(qpn);
            }
        }
    }

    /// Records a queue pair's next deadline. An entry whose deadline has moved stays in the list: when it is due, the queue pair
    /// has no work, and is recorded again.
    fn set_timer(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        let Some(deadline) = qp.deadline() else { return };
        if qp.timer.is_some_and(|time| time <= deadline) {
            return;
        }
        if let Some(time) = qp.timer.replace(deadline) {
            self.timers.remove(&(time, qpn));
        }
        self.timers.insert((deadline, qpn));
    }
}
