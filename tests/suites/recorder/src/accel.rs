// SPDX-License-Identifier: MIT OR Apache-2.0

//! The emulated accelerator as the source or the target of blocks: its rings of work generate signals, transform them, and
//! compute checksums.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use p2pmem_accel_regs::Op;
use p2pmem_accel_regs::driver::{Accel, Ring, RingOptions};
use p2pmem_accel_regs::ring::{Entry, Place};
use p2pmem_async_suite::hardware::{AccelMemory, Hardware};
use p2pmem_recorder::client::compute::{Compute, Computed, POINTS, Registered, Role, VECTOR};
use p2pmem_verbs::{Access, BufferMemory, Domain, HostMemory, Span};

/// Entries of a ring.
const RING_ENTRIES: u32 = 256;
/// The time limit of a poll, which no entry is.
const RING_LIMIT: Duration = Duration::from_secs(1);
/// The number of different signals. Blocks also differ in their first number.
const SIGNALS: u64 = 4;
/// Bytes of the result of an entry.
const RESULT: u64 = 16;

/// The accelerator's rings that a session uses.
#[derive(Debug, Clone, Copy)]
pub struct Rings {
    /// The first ring.
    pub first: u32,
    /// The number of rings. Buffers take turns, so the work of different buffers is concurrent.
    pub count: u32,
}

struct Worker {
    ring: Ring<Arc<Accel>, AccelMemory>,
    /// The place of the result for buffer 0, behind the ring. The others follow.
    results: u64,
    /// The last entry of each piece of work in progress, and its buffer.
    working: VecDeque<(u32, u32)>,
}

/// Where the NIC accesses blocks.
enum NicMemory {
    /// In the accelerator.
    Accelerator,
    /// In host memory: the processor copies each block. For comparison.
    Host(Span),
}

/// The emulated accelerator.
pub struct AccelCompute {
    role: Role,
    block_size: u64,
    buffers: u32,
    workers: Vec<Worker>,
    /// Signals, from which a source makes blocks.
    signals: Option<AccelMemory>,
    inputs: AccelMemory,
    outputs: AccelMemory,
    nic_memory: NicMemory,
    copied: AtomicU64,
}

/// Returns the signal of a number: in each vector the sum of two waves and a ramp, so that all its numbers differ.
fn signal(number: u64, numbers: usize) -> Vec<f32> {
    let vectors = numbers / (2 * POINTS);
    let value = |vector: usize, at: usize| {
        let angle = |frequency: usize| std::f32::consts::TAU * ((frequency * at) % POINTS) as f32 / POINTS as f32;
        let (first, second) = (1 + vector % 500, 3 + 2 * number as usize);
        let (s, c) = angle(first).sin_cos();
        let (t, d) = angle(second).sin_cos();
        [c + 0.5 * d + at as f32 / POINTS as f32, s + 0.5 * t]
    };
    (0..vectors)
        .flat_map(|vector| (0..POINTS).flat_map(move |at| value(vector, at)))
        .collect()
}

impl AccelCompute {
    /// Allocates memory of the accelerator, and starts its rings. With `staged`, the NIC accesses host memory.
    ///
    /// # Errors
    ///
    /// Those of the allocations and of the rings.
    pub fn new(
        hardware: &Hardware,
        role: Role,
        block_size: u64,
        buffers: u32,
        rings: Rings,
        staged: bool,
    ) -> Result<Self> {
        ensure!(
            block_size % VECTOR as u64 == 0 && buffers > 0 && rings.count > 0,
            "a block has a multiple of {VECTOR} bytes; at least one buffer and one ring are needed"
        );
        let pool = u64::from(buffers) * block_size;
        let mut workers = Vec::new();
        for number in rings.first..rings.first + rings.count {
            let area = RingOptions::area(RING_ENTRIES);
            let memory = hardware
                .memory(area + u64::from(buffers) * RESULT)
                .context("memory for a ring")?;
            let results = memory.offset + area;
            let options = RingOptions {
                poll_limit: RING_LIMIT,
                ..RingOptions::new(memory.offset, RING_ENTRIES)
            };
            let ring = Ring::new(hardware.accel.clone(), number, memory, options)?;
            let working = VecDeque::new();
            workers.push(Worker { ring, results, working });
        }
        let signals = match role {
            Role::Source => {
                let memory = hardware.memory(SIGNALS * block_size)?;
                for number in 0..SIGNALS {
                    let values = signal(number, block_size as usize / 4);
                    memory
                        .mapping
                        .copy_from_slice((number * block_size) as usize, &values)?;
                }
                memory.mapping.flush();
                Some(memory)
            }
            Role::Target => None,
        };
        Ok(Self {
            role,
            block_size,
            buffers,
            workers,
            signals,
            inputs: hardware.memory(pool)?,
            outputs: hardware.memory(pool)?,
            nic_memory: if staged {
                NicMemory::Host(Span::host(pool as usize)?)
            } else {
                NicMemory::Accelerator
            },
            copied: AtomicU64::new(0),
        })
    }

    /// Returns the bytes of host memory that the processor has read or written to copy blocks.
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    /// Returns the pool that the NIC accesses, or would access.
    fn nic_pool(&self) -> &AccelMemory {
        match self.role {
            Role::Source => &self.outputs,
            Role::Target => &self.inputs,
        }
    }

