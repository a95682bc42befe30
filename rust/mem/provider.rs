// SPDX-License-Identifier: GPL-2.0

//! Providers: devices with published memory, and the state of that memory.
//!
//! An own or registered provider has one large chunk of its device's pool, or of the BAR itself if it has no struct pages,
//! and divides the chunk with a buddy allocator. An adopted provider belongs to another driver: each buffer takes a chunk of
//! that driver's pool and gives it back at its end.
//!
//! The life of memory: allocated ([`alloc`]), given back, dirty or pinned, cleared ([`scrubber`]), free. A removal
//! ([`removal`]) ends all of it. Memory that was in use is cleared before it returns to its allocator, so free memory is zero or
//! was never used ([`own`](super::own)).
//!
//! Locks: [`Provider::inner`] is a mutex that is held for short sections only, never while memory is cleared, a pool is called
//! or a buffer ends. The buddy allocator's own lock is not taken below it. [`FreeHint`] is read without a lock.

use crate::{
    ext::{
        abi::{
            self,
            consts, //
        },
        completion::Completion,
        device_name::DriverName,
        dmem::{
            CgroupCharge,
            Region, //
        },
        free_hint::{
            padded,
            FitBounds,
            FitHint,
            FreeHint, //
        },
        p2pdma::Backing,
        pci::Function,
        pool::Pool,
        publisher::RevokeCallback,
        refusal::Text,
        vma, //
    },
    mem::{
        memory::{
            Memory,
            MemoryList, //
        },
        own::OwnMemory,
        provider::counters::Counters,
        traits::DeviceAttachment,
        walk, //
    },
    policy::{
        path::PciAddr,
        ranking::Capacity,
        rule::FunctionId, //
    }, //
};
use kernel::{
    new_condvar, new_mutex, new_work,
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Atomic, AtomicFlag, Relaxed},
        Arc, CondVar, Mutex, MutexGuard,
    },
    workqueue::{impl_has_work, Work},
};

pub(crate) mod alloc;
pub(crate) mod counters;
pub(crate) mod removal;
mod scrubber;

/// Bytes that are cleared in one step: a request to stop waits for one step at most.
const STEP: u64 = 2 << 20;

/// The value of `Provider::attach_gid` for no group. The kernel uses it for an invalid group too.
const NO_GROUP: u32 = u32::MAX;

/// How the memory of a provider was published.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProviderKind {
    /// p2pmem is the device's driver.
    Own,
    /// Another driver published the memory with `pci_p2pmem_publish()`.
    Adopted,
    /// Another driver registered the memory with the functions of `include/linux/p2pmem.h`.
    Registered,
}

/// Where memory is allocated.
enum Source {
    /// The module's own chunk or window, and its allocator.
    Own(Arc<OwnMemory>),
    /// Another driver's pool: the bytes taken from it, and the largest request that may succeed, in bytes.
    Adopted {
        pool: Arc<Pool>,
        allocated: u64,
        ceiling: u64,
    },
}

/// The books: everything that `Provider::inner` protects.
pub(crate) struct Inner<B> {
    /// `None` once the removal has begun.
    source: Option<Source>,
    /// Number of [`Memory`] objects that are neither free nor on a list: those of live buffers, of allocations and of the scrubber.
    outstanding: u32,
    /// Live buffers by number.
    buffers: RBTree<u64, Arc<B>>,
    /// The buffers that ended while others referred to the pages of their memory, and are still charged, by number.
    pinned_buffers: RBTree<u64, Arc<B>>,
    /// Whether charges begin and end with the lock of the ledger held, under which this changes. Otherwise the ledger counts no
    /// buffer of this provider.
    pub(crate) counted: bool,
    /// The attachments of the function to dma-bufs, by their numbers.
    attachments: RBTree<u64, Arc<dyn DeviceAttachment>>,
    /// Number of `buffers`.
    count: u32,
    /// Memory that waits for the scrubber.
    dirty: MemoryList,
    /// Memory whose pages others still refer to.
    pinned: MemoryList,
    /// Bytes of pinned memory that is off its list, since its pages are being looked at now.
    looked_at: u64,
    /// Bytes of dirty memory that is being cleared now.
    clearing: u64,
    /// How often outstanding memory came back, so that a waiter can detect that it missed one.
    returns: u64,
}

