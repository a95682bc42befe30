// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory that a device shares with this program: registers, a BAR's memory, a buffer the device does DMA with.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;

use memmap2::{MmapOptions, MmapRaw};

/// A mapping that is only accessed by volatile loads and stores and by copies, never by reference.
///
/// # Invariants
///
/// `map` is mapped, readable and writable, for its whole length as long as the value lives, and page-aligned.
#[derive(Debug)]
pub(crate) struct Shared {
    map: MmapRaw,
}

/// A range does not lie in the mapping, or is not aligned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutOfBounds;

impl Shared {
    /// Maps `len` bytes of a file from its start.
    pub(crate) fn file(file: &File, len: usize) -> io::Result<Self> {
        // INVARIANT: `map_raw` maps readable and writable.
        Ok(Self {
            map: MmapOptions::new().len(len).map_raw(file)?,
        })
    }

    /// Maps `len` bytes of memory of this process, present and locked.
    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        let map = MmapOptions::new().len(len).populate().map_anon()?;
        map.lock()?;
        // INVARIANT: anonymous maps are readable and writable.
        Ok(Self { map: map.into() })
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Address of the first byte in this process.
    pub(crate) fn address(&self) -> usize {
        self.map.as_ptr().addr()
    }

    fn check(&self, offset: u64, len: usize, align: u64) -> Result<usize, OutOfBounds> {
        let end = offset.checked_add(len as u64).ok_or(OutOfBounds)?;
        if end > self.map.len() as u64 || offset % align != 0 {
            return Err(OutOfBounds);
        }
        // Not truncated: no larger than the length of a mapping.
        Ok(offset as usize)
    }

    /// One load of 4 bytes.
    pub(crate) fn load32(&self, offset: u64) -> Result<u32, OutOfBounds> {
        let at = self.check(offset, 4, 4)?;
        // SAFETY: `check` found 4 bytes from `at` on inside of the mapping and `at` aligned, the mapping is page-aligned
        // and readable by the type's invariant, and every bit pattern is a u32.
        Ok(u32::from_le(unsafe {
            self.map.as_ptr().add(at).cast::<u32>().read_volatile()
        }))
    }

    /// One load of 8 bytes.
    pub(crate) fn load64(&self, offset: u64) -> Result<u64, OutOfBounds> {
        let at = self.check(offset, 8, 8)?;
        // SAFETY: as in `load32`, for 8 bytes.
        Ok(u64::from_le(unsafe {
            self.map.as_ptr().add(at).cast::<u64>().read_volatile()
        }))
    }

    /// One store of 4 bytes.
    pub(crate) fn store32(&self, offset: u64, value: u32) -> Result<(), OutOfBounds> {
        let at = self.check(offset, 4, 4)?;
        // SAFETY: `check` found 4 bytes from `at` on inside of the mapping and `at` aligned, and the mapping is
        // page-aligned and writable by the type's invariant.
        unsafe {
            self.map
                .as_mut_ptr()
                .add(at)
                .cast::<u32>()
                .write_volatile(value.to_le())
        };
        Ok(())
    }

    /// One store of 8 bytes.
    pub(crate) fn store64(&self, offset: u64, value: u64) -> Result<(), OutOfBounds> {
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

    /// Copies out of the mapping.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), OutOfBounds> {
        let at = self.check(offset, data.len(), 1)?;
        // SAFETY: `check` found `data.len()` bytes from `at` on inside of the mapping, which is readable. No reference to
        // the mapping exists, so the exclusive `data` does not overlap it.
        unsafe { std::ptr::copy_nonoverlapping(self.map.as_ptr().add(at), data.as_mut_ptr(), data.len()) };
        Ok(())
    }

    /// Copies into the mapping.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> Result<(), OutOfBounds> {
        let at = self.check(offset, data.len(), 1)?;
        // SAFETY: `check` found `data.len()` bytes from `at` on inside of the mapping, which is writable. No reference to
        // the mapping exists, so `data` does not overlap it.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.map.as_mut_ptr().add(at), data.len()) };
        Ok(())
    }
}
