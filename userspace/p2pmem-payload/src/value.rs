// SPDX-License-Identifier: MIT OR Apache-2.0

//! Values of options on the command line.

use std::time::Duration;

/// Parses a size such as `16M`, `1GiB`, or `4096`. Units are powers of 1024.
///
/// # Errors
///
/// The text is no size. The message says how to write one.
pub fn size(text: &str) -> Result<u64, String> {
    parse_size::Config::new()
        .with_binary()
        .parse_size(text)
        .map_err(|why| format!("{why}: specify a number of bytes, or a number with a unit, such as 64K, 2M, or 1GiB"))
}

/// Parses a time limit in seconds.
///
/// # Errors
///
/// The text is no number, or the time is too short or too long.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "specify a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(limit) if limit >= Duration::from_millis(1) && limit <= Duration::from_secs(86400) => Ok(limit),
        _ => Err("specify a number of seconds, from 0.001 to 86400".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_of_powers_of_1024() {
        for (text, bytes) in [("4096", 4096), ("64K", 64 << 10), ("2M", 2 << 20), ("1GiB", 1 << 30)] {
            assert_eq!(size(text), Ok(bytes));
        }
        for text in ["", "x", "-1", "2 apples"] {
            assert!(size(text).unwrap_err().contains("specify"), "{text}");
        }
    }

    #[test]
    fn limits_are_finite_and_not_zero() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "x", "NaN", "inf", "1e9"] {
            assert!(seconds(text).unwrap_err().contains("seconds"), "{text}");
        }
    }
}
