// SPDX-License-Identifier: MIT OR Apache-2.0

//! Time limits, numbers of rounds, and the error of a missed limit.
//!
//! Limits and rounds are given for the stock kernel. On the slower debug kernel the limits are multiplied by a factor, and the
//! numbers of rounds are divided by it.
//!
//! A missed limit is an [`Overrun`]. On a busy machine it proves nothing: the harness runs the test again on fresh guests, and
//! counts the repetition. Every other error fails the test at once.

use std::fmt;
use std::sync::LazyLock;
use std::time::Duration;

/// The environment variable with the factor for time limits.
pub const TIME_FACTOR: &str = "P2PMEM_TIME_FACTOR";

/// The environment variable with the factor for rounds of races, in a long run of the tests.
pub const TIMES: &str = "P2PMEM_TIMES";

static FACTOR: LazyLock<u32> = LazyLock::new(|| number(TIME_FACTOR));
static MORE: LazyLock<u32> = LazyLock::new(|| number(TIMES));

/// Returns the number in an environment variable, or 1 if it is not set.
fn number(name: &str) -> u32 {
    let text = std::env::var(name).ok();
    text.and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// A missed time limit, without another known error.
#[derive(Debug)]
pub struct Overrun(
    /// The message: what took how long.
    pub String,
);

impl Overrun {
    /// The exit code of a program in a guest that fails with an overrun.
    pub const CODE: u8 = 75;

    /// The first words of an overrun's text for another machine or process.
    const PREFIX: &str = "not in time: ";

    /// Returns whether an error is or contains an overrun.
    pub fn is(error: &anyhow::Error) -> bool {
        error.chain().any(|cause| cause.is::<Self>())
    }

    /// Converts an error to text that keeps whether it is an overrun.
    pub fn to_text(error: &anyhow::Error) -> String {
        format!("{}{error:#}", if Self::is(error) { Self::PREFIX } else { "" })
    }

    /// Converts a text of [`Overrun::to_text`] back to an error.
    pub fn from_text(text: String) -> anyhow::Error {
        if text.starts_with(Self::PREFIX) {
            Self(text).into()
        } else {
            anyhow::Error::msg(text)
        }
    }
}

impl fmt::Display for Overrun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Overrun {}

/// As `anyhow::ensure!`, for a time limit: the error is an [`Overrun`].
#[macro_export]
macro_rules! in_time {
    ($holds:expr, $($text:tt)+) => {
        let holds: bool = $holds;
        if !holds {
            return Err(::anyhow::Error::new($crate::limits::Overrun(format!($($text)+))));
        }
    };
}

/// Returns the time limit for this kernel.
pub fn scaled(limit: Duration) -> Duration {
    limit * *FACTOR
}

/// Returns whether this kernel has the usual time limits.
pub fn is_quick() -> bool {
    *FACTOR == 1
}

/// Returns whether this is a long run, with more rounds than usual.
pub fn is_long() -> bool {
    *MORE > 1
}

/// Returns the number of items for a test on this kernel: as many as take about the same time, at least one.
pub fn amount(count: u32) -> u32 {
    count.div_ceil(*FACTOR)
}

/// Returns the number of rounds of a race on this kernel: as many as take about the same time, at least one, and in a long run
/// [`TIMES`] as many.
pub fn rounds(count: u32) -> u32 {
    (count * *MORE).div_ceil(*FACTOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overrun_round_trips_through_text() {
        let late = anyhow::Error::new(Overrun("x took 2 s".into())).context("device y");
        let parsed = Overrun::from_text(Overrun::to_text(&late));
        assert!(Overrun::is(&parsed) && parsed.to_string() == "not in time: device y: x took 2 s");
        let wrong = Overrun::from_text(Overrun::to_text(&anyhow::Error::msg("x is wrong")));
        assert!(!Overrun::is(&wrong) && wrong.to_string() == "x is wrong");
    }
}
