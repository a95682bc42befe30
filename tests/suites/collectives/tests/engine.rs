// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the accelerator's engine with the model of the accelerator in this process.

#[path = "engine/local.rs"]
mod local;

use std::time::{Duration, Instant};

use local::{BDF, LocalAccel};
use p2pmem_accel_regs::driver::{Accel, RingOptions};
use p2pmem_accel_regs::{Counter, Status};
use p2pmem_collectives::element::{Element, Reduction};
use p2pmem_collectives::engine::{Engine, Job, Operation, ProcessorEngine};
use p2pmem_collectives_suite::engine::{AccelEngine, RingArea};
use p2pmem_proptest::config;
use p2pmem_verbs::Span;
use proptest::prelude::*;

const SIZE: u64 = 4 << 20;
/// Where rings are: the last MiB.
const RINGS: u64 = 3 << 20;
const LIMIT: Duration = Duration::from_secs(120);
const SUM: Operation = Operation::Reduce(Element::F32, Reduction::Sum);

/// Starts the engine number `n` of an accelerator.
fn engine(local: &LocalAccel, n: u64, entries: u32) -> AccelEngine {
    try_engine(local, n, entries).unwrap()
}

fn try_engine(local: &LocalAccel, n: u64, entries: u32) -> anyhow::Result<AccelEngine> {
    assert!(RingOptions::area(entries) <= 64 << 10);
    let area = RingArea::new(local.span(), 0, RINGS + n * (64 << 10));
    AccelEngine::new(BDF, local.open(), area, entries)
}

fn job(operation: Operation, into: u64, from: u64, bytes: u64) -> Job {
    Job {
        operation,
        into,
        from,
        bytes,
    }
}

/// Waits until `jobs` jobs have completed.
fn wait(engine: &mut AccelEngine, jobs: u64) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        let completed = engine.completed()?;
        if completed >= jobs {
            return Ok(());
        }
        assert!(start.elapsed() < LIMIT, "{completed} of {jobs} jobs have completed");
        std::thread::yield_now();
    }
}

/// Waits until the engine fails, and returns the message.
fn wait_failure(engine: &mut AccelEngine) -> String {
    format!("{:#}", wait(engine, u64::MAX).unwrap_err())
}

#[test]
fn jobs_run_in_order_after_the_start() {
    let local = LocalAccel::new(SIZE);
    let mut engine = engine(&local, 0, 8);
    assert_eq!(engine.name(), "accelerator 0000:01:00.0");
    let span = local.span();
    span.write(0, &1_f32.to_le_bytes());
    // Each job doubles what the job before it has written.
    for number in 0..8 {
        let copy = number % 2 == 0;
        let into = if copy { 64 } else { 0 };
        let operation = if copy { Operation::Copy } else { SUM };
        assert_eq!(engine.submit(job(operation, into, 64 - into, 4)).unwrap(), Some(number));
    }
    // The queue is full. No job runs before the start.
    assert_eq!(engine.submit(job(SUM, 0, 64, 4)).unwrap(), None);
    assert_eq!((engine.completed().unwrap(), local.tail(engine.ring())), (0, 0));
    engine.start().unwrap();
    assert_eq!(local.tail(engine.ring()), 8);
    wait(&mut engine, 8).unwrap();
    let mut result = [0; 4];
    span.read(0, &mut result);
    assert_eq!(f32::from_le_bytes(result), 16.0);
    assert_eq!(engine.submit(job(SUM, 0, 64, 4)).unwrap(), Some(8));
    engine.start().unwrap();
    wait(&mut engine, 9).unwrap();
    span.read(0, &mut result);
    assert_eq!(f32::from_le_bytes(result), 24.0);
    assert_eq!(local.counter(Counter::RingEntries), 9);
    assert_eq!(
        local.counter(Counter::HostRead) + local.counter(Counter::HostWritten),
        0
    );
}

