// SPDX-License-Identifier: GPL-2.0

//! `/dev/p2pmem`: open files, their ioctls, events and mappings.
//!
//! C header: `include/uapi/linux/p2pmem.h`
//!
//! Nothing is copied to or from user space with a lock held: the copy may fault, and a fault may be one in a mapping
//! of ours.

use crate::{
    alloc::{
        explanation::{
            Decision,
            Explanation,
            QuickDecision, //
        },
        orchestrator::{
            visible_bus_addr,
            OpenFile,
            Orchestrator, //
        },
        request::AllocRequest,
        rules::RuleSet, //
    },
    ext::{
        abi::{
            self,
            calls,
            consts, //
        },
        chrdev::{
            self,
            READABLE, //
        },
        log,
        refusal::{
            refuse,
            Answer,
            Refusal,
            Text, //
        },
        trace,
        vma::{
            AddressSpace,
            NewArea, //
        }, //
    },
    mem::{
        buffer::{
            Buffer,
            Holder, //
        },
        memory::Clearing, //
    },
    policy::{
        placement::Named,
        ranges::Range, //
    },
    share::{
        dmabuf::{
            self,
            Export, //
        },
        export_count::ExportCount,
        peer_client, //
    },
    uapi::{
        file_rules,
        handles::{
            Handles,
            Slot, //
        },
        request::{
            self,
            no_flags,
            no_reserved,
            ArrayWriter, //
        }, //
    }, //
};
use core::mem::{offset_of, size_of};
use kernel::{
    ffi,
    fs::{file::FileDescriptorReservation, File as KernelFile},
    ioctl::_IOC_SIZE,
    new_condvar, new_mutex,
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    sync::{
        aref::ARef,
        poll::{PollCondVar, PollTable},
        Arc, ArcBorrow, CondVar, Mutex,
    },
    transmute::{AsBytes, FromBytes},
    uaccess::{UserPtr, UserSlice, UserSliceWriter},
};

/// Events that wait to be read; more are counted as lost.
const EVENTS: usize = 64;

struct Events {
    ring: [abi::Event; EVENTS],
    first: usize,
    len: usize,
    lost: u32,
}

impl Events {
    /// Returns whether whoever waits for events is to be woken.
    fn push(&mut self, event: impl FnOnce() -> abi::Event) -> bool {
        if self.len == EVENTS {
            self.lost = self.lost.saturating_add(1);
            return false;
        }
        self.ring[(self.first + self.len) % EVENTS] = event();
        self.len += 1;
        true
    }

    /// Takes back an event that could not be delivered. Where there is no room any more, the newest is lost instead.
    fn push_front(&mut self, event: abi::Event) {
        if event.type_ == consts::EVENT_LOST {
            self.lost = self.lost.saturating_add(event.count);
            return;
        }
        if self.len == EVENTS {
            self.len -= 1;
            self.lost = self.lost.saturating_add(1);
        }
        self.first = (self.first + EVENTS - 1) % EVENTS;
        self.ring[self.first] = event;
        self.len += 1;
    }

    fn pop(&mut self) -> Option<abi::Event> {
        if self.len > 0 {
            let event = self.ring[self.first];
            self.first = (self.first + 1) % EVENTS;
            self.len -= 1;
            return Some(event);
        }
        let count = core::mem::take(&mut self.lost);
        (count > 0).then(|| abi::Event {
            size: size_of::<abi::Event>() as u32,
            type_: consts::EVENT_LOST,
            count,
            time_ns: log::now_ns(),
            ..Default::default()
        })
    }

    fn is_empty(&self) -> bool {
        self.len == 0 && self.lost == 0
    }
}

/// What is kept of decisions.
struct Last {
    /// The last decision or refusal.
    decision: Option<Decision>,
    /// One that nobody needs any more.
    spare: Option<KBox<QuickDecision>>,
}

/// An open file.
#[pin_data]
pub(crate) struct File {
    pub(crate) id: u64,
    orchestrator: Arc<Orchestrator>,
    #[pin]
    handles: Mutex<Handles>,
    exports: ExportCount,
    /// The file's own rules.
    #[pin]
    rules: Mutex<Option<Arc<RuleSet>>>,
    #[pin]
    last: Mutex<Last>,
    #[pin]
    events: Mutex<Events>,
    #[pin]
    readable: CondVar,
    /// For those who poll, from the first time on: ending it takes a grace period of RCU, which files that nobody polls are
    /// spared.
    #[pin]
    polled: Mutex<Option<Pin<KBox<PollCondVar>>>>,
}

