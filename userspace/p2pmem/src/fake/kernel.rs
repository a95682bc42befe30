// SPDX-License-Identifier: MIT OR Apache-2.0

//! Calls of one open file of the fake module.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard};

use p2pmem_sys as abi;

use crate::backend::Backend;
use crate::sys::{memory_file, Exported, Kernel, Region, FAKE_DMABUF};
use crate::types::PathClass;

use super::machine::{errno, lock, name, sum, Attachment, Decision, Machine, OpenFile, Provider, State, PAGE, SPACING};

/// An open file of the fake module.
pub(super) struct FakeDevice {
    pub(super) machine: Arc<Machine>,
    pub(super) file: Arc<Mutex<OpenFile>>,
    pub(super) wakeup: Arc<OwnedFd>,
    pub(super) backend: Backend,
}

impl FakeDevice {
    /// Locks the machine for one call. Fails if the test set an error for the call.
    fn enter(&self) -> io::Result<MutexGuard<'_, State>> {
        let mut state = lock(&self.machine.state);
        match state.fail_next.take() {
            Some(wanted) => Err(self.refuse(wanted, "the test lets the call fail".into())),
            None => Ok(state),
        }
    }

    fn refuse(&self, error: i32, text: String) -> io::Error {
        lock(&self.file).last = Some(Decision {
            text,
            error,
            ..Default::default()
        });
        errno(error)
    }
}

impl Drop for FakeDevice {
    fn drop(&mut self) {
        let mut state = lock(&self.machine.state);
        let buffers = std::mem::take(&mut lock(&self.file).buffers);
        for buffer in buffers.values() {
            // Clearing fails only if the host is out of memory, which the next test then reports.
            let _ = state.release(buffer, &self.machine.memory);
        }
    }
}

impl Kernel for FakeDevice {
    fn backend(&self) -> Backend {
        self.backend
    }

    fn info(&self) -> io::Result<abi::p2pmem_info> {
        let state = self.enter()?;
        let all: Vec<_> = state.providers.values().map(Provider::snapshot).collect();
        Ok(abi::p2pmem_info {
            abi_version: abi::P2PMEM_ABI_VERSION,
            abi_compatible: abi::P2PMEM_ABI_COMPATIBLE,
            page_size: PAGE as u32,
            features: u64::from(
                abi::P2PMEM_FEATURE_MMAP_PAGED
                    | abi::P2PMEM_FEATURE_EVENTS
                    | abi::P2PMEM_FEATURE_ADOPT
                    | abi::P2PMEM_FEATURE_DMABUF
                    | abi::P2PMEM_FEATURE_RULES
                    | abi::P2PMEM_FEATURE_IMPORT
                    | abi::P2PMEM_FEATURE_STRIPE
                    | abi::P2PMEM_FEATURE_ATTACH,
            ),
            providers: all.len() as u32,
            buffers: all.iter().map(|p| p.buffers).sum(),
            size: all.iter().map(|p| p.size).sum(),
            free: all.iter().map(|p| p.free).sum(),
            generation: state.generation,
            version: name("fake"),
            ..Default::default()
        })
    }

    fn list(&self, out: &mut [abi::p2pmem_provider]) -> io::Result<usize> {
        let state = self.enter()?;
        for (to, from) in out.iter_mut().zip(state.providers.values()) {
            *to = from.snapshot();
        }
        Ok(state.providers.len())
    }

    fn paths(
        &self,
        clients: &[abi::p2pmem_pci_addr],
        out: &mut [abi::p2pmem_path],
        _rescan: bool,
    ) -> io::Result<usize> {
        let state = self.enter()?;
        let mut out = out.iter_mut();
        for provider in state.providers.values() {
            for (client, addr) in clients.iter().enumerate() {
                let Some(to) = out.next() else { continue };
                let (class, hops) = state.path(provider.raw.addr, *addr);
                let unreachable = class == PathClass::Unreachable;
                *to = abi::p2pmem_path {
                    provider: provider.raw.id,
                    client: client as u32,
                    class: class.to_raw(),
                    flags: if class <= PathClass::SameSwitch {
                        abi::P2PMEM_PATH_BUS_ADDR
                    } else {
                        0
                    },
                    hops,
                    distance: if unreachable { -1 } else { hops as i32 },
                    bandwidth: 15754,
                    ..Default::default()
                };
            }
        }
        Ok(state.providers.len() * clients.len())
    }

