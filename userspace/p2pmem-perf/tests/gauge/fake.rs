// SPDX-License-Identifier: MIT OR Apache-2.0

//! Measurements without NICs: the rates follow from the memories and the mode, and the time is real.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use clap::Parser;
use p2pmem_payload::kind::MemoryKind;
use p2pmem_perf::cli::{Cli, Command, RunArgs};
use p2pmem_perf::gauge::Measurements;
use p2pmem_perf::matrix::{Entry, LinkRate, Matrix, MatrixArgs, MatrixObserver, Measured, Pair, STAGED};
use p2pmem_perf::observer::Observer;
use p2pmem_perf::report::{NicResult, Report, SizeResult};
use p2pmem_perf::stats::{Latency, Speed};
use p2pmem_perf::wire::{Mode, Side};

/// Bytes per second of one NIC from host memory to host memory.
pub const LINK: f64 = 11.6 * (1_u64 << 30) as f64;
const MIB: f64 = (1 << 20) as f64;
/// The pace of the simulation. Nothing waits for it.
const PACE: Duration = Duration::from_millis(10);

/// What tests control.
#[derive(Default)]
pub struct Script {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Pairs of matrices that may be measured; without a limit, none waits.
    pairs: Option<usize>,
    /// How long each pair is measured.
    pair_time: Duration,
    /// Why the next run fails after its first size.
    failure: Option<String>,
    /// Whether the next run panics.
    panics: bool,
}

impl Script {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Lets matrices measure so many pairs more.
    pub fn release(&self, pairs: usize) {
        let mut state = self.state();
        state.pairs = Some(state.pairs.unwrap_or(0) + pairs);
        self.changed.notify_all();
    }

    pub fn pairs_take(&self, time: Duration) {
        self.state().pair_time = time;
    }

    /// Lets the next run fail after its first size.
    pub fn fail(&self, why: &str) {
        self.state().failure = Some(why.to_owned());
    }

    /// Lets the next run panic.
    pub fn panic(&self) {
        self.state().panics = true;
    }

    /// Waits until a pair that cannot run may end.
    fn wait_for_pair(&self, observer: &dyn Observer) -> Result<()> {
        while !self.next_pair() {
            observer.proceed()?;
            let state = self.state();
            drop(self.changed.wait_timeout(state, PACE).unwrap());
        }
        Ok(())
    }

    /// Returns whether a pair may end, and counts it.
    fn next_pair(&self) -> bool {
        match &mut self.state().pairs {
            None => true,
            Some(0) => false,
            Some(pairs) => {
                *pairs -= 1;
                true
            }
        }
    }
}

/// The measurements.
pub struct Fake(pub Arc<Script>);

/// Returns the share of the link's rate.
fn share(from: MemoryKind, to: MemoryKind, mode: Mode, staged: bool) -> f64 {
    let one = |kind| match kind {
        MemoryKind::Cpu => 1.0,
        MemoryKind::Accelerator | MemoryKind::Pageless => 0.97,
        MemoryKind::Cmb => 0.62,
        MemoryKind::Fpga => 0.84,
    };
    let mode = match mode {
        _ if staged => 0.17,
        Mode::Read => 0.91,
        Mode::Send => 0.96,
        _ => 1.0,
    };
    f64::min(one(from), one(to)) * mode
}

fn side(nics: &[String], memory: MemoryKind) -> Side {
    Side {
        nics: nics.to_vec(),
        memory: memory.name().into(),
        providers: Vec::new(),
        registration: "dma-buf".into(),
    }
}

fn speed(bytes: u64, messages: u64, rate: f64) -> Speed {
    Speed {
        bytes,
        iterations: messages,
        seconds: bytes as f64 * messages as f64 / rate,
        peak_mib_per_s: None,
        average_mib_per_s: rate / MIB,
        rate_mpps: rate / bytes as f64 / 1e6,
    }
}

fn latency(bytes: u64, rate: f64) -> Latency {
    let us = 1.9 + bytes as f64 / rate * 1e6;
    Latency {
        p50_us: us,
        p99_us: us * 1.2,
        p999_us: us * 1.6,
        max_us: us * 3.0,
    }
}

fn size_result(nics: &[String], bytes: u64, messages: u64, base: f64) -> SizeResult {
    let each = nics.iter().map(|nic| NicResult {
        nic: nic.clone(),
        speed: speed(bytes, messages, base),
        latency: Some(latency(bytes, base)),
        cpu_us_client: 0.4,
        cpu_us_server: None,
        process_us_server: 0.0,
        copied_client: 0,
        copied_server: 0,
        checked: None,
    });
    let all = speed(bytes, messages * nics.len() as u64, base * nics.len() as f64);
    SizeResult::new(all, Some(latency(bytes, base)), each.collect())
}

impl Measurements for Fake {
    fn nics(&self) -> Result<Vec<String>> {
        Ok(vec!["mlx5_0".into(), "mlx5_1".into()])
    }

