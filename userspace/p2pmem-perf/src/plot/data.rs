// SPDX-License-Identifier: MIT OR Apache-2.0

//! The members of reports that are drawn. All of them are optional, and others are ignored.

use serde::Deserialize;

use crate::report::SizeResult;

/// A report.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Document {
    /// The sizes of a run.
    pub(super) results: Vec<SizeResult>,
    /// The two sides of a run.
    pub(super) client: Option<SideName>,
    pub(super) server: Option<SideName>,
    pub(super) test: Option<TestName>,
    /// A matrix in a report of several measurements.
    matrix: MatrixMember,
    /// A report that is a matrix.
    #[serde(flatten)]
    own: Matrix,
    pub(super) rpc: Vec<Call>,
    pub(super) decomposition: Vec<Path>,
    pub(super) formula: Vec<PathCost>,
    pub(super) multi_port: Option<Ports>,
    /// A report of p2pmem-training.
    #[serde(flatten)]
    pub(super) training: Option<Curve>,
    /// The rates of a stream.
    pub(super) average_mib_per_s: Option<f64>,
    pub(super) rolling_min_mib_per_s: Option<f64>,
    pub(super) rolling_max_mib_per_s: Option<f64>,
}

impl Document {
    /// Returns the matrices that have results.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &[Entry]> {
        let other = match &self.matrix {
            MatrixMember::Cells(entries) => Some(entries),
            MatrixMember::Matrix(matrix) => Some(&matrix.entries),
            MatrixMember::Other(_) => None,
        };
        let all = std::iter::once(&self.own.entries).chain(other);
        all.map(Vec::as_slice).filter(|entries| !entries.is_empty())
    }
}

/// The losses of a training.
#[derive(Debug, Deserialize)]
pub(super) struct Curve {
    pub(super) mode: String,
    pub(super) ranks: u32,
    /// Before the first epoch.
    pub(super) initial_loss: f64,
    /// After each epoch.
    pub(super) losses: Vec<f64>,
}

/// What is known of a side. In a report of rpc, a side is the name of its memory.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum SideName {
    Side { memory: String },
    Memory(String),
}

impl SideName {
    pub(super) fn memory(&self) -> &str {
        match self {
            Self::Side { memory } | Self::Memory(memory) => memory,
        }
    }
}

/// What is known of a test.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct TestName {
    pub(super) mode: String,
    pub(super) staged: bool,
}

/// The member `matrix`. Reports of other programs may have something else of this name.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum MatrixMember {
    /// The cells alone, as in the report of the test bed's demo.
    Cells(Vec<Entry>),
    Matrix(Matrix),
    /// Not drawn.
    Other(#[expect(dead_code, reason = "it only has to be valid JSON")] serde_json::Value),
}

impl Default for MatrixMember {
    fn default() -> Self {
        Self::Other(serde_json::Value::Null)
    }
}

/// A matrix.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Matrix {
    pub(super) entries: Vec<Entry>,
}

/// A cell of a matrix.
#[derive(Debug, Deserialize)]
pub(super) struct Entry {
    pub(super) from: String,
    pub(super) to: String,
    pub(super) mode: String,
    pub(super) size: u64,
    #[serde(default)]
    pub(super) mib_per_s: Option<f64>,
    #[serde(default)]
    pub(super) ratio_to_link: Option<f64>,
}

/// The cost of a call.
#[derive(Debug, Deserialize)]
pub(super) struct Call {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) waiting: String,
    pub(super) p50_us: f64,
    #[serde(default)]
    pub(super) cpu_us_client: f64,
    #[serde(default)]
    pub(super) cpu_us_server: f64,
}

/// What the time of a transfer consists of.
#[derive(Debug, Deserialize)]
pub(super) struct Path {
    pub(super) name: String,
    pub(super) terms: Vec<Term>,
    /// The whole time. The medians of the terms need not add up to that of the whole.
    #[serde(default)]
    pub(super) total_us: Option<f64>,
}

/// A part of a time.
#[derive(Debug, Deserialize)]
pub(super) struct Term {
    pub(super) term: String,
    pub(super) us: f64,
}

/// What a path costs, in bytes for a byte of payload.
#[derive(Debug, Deserialize)]
pub(super) struct PathCost {
    pub(super) name: String,
    /// `None` over TCP: the kernel copies from and to the memory.
    pub(super) copied_by_program: Option<f64>,
    pub(super) copied_by_kernel: f64,
    pub(super) root_complex: f64,
}

/// The rates of one port and of two.
#[derive(Debug, Deserialize)]
pub(super) struct Ports {
    pub(super) single_mib_per_s: f64,
    pub(super) one_process_mib_per_s: f64,
    pub(super) two_processes_mib_per_s: f64,
}
