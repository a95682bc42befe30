// SPDX-License-Identifier: MIT OR Apache-2.0

//! Training between nodes: the program `p2pmem-training-accel` on the first nodes, beside the same training on one processor.

use anyhow::{Context, Result, ensure};
use p2pmem_collectives::schedule::Algorithm;
use p2pmem_training::digits::{Digits, LABELS, PIXELS};
use p2pmem_training::reference;
use p2pmem_training::report::{Mode, SliceReport, TrainingReport};
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
    // A pipeline has a member of this name beside those of its training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved: Option<Moved>,
    /// The parts of the ranks in a tensor-parallel training, by their own reports.
    pub slices: Vec<SliceReport>,
    /// What is wrong with these parts.
    #[serde(skip)]
    pub wrong_slices: Option<String>,
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
            wrong_slices: slices_failure(&report),
            slices: report
                .rank_reports
                .iter()
                .filter_map(|rank| rank.slice.clone())
                .collect(),
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
        failures.extend(training.wrong_slices.as_ref().map(|wrong| format!("{what}: {wrong}")));
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
    let area = 4 * parameters_of(settings, hidden.div_ceil(ranks)) as u64;
    updates * sums + u64::from(settings.epochs) * others * ranks as u64 * area
}

/// Returns the number of parameters of a node that has this number of units of each hidden layer that is split.
fn parameters_of(settings: &Settings, units: usize) -> usize {
    let (hidden, pairs) = (settings.hidden, settings.layers / 2);
    let of_pair = |pair: usize| {
        let inputs = if pair == 0 { PIXELS } else { hidden };
        let outputs = if pair + 1 == pairs { LABELS } else { hidden };
        units * (inputs + 1) + (units + 1) * outputs
    };
    (0..pairs).map(of_pair).sum()
}

/// Returns what is wrong with the parts that the ranks of a tensor-parallel training report. Together they have all units, each has the
/// parameters of its units, and sends what it reports as sent. The busiest one sends the bytes of the formula, which is that of all NICs if
/// what all ranks sent is added.
fn slices_failure(report: &TrainingReport) -> Option<String> {
    let slices: Vec<&SliceReport> = report
        .rank_reports
        .iter()
        .filter_map(|rank| rank.slice.as_ref())
        .collect();
    if report.mode != Mode::Tensor {
        return (!slices.is_empty()).then(|| format!("{} ranks have a part of each layer", slices.len()));
    }
    if slices.len() != report.ranks {
        return Some(format!("{} of {} ranks report their part", slices.len(), report.ranks));
    }
    let units: usize = slices.iter().map(|slice| slice.units).sum();
    if units != report.settings.hidden {
        return Some(format!(
            "the ranks have {units} units, and a layer {}",
            report.settings.hidden
        ));
    }
    for (rank, slice) in report.rank_reports.iter().zip(&slices) {
        let parameters = parameters_of(&report.settings, slice.units);
        let sent = slice.forward.bytes + slice.backward.bytes + slice.collected;
        if (slice.parameters, rank.sent) != (parameters, sent) {
            return Some(format!(
                "{} has {} parameters and sent {} bytes; {parameters} and {sent} are expected",
                rank.name, slice.parameters, rank.sent
            ));
        }
    }
    for (direction, traffic) in [
        ("forward", slices.iter().map(|slice| slice.forward).collect::<Vec<_>>()),
        ("backward", slices.iter().map(|slice| slice.backward).collect()),
    ] {
        let most = traffic.iter().map(|rank| rank.bytes).max();
        if traffic.iter().any(|rank| Some(rank.formula) != most) {
            return Some(format!(
                "{direction}, the busiest rank sent {most:?} bytes: {traffic:?}"
            ));
        }
    }
    let sent: u64 = report.rank_reports.iter().map(|rank| rank.sent).sum();
    let formula = tensor_formula(&report.settings, report.ranks, report.updates);
    (sent != formula).then(|| format!("the ranks sent {sent} bytes, and {formula} by the formula"))
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
    use p2pmem_training::report::{RankReport, Traffic};

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
            slices: Vec::new(),
            wrong_slices: None,
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

    /// A tensor-parallel training of two ranks whose reports are right: one epoch of 14 batches.
    fn tensor_report() -> TrainingReport {
        let settings = Settings {
            epochs: 1,
            batch: 96,
            rate: 0.5,
            hidden: 32,
            layers: 4,
            seed: 1,
        };
        let outcome = reference::train(&settings, &Digits::load(), 1, Algorithm::Ring).unwrap();
        let parameters = parameters_of(&settings, 16);
        let traffic = |numbers: u64| Traffic {
            bytes: 14 * 4 * 96 * numbers,
            formula: 14 * 4 * 96 * numbers,
        };
        let rank = |name: &str| {
            let slice = SliceReport {
                units: 16,
                parameters,
                forward: traffic(32 + 10),
                backward: traffic(32),
                collected: 4 * parameters as u64,
            };
            RankReport {
                sent: slice.forward.bytes + slice.backward.bytes + slice.collected,
                slice: Some(slice),
                ..RankReport::new(name, "mlx5_0", None)
            }
        };
        TrainingReport {
            updates: 14,
            rank_reports: vec![rank("rank 0"), rank("rank 1")],
            ..TrainingReport::new(Mode::Tensor, 2, settings, outcome)
        }
    }

    #[test]
    fn each_number_of_the_parts_can_fail() {
        let good = tensor_report();
        assert_eq!(slices_failure(&good), None);
        let failure = |change: fn(&mut TrainingReport)| {
            let mut report = good.clone();
            change(&mut report);
            slices_failure(&report).unwrap_or_default()
        };
        let wrong = |change: fn(&mut SliceReport)| {
            let mut report = good.clone();
            change(report.rank_reports[1].slice.as_mut().unwrap());
            slices_failure(&report).unwrap_or_default()
        };
        assert!(failure(|report| report.rank_reports[1].slice = None).contains("1 of 2 ranks"));
        assert!(failure(|report| report.mode = Mode::Synchronous).contains("2 ranks have a part"));
        assert!(failure(|report| report.rank_reports[0].sent += 4).starts_with("rank 0 has"));
        assert!(failure(|report| report.updates = 15).contains("by the formula"));
        assert!(wrong(|slice| slice.units = 15).contains("31 units, and a layer 32"));
        assert!(wrong(|slice| slice.parameters -= 1).starts_with("rank 1 has"));
        assert!(wrong(|slice| slice.collected += 4).starts_with("rank 1 has"));
        assert!(wrong(|slice| slice.forward.formula += 4).starts_with("forward, the busiest"));
        assert!(wrong(|slice| slice.backward.formula = 0).starts_with("backward, the busiest"));
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
        assert!(failures(|training| training.wrong_slices = Some("a part".into()))[0].ends_with("2 nodes: a part"));
        assert!(failures(|training| training.losses.clear())[0].contains("2.300 at the end"));
        assert!(failures(|training| training.host_bytes_per_update = 9640.0)[0].contains("9640 host bytes"));
        assert_eq!(
            failures(|training| training.equals_reference = None),
            ["no training was compared with a reference"]
        );
    }
}
