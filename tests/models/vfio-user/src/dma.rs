// SPDX-License-Identifier: MIT OR Apache-2.0

//! DMA by the device: bus addresses, the memory behind them, and the access to it.
//!
//! Memory that came with a descriptor is mapped and copied. Memory without one may belong to another device that this
//! process serves ([`Peers`]), and is copied too. For everything else (a peer's BAR behind another process, memory that the
//! client emulates, or no memory at all) the device sends messages to the client, which accesses the memory as the device
//! would on its bus. Such messages are short and sent one at a time. They wait while the client's register access is being
//! answered, because the client may process them only after the answer.

mod link;
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
use crate::sys::Window;
pub(crate) use table::MAX_MAPS;
use table::{MappedFile, Table, last_address};

/// Most bytes copied while the table of mappings is held, so that an unmapping waits only shortly.
const COPY_CHUNK: u64 = 1 << 20;

/// Class of guest memory in [`Dma::by_target`].
pub const HOST: &str = "host";
/// Class of memory that came with a descriptor and is neither the guest's nor a known peer's in [`Dma::by_target`].
pub const OTHER_MAPPED: &str = "mapped";
/// Class of everything reached by messages in [`Dma::by_target`].
pub const MESSAGE: &str = "message";

/// A range of bus addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First bus address.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
}

/// What is behind a bus address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The guest's memory.
    Host,
    /// A peer's memory that this process has mapped.
    Peer,
    /// Something reached by messages: a peer's BAR, or nothing.
    Message,
}

/// A piece of an address range with one target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First bus address.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// What is there.
    pub target: Target,
}

/// Why a transfer ended early. Bytes before the failing place have been moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DmaError {
    /// The function's bus-master bit is off.
    #[error("bus mastering is off")]
    BusMasterOff,
    /// Nothing answers at the address.
    #[error("nothing answers at {0:#x}")]
    Unreachable(u64),
    /// The target does not permit this access.
    #[error("access to {0:#x} denied")]
    Denied(u64),
    /// The client did not answer in time.
    #[error("no answer for {0:#x} in time")]
    Timeout(u64),
    /// The client answered with an error, or not with the requested data.
    #[error("access to {0:#x} failed with errno {1}")]
    Failed(u64, i32),
    /// [`Dma::abort`] was called.
    #[error("aborted")]
    Aborted,
    /// An atomic access needs a naturally aligned address.
    #[error("atomic access to {0:#x}, which is not aligned")]
    Misaligned(u64),
    /// There is no client.
    #[error("not connected")]
    Disconnected,
    /// A message would be needed on the thread that serves the client, which would wait for itself.
    #[error("DMA by message on the serving thread")]
    WrongThread,
    /// The device's own range does not lie in its memory.
    #[error(transparent)]
    Local(#[from] OutOfBounds),
}

/// Bytes moved, by target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DmaCounts {
    /// Read from guest memory.
    pub host_read: u64,
    /// Written to guest memory.
    pub host_written: u64,
    /// Read from peers' memory mapped here.
    pub peer_read: u64,
    /// Written to peers' memory mapped here.
    pub peer_written: u64,
    /// Read by messages.
    pub message_read: u64,
    /// Written by messages.
    pub message_written: u64,
}

/// Bytes moved from and to one target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Read from it.
    pub read: u64,
    /// Written to it.
    pub written: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    /// From the bus to the device.
    Read,
    /// From the device to the bus.
    Write,
    /// Both at once.
    Update,
}

/// What was moved from and to one peer.
#[derive(Debug)]
struct Named {
    name: Arc<str>,
    read: AtomicU64,
    written: AtomicU64,
}

/// What was moved, by target.
#[derive(Debug, Default)]
struct Tally {
    host_read: AtomicU64,
    host_written: AtomicU64,
    /// All peers together.
    peer_read: AtomicU64,
    peer_written: AtomicU64,
    message_read: AtomicU64,
    message_written: AtomicU64,
    /// The peers known by name, each in `peer_read` and `peer_written` as well.
    named: RwLock<Vec<Named>>,
}

#[derive(Debug, Default)]
struct Shared {
    table: RwLock<Table>,
    peers: Option<Peers>,
    link: Mutex<link::Link>,
    changed: Condvar,
    bus_master: AtomicBool,
    epoch: AtomicU64,
    /// Of all handles together.
    total: Tally,
}

