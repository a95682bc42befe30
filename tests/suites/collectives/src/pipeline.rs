// SPDX-License-Identifier: MIT OR Apache-2.0

//! Pipeline-parallel training between nodes: the bytes that NICs counted beside the formula, and the bubble beside the smallest possible one.

use anyhow::{Context, Result};
use p2pmem_training::digits::{LABELS, PIXELS};
use p2pmem_training::report::TrainingReport;
use p2pmem_training::settings::Settings;
use p2pmem_vm::demo::Table;
use p2pmem_vm::vm::tool;
use serde::Serialize;

use crate::bed::{Bed, Moved, NicBytes};
use crate::sgd::{self, Sgd};

/// Numbers of nodes.
const NODES: [usize; 2] = [2, 4];
/// Times that each sample is used.
const EPOCHS: u32 = 2;
/// The network has a layer for each of four stages. A stage computes a microbatch of 24 samples through a layer of 384 x 384 weights, which
/// takes an emulated processor many times longer than the message with its result, also on a fast machine: the work grows with the square
/// of the width, and the message with the width.
const OPTIONS: &str = "pipeline --layers 4 --hidden 384 --batch 192 --microbatches 8";
/// How much smaller the bubble may seem: the clocks of the nodes differ.
const CLOCK_TOLERANCE: f64 = 0.01;

/// A pipeline.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pipeline {
    /// Number of nodes, each with a stage.
    pub nodes: usize,
    /// Microbatches of a batch.
    pub microbatches: usize,
    /// Outputs, gradients and parameters that the stages sent.
    pub moved: Moved,
    /// The part of the time in which stages computed nothing.
    pub bubble: f64,
    /// The smallest part that is possible with the times of the computations of this run.
    pub least_bubble: f64,
    /// Losses, and whether they have the bits of the same training on one processor.
    #[serde(flatten)]
    pub training: Sgd,
}

impl Pipeline {
    fn new(report: TrainingReport, nics: &[NicBytes]) -> Result<Self> {
        let pipeline = report.pipeline.clone().context("no pipeline in the report")?;
        Ok(Self {
            nodes: report.ranks,
            microbatches: pipeline.microbatches,
            moved: Moved::new(nics, formula(&report.settings, report.ranks, report.updates)),
            bubble: pipeline.bubble,
            least_bubble: pipeline.least_bubble,
            training: Sgd::new(report, nics)?,
        })
    }
}

/// Returns the bytes that the stages of a pipeline send, from the definition of the network. Each of the boundaries between two stages carries a
/// number of each unit of each sample forward, and one backward. After each epoch, the parameters of a stage go over all boundaries
/// before it.
fn formula(settings: &Settings, stages: usize, updates: u64) -> u64 {
    let Settings {
        batch, hidden, layers, ..
    } = *settings;
    let boundaries = stages as u64 - 1;
    let activations = updates * boundaries * 2 * (4 * batch * hidden) as u64;
    let parameters = |layer: usize| {
        let inputs = if layer == 0 { PIXELS } else { hidden };
        let outputs = if layer + 1 == layers { LABELS } else { hidden };
        (inputs + 1) * outputs
    };
    // A stage begins at the layer number layers x stage / stages, rounded down.
    let stage = |layer: usize| (1..stages).filter(|stage| layers * stage / stages <= layer).count();
    let collected: usize = (0..layers).map(|layer| 4 * parameters(layer) * stage(layer)).sum();
    activations + u64::from(settings.epochs) * collected as u64
}

/// Trains by pipelines on the accelerators of the nodes.
///
/// # Errors
///
/// A node fails, or its report cannot be read.
pub fn measure(bed: &mut Bed) -> Result<Vec<Pipeline>> {
    let program = tool("p2pmem-training-accel")?;
    let mut pipelines = Vec::new();
    for nodes in NODES {
        let (report, nics) = sgd::run(bed, &program, OPTIONS, nodes, EPOCHS)?;
        pipelines.push(Pipeline::new(report, &nics).with_context(|| format!("a pipeline of {nodes} nodes"))?);
    }
    Ok(pipelines)
}

