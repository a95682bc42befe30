// SPDX-License-Identifier: MIT OR Apache-2.0

//! Recording: blocks are computed in the accelerator, and written from there to the drives.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};

use super::drives::{report_waiting, LocalStore};
use crate::client::compute::Compute;
use crate::client::record::Recorded;
use crate::client::source::{Source, SourceOptions};
use crate::client::{now, Verification};
use crate::control::ChannelRequest;
use crate::engine::{Progress, RecordEngine};
use crate::store::{ChannelName, System};
use crate::wait::wait;

/// What is recorded.
#[derive(Debug, Clone)]
pub struct RecordOptions {
    /// The channel.
    pub channel: ChannelRequest,
    /// The number of blocks.
    pub blocks: u64,
    /// The sequence number of the first block.
    pub first: u64,
    /// The most bytes in a second that the source has; `None` for no limit.
    pub rate: Option<u64>,
    /// Which blocks are verified.
    pub verify: Verification,
    /// The longest time in which nothing happens, although something is outstanding.
    pub timeout: Duration,
}

/// A recording.
struct Recorder<'a, S: System<File = File>> {
    // Dropped first: it waits for the drives, which access the buffers of the accelerator.
    engine: RecordEngine<S>,
    local: &'a LocalStore<S>,
    source: Source<'a>,
    result: Recorded,
}

/// Records blocks, until all are acknowledged, or until `stop` is set: then those that were begun are acknowledged.
///
/// If a drive fails, its blocks that are not acknowledged go to another drive of the LUN.
///
/// # Errors
///
/// There is no such channel, or it has a writer. The LUN is full, or has no drive left. The accelerator fails. A verified block
/// is wrong. What was acknowledged stays.
pub fn record<S: System<File = File>>(
    compute: &mut dyn Compute,
    local: &LocalStore<S>,
    options: &RecordOptions,
    stop: &AtomicBool,
) -> Result<Recorded> {
    let name = ChannelName::from(&options.channel);
    let blocks = local.blocks(&name, compute)?;
    let (memory, block_size) = (blocks.describe(), compute.block_size());
    let source = Source::new(
        compute,
        SourceOptions {
            first: options.first,
            blocks: options.blocks,
            rate: options.rate,
            verify: options.verify,
        },
    )?;
    let writer = local.store().writer(&name, now())?;
    let engine = RecordEngine::new(writer, blocks).context("starting io_uring")?;
    let mut recorder = Recorder {
        result: Recorded {
            recordings: vec![engine.recording()],
            memory: vec![memory],
            block_size,
            ..Recorded::default()
        },
        engine,
        local,
        source,
    };
    let started = Instant::now();
    let ended = recorder.run(options.timeout, stop);
    report_waiting(&ended, recorder.engine.in_flight());
    // After an error, blocks that were given to the drives become durable, too.
    let (result, finished) = recorder.finish(started);
    let ended = ended.and(finished.context("ending the recording"));
    ended.with_context(|| format!("{} blocks are acknowledged; recording failed", result.acknowledged))?;
    Ok(result)
}

impl<S: System<File = File>> Recorder<'_, S> {
    fn run(&mut self, timeout: Duration, stop: &AtomicBool) -> Result<()> {
        let timeout = timeout + self.source.interval();
        let mut last_progress = Instant::now();
        loop {
            if stop.load(Ordering::Relaxed) {
                self.source.stop();
            }
            let mut progress = self.source.advance()?;
            progress |= self.submit()?;
            progress |= self.collect()?;
            if self.result.acknowledged >= self.source.total() {
                return Ok(());
            }
            if progress {
                last_progress = Instant::now();
                continue;
            }
            ensure!(
                last_progress.elapsed() <= timeout,
                "nothing happened for {timeout:?}; the drives have not completed {} blocks, and the accelerator {}",
                self.engine.in_flight(),
                self.source.computing()
            );
            let mut fds: Vec<BorrowedFd<'_>> = vec![self.engine.as_fd()];
            fds.extend(self.source.event());
            wait(&fds, self.source.longest_wait())?;
        }
    }

    /// Starts to write blocks. Returns whether there was any.
    fn submit(&mut self) -> Result<bool> {
        let mut progress = false;
        while let Some((buffer, block)) = self.source.take() {
            let submitted = self.engine.submit(buffer as usize, block);
            submitted.with_context(|| format!("recording block {}", block.sequence))?;
            progress = true;
        }
        Ok(progress)
    }

    /// Handles what the drives have completed. Returns whether there was anything.
    fn collect(&mut self) -> Result<bool> {
        let done = self.engine.progress();
        let progress = !done.acknowledged.is_empty() || !done.failures.is_empty();
        self.count(&done);
        for block in &done.acknowledged {
            self.source.release(block.buffer as u32);
        }
        if let Some(refused) = done.not_recorded.into_iter().next() {
            return Err(refused.error).with_context(|| format!("recording block {}", refused.block.sequence));
        }
        Ok(progress)
    }

    fn count(&mut self, done: &Progress) {
        count(&mut self.result, self.local, done);
    }

    /// Waits for the drives, and ends the recording.
    fn finish(mut self, started: Instant) -> (Recorded, crate::store::Result<()>) {
        let (done, drained) = self.engine.drain();
        self.count(&done);
        self.result.verified = self.source.verified();
        self.result.nanoseconds = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let (result, local) = (&mut self.result, self.local);
        let (done, finished) = self.engine.finish();
        count(result, local, &done);
        (self.result, drained.and(finished))
    }
}

/// Counts acknowledged blocks, and reports drives that failed.
fn count<S: System>(result: &mut Recorded, local: &LocalStore<S>, done: &Progress) {
    result.acknowledged += done.acknowledged.len() as u64;
    for failure in &done.failures {
        let reason = format!("{} failed: {}", local.describe(&failure.drive), failure.error);
        eprintln!("p2pmem-recorder: {reason}; blocks that it did not acknowledge go to the other drives");
        result.failed.push(reason);
    }
}