#[test]
fn bad_jobs_are_refused_and_the_engine_goes_on() {
    let local = LocalAccel::new(SIZE);
    let mut engine = engine(&local, 0, 4);
    for (bad, reason) in [
        (job(SUM, 0, SIZE - 4, 8), "exceeds"),
        (job(SUM, 0, 4, 8), "overlap"),
        (job(SUM, 2, 64, 4), "multiples of 4"),
        (job(Operation::Copy, 0, 64, 0), "no bytes"),
    ] {
        let error = engine.submit(bad).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
    assert_eq!(engine.submit(job(SUM, 0, 64, 64)).unwrap(), Some(0));
    engine.start().unwrap();
    wait(&mut engine, 1).unwrap();
    for entries in [0, 3, 1 << 17] {
        let error = AccelEngine::new(BDF, local.open(), RingArea::new(local.span(), 0, RINGS), entries).unwrap_err();
        assert!(error.to_string().contains("power of two"), "{error}");
    }
}

#[test]
fn each_engine_has_a_ring_of_its_own() {
    let local = LocalAccel::new(SIZE);
    let mut engines: Vec<AccelEngine> = (0..8).map(|n| engine(&local, n, 4)).collect();
    let rings: Vec<u32> = engines.iter().map(AccelEngine::ring).collect();
    assert_eq!(rings, (0..8).collect::<Vec<u32>>());
    let error = format!("{:#}", try_engine(&local, 8, 4).unwrap_err());
    assert_eq!(
        error,
        "starting a ring of the accelerator 0000:01:00.0: all 8 rings of the accelerator are in use: end a program that uses one"
    );
    let span = local.span();
    span.write(0, &1_f32.to_le_bytes().repeat(1024));
    for (n, engine) in (1..).zip(&mut engines) {
        engine.submit(job(Operation::Copy, n * 4096, 0, 4096)).unwrap();
        engine.submit(job(SUM, n * 4096, 0, 4096)).unwrap();
        engine.start().unwrap();
    }
    for (n, engine) in (1..).zip(&mut engines) {
        wait(engine, 2).unwrap();
        let mut result = vec![0; 4096];
        span.read(n * 4096, &mut result);
        assert!(result == 2_f32.to_le_bytes().repeat(1024), "engine {n}");
    }
    engines.remove(3);
    assert_eq!(engine(&local, 3, 4).ring(), 3);
}

#[test]
fn a_failed_job_is_named() {
    // The registers say that the device has more memory than it has.
    let local = LocalAccel::with_registers(SIZE, 2 * SIZE);
    let mut engine = engine(&local, 0, 8);
    for into in [0, 64, SIZE, 128] {
        engine.submit(job(SUM, into, 4096, 64)).unwrap();
    }
    engine.start().unwrap();
    let expected = format!(
        "accelerator 0000:01:00.0: job 2 (sum of f32, 64 bytes from 0x1000 to {SIZE:#x}) failed: {}",
        Status::BadRange
    );
    // The error stays.
    for _ in 0..2 {
        assert_eq!(wait_failure(&mut engine), expected);
    }
    // Later jobs fill the queue, and then it says why it stays full.
    let error = loop {
        match engine.submit(job(SUM, 0, 64, 64)) {
            Ok(number) => assert!(number.is_some()),
            Err(error) => break error.to_string(),
        }
    };
    assert_eq!(error, expected);
}

#[test]
fn aborts_resets_and_removals_are_found_without_a_report() {
    let local = LocalAccel::new(SIZE);
    let mut aborted = engine(&local, 0, 4);
    local.abort();
    aborted.submit(job(SUM, 0, 64, 64)).unwrap();
    aborted.start().unwrap();
    let error = wait_failure(&mut aborted);
    assert_eq!(
        error,
        "accelerator 0000:01:00.0: job 0 (sum of f32, 64 bytes from 0x40 to 0x0) failed: the command was aborted"
    );
    drop(aborted);

    let mut disabled = engine(&local, 0, 4);
    local.open().disable_ring(disabled.ring(), LIMIT).unwrap();
    disabled.submit(job(SUM, 0, 64, 64)).unwrap();
    disabled.start().unwrap();
    let error = wait_failure(&mut disabled);
    assert!(
        error.ends_with("ring 0 was disabled by a reset or by another program: start again"),
        "{error}"
    );
    drop(disabled);

    for files in [true, false] {
        let local = LocalAccel::new(SIZE);
        let mut removed = engine(&local, 0, 4);
        let before = removed.submit(job(SUM, 0, 64, 64)).unwrap();
        assert_eq!(before, Some(0));
        if files {
            removed.start().unwrap();
            wait(&mut removed, 1).unwrap();
            local.remove();
            removed.submit(job(SUM, 0, 64, 64)).unwrap();
            removed.start().unwrap();
            let error = wait_failure(&mut removed);
            assert!(
                error.ends_with("the accelerator was removed: its registers do not respond"),
                "{error}"
            );
        } else {
            local.remove_files();
            let error = format!("{:#}", removed.start().unwrap_err());
            assert!(
                error.ends_with("the accelerator was removed: its registers do not respond"),
                "{error}"
            );
        }
    }
}

#[test]
fn a_report_that_another_program_overwrites_is_an_error() {
    let local = LocalAccel::new(SIZE);
    let mut engine = engine(&local, 0, 4);
    engine.submit(job(SUM, 0, 64, 64)).unwrap();
    // The report is behind the entries.
    local.span().write(RINGS as usize + 4 * 64, &77_u64.to_le_bytes());
    let error = engine.completed().unwrap_err().to_string();
    assert!(error.contains("reports that entry 77 completed, of 1 jobs"), "{error}");
    local.span().write(RINGS as usize + 4 * 64, &u64::MAX.to_le_bytes());
    assert!(engine.completed().is_err());
}

fn any_operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        1 => Just(Operation::Copy),
        4 => (0_usize..2, 0_usize..2)
            .prop_map(|(element, reduction)| Operation::Reduce(Element::ALL[element], Reduction::ALL[reduction])),
    ]
}

