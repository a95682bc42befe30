// SPDX-License-Identifier: MIT OR Apache-2.0

//! The rate of this machine's time stamp counter, which an emulated processor shows to its guest.
//!
//! A guest's kernel measures the rate in a few ms of its boot. If the host does not run QEMU in just these ms, the kernel expects
//! too few ticks in a second, and its clock is too fast until it ends. So the runner measures the rate, and gives it to the kernel.

use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use crate::sys::ticks;

/// The time between the two readings. They are exact to about a microsecond.
const BETWEEN: Duration = Duration::from_millis(50);
/// How often each reading is made. The fastest one counts: nothing interrupted it.
const READINGS: usize = 16;

/// Reads clock and counter at one moment.
fn reading() -> Option<(Instant, u64)> {
    let readings = (0..READINGS).map(|_| {
        let before = Instant::now();
        let count = ticks()?;
        Some((before.elapsed(), before, count))
    });
    let (_, at, count) = readings.collect::<Option<Vec<_>>>()?.into_iter().min()?;
    Some((at, count))
}

/// Returns the ticks in a millisecond, or `None` without such a counter.
pub fn per_ms() -> Option<u64> {
    static RATE: OnceLock<Option<u64>> = OnceLock::new();
    *RATE.get_or_init(|| {
        let (first, from) = reading()?;
        thread::sleep(BETWEEN);
        let (last, to) = reading()?;
        let nanoseconds = last.duration_since(first).as_nanos();
        u64::try_from(u128::from(to.checked_sub(from)?) * 1_000_000 / nanoseconds).ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_predicts_the_counter() {
        let Some(rate) = per_ms() else { return };
        let (first, from) = reading().unwrap();
        thread::sleep(BETWEEN);
        let (last, to) = reading().unwrap();
        let expected = last.duration_since(first).as_nanos() as f64 * rate as f64 / 1e6;
        let ratio = (to - from) as f64 / expected;
        assert!((0.999..1.001).contains(&ratio), "{rate} ticks in a ms, {ratio}");
    }
}
