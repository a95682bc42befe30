// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory of the devices that this process serves to one guest, by bus address.
//!
//! The client sends no file descriptor for a BAR of another device of this process, so without [`Peers`] a device could
//! access such a BAR only by messages. The address of a peer's memory follows the writes to the configuration space of
//! the peer: a BAR that is being sized or is not decoded has no address, and neither has a BAR of a device that is reset
//! or disconnected. The client decides which addresses a device may access: an address that the client has not mapped
//! for the device is not looked up here. The exception is memory that the client cannot map itself (a delayed region),
//! which it maps for no device.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use tracing::debug;

use crate::memory::{FileId, Memory};

/// Another device of the same guest has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a peer with the name {0:?} exists already")]
pub struct NameTaken(pub String);

/// Public state of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Name of the peer.
    pub name: String,
    /// Size of the memory in bytes.
    pub len: u64,
    /// Bus address; `None` if the BAR is not decoded.
    pub address: Option<u64>,
}

/// The memory of the devices of one guest. Clones refer to the same guest.
#[derive(Clone, Debug, Default)]
pub struct Peers {
    table: Arc<RwLock<PeerTable>>,
}

#[derive(Debug)]
pub(crate) struct Entry {
    id: u64,
    pub(crate) name: Arc<str>,
    pub(crate) memory: Arc<Memory>,
    /// Whether the client maps the memory for other devices.
    mapped: bool,
    address: Option<u64>,
}

/// The peers in a vector: a guest has few devices, and a vector is searched faster than a tree.
#[derive(Debug, Default)]
pub(crate) struct PeerTable {
    entries: Vec<Entry>,
    next: u64,
}

impl PeerTable {
    /// Looks up `address`, which the client has mapped for the accessing device if `mapped` is set. Returns the peer and the
    /// offset in its memory, if any, and for how many of `len` bytes the result holds. An address of two peers, which is
    /// possible while the guest moves BARs, has no peer.
    pub(crate) fn find(&self, address: u64, len: u64, mapped: bool) -> (Option<(&Entry, u64)>, u64) {
        let mut found = None;
        let mut run = len;
        let mut overlap = false;
        for entry in self.entries.iter().filter(|entry| entry.mapped == mapped) {
            let Some(start) = entry.address else { continue };
            if start > address {
                run = run.min(start - address);
            } else if address - start < entry.memory.len() {
                let offset = address - start;
                run = run.min(entry.memory.len() - offset);
                overlap |= found.replace((entry, offset)).is_some();
            }
        }
        (found.filter(|_| !overlap), run)
    }

    /// The peer whose memory is in `file`.
    pub(crate) fn by_file(&self, file: &FileId) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.memory.file_id() == *file)
    }
}

impl Peers {
    /// An empty list of peers.
    pub fn new() -> Self {
        Self::default()
    }

    /// All peers, in the order in which they were added.
    pub fn list(&self) -> Vec<Peer> {
        let peer = |entry: &Entry| Peer {
            name: entry.name.to_string(),
            len: entry.memory.len(),
            address: entry.address,
        };
        self.read().entries.iter().map(peer).collect()
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, PeerTable> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, PeerTable> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds memory of a device, without an address. `mapped` is whether the client maps the memory for other devices.
    pub(crate) fn add(
        &self,
        region: u32,
        name: &str,
        memory: Arc<Memory>,
        mapped: bool,
    ) -> Result<PeerHandle, NameTaken> {
        let mut table = self.write();
        if table.entries.iter().any(|entry| &*entry.name == name) {
            return Err(NameTaken(name.to_owned()));
        }
        let id = table.next;
        table.next += 1;
        table.entries.push(Entry {
            id,
            name: name.into(),
            memory,
            mapped,
            address: None,
        });
        Ok(PeerHandle {
            peers: self.clone(),
            id,
            region,
        })
    }
}

/// A device's handle of its peer entry. Dropping the handle removes the entry.
#[derive(Debug)]
pub(crate) struct PeerHandle {
    peers: Peers,
    id: u64,
    region: u32,
}

impl PeerHandle {
    /// Index of the BAR that is the memory.
    pub(crate) fn region(&self) -> u32 {
        self.region
    }

