// SPDX-License-Identifier: MIT OR Apache-2.0

//! What an adapter's two workers share, and how a transfer is in flight while keys change.
//!
//! Locks, in the order in which they are taken: the driver's engine, then the adapter's state. Neither is held while
//! payload is moved or a transfer is held, and the state is let go while a change of a key waits for transfers. No thread
//! waits for a lock while a transfer of its own is in flight, so every such wait ends with the transfers: and they end, by
//! themselves or because DMA is aborted. The thread that serves the emulator takes none of these locks.

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
use super::wqe::Local;

/// How long a change of a key waits for transfers by the key: longer than anything can hold one.
const DRAIN_LIMIT: Duration = Duration::from_secs(90);

/// An adapter.
#[derive(Debug)]
pub(super) struct Adapter {
    hca: Mutex<Hca>,
    /// The transport of the driver's own queue pairs, which change keys and send nothing: theirs is the commands' worker,
    /// so that keys change while the transport's worker moves payload.
    driver: Mutex<Engine>,
    /// A transfer has ended while a change of a key waits.
    landed: Condvar,
    pub(super) inboxes: Arc<Inboxes>,
    pub(super) hold: Arc<Hold>,
    started: Instant,
}

/// Transfers by a key did not end in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Undrained;

impl Adapter {
    pub(super) fn new(hca: Hca, inboxes: Arc<Inboxes>, hold: Arc<Hold>) -> Self {
        Self {
            driver: Mutex::new(Engine::new(hca.attributes.clone())),
            landed: Condvar::new(),
            started: hca.started,
            hca: Mutex::new(hca),
            inboxes,
            hold,
        }
    }

    pub(super) fn hca(&self) -> MutexGuard<'_, Hca> {
        self.hca.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn driver(&self) -> MutexGuard<'_, Engine> {
        self.driver.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no access by a key is in flight that began before now. The caller has seen to it that what begins from
    /// now on finds the key changed.
    pub(super) fn drain(&self, hca: MutexGuard<'_, Hca>, index: u32) -> Result<(), Undrained> {
        let before = hca.objects.mkeys.next_flight();
        let busy = |hca: &Hca| hca.objects.mkeys.in_flight(index, before);
        if !busy(&hca) || !self.hold.drains() {
            return Ok(());
        }
        self.hold.draining(true);
        let (hca, timeout) = self
            .landed
            .wait_timeout_while(hca, DRAIN_LIMIT, |hca| busy(hca))
            .unwrap_or_else(PoisonError::into_inner);
        self.hold.draining(false);
        if timeout.timed_out() && busy(&hca) {
            warn!(name = hca.identity.name, index, "transfers by a key do not end");
            hca.counters.undrained();
            return Err(Undrained);
        }
        Ok(())
    }

    /// How long nothing else is to be done, after an engine has done its part.
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

    /// Goes on with the driver's own queue pairs.
    pub(super) fn run_driver(&self) -> Wait {
        let next = self.driver().run(&mut Unlocked(self));
        let mut hca = self.hca();
        hca.moderate(Instant::now());
        if hca.has_broken_queues() {
            self.inboxes.put(Message::Look);
        }
        self.wait(next, &hca)
    }

    /// Does a transfer of payload: its addresses are found with the state locked, its bytes are moved without.
    fn transfer<T>(
        &self,
        access: &Access,
        write: bool,
        transfer: impl FnOnce(&Dma, &[Extent]) -> Result<T, DmaError>,
    ) -> Result<T, Fault> {
        let (flight, extents, dma) = self.hca().depart(access)?;
        self.hold.pass(access.qpn, write, access.length);
        let result = transfer(&dma, &extents);
        let mut hca = self.hca();
        hca.land(flight, extents);
        drop(hca);
        self.landed.notify_all();
        result.map_err(|error| bus_fault(&error))
    }
}

/// An adapter as its transports see it: the state is locked for each call, and not while payload is moved.
#[derive(Debug)]
pub(super) struct Unlocked<'a>(pub(super) &'a Adapter);

impl Host for Unlocked<'_> {
    fn now(&mut self) -> Duration {
        self.0.started.elapsed()
    }

    fn next_send(&mut self, qpn: u32) -> Fetched<SendWork> {
        self.0.hca().next_send(qpn)
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
        // 8 bytes: in flight too short a time to be held.
        self.0.hca().atomic(access, operation)
    }

    fn atomic_result(&mut self, qpn: u32, original: u64) -> [u8; 8] {
        self.0.hca().atomic_result(qpn, original)
    }

    fn local(&mut self, qpn: u32, id: u64) -> Result<(), Status> {
        let mut hca = self.0.hca();
        let local = hca.take_local(qpn, id)?;
        let Local::Umr(umr) = local else { return Ok(()) };
        hca.change_key(qpn, &umr)?;
        // What is in flight began by the key as it was.
        self.0.drain(hca, umr.key >> 8).map_err(|Undrained| Status::MwBind)
    }

    fn invalidate(&mut self, qpn: u32, pd: u32, key: u32) -> Result<(), Fault> {
        let mut hca = self.0.hca();
        hca.invalidate(qpn, pd, key)?;
        self.0.drain(hca, key >> 8).map_err(|Undrained| Fault::Bus)
    }

    fn complete(&mut self, completion: Completion) {
        self.0.hca().complete(completion);
    }

    fn event(&mut self, event: Event) {
        self.0.hca().event(event);
    }

    fn transmit(&mut self, packets: Vec<Packet>) {
        self.0.hca().transmit(packets);
    }

    fn has_space(&mut self, dlid: u16) -> bool {
        self.0.hca().has_space(dlid)
    }

    fn in_flight(&mut self, dlid: u16) -> bool {
        self.0.hca().in_flight(dlid)
    }
}
