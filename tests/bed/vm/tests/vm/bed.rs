// SPDX-License-Identifier: MIT OR Apache-2.0

//! The kernels that tests run on, each with its module, and the guests that are kept for the next test.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use libtest_mimic::{Failed, Trial};
use p2pmem_cases::Kernels;
use p2pmem_guest::limits::Overrun;
use p2pmem_vm::cluster::Cluster;
use p2pmem_vm::kernel::Kernel;
use p2pmem_vm::selection::{Selection, Verdict};
use p2pmem_vm::topology::Layout;
use p2pmem_vm::vm::{Command, Options, topologies};
use p2pmem_vm::withheld::Ticks;
use serde::Serialize;
use serde_json::json;

use crate::lanes::{Lane, Lanes};
use crate::{hardening, write_report};

/// The name of the kernel that the sandbox was made for.
pub const STOCK: &str = "stock";
/// The name of the debug kernel.
pub const DEBUG: &str = "debug";

/// Disables slow work of a debug kernel that these tests do not need: the module's unit tests, which run whenever it is
/// loaded and have a target of their own, and the scan for leaks that starts one minute after boot.
const PREPARE: &str = "
    kunit=/sys/module/kunit/parameters/filter_glob leaks=/sys/kernel/debug/kmemleak
    [ ! -e $kunit ] || printf none >$kunit
    [ ! -e $leaks ] || echo scan=off >$leaks";

/// Follows the kernel's name in place of a test's name if guests did not power off in order.
const END: &str = "::the end of guests";
/// The number of lines of a failure that are repeated at the end.
const LINES: usize = 8;
/// The number of characters of each such line.
const COLUMNS: usize = 300;

/// Running guests of a topology, and their kernel.
pub struct Guests {
    kernel: &'static str,
    topology: String,
    /// The guests.
    pub cluster: Cluster,
    /// The client tables whose preparation has run.
    pub prepared: BTreeSet<String>,
    /// The tests that have run in the guests.
    ran: Vec<String>,
    /// The findings of the debug kernel, after they have been read.
    found: Option<Vec<String>>,
}

/// Whether a test runs for the first time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attempt {
    /// The first.
    First,
    /// It runs again after an overrun, with fresh guests.
    Again,
}

/// Guests that are kept for the next test of their lane.
type Shelf = Arc<Mutex<BTreeMap<Lane, Vec<Guests>>>>;

/// The number of repetitions in all tests of a run. More of them mean that tests fail by luck.
const MOST_AGAIN: usize = 3;

/// The results of the tests.
#[derive(Clone, Default)]
pub struct Log {
    results: Arc<Mutex<Results>>,
    selection: Selection,
}

#[derive(Default)]
struct Results {
    ran: Vec<Ran>,
    /// The number of tests that ran again.
    again: usize,
    /// The tests that did not start, because the time for tests was over.
    not_started: Vec<String>,
    /// The tests that no change can affect.
    not_affected: Vec<String>,
    /// The tests that have passed on this tree before.
    passed_before: Vec<String>,
}

/// A test that ran.
#[derive(Serialize)]
struct Ran {
    test: String,
    /// The duration in seconds, including the boot of guests for the test and the end of previous guests.
    seconds: f64,
    /// The share of processor time that the host withheld meanwhile.
    withheld: f64,
    /// The reason of the failure.
    failed: Option<String>,
    /// Whether a time limit was exceeded and no other error is known.
    overrun: bool,
    /// Whether the test ran again after that.
    again: bool,
}

impl Ran {
    /// Runs a test, or a step that counts as one.
    fn new(test: &str, run: impl FnOnce() -> Result<()>) -> Self {
        let (start, before) = (Instant::now(), Ticks::now());
        let error = run().err();
        let withheld = before.and_then(|before| Ok(before.withheld(&Ticks::now()?)));
        Self {
            test: test.to_owned(),
            seconds: start.elapsed().as_secs_f64(),
            withheld: withheld.unwrap_or(0.0),
            overrun: error.as_ref().is_some_and(Overrun::is),
            again: false,
            failed: error.map(|e| format!("{e:#}")),
        }
    }
}

