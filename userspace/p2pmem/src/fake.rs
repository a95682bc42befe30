// SPDX-License-Identifier: MIT OR Apache-2.0

//! A device without a module: for tests of programs that use this crate, and of the crate itself.
//!
//! Providers, paths and failures are what the test says; buffers are real memory that can be mapped and used for direct
//! I/O. What it cannot play is the hardware: a removed provider's mappings do not raise SIGBUS, a dma-buf has a size but
//! not the buffer's content, and keeps no buffer that has no handle any more, and a [`FakeNic`] moves no data.
//!
//! ```
//! use p2pmem::{fake::Fake, PathClass, Request};
//!
//! let near = "0000:03:00.0".parse()?;
//! let far = "0000:08:00.0".parse()?;
//! let drive: p2pmem::PciAddr = "0000:04:00.0".parse()?;
//! let fake = Fake::new()
//!     .provider(near, 64 << 20)
//!     .provider(far, 64 << 20)
//!     .path(near, drive, PathClass::SameSwitch, 4);
//! let device = fake.device();
//! assert_eq!(device.alloc(&Request::new(4096).near([drive]))?.provider(), 1);
//!
//! fake.fail_next(28);
//! assert_eq!(device.alloc(&Request::new(4096)).unwrap_err().errno(), Some(28));
//! # Ok::<(), p2pmem::Error>(())
//! ```

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::c_char;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use p2pmem_sys as abi;
use rustix::event::{eventfd, EventfdFlags};

use crate::addr::PciAddr;
use crate::device::Device;
use crate::sys::{memory_file, wait_readable, Kernel, Region};
use crate::types::PathClass;

mod nic;
mod state;

pub use nic::FakeNic;

const PAGE: u64 = 4096;
/// Each provider's memory is at its id times this in the one file that stands for all; so none is at offset 0.
const SPACING: u64 = 1 << 40;

/// The module and machine that are played. Clones share them.
#[derive(Clone)]
pub struct Fake {
    machine: Arc<Machine>,
}

struct Machine {
    state: Mutex<State>,
    memory: File,
}

#[derive(Default)]
struct State {
    providers: BTreeMap<u32, Provider>,
    last_id: u32,
    /// (provider, client) -> (class, hops)
    paths: HashMap<(PciAddr, PciAddr), (PathClass, u32)>,
    files: Vec<Weak<Mutex<OpenFile>>>,
    gone: abi::p2pmem_stats,
    generation: u64,
    fail_next: Option<i32>,
    /// Mappings ever made: (address, length, offset in the file).
    maps: Vec<(u64, u64, u64)>,
    holders: Option<String>,
    /// Handles beyond the first one of buffers that were imported, by their place in the file.
    imported: HashMap<u64, u32>,
    /// Inodes of dma-bufs: the buffer, and whether it is the whole of it.
    dmabufs: HashMap<(u64, u64), (abi::p2pmem_buffer, bool)>,
}

struct Provider {
    raw: abi::p2pmem_provider,
    /// Start -> length of each live buffer.
    used: BTreeMap<u64, u64>,
    stats: abi::p2pmem_stats,
}

struct OpenFile {
    buffers: BTreeMap<u32, abi::p2pmem_buffer>,
    last_handle: u32,
    events: VecDeque<abi::p2pmem_event>,
    /// Readable while there are events.
    wakeup: Arc<OwnedFd>,
    last: Option<Decision>,
    rules: Vec<abi::p2pmem_rule>,
}

impl OpenFile {
    fn new(wakeup: Arc<OwnedFd>) -> Self {
        Self {
            buffers: BTreeMap::new(),
            last_handle: 0,
            events: VecDeque::new(),
            wakeup,
            last: None,
            rules: Vec::new(),
        }
    }

    fn queue(&mut self, event: &abi::p2pmem_event) {
        self.events.push_back(*event);
        rustix::io::write(&self.wakeup, &1u64.to_ne_bytes()).expect("an eventfd counts to 2^64 - 2");
    }
}

#[derive(Clone, Default)]
struct Decision {
    verdicts: Vec<abi::p2pmem_verdict>,
    text: String,
    error: i32,
    chosen: u32,
}

impl Decision {
    /// Class of the path to a provider.
    fn class_of(&self, provider: u32) -> u32 {
        let verdict = self.verdicts.iter().find(|v| v.provider == provider);
        verdict.map_or(0, |v| v.class)
    }
}

impl fmt::Debug for Fake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fake").finish_non_exhaustive()
    }
}

impl Default for Fake {
    fn default() -> Self {
        Self::new()
    }
}

