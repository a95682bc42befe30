// SPDX-License-Identifier: GPL-2.0

//! Attachments of own providers' functions to dma-bufs of any exporter.
//!
//! A program attaches the function that it drives to a dma-buf, for instance of a NIC's doorbell page, and gets the
//! addresses at which the function reaches the memory. An attachment ends by four causes: the program detaches it, its file
//! is closed, the provider is removed, or the exporter takes the memory back. Where no IOMMU ends the function's access,
//! the function loses bus mastering unless the program detached. See "Attachments to dma-bufs" in
//! Documentation/design/lifecycle.md.
//!
//! Context: process context, may sleep, with none of the module's locks held. Lock order: the dma-buf's reservation, then
//! `Attachment::state`, which is not held while the exporter is called.
//!
//! C header: [`include/linux/dma-buf.h`](srctree/include/linux/dma-buf.h), wrapped by [`crate::ext::dma_attachment`].

use crate::{
    ext::{
        abi::{
            self,
            consts, //
        },
        bus_master::{
            DmaUse,
            Unconfirmed, //
        },
        completion::Completion,
        cred::Credentials,
        dma_attachment::{
            AttachmentOwner,
            DmaAttachment, //
        },
        dma_buf::ExporterName,
        driver,
        log::{
            self,
            Owner, //
        },
        refusal::{
            refuse,
            Answer,
            Refusal, //
        },
        workqueue, //
    },
    mem::{
        buffer::Provider,
        provider::ProviderKind,
        traits::DeviceAttachment, //
    },
    policy::{
        ranges::Range,
        rule::Subject as _, //
    },
    share::dmabuf::{
        self,
        Export, //
    }, //
};
use kernel::{
    fmt, new_mutex, new_work,
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex,
    },
    workqueue::{impl_has_work, Work, WorkItem},
};

/// The next number of an attachment. Numbers are never used twice.
static NEXT_ID: Atomic<u64> = Atomic::<u64>::new(1);

/// Gets the events of an attachment.
///
/// Called with a dma-buf's reservation locked. Must not drop the last reference to an attachment.
pub(crate) trait Watcher: Send + Sync {
    /// An event `kind` (`P2PMEM_EVENT_*`) of the attachment with this handle.
    fn attachment_event(&self, kind: u32, provider: u32, handle: u32);
}

/// The phase of the mapping. It only moves forward.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    New,
    Live,
    /// The exporter took the memory back.
    Revoked,
    /// The attachment was detached, or its file closed, or the provider removed.
    Gone,
}

struct State {
    phase: Phase,
    /// The addresses for the function. None unless Live.
    ranges: KVVec<Range>,
    /// Whether the end of the mapping also ends the function's access.
    translated: bool,
    /// The function may still use the mapping, although the mapping ended.
    stale: Option<Unconfirmed>,
    /// The attachment to the dma-buf, which refers back. [`Attachment::new`] sets it, and the thread that ends the attachment
    /// takes it, so that no lock is held while the exporter is called.
    importer: Option<DmaAttachment>,
    /// Whether the attachment is to end. If there is no `importer` yet, [`Attachment::new`] ends the attachment.
    ending: bool,
}

/// An attachment, which one handle of a file refers to.
#[pin_data]
pub(crate) struct Attachment {
    id: u64,
    provider: Arc<Provider>,
    handle: u32,
    watcher: Arc<dyn Watcher>,
    /// Size of the dma-buf in bytes.
    pub(crate) size: u64,
    exporter: ExporterName,
    owner: Owner,
    since: u64,
    #[pin]
    state: Mutex<State>,
    /// Completed when the attachment has ended.
    #[pin]
    ended: Completion,
    #[pin]
    stopped: Work<Attachment, STOPPED>,
    #[pin]
    removal: Work<Attachment, REMOVED>,
}

/// Work: the function was stopped.
const STOPPED: u64 = 0;
/// Work: the provider is being removed.
const REMOVED: u64 = 1;

impl_has_work! {
    impl HasWork<Attachment, STOPPED> for Attachment { self.stopped }
    impl HasWork<Attachment, REMOVED> for Attachment { self.removal }
}

impl WorkItem<STOPPED> for Attachment {
    type Pointer = Arc<Self>;

    /// Notifies the files of all attachments of a function that was stopped. Not done by the callback, which has a
    /// reservation locked.
    fn run(this: Arc<Self>) {
        this.provider
            .for_each_attachment(|attachment| attachment.function_stopped());
    }
}

