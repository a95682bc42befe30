// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the matrix, with runs that return given results.

use std::cell::Cell;
use std::time::Duration;

use anyhow::{anyhow, bail};
use clap::Parser;

use super::*;
use crate::cli::{Cli, Command};
use crate::report::NicResult;
use crate::stats::{Speed, Times};
use crate::wire::Side;

fn args(options: &str) -> MatrixArgs {
    let line = format!("p2pmem-perf matrix host {options}");
    match Cli::try_parse_from(line.split_whitespace()).unwrap().command {
        Command::Matrix(args) => args,
        other => panic!("{other:?}"),
    }
}

/// Returns the report of a run whose messages take `milliseconds` each.
fn report(args: &RunArgs, milliseconds: u64, nics: u64) -> Report {
    let side = Side {
        nics: vec!["mlx5_0".into()],
        memory: "cpu".into(),
        providers: Vec::new(),
        registration: "reg-mr".into(),
    };
    let mut report = Report::new(args.test(1), side.clone(), side);
    for size in &args.size.0 {
        let times = Times {
            posted: vec![Duration::ZERO],
            done: vec![Duration::from_millis(milliseconds)],
        };
        let nic = NicResult {
            nic: "mlx5_0".into(),
            speed: Speed::new(*size, &times),
            latency: Latency::new([&times]),
            cpu_us_client: 3.0,
            cpu_us_server: Some(1.0),
            process_us_server: 2.0,
            copied_client: if args.staged { *size } else { 0 },
            copied_server: if args.staged { *size } else { 0 },
            checked: None,
        };
        let all = vec![times; nics as usize];
        let nics = vec![nic; nics as usize];
        report
            .results
            .push(SizeResult::new(Speed::of_all(*size, &all), Latency::new(&all), nics));
    }
    report
}

#[test]
fn a_value_is_made_again_when_it_is_not_usable_any_more() {
    let (reused, made) = (Reused::default(), RefCell::new(0));
    let get = |is_usable: bool| {
        let make = || {
            *made.borrow_mut() += 1;
            Ok(*made.borrow())
        };
        reused.get(|_| is_usable, make).unwrap()
    };
    assert_eq!([get(true), get(true), get(false), get(true)], [1, 1, 2, 2]);
    // After an attempt that failed, nothing is left to reuse.
    assert!(reused.get(|_| false, || bail!("no NIC")).is_err());
    assert_eq!(get(true), 3);
}

#[test]
fn every_pair_is_measured_once_by_every_mode() {
    let args = args("--memory cpu,cmb --peer-memory cpu,accelerator --mode write,read --staged --size 1M,2M");
    let runs = RefCell::new(Vec::new());
    let matrix = measure_with(&args, &Unobserved, &|args, _| {
        let to = args.peer_memory.unwrap();
        runs.borrow_mut().push((args.own.memory, to, args.mode, args.staged));
        // Writes to host memory take 10 ms, others 20 ms.
        Ok(report(args, if to == MemoryKind::Cpu { 10 } else { 20 }, 1))
    })
    .unwrap();
    // The link, and all pairs but the link's.
    assert_eq!(runs.borrow().len(), 3 * 4);
    assert_eq!(runs.borrow()[0], (MemoryKind::Cpu, MemoryKind::Cpu, Mode::Write, false));
    assert_eq!(matrix.entries.len(), 3 * 4 * 2);
    assert_eq!(matrix.modes, ["write", "read", "staged"]);
    assert!((matrix.link[0].mib_per_s - 100.0).abs() < 1e-9, "{:?}", matrix.link);
    assert!((matrix.link[1].mib_per_s - 200.0).abs() < 1e-9, "{:?}", matrix.link);
    let of = |from, to, mode, size| matrix.entry(from, to, mode, size).unwrap().measured.clone().unwrap();
    assert!((of("cpu", "cpu", "write", 1 << 20).ratio_to_link - 1.0).abs() < 1e-9);
    let slow = of("cmb", "accelerator", "read", 2 << 20);
    assert!(
        (slow.ratio_to_link - 0.5).abs() < 1e-9 && (slow.mib_per_s - 100.0).abs() < 1e-9,
        "{slow:?}"
    );
    assert_eq!((slow.copied_bytes, slow.moved_bytes), (0, 2 << 20));
    let staged = of("cpu", "cpu", "staged", 1 << 20);
    assert_eq!((staged.copied_bytes, staged.moved_bytes), (2 << 20, 1 << 20));
    assert!(matrix.is_correct());
}