impl Log {
    /// Makes a log of the tests of a selection.
    pub fn new(selection: Selection) -> Self {
        Self {
            results: Arc::default(),
            selection,
        }
    }

    fn results(&self) -> MutexGuard<'_, Results> {
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a test of the selection is to run, and records if it is not. `own` is its name without the kernel.
    pub fn trial(&self, name: &str, own: &str, is_core: bool) -> Option<()> {
        let mut results = self.results();
        match self.selection.verdict(own, is_core) {
            Verdict::Runs => return Some(()),
            Verdict::NotAffected => results.not_affected.push(name.to_owned()),
            Verdict::Passed => results.passed_before.push(name.to_owned()),
        }
        None
    }

    /// Records that a test did not start, because the time for tests was over. The test fails.
    pub fn not_started(&self, name: &str) -> Result<(), Failed> {
        self.results().not_started.push(name.to_owned());
        Err(Failed::from("did not start: the time for tests was over"))
    }

    /// Returns the names of the tests that did not start.
    pub fn without_time(&self) -> Vec<String> {
        self.results().not_started.clone()
    }

    /// Returns the names of the tests that have passed on this tree before.
    pub fn passed_before(&self) -> Vec<String> {
        self.results().passed_before.clone()
    }

    /// Runs a test. If the only failure is an exceeded time limit, runs the test once more with fresh guests, unless
    /// [`MOST_AGAIN`] tests have run again. `own` is its name without the kernel.
    pub fn test(&self, name: &str, own: &str, run: impl Fn(Attempt) -> Result<()>) -> Result<(), Failed> {
        let mut ran = Ran::new(name, || run(Attempt::First));
        if ran.overrun && self.may_repeat() {
            ran.again = true;
            self.results().ran.push(ran);
            ran = Ran::new(name, || run(Attempt::Again));
        }
        let failed = ran.failed.clone();
        self.results().ran.push(ran);
        match failed {
            Some(reason) => Err(Failed::from(reason)),
            None => Ok(self.selection.record(own)?),
        }
    }

    fn may_repeat(&self) -> bool {
        let mut results = self.results();
        results.again += 1;
        results.again <= MOST_AGAIN
    }

    /// Powers guests off. An error is a failure of its own, not of a test. Guests that take too long are waited for
    /// once more, because fresh guests would not repeat what these have run.
    fn end_of_guests(&self, mut guests: Guests) {
        let name = format!("{}{END}", guests.kernel);
        let mut ran = Ran::new(&name, || end(&mut guests));
        if ran.overrun && self.may_repeat() {
            ran.again = true;
            self.results().ran.push(ran);
            ran = Ran::new(&name, || end(&mut guests));
        }
        if ran.failed.is_some() {
            self.results().ran.push(ran);
        }
    }

    /// Writes the report `name`, and prints the reasons of all failures. libtest prints them too, with whole logs, but far from
    /// the end. Returns whether guests failed to power off in order.
    ///
    /// # Errors
    ///
    /// Those of writing a file.
    pub fn end(&self, name: &str) -> Result<bool> {
        let results = self.results();
        let log = &results.ran;
        if !results.not_started.is_empty() {
            println!(
                "{} tests did not start, because the time for tests was over: {}",
                results.not_started.len(),
                results.not_started.join(", ")
            );
        }
        for (tests, why) in [
            (
                &results.not_affected,
                "not affected by the changes since the last full run",
            ),
            (&results.passed_before, "passed on this tree before"),
        ] {
            if !tests.is_empty() {
                println!("{} tests did not run: {why}", tests.len());
            }
        }
        write_report(
            name,
            json!({
                "tests": log,
                "not_started": results.not_started,
                "not_affected": results.not_affected,
                "passed_before": results.passed_before,
            }),
        )?;
        for ran in log.iter() {
            if let Some(reason) = &ran.failed {
                let then = if ran.again { ", and was run once more" } else { "" };
                let withheld = ran.withheld * 100.0;
                println!(
                    "why {} failed, with {withheld:.0} % of the processors withheld{then}:",
                    ran.test
                );
                for line in reason.lines().take(LINES) {
                    println!("    {line:.*}", COLUMNS);
                }
            }
        }
        let again: Vec<&str> = log
            .iter()
            .filter(|ran| ran.again)
            .map(|ran| ran.test.as_str())
            .collect();
        if !again.is_empty() {
            println!(
                "AGAIN {} tests took too long, and were run again: {}",
                again.len(),
                again.join(", ")
            );
        }
        Ok(log
            .iter()
            .any(|ran| ran.failed.is_some() && !ran.again && ran.test.ends_with(END)))
    }
}

