// SPDX-License-Identifier: MIT OR Apache-2.0

//! The worker: executes commands on the accelerator's memory, and DMA.
//!
//! Commands work on copies of chunks, because the guest may change the memory at any time, so the memory cannot be
//! borrowed. Between chunks, a command checks whether it was aborted.

use num_complex::Complex32;
use p2pmem_accel_regs::{self as regs, Counter, FFT_POINTS, Op, Status, flags, pattern_word};
use p2pmem_fft::Planner;
use p2pmem_vfio_user::{Dma, DmaError, Memory, Raised};
use tracing::{debug, warn};

use super::Shared;
use super::queue::Command;

/// Bytes per chunk.
const CHUNK_SIZE: u64 = 1 << 20;

/// Executes commands until the queue is stopped.
pub(super) fn run(shared: &Shared) {
    let mut worker = Worker {
        shared,
        planner: Planner::default(),
        buffer: Vec::new(),
        operand: Vec::new(),
    };
    while let Some((number, command, dma)) = shared.queue.take(|| shared.bus.dma.pinned()) {
        let result = worker.execute(number, &command, &dma);
        let (status, value) = match result {
            Ok(value) => (Status::Ok, value),
            Err(status) => (status, 0),
        };
        debug!(number, ?command, %status, value, "command completed");
        let counter = if status == Status::Ok {
            Counter::CommandsOk
        } else {
            Counter::CommandsFailed
        };
        shared.counters.add(counter, 1);
        let may_interrupt = shared.queue.finish(number, status, value);
        if may_interrupt && command.flags & flags::INTERRUPT != 0 {
            let vector = ((command.flags >> flags::VECTOR_SHIFT) & 0xff) as u16;
            match shared.bus.irqs.raise(vector) {
                Raised::Delivered | Raised::Latched => shared.counters.add(Counter::Interrupts, 1),
                Raised::Dropped | Raised::NoVector => debug!(vector, "interrupt not delivered"),
            }
        }
    }
}

struct Worker<'a> {
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

