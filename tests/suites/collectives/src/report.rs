// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report of the demo: the cost of each algorithm beside its formula, the baseline, and the aims.

use p2pmem_collectives::report::RunReport;
use p2pmem_vm::demo::{self, Table, Verdict};
use serde::Serialize;

use crate::bed::NicBytes;
use crate::kv::{self, Kv};
use crate::pipeline::{self, Pipeline};
use crate::sgd::{self, Sgd};
use crate::slurm::{self, Job};

/// The largest deviation of a ring's bytes from the formula.
const BYTES_TOLERANCE: f64 = 0.05;
/// The smallest part of the link's rate that the busiest node of a ring reaches.
const LINK_RATIO: f64 = 0.85;
/// From this number on, host bytes for a byte of payload are not 0: the NICs also move the words by which ranks enter calls.
const NO_HOST_BYTES: f64 = 0.001;

/// The cost of an algorithm on a number of nodes.
#[derive(Debug, Clone, Serialize)]
pub struct Cost {
    /// The algorithm.
    pub algorithm: String,
    /// Number of nodes, each with one rank.
    pub nodes: usize,
    /// Bytes of the payload of a node.
    pub bytes: u64,
    /// Bytes that the busiest node's NIC sent or received in a call, whichever is more.
    pub bytes_measured: f64,
    /// The same by the formula.
    pub bytes_formula: f64,
    /// `bytes_measured`, divided by `bytes_formula`.
    pub ratio: f64,
    /// Rounds that the ranks saw.
    pub rounds: u32,
    /// The most ranks from which one rank received in one round.
    pub fan_in: u32,
    /// Median time of the slowest rank, in milliseconds.
    pub time_ms: f64,
    /// The time that the link needs for `bytes_measured`, divided by `time_ms`.
    pub ratio_to_link: f64,
    /// Bytes of host memory that NICs accessed, for a byte that they sent.
    pub host_bytes_per_byte: f64,
    /// Whether every byte of every result was right.
    pub verified: bool,
}

impl Cost {
    /// Makes the cost of measured calls from what the ranks reported and the NICs counted. `link` is the link's rate in bytes per
    /// second.
    pub fn measured(report: &RunReport, nics: &[NicBytes], calls: u32, link: f64) -> Self {
        let per_call = |bytes: u64| bytes as f64 / f64::from(calls);
        let busiest = nics
            .iter()
            .map(|nic| nic.peer_read.max(nic.peer_written))
            .max()
            .unwrap_or(0);
        let bytes_measured = per_call(busiest);
        let formula = report.formula.busiest();
        let sent: u64 = nics.iter().map(|nic| nic.peer_read).sum();
        let host: u64 = nics.iter().map(NicBytes::host).sum();
        Self {
            algorithm: report.algorithm.clone().unwrap_or_else(|| report.collective.clone()),
            nodes: report.ranks.len(),
            bytes: report.bytes,
            bytes_measured,
            bytes_formula: formula,
            ratio: bytes_measured / formula,
            rounds: report.measured.rounds,
            fan_in: report.measured.fan_in,
            time_ms: report.time_us / 1e3,
            ratio_to_link: bytes_measured / link / (report.time_us / 1e6),
            host_bytes_per_byte: host as f64 / sent.max(1) as f64,
            verified: report.verified == Some(true),
        }
    }
}

/// `MPI_Allreduce` of Open MPI over UCX, on the same memory, for comparison. Times have no aim; the demo checks that NICs moved the payload.
#[derive(Debug, Clone, Serialize)]
pub struct Baseline {
    /// Number of nodes.
    pub nodes: usize,
    /// Bytes of the payload of a node.
    pub bytes: u64,
    /// Median time of the slowest rank, in milliseconds.
    pub time_ms: f64,
    /// That time, divided by the time of the ring.
    pub ratio_to_ring: f64,
    /// Bytes that NICs sent in all calls, from memory of devices or of the host.
    pub sent: u64,
    /// The fewest bytes that any allreduce of these calls sends: 2 (nodes - 1) payloads for each.
    pub least_sent: u64,
    /// Bytes of host memory that NICs accessed, for a byte of payload of all nodes.
    pub host_bytes_per_byte: f64,
}

