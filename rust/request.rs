// SPDX-License-Identifier: GPL-2.0

//! What the structures of user space ask for, checked field by field.

use crate::{
    dmabuf,
    ext::uapi::{self, consts},
    memory::Clearing,
    orchestrator::{Orchestrator, Wish},
    path::{PathClass, PciAddr},
    placement::Named,
    ranges::Range,
    refusal::{refuse, Answer},
    rules::Book,
};
use core::mem::size_of;
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::Arc,
    transmute::AsBytes,
    uaccess::{UserPtr, UserSlice, UserSliceWriter},
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

/// A writer for an array of user space.
pub(crate) fn array_writer<T>(at: u64, count: u32) -> Answer<UserSliceWriter> {
    let at = usize::try_from(at).map_err(|_| EFAULT)?;
    let len = size_of::<T>().checked_mul(count as usize).ok_or(EFAULT)?;
    Ok(UserSlice::new(UserPtr::from_addr(at), len).writer())
}

/// Addresses of functions as user space has them, each a [`uapi::PciAddress`] of which nothing is checked. That one list is
/// the same as another is known from that. A few take no memory of their own.
pub(crate) struct Names {
    few: [u64; Self::FEW],
    len: usize,
    /// All of them, where they are more than a few. Dropping an empty list would take longer than reading a few.
    many: Option<KVec<u64>>,
}

impl Names {
    const FEW: usize = 8;
    const EACH: usize = size_of::<uapi::PciAddress>();

    /// Those that an array has.
    pub(crate) fn read(at: u64, count: u32) -> Answer<Self> {
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
        let at = usize::try_from(at).map_err(|_| EFAULT)?;
        let len = names.len * Self::EACH;
        let mut reader = UserSlice::new(UserPtr::from_addr(at), len).reader();
        if names.len <= Self::FEW {
            reader.read_slice(&mut AsBytes::as_bytes_mut(&mut names.few)[..len])?;
            return Ok(names);
        }
        let mut many = KVec::from_elem(0u64, names.len, GFP_KERNEL_ACCOUNT)?;
        reader.read_slice(AsBytes::as_bytes_mut(&mut many[..]))?;
        names.many = Some(many);
        Ok(names)
    }

    pub(crate) fn as_slice(&self) -> &[u64] {
        match &self.many {
            Some(many) => many,
            None => self.few.get(..self.len).unwrap_or_default(),
        }
    }
}

/// Checks one of [`Names`].
pub(crate) fn address(raw: u64) -> Answer<PciAddr> {
    let [d0, d1, d2, d3, bus, devfn, r0, r1] = raw.to_ne_bytes();
    no_reserved(u16::from_ne_bytes([r0, r1]).into())?;
    Ok(PciAddr {
        domain: u32::from_ne_bytes([d0, d1, d2, d3]),
        bus,
        devfn,
    })
}

/// The ranges that an array names.
pub(crate) fn ranges(at: u64, count: u32) -> Answer<KVec<Range>> {
    if count > consts::MAX_RANGES {
        return Err(dmabuf::too_many(count.into()));
    }
    let at = usize::try_from(at).map_err(|_| EFAULT)?;
    let len = size_of::<uapi::Range>() * count as usize;
    let mut reader = UserSlice::new(UserPtr::from_addr(at), len).reader();
    let mut list = KVec::with_capacity(count as usize, GFP_KERNEL_ACCOUNT)?;
    for _ in 0..count {
        let uapi::Range { offset, size } = reader.read()?;
        list.push(Range { offset, size }, GFP_KERNEL_ACCOUNT)?;
    }
    Ok(list)
}

/// Checks a request.
pub(crate) fn wish(req: &uapi::Request, own: Option<Arc<Book>>, orchestrator: &Orchestrator) -> Answer<Wish> {
    const PAGE: u64 = PAGE_SIZE as u64;
    no_flags(req.flags, consts::ALLOC_PREFER)?;
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
    let names = Names::read(req.clients, req.nr_clients)?;
    Ok(Wish {
        size,
        align,
        view: orchestrator.view(names.as_slice())?,
        named,
        strategy,
        max_class,
        parts,
        own,
        clearing: Clearing::Now,
    })
}

/// How many providers a request of so many pages is to be divided among; 0 where that is open.
fn parts(req: &uapi::Request, pages: u64) -> Answer<usize> {
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
