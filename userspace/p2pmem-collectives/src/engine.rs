// SPDX-License-Identifier: MIT OR Apache-2.0

//! What executes reductions and copies within a memory: the interface of an engine, and the processor as one.

use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use p2pmem_verbs::Span;

use crate::element::{combine, Element, Reduction};

/// Bytes that the processor reduces at once. Two blocks stay in the processor's cache.
const BLOCK: usize = 16 << 10;

/// What a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Replaces each element of the target by the reduction of this element and of that of the source, as
    /// [`combine`] does.
    Reduce(Element, Reduction),
    /// Copies the source to the target.
    Copy,
}

/// An operation on two ranges of an engine's memory. Offsets are relative to this memory: those in an accelerator's BAR, or those
/// in a span of host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// What to do.
    pub operation: Operation,
    /// Offset of the target.
    pub into: u64,
    /// Offset of the source.
    pub from: u64,
    /// Length of both ranges, at least 1.
    pub bytes: u64,
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.operation {
            Operation::Reduce(element, reduction) => write!(f, "{reduction} of {element}")?,
            Operation::Copy => f.write_str("copy")?,
        }
        let Self { into, from, bytes, .. } = self;
        write!(f, ", {bytes} bytes from {from:#x} to {into:#x}")
    }
}

impl Job {
    /// Checks that both ranges are in a memory of `memory` bytes, do not overlap, and have whole elements that are aligned to their
    /// size.
    ///
    /// # Errors
    ///
    /// The error names the job and the reason.
    pub fn check(&self, memory: u64) -> Result<()> {
        let Self { into, from, bytes, .. } = *self;
        if bytes == 0 {
            bail!("{self}: the job has no bytes");
        }
        let end = |start: u64| start.checked_add(bytes).filter(|end| *end <= memory);
        let (Some(into_end), Some(from_end)) = (end(into), end(from)) else {
            bail!("{self}: a range exceeds the memory of {memory:#x} bytes");
        };
        if into < from_end && from < into_end {
            bail!("{self}: the ranges overlap");
        }
        if let Operation::Reduce(element, _) = self.operation {
            // Not truncated: 2 or 4.
            let size = element.bytes() as u64;
            if [into, from, bytes].iter().any(|value| value % size != 0) {
                bail!("{self}: offsets and length must be multiples of {size} bytes");
            }
        }
        Ok(())
    }
}

/// Executes jobs, one after another, in the order of their submission.
pub trait Engine {
    /// Submits a job, and returns its number. Numbers are consecutive from 0. Returns `None`, and submits nothing, if the queue
    /// is full: it has space again after jobs complete. The job may wait for [`Engine::start`].
    ///
    /// # Errors
    ///
    /// Those of [`Job::check`], after which the engine goes on; or the engine has failed: no job completes any more.
    fn submit(&mut self, job: Job) -> Result<Option<u64>>;

    /// Starts all submitted jobs. Call it once for several jobs.
    ///
    /// # Errors
    ///
    /// The engine has failed.
    fn start(&mut self) -> Result<()>;

    /// Returns the number of completed jobs: those with smaller numbers. Their results are visible to the processor, to other
    /// devices such as the NIC, and to later jobs. Does not wait.
    ///
    /// # Errors
    ///
    /// A job failed, which the error names, or the engine has failed.
    fn completed(&mut self) -> Result<u64>;

    /// Returns the name of the engine, for messages and reports.
    fn name(&self) -> &str;
}

/// Executes jobs, and waits for their end, at most `limit` for each job. No other jobs of the engine are in progress.
///
/// # Errors
///
/// Those of the engine; or a job did not end within the limit.
pub fn execute<E: Engine + ?Sized>(engine: &mut E, jobs: &[Job], limit: Duration) -> Result<()> {
    let mut jobs = jobs.iter().peekable();
    let mut last = None;
    let mut moved = Instant::now();
    let mut done = engine.completed()?;
    loop {
        let mut is_submitted = false;
        while let Some(number) = jobs.peek().map_or(Ok(None), |job| engine.submit(**job))? {
            last = Some(number);
            is_submitted = true;
            jobs.next();
        }
        if is_submitted {
            engine.start()?;
        }
        let completed = engine.completed()?;
        if jobs.peek().is_none() && last.is_none_or(|last| last < completed) {
            return Ok(());
        }
        if completed > done || is_submitted {
            done = completed;
            moved = Instant::now();
        }
        if moved.elapsed() > limit {
            bail!(
                "{}: a job did not end within {limit:?}: is the device there?",
                engine.name()
            );
        }
        thread::yield_now();
    }
}