    fn alloc(&self, request: &abi::p2pmem_request, clients: &[abi::p2pmem_pci_addr]) -> io::Result<abi::p2pmem_alloc> {
        let mut state = self.enter()?;
        let mut file = lock(&self.file);
        let decision = state.decide(request, clients, &file.rules);
        file.last = Some(decision.clone());
        if decision.error != 0 {
            state.gone.failed += 1;
            return Err(errno(decision.error));
        }
        let size = request.size.next_multiple_of(PAGE);
        let buffer = state
            .take(&mut file, decision.chosen, size, request.align)
            .ok_or_else(|| errno(libc::EIO))?;
        let class = decision.class_of(decision.chosen);
        Ok(abi::p2pmem_alloc {
            req: *request,
            handle: buffer.handle,
            provider: buffer.provider,
            size,
            mmap_offset: buffer.mmap_offset,
            bar_offset: buffer.bar_offset,
            class,
            reserved: 0,
        })
    }

    fn stripe(
        &self,
        request: &abi::p2pmem_request,
        clients: &[abi::p2pmem_pci_addr],
        parts: &mut [abi::p2pmem_part],
    ) -> io::Result<usize> {
        let mut state = self.enter()?;
        let mut file = lock(&self.file);
        let (decision, picks, share) = state.decide_stripe(request, clients, &file.rules, parts.len());
        file.last = Some(decision.clone());
        if decision.error != 0 {
            state.gone.failed += 1;
            return Err(errno(decision.error));
        }
        let size = request.size.next_multiple_of(PAGE);
        for (n, (id, part)) in picks.iter().zip(parts.iter_mut()).enumerate() {
            let offset = share * n as u64;
            let buffer = state
                .take(&mut file, *id, share.min(size - offset), request.align)
                .ok_or_else(|| errno(libc::EIO))?;
            *part = abi::p2pmem_part {
                handle: buffer.handle,
                provider: *id,
                offset,
                size: buffer.size,
                mmap_offset: buffer.mmap_offset,
                bar_offset: buffer.bar_offset,
                class: decision.class_of(*id),
                reserved: 0,
            };
        }
        Ok(picks.len())
    }

    fn import(&self, fd: BorrowedFd<'_>) -> io::Result<abi::p2pmem_import> {
        let mut state = self.enter()?;
        let file = File::from(fd.try_clone_to_owned()?).metadata()?;
        let Some((buffer, whole)) = state.dmabufs.get(&(file.dev(), file.ino())).copied() else {
            return Err(self.refuse(libc::EINVAL, "the descriptor is not a dma-buf".into()));
        };
        if !whole {
            return Err(self.refuse(libc::EACCES, "the dma-buf has parts of a buffer".into()));
        }
        let start = buffer.mmap_offset - u64::from(buffer.provider) * SPACING;
        let provider = state.providers.get(&buffer.provider);
        if provider.is_none_or(|p| p.used.get(&start) != Some(&buffer.size)) {
            return Err(self.refuse(libc::ENODEV, "the buffer is revoked".into()));
        }
        *state.imported.entry(buffer.mmap_offset).or_default() += 1;
        let mut mine = lock(&self.file);
        mine.last_handle += 1;
        let handle = mine.last_handle;
        mine.buffers.insert(handle, abi::p2pmem_buffer { handle, ..buffer });
        Ok(abi::p2pmem_import {
            fd: fd.as_raw_fd(),
            flags: 0,
            handle,
            provider: buffer.provider,
            size: buffer.size,
            mmap_offset: buffer.mmap_offset,
            bar_offset: buffer.bar_offset,
        })
    }

    fn free(&self, handle: u32) -> io::Result<()> {
        let mut state = self.enter()?;
        let buffer = lock(&self.file).buffers.remove(&handle);
        let buffer = buffer.ok_or_else(|| self.refuse(libc::ENOENT, format!("there is no buffer {handle}")))?;
        state.release(&buffer, &self.machine.memory)
    }

    fn buffer(&self, handle: u32) -> io::Result<abi::p2pmem_buffer> {
        let state = self.enter()?;
        let buffer = lock(&self.file).buffers.get(&handle).copied();
        let mut buffer = buffer.ok_or_else(|| self.refuse(libc::ENOENT, format!("there is no buffer {handle}")))?;
        buffer.handles = 1 + state.imported.get(&buffer.mmap_offset).copied().unwrap_or(0);
        Ok(buffer)
    }