/// Returns a failure for each aim that is not met.
pub fn judge(pipelines: &[Pipeline]) -> Vec<String> {
    let mut failures = Vec::new();
    for pipeline in pipelines {
        let what = format!("a pipeline of {} nodes", pipeline.nodes);
        if pipeline.training.equals_reference != Some(true) {
            failures.push(format!("{what}: the result does not have the bits of the reference"));
        }
        failures.extend(pipeline.moved.failure().map(|failure| format!("{what}: {failure}")));
        // Messages take time, and nodes that share the processors of the emulator's machine begin later than their input arrives, so the
        // limit is the middle between this bubble and that of stages that compute one after another.
        let sequential = 1.0 - 1.0 / pipeline.nodes as f64;
        let possible = pipeline.least_bubble - CLOCK_TOLERANCE..(pipeline.least_bubble + sequential) / 2.0;
        if !possible.contains(&pipeline.bubble) {
            failures.push(format!(
                "{what}: a bubble of {:.3}; the computations allow {:.3}, and the limit is {:.3}",
                pipeline.bubble, pipeline.least_bubble, possible.end
            ));
        }
    }
    if pipelines.is_empty() {
        failures.push("no pipeline was measured".to_owned());
    }
    failures
}

/// Returns the pipelines as a table.
pub fn table(pipelines: &[Pipeline]) -> Table {
    let header = [
        "nodes",
        "microbatches",
        "bytes sent",
        "formula",
        "bubble",
        "least possible",
        "last loss",
        "bits of the reference",
        "host bytes/update",
    ];
    let row = |pipeline: &Pipeline| {
        let training = &pipeline.training;
        vec![
            pipeline.nodes.to_string(),
            pipeline.microbatches.to_string(),
            pipeline.moved.sent.to_string(),
            pipeline.moved.formula.to_string(),
            format!("{:.3}", pipeline.bubble),
            format!("{:.3}", pipeline.least_bubble),
            format!("{:.3}", training.last_loss()),
            training.bits().to_owned(),
            format!("{:.0}", training.host_bytes_per_update),
        ]
    };
    Table::new(0, &header, pipelines.iter().map(row))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::bed::tests::moved;

    /// A pipeline that meets all aims.
    pub(crate) fn good() -> Pipeline {
        Pipeline {
            nodes: 2,
            microbatches: 8,
            moved: moved(100),
            bubble: 0.15,
            least_bubble: 1.0 / 9.0,
            training: sgd::tests::good(),
        }
    }

    /// One boundary of 14 batches, and two layers of 32 x 32 and 32 x 10 weights that go over it after the epoch.
    #[test]
    fn the_formula_counts_outputs_gradients_and_parameters() {
        let settings = Settings {
            epochs: 1,
            batch: 96,
            rate: 0.5,
            hidden: 32,
            layers: 4,
            seed: 1,
        };
        assert_eq!(
            formula(&settings, 2, 14),
            14 * 2 * 96 * 32 * 4 + 4 * (33 * 32 + 33 * 10)
        );
        // With three stages, the second one begins at layer 1 and the third one at layer 2.
        assert_eq!(
            formula(&settings, 3, 14),
            2 * 14 * 2 * 96 * 32 * 4 + 4 * (33 * 32 + 2 * (33 * 32 + 33 * 10))
        );
    }

    #[test]
    fn the_report_has_the_bytes_of_the_boundaries() {
        let report = serde_json::to_value(good()).unwrap();
        assert_eq!(report["moved"]["formula"], 100);
    }

    #[test]
    fn each_aim_can_fail() {
        let failures = |change: fn(&mut Pipeline)| {
            let mut pipeline = good();
            change(&mut pipeline);
            judge(&[pipeline])
        };
        assert!(failures(|_| {}).is_empty());
        assert!(failures(|pipeline| pipeline.training.equals_reference = None)[0].contains("bits of the reference"));
        assert!(failures(|pipeline| pipeline.moved.sent = 99)[0].contains("NICs sent 99 and received 100 bytes"));
        assert!(failures(|pipeline| pipeline.bubble = 0.05)[0].contains("a bubble of 0.050"));
        assert!(failures(|pipeline| pipeline.bubble = 0.32)[0].contains("a bubble of 0.320"));
        assert_eq!(judge(&[]), ["no pipeline was measured"]);
    }
}
