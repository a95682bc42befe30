// SPDX-License-Identifier: MIT OR Apache-2.0

//! Training between nodes: the program `p2pmem-training-accel` on the first nodes, beside the same training on one processor.

use anyhow::{Context, Result, ensure};
use p2pmem_collectives::schedule::Algorithm;
use p2pmem_training::digits::{Digits, LABELS, PIXELS};
use p2pmem_training::reference;
use p2pmem_training::report::{Mode, TrainingReport};
use p2pmem_training::settings::Settings;
use p2pmem_vm::demo::Table;
use p2pmem_vm::vm::tool;
use serde::Serialize;

use crate::bed::{Bed, Moved, NicBytes};

/// How the nodes train, and their number.
const RUNS: [(&str, usize); 4] = [
    ("sync --algorithm ring", 2),
    ("sync --algorithm ring", 4),
    ("async --window 1 --rate 0.2", 3),
    ("tensor --layers 4 --algorithm ring", 2),
];
/// Times that each sample is used.
const EPOCHS: u32 = 10;
/// Most bytes of host memory that the NIC of a node accesses for an update: the announcements of three calls, each of 256 bytes, which the NIC
/// of one node reads and that of another one writes. The payload of an update has 9640 bytes or more.
const MOST_HOST_BYTES: f64 = 2048.0;
/// The part of the first loss below which a training has learned. The result of a parameter server depends on the order of updates.
const LEARNED: f64 = 0.25;
const LEARNED_WITH_SERVER: f64 = 0.75;

/// A training.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sgd {
    /// How the nodes trained.
    pub mode: Mode,
    /// Number of nodes.
    pub ranks: usize,
    /// Updates of the parameters.
    pub updates: u64,
    /// Mean loss of the training samples before the first update.
    pub initial_loss: f64,
    /// The same after each epoch.
    pub losses: Vec<f64>,
    /// Part of the test samples that are recognized.
    pub accuracy: f64,
    /// Whether losses and parameters have the bits of the same training on one processor; `None` with a parameter server, whose result
    /// depends on the order of arrival.
    pub equals_reference: Option<bool>,
    /// Activations, their gradients, and parameters that the nodes of a tensor-parallel training sent.
    pub moved: Option<Moved>,
    /// Bytes of host memory that the NIC of a node accessed for an update.
    pub host_bytes_per_update: f64,
}

impl Sgd {
    pub(crate) fn new(report: TrainingReport, nics: &[NicBytes]) -> Result<Self> {
        let equals_reference = match report.mode {
            Mode::Synchronous => {
                let expected = reference::train(&report.settings, &Digits::load(), report.ranks, Algorithm::Ring)?;
                Some(expected.digest == report.outcome.digest)
            }
            Mode::Asynchronous => None,
            // The stages add gradients in the order of the samples, as one processor does.
            Mode::Pipeline => Some(
                reference::train(&report.settings, &Digits::load(), 1, Algorithm::Ring)?.digest
                    == report.outcome.digest,
            ),
            Mode::Tensor => {
                let digits = Digits::load();
                let expected = reference::train_tensor(&report.settings, &digits, report.ranks, Algorithm::Ring)?;
                Some(expected.digest == report.outcome.digest)
            }
            Mode::Reference => anyhow::bail!("a reference is no training between nodes"),
        };
        let sent: u64 = nics.iter().map(|nic| nic.peer_read).sum();
        let host: u64 = nics.iter().map(NicBytes::host).sum();
        ensure!(sent > 0, "no NIC read a byte of an accelerator");
        let moved = (report.mode == Mode::Tensor)
            .then(|| Moved::new(nics, tensor_formula(&report.settings, report.ranks, report.updates)));
        Ok(Self {
            moved,
            mode: report.mode,
            ranks: report.ranks,
            updates: report.updates,
            initial_loss: report.outcome.initial_loss,
            losses: report.outcome.losses,
            accuracy: report.outcome.accuracy,
            equals_reference,
            host_bytes_per_update: host as f64 / (report.updates.max(1) * nics.len() as u64) as f64,
        })
    }

    /// Returns the loss after the last epoch.
    pub(crate) fn last_loss(&self) -> f64 {
        self.losses.last().copied().unwrap_or(self.initial_loss)
    }

