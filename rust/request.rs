// SPDX-License-Identifier: GPL-2.0

//! What the structures of user space ask for, checked field by field.

use crate::{
    dmabuf,
    ext::uapi::{self, consts},
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

/// Addresses of functions; a few take no memory of their own.
pub(crate) struct Names {
    few: [PciAddr; Self::FEW],
    len: usize,
    /// All of them, where they are more than a few.
    many: KVec<PciAddr>,
}

impl Names {
    const FEW: usize = 8;
    const NONE: PciAddr = PciAddr {
        domain: 0,
        bus: 0,
        devfn: 0,
    };

    pub(crate) fn new() -> Self {
        Self {
            few: [Self::NONE; Self::FEW],
            len: 0,
            many: KVec::new(),
        }
    }

    fn push(&mut self, name: PciAddr) -> Result {
        if let Some(slot) = self.few.get_mut(self.len) {
            *slot = name;
            self.len += 1;
            return Ok(());
        }
        if self.many.is_empty() {
            self.many.extend_from_slice(&self.few, GFP_KERNEL)?;
        }
        Ok(self.many.push(name, GFP_KERNEL)?)
    }

    pub(crate) fn as_slice(&self) -> &[PciAddr] {
        if self.many.is_empty() {
            &self.few[..self.len]
        } else {
            &self.many
        }
    }
}

/// Adds the addresses of functions that an array has.
pub(crate) fn clients(at: u64, count: u32, names: &mut Names) -> Answer {
    if count > consts::MAX_CLIENTS {
        return Err(refuse!(
            E2BIG,
            "{} clients, at most {} are possible",
            count,
            consts::MAX_CLIENTS
        ));
    }
    let at = usize::try_from(at).map_err(|_| EFAULT)?;
    let mut from = UserPtr::from_addr(at);
    let mut left = count as usize;
    while left > 0 {
        // A few at once: each look into user space takes its time.
        let mut raw = [uapi::PciAddress::default(); Names::FEW];
        let some = left.min(Names::FEW);
        let len = some * size_of::<uapi::PciAddress>();
        UserSlice::new(from, len)
            .reader()
            .read_slice(&mut raw.as_bytes_mut()[..len])?;
        from = from.wrapping_byte_add(len);
        left -= some;
        for raw in &raw[..some] {
            no_reserved(raw.reserved.into())?;
            names.push(PciAddr {
                domain: raw.domain,
                bus: raw.bus,
                devfn: raw.devfn,
            })?;
        }
    }
    Ok(())
}

/// The ranges that an array names.
pub(crate) fn ranges(at: u64, count: u32) -> Answer<KVec<Range>> {
    if count > consts::MAX_RANGES {
        return Err(dmabuf::too_many(count.into()));
    }
    let at = usize::try_from(at).map_err(|_| EFAULT)?;
    let len = size_of::<uapi::Range>() * count as usize;
    let mut reader = UserSlice::new(UserPtr::from_addr(at), len).reader();
    let mut list = KVec::with_capacity(count as usize, GFP_KERNEL)?;
    for _ in 0..count {
        let uapi::Range { offset, size } = reader.read()?;
        list.push(Range { offset, size }, GFP_KERNEL)?;
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
    let mut names = Names::new();
    clients(req.clients, req.nr_clients, &mut names)?;
    Ok(Wish {
        size,
        align,
        view: orchestrator.view(names.as_slice())?,
        named,
        strategy,
        max_class,
        parts,
        own,
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
