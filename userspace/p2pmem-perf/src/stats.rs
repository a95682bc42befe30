// SPDX-License-Identifier: MIT OR Apache-2.0

//! What the times of messages say: bandwidth, on average and at its peak, and the rate of messages.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Most messages whose peak is looked for: its time grows with their square.
const MOST_FOR_PEAK: usize = 8_000;

/// Bytes of a MiB.
const MIB: f64 = (1 << 20) as f64;

/// When each message was posted and when it was done, in time since the run began. Both lists are in order.
#[derive(Debug, Clone, Default)]
pub struct Times {
    /// When the messages were given to the NIC.
    pub posted: Vec<Duration>,
    /// When they were done.
    pub done: Vec<Duration>,
}

impl Times {
    /// For that many messages.
    pub fn with_capacity(messages: usize) -> Self {
        Self {
            posted: Vec::with_capacity(messages),
            done: Vec::with_capacity(messages),
        }
    }

    /// From the first message posted to the last one done.
    pub fn span(&self) -> Duration {
        match (self.posted.first(), self.done.last()) {
            (Some(first), Some(last)) => last.saturating_sub(*first),
            _ => Duration::ZERO,
        }
    }

    /// Shortest time per message over any row of messages: from the posting of its first to the end of its last, by
    /// their number. None where there are no messages, or too many to look at every row.
    pub fn best_per_message(&self) -> Option<Duration> {
        if self.done.len() > MOST_FOR_PEAK {
            return None;
        }
        let mut best: Option<f64> = None;
        for (first, posted) in self.posted.iter().enumerate() {
            for (count, done) in (1u32..).zip(&self.done[first..]) {
                let each = done.saturating_sub(*posted).as_secs_f64() / f64::from(count);
                if best.is_none_or(|best| each < best) {
                    best = Some(each);
                }
            }
        }
        best.map(Duration::from_secs_f64)
    }
}

/// One line of the result: a size, and how fast messages of it went.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// Bytes of a message.
    pub bytes: u64,
    /// Messages.
    pub iterations: u64,
    /// Seconds from the first message posted to the last one done.
    pub seconds: f64,
    /// Bandwidth of the fastest row of messages, in MiB (2^20 bytes) per second; none where it was not looked for.
    pub peak_mib_per_s: Option<f64>,
    /// Bandwidth over all, in MiB per second.
    pub average_mib_per_s: f64,
    /// Messages per microsecond, over all.
    pub rate_mpps: f64,
}

impl Speed {
    /// Of one NIC.
    pub fn new(bytes: u64, times: &Times) -> Self {
        let peak = times.best_per_message();
        let mut speed = Self::over(bytes, times.done.len() as u64, times.span());
        speed.peak_mib_per_s = peak.map(|each| bytes as f64 / MIB / each.as_secs_f64().max(1e-9));
        speed
    }

    /// Of several NICs at once: all their messages over the time from the first one's start to the last one's end, and
    /// no peak, as theirs need not have been at the same time.
    pub fn of_all(bytes: u64, all: &[Times]) -> Self {
        let start = all.iter().filter_map(|times| times.posted.first()).min();
        let end = all.iter().filter_map(|times| times.done.last()).max();
        let span = match (start, end) {
            (Some(start), Some(end)) => end.saturating_sub(*start),
            _ => Duration::ZERO,
        };
        let iterations = all.iter().map(|times| times.done.len() as u64).sum();
        Self::over(bytes, iterations, span)
    }

    fn over(bytes: u64, iterations: u64, span: Duration) -> Self {
        let seconds = span.as_secs_f64();
        // A clock that did not move says nothing.
        let per_second = if seconds > 0.0 {
            iterations as f64 / seconds
        } else {
            0.0
        };
        Self {
            bytes,
            iterations,
            seconds,
            peak_mib_per_s: None,
            average_mib_per_s: per_second * bytes as f64 / MIB,
            rate_mpps: per_second / 1e6,
        }
    }

    /// The columns' header, in perftest's words, so that whatever reads its output reads ours.
    pub const HEADER: &'static str =
        " #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]";

    /// The line below the header.
    pub fn line(&self) -> String {
        format!(
            " {:<10} {:<14} {:<19.2} {:<21.2} {:.6}",
            self.bytes,
            self.iterations,
            self.peak_mib_per_s.unwrap_or(0.0),
            self.average_mib_per_s,
            self.rate_mpps
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(list: &[u64]) -> Vec<Duration> {
        list.iter().map(|ms| Duration::from_millis(*ms)).collect()
    }

    #[test]
    fn average_is_over_all_and_peak_over_the_best_row() {
        let times = Times {
            posted: ms(&[10, 10, 20, 30]),
            done: ms(&[20, 30, 35, 50]),
        };
        assert_eq!(times.span(), Duration::from_millis(40));
        // The first three took 25 ms from the first posting on; the third alone took 15 ms.
        let best = times.best_per_message().unwrap().as_secs_f64();
        assert!((best - 0.025 / 3.0).abs() < 1e-9, "{best}");
        let speed = Speed::new(1 << 20, &times);
        assert!((speed.average_mib_per_s - 100.0).abs() < 1e-9, "{speed:?}");
        assert!((speed.peak_mib_per_s.unwrap() - 120.0).abs() < 1e-3, "{speed:?}");
        assert!((speed.rate_mpps - 1e-4).abs() < 1e-12, "{speed:?}");
        assert!(speed.peak_mib_per_s.unwrap() >= speed.average_mib_per_s);
    }

    #[test]
    fn nothing_done_is_no_speed() {
        let speed = Speed::new(4096, &Times::default());
        assert_eq!((speed.iterations, speed.average_mib_per_s), (0, 0.0));
        assert_eq!(speed.peak_mib_per_s, None);
        assert_eq!(Speed::of_all(4096, &[]).seconds, 0.0);
        let stopped = Times {
            posted: ms(&[1]),
            done: ms(&[1]),
        };
        assert_eq!(Speed::new(4096, &stopped).average_mib_per_s, 0.0);
    }

    #[test]
    fn several_nics_count_from_the_first_start_to_the_last_end() {
        let one = Times {
            posted: ms(&[0, 5]),
            done: ms(&[10, 20]),
        };
        let other = Times {
            posted: ms(&[10, 12]),
            done: ms(&[30, 40]),
        };
        let all = Speed::of_all(1 << 20, &[one, other]);
        assert_eq!((all.iterations, all.peak_mib_per_s), (4, None));
        assert!((all.average_mib_per_s - 100.0).abs() < 1e-9, "{all:?}");
    }

    #[test]
    fn lines_have_five_columns_below_the_header() {
        let speed = Speed {
            bytes: 2 << 20,
            iterations: 2000,
            seconds: 4.0,
            peak_mib_per_s: Some(1234.5),
            average_mib_per_s: 1000.0,
            rate_mpps: 0.0005,
        };
        let line = speed.line();
        let words: Vec<_> = line.split_whitespace().collect();
        assert_eq!(words, ["2097152", "2000", "1234.50", "1000.00", "0.000500"]);
        for (word, title) in words
            .iter()
            .zip(["#bytes", "#iter", "BW peak", "BW average", "MsgRate"])
        {
            assert_eq!(line.find(word), Speed::HEADER.find(title), "{title}");
        }
    }

    #[test]
    fn too_many_messages_have_no_peak() {
        let many = ms(&vec![1; MOST_FOR_PEAK + 1]);
        let times = Times {
            posted: many.clone(),
            done: many,
        };
        assert_eq!(times.best_per_message(), None);
    }
}
