// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests that boot guests: tests of the runner itself, those of the module (the crate `p2pmem-cases`), and client programs
//! of other projects.
//!
//! The tests of a topology run one after the other and share its guests. After a test that fails, whose kernel log has
//! bad lines, or that makes the guests unusable by design, the next test gets fresh guests. `--test-threads` is the
//! number of topologies that are tested at the same time; the default is the number of processors. A test that exceeds
//! a time limit, without any other known error, runs once more. A run has one kernel: the debug kernel if `P2PMEM_DEBUG_KERNEL`
//! names it, else the stock kernel. Tests that `tools/affected` did not select do not run.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use libtest_mimic::{Arguments, Trial};
use p2pmem_cases::{self as cases, Kernels};
use p2pmem_guest::limits::{Overrun, TIMES};
use p2pmem_vm::clients::NotRun;
use p2pmem_vm::cluster::{Cluster, Served};
use p2pmem_vm::kernel::DEBUG_KERNEL;
use p2pmem_vm::selection::Selection;
use p2pmem_vm::stamp::stamp;
use p2pmem_vm::vm::{Command, Outcome, Status, Vm, sibling};
use serde_json::{Value, json};

use bed::{Attempt, Bed, DEBUG, Log, STOCK};
use lanes::Lanes;

mod admin;
mod backends;
mod bed;
mod clients;
mod debug;
mod hardening;
mod iommu;
mod lanes;
mod observe;
mod packages;
mod pairs;
mod peer;
mod perf;
mod python;
mod recorder;
mod registration;
mod runner;
mod unplug;

/// The time limit of a test's command.
const LIMIT: Duration = Duration::from_secs(180);