#[test]
fn a_link_of_a_known_rate_is_not_measured() {
    let args = args("--link-rate 50 --nic mlx5_0,mlx5_1 --memory cpu,cmb --peer-memory cpu --mode write --size 1M,2M");
    let runs = Cell::new(0);
    let matrix = measure_with(&args, &Unobserved, &|args, _| {
        runs.set(runs.get() + 1);
        Ok(report(args, 10, 2))
    })
    .unwrap();
    assert_eq!((runs.get(), matrix.nics, matrix.entries.len()), (2, 2, 4));
    let one = matrix.entry("cpu", "cpu", "write", 1 << 20).unwrap().measured.clone();
    assert!((one.unwrap().ratio_to_link - 4.0).abs() < 1e-9, "{matrix:?}");
    for wrong in ["0", "-1", "inf", "fast"] {
        let line = format!("p2pmem-perf matrix host --link-rate={wrong}");
        let error = Cli::try_parse_from(line.split_whitespace()).unwrap_err().to_string();
        assert!(error.contains("a number above 0"), "{error}");
    }
}

#[test]
fn several_nics_are_one_entry() {
    let matrix = measure_with(&args("--memory cpu --peer-memory cpu"), &Unobserved, &|args, _| {
        Ok(report(args, 10, 2))
    })
    .unwrap();
    let one = matrix
        .entry("cpu", "cpu", "write", 1 << 20)
        .unwrap()
        .measured
        .clone()
        .unwrap();
    assert!((one.mib_per_s - 200.0).abs() < 1e-9, "{one:?}");
    assert!((one.cpu_us_client - 3.0).abs() < 1e-9, "{one:?}");
    assert_eq!(one.moved_bytes, 2 << 20);
}

#[test]
fn a_pair_that_cannot_run_is_reported_and_the_others_continue() {
    let args = args("--memory cpu,fpga --peer-memory cpu,accelerator --mode write");
    let matrix = measure_with(&args, &Unobserved, &|args, _| {
        if args.own.memory == MemoryKind::Fpga {
            return Err(anyhow!("publish an FPGA").context("no provider has memory of the kind fpga"));
        }
        Ok(report(args, 10, 1))
    })
    .unwrap();
    assert_eq!(matrix.entries.len(), 4);
    let failed = matrix.entry("fpga", "accelerator", "write", 1 << 20).unwrap();
    assert_eq!(failed.measured, None);
    assert_eq!(
        failed.error.as_deref(),
        Some("no provider has memory of the kind fpga: publish an FPGA")
    );
    assert!(matrix.is_correct());
    let mut out = Vec::new();
    matrix.tables(&mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[1], ["cpu", "accelerator"], "{text}");
    assert_eq!(rows[2], ["cpu", "100.0", "(1.00)", "100.0", "(1.00)"], "{text}");
    assert_eq!(rows[3], ["fpga", "-", "-"], "{text}");
    assert!(
        text.contains("not measured: fpga to cpu by write: no provider has memory of the kind fpga"),
        "{text}"
    );
}

#[test]
fn a_server_that_is_gone_is_not_awaited_for_each_pair() {
    let args = args("--memory cpu,cmb,fpga --peer-memory cpu,cmb,fpga --mode write");
    let runs = Cell::new(0);
    let matrix = measure_with(&args, &Unobserved, &|args, _| {
        runs.set(runs.get() + 1);
        if runs.get() > 2 {
            return Err(anyhow!("refused").context(Unreachable("does `p2pmem-perf serve` run there".into())));
        }
        Ok(report(args, 10, 1))
    })
    .unwrap();
    assert_eq!((runs.get(), matrix.entries.len()), (3, 9));
    let failed: Vec<_> = matrix.entries.iter().filter_map(|entry| entry.error.as_ref()).collect();
    assert_eq!(failed.len(), 7);
    assert!(failed.iter().all(|why| why.contains("--forever")), "{failed:?}");
}

#[test]
fn the_link_must_be_measured() {
    let error = measure_with(&args(""), &Unobserved, &|_, _| bail!("no NIC")).unwrap_err();
    assert_eq!(format!("{error:#}"), "measuring the link: no NIC");
}

