// SPDX-License-Identifier: MIT OR Apache-2.0

//! How many cases a property test tries: as many as it says, and more in a long run of the tests.

use proptest::test_runner::Config;

/// The environment variable that says how many times as many cases a test tries; for races it does the same for rounds.
pub const TIMES: &str = "P2PMEM_TIMES";

/// The configuration of a test that tries `count` cases, [`TIMES`] as many in a long run.
///
/// # Panics
///
/// What the variable says is no number.
#[must_use]
pub fn config(count: u32) -> Config {
    let times = std::env::var(TIMES).ok();
    Config {
        cases: multiplied(count, times.as_deref()),
        ..Config::default()
    }
}

fn multiplied(count: u32, times: Option<&str>) -> u32 {
    let times = times.map_or(1, |text| text.parse::<u32>().expect("P2PMEM_TIMES is a number"));
    count * times.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_has_more() {
        assert_eq!(multiplied(3000, None), 3000);
        assert_eq!(multiplied(3000, Some("10")), 30_000);
        assert_eq!(multiplied(3000, Some("0")), 3000);
    }
}
