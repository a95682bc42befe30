// SPDX-License-Identifier: MIT OR Apache-2.0

//! What the recorder needs of an accelerator.
//!
//! An accelerator has two pools of buffers, one block each: *input* and *output*. Recording generates a signal in an input
//! buffer, transforms it to the output buffer of the same number, and sends the output. Playback receives a block in an input
//! buffer, and transforms it to the output buffer. A block is an array of complex numbers (two `f32` each), in vectors of
//! [`POINTS`] numbers, each of which is transformed by itself.

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use anyhow::Result;
use p2pmem_verbs::{Access, Domain, Segment};

use crate::memory::BlockMemory;

/// The numbers of a vector.
pub const POINTS: usize = 1024;
/// Bytes of a vector.
pub const VECTOR: usize = POINTS * 8;

/// Buffers that a NIC can access.
pub struct Registered {
    /// The address of buffer 0, for work requests. The others follow, a block each.
    pub address: u64,
    /// The local key.
    pub lkey: u32,
    /// Ends the registration when it is dropped.
    pub registration: Box<dyn Any + Send>,
}

impl std::fmt::Debug for Registered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Registered({:#x})", self.address)
    }
}

impl Registered {
    /// Returns a buffer for work requests.
    pub(crate) fn segment(&self, buffer: u32, block_size: u64) -> Segment {
        Segment {
            address: self.address + u64::from(buffer) * block_size,
            bytes: block_size as u32,
            lkey: self.lkey,
        }
    }
}

/// A computation that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Computed {
    /// The number of the buffer.
    pub buffer: u32,
    /// The CRC-32C of the block in the buffer that the NIC accesses.
    pub checksum: u32,
}

/// Whether the accelerator is a source or a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Generates a signal, and sends its transform.
    Source,
    /// Receives blocks, and transforms them.
    Target,
}

/// An accelerator that computes blocks. Each buffer has its own order of work: work on different buffers can be concurrent.
pub trait Compute {
    /// Returns the number of buffers of each pool.
    fn buffers(&self) -> u32;

    /// Returns the bytes of a block: a multiple of [`VECTOR`].
    fn block_size(&self) -> u64;

    /// Registers the buffers that the NIC accesses: the outputs of a source, the inputs of a target.
    ///
    /// # Errors
    ///
    /// The NIC refuses the memory.
    fn register(&self, domain: &Arc<Domain>, access: Access) -> Result<Registered>;

    /// Returns the buffers that drives access, if they can: the outputs of a source, the inputs of a target. The module
    /// [`local`](crate::local) needs them.
    fn blocks(&self) -> Option<Arc<BlockMemory>> {
        None
    }

    /// Starts the work on a buffer. A source generates the signal of `sequence`, and transforms it; a target transforms the
    /// block that the NIC has written.
    ///
    /// # Errors
    ///
    /// The accelerator refuses the work.
    fn start(&mut self, buffer: u32, sequence: u64) -> Result<()>;

    /// Adds the work that has ended since the last call to `done`.
    ///
    /// # Errors
    ///
    /// The accelerator failed.
    fn poll(&mut self, done: &mut Vec<Computed>) -> Result<()>;

    /// Returns a file descriptor that is readable when work has ended. Without one, the program looks every
    /// millisecond.
    fn event(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Copies the input and the output of a buffer, to verify them.
    ///
    /// # Errors
    ///
    /// The memory is gone.
    fn copy(&self, buffer: u32, input: &mut [f32], output: &mut [f32]) -> Result<()>;
}
