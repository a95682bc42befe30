// SPDX-License-Identifier: MIT OR Apache-2.0

//! Test hooks: a transfer of payload that is held in flight, and draining that can be switched off.
//!
//! A held transfer has its bus addresses already and has moved no byte. It goes on when it is released, when the function
//! is reset, or after [`LIMIT`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tracing::{info, warn};

/// How long a transfer is held at most.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

/// Which transfer is to be held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HoldRequest {
    /// Of this queue pair only.
    pub qpn: Option<u32>,
    /// Only one that writes to memory (`true`), or only one that reads it.
    pub write: Option<bool>,
    /// Only one of this many bytes or more.
    pub min_bytes: u64,
}

/// The result of [`super::Handle::held`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HoldStatus {
    /// A transfer is waited for.
    pub armed: bool,
    /// A transfer is held now.
    pub held: bool,
    /// Queue pair of the transfer that is held, or was held last.
    pub qpn: u32,
    /// Whether that transfer writes to memory.
    pub write: bool,
    /// Length of that transfer in bytes.
    pub bytes: u64,
    /// Commands and work requests that wait now until transfers by their key have ended.
    pub draining: u32,
    /// Those that had to wait, since the start.
    pub drains: u64,
    /// Transfers that went on because their time was up.
    pub expired: u64,
}

#[derive(Debug, Default)]
struct State {
    armed: Option<HoldRequest>,
    status: HoldStatus,
}

/// The hooks of one adapter.
#[derive(Debug)]
pub(super) struct Hold {
    /// Without a request for a hold, transfers need no lock.
    armed: AtomicBool,
    drain: AtomicBool,
    state: Mutex<State>,
    released: Condvar,
}

impl Default for Hold {
    fn default() -> Self {
        Self {
            armed: AtomicBool::new(false),
            drain: AtomicBool::new(true),
            state: Mutex::default(),
            released: Condvar::new(),
        }
    }
}

impl Hold {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds the next transfer that is meant. One that is held goes on.
    pub(super) fn arm(&self, request: HoldRequest) {
        let mut state = self.lock();
        state.armed = Some(request);
        state.status.held = false;
        self.armed.store(true, Ordering::SeqCst);
        self.released.notify_all();
    }

    /// Lets a held transfer go on, and holds no other.
    pub(super) fn release(&self) {
        let mut state = self.lock();
        state.armed = None;
        state.status.held = false;
        self.armed.store(false, Ordering::SeqCst);
        self.released.notify_all();
    }

    /// Whether changes of keys wait for transfers by them.
    pub(super) fn drains(&self) -> bool {
        self.drain.load(Ordering::SeqCst)
    }

    /// Switches that on or off.
    pub(super) fn set_drain(&self, on: bool) {
        self.drain.store(on, Ordering::SeqCst);
    }

    pub(super) fn status(&self) -> HoldStatus {
        let state = self.lock();
        HoldStatus {
            armed: state.armed.is_some(),
            ..state.status.clone()
        }
    }

    /// Something begins or ends to wait for transfers.
    pub(super) fn draining(&self, begins: bool) {
        let status = &mut self.lock().status;
        if begins {
            status.draining += 1;
            status.drains += 1;
        } else {
            status.draining -= 1;
        }
    }

    /// A transfer is about to move its bytes. Returns when it may. The caller holds no lock.
    pub(super) fn pass(&self, qpn: u32, write: bool, bytes: u64) {
        if !self.armed.load(Ordering::SeqCst) {
            return;
        }
        let mut state = self.lock();
        let meant = state.armed.is_some_and(|request| {
            request.qpn.is_none_or(|wanted| wanted == qpn)
                && request.write.is_none_or(|wanted| wanted == write)
                && bytes >= request.min_bytes
        });
        if !meant {
            return;
        }
        info!(qpn, write, bytes, "a transfer is held");
        state.armed = None;
        self.armed.store(false, Ordering::SeqCst);
        state.status = HoldStatus {
            held: true,
            qpn,
            write,
            bytes,
            ..state.status.clone()
        };
        let (mut state, _) = self
            .released
            .wait_timeout_while(state, LIMIT, |state| state.status.held)
            .unwrap_or_else(PoisonError::into_inner);
        if state.status.held {
            warn!(qpn, "a held transfer goes on: nobody released it");
            state.status.held = false;
            state.status.expired += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn only_the_transfer_that_is_meant_is_held() {
        let hold = Arc::new(Hold::default());
        hold.pass(1, true, 1);
        hold.arm(HoldRequest {
            qpn: Some(7),
            write: Some(true),
            min_bytes: 100,
        });
        // None of these would return.
        hold.pass(6, true, 100);
        hold.pass(7, false, 100);
        hold.pass(7, true, 99);
        assert!(hold.status().armed && !hold.status().held);
        let transfer = std::thread::spawn({
            let hold = Arc::clone(&hold);
            move || hold.pass(7, true, 4096)
        });
        while !hold.status().held {
            std::thread::yield_now();
        }
        assert!(!transfer.is_finished());
        // The next one is not meant any more.
        hold.pass(7, true, 4096);
        let status = hold.status();
        assert_eq!((status.qpn, status.bytes, status.armed), (7, 4096, false));
        hold.release();
        transfer.join().unwrap();
        assert_eq!((hold.status().held, hold.status().expired), (false, 0));
    }
}
