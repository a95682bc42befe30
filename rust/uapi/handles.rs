// SPDX-License-Identifier: GPL-2.0

//! The handles of an open file, by their numbers and by where their buffers are mapped.
//!
//! A buffer that was imported may have several on one file: each is a holder of its own.

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

/// Most handles that a file has at a time: some 12 MiB of the kernel's memory, charged to the cgroup of who made them.
const MOST: u32 = 1 << 16;

/// The handles of a file.
pub(crate) struct Handles {
    /// By [`spread`] handles.
    by_handle: RBTree<u32, Holder>,
    /// A buffer's place in the address space of mappings, in pages, and a handle of it.
    by_page: RBTree<(u64, u32), ()>,
    next: u32,
    count: u32,
}

/// A handle as its tree has it: with its bits reversed, as a tree in which each new number is the largest is twice as deep
/// as it has to be.
fn spread(handle: u32) -> u32 {
    handle.reverse_bits()
}

/// What one more handle takes of the kernel's memory.
pub(crate) struct Slot {
    by_handle: RBTreeNodeReservation<u32, Holder>,
    by_page: RBTreeNodeReservation<(u64, u32), ()>,
}

impl Slot {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            by_handle: RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?,
            by_page: RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?,
        })
    }
}

impl Handles {
    pub(crate) fn new() -> Self {
        Self {
            by_handle: RBTree::new(),
            by_page: RBTree::new(),
            next: 1,
            count: 0,
        }
    }

    /// The number that the next handle gets. Errors: `EMFILE` when the file has as many as it can have, or all numbers were used.
    pub(crate) fn number(&mut self) -> Answer<u32> {
        if self.count >= MOST {
            return Err(refuse!(
                EMFILE,
                "this file has {} handles: no more are possible on one file",
                self.count
            ));
        }
        let handle = self.next;
        // The largest number is no handle's.
        self.next = handle
            .checked_add(1)
            .ok_or_else(|| refuse!(EMFILE, "this file has used up all handles: open another one"))?;
        Ok(handle)
    }

    /// Keeps a buffer under a number of [`Self::number`]'s.
    pub(crate) fn insert(&mut self, handle: u32, holder: Holder, slot: Slot) {
        let page = holder.page_offset;
        self.count += 1;
        self.by_page.insert(slot.by_page.into_node((page, handle), ()));
        self.by_handle.insert(slot.by_handle.into_node(spread(handle), holder));
    }

    /// Ends a handle. What comes back may be the buffer's last holder: it is dropped without a lock.
    pub(crate) fn remove(&mut self, handle: u32) -> Option<Holder> {
        let holder = self.by_handle.remove(&spread(handle))?;
        self.by_page.remove(&(holder.page_offset, handle));
        self.count -= 1;
        Some(holder)
    }

    /// The buffer of a handle.
    pub(crate) fn buffer(&self, handle: u32) -> Option<Arc<Buffer>> {
        self.by_handle
            .get(&spread(handle))
            .map(|holder| holder.buffer().clone())
    }

    /// The last buffer that does not begin behind a page.
    pub(crate) fn at_page(&self, page: u64) -> Option<Arc<Buffer>> {
        let (_, handle) = match self.by_page.cursor_lower_bound(&(page, u32::MAX)) {
            Some(behind) => behind.peek_prev().map(|(&key, ())| key),
            None => self.by_page.cursor_back().map(|last| *last.current().0),
        }?;
        self.buffer(handle)
    }

    /// The first handle of a buffer that comes after `after`.
    pub(crate) fn next_of(&self, buffer: &Buffer, after: u32) -> Option<u32> {
        let from = (buffer.page_offset, after.checked_add(1)?);
        let cursor = self.by_page.cursor_lower_bound(&from)?;
        let (&(page, handle), ()) = cursor.current();
        (page == buffer.page_offset).then_some(handle)
    }
}