impl Worker<'_> {
    fn execute(&mut self, number: u64, command: &Command, dma: &Dma) -> Result<u64, Status> {
        let op = Op::from_u32(command.op).ok_or(Status::BadOperation)?;
        if command.flags & !flags::KNOWN != 0 || command.flags & flags::INVERSE != 0 && op != Op::Fft {
            return Err(Status::BadOperation);
        }
        let vector = (command.flags >> flags::VECTOR_SHIFT) & 0xff;
        if command.flags & flags::INTERRUPT != 0 && vector >= u32::from(regs::MSIX_VECTORS) {
            return Err(Status::BadArgument);
        }
        if self.shared.queue.is_aborted(number) {
            return Err(Status::Aborted);
        }
        if op == Op::Nop {
            return Ok(0);
        }
        let memory = self.shared.memory();
        let range = Range::new(memory, command.offset, command.length)?;
        let argument = command.argument;
        match op {
            Op::Nop => Ok(0),
            Op::Fill => self.fill(number, range, |_| argument),
            Op::Pattern => self.fill(number, range, |index| pattern_word(argument, index)),
            Op::Copy => {
                let from = Range::new(memory, argument, command.length)?;
                self.copy(number, from, range)
            }
            Op::Crc32c => self.crc32c(number, range),
            Op::Fft => self.fft(number, range, argument, command.flags & flags::INVERSE != 0),
            Op::AddF32 => {
                let from = Range::new(memory, argument, command.length)?;
                self.add_f32(number, range, from)
            }
            Op::DmaIn | Op::DmaOut => self.dma(dma, op, range, argument),
        }
    }

    /// Calls `step` with start and length of each chunk of `range`. Fails with [`Status::Aborted`] if the command is
    /// aborted.
    fn for_each_chunk(
        &mut self,
        number: u64,
        range: Range,
        chunk_size: u64,
        mut step: impl FnMut(&mut Self, u64, usize) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let mut done = 0;
        while done < range.len {
            if self.shared.queue.is_aborted(number) {
                return Err(Status::Aborted);
            }
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

    fn fill(&mut self, number: u64, range: Range, word: impl Fn(u64) -> u64) -> Result<u64, Status> {
        self.for_each_chunk(number, range, CHUNK_SIZE, |this, at, len| {
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

    fn copy(&mut self, number: u64, from: Range, to: Range) -> Result<u64, Status> {
        // Copy in the order that reads each chunk of an overlapping source before it is overwritten.
        let chunks = to.len.div_ceil(CHUNK_SIZE);
        let backwards = to.start > from.start;
        for i in 0..chunks {
            if self.shared.queue.is_aborted(number) {
                return Err(Status::Aborted);
            }
            let at = if backwards { chunks - 1 - i } else { i } * CHUNK_SIZE;
            let len = CHUNK_SIZE.min(to.len - at);
            let result = self.shared.memory().copy_within(from.start + at, to.start + at, len);
            result.map_err(|_| Status::BadRange)?;
            self.shared.counters.add(Counter::ComputeRead, len);
            self.shared.counters.add(Counter::ComputeWritten, len);
        }
        Ok(0)
    }

    fn crc32c(&mut self, number: u64, range: Range) -> Result<u64, Status> {
        let mut crc = 0;
        self.for_each_chunk(number, range, CHUNK_SIZE, |this, at, len| {
            let mut buffer = std::mem::take(&mut this.buffer);
            let result = this.load(at, &mut buffer, len);
            crc = crc32c::crc32c_append(crc, &buffer);
            this.buffer = buffer;
            result
        })?;
        Ok(crc.into())
    }

    fn fft(&mut self, number: u64, range: Range, points: u64, inverse: bool) -> Result<u64, Status> {
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
        self.for_each_chunk(number, range, CHUNK_SIZE.max(vector), |this, at, len| {
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

    fn add_f32(&mut self, number: u64, to: Range, from: Range) -> Result<u64, Status> {
        if to.start % 4 != 0 || from.start % 4 != 0 {
            return Err(Status::BadAlignment);
        }
        if to.len % 4 != 0 {
            return Err(Status::BadLength);
        }
        if to.overlaps(from) {
            return Err(Status::BadArgument);
        }
        self.for_each_chunk(number, to, CHUNK_SIZE, |this, at, len| {
            let mut sum = std::mem::take(&mut this.buffer);
            let mut add = std::mem::take(&mut this.operand);
            this.load(at, &mut sum, len)?;
            this.load(from.start + (at - to.start), &mut add, len)?;
            for (a, b) in sum.chunks_exact_mut(4).zip(add.chunks_exact(4)) {
                let value = f32::from_le_bytes([a[0], a[1], a[2], a[3]]) + f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                a.copy_from_slice(&value.to_le_bytes());
            }
            let result = this.store(at, &sum);
            this.buffer = sum;
            this.operand = add;
            result
        })?;
        Ok(0)
    }

    fn dma(&mut self, dma: &Dma, op: Op, range: Range, address: u64) -> Result<u64, Status> {
        if range.len > regs::DMA_MAX {
            return Err(Status::BadLength);
        }
        if address.checked_add(range.len - 1).is_none() {
            return Err(Status::BadArgument);
        }
        let memory = self.shared.memory();
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
        result.map(|()| range.len).map_err(|error| {
            warn!(%error, ?op, "DMA failed");
            match error {
                DmaError::BusMasterOff => Status::BusMasterOff,
                DmaError::Unreachable(_) | DmaError::Disconnected => Status::Unreachable,
                DmaError::Denied(_) => Status::Denied,
                DmaError::Timeout(_) => Status::Timeout,
                DmaError::Failed(..) | DmaError::WrongThread => Status::Unreachable,
                DmaError::Aborted => Status::Aborted,
                DmaError::Local(_) | DmaError::Misaligned(_) => Status::BadRange,
            }
        })
    }
}