impl File {
    /// Puts an event into the file's queue.
    fn push_event(&self, kind: u32, provider: u32, handle: u32) {
        let wake = self.events.lock().push(|| abi::Event {
            size: size_of::<abi::Event>() as u32,
            type_: kind,
            provider,
            handle,
            time_ns: log::now_ns(),
            ..Default::default()
        });
        if wake {
            self.wake();
        }
    }

    /// Wakes those who wait for events.
    fn wake(&self) {
        self.readable.notify_all();
        if let Some(polled) = &*self.polled.lock() {
            polled.notify_all();
        }
    }

    /// Keeps a buffer under a new handle.
    fn keep(&self, holder: Holder) -> Answer<u32> {
        // What may fail is done first, and outside the lock.
        let slot = Slot::new()?;
        let mut handles = self.handles.lock();
        match handles.number() {
            Ok(handle) => {
                handles.insert(handle, holder, slot);
                Ok(handle)
            }
            Err(refusal) => {
                // Ending the buffer takes other locks.
                drop(handles);
                drop(holder);
                Err(refusal)
            }
        }
    }

    /// A buffer of this file.
    fn buffer(&self, handle: u32) -> Answer<Arc<Buffer>> {
        let found = self.handles.lock().buffer(handle);
        found.ok_or_else(|| refuse!(ENOENT, "there is no handle {} on this file", handle))
    }

    /// Remembers what was decided; without a buffer the decision is a refusal.
    fn settle(&self, holder: Option<Holder>, decision: Decision) -> Answer<Holder> {
        let refusal = match &decision {
            Decision::Explanation(explanation) if holder.is_none() => explanation.refusal(),
            _ => Refusal::from(EINVAL),
        };
        self.remember(Some(decision));
        holder.ok_or(refusal)
    }

    /// What a decision can be made in without allocating memory.
    fn spare(&self) -> Option<KBox<QuickDecision>> {
        self.last.lock().spare.take()
    }

    /// Remembers what was decided, or that there was no memory to remember it in.
    fn remember(&self, decision: Option<Decision>) {
        let mut last = self.last.lock();
        let old = match core::mem::replace(&mut last.decision, decision) {
            Some(Decision::QuickDecision(quick)) => last.spare.replace(quick).map(Decision::QuickDecision),
            other => other,
        };
        drop(last);
        drop(old);
    }

    // The ioctls, one method each.

    fn info(&self, info: &mut abi::Info) -> Answer {
        let providers = self.orchestrator.providers()?;
        *info = abi::Info {
            abi_version: consts::ABI_VERSION,
            abi_compatible: consts::ABI_COMPATIBLE,
            page_size: PAGE_SIZE as u32,
            features: consts::FEATURES | consts::feature_peer_memory(peer_client::is_open()),
            providers: providers.len() as u32,
            generation: self.orchestrator.generation(),
            ..Default::default()
        };
        for provider in &providers {
            let (buffers, free) = provider.totals();
            info.buffers += buffers;
            info.size += provider.size;
            info.free += free;
        }
        for (to, from) in info.version.iter_mut().zip(crate::VERSION.as_bytes()) {
            *to = *from as ffi::c_char;
        }
        Ok(())
    }

    fn list(&self, list: &mut abi::List) -> Answer {
        no_flags(list.flags, 0)?;
        no_reserved(list.reserved)?;
        let providers = self.orchestrator.providers()?;
        let mut out = ArrayWriter::new(list.providers, list.count, list.provider_size)?;
        for provider in providers.iter().take(list.count as usize) {
            out.write(&provider.describe())?;
        }
        list.count = providers.len() as u32;
        Ok(())
    }

