// SPDX-License-Identifier: MIT OR Apache-2.0

//! DMA by the device: bus addresses, what is behind them, and how it is reached.
//!
//! Memory that came with a descriptor is mapped and copied. Everything else (a peer's BAR behind another process, memory
//! the client emulates, or nothing at all) is asked for by messages, which the client carries out as the device's own
//! accesses on its bus. Such messages are short, one at a time, and wait while the client's register access is being
//! answered: the client may process them only after it.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use tracing::{debug, warn};
use zerocopy::{FromBytes, IntoBytes};

use crate::memory::{Memory, OutOfBounds};
use crate::proto::{self, DmaAccess, HEADER, Header, command, message};
use crate::stream;
use crate::sys::Window;

/// Most bytes in one message; longer replies have been seen to break the client.
const MESSAGE_CHUNK: u64 = 64 << 10;
/// Most bytes copied while the table of mappings is held, so that an unmapping waits only shortly.
const COPY_CHUNK: u64 = 1 << 20;
/// How long a message may take from being wanted to being answered.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// Most mappings at once, as announced to the client.
pub(crate) const MAX_MAPS: usize = 65535;

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
    /// The client answered with an error or with something else than asked for.
    #[error("access to {0:#x} failed with errno {1}")]
    Failed(u64, i32),
    /// [`Dma::abort`] was called.
    #[error("aborted")]
    Aborted,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    /// From the bus to the device.
    Read,
    /// From the device to the bus.
    Write,
}

#[derive(Debug)]
struct Map {
    last: u64,
    readable: bool,
    writable: bool,
    /// The memory, if it came with a descriptor.
    window: Option<(Window, FileId)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct FileId {
    device: u64,
    inode: u64,
}

#[derive(Debug, Default)]
struct Table {
    /// By first address; no two overlap.
    maps: BTreeMap<u64, Map>,
    /// Files known to hold guest memory.
    host: HashSet<FileId>,
    /// The client has told of its memory and goes on with the device: what comes now may be anything.
    settled: bool,
}

impl Table {
    /// What is at `address`: the mapping, if any, and how many of `len` bytes have that answer.
    fn find(&self, address: u64, len: u64) -> (Option<(u64, &Map)>, u64) {
        if let Some((start, map)) = self.maps.range(..=address).next_back() {
            if address <= map.last {
                return (Some((*start, map)), len.min((map.last - address).saturating_add(1)));
            }
        }
        let free = self
            .maps
            .range(address..)
            .next()
            .map_or(len, |(start, _)| start - address);
        (None, len.min(free))
    }

    fn target(&self, map: Option<&Map>) -> Target {
        match map.and_then(|map| map.window.as_ref()) {
            Some((_, file)) if self.host.contains(file) => Target::Host,
            Some(_) => Target::Peer,
            None => Target::Message,
        }
    }
}

#[derive(Debug)]
struct Outstanding {
    id: u16,
    reply: Option<(Header, Vec<u8>)>,
}

/// The way to the client, shared by the serving thread and those that do DMA.
#[derive(Debug, Default)]
struct Link {
    stream: Option<Arc<UnixStream>>,
    server: Option<ThreadId>,
    /// A command of the client is being carried out and not answered yet.
    busy: bool,
    outstanding: Option<Outstanding>,
    next_id: u16,
    max_transfer: u64,
}

#[derive(Debug, Default)]
struct Shared {
    table: RwLock<Table>,
    link: Mutex<Link>,
    changed: Condvar,
    bus_master: AtomicBool,
    epoch: AtomicU64,
    host_read: AtomicU64,
    host_written: AtomicU64,
    peer_read: AtomicU64,
    peer_written: AtomicU64,
    message_read: AtomicU64,
    message_written: AtomicU64,
}

/// Access to bus addresses; clones stand for the same bus.
#[derive(Clone, Debug)]
pub struct Dma {
    shared: Arc<Shared>,
    /// Set where transfers must not outlive an abort.
    pinned: Option<u64>,
}

/// A part of a transfer: where the bytes are on the bus side.
enum Part<'a> {
    Mapped { window: &'a Window, offset: u64 },
    Message { address: u64 },
}

impl Dma {
    pub(crate) fn new() -> Self {
        Self {
            shared: Arc::default(),
            pinned: None,
        }
    }

