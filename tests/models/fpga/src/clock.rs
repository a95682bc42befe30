// SPDX-License-Identifier: MIT OR Apache-2.0

//! The clock of the samples: the time of the host, or a time that a test sets.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Called after a manual clock has advanced.
type Advanced = Arc<dyn Fn() + Send + Sync>;

/// A clock.
#[derive(Clone)]
pub struct Clock(Kind);

#[derive(Clone)]
enum Kind {
    Host(Instant),
    Manual(Arc<Mutex<Manual>>),
}

struct Manual {
    now: Duration,
    advanced: Vec<Advanced>,
}

impl Default for Clock {
    /// The time of the host.
    fn default() -> Self {
        Self(Kind::Host(Instant::now()))
    }
}

impl Clock {
    /// Creates a clock that stands still until [`Clock::advance`]. Clones share the time.
    pub fn manual() -> Self {
        Self(Kind::Manual(Arc::new(Mutex::new(Manual {
            now: Duration::ZERO,
            advanced: Vec::new(),
        }))))
    }

    /// Advances a manual clock. No effect on the time of the host.
    pub fn advance(&self, by: Duration) {
        let Kind::Manual(manual) = &self.0 else { return };
        let advanced = {
            let mut manual = manual.lock().unwrap_or_else(PoisonError::into_inner);
            manual.now += by;
            manual.advanced.clone()
        };
        advanced.iter().for_each(|call| call());
    }

    /// Returns the time.
    pub(crate) fn now(&self) -> Duration {
        match &self.0 {
            Kind::Host(start) => start.elapsed(),
            Kind::Manual(manual) => manual.lock().unwrap_or_else(PoisonError::into_inner).now,
        }
    }

    /// Returns how long a thread has to sleep until `due`; `None` if only a call of `advanced` ends the wait.
    pub(crate) fn sleep_until(&self, due: Duration) -> Option<Duration> {
        match &self.0 {
            Kind::Host(start) => Some(due.saturating_sub(start.elapsed())),
            Kind::Manual(_) => None,
        }
    }

    /// Calls `advanced` after each advance of a manual clock.
    pub(crate) fn on_advance(&self, advanced: Advanced) {
        if let Kind::Manual(manual) = &self.0 {
            let mut manual = manual.lock().unwrap_or_else(PoisonError::into_inner);
            manual.advanced.push(advanced);
        }
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.0 {
            Kind::Host(_) => "host",
            Kind::Manual(_) => "manual",
        };
        write!(f, "Clock({kind}, {:?})", self.now())
    }
}