    fn paths(&self, paths: &mut abi::Paths) -> Answer {
        no_flags(paths.flags, consts::PATHS_RESCAN)?;
        no_reserved(paths.reserved)?;
        if paths.nr_clients == 0 {
            return Err(refuse!(EINVAL, "a path needs a client: nr_clients is 0"));
        }
        let names = request::Names::read(paths.clients, paths.nr_clients, paths.client_size)?;
        if paths.flags & consts::PATHS_RESCAN != 0 {
            // The cache is everyone's.
            if !log::capable_admin() {
                return Err(refuse!(EPERM, "P2PMEM_PATHS_RESCAN takes CAP_SYS_ADMIN"));
            }
            self.orchestrator.forget_paths();
        }
        let clients = names.as_slice();
        let snapshot = self.orchestrator.snapshot(clients)?;
        let (known, all) = (&snapshot.parts.known, &snapshot.parts.paths);
        let mut out = ArrayWriter::new(paths.paths, paths.nr_paths, paths.path_size)?;
        for (i, path) in all.iter().take(paths.nr_paths as usize).enumerate() {
            out.write(&abi::Path {
                provider: known[i / clients.len()].id,
                client: (i % clients.len()) as u32,
                class: path.class.as_raw(),
                flags: if path.acs_redirect {
                    consts::PATH_ACS_REDIRECT
                } else {
                    0
                } | if path.bus_addr { consts::PATH_BUS_ADDR } else { 0 },
                hops: path.hops,
                distance: path.distance,
                bandwidth: path.bandwidth,
                numa_distance: path.numa_distance,
                bridge: path.bridge.map(Into::into).unwrap_or_default(),
            })?;
        }
        paths.nr_paths = all.len() as u32;
        Ok(())
    }

    fn alloc(&self, alloc: &mut abi::Alloc) -> Answer {
        no_reserved(alloc.reserved)?;
        let wanted = self.wanted(&alloc.req)?;
        if wanted.strategy == consts::STRATEGY_STRIPE {
            return Err(refuse!(
                EINVAL,
                "a stripe is a buffer in each of several providers: allocate it by P2PMEM_IOC_STRIPE"
            ));
        }
        let (holder, decision) = self.orchestrator.alloc(&wanted, self.id, self.spare())?;
        let (provider, class) = (decision.chosen(), decision.class());
        let holder = self.settle(holder, decision)?;
        alloc.provider = provider;
        alloc.size = holder.size;
        alloc.mmap_offset = holder.page_offset << PAGE_SHIFT;
        alloc.bar_offset = holder.bar_offset.unwrap_or(u64::MAX);
        alloc.class = class;
        alloc.handle = self.keep(holder)?;
        Ok(())
    }

    /// Allocates a stripe, and returns its parts.
    fn stripe(&self, ask: &mut abi::Stripe) -> Answer<KVec<abi::Part>> {
        no_flags(ask.flags, 0)?;
        no_reserved(ask.reserved)?;
        let wanted = self.wanted(&ask.req)?;
        if wanted.strategy != consts::STRATEGY_STRIPE {
            return Err(refuse!(
                EINVAL,
                "a stripe takes P2PMEM_STRATEGY_STRIPE, not strategy {}",
                wanted.strategy
            ));
        }
        let room = ask.nr_parts as usize;
        if room < wanted.parts.max(1) {
            return Err(refuse!(
                EINVAL,
                "there is room for {} parts, {} are wanted",
                room,
                wanted.parts.max(1)
            ));
        }
        let (made, explanation) = self.orchestrator.stripe(&wanted, room, self.id)?;
        let refusal = made.is_empty().then(|| explanation.refusal());
        self.remember(Some(Decision::Explanation(KBox::new(explanation, GFP_KERNEL_ACCOUNT)?)));
        if let Some(refusal) = refusal {
            return Err(refusal);
        }
        let mut parts = KVec::with_capacity(made.len(), GFP_KERNEL_ACCOUNT)?;
        let mut offset = 0;
        for (holder, class) in made {
            let part = abi::Part {
                provider: holder.provider.id,
                offset,
                size: holder.size,
                mmap_offset: holder.page_offset << PAGE_SHIFT,
                bar_offset: holder.bar_offset.unwrap_or(u64::MAX),
                class,
                ..Default::default()
            };
            offset += holder.size;
            let kept = self.keep(holder).and_then(|handle| {
                parts.push(abi::Part { handle, ..part }, GFP_KERNEL_ACCOUNT)?;
                Ok(())
            });
            if let Err(refusal) = kept {
                self.free_parts(&parts);
                return Err(refusal);
            }
        }
        ask.nr_parts = parts.len() as u32;
        ask.size = wanted.size;
        Ok(parts)
    }

