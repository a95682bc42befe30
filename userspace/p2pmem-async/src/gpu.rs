// SPDX-License-Identifier: MIT OR Apache-2.0

//! The executor on an NVIDIA GPU, by CUDA's driver API, which is loaded at run time.
//!
//! A GPU executes byte code by one of two methods ([`Method`]), each in the order of a stream, so that kernels which make or use
//! the data run between two programs without the CPU.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use p2pmem_cuda_sys::{Condition, Ended, Gpu, Operation as GpuOperation, Place, Stream, StreamError};

use crate::bytecode::{offset_in, Capabilities, Operation, Peer, Program};
use crate::error::{Error, ExecutionFailure, Result};
use crate::region::{Region, RegionId, Target};

/// How a GPU executes byte code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// By stream memory operations, which the front end of the GPU executes. No processor of the GPU is busy during a poll.
    ///
    /// The GPU cannot end a poll that does not come true. [`GpuExecutor::finish`] reports the poll, and the memory stays in
    /// use until the poll comes true or the process ends.
    StreamOperations,
    /// By a kernel with one thread, which interprets the byte code. A poll ends after the limit.
    Kernel,
}

/// A program that was submitted, for error messages.
#[derive(Clone)]
struct Submitted {
    operations: Vec<Operation>,
    /// Index of the operation of the program for each operation of the GPU.
    indices: Vec<usize>,
}

/// Executes programs on a GPU, in order.
pub struct GpuExecutor {
    stream: Stream,
    method: Method,
    limit: Duration,
    name: String,
    places: HashMap<RegionId, (Place, usize)>,
    submitted: Vec<Submitted>,
}

impl fmt::Debug for GpuExecutor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuExecutor")
            .field("name", &self.name)
            .field("method", &self.method)
            .finish_non_exhaustive()
    }
}

/// Converts an error of CUDA.
fn cuda(error: impl fmt::Display) -> Error {
    Error::Executor(error.to_string())
}

impl GpuExecutor {
    /// Creates an executor. `limit` is the time limit of a poll.
    ///
    /// # Errors
    ///
    /// [`Error::Executor`] if CUDA refuses the stream.
    pub fn new(gpu: &Gpu, method: Method, limit: Duration) -> Result<Self> {
        Ok(Self {
            stream: gpu.stream().map_err(cuda)?,
            method,
            limit,
            name: gpu.name().map_err(cuda)?,
            places: HashMap::new(),
            submitted: Vec::new(),
        })
    }

    /// Describes a GPU as the peer of queues.
    ///
    /// # Errors
    ///
    /// [`Error::Executor`] if CUDA refuses a query.
    pub fn peer(gpu: &Gpu, method: Method) -> Result<Peer> {
        let mut capabilities = Capabilities::all();
        match method {
            Method::StreamOperations => {
                // A block consists of such stores.
                let stores = Capabilities::STORE_QWORD | Capabilities::COPY_BLOCK;
                capabilities.set(stores, gpu.supports_64_bit_stores().map_err(cuda)?);
                capabilities.set(Capabilities::POLL_NOR, gpu.supports_nor().map_err(cuda)?);
            }
            Method::Kernel if !gpu.supports_kernels().map_err(cuda)? => capabilities = Capabilities::empty(),
            Method::Kernel => {}
        }
        Ok(Peer::new(gpu.name().map_err(cuda)?, capabilities, MAX_OPERATIONS))
    }

    /// Maps a region to memory that the GPU accesses: the place of the region's first byte.
    pub fn map(&mut self, region: &Region, place: Place) {
        self.places.insert(region.id(), (place, region.len()));
    }

    /// Returns where a region is mapped.
    pub fn mapped(&self, region: &Region) -> Option<&Place> {
        self.places.get(&region.id()).map(|(place, _)| place)
    }

