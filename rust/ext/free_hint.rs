// SPDX-License-Identifier: GPL-2.0

//! What a provider has, for those who do not want to wait for its locks.

use crate::policy::ranking::{
    Capacity,
    FitHint, //
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Relaxed, Release},
        Arc,
    },
};

/// Bytes to take so that a place for `size` bytes at `align` is among them wherever they begin.
pub(crate) fn padded(size: u64, align: u64) -> u64 {
    size.saturating_add(align.saturating_sub(PAGE_SIZE as u64))
}

/// What it takes for a request to fit for sure, and for sure not to.
pub(crate) struct Need {
    /// A free piece of that many bytes has room for it, whether it begins anywhere or is a block that begins at a multiple
    /// of its size.
    enough: u64,
    /// If no more bytes are free than this many, it does not fit.
    short: u64,
}

impl Need {
    /// `size` bytes, a multiple of the page size, at `align`. None where nothing has room for that.
    pub(crate) fn of(size: u64, align: u64) -> Option<Self> {
        let block = size.max(align).checked_next_power_of_two()?;
        Some(Self {
            enough: block.max(padded(size, align)),
            short: size.checked_sub(PAGE_SIZE as u64)?,
        })
    }
}

/// What a provider has: true unless something changes at this moment.
pub(crate) struct FreeHint {
    free: Atomic<u64>,
    piece: Atomic<u64>,
    /// Or [`CLOSED`].
    returning: Atomic<u64>,
    /// How often returning bytes have come to be free.
    returns: Atomic<u64>,
}

/// Returning bytes of what has nothing any more: no BAR has as many.
const CLOSED: u64 = 1 << 63;

/// A relaxed load that takes no call: in most kernels the crate's own is one, to a function in C.
fn peek(word: &Atomic<u64>) -> u64 {
    // SAFETY: The pointer is that of a reference. All writes are atomic ones, and reading an aligned word in one go is
    // what a relaxed load is.
    unsafe { word.as_ptr().read_volatile() }
}

impl FreeHint {
    pub(crate) fn new() -> Result<Arc<Self>> {
        let hint = Self {
            free: Atomic::new(0),
            piece: Atomic::new(0),
            returning: Atomic::new(0),
            returns: Atomic::new(0),
        };
        Ok(Arc::new(hint, GFP_KERNEL)?)
    }

    /// Free bytes, and the largest piece that is known: it begins anywhere, or is a block that begins at a multiple of its
    /// size. Only one at a time may say.
    pub(crate) fn set(&self, free: u64, piece: u64) {
        self.piece.store(piece, Relaxed);
        self.free.store(free, Release);
    }

    /// Bytes that are as good as free, as they will be in a moment, and how often such have come to be free. Bytes are said
    /// here before they are missing from the free ones, and until they are there again. Only one at a time may say, and not
    /// after [`Self::close`].
    pub(crate) fn set_returning(&self, bytes: u64, returns: u64) {
        self.returns.store(returns, Release);
        self.returning.store(bytes, Release);
    }

    /// From here on there is nothing to be had.
    pub(crate) fn close(&self) {
        self.returning.store(CLOSED, Relaxed);
    }

    /// Free bytes, the largest piece that is known, and whether the request fits. Unknown where nothing is to be had any more,
    /// too.
    #[inline(always)]
    pub(crate) fn fit(&self, need: &Need) -> FitHint {
        // Both are bytes of one BAR.
        let free = peek(&self.free).wrapping_add(peek(&self.returning));
        let largest = peek(&self.piece);
        if free >= CLOSED {
            return FitHint::Unknown;
        }
        if need.enough <= largest {
            return FitHint::Fits(Capacity { free, largest });
        }
        if free <= need.short && self.is_short(need) {
            let largest = largest.min(need.short);
            return FitHint::Short(Capacity { free, largest });
        }
        FitHint::Unknown
    }

    /// Whether too little is free for sure: bytes that move between free and returning count once at least.
    #[cold]
    fn is_short(&self, need: &Need) -> bool {
        let returns = self.returns.load(Acquire);
        let before = self.returning.load(Acquire);
        let free = self.free.load(Acquire);
        let after = self.returning.load(Acquire);
        let most = free.wrapping_add(before.max(after));
        most <= need.short && returns == self.returns.load(Acquire)
    }
}

#[kunit_tests(p2pmem_gauge)]
mod tests {
    use super::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn need(pages: u64, align: u64) -> Result<Need> {
        Need::of(pages * PAGE, align * PAGE).ok_or(EINVAL)
    }

    fn fits(free: u64, largest: u64) -> FitHint {
        FitHint::Fits(Capacity { free, largest })
    }

    fn short(free: u64, largest: u64) -> FitHint {
        FitHint::Short(Capacity { free, largest })
    }

    #[test]
    fn what_fits_for_sure_is_said() -> Result {
        let hint = FreeHint::new()?;
        hint.set(12 * PAGE, 8 * PAGE);
        for small in [need(8, 1)?, need(5, 1)?, need(1, 8)?, need(4, 4)?] {
            assert_eq!(hint.fit(&small), fits(12 * PAGE, 8 * PAGE));
        }
        // It may fit into blocks side by side, or into the piece as it lies, or not.
        for unknown in [need(9, 1)?, need(12, 1)?, need(2, 8)?, need(1, 16)?] {
            assert_eq!(hint.fit(&unknown), FitHint::Unknown);
        }
        // For sure it does not.
        assert_eq!(hint.fit(&need(13, 1)?), short(12 * PAGE, 8 * PAGE));
        hint.set(3 * PAGE, 8 * PAGE);
        assert_eq!(hint.fit(&need(9, 1)?), short(3 * PAGE, 8 * PAGE));
        Ok(())
    }

    #[test]
    fn what_comes_back_counts_and_what_is_closed_has_nothing() -> Result {
        let hint = FreeHint::new()?;
        hint.set(PAGE, PAGE);
        hint.set_returning(3 * PAGE, 1);
        assert_eq!(hint.fit(&need(1, 1)?), fits(4 * PAGE, PAGE));
        assert_eq!(hint.fit(&need(2, 1)?), FitHint::Unknown);
        assert_eq!(hint.fit(&need(5, 1)?), short(4 * PAGE, PAGE));
        hint.close();
        assert_eq!(hint.fit(&need(1, 1)?), FitHint::Unknown);
        // Numbers that come late open nothing.
        hint.set(9 * PAGE, 8 * PAGE);
        assert_eq!(hint.fit(&need(1, 1)?), FitHint::Unknown);
        assert!(Need::of(u64::MAX, PAGE).is_none() && Need::of(0, PAGE).is_none());
        Ok(())
    }
}
