// SPDX-License-Identifier: MIT OR Apache-2.0

//! Time limits and repetition counts, which depend on the kernel. The values in tests are for the stock kernel. On a
//! kernel with debug checks, limits are longer, and counts are lower where each repetition takes longer.
//!
//! An exceeded time limit is an [`Overrun`]. On a busy machine an overrun alone is no proof of a fault: the test
//! harness runs the test again, on fresh guests, and counts repetitions. Every other error fails the test at once.

use std::fmt;
use std::sync::LazyLock;
use std::time::Duration;

/// The environment variable with the factor for time limits.
pub const PATIENCE: &str = "P2PMEM_PATIENCE";

/// The environment variable with the factor for the rounds of race tests. A long run of the tests sets it.
pub const TIMES: &str = "P2PMEM_TIMES";

static TIME_FACTOR: LazyLock<u32> = LazyLock::new(|| number(PATIENCE));
static ROUNDS_FACTOR: LazyLock<u32> = LazyLock::new(|| number(TIMES));

/// The number in an environment variable; 1 if the variable is not set or not a number.
fn number(name: &str) -> u32 {
    let text = std::env::var(name).ok();
    text.and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// A time limit was exceeded, and no other fault is known.
#[derive(Debug)]
pub struct Overrun(
    /// The operation and the time it took.
    pub String,
);

impl Overrun {
    /// Exit code of a program in a guest that fails with an overrun.
    pub const CODE: u8 = 75;

    /// Prefix of an overrun's text, by which another machine or process recognizes the overrun.
    const PREFIX: &str = "not in time: ";

    /// Whether an error is an overrun.
    pub fn is(error: &anyhow::Error) -> bool {
        error.chain().any(|cause| cause.is::<Self>())
    }

    /// The text of an error, for another machine or process. An overrun's text begins with `PREFIX`.
    pub fn to_text(error: &anyhow::Error) -> String {
        format!("{}{error:#}", if Self::is(error) { Self::PREFIX } else { "" })
    }

    /// The error for a text that [`Overrun::to_text`] returned.
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
            return Err(::anyhow::Error::new($crate::patience::Overrun(format!($($text)+))));
        }
    };
}

/// The time limit on this kernel, for a limit on the stock kernel.
pub fn patiently(limit: Duration) -> Duration {
    limit * *TIME_FACTOR
}

/// Whether this kernel is as fast as the stock kernel.
pub fn is_quick() -> bool {
    *TIME_FACTOR == 1
}

/// Whether this is a long run, with more rounds than usual.
pub fn is_long() -> bool {
    *ROUNDS_FACTOR > 1
}

/// The number of items that a test uses on this kernel: `count` divided by the factor for time limits, at least 1.
pub fn amount(count: u32) -> u32 {
    count.div_ceil(*TIME_FACTOR)
}

/// The number of rounds of a race test on this kernel: `count` divided by the factor for time limits, at least 1. A
/// long run multiplies it by [`TIMES`].
pub fn rounds(count: u32) -> u32 {
    (count * *ROUNDS_FACTOR).div_ceil(*TIME_FACTOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overrun_survives_as_text() {
        let late = anyhow::Error::new(Overrun("x took 2 s".into())).context("device y");
        let received = Overrun::from_text(Overrun::to_text(&late));
        assert!(Overrun::is(&received) && received.to_string() == "not in time: device y: x took 2 s");
        let wrong = Overrun::from_text(Overrun::to_text(&anyhow::Error::msg("x is wrong")));
        assert!(!Overrun::is(&wrong) && wrong.to_string() == "x is wrong");
    }
}
