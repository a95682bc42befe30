// SPDX-License-Identifier: MIT OR Apache-2.0

//! `matrix`: measures every pair of memories by every mode, relative to the link.
//!
//! The link's rate is that of writes from host memory to host memory, measured first in the same run, unless the options
//! state it. Each pair is a run of its own, as by [`client::measure`], with the same parameters.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write;
use std::sync::Arc;

use anyhow::{ensure, Context, Result};
use indicatif::ProgressBar;
use p2pmem::short_size;
use p2pmem_payload::kind::MemoryKind;
use p2pmem_payload::nic::open_nics;
use p2pmem_verbs::Nic;
use serde::{Deserialize, Serialize};

use crate::cli::RunArgs;
use crate::client::{self, Unreachable};
use crate::observer::{Observer, Unobserved};
use crate::report::{Report, SizeResult};
use crate::stats::Latency;
use crate::wire::{reason_and_remedy, Mode};
use crate::{print_json, progress};

mod args;

pub use args::MatrixArgs;

/// Name of the mode of writes that both sides copy through host memory.
pub const STAGED: &str = "staged";

/// Two memories and how messages move between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// The client's memory.
    pub from: MemoryKind,
    /// The server's memory.
    pub to: MemoryKind,
    /// The operation.
    pub mode: Mode,
    /// Whether both sides copy the messages through host memory.
    pub staged: bool,
}

impl Pair {
    /// The pair that measures the link.
    const LINK: Self = Self {
        from: MemoryKind::Cpu,
        to: MemoryKind::Cpu,
        mode: Mode::Write,
        staged: false,
    };

    /// Returns the name of the mode.
    pub fn mode_name(&self) -> &'static str {
        if self.staged {
            STAGED
        } else {
            self.mode.name()
        }
    }
}

/// The link's rate for messages of one size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkRate {
    /// Message size in bytes.
    pub size: u64,
    /// Bandwidth in MiB per second.
    pub mib_per_s: f64,
}

/// What was measured for a pair and a size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Average bandwidth in MiB per second, of all NICs together.
    pub mib_per_s: f64,
    /// Bandwidth divided by the link's for messages of the same size.
    pub ratio_to_link: f64,
    /// Latency of the messages; `None` without messages.
    pub latency: Option<Latency>,
    /// Microseconds of processor time of the client for a message.
    pub cpu_us_client: f64,
    /// The same of the server; `None` if no thread of the server takes part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_us_server: Option<f64>,
    /// Bytes that the processors of both sides copied.
    pub copied_bytes: u64,
    /// Bytes of all messages.
    pub moved_bytes: u64,
    /// Whether every byte is correct; `None` if the run did not compare.
    pub verified: Option<bool>,
    /// Bytes of the window through which each message moved; `None` if messages moved as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
}

/// The result of a pair for messages of one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Kind of the client's memory. In all modes but `read`, messages move from here.
    pub from: String,
    /// Kind of the server's memory. In the mode `read`, messages move from here.
    pub to: String,
    /// `write`, `read`, `send`, `write-imm`, or another mode of `run`; `staged` for writes that both sides copy through
    /// host memory.
    pub mode: String,
    /// Message size in bytes.
    pub size: u64,
    /// The numbers; `None` if the pair cannot run.
    #[serde(flatten)]
    pub measured: Option<Measured>,
    /// Why the pair cannot run, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// All results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Matrix {
    /// Kinds of the client's memory: the rows.
    pub memory: Vec<String>,
    /// Kinds of the server's memory: the columns.
    pub peer_memory: Vec<String>,
    /// Names of the modes, see [`Entry::mode`].
    pub modes: Vec<String>,
    /// Number of NICs of each side.
    pub nics: usize,
    /// The link's rate for each size.
    pub link: Vec<LinkRate>,
    /// The results so far, in the order of measurement.
    pub entries: Vec<Entry>,
}

impl Matrix {
    /// Returns whether a pair ran, and no wrong byte was found.
    pub fn is_correct(&self) -> bool {
        let mut measured = self.entries.iter().filter_map(|entry| entry.measured.as_ref());
        self.entries.iter().any(|entry| entry.measured.is_some()) && measured.all(|one| one.verified != Some(false))
    }

    /// Returns the entry of a pair.
    pub fn entry(&self, from: &str, to: &str, mode: &str, size: u64) -> Option<&Entry> {
        self.entries
            .iter()
            .find(|entry| entry.from == from && entry.to == to && entry.mode == mode && entry.size == size)
    }

    fn link_rate(&self, size: u64) -> f64 {
        self.link
            .iter()
            .find(|link| link.size == size)
            .map_or(0.0, |link| link.mib_per_s)
    }

