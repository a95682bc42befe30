// SPDX-License-Identifier: GPL-2.0

//! The peer-memory client: `ibv_reg_mr()` of mapped buffers, if the RDMA core has the peer-memory interface.
//!
//! C header: `rust/sys/peer_mem.h`
//!
//! The core asks its clients about memory that it cannot pin itself. The client accepts addresses that begin in a mapping
//! of a buffer. One registration may span several mappings of one buffer. See Documentation/design/peer-memory.md.
//!
//! Errors about the range are reported from get_pages, not from acquire: some RDMA cores do not return an error of acquire
//! to the program.
//!
//! Context: process context, may sleep. The core calls acquire in the registering task, with a lock held that all
//! registrations need; dma_unmap, put_pages and release may run in other threads, as [`crate::ext::peer_mem`] says. The
//! table of registrations is a mutex that is held for look-ups only.

use crate::{
    alloc::orchestrator::Orchestrator,
    ext::{
        abi::consts,
        global,
        peer_mem::{
            self,
            Adapter,
            Form,
            ModuleRef,
            RegistrationRequest,
            Slot, //
        },
        refusal::{
            refuse,
            Answer,
            Refusal, //
        },
        vma::AddressSpace, //
    },
    mem::buffer::Buffer,
    policy::ranges::Range,
    share::peer_registration::{
        Call,
        Found,
        PeerRegistration,
        Registrations, //
    }, //
};
use kernel::{
    fmt,
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    sync::Arc,
};

const PAGE: u64 = PAGE_SIZE as u64;

/// Whether `ibv_reg_mr()` accepts mapped buffers.
pub(crate) fn is_open() -> bool {
    peer_mem::registered().is_some()
}

/// The registration of the client with the core, and its table. Dropping it unregisters the client.
pub(crate) struct ClientRegistration {
    _client: Option<peer_mem::PeerMemoryRegistration<Client>>,
    _registrations: global::Registered<Registrations>,
}

/// Registers the client in the form that the module parameter `peer_memory` chose. If the core refuses the client, the
/// module works without it and logs a warning.
///
/// Errors: `ENOMEM`.
pub(crate) fn register() -> Result<ClientRegistration> {
    let registrations = global::Registered::new(Arc::pin_init(Registrations::new(), GFP_KERNEL)?)?;
    let client = Form::chosen().and_then(|form| match peer_mem::PeerMemoryRegistration::new(c"p2pmem", form) {
        Ok(client) => {
            pr_info!("ibv_reg_mr() takes mapped buffers (peer_memory={})\n", form.name());
            Some(client)
        }
        Err(e) => {
            pr_warn!(
                "ibv_reg_mr() does not take mapped buffers: the RDMA core refuses the client (errno {})\n",
                -e.to_errno()
            );
            None
        }
    });
    Ok(ClientRegistration {
        _client: client,
        _registrations: registrations,
    })
}

/// Writes debugfs' `peer_memory`: the interface and the counters of its calls.
pub(crate) fn describe(f: &mut fmt::Formatter<'_>) -> fmt::Result {
    Registrations::get().map_or(Ok(()), |registrations| registrations.describe(f))
}

/// Writes debugfs' `registrations`: one line for each registration.
pub(crate) fn list(f: &mut fmt::Formatter<'_>) -> fmt::Result {
    Registrations::get().map_or(Ok(()), |registrations| registrations.list(f))
}

/// Returns the buffer and its ranges at the addresses that a program registers, or `None` if the first page is not in a
/// mapping of a buffer. An error further on goes into [`Found::wrong`].
fn look_up(space: &AddressSpace<Buffer>, asked: RegistrationRequest) -> Option<Found> {
    let mut at = asked.address / PAGE * PAGE;
    let first = space.mapped_at(at, PAGE)?;
    let mut found = Found {
        buffer: first.object,
        ranges: KVec::new(),
        may_write: true,
        wrong: None,
    };
    if let Err(refusal) = collect(space, asked, &mut at, &mut found) {
        found.wrong = Some(refusal);
    }
    Some(found)
}

