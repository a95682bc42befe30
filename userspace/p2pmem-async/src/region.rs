// SPDX-License-Identifier: MIT OR Apache-2.0

//! Regions: the memory that byte code names, without addresses. Each executor maps a region to its own addresses.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

/// Memory that the CPU, a NIC, and a peer device access at the same time.
///
/// Every access is volatile and happens once. Values are little-endian in memory. Offsets are in bytes from the start.
///
/// # Panics
///
/// All methods panic if the range is not inside the memory, or if the offset is not a multiple of the access size.
#[allow(clippy::len_without_is_empty)] // no memory is empty
pub trait Memory: Send + Sync + fmt::Debug {
    /// Returns the length in bytes.
    fn len(&self) -> usize;
    /// Returns the address in this process, for registration and for requests to the kernel.
    fn address(&self) -> u64;
    /// Returns the offset in the memory BAR of the accelerator, if the memory is in one.
    fn bar_offset(&self) -> Option<u64> {
        None
    }
    /// Reads 4 bytes in one access.
    fn load_dword(&self, at: usize) -> u32;
    /// Writes 4 bytes in one access.
    fn store_dword(&self, at: usize, value: u32);
    /// Writes 8 bytes in one access.
    fn store_qword(&self, at: usize, value: u64);
    /// Reads bytes.
    fn read(&self, at: usize, out: &mut [u8]);
    /// Writes bytes.
    fn write(&self, at: usize, data: &[u8]);
    /// Makes earlier writes visible to devices before later ones.
    fn fence(&self);
}

/// Identifies a region in this process. Numbers are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(u32);

impl RegionId {
    /// Returns the number, for executors that index a table.
    pub fn number(self) -> u32 {
        self.0
    }
}

/// What a region contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RegionKind {
    /// Send and receive queue of a queue pair. Byte code does not access it.
    WorkQueue,
    /// Doorbell record of a queue pair.
    QpRecord,
    /// Entries of a completion queue.
    Completions,
    /// Doorbell record of a completion queue, and the words by which peeks report that they ended.
    CqRecord,
    /// The NIC's doorbell register page (UAR).
    Doorbell,
    /// Memory of the program: payload, signals, counters.
    Data,
}

impl fmt::Display for RegionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WorkQueue => "work-queue",
            Self::QpRecord => "qp-record",
            Self::Completions => "completions",
            Self::CqRecord => "cq-record",
            Self::Doorbell => "doorbell",
            Self::Data => "data",
        })
    }
}

/// A part of a memory, with an identity that byte code can name.
#[derive(Debug, Clone)]
pub struct Region {
    id: RegionId,
    kind: RegionKind,
    memory: Arc<dyn Memory>,
    start: usize,
    len: usize,
}

impl Region {
    /// Creates a region of a whole memory.
    pub fn new(kind: RegionKind, memory: Arc<dyn Memory>) -> Self {
        let len = memory.len();
        Self::part(kind, memory, 0, len)
    }

    /// Creates a region of `len` bytes of a memory, from byte `start` on.
    ///
    /// # Panics
    ///
    /// The range is not inside the memory, or does not start at a multiple of 8.
    pub fn part(kind: RegionKind, memory: Arc<dyn Memory>, start: usize, len: usize) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let inside = start.checked_add(len).is_some_and(|end| end <= memory.len());
        assert!(
            inside && start % 8 == 0,
            "{len} bytes at {start} are no region of {memory:?}"
        );
        Self {
            id: RegionId(NEXT.fetch_add(1, Ordering::Relaxed)),
            kind,
            memory,
            start,
            len,
        }
    }

    /// Returns the identity.
    pub fn id(&self) -> RegionId {
        self.id
    }

    /// Returns what the region contains.
    pub fn kind(&self) -> RegionKind {
        self.kind
    }

    /// Returns the length in bytes.
    #[allow(clippy::len_without_is_empty)] // no region is empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the offset of the region in its memory.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Returns the address of the first byte in this process.
    pub fn address(&self) -> u64 {
        self.memory.address() + self.start as u64
    }

    /// Returns the offset of the first byte in the memory BAR of the accelerator, by which the accelerator itself accesses
    /// the region; `None` if the region is not in an accelerator, or at several places of it.
    pub fn bar_offset(&self) -> Option<u64> {
        Some(self.memory.bar_offset()? + self.start as u64)
    }

    /// Returns a place in the region, for byte code.
    pub fn target(&self, offset: u64) -> Target {
        Target {
            region: self.id,
            kind: self.kind,
            offset,
        }
    }

    fn at(&self, at: usize, len: usize) -> usize {
        let inside = at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "{len} bytes at {at} are not inside {self:?}");
        self.start + at
    }

    /// Reads 4 bytes. Panics as [`Memory`] does.
    pub fn load_dword(&self, at: usize) -> u32 {
        self.memory.load_dword(self.at(at, 4))
    }

    /// Writes 4 bytes. Panics as [`Memory`] does.
    pub fn store_dword(&self, at: usize, value: u32) {
        self.memory.store_dword(self.at(at, 4), value);
    }

    /// Writes 8 bytes. Panics as [`Memory`] does.
    pub fn store_qword(&self, at: usize, value: u64) {
        self.memory.store_qword(self.at(at, 8), value);
    }

    /// Reads bytes. Panics as [`Memory`] does.
    pub fn read(&self, at: usize, out: &mut [u8]) {
        self.memory.read(self.at(at, out.len()), out);
    }

    /// Writes bytes. Panics as [`Memory`] does.
    pub fn write(&self, at: usize, data: &[u8]) {
        self.memory.write(self.at(at, data.len()), data);
    }

    /// Makes earlier writes visible to devices before later ones.
    pub fn fence(&self) {
        self.memory.fence();
    }
}

/// A place that byte code reads or writes: a region, and an offset in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Target {
    /// The region.
    pub region: RegionId,
    /// What the region contains, for people.
    pub kind: RegionKind,
    /// Offset in bytes.
    pub offset: u64,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}+{:#x}", self.kind, self.region.0, self.offset)
    }
}
