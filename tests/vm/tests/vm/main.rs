// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests that boot guests: of the runner itself, those of the module (`p2pmem_guest::cases`), and clients that others wrote.
//!
//! The guests of one topology run at a time. Its tests share them as long as they are sound: after a test that fails,
//! whose kernel log is bad, or that ruins a guest by design, the next one gets fresh ones.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use p2pmem_guest::cases;
use p2pmem_vm::cluster::Cluster;
use p2pmem_vm::topology::Layout;
use p2pmem_vm::vm::{Command, Options, Outcome, Vm, sibling, topologies};

mod admin;
mod clients;
mod pairs;
mod perf;
mod registration;
mod runner;

/// How long a test's command may take.
const LIMIT: Duration = Duration::from_secs(180);

/// Running guests of a topology.
struct Guests {
    topology: String,
    cluster: Cluster,
    /// Tables of clients whose preparation has been done.
    prepared: BTreeSet<String>,
}

/// Guests that wait for the next test; those of one topology at a time are kept.
type Shelf = Arc<Mutex<Option<Guests>>>;

/// A test with guests of a topology.
pub struct Test {
    /// Its name.
    pub name: &'static str,
    /// The topology it needs.
    pub topology: &'static str,
    /// Whether it needs guests that nobody used, and leaves ones that nobody should use.
    pub alone: bool,
    /// What it does.
    pub run: fn(&mut Cluster) -> Result<()>,
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // A guest has as many processors as the machines this runs on; two at once would only slow each other down.
    arguments.test_threads = Some(1);
    let shelf = Shelf::default();
    let mut trials = vec![
        Trial::test("runner::leaves-no-process", || {
            runner::leaves_no_process("small", 3).map_err(failed)
        }),
        Trial::test("runner::pair-leaves-no-process", || {
            runner::leaves_no_process("pair", 4).map_err(failed)
        }),
        Trial::test("runner::exit-codes-of-the-program", || {
            runner::program().map_err(failed)
        }),
    ];
    for test in runner::TESTS.iter().chain(pairs::TESTS) {
        let shelf = shelf.clone();
        trials.push(Trial::test(test.name, move || {
            with_guests(&shelf, test).map_err(failed)
        }));
    }
    // Of user space's programs, which are built apart.
    let built = std::env::var_os("P2PMEM_BIN").is_some() && std::env::var_os("P2PMEM_MODULE").is_some();
    for test in perf::TESTS.iter().chain(registration::TESTS).chain(admin::TESTS) {
        let shelf = shelf.clone();
        let trial = Trial::test(test.name, move || with_guests(&shelf, test).map_err(failed));
        trials.push(trial.with_ignored_flag(!built));
    }
    // In the order of topologies, so that guests are shared.
    let mut of_module: Vec<_> = cases::all().collect();
    of_module.sort_by_key(|case| (case.topology, case.ruins));
    let module = std::env::var_os("P2PMEM_MODULE").map(PathBuf::from);
    for case in of_module {
        let (shelf, module) = (shelf.clone(), module.clone());
        let ignored = module.is_none() || matches!(cases::kernels(case), cases::Kernels::Debug(_));
        let trial = Trial::test(format!("module::{}", case.name), move || {
            run_case(&shelf, case, module.as_deref()).map_err(failed)
        });
        trials.push(trial.with_ignored_flag(ignored));
    }
    let reports = clients::Reports::default();
    match clients::trials(&shelf, &reports, module.as_deref()) {
        Ok(clients) => trials.extend(clients),
        Err(e) => trials.push(Trial::test("clients::tables", move || Err(failed(e)))),
    }
    if module.is_none() {
        eprintln!("P2PMEM_MODULE is not set: tests of the module and clients are ignored");
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    if let Err(e) = clients::write(&reports) {
        eprintln!("the report on clients: {e:#}");
        return ExitCode::FAILURE;
    }
    let clean = match shelf.lock().map(|mut shelf| shelf.take()) {
        Ok(Some(guests)) => match guests.cluster.shut_down() {
            Ok(findings) if findings.is_empty() => true,
            Ok(findings) => complain(&guests.topology, &findings.join("\n")),
            Err(e) => complain(&guests.topology, &format!("{e:#}")),
        },
        _ => true,
    };
    if clean {
        conclusion.exit_code()
    } else {
        ExitCode::FAILURE
    }
}

fn complain(topology: &str, what: &str) -> bool {
    eprintln!("the last guests ({topology}) did not end in order: {what}");
    false
}

fn failed(e: anyhow::Error) -> Failed {
    Failed::from(format!("{e:#}"))
}

/// The guests of a topology: those on the shelf, or fresh ones.
fn guests(shelf: &Shelf, topology: &str, fresh: bool) -> Result<Guests> {
    let kept = shelf.lock().map_err(|_| anyhow::anyhow!("poisoned"))?.take();
    if let Some(guests) = kept {
        if guests.topology == topology && !fresh && guests.cluster.is_alive() {
            return Ok(guests);
        }
        let name = guests.topology;
        let findings = guests
            .cluster
            .shut_down()
            .with_context(|| format!("ending the guests before ({name})"))?;
        ensure!(
            findings.is_empty(),
            "the guests before ({name}) ended with: {}",
            findings.join("\n")
        );
    }
    let file = topologies().join(format!("{topology}.toml"));
    Ok(Guests {
        topology: topology.to_owned(),
        cluster: Cluster::boot(&Layout::load(&file)?, &Options::default())?,
        prepared: BTreeSet::new(),
    })
}

fn keep(shelf: &Shelf, guests: Guests) -> Result<()> {
    *shelf.lock().map_err(|_| anyhow::anyhow!("poisoned"))? = Some(guests);
    Ok(())
}

fn with_guests(shelf: &Shelf, test: &Test) -> Result<()> {
    let mut guests = guests(shelf, test.topology, test.alone)?;
    (test.run)(&mut guests.cluster)?;
    if !test.alone {
        keep(shelf, guests)?;
    }
    Ok(())
}

fn run_case(shelf: &Shelf, case: &cases::Case, module: Option<&Path>) -> Result<()> {
    let module = fs::canonicalize(module.context("P2PMEM_MODULE is not set")?).context("P2PMEM_MODULE")?;
    let mut guests = guests(shelf, case.topology, false)?;
    let vm = guests.cluster.only()?;
    let program = sibling("p2pmem-guest-tests")?;
    let command = Command::new([program.to_str().context("path")?, "run", case.name]).limit(LIMIT);
    let outcome = run(vm, &command.env("P2PMEM_MODULE", module.to_str().context("path")?))?;
    if !outcome.is_clean() {
        bail!("{}\n{}", case.about, describe(&outcome, vm));
    }
    if !case.ruins {
        keep(shelf, guests)?;
    }
    Ok(())
}

fn run(vm: &mut Vm, command: &Command) -> Result<Outcome> {
    vm.exec(command, &mut |_, _| {})
}

fn sh(vm: &mut Vm, script: &str) -> Result<Outcome> {
    run(vm, &Command::new(["sh", "-c", script]).limit(LIMIT))
}

fn describe(outcome: &Outcome, vm: &Vm) -> String {
    let mut text = describe_outcome(outcome);
    if !vm.is_alive() {
        text.push_str(&vm.console_tail());
    }
    text
}

fn describe_outcome(outcome: &Outcome) -> String {
    let mut text = format!(
        "{:?}\n{}{}",
        outcome.status,
        String::from_utf8_lossy(&outcome.stdout),
        String::from_utf8_lossy(&outcome.stderr)
    );
    if !outcome.findings.is_empty() {
        text.push_str("bad lines in the kernel log:\n");
        text.push_str(&outcome.findings.join("\n"));
        text.push('\n');
    }
    text.push_str("kernel log:\n");
    let skip = outcome.dmesg.len().saturating_sub(60);
    for record in &outcome.dmesg[skip..] {
        text.push_str(&format!("  {}\n", record.text));
    }
    text
}

fn clean(vm: &mut Vm, script: &str) -> Result<Outcome> {
    let outcome = sh(vm, script)?;
    ensure!(outcome.is_clean(), "{script}: {}", describe(&outcome, vm));
    Ok(outcome)
}
