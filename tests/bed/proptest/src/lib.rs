// SPDX-License-Identifier: MIT OR Apache-2.0

//! The number of cases of a property test, which a long run of the tests multiplies.

use proptest::test_runner::Config;

/// The environment variable with the factor for the number of cases of property tests, and of rounds of races.
pub const TIMES: &str = "P2PMEM_TIMES";

/// Returns the configuration of a test with `count` cases, multiplied by [`TIMES`].
///
/// # Panics
///
/// The variable is not a number.
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
    fn long_run_multiplies_cases() {
        assert_eq!(multiplied(3000, None), 3000);
        assert_eq!(multiplied(3000, Some("10")), 30_000);
        assert_eq!(multiplied(3000, Some("0")), 3000);
    }
}
