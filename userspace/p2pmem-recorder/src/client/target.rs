// SPDX-License-Identifier: MIT OR Apache-2.0

//! Where the blocks of a playback go: an accelerator, which transforms each and computes its checksum.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::compute::{Compute, Computed};
use super::{longest_wait, Verification, Verifier};
use crate::store::Block;

/// What was played.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Played {
    /// The number of blocks.
    pub blocks: u64,
    /// The number of the recording on each storage node.
    pub recordings: Vec<u64>,
    /// The memory of the blocks: that of the storage node, or that of the accelerator if drives access it.
    pub memory: String,
    /// Bytes of a block.
    pub block_size: u64,
    /// The sequence number of the first block.
    pub first: Option<u64>,
    /// The sequence number of the last block.
    pub last: Option<u64>,
    /// Sequence numbers between two blocks that followed each other, without a block.
    pub missing: u64,
    /// Nanoseconds from the start to the last block.
    pub nanoseconds: u64,
    /// Blocks whose spectrum was compared with what the processor computes.
    pub verified: u64,
    /// Storage nodes of a mirror that failed, with the reason. The others had all blocks that were played.
    pub failed: Vec<String>,
}

/// The target of a playback.
pub(crate) struct Target<'a> {
    compute: &'a mut dyn Compute,
    free: Vec<u32>,
    /// The block in each buffer on which there is work.
    content: Vec<Option<Block>>,
    computing: u32,
    computed: Vec<Computed>,
    verifier: Verifier,
    /// What was played so far.
    pub(crate) result: Played,
}

impl<'a> Target<'a> {
    /// Returns a target whose buffers are all free. `recordings` and `memory` are for the result.
    pub(crate) fn new(
        compute: &'a mut dyn Compute,
        verify: Verification,
        recordings: Vec<u64>,
        memory: String,
    ) -> Self {
        let (buffers, block_size) = (compute.buffers(), compute.block_size());
        Self {
            compute,
            free: (0..buffers).rev().collect(),
            content: vec![None; buffers as usize],
            computing: 0,
            computed: Vec::new(),
            verifier: Verifier::new(verify, block_size),
            result: Played {
                recordings,
                memory,
                block_size,
                ..Played::default()
            },
        }
    }

    /// Checks the order of a block that follows the one before, and counts sequence numbers without a block. `starts_again` says
    /// that the block is the first one again.
    ///
    /// # Errors
    ///
    /// The block does not follow.
    pub(crate) fn in_order(&mut self, block: &Block, starts_again: bool) -> Result<()> {
        if let Some(last) = self.result.last.filter(|_| !starts_again) {
            ensure!(block.sequence > last, "block {} follows block {last}", block.sequence);
            let between = block.sequence - last - 1;
            self.result.missing = self.result.missing.saturating_add(between);
        }
        self.result.first.get_or_insert(block.sequence);
        self.result.last = Some(block.sequence);
        Ok(())
    }

    /// Takes a free buffer, for a block.
    pub(crate) fn take_buffer(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Whether a buffer is free.
    pub(crate) fn has_buffer(&self) -> bool {
        !self.free.is_empty()
    }

    /// Starts the work on a block that is in its buffer.
    ///
    /// # Errors
    ///
    /// The accelerator refuses the work.
    pub(crate) fn start(&mut self, buffer: u32, block: Block) -> Result<()> {
        self.content[buffer as usize] = Some(block);
        self.compute
            .start(buffer, block.sequence)
            .context("starting work of the accelerator")?;
        self.computing += 1;
        Ok(())
    }

    /// Checks blocks on which the work has ended, and frees their buffers. Returns whether there was any.
    ///
    /// # Errors
    ///
    /// The accelerator failed. The checksum of a block, or the spectrum of a verified block, is wrong.
    pub(crate) fn take_work(&mut self) -> Result<bool> {
        self.computed.clear();
        self.compute
            .poll(&mut self.computed)
            .context("the accelerator failed")?;
        for done in &self.computed {
            let block = self.content[done.buffer as usize].take();
            let Block { sequence, checksum, .. } = block.context("work on a buffer without a block")?;
            ensure!(
                done.checksum == checksum,
                "block {sequence} has the checksum {:#010x}, and {checksum:#010x} was recorded",
                done.checksum
            );
            self.verifier
                .verify(self.compute, done.buffer, self.result.blocks, sequence)?;
            self.result.verified = self.verifier.verified;
            self.computing -= 1;
            self.result.blocks += 1;
            self.free.push(done.buffer);
        }
        Ok(!self.computed.is_empty())
    }

    /// Returns the number of blocks on which there is work.
    pub(crate) fn computing(&self) -> u32 {
        self.computing
    }

    /// Returns the event of the accelerator.
    pub(crate) fn event(&self) -> Option<BorrowedFd<'_>> {
        self.compute.event()
    }

    /// Returns how long to wait at most, until the accelerator has to be looked at.
    pub(crate) fn longest_wait(&self) -> Duration {
        longest_wait(self.compute, self.computing)
    }
}
