// SPDX-License-Identifier: MIT OR Apache-2.0

//! Runs the programs of the tables in `tests/suites/clients`, and writes a report on each.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use libtest_mimic::Trial;
use p2pmem_cases::Kernels;
use p2pmem_guest::limits::is_long;
use p2pmem_vm::clients::{self, CLIENT, Client, NotRun, Report, Results, SERVER, Table, tables};
use p2pmem_vm::cluster::Cluster;
use p2pmem_vm::counters::difference;
use p2pmem_vm::pyverbs;
use p2pmem_vm::vm::{Command, Outcome};
use serde_json::{Value, json};

use crate::bed::{Attempt, Bed, DEBUG, STOCK};
use crate::{describe_outcome, failure, is_late, peer, report, write_report};

/// The time limit of a table's preparation.
const SET_UP: Duration = Duration::from_secs(120);

/// The topology of pyverbs' tests, which connect to themselves on one NIC.
const PYVERBS_TOPOLOGY: &str = "rdma";
/// The time limit of all these tests on one node.
const PYVERBS: Duration = Duration::from_secs(1500);
/// The time limit of one of them, in seconds. On an idle machine it takes one or two.
const PYVERBS_LIMIT: u32 = 120;
/// The number of huge pages that some of them need.
const HUGE_PAGES: u32 = 16;

/// The folders of the compiled C programs and of the installed wheels.
static PROGRAMS: OnceLock<Result<PathBuf, String>> = OnceLock::new();
static WHEELS: OnceLock<Result<PathBuf, String>> = OnceLock::new();

/// The rows of all clients, with the results of those that ran.
pub type Reports = Arc<Mutex<clients::Reports>>;

/// Makes a trial for each selected client of all tables that runs on the kernel. The first one of each table is part of the core, which
/// always runs. Adds a row for each client of all tables.
pub fn trials(bed: &Bed, reports: &Reports) -> Result<Vec<Trial>> {
    let mut trials = Vec::new();
    for path in table_files()? {
        let table = Arc::new(Table::load(&path)?);
        let mut has_core = false;
        for index in 0..table.clients.len() {
            let name = format!("clients::{}::{}", table.name, table.clients[index].name);
            let kernels = match &table.kernels {
                clients::Kernels::Both => Kernels::Both,
                clients::Kernels::Stock(why) => Kernels::Stock(why),
                clients::Kernels::Debug(why) => Kernels::Debug(why),
            };
            let client = &table.clients[index];
            let row = client.report(Results::NotRun(NotRun::NotSelected));
            add(bed, reports, &table.name, row)?;
            let other_kernel = match kernels {
                Kernels::Stock(why) if bed.name != STOCK => Some(why.to_owned()),
                Kernels::Debug(why) if bed.name != DEBUG => Some(why.to_owned()),
                _ => None,
            };
            let skipped = client.skipped(is_long(), bed.name == DEBUG);
            if let Some(reason) = other_kernel.or(skipped) {
                let trial = Trial::test(format!("{}::{name}", bed.name), || Ok(()));
                trials.push(trial.with_kind(format!("skipped: {reason}")).with_ignored_flag(true));
                not_run(reports, bed, &table.name, &client.name, &NotRun::Skipped(reason))?;
                continue;
            }
            let is_core = !has_core;
            has_core = true;
            let (own, all, shared) = (bed.clone(), reports.clone(), table.clone());
            let trial = bed.trial(&name, &table.topology, kernels, is_core, move |attempt| {
                let client = &shared.clients[index];
                let (result, ended) = match run(&own, &shared, client, attempt) {
                    Ok(ran) => ran,
                    Err(e) => {
                        let error = format!("{e:#}");
                        let first = error.lines().next().unwrap_or_default();
                        (clients::Attempt::prevented(first), Err(e))
                    }
                };
                add(&own, &all, &shared.name, client.report(Results::Attempts(vec![result])))?;
                ended
            });
            trials.extend(trial);
        }
    }
    trials.extend(pyverbs_trial(bed, reports)?);
    Ok(trials)
}

