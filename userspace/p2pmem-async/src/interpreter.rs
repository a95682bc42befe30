// SPDX-License-Identifier: MIT OR Apache-2.0

//! The executor on the CPU: the meaning of the byte code, for tests, and for machines without another executor.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use p2pmem_access_sys as access;

use crate::bytecode::{offset_in, Operation, Program};
use crate::error::{Error, ExecutionFailure, Result};
use crate::region::{Region, RegionId, Target};

/// Executes programs on the CPU.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use p2pmem_async::bytecode::wait_for;
/// use p2pmem_async::interpreter::Interpreter;
/// use p2pmem_async::region::{Region, RegionKind};
/// use p2pmem_async::sys::HostMemory;
///
/// let signal = Region::new(RegionKind::Data, Arc::new(HostMemory::new(4096)?));
/// let interpreter = Interpreter::new(Duration::ZERO).map(&signal);
/// assert!(interpreter.run(&wait_for(&signal, 0, 1)?).is_err());
/// signal.store_dword(0, 1);
/// interpreter.run(&wait_for(&signal, 0, 1)?)?;
/// # Ok::<(), p2pmem_async::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Interpreter {
    regions: HashMap<RegionId, Region>,
    limit: Duration,
}

impl Interpreter {
    /// Creates an interpreter without regions. Each program that runs longer than `limit` ends with an error. Every poll
    /// reads memory at least once.
    pub fn new(limit: Duration) -> Self {
        Self {
            regions: HashMap::new(),
            limit,
        }
    }

    /// Maps a region. The interpreter keeps its memory alive.
    #[must_use]
    pub fn map(mut self, region: &Region) -> Self {
        self.regions.insert(region.id(), region.clone());
        self
    }

    /// Maps regions.
    #[must_use]
    pub fn map_all<'a>(self, regions: impl IntoIterator<Item = &'a Region>) -> Self {
        regions.into_iter().fold(self, Self::map)
    }

    /// Executes a program.
    ///
    /// # Errors
    ///
    /// [`Error::Execution`] with the index of the operation that failed. The earlier ones have been executed.
    pub fn run(&self, program: &Program) -> Result<()> {
        let start = Instant::now();
        for (index, operation) in program.operations().iter().enumerate() {
            self.step(operation, start).map_err(|why| Error::Execution {
                index,
                operation: operation.to_string(),
                why,
            })?;
        }
        // The last stores do not stay in a write-combining buffer.
        access::store_fence();
        Ok(())
    }

    fn step(&self, operation: &Operation, start: Instant) -> std::result::Result<(), ExecutionFailure> {
        let Some(target) = operation.target() else {
            access::store_fence();
            return Ok(());
        };
        let (region, at) = self.place(target, operation.size())?;
        match operation {
            Operation::StoreDword { value, .. } => region.store_dword(at, *value),
            Operation::StoreQword { value, .. } => region.store_qword(at, *value),
            Operation::CopyBlock { data, .. } => region.write(at, data),
            _ => loop {
                let last = region.load_dword(at);
                if operation.holds(last) {
                    // What was written before the word is visible to later loads.
                    access::load_fence();
                    break;
                }
                if start.elapsed() >= self.limit {
                    return Err(ExecutionFailure::TimeLimit {
                        limit: self.limit,
                        last,
                    });
                }
                // The NIC or the program that ends the poll may need this processor.
                std::thread::yield_now();
            },
        }
        Ok(())
    }

    fn place(&self, target: Target, size: usize) -> std::result::Result<(&Region, usize), ExecutionFailure> {
        let region = target.region;
        let region = self.regions.get(&region).ok_or(ExecutionFailure::Unmapped { region })?;
        Ok((region, offset_in(target, size, region.len())?))
    }
}

#[cfg(test)]
mod tests;
