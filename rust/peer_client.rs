// SPDX-License-Identifier: GPL-2.0

//! The peer-memory client: `ibv_reg_mr()` of mapped buffers, where the RDMA core has the interface for it.
//!
//! The core asks what memory a program registers that it cannot pin itself. Ours is what lies in mappings of one buffer,
//! as many of them as it takes. See Documentation/design/peer-memory.md.
//!
//! What is wrong with a range that begins in a buffer is said when the core wants the pages, not when it asks: cores
//! differ in whether an error of the first call reaches the program.

use crate::{
    buffer::Buffer,
    ext::{
        global,
        peer_mem::{self, Adapter, Asked, Form, ModuleRef, Slot},
        uapi::consts,
        vma::AddressSpace,
    },
    orchestrator::Orchestrator,
    ranges::Range,
    refusal::{refuse, Answer, Refusal},
    walk,
};
use kernel::{
    fmt, new_mutex,
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex,
    },
};

mod registration;

pub(crate) use registration::Registration;
use registration::{Call, Found};

const PAGE: u64 = PAGE_SIZE as u64;

/// All registrations that the core knows, and what was counted of them.
#[pin_data]
pub(crate) struct Peers {
    #[pin]
    all: Mutex<RBTree<u64, Arc<Registration>>>,
    /// Calls, in the order of [`Call`].
    calls: [Atomic<u64>; Call::NAMES.len()],
    /// Calls that came again, and that came before an earlier one of their order.
    repeated: Atomic<u64>,
    out_of_order: Atomic<u64>,
    refused: Atomic<u64>,
}

impl Peers {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            all <- new_mutex!(RBTree::new()),
            calls: [const { Atomic::new(0) }; Call::NAMES.len()],
            repeated: Atomic::new(0),
            out_of_order: Atomic::new(0),
            refused: Atomic::new(0),
        })
    }

    fn find(&self, id: u64) -> Option<Arc<Registration>> {
        self.all.lock().get(&id).cloned()
    }

    /// Calls `f` with each registration, one after the other and without a lock.
    fn for_each(&self, mut f: impl FnMut(&Registration)) {
        let next = |from| walk::at_or_after(&self.all.lock(), from);
        walk::one_by_one(next, |registration| f(registration));
    }

    /// One line about the interface, and the counters.
    pub(crate) fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let symvers = peer_mem::symvers().to_str().unwrap_or_default();
        f.write_fmt(fmt!("interface {symvers}\nregistered_as "))?;
        f.write_str(peer_mem::registered().map_or("off", Form::name))?;
        for (name, count) in Call::NAMES.iter().zip(&self.calls) {
            f.write_fmt(fmt!("\n{} {}", name, count.load(Relaxed)))?;
        }
        f.write_fmt(fmt!(
            "\nrepeated {}\nout_of_order {}\nrefused {}\n",
            self.repeated.load(Relaxed),
            self.out_of_order.load(Relaxed),
            self.refused.load(Relaxed)
        ))
    }

    /// One line a registration.
    pub(crate) fn list(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("id buffer provider address size entries state calls adapter owner\n")?;
        let mut result = Ok(());
        self.for_each(|registration| result = result.and_then(|()| registration.describe(f)));
        result
    }
}

/// Whether programs can register mapped buffers.
pub(crate) fn is_open() -> bool {
    peer_mem::registered().is_some()
}

