// SPDX-License-Identifier: MIT OR Apache-2.0

//! State that both workers share, and transfers in flight while memory keys change.
//!
//! Lock order: the engine of the REG_UMR queue pairs, then the adapter's state. No thread holds either lock while it
//! moves payload or holds a transfer. Atomics are the exception: they move 8 bytes with the state locked. A change of a
//! memory key drops the state lock while it waits for transfers. No thread waits for a lock while its own transfer is
//! in flight. So each wait ends when the transfers end, either normally or because DMA is aborted. The thread that
//! serves the emulator takes none of these locks.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use p2pmem_ib::{
    Access, Atomic, Completion, Engine, Event, Fault, Fetched, Host, Next, Packet, Queue, ReceiveWork, SendWork, Status,
};
use p2pmem_vfio_user::{Dma, DmaError, Extent};
use tracing::warn;

use super::hold::Hold;
use super::host::bus_fault;
use super::inbox::{Inboxes, Message, Wait};
use super::model::Hca;
use super::trace::{Point, Trace};
use super::wqe::LocalOp;

/// Maximum time a change of a memory key waits for transfers. Longer than `hold::HOLD_TIMEOUT`.
const DRAIN_LIMIT: Duration = Duration::from_secs(90);

/// State of an adapter, shared by its workers.
#[derive(Debug)]
pub(super) struct Adapter {
    hca: Mutex<Hca>,
    /// Engine of the REG_UMR queue pairs, which change memory keys and send no packets. The command worker runs this
    /// engine, so memory keys can change while the transport worker moves payload.
    umr_engine: Mutex<Engine>,
    /// Notified at the end of each transfer; a change of a memory key waits for it.
    transfer_ended: Condvar,
    pub(super) inboxes: Arc<Inboxes>,
    pub(super) hold: Arc<Hold>,
    started: Instant,
}

/// Transfers that use a memory key did not end within [`DRAIN_LIMIT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DrainTimeout;

impl Adapter {
    pub(super) fn new(hca: Hca, inboxes: Arc<Inboxes>, hold: Arc<Hold>) -> Self {
        Self {
            umr_engine: Mutex::new(Engine::new(hca.attributes.clone())),
            transfer_ended: Condvar::new(),
            started: hca.started,
            hca: Mutex::new(hca),
            inboxes,
            hold,
        }
    }

    /// Returns the trace of the adapter's steps.
    pub(super) fn trace(&self) -> &Trace {
        &self.inboxes.trace
    }

    pub(super) fn hca(&self) -> MutexGuard<'_, Hca> {
        self.hca.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn umr_engine(&self) -> MutexGuard<'_, Engine> {
        self.umr_engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no transfer that uses mkey `index` and began before this call is in flight. The caller has already
    /// changed the mkey, so later transfers use the new state.
    pub(super) fn drain(&self, hca: MutexGuard<'_, Hca>, index: u32) -> Result<(), DrainTimeout> {
        let before = hca.objects.mkeys.next_transfer();
        let busy = |hca: &Hca| hca.objects.mkeys.in_flight(index, before);
        if !busy(&hca) || !self.hold.drain_enabled() {
            return Ok(());
        }
        self.hold.draining(true);
        let (hca, timeout) = self
            .transfer_ended
            .wait_timeout_while(hca, DRAIN_LIMIT, |hca| busy(hca))
            .unwrap_or_else(PoisonError::into_inner);
        self.hold.draining(false);
        if timeout.timed_out() && busy(&hca) {
            warn!(
                name = hca.identity.name,
                index, "transfers that use a memory key did not end in time"
            );
            hca.counters.undrained();
            return Err(DrainTimeout);
        }
        Ok(())
    }

    /// Returns how long a worker may sleep, from the result of its engine and the moderated events.
    pub(super) fn wait(&self, next: Next, hca: &Hca) -> Wait {
        let engine = match next {
            Next::More => return Wait::No,
            Next::At(time) => self.started.checked_add(time),
            Next::Idle => None,
        };
        match (engine, hca.next_moderated()) {
            (Some(a), Some(b)) => Wait::Until(a.min(b)),
            (Some(time), None) | (None, Some(time)) => Wait::Until(time),
            (None, None) => Wait::Forever,
        }
    }

