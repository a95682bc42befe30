// SPDX-License-Identifier: MIT OR Apache-2.0

//! Threads that use an object while the test disturbs it, and threads that act at the same time.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};

use super::inflight::until;
use crate::in_time;

/// Runs two closures in two threads that start together. Returns both results, and whether the closures overlapped in
/// time.
pub(super) fn at_once<A: Send, B>(a: impl FnOnce() -> A + Send, b: impl FnOnce() -> B) -> Result<(A, B, bool)> {
    let start = Barrier::new(2);
    let timed = |from: Instant| (from, Instant::now());
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            start.wait();
            let from = Instant::now();
            (a(), timed(from))
        });
        start.wait();
        let from = Instant::now();
        let (got, (from, to)) = (b(), timed(from));
        let (other, (other_from, other_to)) = other.join().map_err(|_| anyhow!("a thread panicked"))?;
        Ok((other, got, from < other_to && other_from < to))
    })
}

/// Runs rounds of a race. `round` returns whether the two sides overlapped. Runs at least `least` rounds, and until a
/// third of `least` rounds overlapped. Fails with an overrun after 10 times `least` rounds.
pub(super) fn contended(least: u32, mut round: impl FnMut() -> Result<bool>) -> Result<()> {
    let (mut rounds, mut seen) = (0, 0);
    while rounds < least || seen < least.div_ceil(3) {
        in_time!(
            rounds < 10 * least,
            "in {seen} of {rounds} rounds, both sides overlapped in time"
        );
        rounds += 1;
        seen += u32::from(round()?);
    }
    println!("in {seen} of {rounds} rounds, both sides overlapped in time");
    Ok(())
}

/// State that the workers and the disturbing thread share.
#[derive(Debug, Default)]
pub(super) struct Busy {
    /// Set when the workers have to end.
    stop: AtomicBool,
    /// Set when a worker has ended.
    worker_ended: AtomicBool,
    served: AtomicU64,
    refused: AtomicU64,
}

/// A closure that runs until [`Busy::goes_on`] is false.
type Worker<'a> = &'a (dyn Fn(&Busy) -> Result<()> + Sync);

impl Busy {
    /// Runs each worker in its own thread and `meanwhile` in the calling thread. When `meanwhile` returns, stops the
    /// workers and joins them. If both fail, returns a worker's error, not that of `meanwhile`.
    pub(super) fn during(workers: &[Worker<'_>], meanwhile: impl FnOnce(&Self) -> Result<()>) -> Result<Self> {
        let busy = Self::default();
        thread::scope(|scope| {
            let threads: Vec<_> = workers
                .iter()
                .map(|worker| {
                    scope.spawn(|| {
                        let result = worker(&busy);
                        busy.worker_ended.store(true, Ordering::Relaxed);
                        result
                    })
                })
                .collect();
            let result = meanwhile(&busy);
            busy.stop.store(true, Ordering::Relaxed);
            for thread in threads {
                thread.join().map_err(|_| anyhow!("a thread panicked"))??;
            }
            result
        })?;
        Ok(busy)
    }

    /// Returns whether a worker has to continue.
    pub(super) fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// Counts an operation that succeeded.
    pub(super) fn serve(&self) {
        self.served.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts an operation that failed as expected.
    pub(super) fn refuse(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of operations that succeeded.
    pub(super) fn served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }

    /// Returns the number of operations that failed as expected.
    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Waits until more than `more` further operations succeeded. Fails after a time limit, or if a worker has ended.
    pub(super) fn await_served(&self, more: u64) -> Result<()> {
        self.await_count("more operations succeed", &self.served, more)
    }

    /// Waits until more than `more` further operations failed as expected. Fails like [`Self::await_served`].
    pub(super) fn await_refused(&self, more: u64) -> Result<()> {
        self.await_count("more operations fail as expected", &self.refused, more)
    }

    /// Waits until more than `before` operations in total failed as expected. Fails like [`Self::await_served`].
    pub(super) fn await_refused_beyond(&self, before: u64) -> Result<()> {
        until("more operations fail as expected", || {
            ensure!(!self.worker_ended.load(Ordering::Relaxed), "a worker has ended early");
            Ok(self.refused() > before)
        })
    }

    fn await_count(&self, what: &str, count: &AtomicU64, more: u64) -> Result<()> {
        let seen = count.load(Ordering::Relaxed);
        until(what, || {
            ensure!(!self.worker_ended.load(Ordering::Relaxed), "a worker has ended early");
            Ok(count.load(Ordering::Relaxed) > seen + more)
        })
    }
}
