// SPDX-License-Identifier: MIT OR Apache-2.0

//! DMA by the device: bus addresses, the memory behind them, and the access to it.
//!
//! Memory that the client maps with a file descriptor is mapped in this process and copied. Memory that the client maps
//! without one may belong to a device that this process serves ([`Peers`]); it is copied too. All other addresses (BARs
//! of devices of other processes, memory that the client emulates, unmapped addresses) are accessed by DMA_READ and
//! DMA_WRITE messages, which the client executes as accesses of the device on its bus. Such messages are short, sent
//! one at a time, and wait while a register access of the client is being answered, because the client may process them
//! only after the reply.

mod connection;
mod table;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, RwLockReadGuard};

use rustix::io::Errno;

use crate::memory::{Memory, OutOfBounds};
use crate::peers::{self, Peers};
use crate::proto;
use crate::sys::SharedMapping;
pub(crate) use table::MAX_MAPS;
use table::{DmaTable, MappedFile, last_address};

/// Maximum number of bytes that are copied under one lock of the DMA table. Limits how long an unmapping waits.
const COPY_CHUNK: u64 = 1 << 20;

/// Key of guest memory in [`Dma::by_target`].
pub const HOST: &str = "host";
/// Key in [`Dma::by_target`] of memory with a file descriptor that is neither guest memory nor a peer in [`Peers`].
pub const OTHER_MAPPED: &str = "mapped";
/// Key in [`Dma::by_target`] of all accesses by message.
pub const MESSAGE: &str = "message";

/// A range of bus addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First bus address.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
}

/// The kind of memory behind a bus address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Guest memory.
    Host,
    /// Memory of a peer that is mapped in this process.
    Peer,
    /// Accessed by messages: a BAR of another process, memory that the client emulates, or an unmapped address.
    Message,
}

/// A part of an address range that has one target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First bus address.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// Target of all its bytes.
    pub target: Target,
}

/// Why a transfer failed. The bytes before the failing address have been transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DmaError {
    /// The function's Bus Master Enable bit is 0.
    #[error("bus mastering is disabled")]
    BusMasterOff,
    /// No memory answers at the address.
    #[error("no memory at bus address {0:#x}")]
    Unreachable(u64),
    /// The mapping does not permit this access.
    #[error("the DMA mapping does not permit the access to {0:#x}")]
    Denied(u64),
    /// The client did not reply in time.
    #[error("timeout: no reply to the access to {0:#x}")]
    Timeout(u64),
    /// The client sent an error reply, or a reply that does not match the request.
    #[error("access to {0:#x} failed with errno {1}")]
    Failed(u64, i32),
    /// [`Dma::abort`] was called.
    #[error("the transfer was aborted")]
    Aborted,
    /// The address of an atomic access is not naturally aligned.
    #[error("atomic access to {0:#x} is not aligned")]
    Misaligned(u64),
    /// No client is connected.
    #[error("no client is connected")]
    Disconnected,
    /// The access needs a message, but runs on the thread that serves the client, which would wait for itself.
    #[error("DMA by message on the serving thread")]
    WrongThread,
    /// The range in the device's own memory is out of bounds.
    #[error(transparent)]
    Local(#[from] OutOfBounds),
}

/// Bytes transferred, by target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DmaCounts {
    /// Read from guest memory.
    pub host_read: u64,
    /// Written to guest memory.
    pub host_written: u64,
    /// Read from memory of peers that is mapped in this process.
    pub peer_read: u64,
    /// Written to memory of peers that is mapped in this process.
    pub peer_written: u64,
    /// Read by messages.
    pub message_read: u64,
    /// Written by messages.
    pub message_written: u64,
}

/// Bytes transferred from and to one target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Read from the target.
    pub read: u64,
    /// Written to the target.
    pub written: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    /// From the bus to the device.
    Read,
    /// From the device to the bus.
    Write,
    /// Atomic read and write.
    Update,
}

/// Bytes transferred from and to one peer.
#[derive(Debug)]
struct PeerCounters {
    name: Arc<str>,
    read: AtomicU64,
    written: AtomicU64,
}

