// SPDX-License-Identifier: GPL-2.0

//! Providers: devices with published memory, and the memory of each.
//!
//! An own or registered provider has one large piece of its device's pool, or of the BAR itself where it does without
//! struct pages, divided by a buddy allocator. An adopted provider belongs to another driver: from its pool a piece is
//! taken for each buffer and given back with it.
//!
//! Memory that comes back is *dirty* until it has been cleared, and *pinned* while someone still refers to its pages
//! (O_DIRECT that was under way when the mapping ended). The scrubber, a work item of each provider, moves it on.
//!
//! Clearing goes in steps of [`STEP`] bytes. Between two steps it looks whether the provider is being removed; an allocation
//! also whether its task was killed, and the scrubber whether an allocation needs the memory as it is: so none of them waits
//! for more than one step.

use crate::{
    ext::{
        abi::{
            self,
            consts, //
        },
        buddy::Buddy,
        completion::Completion,
        dmem::{
            Held,
            Region, //
        },
        free_hint::{
            padded,
            FreeHint, //
        },
        p2pdma::{
            Backing,
            Pool, //
        },
        pci::Function,
        publisher::Publisher,
        refusal::Text,
        task::is_killed,
        workqueue, //
    },
    mem::{
        memory::{
            Clearing,
            Memory,
            Origin,
            Stack, //
        },
        walk, //
    },
    policy::{
        path::PciAddr,
        placement::Capacity,
        rule::Party, //
    }, //
};
use kernel::{
    new_condvar, new_mutex, new_work,
    page::PAGE_SIZE,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Atomic, AtomicFlag, Relaxed},
        Arc, CondVar, CondVarTimeoutResult, Mutex,
    },
    time::msecs_to_jiffies,
    workqueue::{impl_has_work, Work, WorkItem},
};

/// Bytes that are cleared at a time.
const STEP: u64 = 2 << 20;

/// How a provider came to be one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProviderKind {
    Own,
    Adopted,
    /// Its driver handed the memory to p2pmem, by the functions of include/linux/p2pmem.h.
    Registered,
}

/// Where memory comes from.
enum Source {
    Own { backing: Arc<Backing>, buddy: Arc<Buddy> },
    Adopted { pool: Arc<Pool>, held: u64, ceiling: u64 },
}

struct Inner<B> {
    /// There while buffers can be allocated; taken when the provider leaves.
    source: Option<Source>,
    /// What cgroups are charged for; there as long as `source`.
    region: Option<Arc<Region>>,
    /// Pieces that are neither free nor on a list: those of live buffers and those in somebody's hands.
    outstanding: u32,
    buffers: RBTree<u64, Arc<B>>,
    count: u32,
    dirty: Stack,
    pinned: Stack,
    /// Bytes that were dirty and are being cleared now.
    clearing: u64,
    /// Whether the allocator has memory that was in use and was not cleared since: an allocation needed it at once.
    unscrubbed: bool,
    /// How often memory came back to where it is allocated from, or was let go on the way.
    returns: u64,
}

impl<B> Inner<B> {
    /// Bytes that are free as soon as they have been cleared.
    fn returning(&self) -> u64 {
        self.dirty.bytes + self.clearing
    }

    /// Whether memory that was in use waits to be cleared, free or not.
    fn is_clearing(&self) -> bool {
        self.returning() > 0 || self.unscrubbed
    }

    /// A piece is in nobody's hands any more.
    fn let_go(&mut self) {
        self.outstanding -= 1;
        self.returns += 1;
    }
}

/// Declares the counters of a provider, which are those of `struct p2pmem_stats`.
macro_rules! counters {
    ($($name:ident),* $(,)?) => {
        /// What is counted of a provider.
        pub(crate) struct Counters {
            $(pub(crate) $name: Atomic<u64>,)*
        }

        impl Counters {
            pub(crate) fn new() -> Self {
                Self { $($name: Atomic::new(0),)* }
            }

            /// Adds what an answer has.
            pub(crate) fn add(&self, stats: &abi::Stats) {
                $(self.$name.fetch_add(stats.$name, Relaxed);)*
            }

            /// Adds these to the counters of an answer.
            pub(crate) fn add_to(&self, stats: &mut abi::Stats) {
                $(stats.$name += self.$name.load(Relaxed);)*
            }
        }
    };
}

counters!(
    allocs,
    frees,
    failed,
    alloc_bytes,
    free_bytes,
    maps,
    scrubbed_bytes,
    parked,
    revoked,
    exports,
    attaches,
    attach_failed,
);

/// How a provider ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RemovalKind {
    /// Its driver is unbound: the pool ends with it.
    Unbind,
    /// Only p2pmem lets go: the pool stays, and what goes back to it has to be cleared.
    Retire,
    /// As [`Self::Retire`], of a device that does not answer: its memory is cleared, and goes back, when it does.
    Lost,
}