    fn run(&self, args: &RunArgs, observer: &dyn Observer) -> Result<Report> {
        if std::mem::take(&mut self.0.state().panics) {
            panic!("a panic of the tests");
        }
        let nics = &args.own.side.nic;
        let peer = args.peer_memory.unwrap_or(MemoryKind::Cpu);
        let test = args.test(nics.len());
        let mut report = Report::new(test.clone(), side(nics, args.own.memory), side(nics, peer));
        observer.proceed()?;
        observer.ready(&report)?;
        let base = LINK * share(args.own.memory, peer, args.mode, args.staged);
        for bytes in test.sizes.clone() {
            let messages = test.messages(bytes);
            observer.size_starts(bytes, messages)?;
            self.size(observer, nics.len(), bytes, messages, base, false)?;
            let result = size_result(nics, bytes, messages, base);
            observer.size_ends(&result)?;
            report.results.push(result);
            if let Some(why) = self.0.state().failure.take() {
                bail!(why);
            }
        }
        Ok(report)
    }

    fn matrix(&self, args: &MatrixArgs, observer: &dyn MatrixObserver) -> Result<Matrix> {
        let sizes = &args.size.0;
        observer.runs().proceed()?;
        let names = |kinds: &[MemoryKind]| kinds.iter().map(|kind| kind.name().to_owned()).collect();
        let total = LINK * args.side.nic.len() as f64;
        let mut matrix = Matrix {
            memory: names(&args.memory),
            peer_memory: names(&args.peer_memory),
            modes: args.modes(),
            nics: args.side.nic.len(),
            link: sizes
                .iter()
                .map(|size| LinkRate {
                    size: *size,
                    mib_per_s: total / MIB,
                })
                .collect(),
            entries: Vec::new(),
        };
        let staged = args.staged.then_some((Mode::Write, true));
        let mut pairs = Vec::new();
        for (mode, staged) in args.mode.iter().map(|mode| (*mode, false)).chain(staged) {
            for from in &args.memory {
                for to in &args.peer_memory {
                    pairs.push(Pair {
                        from: *from,
                        to: *to,
                        mode,
                        staged,
                    });
                }
            }
        }
        observer.link_measured(&matrix, pairs.len())?;
        for pair in pairs {
            observer.pair_starts(pair)?;
            let entries: Vec<Entry> = sizes
                .iter()
                .map(|size| self.entry(args, pair, *size, Some(size) == sizes.last(), observer.runs()))
                .collect::<Result<_>>()?;
            matrix.entries.extend(entries.iter().cloned());
            observer.pair_ends(&entries, &matrix)?;
        }
        Ok(matrix)
    }
}

impl Fake {
    /// Reports the messages of one size while they are done. With `waits`, messages continue until the pair may end.
    fn size(
        &self,
        observer: &dyn Observer,
        nics: usize,
        bytes: u64,
        messages: u64,
        base: f64,
        waits: bool,
    ) -> Result<()> {
        let (begin, mut moved, mut last) = (Instant::now(), 0.0, Duration::ZERO);
        let mut done = 0;
        while done < messages || waits && !self.0.next_pair() {
            std::thread::sleep(PACE);
            let now = begin.elapsed();
            let wave = 1.0 + 0.02 * (now.as_secs_f64() * 1.7).sin() + 0.012 * (now.as_secs_f64() * 11.0).sin();
            moved += (now - last).as_secs_f64() * base * wave;
            last = now;
            done = (moved / bytes as f64) as u64;
            if !waits {
                done = done.min(messages);
            }
            let each: Vec<u64> = (0..nics as u64).map(|nic| done - done * nic / 40).collect();
            observer.progress(&each)?;
            observer.proceed()?;
        }
        observer.progress(&vec![messages; nics])
    }

    /// Measures a pair for one size. The last size of the pair waits until the pair may end.
    fn entry(&self, args: &MatrixArgs, pair: Pair, size: u64, is_last: bool, observer: &dyn Observer) -> Result<Entry> {
        let mut entry = Entry {
            from: pair.from.name().into(),
            to: pair.to.name().into(),
            mode: if pair.staged { STAGED } else { pair.mode.name() }.into(),
            size,
            measured: None,
            error: None,
        };
        if pair.to == MemoryKind::Pageless {
            if is_last {
                self.0.wait_for_pair(observer)?;
            }
            entry.error = Some("the other side failed: no provider without struct pages is near mlx5_0".into());
            return Ok(entry);
        }
        let ratio = share(pair.from, pair.to, pair.mode, pair.staged);
        let base = LINK * ratio;
        let time = self.0.state().pair_time.as_secs_f64();
        let messages = ((time * base / size as f64) as u64).max(1);
        let mode = format!("--mode={}", pair.mode.name());
        let size_option = format!("--size={size}");
        let words = ["p2pmem-perf", "run", "node-b", &mode, &size_option];
        let Command::Run(run) = Cli::parse_from(words).command else {
            unreachable!("the command is run")
        };
        let test = run.test(args.side.nic.len());
        let test = Report::new(test, side(&args.side.nic, pair.from), side(&args.side.nic, pair.to));
        observer.ready(&test)?;
        // More than a pair has until the test lets it end.
        observer.size_starts(size, 200_000)?;
        self.size(observer, args.side.nic.len(), size, messages, base, is_last)?;
        observer.size_ends(&size_result(&args.side.nic, size, messages, base))?;
        entry.measured = Some(Measured {
            mib_per_s: base * args.side.nic.len() as f64 / MIB,
            ratio_to_link: ratio,
            latency: Some(latency(size, base)),
            cpu_us_client: 0.4,
            cpu_us_server: None,
            copied_bytes: 0,
            moved_bytes: messages * size,
            verified: None,
            window: None,
        });
        Ok(entry)
    }
}