/// Bytes transferred, by target.
#[derive(Debug, Default)]
struct Counters {
    host_read: AtomicU64,
    host_written: AtomicU64,
    /// All peers together, with and without a name.
    peer_read: AtomicU64,
    peer_written: AtomicU64,
    message_read: AtomicU64,
    message_written: AtomicU64,
    /// Peers that have a name. Their bytes are in `peer_read` and `peer_written` too.
    by_peer: RwLock<Vec<PeerCounters>>,
}

#[derive(Debug, Default)]
struct Shared {
    table: RwLock<DmaTable>,
    peers: Option<Peers>,
    connection: Mutex<connection::Connection>,
    connection_changed: Condvar,
    bus_master: AtomicBool,
    /// Number of calls of [`Dma::abort`]. A transfer ends when it changes.
    epoch: AtomicU64,
    /// Counters of all handles.
    total: Counters,
}

/// Access to bus addresses. Clones access the same bus.
#[derive(Clone, Debug)]
pub struct Dma {
    shared: Arc<Shared>,
    /// If set, transfers fail with [`DmaError::Aborted`] once the epoch differs from this one.
    abort_epoch: Option<u64>,
    /// If set, counters of this handle and its clones, in addition to the total.
    own_counters: Option<Arc<Counters>>,
}

/// Location of a part of a transfer on the bus side.
enum Chunk<'a> {
    Mapped { mapping: &'a SharedMapping, offset: u64 },
    Message { address: u64 },
}

/// The DMA table and the peer table, locked for reading so that no memory is unmapped or moved during a copy.
struct LockedTables<'a> {
    table: RwLockReadGuard<'a, DmaTable>,
    peers: Option<RwLockReadGuard<'a, peers::PeerTable>>,
}

/// The result of looking up a bus address.
struct Lookup<'a> {
    /// Number of bytes from the address on for which the result holds.
    run: u64,
    /// Whether the client's mapping permits reads. True if there is no mapping.
    readable: bool,
    writable: bool,
    target: Target,
    /// The memory and the offset in it, if it is mapped in this process.
    memory: Option<(&'a SharedMapping, u64)>,
    /// The peer's name, if the memory belongs to a peer in [`Peers`].
    name: Option<&'a Arc<str>>,
}

impl LockedTables<'_> {
    fn find(&self, address: u64, len: u64) -> Lookup<'_> {
        let (found, run) = self.table.find(address, len);
        let mut lookup = Lookup {
            run,
            readable: true,
            writable: true,
            target: Target::Message,
            memory: None,
            name: None,
        };
        let Some((start, mapping)) = found else { return lookup };
        (lookup.readable, lookup.writable) = (mapping.readable, mapping.writable);
        match (&mapping.memory, &self.peers) {
            (Some((mapping, file)), peers) => {
                lookup.memory = Some((mapping, address - start));
                if self.table.is_host(file) {
                    lookup.target = Target::Host;
                } else {
                    lookup.target = Target::Peer;
                    let peer = peers.as_ref().and_then(|peers| peers.by_file(file));
                    lookup.name = peer.map(|peer| &peer.name);
                }
            }
            (None, Some(peers)) => {
                let (peer, run) = peers.find(address, run);
                lookup.run = run;
                if let Some((peer, offset)) = peer {
                    lookup.target = Target::Peer;
                    lookup.memory = Some((peer.memory.mapping(), offset));
                    lookup.name = Some(&peer.name);
                }
            }
            (None, None) => {}
        }
        lookup
    }
}