impl<B> Inner<B> {
    /// Returns the bytes that are free as soon as they are cleared.
    fn returning(&self) -> u64 {
        self.dirty.bytes + self.clearing
    }

    /// Returns the bytes whose pages others refer to, as far as is known.
    fn pinned_bytes(&self) -> u64 {
        self.pinned.bytes + self.looked_at
    }

    /// Takes `taken` bytes of another driver's pool out of the account: the chunk has gone back to the pool.
    fn unreserve(&mut self, taken: u64) {
        if let Some(Source::Adopted { allocated, .. }) = &mut self.source {
            *allocated -= taken;
        }
    }

    /// Returns whether the removal has not begun.
    pub(crate) fn is_live(&self) -> bool {
        self.source.is_some()
    }

    /// Adds a live buffer, which is charged from here on.
    pub(crate) fn add(&mut self, buffer: RBTreeNode<u64, Arc<B>>) {
        self.buffers.insert(buffer);
        self.count += 1;
    }

    /// Returns all charged buffers.
    pub(crate) fn charged(&self) -> impl Iterator<Item = &Arc<B>> {
        Iterator::chain(self.buffers.values(), self.pinned_buffers.values())
    }

    /// Removes a charged buffer, which the caller drops without locks held.
    pub(crate) fn end_charge(&mut self, buffer: u64) -> Option<Arc<B>> {
        let live = self.buffers.remove(&buffer);
        self.count -= u32::from(live.is_some());
        live.or_else(|| self.pinned_buffers.remove(&buffer))
    }

    /// Ends the outstanding state of one [`Memory`] object.
    fn put_outstanding(&mut self) {
        self.outstanding -= 1;
        self.returns += 1;
    }
}

/// A device with published memory and its buffers, of type `B`.
///
/// # Invariants
///
/// `being_removed` is set if and only if `inner.source` is `None`; both change with `inner` locked.
#[pin_data]
pub(crate) struct Provider<B: Counted> {
    /// The provider's number, never 0 and never used again.
    pub(crate) id: u32,
    pub(crate) kind: ProviderKind,
    pub(crate) addr: PciAddr,
    /// The properties of the function that rules match.
    function_id: FunctionId,
    /// The BAR, or that of the first memory of an adopted provider, whose driver may have published several BARs.
    pub(crate) bar: u32,
    /// Offset of the first published byte in the BAR.
    pub(crate) start: u64,
    /// Bytes that p2pmem manages.
    pub(crate) size: u64,
    /// Bytes that p2pmem keeps in the kernel's pool for other drivers.
    pub(crate) kernel_reserve: u64,
    pages: PageBases,
    /// The constant flags of `P2PMEM_IOC_LIST`: `P2PMEM_PROVIDER_PAGELESS` and `P2PMEM_PROVIDER_EXPORTABLE`.
    flags: u32,
    /// Whether the administrator allows pinned exports, which a revocation has to wait for.
    pinned_exports: AtomicFlag,
    /// The group whose members may attach the function to dma-bufs, or [`NO_GROUP`].
    attach_gid: Atomic<u32>,
    /// Number of open dma-bufs.
    exports: Atomic<u32>,
    pub(crate) counters: Counters,
    /// The driver that registered the memory, which is notified when the memory is revoked.
    publisher: Option<Arc<RevokeCallback>>,
    /// What the dmem cgroup charges for.
    region: Arc<Region>,
    /// Counts the bytes of the buffers.
    ledger: Arc<B::Ledger>,
    function: Function,
    driver: DriverName,
    /// Whether the provider is being removed, readable without the lock between two steps of clearing.
    being_removed: AtomicFlag,
    /// The text that says what the removal waits for.
    #[pin]
    progress: Mutex<Text>,
    #[pin]
    inner: Mutex<Inner<B>>,
    /// Signalled when memory comes back or has been cleared.
    #[pin]
    returned: CondVar,
    /// Free memory, for decisions that read it without a lock.
    hint: Arc<FreeHint>,
    /// Completed when the removal is done.
    #[pin]
    removed: Completion,
    #[pin]
    scrubber: Work<Provider<B>>,
}

