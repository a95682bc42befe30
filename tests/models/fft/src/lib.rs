// SPDX-License-Identifier: MIT OR Apache-2.0

//! Fourier transforms, compiled once. rustfft is generic: each crate that plans a transform compiles all of its
//! algorithms, which takes far longer than the rest of a device model.

use std::sync::Arc;

use rustfft::{Fft, FftPlanner};

/// Makes transforms of single-precision samples, and remembers them.
pub struct Planner(FftPlanner<f32>);

impl Default for Planner {
    fn default() -> Self {
        Self(FftPlanner::new())
    }
}

impl Planner {
    /// A transform of this many samples, or its inverse. Neither is scaled.
    pub fn plan(&mut self, points: usize, inverse: bool) -> Arc<dyn Fft<f32>> {
        if inverse {
            self.0.plan_fft_inverse(points)
        } else {
            self.0.plan_fft_forward(points)
        }
    }
}