impl<E: Engine + ?Sized> Engine for Box<E> {
    fn submit(&mut self, job: Job) -> Result<Option<u64>> {
        (**self).submit(job)
    }

    fn start(&mut self) -> Result<()> {
        (**self).start()
    }

    fn completed(&mut self) -> Result<u64> {
        (**self).completed()
    }

    fn name(&self) -> &str {
        (**self).name()
    }
}

/// The processor as an engine: of host memory, or of other memory that is mapped. Executes each job as it is submitted, so
/// that [`Engine::submit`] takes as long as the job.
#[derive(Debug)]
pub struct ProcessorEngine {
    span: Span,
    completed: u64,
    into: Vec<u8>,
    from: Vec<u8>,
}

impl ProcessorEngine {
    /// An engine of a memory. Offsets of jobs are offsets in `span`.
    pub fn new(span: Span) -> Self {
        Self {
            span,
            completed: 0,
            into: vec![0; BLOCK],
            from: vec![0; BLOCK],
        }
    }

    fn reduce(&mut self, element: Element, reduction: Reduction, job: &Job) -> p2pmem::Result<()> {
        // Not truncated: the ranges are in the span.
        let (into, from, bytes) = (job.into as usize, job.from as usize, job.bytes as usize);
        // A block is a multiple of the size of an element.
        for start in (0..bytes).step_by(BLOCK) {
            let len = BLOCK.min(bytes - start);
            let (target, source) = (&mut self.into[..len], &mut self.from[..len]);
            self.span.try_read(into + start, target)?;
            self.span.try_read(from + start, source)?;
            combine(element, reduction, target, source);
            self.span.try_write(into + start, target)?;
        }
        Ok(())
    }
}

impl Engine for ProcessorEngine {
    fn submit(&mut self, job: Job) -> Result<Option<u64>> {
        job.check(self.span.len() as u64)?;
        let result = match job.operation {
            Operation::Reduce(element, reduction) => self.reduce(element, reduction, &job),
            Operation::Copy => {
                let (into, from, bytes) = (job.into as usize, job.from as usize, job.bytes as usize);
                self.span.try_copy_to(from, &self.span, into, bytes)
            }
        };
        result.with_context(|| format!("{job}: the processor cannot access the memory"))?;
        self.span.flush();
        let number = self.completed;
        self.completed += 1;
        Ok(Some(number))
    }

    fn start(&mut self) -> Result<()> {
        Ok(())
    }

    fn completed(&mut self) -> Result<u64> {
        Ok(self.completed)
    }

