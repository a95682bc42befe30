// SPDX-License-Identifier: MIT OR Apache-2.0

//! A network of two layers that recognizes digits: its loss, and the gradient of the loss.
//!
//! Numbers are f32, and every sum has a fixed order. Exponentials and logarithms are those of the crate libm. So the same parameters and
//! samples give the same bits on every machine.

use crate::digits::{Samples, LABELS, PIXELS};
use crate::random::Random;

/// The network. Its parameters are the weights and offsets of the hidden layer, and then those of the output layer. The weights of a
/// unit follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    /// Units of the hidden layer.
    pub hidden: usize,
}

/// How well parameters recognize samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// Mean cross entropy.
    pub loss: f64,
    /// Part of the samples that are recognized, from 0 to 1.
    pub accuracy: f64,
}

/// Where the parameters of each layer begin.
struct Layers<T> {
    hidden: T,
    hidden_offset: T,
    output: T,
    output_offset: T,
}

/// What the network computes for a sample.
struct Forward {
    hidden: Vec<f32>,
    /// The probability of each digit.
    output: [f32; LABELS],
    /// The loss of the sample.
    loss: f32,
}

/// Returns the sum of the products, from the first one to the last one.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + a * b)
}

/// Adds `factor` times each element.
fn add(to: &mut [f32], factor: f32, from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

impl Network {
    /// Returns the number of parameters.
    pub fn parameters(&self) -> usize {
        self.hidden * (PIXELS + 1) + LABELS * (self.hidden + 1)
    }

    fn layers<'a>(&self, parameters: &'a [f32]) -> Layers<&'a [f32]> {
        let (hidden, rest) = parameters.split_at(self.hidden * PIXELS);
        let (hidden_offset, rest) = rest.split_at(self.hidden);
        let (output, output_offset) = rest.split_at(LABELS * self.hidden);
        Layers {
            hidden,
            hidden_offset,
            output,
            output_offset,
        }
    }

    fn layers_mut<'a>(&self, parameters: &'a mut [f32]) -> Layers<&'a mut [f32]> {
        let (hidden, rest) = parameters.split_at_mut(self.hidden * PIXELS);
        let (hidden_offset, rest) = rest.split_at_mut(self.hidden);
        let (output, output_offset) = rest.split_at_mut(LABELS * self.hidden);
        Layers {
            hidden,
            hidden_offset,
            output,
            output_offset,
        }
    }

    /// Returns the parameters with which training begins.
    pub fn initial(&self, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed, 0);
        let mut parameters = vec![0.0; self.parameters()];
        let layers = self.layers_mut(&mut parameters);
        for (weights, inputs, outputs) in [
            (layers.hidden, PIXELS, self.hidden),
            (layers.output, self.hidden, LABELS),
        ] {
            let range = (6.0 / (inputs + outputs) as f32).sqrt();
            weights.fill_with(|| range * random.symmetric());
        }
        parameters
    }

    fn forward(&self, layers: &Layers<&[f32]>, pixels: &[f32], label: usize) -> Forward {
        let units = layers.hidden.chunks_exact(PIXELS).zip(layers.hidden_offset);
        let hidden: Vec<f32> = units
            .map(|(weights, offset)| (dot(weights, pixels) + offset).max(0.0))
            .collect();
        let mut output = [0.0; LABELS];
        let units = layers.output.chunks_exact(self.hidden).zip(layers.output_offset);
        for (value, (weights, offset)) in output.iter_mut().zip(units) {
            *value = dot(weights, &hidden) + offset;
        }
        let largest = output.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let logit = output[label] - largest;
        let mut sum = 0.0;
        for value in &mut output {
            *value = libm::expf(*value - largest);
            sum += *value;
        }
        output.iter_mut().for_each(|value| *value /= sum);
        Forward {
            hidden,
            output,
            loss: libm::logf(sum) - logit,
        }
    }

    /// Returns the sum of the gradients of the losses of some samples, in the order of `indices`.
    ///
    /// # Panics
    ///
    /// The number of parameters is wrong, or a sample does not exist.
    pub fn gradient(&self, parameters: &[f32], samples: &Samples, indices: &[usize]) -> Vec<f32> {
        assert_eq!(parameters.len(), self.parameters(), "parameters of another network");
        let layers = self.layers(parameters);
        let mut gradient = vec![0.0; parameters.len()];
        let sums = self.layers_mut(&mut gradient);
        for index in indices {
            let (pixels, label) = samples.sample(*index);
            let forward = self.forward(&layers, pixels, label);
            let mut back = vec![0.0; self.hidden];
            for (unit, output) in forward.output.iter().enumerate() {
                let error = if unit == label { output - 1.0 } else { *output };
                let weights = unit * self.hidden..(unit + 1) * self.hidden;
                add(&mut back, error, &layers.output[weights.clone()]);
                add(&mut sums.output[weights], error, &forward.hidden);
                sums.output_offset[unit] += error;
            }
            for (unit, error) in back
                .into_iter()
                .enumerate()
                .filter(|(unit, _)| forward.hidden[*unit] > 0.0)
            {
                add(&mut sums.hidden[unit * PIXELS..][..PIXELS], error, pixels);
                sums.hidden_offset[unit] += error;
            }
        }
        gradient
    }

    /// Returns how well parameters recognize samples.
    ///
    /// # Panics
    ///
    /// As [`Self::gradient`].
    pub fn score(&self, parameters: &[f32], samples: &Samples) -> Score {
        assert_eq!(parameters.len(), self.parameters(), "parameters of another network");
        let layers = self.layers(parameters);
        let (mut loss, mut right) = (0.0, 0);
        for index in 0..samples.len() {
            let (pixels, label) = samples.sample(index);
            let forward = self.forward(&layers, pixels, label);
            loss += f64::from(forward.loss);
            let others = forward.output.iter().enumerate().filter(|(unit, _)| *unit != label);
            right += usize::from(
                others
                    .map(|(_, output)| output)
                    .all(|output| *output < forward.output[label]),
            );
        }
        let count = samples.len().max(1) as f64;
        Score {
            loss: loss / count,
            accuracy: right as f64 / count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digits::Digits;

    const NETWORK: Network = Network { hidden: 5 };

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let digits = Digits::load();
        let parameters = NETWORK.initial(7);
        let indices: Vec<usize> = (0..digits.training.len()).collect();
        let gradient = NETWORK.gradient(&parameters, &digits.training, &indices);
        let loss = |index: usize, change: f32| {
            let mut parameters = parameters.clone();
            parameters[index] += change;
            NETWORK.score(&parameters, &digits.training).loss * indices.len() as f64
        };
        // Parameters of each layer, and their offsets.
        let hidden = 5 * PIXELS;
        for index in (0..hidden).step_by(37).chain(hidden..NETWORK.parameters()) {
            let step = 1e-2;
            let slope = (loss(index, step) - loss(index, -step)) / f64::from(2.0 * step);
            let found = f64::from(gradient[index]);
            assert!(
                (slope - found).abs() < 0.05 * found.abs() + 1.0,
                "parameter {index}: {slope} {found}"
            );
        }
    }

    #[test]
    fn parameters_begin_without_knowledge() {
        let digits = Digits::load();
        let network = Network { hidden: 32 };
        let parameters = network.initial(1);
        assert_eq!(parameters.len(), 64 * 32 + 32 + 320 + 10);
        let score = network.score(&parameters, &digits.test);
        assert!((2.0..3.0).contains(&score.loss) && score.accuracy < 0.3, "{score:?}");
        assert_ne!(parameters, network.initial(2));
    }
}
