// SPDX-License-Identifier: MIT OR Apache-2.0

//! Threads that use something for as long as something happens to it, or that do something at once.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};

use super::inflight::until;
use crate::in_time;

/// Does two things at once, in a thread each, which begin together: what came of them, and whether each began before the other
/// ended.
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

/// Goes through rounds of a race, each of which says whether there was one: so many at least, and until there was one in a third
/// of as many.
pub(super) fn contended(least: u32, mut round: impl FnMut() -> Result<bool>) -> Result<()> {
    let (mut rounds, mut seen) = (0, 0);
    while rounds < least || seen < least.div_ceil(3) {
        in_time!(rounds < 10 * least, "{seen} of {rounds} rounds were a race");
        rounds += 1;
        seen += u32::from(round()?);
    }
    println!("{seen} of {rounds} rounds were a race");
    Ok(())
}

/// What the users of something and who disturbs them tell each other.
#[derive(Debug, Default)]
pub(super) struct Busy {
    /// Set when the users are to end.
    enough: AtomicBool,
    /// Set when one of them has ended.
    ended: AtomicBool,
    served: AtomicU64,
    refused: AtomicU64,
}

/// What a user does until he is told to end.
type User<'a> = &'a (dyn Fn(&Busy) -> Result<()> + Sync);

impl Busy {
    /// Runs the users, each in a thread of its own, and `meanwhile` in this one. When that ends the users are told, and
    /// waited for. Errors: a user's own before those of `meanwhile`.
    pub(super) fn during(users: &[User<'_>], meanwhile: impl FnOnce(&Self) -> Result<()>) -> Result<Self> {
        let busy = Self::default();
        thread::scope(|scope| {
            let threads: Vec<_> = users
                .iter()
                .map(|user| {
                    scope.spawn(|| {
                        let result = user(&busy);
                        busy.ended.store(true, Ordering::Relaxed);
                        result
                    })
                })
                .collect();
            let result = meanwhile(&busy);
            busy.enough.store(true, Ordering::Relaxed);
            for thread in threads {
                thread.join().map_err(|_| anyhow!("a thread panicked"))??;
            }
            result
        })?;
        Ok(busy)
    }

    /// Whether a user is to go on.
    pub(super) fn goes_on(&self) -> bool {
        !self.enough.load(Ordering::Relaxed)
    }

    /// Counts what a user got.
    pub(super) fn serve(&self) {
        self.served.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts what a user did not get, as he had to expect.
    pub(super) fn refuse(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// How much users got.
    pub(super) fn served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }

    /// How much they did not get.
    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Waits until users got more than `more` more. Errors: it takes too long, or a user has ended.
    pub(super) fn await_served(&self, more: u64) -> Result<()> {
        self.counts("is served", &self.served, more)
    }

    /// Waits until users were refused more than `more` times more. Errors as before.
    pub(super) fn await_refused(&self, more: u64) -> Result<()> {
        self.counts("is refused", &self.refused, more)
    }

    /// Waits until users were refused more often than `before` times in all. Errors as before.
    pub(super) fn await_refused_beyond(&self, before: u64) -> Result<()> {
        until("is refused", || {
            ensure!(!self.ended.load(Ordering::Relaxed), "a user has ended");
            Ok(self.refused() > before)
        })
    }

    fn counts(&self, what: &str, count: &AtomicU64, more: u64) -> Result<()> {
        let seen = count.load(Ordering::Relaxed);
        until(what, || {
            ensure!(!self.ended.load(Ordering::Relaxed), "a user has ended");
            Ok(count.load(Ordering::Relaxed) > seen + more)
        })
    }
}