/// A device with published memory, and its buffers, which are of the type `B`.
#[pin_data]
pub(crate) struct Provider<B: Send + Sync + 'static> {
    /// Its number, never 0, never used twice.
    pub(crate) id: u32,
    pub(crate) kind: ProviderKind,
    pub(crate) addr: PciAddr,
    pub(crate) bar: Option<u32>,
    /// First published byte in the BAR.
    pub(crate) start: u64,
    /// Bytes that can be handed out in all.
    pub(crate) size: u64,
    /// Bytes left in the kernel's pool.
    pub(crate) kernel_reserve: u64,
    /// Whether writes to the memory may be combined.
    pub(crate) combine: bool,
    /// What the list of providers says of it, `P2PMEM_PROVIDER_PAGELESS` and `P2PMEM_PROVIDER_EXPORTABLE`.
    flags: u32,
    /// Whether the administrator allows exports that cannot be revoked.
    pinned_exports: AtomicFlag,
    /// dma-bufs that are not closed yet.
    exports: Atomic<u32>,
    pub(crate) counters: Counters,
    /// Who wants to know of its end.
    publisher: Option<Arc<Publisher>>,
    function: Function,
    /// Whether it is being removed, for those who clear without the lock. Set where `source` is taken, with the same lock held.
    leaving: AtomicFlag,
    /// Allocations that found too little, and look for it in what waits to be cleared.
    wanting: Atomic<u32>,
    /// What its removal waits for.
    #[pin]
    progress: Mutex<Text>,
    #[pin]
    inner: Mutex<Inner<B>>,
    /// Something came back or was put in order.
    #[pin]
    settled: CondVar,
    /// What [`Self::glance`] goes by.
    hint: Arc<FreeHint>,
    /// Whoever ended the provider is done.
    #[pin]
    gone: Completion,
    #[pin]
    scrubber: Work<Provider<B>>,
}