impl WorkItem<REMOVED> for Attachment {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.end(End::ProviderRemoved);
    }
}

impl AttachmentOwner for Attachment {
    fn revoked(self: Arc<Self>, device: &DmaUse) {
        let stopped = self.ending(device, Phase::Revoked, false);
        self.notify(consts::EVENT_ATTACHMENT_REVOKED);
        if stopped {
            self.spread_stop();
        }
    }
}

/// How an attachment ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The program detaches, and confirms that the function does not use the addresses any more.
    Detached,
    /// The file is closed, for instance because its process was killed.
    Closed,
    /// The provider is being removed.
    ProviderRemoved,
}

impl Attachment {
    /// Attaches the function of `provider` to the dma-buf of a descriptor, and maps the dma-buf. `handle` and `watcher` are
    /// for events. `quiesced` confirms that the function uses no address of an attachment that has ended.
    ///
    /// Errors: those of `P2PMEM_IOC_ATTACH_DMABUF`.
    pub(crate) fn new(
        provider: &Arc<Provider>,
        fd: i32,
        handle: u32,
        quiesced: bool,
        watcher: Arc<dyn Watcher>,
    ) -> Answer<Arc<Self>> {
        let addr = provider.addr;
        if provider.kind != ProviderKind::Own {
            return Err(refuse!(
                abi::errno(abi::EOPNOTSUPP),
                "{} is bound to its own driver: only a function that is bound to the p2pmem driver can be attached",
                addr
            ));
        }
        permit(provider)?;
        let dma_buf = dmabuf::look_up(fd)?;
        if let Some(export) = dma_buf.object_of::<Export>() {
            if export.provider().function().same(provider.function()) {
                return Err(refuse!(
                    EINVAL,
                    "the dma-buf is memory of {} itself, which reaches it without DMA",
                    addr
                ));
            }
        }
        let device = driver::with_bound(addr, |bound| bound.dma_use()).flatten();
        let mut device = device.ok_or_else(|| removed(provider))?;
        if !device.start(quiesced) {
            return Err(refuse!(
                EBUSY,
                "{} may still use the memory of an attachment that has ended: stop its DMA, then detach the revoked handles, or attach with P2PMEM_ATTACH_QUIESCED",
                addr
            ));
        }
        let (exporter, size) = (dma_buf.exporter_name(), dma_buf.size());
        let this: Arc<Self> = Arc::pin_init(
            pin_init!(Self {
                id: NEXT_ID.fetch_add(1, Relaxed),
                provider: provider.clone(),
                handle,
                watcher,
                size,
                exporter,
                owner: Owner::current(),
                since: log::now_ns(),
                state <- new_mutex!(State {
                    phase: Phase::New,
                    ranges: KVVec::new(),
                    translated: false,
                    stale: None,
                    importer: None,
                    ending: false,
                }),
                ended <- Completion::new(),
                stopped <- new_work!("p2pmem_stopped"),
                removal <- new_work!("p2pmem_attachment_removal"),
            }),
            GFP_KERNEL_ACCOUNT,
        )?;
        // First: a removal that begins from here on finds the attachment, and waits for `ended`.
        provider.add_attachment(this.id, this.clone()).map_err(|e| match e {
            e if e == ENODEV => removed(provider),
            e => e.into(),
        })?;
        let importer = DmaAttachment::new(dma_buf, device, this.clone())
            .map_err(|e| this.refused("attach to", e))
            .and_then(|importer| this.map(importer));
        let importer = match importer {
            Ok(importer) => importer,
            Err(refusal) => {
                this.left();
                return Err(refusal);
            }
        };
        let stopped = importer.device().is_stopped();
        let mut state = this.state.lock();
        state.importer = Some(importer);
        let ending = state.ending;
        drop(state);
        if ending {
            // The caller does not learn the addresses, so the function does not use them.
            this.end(End::Detached);
            return Err(removed(provider));
        }
        // Another mapping of the function may have become stale before this one was live, and its event did not reach this
        // attachment.
        if stopped {
            this.function_stopped();
        }
        Ok(this)
    }

