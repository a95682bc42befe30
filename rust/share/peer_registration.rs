// SPDX-License-Identifier: GPL-2.0

//! Registrations through the peer-memory interface, and the table of them.
//!
//! A registration holds its buffer from get_pages to put_pages, as a handle or a dma-buf does. If the buffer is revoked,
//! the module invalidates the registration: the RDMA core makes the NIC drop its MR.
//!
//! C header: `rust/sys/peer_mem.h`
//!
//! Context: process context, may sleep. `PeerRegistration::state` and `Registrations::all` are mutexes. Neither is held
//! while `Buffer::inner` is taken or while the core is called.

use crate::{
    ext::{
        abi,
        completion::Completion,
        device_name::DeviceName,
        dma_buf::PhysRange,
        global,
        log::{
            LoggedWait,
            Owner, //
        },
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
    share::access, //
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

/// The calls of the core, and invalidate, which is a call to the core, in their regular order.
///
/// Invalidate may race with the end of the registration by its program, and so may be recorded at any place of the order.
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
    /// Names by the value of the variant.
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

/// What [`PeerRegistration::note`] found out about a call.
pub(super) struct Note {
    pub(super) repeated: bool,
    pub(super) out_of_order: bool,
}

/// The ranges of a buffer that a program registers, and the error to report from get_pages.
pub(super) struct Found {
    pub(super) buffer: Arc<Buffer>,
    pub(super) ranges: KVec<Range>,
    /// Whether all mappings are writable, or may become writable with `mprotect()`.
    pub(super) may_write: bool,
    pub(super) wrong: Option<Refusal>,
}

/// The device that does the NIC's DMA.
#[derive(Clone, Copy)]
enum For {
    Unknown,
    /// A NIC that accesses memory with the CPU (rxe, siw).
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

/// Number of calls recorded for one registration.
const CALLS: usize = 12;

/// Everything that `PeerRegistration::state` protects.
struct State {
    calls: [Option<Call>; CALLS],
    /// Whether the registration holds the buffer.
    held: bool,
    revoked: bool,
    adapter: For,
    entries: u32,
}

/// One registration of the core.
#[pin_data]
pub(crate) struct PeerRegistration {
    id: u64,
    owner: Owner,
    asked: RegistrationRequest,
    found: Found,
    /// The DMA mapping.
    #[pin]
    place: Slot,
    #[pin]
    state: Mutex<State>,
    /// Completed when the mapping has ended.
    #[pin]
    idle: Completion,
    _module: ModuleRef,
}

impl PeerRegistration {
    /// Creates a registration. `id` is the core's number, never used twice. The current task becomes the owner. Errors:
    /// `ENOMEM`.
    pub(super) fn new(id: u64, asked: RegistrationRequest, found: Found, module: ModuleRef) -> Result<Arc<Self>> {
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

    /// Records a call.
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

    /// Holds the buffer, for get_pages. `write` says that the NIC will write.
    ///
    /// Errors: `EACCES` (the NIC will write, and a mapping is of a file that was opened for reading only), `ENODEV` (the
    /// buffer is not Live), `EBUSY` (held already), `ENOMEM`, and the errors of the range.
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

    /// Returns the reason why the buffer is not Live any more.
    fn gone(&self) -> Refusal {
        if self.buffer().provider.is_live() {
            refuse!(
                ENODEV,
                "the buffer was freed and unmapped while it was being registered"
            )
        } else {
            self.buffer().revoked()
        }
    }

    /// Maps the ranges for the NIC `adapter`, for dma_map.
    ///
    /// Errors: `EHOSTUNREACH` (no path to the provider), `EOPNOTSUPP` (the memory cannot be mapped for this NIC), `ENODEV`
    /// (the buffer is not Live), `EACCES` (a rule), `ENOMEM`, and the errors of the DMA API.
    pub(super) fn map(&self, adapter: &Adapter<'_>) -> Answer {
        let buffer = self.buffer();
        let provider = &buffer.provider;
        let unsupported = abi::errno(abi::EOPNOTSUPP);
        let name = adapter.device().map(|device| device.name());
        let (target, start) = buffer.target()?;
        if let Some((device, name)) = adapter.device().zip(name.as_ref()) {
            access::check(buffer, device, name)?;
        } else {
            if !provider.has_pages() {
                return Err(refuse!(
                    unsupported,
                    "software RDMA needs struct pages, and {} is pageless: publish it with mode paged",
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
                "DMA mapping of {} bytes of {} for the adapter failed",
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

    /// Records that there is no mapping (any more), and wakes [`Revocable::await_idle`].
    pub(super) fn unmapped(&self) {
        self.idle.complete();
    }

    /// Counts and records a call.
    pub(super) fn count(&self, call: Call) {
        if let Ok(registrations) = Registrations::get() {
            registrations.count(self, call);
        }
    }

    /// Releases the buffer, for put_pages and release. The mapping has ended. May be called several times.
    pub(super) fn let_go(&self) {
        self.unmapped();
        let held = core::mem::replace(&mut self.state.lock().held, false);
        if held {
            self.buffer().end_registration(self.id);
        }
    }
}

impl Revocable for PeerRegistration {
    /// First part of a revocation: refuses mappings from here on and invalidates the registration, so that the NIC drops
    /// its MR before this returns, unless the administrator chose a form without invalidation.
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

    /// Second part of a revocation: waits until the mapping has ended, without a limit, as the memory cannot get a new
    /// owner before. The log names the process and the NIC that hold the memory.
    fn await_idle(&self, _: &mut RevokeDeadline) {
        let mut wait = LoggedWait::new();
        while self.place.is_mapped() {
            if let Some(seconds) = wait.due() {
                let adapter = self.state.lock().adapter;
                self.buffer().provider.waits_for(fmt!(
                    "waiting for {} to end its registration of {:#x} bytes at {:#x} with {} since {} s",
                    self.owner,
                    self.asked.size,
                    self.asked.address,
                    adapter,
                    seconds
                ));
            }
            self.idle.wait(1_000);
        }
    }

    fn outlasts_revocation(&self) -> bool {
        self.place.outlasts_invalidation()
    }

    /// Writes the registration's line of debugfs' `registrations`.
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

/// The registrations that the core knows, and counters of its calls.
#[pin_data]
pub(crate) struct Registrations {
    #[pin]
    all: Mutex<RBTree<u64, Arc<PeerRegistration>>>,
    /// Number of calls, by [`Call`].
    calls: [Atomic<u64>; Call::NAMES.len()],
    /// Number of calls that came more than once for a registration. `out_of_order` has those that came after a later one of
    /// the order.
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

    /// Returns the registration with that number, if the core knows it still.
    pub(super) fn find(&self, id: u64) -> Option<Arc<PeerRegistration>> {
        self.all.lock().get(&id).cloned()
    }

    /// Calls `f` with each registration, without a lock.
    fn for_each(&self, mut f: impl FnMut(&PeerRegistration)) {
        let next = |from| walk::at_or_after(&self.all.lock(), from);
        walk::one_by_one(next, |registration| f(registration));
    }

    /// Writes debugfs' `peer_memory`.
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

    /// Writes debugfs' `registrations`.
    pub(crate) fn list(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("id buffer provider address size entries state calls adapter owner\n")?;
        let mut result = Ok(());
        self.for_each(|registration| result = result.and_then(|()| registration.describe(f)));
        result
    }

    /// Returns the table. Errors: `ENODEV` if no client is registered.
    pub(super) fn get() -> Result<Arc<Self>> {
        global::instance()
    }

    /// Adds a registration. Errors: `ENOMEM`.
    pub(super) fn add(&self, id: u64, registration: &Arc<PeerRegistration>) -> Result {
        let node = RBTreeNode::new(id, registration.clone(), GFP_KERNEL_ACCOUNT)?;
        self.all.lock().insert(node);
        Ok(())
    }

    /// Removes a registration and returns the reference, which may be the last one.
    pub(super) fn remove(&self, id: u64) -> Option<Arc<PeerRegistration>> {
        self.all.lock().remove(&id)
    }

    /// Counts and records a call.
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