impl Baseline {
    /// Returns what is wrong: a comparison with less payload on the link is none.
    fn failure(&self) -> Option<String> {
        (self.sent < self.least_sent).then(|| {
            format!(
                "Open MPI on {} nodes: NICs sent {} bytes, less than an allreduce needs: {}",
                self.nodes, self.sent, self.least_sent
            )
        })
    }
}

/// The report.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Whether the demo passed.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// Rate of the link in MiB per second, measured in this run.
    pub link_mib_per_s: f64,
    /// The cost of each algorithm and number of nodes.
    pub cost: Vec<Cost>,
    /// Open MPI.
    pub baseline: Vec<Baseline>,
    /// Trainings.
    pub sgd: Vec<Sgd>,
    /// Pipeline-parallel trainings.
    pub pipeline: Vec<Pipeline>,
    /// The cache of keys and values of an inference on two nodes.
    pub kv: Vec<Kv>,
    /// Jobs of a Slurm cluster.
    pub slurm: Vec<Job>,
}

impl demo::Report for Report {
    fn verdict(&mut self) -> &mut Verdict {
        &mut self.verdict
    }
}

impl Report {
    /// Returns the costs as a table.
    pub fn costs(&self) -> Table {
        let header = [
            "algorithm",
            "nodes",
            "rounds",
            "fan-in",
            "bytes",
            "formula",
            "ratio",
            "ms",
            "of the link",
            "host bytes/byte",
        ];
        let row = |cost: &Cost| {
            vec![
                cost.algorithm.clone(),
                cost.nodes.to_string(),
                cost.rounds.to_string(),
                cost.fan_in.to_string(),
                format!("{:.0}", cost.bytes_measured),
                format!("{:.0}", cost.bytes_formula),
                format!("{:.3}", cost.ratio),
                format!("{:.0}", cost.time_ms),
                format!("{:.2}", cost.ratio_to_link),
                format!("{:.4}", cost.host_bytes_per_byte),
            ]
        };
        Table::new(1, &header, self.cost.iter().map(row))
    }

    /// Returns the numbers of Open MPI as a table.
    pub fn baselines(&self) -> Table {
        let header = ["nodes", "ms", "relative to the ring", "host bytes/byte"];
        let row = |baseline: &Baseline| {
            vec![
                baseline.nodes.to_string(),
                format!("{:.0}", baseline.time_ms),
                format!("{:.2}", baseline.ratio_to_ring),
                format!("{:.2}", baseline.host_bytes_per_byte),
            ]
        };
        Table::new(0, &header, self.baseline.iter().map(row))
    }