    /// Frees parts whose handles the caller never learns of.
    fn free_parts(&self, parts: &[abi::Part]) {
        for part in parts {
            let _ = self.free(part.handle);
        }
    }

    /// Makes a dma-buf of a whole buffer a handle of this file.
    fn import(&self, ask: &mut abi::Import) -> Answer {
        no_flags(ask.flags, 0)?;
        let holder = Export::import(ask.fd, self.id)?;
        ask.provider = holder.provider.id;
        ask.size = holder.size;
        ask.mmap_offset = holder.page_offset << PAGE_SHIFT;
        ask.bar_offset = holder.bar_offset.unwrap_or(u64::MAX);
        ask.handle = self.keep(holder)?;
        Ok(())
    }

    fn free(&self, handle: u32) -> Answer {
        let holder = self.handles.lock().remove(handle);
        // Dropping it outside the lock may end the buffer.
        match holder {
            Some(_) => Ok(()),
            None => Err(refuse!(ENOENT, "there is no handle {} on this file", handle)),
        }
    }

    fn free_ioctl(&self, free: &mut abi::Free) -> Answer {
        no_flags(free.flags, 0)?;
        self.free(free.handle)
    }

    fn buffer_ioctl(&self, ask: &mut abi::Buffer) -> Answer {
        no_flags(ask.flags, 0)?;
        let buffer = self.buffer(ask.handle)?;
        let (state, mappings) = buffer.status();
        ask.provider = buffer.provider.id;
        ask.size = buffer.size;
        ask.mmap_offset = buffer.page_offset << PAGE_SHIFT;
        ask.bar_offset = buffer.bar_offset.unwrap_or(u64::MAX);
        ask.bus_addr = visible_bus_addr(&buffer);
        ask.state = state.as_raw();
        ask.mappings = mappings;
        (ask.exports, ask.attachments) = buffer.exports();
        ask.handles = buffer.handles();
        Ok(())
    }

    /// Makes a dma-buf. Its descriptor is only there for the caller when it is installed.
    fn export(&self, ask: &mut abi::Export) -> Answer<Descriptor> {
        no_flags(ask.flags, consts::EXPORT_PINNED | consts::EXPORT_MAPPED)?;
        no_reserved(ask.reserved)?;
        let wanted = request::ranges(ask.ranges, ask.nr_ranges, ask.range_size)?;
        let pinned = ask.flags & consts::EXPORT_PINNED != 0;
        let (buffer, list) = if ask.flags & consts::EXPORT_MAPPED != 0 {
            if ask.handle != 0 {
                return Err(refuse!(EINVAL, "P2PMEM_EXPORT_MAPPED takes addresses, not a handle"));
            }
            self.mapped(&wanted)?
        } else {
            let buffer = self.buffer(ask.handle)?;
            dmabuf::check(&wanted, buffer.size)?;
            let mut list = KVec::new();
            for &range in &wanted {
                dmabuf::append(&mut list, range)?;
            }
            (buffer, list)
        };
        let counted = self.exports.take()?;
        let slot = FileDescriptorReservation::get_unused_fd_flags(kernel::fs::file::flags::O_CLOEXEC)
            .map_err(|e| refuse!(e, "no file descriptor is left for the dma-buf"))?;
        let made = Export::new(buffer, list, pinned, self.id, counted)?;
        ask.fd = slot.reserved_fd() as i32;
        Ok(Descriptor {
            slot,
            file: made.into_file(),
        })
    }

    /// The buffer that is mapped at all of these addresses, and which parts of it are.
    fn mapped(&self, wanted: &[Range]) -> Answer<(Arc<Buffer>, KVec<Range>)> {
        let mut found: Option<Arc<Buffer>> = None;
        let mut list = KVec::new();
        for at in 0..wanted.len() {
            let mut left = dmabuf::check_address(wanted, at)?;
            while left.size > 0 {
                let Some(part) = self.orchestrator.space().mapped_at(left.offset, left.size) else {
                    // The preload shim asks so about all memory that a program registers.
                    let nobodys = refuse!(ENOENT, "range {}: no p2pmem buffer is mapped at {:#x}", at, left.offset);
                    return Err(nobodys.unlogged());
                };
                if !part.may_write {
                    return Err(refuse!(
                        EACCES,
                        "range {}: the mapping at {:#x} is of a file that was opened for reading only",
                        at,
                        left.offset
                    ));
                }
                let buffer = found.get_or_insert_with(|| part.object.clone());
                if buffer.id != part.object.id {
                    return Err(refuse!(
                        EXDEV,
                        "range {}: another buffer is mapped at {:#x} than at the first range",
                        at,
                        left.offset
                    ));
                }
                let offset = part.offset - (buffer.page_offset << PAGE_SHIFT);
                let size = part.size;
                dmabuf::append(&mut list, Range { offset, size })?;
                left.offset += size;
                left.size -= size;
            }
        }
        let none = || refuse!(EINVAL, "a dma-buf of no range at all: nr_ranges is 0");
        Ok((found.ok_or_else(none)?, list))
    }

