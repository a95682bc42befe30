// SPDX-License-Identifier: MIT OR Apache-2.0

//! Playback: blocks are read from the drives into the accelerator, and transformed there.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};

use super::drives::{report_waiting, LocalStore};
use crate::client::compute::Compute;
use crate::client::target::{Played, Target};
use crate::client::Verification;
use crate::control::{ChannelRequest, Start};
use crate::engine::PlayEngine;
use crate::pace::Pace;
use crate::session::{check_rate, open_recording, Cursor};
use crate::store::{ChannelName, System};
use crate::wait::wait;

/// What is played.
#[derive(Debug, Clone)]
pub struct PlayOptions {
    /// The channel.
    pub channel: ChannelRequest,
    /// The number of the recording; `None` for the latest one.
    pub recording: Option<u64>,
    /// Where playback starts.
    pub start: Start,
    /// The most blocks to play; `None` for all.
    pub blocks: Option<u64>,
    /// Whether playback starts again after the last block. Needs `blocks`.
    pub repeat: bool,
    /// The most bytes in a second.
    pub rate: Option<u64>,
    /// Which blocks are verified by the processor. The checksum of each block is compared with the recorded one.
    pub verify: Verification,
    /// The longest time in which nothing happens, although something is outstanding.
    pub timeout: Duration,
}

/// A playback.
struct Player<'a, S: System<File = File>> {
    // Dropped first: it waits for the drives, which access the buffers of the accelerator.
    engine: PlayEngine<S>,
    local: &'a LocalStore<S>,
    target: Target<'a>,
    cursor: Cursor,
    pace: Pace,
}

/// Plays a recording to its end, or until `stop` is set: then no further block is read.
///
/// # Errors
///
/// There is no such recording, or no block at or after the start. A drive or the accelerator fails. The checksum of a block, or
/// the spectrum of a verified block, is wrong.
pub fn play<S: System<File = File>>(
    compute: &mut dyn Compute,
    local: &LocalStore<S>,
    options: &PlayOptions,
    stop: &AtomicBool,
) -> Result<Played> {
    ensure!(
        !options.repeat || options.blocks.is_some(),
        "playback that repeats needs a number of blocks"
    );
    check_rate(options.rate)?;
    let name = ChannelName::from(&options.channel);
    let blocks = local.blocks(&name, compute)?;
    let (number, reader) = open_recording(local.store(), &name, options.recording)?;
    let cursor = Cursor::new(&reader, options.start, options.blocks, options.repeat)?;
    let (memory, started) = (blocks.describe(), Instant::now());
    let mut player = Player {
        engine: PlayEngine::new(reader, blocks).context("starting io_uring")?,
        local,
        pace: Pace::new(options.rate, compute.block_size(), started),
        target: Target::new(compute, options.verify, vec![number], memory),
        cursor,
    };
    let ended = player.run(options.timeout, stop);
    report_waiting(&ended, player.engine.in_flight());
    let result = &mut player.target.result;
    ended.with_context(|| format!("{} blocks were played; playback failed", result.blocks))?;
    result.nanoseconds = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Ok(player.target.result)
}

impl<S: System<File = File>> Player<'_, S> {
    fn run(&mut self, timeout: Duration, stop: &AtomicBool) -> Result<()> {
        let timeout = timeout + self.pace.interval();
        let mut last_progress = Instant::now();
        loop {
            let is_last = stop.load(Ordering::Relaxed) || self.cursor.peek().is_none();
            if is_last && self.engine.in_flight() == 0 && self.target.computing() == 0 {
                return Ok(());
            }
            let mut progress = !is_last && self.fetch()?;
            progress |= self.collect()?;
            progress |= self.target.take_work()?;
            if progress {
                last_progress = Instant::now();
                continue;
            }
            ensure!(
                last_progress.elapsed() <= timeout,
                "nothing happened for {timeout:?}; the drives have not completed {} blocks, and the accelerator {}",
                self.engine.in_flight(),
                self.target.computing()
            );
            let mut fds: Vec<BorrowedFd<'_>> = vec![self.engine.as_fd()];
            fds.extend(self.target.event());
            let mut limit = self.target.longest_wait();
            let delay = self.pace.delay(Instant::now());
            if self.target.has_buffer() && !delay.is_zero() {
                limit = limit.min(delay);
            }
            wait(&fds, limit)?;
        }
    }

    /// Starts to read blocks to free buffers. Returns whether there was any.
    fn fetch(&mut self) -> Result<bool> {
        let mut progress = false;
        while self.pace.delay(Instant::now()).is_zero() {
            let Some(block) = self.cursor.peek() else { break };
            let Some(buffer) = self.target.take_buffer() else {
                break;
            };
            // The cursor repeats only if the options say so.
            let starts_again = self.target.result.last.is_some_and(|last| block.sequence <= last);
            self.target.in_order(&block, starts_again)?;
            self.engine.fetch(buffer as usize, block.sequence)?;
            self.cursor.advance(self.engine.reader());
            self.pace.advance(Instant::now());
            progress = true;
        }
        Ok(progress)
    }

    /// Starts the work on blocks that the drives have read. Returns whether there was any.
    fn collect(&mut self) -> Result<bool> {
        let done = self.engine.progress();
        let progress = !done.is_empty();
        for fetched in done {
            let sequence = fetched.block.sequence;
            let drive = &fetched.drive;
            fetched
                .result
                .with_context(|| format!("reading block {sequence} from {}", self.local.describe(drive)))?;
            self.target.start(fetched.buffer as u32, fetched.block)?;
        }
        Ok(progress)
    }
}
