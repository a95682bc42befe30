// SPDX-License-Identifier: GPL-2.0

//! Memory of a provider: an extent of its own memory, or a chunk of another driver's pool.
//!
//! A [`Memory`] is in exactly one place: in a buffer, on its provider's `dirty` or `pinned` list, or in the hands of one
//! thread, which the provider counts as `outstanding`. See "Memory of a buffer" in Documentation/design/lifecycle.md.
//!
//! Context: process context. Nothing here takes a lock of p2pmem; callers own the memory, or hold the mutex that protects
//! it.

use crate::ext::{
    buddy::Extent,
    dmem::CgroupCharge,
    log::Owner,
    p2pdma::{
        Backing,
        Target, //
    },
    vma::Fault, //
};
use crate::mem::own::OwnMemory;
use kernel::{prelude::*, sync::Arc};

/// A contiguous piece of a provider's memory.
pub(crate) struct Memory {
    source: MemorySource,
    /// Bytes that were requested.
    pub(crate) size: u64,
    /// Bytes from the start of the piece that are known to be zero. The whole piece is, before its owner can reach it.
    cleared: u64,
    /// Whether p2pmem took page references for the present owner. Without them nobody else can refer to the pages.
    pages_held: bool,
    /// The present owner, or the last one.
    pub(crate) owner: Owner,
    /// The charge of the dmem cgroup, kept as long as the owner has the memory or refers to its pages.
    pub(crate) cgroup_charge: Option<CgroupCharge>,
    /// The number of the buffer that ended while others referred to the pages, and is still charged.
    pub(crate) pinned_buffer: Option<u64>,
    /// The next element of a [`MemoryList`].
    next: Option<KBox<Memory>>,
}

/// When an allocation clears its memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clearing {
    /// Before the allocation returns.
    Now,
    /// Before the first mapping, export or registration. For `mmap()` at offset 0, which holds the mmap lock, so that
    /// clearing there would block every other user of the mm.
    AtFirstUse,
}

/// Where the memory comes from.
pub(crate) enum MemorySource {
    /// An extent of the provider's own memory.
    Own { extent: Extent, own: Arc<OwnMemory> },
    /// A backing of its own. The first `align_skip` bytes only align the rest.
    Adopted { backing: Arc<Backing>, align_skip: u64 },
}

impl Memory {
    /// Creates memory that belongs to the current task. Errors: `ENOMEM`.
    pub(crate) fn new(source: MemorySource, size: u64) -> Result<KBox<Self>> {
        let memory = Self {
            source,
            size,
            cleared: 0,
            pages_held: false,
            owner: Owner::current(),
            cgroup_charge: None,
            pinned_buffer: None,
            next: None,
        };
        Ok(KBox::new(memory, GFP_KERNEL_ACCOUNT)?)
    }

    /// Returns whether the whole piece was cleared. Only then may its owner reach it.
    pub(crate) fn is_clear(&self) -> bool {
        self.cleared == self.footprint()
    }

    /// Returns the backing and the offset of the piece in it, in bytes.
    fn backing_and_offset(&self) -> (&Arc<Backing>, u64) {
        match &self.source {
            MemorySource::Own { extent, own } => (own.backing(), own.offset_of(extent)),
            MemorySource::Adopted { backing, align_skip } => (backing, *align_skip),
        }
    }

    /// Returns the bytes that the provider has less of, which is at least [`Self::size`].
    pub(crate) fn footprint(&self) -> u64 {
        match &self.source {
            MemorySource::Own { extent, .. } => extent.size(),
            MemorySource::Adopted { backing, .. } => backing.size(),
        }
    }

    /// Returns the BAR of the memory, and the offset of the first byte in it.
    pub(crate) fn place(&self) -> (u32, u64) {
        let (backing, offset) = self.backing_and_offset();
        let (bar, at) = backing.place();
        (bar, at + offset)
    }

    /// Returns whether user mappings are write-combining.
    pub(crate) fn combine(&self) -> bool {
        self.backing_and_offset().0.combine()
    }

    /// Returns the bus address of the first byte, on the provider's bus.
    pub(crate) fn bus_addr(&self) -> u64 {
        let (backing, offset) = self.backing_and_offset();
        backing.bus_addr(offset)
    }

    /// Returns the physical address of the first byte.
    pub(crate) fn phys(&self) -> u64 {
        let (backing, offset) = self.backing_and_offset();
        backing.phys() + offset
    }

    /// Returns the target for DMA mappings of the memory.
    pub(crate) fn target(&self) -> Target {
        self.backing_and_offset().0.clone()
    }

