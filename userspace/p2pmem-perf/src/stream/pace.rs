// SPDX-License-Identifier: MIT OR Apache-2.0

//! When a source with a rate produces its frames, and which ones it drops.

use std::time::Duration;

/// Shortest wait. Frames that are due in between are produced or dropped at once.
pub const SHORTEST: Duration = Duration::from_micros(50);

/// What a source does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Produce the next frame.
    Produce,
    /// Drop this number of frames: they are due, and there is no free memory.
    Drop(u64),
    /// Wait for this time.
    Wait(Duration),
    /// Wait for free memory.
    WaitForMemory,
}

/// The pace of a source.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Bytes per second; `None` for as many as there is memory.
    pub rate: Option<u64>,
    /// Bytes of a frame.
    pub chunk: u64,
}

impl Pace {
    /// Decides what to do at the time `elapsed` since the start, when the next frame is `sequence`. `full` says that
    /// there is no free memory. A frame is due when its last sample has been taken.
    pub fn step(&self, sequence: u64, elapsed: Duration, full: bool) -> Step {
        let Some(rate) = self.rate else {
            return if full { Step::WaitForMemory } else { Step::Produce };
        };
        let per_second = 1_000_000_000;
        let bytes = elapsed.as_nanos() * u128::from(rate) / per_second;
        let due = u64::try_from(bytes / u128::from(self.chunk)).unwrap_or(u64::MAX);
        if due > sequence {
            return if full {
                Step::Drop(due - sequence)
            } else {
                Step::Produce
            };
        }
        let bytes = (u128::from(sequence) + 1) * u128::from(self.chunk);
        let at = (bytes * per_second).div_ceil(u128::from(rate.max(1)));
        let at = Duration::from_nanos(u64::try_from(at).unwrap_or(u64::MAX));
        Step::Wait(at.saturating_sub(elapsed).max(SHORTEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_rate_memory_sets_the_pace() {
        let pace = Pace {
            rate: None,
            chunk: 4096,
        };
        for seconds in [0, 1000] {
            let elapsed = Duration::from_secs(seconds);
            assert_eq!(pace.step(3, elapsed, false), Step::Produce);
            assert_eq!(pace.step(3, elapsed, true), Step::WaitForMemory);
        }
    }

    #[test]
    fn frames_are_due_at_the_rate_and_dropped_without_memory() {
        // One frame per millisecond.
        let pace = Pace {
            rate: Some(4_096_000),
            chunk: 4096,
        };
        let at = Duration::from_micros;
        assert_eq!(pace.step(0, at(0), false), Step::Wait(at(1000)));
        assert_eq!(pace.step(0, at(999), false), Step::Wait(SHORTEST));
        assert_eq!(pace.step(0, at(1000), false), Step::Produce);
        assert_eq!(pace.step(1, at(1000), true), Step::Wait(at(1000)));
        assert_eq!(pace.step(4, at(9500), true), Step::Drop(5));
        assert_eq!(pace.step(9, at(9500), true), Step::Wait(at(500)));
        // A source that is late catches up.
        assert_eq!(pace.step(4, at(9500), false), Step::Produce);
    }
}
