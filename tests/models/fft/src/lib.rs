// SPDX-License-Identifier: MIT OR Apache-2.0

//! Fourier transforms in a crate of their own, compiled once. rustfft is generic: each crate that plans a transform
//! compiles all of its algorithms, which takes far longer than the rest of a device model.

use std::sync::Arc;

use rustfft::{Fft, FftPlanner};

/// Plans transforms of single-precision samples, and caches them.
pub struct Planner(FftPlanner<f32>);

impl Default for Planner {
    fn default() -> Self {
        Self(FftPlanner::new())
    }
}

impl Planner {
    /// Returns the forward or inverse transform of `points` samples. Neither is scaled.
    pub fn plan(&mut self, points: usize, inverse: bool) -> Arc<dyn Fft<f32>> {
        if inverse {
            self.0.plan_fft_inverse(points)
        } else {
            self.0.plan_fft_forward(points)
        }
    }
}