#[test]
fn wrong_bytes_in_the_run_of_the_link_are_an_error() {
    let error = measure_with(
        &args("--memory cmb --peer-memory cpu --verify"),
        &Unobserved,
        &|args, _| {
            let mut report = report(args, 10, 1);
            for result in &mut report.results {
                result.verified = Some(args.own.memory != MemoryKind::Cpu);
            }
            Ok(report)
        },
    )
    .unwrap_err();
    assert!(error.to_string().contains("wrong bytes"), "{error}");
}

#[test]
fn a_matrix_without_results_or_with_wrong_bytes_is_not_correct() {
    let run = |args: &RunArgs, _: &dyn Observer| {
        let mut report = report(args, 10, 1);
        for result in &mut report.results {
            result.verified = Some(args.own.memory == MemoryKind::Cpu);
        }
        Ok(report)
    };
    let good = measure_with(&args("--memory cpu --peer-memory cpu"), &Unobserved, &run).unwrap();
    assert!(good.is_correct());
    let mut wrong = measure_with(&args("--memory cmb --peer-memory cpu"), &Unobserved, &run).unwrap();
    assert!(!wrong.is_correct());
    let mut out = Vec::new();
    wrong.tables(&mut out).unwrap();
    assert!(String::from_utf8(out).unwrap().contains("WRONG"));
    wrong.entries.clear();
    assert!(!wrong.is_correct());
}

/// Records the calls, and stops after a number of pairs.
struct Recorder {
    calls: RefCell<Vec<String>>,
    stop_after: usize,
    stopper: Stopper,
}

#[derive(Default)]
struct Stopper(Cell<bool>);

impl Observer for Stopper {
    fn proceed(&self) -> Result<()> {
        if self.0.get() {
            bail!("stopped by the viewer");
        }
        Ok(())
    }
}

impl MatrixObserver for Recorder {
    fn runs(&self) -> &dyn Observer {
        &self.stopper
    }

    fn link_measured(&self, matrix: &Matrix, pairs: usize) -> Result<()> {
        assert!(matrix.entries.is_empty() && matrix.link.len() == 1);
        self.calls.borrow_mut().push(format!("link, {pairs}"));
        Ok(())
    }

    fn pair_starts(&self, pair: Pair) -> Result<()> {
        self.calls.borrow_mut().push(format!("{} starts", pair.to.name()));
        Ok(())
    }

    fn pair_ends(&self, entries: &[Entry], matrix: &Matrix) -> Result<()> {
        assert_eq!(entries, &matrix.entries[matrix.entries.len() - entries.len()..]);
        self.calls.borrow_mut().push(format!("{} ends", entries[0].to));
        self.stopper.0.set(matrix.entries.len() == self.stop_after);
        Ok(())
    }
}

#[test]
fn the_observer_sees_each_pair_and_can_stop() {
    let recorder = Recorder {
        calls: RefCell::default(),
        stop_after: 2,
        stopper: Stopper::default(),
    };
    let args = args("--memory cpu --peer-memory cpu,cmb,fpga --mode write");
    let error = measure_with(&args, &recorder, &|args, observer| {
        observer.proceed()?;
        Ok(report(args, 10, 1))
    })
    .unwrap_err();
    assert_eq!(error.to_string(), "stopped by the viewer");
    assert_eq!(
        *recorder.calls.borrow(),
        [
            "link, 3",
            "cpu starts",
            "cpu ends",
            "cmb starts",
            "cmb ends",
            "fpga starts"
        ]
    );
}

#[test]
fn a_matrix_can_be_read_back_from_json() {
    let args = args("--memory cpu,fpga --peer-memory cpu --mode write");
    let matrix = measure_with(&args, &Unobserved, &|args, _| match args.own.memory {
        MemoryKind::Fpga => bail!("no FPGA"),
        _ => Ok(report(args, 10, 1)),
    })
    .unwrap();
    let mut out = Vec::new();
    print_json(&mut out, &matrix).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(json["schema"], crate::SCHEMA);
    let entries = json["entries"].as_array().unwrap();
    assert!(entries[0]["mib_per_s"].is_f64() && entries[0]["latency"]["p50_us"].is_f64());
    assert!(entries[0].get("error").is_none());
    assert!(entries[1].get("mib_per_s").is_none() && entries[1]["error"] == "no FPGA");
    let back: Matrix = serde_json::from_slice(&out).unwrap();
    assert_eq!(back, matrix);
}
