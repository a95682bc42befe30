// SPDX-License-Identifier: MIT OR Apache-2.0

//! Rings: their registers, and the workers that execute their entries.
//!
//! Each ring has a worker. The worker reads an entry from BAR2 once, when its turn comes, and uses the copy, so that the
//! guest can change the memory at any time. A ring that is disabled, aborted or reset is not reported on any more: its
//! worker ends the entry in progress, and only then is the ring disabled for the driver. `Ring::aborts` counts these
//! events; an entry belongs to the number at which it was taken.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use p2pmem_accel_regs::ring::{self as regs, Entry, Progress, control, reg};
use p2pmem_accel_regs::{Counter, MSIX_VECTORS, RESULT_SIZE, Status, flags};
use p2pmem_vfio_user::Dma;
use serde::Serialize;
use tracing::{debug, warn};

use super::Shared;
use super::backoff::set_precise_sleeps;
use super::engine::{Executor, Job, failed};
use super::port::Port;
use super::queue::Command;

/// State of a ring, for the control socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RingState {
    /// `disabled`, `running`, `stopping` or `error`.
    pub state: &'static str,
    /// Consumer index.
    pub head: u32,
    /// Producer index.
    pub tail: u32,
    /// Status with which the ring stopped; 0 if none.
    pub status: u32,
}

/// Values of the registers that configure a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Settings {
    base: u64,
    entries: u32,
    poll_limit: u32,
    report: u64,
    /// Without ENABLE.
    control: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            base: 0,
            entries: 0,
            poll_limit: regs::DEFAULT_POLL_LIMIT,
            report: 0,
            control: 0,
        }
    }
}

impl Settings {
    /// Checks that ring and reports are in a memory of `memory` bytes, and do not overlap.
    fn check(&self, memory: u64) -> Result<(), Status> {
        let ok = |good: bool| if good { Ok(()) } else { Err(Status::BadRing) };
        ok(self.entries.is_power_of_two() && self.entries <= regs::MAX_ENTRIES)?;
        let len = u64::from(self.entries) * regs::ENTRY_SIZE;
        let end = self.base.checked_add(len).ok_or(Status::BadRing)?;
        ok(self.base % regs::ENTRY_SIZE == 0 && end <= memory)?;
        ok(self.control & !control::KNOWN == 0)?;
        let (to_memory, to_bus) = (control::REPORT_MEMORY, control::REPORT_BUS);
        ok(self.control & (to_memory | to_bus) != to_memory | to_bus)?;
        ok(self.report % regs::REPORT_SIZE == 0 || self.control & (to_memory | to_bus) == 0)?;
        if self.control & to_memory != 0 {
            let report_end = self.report.checked_add(regs::REPORT_SIZE).ok_or(Status::BadRing)?;
            ok(report_end <= memory && (report_end <= self.base || end <= self.report))?;
        }
        ok(self.control & control::ERROR_INTERRUPT == 0 || self.vector() < u32::from(MSIX_VECTORS))
    }

    fn vector(&self) -> u32 {
        (self.control >> control::VECTOR_SHIFT) & 0xff
    }

    /// Offset in BAR2 of the entry with this index. The settings must be valid.
    fn entry(&self, index: u32) -> u64 {
        self.base + u64::from(index & (self.entries - 1)) * regs::ENTRY_SIZE
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Disabled,
    Running,
    Error,
}

#[derive(Debug, Default)]
struct State {
    settings: Settings,
    phase: Phase,
    /// The worker executes an entry, or reports on it.
    busy: bool,
    head: u32,
    tail: u32,
    stopped: Option<Status>,
    /// DMA since the ring was enabled. Fails permanently once the ring is disabled.
    port: Option<Port>,
    /// The worker has to end.
    ended: bool,
}

impl State {
    fn shown(&self) -> regs::State {
        match self.phase {
            Phase::Running => regs::State::Running,
            _ if self.busy => regs::State::Stopping,
            Phase::Disabled => regs::State::Disabled,
            Phase::Error => regs::State::Error,
        }
    }

    fn progress(&self) -> Progress {
        Progress {
            head: self.head,
            stopped: self.stopped,
        }
    }
}

/// A ring.
#[derive(Debug)]
pub(super) struct Ring {
    state: Mutex<State>,
    changed: Condvar,
    /// How often the ring was disabled or aborted. Changed with the state locked.
    aborts: AtomicU64,
    port: Port,
}

/// An entry whose turn it is.
struct Turn {
    index: u32,
    settings: Settings,
    port: Port,
    /// Value of `aborts` when the entry was taken.
    aborts: u64,
    /// The producer index is too far ahead.
    bad_tail: bool,
}

impl Ring {
    pub(super) fn new(dma: &Dma) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            aborts: AtomicU64::new(0),
            port: Port::new(dma),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn port(&self) -> &Port {
        &self.port
    }

