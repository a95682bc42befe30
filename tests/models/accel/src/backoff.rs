// SPDX-License-Identifier: MIT OR Apache-2.0

//! How long a poll waits between two reads.
//!
//! A poll that becomes true soon must not wait for a timer, and one that takes long must not occupy a processor, because
//! the host has few and what the poll waits for may need one. So a poll spins first, then lets other threads run, and
//! then sleeps for an eighth of the time it has waited: a sleep makes the wait at most an eighth longer.

use std::num::NonZeroU64;
use std::time::Duration;

use tracing::warn;

/// How late a sleep may end, in nanoseconds. The default of Linux is 50 microseconds, longer than most waits of polls.
const TIMER_SLACK: u64 = 1_000;

/// Until this time, a poll reads as fast as it can.
const SPIN: Duration = Duration::from_micros(4);
/// Until this time, a poll lets other threads run after each read.
const YIELD: Duration = Duration::from_micros(40);
/// Shortest and longest sleep.
const SLEEP: (Duration, Duration) = (Duration::from_micros(5), Duration::from_micros(500));
/// As [`SLEEP`], if a read is a message to the client, which makes the client work.
const MESSAGE_SLEEP: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(2));

/// Makes the sleeps of this thread end in time.
pub(super) fn set_precise_sleeps() {
    if let Err(error) = rustix::thread::set_current_timer_slack(NonZeroU64::new(TIMER_SLACK)) {
        warn!(%error, "cannot set the timer slack: polls react later");
    }
}

/// What a poll does before the next read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pause {
    Spin,
    Yield,
    Sleep(Duration),
}

impl Pause {
    /// Returns the pause of a poll that has waited for `waited` and ends after `limit`. With `message`, each read is a
    /// message to the client.
    pub(super) fn after(waited: Duration, limit: Duration, message: bool) -> Self {
        let left = limit.saturating_sub(waited);
        let sleep = |(least, most)| Self::Sleep((waited / 8).clamp(least, most).min(left));
        match waited {
            _ if message => sleep(MESSAGE_SLEEP),
            waited if waited < SPIN => Self::Spin,
            waited if waited < YIELD => Self::Yield,
            _ => sleep(SLEEP),
        }
    }

    pub(super) fn wait(self) {
        match self {
            Self::Spin => std::hint::spin_loop(),
            Self::Yield => std::thread::yield_now(),
            Self::Sleep(time) => std::thread::sleep(time),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use p2pmem_proptest::config;
    use proptest::prelude::*;

    const LIMIT: Duration = Duration::from_secs(1);

    #[test]
    fn polls_spin_then_yield_then_sleep() {
        let after = |micros| Pause::after(Duration::from_micros(micros), LIMIT, false);
        assert_eq!(after(0), Pause::Spin);
        assert_eq!(after(4), Pause::Yield);
        assert_eq!(after(40), Pause::Sleep(Duration::from_micros(5)));
        assert_eq!(after(800), Pause::Sleep(Duration::from_micros(100)));
        assert_eq!(after(100_000), Pause::Sleep(SLEEP.1));
        let first = Pause::after(Duration::ZERO, LIMIT, true);
        assert_eq!(first, Pause::Sleep(MESSAGE_SLEEP.0));
    }

    proptest! {
        #![proptest_config(config(500))]

        /// A sleep is at most an eighth of the time waited, except for the shortest one, and never ends after the limit.
        #[test]
        fn sleeps_are_short_and_end_before_the_limit(
            waited in 0_u64..2_000_000,
            limit in 0_u64..2_000_000,
            message: bool,
        ) {
            let (waited, limit) = (Duration::from_micros(waited), Duration::from_micros(limit));
            if let Pause::Sleep(time) = Pause::after(waited, limit, message) {
                let (least, most) = if message { MESSAGE_SLEEP } else { SLEEP };
                prop_assert!(time <= (waited / 8).max(least) && time <= most);
                prop_assert!(time <= limit.saturating_sub(waited));
            }
        }
    }
}