/// Makes the trial of pyverbs' own tests. Adds a row for each of these tests.
fn pyverbs_trial(bed: &Bed, reports: &Reports) -> Result<Option<Trial>> {
    const WHY: &str = "these programs test the NIC model, and do not use the module";
    for row in pyverbs_expected()?.not_selected() {
        add(bed, reports, pyverbs::NAME, row)?;
    }
    let skipped = match (bed.name, is_long()) {
        (STOCK, true) => None,
        (STOCK, false) => Some("only in a long run"),
        _ => Some(WHY),
    };
    if let Some(reason) = skipped {
        let reason = NotRun::Skipped(reason.to_owned());
        not_run(reports, bed, pyverbs::NAME, pyverbs::NAME, &reason)?;
        let trial = Trial::test(format!("{}::clients::pyverbs", bed.name), || Ok(()));
        return Ok(Some(trial.with_kind(reason.to_string()).with_ignored_flag(true)));
    }
    let (own, all) = (bed.clone(), reports.clone());
    let run = move |attempt| pyverbs(&own, &all, attempt);
    Ok(bed.trial("clients::pyverbs", PYVERBS_TOPOLOGY, Kernels::Stock(WHY), false, run))
}

fn pyverbs_expected() -> Result<pyverbs::Results> {
    pyverbs::Results::load(&tables().join("pyverbs/expected.toml"))
}

/// Returns the table files, ordered by name.
fn table_files() -> Result<Vec<PathBuf>> {
    let folder = tables();
    let entries = fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let mut tables: Vec<PathBuf> = paths
        .into_iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        .collect();
    tables.sort();
    Ok(tables)
}

/// Records why a client of a table did not run on the kernel of `bed`, unless it ran. The table and the client of pyverbs' own
/// tests are [`pyverbs::NAME`].
///
/// # Errors
///
/// There is no such client.
pub fn not_run(reports: &Reports, bed: &Bed, table: &str, client: &str, reason: &NotRun) -> Result<()> {
    let mut reports = reports.lock().map_err(|_| anyhow!("poisoned"))?;
    reports.not_run(bed.name, table, client, reason)
}

fn add(bed: &Bed, reports: &Reports, table: &str, report: Report) -> Result<()> {
    reports.lock().map_err(|_| anyhow!("poisoned"))?.add(Report {
        kernel: bed.name.to_owned(),
        table: table.to_owned(),
        ..report
    });
    Ok(())
}

/// Runs a client. Returns its result for the report, and the error of the test if the result is not the expected one or the
/// guests have findings.
///
/// # Errors
///
/// The client could not run.
fn run(bed: &Bed, table: &Table, client: &Client, attempt: Attempt) -> Result<(clients::Attempt, Result<()>)> {
    let mut guests = bed.guests(&table.topology, attempt)?;
    let env = environment(bed, client)?;
    if let Some(script) = table
        .set_up
        .as_ref()
        .filter(|_| guests.prepared.insert(table.name.clone()))
    {
        set_up(&mut guests.cluster, script, &env).with_context(|| format!("preparing the nodes for {}", table.name))?;
    }
    let cluster = &mut guests.cluster;
    let before = cluster.snapshot()?;
    let with = |mut command: Command| {
        command.env.extend(env.clone());
        command
    };
    let (server, outcome) = match client.server_command() {
        Some(server) => {
            let (server, own) = (with(server), with(client.client_command()));
            let served = if client.server_ends() {
                cluster.serve_to_the_end((SERVER, &server), (CLIENT, &own))?
            } else {
                cluster.serve((SERVER, &server), (CLIENT, &own))?
            };
            (Some(served.server), served.client)
        }
        None => (None, Some(cluster.exec(CLIENT, &with(client.client_command()))?)),
    };
    let alive = cluster.is_alive();
    let counted = if alive {
        difference(&before, &cluster.snapshot()?)
    } else {
        Value::Null
    };
    let result = client.judge(server.as_ref(), outcome.as_ref(), &counted);
    // Guests can be used after a client that failed if their kernels have no findings and no time limit was exceeded.
    let ran: Vec<_> = [&server, &outcome].into_iter().flatten().collect();
    let sound = alive && ran.iter().all(|ran| ran.findings.is_empty() && !is_late(ran));
    let dropped = match sound {
        true => bed.give_back(guests, client.ruins, &client.name),
        false => Ok(()),
    };
    if result.ok {
        return Ok((result, dropped));
    }
    let row = client.report(Results::Attempts(Vec::new()));
    let mut text = format!("{}\nexpected: {}\ngot: {}\n", row.command, row.expected, result.got);
    for (node, outcome) in [(SERVER, &server), (CLIENT, &outcome)] {
        if let Some(outcome) = outcome {
            text.push_str(&format!("--- node {node}: {}", describe_outcome(outcome)));
        }
    }
    text.push_str(&format!("--- counted: {counted}\n"));
    let error = failure(&ran, text);
    Ok((result, Err(error)))
}

