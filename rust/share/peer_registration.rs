// SPDX-License-Identifier: GPL-2.0

//! A registration: a part of a buffer that an RDMA adapter can reach, from when the core asks until it forgets it.
//!
//! It holds its buffer like a handle or a dma-buf does, from get_pages to put_pages. When the buffer is revoked, the core
//! is told to make the adapter forget it.

use crate::{
    ext::{
        abi,
        completion::Completion,
        dma_buf::{
            DeviceName,
            PhysRange, //
        },
        global,
        log::{
            LoggedWait,
            Owner, //
        },
        peer_mem::{
            self,
            Adapter,
            Asked,
            Form,
            ModuleRef,
            Slot, //
        },
        refusal::{
            refuse,
            Answer,
            Refusal, //
        },
        trace::{
            self,
            RegistrationMethod, //
        }, //
    },
    mem::{
        buffer::Buffer,
        traits::{
            Revocable,
            RevokeDeadline, //
        },
        walk, //
    },
    policy::ranges::Range,
    share::dmabuf, //
};
use kernel::{
    fmt, new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex,
    },
};

/// What the core calls, and what it is called for (invalidate), in the order in which it comes.
///
/// An invalidation is ours: it may cross the end of the registration by its program, and be noted at any place of it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd)]
#[repr(u8)]
pub(super) enum Call {
    Acquire,
    GetPages,
    DmaMap,
    Invalidate,
    DmaUnmap,
    PutPages,
    Release,
}

impl Call {
    /// By number.
    pub(super) const NAMES: [&'static str; 7] = [
        "acquire",
        "get_pages",
        "dma_map",
        "invalidate",
        "dma_unmap",
        "put_pages",
        "release",
    ];
}

/// What was noted of a call.
pub(super) struct Note {
    pub(super) repeated: bool,
    pub(super) out_of_order: bool,
}

/// What a program named: parts of a buffer, and what is wrong with them.
pub(super) struct Found {
    pub(super) buffer: Arc<Buffer>,
    pub(super) ranges: KVec<Range>,
    /// Whether all of the mappings are writable or could be made so.
    pub(super) may_write: bool,
    pub(super) wrong: Option<Refusal>,
}

/// Whose DMA it is for.
#[derive(Clone, Copy)]
enum For {
    Unknown,
    /// An adapter that works with the CPU.
    Cpu,
    Device(DeviceName),
}

impl fmt::Display for For {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("-"),
            Self::Cpu => f.write_str("virtual"),
            Self::Device(name) => fmt::Display::fmt(name, f),
        }
    }
}

/// Calls that are remembered of one registration.
const CALLS: usize = 12;

struct State {
    calls: [Option<Call>; CALLS],
    /// Whether it is a holder of its buffer.
    held: bool,
    revoked: bool,
    adapter: For,
    entries: u32,
}

/// A registration.
#[pin_data]
pub(crate) struct PeerRegistration {
    id: u64,
    owner: Owner,
    asked: Asked,
    found: Found,
    #[pin]
    place: Slot,
    #[pin]
    state: Mutex<State>,
    /// Its mapping is gone.
    #[pin]
    idle: Completion,
    _module: ModuleRef,
}

impl PeerRegistration {
    /// `id` is a number that is used once.
    pub(super) fn new(id: u64, asked: Asked, found: Found, module: ModuleRef) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                id,
                owner: Owner::current(),
                asked,
                found,
                place <- Slot::new(),
                state <- new_mutex!(State {
                    calls: [None; CALLS],
                    held: false,
                    revoked: false,
                    adapter: For::Unknown,
                    entries: 0,
                }),
                idle <- Completion::new(),
                _module: module,
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    pub(super) fn buffer(&self) -> &Arc<Buffer> {
        &self.found.buffer
    }

    pub(super) fn slot(&self) -> &Slot {
        &self.place
    }

    /// Remembers a call.
    pub(super) fn note(&self, call: Call) -> Note {
        let mut state = self.state.lock();
        let before = state.calls.iter().flatten();
        let repeated = before.clone().any(|&c| c == call);
        let note = Note {
            repeated,
            out_of_order: !repeated && call != Call::Invalidate && before.clone().any(|&c| c > call),
        };
        if let Some(free) = state.calls.iter_mut().find(|c| c.is_none()) {
            *free = Some(call);
        }
        note
    }