impl Counters {
    fn counts(&self) -> DmaCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DmaCounts {
            host_read: get(&self.host_read),
            host_written: get(&self.host_written),
            peer_read: get(&self.peer_read),
            peer_written: get(&self.peer_written),
            message_read: get(&self.message_read),
            message_written: get(&self.message_written),
        }
    }

    fn by_target(&self) -> BTreeMap<String, Moved> {
        let by_peer = self.by_peer.read().unwrap_or_else(PoisonError::into_inner);
        let mut all = BTreeMap::new();
        let mut peers_total = Moved::default();
        for peer in by_peer.iter() {
            let moved = Moved {
                read: peer.read.load(Ordering::Relaxed),
                written: peer.written.load(Ordering::Relaxed),
            };
            peers_total.read += moved.read;
            peers_total.written += moved.written;
            all.insert(peer.name.to_string(), moved);
        }
        drop(by_peer);
        let counts = self.counts();
        let mut insert = |name: &str, read, written| all.insert(name.to_owned(), Moved { read, written });
        insert(HOST, counts.host_read, counts.host_written);
        insert(MESSAGE, counts.message_read, counts.message_written);
        // The named peers are read before the sum, so the sum is at least as large.
        insert(
            OTHER_MAPPED,
            counts.peer_read.saturating_sub(peers_total.read),
            counts.peer_written.saturating_sub(peers_total.written),
        );
        all
    }

    fn reset(&self) {
        self.by_peer.write().unwrap_or_else(PoisonError::into_inner).clear();
        for counter in [
            &self.host_read,
            &self.host_written,
            &self.peer_read,
            &self.peer_written,
            &self.message_read,
            &self.message_written,
        ] {
            counter.store(0, Ordering::Relaxed);
        }
    }

    fn count(&self, target: Target, name: Option<&Arc<str>>, direction: Direction, bytes: u64) {
        let (read, written) = match target {
            Target::Host => (&self.host_read, &self.host_written),
            Target::Peer => (&self.peer_read, &self.peer_written),
            Target::Message => (&self.message_read, &self.message_written),
        };
        let add = |read: &AtomicU64, written: &AtomicU64| {
            if direction != Direction::Write {
                read.fetch_add(bytes, Ordering::Relaxed);
            }
            if direction != Direction::Read {
                written.fetch_add(bytes, Ordering::Relaxed);
            }
        };
        add(read, written);
        let Some(name) = name else { return };
        let find = |peers: &[PeerCounters]| match peers.iter().find(|peer| peer.name == *name) {
            Some(peer) => {
                add(&peer.read, &peer.written);
                true
            }
            None => false,
        };
        if find(&self.by_peer.read().unwrap_or_else(PoisonError::into_inner)) {
            return;
        }
        let mut by_peer = self.by_peer.write().unwrap_or_else(PoisonError::into_inner);
        if !find(&by_peer) {
            by_peer.push(PeerCounters {
                name: Arc::clone(name),
                read: AtomicU64::new(0),
                written: AtomicU64::new(0),
            });
            find(&by_peer);
        }
    }
}

impl Dma {
    pub(crate) fn new(peers: Option<Peers>) -> Self {
        Self {
            shared: Arc::new(Shared {
                peers,
                ..Shared::default()
            }),
            abort_epoch: None,
            own_counters: None,
        }
    }

    /// The counters that this handle reports.
    fn counters(&self) -> &Counters {
        self.own_counters.as_deref().unwrap_or(&self.shared.total)
    }

    /// Bytes transferred: by all handles, or by this one and its clones if [`Dma::tallied`] returned it.
    pub fn counts(&self) -> DmaCounts {
        self.counters().counts()
    }

    /// As [`Dma::counts`], by name of the target: [`HOST`], each peer's name, [`OTHER_MAPPED`] and [`MESSAGE`]. A peer
    /// is present from its first byte on, the others always.
    pub fn by_target(&self) -> BTreeMap<String, Moved> {
        self.counters().by_target()
    }

    /// Sets the counters to 0 that [`Dma::counts`] returns.
    pub fn reset_counts(&self) {
        self.counters().reset();
    }

    /// Ends every transfer in progress, and makes every later transfer of existing [`Dma::pinned`] handles fail.
    pub fn abort(&self) {
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        // Taking the lock makes sure that no waiter is between its check of the epoch and its sleep.
        drop(self.connection());
        self.shared.connection_changed.notify_all();
    }

    /// Returns a handle whose transfers fail with [`DmaError::Aborted`] after the next [`Dma::abort`], for work that a
    /// reset must end.
    pub fn pinned(&self) -> Self {
        Self {
            abort_epoch: Some(self.epoch()),
            ..self.clone()
        }
    }

    /// Returns a handle with counters of its own that start at 0, for one of several kinds of transfers that run concurrently.
    /// Its transfers count in the total too.
    pub fn tallied(&self) -> Self {
        Self {
            own_counters: Some(Arc::default()),
            ..self.clone()
        }
    }

    fn epoch(&self) -> u64 {
        self.abort_epoch
            .unwrap_or_else(|| self.shared.epoch.load(Ordering::SeqCst))
    }