/// The tests with guests that are not cases of the module, and the kernels on which they run.
const TESTS: &[(&[Test], Kernels<'static>)] = &[
    (debug::TESTS, Kernels::Debug("the stock kernel does not look")),
    (
        runner::TESTS,
        Kernels::Stock("the test checks the runner, not the module"),
    ),
    (
        pairs::TESTS,
        Kernels::Stock("the test checks the runner, not the module"),
    ),
    (
        perf::TESTS,
        Kernels::Stock("the test checks a program with host memory, not the module"),
    ),
    (
        admin::TESTS,
        Kernels::Stock("the test checks tools of user space; other cases test what the module does for them"),
    ),
    (
        observe::TESTS,
        Kernels::Stock("the test checks tools of user space; other cases test what the module does for them"),
    ),
    (
        python::TESTS,
        Kernels::Stock("the test checks a package of user space; other cases test what the module does for it"),
    ),
    (
        recorder::TESTS,
        Kernels::Stock("the test checks a program of user space on the kernel's file systems, not the module"),
    ),
    (
        iommu::TESTS,
        Kernels::Stock("the module makes the same calls without an IOMMU, and machines with one are slow"),
    ),
    (unplug::TESTS, Kernels::Both),
    (
        registration::TESTS,
        Kernels::Stock("the test counts instructions of a kernel without checks"),
    ),
];

/// The kernel of the tests of the library without the module.
const WITHOUT_MODULE: Kernels<'static> =
    Kernels::Stock("the test checks the library with interfaces of the kernel, not the module");

/// A test with guests of a topology.
pub struct Test {
    /// Its name.
    pub name: &'static str,
    /// The topology that the test needs.
    pub topology: &'static str,
    /// Whether the test needs fresh guests, which no other test uses afterwards.
    pub alone: bool,
    /// The test.
    pub run: fn(&mut Cluster) -> Result<()>,
}

fn main() -> ExitCode {
    match run_tests(Arguments::from_args()) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("vm: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the tests, and writes the reports.
fn run_tests(mut arguments: Arguments) -> Result<ExitCode> {
    let is_debug = std::env::var_os(DEBUG_KERNEL).is_some();
    if !arguments.list {
        begin_reports(&arguments, is_debug)?;
    }
    let lanes = Lanes::new(arguments.test_threads)?;
    let log = Log::new(Selection::load(if is_debug { DEBUG } else { STOCK }, is_debug)?);
    let bed = Bed::new(&lanes, &log)?;
    let reports = clients::Reports::default();
    let said = peer::Said::default();
    let alone = |tests: &[(&'static str, lanes::Alone)]| -> Vec<Trial> {
        let made = tests.iter().filter_map(|&(name, test)| lanes.alone(name, &log, test));
        made.collect()
    };
    // The module's tests come first. Of the others, the longest come first: at the end they would keep one processor busy while
    // the other one is idle.
    let mut trials = of_module(&bed, &said);
    if !is_debug {
        trials.extend(
            [packages::ALONE, recorder::ALONE, runner::ALONE]
                .into_iter()
                .flat_map(alone),
        );
    }
    trials.extend(others(&bed.for_others(), &reports)?);
    // Each test waits in a thread of its own.
    arguments.test_threads = Some(trials.len().max(2));
    let conclusion = libtest_mimic::run(&arguments, trials);
    if arguments.list {
        return Ok(ExitCode::SUCCESS);
    }
    let names = report_names(is_debug);
    let not_run = [
        (NotRun::NotStarted, log.without_time()),
        (NotRun::PassedBefore, log.passed_before()),
    ];
    clients::write(&reports, &said, &bed, names.clients, &not_run)?;
    hardening::write(names.hardening)?;
    Ok(match log.end(names.tests)? {
        false => conclusion.exit_code(),
        true => ExitCode::FAILURE,
    })
}

/// Returns the module's tests on a kernel, ordered by topology, so that guests are shared.
fn of_module(bed: &Bed, said: &peer::Said) -> Vec<Trial> {
    let mut cases: Vec<_> = cases::all().collect();
    cases.sort_by_key(|case| (case.topology, case.ruins));
    let trial = |case: &'static cases::Case| {
        let (own, said, name) = (bed.clone(), said.clone(), format!("module::{}", case.name));
        bed.trial(&name, case.topology, cases::kernels(case), true, move |attempt| {
            run_case(&own, &said, case, attempt)
        })
    };
    cases.into_iter().filter_map(trial).collect()
}

/// Returns all other tests on a kernel that share guests. The clients come first, as they need two guests.
fn others(bed: &Bed, reports: &clients::Reports) -> Result<Vec<Trial>> {
    let mut trials = clients::trials(bed, reports)?;
    for (tests, kernels) in TESTS {
        for test in *tests {
            let own = bed.clone();
            trials.extend(bed.trial(test.name, test.topology, *kernels, false, move |attempt| {
                with_guests(&own, test, attempt)
            }));
        }
    }
    for check in cases::backends::checks() {
        let (own, name) = (bed.clone(), format!("backends::{}", check.name));
        trials.extend(bed.trial(&name, check.topology, WITHOUT_MODULE, false, move |attempt| {
            backends::run_check(&own, check, attempt)
        }));
    }
    Ok(trials)
}

/// The origin of this run's reports, and the tests that they cover.
struct Origin {
    stamp: Value,
    /// The arguments, if they select tests.
    filter: Option<String>,
    /// The factor for the rounds of races.
    times: u32,
}

/// The origin of this run.
static ORIGIN: OnceLock<Origin> = OnceLock::new();

/// The names of reports on the tests on a kernel.
struct ReportNames {
    tests: &'static str,
    clients: &'static str,
    hardening: &'static str,
    /// Reports of single tests.
    more: &'static [&'static str],
}

fn report_names(is_debug: bool) -> ReportNames {
    if is_debug {
        return ReportNames {
            tests: "vm-debug.json",
            clients: "clients-debug.json",
            hardening: "hardening-debug.json",
            more: &["peer.json"],
        };
    }
    ReportNames {
        tests: "vm.json",
        clients: "clients.json",
        hardening: "hardening.json",
        more: &["pyverbs.toml", "registration.json", recorder::REPORT],
    }
}

/// Records the origin of the reports, and removes those of an earlier run on this kernel. A run of some tests writes its reports
/// to a folder of its own.
fn begin_reports(arguments: &Arguments, is_debug: bool) -> Result<()> {
    let whole = arguments.filter.is_none() && arguments.skip.is_empty() && !arguments.ignored;
    let origin = Origin {
        stamp: stamp()?,
        filter: (!whole).then(|| std::env::args().skip(1).collect::<Vec<_>>().join(" ")),
        times: times()?,
    };
    // This is the only call.
    let _ = ORIGIN.set(origin);
    let names = report_names(is_debug);
    for name in [names.tests, names.clients, names.hardening].iter().chain(names.more) {
        match fs::remove_file(report(name)?) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e).with_context(|| (*name).to_owned()),
            _ => {}
        }
    }
    Ok(())
}

/// Returns the path of the report `name`.
fn report(name: &str) -> Result<PathBuf> {
    let filtered = ORIGIN.get().is_none_or(|origin| origin.filter.is_some());
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../build/reports");
    let folder = folder.join(if filtered { "filtered" } else { "" });
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder.join(name))
}

/// Writes a report (an object) with its origin, by renaming a complete file.
fn write_report(name: &str, mut value: Value) -> Result<()> {
    let origin = ORIGIN.get().context("nobody began the reports")?;
    value["stamp"] = origin.stamp.clone();
    value["filter"] = json!(origin.filter);
    value["times"] = json!(origin.times);
    let (path, new) = (report(name)?, report(&format!(".{name}"))?);
    fs::write(&new, serde_json::to_vec_pretty(&value)?).with_context(|| new.display().to_string())?;
    fs::rename(&new, &path).with_context(|| path.display().to_string())
}