proptest! {
    #![proptest_config(config(20))]

    /// The accelerator and the processor have the same results, bit for bit, whatever the data, the jobs and the size of the queue.
    #[test]
    fn accelerator_agrees_with_the_processor(
        seed in any::<u64>(),
        shift in 0_u32..5,
        jobs in proptest::collection::vec((any_operation(), 0_u64..20_000, 0_u64..20_000, 1_u64..20_000, any::<bool>()), 1..40),
    ) {
        const HALF: u64 = 160_000;
        let local = LocalAccel::new(SIZE);
        let span = local.span();
        let mut engine = engine(&local, 0, 1 << shift);
        let host = Span::host(2 * HALF as usize).unwrap();
        // Many elements of similar size, and each kind of special value.
        let memory: Vec<u8> = (0..HALF / 2)
            .flat_map(|i| {
                let word = p2pmem_accel_regs::pattern_word(seed, i) as u32;
                let word = if word & 0x300 == 0 { word } else { (word & 0x81ff_ffff) | 0x3e00_0000 };
                word.to_le_bytes()
            })
            .collect();
        span.write(0, &memory);
        host.write(0, &memory);
        let mut processor = ProcessorEngine::new(host.clone());
        let mut number = 0;
        for (operation, into, from, bytes, start) in jobs {
            let (into, from) = if number % 2 == 0 { (into * 4, HALF + from * 4) } else { (HALF + into * 4, from * 4) };
            let job = job(operation, into, from, bytes * 4);
            processor.submit(job).unwrap();
            loop {
                match engine.submit(job).unwrap() {
                    Some(got) => {
                        prop_assert_eq!(got, number);
                        break;
                    }
                    None => {
                        engine.start().unwrap();
                        wait(&mut engine, number - (1 << shift) + 1).unwrap();
                    }
                }
            }
            number += 1;
            if start {
                engine.start().unwrap();
            }
        }
        engine.start().unwrap();
        wait(&mut engine, number).unwrap();
        let (mut found, mut expected) = (vec![0; memory.len()], vec![0; memory.len()]);
        span.read(0, &mut found);
        host.read(0, &mut expected);
        prop_assert!(found == expected);
        prop_assert_eq!(local.counter(Counter::RingEntries), number);
    }
}

#[test]
fn an_engine_is_movable_to_a_thread() {
    fn is_send<T: Send>() {}
    is_send::<AccelEngine>();
    is_send::<Accel>();
    is_send::<ProcessorEngine>();
}
