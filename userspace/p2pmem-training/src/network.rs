// SPDX-License-Identifier: MIT OR Apache-2.0

//! A network of layers that recognizes digits: its loss, and the gradient of the loss.
//!
//! Numbers are f32, and every sum has a fixed order. Exponentials and logarithms are those of the crate libm. So the same parameters and
//! samples give the same bits on every machine.

use std::ops::Range;

use crate::digits::{Samples, LABELS, PIXELS};
use crate::random::Random;

/// The network: hidden layers of the same width, which have rectified linear units, and an output layer. The parameters of a layer are its
/// weights and then its offsets; the weights of a unit follow each other. The layers follow each other, from the first hidden one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    /// Units of each hidden layer.
    pub hidden: usize,
    /// Layers, at least 2: the hidden ones and the output layer.
    pub layers: usize,
}

/// How well parameters recognize samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// Mean cross entropy.
    pub loss: f64,
    /// Part of the samples that are recognized, from 0 to 1.
    pub accuracy: f64,
}

/// A layer, or the part of one that has some of its units (columns of the matrix of weights) or some of its inputs (rows).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layer {
    /// Numbers that each unit multiplies with its weights.
    pub inputs: usize,
    /// Units.
    pub outputs: usize,
    /// Whether the units are rectified: those of the output layer are not.
    pub is_rectified: bool,
}

/// Consecutive layers of a network. In all functions, `parameters` and `sums` are those of these layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    network: Network,
    layers: Range<usize>,
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

/// Replaces the outputs of a network for a sample by the probability of each digit. Returns the loss of the sample.
///
/// # Panics
///
/// The label does not exist.
pub fn probabilities(outputs: &mut [f32], label: usize) -> f32 {
    let largest = outputs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let logit = outputs[label] - largest;
    let mut sum = 0.0;
    for value in outputs.iter_mut() {
        *value = libm::expf(*value - largest);
        sum += *value;
    }
    outputs.iter_mut().for_each(|value| *value /= sum);
    libm::logf(sum) - logit
}

/// Returns the gradient of the loss of a sample at the outputs of a network.
///
/// # Panics
///
/// The label does not exist.
pub fn output_error(outputs: &[f32], label: usize) -> Vec<f32> {
    let mut error = outputs.to_vec();
    probabilities(&mut error, label);
    error[label] -= 1.0;
    error
}

impl Layer {
    /// Returns the number of parameters: weights and offsets.
    pub fn parameters(&self) -> usize {
        self.outputs * (self.inputs + 1)
    }

    fn split<'a>(&self, parameters: &'a [f32]) -> (&'a [f32], &'a [f32]) {
        parameters.split_at(self.outputs * self.inputs)
    }

    /// Returns the sum of each unit's weighted inputs, without the offset.
    pub fn products(&self, parameters: &[f32], inputs: &[f32]) -> Vec<f32> {
        let (weights, _) = self.split(parameters);
        weights
            .chunks_exact(self.inputs)
            .map(|weights| dot(weights, inputs))
            .collect()
    }

    /// Makes sums of weighted inputs the outputs of the units.
    pub fn activate(&self, parameters: &[f32], sums: &mut [f32]) {
        let (_, offsets) = self.split(parameters);
        for (value, offset) in sums.iter_mut().zip(offsets) {
            *value += offset;
            if self.is_rectified {
                *value = value.max(0.0);
            }
        }
    }

    /// Adds the gradient of a sample to `sums`, and to `back` the gradient at the inputs, if needed. `error` is the gradient at the outputs.
    pub fn backward(
        &self,
        parameters: &[f32],
        (inputs, outputs): (&[f32], &[f32]),
        error: &[f32],
        sums: &mut [f32],
        mut back: Option<&mut [f32]>,
    ) {
        let (weights, _) = self.split(parameters);
        let (weight_sums, offset_sums) = sums.split_at_mut(self.outputs * self.inputs);
        for (unit, error) in error.iter().enumerate() {
            if self.is_rectified && outputs[unit] <= 0.0 {
                continue;
            }
            let own = unit * self.inputs..(unit + 1) * self.inputs;
            if let Some(back) = &mut back {
                add(back, *error, &weights[own.clone()]);
            }
            add(&mut weight_sums[own], *error, inputs);
            offset_sums[unit] += error;
        }
    }
}