    pub(super) fn state(&self) -> RingState {
        let state = self.lock();
        RingState {
            state: match state.shown() {
                regs::State::Disabled => "disabled",
                regs::State::Running => "running",
                regs::State::Stopping => "stopping",
                regs::State::Error => "error",
            },
            head: state.head,
            tail: state.tail,
            status: state.stopped.map_or(0, |status| status as u32),
        }
    }

    // The following functions are called on the serving thread.

    /// Returns the 8 bytes of registers at `offset`, a multiple of 8. `None` if the offset is unknown.
    pub(super) fn read64(&self, offset: u64) -> Option<u64> {
        let pair = |low: u32, high: u32| u64::from(low) | (u64::from(high) << 32);
        let state = self.lock();
        let settings = &state.settings;
        Some(match offset {
            reg::BASE => settings.base,
            reg::ENTRIES => pair(settings.entries, settings.poll_limit),
            reg::REPORT => settings.report,
            reg::CONTROL => {
                let enabled = if state.phase == Phase::Disabled {
                    0
                } else {
                    control::ENABLE
                };
                pair(settings.control | enabled, state.shown() as u32)
            }
            reg::HEAD => state.progress().to_u64(),
            reg::TAIL => pair(state.tail, 0),
            _ => return None,
        })
    }

    /// Writes 4 bytes of registers. Returns false if the register is unknown, read-only, or cannot be written in this
    /// state. `memory` is the size of BAR2.
    pub(super) fn write32(&self, offset: u64, value: u32, memory: u64) -> bool {
        fn half(word: &mut u64, high: bool, value: u32) {
            let shift = if high { 32 } else { 0 };
            *word = *word & !(0xffff_ffff << shift) | (u64::from(value) << shift);
        }
        const BASE_HIGH: u64 = reg::BASE + 4;
        const REPORT_HIGH: u64 = reg::REPORT + 4;
        let mut state = self.lock();
        match offset {
            reg::CONTROL => return self.write_control(&mut state, value, memory),
            reg::TAIL => {
                if state.phase == Phase::Running {
                    state.tail = value;
                    self.changed.notify_all();
                }
                return true;
            }
            _ if state.shown() != regs::State::Disabled => return false,
            reg::BASE => half(&mut state.settings.base, false, value),
            BASE_HIGH => half(&mut state.settings.base, true, value),
            reg::ENTRIES => state.settings.entries = value,
            reg::POLL_LIMIT => state.settings.poll_limit = value,
            reg::REPORT => half(&mut state.settings.report, false, value),
            REPORT_HIGH => half(&mut state.settings.report, true, value),
            reg::HEAD => (state.head, state.tail) = (value, value),
            _ => return false,
        }
        true
    }

    fn write_control(&self, state: &mut State, value: u32, memory: u64) -> bool {
        let (shown, enable) = (state.shown(), value & control::ENABLE != 0);
        match (shown, enable) {
            (regs::State::Disabled, _) => {
                state.settings.control = value & !control::ENABLE;
                if enable {
                    self.start(state, memory);
                }
            }
            (regs::State::Running, true) => {}
            (_, true) => return false,
            (_, false) => {
                if state.phase == Phase::Running || state.busy {
                    self.cut(state);
                }
                state.phase = Phase::Disabled;
                state.stopped = None;
            }
        }
        true
    }

    fn start(&self, state: &mut State, memory: u64) {
        state.tail = state.head;
        state.stopped = state.settings.check(memory).err();
        state.phase = match state.stopped {
            None => Phase::Running,
            Some(_) => Phase::Error,
        };
        state.port = Some(self.port.pinned());
        debug!(settings = ?state.settings, phase = ?state.phase, "ring enabled");
    }

    /// Aborts the entry in progress, and makes its DMA and all later DMA since the ring was enabled fail.
    fn cut(&self, state: &mut State) {
        self.aborts.fetch_add(1, Ordering::SeqCst);
        self.port.abort();
        state.port = None;
        self.changed.notify_all();
    }

    /// Stops the ring with [`Status::Aborted`] if it runs.
    pub(super) fn abort(&self) {
        let mut state = self.lock();
        if state.phase == Phase::Running {
            self.cut(&mut state);
            state.phase = Phase::Error;
            state.stopped = Some(Status::Aborted);
        }
    }

    /// Waits until the worker executes nothing. Returns false after `timeout`.
    pub(super) fn wait_idle(&self, timeout: Duration) -> bool {
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), timeout, |state| state.busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Resets the registers. The ring must be aborted and idle.
    pub(super) fn reset(&self) {
        let mut state = self.lock();
        *state = State {
            busy: state.busy,
            ended: state.ended,
            ..State::default()
        };
    }

