// SPDX-License-Identifier: MIT OR Apache-2.0

//! The order of the tests. Tests that share guests run one after the other, in a lane, and some lanes run at the same
//! time. If no lane is left to start, a second runner takes tests of a running lane from its end, with guests of its
//! own.
//!
//! Every test has a thread from the start, which waits until the test may run. All tests of a lane therefore run before
//! the next lane starts, and guests are not ended shortly before others of the same topology boot.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use libtest_mimic::Trial;

use crate::bed::Log;

/// The largest number of lanes that run at the same time. Each has one or two machines of some gigabytes.
const MOST: usize = 4;

/// The environment variable with the time from which on tests do not start, and fail: in seconds since 1970. Without it, all tests
/// start.
const UNTIL: &str = "P2PMEM_TESTS_UNTIL";

/// The key of tests that share guests: a kernel, and a topology and whose tests they are, or a name of its own.
pub type Lane = (&'static str, String);

/// A test that shares no guests.
pub type Alone = fn() -> Result<()>;

/// All lanes.
#[derive(Clone)]
pub struct Lanes(Arc<Shared>);

struct Shared {
    at_once: usize,
    until: Option<SystemTime>,
    places: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Tests that wait to run, by their position in the order of all tests.
    waiting: BTreeMap<usize, Lane>,
    /// The number of running tests of each lane.
    running: BTreeMap<Lane, usize>,
    /// Tests that may run and have not noticed yet.
    called: BTreeSet<usize>,
}

/// Returns the time of [`UNTIL`].
fn until() -> Result<Option<SystemTime>> {
    let Ok(text) = std::env::var(UNTIL) else {
        return Ok(None);
    };
    let seconds = text.parse().ok().map(Duration::from_secs);
    let time = seconds.and_then(|seconds| UNIX_EPOCH.checked_add(seconds));
    time.map(Some).with_context(|| format!("{UNTIL}={text}"))
}

impl State {
    /// Returns the next test: one of the lane `begun`, else the first test of a lane that does not run, else the last
    /// of all tests. A second runner for a lane starts only after all tests had time to arrive.
    fn next(&self, begun: Option<&Lane>) -> Option<usize> {
        let first = |fit: &dyn Fn(&Lane) -> bool| self.waiting.iter().find(|(_, lane)| fit(lane));
        let next = first(&|lane| Some(lane) == begun).or_else(|| first(&|lane| !self.running.contains_key(lane)));
        let last = || begun.and_then(|_| self.waiting.last_key_value());
        next.or_else(last).map(|(&place, _)| place)
    }

    /// Lets as many tests run as may run.
    fn call(&mut self, at_once: usize, begun: Option<&Lane>) {
        while self.running.values().sum::<usize>() < at_once {
            let next = self.next(begun);
            let Some((place, lane)) = next.and_then(|place| self.waiting.remove_entry(&place)) else {
                return;
            };
            *self.running.entry(lane).or_default() += 1;
            self.called.insert(place);
        }
    }

    fn end(&mut self, lane: &Lane) {
        if let Some(count) = self.running.get_mut(lane) {
            *count -= 1;
            if *count == 0 {
                self.running.remove(lane);
            }
        }
    }
}

impl Lanes {
    /// Makes lanes of which `at_once` run at the same time; by default one for each processor.
    ///
    /// # Errors
    ///
    /// The variable with the time from which on tests do not start has no time.
    pub fn new(at_once: Option<usize>) -> Result<Self> {
        let processors = || thread::available_parallelism().map_or(1, usize::from).min(MOST);
        Ok(Self(Arc::new(Shared {
            at_once: at_once.unwrap_or_else(processors).max(1),
            until: until()?,
            places: AtomicUsize::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
        })))
    }

    /// Returns the next position in the order of all tests.
    pub fn place(&self) -> usize {
        self.0.places.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes a test that shares no guests, in a lane of its own.
    pub fn alone(&self, name: &'static str, log: &Log, run: Alone) -> Option<Trial> {
        log.trial(name, name, false)?;
        let (lanes, place, log) = (self.clone(), self.place(), log.clone());
        Some(Trial::test(name, move || {
            let _permit = lanes.wait_for(place, &(name, String::new()));
            if lanes.is_over() {
                return log.not_started(name);
            }
            log.test(name, name, |_| run())
        }))
    }

    /// Returns whether tests must not start any more.
    pub fn is_over(&self) -> bool {
        self.0.until.is_some_and(|until| SystemTime::now() >= until)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the test at a position in the order of all tests may run.
    pub fn wait_for(&self, place: usize, lane: &Lane) -> Permit {
        let mut state = self.state();
        state.waiting.insert(place, lane.clone());
        state.call(self.0.at_once, None);
        self.0.changed.notify_all();
        while !state.called.remove(&place) {
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Permit {
            lanes: self.clone(),
            lane: lane.clone(),
        }
    }
}

/// The permission of a test to run, until it is dropped.
pub struct Permit {
    lanes: Lanes,
    lane: Lane,
}

impl Permit {
    /// Returns whether no other test of the lane waits.
    pub fn is_last(&self) -> bool {
        !self.lanes.state().waiting.values().any(|lane| *lane == self.lane)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.lanes.state();
        state.end(&self.lane);
        state.call(self.lanes.0.at_once, Some(&self.lane));
        self.lanes.0.changed.notify_all();
    }
}
