// SPDX-License-Identifier: MIT OR Apache-2.0

//! The recorder on ext4: killed processes, killed machines, power cuts, and the requests that reach a drive. Writes
//! `recorder-crashes.json`. The environment variable `P2PMEM_SEED` repeats a run whose seed a failure names.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use p2pmem_vm::cluster::Cluster;
use p2pmem_vm::topology::Layout;
use p2pmem_vm::vm::{Command, Options, Status, Stream, Vm, sibling, topologies};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::lanes::Alone;
use crate::perf::ctl;
use crate::{LIMIT, Test, describe, failure, module, run, times, write_report};

/// The tests with one guest.
pub const TESTS: &[Test] = &[
    Test {
        name: "recorder::process-killed",
        topology: "recorder",
        alone: false,
        run: process_killed,
    },
    Test {
        name: "recorder::power-cut",
        topology: "recorder",
        alone: false,
        run: power_cut,
    },
    Test {
        name: "recorder::requests",
        topology: "recorder",
        alone: false,
        run: requests,
    },
];

/// The tests that boot guests themselves.
pub const ALONE: &[(&str, Alone)] = &[("recorder::machine-killed", machine_killed)];

/// The report.
pub const REPORT: &str = "recorder-crashes.json";
/// The prefix of a line with a part of the report.
const MARK: &str = "recorder-report: ";
/// The prefix of a line with what a check found.
const CHECKED: &str = "checked: ";
/// The crashes of each kind in a short run.
const ROUNDS: u32 = 5;
/// The power cuts after which a broken recorder must have been found.
const CONTROL: u32 = 100;
/// The drives of the topology.
const DRIVES: &str = "$P2PMEM_BLOCK_NVME0 $P2PMEM_BLOCK_NVME1";
/// Publishes the accelerator's memory once.
const PUBLISH: &str =
    "[ -e /sys/module/p2pmem ] || { insmod $P2PMEM_MODULE && $P2PMEM_CTL publish $P2PMEM_DEV_ACCEL0 >&2; }";

/// The parts so far.
static PARTS: Mutex<BTreeMap<String, Value>> = Mutex::new(BTreeMap::new());

/// Adds a part to the report, and writes the parts so far.
fn add(part: Value) -> Result<()> {
    let mut parts = PARTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Value::Object(part) = part {
        parts.extend(part);
    }
    write_report(REPORT, json!(*parts))
}

/// Returns the seed of a test.
fn seed() -> Result<u64> {
    match std::env::var("P2PMEM_SEED") {
        Ok(seed) => seed.parse().with_context(|| format!("P2PMEM_SEED={seed}")),
        // 48 bits are exact numbers in any reader of the report.
        Err(_) => Ok(RandomState::new().build_hasher().finish() >> 16),
    }
}

/// Returns a shell command in which the program, the module, and p2pmemctl have names.
fn command(script: &str) -> Result<Command> {
    let program = sibling("p2pmem-recorder-crash")?;
    let command = Command::new(["sh", "-c", script]).limit(LIMIT * times()?);
    Ok(command
        .env("P2PMEM_CRASH", program.to_str().context("path")?)
        .env("P2PMEM_CTL", ctl()?)
        .env("P2PMEM_MODULE", module()?))
}

/// Runs a command, and adds the part of the report that it prints, also if it fails.
fn reported(cluster: &mut Cluster, script: &str) -> Result<Value> {
    let vm = cluster.only()?;
    let outcome = run(vm, &command(script)?)?;
    let output = String::from_utf8_lossy(&outcome.stdout);
    let mut part = Value::Null;
    for line in output.lines() {
        if let Some(text) = line.strip_prefix(MARK) {
            part = serde_json::from_str(text).with_context(|| line.to_owned())?;
            add(part.clone())?;
        }
    }
    if !outcome.is_clean() {
        return Err(failure(&[&outcome], describe(&outcome, vm)));
    }
    ensure!(part.is_object(), "no report: {}", describe(&outcome, vm));
    Ok(part)
}

/// The process that records from the accelerator's memory is killed at random moments.
fn process_killed(cluster: &mut Cluster) -> Result<()> {
    let rounds = ROUNDS * times()?;
    let script = format!(
        "{PUBLISH} && $P2PMEM_CRASH kill --rounds {rounds} --seed {} {DRIVES}",
        seed()?
    );
    let part = reported(cluster, &script)?;
    ensure!(part["process_killed"]["rounds"] == rounds, "{part}");
    Ok(())
}

/// The drives lose what is in their volatile caches. A recorder that acknowledges too early, and one that never flushes these
/// caches, must be found.
fn power_cut(cluster: &mut Cluster) -> Result<()> {
    let (rounds, seed) = (ROUNDS * times()?, seed()?);
    for (kind, flag) in [("power_cut", ""), ("power_cut_flush_at_commit", "--flush-at-commit")] {
        let script = format!("$P2PMEM_CRASH cut {flag} --rounds {rounds} --seed {seed} {DRIVES}");
        let part = reported(cluster, &script)?;
        ensure!(part[kind]["rounds"] == rounds, "{part}");
        let acknowledged = part[kind]["acknowledged"].as_u64().unwrap_or(0);
        ensure!(acknowledged > 0, "no block was acknowledged: {part}");
    }
    for broken in ["early", "volatile"] {
        let script = format!("$P2PMEM_CRASH cut --rounds {CONTROL} --seed {seed} --broken {broken} {DRIVES}");
        let part = reported(cluster, &script)?;
        let found = &part[format!("broken_recorder_{broken}")];
        let blocks = ["lost", "torn"].map(|what| found[what].as_u64().unwrap_or(0));
        ensure!(blocks != [0, 0], "the broken recorder was not found: {part}");
    }
    Ok(())
}