impl_has_work! {
    impl{B: Counted} HasWork<Provider<B>> for Provider<B> { self.scrubber }
}

/// Where the BARs of a provider are in the address space of all mappings: the page of the first byte of each.
///
/// Every provider has pages of its own, so a mapping of a buffer that was revoked never has the pages of a later buffer.
pub(crate) struct PageBases([u64; 6]);

impl PageBases {
    /// The first page: `mmap()` at offset 0 allocates, and a small offset is more likely a mistake than a buffer.
    pub(crate) const FIRST: u64 = vma::LARGEST as u64 * 4 >> PAGE_SHIFT;
    /// The end: offsets in bytes are signed numbers.
    const END: u64 = 1 << (63 - PAGE_SHIFT);

    /// Gives the BARs of a function pages from `next` on, a multiple of [`vma::LARGEST`] bytes, and moves `next` behind them. A
    /// byte has the same place in its page table as in physical memory, so large entries are possible.
    ///
    /// Errors: `ENOSPC` if no pages are left: a provider takes a few GiB of 8 EiB.
    pub(crate) fn new(function: &Function, next: &mut u64) -> Result<Self> {
        let (mut bases, mut at, unit) = ([0; 6], *next, vma::LARGEST as u64);
        for (bar, base) in bases.iter_mut().enumerate() {
            let Some((start, size)) = function.bar(bar as u32) else {
                continue;
            };
            *base = at + ((start % unit) >> PAGE_SHIFT);
            // The BAR begins within the first unit.
            let span = size.checked_add(2 * unit).ok_or(ENOSPC)? / unit * unit;
            at += span >> PAGE_SHIFT;
        }
        if at > Self::END {
            return Err(ENOSPC);
        }
        *next = at;
        Ok(Self(bases))
    }

    /// Returns the page of a byte of a BAR.
    pub(crate) fn of(&self, bar: u32, offset: u64) -> u64 {
        self.0.get(bar as usize).map_or(0, |base| base + (offset >> PAGE_SHIFT))
    }
}

/// A buffer whose bytes a ledger counts: the rules in force (`rust/alloc/rules.rs`).
pub(crate) trait Counted: Send + Sync + Sized + 'static {
    type Ledger: Send + Sync;

    /// Takes the charged buffer `id` off the books of `provider`, and its bytes off the counts.
    ///
    /// Context: process context, may sleep: the ledger takes a mutex.
    fn uncharge(ledger: &Self::Ledger, provider: &Provider<Self>, id: u64);
}

/// The properties of a new provider; see [`Provider`].
pub(crate) struct ProviderConfig<B: Counted> {
    pub(crate) id: u32,
    pub(crate) pages: PageBases,
    pub(crate) function: Function,
    /// The driver that the function is bound to.
    pub(crate) driver: DriverName,
    pub(crate) region: Arc<Region>,
    pub(crate) ledger: Arc<B::Ledger>,
    /// The BAR, and the offset of the first byte in it.
    pub(crate) place: (u32, u64),
    pub(crate) kernel_reserve: u64,
    pub(crate) pinned_exports: bool,
    pub(crate) attach_gid: Option<u32>,
    /// The driver that registered the memory, if one did.
    pub(crate) publisher: Option<Arc<RevokeCallback>>,
}

impl<B: Counted> Provider<B> {
    /// Makes an own or registered provider of `backing`. Errors: `ENOMEM`.
    pub(crate) fn own(config: ProviderConfig<B>, backing: Backing) -> Result<Arc<Self>> {
        let size = backing.size();
        let flags = match backing.has_pages() {
            true => consts::PROVIDER_EXPORTABLE,
            false => consts::PROVIDER_EXPORTABLE | consts::PROVIDER_PAGELESS,
        };
        let own = OwnMemory::new(backing)?;
        let kind = match config.publisher {
            None => ProviderKind::Own,
            Some(_) => ProviderKind::Registered,
        };
        Self::new(config, kind, size, flags, Source::Own(own))
    }

