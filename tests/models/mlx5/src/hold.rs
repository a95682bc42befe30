// SPDX-License-Identifier: MIT OR Apache-2.0

//! Test hooks: hold a payload transfer in flight, and switch off draining.
//!
//! A held transfer has its bus addresses and has not moved any bytes. The transfer continues when a test releases it,
//! when the function is reset, or after [`HOLD_TIMEOUT`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tracing::{info, warn};

/// Maximum time a transfer is held.
pub(super) const HOLD_TIMEOUT: Duration = Duration::from_secs(60);

/// Conditions for the transfer to hold. All set conditions must match.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HoldRequest {
    /// Queue pair of the transfer.
    pub qpn: Option<u32>,
    /// Direction: `true` for a write to memory, `false` for a read from memory.
    pub write: Option<bool>,
    /// Minimum length in bytes.
    pub min_bytes: u64,
}

/// Result of [`super::Handle::held`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HoldStatus {
    /// Whether a hold request is pending.
    pub armed: bool,
    /// Whether a transfer is held now.
    pub held: bool,
    /// Queue pair of the transfer that is held now, or was held last.
    pub qpn: u32,
    /// Whether this transfer writes to memory.
    pub write: bool,
    /// Length of this transfer in bytes.
    pub bytes: u64,
    /// Number of mkey changes (commands and work requests) that wait now for transfers in flight.
    pub draining: u32,
    /// Number of mkey changes that had to wait since the start.
    pub drains: u64,
    /// Number of transfers that continued because the limit of 60 s expired.
    pub expired: u64,
}

#[derive(Debug, Default)]
struct State {
    armed: Option<HoldRequest>,
    status: HoldStatus,
}

/// The test hooks of one adapter.
#[derive(Debug)]
pub(super) struct Hold {
    /// Set while a request is pending. Transfers take no lock otherwise.
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

    /// Holds the next transfer that matches. Releases a held transfer.
    pub(super) fn arm(&self, request: HoldRequest) {
        let mut state = self.lock();
        state.armed = Some(request);
        state.status.held = false;
        self.armed.store(true, Ordering::SeqCst);
        self.released.notify_all();
    }

    /// Releases a held transfer and cancels a pending request.
    pub(super) fn release(&self) {
        let mut state = self.lock();
        state.armed = None;
        state.status.held = false;
        self.armed.store(false, Ordering::SeqCst);
        self.released.notify_all();
    }

    /// Returns whether a change of an mkey waits for transfers that use the mkey.
    pub(super) fn drain_enabled(&self) -> bool {
        self.drain.load(Ordering::SeqCst)
    }

    /// Sets whether a change of an mkey waits for transfers that use the mkey.
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

    /// Records the begin or the end of a wait for transfers.
    pub(super) fn draining(&self, begins: bool) {
        let status = &mut self.lock().status;
        if begins {
            status.draining += 1;
            status.drains += 1;
        } else {
            status.draining -= 1;
        }
    }

    /// Blocks a transfer that matches the pending request, before its first byte is moved. The caller must hold no
    /// lock.
    pub(super) fn hold_if_requested(&self, qpn: u32, write: bool, bytes: u64) {
        if !self.armed.load(Ordering::SeqCst) {
            return;
        }
        let mut state = self.lock();
        let matches = state.armed.is_some_and(|request| {
            request.qpn.is_none_or(|wanted| wanted == qpn)
                && request.write.is_none_or(|wanted| wanted == write)
                && bytes >= request.min_bytes
        });
        if !matches {
            return;
        }
        info!(qpn, write, bytes, "transfer held");
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
            .wait_timeout_while(state, HOLD_TIMEOUT, |state| state.status.held)
            .unwrap_or_else(PoisonError::into_inner);
        if state.status.held {
            warn!(qpn, "held transfer continues: not released in time");
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
    fn only_matching_transfer_is_held() {
        let hold = Arc::new(Hold::default());
        hold.hold_if_requested(1, true, 1);
        hold.arm(HoldRequest {
            qpn: Some(7),
            write: Some(true),
            min_bytes: 100,
        });
        // None of these matches; a match would block.
        hold.hold_if_requested(6, true, 100);
        hold.hold_if_requested(7, false, 100);
        hold.hold_if_requested(7, true, 99);
        assert!(hold.status().armed && !hold.status().held);
        let transfer = std::thread::spawn({
            let hold = Arc::clone(&hold);
            move || hold.hold_if_requested(7, true, 4096)
        });
        while !hold.status().held {
            std::thread::yield_now();
        }
        assert!(!transfer.is_finished());
        // The request is used up, so a second matching transfer does not block.
        hold.hold_if_requested(7, true, 4096);
        let status = hold.status();
        assert_eq!((status.qpn, status.bytes, status.armed), (7, 4096, false));
        hold.release();
        transfer.join().unwrap();
        assert_eq!((hold.status().held, hold.status().expired), (false, 0));
    }
}
