// SPDX-License-Identifier: MIT OR Apache-2.0

//! The state of an adapter, and what each message does to it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use p2pmem_ib::{Counters as TransportCounters, Delivery, Engine, LinkCounters, Modify, Port, PortAttributes, State};
use p2pmem_vfio_user::{Bus, Dma};
use tracing::{debug, warn};

use super::adapter::{Adapter, Unlocked};
use super::caps::{Caps, limit};
use super::command::{self, CounterSet, Phase, link_since, port_capability};
use super::counters::{Counters, difference, sum};
use super::cq::{Cq, Posted};
use super::eq::{Entry, Eq, EventType};
use super::front::Status;
use super::inbox::{Inboxes, Message, Wait};
use super::layout::constants;
use super::layout::wire::{eqe_cq_err, eqe_port_state};
use super::mkey::{Limits, Mkeys};
use super::qp::Qp;
use super::registers::{FIRST_UAR, Interface, Registers, UARS};
use super::srq::Srq;
use super::table::Table;

/// The first number of most objects: 0 is taken for none by drivers.
const FIRST: u32 = 1;
/// The first number of queue pairs; 0 and 1 are the port's own.
const FIRST_QP: u32 = 0x40;
/// The only port.
const PORT: u32 = 1;
/// Where the event of a port has its number: in the upper half of a byte.
const PORT_SHIFT: u32 = 4;
/// Why a completion queue broke: it was full.
const OVERRUN: u32 = 1;
/// The P_Key of everybody, with full membership.
const DEFAULT_PKEY: u16 = 0xffff;
/// How often a command lets the transport go on first. There may be no end to what others send.
const CATCH_UP: usize = 64;
/// Bytes of a node's description.
const DESCRIPTION: usize = 64;

/// Who the adapter is.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub(super) name: String,
    pub(super) node_guid: u64,
    pub(super) port_guid: u64,
}

/// An adapter while all of it is looked at: its transports, and all the rest. Only the transport's worker makes one.
#[derive(Debug)]
pub(super) struct Model<'a> {
    pub(super) engine: &'a mut Engine,
    /// The transport of the driver's own queue pairs.
    pub(super) driver: &'a mut Engine,
    pub(super) hca: &'a mut Hca,
    pub(super) inboxes: &'a Inboxes,
}

/// What the transport's worker has: the transport is its own, the rest is shared.
#[derive(Debug)]
pub(super) struct Transport {
    engine: Engine,
    pub(super) adapter: Arc<Adapter>,
}

/// What of an adapter is not its transport.
#[derive(Debug)]
pub(super) struct Hca {
    pub(super) identity: Identity,
    pub(super) bus: Bus,
    /// Access to the bus until the next reset; the same for payload of connections and for payload of datagrams.
    pub(super) dma: Dma,
    pub(super) payload: Dma,
    pub(super) datagrams: Dma,
    /// Where the latter two come from after a reset, and what counts their bytes.
    pub(super) tallies: [Dma; 2],
    pub(super) registers: Arc<Registers>,
    pub(super) counters: Arc<Counters>,
    pub(super) port: Port,
    pub(super) attributes: PortAttributes,
    /// What the link had carried when its counters were last cleared.
    pub(super) port_base: LinkCounters,
    /// What transports that ended had counted, and what of it all was counted before the counters were last cleared.
    transport_past: TransportCounters,
    transport_base: TransportCounters,
    /// As `port_base`, for those outside of the guest.
    link_base: LinkCounters,
    pub(super) started: Instant,
    pub(super) objects: Objects,
    /// Scratch for addresses.
    pub(super) extents: Vec<p2pmem_vfio_user::Extent>,
}

/// What the driver made and set: a reset forgets it.
#[derive(Debug)]
pub(super) struct Objects {
    pub(super) phase: Phase,
    pub(super) caps: Caps,
    pub(super) port_capabilities: u32,
    pub(super) node_description: [u8; DESCRIPTION],
    pub(super) uars: Table<()>,
    pub(super) pds: Table<()>,
    pub(super) xrcds: Table<()>,
    pub(super) domains: Table<()>,
    pub(super) counter_sets: Table<CounterSet>,
    pub(super) eqs: Table<Eq>,
    pub(super) cqs: Table<Cq>,
    pub(super) qps: Table<Qp>,
    pub(super) srqs: Table<Srq>,
    pub(super) mkeys: Mkeys,
    /// When completion queues owe an event at the latest. Some of them may have sent it already.
    moderated: Vec<(Instant, u32)>,
    /// Completion queues in error, whose queue pairs are not yet notified.
    broken: Vec<u32>,
    /// Tokens of page faults that were reported to the driver and that the driver has not resolved.
    pub(super) faults: BTreeSet<u64>,
}