/// Access to bus addresses; clones stand for the same bus.
#[derive(Clone, Debug)]
pub struct Dma {
    shared: Arc<Shared>,
    /// Set where transfers must not outlive an abort.
    pinned: Option<u64>,
    /// Set where transfers are counted on their own as well.
    own: Option<Arc<Tally>>,
}

/// A part of a transfer: where the bytes are on the bus side.
enum Part<'a> {
    Mapped { window: &'a Window, offset: u64 },
    Message { address: u64 },
}

/// The maps of the bus, held so that nothing is unmapped or moved underneath a copy.
struct Held<'a> {
    table: RwLockReadGuard<'a, Table>,
    peers: Option<RwLockReadGuard<'a, peers::Table>>,
}

/// What is at an address.
struct Place<'a> {
    /// How many bytes have this answer.
    run: u64,
    /// What the client permits; everything where it said nothing.
    readable: bool,
    writable: bool,
    target: Target,
    /// The memory and the offset in it, if it is mapped here.
    memory: Option<(&'a Window, u64)>,
    /// The peer's name, if it is a known one.
    name: Option<&'a Arc<str>>,
}

impl Held<'_> {
    fn find(&self, address: u64, len: u64) -> Place<'_> {
        let (found, run) = self.table.find(address, len);
        let mut place = Place {
            run,
            readable: true,
            writable: true,
            target: Target::Message,
            memory: None,
            name: None,
        };
        let Some((start, map)) = found else { return place };
        (place.readable, place.writable) = (map.readable, map.writable);
        match (&map.window, &self.peers) {
            (Some((window, file)), peers) => {
                place.memory = Some((window, address - start));
                if self.table.is_host(file) {
                    place.target = Target::Host;
                } else {
                    place.target = Target::Peer;
                    let peer = peers.as_ref().and_then(|peers| peers.by_file(file));
                    place.name = peer.map(|peer| &peer.name);
                }
            }
            (None, Some(peers)) => {
                let (peer, run) = peers.find(address, run);
                place.run = run;
                if let Some((peer, offset)) = peer {
                    place.target = Target::Peer;
                    place.memory = Some((peer.memory.window(), offset));
                    place.name = Some(&peer.name);
                }
            }
            (None, None) => {}
        }
        place
    }
}