impl Stage {
    /// Returns the place of the parameters in those of the network.
    pub fn parameters(&self) -> Range<usize> {
        let first = self.network.first_parameter(self.layers.start);
        first..self.network.first_parameter(self.layers.end)
    }

    /// Returns the layers.
    pub fn layers(&self) -> Range<usize> {
        self.layers.clone()
    }

    /// Returns whether the stage ends with the output layer.
    pub fn is_last(&self) -> bool {
        self.layers.end == self.network.layers
    }

    /// Returns the place of a layer's parameters in those of the stage.
    fn place(&self, layer: usize) -> Range<usize> {
        let before = self.network.first_parameter(self.layers.start);
        self.network.first_parameter(layer) - before..self.network.first_parameter(layer + 1) - before
    }

    /// Returns the outputs of each layer for the inputs of the first one.
    pub fn forward(&self, parameters: &[f32], inputs: &[f32]) -> Vec<Vec<f32>> {
        let mut all: Vec<Vec<f32>> = Vec::new();
        for number in self.layers.clone() {
            let (layer, own) = (self.network.layer(number), &parameters[self.place(number)]);
            let mut outputs = layer.products(own, all.last().map_or(inputs, Vec::as_slice));
            layer.activate(own, &mut outputs);
            all.push(outputs);
        }
        all
    }

    /// Adds the gradient of a sample to `sums`. `outputs` are those of [`Self::forward`] for `inputs`, and `error` is the gradient at the
    /// outputs of the last layer. Returns the gradient at the inputs; nothing for the first stage.
    pub fn backward(
        &self,
        parameters: &[f32],
        inputs: &[f32],
        outputs: &[Vec<f32>],
        mut error: Vec<f32>,
        sums: &mut [f32],
    ) -> Vec<f32> {
        for (index, number) in self.layers.clone().enumerate().rev() {
            let (layer, place) = (self.network.layer(number), self.place(number));
            let inputs = if index == 0 { inputs } else { &outputs[index - 1] };
            let mut back = vec![0.0; if number == 0 { 0 } else { layer.inputs }];
            layer.backward(
                &parameters[place.clone()],
                (inputs, &outputs[index]),
                &error,
                &mut sums[place],
                (number > 0).then_some(&mut back[..]),
            );
            error = back;
        }
        error
    }
}

impl Network {
    /// Returns the number of parameters.
    pub fn parameters(&self) -> usize {
        self.first_parameter(self.layers)
    }

    /// Returns a layer.
    pub fn layer(&self, number: usize) -> Layer {
        let is_output = number + 1 == self.layers;
        Layer {
            inputs: if number == 0 { PIXELS } else { self.hidden },
            outputs: if is_output { LABELS } else { self.hidden },
            is_rectified: !is_output,
        }
    }

    /// Returns the number of the first parameter of a layer.
    fn first_parameter(&self, layer: usize) -> usize {
        (0..layer).map(|number| self.layer(number).parameters()).sum()
    }

    /// Returns some layers of the network.
    pub fn stage(&self, layers: Range<usize>) -> Stage {
        Stage { network: *self, layers }
    }