impl Objects {
    fn new(name: &str) -> Self {
        // The description that is shown until the driver gives another.
        let mut node_description = [0; DESCRIPTION];
        for (to, byte) in node_description.iter_mut().zip(name.bytes().take(DESCRIPTION - 1)) {
            *to = byte;
        }
        Self {
            phase: Phase::Any,
            caps: Caps::new(),
            port_capabilities: port_capability::INITIAL,
            node_description,
            uars: Table::new(FIRST_UAR, UARS),
            pds: Table::new(FIRST, 1 << limit::LOG_PDS),
            xrcds: Table::new(FIRST, 1 << limit::LOG_XRCDS),
            domains: Table::new(FIRST, 1 << limit::LOG_TRANSPORT_DOMAINS),
            counter_sets: Table::new(FIRST, limit::Q_COUNTERS),
            eqs: Table::new(FIRST, 1 << limit::LOG_EQS),
            cqs: Table::new(FIRST, 1 << limit::LOG_CQS),
            qps: Table::new(FIRST_QP, 1 << limit::LOG_QPS),
            srqs: Table::new(FIRST, 1 << limit::LOG_SRQS),
            mkeys: Mkeys::new(Limits {
                keys: 1 << limit::LOG_MKEYS,
                ..Limits::default()
            }),
            moderated: Vec::new(),
            broken: Vec::new(),
            faults: BTreeSet::new(),
        }
    }
}

impl Hca {
    /// The port's link is there.
    pub(super) fn port_up(&self) -> bool {
        self.port.is_up()
    }

    /// What the link carried since the counters were last cleared.
    pub(super) fn link_counters(&self) -> LinkCounters {
        link_since(&self.port.counters(), &self.link_base)
    }

    /// The event queue for events of a type.
    fn event_queue(&self, event: EventType) -> Option<u32> {
        self.objects
            .eqs
            .iter()
            .find(|(_, eq)| eq.takes(event))
            .map(|(eqn, _)| eqn)
    }

    /// The event queue for completions of commands.
    pub(super) fn command_eq(&self) -> Option<u32> {
        self.event_queue(EventType::COMMAND)
    }

    /// Adds an event to a queue; nothing happens if there is no such queue.
    pub(super) fn post_event(&mut self, eqn: u32, entry: Entry) {
        self.counters.event();
        if let Some(eq) = self.objects.eqs.get_mut(eqn) {
            eq.post(entry, &self.bus, &self.dma);
        }
    }

    /// Adds an event to the queue that wants its type, if there is one.
    pub(super) fn async_event(&mut self, event: EventType, entry: Entry) {
        match self.event_queue(event) {
            Some(eqn) => self.post_event(eqn, entry),
            None => debug!(?event, "an event that nobody wants"),
        }
    }

    /// Does what a completion queue's answer asks for.
    pub(super) fn follow(&mut self, cqn: u32, posted: Posted) {
        match posted {
            Posted::Quiet => {}
            Posted::Broken => self.counters.lost_completion(),
            Posted::Event => {
                if let Some(eqn) = self.objects.cqs.get(cqn).map(|cq| cq.eqn) {
                    self.post_event(eqn, Entry::completion(cqn));
                }
            }
            Posted::EventAt(time) => self.objects.moderated.push((time, cqn)),
            Posted::Failed => {
                warn!(name = self.identity.name, cqn, "a completion queue overran");
                self.counters.lost_completion();
                self.objects.broken.push(cqn);
                let entry = Entry::new(EventType::CQ_ERROR, 0)
                    .with(eqe_cq_err::CQN, cqn)
                    .with(eqe_cq_err::SYNDROME, OVERRUN);
                self.async_event(EventType::CQ_ERROR, entry);
            }
        }
    }

    /// Sends events that were held back for long enough.
    pub(super) fn moderate(&mut self, now: Instant) {
        let mut i = 0;
        while let Some((time, cqn)) = self.objects.moderated.get(i).copied() {
            if time > now {
                i += 1;
                continue;
            }
            self.objects.moderated.swap_remove(i);
            if self.objects.cqs.get_mut(cqn).is_some_and(|cq| cq.timer(now)) {
                self.follow(cqn, Posted::Event);
            }
        }
    }
}