    /// Bytes moved so far.
    pub fn counts(&self) -> DmaCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DmaCounts {
            host_read: get(&self.shared.host_read),
            host_written: get(&self.shared.host_written),
            peer_read: get(&self.shared.peer_read),
            peer_written: get(&self.shared.peer_written),
            message_read: get(&self.shared.message_read),
            message_written: get(&self.shared.message_written),
        }
    }

    /// Sets the counts to 0.
    pub fn reset_counts(&self) {
        for counter in [
            &self.shared.host_read,
            &self.shared.host_written,
            &self.shared.peer_read,
            &self.shared.peer_written,
            &self.shared.message_read,
            &self.shared.message_written,
        ] {
            counter.store(0, Ordering::Relaxed);
        }
    }

    /// Ends every transfer under way, and every later one of a handle made by [`Dma::pinned`] before.
    pub fn abort(&self) {
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        // Taken so that no waiter is between its test and its sleep.
        drop(self.link());
        self.shared.changed.notify_all();
    }

    /// A handle that stops working at the next [`Dma::abort`]: for a piece of work that a reset must end for good.
    pub fn pinned(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            pinned: Some(self.epoch()),
        }
    }

    fn epoch(&self) -> u64 {
        self.pinned.unwrap_or_else(|| self.shared.epoch.load(Ordering::SeqCst))
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        self.shared.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells what is behind `len` bytes from `address`, in order.
    ///
    /// # Errors
    ///
    /// [`DmaError::Unreachable`] if the range leaves the address space.
    pub fn segments(&self, address: u64, len: u64) -> Result<Vec<Segment>, DmaError> {
        check_range(address, len)?;
        let table = self.shared.table.read().unwrap_or_else(PoisonError::into_inner);
        let mut segments: Vec<Segment> = Vec::new();
        let mut done = 0;
        while done < len {
            let at = address + done;
            let (map, run) = table.find(at, len - done);
            let target = table.target(map.map(|(_, map)| map));
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
        self.transfer(address, data.len() as u64, Direction::Read, |at, len, part| {
            // Not truncated: both are within `data`.
            let data = &mut data[at as usize..][..len as usize];
            match part {
                Part::Mapped { window, offset } => Ok(window.read(offset, data)?),
                Part::Message { address } => self.message_read(address, data),
            }
        })
    }

    /// Writes to the bus.
    ///
    /// # Errors
    ///
    /// See [`DmaError`].
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), DmaError> {
        self.transfer(address, data.len() as u64, Direction::Write, |at, len, part| {
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
        self.transfer(address, len, Direction::Read, |at, len, part| match part {
            Part::Mapped { window, offset: from } => Ok(Window::copy(window, from, memory.window(), offset + at, len)?),
            Part::Message { address } => {
                buffer.resize(len as usize, 0);
                self.message_read(address, &mut buffer)?;
                Ok(memory.write(offset + at, &buffer)?)
            }
        })
    }

    /// Writes `len` bytes of `memory` at `offset` to the bus.
    ///
    /// # Errors
    ///
    /// See [`DmaError`].
    pub fn write_from(&self, address: u64, memory: &Memory, offset: u64, len: u64) -> Result<(), DmaError> {
        check_local(memory, offset, len)?;
        let mut buffer = Vec::new();
        self.transfer(address, len, Direction::Write, |at, len, part| match part {
            Part::Mapped { window, offset: to } => Ok(Window::copy(memory.window(), offset + at, window, to, len)?),
            Part::Message { address } => {
                buffer.resize(len as usize, 0);
                memory.read(offset + at, &mut buffer)?;
                self.message_write(address, &buffer)
            }
        })
    }

    /// Cuts a range at the borders of mappings, and calls `step` with position, length and place of each part.
    fn transfer(
        &self,
        address: u64,
        len: u64,
        direction: Direction,
        mut step: impl FnMut(u64, u64, Part<'_>) -> Result<(), DmaError>,
    ) -> Result<(), DmaError> {
        check_range(address, len)?;
        let epoch = self.epoch();
        let mut done = 0;
        while done < len {
            if self.shared.epoch.load(Ordering::SeqCst) != epoch {
                return Err(DmaError::Aborted);
            }
            if !self.shared.bus_master.load(Ordering::SeqCst) {
                return Err(DmaError::BusMasterOff);
            }
            let at = address + done;
            let table = self.shared.table.read().unwrap_or_else(PoisonError::into_inner);
            let (found, run) = table.find(at, len - done);
            let target = table.target(found.map(|(_, map)| map));
            if let Some((_, map)) = found {
                let permitted = if direction == Direction::Read {
                    map.readable
                } else {
                    map.writable
                };
                if !permitted {
                    return Err(DmaError::Denied(at));
                }
            }
            let moved = match found {
                Some((
                    start,
                    Map {
                        window: Some((window, _)),
                        ..
                    },
                )) => {
                    let run = run.min(COPY_CHUNK);
                    // The table stays locked while its mapping is in use, so that nothing is unmapped underneath.
                    step(
                        done,
                        run,
                        Part::Mapped {
                            window,
                            offset: at - start,
                        },
                    )?;
                    run
                }
                _ => {
                    drop(table);
                    let run = run.min(self.message_chunk());
                    step(done, run, Part::Message { address: at })?;
                    run
                }
            };
            self.count(target, direction, moved);
            done += moved;
        }
        // What follows, such as an interrupt or a flag the guest polls, must not overtake the data.
        std::sync::atomic::fence(Ordering::SeqCst);
        Ok(())
    }

    fn count(&self, target: Target, direction: Direction, bytes: u64) {
        let shared = &self.shared;
        let counter = match (target, direction) {
            (Target::Host, Direction::Read) => &shared.host_read,
            (Target::Host, Direction::Write) => &shared.host_written,
            (Target::Peer, Direction::Read) => &shared.peer_read,
            (Target::Peer, Direction::Write) => &shared.peer_written,
            (Target::Message, Direction::Read) => &shared.message_read,
            (Target::Message, Direction::Write) => &shared.message_written,
        };
        counter.fetch_add(bytes, Ordering::Relaxed);
    }

    fn message_chunk(&self) -> u64 {
        MESSAGE_CHUNK.min(self.link().max_transfer).max(1)
    }

    fn message_read(&self, address: u64, data: &mut [u8]) -> Result<(), DmaError> {
        let access = DmaAccess {
            address,
            count: data.len() as u64,
        };
        let reply = self.request(command::DMA_READ, address, &[access.as_bytes()])?;
        match DmaAccess::read_from_prefix(&reply) {
            Ok((got, bytes)) if got.count == access.count && bytes.len() == data.len() => {
                data.copy_from_slice(bytes);
                Ok(())
            }
            _ => Err(DmaError::Failed(address, Errno::PROTO.raw_os_error())),
        }
    }

    fn message_write(&self, address: u64, data: &[u8]) -> Result<(), DmaError> {
        let access = DmaAccess {
            address,
            count: data.len() as u64,
        };
        self.request(command::DMA_WRITE, address, &[access.as_bytes(), data])
            .map(drop)
    }

    /// Sends a command to the client and waits for its reply, whose body is returned.
    fn request(&self, command: u16, address: u64, parts: &[&[u8]]) -> Result<Vec<u8>, DmaError> {
        let epoch = self.epoch();
        let deadline = Instant::now() + MESSAGE_TIMEOUT;
        let mut link = self.link();
        if link.server == Some(std::thread::current().id()) {
            return Err(DmaError::WrongThread);
        }
        while link.busy || link.outstanding.is_some() {
            link = self.wait(link, epoch, deadline, address)?;
        }
        self.check_alive(&link, epoch)?;
        let Some(stream) = link.stream.clone() else {
            return Err(DmaError::Disconnected);
        };
        let id = link.next_id;
        link.next_id = link.next_id.wrapping_add(1);
        let bytes = proto::encode(
            Header {
                id,
                command,
                ..Header::default()
            },
            parts,
        );
        // Sent with the lock held: the serving thread then cannot begin with a command in between.
        if let Err(error) = stream::send(&stream, &bytes, &[]) {
            warn!(%error, "a DMA message cannot be sent");
            // Half a message may be on its way; nothing after it could be understood.
            let _ = stream.shutdown(std::net::Shutdown::Both);
            return Err(DmaError::Disconnected);
        }
        link.outstanding = Some(Outstanding { id, reply: None });
        loop {
            match &mut link.outstanding {
                Some(mine) if mine.id == id => {
                    if let Some((header, body)) = mine.reply.take() {
                        link.outstanding = None;
                        drop(link);
                        self.shared.changed.notify_all();
                        return check_reply(&header, body, address);
                    }
                }
                _ => return Err(DmaError::Disconnected),
            }
            link = match self.wait(link, epoch, deadline, address) {
                Ok(link) => link,
                Err(error) => {
                    // A reply that comes later is of nobody's interest.
                    let mut link = self.link();
                    if link.outstanding.as_ref().is_some_and(|mine| mine.id == id) {
                        link.outstanding = None;
                    }
                    drop(link);
                    self.shared.changed.notify_all();
                    return Err(error);
                }
            };
        }
    }

    fn check_alive(&self, link: &Link, epoch: u64) -> Result<(), DmaError> {
        if self.shared.epoch.load(Ordering::SeqCst) != epoch {
            return Err(DmaError::Aborted);
        }
        if link.stream.is_none() {
            return Err(DmaError::Disconnected);
        }
        Ok(())
    }

    fn wait<'a>(
        &'a self,
        link: MutexGuard<'a, Link>,
        epoch: u64,
        deadline: Instant,
        address: u64,
    ) -> Result<MutexGuard<'a, Link>, DmaError> {
        self.check_alive(&link, epoch)?;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            warn!(address = format_args!("{address:#x}"), "no answer to a DMA message");
            return Err(DmaError::Timeout(address));
        }
        let (link, _) = self
            .shared
            .changed
            .wait_timeout(link, left)
            .unwrap_or_else(PoisonError::into_inner);
        self.check_alive(&link, epoch)?;
        Ok(link)
    }

    // What follows is for the serving thread.

    /// A client is there; this thread serves it.
    pub(crate) fn connect(&self, stream: Arc<UnixStream>) {
        let mut link = self.link();
        link.stream = Some(stream);
        link.server = Some(std::thread::current().id());
        link.busy = false;
        link.outstanding = None;
        link.max_transfer = proto::DEFAULT_TRANSFER;
    }

    /// The client is gone: transfers fail, mappings are dropped.
    pub(crate) fn disconnect(&self) {
        *self.link() = Link::default();
        self.shared.changed.notify_all();
        self.unmap_all();
        let mut table = self.shared.table.write().unwrap_or_else(PoisonError::into_inner);
        table.host.clear();
        table.settled = false;
    }

    /// The client has told of all the memory there is at the start.
    pub(crate) fn settle(&self) {
        self.shared
            .table
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .settled = true;
    }

    pub(crate) fn set_max_transfer(&self, bytes: u64) {
        self.link().max_transfer = bytes;
    }

    pub(crate) fn set_bus_master(&self, on: bool) {
        self.shared.bus_master.store(on, Ordering::SeqCst);
    }

    /// From now until the value returned is dropped, no message goes to the client but the serving thread's own.
    pub(crate) fn hold(&self) -> Hold<'_> {
        self.link().busy = true;
        Hold(self)
    }

    /// A reply has arrived.
    pub(crate) fn deliver(&self, header: Header, body: Vec<u8>) {
        let mut link = self.link();
        match &mut link.outstanding {
            Some(waiting) if waiting.id == header.id => waiting.reply = Some((header, body)),
            _ => debug!(id = header.id, "a reply nobody waits for"),
        }
        drop(link);
        self.shared.changed.notify_all();
    }

    /// Makes an address range known.
    pub(crate) fn map(&self, request: &proto::DmaMap, fd: Option<OwnedFd>) -> Result<(), Errno> {
        let last = last_address(request.address, request.size)?;
        if request.flags & !(proto::DMA_READABLE | proto::DMA_WRITABLE) != 0 {
            return Err(Errno::INVAL);
        }
        let readable = request.flags & proto::DMA_READABLE != 0;
        let writable = request.flags & proto::DMA_WRITABLE != 0;
        let window = match fd {
            Some(fd) => Some(map_file(&fd, request.offset, request.size, writable)?),
            None => None,
        };
        let mut table = self.shared.table.write().unwrap_or_else(PoisonError::into_inner);
        if table.maps.len() >= MAX_MAPS {
            return Err(Errno::NOSPC);
        }
        if table
            .maps
            .range(..=last)
            .next_back()
            .is_some_and(|(_, map)| map.last >= request.address)
        {
            return Err(Errno::EXIST);
        }
        let window = window.map(|(window, file, is_memfd)| {
            // The guest's memory is what is at address 0, and the memfds known from the start, before any BAR of a peer
            // can have an address.
            if request.address == 0 || is_memfd && !table.settled {
                table.host.insert(file);
            }
            (window, file)
        });
        table.maps.insert(
            request.address,
            Map {
                last,
                readable,
                writable,
                window,
            },
        );
        Ok(())
    }

    /// Takes away all mappings inside of the range. One that reaches over its border is an error.
    pub(crate) fn unmap(&self, address: u64, size: u64) -> Result<(), Errno> {
        let last = last_address(address, size)?;
        // Waits for copies under way: they hold the table for reading.
        let mut table = self.shared.table.write().unwrap_or_else(PoisonError::into_inner);
        let cut_before = table
            .maps
            .range(..address)
            .next_back()
            .is_some_and(|(_, map)| map.last >= address);
        let cut_after = table
            .maps
            .range(address..=last)
            .next_back()
            .is_some_and(|(_, map)| map.last > last);
        if cut_before || cut_after {
            return Err(Errno::INVAL);
        }
        table.maps.retain(|start, _| !(address..=last).contains(start));
        Ok(())
    }

    /// Takes away all mappings.
    pub(crate) fn unmap_all(&self) {
        let mut table = self.shared.table.write().unwrap_or_else(PoisonError::into_inner);
        table.maps.clear();
    }
}