/// Runs pyverbs' own tests, a part of them on each node, and compares each result with the expected one.
fn pyverbs(bed: &Bed, reports: &Reports, attempt: Attempt) -> Result<()> {
    let expected = pyverbs_expected()?;
    let folder = unpack_pyverbs()?;
    let mut guests = bed.guests(PYVERBS_TOPOLOGY, attempt)?;
    let (nodes, runner) = (guests.cluster.names(), tables().join("pyverbs/run.py"));
    let outcomes = guests.cluster.exec_all(|node| {
        let part = nodes.iter().position(|name| name == node).unwrap_or(0);
        let script = format!(
            "echo 3 >/proc/sys/vm/drop_caches; echo 1 >/proc/sys/vm/compact_memory\n\
             echo {HUGE_PAGES} >/proc/sys/vm/nr_hugepages\n\
             [ $(cat /proc/sys/vm/nr_hugepages) = {HUGE_PAGES} ] || {{ echo no huge pages >&2; exit 1; }}\n\
             PYTHONDONTWRITEBYTECODE=1 python3 {} {} $P2PMEM_RDMA_NIC0 {PYVERBS_LIMIT} {part}/{}",
            runner.display(),
            folder.display(),
            nodes.len()
        );
        Command::new(["sh", "-c", &script]).limit(PYVERBS)
    })?;
    // If a run was ended early, results are missing, or the last one is incomplete.
    let all: Vec<_> = outcomes.values().collect();
    if all.iter().any(|outcome| is_late(outcome)) {
        let text = outcomes
            .iter()
            .map(|(node, outcome)| format!("node {node}: {}", describe_outcome(outcome)));
        return Err(failure(&all, text.collect::<Vec<_>>().join("\n")));
    }
    let mut results = pyverbs::Results::default();
    let mut wrong = Vec::new();
    for (node, outcome) in &outcomes {
        results
            .add(&outcome.stdout)
            .with_context(|| format!("node {node}: {}", describe_outcome(outcome)))?;
    }
    results.store(&report("pyverbs.toml")?)?;
    for report in expected.compare(&results) {
        if let Results::Attempts(attempts) = &report.results {
            let bad = attempts.iter().filter(|attempt| !attempt.ok);
            wrong.extend(bad.map(|bad| format!("{}: expected {}, got {}", report.command, report.expected, bad.got)));
        }
        add(bed, reports, pyverbs::NAME, report)?;
    }
    let unclean = outcomes.iter().filter(|(_, outcome)| !outcome.is_clean());
    wrong.extend(unclean.map(|(node, outcome)| format!("node {node}: {}", describe_outcome(outcome))));
    if guests.cluster.is_alive() && outcomes.values().all(|outcome| outcome.findings.is_empty()) {
        bed.keep(guests, "clients::pyverbs");
    }
    if !wrong.is_empty() {
        return Err(failure(&all, wrong.join("\n")));
    }
    Ok(())
}

/// Unpacks the tests of Debian's package, some of which are compressed, into a folder that guests can read. Compiles
/// them too, which takes an emulated processor long.
fn unpack_pyverbs() -> Result<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("pyverbs");
    let script = format!(
        "rm -rf {0} && mkdir -p {0} && cp -r /usr/share/doc/rdma-core/tests {0}/ && gunzip {0}/tests/*.gz && \
         python3 -m compileall -q {0}/tests",
        folder.display()
    );
    let output = std::process::Command::new("sh").args(["-c", &script]).output()?;
    ensure!(
        output.status.success(),
        "unpacking pyverbs' tests: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(folder)
}

