// SPDX-License-Identifier: GPL-2.0

//! Exports: dma-bufs of buffers, and the importers that are attached to them.
//!
//! An export holds its buffer, like a handle or a mapping does, until the last reference to the dma-buf is gone. When the
//! provider is removed, the export is *revoked*: no importer can map the memory any more, p2pmem invalidates the existing
//! mappings, and the removal waits until the importers have ended them. See Documentation/design/dmabuf.md.
//!
//! Context: all functions are for process context and may sleep. The callbacks `pin`, `unpin`, `map` and `unmapped` of
//! [`Exporter`] are called with the dma-buf's reservation locked. `Export::state` is a mutex for short sections. It is
//! taken under the reservation lock and under the lock of [`Link`]; only `Provider::progress` is taken under it.
//!
//! C header: [`include/linux/dma-buf.h`](srctree/include/linux/dma-buf.h), wrapped by [`crate::ext::dma_buf`].

use crate::{
    alloc::orchestrator::Orchestrator,
    ext::{
        abi,
        compat,
        completion::Completion,
        device_name::DeviceName,
        dma_buf::{
            AnyDmaBuf,
            DmaBuf,
            Exporter,
            Importer,
            Link,
            MapSource,
            Operations,
            PhysRange, //
        },
        log::{
            self,
            Owner, //
        },
        p2pdma::Target,
        refusal::{
            refuse,
            Answer,
            Refusal, //
        },
        trace::{
            self,
            RegistrationMethod, //
        },
        workqueue, //
    },
    mem::{
        buffer::{
            Buffer,
            Holder,
            Provider, //
        },
        traits::{
            Revocable,
            RevokeDeadline, //
        }, //
    },
    policy::{
        ranges::Range, //
    },
    share::{
        access,
        export_count::ExportSlot,
        range_list, //
    }, //
};
use kernel::{
    fmt, new_mutex, new_work,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, ArcBorrow, Mutex,
    },
    workqueue::{impl_has_work, Work, WorkItem},
};

/// The next number of an export or of an importer. Numbers are never used twice.
static NEXT_ID: Atomic<u64> = Atomic::<u64>::new(1);

/// An attached importer.
struct Attached {
    name: DeviceName,
    owner: Owner,
    /// Time of the attach, `CLOCK_MONOTONIC` in ns.
    since: u64,
    revocable: bool,
    mappings: u32,
    pins: u32,
}

impl Attached {
    /// Returns how the importer holds the memory, as text for the log and debugfs.
    fn kind(&self) -> &'static str {
        match (self.revocable, self.pins) {
            (true, 0) => "revocable",
            (true, _) => "revocable, pinned",
            (false, _) => "not revocable",
        }
    }
}

struct State {
    /// The memory to map. `None` when the last mapping is gone after the revocation, or the dma-buf is released.
    target: Option<Target>,
    revoked: bool,
    /// Whether all importers were notified of the revocation.
    invalidated: bool,
    /// Whether the buffer's list of exports has the export.
    registered: bool,
    /// Number of mappings of all importers.
    mappings: u32,
    importers: RBTree<u64, Attached>,
}

/// The object behind a dma-buf of p2pmem.
#[pin_data]
pub(crate) struct Export {
    pub(crate) id: u64,
    buffer: Arc<Buffer>,
    /// The exported parts of the buffer.
    ranges: KVec<Range>,
    /// The same parts as physical memory.
    pieces: KVec<PhysRange>,
    pinned: bool,
    /// Number of the open file that exported the buffer.
    file: u64,
    _counted: ExportSlot,
    owner: Owner,
    #[pin]
    link: Link,
    #[pin]
    state: Mutex<State>,
    /// Completed when all importers were notified of the revocation and no mapping is left.
    #[pin]
    idle: Completion,
    #[pin]
    work: Work<Export>,
}

impl_has_work! {
    impl HasWork<Export> for Export { self.work }
}

