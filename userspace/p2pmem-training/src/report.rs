// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report of a training.

use std::io::{self, Write};

use p2pmem::human_size;
use serde::{Deserialize, Serialize};

use crate::asynchronous::Staleness;
use crate::outcome::Outcome;
use crate::pipeline::Trained;
use crate::settings::Settings;

/// Version of the members of the JSON output.
pub const SCHEMA: u32 = 1;

/// How ranks train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// With an allreduce in each iteration.
    Synchronous,
    /// With a parameter server.
    Asynchronous,
    /// With stages of consecutive layers on the ranks.
    Pipeline,
    /// With a part of every layer on each rank.
    Tensor,
    /// The result of another training, computed by one processor.
    Reference,
}

impl Mode {
    /// Returns the name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Synchronous => "synchronous",
            Self::Asynchronous => "asynchronous",
            Self::Pipeline => "pipeline",
            Self::Tensor => "tensor",
            Self::Reference => "reference",
        }
    }
}

/// Bytes of payload, counted and by the formula.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Bytes that the rank sent.
    pub bytes: u64,
    /// The bytes by the formula.
    pub formula: u64,
}

/// What a rank of a pipeline did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageReport {
    /// The number of the first layer, from 0.
    pub first_layer: usize,
    /// Number of layers.
    pub layers: usize,
    /// Number of parameters of these layers.
    pub parameters: usize,
    /// Bytes of outputs for the next rank.
    pub forward: u64,
    /// Bytes of gradients for the rank before.
    pub backward: u64,
    /// Bytes of parameters that the rank sent after epochs, for the loss and the result.
    pub collected: u64,
    /// Seconds in which the rank computed microbatches, by its own clock.
    pub busy_seconds: f64,
}

impl StageReport {
    /// Returns the report of a rank.
    pub fn new(trained: &Trained) -> Self {
        Self {
            first_layer: trained.layers.start,
            layers: trained.layers.len(),
            parameters: trained.parameters,
            forward: trained.forward,
            backward: trained.backward,
            collected: trained.collected,
            busy_seconds: trained.busy.all,
        }
    }
}

/// How the stages of a pipeline worked together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PipelineReport {
    /// Microbatches of a batch.
    pub microbatches: usize,
    /// Seconds of all batches without their updates, from the first action to the last one of rank 0, by its clock.
    pub batch_seconds: f64,
    /// The part of this time in which stages computed nothing, from 0 to 1: 1 - busy time of all ranks / (ranks x `batch_seconds`).
    pub bubble: f64,
    /// The smallest part that is possible with these times of computations, if transfers take no time.
    pub least_bubble: f64,
}

/// What a rank of a tensor-parallel training did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SliceReport {
    /// Units that the rank has of each hidden layer that is split.
    pub units: usize,
    /// Number of parameters of the rank.
    pub parameters: usize,
    /// Parts of outputs. The formula is that of the busiest rank of an allreduce of batch x width x 4 for each pair of layers.
    pub forward: Traffic,
    /// Parts of gradients. The formula is the same one, for each pair of layers but the first.
    pub backward: Traffic,
    /// Bytes of parameters that the rank sent after epochs, for the loss and the result.
    pub collected: u64,
}

/// What a rank used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// The rank, with its host.
    pub name: String,
    /// The NIC.
    pub nic: String,
    /// The provider of the memory; `None` for host memory.
    pub provider: Option<String>,
    /// What reduces; `None` if the rank reduces nothing.
    pub engine: Option<String>,
    /// Bytes of gradients or parameters that the rank sent.
    pub sent: u64,
    /// The digest of the rank's result, in a synchronous training.
    pub digest: Option<String>,
    /// The stage of the rank, in a pipeline.
    #[serde(default)]
    pub stage: Option<StageReport>,
    /// The part of the layers that the rank has, in a tensor-parallel training.
    #[serde(default)]
    pub slice: Option<SliceReport>,
}

impl RankReport {
    /// Returns the report of a rank that has reduced and sent nothing.
    pub fn new(name: &str, nic: &str, provider: Option<String>) -> Self {
        Self {
            name: name.to_owned(),
            nic: nic.to_owned(),
            provider,
            engine: None,
            sent: 0,
            digest: None,
            stage: None,
            slice: None,
        }
    }
}