    /// Returns the comparison with the reference, as a cell of a table.
    pub(crate) fn bits(&self) -> &'static str {
        match self.equals_reference {
            Some(true) => "the same",
            Some(false) => "others",
            None => "-",
        }
    }

    fn name(&self) -> String {
        format!("{} training of {} nodes", self.mode.name(), self.ranks)
    }
}

/// Trains on the accelerators of the nodes.
///
/// # Errors
///
/// A node fails, or its report cannot be read.
pub fn measure(bed: &mut Bed) -> Result<Vec<Sgd>> {
    let program = tool("p2pmem-training-accel")?;
    let mut trainings = Vec::new();
    for (mode, nodes) in RUNS {
        let (report, nics) = run(bed, &program, mode, nodes, EPOCHS)?;
        trainings.push(Sgd::new(report, &nics).with_context(|| format!("{mode} on {nodes} nodes"))?);
    }
    Ok(trainings)
}

/// Runs a training on the first nodes. Returns its report, and what their NICs counted.
///
/// # Errors
///
/// A node fails, or the report cannot be read.
pub fn run(
    bed: &mut Bed,
    program: &str,
    mode: &str,
    nodes: usize,
    epochs: u32,
) -> Result<(TrainingReport, Vec<NicBytes>)> {
    let (text, nics) = bed.run(
        nodes,
        &format!("{program} --json {mode} --memory accelerator --epochs {epochs}"),
    )?;
    let report = serde_json::from_str(&text).with_context(|| format!("the report of {mode}: {text}"))?;
    Ok((report, nics))
}

/// Returns a failure for each aim that is not met.
pub fn judge(trainings: &[Sgd]) -> Vec<String> {
    let mut failures = Vec::new();
    for training in trainings {
        let what = training.name();
        if training.equals_reference == Some(false) {
            failures.push(format!("{what}: the result does not have the bits of the reference"));
        }
        let learned = match training.mode {
            Mode::Asynchronous => LEARNED_WITH_SERVER,
            _ => LEARNED,
        };
        if training.last_loss() >= learned * training.initial_loss {
            failures.push(format!(
                "{what}: a loss of {:.3} at the end, and of {:.3} at the beginning",
                training.last_loss(),
                training.initial_loss
            ));
        }
        failures.extend(moved_failure(&what, training));
        if training.host_bytes_per_update > MOST_HOST_BYTES {
            failures.push(format!(
                "{what}: {:.0} host bytes for an update",
                training.host_bytes_per_update
            ));
        }
    }
    if !trainings.iter().any(|training| training.equals_reference.is_some()) {
        failures.push("no training was compared with a reference".to_owned());
    }
    failures
}

/// Returns what is wrong with the payload of a training.
fn moved_failure(what: &str, training: &Sgd) -> Option<String> {
    let failure = match (training.mode, &training.moved) {
        (Mode::Tensor, None) => Some("no payload was counted".to_owned()),
        (_, moved) => moved.as_ref().and_then(Moved::failure),
    };
    failure.map(|failure| format!("{what}: {failure}"))
}

/// Returns the bytes that all nodes of a tensor-parallel training send, from the definition of the network. A ring adds N bytes of `ranks`
/// nodes with 2 N (ranks - 1) sent bytes. After each epoch, each node sends its parameters to all others, in an area that fits the
/// largest part.
fn tensor_formula(settings: &Settings, ranks: usize, updates: u64) -> u64 {
    let (hidden, others) = (settings.hidden, ranks as u64 - 1);
    let pairs = settings.layers / 2;
    // Of each sample: outputs of each pair, and the gradient at the inputs of each pair but the first.
    let numbers = (pairs - 1) * hidden + LABELS + (pairs - 1) * hidden;
    let sums = 2 * others * (4 * settings.batch * numbers) as u64;
    let units = hidden.div_ceil(ranks);
    let parameters = |pair: usize| {
        let inputs = if pair == 0 { PIXELS } else { hidden };
        let outputs = if pair + 1 == pairs { LABELS } else { hidden };
        units * (inputs + 1) + (units + 1) * outputs
    };
    let area = (4 * (0..pairs).map(parameters).sum::<usize>()) as u64;
    updates * sums + u64::from(settings.epochs) * others * ranks as u64 * area
}

