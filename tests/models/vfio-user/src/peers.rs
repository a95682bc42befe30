// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory of the devices that this process serves to one guest, by its address on the guest's bus.
//!
//! The client passes no descriptor for a BAR of another device that is served here, so a device could reach the BAR by
//! messages only. [`Peers`] has that memory itself. Writes to the other device's configuration space determine the address:
//! a BAR that is being sized, that is not decoded, or whose device is reset or disconnected has none. The client still
//! decides what a device may reach: [`Peers`] does not look up an address that the client never mapped.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use tracing::debug;

use crate::memory::{FileId, Memory};

/// Another device of the same guest goes by this name already.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is a peer called {0:?} already")]
pub struct NameTaken(pub String);

/// A peer as others see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name.
    pub name: String,
    /// Size of its memory in bytes.
    pub len: u64,
    /// Bus address, while it has one.
    pub address: Option<u64>,
}

/// The memory of one guest's devices; clones stand for the same guest.
#[derive(Clone, Debug, Default)]
pub struct Peers {
    table: Arc<RwLock<Table>>,
}

#[derive(Debug)]
pub(crate) struct Entry {
    id: u64,
    pub(crate) name: Arc<str>,
    pub(crate) memory: Arc<Memory>,
    address: Option<u64>,
}

/// A guest has a handful of devices: a list is searched faster than a tree.
#[derive(Debug, Default)]
pub(crate) struct Table {
    entries: Vec<Entry>,
    next: u64,
}

impl Table {
    /// What is at `address`: the peer and the offset in its memory, if any, and how many of `len` bytes have that answer.
    /// Where two peers claim an address, as they may while the guest moves them, there is neither.
    pub(crate) fn find(&self, address: u64, len: u64) -> (Option<(&Entry, u64)>, u64) {
        let mut found = None;
        let mut run = len;
        let mut clash = false;
        for entry in &self.entries {
            let Some(start) = entry.address else { continue };
            if start > address {
                run = run.min(start - address);
            } else if address - start < entry.memory.len() {
                let offset = address - start;
                run = run.min(entry.memory.len() - offset);
                clash |= found.replace((entry, offset)).is_some();
            }
        }
        (found.filter(|_| !clash), run)
    }

    /// The peer whose memory this file is.
    pub(crate) fn by_file(&self, file: &FileId) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.memory.file_id() == *file)
    }
}

impl Peers {
    /// No peers yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// All peers, in the order in which they came.
    pub fn list(&self) -> Vec<Peer> {
        let peer = |entry: &Entry| Peer {
            name: entry.name.to_string(),
            len: entry.memory.len(),
            address: entry.address,
        };
        self.read().entries.iter().map(peer).collect()
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds memory that has no address yet.
    pub(crate) fn offer(&self, region: u32, name: &str, memory: Arc<Memory>) -> Result<Offer, NameTaken> {
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
            address: None,
        });
        Ok(Offer {
            peers: self.clone(),
            id,
            region,
        })
    }
}

/// A device's side of its peer entry, which goes when this is dropped.
#[derive(Debug)]
pub(crate) struct Offer {
    peers: Peers,
    id: u64,
    region: u32,
}

impl Offer {
    /// The BAR behind which the memory is.
    pub(crate) fn region(&self) -> u32 {
        self.region
    }

    /// Says where the memory is now. When this returns, nobody is copying at the former place any more.
    pub(crate) fn place(&self, address: Option<u64>) {
        let mut table = self.peers.write();
        if let Some(entry) = table.entries.iter_mut().find(|entry| entry.id == self.id) {
            if entry.address != address {
                debug!(name = &*entry.name, ?address, "a peer's memory has a new place");
                entry.address = address;
            }
        }
    }
}

impl Drop for Offer {
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
    fn addresses_are_found_and_gaps_are_measured() {
        let peers = Peers::new();
        let low = peers.offer(2, "low", memory(0x1000)).unwrap();
        let high = peers.offer(2, "high", memory(0x2000)).unwrap();
        let find = |address, len| {
            let table = peers.read();
            let (found, run) = table.find(address, len);
            (found.map(|(entry, offset)| (entry.name.to_string(), offset)), run)
        };
        assert_eq!(find(0, 100), (None, 100));
        low.place(Some(0x10000));
        high.place(Some(0x20000));
        assert_eq!(find(0xf000, 0x100000), (None, 0x1000));
        assert_eq!(find(0x10800, 0x100000), (Some(("low".into(), 0x800)), 0x800));
        assert_eq!(find(0x11000, 0x100000), (None, 0xf000));
        assert_eq!(find(0x21fff, 10), (Some(("high".into(), 0x1fff)), 1));
        assert_eq!(find(0x22000, 10), (None, 10));
        high.place(Some(u64::MAX - 0xfff));
        assert_eq!(find(u64::MAX, 1), (Some(("high".into(), 0xfff)), 1));
        low.place(None);
        assert_eq!(find(0x10800, 1), (None, 1));
    }

    #[test]
    fn two_at_one_address_are_none() {
        let peers = Peers::new();
        let a = peers.offer(2, "a", memory(0x2000)).unwrap();
        let b = peers.offer(2, "b", memory(0x1000)).unwrap();
        a.place(Some(0x10000));
        b.place(Some(0x11000));
        let found = |address| {
            peers
                .read()
                .find(address, 0x2000)
                .0
                .map(|(entry, _)| entry.name.to_string())
        };
        assert_eq!(found(0x10fff).as_deref(), Some("a"));
        assert_eq!(found(0x11000), None);
        assert_eq!(peers.read().find(0x10000, 0x2000).1, 0x1000);
        b.place(None);
        assert_eq!(found(0x11000).as_deref(), Some("a"));
    }

    #[test]
    fn names_are_unique_and_free_again() {
        let peers = Peers::new();
        let first = peers.offer(2, "accel0", memory(0x1000)).unwrap();
        assert_eq!(
            peers.offer(2, "accel0", memory(0x1000)).unwrap_err(),
            NameTaken("accel0".into())
        );
        drop(first);
        let _again = peers.offer(2, "accel0", memory(0x1000)).unwrap();
        assert_eq!(peers.list().len(), 1);
    }
}