    /// Makes the worker end.
    pub(super) fn stop(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    // The following functions are called on the worker.

    /// Waits for the next entry. Returns `None` if the worker has to end.
    fn take(&self) -> Option<Turn> {
        let mut state = self.lock();
        if state.busy {
            state.busy = false;
            // A reset may wait for this.
            self.changed.notify_all();
        }
        loop {
            if state.ended {
                return None;
            }
            let pending = state.tail.wrapping_sub(state.head);
            if state.phase == Phase::Running && pending != 0 {
                if let Some(port) = state.port.clone() {
                    state.busy = true;
                    return Some(Turn {
                        index: state.head,
                        settings: state.settings,
                        port,
                        aborts: self.aborts.load(Ordering::SeqCst),
                        bad_tail: pending > state.settings.entries,
                    });
                }
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn is_aborted(&self, turn: &Turn) -> bool {
        self.aborts.load(Ordering::SeqCst) != turn.aborts
    }

    /// Ends a turn: increments the consumer index, or stops the ring. Returns the progress to report; `None` if the ring
    /// was disabled or aborted meanwhile, or if the device is being reset, which aborts DMA first.
    fn finish(&self, turn: &Turn, result: Result<(), Status>) -> Option<Progress> {
        let mut state = self.lock();
        if result.is_ok() {
            state.head = state.head.wrapping_add(1);
        }
        if self.is_aborted(turn) {
            return None;
        }
        if let Err(status) = result {
            state.phase = Phase::Error;
            state.stopped = Some(status);
            if status == Status::Aborted {
                return None;
            }
        }
        Some(state.progress())
    }

    /// Stops the ring because a report could not be written.
    fn stop_with(&self, turn: &Turn, status: Status) {
        let mut state = self.lock();
        if !self.is_aborted(turn) && state.phase == Phase::Running {
            state.phase = Phase::Error;
            state.stopped = Some(status);
        }
    }
}

/// Executes the entries of a ring until the ring is stopped.
pub(super) fn run(shared: &Shared, ring: &Ring) {
    set_precise_sleeps();
    let mut executor = Executor::new(shared);
    while let Some(turn) = ring.take() {
        let mut entry_flags = 0;
        let result = step(shared, ring, &mut executor, &turn, &mut entry_flags);
        if result.is_ok() {
            shared.counters.add(Counter::RingEntries, 1);
        }
        let Some(progress) = ring.finish(&turn, result) else {
            debug!(index = turn.index, ?result, "an entry was aborted");
            continue;
        };
        let mut stopped = progress.stopped.is_some();
        if let Err(status) = report(shared, &turn, progress) {
            ring.stop_with(&turn, status);
            stopped = true;
        }
        if stopped {
            warn!(index = turn.index, ?progress, "a ring stopped with an error");
            shared.counters.add(Counter::RingErrors, 1);
        }
        if entry_flags & flags::INTERRUPT != 0 {
            shared.interrupt_if_enabled(entry_flags >> flags::VECTOR_SHIFT);
        }
        if stopped && turn.settings.control & control::ERROR_INTERRUPT != 0 {
            shared.interrupt_if_enabled(turn.settings.vector());
        }
    }
}

/// Executes an entry, and writes its result if the entry asks for that. Sets `entry_flags` to the flags of a valid entry.
fn step(
    shared: &Shared,
    ring: &Ring,
    executor: &mut Executor<'_>,
    turn: &Turn,
    entry_flags: &mut u32,
) -> Result<(), Status> {
    if turn.bad_tail {
        return Err(Status::BadRing);
    }
    let mut bytes = [0; regs::ENTRY_SIZE as usize];
    let read = shared.memory.read(turn.settings.entry(turn.index), &mut bytes);
    read.map_err(|_| Status::BadRing)?;
    shared.counters.add(Counter::ControlRead, regs::ENTRY_SIZE);
    let entry = Entry::decode(&bytes)?;
    if let Some(at) = entry.result {
        if at % 8 != 0 {
            return Err(Status::BadAlignment);
        }
        let end = at.checked_add(RESULT_SIZE).ok_or(Status::BadRange)?;
        if end > shared.memory.len() {
            return Err(Status::BadRange);
        }
    }
    let job = Job {
        port: &turn.port,
        poll_limit: Duration::from_micros(turn.settings.poll_limit.into()),
        aborted: &|| ring.is_aborted(turn),
    };
    let command = Command {
        op: entry.op as u32,
        flags: entry.flags,
        offset: entry.offset,
        length: entry.length,
        argument: entry.argument,
    };
    let result = executor.execute(&job, &command);
    *entry_flags = entry.flags;
    if let Some(at) = entry.result {
        let (status, value) = match result {
            Ok(value) => (Status::Ok, value),
            Err(status) => (status, 0),
        };
        let head = u64::from(turn.index) | (u64::from(status as u32) << 32);
        shared.store_control(at + 8, &value.to_le_bytes())?;
        shared.store_control(at, &head.to_le_bytes())?;
    }
    result.map(drop)
}

/// Writes a report to where the ring's settings want it.
fn report(shared: &Shared, turn: &Turn, progress: Progress) -> Result<(), Status> {
    let bytes = progress.to_u64().to_le_bytes();
    let settings = &turn.settings;
    if settings.control & control::REPORT_MEMORY != 0 {
        return shared.store_control(settings.report, &bytes);
    }
    if settings.control & control::REPORT_BUS != 0 {
        let result = turn.port.data.write(settings.report, &bytes);
        return result.map_err(|error| failed("a report", &error));
    }
    Ok(())
}