    fn explain(&self, explain: &mut abi::Explain) -> Answer {
        no_flags(explain.flags, consts::EXPLAIN_LAST)?;
        let said = if explain.flags & consts::EXPLAIN_LAST != 0 {
            self.last_said()?
        } else {
            let wanted = self.wanted(&explain.req)?;
            let decision = if wanted.strategy == consts::STRATEGY_STRIPE {
                Decision::Explanation(KBox::new(
                    self.orchestrator.explain_stripe(&wanted, self.id)?,
                    GFP_KERNEL_ACCOUNT,
                )?)
            } else {
                self.orchestrator.explain(&wanted, self.id, self.spare())?
            };
            let silent = explain.nr_verdicts == 0 && explain.text_len == 0;
            match decision {
                Decision::QuickDecision(quick) if silent => {
                    explain.nr_verdicts = wanted.snapshot.providers.len() as u32;
                    explain.text_len = Text::LONGEST;
                    explain.error = 0;
                    explain.chosen = quick.provider();
                    let old = self.last.lock().spare.replace(quick);
                    drop(old);
                    return Ok(());
                }
                Decision::QuickDecision(quick) => KBox::new(quick.explanation()?, GFP_KERNEL_ACCOUNT)?,
                Decision::Explanation(explanation) => explanation,
            }
        };
        let mut out = ArrayWriter::new(explain.verdicts, explain.nr_verdicts, explain.verdict_size)?;
        for verdict in said.verdicts.iter().take(explain.nr_verdicts as usize) {
            out.write(verdict)?;
        }
        explain.nr_verdicts = said.verdicts.len() as u32;
        let text = said.text.as_str().as_bytes();
        explain.text_len = match (explain.text_len as usize).checked_sub(1) {
            Some(room) => {
                let cut = text.get(..room).unwrap_or(text);
                let mut out = request::text_writer(explain.text, explain.text_len)?;
                out.write_slice(cut)?;
                out.write(&0u8)?;
                text.len() as u32 + 1
            }
            None => Text::LONGEST,
        };
        explain.error = said.error as u32;
        explain.chosen = said.chosen;
        Ok(())
    }

    /// What there is to say of this file's last decision or refusal.
    fn last_said(&self) -> Answer<KBox<Explanation>> {
        let last = self.last.lock();
        // Nothing to explain is itself nothing to remember.
        let explanation = match last.decision.as_ref().ok_or(Refusal::from(abi::errno(abi::ENODATA)))? {
            Decision::QuickDecision(quick) => quick.explanation()?,
            Decision::Explanation(explanation) => explanation.again()?,
        };
        Ok(KBox::new(explanation, GFP_KERNEL_ACCOUNT)?)
    }

    fn own_rules(&self) -> Option<Arc<RuleSet>> {
        self.rules.lock().clone()
    }

    /// Checks a request.
    fn wanted(&self, req: &abi::Request) -> Answer<AllocRequest> {
        request::wanted(req, self.own_rules(), &self.orchestrator)
    }

    /// Replaces the file's own rules.
    fn set_rules(&self, ask: &mut abi::Rules) -> Answer {
        no_flags(ask.flags, 0)?;
        no_reserved(ask.reserved)?;
        let new = file_rules::read(ask)?;
        let old = core::mem::replace(&mut *self.rules.lock(), new);
        drop(old);
        Ok(())
    }

    fn stats(&self, stats: &mut abi::Stats) -> Answer {
        no_flags(stats.flags, 0)?;
        let id = stats.provider;
        *stats = abi::Stats {
            provider: id,
            ..Default::default()
        };
        self.orchestrator.stats(id, stats)
    }

