// SPDX-License-Identifier: GPL-2.0

//! What a provider has, for those who do not want to wait for its locks.

use crate::placement::Stock;
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc,
    },
};

/// Bytes to take so that a place for `size` bytes at `align` is among them wherever they begin.
pub(crate) fn padded(size: u64, align: u64) -> u64 {
    size.saturating_add(align.saturating_sub(PAGE_SIZE as u64))
}

/// What it takes for a request to fit for sure.
pub(crate) struct Need {
    size: u64,
    /// A free block that begins at a multiple of its size.
    block: u64,
    /// A free piece that begins anywhere.
    padded: u64,
}

impl Need {
    /// `size` bytes, a multiple of the page size, at `align`. None where nothing has room for that.
    pub(crate) fn of(size: u64, align: u64) -> Option<Self> {
        Some(Self {
            size,
            block: size.max(align).checked_next_power_of_two()?,
            padded: padded(size, align),
        })
    }
}

/// What a provider has: true unless something changes at this moment.
pub(crate) struct Gauge {
    /// Whether `piece` is a block that begins at a multiple of its size.
    blocks: bool,
    free: Atomic<u64>,
    piece: Atomic<u64>,
    /// Or [`CLOSED`].
    returning: Atomic<u64>,
}

/// Returning bytes of what has nothing any more.
const CLOSED: u64 = u64::MAX;

/// A relaxed load that takes no call: in most kernels the crate's own is one, to a function in C.
fn peek(word: &Atomic<u64>) -> u64 {
    // SAFETY: The pointer is that of a reference. All writes are atomic ones, and reading an aligned word in one go is
    // what a relaxed load is.
    unsafe { word.as_ptr().read_volatile() }
}

impl Gauge {
    /// Of blocks that begin at multiples of their sizes, or of pieces that begin anywhere.
    pub(crate) fn new(blocks: bool) -> Result<Arc<Self>> {
        let gauge = Self {
            blocks,
            free: Atomic::new(0),
            piece: Atomic::new(0),
            returning: Atomic::new(0),
        };
        Ok(Arc::new(gauge, GFP_KERNEL)?)
    }

    /// Free bytes, and the largest piece that is known. Only one at a time may say.
    pub(crate) fn set(&self, free: u64, piece: u64) {
        self.free.store(free, Relaxed);
        self.piece.store(piece, Relaxed);
    }

    /// Bytes that are as good as free, as they will be in a moment. Only one at a time may say, and not after [`Self::close`].
    pub(crate) fn set_returning(&self, bytes: u64) {
        self.returning.store(bytes, Relaxed);
    }

    /// From here on there is nothing to be had.
    pub(crate) fn close(&self) {
        self.returning.store(CLOSED, Relaxed);
    }

    /// Free bytes, and the largest piece that is known, which tells whether the request fits. None where that cannot be
    /// told, or nothing is to be had any more.
    #[inline(always)]
    pub(crate) fn glance(&self, need: &Need) -> Option<Stock> {
        let (free, largest) = (peek(&self.free), peek(&self.piece));
        let returning = peek(&self.returning);
        let enough = if self.blocks { need.block } else { need.padded };
        if returning == CLOSED {
            return None;
        }
        let free = free.saturating_add(returning);
        if enough <= largest {
            return Some(Stock { free, largest });
        }
        let most = need.size - PAGE_SIZE as u64;
        (free <= most).then_some(Stock {
            free,
            largest: largest.min(most),
        })
    }
}

#[kunit_tests(p2pmem_gauge)]
mod tests {
    use super::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn need(pages: u64, align: u64) -> Result<Need> {
        Need::of(pages * PAGE, align * PAGE).ok_or(EINVAL)
    }

    fn has(free: u64, largest: u64) -> Option<Stock> {
        Some(Stock { free, largest })
    }

    #[test]
    fn what_fits_for_sure_is_said() -> Result {
        let blocks = Gauge::new(true)?;
        blocks.set(12 * PAGE, 8 * PAGE);
        assert_eq!(blocks.glance(&need(8, 1)?), has(12 * PAGE, 8 * PAGE));
        assert_eq!(blocks.glance(&need(5, 8)?), has(12 * PAGE, 8 * PAGE));
        // It may fit into blocks side by side, or not.
        assert_eq!(blocks.glance(&need(9, 1)?), None);
        assert_eq!(blocks.glance(&need(1, 16)?), None);
        // For sure it does not.
        assert_eq!(blocks.glance(&need(13, 1)?), has(12 * PAGE, 8 * PAGE));
        let pieces = Gauge::new(false)?;
        pieces.set(12 * PAGE, 9 * PAGE);
        assert_eq!(pieces.glance(&need(9, 1)?), has(12 * PAGE, 9 * PAGE));
        assert_eq!(pieces.glance(&need(2, 8)?), has(12 * PAGE, 9 * PAGE));
        assert_eq!(pieces.glance(&need(3, 8)?), None);
        Ok(())
    }

    #[test]
    fn what_comes_back_counts_and_what_is_closed_has_nothing() -> Result {
        let gauge = Gauge::new(true)?;
        gauge.set(PAGE, PAGE);
        gauge.set_returning(3 * PAGE);
        assert_eq!(gauge.glance(&need(1, 1)?), has(4 * PAGE, PAGE));
        assert_eq!(gauge.glance(&need(2, 1)?), None);
        assert_eq!(gauge.glance(&need(5, 1)?), has(4 * PAGE, PAGE));
        gauge.close();
        assert_eq!(gauge.glance(&need(1, 1)?), None);
        // Numbers that come late open nothing.
        gauge.set(9 * PAGE, 8 * PAGE);
        assert_eq!(gauge.glance(&need(1, 1)?), None);
        assert!(Need::of(u64::MAX, PAGE).is_none());
        Ok(())
    }
}