/// Returns the trainings as a table.
pub fn table(trainings: &[Sgd]) -> Table {
    let header = [
        "training",
        "nodes",
        "updates",
        "first loss",
        "last loss",
        "recognized",
        "bits of the reference",
        "host bytes/update",
    ];
    let row = |training: &Sgd| {
        vec![
            training.mode.name().to_owned(),
            training.ranks.to_string(),
            training.updates.to_string(),
            format!("{:.3}", training.initial_loss),
            format!("{:.3}", training.last_loss()),
            format!("{:.1} %", 100.0 * training.accuracy),
            training.bits().to_owned(),
            format!("{:.0}", training.host_bytes_per_update),
        ]
    };
    Table::new(1, &header, trainings.iter().map(row))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::bed::tests::moved;

    /// A training that meets all aims.
    pub(crate) fn good() -> Sgd {
        Sgd {
            mode: Mode::Synchronous,
            ranks: 2,
            updates: 140,
            initial_loss: 2.3,
            losses: vec![1.0, 0.5],
            accuracy: 0.9,
            equals_reference: Some(true),
            moved: None,
            host_bytes_per_update: 512.0,
        }
    }

    #[test]
    fn a_result_is_compared_with_the_reference() {
        let settings = p2pmem_training::settings::Settings {
            epochs: 1,
            batch: 96,
            rate: 0.5,
            hidden: 4,
            layers: 2,
            seed: 1,
        };
        let outcome = reference::train(&settings, &Digits::load(), 2, Algorithm::Ring).unwrap();
        let report = TrainingReport {
            updates: 14,
            ..TrainingReport::new(Mode::Synchronous, 2, settings, outcome)
        };
        let nics = [NicBytes {
            peer_read: 100,
            peer_written: 0,
            host_read: 28,
            host_written: 0,
        }];
        let same = Sgd::new(report.clone(), &nics).unwrap();
        assert_eq!((same.equals_reference, same.host_bytes_per_update), (Some(true), 2.0));
        let mut other = report.clone();
        other.outcome.digest = "0".into();
        assert_eq!(Sgd::new(other, &nics).unwrap().equals_reference, Some(false));
        assert!(Sgd::new(report, &[NicBytes::default()]).is_err());
    }

    /// Five epochs of 14 batches. Each of both nodes sends N bytes for a sum of N bytes.
    #[test]
    fn the_formula_of_tensor_parallelism_counts_sums_and_parameters() {
        let settings = Settings {
            epochs: 5,
            batch: 96,
            rate: 0.5,
            hidden: 32,
            layers: 4,
            seed: 1,
        };
        let sums = 2 * 70 * 4 * 96 * (32 + 10 + 32);
        // 16 units of both hidden layers: weights and offsets of the units, weights of the second layers, and their offsets.
        let parameters = (16 * 65 + 16 * 32 + 32) + (16 * 33 + 16 * 10 + 10);
        assert_eq!(tensor_formula(&settings, 2, 70), sums + 5 * 2 * 4 * parameters);
    }

    #[test]
    fn each_aim_can_fail() {
        let failures = |change: fn(&mut Sgd)| {
            let mut training = good();
            change(&mut training);
            judge(&[training])
        };
        assert!(failures(|_| {}).is_empty());
        assert!(failures(|training| training.equals_reference = Some(false))[0].contains("bits of the reference"));
        assert!(failures(|training| training.losses = vec![0.6])[0].contains("0.600 at the end"));
        assert!(
            failures(|training| {
                training.moved = Some(Moved { sent: 99, ..moved(100) });
            })[0]
                .contains("NICs sent 99 and received 100 bytes of payload, and 100 by the formula")
        );
        assert!(failures(|training| training.mode = Mode::Tensor)[0].contains("no payload was counted"));
        assert!(failures(|training| training.losses.clear())[0].contains("2.300 at the end"));
        assert!(failures(|training| training.host_bytes_per_update = 9640.0)[0].contains("9640 host bytes"));
        assert_eq!(
            failures(|training| training.equals_reference = None),
            ["no training was compared with a reference"]
        );
    }
}