    /// Maps a buffer of this file, or with offset 0 a new one.
    fn map(&self, area: NewArea<'_, Buffer>) -> Answer {
        if !area.is_shared() {
            return Err(refuse!(
                EINVAL,
                "device memory cannot be mapped privately: use MAP_SHARED"
            ));
        }
        let (page, len) = (area.page_offset(), area.len());
        if page == 0 {
            let wanted = AllocRequest {
                size: len,
                align: PAGE_SIZE as u64,
                snapshot: self.orchestrator.snapshot(&[])?,
                named: Named::Any,
                strategy: consts::STRATEGY_NEAREST,
                max_class: None,
                parts: 0,
                own: self.own_rules(),
                // The kernel holds the mmap lock, which whoever looks at the process waits for.
                clearing: Clearing::AtFirstUse,
            };
            let (holder, decision) = self.orchestrator.alloc(&wanted, self.id, self.spare())?;
            let holder = self.settle(holder, decision)?;
            // The handle ends here, the mapping keeps the buffer.
            return attach(area, holder.buffer(), holder.page_offset);
        }
        let found = self.handles.lock().at_page(page);
        let Some(buffer) = found else {
            return Err(refuse!(
                EINVAL,
                "no buffer of this file is at offset {:#x}",
                page << PAGE_SHIFT
            ));
        };
        let offset = (page - buffer.page_offset) << PAGE_SHIFT;
        if offset >= buffer.size || len > buffer.size - offset {
            return Err(refuse!(
                EINVAL,
                "{} bytes at {} of a buffer of {} bytes reach past its end",
                len,
                offset,
                buffer.size
            ));
        }
        attach(area, &buffer, page)
    }
}

/// A dma-buf and the number it will have for the caller.
struct Descriptor {
    slot: FileDescriptorReservation,
    file: ARef<KernelFile>,
}

impl Descriptor {
    /// Makes it the caller's. Nothing may fail afterwards.
    fn install(self) {
        self.slot.fd_install(self.file);
    }
}

/// Makes an area a mapping of a buffer.
fn attach(area: NewArea<'_, Buffer>, buffer: &Arc<Buffer>, page: u64) -> Answer {
    buffer
        .map()
        .map_err(|e| refuse!(e, "the buffer was revoked: its provider {} left", buffer.provider.addr))?;
    buffer.provider.mapped();
    trace::map(|| {
        let offset = (page - buffer.page_offset) << PAGE_SHIFT;
        (buffer.about(), offset, area.len())
    });
    let provider = &buffer.provider;
    area.attach(buffer.clone(), page, provider.combine, provider.has_pages());
    Ok(())
}

/// An ioctl's argument: the caller's structure, which may be shorter or longer than the module's.
#[derive(Clone, Copy)]
struct Argument {
    at: UserPtr,
    size: usize,
}

impl Argument {
    /// Copies the structure in, calls its method, and copies the structure out where the method succeeded and `out` says
    /// so. The caller's structure has to have the first `least` bytes.
    fn exchange<T: FromBytes + AsBytes + Default>(
        self,
        least: usize,
        method: impl FnOnce(&mut T) -> Answer,
        out: bool,
    ) -> Answer {
        self.at_least(least)?;
        let (mut reader, mut writer) = UserSlice::new(self.at, self.size).reader_writer();
        let mut value = request::read_sized::<T>(&mut reader, self.size)?;
        method(&mut value)?;
        if out {
            self.write(&mut writer, &value)?;
        }
        Ok(())
    }

    /// Writes of a structure what the caller has room for.
    #[inline(always)]
    fn write<T: AsBytes>(self, writer: &mut UserSliceWriter, value: &T) -> Result {
        if self.size == size_of::<T>() {
            // A copy of a size that the compiler knows: this is on the way of every call.
            return writer.write(value);
        }
        let bytes = value.as_bytes();
        writer.write_slice(bytes.get(..self.size).unwrap_or(bytes))
    }

    /// Copies an answer out. What the caller has room for beyond it becomes zero.
    fn answer<T: AsBytes>(self, value: &T) -> Answer {
        let mut writer = UserSlice::new(self.at, self.size).writer();
        self.write(&mut writer, value)?;
        request::write_zeros(&mut writer, self.size.saturating_sub(size_of::<T>()))
    }