/// Runs a script of the tables' folder that makes a folder for guests, and returns the folder. `script` is the script's path
/// in the tables' folder. Runs the script once in this process.
fn make_folder(script: &str, made: &OnceLock<Result<PathBuf, String>>) -> Result<PathBuf> {
    let make = || {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(script);
        let output = std::process::Command::new(tables().join(script))
            .arg(&folder)
            .output()?;
        ensure!(
            output.status.success(),
            "{script}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(folder)
    };
    let made = made.get_or_init(|| make().map_err(|e| format!("{e:#}")));
    made.clone().map_err(|e| anyhow!(e))
}

/// Returns the environment of all scripts: the module, the folder of this build's programs, and the folder of the
/// scripts. For a client that names them, also the folders of compiled programs and of wheels, the Python package, and its
/// examples.
fn environment(bed: &Bed, client: &Client) -> Result<BTreeMap<String, String>> {
    let module = bed.module()?;
    let bin = std::env::var("P2PMEM_BIN").context("P2PMEM_BIN is not set: where are user space's programs?")?;
    ensure!(
        Path::new(&bin).join("p2pmemctl").exists(),
        "{bin} has no p2pmemctl: make user"
    );
    let mut env = BTreeMap::from([
        ("P2PMEM_MODULE".into(), module),
        ("P2PMEM_BIN".into(), bin),
        ("P2PMEM_CLIENTS".into(), tables().display().to_string()),
    ]);
    for (variable, script, made) in [
        ("P2PMEM_PROGRAMS", "programs/build", &PROGRAMS),
        ("P2PMEM_WHEELS", "wheels/install", &WHEELS),
    ] {
        if client.names(variable) {
            env.insert(variable.into(), make_folder(script, made)?.display().to_string());
        }
    }
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    for (variable, folder) in [
        ("P2PMEM_PYTHON", "build/python/site"),
        ("P2PMEM_EXAMPLES", "userspace/p2pmem-python/examples"),
    ] {
        if client.names(variable) {
            let folder = top.join(folder);
            ensure!(folder.exists(), "{} does not exist: make user", folder.display());
            env.insert(variable.into(), folder.display().to_string());
        }
    }
    Ok(env)
}

fn set_up(cluster: &mut Cluster, script: &str, env: &BTreeMap<String, String>) -> Result<()> {
    let outcomes = cluster.exec_all(|_| {
        let mut command = Command::new(["bash", "-ec", script]).limit(SET_UP);
        command.env.extend(env.clone());
        command
    })?;
    if outcomes.values().all(Outcome::is_clean) {
        return Ok(());
    }
    let all: Vec<_> = outcomes.values().collect();
    let text = outcomes
        .iter()
        .map(|(node, outcome)| format!("node {node}: {}", describe_outcome(outcome)));
    Err(failure(&all, text.collect::<Vec<_>>().join("\n")))
}

/// Writes the report `name`, and the one on peer memory, whose interface only the debug kernel has. `without` has reasons why tests of
/// `bed` did not run, each with the names of the tests.
pub fn write(
    reports: &Reports,
    said: &peer::Said,
    bed: &Bed,
    name: &str,
    without: &[(NotRun, Vec<String>)],
) -> Result<()> {
    for (reason, tests) in without {
        for test in tests {
            let own = test
                .strip_prefix(bed.name)
                .and_then(|test| test.strip_prefix("::clients::"));
            if let Some(own) = own {
                let (table, client) = own.split_once("::").unwrap_or((own, own));
                not_run(reports, bed, table, client, reason)?;
            }
        }
    }
    let reports = reports.lock().map_err(|_| anyhow!("poisoned"))?;
    if bed.name == DEBUG {
        peer::write(said, reports.rows())?;
    }
    write_report(name, json!({ "clients": reports.rows() }))
}
