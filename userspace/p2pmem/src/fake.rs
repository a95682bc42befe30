// SPDX-License-Identifier: MIT OR Apache-2.0

//! A device without a module: for tests of programs that use this crate, and of the crate itself.
//!
//! Providers, paths and failures are what the test says; buffers are real memory that can be mapped and used for direct
//! I/O. What it cannot play is the hardware: a removed provider's mappings do not raise SIGBUS, a dma-buf has a size but
//! not the buffer's content, and a [`FakeNic`] moves no data.
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
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use p2pmem_sys as abi;

use crate::device::Device;
use crate::pci::PciAddr;
use crate::sys::{memory_file, Kernel, Region};
use crate::types::{human_size, PathClass};

mod nic;

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
    /// Signalled when events were queued.
    came: Condvar,
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
}

struct Provider {
    raw: abi::p2pmem_provider,
    /// Start -> length of each live buffer.
    used: BTreeMap<u64, u64>,
    stats: abi::p2pmem_stats,
}

#[derive(Default)]
struct OpenFile {
    buffers: BTreeMap<u32, abi::p2pmem_buffer>,
    last_handle: u32,
    events: VecDeque<abi::p2pmem_event>,
    last: Option<Decision>,
    rules: Vec<abi::p2pmem_rule>,
}

