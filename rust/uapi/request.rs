// SPDX-License-Identifier: GPL-2.0

//! What the structures of user space ask for, checked field by field.

use crate::{
    alloc::{
        orchestrator::Orchestrator,
        request::AllocRequest,
        rules::RuleSet, //
    },
    ext::{
        abi::{
            self,
            consts, //
        },
        refusal::{
            refuse,
            Answer, //
        }, //
    },
    mem::memory::Clearing,
    policy::{
        path::PathClass,
        placement::Named,
        ranges::Range, //
    },
    share::dmabuf, //
};
use core::mem::size_of;
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::Arc,
    transmute::{AsBytes, FromBytes},
    uaccess::{UserPtr, UserSlice, UserSliceReader, UserSliceWriter},
};

pub(crate) fn no_flags(flags: u32, known: u32) -> Answer {
    if flags & !known == 0 {
        Ok(())
    } else {
        Err(refuse!(EINVAL, "unknown flags {:#x}", flags & !known))
    }
}

pub(crate) fn no_reserved(reserved: u32) -> Answer {
    if reserved == 0 {
        Ok(())
    } else {
        Err(refuse!(EINVAL, "a reserved field is not zero"))
    }
}

/// A writer for a text of user space.
pub(crate) fn text_writer(at: u64, len: u32) -> Answer<UserSliceWriter> {
    let at = usize::try_from(at).map_err(|_| EFAULT)?;
    Ok(UserSlice::new(UserPtr::from_addr(at), len as usize).writer())
}

/// The memory of an array whose elements have the size that the caller stated.
fn array(at: u64, count: u32, size: u32) -> Answer<UserSlice> {
    let at = usize::try_from(at).map_err(|_| EFAULT)?;
    if count == 0 {
        return Ok(UserSlice::new(UserPtr::from_addr(at), 0));
    }
    if size > consts::MAX_ELEMENT {
        return Err(refuse!(
            E2BIG,
            "elements of {} bytes, at most {} are possible",
            size,
            consts::MAX_ELEMENT
        ));
    }
    if size < 4 {
        return Err(refuse!(EINVAL, "elements of {} bytes, at least 4 are needed", size));
    }
    let len = (size as usize).checked_mul(count as usize).ok_or(EFAULT)?;
    Ok(UserSlice::new(UserPtr::from_addr(at), len))
}

/// Writes an array of user space.
pub(crate) struct ArrayWriter {
    writer: UserSliceWriter,
    size: usize,
}

impl ArrayWriter {
    /// For `count` elements of `size` bytes each.
    pub(crate) fn new(at: u64, count: u32, size: u32) -> Answer<Self> {
        Ok(Self {
            writer: array(at, count, size)?.writer(),
            size: size as usize,
        })
    }

    /// Writes one element: cut to the caller's size, or filled up with zeros.
    pub(crate) fn write<T: AsBytes>(&mut self, value: &T) -> Answer {
        let bytes = value.as_bytes();
        self.writer.write_slice(bytes.get(..self.size).unwrap_or(bytes))?;
        write_zeros(&mut self.writer, self.size.saturating_sub(bytes.len()))
    }
}

/// Reads an array of user space.
pub(crate) struct ArrayReader {
    reader: UserSliceReader,
    size: usize,
}

impl ArrayReader {
    /// For `count` elements of `size` bytes each.
    pub(crate) fn new(at: u64, count: u32, size: u32) -> Answer<Self> {
        Ok(Self {
            reader: array(at, count, size)?.reader(),
            size: size as usize,
        })
    }

    /// Reads one element: what is missing is zero, what is unknown has to be.
    pub(crate) fn read<T: AsBytes + FromBytes + Default>(&mut self) -> Answer<T> {
        read_sized(&mut self.reader, self.size)
    }
}

/// Writes that many zeros.
pub(crate) fn write_zeros(writer: &mut UserSliceWriter, mut len: usize) -> Answer {
    const ZEROS: [u8; 64] = [0; 64];
    while len > 0 {
        let some = ZEROS.get(..len).unwrap_or(&ZEROS);
        writer.write_slice(some)?;
        len -= some.len();
    }
    Ok(())
}

/// Reads a structure of which the caller has `size` bytes: what is missing is zero, what is unknown has to be.
#[inline(always)]
pub(crate) fn read_sized<T: AsBytes + FromBytes + Default>(reader: &mut UserSliceReader, size: usize) -> Answer<T> {
    if size == size_of::<T>() {
        // Without clearing its place first: this is on the way of every call.
        return Ok(reader.read()?);
    }
    read_other_size(reader, size)
}

/// As [`read_sized`], of a structure that is longer or shorter than the module's.
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

/// Addresses of functions as user space has them, each a [`abi::PciAddress`] of which nothing is checked. That one list is
/// the same as another is known from that. A few take no memory of their own.
pub(crate) struct Names {
    few: [u64; Self::FEW],
    len: usize,
    /// All of them, where they are more than a few. Dropping an empty list would take longer than reading a few.
    many: Option<KVec<u64>>,
}

impl Names {
    const FEW: usize = 8;
    const EACH: usize = size_of::<abi::PciAddress>();