    fn at_least(self, least: usize) -> Answer {
        if self.size >= least {
            return Ok(());
        }
        Err(refuse!(
            EINVAL,
            "an argument of {} bytes, at least {} are needed",
            self.size,
            least
        ))
    }
}

/// What the kernel calls for open files.
static TABLE: chrdev::Table<File> = chrdev::Table::new();

impl OpenFile for File {
    fn notify(&self, kind: u32, provider: u32) {
        self.push_event(kind, provider, 0);
    }

    /// Tells of a buffer that was revoked, once for each of its handles.
    fn notify_revoked(&self, buffer: &Buffer) {
        let provider = buffer.provider.id;
        let mut last = 0;
        loop {
            let next = self.handles.lock().next_of(buffer, last);
            match next {
                Some(handle) => self.push_event(consts::EVENT_BUFFER_REVOKED, provider, handle),
                // It was freed, and only mappings are left.
                None if last == 0 && buffer.file == self.id => {
                    self.push_event(consts::EVENT_BUFFER_REVOKED, provider, 0)
                }
                None => return,
            }
            last = next.unwrap_or(u32::MAX);
        }
    }

    /// Remembers a refusal, and puts it into the log. One without a sentence leaves no trace.
    fn refused(&self, what: &str, refusal: &Refusal) {
        refusal.log(what);
        if refusal.text().as_str().is_empty() {
            return;
        }
        let error = -refusal.error.to_errno();
        let known = match &self.last.lock().decision {
            // A decision that found no provider was remembered with its verdicts just before.
            Some(Decision::Explanation(last)) => last.error == error && last.text.as_str() == refusal.text().as_str(),
            _ => false,
        };
        if !known {
            let explanation = KBox::new(Explanation::of_refusal(error, *refusal.text()), GFP_KERNEL_ACCOUNT);
            self.remember(explanation.ok().map(Decision::Explanation));
        }
    }
}

impl chrdev::Operations for File {
    type Object = Buffer;

