// SPDX-License-Identifier: GPL-2.0

//! A lock-free hint of a provider's free memory.
//!
//! The owner of the provider's locks writes the hint; allocations read it without a lock to decide whether a provider can
//! serve a request. Nothing here sleeps or takes a lock, so all functions run in any context. All sizes are bytes.
//!
//! No C header: the hint consists of [`kernel::sync::atomic`] types.

use crate::policy::ranking::Capacity;
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Relaxed, Release},
        Arc,
    },
};

/// Returns how many bytes always contain `size` bytes aligned to `align`, at whatever page they begin.
pub(crate) fn padded(size: u64, align: u64) -> u64 {
    size.saturating_add(align.saturating_sub(PAGE_SIZE as u64))
}

/// A request's needs: bounds for when it fits and when it does not fit.
pub(crate) struct FitBounds {
    /// A free piece of at least this size fits, whether it begins at any page or is a block aligned to its size.
    enough: u64,
    /// If at most this many bytes are free, the request does not fit.
    short: u64,
}

impl FitBounds {
    /// Computes the needs of `size` bytes, a multiple of the page size, aligned to `align`.
    pub(crate) fn of(size: u64, align: u64) -> Self {
        let block = size.max(align).checked_next_power_of_two().unwrap_or(u64::MAX);
        Self {
            enough: block.max(padded(size, align)),
            short: size.saturating_sub(PAGE_SIZE as u64),
        }
    }

    /// Returns whether the request fits for certain.
    #[inline(always)]
    pub(crate) fn are_met(&self, has: &Capacity) -> bool {
        has.is_live() && self.enough <= has.largest
    }
}

/// What a free-space hint says about a request: whether size and alignment fit, and the provider's capacity. `Unknown` if
/// the hint can prove neither: more than [`Capacity::largest`] may be in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FitHint {
    Fits(Capacity),
    Short(Capacity),
    Unknown(Capacity),
}

/// A provider's free memory, as of the last change.
///
/// One writer at a time: callers hold the provider's lock for [`Self::set`] and [`Self::set_returning`].
pub(crate) struct FreeHint {
    free: Atomic<u64>,
    piece: Atomic<u64>,
    /// Bytes that are about to be free, or [`CLOSED`].
    returning: Atomic<u64>,
    /// How many times returning bytes have become free.
    returns: Atomic<u64>,
}

/// The value of `returning` for a closed hint. No BAR is as large.
const CLOSED: u64 = 1 << 63;

/// Loads an atomic with relaxed ordering, inline.
///
/// In most kernel configurations the kernel crate's own load is a call of a C function.
fn peek(word: &Atomic<u64>) -> u64 {
    // SAFETY: The pointer is derived from a reference, so it is valid and aligned. All writes are atomic, and a volatile
    // load of an aligned word is the kernel's relaxed atomic load (`READ_ONCE()`).
    unsafe { word.as_ptr().read_volatile() }
}

impl FreeHint {
    /// Creates the hint of a provider without free memory. Errors: `ENOMEM`.
    pub(crate) fn new() -> Result<Arc<Self>> {
        let hint = Self {
            free: Atomic::new(0),
            piece: Atomic::new(0),
            returning: Atomic::new(0),
            returns: Atomic::new(0),
        };
        Ok(Arc::new(hint, GFP_KERNEL)?)
    }

    /// Sets the free bytes and the size of the largest known piece.
    ///
    /// The piece begins at any page, or is a block aligned to its size. Callers hold the provider's lock.
    pub(crate) fn set(&self, free: u64, piece: u64) {
        self.piece.store(piece, Relaxed);
        self.free.store(free, Release);
    }

    /// Sets the bytes that are about to be free, and how many times such bytes have become free.
    ///
    /// Bytes must be counted as returning before they are missing from the free bytes, and until they are counted as free
    /// again. Callers hold the provider's lock, and do not call this after [`Self::close`].
    pub(crate) fn set_returning(&self, bytes: u64, returns: u64) {
        self.returns.store(returns, Release);
        self.returning.store(bytes, Release);
    }

    /// Closes the hint: [`Self::fit`] returns `Short` with [`Capacity::REMOVED`] from now on.
    pub(crate) fn close(&self) {
        self.returning.store(CLOSED, Relaxed);
    }

