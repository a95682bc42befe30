// SPDX-License-Identifier: GPL-2.0

//! Lists of ranges: whether parts of a buffer can make up a dma-buf.
//!
//! The file is pure: it needs nothing but `core`, allocates nothing, cannot panic, and holds no `unsafe`. The same text
//! is compiled into the module and into the host tests of tests/pure.

/// A range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    /// First byte.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) size: u64,
}

/// What is wrong with a list of ranges, and with which of them (an index).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// There is none.
    None,
    /// It has no bytes.
    Empty(usize),
    /// Its offset or its size is no whole number of pages.
    Unaligned(usize),
    /// It ends behind what there is.
    Outside(usize),
    /// It shares bytes with an earlier one, whose index comes second.
    Overlap(usize, usize),
}

impl Range {
    /// First byte behind it; none where there is no such number.
    pub(crate) fn end(self) -> Option<u64> {
        self.offset.checked_add(self.size)
    }

    /// Both as one, where `next` begins at the end of this one.
    pub(crate) fn join(self, next: Self) -> Option<Self> {
        if self.end() != Some(next.offset) {
            return None;
        }
        Some(Self {
            offset: self.offset,
            size: self.size.checked_add(next.size)?,
        })
    }

    /// Whether it has bytes and consists of whole pages. `at` is its index, for the answer.
    pub(crate) fn check_pages(self, page: u64, at: usize) -> Result<(), Fault> {
        if self.size == 0 {
            return Err(Fault::Empty(at));
        }
        let aligned = |n: u64| n.checked_rem(page) == Some(0);
        if aligned(self.offset) && aligned(self.size) {
            Ok(())
        } else {
            Err(Fault::Unaligned(at))
        }
    }
}

/// Whether all ranges are whole pages of something that is `size` bytes long, and no two overlap. Returns their sum.
pub(crate) fn check(ranges: &[Range], size: u64, page: u64) -> Result<u64, Fault> {
    if ranges.is_empty() {
        return Err(Fault::None);
    }
    let mut sum = 0_u64;
    for (at, range) in ranges.iter().enumerate() {
        range.check_pages(page, at)?;
        let end = range.end().filter(|&end| end <= size).ok_or(Fault::Outside(at))?;
        for (before, other) in ranges.iter().enumerate().take(at) {
            // The earlier ones were found to end somewhere.
            let other_end = other.end().unwrap_or(u64::MAX);
            if range.offset < other_end && other.offset < end {
                return Err(Fault::Overlap(at, before));
            }
        }
        // They do not overlap, so that the sum is at most `size`.
        sum = sum.saturating_add(range.size);
    }
    Ok(sum)
}
