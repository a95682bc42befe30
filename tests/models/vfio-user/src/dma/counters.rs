// SPDX-License-Identifier: MIT OR Apache-2.0

//! Counters of the bytes that a device transfers, by target.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use serde::Serialize;

use super::{Direction, Target};

/// Key of guest memory in [`Dma::by_target`](super::Dma::by_target).
pub const HOST: &str = "host";
/// Key in [`Dma::by_target`](super::Dma::by_target) of memory with a file descriptor that is neither guest memory nor a
/// peer in [`Peers`](crate::Peers).
pub const OTHER_MAPPED: &str = "mapped";
/// Key in [`Dma::by_target`](super::Dma::by_target) of all accesses by message.
pub const MESSAGE: &str = "message";

/// Bytes transferred, by kind of target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Moved {
    /// Read from the target.
    pub read: u64,
    /// Written to the target.
    pub written: u64,
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
pub(super) struct Counters {
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

impl Counters {
    /// Returns the sums by kind of target.
    pub(super) fn counts(&self) -> DmaCounts {
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

    /// Returns the bytes by name of the target, as [`Dma::by_target`](super::Dma::by_target).
    pub(super) fn by_target(&self) -> BTreeMap<String, Moved> {
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

    /// Sets all counters to 0 and removes the named peers.
    pub(super) fn reset(&self) {
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

    /// Adds `bytes` to the counters of `target`, and to those of the peer `name` if it has one.
    pub(super) fn count(&self, target: Target, name: Option<&Arc<str>>, direction: Direction, bytes: u64) {
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