/// Lets messages go out again when dropped.
pub(crate) struct Hold<'a>(&'a Dma);

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.0.link().busy = false;
        self.0.shared.changed.notify_all();
    }
}

/// Refuses ranges that leave the address space.
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

fn last_address(address: u64, size: u64) -> Result<u64, Errno> {
    size.checked_sub(1)
        .and_then(|rest| address.checked_add(rest))
        .ok_or(Errno::INVAL)
}

fn check_reply(header: &Header, body: Vec<u8>, address: u64) -> Result<Vec<u8>, DmaError> {
    if header.flags & message::ERROR == 0 {
        return Ok(body);
    }
    let errno = i32::try_from(header.error).unwrap_or(i32::MAX);
    Err(match Errno::from_raw_os_error(errno.clamp(1, 4095)) {
        Errno::NODEV | Errno::FAULT | Errno::NXIO => DmaError::Unreachable(address),
        Errno::PERM | Errno::ACCESS => DmaError::Denied(address),
        _ => DmaError::Failed(address, errno),
    })
}

/// Maps a part of a file, which must hold that part, and tells which file it is and whether it is a memfd.
fn map_file(fd: &OwnedFd, offset: u64, size: u64, writable: bool) -> Result<(Window, FileId, bool), Errno> {
    let stat = rustix::fs::fstat(fd)?;
    let end = offset.checked_add(size).ok_or(Errno::INVAL)?;
    // Accesses past a file's end would kill this process; devices have no size and take care of themselves.
    let regular = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
    if regular && u64::try_from(stat.st_size).map_or(true, |have| have < end) {
        return Err(Errno::INVAL);
    }
    let window = Window::map(fd.as_fd(), offset, size, writable)
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL))?;
    let link = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())?;
    let memfd = link.as_bytes().starts_with(b"/memfd:");
    Ok((
        window,
        FileId {
            device: stat.st_dev,
            inode: stat.st_ino,
        },
        memfd,
    ))
}

