// SPDX-License-Identifier: MIT OR Apache-2.0

//! Pipeline-parallel training between nodes: its bytes and its bubble beside the formulas.

use anyhow::{Context, Result};
use p2pmem_training::report::TrainingReport;
use p2pmem_vm::demo::Table;
use p2pmem_vm::vm::tool;
use serde::Serialize;

use crate::bed::{Bed, NicBytes};
use crate::sgd::{self, Sgd};

/// Numbers of nodes.
const NODES: [usize; 2] = [2, 4];
/// Times that each sample is used.
const EPOCHS: u32 = 2;
/// The network has a layer for each of four stages. A computation takes much longer than a guest needs for it, so that nodes that share the
/// processors of the emulator's machine do not wait for each other.
const OPTIONS: &str = "pipeline --layers 4 --microbatches 8 --stage-time 25";
/// How much more than by the formula the bubble may be: messages and their receivers take time, too.
const BUBBLE_TOLERANCE: f64 = 0.1;

/// A pipeline.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pipeline {
    /// Number of nodes, each with a stage.
    pub nodes: usize,
    /// Microbatches of a batch.
    pub microbatches: usize,
    /// Bytes that all stages sent forward and backward.
    pub bytes: u64,
    /// The same by the formula.
    pub bytes_formula: u64,
    /// The part of the time in which stages computed nothing.
    pub bubble: f64,
    /// The same by the formula.
    pub bubble_formula: f64,
    /// Losses, and whether they have the bits of the same training on one processor.
    #[serde(flatten)]
    pub training: Sgd,
}

impl Pipeline {
    fn new(report: TrainingReport, nics: &[NicBytes]) -> Result<Self> {
        let pipeline = report.pipeline.clone().context("no pipeline in the report")?;
        let stages = report.rank_reports.iter().filter_map(|rank| rank.stage.as_ref());
        let traffic: Vec<_> = stages.flat_map(|stage| [stage.forward, stage.backward]).collect();
        Ok(Self {
            nodes: report.ranks,
            microbatches: pipeline.microbatches,
            bytes: traffic.iter().map(|part| part.bytes).sum(),
            bytes_formula: traffic.iter().map(|part| part.formula).sum(),
            bubble: pipeline.bubble,
            bubble_formula: pipeline.bubble_formula,
            training: Sgd::new(report, nics)?,
        })
    }
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
        if pipeline.bytes != pipeline.bytes_formula {
            failures.push(format!(
                "{what}: {} bytes, and {} by the formula",
                pipeline.bytes, pipeline.bytes_formula
            ));
        }
        // The bubble cannot be smaller: no stage computes before its input has arrived.
        if !(pipeline.bubble_formula - 0.01..pipeline.bubble_formula + BUBBLE_TOLERANCE).contains(&pipeline.bubble) {
            failures.push(format!(
                "{what}: a bubble of {:.3}, and of {:.3} by the formula",
                pipeline.bubble, pipeline.bubble_formula
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
        "bytes",
        "formula",
        "bubble",
        "formula",
        "last loss",
        "bits of the reference",
        "host bytes/update",
    ];
    let row = |pipeline: &Pipeline| {
        let training = &pipeline.training;
        vec![
            pipeline.nodes.to_string(),
            pipeline.microbatches.to_string(),
            pipeline.bytes.to_string(),
            pipeline.bytes_formula.to_string(),
            format!("{:.3}", pipeline.bubble),
            format!("{:.3}", pipeline.bubble_formula),
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

    /// A pipeline that meets all aims.
    pub(crate) fn good() -> Pipeline {
        Pipeline {
            nodes: 2,
            microbatches: 8,
            bytes: 100,
            bytes_formula: 100,
            bubble: 0.15,
            bubble_formula: 1.0 / 9.0,
            training: sgd::tests::good(),
        }
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
        assert!(failures(|pipeline| pipeline.bytes = 99)[0].contains("99 bytes, and 100"));
        assert!(failures(|pipeline| pipeline.bubble = 0.05)[0].contains("a bubble of 0.050"));
        assert!(failures(|pipeline| pipeline.bubble = 0.3)[0].contains("a bubble of 0.300"));
        assert_eq!(judge(&[]), ["no pipeline was measured"]);
    }
}
