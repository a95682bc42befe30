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
const MAX_QUEUED: usize = 2048;
/// Packets queued from which down it has room again.
const RESUME_QUEUED: usize = MAX_QUEUED / 2;

/// Puts something into an adapter's inbox.
pub(super) type Deliver = Arc<dyn Fn(Delivery) + Send + Sync>;

/// The way from one port to another.
pub(super) struct PathState {
    queued: AtomicUsize,
    busy: AtomicUsize,
    /// The sender was told that there is no room, and waits.
    waiting: AtomicBool,
    sender: Deliver,
}

impl PathState {
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
        if self.queued.load(Ordering::SeqCst) < MAX_QUEUED {
            return true;
        }
        self.waiting.store(true, Ordering::SeqCst);
        // Packets that went after the first look told nobody.
        if self.queued.load(Ordering::SeqCst) <= RESUME_QUEUED {
            self.waiting.store(false, Ordering::SeqCst);
            return true;
        }
        false
    }

    pub(super) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::SeqCst) > 0
    }

    /// Puts packets on the way.
    pub(super) fn enqueue(self: &Arc<Self>, packets: usize) -> InFlight {
        self.queued.fetch_add(packets, Ordering::SeqCst);
        self.busy.fetch_add(1, Ordering::SeqCst);
        InFlight {
            path: self.clone(),
            packets,
        }
    }
}

impl fmt::Debug for PathState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PathState")
            .field("queued", &self.queued)
            .field("busy", &self.busy)
            .finish_non_exhaustive()
    }
}

/// Packets on their way, until they have been taken from the inbox and worked on.
#[derive(Debug)]
pub(crate) struct InFlight {
    path: Arc<PathState>,
    packets: usize,
}

impl InFlight {
    /// Something of the packets is kept: they have been taken, but not been worked on altogether.
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
            (self.path.sender)(Delivery::Room);
        }
    }
}

/// Packets that are kept by whom they were for.
#[derive(Debug)]
pub(crate) struct BusyGuard {
    path: Arc<PathState>,
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
    fn a_full_way_tells_when_it_has_room_again() {
        let (sender, inbox) = mpsc::channel();
        let path = Arc::new(PathState::new(Arc::new(move |delivery| sender.send(delivery).unwrap())));
        let first = path.enqueue(MAX_QUEUED - RESUME_QUEUED);
        assert!(path.has_room());
        let second = path.enqueue(RESUME_QUEUED);
        assert!(!path.has_room());
        assert!(inbox.try_recv().is_err());
        drop(first);
        assert!(matches!(inbox.try_recv(), Ok(Delivery::Room)));
        assert!(path.has_room());
        // Told once only.
        drop(second);
        assert!(inbox.try_recv().is_err());
    }

    #[test]
    fn what_is_held_is_busy_but_takes_no_room() {
        let path = Arc::new(PathState::new(Arc::new(|_| {})));
        let in_flight = path.enqueue(MAX_QUEUED);
        let guard = in_flight.busy_guard();
        drop(in_flight);
        assert!(path.is_busy());
        assert!(path.has_room());
        drop(guard);
        assert!(!path.is_busy());
    }
}
