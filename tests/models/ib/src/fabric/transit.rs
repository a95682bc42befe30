// SPDX-License-Identifier: MIT OR Apache-2.0

//! What is on its way: how much, whether a way has room for more, and whether what went along it has been worked on.
//!
//! Two things are counted for each way between two ports. `queued` packets have arrived and lie in the other adapter's
//! inbox (or are being delayed): when there are too many, senders wait, as they would for credits on a real link. `busy`
//! bursts have not been worked on altogether: while there are any, nothing that is missing is taken for lost, however slow
//! the other adapter's thread may be.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::Delivery;

/// Packets queued on a way from which on it has no room.
const FULL: usize = 2048;
/// Packets queued from which down it has room again.
const LOW: usize = FULL / 2;

/// Puts something into an adapter's inbox.
pub(super) type Deliver = Arc<dyn Fn(Delivery) + Send + Sync>;

/// The way from one port to another.
pub(super) struct Way {
    queued: AtomicUsize,
    busy: AtomicUsize,
    /// The sender was told that there is no room, and waits.
    waiting: AtomicBool,
    sender: Deliver,
}

impl Way {
    pub(super) fn new(sender: Deliver) -> Self {
        Self {
            queued: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            waiting: AtomicBool::new(false),
            sender,
        }
    }

    /// Whether there is room. If not, the sender is told when there is.
    pub(super) fn has_room(&self) -> bool {
        if self.queued.load(Ordering::SeqCst) < FULL {
            return true;
        }
        self.waiting.store(true, Ordering::SeqCst);
        // Packets that went after the first look told nobody.
        if self.queued.load(Ordering::SeqCst) <= LOW {
            self.waiting.store(false, Ordering::SeqCst);
            return true;
        }
        false
    }

    pub(super) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::SeqCst) > 0
    }

    /// Puts packets on the way.
    pub(super) fn depart(self: &Arc<Self>, packets: usize) -> Flight {
        self.queued.fetch_add(packets, Ordering::SeqCst);
        self.busy.fetch_add(1, Ordering::SeqCst);
        Flight {
            way: self.clone(),
            packets,
        }
    }
}

impl fmt::Debug for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Way")
            .field("queued", &self.queued)
            .field("busy", &self.busy)
            .finish_non_exhaustive()
    }
}

/// Packets on their way, until they have been taken from the inbox and worked on.
#[derive(Debug)]
pub(crate) struct Flight {
    way: Arc<Way>,
    packets: usize,
}

impl Flight {
    /// Something of the packets is kept: they have been taken, but not been worked on altogether.
    pub(crate) fn hold(&self) -> Hold {
        self.way.busy.fetch_add(1, Ordering::SeqCst);
        Hold { way: self.way.clone() }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.way.busy.fetch_sub(1, Ordering::SeqCst);
        let left = self.way.queued.fetch_sub(self.packets, Ordering::SeqCst) - self.packets;
        if left <= LOW && self.way.waiting.swap(false, Ordering::SeqCst) {
            (self.way.sender)(Delivery::Room);
        }
    }
}

/// Packets that are kept by whom they were for.
#[derive(Debug)]
pub(crate) struct Hold {
    way: Arc<Way>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.way.busy.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_full_way_tells_when_it_has_room_again() {
        let (sender, inbox) = mpsc::channel();
        let way = Arc::new(Way::new(Arc::new(move |delivery| sender.send(delivery).unwrap())));
        let first = way.depart(FULL - LOW);
        assert!(way.has_room());
        let second = way.depart(LOW);
        assert!(!way.has_room());
        assert!(inbox.try_recv().is_err());
        drop(first);
        assert!(matches!(inbox.try_recv(), Ok(Delivery::Room)));
        assert!(way.has_room());
        // Told once only.
        drop(second);
        assert!(inbox.try_recv().is_err());
    }

    #[test]
    fn what_is_held_is_busy_but_takes_no_room() {
        let way = Arc::new(Way::new(Arc::new(|_| {})));
        let flight = way.depart(FULL);
        let hold = flight.hold();
        drop(flight);
        assert!(way.is_busy());
        assert!(way.has_room());
        drop(hold);
        assert!(!way.is_busy());
    }
}