    /// Makes an adopted provider, which takes up to `size` bytes from `pool`. Errors: `ENOMEM`.
    pub(crate) fn adopted(config: ProviderConfig<B>, pool: Arc<Pool>, size: u64) -> Result<Arc<Self>> {
        let (flags, allocated, ceiling) = (consts::PROVIDER_EXPORTABLE, 0, size);
        Self::new(
            config,
            ProviderKind::Adopted,
            size,
            flags,
            Source::Adopted {
                pool,
                allocated,
                ceiling,
            },
        )
    }

    fn new(config: ProviderConfig<B>, kind: ProviderKind, size: u64, flags: u32, source: Source) -> Result<Arc<Self>> {
        let hint = match &source {
            Source::Own(own) => own.buddy().hint(),
            Source::Adopted { ceiling, .. } => {
                let hint = FreeHint::new()?;
                hint.set(size, size.min(*ceiling));
                hint
            }
        };
        Arc::pin_init(
            pin_init!(Self {
                id: config.id,
                kind,
                addr: config.function.address(),
                function_id: config.function.function_id(),
                bar: config.place.0,
                start: config.place.1,
                size,
                kernel_reserve: config.kernel_reserve,
                pages: config.pages,
                flags,
                pinned_exports: AtomicFlag::new(config.pinned_exports),
                attach_gid: Atomic::new(config.attach_gid.unwrap_or(NO_GROUP)),
                exports: Atomic::new(0),
                counters: Counters::new(),
                publisher: config.publisher,
                function: config.function,
                driver: config.driver,
                region: config.region,
                ledger: config.ledger,
                being_removed: AtomicFlag::new(false),
                progress <- new_mutex!(Text::EMPTY),
                inner <- new_mutex!(Inner {
                    source: Some(source),
                    outstanding: 0,
                    buffers: RBTree::new(),
                    pinned_buffers: RBTree::new(),
                    // The first allocation finds out whether buffers are counted.
                    counted: true,
                    attachments: RBTree::new(),
                    count: 0,
                    dirty: MemoryList::EMPTY,
                    pinned: MemoryList::EMPTY,
                    looked_at: 0,
                    clearing: 0,
                    returns: 0,
                }),
                returned <- new_condvar!(),
                hint,
                removed <- Completion::new(),
                scrubber <- new_work!("p2pmem_scrubber"),
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the PCI function.
    pub(crate) fn function(&self) -> &Function {
        &self.function
    }

    /// Returns what rules match: address, vendor, device, class and NUMA node.
    pub(crate) fn function_id(&self) -> FunctionId {
        self.function_id
    }

    /// Returns whether the kernel lets `client` access the memory. May sleep; takes `inner`. Errors: `ENODEV` (the provider is being
    /// removed).
    pub(crate) fn is_reached_by(&self, client: &Function) -> Result<bool> {
        let inner = self.inner.lock();
        let own = match inner.source.as_ref().ok_or(ENODEV)? {
            Source::Own(own) => Ok(own.backing().clone()),
            Source::Adopted { pool, .. } => Err(pool.clone()),
        };
        drop(inner);
        match own {
            Ok(backing) => Ok(backing.is_reached_by(client)),
            Err(pool) => pool.is_reached_by(client).ok_or(ENODEV),
        }
    }

    /// Charges the caller's cgroup for `bytes` of this provider. Errors: `EAGAIN` (a limit of dmem).
    pub(crate) fn charge_cgroup(&self, bytes: u64) -> Result<CgroupCharge> {
        if !Region::COUNTS {
            return Ok(CgroupCharge::NOTHING);
        }
        self.region.charge(bytes)
    }

    /// Tries whether [`Self::charge_cgroup`] would succeed. Errors: `EAGAIN`.
    pub(crate) fn try_charge_cgroup(&self, bytes: u64) -> Result {
        if !Region::COUNTS {
            return Ok(());
        }
        self.region.try_charge(bytes)
    }

    /// Returns the bytes of an adopted pool that p2pmem keeps free for other drivers. An own provider gave other drivers their
    /// part when it was published, so it has no bound here.
    pub(crate) fn kernel_reserve(&self) -> u64 {
        match self.kind {
            ProviderKind::Own | ProviderKind::Registered => u64::MAX,
            ProviderKind::Adopted => self.kernel_reserve,
        }
    }

    /// Returns whether the memory has struct pages.
    pub(crate) fn has_pages(&self) -> bool {
        self.flags & consts::PROVIDER_PAGELESS == 0
    }

    /// Returns whether the administrator allows pinned exports.
    pub(crate) fn pinned_exports(&self) -> bool {
        self.pinned_exports.load(Relaxed)
    }

    /// Allows or forbids pinned exports. Existing ones stay.
    pub(crate) fn set_pinned_exports(&self, allow: bool) {
        self.pinned_exports.store(allow, Relaxed);
    }

    /// Returns the group whose members may attach the function to dma-bufs.
    pub(crate) fn attach_gid(&self) -> Option<u32> {
        Some(self.attach_gid.load(Relaxed)).filter(|&gid| gid != NO_GROUP)
    }

    /// Sets the group whose members may attach the function. Existing attachments stay.
    pub(crate) fn set_attach_gid(&self, gid: Option<u32>) {
        self.attach_gid.store(gid.unwrap_or(NO_GROUP), Relaxed);
    }

    /// Adds an attachment of the function to a dma-buf. Errors: `ENODEV` (being removed), `ENOMEM`.
    pub(crate) fn add_attachment(&self, id: u64, attachment: Arc<dyn DeviceAttachment>) -> Result {
        let node = RBTreeNode::new(id, attachment, GFP_KERNEL_ACCOUNT)?;
        let mut inner = self.inner.lock();
        if inner.source.is_none() {
            drop(inner);
            drop(node);
            return Err(ENODEV);
        }
        inner.attachments.insert(node);
        Ok(())
    }

    /// Removes an attachment from the list.
    pub(crate) fn remove_attachment(&self, id: u64) {
        let removed = self.inner.lock().attachments.remove_node(&id);
        // Dropped without `inner` held.
        drop(removed);
    }

    /// Calls `f` for each attachment in turn, without a lock held. An attachment that is added meanwhile may be missed.
    pub(crate) fn for_each_attachment(&self, f: impl FnMut(&Arc<dyn DeviceAttachment>)) {
        walk::one_by_one(|from| walk::at_or_after(&self.inner.lock().attachments, from), f);
    }

    /// Updates the hint of free memory after a change of `inner`, with its lock held.
    fn update_hint(&self, inner: &Inner<B>) {
        match &inner.source {
            None => self.hint.close(),
            Some(Source::Own(_)) => self.hint.set_returning(inner.returning(), inner.returns),
            Some(Source::Adopted { allocated, ceiling, .. }) => {
                let free = self.size - allocated;
                self.hint.set_returning(inner.returning(), inner.returns);
                self.hint.set(free, free.min(*ceiling));
            }
        }
    }

    /// Returns the capacity without a lock. More than the largest piece may be in one piece.
    #[inline(always)]
    pub(crate) fn capacity_hint(&self) -> Capacity {
        self.hint.capacity()
    }

    /// Returns the free memory for a request with the bounds `need`. `largest >= size` holds if and only if the request fits. Takes
    /// no lock if the hint proves that the request does not fit.
    #[cold]
    pub(crate) fn exact_capacity(&self, need: &FitBounds, size: u64, align: u64) -> Capacity {
        match self.hint.fit(need) {
            FitHint::Short(has) => has,
            FitHint::Fits(_) | FitHint::Unknown(_) => self.capacity(size, align),
        }
    }

    /// Returns the free memory for a request. `largest >= size` holds if and only if the request fits.
    pub(crate) fn capacity(&self, size: u64, align: u64) -> Capacity {
        let inner = self.inner.lock();
        let (free, largest) = match &inner.source {
            None => return Capacity::REMOVED,
            Some(Source::Own(own)) => {
                let own = own.clone();
                // Memory that is being cleared counts as free, since an allocation waits for it.
                let free = own.buddy().free() + inner.returning();
                let (clearing, returns) = (inner.returning() > 0, inner.returns);
                drop(inner);
                let largest = own.buddy().largest_for(size, align);
                // Whether blocks that are being cleared will merge into one that fits is known only once they are free.
                let joined = largest < size && (clearing || self.has_moved(returns));
                (free, if joined { size.min(free) } else { largest })
            }
            Some(Source::Adopted { allocated, ceiling, .. }) => {
                let returning = inner.returning();
                let free = self.size - allocated + returning;
                let largest = free.min((*ceiling).max(returning));
                // A chunk of the pool is aligned by taking more.
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
        Capacity { free, largest }
    }

    /// Returns whether memory came back since `inner.returns` was `returns`, or is being cleared.
    fn has_moved(&self, returns: u64) -> bool {
        let inner = self.inner.lock();
        inner.returns != returns || inner.returning() > 0
    }

    /// Returns the offset of memory in the address space of all mappings, in pages.
    pub(crate) fn page_offset_of(&self, memory: &Memory) -> u64 {
        let (bar, offset) = memory.place();
        self.pages.of(bar, offset)
    }

    /// Locks the books, for the ledger: after its own lock, if the provider's buffers are counted.
    pub(crate) fn books(&self) -> MutexGuard<'_, Inner<B>> {
        self.inner.lock()
    }

    /// Ends the charge of a buffer that ended, if the buffer is charged.
    fn uncharge(&self, buffer: u64) {
        let mut inner = self.inner.lock();
        if inner.counted {
            drop(inner);
            B::uncharge(&self.ledger, self, buffer);
            return;
        }
        let ended = inner.end_charge(buffer);
        drop(inner);
        drop(ended);
    }

    /// Ends what is left of the last owner's charges of memory, to whose pages nobody refers any more.
    pub(crate) fn forget_owner(&self, memory: &mut Memory) {
        if let Some(buffer) = memory.forget_owner() {
            self.uncharge(buffer);
        }
    }

    /// Returns the provider's element of `P2PMEM_IOC_LIST`.
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
            bar: self.bar as i32,
            numa_node: function.node(),
            bar_offset: self.start,
            size: self.size,
            kernel_reserve: self.kernel_reserve,
            vendor,
            device,
            class,
            flags: self.flags,
            exports: self.exports.load(Relaxed),
            driver: self.driver,
            ..Default::default()
        };
        if self.pinned_exports() {
            row.flags |= consts::PROVIDER_PINNED_EXPORTS;
        }
        let inner = self.inner.lock();
        if inner.returning() > 0 {
            row.flags |= consts::PROVIDER_CLEARING;
        }
        row.buffers = inner.count;
        row.pinned = inner.pinned_bytes();
        row.scrubbing = inner.returning();
        row.state = if inner.source.is_some() {
            consts::PROVIDER_LIVE
        } else {
            consts::PROVIDER_REVOKING
        };
        let own = match &inner.source {
            None => None,
            Some(Source::Own(own)) => Some(own.clone()),
            Some(Source::Adopted { allocated, ceiling, .. }) => {
                row.free = self.size - allocated;
                row.largest = row.free.min(*ceiling);
                None
            }
        };
        drop(inner);
        if let Some(own) = own {
            row.free = own.buddy().free();
            row.largest = own.buddy().largest();
        }
        row
    }

    /// Returns the number of live buffers and the free bytes.
    pub(crate) fn totals(&self) -> (u32, u64) {
        let inner = self.inner.lock();
        let count = inner.count;
        let free = match &inner.source {
            None => 0,
            Some(Source::Own(own)) => {
                let own = own.clone();
                drop(inner);
                own.buddy().free()
            }
            Some(Source::Adopted { allocated, .. }) => self.size - allocated,
        };
        (count, free)
    }

    /// Counts a user mapping.
    pub(crate) fn mapped(&self) {
        self.counters.maps.fetch_add(1, Relaxed);
    }

    /// Counts a new dma-buf.
    pub(crate) fn exported(&self) {
        self.exports.fetch_add(1, Relaxed);
        self.counters.exports.fetch_add(1, Relaxed);
    }

    /// Counts the end of a dma-buf.
    pub(crate) fn unexported(&self) {
        self.exports.fetch_sub(1, Relaxed);
    }

    /// Calls `f` for each live buffer in turn, without a lock held. A buffer that is added meanwhile may be missed.
    pub(crate) fn for_each_buffer(&self, f: impl FnMut(&Arc<B>)) {
        walk::one_by_one(|from| walk::at_or_after(&self.inner.lock().buffers, from), f);
    }

    /// Returns whether the removal has not begun.
    pub(crate) fn is_live(&self) -> bool {
        self.books().is_live()
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