    /// Sets the bus address. When this returns, no copy to the former address is in progress.
    pub(crate) fn set_address(&self, address: Option<u64>) {
        let mut table = self.peers.write();
        if let Some(entry) = table.entries.iter_mut().find(|entry| entry.id == self.id) {
            if entry.address != address {
                debug!(
                    name = &*entry.name,
                    ?address,
                    "the bus address of a peer's memory changed"
                );
                entry.address = address;
            }
        }
    }
}

impl Drop for PeerHandle {
    fn drop(&mut self) {
        self.peers.write().entries.retain(|entry| entry.id != self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(len: u64) -> Arc<Memory> {
        Arc::new(Memory::new("peer", len).unwrap())
    }

    #[test]
    fn lookup_returns_peer_or_length_of_gap() {
        let peers = Peers::new();
        let low = peers.add(2, "low", memory(0x1000), true).unwrap();
        let high = peers.add(2, "high", memory(0x2000), true).unwrap();
        let find = |address, len| {
            let table = peers.read();
            let (found, run) = table.find(address, len, true);
            (found.map(|(entry, offset)| (entry.name.to_string(), offset)), run)
        };
        assert_eq!(find(0, 100), (None, 100));
        low.set_address(Some(0x10000));
        high.set_address(Some(0x20000));
        assert_eq!(find(0xf000, 0x100000), (None, 0x1000));
        assert_eq!(find(0x10800, 0x100000), (Some(("low".into(), 0x800)), 0x800));
        assert_eq!(find(0x11000, 0x100000), (None, 0xf000));
        assert_eq!(find(0x21fff, 10), (Some(("high".into(), 0x1fff)), 1));
        assert_eq!(find(0x22000, 10), (None, 10));
        high.set_address(Some(u64::MAX - 0xfff));
        assert_eq!(find(u64::MAX, 1), (Some(("high".into(), 0xfff)), 1));
        low.set_address(None);
        assert_eq!(find(0x10800, 1), (None, 1));
    }

    #[test]
    fn overlapping_peers_are_not_found() {
        let peers = Peers::new();
        let a = peers.add(2, "a", memory(0x2000), true).unwrap();
        let b = peers.add(2, "b", memory(0x1000), true).unwrap();
        a.set_address(Some(0x10000));
        b.set_address(Some(0x11000));
        let found = |address| {
            peers
                .read()
                .find(address, 0x2000, true)
                .0
                .map(|(entry, _)| entry.name.to_string())
        };
        assert_eq!(found(0x10fff).as_deref(), Some("a"));
        assert_eq!(found(0x11000), None);
        assert_eq!(peers.read().find(0x10000, 0x2000, true).1, 0x1000);
        b.set_address(None);
        assert_eq!(found(0x11000).as_deref(), Some("a"));
    }

    #[test]
    fn memory_that_the_client_does_not_map_is_apart() {
        let peers = Peers::new();
        let mapped = peers.add(2, "mapped", memory(0x1000), true).unwrap();
        let trapped = peers.add(2, "trapped", memory(0x1000), false).unwrap();
        mapped.set_address(Some(0x10000));
        trapped.set_address(Some(0x11000));
        let table = peers.read();
        let name = |address, mapped| {
            table
                .find(address, 8, mapped)
                .0
                .map(|(entry, _)| entry.name.to_string())
        };
        assert_eq!(name(0x10000, true).as_deref(), Some("mapped"));
        assert_eq!(name(0x10000, false), None);
        assert_eq!(name(0x11000, true), None);
        assert_eq!(name(0x11000, false).as_deref(), Some("trapped"));
        // The other kind of memory does not limit the run.
        assert_eq!(table.find(0xf000, 0x10000, false).1, 0x2000);
    }

    #[test]
    fn names_are_unique_and_reusable() {
        let peers = Peers::new();
        let first = peers.add(2, "accel0", memory(0x1000), true).unwrap();
        assert_eq!(
            peers.add(2, "accel0", memory(0x1000), true).unwrap_err(),
            NameTaken("accel0".into())
        );
        drop(first);
        let _again = peers.add(2, "accel0", memory(0x1000), true).unwrap();
        assert_eq!(peers.list().len(), 1);
    }
}
