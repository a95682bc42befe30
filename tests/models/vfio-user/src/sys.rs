// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory shared with other processes, accessed without a reference to its bytes.
//!
//! The guest, the client and this process may change such memory at any time. All accesses are copies through raw
//! pointers. A copy that races with a change has unspecified bytes, but no effect on control flow.

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
pub(crate) struct SharedMapping {
    map: MmapRaw,
    writable: bool,
}

impl SharedMapping {
    /// Maps `len` bytes of `fd` from `offset` on; `offset` need not be aligned.
    ///
    /// # Errors
    ///
    /// Those of mmap; `InvalidInput` if `len` is 0 or exceeds `isize::MAX`.
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
        // INVARIANT: both kinds of mapping are readable, and `writable` is set only for the first.
        Ok(Self { map, writable })
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// Checks a range and returns its start as an index. With `write`, checks also that the mapping is writable.
    fn check(&self, offset: u64, len: usize, write: bool) -> Result<usize, OutOfBounds> {
        let end = offset.checked_add(len as u64).ok_or(OutOfBounds)?;
        if end > self.len() || write && !self.writable {
            return Err(OutOfBounds);
        }
        // No truncation: the end is at most the length of the mapping, which is a usize.
        Ok(offset as usize)
    }

    /// Copies from the mapping. A naturally aligned access of 2, 4 or 8 bytes is one load.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), OutOfBounds> {
        let at = self.check(offset, data.len(), false)?;
        // SAFETY: `check` ensures that `data.len()` bytes from `at` on lie in the mapping, which is readable by the
        // type's invariant. The atomic types need no alignment beyond the one tested, and every bit pattern is valid
        // for them. `data` is an exclusive reference and no reference to the mapping exists, so they do not overlap.
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

    /// Copies to the mapping. A naturally aligned access of 2, 4 or 8 bytes is one store.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> Result<(), OutOfBounds> {
        let at = self.check(offset, data.len(), true)?;
        // SAFETY: `check` ensures that `data.len()` bytes from `at` on lie in the mapping and that the mapping is
        // writable. The atomic types need no alignment beyond the one tested. No reference to the mapping exists, so
        // `data` does not overlap it.
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

    /// Appends `len` bytes of the mapping to `out`.
    pub(crate) fn append(&self, offset: u64, len: usize, out: &mut Vec<u8>) -> Result<(), OutOfBounds> {
        let at = self.check(offset, len, false)?;
        out.reserve(len);
        let spare = out.spare_capacity_mut().as_mut_ptr();
        // SAFETY: `check` ensures that `len` bytes from `at` on lie in the mapping, which is readable by the type's
        // invariant. `reserve` provides at least `len` bytes at `spare`. They belong to the vector alone, so they do not
        // overlap the mapping. The copy initialises all of them before `set_len`.
        unsafe {
            std::ptr::copy_nonoverlapping(self.map.as_mut_ptr().add(at), spare.cast(), len);
            out.set_len(out.len() + len);
        }
        Ok(())
    }

    /// Atomically replaces the little-endian 64-bit number at `offset` by `change` of it, and returns the old value.
    /// `None` if the bytes are not naturally aligned in this mapping.
    pub(crate) fn update(&self, offset: u64, mut change: impl FnMut(u64) -> u64) -> Result<Option<u64>, OutOfBounds> {
        let at = self.check(offset, 8, true)?;
        let to = self.map.as_mut_ptr().wrapping_add(at);
        if to.addr() % 8 != 0 {
            return Ok(None);
        }
        // SAFETY: `check` ensures that 8 bytes from `at` on lie in the mapping and that the mapping is writable; it is
        // readable by the type's invariant. The alignment is tested above. The mapping outlives the reference and is
        // accessed only through raw pointers and atomics.
        let word = unsafe { AtomicU64::from_ptr(to.cast()) };
        let step = |old: u64| Some(change(u64::from_le(old)).to_le());
        // Never fails, because `step` never returns `None`.
        let old = match word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, step) {
            Ok(old) | Err(old) => old,
        };
        Ok(Some(u64::from_le(old)))
    }

    /// Copies `len` bytes between two mappings or within one. The ranges may overlap.
    pub(crate) fn copy(
        from: &SharedMapping,
        from_at: u64,
        to: &SharedMapping,
        to_at: u64,
        len: u64,
    ) -> Result<(), OutOfBounds> {
        let len = usize::try_from(len).map_err(|_| OutOfBounds)?;
        let from_at = from.check(from_at, len, false)?;
        let to_at = to.check(to_at, len, true)?;
        // SAFETY: `check` ensures that both ranges lie in their mappings and that the target is writable; the source is
        // readable by the type's invariant. `copy` permits overlap, which two mappings of one file may have too.
        unsafe {
            std::ptr::copy(from.map.as_mut_ptr().add(from_at), to.map.as_mut_ptr().add(to_at), len);
        }
        Ok(())
    }
}