    /// Maps the dma-buf and keeps the addresses.
    fn map(&self, importer: DmaAttachment) -> Answer<DmaAttachment> {
        let mut bounced = false;
        let mapped = importer.map(consts::MAX_DMA_RANGES as usize, |mapping| {
            bounced = mapping.bounced;
            if bounced {
                return Err(abi::errno(abi::EOPNOTSUPP));
            }
            let mut state = self.state.lock();
            state.phase = Phase::Live;
            state.ranges = mapping.ranges;
            state.translated = mapping.translated;
            Ok(())
        });
        match mapped {
            Ok(()) => Ok(importer),
            Err(e) if bounced => Err(refuse!(
                e,
                "{} reaches the memory of the dma-buf of {} only through a bounce buffer, or not coherently",
                self.provider.addr,
                self.exporter
            )),
            Err(e) if e == E2BIG => Err(refuse!(
                e,
                "the dma-buf of {} has more than {} ranges for {}",
                self.exporter,
                consts::MAX_DMA_RANGES,
                self.provider.addr
            )),
            Err(e) => Err(self.refused("map", e)),
        }
    }

    /// Returns the refusal for an error of the exporter.
    fn refused(&self, what: &str, error: Error) -> Refusal {
        if error == ERESTARTSYS || error == ENOMEM {
            return error.into();
        }
        refuse!(
            error,
            "{} cannot {} the dma-buf of {}: its exporter, or the kernel's DMA interface, refuses",
            self.provider.addr,
            what,
            self.exporter
        )
    }

    /// Ends the attachment, or waits until another thread has ended it. When this returns, the function has no mapping, and
    /// the provider's list does not have the attachment any more. Takes the reservation.
    pub(crate) fn end(self: &Arc<Self>, how: End) {
        let mut state = self.state.lock();
        state.ending = true;
        let importer = state.importer.take();
        drop(state);
        match importer {
            Some(importer) => self.finish(importer, how),
            None => while !self.ended.wait(1_000) {},
        }
        if how != End::Detached {
            return;
        }
        let stale = self.state.lock().stale.take();
        if let Some(stale) = stale {
            stale.confirm();
        }
    }

    /// Ends the mapping and detaches from the dma-buf. Takes the reservation.
    fn finish(self: &Arc<Self>, importer: DmaAttachment, how: End) {
        let (mut ended, mut stopped) = (false, false);
        importer.unmap(|| {
            ended = true;
            stopped = self.ending(importer.device(), Phase::Gone, how == End::Detached);
        });
        // Detaching and dropping the dma-buf call the exporter.
        drop(importer);
        if ended && how == End::ProviderRemoved {
            self.notify(consts::EVENT_ATTACHMENT_REVOKED);
        }
        if stopped {
            self.spread_stop();
        }
        self.left();
    }

    /// The function is not attached to the dma-buf any more.
    fn left(&self) {
        self.provider.remove_attachment(self.id);
        self.ended.complete();
    }

    fn notify(&self, kind: u32) {
        self.watcher.attachment_event(kind, self.provider.id, self.handle);
    }

    /// The mapping is about to end, with the reservation locked. `confirmed` says that the function does not use the
    /// addresses any more. Otherwise, nobody can attach the function until somebody confirms this, and if no IOMMU ends the
    /// access, this takes bus mastering from the function. Returns whether this stopped the function.
    fn ending(&self, device: &DmaUse, phase: Phase, confirmed: bool) -> bool {
        let mut state = self.state.lock();
        state.phase = phase;
        let ranges = core::mem::replace(&mut state.ranges, KVVec::new());
        let mut stopped = false;
        // An administrator can make translations lazy at any time.
        state.translated = state.translated && ranges.first().is_some_and(|range| device.translates(range.offset));
        if !confirmed {
            let (stale, first) = device.end_unconfirmed(state.translated);
            state.stale = Some(stale);
            stopped = first;
        }
        drop(state);
        drop(ranges);
        stopped
    }

    /// Notifies the other attachments of the function that it can do no DMA.
    fn spread_stop(self: &Arc<Self>) {
        if log::allowed() {
            dev_notice!(
                self.provider.function().device(),
                "p2pmem: bus mastering is disabled: a mapping ended that the device may still use, and no IOMMU ends the access\n"
            );
        }
        // Cannot be the last reference: the caller has one.
        workqueue::enqueue::<_, STOPPED>(self.clone());
    }

    /// Returns the id of the provider.
    pub(crate) fn provider(&self) -> u32 {
        self.provider.id
    }