impl_has_work! {
    impl{B: Send + Sync + 'static} HasWork<Provider<B>> for Provider<B> { self.scrubber }
}

/// What a provider is made from.
pub(crate) struct Parts {
    pub(crate) id: u32,
    pub(crate) function: Function,
    pub(crate) bar: Option<u32>,
    pub(crate) start: u64,
    pub(crate) kernel_reserve: u64,
    pub(crate) combine: bool,
    pub(crate) pinned_exports: bool,
    /// The driver that registered it, where one did.
    pub(crate) publisher: Option<Arc<Publisher>>,
}

impl<B: Send + Sync + 'static> Provider<B> {
    /// A provider whose memory is `backing`.
    pub(crate) fn own(parts: Parts, backing: Backing) -> Result<Arc<Self>> {
        let size = backing.size();
        let buddy = Buddy::new(parts.start, parts.start + size)?;
        let flags = match backing {
            Backing::Pages(_) => consts::PROVIDER_EXPORTABLE,
            Backing::Window(_) => consts::PROVIDER_EXPORTABLE | consts::PROVIDER_PAGELESS,
        };
        let backing = Arc::new(backing, GFP_KERNEL)?;
        let kind = match parts.publisher {
            None => ProviderKind::Own,
            Some(_) => ProviderKind::Registered,
        };
        Self::new(parts, kind, size, flags, Source::Own { backing, buddy })
    }

    /// A provider that takes what it needs, `size` bytes at most, from its device's pool.
    pub(crate) fn adopted(parts: Parts, pool: Arc<Pool>, size: u64) -> Result<Arc<Self>> {
        // Mapping for DMA needs to know the BAR.
        let flags = parts.bar.map_or(0, |_| consts::PROVIDER_EXPORTABLE);
        let (held, ceiling) = (0, size);
        Self::new(
            parts,
            ProviderKind::Adopted,
            size,
            flags,
            Source::Adopted { pool, held, ceiling },
        )
    }

    fn new(parts: Parts, kind: ProviderKind, size: u64, flags: u32, source: Source) -> Result<Arc<Self>> {
        let region = Arc::new(Region::new(size, parts.function.address())?, GFP_KERNEL)?;
        let hint = match &source {
            Source::Own { buddy, .. } => buddy.hint(),
            Source::Adopted { ceiling, .. } => {
                let hint = FreeHint::new()?;
                hint.set(size, size.min(*ceiling));
                hint
            }
        };
        Arc::pin_init(
            pin_init!(Self {
                id: parts.id,
                kind,
                addr: parts.function.address(),
                bar: parts.bar,
                start: parts.start,
                size,
                kernel_reserve: parts.kernel_reserve,
                combine: parts.combine,
                flags,
                pinned_exports: AtomicFlag::new(parts.pinned_exports),
                exports: Atomic::new(0),
                counters: Counters::new(),
                publisher: parts.publisher,
                function: parts.function,
                leaving: AtomicFlag::new(false),
                wanting: Atomic::new(0),
                progress <- new_mutex!(Text::EMPTY),
                inner <- new_mutex!(Inner {
                    source: Some(source),
                    region: Some(region),
                    outstanding: 0,
                    buffers: RBTree::new(),
                    count: 0,
                    dirty: Stack::EMPTY,
                    pinned: Stack::EMPTY,
                    clearing: 0,
                    unscrubbed: false,
                    returns: 0,
                }),
                settled <- new_condvar!(),
                hint,
                gone <- Completion::new(),
                scrubber <- new_work!("p2pmem_scrubber"),
            }),
            GFP_KERNEL,
        )
    }

    /// How often an allocation waits for memory that others are putting in order: a bound, should others be faster each
    /// time.
    const WAITS: u32 = 16;

    pub(crate) fn function(&self) -> &Function {
        &self.function
    }

    /// What rules can tell it from others by.
    pub(crate) fn party(&self) -> Party {
        self.function.party()
    }

    /// Charges the caller's cgroup for memory of this provider. Errors: `EAGAIN` (a limit), `ENODEV` (leaving).
    pub(crate) fn charge_cgroup(&self, bytes: u64) -> Result<Held> {
        if !Region::COUNTS {
            return Ok(Held::NOTHING);
        }
        let region = self.inner.lock().region.clone().ok_or(ENODEV)?;
        region.charge(bytes)
    }

    /// Bytes of its device's pool that other drivers can always have. What an own provider leaves them is settled when
    /// it is published.
    pub(crate) fn kernel_has(&self) -> u64 {
        match self.kind {
            ProviderKind::Own | ProviderKind::Registered => u64::MAX,
            ProviderKind::Adopted => self.kernel_reserve,
        }
    }

    /// Whether its memory has struct pages.
    pub(crate) fn has_pages(&self) -> bool {
        self.flags & consts::PROVIDER_PAGELESS == 0
    }

    /// Whether the administrator allows exports that cannot be revoked.
    pub(crate) fn pinned_exports(&self) -> bool {
        self.pinned_exports.load(Relaxed)
    }

    pub(crate) fn set_pinned_exports(&self, allow: bool) {
        self.pinned_exports.store(allow, Relaxed);
    }

    /// Tells those who glance how things are.
    fn note(&self, inner: &Inner<B>) {
        match &inner.source {
            None => self.hint.close(),
            Some(Source::Own { .. }) => self.hint.set_returning(inner.returning(), inner.returns),
            Some(Source::Adopted { held, ceiling, .. }) => {
                let free = self.size - held;
                self.hint.set_returning(inner.returning(), inner.returns);
                self.hint.set(free, free.min(*ceiling));
            }
        }
    }

    /// What tells as [`Self::capacity`] does, without a lock.
    pub(crate) fn hint(&self) -> Arc<FreeHint> {
        self.hint.clone()
    }

    /// What there is for a request, without taking it: its `largest` is exact as to whether the request fits. None where the
    /// provider is being removed.
    pub(crate) fn capacity(&self, size: u64, align: u64) -> Option<Capacity> {
        let inner = self.inner.lock();
        let (free, largest) = match &inner.source {
            None => return None,
            Some(Source::Own { buddy, .. }) => {
                let buddy = buddy.clone();
                // What is being cleared is as good as free: an allocation waits for it. The scrubber says so of what it takes
                // from the allocator before it does, so none of it is missed.
                let free = buddy.free() + inner.returning();
                let (clearing, returns) = (inner.is_clearing(), inner.returns);
                drop(inner);
                let largest = buddy.largest_for(size, align);
                // Whether the pieces that are being cleared will join is known when they have.
                let joined = largest < size && (clearing || self.has_moved(returns));
                (free, if joined { size.min(free) } else { largest })
            }
            Some(Source::Adopted { held, ceiling, .. }) => {
                let returning = inner.returning();
                let free = self.size - held + returning;
                let largest = free.min((*ceiling).max(returning));
                // The alignment is made by taking more.
                let fits = largest >= padded(size, align);
                (
                    free,
                    if fits {
                        largest
                    } else {
                        largest.min(size - PAGE_SIZE as u64)
                    },
                )
            }
        };
        Some(Capacity { free, largest })
    }

    /// Whether memory came back since it had done so `returns` times, or is about to.
    fn has_moved(&self, returns: u64) -> bool {
        let inner = self.inner.lock();
        inner.returns != returns || inner.is_clearing()
    }

    /// Allocates memory that is all zeroes, or is so after [`Self::clear_for_use`] where `clearing` says so.
    ///
    /// Errors: `ENOSPC`, `ENODEV` (being removed), `ENOMEM`, `EINTR` (the task was killed), `ERESTARTSYS` (a signal came
    /// while it waited for others).
    pub(crate) fn alloc(self: &Arc<Self>, size: u64, align: u64, clearing: Clearing) -> Result<KBox<Memory>> {
        let memory = match self.alloc_once(size, align, clearing) {
            Err(e) if e == ENOSPC => {
                self.wanting.fetch_add(1, Relaxed);
                let memory = self.alloc_dirty(size, align, clearing);
                self.wanting.fetch_sub(1, Relaxed);
                // The scrubber goes on.
                self.settled.notify_all();
                memory?
            }
            done => done?,
        };
        self.counters.allocs.fetch_add(1, Relaxed);
        self.counters.alloc_bytes.fetch_add(memory.size, Relaxed);
        Ok(memory)
    }

    /// As [`Self::alloc`], where there was too little: memory that waits to be cleared counts as free, so it has to be had.
    fn alloc_dirty(self: &Arc<Self>, size: u64, align: u64, clearing: Clearing) -> Result<KBox<Memory>> {
        let mut waits = 0;
        // Others may take what this request released. Then it ends when it has released as much as there is, twice.
        let mut released = 0;
        loop {
            let returns = self.inner.lock().returns;
            match self.alloc_once(size, align, clearing) {
                Err(e) if e == ENOSPC => {}
                done => return done,
            }
            let more = self.release_dirty(size)?;
            released += more;
            if more == 0 || released > 2 * self.size {
                if waits == Self::WAITS || !self.await_others(returns)? {
                    return Err(ENOSPC);
                }
                waits += 1;
            }
        }
    }

    fn alloc_once(self: &Arc<Self>, size: u64, align: u64, clearing: Clearing) -> Result<KBox<Memory>> {
        let mut inner = self.inner.lock();
        let own = match inner.source.as_mut().ok_or(ENODEV)? {
            Source::Own { backing, buddy } => Ok((backing.clone(), buddy.clone())),
            Source::Adopted { pool, held, .. } => {
                let taken = padded(size, align);
                if self.size - *held < taken {
                    return Err(ENOSPC);
                }
                *held += taken;
                Err(pool.clone())
            }
        };
        inner.outstanding += 1;
        self.note(&inner);
        drop(inner);
        let memory = match own {
            Ok((backing, buddy)) => self.alloc_own(backing, &buddy, size, align),
            Err(pool) => self.alloc_adopted(&pool, size, align),
        };
        let memory = memory.and_then(|mut memory| match clearing {
            Clearing::Now => {
                let taken = memory.footprint();
                self.clear_for_use(&mut memory)
                    .map(|()| memory)
                    .inspect_err(|_| self.untake(taken))
            }
            Clearing::AtFirstUse => Ok(memory),
        });
        if let Err(e) = &memory {
            let mut inner = self.inner.lock();
            if *e == ENOSPC {
                // Nothing had been taken.
                inner.outstanding -= 1;
            } else {
                // What was taken went back as it was. Another driver's pool does without being cleared: nobody had it.
                inner.let_go();
                inner.unscrubbed |= matches!(inner.source, Some(Source::Own { .. }));
            }
            let scrub = inner.unscrubbed;
            drop(inner);
            self.settled.notify_all();
            if scrub {
                workqueue::run_later();
            }
        }
        memory
    }

    /// A piece of another driver's pool was given back.
    fn untake(&self, taken: u64) {
        let mut inner = self.inner.lock();
        if let Some(Source::Adopted { held, .. }) = &mut inner.source {
            *held -= taken;
        }
        self.note(&inner);
    }

    fn alloc_own(&self, backing: Arc<Backing>, buddy: &Arc<Buddy>, size: u64, align: u64) -> Result<KBox<Memory>> {
        let mut extent = buddy.alloc(size, align)?;
        let clear = extent.is_clear();
        // From here on it has an owner, who may write to it.
        extent.set_clear(false);
        let start = self.start;
        Memory::new(Origin::Own { extent, backing, start }, size, clear)
    }

    /// Clears memory that was just allocated, where that is still to do.
    ///
    /// Errors: `ENODEV` (being removed), `EINTR` (the task was killed). The memory is to be cleared still.
    pub(crate) fn clear_for_use(&self, memory: &mut Memory) -> Result {
        if memory.is_clear() {
            return Ok(());
        }
        self.clear_by_steps(memory, || if is_killed() { Err(EINTR) } else { Ok(()) })
    }

    /// Clears memory, as long as the provider is not being removed (`ENODEV`) and `go_on` has no objection.
    fn clear_by_steps(&self, memory: &mut Memory, go_on: impl Fn() -> Result) -> Result {
        memory.clear(self.combine, STEP, || {
            if self.leaving.load(Relaxed) {
                return Err(ENODEV);
            }
            go_on()
        })?;
        self.counters.scrubbed_bytes.fetch_add(memory.footprint(), Relaxed);
        Ok(())
    }

    fn alloc_adopted(&self, pool: &Pool, size: u64, align: u64) -> Result<KBox<Memory>> {
        let taken = padded(size, align);
        let memory = pool.take(taken).ok_or(ENOSPC).and_then(|chunk| {
            let at = chunk.phys() - self.bar_start();
            let skip = at.next_multiple_of(align) - at;
            let backing = Arc::new(Backing::Pages(chunk), GFP_KERNEL_ACCOUNT)?;
            Memory::new(Origin::Adopted { backing, skip }, size, false)
        });
        if let Err(e) = memory.as_ref() {
            let full = *e == ENOSPC;
            let mut inner = self.inner.lock();
            if let Some(Source::Adopted { held, ceiling, .. }) = &mut inner.source {
                *held -= taken;
                if full {
                    // Its driver uses more than was known.
                    *ceiling = (*ceiling).min(taken - PAGE_SIZE as u64);
                }
            }
            self.note(&inner);
        }
        memory
    }

    /// Physical address at which the BAR begins, or 0 where the BAR is not known.
    fn bar_start(&self) -> u64 {
        self.bar
            .and_then(|bar| self.function().bar(bar))
            .map_or(0, |(start, _)| start)
    }

    /// Where a piece begins in the BAR.
    pub(crate) fn bar_offset_of(&self, memory: &Memory) -> Option<u64> {
        self.bar?;
        Some(match memory.piece() {
            Origin::Own { extent, .. } => extent.offset(),
            Origin::Adopted { .. } => memory.phys() - self.bar_start(),
        })
    }

    /// Takes a buffer into the provider's books, by its number. Errors: `ENODEV` when the provider is leaving.
    pub(crate) fn register(&self, id: u64, buffer: &Arc<B>) -> Result {
        let node = RBTreeNode::new(id, buffer.clone(), GFP_KERNEL_ACCOUNT)?;
        let mut inner = self.inner.lock();
        if inner.source.is_none() {
            drop(inner);
            drop(node);
            return Err(ENODEV);
        }
        inner.buffers.insert(node);
        inner.count += 1;
        Ok(())
    }

    /// Memory comes back, with the number of the buffer that ended.
    pub(crate) fn give_back(self: &Arc<Self>, buffer: Option<u64>, mut memory: KBox<Memory>) {
        self.counters.frees.fetch_add(1, Relaxed);
        self.counters.free_bytes.fetch_add(memory.size, Relaxed);
        // What others still refer to is not free, and counts as its last owner's until it is.
        if memory.busy() == 0 {
            memory.charge = None;
        }
        let mut inner = self.inner.lock();
        let ended = buffer.and_then(|id| inner.buffers.remove(&id));
        inner.count -= u32::from(ended.is_some());
        inner.dirty.push(memory);
        inner.let_go();
        self.note(&inner);
        let live = inner.source.is_some();
        drop(inner);
        drop(ended);
        self.settled.notify_all();
        if live {
            // A worker that wakes for each piece would cost more than all else that freeing does.
            workqueue::run_later();
        }
    }

    /// Has memory that came back cleared.
    pub(crate) fn send_scrubber(self: &Arc<Self>) {
        let inner = self.inner.lock();
        let work = !inner.dirty.is_empty() || inner.unscrubbed;
        drop(inner);
        if work {
            workqueue::enqueue(self.clone());
        }
    }

    /// Takes a piece that came back and that nobody refers to any more: it is in the caller's hands until
    /// [`Self::put_down`]. Pieces that somebody refers to become pinned on the way.
    fn pick_up(&self) -> Option<KBox<Memory>> {
        loop {
            let mut inner = self.inner.lock();
            inner.source.as_ref()?;
            let memory = inner.dirty.pop()?;
            inner.outstanding += 1;
            inner.clearing += memory.footprint();
            drop(inner);
            if memory.busy() == 0 {
                return Some(memory);
            }
            let mut inner = self.inner.lock();
            inner.outstanding -= 1;
            inner.clearing -= memory.footprint();
            inner.pinned.push(memory);
            self.note(&inner);
            drop(inner);
            self.settled.notify_all();
            self.counters.parked.fetch_add(1, Relaxed);
        }
    }

    /// A piece of `taken` bytes is in nobody's hands any more.
    fn put_down(&self, taken: u64, then: impl FnOnce(&mut Inner<B>)) {
        let mut inner = self.inner.lock();
        inner.let_go();
        inner.clearing -= taken;
        then(&mut inner);
        self.note(&inner);
        drop(inner);
        self.settled.notify_all();
    }

    /// Clears one piece of memory that came back, and gives it back to where it was allocated from. Returns its bytes,
    /// 0 when there was none that could be.
    ///
    /// Errors: those of `go_on`, and `ENODEV` when the provider is being removed. The piece is to be cleared still.
    fn clean_one(&self, go_on: impl Fn() -> Result) -> Result<u64> {
        let Some(mut memory) = self.pick_up() else {
            return Ok(0);
        };
        let taken = memory.footprint();
        if let Err(e) = self.clear_by_steps(&mut memory, go_on) {
            self.put_down(taken, |inner| inner.dirty.push(memory));
            return Err(e);
        }
        memory.returned_clear();
        drop(memory);
        self.put_down(taken, |inner| {
            if let Some(Source::Adopted { held, ceiling, .. }) = &mut inner.source {
                *held -= taken;
                *ceiling = self.size;
            }
        });
        Ok(taken)
    }

    /// Takes pieces that nobody refers to any more out of those that were pinned. Returns whether there were any.
    fn take_unpinned(&self) -> bool {
        let mut inner = self.inner.lock();
        // Others may park more meanwhile: that is for the next time.
        let mut looked_at = Stack::EMPTY;
        core::mem::swap(&mut looked_at, &mut inner.pinned);
        let count = looked_at.len();
        inner.outstanding += count;
        drop(inner);
        let (mut still, mut idle) = (Stack::EMPTY, Stack::EMPTY);
        while let Some(memory) = looked_at.pop() {
            if memory.busy() > 0 {
                still.push(memory);
            } else {
                idle.push(memory);
            }
        }
        let any = !idle.is_empty();
        let mut inner = self.inner.lock();
        inner.pinned.append(still);
        inner.dirty.append(idle);
        inner.outstanding -= count;
        self.note(&inner);
        drop(inner);
        self.settled.notify_all();
        any
    }

    /// Clears memory of the allocator that an allocation needed before it was cleared, a step at most. Whether there may
    /// be more.
    fn scrub_free(&self) -> bool {
        let mut inner = self.inner.lock();
        let (backing, buddy) = match &inner.source {
            Some(Source::Own { backing, buddy }) if inner.unscrubbed => (backing.clone(), buddy.clone()),
            _ => return false,
        };
        // Whoever releases more from here on says so again.
        inner.unscrubbed = false;
        inner.outstanding += 1;
        // Said before it is taken: nobody is to find it missing.
        inner.clearing += STEP;
        self.note(&inner);
        drop(inner);
        let taken = match buddy.take_unclear(STEP) {
            Ok(Some(mut extent)) => {
                let size = extent.size();
                // No more than that is missing.
                self.inner.lock().clearing -= STEP - size;
                backing.clear(extent.offset() - self.start, size, self.combine);
                extent.set_clear(true);
                self.counters.scrubbed_bytes.fetch_add(size, Relaxed);
                Ok(size)
            }
            other => other.map(|_| 0),
        };
        drop(backing);
        let missing = match taken {
            Ok(size @ 1..) => size,
            _ => STEP,
        };
        self.put_down(missing, |inner| inner.unscrubbed |= taken != Ok(0));
        matches!(taken, Ok(1..))
    }

    /// Puts in order what can be, as long as the provider is not being removed and no allocation looks for memory as it is.
    /// True when anything was done.
    fn clean(&self) -> bool {
        let go_on = || {
            if self.wanting.load(Relaxed) > 0 {
                Err(EAGAIN)
            } else {
                Ok(())
            }
        };
        self.take_unpinned();
        let mut done = false;
        while go_on().is_ok() && matches!(self.clean_one(go_on), Ok(1..)) {
            done = true;
        }
        while go_on().is_ok() && self.scrub_free() {
            done = true;
        }
        done
    }

    /// Makes room for a request of `size` bytes that found none: memory that waits for the scrubber goes to the allocator
    /// as it is, until it has as many bytes; the allocation clears what it gets of them, and the scrubber the rest. What
    /// goes back to another driver's pool is cleared before. Returns how many bytes were released.
    ///
    /// Errors: `EINTR` (the task was killed), `ENODEV` (being removed).
    fn release_dirty(self: &Arc<Self>, size: u64) -> Result<u64> {
        self.take_unpinned();
        let buddy = match &self.inner.lock().source {
            None => return Err(ENODEV),
            Some(Source::Own { buddy, .. }) => Some(buddy.clone()),
            Some(Source::Adopted { .. }) => None,
        };
        let Some(buddy) = buddy else {
            return self.clean_one(|| if is_killed() { Err(EINTR) } else { Ok(()) });
        };
        let mut released = 0;
        while let Some(memory) = self.pick_up() {
            let taken = memory.footprint();
            drop(memory);
            self.put_down(taken, |inner| inner.unscrubbed = true);
            released += taken;
            if is_killed() || buddy.free() >= size {
                break;
            }
        }
        if released > 0 {
            workqueue::enqueue(self.clone());
        }
        if is_killed() {
            return Err(EINTR);
        }
        Ok(released)
    }

    /// Waits a moment for what others have in hands. `returns` is what [`Inner::returns`] was before the caller looked for
    /// memory: what came back since then it may not have seen. False when nothing came back and nobody has any. Errors:
    /// `ERESTARTSYS`, `ENODEV` (being removed).
    fn await_others(&self, returns: u64) -> Result<bool> {
        let mut inner = self.inner.lock();
        if inner.source.is_none() {
            return Err(ENODEV);
        }
        if !inner.dirty.is_empty() || inner.returns != returns {
            return Ok(true);
        }
        if inner.outstanding <= inner.count {
            return Ok(false);
        }
        match self
            .settled
            .wait_interruptible_timeout(&mut inner, msecs_to_jiffies(100))
        {
            CondVarTimeoutResult::Signal { .. } => Err(ERESTARTSYS),
            _ => Ok(true),
        }
    }

    /// A row of the list of providers.
    pub(crate) fn describe(&self) -> abi::Provider {
        let function = self.function();
        let (vendor, device, class) = function.ids();
        let mut row = abi::Provider {
            id: self.id,
            kind: match self.kind {
                ProviderKind::Own => consts::KIND_OWN,
                ProviderKind::Adopted => consts::KIND_ADOPTED,
                ProviderKind::Registered => consts::KIND_REGISTERED,
            },
            addr: self.addr.into(),
            bar: self.bar.map_or(-1, |bar| bar as i32),
            numa_node: function.node(),
            bar_offset: self.start,
            size: self.size,
            kernel_reserve: self.kernel_reserve,
            vendor,
            device,
            class,
            flags: self.flags,
            exports: self.exports.load(Relaxed),
            ..Default::default()
        };
        function.driver_name(&mut row.driver);
        if self.pinned_exports() {
            row.flags |= consts::PROVIDER_PINNED_EXPORTS;
        }
        let inner = self.inner.lock();
        if inner.is_clearing() {
            row.flags |= consts::PROVIDER_CLEARING;
        }
        row.buffers = inner.count;
        row.parked = inner.pinned.bytes;
        row.scrubbing = inner.returning();
        row.state = if inner.source.is_some() {
            consts::PROVIDER_LIVE
        } else {
            consts::PROVIDER_REVOKING
        };
        let own = match &inner.source {
            None => None,
            Some(Source::Own { buddy, .. }) => Some(buddy.clone()),
            Some(Source::Adopted { held, ceiling, .. }) => {
                row.free = self.size - held;
                row.largest = row.free.min(*ceiling);
                None
            }
        };
        drop(inner);
        if let Some(buddy) = own {
            row.free = buddy.free();
            row.largest = buddy.largest();
        }
        row
    }

    /// Live buffers, and free bytes.
    pub(crate) fn totals(&self) -> (u32, u64) {
        let inner = self.inner.lock();
        let count = inner.count;
        let free = match &inner.source {
            None => 0,
            Some(Source::Own { buddy, .. }) => {
                let buddy = buddy.clone();
                drop(inner);
                buddy.free()
            }
            Some(Source::Adopted { held, .. }) => self.size - held,
        };
        (count, free)
    }

    /// A user mapping was made.
    pub(crate) fn mapped(&self) {
        self.counters.maps.fetch_add(1, Relaxed);
    }

    /// A dma-buf was made.
    pub(crate) fn exported(&self) {
        self.exports.fetch_add(1, Relaxed);
        self.counters.exports.fetch_add(1, Relaxed);
    }

    /// A dma-buf was closed.
    pub(crate) fn unexported(&self) {
        self.exports.fetch_sub(1, Relaxed);
    }

    /// Calls `f` with each live buffer, one after the other and without a lock. Buffers that come meanwhile may be
    /// missed.
    pub(crate) fn for_each_buffer(&self, f: impl FnMut(&Arc<B>)) {
        walk::one_by_one(|from| walk::at_or_after(&self.inner.lock().buffers, from), f);
    }

    /// Whether it has not begun to leave.
    #[cfg(p2pmem_peer)]
    pub(crate) fn is_live(&self) -> bool {
        self.inner.lock().source.is_some()
    }

    /// First part of a removal: from here on nothing is allocated. None when it is being removed already.
    pub(crate) fn stop(&self) -> Option<Stopped> {
        let mut inner = self.inner.lock();
        let source = inner.source.take()?;
        self.leaving.store(true, Relaxed);
        let region = inner.region.take();
        self.note(&inner);
        drop(inner);
        drop(region);
        // The scrubber sleeps while memory is pinned.
        self.settled.notify_all();
        Some(Stopped(source))
    }

    /// Waits until no memory is in anybody's hands: that of an allocation or of the scrubber, which end at their next step.
    pub(crate) fn await_hands(&self) {
        let mut inner = self.inner.lock();
        while inner.outstanding > 0 {
            self.settled.wait(&mut inner);
        }
    }

    /// Takes all memory that came back, when all buffers were revoked.
    pub(crate) fn take_returned(&self) -> Stack {
        let mut inner = self.inner.lock();
        let mut all = core::mem::replace(&mut inner.dirty, Stack::EMPTY);
        all.append(core::mem::replace(&mut inner.pinned, Stack::EMPTY));
        all
    }

    /// Clears memory of a provider that was stopped. Nobody may be using it.
    pub(crate) fn clear_stopped(&self, memory: &mut Memory) {
        // Nothing objects.
        let _ = memory.clear(self.combine, STEP, || Ok(()));
    }

    /// Clears what the allocator of a provider that was stopped has of memory that was in use.
    pub(crate) fn scrub_stopped(&self, stopped: &Stopped) {
        let Source::Own { backing, buddy } = &stopped.0 else {
            return;
        };
        while self.inner.lock().unscrubbed {
            match buddy.take_unclear(STEP) {
                Ok(Some(mut extent)) => {
                    backing.clear(extent.offset() - self.start, extent.size(), self.combine);
                    extent.set_clear(true);
                }
                Ok(None) => self.inner.lock().unscrubbed = false,
                Err(_) => {
                    // Without memory to take it in pieces, all of it is cleared: nothing is in use any more.
                    backing.clear(0, backing.size(), self.combine);
                    self.inner.lock().unscrubbed = false;
                }
            }
        }
    }

    /// Says what its removal waits for, for those who ask ([`Self::progress`]).
    pub(crate) fn set_progress(&self, text: Text) {
        *self.progress.lock() = text;
    }

    /// What its removal waits for; empty where it is not being removed.
    pub(crate) fn progress(&self) -> Text {
        *self.progress.lock()
    }

    /// Whether it is being removed, or was.
    pub(crate) fn is_being_removed(&self) -> bool {
        self.leaving.load(Relaxed)
    }

    /// Tells the driver that published it, if one did, that nobody can reach the memory any more.
    pub(crate) fn notify_publisher(&self) {
        if let Some(publisher) = &self.publisher {
            publisher.revoked();
        }
    }

    /// The end of a removal, after which nothing of it is left.
    pub(crate) fn ended(&self) {
        self.gone.complete();
    }

    /// Waits for another one who removes the provider; what takes that one long it says itself.
    pub(crate) fn await_end(&self) {
        while !self.gone.wait(1_000) {}
    }

    /// As [`Self::await_end`], `ms` milliseconds at most, and unless the task is killed meanwhile (`EINTR`). Whether it ended.
    pub(crate) fn await_end_killable(&self, ms: u32) -> Result<bool> {
        self.gone.wait_killable(ms)
    }

    /// As [`Self::await_end`], `ms` milliseconds at most. Whether it ended.
    pub(crate) fn await_end_for(&self, ms: u32) -> bool {
        self.gone.wait(ms)
    }
}

