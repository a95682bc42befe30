// SPDX-License-Identifier: MIT OR Apache-2.0

//! Command queue: waiting commands, the running command, and the results of the last commands. A worker takes commands
//! from the queue and has them executed.
//!
//! Internal command numbers are 64-bit and continue across resets. The registers show the lower 32 bits of the number
//! since the last reset. Commands with a number up to `aborted` stop before their next chunk.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use p2pmem_accel_regs::{COMMAND_POLL_LIMIT, Counter, QUEUE_DEPTH, Status, control, flags};
use tracing::debug;

use super::Shared;
use super::backoff::set_precise_sleeps;
use super::engine::{Executor, Job};

/// Executes commands until the queue is stopped.
pub(super) fn run(shared: &Shared) {
    set_precise_sleeps();
    let mut executor = Executor::new(shared);
    while let Some((number, command, port)) = shared.queue.take(|| shared.port.pinned()) {
        let job = Job {
            port: &port,
            poll_limit: Duration::from_micros(COMMAND_POLL_LIMIT.into()),
            aborted: &|| shared.queue.is_aborted(number),
        };
        let (status, value) = match executor.execute(&job, &command) {
            Ok(value) => (Status::Ok, value),
            Err(status) => (status, 0),
        };
        debug!(number, ?command, %status, value, "command completed");
        let counter = if status == Status::Ok {
            Counter::CommandsOk
        } else {
            Counter::CommandsFailed
        };
        shared.counters.add(counter, 1);
        if shared.queue.finish(number, status, value) && command.flags & flags::INTERRUPT != 0 {
            shared.interrupt(command.flags >> flags::VECTOR_SHIFT);
        }
    }
}

/// A command: values of the command registers at the doorbell, or of an entry of a ring.
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
pub(super) struct ResultEntry {
    pub(super) seq: u32,
    pub(super) status: u32,
    pub(super) value: u64,
}

#[derive(Debug)]
struct State {
    waiting: VecDeque<(u64, Command)>,
    running: bool,
    /// Numbers of the last accepted command, of the last completed command, and of the last command before the last
    /// reset.
    submitted: u64,
    completed: u64,
    base: u64,
    refused: u32,
    control: u32,
    results: [ResultEntry; QUEUE_DEPTH as usize],
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
            results: [ResultEntry::default(); QUEUE_DEPTH as usize],
            stopped: false,
        }
    }
}

/// Queue between the registers and the worker.
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

    /// Waits for the next command. Calls `begin` with the queue locked, so that no other thread sees the command as
    /// running before. Returns `None` if the queue is stopped.
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

    /// Completes the running command. Returns whether the command may raise an interrupt.
    pub(super) fn finish(&self, number: u64, status: Status, value: u64) -> bool {
        let mut state = self.lock();
        state.running = false;
        state.completed = number;
        let current = number > state.base;
        if current {
            let seq = (number - state.base) as u32;
            state.results[(seq % QUEUE_DEPTH) as usize] = ResultEntry {
                seq,
                status: status as u32,
                value,
            };
        }
        self.changed.notify_all();
        current && state.control & control::INTERRUPTS != 0
    }

    /// Returns whether the command with this number is aborted.
    pub(super) fn is_aborted(&self, number: u64) -> bool {
        number <= self.aborted.load(Ordering::SeqCst)
    }

    /// Aborts all commands that were accepted so far.
    pub(super) fn abort(&self) {
        let state = self.lock();
        self.aborted.store(state.submitted, Ordering::SeqCst);
    }

    /// Waits until no command is running or waiting. Returns false after `timeout`.
    pub(super) fn wait_idle(&self, timeout: Duration) -> bool {
        let busy = |state: &mut State| state.running || !state.waiting.is_empty();
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Resets the state that the registers show.
    pub(super) fn reset(&self) {
        let mut state = self.lock();
        state.base = state.submitted;
        state.refused = 0;
        state.control = 0;
        state.results = [ResultEntry::default(); QUEUE_DEPTH as usize];
    }

    /// Makes the worker end.
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
        // Not truncated: at most the depth of the queue.
        (state.submitted - state.completed) as u32
    }

    /// Returns the values of registers SUBMITTED and COMPLETED.
    pub(super) fn sequence(&self) -> (u32, u32) {
        let state = self.lock();
        // Truncated on purpose: the registers wrap around.
        (
            state.submitted.saturating_sub(state.base) as u32,
            state.completed.saturating_sub(state.base) as u32,
        )
    }

    pub(super) fn refused(&self) -> u32 {
        self.lock().refused
    }

    pub(super) fn result(&self, index: usize) -> ResultEntry {
        self.lock().results.get(index).copied().unwrap_or_default()
    }
}
