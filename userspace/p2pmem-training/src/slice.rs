// SPDX-License-Identifier: MIT OR Apache-2.0

//! A network whose hidden units are split over ranks, for tensor parallelism: what each rank has, and what it computes.
//!
//! Layers form pairs. Of the first layer of a pair, a rank has some units, which are columns of the matrix of weights. Of the second layer, it
//! has the weights of these units, which are rows. So a rank computes its units alone, and a part of each sum of the second layer; the
//! ranks add these parts, and then each rank adds the offsets. Backward, each rank has a part of the gradient at the inputs of a pair,
//! and the ranks add these parts. The first pair needs no gradient at its inputs, which are pixels.

use std::ops::Range;

use anyhow::{ensure, Result};

use crate::digits::{Samples, LABELS};
use crate::network::{output_error, Layer, Network};

/// Whether parts of outputs or parts of gradients are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Outputs of a pair of layers.
    Forward,
    /// The gradient at the inputs of a pair of layers.
    Backward,
}

/// What adds the parts of all ranks. Gets the parts of the ranks that are computed here, and returns the sum.
pub type Add<'a> = &'a mut dyn FnMut(Direction, Vec<Vec<f32>>) -> Result<Vec<f32>>;

/// The part of a network that a rank has. Its parameters are those of one pair after another: weights and offsets of the rank's units of the
/// first layer, and then the weights of these units and all offsets of the second layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    network: Network,
    units: Range<usize>,
}

/// A pair of layers, as a rank has it.
struct Pair {
    first: Layer,
    second: Layer,
    /// The places of the parameters of both layers in those of the slice.
    places: [Range<usize>; 2],
}

/// What a rank computed forward for a pair, by sample.
struct Forward {
    inputs: Vec<Vec<f32>>,
    /// Outputs of the units that the rank has.
    hidden: Vec<Vec<f32>>,
    outputs: Vec<Vec<f32>>,
}

/// Checks that a network can be split over `ranks` ranks.
///
/// # Errors
///
/// The number of layers is odd, or there are more ranks than units.
pub fn check(network: &Network, ranks: usize) -> Result<()> {
    ensure!(
        network.layers % 2 == 0,
        "{} layers: tensor parallelism splits pairs of layers; set --layers to an even number",
        network.layers
    );
    ensure!(
        ranks <= network.hidden,
        "{ranks} ranks for {} units of a hidden layer: each rank needs a unit; start fewer ranks, or set --hidden",
        network.hidden
    );
    Ok(())
}

/// Returns the bytes that the ranks add for a batch of this number of samples, one number for each sum.
pub fn sums(network: &Network, batch: usize) -> Vec<(Direction, u64)> {
    let pairs = network.layers / 2;
    let bytes = |width: usize| (4 * batch * width) as u64;
    let width = |pair: usize| if pair + 1 == pairs { LABELS } else { network.hidden };
    let forward = (0..pairs).map(|pair| (Direction::Forward, bytes(width(pair))));
    let backward = (1..pairs).map(|_| (Direction::Backward, bytes(network.hidden)));
    forward.chain(backward).collect()
}

impl Slice {
    /// Returns the part of a rank.
    pub fn new(network: Network, rank: usize, ranks: usize) -> Self {
        let edge = |rank: usize| network.hidden * rank / ranks;
        Self {
            network,
            units: edge(rank)..edge(rank + 1),
        }
    }

    /// Returns the number of units of each hidden layer that is split.
    pub fn units(&self) -> usize {
        self.units.len()
    }

    /// Returns the number of parameters.
    pub fn parameters(&self) -> usize {
        let last = self.network.layers / 2 - 1;
        self.pair(last).places[1].end
    }

    fn layers(&self, pair: usize) -> (Layer, Layer) {
        let first = Layer {
            outputs: self.units.len(),
            ..self.network.layer(2 * pair)
        };
        let second = Layer {
            inputs: self.units.len(),
            ..self.network.layer(2 * pair + 1)
        };
        (first, second)
    }

    fn pair(&self, number: usize) -> Pair {
        let bytes = |pair| {
            let (first, second) = self.layers(pair);
            first.parameters() + second.parameters()
        };
        let start: usize = (0..number).map(bytes).sum();
        let (first, second) = self.layers(number);
        let middle = start + first.parameters();
        Pair {
            first,
            second,
            places: [start..middle, middle..middle + second.parameters()],
        }
    }