    /// Returns the capacity at this moment. More than the largest piece may be in one piece.
    #[inline(always)]
    pub(crate) fn capacity(&self) -> Capacity {
        Capacity {
            // Cannot overflow into `CLOSED`: both are sizes within one BAR, unless the hint is closed.
            free: peek(&self.free).wrapping_add(peek(&self.returning)),
            largest: peek(&self.piece),
        }
    }

    /// Returns whether the request fits, does not fit, or is unknown, with the capacity at this moment.
    #[inline(always)]
    pub(crate) fn fit(&self, need: &FitBounds) -> FitHint {
        let has = self.capacity();
        if need.are_met(&has) {
            return FitHint::Fits(has);
        }
        if !has.is_live() {
            return FitHint::Short(Capacity::REMOVED);
        }
        let Capacity { free, largest } = has;
        if free <= need.short && self.is_short(need) {
            let largest = largest.min(need.short);
            return FitHint::Short(Capacity { free, largest });
        }
        FitHint::Unknown(Capacity { free, largest })
    }

    /// Returns whether certainly too little is free.
    ///
    /// Bytes that move between free and returning are counted at least once: `returning` is read before and after `free`,
    /// and `returns` counts bytes that moved meanwhile.
    #[cold]
    fn is_short(&self, need: &FitBounds) -> bool {
        let returns = self.returns.load(Acquire);
        let before = self.returning.load(Acquire);
        let free = self.free.load(Acquire);
        let after = self.returning.load(Acquire);
        let most = free.wrapping_add(before.max(after));
        most <= need.short && returns == self.returns.load(Acquire)
    }
}

#[kunit_tests(p2pmem_free_hint)]
mod tests {
    use super::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn need(pages: u64, align: u64) -> FitBounds {
        FitBounds::of(pages * PAGE, align * PAGE)
    }

    fn fits(free: u64, largest: u64) -> FitHint {
        FitHint::Fits(Capacity { free, largest })
    }

    fn short(free: u64, largest: u64) -> FitHint {
        FitHint::Short(Capacity { free, largest })
    }

    fn unknown(free: u64, largest: u64) -> FitHint {
        FitHint::Unknown(Capacity { free, largest })
    }

    #[test]
    fn fit_is_reported_only_if_certain() -> Result {
        let hint = FreeHint::new()?;
        hint.set(12 * PAGE, 8 * PAGE);
        for small in [need(8, 1), need(5, 1), need(1, 8), need(4, 4)] {
            assert_eq!(hint.fit(&small), fits(12 * PAGE, 8 * PAGE));
        }
        // These may fit into adjacent blocks or unaligned into the piece, or not at all.
        for uncertain in [need(9, 1), need(12, 1), need(2, 8), need(1, 16)] {
            assert_eq!(hint.fit(&uncertain), unknown(12 * PAGE, 8 * PAGE));
        }
        // These do not fit.
        assert_eq!(hint.fit(&need(13, 1)), short(12 * PAGE, 8 * PAGE));
        hint.set(3 * PAGE, 8 * PAGE);
        assert_eq!(hint.fit(&need(9, 1)), short(3 * PAGE, 8 * PAGE));
        Ok(())
    }

    #[test]
    fn returning_memory_counts_and_closed_hint_has_none() -> Result {
        let hint = FreeHint::new()?;
        hint.set(PAGE, PAGE);
        hint.set_returning(3 * PAGE, 1);
        assert_eq!(hint.fit(&need(1, 1)), fits(4 * PAGE, PAGE));
        assert_eq!(hint.fit(&need(2, 1)), unknown(4 * PAGE, PAGE));
        assert_eq!(hint.fit(&need(5, 1)), short(4 * PAGE, PAGE));
        hint.close();
        assert_eq!(hint.fit(&need(1, 1)), FitHint::Short(Capacity::REMOVED));
        // A late update does not reopen the hint.
        hint.set(9 * PAGE, 8 * PAGE);
        assert_eq!(hint.fit(&need(1, 1)), FitHint::Short(Capacity::REMOVED));
        // No memory is that large.
        let hint = FreeHint::new()?;
        hint.set(9 * PAGE, 8 * PAGE);
        assert_eq!(hint.fit(&FitBounds::of(u64::MAX, PAGE)), short(9 * PAGE, 8 * PAGE));
        Ok(())
    }
}