/// What a provider had when it stopped. Dropping it gives the memory back: a chunk goes back to the device's pool.
pub(crate) struct Stopped(Source);

/// Memory of a device that did not answer when its provider was removed: nobody's, until it can be cleared.
pub(crate) struct Lost<B: Send + Sync + 'static> {
    provider: Arc<Provider<B>>,
    stopped: Stopped,
}

impl<B: Send + Sync + 'static> Lost<B> {
    pub(crate) fn new(provider: Arc<Provider<B>>, stopped: Stopped) -> Self {
        Self { provider, stopped }
    }

    /// Whether it is memory of this function.
    pub(crate) fn is_of(&self, function: &Function) -> bool {
        self.provider.function().same(function)
    }

    /// Clears all of it, whatever is known of it.
    pub(crate) fn clear(&self) {
        if let Source::Own { backing, .. } = &self.stopped.0 {
            backing.clear(0, backing.size(), self.provider.combine);
        }
    }
}

impl<B: Send + Sync + 'static> WorkItem for Provider<B> {
    type Pointer = Arc<Self>;

    /// The scrubber: works until nothing is dirty and nothing pinned, or the provider is being removed.
    fn run(this: Arc<Self>) {
        let mut pause = 10;
        loop {
            if this.clean() {
                pause = 10;
            }
            let mut inner = this.inner.lock();
            if inner.source.is_none() || (inner.pinned.is_empty() && inner.dirty.is_empty() && !inner.unscrubbed) {
                return;
            }
            if inner.dirty.is_empty() || this.wanting.load(Relaxed) > 0 {
                // Nobody tells when a page's last other reference is dropped, so it is looked at now and then.
                let _ = this
                    .settled
                    .wait_interruptible_timeout(&mut inner, msecs_to_jiffies(pause));
                pause = (pause * 2).min(500);
            }
        }
    }
}

impl From<PciAddr> for abi::PciAddress {
    fn from(addr: PciAddr) -> Self {
        Self {
            domain: addr.domain,
            bus: addr.bus,
            devfn: addr.devfn,
            reserved: 0,
        }
    }
}
