// SPDX-License-Identifier: MIT OR Apache-2.0

//! What is trained and how: settings that all ranks have in common, and the batches that follow from them.

use anyhow::{ensure, Result};
use p2pmem_collectives::schedule::Algorithm;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::network::Network;
use crate::random::Random;

/// Most epochs: a checkpoint has the loss of each.
pub const MAX_EPOCHS: u32 = 400;

/// Most layers.
pub const MAX_LAYERS: usize = 16;
/// Most parameters: two checkpoints of this size are read at once.
pub const MAX_PARAMETERS: usize = 500_000;

/// The number of layers of a training that does not have this setting.
fn two() -> usize {
    2
}

/// Settings of a training.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Times that each training sample is used.
    pub epochs: u32,
    /// Samples of a batch, whose gradients are added for one update of the parameters.
    pub batch: usize,
    /// What the mean gradient of a batch is multiplied with.
    pub rate: f32,
    /// Units of each hidden layer.
    pub hidden: usize,
    /// Layers: the hidden ones and the output layer.
    #[serde(default = "two")]
    pub layers: usize,
    /// Seed of the first parameters and of the order of the samples.
    pub seed: u64,
}

impl Settings {
    /// Checks the settings for this number of training samples.
    ///
    /// # Errors
    ///
    /// A setting is not possible.
    pub fn check(&self, samples: usize) -> Result<()> {
        ensure!(
            (1..=MAX_EPOCHS).contains(&self.epochs),
            "{} epochs: 1 to {MAX_EPOCHS} are possible",
            self.epochs
        );
        ensure!(
            (1..=samples).contains(&self.batch),
            "batches of {} samples: there are {samples} training samples",
            self.batch
        );
        ensure!(
            (1..=4096).contains(&self.hidden),
            "{} units of a hidden layer: 1 to 4096 are possible",
            self.hidden
        );
        ensure!(
            (2..=MAX_LAYERS).contains(&self.layers),
            "{} layers: 2 to {MAX_LAYERS} are possible",
            self.layers
        );
        ensure!(
            self.network().parameters() <= MAX_PARAMETERS,
            "{} layers with {} units have more than {MAX_PARAMETERS} parameters",
            self.layers,
            self.hidden
        );
        ensure!(
            self.rate.is_finite() && self.rate > 0.0,
            "a rate of {}: specify a positive number",
            self.rate
        );
        Ok(())
    }

    /// Returns the network.
    pub fn network(&self) -> Network {
        Network {
            hidden: self.hidden,
            layers: self.layers,
        }
    }

    /// Returns what a rank adds to the parameters for the sum of the gradients of its part of a batch.
    pub fn update(&self, gradient: &[f32]) -> Vec<u8> {
        let factor = -self.rate / self.batch as f32;
        gradient
            .iter()
            .flat_map(|value| (factor * value).to_le_bytes())
            .collect()
    }

    /// Returns what identifies a training of `ranks` ranks: two trainings with the same value have the same result.
    pub fn fingerprint(&self, ranks: usize, algorithm: Algorithm) -> [u8; 32] {
        let mut text = serde_json::json!({ "settings": self, "ranks": ranks, "algorithm": algorithm.name() });
        if let Some(settings) = text["settings"].as_object_mut().filter(|_| self.layers == two()) {
            // Checkpoints of versions without this setting stay valid.
            settings.remove("layers");
        }
        Sha256::digest(text.to_string()).into()
    }
}

/// The batches of all epochs. Each epoch has its own order of the samples. Samples that fill no batch are not used in this epoch.
#[derive(Debug)]
pub struct Batches {
    seed: u64,
    size: usize,
    epoch: u32,
    order: Vec<usize>,
}

impl Batches {
    /// Returns the batches of `samples` training samples.
    pub fn new(settings: &Settings, samples: usize) -> Self {
        let mut batches = Self {
            seed: settings.seed,
            size: settings.batch,
            epoch: 0,
            order: (0..samples).collect(),
        };
        batches.shuffle();
        batches
    }

