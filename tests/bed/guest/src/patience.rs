// SPDX-License-Identifier: MIT OR Apache-2.0

//! How long is too long, and how often is often enough: limits of time and numbers of rounds are for the stock kernel. On one
//! that checks itself all the time the limits are longer, and the rounds fewer where each takes that much longer.
//!
//! A limit that is missed is an [`Overrun`], which alone proves nothing on a machine that may be busy: the harness runs the test
//! again, on fresh guests, and counts that. All else that is wrong counts at once.

use std::fmt;
use std::sync::LazyLock;
use std::time::Duration;

/// The environment variable that has the factor.
pub const PATIENCE: &str = "P2PMEM_PATIENCE";

/// The environment variable that says how many times as many rounds a race goes through, in a long run of the tests.
pub const TIMES: &str = "P2PMEM_TIMES";

static FACTOR: LazyLock<u32> = LazyLock::new(|| number(PATIENCE));
static MORE: LazyLock<u32> = LazyLock::new(|| number(TIMES));

/// The number in an environment variable; 1 where there is none.
fn number(name: &str) -> u32 {
    let text = std::env::var(name).ok();
    text.and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// A limit of time was missed, and nothing else is known to be wrong.
#[derive(Debug)]
pub struct Overrun(
    /// What took how long.
    pub String,
);

impl Overrun {
    /// With what a program in a guest ends that fails for one.
    pub const CODE: u8 = 75;

    /// The first words of an overrun's text for another machine or process.
    const PREFIX: &str = "not in time: ";

    /// Whether an error is one.
    pub fn is(error: &anyhow::Error) -> bool {
        error.chain().any(|cause| cause.is::<Self>())
    }

    /// An error as text, which says whether it is one.
    pub fn to_text(error: &anyhow::Error) -> String {
        format!("{}{error:#}", if Self::is(error) { Self::PREFIX } else { "" })
    }

    /// The error of a text that [`Overrun::to_text`] made.
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

/// As `anyhow::ensure!`, of a limit of time: the error is an [`Overrun`].
#[macro_export]
macro_rules! in_time {
    ($holds:expr, $($text:tt)+) => {
        let holds: bool = $holds;
        if !holds {
            return Err(::anyhow::Error::new($crate::patience::Overrun(format!($($text)+))));
        }
    };
}

/// A limit of time as it is on this kernel.
pub fn patiently(limit: Duration) -> Duration {
    limit * *FACTOR
}

/// Whether this kernel is no slower than others.
pub fn is_quick() -> bool {
    *FACTOR == 1
}

/// Whether this is a long run, with more rounds than usual.
pub fn is_long() -> bool {
    *MORE > 1
}

/// How much of a kind a test has on this kernel: about as much as takes the same time, and at least one.
pub fn amount(count: u32) -> u32 {
    count.div_ceil(*FACTOR)
}

/// How many rounds a race goes through on this kernel: about as many as take the same time, and at least one; in a long run
/// [`TIMES`] as many.
pub fn rounds(count: u32) -> u32 {
    (count * *MORE).div_ceil(*FACTOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overrun_survives_as_text() {
        let late = anyhow::Error::new(Overrun("x took 2 s".into())).context("device y");
        let parsed = Overrun::from_text(Overrun::to_text(&late));
        assert!(Overrun::is(&parsed) && parsed.to_string() == "not in time: device y: x took 2 s");
        let wrong = Overrun::from_text(Overrun::to_text(&anyhow::Error::msg("x is wrong")));
        assert!(!Overrun::is(&wrong) && wrong.to_string() == "x is wrong");
    }
}