    /// Checks the aims. Adds a failure for each that is not met.
    pub fn judge(&mut self) {
        let mut failures = Vec::new();
        for cost in &self.cost {
            let what = format!("{} of {} nodes", cost.algorithm, cost.nodes);
            if !cost.verified {
                failures.push(format!("{what}: not every byte is right"));
            }
            if (cost.ratio - 1.0).abs() > BYTES_TOLERANCE {
                failures.push(format!("{what}: {:.3} times the bytes of the formula", cost.ratio));
            }
            if cost.host_bytes_per_byte >= NO_HOST_BYTES {
                failures.push(format!("{what}: {:.4} host bytes for a byte", cost.host_bytes_per_byte));
            }
            if cost.algorithm == "ring" && cost.ratio_to_link < LINK_RATIO {
                failures.push(format!(
                    "{what}: {:.2} of the link's rate, less than {LINK_RATIO}",
                    cost.ratio_to_link
                ));
            }
        }
        if self.cost.iter().all(|cost| cost.algorithm != "ring") {
            failures.push("no ring was measured".to_owned());
        }
        if self.baseline.is_empty() {
            failures.push("Open MPI was not measured".to_owned());
        }
        failures.extend(self.baseline.iter().filter_map(Baseline::failure));
        failures.extend(sgd::judge(&self.sgd));
        failures.extend(pipeline::judge(&self.pipeline));
        failures.extend(kv::judge(&self.kv));
        failures.extend(slurm::judge(&self.slurm));
        self.verdict.failures.extend(failures);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A cost that meets all aims.
    pub(crate) fn ring() -> Cost {
        Cost {
            algorithm: "ring".into(),
            nodes: 2,
            bytes: 100,
            bytes_measured: 100.0,
            bytes_formula: 100.0,
            ratio: 1.0,
            rounds: 2,
            fan_in: 1,
            time_ms: 1.0,
            ratio_to_link: 0.9,
            host_bytes_per_byte: 0.0,
            verified: true,
        }
    }

    /// A baseline that meets its aim.
    fn baseline() -> Baseline {
        Baseline {
            nodes: 3,
            bytes: 100,
            time_ms: 2.0,
            ratio_to_ring: 2.0,
            sent: 400,
            least_sent: 400,
            host_bytes_per_byte: 1.0,
        }
    }

    /// A report that meets all aims.
    fn good() -> Report {
        Report {
            cost: vec![ring()],
            baseline: vec![baseline()],
            sgd: vec![sgd::tests::good()],
            pipeline: vec![pipeline::tests::good()],
            kv: vec![kv::tests::direct()],
            slurm: vec![slurm::tests::good()],
            ..Report::default()
        }
    }

    fn failures(change: fn(&mut Cost)) -> Vec<String> {
        let mut report = good();
        change(&mut report.cost[0]);
        report.judge();
        report.verdict.failures
    }

    #[test]
    fn each_aim_can_fail() {
        assert!(failures(|_| {}).is_empty());
        assert!(failures(|cost| cost.verified = false)[0].contains("not every byte"));
        assert!(failures(|cost| cost.ratio = 1.06)[0].contains("1.060 times the bytes"));
        assert!(failures(|cost| cost.ratio = 0.94)[0].contains("0.940 times the bytes"));
        assert!(failures(|cost| cost.host_bytes_per_byte = 0.01)[0].contains("0.0100 host bytes"));
        assert!(failures(|cost| cost.ratio_to_link = 0.8)[0].contains("0.80 of the link's rate"));
        assert_eq!(
            failures(|cost| cost.algorithm = "decentralized".into()),
            ["no ring was measured"]
        );
    }

    #[test]
    fn a_baseline_without_payload_is_none() {
        let mut report = Report {
            baseline: vec![Baseline {
                sent: 399,
                ..baseline()
            }],
            ..good()
        };
        report.judge();
        assert_eq!(
            report.verdict.failures,
            ["Open MPI on 3 nodes: NICs sent 399 bytes, less than an allreduce needs: 400"]
        );
        let mut report = Report {
            baseline: Vec::new(),
            ..good()
        };
        report.judge();
        assert_eq!(report.verdict.failures, ["Open MPI was not measured"]);
    }

    #[test]
    fn the_part_of_the_link_is_that_of_the_median_call() {
        let report: RunReport = serde_json::from_value(serde_json::json!({
            "collective": "allreduce", "algorithm": "ring", "element": "f32", "reduction": "sum", "bytes": 100, "chunk": 10, "window": 1,
            "time_us": 2e6, "shortest_us": 1e6, "ratio": 1.0, "verified": true,
            "measured": formula(), "formula": formula(),
            "ring": { "order": [], "by_topology": [], "chosen": "topology", "steps": [] }, "ranks": [],
        }))
        .unwrap();
        let nics = [NicBytes {
            peer_read: 400,
            peer_written: 400,
            ..NicBytes::default()
        }];
        let cost = Cost::measured(&report, &nics, 4, 100.0);
        assert_eq!((cost.bytes_measured, cost.ratio_to_link), (100.0, 0.5));
    }

    fn formula() -> serde_json::Value {
        serde_json::json!({ "rounds": 2, "most_sent": 100.0, "most_received": 100.0, "most_in_round": 50.0, "fan_in": 1 })
    }
}