impl Tally {
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
        let named = self.named.read().unwrap_or_else(PoisonError::into_inner);
        let mut all = BTreeMap::new();
        let mut known = Moved::default();
        for peer in named.iter() {
            let moved = Moved {
                read: peer.read.load(Ordering::Relaxed),
                written: peer.written.load(Ordering::Relaxed),
            };
            known.read += moved.read;
            known.written += moved.written;
            all.insert(peer.name.to_string(), moved);
        }
        drop(named);
        let counts = self.counts();
        let mut insert = |name: &str, read, written| all.insert(name.to_owned(), Moved { read, written });
        insert(HOST, counts.host_read, counts.host_written);
        insert(MESSAGE, counts.message_read, counts.message_written);
        // The names were counted before the sum, which is therefore never the smaller one.
        insert(
            OTHER_MAPPED,
            counts.peer_read.saturating_sub(known.read),
            counts.peer_written.saturating_sub(known.written),
        );
        all
    }

    fn reset(&self) {
        self.named.write().unwrap_or_else(PoisonError::into_inner).clear();
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
        let find = |peers: &[Named]| match peers.iter().find(|peer| peer.name == *name) {
            Some(peer) => {
                add(&peer.read, &peer.written);
                true
            }
            None => false,
        };
        if find(&self.named.read().unwrap_or_else(PoisonError::into_inner)) {
            return;
        }
        let mut named = self.named.write().unwrap_or_else(PoisonError::into_inner);
        if !find(&named) {
            named.push(Named {
                name: Arc::clone(name),
                read: AtomicU64::new(0),
                written: AtomicU64::new(0),
            });
            find(&named);
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
            pinned: None,
            own: None,
        }
    }

    /// The tally of this handle.
    fn tally(&self) -> &Tally {
        self.own.as_deref().unwrap_or(&self.shared.total)
    }

    /// Bytes moved so far: by all handles, or by this one and its clones if it was made by [`Dma::tallied`].
    pub fn counts(&self) -> DmaCounts {
        self.tally().counts()
    }

    /// As [`Dma::counts`], by what the bytes were moved from and to: [`HOST`], each peer by its name, [`OTHER_MAPPED`] and
    /// [`MESSAGE`]. Peers appear with the first byte, the others always.
    pub fn by_target(&self) -> BTreeMap<String, Moved> {
        self.tally().by_target()
    }

    /// Sets the counts to 0 that [`Dma::counts`] returns.
    pub fn reset_counts(&self) {
        self.tally().reset();
    }

    /// Ends every transfer in flight, and every later one of a handle that [`Dma::pinned`] returned before.
    pub fn abort(&self) {
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        // Taken so that no waiter is between its test and its sleep.
        drop(self.link());
        self.shared.changed.notify_all();
    }

    /// Returns a handle that fails permanently after the next [`Dma::abort`]: for work that a reset must end.
    pub fn pinned(&self) -> Self {
        Self {
            pinned: Some(self.epoch()),
            ..self.clone()
        }
    }

    /// A handle whose transfers are also counted on their own, from 0 on: for one kind of transfers among several that
    /// run at the same time.
    pub fn tallied(&self) -> Self {
        Self {
            own: Some(Arc::default()),
            ..self.clone()
        }
    }

    fn epoch(&self) -> u64 {
        self.pinned.unwrap_or_else(|| self.shared.epoch.load(Ordering::SeqCst))
    }

    fn hold_maps(&self) -> Held<'_> {
        // Always in this order, and never held while waiting for the client.
        let table = self.shared.table.read().unwrap_or_else(PoisonError::into_inner);
        let peers = self.shared.peers.as_ref().map(Peers::read);
        Held { table, peers }
    }

    /// Returns the memory of `len` bytes from `address`, in order.
    ///
    /// # Errors
    ///
    /// [`DmaError::Unreachable`] if the range ends beyond the address space.
    pub fn segments(&self, address: u64, len: u64) -> Result<Vec<Segment>, DmaError> {
        check_range(address, len)?;
        let held = self.hold_maps();
        let mut segments: Vec<Segment> = Vec::new();
        let mut done = 0;
        while done < len {
            let at = address + done;
            let Place { run, target, .. } = held.find(at, len - done);
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

    /// Reads ranges one after another, `data.len()` bytes in all.
    ///
    /// # Errors
    ///
    /// See [`DmaError`]; [`DmaError::Local`] if the ranges are not as long as `data`.
    pub fn read_extents(&self, extents: &[Extent], data: &mut [u8]) -> Result<(), DmaError> {
        check_total(extents, data.len() as u64)?;
        self.transfer(extents, Direction::Read, |at, len, part| {
            // Not truncated: both are within `data`.
            let data = &mut data[at as usize..][..len as usize];
            match part {
                Part::Mapped { window, offset } => Ok(window.read(offset, data)?),
                Part::Message { address } => self.message_read(address, data),
            }
        })
    }

    /// Reads ranges one after another and appends what they hold to `out`. On an error, what was read before it is there.
    ///
    /// # Errors
    ///
    /// See [`DmaError`].
    pub fn append_extents(&self, extents: &[Extent], out: &mut Vec<u8>) -> Result<(), DmaError> {
        self.transfer(extents, Direction::Read, |_, len, part| match part {
            // Not truncated: a part is a megabyte at most.
            Part::Mapped { window, offset } => Ok(window.append(offset, len as usize, out)?),
            Part::Message { address } => {
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

    /// Writes ranges one after another, `data.len()` bytes in all.
    ///
    /// # Errors
    ///
    /// See [`DmaError`]; [`DmaError::Local`] if the ranges are not as long as `data`.
    pub fn write_extents(&self, extents: &[Extent], data: &[u8]) -> Result<(), DmaError> {
        check_total(extents, data.len() as u64)?;
        self.transfer(extents, Direction::Write, |at, len, part| {
            // Not truncated: both are within `data`.
            let data = &data[at as usize..][..len as usize];
            match part {
                Part::Mapped { window, offset } => Ok(window.write(offset, data)?),
                Part::Message { address } => self.message_write(address, data),
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
            |at, len, part| match part {
                Part::Mapped { window, offset: from } => {
                    Ok(Window::copy(window, from, memory.window(), offset + at, len)?)
                }
                Part::Message { address } => {
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
            |at, len, part| match part {
                Part::Mapped { window, offset: to } => Ok(Window::copy(memory.window(), offset + at, window, to, len)?),
                Part::Message { address } => {
                    buffer.resize(len as usize, 0);
                    memory.read(offset + at, &mut buffer)?;
                    self.message_write(address, &buffer)
                }
            },
        )
    }

    /// Changes the 8 bytes at `address`, a little-endian number, and returns what they were. Where the memory is mapped
    /// here, no access of another device or of a processor comes in between; where it is reached by messages, only no
    /// other such change by a device of this process. `change` may be called more than once.
    ///
    /// # Errors
    ///
    /// See [`DmaError`]; [`DmaError::Misaligned`] if the address is not divisible by 8.
    pub fn update(&self, address: u64, mut change: impl FnMut(u64) -> u64) -> Result<u64, DmaError> {
        /// Held from reading to writing by message.
        static BY_MESSAGE: Mutex<()> = Mutex::new(());

        if address % 8 != 0 {
            return Err(DmaError::Misaligned(address));
        }
        let mut old = 0;
        self.transfer(&[Extent { address, len: 8 }], Direction::Update, |_, len, part| {
            if len != 8 {
                // Half of it is somewhere else.
                return Err(DmaError::Misaligned(address));
            }
            old = match part {
                Part::Mapped { window, offset } => {
                    let old = window.update(offset, &mut change)?;
                    old.ok_or(DmaError::Misaligned(address))?
                }
                Part::Message { address } => {
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

    /// Cuts ranges at the borders of mappings, and calls `step` with position in the whole, length and place of each part.
    fn transfer(
        &self,
        extents: &[Extent],
        direction: Direction,
        mut step: impl FnMut(u64, u64, Part<'_>) -> Result<(), DmaError>,
    ) -> Result<(), DmaError> {
        for extent in extents {
            check_range(extent.address, extent.len)?;
        }
        let epoch = self.epoch();
        let mut position = 0;
        let mut held: Option<Held<'_>> = None;
        // What may be copied until the maps are let go for a moment.
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
                let place = held
                    .get_or_insert_with(|| self.hold_maps())
                    .find(address, extent.len - done);
                let permitted = match direction {
                    Direction::Read => place.readable,
                    Direction::Write => place.writable,
                    Direction::Update => place.readable && place.writable,
                };
                if !permitted {
                    return Err(DmaError::Denied(address));
                }
                let moved = if let Some((window, offset)) = place.memory {
                    let run = place.run.min(budget);
                    step(position, run, Part::Mapped { window, offset })?;
                    self.count(place.target, place.name, direction, run);
                    budget -= run;
                    if budget == 0 {
                        budget = COPY_CHUNK;
                        held = None;
                    }
                    run
                } else {
                    let run = place.run;
                    held = None;
                    let run = run.min(self.message_chunk());
                    step(position, run, Part::Message { address })?;
                    self.count(Target::Message, None, direction, run);
                    run
                };
                done += moved;
                position += moved;
            }
        }
        drop(held);
        // What follows, such as an interrupt or a flag the guest polls, must not overtake the data.
        std::sync::atomic::fence(Ordering::SeqCst);
        Ok(())
    }

    fn count(&self, target: Target, name: Option<&Arc<str>>, direction: Direction, bytes: u64) {
        self.shared.total.count(target, name, direction, bytes);
        if let Some(own) = &self.own {
            own.count(target, name, direction, bytes);
        }
    }

    // What follows is for the serving thread.

    /// The client is gone: transfers fail, mappings are dropped.
    pub(crate) fn disconnect(&self) {
        self.hang_up();
        self.table_mut(Table::forget);
    }

    /// Records that the client has mapped all memory that exists at the start.
    pub(crate) fn settle(&self) {
        self.table_mut(Table::settle);
    }

    pub(crate) fn set_bus_master(&self, on: bool) {
        self.shared.bus_master.store(on, Ordering::SeqCst);
    }

    /// Changes the table. Waits for copies in progress, which hold the table's lock for reading.
    fn table_mut<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        change(&mut self.shared.table.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes an address range known.
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

    /// Takes away all mappings inside of the range. One that reaches over its border is an error.
    pub(crate) fn unmap(&self, address: u64, size: u64) -> Result<(), Errno> {
        self.table_mut(|table| table.unmap(address, size))
    }

    /// Takes away all mappings.
    pub(crate) fn unmap_all(&self) {
        self.table_mut(Table::clear);
    }
}

/// Refuses ranges that end beyond the address space.
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