    /// Becomes a holder of the buffer. `write`: the adapter will write.
    pub(super) fn hold(self: &Arc<Self>, write: bool) -> Answer {
        if let Some(wrong) = &self.found.wrong {
            return Err(wrong.again());
        }
        if write && !self.found.may_write {
            return Err(refuse!(
                EACCES,
                "the mapping at {:#x} is of a file that was opened for reading only",
                self.asked.address
            ));
        }
        let revocable: Arc<dyn Revocable> = self.clone();
        let node = RBTreeNode::new(self.id, revocable, GFP_KERNEL_ACCOUNT)?;
        let mut state = self.state.lock();
        if state.held {
            return Err(EBUSY.into());
        }
        state.held = true;
        drop(state);
        self.buffer().add_registration(node).map_err(|_| {
            self.state.lock().held = false;
            self.gone()
        })
    }

    fn gone(&self) -> Refusal {
        let provider = &self.buffer().provider;
        if provider.is_live() {
            refuse!(
                ENODEV,
                "the buffer was freed and unmapped while it was being registered"
            )
        } else {
            refuse!(ENODEV, "the buffer was revoked: its provider {} left", provider.addr)
        }
    }

    /// Maps the memory for an adapter.
    pub(super) fn map(&self, adapter: &Adapter<'_>) -> Answer {
        let buffer = self.buffer();
        let provider = &buffer.provider;
        let unsupported = abi::errno(abi::EOPNOTSUPP);
        let name = adapter.name();
        let (target, start) = buffer.target()?;
        if let Some(name) = &name {
            if !adapter.reaches(provider.function()) {
                return Err(dmabuf::unreachable(provider, name, adapter.function()));
            }
            dmabuf::allowed(buffer, adapter.function(), name)?;
            if !target.is_for_dma() {
                return Err(refuse!(
                    unsupported,
                    "memory of {} cannot be mapped for DMA: its driver published it, and it lies in none of its BARs",
                    provider.addr
                ));
            }
        } else {
            if !provider.has_pages() {
                return Err(refuse!(
                    unsupported,
                    "{} was published without pages, which an RDMA adapter needs that works with the CPU",
                    provider.addr
                ));
            }
            buffer.hold_pages().map_err(|_| self.gone())?;
        }
        let mut pieces = KVec::with_capacity(self.found.ranges.len(), GFP_KERNEL_ACCOUNT)?;
        for range in &self.found.ranges {
            pieces.push(PhysRange::new(start + range.offset, range.size)?, GFP_KERNEL_ACCOUNT)?;
        }
        let entries = self.place.map(adapter, target, &pieces).map_err(|e| match e {
            e if e == ENODEV => self.gone(),
            e => refuse!(
                e,
                "the kernel does not map {} bytes of {} for the adapter",
                self.asked.size,
                provider.addr
            ),
        })?;
        trace::register(RegistrationMethod::PeerMemory, || {
            let length = self.found.ranges.iter().map(|range| range.size).sum();
            let device = name.as_ref().map_or(c"virtual", DeviceName::device);
            (buffer.about(), self.id, length, device)
        });
        let mut state = self.state.lock();
        state.entries = entries;
        state.adapter = name.map_or(For::Cpu, For::Device);
        Ok(())
    }

    /// The mapping has ended, if there was one.
    pub(super) fn unmapped(&self) {
        self.idle.complete();
    }

    /// Counts a call of the core for it.
    pub(super) fn count(&self, call: Call) {
        if let Ok(registrations) = Registrations::get() {
            registrations.count(self, call);
        }
    }

    /// Is no holder of the buffer any more: the mapping has ended.
    pub(super) fn let_go(&self) {
        self.unmapped();
        let held = core::mem::replace(&mut self.state.lock().held, false);
        if held {
            self.buffer().end_registration(self.id);
        }
    }
}

