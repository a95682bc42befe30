// SPDX-License-Identifier: MIT OR Apache-2.0

//! The rolling average of a rate.

use std::collections::VecDeque;
use std::time::Duration;

/// Number of the latest samples whose average is taken.
pub const SAMPLES: usize = 10;

/// The rolling average of a rate, from samples at any times.
#[derive(Debug, Clone, Default)]
pub struct Rolling {
    /// Time and bytes between two samples.
    samples: VecDeque<(Duration, u64)>,
    last: (Duration, u64),
    range: Option<(f64, f64)>,
}

/// Returns bytes per second.
fn rate(time: Duration, bytes: u64) -> f64 {
    if time.is_zero() {
        return 0.0;
    }
    bytes as f64 / time.as_secs_f64()
}

impl Rolling {
    /// Takes a sample: `bytes` since the start, at the time `now` since the start. Returns bytes per second since the last
    /// sample, and the rolling average.
    pub fn sample(&mut self, now: Duration, bytes: u64) -> (f64, f64) {
        let part = (now.saturating_sub(self.last.0), bytes.saturating_sub(self.last.1));
        self.last = (now, bytes);
        self.samples.push_back(part);
        if self.samples.len() > SAMPLES {
            self.samples.pop_front();
        }
        let time = self.samples.iter().map(|(time, _)| time).sum();
        let average = rate(time, self.samples.iter().map(|(_, bytes)| bytes).sum());
        let (least, most) = self.range.unwrap_or((average, average));
        self.range = Some((least.min(average), most.max(average)));
        (rate(part.0, part.1), average)
    }

    /// Returns the lowest and the highest rolling average; `None` without a sample.
    pub fn range(&self) -> Option<(f64, f64)> {
        self.range
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_is_that_of_the_latest_samples() {
        let mut rolling = Rolling::default();
        assert_eq!(rolling.range(), None);
        let second = Duration::from_secs(1);
        let mut bytes = 0;
        for i in 1..=20 {
            // 100 bytes per second, then 200.
            bytes += if i <= 10 { 100 } else { 200 };
            let (now, average) = rolling.sample(i * second, bytes);
            let expected = if i <= 10 {
                100.0
            } else {
                100.0 + 10.0 * f64::from(i - 10)
            };
            assert_eq!((now, average), (if i <= 10 { 100.0 } else { 200.0 }, expected), "{i}");
        }
        assert_eq!(rolling.range(), Some((100.0, 200.0)));
        // Two samples at the same time have no rate.
        assert_eq!(rolling.sample(20 * second, bytes).0, 0.0);
    }
}