    fn name(&self) -> &str {
        "processor"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SUM: Operation = Operation::Reduce(Element::F32, Reduction::Sum);

    fn job(operation: Operation, into: u64, from: u64, bytes: u64) -> Job {
        Job {
            operation,
            into,
            from,
            bytes,
        }
    }

    #[test]
    fn bad_jobs_are_refused_and_change_nothing() {
        let span = Span::host(4096).unwrap();
        span.write(0, &[0x3f; 4096]);
        let mut engine = ProcessorEngine::new(span.clone());
        let bf16 = Operation::Reduce(Element::Bf16, Reduction::Max);
        for (bad, reason) in [
            (job(SUM, 0, 64, 0), "no bytes"),
            (job(Operation::Copy, 0, 64, 0), "no bytes"),
            (job(SUM, 4096, 0, 4), "exceeds"),
            (job(SUM, 0, 4092, 8), "exceeds"),
            (job(SUM, u64::MAX - 3, 0, 4), "exceeds"),
            (job(Operation::Copy, 0, 4, u64::MAX), "exceeds"),
            (job(SUM, 0, 60, 64), "overlap"),
            (job(SUM, 60, 0, 64), "overlap"),
            (job(Operation::Copy, 7, 7, 1), "overlap"),
            (job(SUM, 2, 64, 4), "multiples of 4"),
            (job(SUM, 0, 66, 4), "multiples of 4"),
            (job(SUM, 0, 64, 6), "multiples of 4"),
            (job(bf16, 1, 64, 2), "multiples of 2"),
            (job(bf16, 0, 64, 3), "multiples of 2"),
        ] {
            let error = engine.submit(bad).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
            assert!(error.starts_with(&bad.to_string()), "{error}");
        }
        assert_eq!(engine.completed().unwrap(), 0);
        let mut all = vec![0; 4096];
        span.read(0, &mut all);
        assert!(all == [0x3f; 4096]);
        // The engine goes on. Adjacent ranges do not overlap, and copies need no alignment.
        assert_eq!(engine.submit(job(SUM, 0, 64, 64)).unwrap(), Some(0));
        assert_eq!(engine.submit(job(Operation::Copy, 4095, 3, 1)).unwrap(), Some(1));
        engine.start().unwrap();
        assert_eq!(engine.completed().unwrap(), 2);
    }

    /// An engine with space for two jobs, which ends one job in every second query, and none after `last` jobs.
    struct Slow {
        submitted: u64,
        completed: u64,
        queries: u64,
        last: u64,
    }

    impl Engine for Slow {
        fn submit(&mut self, _job: Job) -> Result<Option<u64>> {
            if self.submitted - self.completed == 2 {
                return Ok(None);
            }
            self.submitted += 1;
            Ok(Some(self.submitted - 1))
        }

        fn start(&mut self) -> Result<()> {
            Ok(())
        }

        fn completed(&mut self) -> Result<u64> {
            self.queries += 1;
            if self.queries % 2 == 0 && self.completed < self.submitted.min(self.last) {
                self.completed += 1;
            }
            Ok(self.completed)
        }

        fn name(&self) -> &str {
            "slow"
        }
    }

    #[test]
    fn execution_ends_with_the_last_job_or_at_the_limit() {
        let slow = |last| Slow {
            submitted: 0,
            completed: 0,
            queries: 0,
            last,
        };
        let jobs = [job(Operation::Copy, 0, 64, 1); 5];
        let mut engine = slow(5);
        execute(&mut engine, &jobs, Duration::from_secs(60)).unwrap();
        assert_eq!((engine.submitted, engine.completed), (5, 5));
        execute(&mut engine, &[], Duration::ZERO).unwrap();
        let error = execute(&mut slow(4), &jobs, Duration::from_millis(10)).unwrap_err();
        assert!(
            error.to_string().starts_with("slow: a job did not end within 10ms"),
            "{error}"
        );
    }

    #[test]
    fn jobs_are_described_by_their_ranges() {
        let sum = job(SUM, 0x1000, 0x2000, 64);
        assert_eq!(sum.to_string(), "sum of f32, 64 bytes from 0x2000 to 0x1000");
        let copy = job(Operation::Copy, 0, 16, 1);
        assert_eq!(copy.to_string(), "copy, 1 bytes from 0x10 to 0x0");
    }

    #[test]
    fn a_mapped_buffer_is_reduced_too() {
        let device = p2pmem::fake::Fake::example().device();
        let mapping = device.alloc(&p2pmem::Request::new(65536)).unwrap().map().unwrap();
        let span = Span::buffer(mapping);
        let ones = 1_f32.to_le_bytes().repeat(8192);
        span.write(0, &ones);
        span.write(32768, &ones);
        let mut engine = ProcessorEngine::new(span.clone());
        engine.submit(job(SUM, 0, 32768, 32768)).unwrap();
        let mut result = vec![0; 32768];
        span.read(0, &mut result);
        assert!(result == 2_f32.to_le_bytes().repeat(8192));
    }

    fn any_operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            Just(Operation::Copy),
            (0_usize..2, 0_usize..2)
                .prop_map(|(element, reduction)| Operation::Reduce(Element::ALL[element], Reduction::ALL[reduction])),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        /// Jobs in the span give what the same operations give on a vector, also over several blocks.
        #[test]
        fn jobs_agree_with_slices(
            seed in any::<u64>(),
            jobs in proptest::collection::vec((any_operation(), 0_u64..8192, 0_u64..8192, 1_u64..12_000), 1..8),
        ) {
            const HALF: u64 = 80 << 10;
            let mut memory: Vec<u8> = (0..2 * HALF)
                .map(|i| (i ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[1])
                .collect();
            let span = Span::host(memory.len()).unwrap();
            span.write(0, &memory);
            let mut engine = ProcessorEngine::new(span.clone());
            for (number, (operation, into, from, bytes)) in (0..).zip(jobs) {
                // To elements of 4 bytes. Every second job is in the other direction.
                let (into, from) = if number % 2 == 0 { (into * 4, HALF + from * 4) } else { (HALF + into * 4, from * 4) };
                let job = job(operation, into, from, bytes * 4);
                prop_assert_eq!(engine.submit(job).unwrap(), Some(number));
                let source = memory[from as usize..][..bytes as usize * 4].to_vec();
                let target = &mut memory[into as usize..][..bytes as usize * 4];
                match operation {
                    Operation::Copy => target.copy_from_slice(&source),
                    Operation::Reduce(element, reduction) => combine(element, reduction, target, &source),
                }
                prop_assert_eq!(engine.completed().unwrap(), number + 1);
            }
            let mut result = vec![0; memory.len()];
            span.read(0, &mut result);
            prop_assert!(result == memory);
        }
    }
}
