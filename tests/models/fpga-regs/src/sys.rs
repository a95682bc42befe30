// SPDX-License-Identifier: MIT OR Apache-2.0

//! A mapping of a device's registers or memory.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;

use memmap2::{MmapOptions, MmapRaw};

/// A mapping that is accessed only by volatile loads and stores of words, never by reference.
///
/// # Invariants
///
/// `map` is page-aligned, and is mapped readable and writable for its whole length while the value exists.
#[derive(Debug)]
pub(crate) struct Mapping {
    map: MmapRaw,
}

/// A word is not in the mapping, or is not aligned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutOfBounds;

impl Mapping {
    /// Maps the first `len` bytes of a file.
    pub(crate) fn file(file: &File, len: usize) -> io::Result<Self> {
        // INVARIANT: `map_raw` maps readable and writable.
        Ok(Self {
            map: MmapOptions::new().len(len).map_raw(file)?,
        })
    }

    /// Returns the address of an aligned word of type `T` at `offset`.
    fn word<T>(&self, offset: u64) -> Result<*mut T, OutOfBounds> {
        let len = size_of::<T>() as u64;
        let end = offset.checked_add(len).ok_or(OutOfBounds)?;
        if end > self.map.len() as u64 || offset % len != 0 {
            return Err(OutOfBounds);
        }
        // Not truncated: at most the length of the mapping. The address stays inside the mapping.
        Ok(self.map.as_mut_ptr().wrapping_add(offset as usize).cast())
    }

    /// Loads 4 bytes with one access.
    pub(crate) fn load32(&self, offset: u64) -> Result<u32, OutOfBounds> {
        let word = self.word::<u32>(offset)?;
        // SAFETY: `word` is an aligned address whose bytes are in the mapping, which is readable by the type's invariant.
        // Every bit pattern is a valid u32.
        Ok(u32::from_le(unsafe { word.read_volatile() }))
    }

    /// Loads 8 bytes with one access.
    pub(crate) fn load64(&self, offset: u64) -> Result<u64, OutOfBounds> {
        let word = self.word::<u64>(offset)?;
        // SAFETY: as in `load32`, for a u64.
        Ok(u64::from_le(unsafe { word.read_volatile() }))
    }

    /// Stores 4 bytes with one access.
    pub(crate) fn store32(&self, offset: u64, value: u32) -> Result<(), OutOfBounds> {
        let word = self.word::<u32>(offset)?;
        // SAFETY: `word` is an aligned address whose bytes are in the mapping, which is writable by the type's invariant.
        unsafe { word.write_volatile(value.to_le()) };
        Ok(())
    }

    /// Stores 8 bytes with one access.
    pub(crate) fn store64(&self, offset: u64, value: u64) -> Result<(), OutOfBounds> {
        let word = self.word::<u64>(offset)?;
        // SAFETY: as in `store32`, for a u64.
        unsafe { word.write_volatile(value.to_le()) };
        Ok(())
    }
}