    fn explain(
        &self,
        request: Option<(&abi::p2pmem_request, &[abi::p2pmem_pci_addr])>,
        verdicts: &mut [abi::p2pmem_verdict],
        text: &mut [u8],
    ) -> io::Result<abi::p2pmem_explain> {
        let decision = match request {
            Some((request, clients)) if request.strategy == abi::P2PMEM_STRATEGY_STRIPE => {
                let most = abi::P2PMEM_MAX_PARTS as usize;
                let state = self.enter()?;
                state.decide_stripe(request, clients, &lock(&self.file).rules, most).0
            }
            Some((request, clients)) => self.enter()?.decide(request, clients, &lock(&self.file).rules),
            None => lock(&self.file).last.clone().ok_or_else(|| errno(libc::ENODATA))?,
        };
        for (to, from) in verdicts.iter_mut().zip(&decision.verdicts) {
            *to = *from;
        }
        for (to, from) in text.iter_mut().zip(decision.text.bytes().chain([0])) {
            *to = from;
        }
        Ok(abi::p2pmem_explain {
            req: request.map(|(request, _)| *request).unwrap_or_default(), // like the module, which keeps no request
            nr_verdicts: decision.verdicts.len() as u32,
            text_len: decision.text.len() as u32 + 1,
            error: decision.error as u32,
            chosen: decision.chosen,
            ..Default::default()
        })
    }

    fn stats(&self, provider: u32) -> io::Result<abi::p2pmem_stats> {
        let state = self.enter()?;
        if provider != 0 {
            let found = state.providers.get(&provider).map(|p| p.stats);
            return found.ok_or_else(|| self.refuse(libc::ENOENT, format!("there is no provider {provider}")));
        }
        let mut all = state.gone;
        for provider in state.providers.values() {
            sum(&mut all, &provider.stats);
        }
        Ok(all)
    }

    fn set_rules(&self, rules: &[abi::p2pmem_rule]) -> io::Result<()> {
        lock(&self.file).rules = rules.to_vec();
        Ok(())
    }

    fn map(&self, _handle: u32, offset: u64, len: usize) -> io::Result<Arc<Region>> {
        let mut state = self.enter()?;
        let id = (offset / SPACING) as u32;
        let provider = state.providers.get_mut(&id).ok_or_else(|| errno(libc::ENODEV))?;
        provider.stats.maps += 1;
        let region = Region::map(&self.machine.memory, offset, len)?;
        state.maps.push((region.as_ptr() as u64, len as u64, offset));
        Ok(Arc::new(region))
    }

    fn export(&self, handle: u32, ranges: &[abi::p2pmem_range], flags: u32) -> io::Result<Exported> {
        let mut state = self.enter()?;
        let ranges = state
            .offsets(ranges, flags & abi::P2PMEM_EXPORT_MAPPED != 0)
            .map_err(|text| self.refuse(libc::ENOENT, text))?;
        let buffer = {
            let file = lock(&self.file);
            let mut all = file.buffers.values();
            match flags & abi::P2PMEM_EXPORT_MAPPED {
                0 => file.buffers.get(&handle).copied(),
                _ => all
                    .find(|b| {
                        ranges
                            .iter()
                            .all(|(at, _)| (b.mmap_offset..b.mmap_offset + b.size).contains(at))
                    })
                    .copied(),
            }
        };
        let buffer = buffer.ok_or_else(|| self.refuse(libc::ENOENT, format!("there is no buffer {handle}")))?;
        let start = if handle == 0 { buffer.mmap_offset } else { 0 };
        let inside = |(at, len): &(u64, u64)| *at >= start && at - start + len <= buffer.size;
        let overlap = |i: usize| {
            ranges[..i]
                .iter()
                .any(|o| o.0 < ranges[i].0 + ranges[i].1 && ranges[i].0 < o.0 + o.1)
        };
        let bad = ranges
            .iter()
            .any(|r| r.0 % PAGE != 0 || r.1 % PAGE != 0 || r.1 == 0 || !inside(r));
        if bad || (0..ranges.len()).any(overlap) {
            return Err(self.refuse(
                libc::EINVAL,
                "a range is not whole pages, exceeds the buffer, or overlaps another".into(),
            ));
        }
        let provider = state.providers.get_mut(&buffer.provider);
        let provider =
            provider.ok_or_else(|| self.refuse(libc::ENODEV, format!("buffer {} was revoked", buffer.handle)))?;
        let allowed = provider.raw.flags & abi::P2PMEM_PROVIDER_PINNED_EXPORTS != 0;
        if flags & abi::P2PMEM_EXPORT_PINNED != 0 && !allowed {
            return Err(self.refuse(libc::EPERM, "pinned exports are not allowed".into()));
        }
        if provider.raw.flags & abi::P2PMEM_PROVIDER_EXPORTABLE == 0 {
            return Err(self.refuse(libc::EOPNOTSUPP, "the BAR of this memory is not known".into()));
        }
        provider.stats.exports += 1;
        let made = memory_file(FAKE_DMABUF, ranges.iter().map(|r| r.1).sum())?;
        let (at, whole) = (made.metadata()?, ranges == [(start, buffer.size)]);
        state.dmabufs.insert((at.dev(), at.ino()), (buffer, whole));
        state.dmabuf_ranges.insert((at.dev(), at.ino()), ranges);
        Ok(OwnedFd::from(made).into())
    }

