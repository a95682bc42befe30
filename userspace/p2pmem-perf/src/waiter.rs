// SPDX-License-Identifier: MIT OR Apache-2.0

//! Waiting for completions, with a limit on the time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use clap::ValueEnum;
use p2pmem_verbs::{Completion, Completions};
use serde::{Deserialize, Serialize};

/// Polls between two reads of the clock.
const POLLS: u32 = 256;
/// How long adaptive polling polls before it sleeps: about what a sleep and an interrupt cost.
pub(crate) const SPIN: Duration = Duration::from_micros(50);
/// Longest sleep. Limits the time until a stop request is noticed.
const MAX_SLEEP: Duration = Duration::from_millis(100);

/// Set to stop all threads of a test.
pub type Stop = Arc<AtomicBool>;

/// How to wait for a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum How {
    /// Poll until it is there.
    Poll,
    /// Sleep until its event arrives.
    Events,
    /// Poll for a short time, then sleep until its event arrives.
    Adaptive,
}

impl How {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Events => "events",
            Self::Adaptive => "adaptive",
        }
    }
}

/// Waits for completions of one queue.
#[derive(Clone)]
pub struct Waiter {
    completions: Arc<Completions>,
    how: How,
    limit: Duration,
    stop: Stop,
}

impl Waiter {
    /// Creates a waiter. No other thread may poll the completion queue.
    pub fn new(completions: Arc<Completions>, how: How, limit: Duration, stop: Stop) -> Self {
        Self {
            completions,
            how,
            limit,
            stop,
        }
    }

    /// Polls completions into `into`; waits if there are none. `what` describes the awaited message for errors.
    ///
    /// # Errors
    ///
    /// The limit ended, the test was stopped, or a request failed.
    pub fn next(&self, into: &mut Vec<Completion>, what: &dyn Fn() -> String) -> Result<()> {
        self.wait(into, what)?;
        check(into, what)
    }

    /// Waits for the completion of the only outstanding request, successful or not.
    ///
    /// # Errors
    ///
    /// The limit ended, or the test was stopped.
    pub fn next_completion(&self, what: &dyn Fn() -> String) -> Result<Completion> {
        let mut completions = Vec::new();
        self.wait(&mut completions, what)?;
        completions.pop().context("no completion")
    }

    /// Polls completions into `into`; waits if there are none.
    fn wait(&self, into: &mut Vec<Completion>, what: &dyn Fn() -> String) -> Result<()> {
        into.clear();
        let start = Instant::now();
        loop {
            let rounds = if self.how == How::Events { 1 } else { POLLS };
            for _ in 0..rounds {
                if self.completions.poll(into).context("polling completions")? > 0 {
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
                    "{} did not complete within {:?}: is the link up, and is the other side running? --timeout sets the limit",
                    what(),
                    self.limit
                );
            }
            if self.how == How::Poll || self.how == How::Adaptive && waited < SPIN {
                continue;
            }
            self.completions.arm().context("requesting a completion event")?;
            // A completion before ibv_req_notify_cq() causes no event.
            if self.completions.poll(into).context("polling completions")? > 0 {
                return Ok(());
            }
            self.completions
                .wait(MAX_SLEEP.min(self.limit.saturating_sub(waited)))
                .context("waiting for a completion event")?;
        }
    }
}

/// Returns the first failure as an error: the ones after it are usually flush errors that it caused.
fn check(completions: &[Completion], what: &dyn Fn() -> String) -> Result<()> {
    match completions.iter().find_map(|done| done.failure) {
        Some(failure) => bail!("{} failed: {failure}", what()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use p2pmem_verbs::Failure;

    #[test]
    fn the_first_failure_is_reported() {
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