    fn measured(&self, result: &SizeResult) -> Measured {
        let nics = result.nics.len().max(1) as f64;
        let rate = result.speed.average_mib_per_s;
        let link = self.link_rate(result.speed.bytes);
        Measured {
            mib_per_s: rate,
            ratio_to_link: if link > 0.0 { rate / link } else { 0.0 },
            latency: result.latency,
            cpu_us_client: result.nics.iter().map(|nic| nic.cpu_us_client).sum::<f64>() / nics,
            cpu_us_server: result
                .nics
                .iter()
                .map(|nic| nic.cpu_us_server)
                .sum::<Option<f64>>()
                .map(|sum| sum / nics),
            copied_bytes: result.nics.iter().fold(0, |sum, nic| {
                sum.saturating_add(nic.copied_client).saturating_add(nic.copied_server)
            }),
            moved_bytes: result
                .nics
                .iter()
                .map(|nic| nic.speed.bytes * nic.speed.iterations)
                .sum(),
            verified: result.verified,
            window: result.window,
        }
    }

    /// Returns the entries of a pair that ran.
    fn results(&self, pair: Pair, report: &Report) -> Vec<Entry> {
        report
            .results
            .iter()
            .map(|result| Entry {
                measured: Some(self.measured(result)),
                ..entry(pair, result.speed.bytes)
            })
            .collect()
    }

    /// Writes a table for each mode and size: a row for each own memory, a column for each memory of the server, with the
    /// bandwidth and the ratio to the link.
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub fn tables(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let mut reasons = BTreeSet::new();
        for mode in &self.modes {
            for link in &self.link {
                writeln!(
                    out,
                    "{mode}, messages of {}: MiB/s (ratio to the link's {:.1} MiB/s); rows: own memory, columns: the \
                     server's",
                    short_size(link.size),
                    link.mib_per_s
                )?;
                write!(out, " {:<12}", "")?;
                for to in &self.peer_memory {
                    write!(out, " {to:>17}")?;
                }
                writeln!(out)?;
                for from in &self.memory {
                    write!(out, " {from:<12}")?;
                    for to in &self.peer_memory {
                        let entry = self.entry(from, to, mode, link.size);
                        let mut cell = String::new();
                        match entry.and_then(|entry| entry.measured.as_ref()) {
                            Some(one) => {
                                let wrong = if one.verified == Some(false) { " WRONG" } else { "" };
                                // Writing to a string does not fail.
                                let _ = write!(cell, "{:.1} ({:.2}){wrong}", one.mib_per_s, one.ratio_to_link);
                            }
                            None => cell.push('-'),
                        }
                        if let Some(error) = entry.and_then(|entry| entry.error.as_ref()) {
                            reasons.insert(format!("{from} to {to} by {mode}: {error}"));
                        }
                        write!(out, " {cell:>17}")?;
                    }
                    writeln!(out)?;
                }
            }
        }
        for reason in reasons {
            writeln!(out, "not measured: {reason}")?;
        }
        Ok(())
    }
}

fn entry(pair: Pair, size: u64) -> Entry {
    Entry {
        from: pair.from.name().to_owned(),
        to: pair.to.name().to_owned(),
        mode: pair.mode_name().to_owned(),
        size,
        measured: None,
        error: None,
    }
}

/// Receives what the measurement of a matrix reports. A method that fails ends the measurement with its error. All methods
/// are called on the thread that measures.
pub trait MatrixObserver {
    /// Returns the observer of each run. If its method `proceed` fails, the whole measurement ends.
    fn runs(&self) -> &dyn Observer {
        &Unobserved
    }

    /// The link is measured; `matrix` has no entries yet. `pairs` pairs follow.
    ///
    /// # Errors
    ///
    /// The measurement must end.
    fn link_measured(&self, matrix: &Matrix, pairs: usize) -> Result<()> {
        let _ = (matrix, pairs);
        Ok(())
    }

    /// The measurement of a pair starts.
    ///
    /// # Errors
    ///
    /// The measurement must end.
    fn pair_starts(&self, pair: Pair) -> Result<()> {
        let _ = pair;
        Ok(())
    }

    /// A pair is measured, or cannot run: one entry for each size, which are also the last ones of `matrix`.
    ///
    /// # Errors
    ///
    /// The measurement must end.
    fn pair_ends(&self, entries: &[Entry], matrix: &Matrix) -> Result<()> {
        let _ = (entries, matrix);
        Ok(())
    }
}

impl MatrixObserver for Unobserved {}

/// Measures the matrix, and prints the tables. Returns whether a pair ran, and no wrong byte was found.
///
/// # Errors
///
/// Those of [`measure`].
pub fn run(args: &MatrixArgs, json: bool, out: &mut dyn Write) -> Result<bool> {
    let terminal = Terminal {
        json,
        bar: RefCell::new(ProgressBar::hidden()),
    };
    let matrix = measure(args, &terminal);
    terminal.bar.borrow().finish_and_clear();
    let matrix = matrix?;
    if json {
        print_json(out, &matrix)?;
    } else {
        matrix.tables(out)?;
    }
    Ok(matrix.is_correct())
}

