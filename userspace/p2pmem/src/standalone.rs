// SPDX-License-Identifier: MIT OR Apache-2.0

//! The backends without the module. Interfaces of the kernel provide the memory. This code does the rest of the
//! module's work: it lists the memory, computes the paths to clients, chooses the memory for a request, and explains
//! the choice.

pub(crate) mod decision;
mod slots;
mod source;
mod sysfs;
mod vfio;

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path as FsPath;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use p2pmem_sys as abi;
use rustix::event::{eventfd, EventfdFlags};

use crate::addr::PciAddr;
use crate::backend::{Backend, Capability};
use crate::error::{Error, Result};
use crate::inventory::kernel_name;
use crate::sys::{page_size, Exported, Kernel, Region};
use crate::topology::{Walk, Walks};
use crate::types::{Path, KIND_VFIO};
use decision::{decide, Candidate, Decision};
use source::{Found, Piece, Place, Refusal, Source};
use sysfs::SysfsSource;
use vfio::VfioSource;

/// Opens a backend of the machine whose file system is at `root`. `bars` are the BARs that [`Backend::Vfio`] uses
/// instead of the largest BAR for memory.
///
/// # Errors
///
/// [`Error::Unavailable`] if the backend has no memory; [`Error::Open`] if the program may not open the memory;
/// [`Error::NotSupported`] for a backend that has no devices.
pub(crate) fn open(root: &FsPath, backend: Backend, bars: &[(PciAddr, u8)]) -> Result<Box<dyn Kernel>> {
    let source: Box<dyn Source> = match backend {
        Backend::Sysfs => Box::new(SysfsSource::new(root)?),
        Backend::Vfio => Box::new(VfioSource::new(root, bars)?),
        Backend::Module | Backend::Driver => {
            return Err(Error::NotSupported {
                backend,
                capability: Capability::Mapping,
            })
        }
    };
    Ok(Box::new(Standalone::new(source)?))
}

/// An open backend.
struct Standalone {
    source: Box<dyn Source>,
    state: Mutex<State>,
    /// An eventfd that is never readable, because these backends have no events.
    no_events: OwnedFd,
}

#[derive(Default)]
struct State {
    ids: BTreeMap<Place, u32>,
    buffers: BTreeMap<u32, Buffer>,
    last_handle: u32,
    mapped: Vec<Mapped>,
    walks: Walks,
    last: Option<Decision>,
    stats: BTreeMap<u32, abi::p2pmem_stats>,
    /// Number of requests that no memory served.
    failed: u64,
}

/// A mapping. Exports refer to its addresses.
struct Mapped {
    start: u64,
    len: u64,
    region: Weak<Region>,
    provider: u32,
    piece: Weak<dyn Piece>,
}

/// A buffer that the program holds by a handle.
#[derive(Clone)]
struct Buffer {
    provider: u32,
    addr: PciAddr,
    size: u64,
    piece: Arc<dyn Piece>,
}

fn errno(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

/// Returns an error of this crate as an error of [`Kernel`].
fn own(error: Error) -> io::Error {
    io::Error::other(error)
}

/// Returns a string in a fixed array, always with a NUL.
fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut chars = [0; N];
    for (to, from) in chars.iter_mut().zip(text.bytes().take(N - 1)) {
        *to = c_char::from_ne_bytes([from]);
    }
    chars
}

impl State {
    /// Returns the id of the memory at a place, which is constant while the backend is open.
    fn id(&mut self, place: Place) -> u32 {
        let next = u32::try_from(self.ids.len() + 1).unwrap_or(u32::MAX);
        *self.ids.entry(place).or_insert(next)
    }

    /// Records the message of an error, and returns the error.
    fn refuse(&mut self, error: i32, text: impl Into<String>) -> io::Error {
        self.last = Some(Decision::refusal(error, text));
        errno(error)
    }

    fn buffer(&mut self, handle: u32) -> io::Result<Buffer> {
        match self.buffers.get(&handle).cloned() {
            Some(buffer) => Ok(buffer),
            None => Err(self.refuse(libc::ENOENT, format!("there is no buffer {handle}"))),
        }
    }
}

