// SPDX-License-Identifier: MIT OR Apache-2.0

//! Executes operations on the accelerator's memory, and DMA, no matter where an operation comes from.
//!
//! Operations work on copies of chunks, because the guest may change the memory at any time, so the memory cannot be
//! borrowed. Between chunks, an operation checks whether it was aborted.

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use num_complex::Complex32;
use p2pmem_accel_regs::ring::Place;
use p2pmem_accel_regs::{self as regs, Counter, FFT_POINTS, Op, Status, flags, pattern_word};
use p2pmem_fft::Planner;
use p2pmem_vfio_user::{DmaError, Memory, Target};
use tracing::{debug, warn};

use super::Shared;
use super::arithmetic;
use super::backoff::Pause;
use super::port::Port;
use super::queue::Command;

/// Bytes per chunk.
const CHUNK_SIZE: u64 = 1 << 20;

/// What an operation needs from its source.
pub(super) struct Job<'a> {
    pub(super) port: &'a Port,
    /// Maximum time of a poll.
    pub(super) poll_limit: Duration,
    /// Returns whether the operation was aborted.
    pub(super) aborted: &'a dyn Fn() -> bool,
}

impl Job<'_> {
    /// Fails with [`Status::Aborted`] if the operation was aborted.
    fn check(&self) -> Result<(), Status> {
        if (self.aborted)() { Err(Status::Aborted) } else { Ok(()) }
    }
}

/// Executes operations of one source, one after another.
pub(super) struct Executor<'a> {
    shared: &'a Shared,
    planner: Planner,
    buffer: Vec<u8>,
    operand: Vec<u8>,
}

/// A range within the accelerator's memory.
#[derive(Clone, Copy)]
struct Range {
    start: u64,
    len: u64,
}

impl Range {
    fn new(memory: &Memory, start: u64, len: u64) -> Result<Self, Status> {
        if len == 0 {
            return Err(Status::BadLength);
        }
        match start.checked_add(len) {
            Some(end) if end <= memory.len() => Ok(Self { start, len }),
            _ => Err(Status::BadRange),
        }
    }

    fn overlaps(self, other: Range) -> bool {
        self.start < other.start + other.len && other.start < self.start + self.len
    }
}

/// Returns the place of an operation, which must be aligned to `width` and, in BAR2, in range.
fn place(memory: &Memory, command: &Command, width: u64) -> Result<Place, Status> {
    if command.offset % width != 0 {
        return Err(Status::BadAlignment);
    }
    if command.flags & flags::BUS != 0 {
        return Ok(Place::Bus(command.offset));
    }
    Range::new(memory, command.offset, width).map(|range| Place::Memory(range.start))
}

/// Returns an argument that must have 32 bits.
fn word(argument: u64) -> Result<u32, Status> {
    u32::try_from(argument).map_err(|_| Status::BadArgument)
}

impl<'a> Executor<'a> {
    pub(super) fn new(shared: &'a Shared) -> Self {
        Self {
            shared,
            planner: Planner::default(),
            buffer: Vec::new(),
            operand: Vec::new(),
        }
    }

    /// Executes an operation, and returns its result.
    pub(super) fn execute(&mut self, job: &Job<'_>, command: &Command) -> Result<u64, Status> {
        let op = Op::from_u32(command.op).ok_or(Status::BadOperation)?;
        if command.flags & !op.flags() != 0 {
            return Err(Status::BadOperation);
        }
        let vector = (command.flags & flags::VECTOR) >> flags::VECTOR_SHIFT;
        if command.flags & flags::INTERRUPT != 0 && vector >= u32::from(regs::MSIX_VECTORS) {
            return Err(Status::BadArgument);
        }
        job.check()?;
        let memory = self.shared.memory();
        let argument = command.argument;
        let range = || Range::new(memory, command.offset, command.length);
        let source = || Range::new(memory, argument, command.length);
        match op {
            Op::Nop => Ok(0),
            Op::Fill => self.fill(job, range()?, |_| argument),
            Op::Pattern => self.fill(job, range()?, |index| pattern_word(argument, index)),
            Op::Copy => {
                let to = range()?;
                self.copy(job, source()?, to)
            }
            Op::Crc32c => self.crc32c(job, range()?),
            Op::Fft => self.fft(job, range()?, argument, command.flags & flags::INVERSE != 0),
            Op::AddF32 => {
                let to = range()?;
                self.combine(job, to, source()?, arithmetic::add_f32)
            }
            Op::AddBf16 => {
                let to = range()?;
                self.combine(job, to, source()?, arithmetic::add_bf16)
            }
            Op::MaxF32 => {
                let to = range()?;
                self.combine(job, to, source()?, arithmetic::max_f32)
            }
            Op::MaxBf16 => {
                let to = range()?;
                self.combine(job, to, source()?, arithmetic::max_bf16)
            }
            Op::DmaIn | Op::DmaOut => self.dma(job, op, range()?, argument),
            Op::Fence => {
                // A store by message has ended when its reply has arrived. Stores to memory are in program order for
                // this host's other threads after this.
                fence(Ordering::SeqCst);
                Ok(0)
            }
            Op::Store32 => {
                let value = word(argument)?;
                self.store_word(job, op, place(memory, command, 4)?, &value.to_le_bytes())
            }
            Op::Store64 => self.store_word(job, op, place(memory, command, 8)?, &argument.to_le_bytes()),
            Op::CopyBlock => self.copy_block(job, command),
            Op::PollAnd | Op::PollNor | Op::PollGeq => {
                let value = word(argument)?;
                self.poll(job, op, place(memory, command, 4)?, value)
            }
            Op::Timestamp => self.timestamp(command.offset, argument),
        }
    }