    fn attach(
        &self,
        fd: BorrowedFd<'_>,
        provider: u32,
        flags: u32,
        ranges: &mut [abi::p2pmem_dma_range],
    ) -> io::Result<abi::p2pmem_attach> {
        let mut state = self.enter()?;
        let found = state.providers.get(&provider).map(|p| p.raw.kind);
        let kind = found.ok_or_else(|| self.refuse(libc::ENOENT, format!("there is no provider {provider}")))?;
        if kind != abi::P2PMEM_KIND_OWN {
            return Err(self.refuse(libc::EOPNOTSUPP, "the function is bound to its own driver".into()));
        }
        let file = File::from(fd.try_clone_to_owned()?).metadata()?;
        let Some(parts) = state.dmabuf_ranges.get(&(file.dev(), file.ino())).cloned() else {
            return Err(self.refuse(libc::EINVAL, "the descriptor is not a dma-buf".into()));
        };
        if flags & abi::P2PMEM_ATTACH_QUIESCED != 0 {
            state.stopped.remove(&provider);
        }
        if state.stopped.contains_key(&provider) {
            return Err(self.refuse(
                libc::EBUSY,
                "the function may still use the memory of an attachment that has ended".into(),
            ));
        }
        let all: Vec<_> = parts
            .iter()
            .map(|&(address, size)| abi::p2pmem_dma_range { address, size })
            .collect();
        for (to, from) in ranges.iter_mut().zip(&all) {
            *to = *from;
        }
        let mut mine = lock(&self.file);
        mine.last_handle += 1;
        let handle = mine.last_handle;
        let size = all.iter().map(|range| range.size).sum();
        let (nr_ranges, raw) = (
            all.len() as u32,
            abi::p2pmem_attachment {
                handle,
                provider,
                state: abi::P2PMEM_ATTACHMENT_LIVE,
                size,
                ..Default::default()
            },
        );
        mine.attachments.insert(handle, Attachment { raw, ranges: all });
        Ok(abi::p2pmem_attach {
            fd: fd.as_raw_fd(),
            provider,
            flags,
            handle,
            nr_ranges,
            size,
            ..Default::default()
        })
    }

    fn attachment(&self, handle: u32, ranges: &mut [abi::p2pmem_dma_range]) -> io::Result<abi::p2pmem_attachment> {
        let state = self.enter()?;
        let mine = lock(&self.file);
        let Some(found) = mine.attachments.get(&handle) else {
            drop(mine);
            return Err(self.refuse(libc::ENOENT, format!("there is no attachment {handle}")));
        };
        for (to, from) in ranges.iter_mut().zip(&found.ranges) {
            *to = *from;
        }
        let mut raw = found.raw;
        raw.nr_ranges = found.ranges.len() as u32;
        if raw.state == abi::P2PMEM_ATTACHMENT_LIVE && state.stopped.contains_key(&raw.provider) {
            raw.state = abi::P2PMEM_ATTACHMENT_STOPPED;
        }
        Ok(raw)
    }

    fn detach(&self, handle: u32) -> io::Result<()> {
        let mut state = self.enter()?;
        let closed = lock(&self.file).attachments.remove(&handle);
        let closed = closed.ok_or_else(|| self.refuse(libc::ENOENT, format!("there is no attachment {handle}")))?;
        if closed.raw.state == abi::P2PMEM_ATTACHMENT_REVOKED {
            state.confirm(closed.raw.provider);
        }
        Ok(())
    }

    fn holders(&self) -> io::Result<String> {
        let holders = lock(&self.machine.state).holders.clone();
        holders.ok_or_else(|| errno(libc::EACCES))
    }

    fn read_events(&self, out: &mut [abi::p2pmem_event]) -> io::Result<usize> {
        let mut file = lock(&self.file);
        if file.events.is_empty() {
            return Err(errno(libc::EAGAIN));
        }
        let n = file.events.len().min(out.len());
        for (to, from) in out.iter_mut().zip(file.events.drain(..n)) {
            *to = from;
        }
        if file.events.is_empty() {
            rustix::io::read(&self.wakeup, &mut [0; 8])?;
        }
        Ok(n)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.machine.memory.as_fd()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }
}