    /// Runs the engine of the REG_UMR queue pairs.
    pub(super) fn run_umr_engine(&self) -> Wait {
        let next = self.umr_engine().run(&mut AdapterHost(self));
        let mut hca = self.hca();
        hca.fire_moderated_events(Instant::now());
        if hca.has_broken_cqs() {
            self.inboxes.put(Message::BrokenCqs);
        }
        self.wait(next, &hca)
    }

    /// Transfers payload. The state is locked for the address translation, and unlocked while the bytes are moved.
    fn transfer<T>(
        &self,
        access: &Access,
        write: bool,
        transfer: impl FnOnce(&Dma, &[Extent]) -> Result<T, DmaError>,
    ) -> Result<T, Fault> {
        let begin = self.trace().begin();
        let (id, extents, dma) = self.hca().begin_transfer(access)?;
        self.hold.hold_if_requested(access.qpn, write, access.length);
        let result = transfer(&dma, &extents);
        let mut hca = self.hca();
        hca.end_transfer(id, extents);
        drop(hca);
        self.transfer_ended.notify_all();
        let point = if write { Point::Write } else { Point::Read };
        self.trace().end(begin, point, access.qpn, access.length);
        result.map_err(|error| bus_fault(&error))
    }
}

/// [`Host`] of the transport engines: locks the state for each call, except while payload is moved.
#[derive(Debug)]
pub(super) struct AdapterHost<'a>(pub(super) &'a Adapter);

impl Host for AdapterHost<'_> {
    fn now(&mut self) -> Duration {
        self.0.started.elapsed()
    }

    fn next_send(&mut self, qpn: u32) -> Fetched<SendWork> {
        let begin = self.0.trace().begin();
        let fetched = self.0.hca().next_send(qpn);
        if matches!(fetched, Fetched::Work(_)) {
            self.0.trace().end(begin, Point::Fetch, qpn, 0);
        }
        fetched
    }

    fn next_receive(&mut self, queue: Queue) -> Fetched<ReceiveWork> {
        self.0.hca().next_receive(queue)
    }

    fn read(&mut self, access: &Access, data: &mut [u8]) -> Result<(), Fault> {
        self.0
            .transfer(access, false, |dma, extents| dma.read_extents(extents, data))
    }

    fn write(&mut self, access: &Access, data: &[u8]) -> Result<(), Fault> {
        self.0
            .transfer(access, true, |dma, extents| dma.write_extents(extents, data))
    }

    fn check(&mut self, access: &Access) -> Result<(), Fault> {
        self.0.hca().check(access)
    }

    fn atomic(&mut self, access: &Access, operation: Atomic) -> Result<u64, Fault> {
        // An atomic moves its 8 bytes with the state locked, so no mkey changes while the atomic is in flight.
        self.0.hca().atomic(access, operation)
    }

    fn atomic_result(&mut self, qpn: u32, original: u64) -> [u8; 8] {
        self.0.hca().atomic_result(qpn, original)
    }

    fn local(&mut self, qpn: u32, id: u64) -> Result<(), Status> {
        let mut hca = self.0.hca();
        let local = hca.take_local(qpn, id)?;
        let LocalOp::Umr(umr) = local else { return Ok(()) };
        hca.change_key(qpn, &umr)?;
        // Transfers in flight still use the previous state of the mkey.
        self.0.drain(hca, umr.key >> 8).map_err(|DrainTimeout| Status::MwBind)
    }

    fn invalidate(&mut self, qpn: u32, pd: u32, key: u32) -> Result<(), Fault> {
        let mut hca = self.0.hca();
        hca.invalidate(qpn, pd, key)?;
        self.0.drain(hca, key >> 8).map_err(|DrainTimeout| Fault::Bus)
    }

    fn complete(&mut self, completion: Completion) {
        let begin = self.0.trace().begin();
        let (Completion::Send { qpn, .. } | Completion::Receive { qpn, .. }) = completion;
        self.0.hca().complete(completion);
        self.0.trace().end(begin, Point::Complete, qpn, 0);
    }

    fn event(&mut self, event: Event) {
        self.0.hca().event(event);
    }

    fn transmit(&mut self, packets: Vec<Packet>) {
        let begin = self.0.trace().begin();
        self.0.hca().transmit(packets);
        self.0.trace().end(begin, Point::Send, 0, 0);
    }

    fn has_space(&mut self, dlid: u16) -> bool {
        self.0.hca().has_space(dlid)
    }

    fn in_flight(&mut self, dlid: u16) -> bool {
        self.0.hca().in_flight(dlid)
    }
}
