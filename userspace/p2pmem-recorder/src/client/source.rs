// SPDX-License-Identifier: MIT OR Apache-2.0

//! The blocks of a recording: an accelerator computes them in its buffers, at a rate, and they are taken in the order of their
//! sequence numbers.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::compute::{Compute, Computed};
use super::{longest_wait, now, Verification, Verifier};
use crate::pace::Pace;
use crate::store::Block;

/// Which blocks a source has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SourceOptions {
    /// The sequence number of the first block.
    pub first: u64,
    /// The number of blocks.
    pub blocks: u64,
    /// The most bytes in a second; `None` for no limit.
    pub rate: Option<u64>,
    /// Which blocks are verified.
    pub verify: Verification,
}

/// The source of a recording.
pub(crate) struct Source<'a> {
    compute: &'a mut dyn Compute,
    first: u64,
    next: u64,
    end: u64,
    pace: Pace,
    free: Vec<u32>,
    /// The sequence number of the block in a buffer.
    sequences: Vec<u64>,
    computing: u32,
    computed: Vec<Computed>,
    /// Blocks that are computed and not taken, by sequence number.
    ready: BTreeMap<u64, (u32, Block)>,
    next_to_take: u64,
    verifier: Verifier,
}

impl<'a> Source<'a> {
    /// Returns a source whose buffers are all free.
    ///
    /// # Errors
    ///
    /// The sequence numbers exceed 64 bits.
    pub(crate) fn new(compute: &'a mut dyn Compute, options: SourceOptions) -> Result<Self> {
        let block_size = compute.block_size();
        let end = options.first.checked_add(options.blocks);
        Ok(Self {
            free: (0..compute.buffers()).rev().collect(),
            sequences: vec![0; compute.buffers() as usize],
            compute,
            first: options.first,
            next: options.first,
            end: end.context("the sequence numbers exceed 64 bits")?,
            pace: Pace::new(options.rate, block_size, Instant::now()),
            computing: 0,
            computed: Vec::new(),
            ready: BTreeMap::new(),
            next_to_take: options.first,
            verifier: Verifier::new(options.verify, block_size),
        })
    }

    /// Starts the work on free buffers, and handles work that has ended. Returns whether there was any.
    ///
    /// # Errors
    ///
    /// The accelerator failed, or a verified block is wrong.
    pub(crate) fn advance(&mut self) -> Result<bool> {
        let started = self.start_work()?;
        Ok(self.take_work()? || started)
    }

    fn start_work(&mut self) -> Result<bool> {
        let mut progress = false;
        while self.next < self.end && self.pace.delay(Instant::now()).is_zero() {
            let Some(buffer) = self.free.pop() else { break };
            self.sequences[buffer as usize] = self.next;
            self.compute
                .start(buffer, self.next)
                .context("starting work of the accelerator")?;
            self.pace.advance(Instant::now());
            self.next += 1;
            self.computing += 1;
            progress = true;
        }
        Ok(progress)
    }

    fn take_work(&mut self) -> Result<bool> {
        self.computed.clear();
        self.compute
            .poll(&mut self.computed)
            .context("the accelerator failed")?;
        for done in &self.computed {
            self.computing -= 1;
            let sequence = self.sequences[done.buffer as usize];
            let number = sequence - self.first;
            self.verifier.verify(self.compute, done.buffer, number, sequence)?;
            let block = Block {
                sequence,
                time: now(),
                checksum: done.checksum,
            };
            self.ready.insert(sequence, (done.buffer, block));
        }
        Ok(!self.computed.is_empty())
    }

    /// Returns the sequence number of the next block, if it is computed.
    pub(crate) fn peek(&self) -> Option<u64> {
        self.ready.contains_key(&self.next_to_take).then_some(self.next_to_take)
    }

    /// Takes the next block and its buffer, if it is computed.
    pub(crate) fn take(&mut self) -> Option<(u32, Block)> {
        let taken = self.ready.remove(&self.next_to_take)?;
        self.next_to_take += 1;
        Some(taken)
    }

    /// A buffer that was taken can be used for another block.
    pub(crate) fn release(&mut self, buffer: u32) {
        self.free.push(buffer);
    }

    /// Begins no further block. Those that were begun remain.
    pub(crate) fn stop(&mut self) {
        self.end = self.next;
    }

    /// Returns the number of blocks.
    pub(crate) fn total(&self) -> u64 {
        self.end - self.first
    }

    /// Returns the sequence number of the block in a buffer.
    pub(crate) fn sequence(&self, buffer: u32) -> u64 {
        self.sequences[buffer as usize]
    }

    /// Returns the number of blocks that are being computed.
    pub(crate) fn computing(&self) -> u32 {
        self.computing
    }

    /// Returns the number of verified blocks.
    pub(crate) fn verified(&self) -> u64 {
        self.verifier.verified
    }

    /// Returns the time between two blocks at the rate.
    pub(crate) fn interval(&self) -> Duration {
        self.pace.interval()
    }

    /// Returns the event of the accelerator.
    pub(crate) fn event(&self) -> Option<BorrowedFd<'_>> {
        self.compute.event()
    }

    /// Returns how long to wait at most, until the accelerator has to be looked at or the next block may begin.
    pub(crate) fn longest_wait(&self) -> Duration {
        let limit = longest_wait(self.compute, self.computing);
        if self.free.is_empty() || self.next == self.end {
            return limit;
        }
        match self.pace.delay(Instant::now()) {
            Duration::ZERO => limit,
            delay => limit.min(delay),
        }
    }
}
