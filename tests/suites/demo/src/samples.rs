// SPDX-License-Identifier: MIT OR Apache-2.0

//! The signal: some tones in noise, equal for equal seeds on every machine.
//!
//! Tones come from oscillators with integer phase: 32 bits, of which the upper ones index a table of one cycle. The
//! phase therefore does not drift, and an emulated processor has little to compute.

use num_complex::Complex32;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Bits of phase that index the table.
const TABLE_BITS: u32 = 12;

/// The largest amplitude of the noise, in the real and in the imaginary part.
const NOISE: f32 = 0.25;

/// A tone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tone {
    /// Cycles per sample, as a fraction of 2^32.
    pub step: u32,
    /// Amplitude.
    pub amplitude: f32,
}

impl Tone {
    /// Makes a tone with `cycles` cycles in each vector of `points` samples (any fraction; a negative number reverses
    /// the rotation).
    pub fn new(cycles: f64, points: usize, amplitude: f32) -> Tone {
        let turns = (cycles / points as f64).rem_euclid(1.0);
        // Saturates at the last step below a whole cycle.
        let step = (turns * 4_294_967_296.0).round() as u32;
        Tone { step, amplitude }
    }
}

/// Makes the signal.
#[derive(Debug)]
pub struct Generator {
    noise: ChaCha8Rng,
    /// Tones with their tables of one cycle, and their phases.
    tones: Vec<(Tone, Vec<Complex32>, u32)>,
}

impl Generator {
    /// Makes a generator with the noise of `seed`.
    pub fn new(seed: u64, tones: &[Tone]) -> Generator {
        let table = |tone: &Tone| {
            let size = 1u32 << TABLE_BITS;
            let turn = |n: u32| std::f64::consts::TAU * f64::from(n) / f64::from(size);
            (0..size)
                .map(|n| Complex32::new(turn(n).cos() as f32, turn(n).sin() as f32) * tone.amplitude)
                .collect()
        };
        Generator {
            noise: ChaCha8Rng::seed_from_u64(seed),
            tones: tones.iter().map(|tone| (*tone, table(tone), 0)).collect(),
        }
    }

    /// Fills `out` with the next samples of the signal.
    pub fn fill(&mut self, out: &mut [Complex32]) {
        for sample in out {
            // One word for both parts: 32 bits each, more than an f32 holds.
            let word = self.noise.next_u64();
            let part = |bits: u32| bits as i32 as f32 * (NOISE / 2_147_483_648.0);
            *sample = Complex32::new(part(word as u32), part((word >> 32) as u32));
            for (tone, table, phase) in &mut self.tones {
                *sample += table[(*phase >> (u32::BITS - TABLE_BITS)) as usize];
                *phase = phase.wrapping_add(tone.step);
            }
        }
    }
}

/// Returns the demo's tones: one on a bin of the transform, one between bins, and one with reversed rotation.
pub fn demo_tones(points: usize) -> [Tone; 3] {
    [
        Tone::new(100.0, points, 1.0),
        Tone::new(260.37, points, 0.5),
        Tone::new(-31.0, points, 0.25),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const POINTS: usize = 1024;

    fn samples(seed: u64, count: usize) -> Vec<Complex32> {
        let mut out = vec![Complex32::default(); count];
        Generator::new(seed, &demo_tones(POINTS)).fill(&mut out);
        out
    }

    #[test]
    fn samples_depend_on_seed() {
        assert_eq!(samples(7, 5000), samples(7, 5000));
        let different = samples(7, 5000)
            .iter()
            .zip(samples(8, 5000))
            .filter(|(a, b)| **a != *b)
            .count();
        assert!(different > 4990, "{different}");
    }

    #[test]
    fn generation_in_parts_equals_whole() {
        let whole = samples(1, 4096);
        let mut generator = Generator::new(1, &demo_tones(POINTS));
        let mut pieces = vec![Complex32::default(); 4096];
        let (first, second) = pieces.split_at_mut(1000);
        generator.fill(first);
        generator.fill(second);
        assert_eq!(pieces, whole);
    }

    #[test]
    fn spectrum_has_the_tones() {
        let mut spectrum = samples(3, POINTS);
        rustfft::FftPlanner::new()
            .plan_fft_forward(POINTS)
            .process(&mut spectrum);
        let level = |bin: usize| spectrum[bin].norm() / POINTS as f32;
        assert!((level(100) - 1.0).abs() < 0.05, "{}", level(100));
        assert!((level(POINTS - 31) - 0.25).abs() < 0.05, "{}", level(POINTS - 31));
        assert!(level(260) > 0.25 && level(261) > 0.1, "between bins");
        let noise = (400..600).map(level).sum::<f32>() / 200.0;
        assert!(noise > 0.001 && noise < 0.02, "{noise}");
    }

    #[test]
    fn frequency_sets_phase_step() {
        assert_eq!(Tone::new(256.0, 1024, 1.0).step, 1 << 30);
        assert_eq!(Tone::new(-256.0, 1024, 1.0).step, 3 << 30);
        assert_eq!(Tone::new(1024.0, 1024, 1.0).step, 0);
    }
}