/// Collects the ranges of the buffer from address `at` on, joining adjacent ones. Advances `at` to the end, or to the page
/// with an error.
///
/// Errors: `EINVAL` (no bytes, or the end wraps around), `EFAULT` (something else is mapped there, or nothing), `EXDEV`
/// (another buffer), `E2BIG` (too many ranges), `ENOMEM`.
fn collect(space: &AddressSpace<Buffer>, asked: RegistrationRequest, at: &mut u64, found: &mut Found) -> Answer {
    if asked.size == 0 {
        return Err(refuse!(EINVAL, "a registration of 0 bytes at {:#x}", asked.address));
    }
    let end = asked.address.checked_add(asked.size);
    let Some(end) = end.and_then(|end| end.checked_next_multiple_of(PAGE)) else {
        return Err(refuse!(
            EINVAL,
            "{:#x} bytes at {:#x} wrap around the address space",
            asked.size,
            asked.address
        ));
    };
    while *at < end {
        let Some(part) = space.mapped_at(*at, end - *at) else {
            return Err(refuse!(
                EFAULT,
                "{:#x} bytes at {:#x} begin in a buffer, and {:#x} is not mapped to it",
                asked.size,
                asked.address,
                *at
            ));
        };
        if part.object.id != found.buffer.id {
            return Err(refuse!(
                EXDEV,
                "{:#x} bytes at {:#x} reach from one buffer into another one at {:#x}: register each by itself",
                asked.size,
                asked.address,
                *at
            ));
        }
        found.may_write &= part.may_write;
        let next = Range {
            offset: part.offset - (part.object.page_offset << PAGE_SHIFT),
            size: part.size,
        };
        *at += part.size;
        if let Some((both, last)) = found.ranges.last_mut().and_then(|last| Some((last.join(next)?, last))) {
            *last = both;
            continue;
        }
        if found.ranges.len() >= consts::MAX_RANGES as usize {
            return Err(refuse!(
                E2BIG,
                "{:#x} bytes at {:#x} are more than {} pieces of a buffer",
                asked.size,
                asked.address,
                consts::MAX_RANGES
            ));
        }
        found.ranges.push(next, GFP_KERNEL_ACCOUNT)?;
    }
    Ok(())
}

/// The client's callbacks.
pub(crate) struct Client;

impl Client {
    /// Reports a refusal to the file that allocated the buffer, for `P2PMEM_IOC_EXPLAIN_LAST`, and to the log. Returns the
    /// errno.
    fn refused(context: &PeerRegistration, refusal: Refusal) -> Error {
        if let Ok(registrations) = Registrations::get() {
            registrations.count_refusal();
        }
        let Ok(orchestrator) = Orchestrator::get() else {
            return refusal.error;
        };
        const WHAT: &str = "ibv_reg_mr";
        match orchestrator.file(context.buffer().file) {
            Some(file) => file.refused(WHAT, &refusal),
            None => refusal.log(WHAT),
        }
        refusal.error
    }

    /// Makes a registration. False if the memory is not a buffer's, or the module is being unloaded.
    ///
    /// Errors: `ENOMEM`.
    fn enter(orchestrator: &Orchestrator, id: u64, asked: RegistrationRequest) -> Result<bool> {
        let Some(found) = look_up(orchestrator.space(), asked) else {
            return Ok(false);
        };
        // Keeps the module loaded for as long as the registration exists, even if the program closed everything else.
        let Some(module) = ModuleRef::get() else {
            return Ok(false);
        };
        let registration = PeerRegistration::new(id, asked, found, module)?;
        Registrations::get()?.add(id, &registration)?;
        registration.count(Call::Acquire);
        Ok(true)
    }
}

impl peer_mem::Client for Client {
    type Context = PeerRegistration;

    fn acquire(number: u64, asked: RegistrationRequest) -> Result<bool> {
        match Orchestrator::get() {
            Ok(orchestrator) => Self::enter(&orchestrator, number, asked),
            Err(_) => Ok(false),
        }
    }

    fn find(number: u64) -> Option<Arc<PeerRegistration>> {
        Registrations::get().ok()?.find(number)
    }

    fn get_pages(context: &Arc<PeerRegistration>, write: bool) -> Result {
        context.count(Call::GetPages);
        context.hold(write).map_err(|refusal| Self::refused(context, refusal))
    }

    fn dma_map(context: &PeerRegistration, adapter: &Adapter<'_>) -> Result {
        context.count(Call::DmaMap);
        context.map(adapter).map_err(|refusal| Self::refused(context, refusal))
    }

    fn slot(context: &PeerRegistration) -> &Slot {
        context.slot()
    }

    fn dma_unmap(context: &PeerRegistration) {
        context.count(Call::DmaUnmap);
        context.unmapped();
    }

    fn put_pages(context: &PeerRegistration) {
        context.count(Call::PutPages);
        context.let_go();
    }

    fn release(number: u64) {
        let Ok(registrations) = Registrations::get() else {
            return;
        };
        // Dropped without the table's lock. Ends a registration for which the core did not call put_pages.
        if let Some(registration) = registrations.remove(number) {
            registration.count(Call::Release);
            registration.let_go();
        }
    }
}