impl WorkItem for Export {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.invalidate();
    }
}

impl Export {
    /// Makes a dma-buf of ranges of a buffer. `pinned` also admits importers that cannot be revoked.
    ///
    /// Errors: those of `P2PMEM_IOC_EXPORT_DMABUF` that concern the buffer and the ranges, among them `EPERM` if the
    /// administrator does not allow pinned exports, `ENODEV` if the buffer is revoked.
    pub(crate) fn new(
        buffer: Arc<Buffer>,
        ranges: KVec<Range>,
        pinned: bool,
        file: u64,
        counted: ExportSlot,
    ) -> Answer<DmaBuf<Self>> {
        let provider = &buffer.provider;
        let size = range_list::check(&ranges, buffer.size)?;
        if pinned && !provider.pinned_exports() {
            return Err(refuse!(
                EPERM,
                "the administrator does not allow pinned exports of {}: pinned_exports in its configfs directory is 0",
                provider.addr
            ));
        }
        let (target, start) = buffer.target()?;
        let mut pieces = KVec::with_capacity(ranges.len(), GFP_KERNEL_ACCOUNT)?;
        for range in &ranges {
            pieces.push(PhysRange::new(start + range.offset, range.size)?, GFP_KERNEL_ACCOUNT)?;
        }
        let for_export = buffer.clone();
        let export: Arc<Self> = Arc::pin_init(
            pin_init!(Self {
                id: NEXT_ID.fetch_add(1, Relaxed),
                buffer: for_export,
                ranges,
                pieces,
                pinned,
                file,
                _counted: counted,
                owner: Owner::current(),
                link <- Link::new(),
                state <- new_mutex!(State {
                    target: Some(target),
                    revoked: false,
                    invalidated: false,
                    registered: false,
                    mappings: 0,
                    importers: RBTree::new(),
                }),
                idle <- Completion::new(),
                work <- new_work!("p2pmem_invalidation"),
            }),
            GFP_KERNEL_ACCOUNT,
        )?;
        let revocable: Arc<dyn Revocable> = export.clone();
        let node = RBTreeNode::new(export.id, revocable, GFP_KERNEL_ACCOUNT)?;
        let made = DmaBuf::new(export.clone(), size, compat::this_module())?;
        buffer.add_export(node).map_err(|_| export.revoked())?;
        // `made` holds a reference to the dma-buf, so the dma-buf cannot be released before this.
        export.state.lock().registered = true;
        Ok(made)
    }

    /// Creates a handle of the open file `file` from a dma-buf of a whole buffer.
    ///
    /// Errors: `EBADF`, `EXDEV` if the dma-buf is not of p2pmem, `EACCES` if the dma-buf does not contain the whole
    /// buffer, `ENODEV` if the buffer is revoked, and the others of `P2PMEM_IOC_IMPORT` that concern the descriptor and
    /// the buffer.
    pub(crate) fn import(fd: i32, file: u64) -> Answer<Holder> {
        let dma_buf = look_up(fd)?;
        let export = dma_buf.object_of::<Self>().ok_or_else(|| {
            refuse!(
                EXDEV,
                "descriptor {} is a dma-buf of {}, not of p2pmem",
                fd,
                dma_buf.exporter_name()
            )
        })?;
        let buffer = &export.buffer;
        let whole = Range {
            offset: 0,
            size: buffer.size,
        };
        if export.ranges[..] != [whole] {
            return Err(refuse!(
                EACCES,
                "the dma-buf has parts of a buffer: an import needs an export of the whole buffer"
            ));
        }
        buffer.hold(file).map_err(|e| match e {
            e if e == ENODEV => export.revoked(),
            e => e.into(),
        })
    }

    /// Returns the provider of the buffer.
    pub(super) fn provider(&self) -> &Provider {
        &self.buffer.provider
    }

