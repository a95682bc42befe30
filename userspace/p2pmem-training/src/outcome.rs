// SPDX-License-Identifier: MIT OR Apache-2.0

//! The result of a training.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::digits::Digits;
use crate::settings::Settings;

/// What a training has reached.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Mean loss of all training samples before the first update.
    pub initial_loss: f64,
    /// Mean loss of all training samples after each epoch.
    pub losses: Vec<f64>,
    /// Part of the test samples that are recognized, from 0 to 1.
    pub accuracy: f64,
    /// SHA-256 of the bits of the losses and of the parameters, in hexadecimal digits.
    pub digest: String,
}

/// Returns the numbers of little-endian bytes.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}

/// Returns the little-endian bytes of numbers.
pub fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

impl Outcome {
    /// Returns the result of a training with these losses and last parameters.
    pub fn new(settings: &Settings, digits: &Digits, losses: Vec<f64>, parameters: &[u8]) -> Self {
        let network = settings.network();
        let mut hash = Sha256::new();
        losses.iter().for_each(|loss| hash.update(loss.to_le_bytes()));
        hash.update(parameters);
        Self {
            initial_loss: network.score(&network.initial(settings.seed), &digits.training).loss,
            losses,
            accuracy: network.score(&floats(parameters), &digits.test).accuracy,
            digest: hex::encode(hash.finalize()),
        }
    }

    /// Returns the loss after the last epoch.
    pub fn last_loss(&self) -> f64 {
        self.losses.last().copied().unwrap_or(self.initial_loss)
    }
}