impl Hca {
    pub(super) fn new(
        identity: Identity,
        bus: Bus,
        registers: Arc<Registers>,
        counters: Arc<Counters>,
        port: Port,
    ) -> Self {
        let attributes = PortAttributes {
            lid: port.lid(),
            lmc: 0,
            gids: vec![port.gid()],
            pkeys: vec![DEFAULT_PKEY],
        };
        let dma = bus.dma.pinned();
        let tallies = [bus.dma.tallied(), bus.dma.tallied()];
        let [payload, datagrams] = [tallies[0].pinned(), tallies[1].pinned()];
        let objects = Objects::new(&identity.name);
        Self {
            identity,
            bus,
            dma,
            payload,
            datagrams,
            tallies,
            registers,
            counters,
            port,
            attributes,
            port_base: LinkCounters::default(),
            transport_past: TransportCounters::default(),
            transport_base: TransportCounters::default(),
            link_base: LinkCounters::default(),
            started: Instant::now(),
            objects,
            extents: Vec::new(),
        }
    }

    /// Reports a change of the port's state to the driver.
    pub(super) fn link(&mut self, up: bool) {
        let sub_type = if up {
            constants::MLX5_PORT_CHANGE_SUBTYPE_ACTIVE
        } else {
            constants::MLX5_PORT_CHANGE_SUBTYPE_DOWN
        };
        let entry = Entry::new(EventType::PORT, sub_type).with(eqe_port_state::PORT, PORT << PORT_SHIFT);
        self.async_event(EventType::PORT, entry);
    }

    /// DMA was aborted: takes handles that work again.
    fn renew_dma(&mut self) {
        self.dma = self.bus.dma.pinned();
        [self.payload, self.datagrams] = [self.tallies[0].pinned(), self.tallies[1].pinned()];
    }

    /// When an event is due that was held back.
    pub(super) fn next_moderated(&self) -> Option<Instant> {
        self.objects.moderated.iter().map(|(time, _)| *time).min()
    }

    /// Returns whether there are completion queues in error whose queue pairs are not yet notified.
    pub(super) fn has_broken_queues(&self) -> bool {
        !self.objects.broken.is_empty()
    }

    /// Takes in a doorbell of an event or completion queue.
    pub(super) fn doorbell(&mut self, message: &Message) {
        match *message {
            Message::EventQueue {
                uar,
                eqn,
                consumer,
                arm,
            } => {
                let eq = self.objects.eqs.get_mut(u32::from(eqn)).filter(|eq| eq.uar == uar);
                let known = eq.is_some_and(|eq| eq.doorbell(consumer, arm, &self.bus, &self.dma));
                if !known {
                    self.counters.bad_doorbell();
                }
            }
            Message::Arm {
                uar,
                words: [word, cqn],
            } => {
                let cqn = cqn & 0x00ff_ffff;
                let now = Instant::now();
                let cq = self.objects.cqs.get_mut(cqn);
                // Any UAR of the queue's process may arm the queue; the model cannot distinguish processes.
                match cq.filter(|_| self.objects.uars.get(uar).is_some()) {
                    Some(cq) => {
                        let posted = cq.arm(word, now);
                        self.follow(cqn, posted);
                    }
                    None => self.counters.bad_doorbell(),
                }
            }
            _ => {}
        }
    }

    /// Whether a doorbell of a send queue is one; else it is counted.
    pub(super) fn may_send(&self, uar: u32, qpn: u32) -> bool {
        let known = self.objects.uars.get(uar).is_some() && self.objects.qps.get(qpn).is_some();
        if !known {
            self.counters.bad_doorbell();
        }
        known
    }
}

impl Transport {
    pub(super) fn new(adapter: Arc<Adapter>) -> Self {
        let engine = Engine::new(adapter.hca().attributes.clone());
        Self { engine, adapter }
    }