/// A kernel to run tests on.
#[derive(Clone)]
pub struct Bed {
    /// Its name, with which the names of its tests begin.
    pub name: &'static str,
    kernel: Kernel,
    module: PathBuf,
    /// Whether the tests are those of the module.
    of_module: bool,
    shelf: Shelf,
    lanes: Lanes,
    log: Log,
}

impl Bed {
    /// Returns the kernel of this run: the debug kernel if the environment names it, else the stock kernel. `P2PMEM_MODULE` is the
    /// path of the module; the module of the debug kernel has the same name in the folder `debug` beside it.
    ///
    /// # Errors
    ///
    /// The kernel or the variable is missing.
    pub fn new(lanes: &Lanes, log: &Log) -> Result<Bed> {
        let module = PathBuf::from(std::env::var_os("P2PMEM_MODULE").context("P2PMEM_MODULE is not set")?);
        let (name, kernel, module) = match Kernel::debug()? {
            Some(kernel) => {
                let folder = module.parent().context("P2PMEM_MODULE has no folder")?.join(DEBUG);
                let file = module.file_name().context("P2PMEM_MODULE names no file")?;
                (DEBUG, kernel, folder.join(file))
            }
            None => (STOCK, Kernel::stock()?, module),
        };
        Ok(Bed {
            name,
            kernel,
            module,
            of_module: true,
            shelf: Shelf::default(),
            lanes: lanes.clone(),
            log: log.clone(),
        })
    }

    /// Returns the same kernel for tests that are not the module's. They share no guests with the module's, whose rules and providers
    /// they would see.
    pub fn for_others(&self) -> Bed {
        Bed {
            of_module: false,
            ..self.clone()
        }
    }

    /// Makes a test on this kernel with guests of a topology, if it is selected. The module's tests always are, as are others of
    /// the core. A test that does not run on the kernel shows as ignored, with the reason.
    pub fn trial(
        &self,
        own_name: &str,
        topology: &str,
        kernels: Kernels<'_>,
        is_core: bool,
        run: impl Fn(Attempt) -> Result<()> + Send + 'static,
    ) -> Option<Trial> {
        let (name, own_name, own) = (format!("{}::{own_name}", self.name), own_name.to_owned(), self.clone());
        if let Kernels::Stock(why) | Kernels::Debug(why) = kernels {
            if !self.is_of(kernels) {
                let trial = Trial::test(name, || Ok(())).with_kind(format!("not here: {why}"));
                return Some(trial.with_ignored_flag(true));
            }
        }
        self.log.trial(&name, &own_name, self.of_module || is_core)?;
        let (lane, place) = (self.lane(topology), self.lanes.place());
        Some(Trial::test(name.clone(), move || {
            let permit = own.lanes.wait_for(place, &lane);
            let outcome = if own.lanes.is_over() {
                own.log.not_started(&name)
            } else {
                own.log.test(&name, &own_name, run)
            };
            let is_last = permit.is_last();
            // The end of guests mostly waits until new allocations are old enough to count as leaked, so other lanes
            // may run meanwhile.
            drop(permit);
            if is_last {
                while let Some(guests) = own.kept(&lane) {
                    own.log.end_of_guests(guests);
                }
            }
            outcome
        }))
    }

    fn lane(&self, topology: &str) -> Lane {
        let whose = if self.of_module { "" } else { ", others" };
        (self.name, format!("{topology}{whose}"))
    }