    /// Returns the parameters with which training begins.
    pub fn initial(&self, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed, 0);
        let mut parameters = vec![0.0; self.parameters()];
        for number in 0..self.layers {
            let Layer { inputs, outputs, .. } = self.layer(number);
            let range = (6.0 / (inputs + outputs) as f32).sqrt();
            let weights = &mut parameters[self.first_parameter(number)..][..outputs * inputs];
            weights.fill_with(|| range * random.symmetric());
        }
        parameters
    }

    /// Returns the sum of the gradients of the losses of some samples, in the order of `indices`.
    ///
    /// # Panics
    ///
    /// The number of parameters is wrong, or a sample does not exist.
    pub fn gradient(&self, parameters: &[f32], samples: &Samples, indices: &[usize]) -> Vec<f32> {
        assert_eq!(parameters.len(), self.parameters(), "parameters of another network");
        let all = self.stage(0..self.layers);
        let mut gradient = vec![0.0; parameters.len()];
        for index in indices {
            let (pixels, label) = samples.sample(*index);
            let outputs = all.forward(parameters, pixels);
            let error = output_error(&outputs[self.layers - 1], label);
            all.backward(parameters, pixels, &outputs, error, &mut gradient);
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
        let all = self.stage(0..self.layers);
        let (mut loss, mut right) = (0.0, 0);
        for index in 0..samples.len() {
            let (pixels, label) = samples.sample(index);
            let mut outputs = all.forward(parameters, pixels).pop().unwrap_or_default();
            loss += f64::from(probabilities(&mut outputs, label));
            let others = outputs.iter().enumerate().filter(|(unit, _)| *unit != label);
            right += usize::from(others.map(|(_, output)| output).all(|output| *output < outputs[label]));
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

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        for layers in [2, 3, 4] {
            compare(Network { hidden: 5, layers });
        }
    }

    fn compare(network: Network) {
        let digits = Digits::load();
        let mut parameters = network.initial(7);
        // With an offset of 0, a unit whose inputs are all 0 is where its slope changes.
        parameters
            .iter_mut()
            .filter(|parameter| **parameter == 0.0)
            .for_each(|offset| *offset = 0.1);
        let indices: Vec<usize> = (0..digits.training.len()).collect();
        let gradient = network.gradient(&parameters, &digits.training, &indices);
        let loss = |index: usize, change: f32| {
            let mut parameters = parameters.clone();
            parameters[index] += change;
            network.score(&parameters, &digits.training).loss * indices.len() as f64
        };
        // Some of the first weights, and all other parameters.
        let hidden = 5 * PIXELS;
        for index in (0..hidden).step_by(37).chain(hidden..network.parameters()) {
            // So small that few units change between 0 and another value.
            let step = 3e-4;
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
        let network = Network { hidden: 32, layers: 2 };
        let parameters = network.initial(1);
        assert_eq!(parameters.len(), 64 * 32 + 32 + 320 + 10);
        let score = network.score(&parameters, &digits.test);
        assert!((2.0..3.0).contains(&score.loss) && score.accuracy < 0.3, "{score:?}");
        assert_ne!(parameters, network.initial(2));
    }

    #[test]
    fn stages_are_the_whole_network() {
        let network = Network { hidden: 6, layers: 5 };
        assert_eq!(network.parameters(), 6 * 65 + 3 * 6 * 7 + 10 * 7);
        let digits = Digits::load();
        let parameters = network.initial(1);
        let (pixels, label) = digits.training.sample(3);
        let stages = [network.stage(0..1), network.stage(1..3), network.stage(3..5)];
        let mut inputs = vec![pixels.to_vec()];
        let mut outputs = Vec::new();
        for stage in &stages {
            let own = stage.forward(&parameters[stage.parameters()], &inputs[inputs.len() - 1]);
            inputs.push(own[own.len() - 1].clone());
            outputs.push(own);
        }
        let mut error = output_error(&inputs[3], label);
        let mut gradient = vec![0.0; network.parameters()];
        for (index, stage) in stages.iter().enumerate().rev() {
            let place = stage.parameters();
            let sums = &mut gradient[place.clone()];
            error = stage.backward(&parameters[place], &inputs[index], &outputs[index], error, sums);
        }
        assert_eq!(gradient, network.gradient(&parameters, &digits.training, &[3]));
        assert!(error.is_empty());
    }
}