/// The report of a training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainingReport {
    /// How the ranks trained.
    pub mode: Mode,
    /// Number of ranks.
    pub ranks: usize,
    /// How gradients were added; `None` with a parameter server.
    pub algorithm: Option<String>,
    /// The settings.
    pub settings: Settings,
    /// Number of parameters.
    pub parameters: usize,
    /// Updates of the parameters in this run.
    pub updates: u64,
    /// The result.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// How far gradients lag behind the parameters, with a parameter server.
    pub staleness: Option<Staleness>,
    /// The iteration of the checkpoint with which this run began.
    pub resumed_at: Option<u64>,
    /// Checkpoints of this run.
    pub checkpoints: u64,
    /// The stages, in a pipeline.
    #[serde(default)]
    pub pipeline: Option<PipelineReport>,
    /// Seconds of the training, without its preparation.
    pub seconds: f64,
    /// The ranks; empty for a reference.
    pub rank_reports: Vec<RankReport>,
}

impl TrainingReport {
    /// Returns the report of a training without updates, checkpoints, and reports of ranks.
    pub fn new(mode: Mode, ranks: usize, settings: Settings, outcome: Outcome) -> Self {
        Self {
            mode,
            ranks,
            algorithm: None,
            settings,
            parameters: settings.network().parameters(),
            updates: 0,
            outcome,
            staleness: None,
            resumed_at: None,
            checkpoints: 0,
            pipeline: None,
            seconds: 0.0,
            rank_reports: Vec::new(),
        }
    }
}

/// Prints the report.
///
/// # Errors
///
/// Those of the output.
pub fn print(out: &mut dyn Write, report: &TrainingReport) -> io::Result<()> {
    let algorithm = report
        .algorithm
        .as_ref()
        .map(|name| format!(" by {name}"))
        .unwrap_or_default();
    writeln!(
        out,
        "{} training of {} ranks{algorithm}: {} parameters, {} epochs, {} updates in {:.1} s",
        report.mode.name(),
        report.ranks,
        report.parameters,
        report.settings.epochs,
        report.updates,
        report.seconds
    )?;
    for rank in &report.rank_reports {
        writeln!(
            out,
            " {} {} {} {}, sent {}",
            rank.name,
            rank.nic,
            rank.provider.as_deref().unwrap_or("host memory"),
            rank.engine.as_deref().unwrap_or("no engine"),
            human_size(rank.sent)
        )?;
        if let Some(stage) = &rank.stage {
            let last = stage.first_layer + stage.layers - 1;
            writeln!(
                out,
                "  layers {} to {last}: {} parameters; forward {} bytes, backward {} bytes, busy {:.3} s",
                stage.first_layer, stage.parameters, stage.forward, stage.backward, stage.busy_seconds
            )?;
        }
        if let Some(slice) = &rank.slice {
            writeln!(
                out,
                "  {} units: {} parameters; forward {} bytes (formula {}), backward {} bytes (formula {})",
                slice.units,
                slice.parameters,
                slice.forward.bytes,
                slice.forward.formula,
                slice.backward.bytes,
                slice.backward.formula
            )?;
        }
    }
    if let Some(pipeline) = &report.pipeline {
        writeln!(
            out,
            "bubble: {:.3} of {:.3} s; these computations of {} stages and {} microbatches allow {:.3}",
            pipeline.bubble, pipeline.batch_seconds, report.ranks, pipeline.microbatches, pipeline.least_bubble
        )?;
    }
    if let Some(iteration) = report.resumed_at {
        writeln!(out, "continued after iteration {iteration}")?;
    }
    if report.checkpoints > 0 {
        writeln!(out, "{} checkpoints", report.checkpoints)?;
    }
    if let Some(staleness) = report.staleness {
        writeln!(
            out,
            "staleness of updates: mean {:.2}, most {}",
            staleness.mean, staleness.most
        )?;
    }
    let outcome = &report.outcome;
    writeln!(out, "loss before the first update: {:.6}", outcome.initial_loss)?;
    for (number, loss) in (1..).zip(&outcome.losses) {
        writeln!(out, "loss after epoch {number}: {loss:.6}")?;
    }
    writeln!(out, "recognized test samples: {:.1} %", 100.0 * outcome.accuracy)?;
    writeln!(out, "digest of losses and parameters: {}", outcome.digest)
}