    /// Returns the stream, for kernels that run between programs.
    pub fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }

    fn place(&self, target: Target, size: usize) -> std::result::Result<Place, ExecutionFailure> {
        let region = target.region;
        let (place, len) = self.places.get(&region).ok_or(ExecutionFailure::Unmapped { region })?;
        Ok(Place {
            memory: place.memory.clone(),
            offset: place.offset + offset_in(target, size, *len)?,
        })
    }

    /// Converts an operation to operations of the GPU.
    fn convert(&self, operation: &Operation) -> std::result::Result<Vec<GpuOperation>, ExecutionFailure> {
        let Some(target) = operation.target() else {
            return Ok(vec![GpuOperation::Fence]);
        };
        let place = self.place(target, operation.size())?;
        Ok(match operation {
            Operation::StoreDword { value, .. } => vec![GpuOperation::Store32(place, *value)],
            Operation::StoreQword { value, .. } => vec![GpuOperation::Store64(place, *value)],
            Operation::CopyBlock { data, .. } => {
                let words = data.chunks_exact(8).enumerate().map(|(i, bytes)| {
                    let mut word = [0; 8];
                    word.copy_from_slice(bytes);
                    let place = Place {
                        memory: place.memory.clone(),
                        offset: place.offset + 8 * i,
                    };
                    GpuOperation::Store64(place, u64::from_le_bytes(word))
                });
                words.collect()
            }
            Operation::PollAnd { value, .. } => vec![GpuOperation::Wait(place, Condition::And, *value)],
            Operation::PollNor { value, .. } => vec![GpuOperation::Wait(place, Condition::Nor, *value)],
            Operation::PollGeq { value, .. } => vec![GpuOperation::Wait(place, Condition::GreaterOrEqual, *value)],
            Operation::Fence => vec![GpuOperation::Fence],
        })
    }

    /// Submits a program. The GPU executes it after all that was submitted before.
    ///
    /// # Errors
    ///
    /// [`Error::Execution`] for an operation whose region is not mapped or whose target is outside of it;
    /// [`Error::Executor`] if CUDA refuses the operations. Nothing of the program was submitted then, except if CUDA fails
    /// in the middle.
    pub fn submit(&mut self, program: &Program) -> Result<()> {
        let operations = program.operations();
        let mut converted = Vec::new();
        let mut indices = Vec::new();
        for (index, operation) in operations.iter().enumerate() {
            let new = self.convert(operation).map_err(|why| Error::Execution {
                index,
                operation: operation.to_string(),
                why,
            })?;
            indices.extend(new.iter().map(|_| index));
            converted.extend(new);
        }
        let submitted = match self.method {
            Method::StreamOperations => self.stream.enqueue(&converted),
            Method::Kernel => self.stream.execute(&converted, self.limit),
        };
        submitted.map_err(cuda)?;
        self.submitted.push(Submitted {
            operations: operations.to_vec(),
            indices,
        });
        Ok(())
    }

    /// Waits until the GPU has executed all programs, at most for the time limit of one poll after another: `limit` in all.
    ///
    /// # Errors
    ///
    /// [`Error::Execution`] with the operation that did not end; the later operations, also of later programs, were not
    /// executed. [`Error::Executor`] if an operation or a kernel of the stream failed.
    pub fn finish(&mut self, limit: Duration) -> Result<()> {
        let result = self.stream.finish(limit);
        let submitted = match &result {
            // A later call can wait again.
            Err(StreamError::Stuck { .. }) => self.submitted.clone(),
            _ => std::mem::take(&mut self.submitted),
        };
        let failure = |at: Option<(&Submitted, usize)>, why: ExecutionFailure| {
            let operation = at.and_then(|(submitted, index)| {
                let index = *submitted.indices.get(index)?;
                Some((index, submitted.operations[index].to_string()))
            });
            match operation {
                Some((index, operation)) => Error::Execution { index, operation, why },
                None => Error::Executor(format!("an operation {why}")),
            }
        };
        match result {
            Ok(()) => Ok(()),
            Err(StreamError::Ended { list, index, why }) => {
                let at = submitted.get(list).map(|submitted| (submitted, index));
                Err(failure(
                    at,
                    match why {
                        Ended::Late => ExecutionFailure::Late { limit: self.limit },
                        Ended::Stopped => ExecutionFailure::Stopped,
                    },
                ))
            }
            Err(StreamError::Stuck { index }) => {
                // The index counts the operations of all programs.
                let mut at = None;
                let mut first = 0;
                for submitted in &submitted {
                    let relative = index.and_then(|index| index.checked_sub(first));
                    at = at.or(relative
                        .filter(|i| *i < submitted.indices.len())
                        .map(|i| (submitted, i)));
                    first += submitted.indices.len();
                }
                Err(failure(at, ExecutionFailure::Late { limit }))
            }
            Err(error) => Err(cuda(error)),
        }
    }

    /// Ends the polls of all programs that were submitted, for example because the other side died. [`Method::Kernel`] only:
    /// the GPU cannot take back stream memory operations.
    pub fn stop(&self) {
        self.stream.stop();
    }
}

/// Operations of a program that an executor takes. A block counts as one, but takes an entry for each 8 bytes;
/// [`GpuExecutor::submit`] refuses what the stream's memory has no space for.
const MAX_OPERATIONS: usize = 1 << 16;
