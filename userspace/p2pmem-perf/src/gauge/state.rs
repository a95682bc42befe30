// SPDX-License-Identifier: MIT OR Apache-2.0

//! The state of the gauge: the job that runs, the rates of the last minutes, the last results, and the matrix.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use clap::ValueEnum;
use p2pmem_payload::kind::MemoryKind;
use p2pmem_web::{Changed, State};
use serde::Serialize;

use super::args::ServerAddress;
use super::job::JobObserver;
use super::measurements::Measurements;
use crate::cli::RunArgs;
use crate::matrix::{Matrix, MatrixArgs, STAGED};
use crate::report::{Report, SizeResult};
use crate::wire::{reason_and_remedy, Mode};

/// The version of the members of the state.
const SCHEMA: u32 = 1;
/// Results that are kept.
const MAX_RESULTS: usize = 50;
/// How long rates are kept, in milliseconds.
const WINDOW: u64 = 120_000;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    /// Transfers between two memories.
    Run,
    /// Transfers between every pair of memories.
    Matrix,
}

/// A measurement that a viewer requests.
#[derive(Debug)]
pub(super) enum Request {
    Run(Box<RunArgs>),
    Matrix(Box<MatrixArgs>),
}

/// How many pairs of a matrix are measured.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Pairs {
    pub(super) ended: usize,
    pub(super) of: usize,
}

/// The measurement that runs.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Job {
    pub(super) id: u64,
    pub(super) kind: Kind,
    /// The address of the viewer that started it.
    by: String,
    /// Seconds since 1970.
    started: u64,
    /// The client's memory.
    from: String,
    /// The server's memory.
    to: String,
    mode: String,
    /// Names of the NICs, when both sides are ready.
    nics: Vec<String>,
    /// Size of the messages in flight.
    bytes: Option<u64>,
    /// Messages of the size for each NIC.
    messages: u64,
    /// Messages done by each NIC.
    done: Vec<u64>,
    /// The number of pairs of a matrix.
    pairs: Option<Pairs>,
    /// The address of the viewer that stops it.
    stopped_by: Option<String>,
    /// The results of the sizes that are done.
    report: Option<Report>,
}

impl Job {
    /// Returns the name of the pair of memories.
    fn pair(&self) -> String {
        format!("{} → {}", self.from, self.to)
    }
}

/// Rates at one time.
#[derive(Debug, Clone, Serialize)]
struct Sample {
    /// Milliseconds since the start of the gauge.
    time: u64,
    /// The pair of memories.
    pair: String,
    /// Bytes per second of each NIC.
    ports: BTreeMap<String, f64>,
}

/// A measurement that has ended.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Ended {
    pub(super) id: u64,
    pub(super) kind: Kind,
    pub(super) by: String,
    /// Seconds since 1970.
    pub(super) started: u64,
    pub(super) ended: u64,
    pub(super) from: String,
    pub(super) to: String,
    pub(super) mode: String,
    /// Why it ended early.
    pub(super) error: Option<String>,
    /// The results of a run. After an error, those of the sizes before.
    pub(super) report: Option<Report>,
}

/// The last matrix.
#[derive(Debug, Clone, Serialize)]
pub(super) struct MatrixState {
    pub(super) id: u64,
    running: bool,
    /// Why it ended early.
    error: Option<String>,
    #[serde(flatten)]
    pub(super) matrix: Matrix,
}

/// What changes.
#[derive(Debug, Default)]
struct Inner {
    last_id: u64,
    job: Option<Job>,
    history: VecDeque<Sample>,
    results: VecDeque<Ended>,
    matrix: Option<MatrixState>,
}

/// The gauge.
pub struct Gauge {
    measurements: Box<dyn Measurements>,
    server: ServerAddress,
    nics: Vec<String>,
    changed: Changed,
    started: Instant,
    inner: Mutex<Inner>,
}

/// The state as JSON.
#[derive(Serialize)]
struct Snapshot<'a> {
    schema: u32,
    version: &'static str,
    /// The server.
    server: String,
    /// Milliseconds since the start of the gauge.
    elapsed: u64,
    /// This node's NICs.
    nics: &'a [String],
    /// Kinds of memory.
    memory: Vec<&'static str>,
    /// Modes of the messages.
    modes: Vec<&'static str>,
    job: Option<&'a Job>,
    history: &'a VecDeque<Sample>,
    /// The newest first.
    results: &'a VecDeque<Ended>,
    matrix: Option<&'a MatrixState>,
}

/// Results for other programs.
#[derive(Serialize)]
pub(super) struct Results {
    schema: u32,
    server: String,
    /// The newest first.
    pub(super) runs: Vec<Ended>,
    pub(super) matrix: Option<MatrixState>,
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |time| time.as_secs())
}