    /// Returns the place in the network of each parameter of the slice.
    fn places(&self) -> Vec<usize> {
        let mut places = Vec::new();
        for pair in 0..self.network.layers / 2 {
            let (first, second) = (self.network.layer(2 * pair), self.network.layer(2 * pair + 1));
            let start = |layer: usize| self.network.stage(layer..layer + 1).parameters().start;
            let at = start(2 * pair);
            places.extend(
                self.units
                    .clone()
                    .flat_map(|unit| (0..first.inputs).map(move |input| at + unit * first.inputs + input)),
            );
            places.extend(self.units.clone().map(|unit| at + first.outputs * first.inputs + unit));
            let at = start(2 * pair + 1);
            places.extend(
                (0..second.outputs)
                    .flat_map(|unit| self.units.clone().map(move |input| at + unit * second.inputs + input)),
            );
            places.extend((0..second.outputs).map(|unit| at + second.outputs * second.inputs + unit));
        }
        places
    }

    /// Returns the parameters of the slice from those of the network.
    ///
    /// # Panics
    ///
    /// The number of parameters is wrong.
    pub fn cut(&self, whole: &[f32]) -> Vec<f32> {
        self.places().into_iter().map(|place| whole[place]).collect()
    }

    /// Copies the parameters of the slice to those of the network.
    ///
    /// # Panics
    ///
    /// A number of parameters is wrong.
    pub fn paste(&self, own: &[f32], whole: &mut [f32]) {
        for (place, value) in self.places().into_iter().zip(own) {
            whole[place] = *value;
        }
    }

    /// Computes the rank's units of a pair. Returns the rank's part of the sums of the second layer, those of one sample after another.
    fn forward(&self, own: &[f32], pair: &Pair, inputs: Vec<Vec<f32>>) -> (Forward, Vec<f32>) {
        let [first, second] = pair.places.clone().map(|place| &own[place]);
        let unit = |inputs: &Vec<f32>| {
            let mut hidden = pair.first.products(first, inputs);
            pair.first.activate(first, &mut hidden);
            hidden
        };
        let hidden: Vec<Vec<f32>> = inputs.iter().map(unit).collect();
        let part = hidden
            .iter()
            .flat_map(|hidden| pair.second.products(second, hidden))
            .collect();
        let forward = Forward {
            inputs,
            hidden,
            outputs: Vec::new(),
        };
        (forward, part)
    }

    /// Adds the gradient of a pair to `gradient`. Returns the rank's part of the gradient at the inputs; nothing for the first pair.
    fn backward(
        &self,
        own: &[f32],
        number: usize,
        forward: &Forward,
        errors: &[Vec<f32>],
        gradient: &mut [f32],
    ) -> Vec<f32> {
        let pair = self.pair(number);
        let [first, second] = pair.places;
        let mut all = Vec::new();
        for (sample, error) in errors.iter().enumerate() {
            let (inputs, hidden) = (&forward.inputs[sample], &forward.hidden[sample]);
            let mut hidden_error = vec![0.0; self.units.len()];
            let sums = &mut gradient[second.clone()];
            let values = (hidden.as_slice(), forward.outputs[sample].as_slice());
            pair.second
                .backward(&own[second.clone()], values, error, sums, Some(&mut hidden_error));
            let mut back = vec![0.0; if number == 0 { 0 } else { inputs.len() }];
            let sums = &mut gradient[first.clone()];
            let needed = (number > 0).then_some(&mut back[..]);
            pair.first
                .backward(&own[first.clone()], (inputs, hidden), &hidden_error, sums, needed);
            all.extend(back);
        }
        all
    }
}