fn errno(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Fake {
    /// A machine without providers.
    ///
    /// # Panics
    ///
    /// Where the kernel has no memory files (memfd).
    pub fn new() -> Self {
        let memory = memory_file(c"p2pmem-fake", SPACING << 8).expect("a memory file");
        Self {
            machine: Arc::new(Machine {
                state: Mutex::default(),
                memory,
            }),
        }
    }

    /// A small machine: below one switch an accelerator (provider 1 at 0000:03:00.0, 256 MiB), a drive at 0000:04:00.0
    /// and one with a controller memory buffer (provider 3 at 0000:05:00.0, 32 MiB, adopted), and on another root port
    /// a second accelerator (provider 2 at 0000:08:00.0, 64 MiB). A NIC at 0000:0a:00.0 can reach nothing.
    pub fn example() -> Self {
        let at = |bus| PciAddr {
            domain: 0,
            bus,
            devfn: 0,
        };
        Self::new()
            .provider(at(3), 256 << 20)
            .provider(at(8), 64 << 20)
            .adopted(at(5), 32 << 20, "nvme")
            .path(at(3), at(4), PathClass::SameSwitch, 4)
            .path(at(3), at(5), PathClass::SameSwitch, 4)
            .path(at(5), at(4), PathClass::SameSwitch, 4)
            .path(at(5), at(5), PathClass::SameDevice, 0)
            .path(at(3), at(10), PathClass::Unreachable, 0)
            .path(at(5), at(10), PathClass::Unreachable, 0)
            .path(at(8), at(10), PathClass::Unreachable, 0)
    }

    /// Adds a provider of `size` bytes; ids are given from 1 on.
    pub fn provider(self, addr: PciAddr, size: u64) -> Self {
        self.add(abi::p2pmem_provider {
            kind: abi::P2PMEM_KIND_OWN,
            addr: addr.into(),
            bar: 2,
            size,
            vendor: 0x1de5,
            device: 0x0001,
            class: 0x12_0000,
            flags: abi::P2PMEM_PROVIDER_EXPORTABLE,
            driver: name("p2pmem"),
            ..Default::default()
        })
    }

    /// Adds a provider that its own driver published.
    pub fn adopted(self, addr: PciAddr, size: u64, driver: &str) -> Self {
        self.add(abi::p2pmem_provider {
            kind: abi::P2PMEM_KIND_ADOPTED,
            addr: addr.into(),
            bar: -1,
            size,
            vendor: 0x1b36,
            device: 0x0010,
            class: 0x01_0802,
            driver: name(driver),
            ..Default::default()
        })
    }

    fn add(self, raw: abi::p2pmem_provider) -> Self {
        let mut state = lock(&self.machine.state);
        state.last_id += 1;
        let id = state.last_id;
        let raw = abi::p2pmem_provider {
            id,
            state: abi::P2PMEM_PROVIDER_LIVE,
            numa_node: -1,
            ..raw
        };
        state.providers.insert(
            id,
            Provider {
                raw,
                used: BTreeMap::new(),
                stats: Default::default(),
            },
        );
        state.tell_all(&event(abi::P2PMEM_EVENT_PROVIDER_ADDED, id, 0));
        drop(state);
        self
    }

    /// Says how far a provider is from a client. Without it a path goes through the host bridge, 6 hops.
    pub fn path(self, provider: PciAddr, client: PciAddr, class: PathClass, hops: u32) -> Self {
        lock(&self.machine.state)
            .paths
            .insert((provider, client), (class, hops));
        self
    }

    /// Opens it, as `Device::open()` opens the real one.
    pub fn device(&self) -> Device {
        let wakeup = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        let wakeup = Arc::new(wakeup);
        let file = Arc::new(Mutex::new(OpenFile::new(wakeup.clone())));
        lock(&self.machine.state).files.push(Arc::downgrade(&file));
        Device::with(Box::new(FakeDevice {
            machine: self.machine.clone(),
            file,
            wakeup,
        }))
    }

    /// Has the next call, whichever it is, fail with this errno (positive).
    pub fn fail_next(&self, errno: i32) {
        lock(&self.machine.state).fail_next = Some(errno);
    }

    /// Has the administrator of a provider allow exports to importers that cannot be revoked.
    pub fn allow_pinned(&self, id: u32) {
        if let Some(provider) = lock(&self.machine.state).providers.get_mut(&id) {
            provider.raw.flags |= abi::P2PMEM_PROVIDER_PINNED_EXPORTS;
        }
    }

    /// Has the module refuse an importer of a dma-buf, for this reason and with this errno (positive). What the
    /// importer's driver makes of it is up to the test: [`FakeNic::fail_next`].
    pub fn refuse_importer(&self, errno: i32, why: &str) {
        for file in lock(&self.machine.state).files.iter().filter_map(Weak::upgrade) {
            lock(&file).last = Some(Decision {
                text: why.to_owned(),
                error: errno,
                ..Default::default()
            });
        }
    }

    /// Has root's list of buffers and whose they are read so: a first line of column names, with `function`, `size` and
    /// at the end `owner`, and a line for each buffer. None: the program is not root.
    pub fn holders(&self, table: Option<&str>) {
        lock(&self.machine.state).holders = table.map(str::to_owned);
    }

    /// Takes a provider away: its buffers are revoked, and all open devices are told.
    pub fn remove_provider(&self, id: u32) {
        let mut state = lock(&self.machine.state);
        let Some(provider) = state.providers.remove(&id) else {
            return;
        };
        sum(&mut state.gone, &provider.stats);
        let files: Vec<_> = state.files.iter().filter_map(Weak::upgrade).collect();
        for file in files {
            let mut file = lock(&file);
            let live: Vec<u32> = file
                .buffers
                .values()
                .filter(|b| b.provider == id)
                .map(|b| b.handle)
                .collect();
            for handle in live {
                if let Some(buffer) = file.buffers.get_mut(&handle) {
                    buffer.state = abi::P2PMEM_BUFFER_GONE;
                }
                file.queue(&event(abi::P2PMEM_EVENT_BUFFER_REVOKED, id, handle));
                state.gone.revoked += 1;
            }
        }
        state.tell_all(&event(abi::P2PMEM_EVENT_PROVIDER_REMOVED, id, 0));
    }
}

fn name(text: &str) -> [c_char; 32] {
    let mut chars = [0; 32];
    for (to, from) in chars.iter_mut().zip(text.bytes().take(31)) {
        *to = c_char::from_ne_bytes([from]);
    }
    chars
}

fn event(type_: u32, provider: u32, handle: u32) -> abi::p2pmem_event {
    abi::p2pmem_event {
        type_,
        provider,
        handle,
        ..Default::default()
    }
}

fn sum(into: &mut abi::p2pmem_stats, from: &abi::p2pmem_stats) {
    into.allocs += from.allocs;
    into.frees += from.frees;
    into.failed += from.failed;
    into.alloc_bytes += from.alloc_bytes;
    into.free_bytes += from.free_bytes;
    into.maps += from.maps;
    into.scrubbed_bytes += from.scrubbed_bytes;
    into.parked += from.parked;
    into.revoked += from.revoked;
    into.exports += from.exports;
    into.attaches += from.attaches;
    into.attach_failed += from.attach_failed;
}

impl Provider {
    /// Free pieces: (start, length).
    fn holes(&self) -> Vec<(u64, u64)> {
        let mut at = 0;
        let mut holes = Vec::new();
        for (start, len) in &self.used {
            holes.push((at, start - at));
            at = start + len;
        }
        holes.push((at, self.raw.size - at));
        holes
    }

    fn place(&self, size: u64, align: u64) -> Option<u64> {
        self.holes().into_iter().find_map(|(start, len)| {
            let aligned = start.next_multiple_of(align);
            (aligned - start + size <= len).then_some(aligned)
        })
    }

    fn snapshot(&self) -> abi::p2pmem_provider {
        let holes = self.holes();
        abi::p2pmem_provider {
            free: holes.iter().map(|h| h.1).sum(),
            largest: holes.iter().map(|h| h.1).max().unwrap_or(0),
            buffers: self.used.len() as u32,
            ..self.raw
        }
    }
}

/// One open file of the machine.
struct FakeDevice {
    machine: Arc<Machine>,
    file: Arc<Mutex<OpenFile>>,
    wakeup: Arc<OwnedFd>,
}

impl FakeDevice {
    /// Locks the machine for one call, unless the test wants the call to fail.
    fn enter(&self) -> io::Result<MutexGuard<'_, State>> {
        let mut state = lock(&self.machine.state);
        match state.fail_next.take() {
            Some(wanted) => Err(self.refuse(wanted, "the test wants it to fail".into())),
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
            // Clearing memory of our own cannot fail but for want of memory, and then the next test is told.
            let _ = state.release(buffer, &self.machine.memory);
        }
    }
}

