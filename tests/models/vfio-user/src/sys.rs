// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory shared with other processes, accessed without ever making a reference to it.
//!
//! The guest, the emulator and this process all change such memory at any time. It is therefore only copied from and to,
//! through raw pointers; what a copy sees of a concurrent change is unspecified bytes, never undefined control flow.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};

use crate::memory::OutOfBounds;

/// A shared mapping of a part of a file.
///
/// # Invariants
///
/// `map` is mapped, readable, for its whole length as long as the value lives, and writable if `writable` is set.
#[derive(Debug)]
pub(crate) struct Window {
    map: MmapRaw,
    writable: bool,
}

impl Window {
    /// Maps `len` bytes of `fd` at `offset`, which need not be aligned.
    ///
    /// # Errors
    ///
    /// What mmap says, and `InvalidInput` for an empty or an unaddressable length.
    pub(crate) fn map(fd: BorrowedFd<'_>, offset: u64, len: u64, writable: bool) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        if len == 0 || len > isize::MAX as usize {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut options = MmapOptions::new();
        options.offset(offset).len(len);
        let raw = fd.as_raw_fd();
        let map = if writable {
            options.map_raw(raw)?
        } else {
            options.map_raw_read_only(raw)?
        };
        // INVARIANT: both kinds of mapping are readable, and only the first is said to be writable.
        Ok(Self { map, writable })
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// Checks a range and returns its start as an index.
    fn check(&self, offset: u64, len: usize, write: bool) -> Result<usize, OutOfBounds> {
        let end = offset.checked_add(len as u64).ok_or(OutOfBounds)?;
        if end > self.len() || write && !self.writable {
            return Err(OutOfBounds);
        }
        // Not truncated: the end is no larger than the length of a mapping.
        Ok(offset as usize)
    }

    /// Copies from the window. A naturally aligned access of 2, 4 or 8 bytes is one load.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), OutOfBounds> {
        let at = self.check(offset, data.len(), false)?;
        // SAFETY: `check` found `data.len()` bytes from `at` on inside of the mapping, which is readable by the type's
        // invariant. The atomic types have no alignment beyond the one tested, and every bit pattern is valid for them.
        // `data` is an exclusive reference, so it cannot overlap memory that no reference exists to.
        unsafe {
            let from = self.map.as_mut_ptr().add(at);
            match data.len() {
                2 if from.addr() % 2 == 0 => {
                    let value = AtomicU16::from_ptr(from.cast()).load(Ordering::Acquire);
                    data.copy_from_slice(&value.to_ne_bytes());
                }
                4 if from.addr() % 4 == 0 => {
                    let value = AtomicU32::from_ptr(from.cast()).load(Ordering::Acquire);
                    data.copy_from_slice(&value.to_ne_bytes());
                }
                8 if from.addr() % 8 == 0 => {
                    let value = AtomicU64::from_ptr(from.cast()).load(Ordering::Acquire);
                    data.copy_from_slice(&value.to_ne_bytes());
                }
                len => std::ptr::copy_nonoverlapping(from, data.as_mut_ptr(), len),
            }
        }
        Ok(())
    }

    /// Copies into the window. A naturally aligned access of 2, 4 or 8 bytes is one store.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> Result<(), OutOfBounds> {
        let at = self.check(offset, data.len(), true)?;
        // SAFETY: `check` found `data.len()` bytes from `at` on inside of the mapping, and the mapping writable. The
        // atomic types have no alignment beyond the one tested. No reference to the mapping exists, so `data` does not
        // overlap it.
        unsafe {
            let to = self.map.as_mut_ptr().add(at);
            match *data {
                [a, b] if to.addr() % 2 == 0 => {
                    AtomicU16::from_ptr(to.cast()).store(u16::from_ne_bytes([a, b]), Ordering::Release);
                }
                [a, b, c, d] if to.addr() % 4 == 0 => {
                    AtomicU32::from_ptr(to.cast()).store(u32::from_ne_bytes([a, b, c, d]), Ordering::Release);
                }
                [a, b, c, d, e, f, g, h] if to.addr() % 8 == 0 => {
                    let value = u64::from_ne_bytes([a, b, c, d, e, f, g, h]);
                    AtomicU64::from_ptr(to.cast()).store(value, Ordering::Release);
                }
                _ => std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()),
            }
        }
        Ok(())
    }

    /// Copies `len` bytes of the window to the end of `out`.
    pub(crate) fn append(&self, offset: u64, len: usize, out: &mut Vec<u8>) -> Result<(), OutOfBounds> {
        let at = self.check(offset, len, false)?;
        out.reserve(len);
        let spare = out.spare_capacity_mut().as_mut_ptr();
        // SAFETY: `check` found `len` bytes from `at` on inside of the mapping, which is readable by the type's invariant.
        // `reserve` made space for `len` bytes at `spare`, which belong to the vector alone and so do not overlap memory
        // that no reference exists to. The copy initialises them all before the length includes them.
        unsafe {
            std::ptr::copy_nonoverlapping(self.map.as_mut_ptr().add(at), spare.cast(), len);
            out.set_len(out.len() + len);
        }
        Ok(())
    }

    /// Changes the 8 bytes at `offset`, a little-endian number, in one step that no other access to them can interrupt,
    /// and returns what they were. `None` if they are not naturally aligned here.
    pub(crate) fn update(&self, offset: u64, mut change: impl FnMut(u64) -> u64) -> Result<Option<u64>, OutOfBounds> {
        let at = self.check(offset, 8, true)?;
        let to = self.map.as_mut_ptr().wrapping_add(at);
        if to.addr() % 8 != 0 {
            return Ok(None);
        }
        // SAFETY: `check` found 8 bytes from `at` on inside of the mapping, and that the mapping is writable and therefore
        // readable; the alignment was tested. The mapping outlives the reference, and is only accessed through raw pointers
        // and atomics.
        let word = unsafe { AtomicU64::from_ptr(to.cast()) };
        let step = |old: u64| Some(change(u64::from_le(old)).to_le());
        // Never refused, as `step` always has an answer.
        let old = match word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, step) {
            Ok(old) | Err(old) => old,
        };
        Ok(Some(u64::from_le(old)))
    }

    /// Copies `len` bytes from one window to another, or within one; the ranges may overlap.
    pub(crate) fn copy(from: &Window, from_at: u64, to: &Window, to_at: u64, len: u64) -> Result<(), OutOfBounds> {
        let len = usize::try_from(len).map_err(|_| OutOfBounds)?;
        let from_at = from.check(from_at, len, false)?;
        let to_at = to.check(to_at, len, true)?;
        // SAFETY: both ranges were found inside of their mappings, the source is readable, the target writable. `copy`
        // allows for overlap, which two mappings of one file may have as well.
        unsafe {
            std::ptr::copy(from.map.as_mut_ptr().add(from_at), to.map.as_mut_ptr().add(to_at), len);
        }
        Ok(())
    }
}