impl Gauge {
    /// Returns a gauge that measures to `server`.
    ///
    /// # Errors
    ///
    /// This node has no NIC. The message says what to do.
    pub fn new(measurements: Box<dyn Measurements>, server: ServerAddress) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            nics: measurements.nics()?,
            measurements,
            server,
            changed: Changed::default(),
            started: Instant::now(),
            inner: Mutex::default(),
        }))
    }

    pub(super) fn changed(&self) -> Changed {
        self.changed.clone()
    }

    pub(super) fn server(&self) -> &ServerAddress {
        &self.server
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a measurement on a thread of its own. Returns its number, or why none can start now.
    pub(super) fn start(self: &Arc<Self>, request: Request, by: String) -> Result<u64, String> {
        let mut inner = self.inner();
        if let Some(job) = &inner.job {
            let what = match job.kind {
                Kind::Run => format!("run {} ({}, {})", job.id, job.pair(), job.mode),
                Kind::Matrix => format!("matrix {}", job.id),
            };
            return Err(format!(
                "{what} of the viewer at {} is in progress; stop it, or wait until it ends",
                job.by
            ));
        }
        let id = inner.last_id + 1;
        let (kind, from, to, mode) = match &request {
            Request::Run(args) => {
                let mode = if args.staged { STAGED } else { args.mode.name() };
                let to = args.peer_memory.map_or("the server's", MemoryKind::name);
                (Kind::Run, args.own.memory.name(), to, mode)
            }
            // The link is measured first.
            Request::Matrix(_) => (Kind::Matrix, "cpu", "cpu", "write"),
        };
        let job = Job {
            id,
            kind,
            by,
            started: now(),
            from: from.to_owned(),
            to: to.to_owned(),
            mode: mode.to_owned(),
            nics: Vec::new(),
            bytes: None,
            messages: 0,
            done: Vec::new(),
            pairs: None,
            stopped_by: None,
            report: None,
        };
        let gauge = Arc::clone(self);
        let measures = move || gauge.measure(&request);
        let thread = std::thread::Builder::new().name("measure".into()).spawn(measures);
        thread.map_err(|error| format!("cannot create a thread: {error}; try again"))?;
        inner.last_id = id;
        inner.job = Some(job);
        drop(inner);
        self.changed.notify();
        Ok(id)
    }

    /// Measures on the thread of the job.
    fn measure(self: Arc<Self>, request: &Request) {
        let observer = JobObserver::new(Arc::clone(&self));
        // After a panic, the job ends too.
        let measured = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| match request {
            Request::Run(args) => self.measurements.run(args, &observer).map(|report| report.is_correct()),
            Request::Matrix(args) => self
                .measurements
                .matrix(args, &observer)
                .map(|matrix| matrix.is_correct()),
        }));
        let error = match measured {
            Ok(Ok(true)) => None,
            Ok(Ok(false)) => Some("bytes are wrong, or no pair could run: see the results".to_owned()),
            Ok(Err(error)) => Some(reason_and_remedy(&error)),
            Err(_) => Some("the program failed inside; report it with the program's output".to_owned()),
        };
        self.end(error);
    }

    /// Moves the job to the results.
    fn end(&self, error: Option<String>) {
        let mut inner = self.inner();
        self.add_rates(&mut inner, None);
        if let Some(job) = inner.job.take() {
            if let Some(matrix) = inner.matrix.as_mut().filter(|matrix| matrix.id == job.id) {
                matrix.running = false;
                matrix.error.clone_from(&error);
            }
            inner.results.push_front(Ended {
                id: job.id,
                kind: job.kind,
                by: job.by,
                started: job.started,
                ended: now(),
                from: job.from,
                to: job.to,
                mode: job.mode,
                error,
                report: job.report.filter(|_| job.kind == Kind::Run),
            });
            inner.results.truncate(MAX_RESULTS);
        }
        drop(inner);
        self.changed.notify();
    }

    /// Stops the job with this number. Returns whether it runs.
    pub(super) fn stop(&self, id: u64, by: String) -> bool {
        let mut inner = self.inner();
        let Some(job) = inner.job.as_mut().filter(|job| job.id == id) else {
            return false;
        };
        // The first who stops it is in its error.
        job.stopped_by.get_or_insert(by);
        drop(inner);
        self.changed.notify();
        true
    }

    /// Returns the viewer that stopped the job.
    pub(super) fn stopped_by(&self) -> Option<String> {
        self.inner().job.as_ref()?.stopped_by.clone()
    }

    /// Adds the rates of the job's NICs to the history; zero for `None`.
    fn add_rates(&self, inner: &mut Inner, rates: Option<Vec<f64>>) {
        let Some(job) = inner.job.as_ref().filter(|job| !job.nics.is_empty()) else {
            return;
        };
        let time = self.elapsed();
        let rates = rates.unwrap_or_default().into_iter().chain(std::iter::repeat(0.0));
        // A NIC that is named twice, with its port and without, has the sum.
        let mut ports = BTreeMap::new();
        for (nic, rate) in job.nics.iter().zip(rates) {
            *ports.entry(nic.clone()).or_insert(0.0) += rate;
        }
        let sample = Sample {
            time,
            pair: job.pair(),
            ports,
        };
        inner.history.push_back(sample);
        while inner.history.front().is_some_and(|first| first.time + WINDOW < time) {
            inner.history.pop_front();
        }
    }

    fn elapsed(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Changes the job, and publishes the state.
    fn change(&self, change: impl FnOnce(&Self, &mut Inner)) {
        let mut inner = self.inner();
        change(self, &mut inner);
        drop(inner);
        self.changed.notify();
    }

    /// Both sides of a run are ready.
    pub(super) fn job_is_ready(&self, report: &Report) {
        self.change(|gauge, inner| {
            if let Some(job) = &mut inner.job {
                job.nics.clone_from(&report.client.nics);
                job.to.clone_from(&report.server.memory);
                job.report = Some(report.clone());
            }
            // The lines of the charts begin here.
            gauge.add_rates(inner, None);
        });
    }

    /// Returns the number of NICs.
    pub(super) fn size_starts(&self, bytes: u64, messages: u64) -> usize {
        let mut inner = self.inner();
        let Some(job) = &mut inner.job else { return 0 };
        job.bytes = Some(bytes);
        job.messages = messages;
        job.done = vec![0; job.nics.len()];
        job.nics.len()
    }

    pub(super) fn job_advances(&self, done: &[u64], rates: Option<Vec<f64>>) {
        let mut inner = self.inner();
        if let Some(job) = &mut inner.job {
            job.done = done.to_vec();
        }
        if rates.is_some() {
            self.add_rates(&mut inner, rates);
            drop(inner);
            self.changed.notify();
        }
    }

    pub(super) fn size_ends(&self, result: &SizeResult, rates: Option<Vec<f64>>) {
        self.change(|gauge, inner| {
            if let Some(report) = inner.job.as_mut().and_then(|job| job.report.as_mut()) {
                report.results.push(result.clone());
            }
            if rates.is_some() {
                gauge.add_rates(inner, rates);
            }
        });
    }

    /// The link of a matrix is measured.
    pub(super) fn matrix_has(&self, matrix: &Matrix, pairs: Pairs) {
        self.change(|_, inner| {
            let Some(job) = &mut inner.job else { return };
            job.pairs = Some(pairs);
            inner.matrix = Some(MatrixState {
                id: job.id,
                running: true,
                error: None,
                matrix: matrix.clone(),
            });
        });
    }

    pub(super) fn pair_starts(&self, from: &str, to: &str, mode: &str) {
        self.change(|gauge, inner| {
            // The lines of the pair before end here.
            gauge.add_rates(inner, None);
            let Some(job) = &mut inner.job else { return };
            job.from = from.to_owned();
            job.to = to.to_owned();
            job.mode = mode.to_owned();
            job.nics.clear();
            job.bytes = None;
        });
    }

    pub(super) fn pair_ends(&self, matrix: &Matrix) {
        self.change(|_, inner| {
            if let Some(state) = &mut inner.matrix {
                state.matrix = matrix.clone();
            }
            if let Some(pairs) = inner.job.as_mut().and_then(|job| job.pairs.as_mut()) {
                pairs.ended += 1;
            }
        });
    }

    /// Returns the results.
    pub(super) fn results(&self) -> Results {
        let inner = self.inner();
        let runs = inner.results.iter().filter(|ended| ended.kind == Kind::Run);
        Results {
            schema: SCHEMA,
            server: self.server.to_string(),
            runs: runs.cloned().collect(),
            matrix: inner.matrix.clone(),
        }
    }
}

impl State for Gauge {
    fn json(&self) -> serde_json::Result<String> {
        let inner = self.inner();
        serde_json::to_string(&Snapshot {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION"),
            server: self.server.to_string(),
            elapsed: self.elapsed(),
            nics: &self.nics,
            memory: MemoryKind::value_variants().iter().map(|kind| kind.name()).collect(),
            modes: Mode::value_variants().iter().map(|mode| mode.name()).collect(),
            job: inner.job.as_ref(),
            history: &inner.history,
            results: &inner.results,
            matrix: inner.matrix.as_ref(),
        })
    }
}