/// The client as the core knows it; it does no more when this is dropped.
pub(crate) struct Door(#[allow(dead_code, reason = "held to be dropped")] Option<peer_mem::Registration<Client>>);

/// Registers the client in the form that the administrator chose. A core that does not take it does not keep the module
/// from its other work.
pub(crate) fn open() -> Result<Door> {
    let Some(form) = Form::chosen() else {
        return Ok(Door(None));
    };
    match peer_mem::Registration::new(c"p2pmem", form) {
        Ok(registration) => {
            pr_info!("ibv_reg_mr() takes mapped buffers (peer_memory={})\n", form.name());
            Ok(Door(Some(registration)))
        }
        Err(e) => {
            pr_warn!(
                "ibv_reg_mr() does not take mapped buffers: the RDMA core refuses the client (errno {})\n",
                -e.to_errno()
            );
            Ok(Door(None))
        }
    }
}

/// What is at the addresses that a program named. None where the first of them is not in a buffer.
fn look_up(space: &AddressSpace<Buffer>, asked: Asked) -> Option<Found> {
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

/// Collects the parts of the buffer that are mapped from `at` on. Stops with `at` where something is wrong.
fn collect(space: &AddressSpace<Buffer>, asked: Asked, at: &mut u64, found: &mut Found) -> Answer {
    if asked.size == 0 {
        return Err(refuse!(EINVAL, "a registration of 0 bytes at {:#x}", asked.address));
    }
    let end = asked.address.checked_add(asked.size);
    let Some(end) = end.and_then(|end| end.checked_next_multiple_of(PAGE)) else {
        return Err(refuse!(
            EINVAL,
            "{:#x} bytes at {:#x} end behind the last address",
            asked.size,
            asked.address
        ));
    };
    while *at < end {
        let Some(part) = space.mapped_at(*at, end - *at) else {
            return Err(refuse!(
                EFAULT,
                "{:#x} bytes at {:#x} begin in a buffer, and at {:#x} there is something else, or nothing",
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

/// The client.
pub(crate) struct Client;

impl Client {
    /// Tells the program that was refused, by the file that has the buffer, and the log.
    fn refused(context: &Registration, refusal: Refusal) -> Error {
        let Ok(orchestrator) = global::orchestrator() else {
            return refusal.error;
        };
        orchestrator.peers().refused.fetch_add(1, Relaxed);
        const WHAT: &str = "ibv_reg_mr";
        match orchestrator.file(context.buffer().file) {
            Some(file) => file.refused(WHAT, &refusal),
            None => refusal.log(WHAT),
        }
        refusal.error
    }

    /// Counts a call.
    fn count(context: &Registration, call: Call) {
        let Ok(orchestrator) = global::orchestrator() else {
            return;
        };
        let peers = orchestrator.peers();
        let note = context.note(call);
        peers.calls[call as usize].fetch_add(1, Relaxed);
        peers.repeated.fetch_add(u64::from(note.repeated), Relaxed);
        peers.out_of_order.fetch_add(u64::from(note.out_of_order), Relaxed);
    }

    /// False where the memory is not ours, or the module is being unloaded.
    fn enter(orchestrator: &Orchestrator, id: u64, asked: Asked) -> Result<bool> {
        let Some(found) = look_up(orchestrator.space(), asked) else {
            return Ok(false);
        };
        // While a program has a registration the module is not unloaded, whatever else the program has closed.
        let Some(module) = ModuleRef::get() else {
            return Ok(false);
        };
        let registration = Registration::new(id, asked, found, module)?;
        let node = RBTreeNode::new(id, registration.clone(), GFP_KERNEL_ACCOUNT)?;
        orchestrator.peers().all.lock().insert(node);
        Self::count(&registration, Call::Acquire);
        Ok(true)
    }
}

impl peer_mem::Client for Client {
    type Context = Registration;

    fn acquire(number: u64, asked: Asked) -> Result<bool> {
        match global::orchestrator() {
            Ok(orchestrator) => Self::enter(&orchestrator, number, asked),
            Err(_) => Ok(false),
        }
    }

    fn find(number: u64) -> Option<Arc<Registration>> {
        global::orchestrator().ok()?.peers().find(number)
    }

    fn get_pages(context: &Arc<Registration>, write: bool) -> Result {
        Self::count(context, Call::GetPages);
        context.hold(write).map_err(|refusal| Self::refused(context, refusal))
    }

    fn dma_map(context: &Registration, adapter: &Adapter<'_>) -> Result {
        Self::count(context, Call::DmaMap);
        context.map(adapter).map_err(|refusal| Self::refused(context, refusal))
    }

    fn slot(context: &Registration) -> &Slot {
        context.slot()
    }

    fn dma_unmap(context: &Registration) {
        Self::count(context, Call::DmaUnmap);
        context.unmapped();
    }

    fn put_pages(context: &Registration) {
        Self::count(context, Call::PutPages);
        context.let_go();
    }

    fn release(number: u64) {
        let Ok(orchestrator) = global::orchestrator() else {
            return;
        };
        let removed = orchestrator.peers().all.lock().remove(&number);
        // Outside the lock: what was not ended ends now.
        if let Some(registration) = removed {
            Self::count(&registration, Call::Release);
            registration.let_go();
        }
    }
}