    /// Calls `step` with start and length of each chunk of `range`. Fails with [`Status::Aborted`] if the command is
    /// aborted.
    fn for_each_chunk(
        &mut self,
        job: &Job<'_>,
        range: Range,
        chunk_size: u64,
        mut step: impl FnMut(&mut Self, u64, usize) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let mut done = 0;
        while done < range.len {
            job.check()?;
            let len = chunk_size.min(range.len - done);
            // Not truncated: a chunk has a few megabytes.
            step(self, range.start + done, len as usize)?;
            done += len;
        }
        Ok(())
    }

    fn load(&self, at: u64, buffer: &mut Vec<u8>, len: usize) -> Result<(), Status> {
        buffer.resize(len, 0);
        self.shared.memory().read(at, buffer).map_err(|_| Status::BadRange)?;
        self.shared.counters.add(Counter::ComputeRead, len as u64);
        Ok(())
    }

    fn store(&self, at: u64, data: &[u8]) -> Result<(), Status> {
        self.shared.memory().write(at, data).map_err(|_| Status::BadRange)?;
        self.shared.counters.add(Counter::ComputeWritten, data.len() as u64);
        Ok(())
    }

    fn fill(&mut self, job: &Job<'_>, range: Range, word: impl Fn(u64) -> u64) -> Result<u64, Status> {
        self.for_each_chunk(job, range, CHUNK_SIZE, |this, at, len| {
            let mut buffer = std::mem::take(&mut this.buffer);
            buffer.resize(len, 0);
            let first = (at - range.start) / 8;
            for (i, chunk) in buffer.chunks_mut(8).enumerate() {
                let bytes = word(first + i as u64).to_le_bytes();
                chunk.copy_from_slice(&bytes[..chunk.len()]);
            }
            let result = this.store(at, &buffer);
            this.buffer = buffer;
            result
        })?;
        Ok(0)
    }

    fn copy(&mut self, job: &Job<'_>, from: Range, to: Range) -> Result<u64, Status> {
        // Copy in the order that reads each chunk of an overlapping source before it is overwritten.
        let chunks = to.len.div_ceil(CHUNK_SIZE);
        let backwards = to.start > from.start;
        for i in 0..chunks {
            job.check()?;
            let at = if backwards { chunks - 1 - i } else { i } * CHUNK_SIZE;
            let len = CHUNK_SIZE.min(to.len - at);
            let result = self.shared.memory().copy_within(from.start + at, to.start + at, len);
            result.map_err(|_| Status::BadRange)?;
            self.shared.counters.add(Counter::ComputeRead, len);
            self.shared.counters.add(Counter::ComputeWritten, len);
        }
        Ok(0)
    }

    fn crc32c(&mut self, job: &Job<'_>, range: Range) -> Result<u64, Status> {
        let mut crc = 0;
        self.for_each_chunk(job, range, CHUNK_SIZE, |this, at, len| {
            let mut buffer = std::mem::take(&mut this.buffer);
            let result = this.load(at, &mut buffer, len);
            crc = crc32c::crc32c_append(crc, &buffer);
            this.buffer = buffer;
            result
        })?;
        Ok(crc.into())
    }

