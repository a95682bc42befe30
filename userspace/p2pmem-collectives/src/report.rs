// SPDX-License-Identifier: MIT OR Apache-2.0

//! What `run` and `cost` print.

use std::io::{self, Write};
use std::time::Duration;

use p2pmem::human_size;
use serde::{Deserialize, Serialize};

use crate::communicator::Done;
use crate::cost::Cost;
use crate::topology::Step;

/// Version of the JSON: the member `schema`.
pub const SCHEMA: u32 = 1;

/// What a rank measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankReport {
    /// Its name.
    pub name: String,
    /// The name of its machine.
    pub node: String,
    /// Its NIC.
    pub nic: String,
    /// The provider of its memory; `None` for host memory.
    pub provider: Option<String>,
    /// The class of the path between memory and NIC, as `p2pmemctl topo` prints it; `None` for host memory.
    pub path: Option<String>,
    /// What reduces.
    pub engine: String,
    /// What it did in one call.
    pub done: Done,
    /// Microseconds of each call.
    pub times_us: Vec<f64>,
    /// Wrong bytes in all calls; `None` if they were not compared.
    pub wrong_bytes: Option<u64>,
}

/// The ring of a job, and why it has this order.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RingReport {
    /// The ranks in their order.
    pub order: Vec<usize>,
    /// The order in which neighbours are nearest.
    pub by_topology: Vec<usize>,
    /// Who chose the order: `topology`, or `option` for the user.
    pub chosen: String,
    /// What neighbours share.
    pub steps: Vec<Step>,
}

/// What a job measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunReport {
    /// The operation.
    pub collective: String,
    /// The algorithm of an allreduce.
    pub algorithm: Option<String>,
    /// Type of the elements.
    pub element: String,
    /// The reduction, if there is one.
    pub reduction: Option<String>,
    /// Bytes of the payload of each rank.
    pub bytes: u64,
    /// Bytes of a piece.
    pub chunk: u64,
    /// Pieces at the same time.
    pub window: u32,
    /// Median over the calls of the slowest rank's time, in microseconds.
    pub time_us: f64,
    /// Shortest of these times.
    pub shortest_us: f64,
    /// What the ranks counted.
    pub measured: Cost,
    /// The same by the formula.
    pub formula: Cost,
    /// Bytes of the busiest rank, relative to the formula.
    pub ratio: f64,
    /// The ring.
    pub ring: RingReport,
    /// Whether all bytes were right; `None` if they were not compared.
    pub verified: Option<bool>,
    /// The ranks.
    pub ranks: Vec<RankReport>,
}

/// Returns the cost that ranks counted.
pub fn measured(ranks: &[RankReport]) -> Cost {
    let most = |value: fn(&Done) -> u64| ranks.iter().map(|rank| value(&rank.done)).max().unwrap_or(0);
    Cost {
        rounds: most(|done| done.rounds.into()) as u32,
        most_sent: most(|done| done.sent) as f64,
        most_received: most(|done| done.received) as f64,
        most_in_round: most(|done| done.most_in_round) as f64,
        fan_in: most(|done| done.fan_in.into()) as u32,
    }
}

/// Returns the median and the shortest of the times of the slowest ranks, in microseconds.
pub fn times(ranks: &[RankReport]) -> (f64, f64) {
    let calls = ranks.iter().map(|rank| rank.times_us.len()).min().unwrap_or(0);
    let slowest = |call: usize| ranks.iter().map(|rank| rank.times_us[call]).fold(0.0, f64::max);
    let mut all: Vec<f64> = (0..calls).map(slowest).collect();
    all.sort_by(f64::total_cmp);
    (
        all.get(calls / 2).copied().unwrap_or(0.0),
        all.first().copied().unwrap_or(0.0),
    )
}

