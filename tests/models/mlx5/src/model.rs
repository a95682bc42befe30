// SPDX-License-Identifier: MIT OR Apache-2.0

//! State of an adapter, and the handling of each message.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use p2pmem_ib::{
    Counters as TransportCounters, Delivery, Engine, Gid, LinkCounters, Modify, Port, PortAttributes, State,
};
use p2pmem_vfio_user::{Bus, Dma};
use tracing::{debug, warn};

use super::adapter::{Adapter, AdapterHost};
use super::caps::{Caps, limit};
use super::command::{self, CounterSet, Phase, link_since, port_capability};
use super::counters::{Counters, difference, sum};
use super::cq::{Cq, PostResult};
use super::eq::{Eq, Eqe, EventType};
use super::front::Status;
use super::inbox::{Inboxes, Message, Wait};
use super::layout::constants;
use super::layout::wire::{eqe_cq_err, eqe_port_state};
use super::mkey::{Limits, Mkeys};
use super::qp::Qp;
use super::registers::{FIRST_UAR, NicInterface, Registers, UARS};
use super::srq::Srq;
use super::table::Table;
use super::trace::Point;

/// First number of most objects. Drivers treat number 0 as invalid.
const FIRST: u32 = 1;
/// First queue pair number. Numbers 0 and 1 are the special queue pairs of the port.
const FIRST_QP: u32 = 0x40;
/// Number of the only port.
const PORT: u32 = 1;
/// Shift of the port number in the port state event: the number is in the upper half of the byte.
const PORT_SHIFT: u32 = 4;
/// Syndrome of a CQ error event: overrun.
const OVERRUN: u32 = 1;
/// Default P_Key, full membership.
const DEFAULT_PKEY: u16 = 0xffff;
/// Maximum number of transport runs before a command is executed. Other adapters may send without end.
const CATCH_UP: usize = 64;
/// Size of the node description in bytes.
const NODE_DESC_SIZE: usize = 64;

/// Name and GUIDs of an adapter.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub(super) name: String,
    pub(super) node_guid: u64,
    pub(super) port_guid: u64,
}

/// Exclusive access to a whole adapter: both transport engines and the shared state. Only the transport worker creates
/// one.
#[derive(Debug)]
pub(super) struct Model<'a> {
    pub(super) engine: &'a mut Engine,
    /// Engine of the REG_UMR queue pairs.
    pub(super) umr_engine: &'a mut Engine,
    pub(super) hca: &'a mut Hca,
    pub(super) inboxes: &'a Inboxes,
}

/// State of the transport worker: the worker owns the engine and shares the adapter.
#[derive(Debug)]
pub(super) struct TransportWorker {
    engine: Engine,
    pub(super) adapter: Arc<Adapter>,
}

/// State of an adapter without its transport engines.
#[derive(Debug)]
pub(super) struct Hca {
    pub(super) identity: Identity,
    pub(super) bus: Bus,
    /// DMA handles, valid until the next reset: for queues and commands, for connected payload, for datagram payload.
    pub(super) dma: Dma,
    pub(super) payload: Dma,
    pub(super) datagrams: Dma,
    /// Source of `payload` and `datagrams` after a reset. These handles count the bytes.
    pub(super) counted_dma: [Dma; 2],
    pub(super) registers: Arc<Registers>,
    pub(super) counters: Arc<Counters>,
    pub(super) port: Port,
    pub(super) attributes: PortAttributes,
    /// Link counters at the time the driver last cleared them.
    pub(super) port_base: LinkCounters,
    /// Transport counters of engines that a reset replaced, and the total at the time the counters were last cleared.
    transport_past: TransportCounters,
    transport_base: TransportCounters,
    /// Link counters at the time [`super::Handle::reset_counters`] last cleared them.
    link_base: LinkCounters,
    pub(super) started: Instant,
    pub(super) objects: Objects,
    /// Buffer for bus addresses, kept to avoid an allocation per access.
    pub(super) extents: Vec<p2pmem_vfio_user::Extent>,
}

/// Objects and settings of the driver. A reset drops them.
#[derive(Debug)]
pub(super) struct Objects {
    pub(super) phase: Phase,
    pub(super) caps: Caps,
    pub(super) port_capabilities: u32,
    pub(super) node_description: [u8; NODE_DESC_SIZE],
    pub(super) uars: Table<()>,
    pub(super) pds: Table<()>,
    pub(super) xrcds: Table<()>,
    pub(super) transport_domains: Table<()>,
    pub(super) counter_sets: Table<CounterSet>,
    pub(super) eqs: Table<Eq>,
    pub(super) cqs: Table<Cq>,
    pub(super) qps: Table<Qp>,
    pub(super) srqs: Table<Srq>,
    pub(super) mkeys: Mkeys,
    /// CQs with a moderated event, and the time at which the event is due. The event may already be sent.
    moderated_cqs: Vec<(Instant, u32)>,
    /// Broken CQs whose queue pairs are not in the error state yet.
    broken_cqs: Vec<u32>,
    /// Tokens of page faults that are reported to the driver and not resumed yet.
    pub(super) faults: BTreeSet<u64>,
}