    fn fft(&mut self, job: &Job<'_>, range: Range, points: u64, inverse: bool) -> Result<u64, Status> {
        if !points.is_power_of_two() || !FFT_POINTS.contains(&points) {
            return Err(Status::BadArgument);
        }
        let vector = points * 8;
        if range.start % 8 != 0 {
            return Err(Status::BadAlignment);
        }
        if range.len % vector != 0 {
            return Err(Status::BadLength);
        }
        // Not truncated: checked above.
        let points = points as usize;
        let fft = self.planner.plan(points, inverse);
        let scale = if inverse { 1.0 / points as f32 } else { 1.0 };
        let mut scratch = vec![Complex32::default(); fft.get_inplace_scratch_len()];
        let mut samples: Vec<Complex32> = Vec::new();
        self.for_each_chunk(job, range, CHUNK_SIZE.max(vector), |this, at, len| {
            let mut buffer = std::mem::take(&mut this.buffer);
            this.load(at, &mut buffer, len)?;
            samples.clear();
            samples.extend(buffer.chunks_exact(8).map(|bytes| {
                let part = |i: usize| f32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
                Complex32::new(part(0), part(4))
            }));
            fft.process_with_scratch(&mut samples, &mut scratch);
            for (bytes, sample) in buffer.chunks_exact_mut(8).zip(&samples) {
                let sample = sample * scale;
                bytes[..4].copy_from_slice(&sample.re.to_le_bytes());
                bytes[4..].copy_from_slice(&sample.im.to_le_bytes());
            }
            let result = this.store(at, &buffer);
            this.buffer = buffer;
            result
        })?;
        Ok(0)
    }

    /// Replaces each element of `to`, of `N` bytes, by the result of `operation` of this element and of that of `from`.
    fn combine<const N: usize>(
        &mut self,
        job: &Job<'_>,
        to: Range,
        from: Range,
        operation: impl Fn([u8; N], [u8; N]) -> [u8; N],
    ) -> Result<u64, Status> {
        let size = N as u64;
        if to.start % size != 0 || from.start % size != 0 {
            return Err(Status::BadAlignment);
        }
        if to.len % size != 0 {
            return Err(Status::BadLength);
        }
        if to.overlaps(from) {
            return Err(Status::BadArgument);
        }
        self.for_each_chunk(job, to, CHUNK_SIZE, |this, at, len| {
            let mut into = std::mem::take(&mut this.buffer);
            let mut operand = std::mem::take(&mut this.operand);
            this.load(at, &mut into, len)?;
            this.load(from.start + (at - to.start), &mut operand, len)?;
            for (a, b) in into.chunks_exact_mut(N).zip(operand.chunks_exact(N)) {
                let (mut left, mut right) = ([0; N], [0; N]);
                left.copy_from_slice(a);
                right.copy_from_slice(b);
                a.copy_from_slice(&operation(left, right));
            }
            let result = this.store(at, &into);
            this.buffer = into;
            this.operand = operand;
            result
        })?;
        Ok(0)
    }

    fn dma(&mut self, job: &Job<'_>, op: Op, range: Range, address: u64) -> Result<u64, Status> {
        if range.len > regs::DMA_MAX {
            return Err(Status::BadLength);
        }
        if address.checked_add(range.len - 1).is_none() {
            return Err(Status::BadArgument);
        }
        let memory = self.shared.memory();
        let dma = &job.port.data;
        let before = dma.counts();
        let result = match op {
            Op::DmaIn => dma.read_into(address, memory, range.start, range.len),
            _ => dma.write_from(address, memory, range.start, range.len),
        };
        // Bytes that were moved before an error count too. The bus counts them.
        let after = dma.counts();
        let read = (after.host_read + after.peer_read + after.message_read)
            .saturating_sub(before.host_read + before.peer_read + before.message_read);
        let written = (after.host_written + after.peer_written + after.message_written)
            .saturating_sub(before.host_written + before.peer_written + before.message_written);
        self.shared.counters.add(Counter::EngineWritten, read);
        self.shared.counters.add(Counter::EngineRead, written);
        result.map(|()| range.len).map_err(|error| failed(op, &error))
    }

    /// Stores 4 or 8 bytes to an aligned place as one access.
    fn store_word(&self, job: &Job<'_>, op: Op, to: Place, data: &[u8]) -> Result<u64, Status> {
        match to {
            Place::Memory(offset) => self.shared.store_control(offset, data)?,
            Place::Bus(address) => {
                let result = job.port.data.write(address, data);
                result.map_err(|error| failed(op, &error))?;
            }
        }
        self.shared.counters.add(Counter::Stores, 1);
        Ok(0)
    }