    /// Returns the state (`P2PMEM_ATTACHMENT_*`) and the flags of `info`.
    pub(crate) fn status(&self) -> (u32, u32) {
        let state = self.state.lock();
        let stopped = state.importer.as_ref().is_some_and(|a| a.device().is_stopped());
        let status = match state.phase {
            Phase::New | Phase::Live if stopped => consts::ATTACHMENT_STOPPED,
            Phase::New | Phase::Live => consts::ATTACHMENT_LIVE,
            Phase::Revoked => consts::ATTACHMENT_REVOKED,
            Phase::Gone => consts::ATTACHMENT_GONE,
        };
        let info = if state.translated {
            consts::ATTACHMENT_TRANSLATED
        } else {
            0
        };
        (status, info)
    }

    /// Returns a copy of at most `most` ranges, and the number of all ranges. Errors: `ENOMEM`.
    pub(crate) fn ranges(&self, most: usize) -> Result<(KVVec<Range>, usize)> {
        // No allocation with `state` locked: the exporter's callback takes it, and exporters call during memory reclaim. There
        // are never more ranges later.
        let count = self.state.lock().ranges.len().min(most);
        let mut copy = KVVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?;
        let state = self.state.lock();
        for range in state.ranges.iter().take(count) {
            copy.push_within_capacity(*range).map_err(|_| ENOMEM)?;
        }
        Ok((copy, state.ranges.len()))
    }
}

impl DeviceAttachment for Attachment {
    /// On the workqueue, because the exporter may hold the reservation for long.
    fn revoke(self: Arc<Self>) {
        if !workqueue::enqueue::<_, REMOVED>(self.clone()) {
            self.end(End::ProviderRemoved);
        }
    }

    fn await_end(&self) {
        let mut wait = log::LoggedWait::new();
        while !self.ended.wait(1_000) {
            if let Some(seconds) = wait.due() {
                self.provider.waits_for(fmt!(
                    "waiting for the dma-buf of {} to end attachment {} of {} since {} s: the dma-buf is locked",
                    self.exporter,
                    self.id,
                    self.owner,
                    seconds
                ));
            }
        }
    }

    fn function_stopped(&self) {
        if self.state.lock().phase == Phase::Live {
            self.notify(consts::EVENT_ATTACHMENT_STOPPED);
        }
    }

    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (status, info) = self.status();
        let translated = info & consts::ATTACHMENT_TRANSLATED != 0;
        let state = self.state.lock();
        f.write_fmt(fmt!(
            "attachment {} of {} to a dma-buf of {}: {} bytes, {}, {}, by {}, since {} s\n",
            self.id,
            self.provider.addr,
            self.exporter,
            self.size,
            match status {
                consts::ATTACHMENT_LIVE => "live",
                consts::ATTACHMENT_STOPPED => "stopped",
                consts::ATTACHMENT_REVOKED => "revoked",
                _ => "gone",
            },
            if translated { "translated" } else { "not translated" },
            self.owner,
            log::now_ns().saturating_sub(self.since) / 1_000_000_000
        ))?;
        for range in state.ranges.iter().take(SHOWN) {
            f.write_fmt(fmt!("  {:#x}+{:#x}\n", range.offset, range.size))?;
        }
        match state.ranges.len().checked_sub(SHOWN) {
            None | Some(0) => Ok(()),
            Some(more) => f.write_fmt(fmt!("  and {} more ranges\n", more)),
        }
    }
}

/// The most ranges of an attachment that debugfs shows.
const SHOWN: usize = 16;

/// Checks that the calling task may attach the function of a provider: with `CAP_SYS_ADMIN`, or as a member of the group
/// that the administrator named. Errors: `EPERM`.
fn permit(provider: &Provider) -> Answer {
    let gid = provider.attach_gid();
    if log::capable_admin() || gid.is_some_and(|gid| Credentials::current().is_member(gid)) {
        return Ok(());
    }
    Err(match gid {
        Some(gid) => refuse!(
            EPERM,
            "attaching {} takes CAP_SYS_ADMIN or membership in group {}: attach_gid in its configfs directory",
            provider.addr,
            gid
        ),
        None => refuse!(
            EPERM,
            "attaching {} takes CAP_SYS_ADMIN: attach_gid in its configfs directory names no group",
            provider.addr
        ),
    })
}

fn removed(provider: &Provider) -> Refusal {
    refuse!(ENODEV, "provider {} is being removed", provider.addr)
}
