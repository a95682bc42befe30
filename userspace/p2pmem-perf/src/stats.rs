// SPDX-License-Identifier: MIT OR Apache-2.0

//! Statistics from the times of messages: average and peak bandwidth, message rate, and latency.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Maximum number of messages for which the peak is computed: the computation is quadratic.
const MAX_FOR_PEAK: usize = 8_000;

/// The longest time that latencies distinguish, in nanoseconds.
const HOUR_NS: u64 = 3_600_000_000_000;

/// Bytes of a MiB.
const MIB: f64 = (1 << 20) as f64;

/// When each message was posted and completed, in time since the start of the run. Both lists are in order.
#[derive(Debug, Clone, Default)]
pub struct Times {
    /// When the messages were posted to the NIC.
    pub posted: Vec<Duration>,
    /// When the messages completed.
    pub done: Vec<Duration>,
}

impl Times {
    /// Creates empty lists with space for `messages` messages.
    pub fn with_capacity(messages: usize) -> Self {
        Self {
            posted: Vec::with_capacity(messages),
            done: Vec::with_capacity(messages),
        }
    }

    /// Returns the time from the first posting to the last completion.
    pub fn span(&self) -> Duration {
        match (self.posted.first(), self.done.last()) {
            (Some(first), Some(last)) => last.saturating_sub(*first),
            _ => Duration::ZERO,
        }
    }

    /// Returns the shortest time per message of any sequence of messages: from the posting of its first message to the
    /// completion of its last one, divided by the number of messages. `None` without messages or with too many.
    pub fn best_per_message(&self) -> Option<Duration> {
        if self.done.len() > MAX_FOR_PEAK {
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

/// How long messages of one size took, from posting to completion, in microseconds. With several messages in flight, this includes
/// the time that a message waits for those before it: use a depth of 1 for the latency of a single message.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Half of the messages took this long or less.
    pub p50_us: f64,
    /// 99 % of the messages took this long or less.
    pub p99_us: f64,
    /// 99.9 % of the messages took this long or less.
    pub p999_us: f64,
    /// The longest time of a message.
    pub max_us: f64,
}

impl Latency {
    /// Computes the latency of the messages of one or several NICs, to three digits. `None` without messages.
    pub fn new<'a>(all: impl IntoIterator<Item = &'a Times>) -> Option<Self> {
        // The bounds are valid: this does not fail.
        let mut histogram = Histogram::<u64>::new_with_bounds(1, HOUR_NS, 3).ok()?;
        for times in all {
            for (posted, done) in times.posted.iter().zip(&times.done) {
                let took = done.saturating_sub(*posted).as_nanos();
                histogram.saturating_record(u64::try_from(took).unwrap_or(HOUR_NS));
            }
        }
        if histogram.is_empty() {
            return None;
        }
        let us = |ns: u64| ns as f64 / 1e3;
        Some(Self {
            p50_us: us(histogram.value_at_quantile(0.5)),
            p99_us: us(histogram.value_at_quantile(0.99)),
            p999_us: us(histogram.value_at_quantile(0.999)),
            max_us: us(histogram.max()),
        })
    }

    /// Returns the line for people.
    pub fn line(&self) -> String {
        format!(
            "latency {:.2} us (median), {:.2} (99 %), {:.2} (99.9 %), {:.2} (longest)",
            self.p50_us, self.p99_us, self.p999_us, self.max_us
        )
    }
}

/// Speed of the messages of one size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// Message size in bytes.
    pub bytes: u64,
    /// Number of messages.
    pub iterations: u64,
    /// Seconds from the first posting to the last completion.
    pub seconds: f64,
    /// Bandwidth of the fastest sequence of messages, in MiB (2^20 bytes) per second; `None` if not computed.
    pub peak_mib_per_s: Option<f64>,
    /// Average bandwidth in MiB per second.
    pub average_mib_per_s: f64,
    /// Average number of messages per microsecond.
    pub rate_mpps: f64,
}

impl Speed {
    /// Computes the speed of one NIC.
    pub fn new(bytes: u64, times: &Times) -> Self {
        let peak = times.best_per_message();
        let mut speed = Self::over(bytes, times.done.len() as u64, times.span());
        speed.peak_mib_per_s = peak.map(|each| bytes as f64 / MIB / each.as_secs_f64().max(1e-9));
        speed
    }

    /// Computes the speed of several NICs together: all messages, from the first posting to the last completion. There
    /// is no peak, because the peaks of the NICs need not coincide.
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
        // A span of zero gives no rate.
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

    /// The header of the columns, in the format of perftest, so that programs that parse perftest's output can parse
    /// this.
    pub const HEADER: &'static str =
        " #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]";

    /// Returns the line for the table.
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
    fn average_is_over_all_and_peak_over_the_best_sequence() {
        let times = Times {
            posted: ms(&[10, 10, 20, 30]),
            done: ms(&[20, 30, 35, 50]),
        };
        assert_eq!(times.span(), Duration::from_millis(40));
        // The first three messages took 25 ms from the first posting; the third alone took 15 ms.
        let best = times.best_per_message().unwrap().as_secs_f64();
        assert!((best - 0.025 / 3.0).abs() < 1e-9, "{best}");
        let speed = Speed::new(1 << 20, &times);
        assert!((speed.average_mib_per_s - 100.0).abs() < 1e-9, "{speed:?}");
        assert!((speed.peak_mib_per_s.unwrap() - 120.0).abs() < 1e-3, "{speed:?}");
        assert!((speed.rate_mpps - 1e-4).abs() < 1e-12, "{speed:?}");
        assert!(speed.peak_mib_per_s.unwrap() >= speed.average_mib_per_s);
    }

    #[test]
    fn latencies_are_quantiles_of_all_messages() {
        let us = |list: Vec<u64>| list.into_iter().map(Duration::from_micros).collect();
        let one = Times {
            posted: us(vec![0; 999]),
            done: us((1..=999).collect()),
        };
        let other = Times {
            posted: us(vec![10]),
            done: us(vec![5010]),
        };
        let latency = Latency::new([&one, &other]).unwrap();
        let near = |value: f64, expected: f64| (value / expected - 1.0).abs() < 0.01;
        assert!(
            near(latency.p50_us, 500.0) && near(latency.p99_us, 990.0),
            "{latency:?}"
        );
        assert!(
            near(latency.p999_us, 999.0) && near(latency.max_us, 5000.0),
            "{latency:?}"
        );
        assert_eq!(Latency::new([]), None);
        assert_eq!(Latency::new([&Times::default()]), None);
    }

    #[test]
    fn no_messages_have_no_speed() {
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
        let many = ms(&vec![1; MAX_FOR_PEAK + 1]);
        let times = Times {
            posted: many.clone(),
            done: many,
        };
        assert_eq!(times.best_per_message(), None);
    }
}
