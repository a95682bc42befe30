// SPDX-License-Identifier: MIT OR Apache-2.0

//! The times of an adapter's steps: doorbells, work requests, payload, packets, and completions.
//!
//! A trace splits the latency of a message into its parts. All adapters of a process use one clock, so the traces of two
//! adapters show when a packet left one and arrived at the other. Without a trace, a step costs one atomic load.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Maximum number of steps in a trace.
pub const MAX_STEPS: usize = 1 << 16;

/// Time 0 of the traces.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// A step of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Point {
    /// A send doorbell arrived at the registers.
    Doorbell,
    /// A work request was fetched from a send queue.
    Fetch,
    /// Payload was read from memory.
    Read,
    /// Packets were handed to the port.
    Send,
    /// Packets arrived from the port.
    Receive,
    /// Payload was written to memory.
    Write,
    /// A completion was written to its queue, with its event.
    Complete,
}

/// A step, and when it took place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The step.
    pub point: Point,
    /// The queue pair of this adapter; 0 for packets, which may be of several queue pairs.
    pub qpn: u32,
    /// Bytes of payload; 0 for steps that move none.
    pub bytes: u64,
    /// When the step began, in nanoseconds on the clock of the process.
    pub begin_ns: u64,
    /// When the step ended. Equal to `begin_ns` if the step has no duration.
    pub end_ns: u64,
}

/// A trace that has been requested, and the steps so far.
#[derive(Debug, Default)]
struct Recorded {
    steps: Vec<Step>,
    /// Maximum number of steps.
    most: usize,
    /// Steps after the maximum.
    missed: u64,
}

/// Steps of a trace, as a [`super::Handle`] returns them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Steps {
    /// The steps in the order of their ends.
    pub steps: Vec<Step>,
    /// Number of steps that did not fit.
    pub missed: u64,
}

/// The trace of an adapter.
#[derive(Debug, Default)]
pub(super) struct Trace {
    on: AtomicBool,
    recorded: Mutex<Recorded>,
}

/// The beginning of a step: `None` while no trace is requested.
#[derive(Clone, Copy, Debug)]
pub(super) struct Begin(Option<Duration>);

impl Trace {
    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a trace of at most `most` steps. Drops the steps of the trace before.
    pub(super) fn start(&self, most: usize) {
        LazyLock::force(&START);
        let mut recorded = self.recorded();
        *recorded = Recorded {
            steps: Vec::with_capacity(most.min(MAX_STEPS)),
            most: most.min(MAX_STEPS),
            missed: 0,
        };
        self.on.store(true, Ordering::Relaxed);
    }

    /// Ends the trace and returns its steps.
    pub(super) fn take(&self) -> Steps {
        let mut recorded = self.recorded();
        self.on.store(false, Ordering::Relaxed);
        let Recorded { steps, missed, .. } = std::mem::take(&mut *recorded);
        Steps { steps, missed }
    }

    /// Returns the beginning of a step.
    pub(super) fn begin(&self) -> Begin {
        Begin(self.on.load(Ordering::Relaxed).then(|| START.elapsed()))
    }

    /// Records a step that began at `begin` and ends now.
    pub(super) fn end(&self, begin: Begin, point: Point, qpn: u32, bytes: u64) {
        if let Begin(Some(begin)) = begin {
            self.record(point, qpn, bytes, begin, START.elapsed());
        }
    }

    /// Records a step without duration.
    pub(super) fn at(&self, begin: Begin, point: Point, qpn: u32) {
        if let Begin(Some(now)) = begin {
            self.record(point, qpn, 0, now, now);
        }
    }

    fn record(&self, point: Point, qpn: u32, bytes: u64, begin: Duration, end: Duration) {
        let mut recorded = self.recorded();
        // A trace may have ended since the step began.
        if !self.on.load(Ordering::Relaxed) {
            return;
        }
        if recorded.steps.len() >= recorded.most {
            recorded.missed += 1;
            return;
        }
        // Not truncated: 64 bits hold 584 years.
        recorded.steps.push(Step {
            point,
            qpn,
            bytes,
            begin_ns: begin.as_nanos() as u64,
            end_ns: end.as_nanos() as u64,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_recorded_without_a_request() {
        let trace = Trace::default();
        trace.end(trace.begin(), Point::Read, 64, 4096);
        assert_eq!(trace.take(), Steps::default());
    }

    #[test]
    fn steps_have_their_order_and_a_maximum() {
        let trace = Trace::default();
        trace.start(2);
        trace.at(trace.begin(), Point::Doorbell, 64);
        trace.end(trace.begin(), Point::Read, 64, 4096);
        trace.end(trace.begin(), Point::Complete, 64, 0);
        let found = trace.take();
        let points: Vec<_> = found
            .steps
            .iter()
            .map(|step| (step.point, step.qpn, step.bytes))
            .collect();
        assert_eq!(points, [(Point::Doorbell, 64, 0), (Point::Read, 64, 4096)]);
        assert_eq!(found.missed, 1);
        assert_eq!(found.steps[0].begin_ns, found.steps[0].end_ns);
        assert!(found.steps[1].begin_ns >= found.steps[0].end_ns);
        assert!(found.steps[1].end_ns >= found.steps[1].begin_ns);
    }

    #[test]
    fn a_step_that_ends_after_the_trace_is_dropped() {
        let trace = Trace::default();
        trace.start(10);
        let begin = trace.begin();
        assert_eq!(trace.take(), Steps::default());
        trace.end(begin, Point::Read, 64, 4096);
        trace.start(10);
        assert_eq!(trace.take(), Steps::default());
    }
}
