// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report of a training.

use std::io::{self, Write};

use p2pmem::human_size;
use serde::{Deserialize, Serialize};

use crate::asynchronous::Staleness;
use crate::outcome::Outcome;
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
    /// The result of a synchronous training, computed by one processor.
    Reference,
}

impl Mode {
    /// Returns the name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Synchronous => "synchronous",
            Self::Asynchronous => "asynchronous",
            Self::Reference => "reference",
        }
    }
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
    /// Seconds of the training, without its preparation.
    pub seconds: f64,
    /// The ranks; empty for a reference.
    pub rank_reports: Vec<RankReport>,
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
