// SPDX-License-Identifier: MIT OR Apache-2.0

//! The data: 1797 handwritten digits of 8 by 8 pixels, "Optical Recognition of Handwritten Digits", which the crate smartcore contains.

use smartcore::dataset::digits::load_dataset;

/// Pixels of a digit.
pub const PIXELS: usize = 64;
/// Number of digits.
pub const LABELS: usize = 10;
/// The largest value of a pixel in the data.
const WHITE: f32 = 16.0;
/// One sample of this number is a test sample.
const TEST_PART: usize = 5;

/// Some of the samples.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Samples {
    pixels: Vec<f32>,
    labels: Vec<usize>,
}

impl Samples {
    /// Returns the number of samples.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Returns whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Returns the pixels of a sample, from 0 to 1, and its digit.
    ///
    /// # Panics
    ///
    /// The sample does not exist.
    pub fn sample(&self, index: usize) -> (&[f32], usize) {
        (&self.pixels[index * PIXELS..][..PIXELS], self.labels[index])
    }

    fn push(&mut self, pixels: &[f32], label: usize) {
        self.pixels.extend(pixels.iter().map(|pixel| pixel / WHITE));
        self.labels.push(label);
    }
}

/// The data set.
#[derive(Debug, Clone, Default)]
pub struct Digits {
    /// Samples for training.
    pub training: Samples,
    /// Samples that training does not use.
    pub test: Samples,
}

impl Digits {
    /// Returns the data set.
    pub fn load() -> Self {
        let data = load_dataset();
        let mut digits = Self::default();
        for (index, (pixels, label)) in data.data.chunks_exact(PIXELS).zip(&data.target).enumerate() {
            let is_test = index % TEST_PART == TEST_PART - 1;
            let samples = if is_test {
                &mut digits.test
            } else {
                &mut digits.training
            };
            // Labels are whole numbers from 0 to 9.
            samples.push(pixels, *label as usize);
        }
        digits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_digits_are_in_both_parts() {
        let digits = Digits::load();
        assert_eq!((digits.training.len(), digits.test.len()), (1438, 359));
        for samples in [&digits.training, &digits.test] {
            let mut counts = [0; LABELS];
            for index in 0..samples.len() {
                let (pixels, label) = samples.sample(index);
                assert!(pixels.iter().all(|pixel| (0.0..=1.0).contains(pixel)));
                assert!(pixels.iter().any(|pixel| *pixel > 0.5), "sample {index} is blank");
                counts[label] += 1;
            }
            assert!(counts.iter().all(|count| *count > samples.len() / 20), "{counts:?}");
        }
    }
}