impl Revocable for PeerRegistration {
    /// First part of a revocation: nothing is mapped any more from here on, and the adapter forgets what was, unless the
    /// administrator chose that it need not.
    fn revoke(self: Arc<Self>) {
        self.state.lock().revoked = true;
        if !self.place.close() {
            return;
        }
        self.count(Call::Invalidate);
        self.place.invalidate();
        if !self.place.is_mapped() {
            self.unmapped();
        }
    }

    /// Second part: waits until no adapter can reach the memory, without a limit, as it cannot be anybody else's before,
    /// but with a line in the log that names who holds on.
    fn await_idle(&self, _: &mut RevokeDeadline) {
        let mut wait = LoggedWait::new();
        while self.place.is_mapped() {
            if let Some(seconds) = wait.due() {
                pr_warn!(
                    "{}: waiting for {} to end its registration of {:#x} bytes at {:#x} with {} since {} s\n",
                    self.buffer().provider.addr,
                    self.owner,
                    self.asked.size,
                    self.asked.address,
                    self.state.lock().adapter,
                    seconds
                );
            }
            self.idle.wait(1_000);
        }
    }

    /// One line, for debugfs.
    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mapped = self.place.is_mapped();
        let state = self.state.lock();
        let is = match (state.revoked, mapped, state.held) {
            (true, true, _) => "revoking",
            (true, false, _) => "revoked",
            (false, true, _) => "mapped",
            (false, false, true) => "held",
            (false, false, false) => "idle",
        };
        f.write_fmt(fmt!(
            "{} {} {} {:#x} {} {} {} ",
            self.id,
            self.buffer().id,
            self.buffer().provider.addr,
            self.asked.address,
            self.asked.size,
            state.entries,
            is
        ))?;
        for (at, call) in state.calls.iter().flatten().enumerate() {
            f.write_str(if at > 0 { "," } else { "" })?;
            f.write_str(Call::NAMES[*call as usize])?;
        }
        f.write_fmt(fmt!(" {} {}\n", state.adapter, self.owner))
    }
}

/// All registrations that the core knows, and what was counted of them.
#[pin_data]
pub(crate) struct Registrations {
    #[pin]
    all: Mutex<RBTree<u64, Arc<PeerRegistration>>>,
    /// Calls, in the order of [`Call`].
    calls: [Atomic<u64>; Call::NAMES.len()],
    /// Calls that came again, and that came before an earlier one of their order.
    repeated: Atomic<u64>,
    out_of_order: Atomic<u64>,
    refused: Atomic<u64>,
}

impl Registrations {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            all <- new_mutex!(RBTree::new()),
            calls: [const { Atomic::new(0) }; Call::NAMES.len()],
            repeated: Atomic::new(0),
            out_of_order: Atomic::new(0),
            refused: Atomic::new(0),
        })
    }

    pub(super) fn find(&self, id: u64) -> Option<Arc<PeerRegistration>> {
        self.all.lock().get(&id).cloned()
    }

    /// Calls `f` with each registration, one after the other and without a lock.
    fn for_each(&self, mut f: impl FnMut(&PeerRegistration)) {
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

    /// The table of the client that is registered. Errors: `ENODEV` where none is.
    pub(super) fn get() -> Result<Arc<Self>> {
        global::instance()
    }

    /// Takes in a registration. Errors: `ENOMEM`.
    pub(super) fn add(&self, id: u64, registration: &Arc<PeerRegistration>) -> Result {
        let node = RBTreeNode::new(id, registration.clone(), GFP_KERNEL_ACCOUNT)?;
        self.all.lock().insert(node);
        Ok(())
    }

    /// Forgets a registration. The last reference may be the caller's.
    pub(super) fn remove(&self, id: u64) -> Option<Arc<PeerRegistration>> {
        self.all.lock().remove(&id)
    }

    /// Counts a call.
    pub(super) fn count(&self, registration: &PeerRegistration, call: Call) {
        let note = registration.note(call);
        self.calls[call as usize].fetch_add(1, Relaxed);
        self.repeated.fetch_add(u64::from(note.repeated), Relaxed);
        self.out_of_order.fetch_add(u64::from(note.out_of_order), Relaxed);
    }

    /// Counts a refusal.
    pub(super) fn count_refusal(&self) {
        self.refused.fetch_add(1, Relaxed);
    }
}