impl Objects {
    fn new(name: &str) -> Self {
        // Node description until the driver sets one.
        let mut node_description = [0; NODE_DESC_SIZE];
        for (to, byte) in node_description.iter_mut().zip(name.bytes().take(NODE_DESC_SIZE - 1)) {
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
            transport_domains: Table::new(FIRST, 1 << limit::LOG_TRANSPORT_DOMAINS),
            counter_sets: Table::new(FIRST, limit::Q_COUNTERS),
            eqs: Table::new(FIRST, 1 << limit::LOG_EQS),
            cqs: Table::new(FIRST, 1 << limit::LOG_CQS),
            qps: Table::new(FIRST_QP, 1 << limit::LOG_QPS),
            srqs: Table::new(FIRST, 1 << limit::LOG_SRQS),
            mkeys: Mkeys::new(Limits {
                keys: 1 << limit::LOG_MKEYS,
                ..Limits::default()
            }),
            moderated_cqs: Vec::new(),
            broken_cqs: Vec::new(),
            faults: BTreeSet::new(),
        }
    }
}

impl Hca {
    /// Returns whether the port's link is up.
    pub(super) fn port_up(&self) -> bool {
        self.port.is_up()
    }

    /// Returns the link counters since [`super::Handle::reset_counters`].
    pub(super) fn link_counters(&self) -> LinkCounters {
        link_since(&self.port.counters(), &self.link_base)
    }

    /// Returns the number of the EQ that subscribes to an event type.
    fn event_queue(&self, event: EventType) -> Option<u32> {
        self.objects
            .eqs
            .iter()
            .find(|(_, eq)| eq.subscribes_to(event))
            .map(|(eqn, _)| eqn)
    }

    /// Returns the number of the EQ for command completion events.
    pub(super) fn command_eq(&self) -> Option<u32> {
        self.event_queue(EventType::COMMAND)
    }

    /// Posts an event to EQ `eqn`. Does nothing if the EQ does not exist.
    pub(super) fn post_event(&mut self, eqn: u32, entry: Eqe) {
        self.counters.event();
        if let Some(eq) = self.objects.eqs.get_mut(eqn) {
            eq.post(entry, &self.bus, &self.dma);
        }
    }

    /// Posts an event to the EQ that subscribes to its type. Drops the event if no EQ does.
    pub(super) fn async_event(&mut self, event: EventType, entry: Eqe) {
        match self.event_queue(event) {
            Some(eqn) => self.post_event(eqn, entry),
            None => debug!(?event, "no event queue subscribes to the event"),
        }
    }

    /// Posts, schedules or drops the event that follows from [`Cq::post`] or [`Cq::arm`].
    pub(super) fn handle_post_result(&mut self, cqn: u32, result: PostResult) {
        match result {
            PostResult::NoEvent => {}
            PostResult::Broken => self.counters.lost_completion(),
            PostResult::Event => {
                if let Some(eqn) = self.objects.cqs.get(cqn).map(|cq| cq.eqn) {
                    self.post_event(eqn, Eqe::completion(cqn));
                }
            }
            PostResult::EventAt(time) => self.objects.moderated_cqs.push((time, cqn)),
            PostResult::Failed => {
                warn!(name = self.identity.name, cqn, "completion queue overrun");
                self.counters.lost_completion();
                self.objects.broken_cqs.push(cqn);
                let entry = Eqe::new(EventType::CQ_ERROR, 0)
                    .with(eqe_cq_err::CQN, cqn)
                    .with(eqe_cq_err::SYNDROME, OVERRUN);
                self.async_event(EventType::CQ_ERROR, entry);
            }
        }
    }

