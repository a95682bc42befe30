// SPDX-License-Identifier: MIT OR Apache-2.0

//! Comparison of spectra.

use num_complex::Complex32;
use serde::{Deserialize, Serialize};

/// The largest permitted error, relative to the root mean square of the expected spectrum. A transform of 1024 points
/// in f32 has an error of up to about 1e-5 in its strongest bins, so a larger error is not rounding.
pub const TOLERANCE: f64 = 5e-5;

/// The difference between a spectrum and the expected one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// The number of compared values.
    pub values: u64,
    /// The root mean square of the expected values' magnitudes.
    pub rms: f64,
    /// The largest magnitude of a difference, relative to `rms`; infinite if a value is not a number.
    #[serde(with = "finite")]
    pub max_error: f64,
}

impl Comparison {
    /// Returns whether the spectra are equal within [`TOLERANCE`]. Empty and all-zero spectra never count as equal: the
    /// demo's spectrum is neither.
    pub fn is_equal(&self) -> bool {
        self.values > 0 && self.rms > 0.0 && self.max_error <= TOLERANCE
    }
}

/// JSON has no infinity, which is written as null.
mod finite {
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_f64(*value)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::INFINITY))
    }
}

/// Compares spectra part by part.
#[derive(Debug, Clone, Copy, Default)]
pub struct Comparator {
    values: u64,
    energy: f64,
    /// The squared magnitude of the largest difference.
    worst: f64,
}

impl Comparator {
    /// Adds the next values.
    ///
    /// # Panics
    ///
    /// The slices have different lengths.
    pub fn add(&mut self, got: &[Complex32], expected: &[Complex32]) {
        assert_eq!(got.len(), expected.len(), "spectra of different length");
        self.values += got.len() as u64;
        for (got, expected) in got.iter().zip(expected) {
            let off = f64::from((got - expected).norm_sqr());
            // `f64::max()` ignores a value that is not a number.
            self.worst = self.worst.max(if off.is_nan() { f64::INFINITY } else { off });
            self.energy += f64::from(expected.norm_sqr());
        }
    }

    /// Returns the comparison.
    pub fn finish(&self) -> Comparison {
        let rms = (self.energy / self.values.max(1) as f64).sqrt();
        let max_error = if self.worst == 0.0 {
            0.0
        } else {
            self.worst.sqrt() / rms
        };
        Comparison {
            values: self.values,
            rms,
            max_error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(got: &[Complex32], expected: &[Complex32]) -> Comparison {
        let mut comparator = Comparator::default();
        comparator.add(got, expected);
        comparator.finish()
    }

    fn spectrum() -> Vec<Complex32> {
        (0..64).map(|n| Complex32::new(n as f32, -2.0)).collect()
    }

    #[test]
    fn values_within_tolerance_are_equal() {
        let expected = spectrum();
        let same = compare(&expected, &expected);
        assert!(same.is_equal());
        assert_eq!((same.values, same.max_error), (64, 0.0));
        let mut near = expected.clone();
        near[63].re += 1e-3;
        let near = compare(&near, &expected);
        assert!(near.is_equal() && near.max_error > 1e-5, "{near:?}");
    }

    #[test]
    fn one_wrong_value_is_unequal() {
        let expected = spectrum();
        for wrong in [0.01, f32::NAN, f32::INFINITY] {
            let mut got = expected.clone();
            got[17].im += wrong;
            assert!(!compare(&got, &expected).is_equal(), "{wrong}");
        }
        let mut broken = expected.clone();
        broken[0].re = f32::NAN;
        assert!(!compare(&expected, &broken).is_equal());
    }

    #[test]
    fn nan_gives_infinite_error() {
        let expected = spectrum();
        let mut got = expected.clone();
        got[0].re = f32::NAN;
        got[1].re += 5.0;
        let comparison = compare(&got, &expected);
        assert_eq!(comparison.max_error, f64::INFINITY);
        let text = serde_json::to_string(&comparison).unwrap();
        assert_eq!(serde_json::from_str::<Comparison>(&text).unwrap(), comparison);
    }

    #[test]
    fn empty_and_zero_signals_are_unequal() {
        assert!(!compare(&[], &[]).is_equal());
        let silence = [Complex32::default(); 8];
        assert!(!compare(&silence, &silence).is_equal());
    }
}
