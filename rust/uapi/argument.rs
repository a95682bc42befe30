// SPDX-License-Identifier: GPL-2.0

//! Copies ioctl arguments and arrays between the kernel and user space.
//!
//! The caller states the size of its structures, which may be older (shorter) or newer (longer) than the module's. A shorter
//! structure is read as if zeros followed. A longer one is accepted if its tail is zero, and refused with `E2BIG` otherwise.
//!
//! Context: may sleep, as every copy may fault. Callers hold no lock of this module, since the fault may be one in a mapping
//! of this module's own memory.

use crate::ext::{
    abi::consts,
    refusal::{
        refuse,
        Answer, //
    }, //
};
use core::mem::size_of;
use kernel::{
    prelude::*,
    transmute::{AsBytes, FromBytes},
    types::ScopeGuard,
    uaccess::{UserPtr, UserSlice, UserSliceReader, UserSliceWriter},
};

/// What undoes an ioctl. Dropping the value undoes the ioctl: the caller does not learn of a new handle or a new descriptor if the
/// structure with its number cannot be copied to user space.
pub(super) trait Undo {
    /// Does not undo the ioctl, which cannot fail any more.
    fn keep(self);
}

impl Undo for () {
    fn keep(self) {}
}

impl<T, F: FnOnce(T)> Undo for ScopeGuard<T, F> {
    fn keep(self) {
        self.dismiss();
    }
}

impl<U: Undo> Undo for KVec<U> {
    fn keep(self) {
        self.into_iter().for_each(U::keep);
    }
}

/// Refuses flags other than `known` with `EINVAL`.
pub(super) fn no_flags(flags: u32, known: u32) -> Answer {
    if flags & !known == 0 {
        Ok(())
    } else {
        Err(refuse!(EINVAL, "unknown flags {:#x}", flags & !known))
    }
}

/// Refuses a reserved field that is not zero with `EINVAL`.
pub(super) fn no_reserved(reserved: u32) -> Answer {
    if reserved == 0 {
        Ok(())
    } else {
        Err(refuse!(EINVAL, "a reserved field is not zero"))
    }
}

/// Returns a reader and a writer of structures in user space: an array of `count` elements of `size` bytes each, the size that the
/// caller states.
///
/// Errors: `EINVAL` (less than 4 bytes), `E2BIG` (more than `MAX_ELEMENT`).
pub(super) fn array(at: u64, count: u32, size: u32) -> Answer<(Reader, Writer)> {
    if count != 0 && size > consts::MAX_ELEMENT {
        return Err(refuse!(
            E2BIG,
            "the array elements have {} bytes, at most {} are allowed",
            size,
            consts::MAX_ELEMENT
        ));
    }
    if count != 0 && size < 4 {
        return Err(refuse!(
            EINVAL,
            "the array elements have {} bytes, at least 4 are needed",
            size
        ));
    }
    Ok(structures(
        UserPtr::from_addr(at as usize),
        count as usize,
        size as usize,
    ))
}

/// Returns a reader and a writer of `count` structures in user space that have `size` bytes each.
pub(super) fn structures(at: UserPtr, count: usize, size: usize) -> (Reader, Writer) {
    let (reader, writer) = UserSlice::new(at, size * count).reader_writer();
    (Reader { reader, size }, Writer { writer, size })
}

/// Reads structures in user space one after the other.
pub(super) struct Reader {
    reader: UserSliceReader,
    size: usize,
}

impl Reader {
    /// Reads the next structure. Missing bytes are zero; bytes beyond the module's structure have to be zero (`E2BIG`).
    #[inline(always)]
    pub(super) fn read<T: AsBytes + FromBytes + Default>(&mut self) -> Answer<T> {
        if self.size == size_of::<T>() {
            // The common case is a copy of constant size into memory that is not cleared first.
            return Ok(self.reader.read()?);
        }
        self.read_other_size()
    }

    /// The part of [`Self::read`] for a structure that is longer or shorter than the module's.
    #[cold]
    #[inline(never)]
    fn read_other_size<T: AsBytes + FromBytes + Default>(&mut self) -> Answer<T> {
        let mut value = T::default();
        let known = self.size.min(size_of::<T>());
        self.reader
            .read_slice(&mut AsBytes::as_bytes_mut(&mut value)[..known])?;
        let mut left = self.size - known;
        let mut tail = [0u8; 64];
        while left > 0 {
            let some = left.min(tail.len());
            self.reader.read_slice(&mut tail[..some])?;
            if tail[..some].iter().any(|byte| *byte != 0) {
                return Err(refuse!(
                    E2BIG,
                    "a structure of {} bytes is not zero beyond the {} that this module knows",
                    self.size,
                    size_of::<T>()
                ));
            }
            left -= some;
        }
        Ok(value)
    }
}

/// Writes structures in user space one after the other.
pub(super) struct Writer {
    writer: UserSliceWriter,
    size: usize,
}

impl Writer {
    /// Writes the next structure, truncated to the caller's size or followed by zeros.
    #[inline(always)]
    pub(super) fn write<T: AsBytes>(&mut self, value: &T) -> Answer {
        if self.size == size_of::<T>() {
            // The common case is a copy of constant size, which the compiler inlines.
            return Ok(self.writer.write(value)?);
        }
        let bytes = value.as_bytes();
        self.writer.write_slice(bytes.get(..self.size).unwrap_or(bytes))?;
        let mut zeros = self.size.saturating_sub(bytes.len());
        while zeros > 0 {
            let some = [0; 64].get(..zeros).unwrap_or(&[0; 64]);
            self.writer.write_slice(some)?;
            zeros -= some.len();
        }
        Ok(())
    }
}
