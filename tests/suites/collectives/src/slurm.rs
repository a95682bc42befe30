// SPDX-License-Identifier: MIT OR Apache-2.0

//! Jobs of a Slurm cluster of two nodes, which hands out the bytes of the accelerators' memory. The jobs are functions of
//! `slurm-jobs.sh` in the folder with the tables of clients.

use std::path::Path;

use anyhow::{Context, Result};
use p2pmem_vm::demo::Table;
use p2pmem_vm::qemu::utf8;
use p2pmem_vm::vm::tool;
use serde::Serialize;

use crate::bed::{Bed, NODES, programs};

/// Bytes of each of two jobs that contend: more than half of the 128 MiB of a node.
const CONTENDING: &str = "72M";

/// The nodes of the cluster. The first one has the controller.
const CLUSTER: [&str; 2] = [NODES[0], NODES[1]];

/// What a job did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Job {
    /// The job.
    pub name: &'static str,
    /// What has to happen.
    pub expected: &'static str,
    /// Whether the job's output says that it happened.
    pub happened: bool,
    /// Buffers that were left on the node when no job ran.
    pub buffers_left: Option<u64>,
}

/// A job: its name, what has to happen, the words that say so, and the function of `slurm-jobs.sh`.
struct Case {
    name: &'static str,
    expected: &'static str,
    says: &'static [&'static str],
    script: String,
}

fn cases() -> Result<Vec<Case>> {
    Ok(vec![
        Case {
            name: "jobs with limits",
            expected: "8 MiB are granted, 12 MiB and a job without bytes are refused",
            says: &[
                "8 MiB in provider",
                "quota of rule 50-slurm-4001: uid 4001 uses 0 of 8388608 bytes, 12582912 requested",
                "rule 90-no-job denies",
            ],
            script: "jobs_with_limits".into(),
        },
        Case {
            name: "a job that is killed",
            expected: "its memory is free",
            says: &["50-slurm-4001"],
            script: "killed_job".into(),
        },
        Case {
            name: "two jobs that contend",
            expected: "the second one waits for the end of the first one",
            says: &["50-slurm-4001", "the second job waited for the end of the first one"],
            script: format!("contending_jobs {CONTENDING}"),
        },
        Case {
            name: "an allreduce that srun starts",
            expected: "every byte of the result is right",
            says: &["every byte of every result is right"],
            script: format!("allreduce_of_job {}", tool("p2pmem-collectives-accel")?),
        },
    ])
}

impl Job {
    fn new(case: &Case, output: &str) -> Self {
        let left = output.lines().find_map(|line| line.strip_prefix("buffers: "));
        Self {
            name: case.name,
            expected: case.expected,
            happened: case.says.iter().all(|words| output.contains(words)),
            buffers_left: left.and_then(|count| count.parse().ok()),
        }
    }
}

/// Makes the first two nodes a cluster while it runs the jobs. Meanwhile, only jobs get memory on these nodes.
///
/// # Errors
///
/// A daemon does not start, or a job fails that must not.
pub fn measure(bed: &mut Bed, clients: &Path) -> Result<Vec<Job>> {
    let (bin, clients) = (programs()?, utf8(clients)?);
    let environment = format!("export P2PMEM_BIN={} P2PMEM_CLIENTS={clients}", utf8(&bin)?);
    let daemons = format!("{environment}; {clients}/slurm-node.sh");
    for node in CLUSTER {
        bed.run_script(node, &daemons)?;
    }
    let mut run = |case: Case| {
        let script = format!("{environment}; source {clients}/slurm-jobs.sh; {}", case.script);
        let output = bed.run_script(CLUSTER[0], &script).with_context(|| case.name)?;
        Ok(Job::new(&case, &output))
    };
    let jobs = cases()?.into_iter().map(&mut run).collect();
    // The module cannot be unloaded while there are rules.
    for node in CLUSTER {
        bed.run_script(node, &format!("{daemons} stop"))?;
    }
    jobs
}

/// Returns a failure for each job that did not do what it has to.
pub fn judge(jobs: &[Job]) -> Vec<String> {
    let mut failures = Vec::new();
    for job in jobs {
        if !job.happened {
            failures.push(format!("Slurm, {}: not {}", job.name, job.expected));
        }
        if job.buffers_left != Some(0) {
            failures.push(format!(
                "Slurm, {}: buffers that are left: {:?}",
                job.name, job.buffers_left
            ));
        }
    }
    if jobs.is_empty() {
        failures.push("no job of Slurm ran".to_owned());
    }
    failures
}

/// Returns the jobs as a table.
pub fn table(jobs: &[Job]) -> Table {
    let header = ["job", "expected", "happened", "buffers left"];
    let row = |job: &Job| {
        vec![
            job.name.to_owned(),
            job.expected.to_owned(),
            if job.happened { "yes" } else { "no" }.to_owned(),
            job.buffers_left
                .map_or_else(|| "-".to_owned(), |count| count.to_string()),
        ]
    };
    Table::new(3, &header, jobs.iter().map(row))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A job that did what it has to.
    pub(crate) fn good() -> Job {
        Job {
            name: "two jobs",
            expected: "both are right",
            happened: true,
            buffers_left: Some(0),
        }
    }

    #[test]
    fn the_output_of_a_job_says_what_happened() {
        let case = Case {
            name: "a job",
            expected: "it ends",
            says: &["one", "two"],
            script: String::new(),
        };
        let done = Job::new(&case, "line one\nline two\nbuffers: 3\n");
        assert!(done.happened && done.buffers_left == Some(3));
        let lost = Job::new(&case, "line one\n");
        assert!(!lost.happened && lost.buffers_left.is_none());
    }

    #[test]
    fn each_aim_can_fail() {
        let failures = |change: fn(&mut Job)| {
            let mut job = good();
            change(&mut job);
            judge(&[job])
        };
        assert!(failures(|_| {}).is_empty());
        assert_eq!(
            failures(|job| job.happened = false),
            ["Slurm, two jobs: not both are right"]
        );
        assert!(failures(|job| job.buffers_left = Some(1))[0].contains("Some(1)"));
        assert!(failures(|job| job.buffers_left = None)[0].contains("None"));
        assert_eq!(judge(&[]), ["no job of Slurm ran"]);
    }
}
