// SPDX-License-Identifier: MIT OR Apache-2.0

//! Waiting for completions, with a limit.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

use crate::sys::verbs::{Completion, Completions};

/// The number of polls before the clock is read.
const ROUND: u32 = 256;
/// How long one sleep lasts at most, so that a stop is seen.
const NAP: Duration = Duration::from_millis(100);

/// Set where all that goes on is to end.
pub type Stop = Arc<AtomicBool>;

/// Waits for completions of one queue.
#[derive(Clone)]
pub struct Waiter {
    completions: Arc<Completions>,
    /// Sleep instead of asking all the time.
    events: bool,
    limit: Duration,
    stop: Stop,
}

impl Waiter {
    /// For a queue of which nobody else takes completions.
    pub fn new(completions: Arc<Completions>, events: bool, limit: Duration, stop: Stop) -> Self {
        Self {
            completions,
            events,
            limit,
            stop,
        }
    }

    /// Takes the completions that are there; where there are none it waits for one. `what` says what is waited for.
    ///
    /// # Errors
    ///
    /// The limit is over, the test was stopped, or a request failed.
    pub fn next(&self, into: &mut Vec<Completion>, what: &dyn Fn() -> String) -> Result<()> {
        self.wait(into, what)?;
        check(into, what)
    }

    /// As [`Waiter::next`], of a queue with one request: its completion, failed or not.
    ///
    /// # Errors
    ///
    /// The limit is over, or the test was stopped.
    pub fn any(&self, what: &dyn Fn() -> String) -> Result<Completion> {
        let mut completions = Vec::new();
        self.wait(&mut completions, what)?;
        completions.pop().context("no completion")
    }

    /// Takes the completions that are there; where there are none it waits for one.
    fn wait(&self, into: &mut Vec<Completion>, what: &dyn Fn() -> String) -> Result<()> {
        into.clear();
        let start = Instant::now();
        loop {
            let rounds = if self.events { 1 } else { ROUND };
            for _ in 0..rounds {
                if self.completions.poll(into).context("asking for completions")? > 0 {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            if self.stop.load(Ordering::Relaxed) {
                bail!("stopped while waiting for {}", what());
            }
            let waited = start.elapsed();
            if waited >= self.limit {
                bail!(
                    "{} did not come within {:?}: is the link up, does the other side still run? --timeout sets the limit",
                    what(),
                    self.limit
                );
            }
            if !self.events {
                continue;
            }
            self.completions.arm().context("asking for an event")?;
            // What came before the queue was armed makes no event.
            if self.completions.poll(into).context("asking for completions")? > 0 {
                return Ok(());
            }
            self.completions
                .wait(NAP.min(self.limit.saturating_sub(waited)))
                .context("waiting for an event")?;
        }
    }
}

/// Fails with the first failure among completions: those after it are mostly flushed for its sake.
fn check(completions: &[Completion], what: &dyn Fn() -> String) -> Result<()> {
    match completions.iter().find_map(|done| done.failure) {
        Some(failure) => bail!("{} failed: {failure}", what()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::verbs::Failure;

    #[test]
    fn the_first_failure_is_told() {
        let good = Completion {
            id: 1,
            failure: None,
            bytes: 0,
            immediate: None,
        };
        let bad = |status| Completion {
            failure: Some(Failure { status, vendor: 0x88 }),
            ..good
        };
        assert!(check(&[good, good], &|| String::new()).is_ok());
        let error = check(&[good, bad(10), bad(5)], &|| "message 7".into()).unwrap_err();
        let text = error.to_string();
        assert!(
            text.starts_with("message 7 failed: remote access error (status 10"),
            "{text}"
        );
    }
}
