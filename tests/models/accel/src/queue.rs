// SPDX-License-Identifier: MIT OR Apache-2.0

//! Commands waiting, the one running, and how the last ones ended.
//!
//! Inside, commands are numbered without wrapping and across resets; registers show the number since the last reset, cut
//! to 32 bits. A command whose number is at most `aborted` is ended without effect on what is not yet done of it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use p2pmem_accel_regs::{QUEUE_DEPTH, Status, control};

/// A command as the registers held it at the doorbell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Command {
    pub(super) op: u32,
    pub(super) flags: u32,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) argument: u64,
}

/// An entry of the result table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) seq: u32,
    pub(super) status: u32,
    pub(super) value: u64,
}

#[derive(Debug)]
struct State {
    waiting: VecDeque<(u64, Command)>,
    running: bool,
    /// Number of the last command accepted, of the last one ended, and of the last one before the last reset.
    submitted: u64,
    completed: u64,
    base: u64,
    refused: u32,
    control: u32,
    results: [Outcome; QUEUE_DEPTH as usize],
    stopped: bool,
}

impl Default for State {
    fn default() -> Self {
        Self {
            waiting: VecDeque::new(),
            running: false,
            submitted: 0,
            completed: 0,
            base: 0,
            refused: 0,
            control: 0,
            results: [Outcome::default(); QUEUE_DEPTH as usize],
            stopped: false,
        }
    }
}

/// The queue between the registers and the worker.
#[derive(Debug, Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    aborted: AtomicU64,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn submit(&self, command: Command) {
        let mut state = self.lock();
        if state.submitted - state.completed >= u64::from(QUEUE_DEPTH) {
            state.refused = state.refused.wrapping_add(1);
            return;
        }
        state.submitted += 1;
        let number = state.submitted;
        state.waiting.push_back((number, command));
        self.changed.notify_all();
    }

    /// Waits for the next command; `begin` is called before anyone else sees that it has begun. `None` when stopped.
    pub(super) fn take<T>(&self, begin: impl FnOnce() -> T) -> Option<(u64, Command, T)> {
        let mut state = self.lock();
        loop {
            if state.stopped {
                return None;
            }
            if let Some((number, command)) = state.waiting.pop_front() {
                state.running = true;
                return Some((number, command, begin()));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The command taken last has ended. Returns whether it may raise an interrupt.
    pub(super) fn finish(&self, number: u64, status: Status, value: u64) -> bool {
        let mut state = self.lock();
        state.running = false;
        state.completed = number;
        let current = number > state.base;
        if current {
            let seq = (number - state.base) as u32;
            state.results[(seq % QUEUE_DEPTH) as usize] = Outcome {
                seq,
                status: status as u32,
                value,
            };
        }
        self.changed.notify_all();
        current && state.control & control::INTERRUPTS != 0
    }

    /// Whether the command with this number was aborted.
    pub(super) fn is_aborted(&self, number: u64) -> bool {
        number <= self.aborted.load(Ordering::SeqCst)
    }

    /// Aborts everything accepted so far.
    pub(super) fn abort(&self) {
        let state = self.lock();
        self.aborted.store(state.submitted, Ordering::SeqCst);
    }

    /// Waits until nothing is running or waiting; false if that takes too long.
    pub(super) fn wait_idle(&self, timeout: Duration) -> bool {
        let busy = |state: &mut State| state.running || !state.waiting.is_empty();
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Power-on state, as the registers show it.
    pub(super) fn reset(&self) {
        let mut state = self.lock();
        state.base = state.submitted;
        state.refused = 0;
        state.control = 0;
        state.results = [Outcome::default(); QUEUE_DEPTH as usize];
    }

    /// Lets the worker end.
    pub(super) fn stop(&self) {
        self.lock().stopped = true;
        self.changed.notify_all();
    }

    pub(super) fn control(&self) -> u32 {
        self.lock().control
    }

    pub(super) fn set_control(&self, value: u32) {
        self.lock().control = value & control::INTERRUPTS;
    }

    pub(super) fn pending(&self) -> u32 {
        let state = self.lock();
        // Not truncated: no more than the queue's depth.
        (state.submitted - state.completed) as u32
    }

    /// What the SUBMITTED and COMPLETED registers show.
    pub(super) fn sequence(&self) -> (u32, u32) {
        let state = self.lock();
        // Truncated on purpose: the registers wrap.
        (
            state.submitted.saturating_sub(state.base) as u32,
            state.completed.saturating_sub(state.base) as u32,
        )
    }

    pub(super) fn refused(&self) -> u32 {
        self.lock().refused
    }

    pub(super) fn result(&self, index: usize) -> Outcome {
        self.lock().results.get(index).copied().unwrap_or_default()
    }
}