    /// Marks the export as revoked and invalidates the importers' mappings. When this returns, no new mapping can be made.
    /// Most importers have ended their mappings.
    ///
    /// May sleep. Takes the reservation lock.
    fn invalidate(&self) {
        self.link.invalidate(|| self.state.lock().revoked = true);
        let mut state = self.state.lock();
        state.invalidated = true;
        if state.mappings == 0 {
            self.idle.complete();
        }
    }

    /// Returns whether the invalidation has ended and no mapping is left. If so, drops the reference to the provider's
    /// memory.
    fn is_idle(&self) -> bool {
        let mut state = self.state.lock();
        if !state.invalidated || state.mappings > 0 {
            return false;
        }
        let target = state.target.take();
        drop(state);
        drop(target);
        true
    }

    /// Logs what the removal waits for after `waited` seconds, and shows it in `status`: the importers with mappings, or if
    /// the invalidation has not ended, all importers, because any of them may hold the reservation lock.
    fn name_holders(&self, waited: u64) {
        let provider = &self.buffer.provider;
        let state = self.state.lock();
        if !state.invalidated {
            provider.waits_for(fmt!("waiting for the lock of dma-buf {} since {} s", self.id, waited));
        }
        for importer in state.importers.values() {
            if !state.invalidated || importer.mappings > 0 {
                provider.waits_for(fmt!(
                    "waiting for {} of {} to let go of dma-buf {} since {} s: {} mappings, {}",
                    importer.name,
                    importer.owner,
                    self.id,
                    waited,
                    importer.mappings,
                    importer.kind()
                ));
            }
        }
    }

    /// Checks whether an importer may attach.
    ///
    /// Errors: `EOPNOTSUPP` if the importer does not support peer-to-peer DMA, or cannot be revoked and the export is not
    /// pinned; `EPERM` if the administrator no longer allows pinned exports; `EHOSTUNREACH`; `EACCES` if a rule forbids
    /// the access.
    fn admit(&self, importer: &Importer<'_>, name: &DeviceName) -> Answer {
        let provider = &self.buffer.provider;
        if !importer.peer_to_peer() {
            return Err(refuse!(
                abi::errno(abi::EOPNOTSUPP),
                "{} cannot do DMA to a peer's memory: its driver does not allow peer-to-peer for this dma-buf",
                name
            ));
        }
        let revocable = importer.revocable();
        if !revocable && !self.pinned {
            return Err(refuse!(
                abi::errno(abi::EOPNOTSUPP),
                "{} cannot release a revoked dma-buf: export with P2PMEM_EXPORT_PINNED, if the administrator allows pinned exports",
                name
            ));
        }
        if !revocable && !provider.pinned_exports() {
            return Err(refuse!(
                EPERM,
                "{} cannot release a revoked dma-buf, and the administrator no longer allows pinned exports of {}",
                name,
                provider.addr
            ));
        }
        access::check(&self.buffer, importer.device(), name)
    }

    /// Adds an importer to the list and returns its number. Errors: those of [`Self::admit`], `ENODEV` if revoked,
    /// `ENOMEM`.
    fn enter(&self, importer: &Importer<'_>) -> Answer<u64> {
        // The target keeps the provider's memory published until the importer is admitted, as the checks read the
        // provider.
        let state = self.state.lock();
        let target = state.target.clone().filter(|_| !state.revoked);
        drop(state);
        let Some(target) = target else {
            return Err(self.revoked());
        };
        let name = importer.device().name();
        self.admit(importer, &name)?;
        drop(target);
        let number = NEXT_ID.fetch_add(1, Relaxed);
        let attached = Attached {
            name,
            owner: Owner::current(),
            since: log::now_ns(),
            revocable: importer.revocable(),
            mappings: 0,
            pins: 0,
        };
        let node = RBTreeNode::new(number, attached, GFP_KERNEL_ACCOUNT)?;
        let mut state = self.state.lock();
        if state.revoked {
            drop(state);
            return Err(self.revoked());
        }
        state.importers.insert(node);
        Ok(number)
    }

