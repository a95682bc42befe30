// SPDX-License-Identifier: GPL-2.0

//! Checks the requests in the structures of user space field by field and converts them to the module's own types.
//!
//! Context: may sleep, no locks held (see [`argument`](super::argument)).

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
    share::range_list,
    uapi::argument::{
        array,
        no_flags,
        no_reserved, //
    }, //
};
use core::mem::size_of;
use kernel::{page::PAGE_SIZE, prelude::*, sync::Arc};

/// The PCI addresses of a request's clients, each an unchecked [`abi::PciAddress`] as one word, so that two lists compare
/// word by word. Short lists need no allocation.
pub(super) struct ClientNames {
    few: [u64; Self::FEW],
    len: usize,
    /// All addresses, if there are more than [`Self::FEW`]. An `Option`, since dropping an empty vector costs more than reading
    /// a short list.
    many: Option<KVec<u64>>,
}

impl ClientNames {
    const FEW: usize = 8;
    const EACH: usize = size_of::<abi::PciAddress>();

    /// Reads an array of `count` addresses whose elements have `size` bytes. Errors: `E2BIG` (more than `MAX_CLIENTS`), `ENOMEM`,
    /// those of [`array`], and those of reading an element.
    pub(super) fn read(at: u64, count: u32, size: u32) -> Answer<Self> {
        const _: () = assert!(ClientNames::EACH == size_of::<u64>());
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
                "{} clients, at most {} are allowed",
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
            // The common case is one copy, as every allocation does this.
            abi::read_words(at as usize, all)?;
        } else {
            let (mut reader, _) = array(at, count, size)?;
            for name in all {
                *name = reader.read()?;
            }
        }
        Ok(names)
    }

    /// Returns the addresses in the caller's order.
    pub(super) fn as_slice(&self) -> &[u64] {
        match &self.many {
            Some(many) => many,
            None => self.few.get(..self.len).unwrap_or_default(),
        }
    }
}

/// Reads an array of ranges. Errors: `E2BIG` (more than `MAX_RANGES`), `ENOMEM`, those of [`array`], and those of reading an element.
pub(super) fn ranges(at: u64, count: u32, size: u32) -> Answer<KVec<Range>> {
    if count > consts::MAX_RANGES {
        return Err(range_list::too_many(count.into()));
    }
    let (mut reader, _) = array(at, count, size)?;
    let mut list = KVec::with_capacity(count as usize, GFP_KERNEL_ACCOUNT)?;
    for _ in 0..count {
        let abi::Range { offset, size } = reader.read()?;
        list.push(Range { offset, size }, GFP_KERNEL_ACCOUNT)?;
    }
    Ok(list)
}

/// Checks a request, and takes the topology snapshot for its clients. Sizes are rounded up to pages.
///
/// Errors: `EINVAL`, `E2BIG`, `EFAULT`, `ENOMEM`, and for the clients those of [`Orchestrator::snapshot`].
pub(super) fn check(
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
            "the alignment {} is not a power of two up to {}",
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
        strategy @ consts::STRATEGY_NEAREST..=consts::STRATEGY_STRIPE => strategy,
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
            Some(PathClass::Unreachable) | None => {
                return Err(refuse!(EINVAL, "{} is not a path class for max_class", raw))
            }
            class => class,
        },
    };
    let names = ClientNames::read(req.clients, req.nr_clients, req.client_size)?;
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

/// Returns the number of parts of a stripe of `pages` pages, 0 if the request does not set the number or wants no stripe.
fn parts(req: &abi::Request, pages: u64) -> Answer<usize> {
    let parts = req.parts as usize;
    if req.strategy != consts::STRATEGY_STRIPE {
        return match parts {
            0 => Ok(0),
            _ => Err(refuse!(EINVAL, "parts is for P2PMEM_STRATEGY_STRIPE only")),
        };
    }
    if parts > consts::MAX_PARTS {
        return Err(refuse!(
            E2BIG,
            "a stripe of {} parts, at most {} are allowed",
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
            "a stripe spans several providers: prefer one, but do not require it"
        ));
    }
    Ok(parts)
}
