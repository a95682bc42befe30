// SPDX-License-Identifier: GPL-2.0

//! Pieces of a provider's memory, on their way from the provider to a buffer and back.

use crate::ext::{
    buddy::Extent,
    log::Owner,
    p2pdma::{
        Backing,
        Target, //
    },
    vma::Fault, //
};
use crate::mem::traits::Charge;
use kernel::{prelude::*, sync::Arc};

/// A piece of a provider's memory.
pub(crate) struct Memory {
    piece: Origin,
    /// Bytes that were asked for.
    pub(crate) size: u64,
    /// Whether it is all zeroes for its present owner, but for what that one wrote.
    clear: bool,
    /// Whether it was ever mapped for its present owner: only then can others refer to its pages.
    touched: bool,
    /// Whose it is, or was last.
    pub(crate) owner: Owner,
    /// What it counts as, for as long as its owner has it or refers to its pages.
    pub(crate) charge: Option<Charge>,
    /// The next one of a [`Stack`].
    next: Option<KBox<Memory>>,
}

/// When memory is cleared for its owner.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clearing {
    /// Before the allocation returns.
    Now,
    /// Before it is mapped or exported for the first time: for an allocation with the mmap lock held, which others want.
    AtFirstUse,
}

pub(crate) enum Origin {
    /// Part of the provider's backing, which begins at `start` in the BAR.
    Own {
        extent: Extent,
        backing: Arc<Backing>,
        start: u64,
    },
    /// A backing of its own, of which the first `skip` bytes are only there for the alignment of the rest.
    Adopted { backing: Arc<Backing>, skip: u64 },
}

impl Memory {
    /// A piece for the calling process; `clear` says whether nobody has touched it since it was cleared.
    pub(crate) fn new(piece: Origin, size: u64, clear: bool) -> Result<KBox<Self>> {
        let memory = Self {
            piece,
            size,
            clear,
            touched: false,
            owner: Owner::current(),
            charge: None,
            next: None,
        };
        Ok(KBox::new(memory, GFP_KERNEL_ACCOUNT)?)
    }

    pub(crate) fn piece(&self) -> &Origin {
        &self.piece
    }

    /// Whether its owner may have it: it was cleared since its last one had it.
    pub(crate) fn is_clear(&self) -> bool {
        self.clear
    }

    /// The backing, and where in it the piece begins.
    fn place(&self) -> (&Arc<Backing>, u64) {
        match &self.piece {
            Origin::Own { extent, backing, start } => (backing, extent.offset() - start),
            Origin::Adopted { backing, skip } => (backing, *skip),
        }
    }

    /// What it takes from its provider, bytes.
    pub(crate) fn footprint(&self) -> u64 {
        match &self.piece {
            Origin::Own { extent, .. } => extent.size(),
            Origin::Adopted { backing, .. } => backing.size(),
        }
    }

    /// Address on the provider's bus.
    pub(crate) fn bus_addr(&self) -> u64 {
        let (backing, offset) = self.place();
        backing.bus_addr(offset)
    }

    /// Physical address.
    pub(crate) fn phys(&self) -> u64 {
        let (backing, offset) = self.place();
        backing.phys() + offset
    }

    /// What mappings of it for devices are made with.
    pub(crate) fn target(&self) -> Target {
        self.place().0.target()
    }

    /// Maps what is `offset` into the piece, and up to `left` bytes behind it, where a fault wants it.
    pub(crate) fn map(&mut self, fault: &Fault<'_>, offset: u64, left: u64) -> Result {
        self.hold();
        let (backing, start) = self.place();
        backing.insert(fault, start + offset, left)
    }

    /// Takes our references on its pages, so that others can.
    pub(crate) fn hold(&mut self) {
        let size = self.size;
        let touched = core::mem::replace(&mut self.touched, true);
        let (backing, start) = self.place();
        if !touched {
            backing.hold(start, size);
        }
    }

    /// As [`Self::map`], for a page table's worth of memory as one entry. Errors: `EAGAIN` where that cannot be.
    pub(crate) fn map_table(&self, fault: &Fault<'_>, offset: u64) -> Result {
        let (backing, start) = self.place();
        if self
            .size
            .checked_sub(offset)
            .is_none_or(|left| left < Fault::TABLE as u64)
        {
            return Err(EAGAIN);
        }
        backing.insert_table(fault, start + offset)
    }

    /// How many of its pages others refer to.
    pub(crate) fn busy(&self) -> usize {
        let (backing, start) = self.place();
        if self.touched {
            backing.busy(start, self.size)
        } else {
            0
        }
    }

    /// Clears the whole piece, of which nothing is in use, `step` bytes at a time. `go_on` is asked before each step; with
    /// its error the piece is to be cleared still.
    pub(crate) fn clear(&mut self, combine: bool, step: u64, go_on: impl Fn() -> Result) -> Result {
        let size = self.footprint();
        let (backing, start) = match &self.piece {
            Origin::Own { extent, backing, start } => (backing, extent.offset() - *start),
            Origin::Adopted { backing, .. } => (backing, 0),
        };
        let mut done = 0;
        while done < size {
            go_on()?;
            let now = step.min(size - done);
            backing.clear(start + done, now, combine);
            done += now;
        }
        self.clear = true;
        Ok(())
    }

    /// It goes back, all zeroes: nobody has it, and nothing is charged for it.
    pub(crate) fn returned_clear(&mut self) {
        if let Origin::Own { extent, .. } = &mut self.piece {
            extent.set_clear(true);
        }
        self.touched = false;
        self.charge = None;
    }
}

/// A list of memory that takes no memory.
pub(crate) struct Stack {
    head: Option<KBox<Memory>>,
    count: u32,
    pub(crate) bytes: u64,
}

impl Stack {
    pub(crate) const EMPTY: Self = Self {
        head: None,
        count: 0,
        bytes: 0,
    };

    /// How many pieces it has.
    pub(crate) fn len(&self) -> u32 {
        self.count
    }

    pub(crate) fn push(&mut self, mut memory: KBox<Memory>) {
        self.bytes += memory.footprint();
        self.count += 1;
        memory.next = self.head.take();
        self.head = Some(memory);
    }

    /// The piece that comes next.
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

    /// Takes over all of another list.
    pub(crate) fn append(&mut self, mut other: Self) {
        while let Some(memory) = other.pop() {
            self.push(memory);
        }
    }
}

impl Drop for Stack {
    /// Link by link: a long list must not be dropped by recursion, as the kernel's stack is small.
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}
