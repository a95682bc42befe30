// SPDX-License-Identifier: MIT OR Apache-2.0

//! Groups of jobs that `mpirun` starts. The ranks are this test binary again, which runs the test `rank_of_a_job` only.

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use p2pmem_collectives::group::{Directory, Group, GroupOptions};
use p2pmem_collectives::pmix::PmixDirectory;
use rustix::process::{getpid, kill_process, Signal};

/// Environment variable: what the rank does.
const PART: &str = "P2PMEM_GROUP_TEST_PART";
/// Environment variable: a folder of the job.
const FOLDER: &str = "P2PMEM_GROUP_TEST_FOLDER";
/// A limit that is never reached.
const LIMIT: Duration = Duration::from_secs(120);
/// Longer than the launcher needs to react to a death.
const REACTION: Duration = Duration::from_secs(3);

/// Runs a job of three ranks. Returns `None` if there is no `mpirun`.
fn run(part: &str) -> Option<Output> {
    if !Command::new("mpirun")
        .arg("--version")
        .output()
        .is_ok_and(|out| out.status.success())
    {
        assert!(
            !p2pmem_header_test::in_sandbox(),
            "in the sandbox this test must run, but there is no mpirun"
        );
        eprintln!("skipped: there is no mpirun");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let out = Command::new("timeout")
        // mpirun gets SIGTERM first, so that it ends its ranks.
        .args(["--kill-after=20", "240", "mpirun", "--oversubscribe", "-np", "3"])
        // Without it, mpirun kills the other ranks when one of them dies.
        .arg("--enable-recovery")
        .args(["-x", PART, "-x", FOLDER])
        .arg(env::current_exe().unwrap())
        .args(["--exact", "rank_of_a_job", "--ignored", "--nocapture"])
        .env(PART, part)
        .env(FOLDER, folder.path())
        .env("TMPDIR", folder.path())
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .output()
        .unwrap();
    Some(out)
}

/// Returns the lines that the ranks have written, sorted.
fn lines(out: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&out.stdout);
    // The test harness may write on the same line.
    let mut lines: Vec<String> = text
        .lines()
        .filter_map(|line| line.split_once("rank> "))
        .map(|(_, line)| line.to_owned())
        .collect();
    lines.sort();
    lines
}

/// A rank of a job, which one of the tests below has started.
#[test]
#[ignore = "runs only under mpirun, which other tests start"]
fn rank_of_a_job() {
    let Ok(part) = env::var(PART) else { return };
    let folder = env::var(FOLDER).unwrap();
    let done = Path::new(&folder).join("done");
    let directory = PmixDirectory::new().unwrap();
    let rank = directory.rank();
    if part == "missing" && rank == 2 {
        // This rank does not join until the others have given up.
        let deadline = Instant::now() + LIMIT;
        while !done.exists() && Instant::now() < deadline {
            thread::yield_now();
        }
        return;
    }
    let limit = if part == "missing" {
        Duration::from_secs(4)
    } else {
        LIMIT
    };
    let options = GroupOptions {
        limit,
        host: Some(format!("node-{rank}")),
        ..GroupOptions::default()
    };
    let group = match Group::join(Box::new(directory), &options) {
        Ok(group) => group,
        Err(error) => {
            println!("rank> {rank}: {error:#}");
            fs::write(done, "").unwrap();
            return;
        }
    };
    if part == "killed" {
        group.barrier(LIMIT).unwrap();
        if rank == 1 {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        let error = loop {
            if let Err(failure) = group.check() {
                break failure;
            }
            thread::yield_now();
        };
        // The launcher notices the death at about the same time. Were it to end the other ranks, it would do so in this time.
        thread::sleep(REACTION);
        println!("rank> {rank}: {error}");
        return;
    }
    let values = group.exchange(format!("value {rank}").as_bytes(), LIMIT).unwrap();
    let values: Vec<_> = values.iter().map(|value| String::from_utf8_lossy(value)).collect();
    println!("rank> {rank}: {}", values.join(", "));
    group.leave(LIMIT).unwrap();
}

#[test]
fn ranks_of_mpirun_find_each_other() {
    let Some(out) = run("exchange") else { return };
    assert_eq!(
        lines(&out),
        [0, 1, 2].map(|rank| format!("{rank}: value 0, value 1, value 2")),
        "{out:?}"
    );
    assert!(out.status.success(), "{out:?}");
}

#[test]
fn a_rank_that_does_not_join_is_named() {
    let Some(out) = run("missing") else { return };
    assert_eq!(
        lines(&out),
        [0, 1].map(|rank| format!("{rank}: rank 2 did not join within 4s")),
        "{out:?}"
    );
}

#[test]
fn the_others_survive_a_killed_rank_and_name_it() {
    let Some(out) = run("killed") else { return };
    assert_eq!(
        lines(&out),
        [0, 2].map(|rank| format!("{rank}: rank 1 (node-1) ended")),
        "{out:?}"
    );
}
