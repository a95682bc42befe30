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
    uaccess::{UserPtr, UserSlice, UserSliceReader, UserSliceWriter},
};

/// The argument of an ioctl: the address of the caller's structure and its size in bytes, which `cmd` encodes.
#[derive(Clone, Copy)]
pub(super) struct Argument {
    pub(super) at: UserPtr,
    pub(super) size: usize,
}

impl Argument {
    /// Copies the structure from user space, calls `method`, and if it succeeds and `out` is set copies the structure back.
    ///
    /// Errors: `EINVAL` (the caller's structure is shorter than `least` bytes), `E2BIG`, `EFAULT`, and those of `method`.
    pub(super) fn exchange<T: FromBytes + AsBytes + Default>(
        self,
        least: usize,
        method: impl FnOnce(&mut T) -> Answer,
        out: bool,
    ) -> Answer {
        self.at_least(least)?;
        let (mut reader, mut writer) = UserSlice::new(self.at, self.size).reader_writer();
        let mut value = read_sized::<T>(&mut reader, self.size)?;
        method(&mut value)?;
        if out {
            self.write(&mut writer, &value)?;
        }
        Ok(())
    }

    /// Writes the part of a structure that fits the caller's size.
    #[inline(always)]
    fn write<T: AsBytes>(self, writer: &mut UserSliceWriter, value: &T) -> Result {
        if self.size == size_of::<T>() {
            // The common case is a copy of constant size, which the compiler inlines.
            return writer.write(value);
        }
        let bytes = value.as_bytes();
        writer.write_slice(bytes.get(..self.size).unwrap_or(bytes))
    }

    /// Copies an output-only structure to user space, and fills a longer structure of the caller up with zeros.
    pub(super) fn answer<T: AsBytes>(self, value: &T) -> Answer {
        let mut writer = UserSlice::new(self.at, self.size).writer();
        self.write(&mut writer, value)?;
        write_zeros(&mut writer, self.size.saturating_sub(size_of::<T>()))
    }

    pub(super) fn at_least(self, least: usize) -> Answer {
        if self.size >= least {
            return Ok(());
        }
        Err(refuse!(
            EINVAL,
            "the argument has {} bytes, at least {} are needed",
            self.size,
            least
        ))
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

/// Returns a writer for a text buffer of `len` bytes in user space.
pub(super) fn text_writer(at: u64, len: u32) -> Answer<UserSliceWriter> {
    let at = usize::try_from(at).map_err(|_| EFAULT)?;
    Ok(UserSlice::new(UserPtr::from_addr(at), len as usize).writer())
}

/// Returns the memory of an array of `count` elements of `size` bytes each, the size that the caller states.
///
/// Errors: `EINVAL` (less than 4 bytes), `E2BIG` (more than `MAX_ELEMENT`), `EFAULT` (the address space ends before the array).
pub(super) fn array(at: u64, count: u32, size: u32) -> Answer<UserSlice> {
    let at = usize::try_from(at).map_err(|_| EFAULT)?;
    if count == 0 {
        return Ok(UserSlice::new(UserPtr::from_addr(at), 0));
    }
    if size > consts::MAX_ELEMENT {
        return Err(refuse!(
            E2BIG,
            "the array elements have {} bytes, at most {} are allowed",
            size,
            consts::MAX_ELEMENT
        ));
    }
    if size < 4 {
        return Err(refuse!(
            EINVAL,
            "the array elements have {} bytes, at least 4 are needed",
            size
        ));
    }
    let len = (size as usize).checked_mul(count as usize).ok_or(EFAULT)?;
    Ok(UserSlice::new(UserPtr::from_addr(at), len))
}

/// Writes the elements of an array in user space one after the other.
pub(super) struct ArrayWriter {
    writer: UserSliceWriter,
    size: usize,
}

impl ArrayWriter {
    /// Starts at the first of `count` elements of `size` bytes each.
    pub(super) fn new(at: u64, count: u32, size: u32) -> Answer<Self> {
        Ok(Self {
            writer: array(at, count, size)?.writer(),
            size: size as usize,
        })
    }

    /// Writes the next element, truncated to the caller's size or followed by zeros.
    pub(super) fn write<T: AsBytes>(&mut self, value: &T) -> Answer {
        let bytes = value.as_bytes();
        self.writer.write_slice(bytes.get(..self.size).unwrap_or(bytes))?;
        write_zeros(&mut self.writer, self.size.saturating_sub(bytes.len()))
    }
}

/// Reads the elements of an array in user space one after the other.
pub(super) struct ArrayReader {
    reader: UserSliceReader,
    size: usize,
}

impl ArrayReader {
    /// Starts at the first of `count` elements of `size` bytes each.
    pub(super) fn new(at: u64, count: u32, size: u32) -> Answer<Self> {
        Ok(Self {
            reader: array(at, count, size)?.reader(),
            size: size as usize,
        })
    }

    /// Reads the next element, see [`read_sized`].
    pub(super) fn read<T: AsBytes + FromBytes + Default>(&mut self) -> Answer<T> {
        read_sized(&mut self.reader, self.size)
    }
}

/// Writes `len` zero bytes.
pub(super) fn write_zeros(writer: &mut UserSliceWriter, mut len: usize) -> Answer {
    const ZEROS: [u8; 64] = [0; 64];
    while len > 0 {
        let some = ZEROS.get(..len).unwrap_or(&ZEROS);
        writer.write_slice(some)?;
        len -= some.len();
    }
    Ok(())
}

/// Reads a structure of which the caller has `size` bytes. Missing bytes are zero; bytes beyond the module's structure have to
/// be zero (`E2BIG`).
#[inline(always)]
pub(super) fn read_sized<T: AsBytes + FromBytes + Default>(reader: &mut UserSliceReader, size: usize) -> Answer<T> {
    if size == size_of::<T>() {
        // The common case is a copy of constant size into memory that is not cleared first.
        return Ok(reader.read()?);
    }
    read_other_size(reader, size)
}

/// The part of [`read_sized`] for a structure that is longer or shorter than the module's.
#[cold]
#[inline(never)]
fn read_other_size<T: AsBytes + FromBytes + Default>(reader: &mut UserSliceReader, size: usize) -> Answer<T> {
    let mut value = T::default();
    let known = size.min(size_of::<T>());
    reader.read_slice(&mut AsBytes::as_bytes_mut(&mut value)[..known])?;
    let mut left = size - known;
    let mut tail = [0u8; 64];
    while left > 0 {
        let some = left.min(tail.len());
        reader.read_slice(&mut tail[..some])?;
        if tail[..some].iter().any(|byte| *byte != 0) {
            return Err(refuse!(
                E2BIG,
                "a structure of {} bytes is not zero beyond the {} that this module knows",
                size,
                size_of::<T>()
            ));
        }
        left -= some;
    }
    Ok(value)
}