    fn revoked(&self) -> Refusal {
        refuse!(
            ENODEV,
            "the dma-buf is revoked: provider {} was removed",
            self.buffer.provider.addr
        )
    }

    /// Reports a refusal to the exporting file, whose own calls do not show it; without the file, logs the refusal.
    fn refused(&self, what: &str, refusal: &Refusal) {
        match Orchestrator::get().ok().and_then(|o| o.file(self.file)) {
            Some(file) => file.refused(what, refusal),
            None => refusal.log(what),
        }
    }

    /// Changes the record of an importer, if the importer is attached.
    fn change(&self, importer: u64, change: impl FnOnce(&mut Attached)) {
        if let Some(attached) = self.state.lock().importers.get_mut(&importer) {
            change(attached);
        }
    }
}

/// The operations of all dma-bufs of p2pmem. Their address distinguishes them from other dma-bufs.
static OPERATIONS: Operations<Export> = Operations::new();

impl Revocable for Export {
    /// Starts the first part of a revocation, the invalidation, on the module's workqueue.
    ///
    /// An importer's driver may wait for its device, or hold the reservation lock. On the workqueue the waits for several
    /// dma-bufs overlap. If the work item cannot be queued, invalidates synchronously.
    fn revoke(self: Arc<Self>) {
        if !workqueue::enqueue(self.clone()) {
            self.invalidate();
        }
    }

    /// Second part of a revocation: waits until no importer can reach the memory. May sleep.
    ///
    /// The wait for the invalidation and for mappings has no limit, because the memory must not be reused before they end; the
    /// log names their holders periodically. The wait for fences ends at `deadline`.
    fn await_idle(&self, deadline: &mut RevokeDeadline) {
        let mut wait = log::LoggedWait::new();
        while !self.is_idle() {
            if let Some(seconds) = wait.due() {
                self.name_holders(seconds);
            }
            self.idle.wait(1_000);
        }
        // Without a mapping, no device can use the memory. A fence that is not signalled yet was added by a program, or
        // belongs to an importer that has not signalled it yet.
        loop {
            let ms = deadline.next(100);
            if self.link.wait_fences(ms) {
                break;
            }
            deadline.spend(ms);
            if ms == 0 {
                dev_warn!(
                    self.buffer.provider.function().device(),
                    "p2pmem: going on with fences of dma-buf {} of {} that are not signalled: nobody has it mapped\n",
                    self.id,
                    self.owner
                );
                break;
            }
        }
    }

    fn outlasts_revocation(&self) -> bool {
        let state = self.state.lock();
        let mut importers = state.importers.values();
        importers.any(|importer| importer.mappings > 0 && !importer.revocable)
    }

    /// Returns the number of attached importers.
    fn attachments(&self) -> u32 {
        self.state.lock().importers.values().count() as u32
    }

    /// Writes one line about the dma-buf and one line per importer, for debugfs.
    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_fmt(fmt!(
            "dma-buf {} of buffer {} in {}:",
            self.id,
            self.buffer.id,
            self.buffer.provider.addr
        ))?;
        for range in &self.ranges {
            f.write_fmt(fmt!(" {:#x}+{:#x}", range.offset, range.size))?;
        }
        let now = log::now_ns();
        let state = self.state.lock();
        f.write_fmt(fmt!(
            ", {}, {}, exported by {}\n",
            if self.pinned { "pinned" } else { "revocable" },
            if state.revoked { "revoked" } else { "live" },
            self.owner
        ))?;
        for importer in state.importers.values() {
            f.write_fmt(fmt!(
                "  importer {} of {}: {} mappings, {}, since {} s\n",
                importer.name,
                importer.owner,
                importer.mappings,
                importer.kind(),
                now.saturating_sub(importer.since) / 1_000_000_000
            ))?;
        }
        Ok(())
    }
}