    /// Looks at all of the adapter. No transfer of payload is in flight meanwhile: they are this thread's.
    pub(super) fn with<T>(&mut self, look: impl FnOnce(&mut Model<'_>) -> T) -> T {
        let mut driver = self.adapter.driver();
        let mut hca = self.adapter.hca();
        look(&mut Model {
            engine: &mut self.engine,
            driver: &mut driver,
            hca: &mut hca,
            inboxes: &self.adapter.inboxes,
        })
    }

    /// Takes in what happened. False if the worker is to end.
    pub(super) fn handle(&mut self, message: Message) -> bool {
        match message {
            Message::Execute(command) => {
                self.catch_up();
                let output = self.carry_out(&command.input, command.output_len);
                command::finish(&mut self.adapter.hca(), &command, &output);
            }
            Message::Send { uar, qpn } => {
                if self.adapter.hca().may_send(uar, qpn) {
                    self.engine.doorbell(qpn);
                }
            }
            Message::Delivery(Delivery::Packets(burst)) => {
                self.engine.packets(&mut Unlocked(&self.adapter), burst);
            }
            Message::Delivery(Delivery::PathReady) => self.engine.path_ready(),
            Message::Delivery(Delivery::Link(up)) => self.adapter.hca().link(up),
            Message::SoftwareReset => self.with(|model| {
                model.clear();
                model.hca.registers.set_interface(Interface::Disabled);
            }),
            Message::Reset => self.with(|model| {
                model.hca.renew_dma();
                model.clear();
                model.hca.registers.ready();
            }),
            Message::Ask(ask) => self.with(ask),
            Message::Look => {}
            Message::Stop => return false,
            // The commands' worker's.
            Message::Command { .. } | Message::EventQueue { .. } | Message::Arm { .. } => {}
        }
        true
    }

    /// Carries out a command and returns its output.
    pub(super) fn carry_out(&mut self, input: &[u8], output_len: usize) -> Vec<u8> {
        if command::is_about_keys(input) {
            return command::run_about_keys(&self.adapter, input, output_len);
        }
        self.with(|model| command::run(model, input, output_len))
    }

    /// Completes posted work before a command is executed, as far as the work does not depend on other devices. A driver that
    /// posts work and then changes the objects of that work relies on an adapter that is faster than its commands.
    fn catch_up(&mut self) {
        for _ in 0..CATCH_UP {
            if self.run() != Wait::No {
                return;
            }
        }
    }

    /// Does the pending work, and returns how long there will be no more.
    pub(super) fn run(&mut self) -> Wait {
        let next = self.engine.run(&mut Unlocked(&self.adapter));
        let mut hca = self.adapter.hca();
        hca.moderate(Instant::now());
        if hca.has_broken_queues() {
            drop(hca);
            self.with(|model| model.fail_users_of_broken_queues());
            hca = self.adapter.hca();
        }
        self.adapter.wait(next, &hca)
    }
}

impl Model<'_> {
    /// Forgets everything that the driver made. What was counted stays.
    pub(super) fn clear(&mut self) {
        let hca = &mut self.hca;
        hca.transport_past = sum(&hca.transport_past, &self.engine.counters());
        *self.engine = Engine::new(hca.attributes.clone());
        *self.driver = Engine::new(hca.attributes.clone());
        self.inboxes.clear();
        hca.objects = Objects::new(&hca.identity.name);
    }

    /// Queue pairs whose completions have nowhere to go cannot go on.
    fn fail_users_of_broken_queues(&mut self) {
        for cqn in std::mem::take(&mut self.hca.objects.broken) {
            let all = self.hca.objects.qps.iter();
            let users = all.filter(|(_, qp)| qp.send_cqn == cqn || qp.receive_cqn == cqn);
            let users: Vec<u32> = users.map(|(qpn, _)| qpn).collect();
            for qpn in users {
                let change = Modify {
                    state: Some(State::Err),
                    ..Modify::default()
                };
                // One that is in its first state has nothing to lose and stays there.
                let own = self.hca.objects.qps.get(qpn).is_some_and(|qp| qp.driver);
                let engine = if own { &mut *self.driver } else { &mut *self.engine };
                if let Err(error) = engine.modify(self.hca, qpn, &change) {
                    debug!(%error, qpn, "a queue pair with a broken completion queue");
                }
            }
        }
    }

    /// What the transport has done since the counters were last cleared.
    pub(super) fn transport(&self) -> TransportCounters {
        let all = sum(&self.hca.transport_past, &self.engine.counters());
        difference(&all, &self.hca.transport_base)
    }

    /// Sets the counters to zero.
    pub(super) fn reset_counters(&mut self) {
        self.hca.counters.reset();
        self.hca.bus.dma.reset_counts();
        for tally in &self.hca.tallies {
            tally.reset_counts();
        }
        self.hca.transport_base = sum(&self.hca.transport_past, &self.engine.counters());
        self.hca.link_base = self.hca.port.counters();
    }

    /// What there is.
    pub(super) fn status(&self) -> Status {
        let Hca {
            port,
            objects,
            attributes,
            ..
        } = &self.hca;
        Status {
            link: port.is_up(),
            lid: attributes.lid,
            initialised: objects.phase == Phase::Initialised,
            queue_pairs: objects.qps.len(),
            completion_queues: objects.cqs.len(),
            shared_receive_queues: objects.srqs.len(),
            memory_keys: objects.mkeys.len(),
            page_faults: objects.faults.len(),
        }
    }

    /// Ends all waiting for pages: nobody will repair them.
    pub(super) fn fail_page_faults(&mut self) {
        self.hca.objects.mkeys.listen_to_faults(false);
        for token in std::mem::take(&mut self.hca.objects.faults) {
            self.hca.objects.mkeys.resume_fault(token, true);
            self.engine.resume(token, false);
        }
    }
}