impl From<DmaError> for io::Error {
    fn from(error: DmaError) -> Self {
        io::Error::other(error)
    }
}

const _: () = assert!(HEADER + size_of::<DmaAccess>() + MESSAGE_CHUNK as usize <= proto::MAX_MESSAGE);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rustix::fs::MemfdFlags;

    fn request(address: u64, size: u64, offset: u64, flags: u32) -> proto::DmaMap {
        proto::DmaMap {
            argsz: 32,
            flags,
            offset,
            address,
            size,
        }
    }

    fn memfd(size: u64) -> OwnedFd {
        let fd = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, size).unwrap();
        fd
    }

    fn file(size: u64) -> OwnedFd {
        // A file without a name that is no memfd, as memory of an ivshmem device is.
        let fd = rustix::fs::open(
            std::env::temp_dir(),
            rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        )
        .unwrap();
        rustix::fs::ftruncate(&fd, size).unwrap();
        fd
    }

    const RW: u32 = proto::DMA_READABLE | proto::DMA_WRITABLE;

    #[test]
    fn moves_across_mappings_and_counts_by_target() {
        let dma = Dma::new();
        dma.set_bus_master(true);
        let ram = memfd(0x4000);
        dma.map(&request(0x1000, 0x1000, 0x2000, RW), Some(ram.try_clone().unwrap()))
            .unwrap();
        dma.map(&request(0x2000, 0x1000, 0x1000, RW), Some(ram.try_clone().unwrap()))
            .unwrap();
        dma.map(&request(0x3000, 0x1000, 0, RW), Some(file(0x1000))).unwrap();
        let data: Vec<u8> = (0..0x2000_u32).map(|i| (i % 251) as u8).collect();
        dma.write(0x1800, &data).unwrap();
        let mut back = vec![0; 0x2000];
        dma.read(0x1800, &mut back).unwrap();
        assert_eq!(back, data);
        let mut raw = vec![0; 0x800];
        rustix::io::pread(&ram, &mut raw, 0x2800).unwrap();
        assert_eq!(raw, data[..0x800]);
        let counts = dma.counts();
        assert_eq!((counts.host_written, counts.peer_written), (0x1800, 0x800));
        assert_eq!(
            (counts.host_read, counts.peer_read, counts.message_read),
            (0x1800, 0x800, 0)
        );
        let memory = Memory::new("device", 0x4000).unwrap();
        dma.read_into(0x1800, &memory, 0x100, 0x2000).unwrap();
        memory.read(0x100, &mut back).unwrap();
        assert_eq!(back, data);
        dma.write_from(0x2000, &memory, 0x100, 0x10).unwrap();
        assert_eq!(
            dma.read_into(0x1800, &memory, 0x2001, 0x2000),
            Err(DmaError::Local(OutOfBounds))
        );
        assert_eq!(
            dma.segments(0x1800, 0x4000).unwrap(),
            [
                Segment {
                    address: 0x1800,
                    len: 0x1800,
                    target: Target::Host
                },
                Segment {
                    address: 0x3000,
                    len: 0x1000,
                    target: Target::Peer
                },
                Segment {
                    address: 0x4000,
                    len: 0x1800,
                    target: Target::Message
                },
            ]
        );
        dma.reset_counts();
        assert_eq!(dma.counts(), DmaCounts::default());
    }

    #[test]
    fn what_is_at_address_0_is_guest_memory() {
        let dma = Dma::new();
        let ram = file(0x2000);
        dma.map(&request(0x10_0000, 0x1000, 0x1000, RW), Some(ram.try_clone().unwrap()))
            .unwrap();
        assert_eq!(dma.segments(0x10_0000, 1).unwrap()[0].target, Target::Peer);
        dma.map(&request(0, 0x1000, 0, RW), Some(ram)).unwrap();
        assert_eq!(dma.segments(0x10_0000, 1).unwrap()[0].target, Target::Host);
    }

    #[test]
    fn memory_that_comes_late_is_a_peers() {
        let dma = Dma::new();
        let ram = memfd(0x2000);
        dma.map(&request(0x1000, 0x1000, 0, RW), Some(ram.try_clone().unwrap()))
            .unwrap();
        dma.settle();
        dma.map(&request(0x8000, 0x1000, 0, RW), Some(memfd(0x1000))).unwrap();
        dma.map(&request(0x9000, 0x1000, 0x1000, RW), Some(ram)).unwrap();
        let target = |address| dma.segments(address, 1).unwrap()[0].target;
        assert_eq!(
            [target(0x1000), target(0x8000), target(0x9000)],
            [Target::Host, Target::Peer, Target::Host]
        );
    }

    #[test]
    fn refusals() {
        let dma = Dma::new();
        let mut data = [0; 16];
        dma.map(&request(0x1000, 0x1000, 0, proto::DMA_READABLE), Some(memfd(0x1000)))
            .unwrap();
        assert_eq!(dma.read(0x1000, &mut data), Err(DmaError::BusMasterOff));
        dma.set_bus_master(true);
        dma.read(0x1000, &mut data).unwrap();
        assert_eq!(dma.write(0x1000, &data), Err(DmaError::Denied(0x1000)));
        assert_eq!(dma.read(0x1ff8, &mut data), Err(DmaError::Disconnected));
        assert_eq!(
            dma.read(u64::MAX - 3, &mut data),
            Err(DmaError::Unreachable(u64::MAX - 3))
        );
        let pinned = dma.pinned();
        pinned.read(0x1000, &mut data).unwrap();
        dma.abort();
        assert_eq!(pinned.read(0x1000, &mut data), Err(DmaError::Aborted));
        dma.read(0x1000, &mut data).unwrap();
    }

    #[test]
    fn bad_mappings() {
        let dma = Dma::new();
        let try_map = |address, size, offset, fd: Option<OwnedFd>| dma.map(&request(address, size, offset, RW), fd);
        assert_eq!(try_map(0, 0, 0, None), Err(Errno::INVAL));
        assert_eq!(try_map(u64::MAX, 2, 0, None), Err(Errno::INVAL));
        assert_eq!(try_map(0, 0x2000, 0, Some(memfd(0x1000))), Err(Errno::INVAL));
        assert_eq!(try_map(0, 0x1000, u64::MAX, Some(memfd(0x1000))), Err(Errno::INVAL));
        assert_eq!(dma.map(&request(0, 1, 0, 4), None), Err(Errno::INVAL));
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(try_map(0, 0x1000, 0, Some(pipe)).is_err());
        try_map(0x1000, 0x1000, 0, None).unwrap();
        for (address, size) in [
            (0x1000, 0x1000),
            (0, 0x1001),
            (0x1fff, 1),
            (0x1800, 0x10),
            (0, u64::MAX),
        ] {
            assert_eq!(
                try_map(address, size, 0, None),
                Err(Errno::EXIST),
                "{address:#x} {size:#x}"
            );
        }
        try_map(0x2000, u64::MAX - 0x1fff, 0, None).unwrap();
        assert_eq!(dma.unmap(0x1000, 0x800), Err(Errno::INVAL));
        assert_eq!(dma.unmap(0x1800, 0x800), Err(Errno::INVAL));
        assert_eq!(dma.unmap(0x1000, 0), Err(Errno::INVAL));
        dma.unmap(0, 0x1000).unwrap();
        dma.unmap(0x1000, 0x1000).unwrap();
        try_map(0x1000, 0x1000, 0, None).unwrap();
        dma.unmap_all();
        try_map(0, u64::MAX, 0, None).unwrap();
    }

    proptest! {
        /// The table agrees with a list searched from end to end.
        #[test]
        fn table_agrees_with_a_list(ops in proptest::collection::vec((any::<bool>(), 0_u64..64, 1_u64..16), 1..60)) {
            let dma = Dma::new();
            let mut list: Vec<(u64, u64)> = Vec::new();
            for (map, start, len) in ops {
                let end = start + len;
                if map {
                    let clash = list.iter().any(|(s, e)| *s < end && start < *e);
                    let result = dma.map(&request(start, len, 0, RW), None);
                    prop_assert_eq!(result, if clash { Err(Errno::EXIST) } else { Ok(()) });
                    if !clash {
                        list.push((start, end));
                    }
                } else {
                    let cut = list.iter().any(|(s, e)| *s < end && start < *e && (*s < start || *e > end));
                    prop_assert_eq!(dma.unmap(start, len), if cut { Err(Errno::INVAL) } else { Ok(()) });
                    if !cut {
                        list.retain(|(s, e)| *s < start || *e > end);
                    }
                }
                let table = dma.shared.table.read().unwrap();
                for address in 0..80 {
                    let inside = list.iter().find(|(s, e)| (*s..*e).contains(&address));
                    let (found, run) = table.find(address, 1000);
                    prop_assert_eq!(found.is_some(), inside.is_some());
                    let free = list.iter().map(|(s, _)| *s).filter(|s| *s > address).min().map_or(1000, |s| s - address);
                    prop_assert_eq!(run, inside.map_or(free, |(_, e)| e - address));
                }
            }
        }
    }
}