    fn at(&self, buffer: u32) -> u64 {
        u64::from(buffer) * self.block_size
    }

    /// Copies a block between the accelerator and the host memory that the NIC accesses.
    fn copy_staged(&self, buffer: u32) -> Result<()> {
        let NicMemory::Host(span) = &self.nic_memory else {
            return Ok(());
        };
        let at = self.at(buffer) as usize;
        let mut bytes = vec![0_u8; self.block_size as usize];
        let pool = &self.nic_pool().mapping;
        match self.role {
            Role::Source => {
                pool.copy_to_slice(at, &mut bytes)?;
                span.write(at, &bytes);
                span.flush();
            }
            Role::Target => {
                span.read(at, &mut bytes);
                pool.copy_from_slice(at, &bytes)?;
                pool.flush();
            }
        }
        self.copied.fetch_add(self.block_size, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the entries for the work on a block.
    fn entries(&self, buffer: u32, sequence: u64, result: u64) -> Vec<Entry> {
        let (size, at) = (self.block_size, self.at(buffer));
        let (input, output) = (self.inputs.offset + at, self.outputs.offset + at);
        let mut entries = Vec::new();
        if let Some(signals) = &self.signals {
            let from = signals.offset + sequence % SIGNALS * size;
            entries.push(Entry::new(Op::Copy, input, size, from));
            // The first number of the block. Every sequence number below 2^24 is an f32.
            let first = (sequence % (1 << 24)) as f32;
            entries.push(Entry::store64(Place::Memory(input), u64::from(first.to_bits())));
        }
        entries.push(Entry::new(Op::Copy, output, size, input));
        entries.push(Entry::fft(output, size, POINTS as u64));
        let sent = match self.role {
            Role::Source => output,
            Role::Target => input,
        };
        entries.push(Entry::new(Op::Crc32c, sent, size, 0).with_result(result));
        entries
    }
}

impl Compute for AccelCompute {
    fn buffers(&self) -> u32 {
        self.buffers
    }

    fn block_size(&self) -> u64 {
        self.block_size
    }

    fn register(&self, domain: &Arc<Domain>, access: Access) -> Result<Registered> {
        Ok(match &self.nic_memory {
            NicMemory::Accelerator => {
                let memory = BufferMemory::register(domain, &self.nic_pool().buffer, access)?;
                Registered {
                    address: memory.registration().addr(),
                    lkey: memory.registration().lkey(),
                    registration: Box::new(memory),
                }
            }
            NicMemory::Host(span) => {
                let memory = HostMemory::register(domain, span, access)?;
                Registered {
                    address: span.address(),
                    lkey: memory.keys().0,
                    registration: Box::new(memory),
                }
            }
        })
    }

    fn start(&mut self, buffer: u32, sequence: u64) -> Result<()> {
        if self.role == Role::Target {
            self.copy_staged(buffer)?;
        }
        let number = buffer as usize % self.workers.len();
        let result = self.workers[number].results + u64::from(buffer) * RESULT;
        let entries = self.entries(buffer, sequence, result);
        let worker = &mut self.workers[number];
        let mut last = 0;
        for entry in &entries {
            last = worker.ring.push(entry)?;
        }
        worker.ring.doorbell()?;
        worker.working.push_back((last, buffer));
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Computed>) -> Result<()> {
        let mut ended = Vec::new();
        for worker in &mut self.workers {
            worker.ring.refresh()?;
            let progress = worker.ring.progress()?;
            while let Some((_, buffer)) = worker.working.front().filter(|(last, _)| progress.has_completed(*last)) {
                let result = worker.ring.result(worker.results + u64::from(*buffer) * RESULT)?;
                let result = result.context("an entry has completed without a result")?;
                ended.push(Computed {
                    buffer: *buffer,
                    checksum: result.value as u32,
                });
                worker.working.pop_front();
            }
        }
        if self.role == Role::Source {
            ended.iter().try_for_each(|ended| self.copy_staged(ended.buffer))?;
        }
        done.extend(ended);
        Ok(())
    }

    fn copy(&self, buffer: u32, input: &mut [f32], output: &mut [f32]) -> Result<()> {
        let at = self.at(buffer) as usize;
        self.inputs.mapping.copy_to_slice(at, input)?;
        self.outputs.mapping.copy_to_slice(at, output)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use p2pmem_recorder::client::spectrum::Transform;

    use super::*;

    #[test]
    fn signals_differ_and_are_finite() {
        let signals: Vec<Vec<f32>> = (0..SIGNALS).map(|number| signal(number, 4 * POINTS)).collect();
        assert!(signals.iter().flatten().all(|value| value.is_finite()));
        assert!(signals.windows(2).all(|pair| pair[0] != pair[1]));
        let spectrum = Transform::default().forward(&signals[0]);
        // The two waves of vector 0 have frequencies 1 and 3.
        let power = |at: usize| spectrum[2 * at].hypot(spectrum[2 * at + 1]);
        assert!(power(1) > 500.0 && power(3) > 250.0 && power(600) < 50.0);
    }
}
