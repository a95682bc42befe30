// SPDX-License-Identifier: MIT OR Apache-2.0

//! The transport of one adapter: its queue pairs, and the scheduling of their work.

mod datagram;
mod flush;
mod pool;
mod qp;
mod receive;
mod requester;
mod responder;
mod responses;
mod scatter_gather;

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use serde::Serialize;
use tracing::debug;

use crate::attributes::{Modify, ModifyError, PortAttributes, QpAttributes, QpConfig, ReceiveFrom, Service, SrqConfig};
use crate::fabric::{Burst, BusyGuard, InFlight};
use crate::host::{Event, Host};
use crate::packet::{Extended, Gid, MULTICAST_QPN, Packet, operation, service};
use crate::work::Status;
use datagram::pkeys_match;
use pool::Pool;
use qp::{GSI_QPN, Qp, Step};
use receive::Srq;

/// Most packets that a queue pair queues in each direction while it waits. Further packets are dropped and count as
/// lost.
const MAX_BACKLOG: usize = 8192;
/// Most steps of queue pairs in one call of [`Engine::run`].
const QP_BUDGET: usize = 32;
/// Number of pending packets at which [`Engine::run`] transmits before the next step.
const TRANSMIT_BATCH: usize = 32;

/// The time of the next call of [`Engine::run`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Work is pending: read the inbox without waiting, then call again.
    More,
    /// Call again at this time, on the clock of [`Host::now`].
    At(Duration),
    /// No work is pending: call again after the next event.
    Idle,
}

/// Counters of the transport since the engine was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Packets sent.
    pub packets_sent: u64,
    /// Packets received.
    pub packets_received: u64,
    /// Payload bytes sent, including retransmissions.
    pub bytes_sent: u64,
    /// Payload bytes received and accepted.
    pub bytes_received: u64,
    /// Packets retransmitted.
    pub retransmissions: u64,
    /// Expired acknowledgement timers.
    pub timeouts: u64,
    /// PSN sequence error NAKs sent.
    pub sequence_naks_sent: u64,
    /// PSN sequence error NAKs received.
    pub sequence_naks_received: u64,
    /// RNR NAKs sent.
    pub rnr_naks_sent: u64,
    /// RNR NAKs received.
    pub rnr_naks_received: u64,
    /// Duplicate requests received.
    pub duplicates: u64,
    /// Requests rejected as invalid.
    pub invalid_requests: u64,
    /// Requests rejected because their key does not allow the access.
    pub remote_access_errors: u64,
    /// Requests of a remote queue pair that failed at this responder.
    pub remote_operation_errors: u64,
    /// Accesses that waited for a page.
    pub page_faults: u64,
    /// Datagrams dropped because no receive was posted.
    pub datagrams_dropped: u64,
    /// Packets dropped for a wrong P_Key.
    pub pkey_violations: u64,
    /// Packets dropped for a wrong Q_Key.
    pub qkey_violations: u64,
    /// Packets dropped for other reasons: unknown queue pair, wrong state, malformed.
    pub packets_dropped: u64,
    /// Completions with an error, except flush errors.
    pub error_completions: u64,
    /// Work requests flushed.
    pub flushed: u64,
}

/// The transport of one adapter.
///
/// Only [`packets`](Self::packets), [`modify`](Self::modify) and [`run`](Self::run) call the host. The other methods
/// record an event, and `run` handles the event.
#[derive(Debug)]
pub struct Engine {
    qps: HashMap<u32, Qp>,
    /// The queue pair that acts as queue pair 1.
    gsi: Option<u32>,
    /// Multicast groups and the queue pairs attached to them.
    groups: HashMap<Gid, Vec<u32>>,
    /// Queue pairs with pending work, each at most once.
    ready: VecDeque<u32>,
    /// Next deadlines of queue pairs, each queue pair at most once.
    timers: BTreeSet<(Duration, u32)>,
    shared: Shared,
}

