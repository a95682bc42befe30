// SPDX-License-Identifier: MIT OR Apache-2.0

//! Packets in flight: their number, whether a path takes more, and whether all packets of a path have been processed.
//!
//! Each path between two ports has two counters. `queued` packets have arrived in the other adapter's inbox, or are being
//! delayed: if there are too many, senders wait, as they would for credits of a real link. `busy` bursts have not been
//! processed completely: while there are any, no missing packet counts as lost, however slow the other adapter's thread is.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::Delivery;

/// The number of queued packets at which a path takes no more.
const FULL: usize = 2048;
/// The number of queued packets at which a full path takes packets again.
const LOW: usize = FULL / 2;

/// Puts something into an adapter's inbox.
pub(super) type Deliver = Arc<dyn Fn(Delivery) + Send + Sync>;

/// The path from one port to another.
pub(super) struct PortPath {
    queued: AtomicUsize,
    busy: AtomicUsize,
    /// The sender has found the path full, and waits.
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

    /// Returns whether the path takes more packets. If not, the sender is notified when it does.
    pub(super) fn has_space(&self) -> bool {
        if self.queued.load(Ordering::SeqCst) < FULL {
            return true;
        }
        self.waiting.store(true, Ordering::SeqCst);
        // Packets that were processed after the first check notified no sender.
        if self.queued.load(Ordering::SeqCst) <= LOW {
            self.waiting.store(false, Ordering::SeqCst);
            return true;
        }
        false
    }

    pub(super) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::SeqCst) > 0
    }

    /// Puts packets on the path.
    pub(super) fn depart(self: &Arc<Self>, packets: usize) -> Flight {
        self.queued.fetch_add(packets, Ordering::SeqCst);
        self.busy.fetch_add(1, Ordering::SeqCst);
        Flight {
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

/// Packets in flight, until they have been taken from the inbox and processed.
#[derive(Debug)]
pub(crate) struct Flight {
    path: Arc<PortPath>,
    packets: usize,
}

impl Flight {
    /// Something of the packets is kept: they have been taken, but not been worked on altogether.
    pub(crate) fn hold(&self) -> Hold {
        self.path.busy.fetch_add(1, Ordering::SeqCst);
        Hold {
            path: self.path.clone(),
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.path.busy.fetch_sub(1, Ordering::SeqCst);
        let left = self.path.queued.fetch_sub(self.packets, Ordering::SeqCst) - self.packets;
        if left <= LOW && self.path.waiting.swap(false, Ordering::SeqCst) {
            (self.path.sender)(Delivery::PathReady);
        }
    }
}

/// Packets that the receiving adapter keeps.
#[derive(Debug)]
pub(crate) struct Hold {
    path: Arc<PortPath>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.path.busy.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_full_way_tells_when_it_has_room_again() {
        let (sender, inbox) = mpsc::channel();
        let path = Arc::new(PortPath::new(Arc::new(move |delivery| sender.send(delivery).unwrap())));
        let first = path.depart(FULL - LOW);
        assert!(path.has_space());
        let second = path.depart(LOW);
        assert!(!path.has_space());
        assert!(inbox.try_recv().is_err());
        drop(first);
        assert!(matches!(inbox.try_recv(), Ok(Delivery::PathReady)));
        assert!(path.has_space());
        // Notified once only.
        drop(second);
        assert!(inbox.try_recv().is_err());
    }

    #[test]
    fn what_is_held_is_busy_but_takes_no_room() {
        let path = Arc::new(PortPath::new(Arc::new(|_| {})));
        let flight = path.depart(FULL);
        let hold = flight.hold();
        drop(flight);
        assert!(path.is_busy());
        assert!(path.has_space());
        drop(hold);
        assert!(!path.is_busy());
    }
}
