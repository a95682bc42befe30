// SPDX-License-Identifier: MIT OR Apache-2.0

//! Whose turn it is: tests that share guests run one after the other, in a lane; some lanes run at a time. When there is
//! none left to begin with, one that runs is gone through from its end as well, with guests of its own.
//!
//! Every test has a thread from the start, in which it waits for its turn. So a lane is gone through before the next one
//! begins, and no guests are ended for others of the same kind to be booted soon after.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::Result;
use libtest_mimic::Trial;

use crate::bed::Log;

/// Most lanes at a time. Each has a machine or two of some gigabytes.
const MOST: usize = 4;

/// What tests share: a kernel and a topology, or a name of their own.
pub type Lane = (&'static str, String);

/// A test that shares no guests with others.
pub type Alone = fn() -> Result<()>;

/// All lanes.
#[derive(Clone)]
pub struct Lanes(Arc<Shared>);

struct Shared {
    at_once: usize,
    places: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Tests without a turn, by their place in the order of all.
    waiting: BTreeMap<usize, Lane>,
    /// How many tests of a lane run.
    running: BTreeMap<Lane, usize>,
    /// Tests that have been given a turn and did not notice yet.
    called: BTreeSet<usize>,
}

impl State {
    /// The test that is next: one of the lane that has begun, else the first of a lane of which none runs, else the last of
    /// all; but no lane is gone through twice before there was time for all tests to come.
    fn next(&self, begun: Option<&Lane>) -> Option<usize> {
        let first = |fit: &dyn Fn(&Lane) -> bool| self.waiting.iter().find(|(_, lane)| fit(lane));
        let next = first(&|lane| Some(lane) == begun).or_else(|| first(&|lane| !self.running.contains_key(lane)));
        let last = || begun.and_then(|_| self.waiting.last_key_value());
        next.or_else(last).map(|(&place, _)| place)
    }

    /// Gives turns to as many tests as may run.
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
    /// As many at a time as asked for, else one a processor.
    pub fn new(at_once: Option<usize>) -> Self {
        let processors = || thread::available_parallelism().map_or(1, usize::from).min(MOST);
        Self(Arc::new(Shared {
            at_once: at_once.unwrap_or_else(processors).max(1),
            places: AtomicUsize::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// The next place in the order of all tests.
    pub fn place(&self) -> usize {
        self.0.places.fetch_add(1, Ordering::Relaxed)
    }

    /// A test that shares no guests with others, in a lane of its own.
    pub fn alone(&self, name: &'static str, log: &Log, run: Alone) -> Trial {
        let (lanes, place, log) = (self.clone(), self.place(), log.clone());
        Trial::test(name, move || {
            let _turn = lanes.turn(place, &(name, String::new()));
            log.test(name, |_| run())
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the turn of the test at a place in the order of all.
    pub fn turn(&self, place: usize, lane: &Lane) -> Turn {
        let mut state = self.state();
        state.waiting.insert(place, lane.clone());
        state.call(self.0.at_once, None);
        self.0.changed.notify_all();
        while !state.called.remove(&place) {
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Turn {
            lanes: self.clone(),
            lane: lane.clone(),
        }
    }
}

/// A test's turn, until it is dropped.
pub struct Turn {
    lanes: Lanes,
    lane: Lane,
}

impl Turn {
    /// Whether no other test of the lane waits.
    pub fn is_last(&self) -> bool {
        !self.lanes.state().waiting.values().any(|lane| *lane == self.lane)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.lanes.state();
        state.end(&self.lane);
        state.call(self.lanes.0.at_once, Some(&self.lane));
        self.lanes.0.changed.notify_all();
    }
}
