// SPDX-License-Identifier: MIT OR Apache-2.0

//! Transfers between the bus and the device: lists of ranges, split at the borders of mappings.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Direction, Dma, DmaError, Extent, LockedTables, Target, check_range};
use crate::memory::{Memory, OutOfBounds};
use crate::sys::SharedMapping;

/// Maximum number of bytes that are copied under one lock of the DMA table. Limits how long an unmapping waits.
const COPY_CHUNK: u64 = 1 << 20;

/// Location of a part of a transfer on the bus side.
enum Chunk<'a> {
    Mapped { mapping: &'a SharedMapping, offset: u64 },
    Message { address: u64 },
}

impl Dma {
    /// Reads from the bus.
    ///
    /// # Errors
    ///
    /// See [`DmaError`].
    pub fn read(&self, address: u64, data: &mut [u8]) -> Result<(), DmaError> {
        let len = data.len() as u64;
        self.read_extents(&[Extent { address, len }], data)
    }

    /// Writes to the bus.
    ///
    /// # Errors
    ///
    /// See [`DmaError`].
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), DmaError> {
        let len = data.len() as u64;
        self.write_extents(&[Extent { address, len }], data)
    }

    /// Reads ranges one after another, `data.len()` bytes in total.
    ///
    /// # Errors
    ///
    /// See [`DmaError`]; [`DmaError::Local`] if the total length of the ranges is not that of `data`.
    pub fn read_extents(&self, extents: &[Extent], data: &mut [u8]) -> Result<(), DmaError> {
        check_total(extents, data.len() as u64)?;
        self.transfer(extents, Direction::Read, |at, len, chunk| {
            // No truncation: both lie within `data`.
            let data = &mut data[at as usize..][..len as usize];
            match chunk {
                Chunk::Mapped { mapping, offset } => Ok(mapping.read(offset, data)?),
                Chunk::Message { address } => self.message_read(address, data),
            }
        })
    }

    /// Reads ranges one after another and appends their bytes to `out`. On an error, `out` has the bytes that were read
    /// before.
    ///
    /// # Errors
    ///
    /// See [`DmaError`].
    pub fn append_extents(&self, extents: &[Extent], out: &mut Vec<u8>) -> Result<(), DmaError> {
        self.transfer(extents, Direction::Read, |_, len, chunk| match chunk {
            // No truncation: a chunk has at most `COPY_CHUNK` bytes.
            Chunk::Mapped { mapping, offset } => Ok(mapping.append(offset, len as usize, out)?),
            Chunk::Message { address } => {
                let start = out.len();
                out.resize(start + len as usize, 0);
                let result = self.message_read(address, &mut out[start..]);
                if result.is_err() {
                    out.truncate(start);
                }
                result
            }
        })
    }

    /// Writes ranges one after another, `data.len()` bytes in total.
    ///
    /// # Errors
    ///
    /// See [`DmaError`]; [`DmaError::Local`] if the total length of the ranges is not that of `data`.
    pub fn write_extents(&self, extents: &[Extent], data: &[u8]) -> Result<(), DmaError> {
        check_total(extents, data.len() as u64)?;
        self.transfer(extents, Direction::Write, |at, len, chunk| {
            // No truncation: both lie within `data`.
            let data = &data[at as usize..][..len as usize];
            match chunk {
                Chunk::Mapped { mapping, offset } => Ok(mapping.write(offset, data)?),
                Chunk::Message { address } => self.message_write(address, data),
            }
        })
    }

    /// Reads `len` bytes from the bus into `memory` at `offset`.
    ///
    /// # Errors
    ///
    /// See [`DmaError`].
    pub fn read_into(&self, address: u64, memory: &Memory, offset: u64, len: u64) -> Result<(), DmaError> {
        check_local(memory, offset, len)?;
        let mut buffer = Vec::new();
        self.transfer(
            &[Extent { address, len }],
            Direction::Read,
            |at, len, chunk| match chunk {
                Chunk::Mapped { mapping, offset: from } => {
                    Ok(SharedMapping::copy(mapping, from, memory.mapping(), offset + at, len)?)
                }
                Chunk::Message { address } => {
                    buffer.resize(len as usize, 0);
                    self.message_read(address, &mut buffer)?;
                    Ok(memory.write(offset + at, &buffer)?)
                }
            },
        )
    }

    /// Writes `len` bytes of `memory` at `offset` to the bus.
    ///
    /// # Errors
    ///
    /// See [`DmaError`].
    pub fn write_from(&self, address: u64, memory: &Memory, offset: u64, len: u64) -> Result<(), DmaError> {
        check_local(memory, offset, len)?;
        let mut buffer = Vec::new();
        self.transfer(
            &[Extent { address, len }],
            Direction::Write,
            |at, len, chunk| match chunk {
                Chunk::Mapped { mapping, offset: to } => {
                    Ok(SharedMapping::copy(memory.mapping(), offset + at, mapping, to, len)?)
                }
                Chunk::Message { address } => {
                    buffer.resize(len as usize, 0);
                    memory.read(offset + at, &mut buffer)?;
                    self.message_write(address, &buffer)
                }
            },
        )
    }

    /// Replaces the little-endian 64-bit number at `address` by `change` of it, and returns the old value. `change` may
    /// be called more than once.
    ///
    /// If the memory is mapped in this process, the operation is atomic against other devices and processors. If the
    /// memory is accessed by messages, the operation is atomic only against other calls of this function in this
    /// process.
    ///
    /// # Errors
    ///
    /// See [`DmaError`]; [`DmaError::Misaligned`] if the address is not divisible by 8.
    pub fn update(&self, address: u64, mut change: impl FnMut(u64) -> u64) -> Result<u64, DmaError> {
        /// Held from the DMA_READ message to the DMA_WRITE message.
        static BY_MESSAGE: Mutex<()> = Mutex::new(());

        if address % 8 != 0 {
            return Err(DmaError::Misaligned(address));
        }
        let mut old = 0;
        self.transfer(&[Extent { address, len: 8 }], Direction::Update, |_, len, chunk| {
            if len != 8 {
                // The 8 bytes are in two mappings.
                return Err(DmaError::Misaligned(address));
            }
            old = match chunk {
                Chunk::Mapped { mapping, offset } => {
                    let old = mapping.update(offset, &mut change)?;
                    old.ok_or(DmaError::Misaligned(address))?
                }
                Chunk::Message { address } => {
                    let _only = BY_MESSAGE.lock().unwrap_or_else(PoisonError::into_inner);
                    let mut bytes = [0; 8];
                    self.message_read(address, &mut bytes)?;
                    let old = u64::from_le_bytes(bytes);
                    self.message_write(address, &change(old).to_le_bytes())?;
                    old
                }
            };
            Ok(())
        })?;
        Ok(old)
    }

    /// Splits ranges at the borders of mappings, and calls `step` for each chunk with its position in the transfer, its
    /// length and its location.
    fn transfer(
        &self,
        extents: &[Extent],
        direction: Direction,
        mut step: impl FnMut(u64, u64, Chunk<'_>) -> Result<(), DmaError>,
    ) -> Result<(), DmaError> {
        for extent in extents {
            check_range(extent.address, extent.len)?;
        }
        let epoch = self.epoch();
        let mut position = 0;
        let mut tables: Option<LockedTables<'_>> = None;
        // Bytes that may be copied before the tables are unlocked once.
        let mut budget = COPY_CHUNK;
        for extent in extents {
            let mut done = 0;
            while done < extent.len {
                if self.current_epoch() != epoch {
                    return Err(DmaError::Aborted);
                }
                if !self.shared.bus_master.load(Ordering::SeqCst) {
                    return Err(DmaError::BusMasterOff);
                }
                let address = extent.address + done;
                let lookup = tables
                    .get_or_insert_with(|| self.lock_tables())
                    .find(address, extent.len - done);
                let permitted = match direction {
                    Direction::Read => lookup.readable,
                    Direction::Write => lookup.writable,
                    Direction::Update => lookup.readable && lookup.writable,
                };
                if !permitted {
                    return Err(DmaError::Denied(address));
                }
                let moved = if let Some((mapping, offset)) = lookup.memory {
                    let run = lookup.run.min(budget);
                    step(position, run, Chunk::Mapped { mapping, offset })?;
                    self.count(lookup.target, lookup.name, direction, run);
                    budget -= run;
                    if budget == 0 {
                        budget = COPY_CHUNK;
                        tables = None;
                    }
                    run
                } else {
                    let run = lookup.run;
                    tables = None;
                    let run = run.min(self.message_chunk());
                    step(position, run, Chunk::Message { address })?;
                    self.count(Target::Message, None, direction, run);
                    run
                };
                done += moved;
                position += moved;
            }
        }
        drop(tables);
        // Later stores, such as an interrupt or a flag that the guest polls, must not become visible before the data.
        std::sync::atomic::fence(Ordering::SeqCst);
        Ok(())
    }

    fn count(&self, target: Target, name: Option<&Arc<str>>, direction: Direction, bytes: u64) {
        self.shared.total.count(target, name, direction, bytes);
        if let Some(counters) = &self.own_counters {
            counters.count(target, name, direction, bytes);
        }
    }
}

fn check_local(memory: &Memory, offset: u64, len: u64) -> Result<(), OutOfBounds> {
    match offset.checked_add(len) {
        Some(end) if end <= memory.len() => Ok(()),
        _ => Err(OutOfBounds),
    }
}

fn check_total(extents: &[Extent], len: u64) -> Result<(), OutOfBounds> {
    let total = extents
        .iter()
        .try_fold(0_u64, |sum, extent| sum.checked_add(extent.len));
    if total == Some(len) { Ok(()) } else { Err(OutOfBounds) }
}