    /// Posts all moderated events that are due at `now`.
    pub(super) fn fire_moderated_events(&mut self, now: Instant) {
        let mut i = 0;
        while let Some((time, cqn)) = self.objects.moderated_cqs.get(i).copied() {
            if time > now {
                i += 1;
                continue;
            }
            self.objects.moderated_cqs.swap_remove(i);
            if self.objects.cqs.get_mut(cqn).is_some_and(|cq| cq.timer(now)) {
                self.handle_post_result(cqn, PostResult::Event);
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
        let mut attributes = PortAttributes {
            lid: port.lid(),
            lmc: 0,
            gids: vec![port.gid()],
            pkeys: vec![DEFAULT_PKEY],
        };
        // The other entries of the tables are invalid.
        attributes.gids.resize(limit::GIDS, Gid::default());
        attributes.pkeys.resize(limit::PKEYS, 0);
        let dma = bus.dma.pinned();
        let counted_dma = [bus.dma.tallied(), bus.dma.tallied()];
        let [payload, datagrams] = [counted_dma[0].pinned(), counted_dma[1].pinned()];
        let objects = Objects::new(&identity.name);
        Self {
            identity,
            bus,
            dma,
            payload,
            datagrams,
            counted_dma,
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

    /// Posts a port state change event.
    pub(super) fn post_port_event(&mut self, up: bool) {
        let sub_type = if up {
            constants::MLX5_PORT_CHANGE_SUBTYPE_ACTIVE
        } else {
            constants::MLX5_PORT_CHANGE_SUBTYPE_DOWN
        };
        let entry = Eqe::new(EventType::PORT, sub_type).with(eqe_port_state::PORT, PORT << PORT_SHIFT);
        self.async_event(EventType::PORT, entry);
    }

    /// Replaces the DMA handles. An abort makes the old ones fail permanently.
    fn renew_dma(&mut self) {
        self.dma = self.bus.dma.pinned();
        [self.payload, self.datagrams] = [self.counted_dma[0].pinned(), self.counted_dma[1].pinned()];
    }

    /// Returns the time at which the next moderated event is due.
    pub(super) fn next_moderated(&self) -> Option<Instant> {
        self.objects.moderated_cqs.iter().map(|(time, _)| *time).min()
    }

    /// Returns whether a broken CQ has queue pairs that are not in the error state yet.
    pub(super) fn has_broken_cqs(&self) -> bool {
        !self.objects.broken_cqs.is_empty()
    }

    /// Handles a doorbell of an EQ or CQ. Other messages are ignored.
    pub(super) fn doorbell(&mut self, message: &Message) {
        match *message {
            Message::EqDoorbell {
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
            Message::ArmCq {
                uar,
                words: [word, cqn],
            } => {
                let cqn = cqn & 0x00ff_ffff;
                let now = Instant::now();
                let cq = self.objects.cqs.get_mut(cqn);
                // Any UAR page of the process may arm a CQ. The model cannot map a UAR page to a process, so any page
                // is accepted.
                match cq.filter(|_| self.objects.uars.get(uar).is_some()) {
                    Some(cq) => {
                        let posted = cq.arm(word, now);
                        self.handle_post_result(cqn, posted);
                    }
                    None => self.counters.bad_doorbell(),
                }
            }
            _ => {}
        }
    }

    /// Returns whether the UAR page and the queue pair of a send doorbell exist. Counts a bad doorbell otherwise.
    pub(super) fn check_send_doorbell(&self, uar: u32, qpn: u32) -> bool {
        let known = self.objects.uars.get(uar).is_some() && self.objects.qps.get(qpn).is_some();
        if !known {
            self.counters.bad_doorbell();
        }
        known
    }
}

impl TransportWorker {
    pub(super) fn new(adapter: Arc<Adapter>) -> Self {
        let engine = Engine::new(adapter.hca().attributes.clone());
        Self { engine, adapter }
    }

    /// Calls `call` with exclusive access to the adapter. No payload is in flight meanwhile, because only this thread
    /// moves payload.
    pub(super) fn with<T>(&mut self, call: impl FnOnce(&mut Model<'_>) -> T) -> T {
        let mut umr_engine = self.adapter.umr_engine();
        let mut hca = self.adapter.hca();
        call(&mut Model {
            engine: &mut self.engine,
            umr_engine: &mut umr_engine,
            hca: &mut hca,
            inboxes: &self.adapter.inboxes,
        })
    }

    /// Handles a message. Returns false if the worker must end.
    pub(super) fn handle(&mut self, message: Message) -> bool {
        match message {
            Message::Execute(command) => {
                self.catch_up();
                let output = self.execute(&command.input, command.output_len);
                command::finish(&mut self.adapter.hca(), &command, &output);
            }
            Message::SendDoorbell { uar, qpn } => {
                if self.adapter.hca().check_send_doorbell(uar, qpn) {
                    self.engine.doorbell(qpn);
                }
            }
            Message::Delivery(Delivery::Packets(burst)) => {
                let trace = self.adapter.trace();
                trace.at(trace.begin(), Point::Receive, 0);
                self.engine.packets(&mut AdapterHost(&self.adapter), burst);
            }
            Message::Delivery(Delivery::PathReady) => self.engine.path_ready(),
            Message::Delivery(Delivery::Link(up)) => self.adapter.hca().post_port_event(up),
            Message::SoftwareReset => self.with(|model| {
                model.clear();
                model.hca.registers.set_interface(NicInterface::Disabled);
            }),
            Message::Reset => self.with(|model| {
                model.hca.renew_dma();
                model.clear();
                model.hca.registers.ready();
            }),
            Message::Request(request) => self.with(request),
            Message::BrokenCqs => {}
            Message::Stop => return false,
            // The command worker handles these.
            Message::Command { .. } | Message::EqDoorbell { .. } | Message::ArmCq { .. } => {}
        }
        true
    }

    /// Executes a command and returns its output of `output_len` bytes.
    pub(super) fn execute(&mut self, input: &[u8], output_len: usize) -> Vec<u8> {
        if command::is_mkey_command(input) {
            return command::run_mkey_command(&self.adapter, input, output_len);
        }
        self.with(|model| command::run(model, input, output_len))
    }

    /// Runs the transport until no work is ready, [`CATCH_UP`] times at most. Called before a command is executed: a
    /// driver that posts work and then changes an object of that work relies on the adapter to be faster than its
    /// commands.
    fn catch_up(&mut self) {
        for _ in 0..CATCH_UP {
            if self.run() != Wait::No {
                return;
            }
        }
    }

    /// Runs the transport once, posts the moderated events that are due, and returns how long the worker may sleep.
    pub(super) fn run(&mut self) -> Wait {
        let next = self.engine.run(&mut AdapterHost(&self.adapter));
        let mut hca = self.adapter.hca();
        hca.fire_moderated_events(Instant::now());
        if hca.has_broken_cqs() {
            drop(hca);
            self.with(|model| model.fail_qps_of_broken_cqs());
            hca = self.adapter.hca();
        }
        self.adapter.wait(next, &hca)
    }
}

impl Model<'_> {
    /// Drops all objects and settings of the driver. Counters keep their values.
    pub(super) fn clear(&mut self) {
        let hca = &mut self.hca;
        hca.transport_past = sum(&hca.transport_past, &self.engine.counters());
        *self.engine = Engine::new(hca.attributes.clone());
        *self.umr_engine = Engine::new(hca.attributes.clone());
        self.inboxes.clear();
        hca.objects = Objects::new(&hca.identity.name);
    }

    /// Moves the queue pairs of broken CQs to the error state: their completions would be lost.
    fn fail_qps_of_broken_cqs(&mut self) {
        for cqn in std::mem::take(&mut self.hca.objects.broken_cqs) {
            let all = self.hca.objects.qps.iter();
            let users = all.filter(|(_, qp)| qp.send_cqn == cqn || qp.receive_cqn == cqn);
            let users: Vec<u32> = users.map(|(qpn, _)| qpn).collect();
            for qpn in users {
                let change = Modify {
                    state: Some(State::Err),
                    ..Modify::default()
                };
                // A queue pair in state RST has no work to lose, and stays in RST.
                let own = self.hca.objects.qps.get(qpn).is_some_and(|qp| qp.reg_umr);
                let engine = if own { &mut *self.umr_engine } else { &mut *self.engine };
                if let Err(error) = engine.modify(self.hca, qpn, &change) {
                    debug!(%error, qpn, "queue pair of a broken completion queue stays in its state");
                }
            }
        }
    }

    /// Returns the transport counters since [`Model::reset_counters`].
    pub(super) fn transport_counters(&self) -> TransportCounters {
        let all = sum(&self.hca.transport_past, &self.engine.counters());
        difference(&all, &self.hca.transport_base)
    }

    /// Sets the counters of [`super::Handle::report`] to 0, except those of register accesses.
    pub(super) fn reset_counters(&mut self) {
        self.hca.counters.reset();
        self.hca.bus.dma.reset_counts();
        for dma in &self.hca.counted_dma {
            dma.reset_counts();
        }
        self.hca.transport_base = sum(&self.hca.transport_past, &self.engine.counters());
        self.hca.link_base = self.hca.port.counters();
    }

    /// Returns the state of the port, and the number of objects of each type.
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

    /// Fails all accesses that wait for a page fault, because no EQ for page faults is left.
    pub(super) fn fail_page_faults(&mut self) {
        self.hca.objects.mkeys.enable_page_faults(false);
        for token in std::mem::take(&mut self.hca.objects.faults) {
            self.hca.objects.mkeys.resume_fault(token, true);
            self.engine.resume(token, false);
        }
    }
}
