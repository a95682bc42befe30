// SPDX-License-Identifier: MIT OR Apache-2.0

//! The spectrum of a block as the processor computes it, to verify that of an accelerator.

use std::sync::Arc;

use anyhow::{ensure, Result};
use rustfft::num_complex::Complex32;
use rustfft::{Fft, FftPlanner};

use super::compute::POINTS;

/// The largest difference of two results, relative to the root mean square of the vector. Transforms of 1024 points in `f32`
/// differ by about 1e-6.
const TOLERANCE: f32 = 1e-4;

/// Transforms vectors of [`POINTS`] complex numbers, without scaling.
#[derive(Clone)]
pub struct Transform {
    fft: Arc<dyn Fft<f32>>,
}

impl std::fmt::Debug for Transform {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Transform")
    }
}

impl Default for Transform {
    fn default() -> Self {
        Self {
            fft: FftPlanner::new().plan_fft_forward(POINTS),
        }
    }
}

impl Transform {
    /// Transforms a block.
    ///
    /// # Panics
    ///
    /// The block is not a multiple of [`POINTS`] complex numbers.
    pub fn forward(&self, input: &[f32]) -> Vec<f32> {
        assert!(input.len() % (2 * POINTS) == 0, "{} numbers", input.len());
        let mut values: Vec<Complex32> = input
            .chunks_exact(2)
            .map(|pair| Complex32::new(pair[0], pair[1]))
            .collect();
        self.fft.process(&mut values);
        values.iter().flat_map(|value| [value.re, value.im]).collect()
    }

    /// Compares an accelerator's result with that of the processor.
    ///
    /// # Errors
    ///
    /// They differ by more than rounding: the message has the first place.
    pub fn verify(&self, input: &[f32], output: &[f32]) -> Result<()> {
        let expected = self.forward(input);
        for (number, (expected, found)) in expected.chunks(2 * POINTS).zip(output.chunks(2 * POINTS)).enumerate() {
            let square: f32 = expected.iter().map(|value| value * value).sum::<f32>() / POINTS as f32;
            let most = TOLERANCE * square.sqrt().max(f32::MIN_POSITIVE);
            for (at, (expected, found)) in expected.iter().zip(found).enumerate() {
                ensure!(
                    (expected - found).abs() <= most,
                    "vector {number} has {found} at {at} after the transform, and the processor computes {expected}"
                );
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_impulse_has_a_flat_spectrum_and_a_wrong_value_is_found() {
        let transform = Transform::default();
        let mut input = vec![0.0; 4 * POINTS];
        (input[0], input[2 * POINTS]) = (1.0, 2.0);
        let output = transform.forward(&input);
        assert!(output[..2 * POINTS]
            .chunks(2)
            .all(|value| (value[0] - 1.0).abs() < 1e-6 && value[1].abs() < 1e-6));
        transform.verify(&input, &output).unwrap();
        for at in [0, 2 * POINTS - 1, 4 * POINTS - 1] {
            for wrong in [1e-2, f32::NAN] {
                let mut bad = output.clone();
                bad[at] += wrong;
                let error = transform.verify(&input, &bad).unwrap_err().to_string();
                assert!(error.starts_with(&format!("vector {}", at / (2 * POINTS))), "{error}");
            }
        }
    }
}