/// Shows the progress on the terminal.
struct Terminal {
    json: bool,
    bar: RefCell<ProgressBar>,
}

impl MatrixObserver for Terminal {
    fn link_measured(&self, _: &Matrix, pairs: usize) -> Result<()> {
        self.bar.replace(progress::bar("pairs", pairs as u64, self.json));
        Ok(())
    }

    fn pair_starts(&self, pair: Pair) -> Result<()> {
        let message = format!("{} to {}, {}", pair.from.name(), pair.to.name(), pair.mode_name());
        self.bar.borrow().set_message(message);
        Ok(())
    }

    fn pair_ends(&self, _: &[Entry], _: &Matrix) -> Result<()> {
        self.bar.borrow().inc(1);
        Ok(())
    }
}

/// Measures the matrix, and reports each pair to `observer`. A pair that cannot run has entries with the reason, and the
/// others continue.
///
/// # Errors
///
/// The link cannot be measured, or the observer ends the measurement.
pub fn measure(args: &MatrixArgs, observer: &dyn MatrixObserver) -> Result<Matrix> {
    let nics: Reused<Vec<Arc<Nic>>> = Reused::default();
    measure_with(args, observer, &|args, observer| {
        let nics = nics.get(|nics| are_usable(nics), || open_nics(&args.own.side.nic))?;
        client::measure_on(args, nics, observer)
    })
}

/// Returns whether all NICs are still there and connected. One that was reset or replaced since it was opened is not.
fn are_usable(nics: &[Arc<Nic>]) -> bool {
    nics.iter().all(|nic| nic.port().is_ok_and(|port| port.is_active))
}

/// A value that is made once, and again when it is not usable any more.
#[derive(Default)]
struct Reused<T>(RefCell<Option<T>>);

impl<T: Clone> Reused<T> {
    fn get(&self, is_usable: impl Fn(&T) -> bool, make: impl FnOnce() -> Result<T>) -> Result<T> {
        let value = match self.0.take().filter(is_usable) {
            Some(value) => value,
            None => make()?,
        };
        self.0.replace(Some(value.clone()));
        Ok(value)
    }
}

/// Measures a pair.
type Measure<'a> = &'a dyn Fn(&RunArgs, &dyn Observer) -> Result<Report>;

fn measure_with(args: &MatrixArgs, observer: &dyn MatrixObserver, run: Measure<'_>) -> Result<Matrix> {
    let pairs = args.pairs();
    let names = |kinds: &[MemoryKind]| kinds.iter().map(|kind| kind.name().to_owned()).collect();
    let mut matrix = Matrix {
        memory: names(&args.memory),
        peer_memory: names(&args.peer_memory),
        modes: args.modes(),
        nics: args.side.nic.len().max(1),
        link: Vec::new(),
        entries: Vec::new(),
    };
    let mut link = None;
    if let Some(mib_per_s) = args.link_rate {
        let rate = |size: &u64| LinkRate { size: *size, mib_per_s };
        matrix.link = args.size.0.iter().map(rate).collect();
    } else {
        let report = run(&args.run_args(Pair::LINK), observer.runs()).context("measuring the link")?;
        ensure!(
            report.is_correct(),
            "the target has wrong bytes after writes from host memory to host memory, so the link's rate says nothing: see \
             the errors of `p2pmem-perf run --verify` between the two nodes"
        );
        let rate = |result: &SizeResult| LinkRate {
            size: result.speed.bytes,
            mib_per_s: result.speed.average_mib_per_s,
        };
        matrix.link = report.results.iter().map(rate).collect();
        matrix.nics = report.client.nics.len();
        link = Some(report);
    }
    observer.link_measured(&matrix, pairs.len())?;
    // Why no other pair can run.
    let mut ended: Option<String> = None;
    for pair in pairs {
        observer.pair_starts(pair)?;
        let measured = if let Some(report) = link.as_ref().filter(|_| pair == Pair::LINK) {
            Ok(matrix.results(pair, report))
        } else if let Some(why) = &ended {
            Err(why.clone())
        } else {
            match run(&args.run_args(pair), observer.runs()) {
                Ok(report) => Ok(matrix.results(pair, &report)),
                Err(error) => {
                    // A stop request is no property of the pair.
                    observer.runs().proceed()?;
                    let mut why = reason_and_remedy(&error);
                    if error.downcast_ref::<Unreachable>().is_some() {
                        why += " (the server of a matrix needs --forever)";
                        ended = Some(why.clone());
                    }
                    Err(why)
                }
            }
        };
        let entries = measured.unwrap_or_else(|why| {
            let failed = |size: &u64| Entry {
                error: Some(why.clone()),
                ..entry(pair, *size)
            };
            args.size.0.iter().map(failed).collect()
        });
        matrix.entries.extend(entries.iter().cloned());
        observer.pair_ends(&entries, &matrix)?;
    }
    Ok(matrix)
}

#[cfg(test)]
mod tests;