/// Prints the ring and the reason for its order in one line.
fn print_ring(out: &mut dyn Write, ring: &RingReport) -> io::Result<()> {
    let numbers = |order: &[usize]| order.iter().map(usize::to_string).collect::<Vec<_>>().join(" ");
    let mut why: Vec<String> = ring.steps.iter().map(Step::to_string).collect();
    if ring.order != ring.by_topology {
        why.insert(
            0,
            format!("by --ring; the topology gives {}", numbers(&ring.by_topology)),
        );
    }
    writeln!(out, "ring: {} ({})", numbers(&ring.order), why.join("; "))
}

fn human(bytes: f64) -> String {
    human_size(bytes.round() as u64)
}

/// Prints the report of a job.
///
/// # Errors
///
/// Those of the output.
pub fn print_run(out: &mut dyn Write, report: &RunReport) -> io::Result<()> {
    let algorithm = report
        .algorithm
        .as_ref()
        .map(|name| format!(" by {name}"))
        .unwrap_or_default();
    let reduction = report
        .reduction
        .as_ref()
        .map(|name| format!(", {name}"))
        .unwrap_or_default();
    writeln!(
        out,
        "{}{algorithm} of {} of {}{reduction}, {} ranks, pieces of {}, {} at the same time",
        report.collective,
        human_size(report.bytes),
        report.element,
        report.ranks.len(),
        human_size(report.chunk),
        report.window
    )?;
    let median = Duration::from_secs_f64(report.time_us / 1e6);
    let rate = report.bytes as f64 / report.time_us * 1e6 / f64::from(1 << 20);
    writeln!(
        out,
        "time of the slowest rank: {median:.1?} (shortest {:.1?}), {rate:.1} MiB/s of payload",
        Duration::from_secs_f64(report.shortest_us / 1e6)
    )?;
    if !report.ring.steps.is_empty() {
        print_ring(out, &report.ring)?;
    }
    writeln!(
        out,
        " {:<22} {:<10} {:<14} {:<5} {:<26} {:>10} {:>10} {:>10}",
        "rank", "NIC", "memory", "path", "engine", "sent", "received", "reduced"
    )?;
    for rank in &report.ranks {
        writeln!(
            out,
            " {:<22} {:<10} {:<14} {:<5} {:<26} {:>10} {:>10} {:>10}",
            rank.name,
            rank.nic,
            rank.provider.as_deref().unwrap_or("host"),
            rank.path.as_deref().unwrap_or("-"),
            rank.engine,
            human_size(rank.done.sent),
            human_size(rank.done.received),
            human_size(rank.done.engine)
        )?;
    }
    print_costs(
        out,
        &[
            ("measured", report.ranks.len(), &report.measured),
            ("formula", report.ranks.len(), &report.formula),
        ],
    )?;
    writeln!(
        out,
        "bytes of the busiest rank, relative to the formula: {:.3}",
        report.ratio
    )?;
    match report.verified {
        Some(true) => writeln!(out, "every byte of every result is right"),
        Some(false) => {
            let wrong: u64 = report.ranks.iter().filter_map(|rank| rank.wrong_bytes).sum();
            writeln!(out, "WRONG: {wrong} bytes differ from the result by definition")
        }
        None => Ok(()),
    }
}

/// Prints a table of costs: names, numbers of ranks, and costs.
///
/// # Errors
///
/// Those of the output.
pub fn print_costs(out: &mut dyn Write, costs: &[(&str, usize, &Cost)]) -> io::Result<()> {
    writeln!(
        out,
        " {:<28} {:>6} {:>7} {:>12} {:>12} {:>14} {:>7}",
        "", "ranks", "rounds", "most sent", "received", "in one round", "fan-in"
    )?;
    for (name, ranks, cost) in costs {
        writeln!(
            out,
            " {name:<28} {ranks:>6} {:>7} {:>12} {:>12} {:>14} {:>7}",
            cost.rounds,
            human(cost.most_sent),
            human(cost.most_received),
            human(cost.most_in_round),
            cost.fan_in
        )?;
    }
    Ok(())
}