/// A block takes two writes with FUA and no flush, if its segment was allocated and written before.
fn requests(cluster: &mut Cluster) -> Result<()> {
    let part = reported(
        cluster,
        &format!("{PUBLISH} && $P2PMEM_CRASH count $P2PMEM_BLOCK_NVME0"),
    )?;
    let of = |create: &str, what: &str| {
        let counts = &part["requests_of_ext4"][create];
        let blocks = counts["blocks"].as_u64().context("blocks")?;
        let requests = counts["requests"][what].as_u64().context("requests")?;
        Ok::<_, anyhow::Error>((requests, blocks))
    };
    for (what, each) in [("writes", 2), ("fua", 2), ("flushes", 0)] {
        let (requests, blocks) = of("zeroed", what)?;
        ensure!(requests == each * blocks, "{what} of zeroed segments: {part}");
    }
    for create in ["allocated", "sparse"] {
        let (requests, blocks) = of(create, "flushes")?;
        ensure!(
            requests >= blocks,
            "segments that are only {create} cost no flush: {part}"
        );
    }
    Ok(())
}

/// QEMU is killed at random moments. What it had written to the images stays.
fn machine_killed() -> Result<()> {
    let (rounds, seed) = (ROUNDS * times()?, seed()?);
    let layout = Layout::load(&topologies().join("recorder.toml"))?;
    let topology = &layout.nodes.first().context("a node")?.topology;
    let images = p2pmem_vm::vm::folder()?;
    let mut options = Options::default();
    let mut random = seed;
    let mut sums = [0; 4];
    for round in 0..=rounds {
        let mut vm = Vm::boot(topology, &options)?;
        let flags = match round {
            0 => "--first",
            _ if round == rounds => "--last",
            _ => "",
        };
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        // The first line says what the check found.
        let lines = if round == rounds {
            u64::MAX
        } else {
            2 + (random >> 33) % 150
        };
        let salt = seed.wrapping_add(u64::from(round) << 20);
        let script = format!("{PUBLISH} && $P2PMEM_CRASH machine {flags} --seed {salt} {DRIVES}");
        let output = killed_after(&mut vm, &command(&script)?, lines, round == rounds)
            .with_context(|| format!("round {round}, seed {seed}"))?;
        let checked = output.lines().find_map(|line| line.strip_prefix(CHECKED));
        if round > 0 {
            let text = checked.with_context(|| format!("round {round}, seed {seed}: no check: {output}"))?;
            let checked: Value = serde_json::from_str(text)?;
            let count = |what: &str| checked[what].as_array().map_or(0, Vec::len) as u64;
            let number = |what: &str| checked[what].as_u64().unwrap_or(0);
            let found = [
                number("acknowledged"),
                number("presented"),
                count("lost"),
                count("torn"),
            ];
            sums.iter_mut().zip(found).for_each(|(sum, found)| *sum += found);
            add(json!({ "machine_killed": {
                "rounds": round, "seed": seed,
                "acknowledged": sums[0], "presented": sums[1], "lost": sums[2], "torn": sums[3],
            }}))?;
            let problems = count("problems");
            ensure!(
                found[2..] == [0, 0] && problems == 0,
                "round {round}, seed {seed}: {text}"
            );
        }
        vm.keep_images(images.path())?;
        options.images = Some(images.path().to_owned());
    }
    Ok(())
}

/// Kills QEMU after a number of lines of the command's output, which is returned. Without `ends`, the command must not end
/// before.
fn killed_after(vm: &mut Vm, command: &Command, lines: u64, ends: bool) -> Result<String> {
    let qemu = i32::try_from(vm.qemu_id())
        .ok()
        .and_then(Pid::from_raw)
        .context("QEMU's id")?;
    let mut seen = 0;
    let outcome = vm.exec(command, &mut |stream, bytes| {
        if stream != Stream::Stdout {
            return;
        }
        let before = seen;
        seen += bytes.iter().filter(|&&byte| byte == b'\n').count() as u64;
        if before < lines && seen >= lines {
            // If QEMU has ended already, the status below says so.
            let _ = kill_process(qemu, Signal::KILL);
        }
    })?;
    let expected = match &outcome.status {
        Status::Exited { code: 0 } => ends,
        Status::Died { .. } => !ends && seen >= lines,
        _ => false,
    };
    ensure!(expected && outcome.findings.is_empty(), "{}", describe(&outcome, vm));
    Ok(String::from_utf8_lossy(&outcome.stdout).into_owned())
}