    /// Maps the memory from `offset` on at the address of `fault`.
    ///
    /// Context: page fault; `Buffer::inner` and the mmap lock or the VMA lock are held.
    pub(crate) fn map(&mut self, fault: &Fault<'_>, offset: u64) -> Result {
        self.pages_held = true;
        let (backing, start) = self.backing_and_offset();
        backing.insert(fault, start, self.size, offset)
    }

    /// Takes p2pmem's references to all pages.
    pub(crate) fn hold(&mut self) {
        self.pages_held = true;
        let (backing, start) = self.backing_and_offset();
        backing.hold(start, self.size);
    }

    /// Returns the number of pages that others refer to.
    pub(crate) fn busy(&self) -> usize {
        let (backing, start) = self.backing_and_offset();
        if self.pages_held {
            backing.busy(start, self.size)
        } else {
            0
        }
    }

    /// Clears up to `step` bytes that may not be zero, and returns their number. Nobody may use the memory meanwhile. May sleep.
    pub(crate) fn clear_step(&mut self, step: u64) -> u64 {
        let left = self.cleared..self.footprint();
        let dirty = match &self.source {
            MemorySource::Own { extent, own } => own.clear_unknown(extent, left.clone(), step),
            MemorySource::Adopted { backing, .. } => {
                let now = step.min(left.end - left.start);
                backing.clear(left.start, now);
                left.start..left.start + now
            }
        };
        self.cleared = dirty.end;
        dirty.end - dirty.start
    }

    /// Marks the memory as used by its owner, who has ended.
    pub(crate) fn set_used(&mut self) {
        self.cleared = 0;
    }

    /// Drops the last owner's charge to the cgroup, and notes that nobody refers to the pages any more: [`Self::busy`] need not
    /// count again. Returns the number of the buffer that is still charged.
    pub(crate) fn forget_owner(&mut self) -> Option<u64> {
        self.pages_held = false;
        self.cgroup_charge = None;
        self.pinned_buffer.take()
    }

    /// Clears up to `step` bytes of used memory, and returns their number. In the provider's own memory they are free afterwards,
    /// and the piece is smaller. After the last step [`Self::is_clear`] returns true, and dropping the piece frees what is left.
    ///
    /// Errors: `EINTR` (the task was killed). Nothing was freed then.
    pub(crate) fn scrub_step(&mut self, step: u64) -> Result<u64> {
        let MemorySource::Own { extent, own } = &mut self.source else {
            return Ok(self.clear_step(step));
        };
        let now = step.min(extent.size());
        own.backing().clear(own.offset_of(extent), now);
        if now == extent.size() {
            self.cleared = now;
        } else {
            extent.free_front(now)?;
        }
        Ok(now)
    }

    /// Marks used memory as unknown, so that dropping the piece frees it without clearing it, and returns its size. A chunk of
    /// another driver's pool is cleared by a step instead, since the pool remembers nothing.
    pub(crate) fn release_step(&mut self, step: u64) -> u64 {
        let MemorySource::Own { extent, own } = &self.source else {
            return self.clear_step(step);
        };
        own.release(extent);
        self.cleared = extent.size();
        self.cleared
    }

    /// Clears the whole piece, whatever it contains.
    pub(crate) fn clear_all(&self) {
        let (backing, offset) = match &self.source {
            MemorySource::Own { .. } => self.backing_and_offset(),
            MemorySource::Adopted { backing, .. } => (backing, 0),
        };
        backing.clear(offset, self.footprint());
    }
}

/// A linked list of memory, last in, first out. Adding to it allocates nothing and cannot fail.
pub(crate) struct MemoryList {
    head: Option<KBox<Memory>>,
    count: u32,
    pub(crate) bytes: u64,
}

impl MemoryList {
    pub(crate) const EMPTY: Self = Self {
        head: None,
        count: 0,
        bytes: 0,
    };

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> u32 {
        self.count
    }

    pub(crate) fn push(&mut self, mut memory: KBox<Memory>) {
        self.bytes += memory.footprint();
        self.count += 1;
        memory.next = self.head.take();
        self.head = Some(memory);
    }

    /// Returns the element that [`Self::pop`] would return.
    pub(crate) fn first(&self) -> Option<&Memory> {
        self.head.as_deref()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head.is_none()
    }

    pub(crate) fn pop(&mut self) -> Option<KBox<Memory>> {
        let mut memory = self.head.take()?;
        self.head = memory.next.take();
        self.bytes -= memory.footprint();
        self.count -= 1;
        Some(memory)
    }

    /// Moves all elements of `other` here.
    pub(crate) fn append(&mut self, mut other: Self) {
        while let Some(memory) = other.pop() {
            self.push(memory);
        }
    }
}

impl Drop for MemoryList {
    /// Frees element by element. Recursive drops of a long list would overflow the kernel's stack.
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}