/// State that all queue pairs of an engine use.
#[derive(Debug)]
pub(crate) struct Shared {
    port: PortAttributes,
    srqs: HashMap<u32, Srq>,
    /// Packets to be transmitted.
    out: Vec<Packet>,
    pool: Pool,
    counters: Counters,
    /// Tokens of page faults, and the queue pairs that wait for them.
    page_waiters: HashMap<u64, Vec<u32>>,
    /// Queue pairs that wait because their path is full.
    blocked: Vec<u32>,
    /// Queue pairs to be added to the list of pending work.
    wake: Vec<u32>,
    /// Guards to be dropped after the pending packets are transmitted: until then, the received packets keep their path
    /// busy.
    released: Vec<BusyGuard>,
}

impl Shared {
    fn wait_for_page(&mut self, token: u64, qpn: u32) {
        self.counters.page_faults += 1;
        let waiting = self.page_waiters.entry(token).or_default();
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

/// The environment of a queue pair while the engine processes the queue pair.
pub(crate) struct Context<'a> {
    host: &'a mut dyn Host,
    shared: &'a mut Shared,
    /// In-flight marker of the burst that is being processed.
    in_flight: Option<&'a InFlight>,
    now: Option<Duration>,
}

impl<'a> Context<'a> {
    fn new(host: &'a mut dyn Host, shared: &'a mut Shared, in_flight: Option<&'a InFlight>) -> Self {
        Self {
            host,
            shared,
            in_flight,
            now: None,
        }
    }

    /// Returns the current time, which each context reads at most once.
    fn now(&mut self) -> Duration {
        *self.now.get_or_insert_with(|| self.host.now())
    }

    fn send(&mut self, packet: Packet) {
        self.shared.counters.packets_sent += 1;
        self.shared.counters.bytes_sent += packet.payload.len() as u64;
        self.shared.out.push(packet);
    }

    /// Keeps the path of the received burst busy until `guard` is dropped: a queue pair keeps a packet of the burst for
    /// later.
    fn keep_busy(&self, guard: &mut Option<BusyGuard>) {
        if guard.is_none() {
            *guard = self.in_flight.map(InFlight::busy_guard);
        }
    }