impl Standalone {
    fn new(source: Box<dyn Source>) -> Result<Self> {
        let no_events = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::State(format!("cannot create an eventfd: {}", io::Error::from(error))))?;
        Ok(Self {
            source,
            state: Mutex::default(),
            no_events,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the memory that the source has, with ids, in the order of the ids.
    fn survey(&self, state: &mut State) -> io::Result<Vec<(u32, Found)>> {
        let mut found = self.source.survey().map_err(own)?;
        found.sort_by_key(|found| found.place);
        let mut all: Vec<_> = found.into_iter().map(|found| (state.id(found.place), found)).collect();
        all.sort_by_key(|(id, _)| *id);
        Ok(all)
    }

    fn provider(&self, state: &State, id: u32, found: &Found) -> abi::p2pmem_provider {
        let backend = self.source.backend();
        let buffers = state.buffers.values().filter(|buffer| buffer.provider == id);
        let (count, exports) = buffers.fold((0, 0), |(count, exports): (u32, u32), buffer| {
            (count + 1, exports.saturating_add(buffer.piece.exports()))
        });
        let flag = |capability, flag| if backend.supports(capability) { flag } else { 0 };
        let pageless = if backend == Backend::Vfio {
            abi::P2PMEM_PROVIDER_PAGELESS
        } else {
            0
        };
        abi::p2pmem_provider {
            id,
            kind: match backend {
                Backend::Vfio => KIND_VFIO,
                _ => abi::P2PMEM_KIND_ADOPTED,
            },
            addr: found.place.addr.into(),
            state: abi::P2PMEM_PROVIDER_LIVE,
            bar: found.place.bar.map_or(-1, i32::from),
            numa_node: found.device.numa_node.unwrap_or(-1),
            buffers: count,
            size: found.size,
            free: found.free,
            largest: found.largest,
            pinned: found.pinned,
            vendor: found.device.vendor,
            device: found.device.device,
            class: found.device.class,
            flags: flag(Capability::DmaBuf, abi::P2PMEM_PROVIDER_EXPORTABLE) | pageless,
            exports,
            driver: chars(found.device.driver.as_deref().unwrap_or_default()),
            ..Default::default()
        }
    }

    /// Returns the walks of clients. Fails with ENODEV if a client does not exist.
    fn walks(&self, state: &mut State, clients: &[abi::p2pmem_pci_addr]) -> io::Result<Vec<Arc<Walk>>> {
        let sys = self.source.root().join("sys");
        clients
            .iter()
            .map(|client| {
                let addr = PciAddr::from(*client);
                let walk = state.walks.get(&sys, addr);
                walk.ok_or_else(|| state.refuse(libc::ENODEV, format!("the client {addr} does not exist")))
            })
            .collect()
    }

    /// Returns the paths from the memory of a function to clients; none if the function was removed.
    fn paths(&self, state: &mut State, addr: PciAddr, clients: &[Arc<Walk>]) -> Option<Vec<Path>> {
        let sys = self.source.root().join("sys");
        let memory = state.walks.get(&sys, addr)?;
        Some(clients.iter().map(|client| memory.path_to(&sys, client)).collect())
    }

    fn candidates(&self, state: &mut State, clients: &[abi::p2pmem_pci_addr]) -> io::Result<Vec<(Candidate, Place)>> {
        let clients = self.walks(state, clients)?;
        let found = self.survey(state)?;
        let candidates = found.into_iter().filter_map(|(id, found)| {
            let candidate = Candidate {
                id,
                addr: found.place.addr,
                size: found.size,
                free: found.free,
                largest: found.largest,
                paths: self.paths(state, found.place.addr, &clients)?,
            };
            Some((candidate, found.place))
        });
        Ok(candidates.collect())
    }

    fn decide(&self, candidates: &[(Candidate, Place)], request: &abi::p2pmem_request) -> Decision {
        let candidates: Vec<_> = candidates.iter().map(|(candidate, _)| candidate.clone()).collect();
        decide(&candidates, request)
    }
}

impl Kernel for Standalone {
    fn backend(&self) -> Backend {
        self.source.backend()
    }

    fn info(&self) -> io::Result<abi::p2pmem_info> {
        let mut state = self.lock();
        let all = self.survey(&mut state)?;
        let dmabuf = self.backend().supports(Capability::DmaBuf);
        let sum = |bytes: fn(&Found) -> u64| all.iter().map(|(_, found)| bytes(found)).fold(0, u64::saturating_add);
        Ok(abi::p2pmem_info {
            abi_version: abi::P2PMEM_ABI_VERSION,
            abi_compatible: abi::P2PMEM_ABI_COMPATIBLE,
            page_size: u32::try_from(page_size()).unwrap_or(u32::MAX),
            features: if dmabuf { abi::P2PMEM_FEATURE_DMABUF.into() } else { 0 },
            providers: u32::try_from(all.len()).unwrap_or(u32::MAX),
            buffers: u32::try_from(state.buffers.len()).unwrap_or(u32::MAX),
            size: sum(|found| found.size),
            free: sum(|found| found.free),
            version: chars(&format!("Linux {}", kernel_name(self.source.root()))),
            ..Default::default()
        })
    }

    fn list(&self, out: &mut [abi::p2pmem_provider]) -> io::Result<usize> {
        let mut state = self.lock();
        let all = self.survey(&mut state)?;
        for (to, (id, found)) in out.iter_mut().zip(&all) {
            *to = self.provider(&state, *id, found);
        }
        Ok(all.len())
    }

    fn paths(&self, clients: &[abi::p2pmem_pci_addr], out: &mut [abi::p2pmem_path], rescan: bool) -> io::Result<usize> {
        let mut state = self.lock();
        if rescan {
            state.walks.forget();
        }
        let walks = self.walks(&mut state, clients)?;
        let mut total = 0;
        let mut out = out.iter_mut();
        for (id, found) in self.survey(&mut state)? {
            let Some(paths) = self.paths(&mut state, found.place.addr, &walks) else {
                continue;
            };
            total += paths.len();
            for (client, path) in (0u32..).zip(&paths) {
                let Some(to) = out.next() else { continue };
                let flag = |set, flag| if set { flag } else { 0 };
                *to = abi::p2pmem_path {
                    provider: id,
                    client,
                    class: path.class.to_raw(),
                    flags: flag(path.acs_redirect, abi::P2PMEM_PATH_ACS_REDIRECT)
                        | flag(path.bus_addr, abi::P2PMEM_PATH_BUS_ADDR),
                    hops: path.hops,
                    distance: path.distance.and_then(|d| i32::try_from(d).ok()).unwrap_or(-1),
                    bandwidth: path.bandwidth.unwrap_or(0),
                    numa_distance: path.numa_distance.unwrap_or(0),
                    bridge: path.bridge.unwrap_or_default().into(),
                };
            }
        }
        Ok(total)
    }

    fn alloc(&self, request: &abi::p2pmem_request, clients: &[abi::p2pmem_pci_addr]) -> io::Result<abi::p2pmem_alloc> {
        let mut state = self.lock();
        let size = request.size.checked_next_multiple_of(page_size());
        let size = size.ok_or_else(|| state.refuse(libc::EINVAL, "the size is too large"))?;
        let handle = state.last_handle.checked_add(1);
        let handle = handle.ok_or_else(|| state.refuse(libc::EMFILE, "all numbers of buffers have been used"))?;
        let mut candidates = self.candidates(&mut state, clients)?;
        let (mut unusable, mut first) = (String::new(), None);
        // Each round takes memory or excludes a candidate.
        loop {
            let mut decision = self.decide(&candidates, request);
            let chosen = candidates
                .iter_mut()
                .find(|(candidate, _)| candidate.id == decision.chosen);
            let Some((candidate, place)) = chosen else {
                decision.text += &unusable;
                state.failed += 1;
                let error = decision.error;
                state.last = Some(decision);
                return Err(first.map_or_else(|| errno(error), own));
            };
            match self.source.take(*place, size, request.align) {
                Ok(piece) => {
                    let class = decision.class();
                    decision.text += &unusable;
                    let (provider, addr) = (candidate.id, candidate.addr);
                    state.last = Some(decision);
                    state.last_handle = handle;
                    let stats = state.stats.entry(provider).or_default();
                    stats.allocs += 1;
                    stats.alloc_bytes += size;
                    let bar_offset = piece.bar_offset().unwrap_or(u64::MAX);
                    let buffer = Buffer {
                        provider,
                        addr,
                        size,
                        piece,
                    };
                    state.buffers.insert(handle, buffer);
                    return Ok(abi::p2pmem_alloc {
                        req: *request,
                        handle,
                        provider,
                        size,
                        mmap_offset: 0,
                        bar_offset,
                        class,
                        reserved: 0,
                    });
                }
                Err(Refusal::Full) => candidate.largest = candidate.largest.min(size - 1),
                Err(Refusal::Unusable(error)) => {
                    (candidate.free, candidate.largest) = (0, 0);
                    unusable += &format!("; {} cannot be used: {error}", candidate.addr);
                    first = first.or(Some(error));
                }
            }
        }
    }

    fn free(&self, handle: u32) -> io::Result<()> {
        let mut state = self.lock();
        let buffer = state.buffer(handle)?;
        state.buffers.remove(&handle);
        let stats = state.stats.entry(buffer.provider).or_default();
        stats.frees += 1;
        stats.free_bytes += buffer.size;
        // If this is the last reference, the memory is freed here, which does not need the lock.
        drop(state);
        drop(buffer);
        Ok(())
    }

    fn buffer(&self, handle: u32) -> io::Result<abi::p2pmem_buffer> {
        let mut state = self.lock();
        let buffer = state.buffer(handle)?;
        Ok(abi::p2pmem_buffer {
            handle,
            provider: buffer.provider,
            size: buffer.size,
            bar_offset: buffer.piece.bar_offset().unwrap_or(u64::MAX),
            state: if buffer.piece.is_live() {
                abi::P2PMEM_BUFFER_LIVE
            } else {
                abi::P2PMEM_BUFFER_GONE
            },
            mappings: buffer.piece.mappings(),
            exports: buffer.piece.exports(),
            handles: 1,
            ..Default::default()
        })
    }

    fn explain(
        &self,
        request: Option<(&abi::p2pmem_request, &[abi::p2pmem_pci_addr])>,
        verdicts: &mut [abi::p2pmem_verdict],
        text: &mut [u8],
    ) -> io::Result<abi::p2pmem_explain> {
        let mut state = self.lock();
        let decision = match request {
            Some((request, clients)) => {
                let candidates = self.candidates(&mut state, clients)?;
                self.decide(&candidates, request)
            }
            None => state.last.clone().ok_or_else(|| errno(libc::ENODATA))?,
        };
        for (to, from) in verdicts.iter_mut().zip(&decision.verdicts) {
            *to = *from;
        }
        for (to, from) in text.iter_mut().zip(decision.text.bytes().chain([0])) {
            *to = from;
        }
        Ok(abi::p2pmem_explain {
            req: request.map(|(request, _)| *request).unwrap_or_default(),
            nr_verdicts: u32::try_from(decision.verdicts.len()).unwrap_or(u32::MAX),
            text_len: u32::try_from(decision.text.len() + 1).unwrap_or(u32::MAX),
            error: decision.error.unsigned_abs(),
            chosen: decision.chosen,
            ..Default::default()
        })
    }

    fn stats(&self, provider: u32) -> io::Result<abi::p2pmem_stats> {
        let mut state = self.lock();
        if provider != 0 {
            let known = state.ids.values().any(|id| *id == provider);
            return match state.stats.get(&provider) {
                Some(stats) => Ok(*stats),
                None if known => Ok(abi::p2pmem_stats::default()),
                None => Err(state.refuse(libc::ENOENT, format!("there is no provider {provider}"))),
            };
        }
        let mut all = abi::p2pmem_stats {
            failed: state.failed,
            ..Default::default()
        };
        for stats in state.stats.values() {
            all.allocs += stats.allocs;
            all.frees += stats.frees;
            all.alloc_bytes += stats.alloc_bytes;
            all.free_bytes += stats.free_bytes;
            all.maps += stats.maps;
            all.exports += stats.exports;
        }
        Ok(all)
    }

    fn set_rules(&self, _rules: &[abi::p2pmem_rule]) -> io::Result<()> {
        Err(self.unsupported(Capability::Rules))
    }

    fn map(&self, handle: u32, _offset: u64, _len: usize) -> io::Result<Arc<Region>> {
        let mut state = self.lock();
        let buffer = state.buffer(handle)?;
        let region = buffer.piece.clone().map()?;
        // Exports find the memory by the addresses of its mapping.
        if self.backend().supports(Capability::DmaBuf) {
            state.mapped.retain(|mapped| mapped.region.strong_count() > 0);
            state.mapped.push(Mapped {
                start: region.as_ptr() as u64,
                len: region.len() as u64,
                region: Arc::downgrade(&region),
                provider: buffer.provider,
                piece: Arc::downgrade(&buffer.piece),
            });
        }
        state.stats.entry(buffer.provider).or_default().maps += 1;
        Ok(region)
    }

    fn export(&self, handle: u32, ranges: &[abi::p2pmem_range], flags: u32) -> io::Result<Exported> {
        let mut state = self.lock();
        let (provider, piece, start, size) = if flags & abi::P2PMEM_EXPORT_MAPPED == 0 {
            let buffer = state.buffer(handle)?;
            (buffer.provider, buffer.piece, 0, buffer.size)
        } else {
            let first = ranges.first().map_or(0, |range| range.offset);
            let mapped = state.mapped.iter().find_map(|mapped| {
                let offset = first.checked_sub(mapped.start).filter(|offset| *offset < mapped.len);
                // A later mapping can have the addresses of a mapping that has ended.
                mapped.region.upgrade().filter(|_| offset.is_some())?;
                Some((mapped.provider, mapped.piece.upgrade()?, mapped.start, mapped.len))
            });
            match mapped {
                Some(mapped) => mapped,
                None => return Err(state.refuse(libc::ENOENT, "the addresses are not in a mapping of a buffer")),
            }
        };
        if flags & abi::P2PMEM_EXPORT_PINNED != 0 {
            let text = "vfio-pci can revoke its dma-bufs, and does not accept importers that cannot be revoked";
            return Err(state.refuse(libc::EOPNOTSUPP, text));
        }
        let page = page_size();
        let inside = |range: &abi::p2pmem_range| {
            let offset = range.offset.checked_sub(start)?;
            let end = offset.checked_add(range.size)?;
            let whole = offset % page == 0 && range.size % page == 0 && range.size > 0;
            (whole && end <= size).then_some((offset, range.size))
        };
        let in_piece: Option<Vec<_>> = ranges.iter().map(inside).collect();
        let mut in_piece = in_piece.ok_or_else(|| {
            state.refuse(
                libc::EINVAL,
                "a range does not consist of whole pages, or exceeds the memory",
            )
        })?;
        // Adjacent ranges are one range.
        in_piece.dedup_by(|next, range| {
            let continues = range.0 + range.1 == next.0;
            if continues {
                range.1 += next.1;
            }
            continues
        });
        let [(offset, len)] = in_piece.as_slice() else {
            let text =
                "a dma-buf of vfio-pci has one range, because Linux maps several ranges to wrong addresses behind an \
                        IOMMU: export each range";
            return Err(state.refuse(libc::EOPNOTSUPP, text));
        };
        match piece.export(*offset, *len) {
            Ok(exported) => {
                // If an importer fails, a message about an earlier error would be reported as the reason.
                state.last = None;
                state.stats.entry(provider).or_default().exports += 1;
                Ok(exported)
            }
            Err(error) => Err(match error.raw_os_error() {
                Some(code) => state.refuse(code, "vfio-pci cannot export the memory"),
                None => error,
            }),
        }
    }

    fn import(&self, _fd: BorrowedFd<'_>) -> io::Result<abi::p2pmem_import> {
        Err(self.unsupported(Capability::Sharing))
    }

    fn stripe(
        &self,
        _request: &abi::p2pmem_request,
        _clients: &[abi::p2pmem_pci_addr],
        _parts: &mut [abi::p2pmem_part],
    ) -> io::Result<usize> {
        Err(self.unsupported(Capability::Placement))
    }

    fn holders(&self) -> io::Result<String> {
        let state = self.lock();
        let mut table = "function size owner\n".to_owned();
        for buffer in state.buffers.values() {
            table += &format!("{} {} this program\n", buffer.addr, buffer.size);
        }
        Ok(table)
    }

    fn read_events(&self, _out: &mut [abi::p2pmem_event]) -> io::Result<usize> {
        Err(self.unsupported(Capability::Revoke))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.no_events.as_fd()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.no_events.as_fd()
    }
}

impl Standalone {
    fn unsupported(&self, capability: Capability) -> io::Error {
        own(Error::NotSupported {
            backend: self.source.backend(),
            capability,
        })
    }
}

#[cfg(test)]
pub(crate) mod tests;