    fn shuffle(&mut self) {
        self.order.sort_unstable();
        Random::new(self.seed, u64::from(self.epoch) + 1).shuffle(&mut self.order);
    }

    /// Returns the number of batches of an epoch.
    pub fn per_epoch(&self) -> u64 {
        (self.order.len() / self.size) as u64
    }

    /// Returns the samples of a batch. Batches are numbered through all epochs.
    pub fn batch(&mut self, number: u64) -> &[usize] {
        // Not truncated: at most MAX_EPOCHS, and less than the samples.
        let epoch = (number / self.per_epoch()) as u32;
        let batch = (number % self.per_epoch()) as usize;
        if epoch != self.epoch {
            self.epoch = epoch;
            self.shuffle();
        }
        &self.order[batch * self.size..][..self.size]
    }
}

/// Returns a rank's part of a batch.
pub fn share(batch: &[usize], rank: usize, ranks: usize) -> &[usize] {
    let edge = |rank: usize| batch.len() * rank / ranks;
    &batch[edge(rank)..edge(rank + 1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: Settings = Settings {
        epochs: 2,
        batch: 10,
        rate: 0.5,
        hidden: 4,
        layers: 2,
        seed: 1,
    };

    #[test]
    fn an_epoch_has_each_sample_at_most_once() {
        let mut batches = Batches::new(&SETTINGS, 45);
        assert_eq!(batches.per_epoch(), 4);
        let mut epoch = |first: u64| -> Vec<usize> {
            let numbers = first..first + 4;
            numbers.flat_map(|number| batches.batch(number).to_vec()).collect()
        };
        let (first, second, again) = (epoch(0), epoch(4), epoch(0));
        assert_eq!(first, again);
        assert_ne!(first, second);
        for mut all in [first, second] {
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), 40);
        }
    }

    #[test]
    fn shares_are_the_whole_batch() {
        let batch: Vec<usize> = (0..10).collect();
        for ranks in 1..=12 {
            let all: Vec<usize> = (0..ranks)
                .flat_map(|rank| share(&batch, rank, ranks).to_vec())
                .collect();
            assert_eq!(all, batch);
        }
        assert_eq!(share(&batch, 1, 4), [2, 3, 4]);
    }

    #[test]
    fn impossible_settings_are_named() {
        SETTINGS.check(45).unwrap();
        let error = |change: fn(&mut Settings)| {
            let mut settings = SETTINGS;
            change(&mut settings);
            settings.check(45).unwrap_err().to_string()
        };
        assert!(error(|settings| settings.epochs = 0).contains("0 epochs"));
        assert!(error(|settings| settings.batch = 46).contains("45 training samples"));
        assert!(error(|settings| settings.hidden = 0).contains("hidden layer"));
        assert!(error(|settings| settings.layers = 1).contains("1 layers"));
        assert!(error(|settings| (settings.hidden, settings.layers) = (600, 4)).contains("parameters"));
        assert!(error(|settings| settings.rate = f32::NAN).contains("positive number"));
    }

    #[test]
    fn other_trainings_have_other_fingerprints() {
        let fingerprint = SETTINGS.fingerprint(2, Algorithm::Ring);
        assert_eq!(fingerprint, SETTINGS.fingerprint(2, Algorithm::Ring));
        assert_ne!(fingerprint, SETTINGS.fingerprint(3, Algorithm::Ring));
        assert_ne!(fingerprint, SETTINGS.fingerprint(2, Algorithm::Decentralized));
        let other = Settings { seed: 2, ..SETTINGS };
        assert_ne!(fingerprint, other.fingerprint(2, Algorithm::Ring));
        let other = Settings { layers: 3, ..SETTINGS };
        assert_ne!(fingerprint, other.fingerprint(2, Algorithm::Ring));
    }

    /// The value of the version that had only networks of two layers.
    #[test]
    fn a_network_of_two_layers_keeps_its_fingerprint() {
        let fingerprint = hex::encode(SETTINGS.fingerprint(2, Algorithm::Ring));
        assert_eq!(
            fingerprint,
            "2d72d3e8261f5d60b0e14742ba2801e03db1962d44366feecff32c426e54c4e1"
        );
    }
}
