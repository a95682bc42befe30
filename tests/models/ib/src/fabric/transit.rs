// SPDX-License-Identifier: MIT OR Apache-2.0

//! Packets in flight: flow control of the path between two ports, and the state that defers acknowledgement timeouts.
//!
//! Each path has two counters. `queued` counts packets in the inbox of the receiving adapter, or delayed by a link.
//! Above a limit the sender waits, as for flow-control credits on a real link. `busy` counts bursts that are not
//! processed completely. While `busy` is not 0, the requester does not treat a missing acknowledgement as a loss,
//! however slow the thread of the other adapter is.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::Delivery;

/// Number of queued packets at which a path is full.
const MAX_QUEUED: usize = 2048;
/// Number of queued packets at or below which a full path accepts packets again.
const RESUME_QUEUED: usize = MAX_QUEUED / 2;

/// Puts a delivery into the inbox of an adapter.
pub(super) type Deliver = Arc<dyn Fn(Delivery) + Send + Sync>;

/// State of the path from one port to another.
pub(super) struct PortPath {
    queued: AtomicUsize,
    busy: AtomicUsize,
    /// The path was full at the last check, and the sender waits for [`Delivery::PathReady`].
    waiting: AtomicBool,
    sender: Deliver,
}

impl PortPath {
    pub(super) fn new(sender: Deliver) -> Self {
        Self {
            queued: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            waiting: AtomicBool::new(false),
            sender,
        }
    }

    /// Returns whether the path accepts packets. If not, [`Delivery::PathReady`] notifies the sender when the path
    /// accepts packets again.
    pub(super) fn has_space(&self) -> bool {
        if self.queued.load(Ordering::SeqCst) < MAX_QUEUED {
            return true;
        }
        self.waiting.store(true, Ordering::SeqCst);
        // Packets that were processed between the first load and the store of `waiting` caused no notification.
        if self.queued.load(Ordering::SeqCst) <= RESUME_QUEUED {
            self.waiting.store(false, Ordering::SeqCst);
            return true;
        }
        false
    }

    pub(super) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::SeqCst) > 0
    }

    /// Counts `packets` as queued, and one burst as busy, until the returned value is dropped.
    pub(super) fn enqueue(self: &Arc<Self>, packets: usize) -> InFlight {
        self.queued.fetch_add(packets, Ordering::SeqCst);
        self.busy.fetch_add(1, Ordering::SeqCst);
        InFlight {
            path: self.clone(),
            packets,
        }
    }
}

impl fmt::Debug for PortPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortPath")
            .field("queued", &self.queued)
            .field("busy", &self.busy)
            .finish_non_exhaustive()
    }
}

/// A burst on a path. Dropped when the burst was taken from the inbox and processed.
#[derive(Debug)]
pub(crate) struct InFlight {
    path: Arc<PortPath>,
    packets: usize,
}

impl InFlight {
    /// Keeps the path busy after the burst was taken, because the receiver keeps a part of the burst for later.
    pub(crate) fn busy_guard(&self) -> BusyGuard {
        self.path.busy.fetch_add(1, Ordering::SeqCst);
        BusyGuard {
            path: self.path.clone(),
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.path.busy.fetch_sub(1, Ordering::SeqCst);
        let left = self.path.queued.fetch_sub(self.packets, Ordering::SeqCst) - self.packets;
        if left <= RESUME_QUEUED && self.path.waiting.swap(false, Ordering::SeqCst) {
            (self.path.sender)(Delivery::PathReady);
        }
    }
}

/// Keeps a path busy while the receiver keeps packets for later.
#[derive(Debug)]
pub(crate) struct BusyGuard {
    path: Arc<PortPath>,
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.path.busy.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_full_path_notifies_its_sender_when_it_has_space() {
        let (sender, inbox) = mpsc::channel();
        let path = Arc::new(PortPath::new(Arc::new(move |delivery| sender.send(delivery).unwrap())));
        let first = path.enqueue(MAX_QUEUED - RESUME_QUEUED);
        assert!(path.has_space());
        let second = path.enqueue(RESUME_QUEUED);
        assert!(!path.has_space());
        assert!(inbox.try_recv().is_err());
        drop(first);
        assert!(matches!(inbox.try_recv(), Ok(Delivery::PathReady)));
        assert!(path.has_space());
        // The notification is sent only once.
        drop(second);
        assert!(inbox.try_recv().is_err());
    }

    #[test]
    fn a_guard_keeps_a_path_busy_but_not_full() {
        let path = Arc::new(PortPath::new(Arc::new(|_| {})));
        let in_flight = path.enqueue(MAX_QUEUED);
        let guard = in_flight.busy_guard();
        drop(in_flight);
        assert!(path.is_busy());
        assert!(path.has_space());
        drop(guard);
        assert!(!path.is_busy());
    }
}
