// SPDX-License-Identifier: MIT OR Apache-2.0

//! Limits the rate of blocks.

use std::time::{Duration, Instant};

/// Limits the bytes in a second. Time in which nothing was played is not made up for.
#[derive(Debug)]
pub(crate) struct Pace {
    /// The time of a block.
    interval: Duration,
    /// When the next block may begin.
    due: Instant,
}

impl Pace {
    /// Limits blocks to `rate` bytes in a second; `None` for no limit.
    pub(crate) fn new(rate: Option<u64>, block_size: u64, now: Instant) -> Self {
        let seconds = rate.map_or(0.0, |rate| block_size as f64 / rate.max(1) as f64);
        Self {
            interval: Duration::from_secs_f64(seconds),
            due: now,
        }
    }

    /// Returns the time between two blocks.
    pub(crate) fn interval(&self) -> Duration {
        self.interval
    }

    /// Returns how long the next block has to wait.
    pub(crate) fn delay(&self, now: Instant) -> Duration {
        self.due.saturating_duration_since(now)
    }

    /// Counts a block.
    pub(crate) fn advance(&mut self, now: Instant) {
        self.due = self.due.max(now) + self.interval;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_does_not_make_up_for_a_pause() {
        let start = Instant::now();
        let mut pace = Pace::new(Some(4096), 4096, start);
        assert_eq!(pace.delay(start), Duration::ZERO);
        pace.advance(start);
        assert_eq!(pace.delay(start), Duration::from_secs(1));
        let later = start + Duration::from_secs(20);
        assert_eq!(pace.delay(later), Duration::ZERO);
        pace.advance(later);
        assert_eq!(pace.delay(later), Duration::from_secs(1));
        let mut unlimited = Pace::new(None, 4096, start);
        unlimited.advance(start);
        assert_eq!(unlimited.delay(start), Duration::ZERO);
    }
}
