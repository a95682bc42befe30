// SPDX-License-Identifier: GPL-2.0

//! The handles of an open file: of buffers, found by number and by mmap offset; and the numbers of all handles.
//!
//! A buffer may have several handles on one file, as every import of its dma-buf makes one. Each handle is a holder of the buffer.
//! Handles of buffers and of attachments are numbered together.
//!
//! The methods take no lock; the file's mutex protects the handles.

use crate::{
    ext::refusal::{
        refuse,
        Answer, //
    },
    mem::buffer::{
        Buffer,
        Holder, //
    }, //
};
use kernel::{
    prelude::*,
    rbtree::{RBTree, RBTreeNodeReservation},
    sync::Arc,
};

/// Maximum number of handles of a file. They take about 12 MiB of kernel memory, charged to the cgroup of their creator.
const MAX_HANDLES: u32 = 1 << 16;

/// The handles of a file.
pub(crate) struct Handles {
    /// The holders, by [`spread`] handles.
    by_handle: RBTree<u32, Holder>,
    /// A buffer's mmap offset in pages, and a handle of the buffer.
    by_page: RBTree<(u64, u32), ()>,
    next: u32,
    /// Number of handles, with those that are reserved.
    count: u32,
}

/// Returns the key of a handle in its tree: the handle with its bits reversed. Ascending keys would make the red-black tree twice
/// as deep as needed.
fn spread(handle: u32) -> u32 {
    handle.reverse_bits()
}

/// The memory for one more handle.
pub(crate) struct Slot {
    by_handle: RBTreeNodeReservation<u32, Holder>,
    by_page: RBTreeNodeReservation<(u64, u32), ()>,
}

impl Slot {
    /// Allocates the memory. Errors: `ENOMEM`.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            by_handle: RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?,
            by_page: RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?,
        })
    }
}

impl Handles {
    /// Returns an empty table.
    pub(crate) fn new() -> Self {
        Self {
            by_handle: RBTree::new(),
            by_page: RBTree::new(),
            next: 1,
            count: 0,
        }
    }

    /// Returns the number of the next handle. Errors: `EMFILE` if the file has [`MAX_HANDLES`] handles or has used all numbers.
    pub(crate) fn number(&mut self) -> Answer<u32> {
        if self.count >= MAX_HANDLES {
            return Err(refuse!(
                EMFILE,
                "this file has {} handles, which is the maximum: free some",
                self.count
            ));
        }
        let handle = self.next;
        // `u32::MAX` is never a handle: lookups use it as an upper bound.
        self.next = handle
            .checked_add(1)
            .ok_or_else(|| refuse!(EMFILE, "this file has used up all handles: open another one"))?;
        Ok(handle)
    }

    /// Reserves a handle for an attachment and returns its number, until [`Self::cancel`]. Errors: as for [`Self::number`].
    pub(super) fn reserve(&mut self) -> Answer<u32> {
        let handle = self.number()?;
        self.count += 1;
        Ok(handle)
    }

    /// Gives up a reserved handle. Its number is not used again.
    pub(super) fn cancel(&mut self) {
        self.count -= 1;
    }

    /// Inserts a buffer under a number that [`Self::number`] returned.
    pub(crate) fn insert(&mut self, handle: u32, holder: Holder, slot: Slot) {
        let page = holder.page_offset;
        self.count += 1;
        self.by_page.insert(slot.by_page.into_node((page, handle), ()));
        self.by_handle.insert(slot.by_handle.into_node(spread(handle), holder));
    }

    /// Removes a handle. The caller drops the result without locks held, as it may be the last holder, which ends the buffer.
    pub(crate) fn remove(&mut self, handle: u32) -> Option<Holder> {
        let holder = self.by_handle.remove(&spread(handle))?;
        self.by_page.remove(&(holder.page_offset, handle));
        self.count -= 1;
        Some(holder)
    }

    /// Returns the buffer of a handle.
    pub(crate) fn buffer(&self, handle: u32) -> Option<Arc<Buffer>> {
        self.by_handle
            .get(&spread(handle))
            .map(|holder| holder.buffer().clone())
    }

    /// Returns the buffer with the highest mmap offset that is not above `page`, in pages.
    pub(crate) fn at_page(&self, page: u64) -> Option<Arc<Buffer>> {
        let (_, handle) = match self.by_page.cursor_lower_bound(&(page, u32::MAX)) {
            Some(behind) => behind.peek_prev().map(|(&key, ())| key),
            None => self.by_page.cursor_back().map(|last| *last.current().0),
        }?;
        self.buffer(handle)
    }

    /// Returns the lowest handle of a buffer that is greater than `after`, and whether there are more.
    pub(crate) fn next_of(&self, buffer: &Buffer, after: u32) -> Option<(u32, bool)> {
        let from = (buffer.page_offset, after.checked_add(1)?);
        let cursor = self.by_page.cursor_lower_bound(&from)?;
        let (&(page, handle), ()) = cursor.current();
        let more = cursor.peek_next().is_some_and(|(&(next, _), ())| next == page);
        (page == buffer.page_offset).then_some((handle, more))
    }
}
