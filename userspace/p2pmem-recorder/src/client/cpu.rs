// SPDX-License-Identifier: MIT OR Apache-2.0

//! A processor that computes blocks in place of an accelerator, and stores them in device memory or host memory.

use std::f32::consts::TAU;
use std::sync::Arc;

use anyhow::{ensure, Result};
use p2pmem_verbs::{Access, Domain};

use super::compute::{Compute, Computed, Registered, Role, POINTS, VECTOR};
use super::spectrum::Transform;
use crate::memory::BlockMemory;
use crate::rdma::RegisteredBlocks;

/// The processor as the source or the target of blocks.
#[derive(Debug)]
pub struct Cpu {
    role: Role,
    /// The memory that the NIC or drives access.
    blocks: Arc<BlockMemory>,
    /// The other pool: signals of a source, spectra of a target.
    other: Vec<Vec<f32>>,
    transform: Transform,
    done: Vec<Computed>,
}

/// Returns the signal of a block: in each vector a wave whose frequency depends on the vector and on the block.
fn signal(sequence: u64, numbers: usize) -> Vec<f32> {
    let vectors = numbers / (2 * POINTS);
    let wave = |vector: usize| {
        let frequency = (sequence.wrapping_mul(7).wrapping_add(vector as u64 * 3) % POINTS as u64) as f32;
        (0..POINTS).flat_map(move |at| {
            let (imaginary, real) = (TAU * frequency * at as f32 / POINTS as f32).sin_cos();
            [real, imaginary]
        })
    };
    (0..vectors).flat_map(wave).collect()
}

impl Cpu {
    /// Uses buffers that the NIC accesses.
    ///
    /// # Errors
    ///
    /// The size of a block is not a multiple of [`VECTOR`].
    pub fn new(role: Role, blocks: BlockMemory) -> Result<Self> {
        ensure!(
            blocks.block_size() % VECTOR == 0,
            "blocks of {} bytes: use a multiple of {VECTOR}, which is a vector of {POINTS} complex numbers",
            blocks.block_size()
        );
        let numbers = blocks.block_size() / 4;
        Ok(Self {
            role,
            other: vec![vec![0.0; numbers]; blocks.count()],
            blocks: Arc::new(blocks),
            transform: Transform::default(),
            done: Vec::new(),
        })
    }
}

impl Compute for Cpu {
    fn buffers(&self) -> u32 {
        self.blocks.count() as u32
    }

    fn block_size(&self) -> u64 {
        self.blocks.block_size() as u64
    }

    fn register(&self, domain: &Arc<Domain>, access: Access) -> Result<Registered> {
        let registration = RegisteredBlocks::new(domain, &self.blocks, access)?;
        let first = registration.segment(0);
        Ok(Registered {
            address: first.address,
            lkey: first.lkey,
            registration: Box::new(registration),
        })
    }

    fn blocks(&self) -> Option<Arc<BlockMemory>> {
        Some(Arc::clone(&self.blocks))
    }

    fn start(&mut self, buffer: u32, sequence: u64) -> Result<()> {
        let place = buffer as usize;
        let mut bytes = vec![0; self.blocks.block_size()];
        match self.role {
            Role::Source => {
                self.other[place] = signal(sequence, self.blocks.block_size() / 4);
                let spectrum = self.transform.forward(&self.other[place]);
                for (bytes, value) in bytes.chunks_exact_mut(4).zip(&spectrum) {
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
                self.blocks.write(place, 0, &bytes)?;
            }
            Role::Target => {
                self.blocks.read(place, 0, &mut bytes)?;
                self.other[place] = self.transform.forward(&to_numbers(&bytes));
            }
        }
        let checksum = crc32c::crc32c(&bytes);
        self.done.push(Computed { buffer, checksum });
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Computed>) -> Result<()> {
        done.append(&mut self.done);
        Ok(())
    }

    fn copy(&self, buffer: u32, input: &mut [f32], output: &mut [f32]) -> Result<()> {
        let mut bytes = vec![0; self.blocks.block_size()];
        self.blocks.read(buffer as usize, 0, &mut bytes)?;
        let (blocks, other) = match self.role {
            Role::Source => (output, input),
            Role::Target => (input, output),
        };
        blocks.copy_from_slice(&to_numbers(&bytes));
        other.copy_from_slice(&self.other[buffer as usize]);
        Ok(())
    }
}

/// Reads little-endian numbers.
pub fn to_numbers(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.chunks_exact(4);
    words
        .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_source_computes_a_target_transforms() {
        let memory = || BlockMemory::host(2 * VECTOR as u64, 2).unwrap();
        let mut source = Cpu::new(Role::Source, memory()).unwrap();
        let mut target = Cpu::new(Role::Target, memory()).unwrap();
        let transform = Transform::default();
        let numbers = VECTOR / 2;
        let (mut input, mut output) = (vec![0.0; numbers], vec![0.0; numbers]);
        let mut previous = None;
        for sequence in 0..3 {
            source.start(1, sequence).unwrap();
            let mut done = Vec::new();
            source.poll(&mut done).unwrap();
            let [computed] = done[..] else { panic!("{done:?}") };
            source.copy(1, &mut input, &mut output).unwrap();
            transform.verify(&input, &output).unwrap();
            assert_ne!(
                previous.replace(computed.checksum),
                Some(computed.checksum),
                "blocks differ"
            );

            let mut bytes = vec![0; 2 * VECTOR];
            source.blocks.read(1, 0, &mut bytes).unwrap();
            target.blocks.write(0, 0, &bytes).unwrap();
            target.start(0, sequence).unwrap();
            done.clear();
            target.poll(&mut done).unwrap();
            assert_eq!(done, [Computed { buffer: 0, ..computed }]);
            target.copy(0, &mut input, &mut output).unwrap();
            transform.verify(&input, &output).unwrap();
        }
    }

    #[test]
    fn blocks_are_whole_vectors() {
        let error = Cpu::new(Role::Source, BlockMemory::host(4096, 1).unwrap()).unwrap_err();
        assert!(error.to_string().contains("multiple of 8192"), "{error}");
    }
}
