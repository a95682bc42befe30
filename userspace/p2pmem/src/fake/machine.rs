// SPDX-License-Identifier: MIT OR Apache-2.0

//! The state of the fake module: providers, open files, decisions.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::c_char;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use p2pmem_sys as abi;

use crate::addr::PciAddr;
use crate::types::PathClass;

pub(super) const PAGE: u64 = 4096;
/// One file has the memory of all providers. A provider's memory starts at its id times this offset in bytes, so no
/// buffer is at offset 0.
pub(super) const SPACING: u64 = 1 << 40;

/// The fake machine.
pub(super) struct Machine {
    pub(super) state: Mutex<State>,
    pub(super) memory: File,
}

/// The state of the module.
#[derive(Default)]
pub(super) struct State {
    pub(super) providers: BTreeMap<u32, Provider>,
    pub(super) last_id: u32,
    /// (provider, client) -> (class, hops)
    pub(super) paths: HashMap<(PciAddr, PciAddr), (PathClass, u32)>,
    pub(super) files: Vec<Weak<Mutex<OpenFile>>>,
    pub(super) gone: abi::p2pmem_stats,
    pub(super) generation: u64,
    pub(super) fail_next: Option<i32>,
    /// All mappings ever created: (address, length, offset in the file).
    pub(super) maps: Vec<(u64, u64, u64)>,
    pub(super) holders: Option<String>,
    /// Number of handles beyond the first one of each imported buffer, by the buffer's offset in the file.
    pub(super) imported: HashMap<u64, u32>,
    /// Dma-bufs by device and inode: the buffer, and whether the dma-buf is the whole buffer.
    pub(super) dmabufs: HashMap<(u64, u64), (abi::p2pmem_buffer, bool)>,
    /// The ranges of each dma-buf, by device and inode: offset in the memory file, and size.
    pub(super) dmabuf_ranges: HashMap<(u64, u64), Vec<(u64, u64)>>,
    /// Providers whose function is stopped, and the number of revoked attachments that are not closed.
    pub(super) stopped: HashMap<u32, u32>,
}

/// A provider, with its memory and counters.
pub(super) struct Provider {
    pub(super) raw: abi::p2pmem_provider,
    /// Start -> length of each live buffer.
    pub(super) used: BTreeMap<u64, u64>,
    pub(super) stats: abi::p2pmem_stats,
}

/// The state of one open file.
pub(super) struct OpenFile {
    pub(super) buffers: BTreeMap<u32, abi::p2pmem_buffer>,
    /// The attachments of the file, with their ranges.
    pub(super) attachments: BTreeMap<u32, Attachment>,
    pub(super) last_handle: u32,
    pub(super) events: VecDeque<abi::p2pmem_event>,
    /// An eventfd that is readable while there are events.
    pub(super) wakeup: Arc<OwnedFd>,
    pub(super) last: Option<Decision>,
    pub(super) rules: Vec<abi::p2pmem_rule>,
}

impl OpenFile {
    pub(super) fn new(wakeup: Arc<OwnedFd>) -> Self {
        Self {
            buffers: BTreeMap::new(),
            attachments: BTreeMap::new(),
            last_handle: 0,
            events: VecDeque::new(),
            wakeup,
            last: None,
            rules: Vec::new(),
        }
    }

    pub(super) fn queue(&mut self, event: &abi::p2pmem_event) {
        self.events.push_back(*event);
        rustix::io::write(&self.wakeup, &1u64.to_ne_bytes()).expect("an eventfd counts to 2^64 - 2");
    }
}

/// An attachment.
pub(super) struct Attachment {
    pub(super) raw: abi::p2pmem_attachment,
    pub(super) ranges: Vec<abi::p2pmem_dma_range>,
}

/// The last decision of a file.
#[derive(Clone, Default)]
pub(super) struct Decision {
    pub(super) verdicts: Vec<abi::p2pmem_verdict>,
    pub(super) text: String,
    pub(super) error: i32,
    pub(super) chosen: u32,
}

impl Decision {
    /// Returns the class of the path to a provider.
    pub(super) fn class_of(&self, provider: u32) -> u32 {
        let verdict = self.verdicts.iter().find(|v| v.provider == provider);
        verdict.map_or(0, |v| v.class)
    }
}

pub(super) fn errno(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn name(text: &str) -> [c_char; 32] {
    let mut chars = [0; 32];
    for (to, from) in chars.iter_mut().zip(text.bytes().take(31)) {
        *to = c_char::from_ne_bytes([from]);
    }
    chars
}

pub(super) fn event(type_: u32, provider: u32, handle: u32) -> abi::p2pmem_event {
    abi::p2pmem_event {
        type_,
        provider,
        handle,
        ..Default::default()
    }
}

pub(super) fn sum(into: &mut abi::p2pmem_stats, from: &abi::p2pmem_stats) {
    into.allocs += from.allocs;
    into.frees += from.frees;
    into.failed += from.failed;
    into.alloc_bytes += from.alloc_bytes;
    into.free_bytes += from.free_bytes;
    into.maps += from.maps;
    into.scrubbed_bytes += from.scrubbed_bytes;
    into.pinned += from.pinned;
    into.revoked += from.revoked;
    into.exports += from.exports;
    into.attaches += from.attaches;
    into.attach_failed += from.attach_failed;
}

impl Provider {
    /// Returns the free pieces: (start, length).
    pub(super) fn holes(&self) -> Vec<(u64, u64)> {
        let mut at = 0;
        let mut holes = Vec::new();
        for (start, len) in &self.used {
            holes.push((at, start - at));
            at = start + len;
        }
        holes.push((at, self.raw.size - at));
        holes
    }

    pub(super) fn place(&self, size: u64, align: u64) -> Option<u64> {
        self.holes().into_iter().find_map(|(start, len)| {
            let aligned = start.next_multiple_of(align);
            (aligned - start + size <= len).then_some(aligned)
        })
    }

    pub(super) fn snapshot(&self) -> abi::p2pmem_provider {
        let holes = self.holes();
        abi::p2pmem_provider {
            free: holes.iter().map(|h| h.1).sum(),
            largest: holes.iter().map(|h| h.1).max().unwrap_or(0),
            buffers: self.used.len() as u32,
            ..self.raw
        }
    }
}