    fn lock_tables(&self) -> LockedTables<'_> {
        // Lock order: DMA table, peer table. Neither is held while a thread waits for the client.
        let table = self.shared.table.read().unwrap_or_else(PoisonError::into_inner);
        let peers = self.shared.peers.as_ref().map(Peers::read);
        LockedTables { table, peers }
    }

    /// Returns the segments of `len` bytes from `address` on, in order of address.
    ///
    /// # Errors
    ///
    /// [`DmaError::Unreachable`] if the range exceeds the 64-bit address space.
    pub fn segments(&self, address: u64, len: u64) -> Result<Vec<Segment>, DmaError> {
        check_range(address, len)?;
        let tables = self.lock_tables();
        let mut segments: Vec<Segment> = Vec::new();
        let mut done = 0;
        while done < len {
            let at = address + done;
            let Lookup { run, target, .. } = tables.find(at, len - done);
            match segments.last_mut() {
                Some(last) if last.target == target => last.len += run,
                _ => segments.push(Segment {
                    address: at,
                    len: run,
                    target,
                }),
            }
            done += run;
        }
        Ok(segments)
    }

    /// Reads from the bus.
    ///
    /// # Errors
    ///
    /// See [`DmaError`].
    pub fn read(&self, address: u64, data: &mut [u8]) -> Result<(), DmaError> {
        let len = data.len() as u64;
        self.read_extents(&[Extent { address, len }], data)
    }

    /// Writes to the bus.
    ///
    /// # Errors
    ///
    /// See [`DmaError`].
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), DmaError> {
        let len = data.len() as u64;
        self.write_extents(&[Extent { address, len }], data)
    }

    /// Reads ranges one after another, `data.len()` bytes in total.
    ///
    /// # Errors
    ///
    /// See [`DmaError`]; [`DmaError::Local`] if the total length of the ranges is not that of `data`.
    pub fn read_extents(&self, extents: &[Extent], data: &mut [u8]) -> Result<(), DmaError> {
        check_total(extents, data.len() as u64)?;
        self.transfer(extents, Direction::Read, |at, len, chunk| {
            // No truncation: both lie within `data`.
            let data = &mut data[at as usize..][..len as usize];
            match chunk {
                Chunk::Mapped { mapping, offset } => Ok(mapping.read(offset, data)?),
                Chunk::Message { address } => self.message_read(address, data),
            }
        })
    }

    /// Reads ranges one after another and appends their bytes to `out`. On an error, `out` has the bytes that were read
    /// before.
    ///
    /// # Errors
    ///
    /// See [`DmaError`].
    pub fn append_extents(&self, extents: &[Extent], out: &mut Vec<u8>) -> Result<(), DmaError> {
        self.transfer(extents, Direction::Read, |_, len, chunk| match chunk {
            // No truncation: a chunk has at most `COPY_CHUNK` bytes.
            Chunk::Mapped { mapping, offset } => Ok(mapping.append(offset, len as usize, out)?),
            Chunk::Message { address } => {
                let start = out.len();
                out.resize(start + len as usize, 0);
                let result = self.message_read(address, &mut out[start..]);
                if result.is_err() {
                    out.truncate(start);
                }
                result
            }
        })
    }

    /// Writes ranges one after another, `data.len()` bytes in total.
    ///
    /// # Errors
    ///
    /// See [`DmaError`]; [`DmaError::Local`] if the total length of the ranges is not that of `data`.
    pub fn write_extents(&self, extents: &[Extent], data: &[u8]) -> Result<(), DmaError> {
        check_total(extents, data.len() as u64)?;
        self.transfer(extents, Direction::Write, |at, len, chunk| {
            // No truncation: both lie within `data`.
            let data = &data[at as usize..][..len as usize];
            match chunk {
                Chunk::Mapped { mapping, offset } => Ok(mapping.write(offset, data)?),
                Chunk::Message { address } => self.message_write(address, data),
            }
        })
    }

    /// Reads `len` bytes from the bus into `memory` at `offset`.
    ///
    /// # Errors
    ///
    /// See [`DmaError`].
    pub fn read_into(&self, address: u64, memory: &Memory, offset: u64, len: u64) -> Result<(), DmaError> {
        check_local(memory, offset, len)?;
        let mut buffer = Vec::new();
        self.transfer(
            &[Extent { address, len }],
            Direction::Read,
            |at, len, chunk| match chunk {
                Chunk::Mapped { mapping, offset: from } => {
                    Ok(SharedMapping::copy(mapping, from, memory.mapping(), offset + at, len)?)
                }
                Chunk::Message { address } => {
                    buffer.resize(len as usize, 0);
                    self.message_read(address, &mut buffer)?;
                    Ok(memory.write(offset + at, &buffer)?)
                }
            },
        )
    }

    /// Writes `len` bytes of `memory` at `offset` to the bus.
    ///
    /// # Errors
    ///
    /// See [`DmaError`].
    pub fn write_from(&self, address: u64, memory: &Memory, offset: u64, len: u64) -> Result<(), DmaError> {
        check_local(memory, offset, len)?;
        let mut buffer = Vec::new();
        self.transfer(
            &[Extent { address, len }],
            Direction::Write,
            |at, len, chunk| match chunk {
                Chunk::Mapped { mapping, offset: to } => {
                    Ok(SharedMapping::copy(memory.mapping(), offset + at, mapping, to, len)?)
                }
                Chunk::Message { address } => {
                    buffer.resize(len as usize, 0);
                    memory.read(offset + at, &mut buffer)?;
                    self.message_write(address, &buffer)
                }
            },
        )
    }

    /// Replaces the little-endian 64-bit number at `address` by `change` of it, and returns the old value. `change` may
    /// be called more than once.
    ///
    /// If the memory is mapped in this process, the operation is atomic against other devices and processors. If the
    /// memory is accessed by messages, the operation is atomic only against other calls of this function in this
    /// process.
    ///
    /// # Errors
    ///
    /// See [`DmaError`]; [`DmaError::Misaligned`] if the address is not divisible by 8.
    pub fn update(&self, address: u64, mut change: impl FnMut(u64) -> u64) -> Result<u64, DmaError> {
        /// Held from the DMA_READ message to the DMA_WRITE message.
        static BY_MESSAGE: Mutex<()> = Mutex::new(());

        if address % 8 != 0 {
            return Err(DmaError::Misaligned(address));
        }
        let mut old = 0;
        self.transfer(&[Extent { address, len: 8 }], Direction::Update, |_, len, chunk| {
            if len != 8 {
                // The 8 bytes are in two mappings.
                return Err(DmaError::Misaligned(address));
            }
            old = match chunk {
                Chunk::Mapped { mapping, offset } => {
                    let old = mapping.update(offset, &mut change)?;
                    old.ok_or(DmaError::Misaligned(address))?
                }
                Chunk::Message { address } => {
                    let _only = BY_MESSAGE.lock().unwrap_or_else(PoisonError::into_inner);
                    let mut bytes = [0; 8];
                    self.message_read(address, &mut bytes)?;
                    let old = u64::from_le_bytes(bytes);
                    self.message_write(address, &change(old).to_le_bytes())?;
                    old
                }
            };
            Ok(())
        })?;
        Ok(old)
    }

    /// Splits ranges at the borders of mappings, and calls `step` for each chunk with its position in the transfer, its
    /// length and its location.
    fn transfer(
        &self,
        extents: &[Extent],
        direction: Direction,
        mut step: impl FnMut(u64, u64, Chunk<'_>) -> Result<(), DmaError>,
    ) -> Result<(), DmaError> {
        for extent in extents {
            check_range(extent.address, extent.len)?;
        }
        let epoch = self.epoch();
        let mut position = 0;
        let mut tables: Option<LockedTables<'_>> = None;
        // Bytes that may be copied before the tables are unlocked once.
        let mut budget = COPY_CHUNK;
        for extent in extents {
            let mut done = 0;
            while done < extent.len {
                if self.shared.epoch.load(Ordering::SeqCst) != epoch {
                    return Err(DmaError::Aborted);
                }
                if !self.shared.bus_master.load(Ordering::SeqCst) {
                    return Err(DmaError::BusMasterOff);
                }
                let address = extent.address + done;
                let lookup = tables
                    .get_or_insert_with(|| self.lock_tables())
                    .find(address, extent.len - done);
                let permitted = match direction {
                    Direction::Read => lookup.readable,
                    Direction::Write => lookup.writable,
                    Direction::Update => lookup.readable && lookup.writable,
                };
                if !permitted {
                    return Err(DmaError::Denied(address));
                }
                let moved = if let Some((mapping, offset)) = lookup.memory {
                    let run = lookup.run.min(budget);
                    step(position, run, Chunk::Mapped { mapping, offset })?;
                    self.count(lookup.target, lookup.name, direction, run);
                    budget -= run;
                    if budget == 0 {
                        budget = COPY_CHUNK;
                        tables = None;
                    }
                    run
                } else {
                    let run = lookup.run;
                    tables = None;
                    let run = run.min(self.message_chunk());
                    step(position, run, Chunk::Message { address })?;
                    self.count(Target::Message, None, direction, run);
                    run
                };
                done += moved;
                position += moved;
            }
        }
        drop(tables);
        // Later stores, such as an interrupt or a flag that the guest polls, must not become visible before the data.
        std::sync::atomic::fence(Ordering::SeqCst);
        Ok(())
    }

    fn count(&self, target: Target, name: Option<&Arc<str>>, direction: Direction, bytes: u64) {
        self.shared.total.count(target, name, direction, bytes);
        if let Some(counters) = &self.own_counters {
            counters.count(target, name, direction, bytes);
        }
    }

    // The following functions are called on the serving thread.

    /// The client has disconnected: transfers fail, and all mappings are removed.
    pub(crate) fn disconnect(&self) {
        self.close_connection();
        self.table_mut(DmaTable::reset);
    }

    /// Records that the client has sent its initial mappings. A memfd that the client maps for the first time after this
    /// call is not guest memory, except at address 0.
    pub(crate) fn end_initial_maps(&self) {
        self.table_mut(DmaTable::end_initial_maps);
    }

    pub(crate) fn set_bus_master(&self, on: bool) {
        self.shared.bus_master.store(on, Ordering::SeqCst);
    }

    /// Changes the table. Waits for copies in progress, which hold the lock for reading.
    fn table_mut<T>(&self, change: impl FnOnce(&mut DmaTable) -> T) -> T {
        change(&mut self.shared.table.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Handles DMA_MAP: adds a mapping.
    pub(crate) fn map(&self, request: &proto::DmaMap, fd: Option<OwnedFd>) -> Result<(), Errno> {
        last_address(request.address, request.size)?;
        if request.flags & !(proto::DMA_READABLE | proto::DMA_WRITABLE) != 0 {
            return Err(Errno::INVAL);
        }
        let writable = request.flags & proto::DMA_WRITABLE != 0;
        let file = match fd {
            Some(fd) => Some(MappedFile::new(&fd, request.offset, request.size, writable)?),
            None => None,
        };
        self.table_mut(|table| table.map(request, file))
    }

    /// Handles DMA_UNMAP: removes all mappings in the range. Fails with `EINVAL` if a mapping is only partly in the
    /// range.
    pub(crate) fn unmap(&self, address: u64, size: u64) -> Result<(), Errno> {
        self.table_mut(|table| table.unmap(address, size))
    }

    /// Removes all mappings.
    pub(crate) fn unmap_all(&self) {
        self.table_mut(DmaTable::clear);
    }
}

/// Fails for a range that exceeds the 64-bit address space.
fn check_range(address: u64, len: u64) -> Result<(), DmaError> {
    if len != 0 && address.checked_add(len - 1).is_none() {
        return Err(DmaError::Unreachable(address));
    }
    Ok(())
}

fn check_local(memory: &Memory, offset: u64, len: u64) -> Result<(), OutOfBounds> {
    match offset.checked_add(len) {
        Some(end) if end <= memory.len() => Ok(()),
        _ => Err(OutOfBounds),
    }
}

fn check_total(extents: &[Extent], len: u64) -> Result<(), OutOfBounds> {
    let total = extents
        .iter()
        .try_fold(0_u64, |sum, extent| sum.checked_add(extent.len));
    if total == Some(len) { Ok(()) } else { Err(OutOfBounds) }
}

impl From<DmaError> for io::Error {
    fn from(error: DmaError) -> Self {
        io::Error::other(error)
    }
}