impl Kernel for FakeDevice {
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
                    | abi::P2PMEM_FEATURE_STRIPE,
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
                let (class, hops) = state.way(provider.raw.addr, *addr);
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
            return Err(self.refuse(libc::EINVAL, "the descriptor is no dma-buf".into()));
        };
        if !whole {
            return Err(self.refuse(libc::EACCES, "the dma-buf is of parts of a buffer".into()));
        }
        let start = buffer.mmap_offset - u64::from(buffer.provider) * SPACING;
        let provider = state.providers.get(&buffer.provider);
        if provider.is_none_or(|p| p.used.get(&start) != Some(&buffer.size)) {
            return Err(self.refuse(libc::ENODEV, "the buffer was revoked".into()));
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
            req: request.map(|(request, _)| *request).unwrap_or_default(), // as the module: not kept for later
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

    fn map(&self, offset: u64, len: usize) -> io::Result<Region> {
        let mut state = self.enter()?;
        let id = (offset / SPACING) as u32;
        let provider = state.providers.get_mut(&id).ok_or_else(|| errno(libc::ENODEV))?;
        provider.stats.maps += 1;
        let region = Region::map(&self.machine.memory, offset, len)?;
        state.maps.push((region.as_ptr() as u64, len as u64, offset));
        Ok(region)
    }

    fn export(&self, handle: u32, ranges: &[abi::p2pmem_range], flags: u32) -> io::Result<OwnedFd> {
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
                "a range is no whole pages, past the end, or overlaps another".into(),
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
        let made = memory_file(c"p2pmem-fake-dmabuf", ranges.iter().map(|r| r.1).sum())?;
        let (at, whole) = (made.metadata()?, ranges == [(start, buffer.size)]);
        state.dmabufs.insert((at.dev(), at.ino()), (buffer, whole));
        Ok(OwnedFd::from(made))
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

    fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        wait_readable(self.event_fd(), timeout)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.machine.memory.as_fd()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Request, VerdictCode};

    #[test]
    fn every_verdict_it_knows_is_given_for_its_reason() {
        let at = |bus| PciAddr {
            domain: 0,
            bus,
            devfn: 0,
        };
        let (client, lonely) = (at(100), at(101));
        let fake = Fake::new()
            .provider(at(1), 1 << 20)
            .provider(at(2), 1 << 20)
            .provider(at(3), 1 << 20)
            .provider(at(4), 64 << 10)
            .path(at(1), client, PathClass::SameSwitch, 4)
            .path(at(2), client, PathClass::SameSwitch, 6)
            .path(at(1), lonely, PathClass::Unreachable, 0);
        let device = fake.device();
        let codes = |request: &Request| -> Vec<VerdictCode> {
            device
                .explain(request)
                .unwrap()
                .verdicts
                .iter()
                .map(|v| v.code)
                .collect()
        };
        use VerdictCode::*;
        assert_eq!(
            codes(&Request::new(512 << 10).near([client])),
            [Chosen, Hops, Class, TooSmall]
        );
        assert_eq!(
            codes(&Request::new(4096).near([lonely])),
            [Unreachable, Chosen, Order, Order]
        );
        let near = Request::new(4096).near([client]);
        assert_eq!(
            codes(&near.clone().max_class(PathClass::SameSwitch)),
            [Chosen, Hops, TooFar, TooFar]
        );
        assert_eq!(codes(&near.clone().provider(3)), [NotNamed, NotNamed, Chosen, NotNamed]);
        assert_eq!(codes(&near.prefer(3)), [NotNamed, NotNamed, Chosen, NotNamed]);
        assert_eq!(
            codes(&Request::new(1 << 20).prefer(4)),
            [Chosen, Order, Order, TooSmall]
        );

        // Keep the middle of provider 1: half of it is free, but no megabyte's half in one piece.
        let request = Request::new(256 << 10).provider(1);
        let mut four: Vec<_> = (0..4).map(|_| device.alloc(&request).unwrap()).collect();
        assert_eq!(device.alloc(&request).unwrap_err().errno(), Some(libc::ENOSPC));
        assert_eq!(codes(&request)[0], Full);
        four.remove(2);
        four.remove(0);
        assert_eq!(codes(&Request::new(512 << 10).provider(1))[0], Fragmented);
    }

    #[test]
    fn freed_memory_is_cleared() {
        let device = Fake::example().device();
        let request = Request::new(8192).provider(1);
        device
            .alloc(&request)
            .unwrap()
            .map()
            .unwrap()
            .fill(0..8192, 0xaa)
            .unwrap();
        let again = device.alloc(&request).unwrap();
        assert_eq!(again.bar_offset(), Some(0), "the same place");
        assert_eq!(again.map().unwrap().read::<u64>(4096).unwrap(), 0);
    }

    #[test]
    fn closing_frees() {
        let fake = Fake::example();
        let buffer = fake.device().alloc(&Request::new(4096)).unwrap();
        std::mem::forget(buffer.map().unwrap());
        drop(buffer);
        assert_eq!(fake.device().info().unwrap().buffers, 0);
    }
}