    fn shelf(&self) -> MutexGuard<'_, BTreeMap<Lane, Vec<Guests>>> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept(&self, lane: &Lane) -> Option<Guests> {
        self.shelf().get_mut(lane)?.pop()
    }

    fn is_of(&self, kernels: Kernels<'_>) -> bool {
        match kernels {
            Kernels::Both => true,
            Kernels::Stock(_) => self.name == STOCK,
            Kernels::Debug(_) => self.name == DEBUG,
        }
    }

    /// Returns the path of the module, which is the same in guests.
    ///
    /// # Errors
    ///
    /// The module was not built for this kernel.
    pub fn module(&self) -> Result<String> {
        let module = fs::canonicalize(&self.module).with_context(|| format!("the module {}", self.module.display()))?;
        Ok(module.to_str().context("the module's path is not UTF-8")?.to_owned())
    }

    /// Returns guests of a topology: kept ones, or fresh ones. A test that runs again always gets fresh ones.
    ///
    /// # Errors
    ///
    /// The guests do not boot.
    pub fn guests(&self, topology: &str, attempt: Attempt) -> Result<Guests> {
        if let Some(guests) = self.kept(&self.lane(topology)) {
            if attempt == Attempt::First && guests.cluster.is_alive() {
                return Ok(guests);
            }
            // The next test is not responsible for errors of these guests.
            self.log.end_of_guests(guests);
        }
        let file = topologies().join(format!("{topology}.toml"));
        let options = Options {
            kernel: Some(self.kernel.clone()),
            ..Options::default()
        };
        let mut cluster = Cluster::boot(&Layout::load(&file)?, &options)?;
        for (node, outcome) in cluster.exec_all(|_| Command::new(["sh", "-c", PREPARE]))? {
            ensure!(outcome.is_clean(), "node {node:?}: {outcome:?}");
        }
        hardening::ran_on(self.name);
        Ok(Guests {
            kernel: self.name,
            topology: topology.to_owned(),
            cluster,
            prepared: BTreeSet::new(),
            ran: Vec::new(),
            found: None,
        })
    }

    /// Ends guests that a test has made unusable, or keeps them for the next test.
    ///
    /// # Errors
    ///
    /// The kernel of guests that end has findings.
    pub fn give_back(&self, guests: Guests, ruined: bool, test: &str) -> Result<()> {
        if ruined {
            return self.drop_guests(guests);
        }
        self.keep(guests, test);
        Ok(())
    }

    /// Keeps guests in which a test has run for the next test.
    pub fn keep(&self, mut guests: Guests, test: &str) {
        guests.ran.push(test.to_owned());
        let lane = self.lane(&guests.topology);
        self.shelf().entry(lane).or_default().push(guests);
    }

    /// Ends guests that no other test can use, after reading the findings of their kernel. The test may have left the
    /// guests in a state in which they cannot power off.
    ///
    /// # Errors
    ///
    /// The kernel has findings.
    fn drop_guests(&self, mut guests: Guests) -> Result<()> {
        if guests.cluster.is_alive() {
            let findings = guests.cluster.check()?;
            hardening::count(&findings);
            ensure!(findings.is_empty(), "{}", findings.join("\n"));
        }
        Ok(())
    }
}

/// Powers guests off, after reading the findings of their kernel.
///
/// # Errors
///
/// The kernel has findings, or the guests do not power off; with the names of the tests that ran. After an [`Overrun`],
/// another call continues.
fn end(guests: &mut Guests) -> Result<()> {
    let Guests {
        kernel,
        topology,
        cluster,
        ran,
        found,
        ..
    } = guests;
    let what = || format!("the {kernel} guests ({topology}) that have run {}", ran.join(", "));
    if found.is_none() && cluster.is_alive() {
        *found = Some(cluster.check().with_context(what)?);
    }
    let mut findings = found.clone().unwrap_or_default();
    findings.extend(cluster.power_off().with_context(what)?);
    hardening::count(&findings);
    ensure!(findings.is_empty(), "{}: {}", what(), findings.join("\n"));
    Ok(())
}
