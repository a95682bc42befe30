// SPDX-License-Identifier: MIT OR Apache-2.0

//! DMA by the device: bus addresses, the memory behind them, and the access to it.
//!
//! Memory that the client maps with a file descriptor is mapped in this process and copied. Memory that the client maps
//! without one, or cannot map, may belong to a device that this process serves ([`Peers`]); it is copied too. All other addresses (BARs
//! of devices of other processes, memory that the client emulates, unmapped addresses) are accessed by DMA_READ and
//! DMA_WRITE messages, which the client executes as accesses of the device on its bus. Such messages are short, sent
//! one at a time, and wait while a register access of the client is being answered, because the client may process them
//! only after the reply.

mod connection;
mod counters;
mod table;
#[cfg(test)]
mod tests;
mod transfer;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, RwLockReadGuard};

use rustix::io::Errno;

use crate::memory::OutOfBounds;
use crate::peers::{self, Peers};
use crate::proto;
use crate::sys::SharedMapping;
use counters::Counters;
pub use counters::{DmaCounts, HOST, MESSAGE, Moved, OTHER_MAPPED};
pub(crate) use table::MAX_MAPS;
use table::{DmaTable, MappedFile, last_address};

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

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    /// From the bus to the device.
    Read,
    /// From the device to the bus.
    Write,
    /// Atomic read and write.
    Update,
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

/// Numbers of aborts: of all handles, and of those that [`Dma::abort_separate`] ends. A transfer ends when one changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Epoch {
    all: u64,
    own: u64,
}

/// Access to bus addresses. Clones access the same bus.
#[derive(Clone, Debug)]
pub struct Dma {
    shared: Arc<Shared>,
    /// If set, transfers fail with [`DmaError::Aborted`] once the epoch differs from this one.
    abort_epoch: Option<Epoch>,
    /// If set, the number of calls of [`Dma::abort_separate`] of this handle and its clones.
    own_epoch: Option<Arc<AtomicU64>>,
    /// If set, counters of this handle and its clones, in addition to the total.
    own_counters: Option<Arc<Counters>>,
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
        let Some((start, mapping)) = found else {
            self.find_peer(&mut lookup, address, false);
            return lookup;
        };
        (lookup.readable, lookup.writable) = (mapping.readable, mapping.writable);
        match &mapping.memory {
            Some((mapping, file)) => {
                lookup.memory = Some((mapping, address - start));
                if self.table.is_host(file) {
                    lookup.target = Target::Host;
                } else {
                    lookup.target = Target::Peer;
                    let peer = self.peers.as_ref().and_then(|peers| peers.by_file(file));
                    lookup.name = peer.map(|peer| &peer.name);
                }
            }
            None => self.find_peer(&mut lookup, address, true),
        }
        lookup
    }

    /// Completes a lookup with the peer at `address`, which the client has mapped without a file descriptor if `mapped` is set.
    fn find_peer<'a>(&'a self, lookup: &mut Lookup<'a>, address: u64, mapped: bool) {
        let Some(peers) = &self.peers else { return };
        let (peer, run) = peers.find(address, lookup.run, mapped);
        lookup.run = run;
        if let Some((peer, offset)) = peer {
            lookup.target = Target::Peer;
            lookup.memory = Some((peer.memory.mapping(), offset));
            lookup.name = Some(&peer.name);
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
            own_epoch: None,
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
        self.wake_waiters();
    }

    /// Returns a handle that [`Dma::abort_separate`] aborts without the other handles of the bus, for one of several
    /// engines of a device. [`Dma::abort`] aborts it too.
    pub fn separate(&self) -> Self {
        Self {
            own_epoch: Some(Arc::default()),
            ..self.clone()
        }
    }

    /// As [`Dma::abort`], for the transfers of this handle and its clones, if [`Dma::separate`] returned it. Otherwise for
    /// all.
    pub fn abort_separate(&self) {
        match &self.own_epoch {
            Some(own) => {
                own.fetch_add(1, Ordering::SeqCst);
                self.wake_waiters();
            }
            None => self.abort(),
        }
    }

    /// Makes the transfers that wait for the client look at the epoch.
    fn wake_waiters(&self) {
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

    /// Returns a handle with counters of its own that start at 0, for one of several kinds of transfers that run
    /// concurrently. Its transfers count in the total too.
    pub fn tallied(&self) -> Self {
        Self {
            own_counters: Some(Arc::default()),
            ..self.clone()
        }
    }

    /// The epoch in which a transfer of this handle starts.
    fn epoch(&self) -> Epoch {
        self.abort_epoch.unwrap_or_else(|| self.current_epoch())
    }

    fn current_epoch(&self) -> Epoch {
        Epoch {
            all: self.shared.epoch.load(Ordering::SeqCst),
            own: self.own_epoch.as_ref().map_or(0, |own| own.load(Ordering::SeqCst)),
        }
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

impl From<DmaError> for io::Error {
    fn from(error: DmaError) -> Self {
        io::Error::other(error)
    }
}