impl Exporter for Export {
    fn operations() -> &'static Operations<Self> {
        &OPERATIONS
    }

    fn link(&self) -> &Link {
        &self.link
    }

    fn attach(this: ArcBorrow<'_, Self>, importer: &Importer<'_>) -> Result<u64> {
        let counters = &this.buffer.provider.counters;
        match this.enter(importer) {
            Ok(number) => {
                counters.attaches.fetch_add(1, Relaxed);
                let name = importer.device().name();
                trace::register(RegistrationMethod::DmaBuf, || {
                    let length = this.ranges.iter().map(|range| range.size).sum();
                    (this.buffer.about(), this.id, length, name.device())
                });
                Ok(number)
            }
            Err(refusal) => {
                counters.attach_failed.fetch_add(1, Relaxed);
                this.refused("attach", &refusal);
                Err(refusal.error)
            }
        }
    }

    fn detach(this: ArcBorrow<'_, Self>, importer: u64) {
        this.state.lock().importers.remove(&importer);
    }

    fn pin(this: ArcBorrow<'_, Self>, importer: u64) -> Result {
        // The memory never moves, so there is nothing to do. `attach()` has checked that the importer can be revoked, or
        // that the administrator allows pinned exports.
        this.change(importer, |attached| attached.pins += 1);
        Ok(())
    }

    fn unpin(this: ArcBorrow<'_, Self>, importer: u64) {
        this.change(importer, |attached| attached.pins = attached.pins.saturating_sub(1));
    }

    fn map(&self, importer: u64) -> Result<MapSource<'_>> {
        let mut state = self.state.lock();
        if state.revoked {
            return Err(ENODEV);
        }
        let target = state.target.clone().ok_or(ENODEV)?;
        state.mappings += 1;
        if let Some(attached) = state.importers.get_mut(&importer) {
            attached.mappings += 1;
        }
        drop(state);
        Ok(MapSource {
            target,
            pieces: &self.pieces,
        })
    }

    fn unmapped(this: ArcBorrow<'_, Self>, importer: u64) {
        let mut state = this.state.lock();
        state.mappings -= 1;
        if let Some(attached) = state.importers.get_mut(&importer) {
            attached.mappings -= 1;
        }
        if state.invalidated && state.mappings == 0 {
            this.idle.complete();
        }
    }

    fn mmap(this: ArcBorrow<'_, Self>) -> Error {
        let refusal = refuse!(
            abi::errno(abi::EOPNOTSUPP),
            "a dma-buf of p2pmem is for devices: map the buffer itself, through /dev/p2pmem"
        );
        this.refused("mmap of a dma-buf", &refusal);
        refusal.error
    }

    fn released(this: Arc<Self>) {
        let mut state = this.state.lock();
        let registered = core::mem::replace(&mut state.registered, false);
        let target = state.target.take();
        drop(state);
        drop(target);
        if registered {
            this.buffer.end_export(this.id);
        }
    }
}

/// Looks up the dma-buf of a descriptor of the current process. Errors: `EBADF`, `EINVAL` if it is no dma-buf.
pub(super) fn look_up(fd: i32) -> Answer<AnyDmaBuf> {
    AnyDmaBuf::get(fd).map_err(|e| match e {
        e if e == EBADF => refuse!(e, "{} is not an open file descriptor", fd),
        e => refuse!(e, "descriptor {} is not a dma-buf", fd),
    })
}

/// Writes all dma-bufs, for debugfs.
pub(crate) fn describe_all(orchestrator: &Arc<Orchestrator>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut result = Ok(());
    for provider in &orchestrator.providers().map_err(|_| fmt::Error)? {
        provider.for_each_buffer(|buffer| {
            buffer.for_each_export(|export| {
                result = result.and_then(|()| export.describe(f));
            });
        });
    }
    result
}