    fn copy_block(&mut self, job: &Job<'_>, command: &Command) -> Result<u64, Status> {
        let memory = self.shared.memory();
        let len = command.length;
        if len == 0 || len > regs::BLOCK_MAX {
            return Err(Status::BadLength);
        }
        let side = |address: u64, bus: u32| match command.flags & bus {
            0 => Range::new(memory, address, len).map(|range| Place::Memory(range.start)),
            _ if address.checked_add(len - 1).is_none() => Err(Status::BadArgument),
            _ => Ok(Place::Bus(address)),
        };
        let from = side(command.argument, flags::SOURCE_BUS)?;
        let to = side(command.offset, flags::BUS)?;
        // Not truncated: at most `BLOCK_MAX`.
        self.buffer.resize(len as usize, 0);
        let counters = &self.shared.counters;
        match from {
            Place::Memory(offset) => {
                memory.read(offset, &mut self.buffer).map_err(|_| Status::BadRange)?;
                counters.add(Counter::EngineRead, len);
            }
            Place::Bus(address) => {
                let result = job.port.data.read(address, &mut self.buffer);
                result.map_err(|error| failed(Op::CopyBlock, &error))?;
            }
        }
        match to {
            Place::Memory(offset) => {
                memory.write(offset, &self.buffer).map_err(|_| Status::BadRange)?;
                counters.add(Counter::EngineWritten, len);
            }
            Place::Bus(address) => {
                let result = job.port.data.write(address, &self.buffer);
                result.map_err(|error| failed(Op::CopyBlock, &error))?;
            }
        }
        Ok(len)
    }

    /// Reads the word at an aligned place until the condition of `op` is true. Returns the word.
    fn poll(&self, job: &Job<'_>, op: Op, at: Place, value: u32) -> Result<u64, Status> {
        let start = Instant::now();
        let mut message = None;
        loop {
            let mut bytes = [0; 4];
            match at {
                Place::Memory(offset) => {
                    let result = self.shared.memory().read(offset, &mut bytes);
                    result.map_err(|_| Status::BadRange)?;
                }
                Place::Bus(address) => {
                    let result = job.port.polls.read(address, &mut bytes);
                    result.map_err(|error| failed(op, &error))?;
                }
            }
            let word = u32::from_le_bytes(bytes);
            if op.is_true(word, value) == Some(true) {
                self.shared.counters.add(Counter::Polls, 1);
                if let Place::Memory(_) = at {
                    self.shared.counters.add(Counter::ControlRead, 4);
                }
                return Ok(word.into());
            }
            self.shared.counters.add(Counter::PollRetries, 1);
            job.check()?;
            let waited = start.elapsed();
            if waited >= job.poll_limit {
                return Err(Status::TimedOut);
            }
            let message = *message.get_or_insert_with(|| match at {
                Place::Memory(_) => false,
                Place::Bus(address) => {
                    let segments = job.port.polls.segments(address, 4);
                    segments.is_ok_and(|all| all.iter().any(|segment| segment.target == Target::Message))
                }
            });
            Pause::after(waited, job.poll_limit, message).wait();
        }
    }

    fn timestamp(&self, offset: u64, tag: u64) -> Result<u64, Status> {
        if offset % 8 != 0 {
            return Err(Status::BadAlignment);
        }
        let range = Range::new(self.shared.memory(), offset, regs::TIMESTAMP_SIZE)?;
        let clock = self.shared.clock();
        self.shared.store_control(range.start, &clock.to_le_bytes())?;
        self.shared.store_control(range.start + 8, &tag.to_le_bytes())?;
        Ok(clock)
    }
}

/// Logs an error of the bus, and returns the status for it.
pub(super) fn failed(what: impl std::fmt::Debug, error: &DmaError) -> Status {
    if *error == DmaError::Aborted {
        debug!(?what, "DMA was aborted");
    } else {
        warn!(%error, ?what, "DMA failed");
    }
    match error {
        DmaError::BusMasterOff => Status::BusMasterOff,
        DmaError::Unreachable(_) | DmaError::Disconnected => Status::Unreachable,
        DmaError::Denied(_) => Status::Denied,
        DmaError::Timeout(_) => Status::Timeout,
        DmaError::Failed(..) | DmaError::WrongThread => Status::Unreachable,
        DmaError::Aborted => Status::Aborted,
        DmaError::Local(_) | DmaError::Misaligned(_) => Status::BadRange,
    }
}
