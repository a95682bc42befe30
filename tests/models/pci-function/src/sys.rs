// SPDX-License-Identifier: MIT OR Apache-2.0

//! Mappings of memory that a device shares with this program: registers, a BAR, or a DMA buffer.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;

use memmap2::{MmapOptions, MmapRaw};

/// A mapping that is accessed only by volatile loads and stores and by copies, never by reference.
///
/// # Invariants
///
/// `map` is page-aligned, and is mapped readable and writable for its whole length while the value exists.
#[derive(Debug)]
pub struct Mapping {
    map: MmapRaw,
}

/// A range is not in the mapping, or is not aligned.
#[derive(Clone, Copy, Debug)]
pub struct OutOfBounds;

impl Mapping {
    /// Maps the first `len` bytes of a file.
    ///
    /// # Errors
    ///
    /// Those of `mmap()`.
    pub fn file(file: &File, len: usize) -> io::Result<Self> {
        // INVARIANT: `map_raw` maps readable and writable.
        Ok(Self {
            map: MmapOptions::new().len(len).map_raw(file)?,
        })
    }

    /// Maps `len` bytes of anonymous memory, populated and locked.
    ///
    /// # Errors
    ///
    /// Those of `mmap()` and `mlock()`.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let map = MmapOptions::new().len(len).populate().map_anon()?;
        map.lock()?;
        // INVARIANT: anonymous maps are readable and writable.
        Ok(Self { map: map.into() })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Returns whether the mapping has no bytes.
    pub fn is_empty(&self) -> bool {
        self.map.len() == 0
    }

    /// Returns the virtual address of the first byte.
    pub fn address(&self) -> usize {
        self.map.as_ptr().addr()
    }

    fn check(&self, offset: u64, len: usize, align: u64) -> Result<usize, OutOfBounds> {
        let end = offset.checked_add(len as u64).ok_or(OutOfBounds)?;
        if end > self.map.len() as u64 || offset % align != 0 {
            return Err(OutOfBounds);
        }
        // Not truncated: at most the length of the mapping.
        Ok(offset as usize)
    }

    /// Loads 4 bytes with one volatile access.
    ///
    /// # Errors
    ///
    /// The range is not in the mapping, or is not aligned.
    pub fn load32(&self, offset: u64) -> Result<u32, OutOfBounds> {
        let at = self.check(offset, 4, 4)?;
        // SAFETY: `check` ensures that the 4 bytes at `at` are in the mapping and that `at` is aligned. By the type's
        // invariant, the mapping is page-aligned and readable. Every bit pattern is a valid u32.
        Ok(u32::from_le(unsafe {
            self.map.as_ptr().add(at).cast::<u32>().read_volatile()
        }))
    }

    /// Loads 8 bytes with one volatile access.
    ///
    /// # Errors
    ///
    /// The range is not in the mapping, or is not aligned.
    pub fn load64(&self, offset: u64) -> Result<u64, OutOfBounds> {
        let at = self.check(offset, 8, 8)?;
        // SAFETY: as in `load32`, for 8 bytes.
        Ok(u64::from_le(unsafe {
            self.map.as_ptr().add(at).cast::<u64>().read_volatile()
        }))
    }

    /// Stores 4 bytes with one volatile access.
    ///
    /// # Errors
    ///
    /// The range is not in the mapping, or is not aligned.
    pub fn store32(&self, offset: u64, value: u32) -> Result<(), OutOfBounds> {
        let at = self.check(offset, 4, 4)?;
        // SAFETY: `check` ensures that the 4 bytes at `at` are in the mapping and that `at` is aligned. By the type's
        // invariant, the mapping is page-aligned and writable.
        unsafe {
            self.map
                .as_mut_ptr()
                .add(at)
                .cast::<u32>()
                .write_volatile(value.to_le())
        };
        Ok(())
    }

    /// Stores 8 bytes with one volatile access.
    ///
    /// # Errors
    ///
    /// The range is not in the mapping, or is not aligned.
    pub fn store64(&self, offset: u64, value: u64) -> Result<(), OutOfBounds> {
        let at = self.check(offset, 8, 8)?;
        // SAFETY: as in `store32`, for 8 bytes.
        unsafe {
            self.map
                .as_mut_ptr()
                .add(at)
                .cast::<u64>()
                .write_volatile(value.to_le())
        };
        Ok(())
    }

    /// Copies from the mapping to `data`.
    ///
    /// # Errors
    ///
    /// The range is not in the mapping, or is not aligned.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), OutOfBounds> {
        let at = self.check(offset, data.len(), 1)?;
        // SAFETY: `check` ensures that `data.len()` bytes at `at` are in the mapping, which is readable by the type's
        // invariant. No reference to the mapping exists, so the exclusive `data` does not overlap it.
        unsafe { std::ptr::copy_nonoverlapping(self.map.as_ptr().add(at), data.as_mut_ptr(), data.len()) };
        Ok(())
    }

    /// Copies `data` to the mapping.
    ///
    /// # Errors
    ///
    /// The range is not in the mapping, or is not aligned.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), OutOfBounds> {
        let at = self.check(offset, data.len(), 1)?;
        // SAFETY: `check` ensures that `data.len()` bytes at `at` are in the mapping, which is writable by the type's
        // invariant. No reference to the mapping exists, so `data` does not overlap it.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.map.as_mut_ptr().add(at), data.len()) };
        Ok(())
    }
}
