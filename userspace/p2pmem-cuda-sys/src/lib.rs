// SPDX-License-Identifier: MIT OR Apache-2.0

//! The part of CUDA's driver API that p2pmem uses, loaded at run time: GPU memory and its dma-bufs, host memory that the
//! GPU accesses, stream memory operations, and a kernel that executes a list of such operations.
//!
//! Every function of this crate is safe to call. The GPU accesses only memory that a [`Place`] names, and the memory stays
//! allocated until the GPU has finished.
#![allow(unsafe_code)]

mod error;
mod functions;
mod gpu;
mod memory;
mod operation;
mod stream;

pub use error::{CudaError, LoadError};
pub use gpu::{Cuda, Gpu};
pub use memory::{GpuMemory, HostMemory, HostMemoryError, Memory, OutOfRange, Place};
pub use operation::{Condition, Operation};
pub use stream::{Ended, Stream, StreamError};

/// A result with an error of CUDA.
pub type Result<T> = std::result::Result<T, CudaError>;