/// Returns the sum of the gradients of the losses of some samples for each of `slices`, in the order of `indices`. `parameters` are those of
/// the slices, and `add` adds the parts of all ranks.
///
/// # Errors
///
/// Those of `add`.
///
/// # Panics
///
/// There is no slice, a number of parameters is wrong, or a sample does not exist.
pub fn gradients(
    slices: &[Slice],
    parameters: &[Vec<f32>],
    samples: &Samples,
    indices: &[usize],
    add: Add<'_>,
) -> Result<Vec<Vec<f32>>> {
    let network = slices[0].network;
    let pairs = network.layers / 2;
    let mut inputs: Vec<Vec<f32>> = indices.iter().map(|index| samples.sample(*index).0.to_vec()).collect();
    // By pair and slice.
    let mut computed: Vec<Vec<Forward>> = Vec::new();
    for number in 0..pairs {
        let all = slices.iter().zip(parameters);
        let (mut forward, parts): (Vec<_>, Vec<_>) = all
            .map(|(slice, own)| slice.forward(own, &slice.pair(number), inputs.clone()))
            .unzip();
        let sums = add(Direction::Forward, parts)?;
        for ((slice, own), forward) in slices.iter().zip(parameters).zip(&mut forward) {
            let pair = slice.pair(number);
            forward.outputs = sums
                .chunks_exact(pair.second.outputs)
                .map(|sums| {
                    let mut outputs = sums.to_vec();
                    pair.second.activate(&own[pair.places[1].clone()], &mut outputs);
                    outputs
                })
                .collect();
        }
        inputs = forward[0].outputs.clone();
        computed.push(forward);
    }
    let labels = indices.iter().map(|index| samples.sample(*index).1);
    let mut errors: Vec<Vec<f32>> = inputs
        .iter()
        .zip(labels)
        .map(|(outputs, label)| output_error(outputs, label))
        .collect();
    let mut gradients: Vec<Vec<f32>> = parameters.iter().map(|own| vec![0.0; own.len()]).collect();
    for (number, forward) in computed.iter().enumerate().rev() {
        let mut parts = Vec::new();
        for (index, slice) in slices.iter().enumerate() {
            let gradient = &mut gradients[index];
            parts.push(slice.backward(&parameters[index], number, &forward[index], &errors, gradient));
        }
        if number > 0 {
            let sums = add(Direction::Backward, parts)?;
            errors = sums.chunks_exact(network.hidden).map(<[f32]>::to_vec).collect();
        }
    }
    Ok(gradients)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digits::Digits;

    #[test]
    fn slices_are_the_whole_network() {
        let network = Network { hidden: 7, layers: 4 };
        let initial = network.initial(1);
        for ranks in 1..=4 {
            let mut whole = vec![f32::NAN; initial.len()];
            for rank in 0..ranks {
                let slice = Slice::new(network, rank, ranks);
                let own = slice.cut(&initial);
                assert_eq!(own.len(), slice.parameters());
                slice.paste(&own, &mut whole);
            }
            assert_eq!(whole, initial, "{ranks} ranks");
        }
    }

    #[test]
    fn the_gradients_of_slices_are_those_of_the_network() {
        let digits = Digits::load();
        let indices: Vec<usize> = (10..40).collect();
        for (ranks, layers) in [(1, 2), (3, 2), (1, 4), (2, 4), (4, 6)] {
            let network = Network { hidden: 9, layers };
            let parameters = network.initial(5);
            let slices: Vec<Slice> = (0..ranks).map(|rank| Slice::new(network, rank, ranks)).collect();
            let own: Vec<Vec<f32>> = slices.iter().map(|slice| slice.cut(&parameters)).collect();
            let mut added = Vec::new();
            let mut add = |direction, parts: Vec<Vec<f32>>| {
                added.push((direction, 4 * parts[0].len() as u64));
                let sum = |index: usize| parts.iter().map(|part| part[index]).sum();
                Ok((0..parts[0].len()).map(sum).collect())
            };
            let gradients = gradients(&slices, &own, &digits.training, &indices, &mut add).unwrap();
            assert_eq!(added.len(), layers - 1);
            let mut expected = sums(&network, 30);
            // Backward begins with the last pair.
            let count = layers / 2;
            expected[count..].reverse();
            assert_eq!(added, expected);
            let mut whole = vec![f32::NAN; parameters.len()];
            for (slice, gradient) in slices.iter().zip(&gradients) {
                slice.paste(gradient, &mut whole);
            }
            let reference = network.gradient(&parameters, &digits.training, &indices);
            for (found, expected) in whole.iter().zip(&reference) {
                // Other orders of additions have other rounding errors.
                let limit = if ranks == 1 { 0.0 } else { 1e-3 };
                assert!(
                    (found - expected).abs() <= limit,
                    "{ranks} ranks, {layers} layers: {found} {expected}"
                );
            }
        }
    }

    #[test]
    fn impossible_splits_are_named() {
        let error = |layers, ranks| check(&Network { hidden: 3, layers }, ranks).unwrap_err().to_string();
        assert!(error(3, 2).contains("3 layers"));
        assert!(error(4, 4).contains("4 ranks for 3 units"));
        check(&Network { hidden: 3, layers: 4 }, 3).unwrap();
    }
}