    /// Raises the limit event of a shared receive queue if `left`, the number of remaining requests, is below the
    /// limit.
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
                page_waiters: HashMap::new(),
                blocked: Vec::new(),
                wake: Vec::new(),
                released: Vec::new(),
            },
        }
    }

    /// Changes the attributes of the port.
    pub fn set_port(&mut self, port: PortAttributes) {
        self.shared.port = port;
        for qp in self.qps.values_mut() {
            qp.set_route(&self.shared.port);
        }
    }

    /// Creates a queue pair in state RESET. Numbers 0 and 1 and numbers above 0xfffffe are reserved.
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

    /// Changes attributes and state of a queue pair. ERR flushes the work requests (in [`run`](Self::run)). RESET
    /// discards the work requests without completions.
    ///
    /// # Errors
    ///
    /// The reason of the failure. Nothing was changed.
    pub fn modify(&mut self, host: &mut dyn Host, qpn: u32, change: &Modify) -> Result<(), ModifyError> {
        let qp = self.qps.get_mut(&qpn).ok_or(ModifyError::NoQueue)?;
        qp.modify(&mut Context::new(host, &mut self.shared, None), change)?;
        self.schedule(qpn);
        self.send_and_schedule(host);
        Ok(())
    }

    /// Returns state and attributes of a queue pair.
    pub fn query(&self, qpn: u32) -> Option<QpAttributes> {
        self.qps.get(&qpn).map(Qp::attributes)
    }

    /// Destroys a queue pair. Its work requests cause no more completions.
    ///
    /// # Errors
    ///
    /// No such queue pair.
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
        // The number may be reused: no list may keep a reference to this queue pair.
        self.ready.retain(|ready| *ready != qpn);
        self.shared.wake.retain(|wake| *wake != qpn);
        self.shared.blocked.retain(|blocked| *blocked != qpn);
        self.groups.retain(|_, members| {
            members.retain(|member| *member != qpn);
            !members.is_empty()
        });
        self.shared.page_waiters.retain(|_, waiting| {
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

    /// Arms the limit of a shared receive queue. The event is raised once, when a request is fetched and fewer than
    /// `limit` requests remain in the queue.
    ///
    /// # Errors
    ///
    /// No such shared receive queue.
    pub fn arm_srq(&mut self, srqn: u32, limit: u32) -> Result<(), ModifyError> {
        self.shared
            .srqs
            .get_mut(&srqn)
            .ok_or(ModifyError::NoQueue)?
            .config
            .limit = limit;
        Ok(())
    }

    /// Returns the limit of a shared receive queue; 0 if the limit is disarmed.
    pub fn srq_limit(&self, srqn: u32) -> Option<u32> {
        self.shared.srqs.get(&srqn).map(|srq| srq.config.limit)
    }

    /// Destroys a shared receive queue.
    ///
    /// # Errors
    ///
    /// No such shared receive queue, or a queue pair uses it.
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

    /// Attaches a datagram queue pair to a multicast group, so that the queue pair receives the group's packets. (The
    /// port joins the group through subnet administration.)
    ///
    /// # Errors
    ///
    /// No such queue pair, or the queue pair is already attached.
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

    /// Records that a send queue has new work requests. Unknown queue pairs are ignored.
    pub fn doorbell(&mut self, qpn: u32) {
        if let Some(qp) = self.qps.get_mut(&qpn) {
            qp.requester.ring();
            self.schedule(qpn);
        }
    }

    /// Returns whether the queue pair sent the multicast packet itself and blocks multicast loopback.
    fn blocks_loopback(&self, qpn: u32, packet: &Packet) -> bool {
        let port = &self.shared.port;
        self.qps.get(&qpn).is_some_and(|qp| {
            qp.config.deaf_to_itself
                && matches!(packet.extended, Extended::Deth(deth) if deth.source_qpn == qpn)
                && packet.slid >> port.lmc == port.lid >> port.lmc
        })
    }

    /// Handles packets that arrived, and transmits the responses.
    pub fn packets(&mut self, host: &mut dyn Host, burst: Burst) {
        let Burst { packets, in_flight } = burst;
        let mut touched = Vec::new();
        for packet in packets {
            self.shared.counters.packets_received += 1;
            if packet.dest_qpn == MULTICAST_QPN {
                let group = packet.grh.as_ref().map(|grh| grh.dgid).unwrap_or_default();
                for qpn in self.groups.get(&group).cloned().unwrap_or_default() {
                    if self.blocks_loopback(qpn, &packet) {
                        continue;
                    }
                    self.dispatch(host, in_flight.as_ref(), qpn, packet.clone(), &mut touched);
                }
            } else {
                let qpn = if packet.dest_qpn == GSI_QPN {
                    self.gsi.unwrap_or(GSI_QPN)
                } else {
                    packet.dest_qpn
                };
                self.dispatch(host, in_flight.as_ref(), qpn, packet, &mut touched);
            }
        }
        touched.sort_unstable();
        touched.dedup();
        for qpn in touched {
            let Some(qp) = self.qps.get_mut(&qpn) else { continue };
            let mut cx = Context::new(host, &mut self.shared, in_flight.as_ref());
            if qp.receives() {
                qp.settle_requests(&mut cx);
            }
            if qp.sends() {
                qp.settle_responses(&mut cx);
            }
            if qp.requester.wants_step() {
                self.schedule(qpn);
            }
            self.set_timer(qpn);
        }
        self.send_and_schedule(host);
        // Dropped only now, when the responses are in flight.
        drop(in_flight);
    }

    /// Checks a packet and passes the packet to a queue pair.
    fn dispatch(
        &mut self,
        host: &mut dyn Host,
        in_flight: Option<&InFlight>,
        qpn: u32,
        packet: Packet,
        touched: &mut Vec<u32>,
    ) {
        let shared = &mut self.shared;
        let Some(qp) = self.qps.get_mut(&qpn) else {
            debug!(?packet, "packet for an unknown queue pair");
            shared.counters.packets_dropped += 1;
            return;
        };
        if packet.opcode & service::MASK != qp.opcode_service() || !qp.receives() {
            debug!(qpn, state = ?qp.state, ?packet, "service or state of the queue pair rejects the packet");
            shared.counters.packets_dropped += 1;
            return;
        }
        let accepted = match qp.config.service {
            Service::Gsi => shared.port.pkeys.iter().any(|own| pkeys_match(*own, packet.pkey)),
            _ => pkeys_match(qp.pkey(&shared.port), packet.pkey),
        };
        if !accepted {
            debug!(qpn, ?packet, "packet with a wrong P_Key");
            shared.counters.pkey_violations += 1;
            return;
        }
        let mut cx = Context::new(host, shared, in_flight);
        qp.note_arrival(&mut cx);
        let responses = operation::READ_RESPONSE_FIRST..=operation::ATOMIC_ACKNOWLEDGE;
        if responses.contains(&(packet.opcode & operation::MASK)) {
            qp.receive_response(&mut cx, packet);
        } else {
            qp.receive_request(&mut cx, packet);
        }
        if touched.last() != Some(&qpn) {
            touched.push(qpn);
        }
    }

    /// Resolves a page fault. Accesses that wait for `token` are repeated or, if `ok` is false, fail. Unknown tokens
    /// are ignored.
    pub fn resume(&mut self, token: u64, ok: bool) {
        for qpn in self.shared.page_waiters.remove(&token).unwrap_or_default() {
            if let Some(qp) = self.qps.get_mut(&qpn) {
                qp.resume(token, ok);
                self.schedule(qpn);
            }
        }
    }

    /// Continues queue pairs that waited because their path was full.
    pub fn path_ready(&mut self) {
        for qpn in std::mem::take(&mut self.shared.blocked) {
            self.schedule(qpn);
        }
    }

    /// Does a bounded amount of the pending work, and returns when to call again.
    pub fn run(&mut self, host: &mut dyn Host) -> Next {
        if !self.timers.is_empty() {
            let now = host.now();
            while let Some(&(time, qpn)) = self.timers.first().filter(|(time, _)| *time <= now) {
                self.timers.remove(&(time, qpn));
                if let Some(qp) = self.qps.get_mut(&qpn) {
                    qp.timer = None;
                    qp.on_timer(&mut Context::new(host, &mut self.shared, None), now);
                    self.set_timer(qpn);
                }
            }
        }
        self.schedule_woken();
        for _ in 0..QP_BUDGET {
            let Some(qpn) = self.ready.pop_front() else { break };
            let Some(qp) = self.qps.get_mut(&qpn) else { continue };
            qp.scheduled = false;
            let step = qp.step(&mut Context::new(host, &mut self.shared, None));
            self.set_timer(qpn);
            if step == Step::More {
                self.schedule(qpn);
            }
            self.schedule_woken();
            if self.shared.out.len() >= TRANSMIT_BATCH {
                self.shared.send_out(host);
            }
        }
        self.send_and_schedule(host);
        if !self.ready.is_empty() {
            return Next::More;
        }
        self.timers.first().map_or(Next::Idle, |(time, _)| Next::At(*time))
    }

    /// Returns the counters of the transport.
    pub fn counters(&self) -> Counters {
        self.shared.counters
    }

    /// Transmits the pending packets and schedules the queue pairs that were woken.
    fn send_and_schedule(&mut self, host: &mut dyn Host) {
        self.shared.send_out(host);
        self.schedule_woken();
    }

    fn schedule_woken(&mut self) {
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

    /// Adds a queue pair's next deadline to the timers. An entry whose deadline moved to a later time stays: when the
    /// entry expires, the queue pair finds nothing to do and is added again.
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