    fn table() -> &'static chrdev::Table<Self> {
        &TABLE
    }

    fn open() -> Result<Arc<Self>> {
        let orchestrator = Orchestrator::get()?;
        let for_file = orchestrator.clone();
        let exports = ExportCount::new()?;
        let file: Arc<Self> = Arc::pin_init(
            pin_init!(Self {
                id: for_file.file_id(),
                orchestrator: for_file,
                handles <- new_mutex!(Handles::new()),
                exports,
                rules <- new_mutex!(None),
                last <- new_mutex!(Last {
                    decision: None,
                    spare: None,
                }),
                events <- new_mutex!(Events {
                    ring: [abi::Event::default(); EVENTS],
                    first: 0,
                    len: 0,
                    lost: 0,
                }),
                readable <- new_condvar!("p2pmem_events"),
                polled <- new_mutex!(None),
            }),
            GFP_KERNEL_ACCOUNT,
        )?;
        orchestrator.add_file(file.id, file.clone())?;
        Ok(file)
    }

    fn address_space(&self) -> &AddressSpace<Buffer> {
        self.orchestrator.space()
    }

    fn close(this: Arc<Self>) {
        this.orchestrator.remove_file(this.id);
    }

    fn ioctl(this: ArcBorrow<'_, Self>, cmd: u32, arg: UserPtr) -> Result {
        let file = &*this;
        // The size is the caller's own, and no part of what the call is.
        let arg = Argument {
            at: arg,
            size: _IOC_SIZE(cmd),
        };
        let (what, answer) = match abi::sizeless(cmd) {
            calls::INFO => {
                let mut info = abi::Info::default();
                let least = offset_of!(abi::Info, features);
                let answer = arg
                    .at_least(least)
                    .and_then(|()| file.info(&mut info))
                    .and_then(|()| arg.answer(&info));
                ("INFO", answer)
            }
            calls::LIST => (
                "LIST",
                arg.exchange(offset_of!(abi::List, reserved), |a| file.list(a), true),
            ),
            calls::PATHS => ("PATHS", arg.exchange(size_of::<abi::Paths>(), |a| file.paths(a), true)),
            calls::ALLOC => {
                let mut handle = 0;
                let answer = arg.exchange(
                    offset_of!(abi::Alloc, provider),
                    |a: &mut abi::Alloc| {
                        file.alloc(a)?;
                        handle = a.handle;
                        Ok(())
                    },
                    true,
                );
                if answer.is_err() && handle != 0 {
                    // The caller never learns of the handle: the buffer must not stay.
                    let _ = file.free(handle);
                }
                ("ALLOC", answer)
            }
            calls::STRIPE => {
                let mut parts = KVec::new();
                let answer = arg.exchange(
                    offset_of!(abi::Stripe, reserved),
                    |ask: &mut abi::Stripe| {
                        parts = file.stripe(ask)?;
                        let mut out = ArrayWriter::new(ask.parts, ask.nr_parts, ask.part_size)?;
                        for part in &parts {
                            out.write(part)?;
                        }
                        Ok(())
                    },
                    true,
                );
                if answer.is_err() {
                    file.free_parts(&parts);
                }
                ("STRIPE", answer)
            }
            calls::IMPORT => {
                let mut handle = 0;
                let answer = arg.exchange(
                    offset_of!(abi::Import, provider),
                    |ask: &mut abi::Import| {
                        file.import(ask)?;
                        handle = ask.handle;
                        Ok(())
                    },
                    true,
                );
                if answer.is_err() && handle != 0 {
                    // As above.
                    let _ = file.free(handle);
                }
                ("IMPORT", answer)
            }
            calls::FREE => (
                "FREE",
                arg.exchange(offset_of!(abi::Free, flags), |a| file.free_ioctl(a), false),
            ),
            calls::BUFFER => (
                "BUFFER",
                arg.exchange(offset_of!(abi::Buffer, size), |a| file.buffer_ioctl(a), true),
            ),
            calls::EXPLAIN => (
                "EXPLAIN",
                arg.exchange(offset_of!(abi::Explain, error), |a| file.explain(a), true),
            ),
            calls::RULES => (
                "RULES",
                arg.exchange(offset_of!(abi::Rules, reserved), |a| file.set_rules(a), false),
            ),
            calls::STATS => (
                "STATS",
                arg.exchange(offset_of!(abi::Stats, flags), |a| file.stats(a), true),
            ),
            calls::EXPORT_DMABUF => {
                let mut made = None;
                let answer = arg.exchange(
                    offset_of!(abi::Export, reserved),
                    |a| {
                        made = Some(file.export(a)?);
                        Ok(())
                    },
                    true,
                );
                if let (Ok(()), Some(descriptor)) = (&answer, made) {
                    descriptor.install();
                }
                ("EXPORT_DMABUF", answer)
            }
            _ => return Err(ENOTTY),
        };
        answer.map_err(|refusal| {
            file.refused(what, &refusal);
            refusal.error
        })
    }

    fn read(this: ArcBorrow<'_, Self>, mut out: UserSliceWriter, nonblock: bool) -> Result<usize> {
        let size = size_of::<abi::Event>();
        if out.len() < size {
            return Err(EINVAL);
        }
        let mut done = 0;
        while out.len() >= size {
            let mut events = this.events.lock();
            while events.is_empty() {
                if done > 0 {
                    return Ok(done);
                }
                if nonblock {
                    return Err(EAGAIN);
                }
                if this.readable.wait_interruptible(&mut events) {
                    return Err(ERESTARTSYS);
                }
            }
            let event = events.pop();
            drop(events);
            if let Some(event) = event {
                if let Err(error) = out.write(&event) {
                    // Not lost: the next read has it, and those that wait for one are told.
                    this.events.lock().push_front(event);
                    this.wake();
                    return if done > 0 { Ok(done) } else { Err(error) };
                }
                done += size;
            }
        }
        Ok(done)
    }

    fn poll(this: ArcBorrow<'_, Self>, file: &KernelFile, table: PollTable<'_>) -> u32 {
        let mut polled = this.polled.lock();
        if polled.is_none() {
            *polled = KBox::pin_init(kernel::new_poll_condvar!("p2pmem_poll"), GFP_KERNEL_ACCOUNT).ok();
        }
        let Some(waiting) = &*polled else {
            // Without memory to wait in, whoever polls has to look.
            return READABLE;
        };
        table.register_wait(file, waiting);
        drop(polled);
        if this.events.lock().is_empty() {
            0
        } else {
            READABLE
        }
    }

    fn mmap(this: ArcBorrow<'_, Self>, area: NewArea<'_, Buffer>) -> Result {
        this.map(area).map_err(|refusal| {
            this.refused("mmap", &refusal);
            refusal.error
        })
    }
}