    /// Those that an array has, whose elements are of `size` bytes.
    pub(crate) fn read(at: u64, count: u32, size: u32) -> Answer<Self> {
        const _: () = assert!(Names::EACH == size_of::<u64>());
        let mut names = Self {
            few: [0; Self::FEW],
            len: count as usize,
            many: None,
        };
        if names.len == 0 {
            return Ok(names);
        }
        if count > consts::MAX_CLIENTS {
            return Err(refuse!(
                E2BIG,
                "{} clients, at most {} are possible",
                count,
                consts::MAX_CLIENTS
            ));
        }
        if names.len > Self::FEW {
            names.many = Some(KVec::from_elem(0u64, names.len, GFP_KERNEL_ACCOUNT)?);
        }
        let all = match &mut names.many {
            Some(many) => &mut many[..],
            None => &mut names.few[..names.len],
        };
        if size as usize == Self::EACH {
            // At once: this is on the way of every decision.
            abi::read_words(usize::try_from(at).map_err(|_| EFAULT)?, all)?;
        } else {
            let mut reader = array(at, count, size)?.reader();
            for name in all {
                *name = read_sized(&mut reader, size as usize)?;
            }
        }
        Ok(names)
    }

    pub(crate) fn as_slice(&self) -> &[u64] {
        match &self.many {
            Some(many) => many,
            None => self.few.get(..self.len).unwrap_or_default(),
        }
    }
}

/// The ranges that an array names.
pub(crate) fn ranges(at: u64, count: u32, size: u32) -> Answer<KVec<Range>> {
    if count > consts::MAX_RANGES {
        return Err(dmabuf::too_many(count.into()));
    }
    let mut reader = ArrayReader::new(at, count, size)?;
    let mut list = KVec::with_capacity(count as usize, GFP_KERNEL_ACCOUNT)?;
    for _ in 0..count {
        let abi::Range { offset, size } = reader.read()?;
        list.push(Range { offset, size }, GFP_KERNEL_ACCOUNT)?;
    }
    Ok(list)
}

/// Checks a request.
pub(crate) fn wanted(
    req: &abi::Request,
    own: Option<Arc<RuleSet>>,
    orchestrator: &Orchestrator,
) -> Answer<AllocRequest> {
    const PAGE: u64 = PAGE_SIZE as u64;
    no_flags(req.flags, consts::ALLOC_PREFER)?;
    no_reserved(req.reserved)?;
    no_reserved(u32::from(req.spare.iter().fold(0, |all, word| all | word) != 0))?;
    if req.size == 0 {
        return Err(refuse!(EINVAL, "a buffer of 0 bytes"));
    }
    let size = req
        .size
        .checked_next_multiple_of(PAGE)
        .ok_or_else(|| refuse!(EINVAL, "a size of {} bytes cannot be rounded up to pages", req.size))?;
    let align = req.align.max(PAGE);
    if req.align != 0 && !req.align.is_power_of_two() || align > consts::MAX_ALIGN {
        return Err(refuse!(
            EINVAL,
            "an alignment of {} is no power of two up to {}",
            req.align,
            consts::MAX_ALIGN
        ));
    }
    let strategy = match req.strategy {
        consts::STRATEGY_UPSTREAM if req.nr_clients == 0 => {
            return Err(refuse!(
                EINVAL,
                "the kernel's own choice needs clients: nr_clients is 0"
            ));
        }
        known @ consts::STRATEGY_NEAREST..=consts::STRATEGY_STRIPE => known,
        other => return Err(refuse!(EINVAL, "unknown strategy {}", other)),
    };
    let parts = parts(req, size / PAGE)?;
    let prefer = req.flags & consts::ALLOC_PREFER != 0;
    let named = match req.provider {
        0 if prefer => return Err(refuse!(EINVAL, "P2PMEM_ALLOC_PREFER without a provider to prefer")),
        0 => Named::Any,
        id if prefer => Named::Prefer(id),
        id => Named::Require(id),
    };
    let max_class = match req.max_class {
        0 => None,
        raw => match PathClass::from_raw(raw) {
            Some(PathClass::Unreachable) | None => return Err(refuse!(EINVAL, "{} is no max_class", raw)),
            class => class,
        },
    };
    let names = Names::read(req.clients, req.nr_clients, req.client_size)?;
    Ok(AllocRequest {
        size,
        align,
        snapshot: orchestrator.snapshot(names.as_slice())?,
        named,
        strategy,
        max_class,
        parts,
        own,
        clearing: Clearing::Now,
    })
}

/// How many providers a request of so many pages is to be divided among; 0 where that is open.
fn parts(req: &abi::Request, pages: u64) -> Answer<usize> {
    let parts = req.parts as usize;
    if req.strategy != consts::STRATEGY_STRIPE {
        return match parts {
            0 => Ok(0),
            _ => Err(refuse!(EINVAL, "parts are for P2PMEM_STRATEGY_STRIPE alone")),
        };
    }
    if parts > consts::MAX_PARTS {
        return Err(refuse!(
            E2BIG,
            "a stripe of {} parts, at most {} are possible",
            parts,
            consts::MAX_PARTS
        ));
    }
    if parts as u64 > pages {
        return Err(refuse!(
            EINVAL,
            "{} pages cannot be divided into {} parts",
            pages,
            parts
        ));
    }
    if req.provider != 0 && req.flags & consts::ALLOC_PREFER == 0 {
        return Err(refuse!(
            EINVAL,
            "a stripe is in several providers: one can be preferred, but not required"
        ));
    }
    Ok(parts)
}