#[derive(Clone, Default)]
struct Decision {
    verdicts: Vec<abi::p2pmem_verdict>,
    text: String,
    error: i32,
    chosen: u32,
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
                came: Condvar::new(),
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
        self.machine.came.notify_all();
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
        let file = Arc::new(Mutex::new(OpenFile::default()));
        lock(&self.machine.state).files.push(Arc::downgrade(&file));
        Device::with(Box::new(FakeDevice {
            machine: self.machine.clone(),
            file,
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
                file.events
                    .push_back(event(abi::P2PMEM_EVENT_BUFFER_REVOKED, id, handle));
                state.gone.revoked += 1;
            }
        }
        state.tell_all(&event(abi::P2PMEM_EVENT_PROVIDER_REMOVED, id, 0));
        drop(state);
        self.machine.came.notify_all();
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
        count: 0,
        time_ns: 0,
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

impl State {
    fn tell_all(&mut self, event: &abi::p2pmem_event) {
        self.generation += 1;
        self.files.retain(|f| f.strong_count() > 0);
        for file in self.files.iter().filter_map(Weak::upgrade) {
            lock(&file).events.push_back(*event);
        }
    }

    fn way(&self, provider: abi::p2pmem_pci_addr, client: abi::p2pmem_pci_addr) -> (PathClass, u32) {
        let key = (provider.into(), client.into());
        self.paths.get(&key).copied().unwrap_or((PathClass::HostBridge, 6))
    }

    /// Decides by the file's own rules, of which it knows those that deny a provider, for whatever client.
    fn decide(
        &self,
        request: &abi::p2pmem_request,
        clients: &[abi::p2pmem_pci_addr],
        own: &[abi::p2pmem_rule],
    ) -> Decision {
        let size = request.size.next_multiple_of(PAGE);
        let prefer = request.flags & abi::P2PMEM_ALLOC_PREFER != 0;
        let mut verdicts: Vec<abi::p2pmem_verdict> = Vec::new();
        for (id, provider) in &self.providers {
            let now = provider.snapshot();
            let ways: Vec<_> = clients.iter().map(|c| self.way(now.addr, *c)).collect();
            let worst = ways
                .iter()
                .enumerate()
                .max_by_key(|(i, (class, _))| (*class, std::cmp::Reverse(*i)));
            let class = worst.map_or(0, |(_, (class, _))| class.to_raw());
            let deny = own.iter().find(|rule| {
                let here = rule.flags & abi::P2PMEM_RULE_PROVIDER == 0 || rule.provider == now.addr;
                here && rule.action == abi::P2PMEM_RULE_DENY
            });
            let code = if request.provider != 0 && request.provider != *id && !prefer {
                abi::P2PMEM_VERDICT_NOT_NAMED
            } else if class == abi::P2PMEM_PATH_UNREACHABLE {
                abi::P2PMEM_VERDICT_UNREACHABLE
            } else if deny.is_some() {
                abi::P2PMEM_VERDICT_DENIED
            } else if request.max_class != 0 && class > request.max_class {
                abi::P2PMEM_VERDICT_TOO_FAR
            } else if now.size < size {
                abi::P2PMEM_VERDICT_TOO_SMALL
            } else if now.free < size {
                abi::P2PMEM_VERDICT_FULL
            } else if provider.place(size, request.align.max(PAGE)).is_none() {
                abi::P2PMEM_VERDICT_FRAGMENTED
            } else {
                0 // a candidate
            };
            verdicts.push(abi::p2pmem_verdict {
                provider: *id,
                code,
                addr: now.addr,
                worst_client: worst.map_or(0, |(i, _)| i as u32),
                class,
                hops: ways.iter().map(|w| w.1).sum(),
                size: now.size,
                free: now.free,
                largest: now.largest,
                rule_set: deny.map_or(abi::P2PMEM_RULES_NONE, |_| abi::P2PMEM_RULES_OWN),
                rule: deny.map_or_else(Default::default, |rule| rule.name),
                ..Default::default()
            });
        }
        let denied = verdicts.iter().any(|v| v.code == abi::P2PMEM_VERDICT_DENIED);
        let candidates = verdicts.iter().filter(|v| v.code == 0);
        let named = |v: &&abi::p2pmem_verdict| prefer && v.provider == request.provider;
        let best = candidates
            .min_by_key(|v| (!named(v), v.class, v.hops, v.provider))
            .copied();
        for verdict in verdicts.iter_mut().filter(|v| v.code == 0) {
            verdict.code = match &best {
                Some(best) if best.provider == verdict.provider => abi::P2PMEM_VERDICT_CHOSEN,
                Some(best) if named(&best) => abi::P2PMEM_VERDICT_NOT_NAMED,
                Some(best) if best.class < verdict.class => abi::P2PMEM_VERDICT_CLASS,
                Some(best) if best.hops < verdict.hops => abi::P2PMEM_VERDICT_HOPS,
                _ => abi::P2PMEM_VERDICT_ORDER,
            };
        }
        let full = verdicts
            .iter()
            .any(|v| [abi::P2PMEM_VERDICT_FULL, abi::P2PMEM_VERDICT_FRAGMENTED].contains(&v.code));
        let (error, text) = match &best {
            Some(best) => (0, format!("{} was chosen", PciAddr::from(best.addr))),
            None if full => (libc::ENOSPC, format!("no provider has {} free", human_size(size))),
            None if denied => (libc::EACCES, "the file's own rules deny all that could serve".into()),
            None => (
                libc::ENODEV,
                format!("no provider could ever serve {}", human_size(size)),
            ),
        };
        Decision {
            verdicts,
            text,
            error,
            chosen: best.map_or(0, |b| b.provider),
        }
    }

    /// (start, length) of ranges; of addresses, in the file that stands for all memory.
    fn offsets(&self, ranges: &[abi::p2pmem_range], mapped: bool) -> Result<Vec<(u64, u64)>, String> {
        let offset = |range: &abi::p2pmem_range| {
            // The newest: what is gone may have been at the same address.
            let map = self
                .maps
                .iter()
                .rev()
                .find(|m| (m.0..m.0 + m.1).contains(&range.offset));
            match map {
                _ if !mapped => Ok((range.offset, range.size)),
                Some((start, _, offset)) => Ok((offset + (range.offset - start), range.size)),
                None => Err(format!("no buffer is mapped at {:#x}", range.offset)),
            }
        };
        ranges.iter().map(offset).collect()
    }

    /// Frees what the buffer holds, and clears it as the module does.
    fn release(&mut self, buffer: &abi::p2pmem_buffer, memory: &File) -> io::Result<()> {
        let Some(provider) = self.providers.get_mut(&buffer.provider) else {
            return Ok(());
        };
        provider
            .used
            .remove(&(buffer.mmap_offset - u64::from(buffer.provider) * SPACING));
        provider.stats.frees += 1;
        provider.stats.free_bytes += buffer.size;
        provider.stats.scrubbed_bytes += buffer.size;
        let zeros = vec![0; buffer.size.min(1 << 20) as usize];
        let mut done = 0;
        while done < buffer.size {
            let some = (buffer.size - done).min(zeros.len() as u64);
            memory.write_all_at(&zeros[..some as usize], buffer.mmap_offset + done)?;
            done += some;
        }
        Ok(())
    }
}

/// One open file of the machine.
struct FakeDevice {
    machine: Arc<Machine>,
    file: Arc<Mutex<OpenFile>>,
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
            page_size: PAGE as u32,
            features: u64::from(
                abi::P2PMEM_FEATURE_MMAP_PAGED
                    | abi::P2PMEM_FEATURE_EVENTS
                    | abi::P2PMEM_FEATURE_ADOPT
                    | abi::P2PMEM_FEATURE_DMABUF,
            ),
            providers: all.len() as u32,
            buffers: all.iter().map(|p| p.buffers).sum(),
            size: all.iter().map(|p| p.size).sum(),
            free: all.iter().map(|p| p.free).sum(),
            generation: state.generation,
            version: name("fake"),
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
        let provider = state
            .providers
            .get_mut(&decision.chosen)
            .ok_or_else(|| errno(libc::EIO))?;
        let size = request.size.next_multiple_of(PAGE);
        let offset = provider
            .place(size, request.align.max(PAGE))
            .ok_or_else(|| errno(libc::EIO))?;
        provider.used.insert(offset, size);
        provider.stats.allocs += 1;
        provider.stats.alloc_bytes += size;
        file.last_handle += 1;
        let handle = file.last_handle;
        let mmap_offset = u64::from(decision.chosen) * SPACING + offset;
        let bar_offset = if provider.raw.bar < 0 { u64::MAX } else { offset };
        let buffer = abi::p2pmem_buffer {
            handle,
            provider: decision.chosen,
            size,
            mmap_offset,
            bar_offset,
            state: abi::P2PMEM_BUFFER_LIVE,
            ..Default::default()
        };
        file.buffers.insert(handle, buffer);
        let class = decision
            .verdicts
            .iter()
            .find(|v| v.provider == decision.chosen)
            .map_or(0, |v| v.class);
        let provider = decision.chosen;
        Ok(abi::p2pmem_alloc {
            req: *request,
            handle,
            provider,
            size,
            mmap_offset,
            bar_offset,
            class,
            reserved: 0,
        })
    }

    fn free(&self, handle: u32) -> io::Result<()> {
        let mut state = self.enter()?;
        let buffer = lock(&self.file).buffers.remove(&handle);
        let buffer = buffer.ok_or_else(|| self.refuse(libc::ENOENT, format!("there is no buffer {handle}")))?;
        state.release(&buffer, &self.machine.memory)
    }

    fn buffer(&self, handle: u32) -> io::Result<abi::p2pmem_buffer> {
        let _state = self.enter()?;
        let buffer = lock(&self.file).buffers.get(&handle).copied();
        buffer.ok_or_else(|| self.refuse(libc::ENOENT, format!("there is no buffer {handle}")))
    }

    fn explain(
        &self,
        request: Option<(&abi::p2pmem_request, &[abi::p2pmem_pci_addr])>,
        verdicts: &mut [abi::p2pmem_verdict],
        text: &mut [u8],
    ) -> io::Result<abi::p2pmem_explain> {
        let decision = match request {
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
        memory_file(c"p2pmem-fake-dmabuf", ranges.iter().map(|r| r.1).sum()).map(OwnedFd::from)
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
        Ok(n)
    }

    fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let deadline = timeout.map(|t| Instant::now() + t);
        let mut state = lock(&self.machine.state);
        loop {
            if !lock(&self.file).events.is_empty() {
                return Ok(true);
            }
            state = match deadline {
                None => self.machine.came.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(false);
                    }
                    self.machine
                        .came
                        .wait_timeout(state, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.machine.memory.as_fd()
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