fn with_guests(bed: &Bed, test: &Test, attempt: Attempt) -> Result<()> {
    let attempt = if test.alone { Attempt::Again } else { attempt };
    let mut guests = bed.guests(test.topology, attempt)?;
    (test.run)(&mut guests.cluster)?;
    bed.give_back(guests, test.alone, test.name)
}

/// Returns the factor for the rounds of races: [`TIMES`], or 1.
fn times() -> Result<u32> {
    match std::env::var(TIMES) {
        Ok(times) => Ok(times.parse::<u32>().with_context(|| format!("{TIMES}={times}"))?.max(1)),
        Err(_) => Ok(1),
    }
}

/// Returns the command that runs a case in a guest, with the module for its kernel.
fn case_command(name: &str, module: &str) -> Result<Command> {
    let program = sibling("p2pmem-guest-tests")?;
    let times = times()?;
    let command = Command::new([program.to_str().context("path")?, "run", name]).limit(LIMIT * times);
    Ok(command.env(TIMES, times.to_string()).env("P2PMEM_MODULE", module))
}

fn run_case(bed: &Bed, said: &peer::Said, case: &cases::Case, attempt: Attempt) -> Result<()> {
    let module = bed.module()?;
    let mut guests = bed.guests(case.topology, attempt)?;
    let vm = guests.cluster.only()?;
    let outcome = run(vm, &case_command(case.name, &module)?)?;
    let result = if !outcome.is_clean() {
        let text = format!("{}\n{}", case.about, describe(&outcome, vm));
        Err(failure(&[&outcome], text))
    } else {
        bed.give_back(guests, case.ruins, case.name)
    };
    // The report keeps a case's part even if the case failed, except if the case runs again and prints it again.
    if !result.as_ref().is_err_and(Overrun::is) {
        peer::collect(said, &outcome.stdout)?;
        hardening::collect(bed.name, case.name, &outcome.stdout)?;
    }
    result
}

/// Returns whether a command exceeded its time limit, or ended with the exit code for that.
fn is_late(outcome: &Outcome) -> bool {
    let code = i32::from(Overrun::CODE);
    outcome.status == Status::TimedOut || outcome.status == Status::Exited { code }
}

/// Returns the error for commands that failed: an [`Overrun`] if exceeding a time limit is the only failure. A command
/// that was stopped because another one was late does not count. The findings of their kernels are added to the report.
fn failure(outcomes: &[&Outcome], text: String) -> anyhow::Error {
    let fine = |outcome: &&Outcome| {
        let ended = outcome.status == Status::Exited { code: 0 } || outcome.status == Status::Stopped;
        outcome.findings.is_empty() && (ended || is_late(outcome))
    };
    for outcome in outcomes {
        hardening::count(&outcome.findings);
    }
    if outcomes.iter().any(|outcome| is_late(outcome)) && outcomes.iter().all(fine) {
        Overrun(text).into()
    } else {
        anyhow!(text)
    }
}

/// Returns the error for a server and its client: see [`failure`].
fn served_failure(served: &Served) -> anyhow::Error {
    let mut text = format!("server: {}", describe_outcome(&served.server));
    match &served.client {
        Some(client) => text.push_str(&format!("client: {}", describe_outcome(client))),
        None => text.push_str("the server did not listen"),
    }
    let both: Vec<_> = [Some(&served.server), served.client.as_ref()]
        .into_iter()
        .flatten()
        .collect();
    failure(&both, text)
}

/// Returns the client's outcome, or an error unless the server and its client succeeded.
fn both_clean(served: Served) -> Result<Outcome> {
    match &served.client {
        Some(client) if client.is_clean() && served.server.is_clean() => {}
        _ => return Err(served_failure(&served)),
    }
    served.client.context("no client")
}

/// Returns the path of the module for the stock kernel.
fn module() -> Result<String> {
    std::env::var("P2PMEM_MODULE").context("P2PMEM_MODULE is not set")
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

/// The errors come first, because the last lines of a run show only the beginning.
fn describe_outcome(outcome: &Outcome) -> String {
    let mut text = format!(
        "{:?}\n{}{}",
        outcome.status,
        String::from_utf8_lossy(&outcome.stderr),
        String::from_utf8_lossy(&outcome.stdout)
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
    if !outcome.is_clean() {
        return Err(failure(&[&outcome], format!("{script}: {}", describe(&outcome, vm))));
    }
    Ok(outcome)
}
