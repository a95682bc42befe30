// SPDX-License-Identifier: GPL-2.0

//! Lists of ranges: whether parts of a buffer can make up a dma-buf.
//!
//! The file is pure: it needs nothing but `core`, allocates nothing, cannot panic, takes no lock, and has no `unsafe`. The
//! module and the host tests of tests/suites/pure compile the same source.

/// A range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    /// First byte.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) size: u64,
}

/// What is wrong with a list of ranges. The first number is the index of the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RangeError {
    /// The list is empty.
    None,
    /// The range has no bytes.
    Empty(usize),
    /// Offset or size is not a multiple of the page size.
    Unaligned(usize),
    /// The range ends behind the end of the buffer.
    Outside(usize),
    /// The range overlaps an earlier one, whose index is the second number.
    Overlap(usize, usize),
}

impl Range {
    /// Returns the first byte behind the range, `None` on overflow.
    pub(crate) fn end(self) -> Option<u64> {
        self.offset.checked_add(self.size)
    }

    /// Returns both ranges as one, if `next` begins at the end of this one.
    pub(crate) fn join(self, next: Self) -> Option<Self> {
        if self.end() != Some(next.offset) {
            return None;
        }
        Some(Self {
            offset: self.offset,
            size: self.size.checked_add(next.size)?,
        })
    }

    /// Checks that the range has bytes and consists of whole pages. `at` is its index, for the error.
    pub(crate) fn check_pages(self, page: u64, at: usize) -> Result<(), RangeError> {
        if self.size == 0 {
            return Err(RangeError::Empty(at));
        }
        let aligned = |n: u64| n.checked_rem(page) == Some(0);
        if aligned(self.offset) && aligned(self.size) {
            Ok(())
        } else {
            Err(RangeError::Unaligned(at))
        }
    }
}

/// Checks that all ranges are whole pages within `size` bytes and that no two overlap. Returns the sum of their sizes.
pub(crate) fn check(ranges: &[Range], size: u64, page: u64) -> Result<u64, RangeError> {
    if ranges.is_empty() {
        return Err(RangeError::None);
    }
    let mut sum = 0_u64;
    for (at, range) in ranges.iter().enumerate() {
        range.check_pages(page, at)?;
        let end = range.end().filter(|&end| end <= size).ok_or(RangeError::Outside(at))?;
        for (before, other) in ranges.iter().enumerate().take(at) {
            // Earlier ranges have an end: they were checked.
            let other_end = other.end().unwrap_or(u64::MAX);
            if range.offset < other_end && other.offset < end {
                return Err(RangeError::Overlap(at, before));
            }
        }
        // Ranges do not overlap, so the sum is at most `size`.
        sum = sum.saturating_add(range.size);
    }
    Ok(sum)
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_ranges))]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn range(offset: u64, size: u64) -> Range {
        Range { offset, size }
    }

    fn pages(offset: u64, count: u64) -> Range {
        range(offset * PAGE, count * PAGE)
    }

    #[test]
    fn each_error_names_its_range() {
        let size = 16 * PAGE;
        let top = u64::MAX / PAGE * PAGE;
        let cases: [(&[Range], Result<u64, RangeError>); 13] = [
            (&[], Err(RangeError::None)),
            (&[pages(0, 16)], Ok(size)),
            (&[pages(3, 2), pages(0, 3)], Ok(5 * PAGE)),
            (&[pages(0, 1), pages(1, 0)], Err(RangeError::Empty(1))),
            (&[range(0, PAGE), range(PAGE + 1, PAGE)], Err(RangeError::Unaligned(1))),
            (&[range(0, PAGE - 1)], Err(RangeError::Unaligned(0))),
            (&[pages(15, 1), pages(16, 1)], Err(RangeError::Outside(1))),
            (&[pages(0, 17)], Err(RangeError::Outside(0))),
            (&[range(top, PAGE)], Err(RangeError::Outside(0))),
            (&[range(top, top)], Err(RangeError::Outside(0))),
            (&[range(PAGE, top)], Err(RangeError::Outside(0))),
            (&[pages(0, 4), pages(8, 1), pages(3, 2)], Err(RangeError::Overlap(2, 0))),
            (&[pages(0, 1), pages(4, 1), pages(4, 1)], Err(RangeError::Overlap(2, 1))),
        ];
        for (ranges, answer) in cases {
            assert_eq!(check(ranges, size, PAGE), answer);
        }
    }

    #[test]
    fn page_size_zero_is_unaligned() {
        assert_eq!(check(&[pages(0, 1)], PAGE, 0), Err(RangeError::Unaligned(0)));
    }

    #[test]
    fn adjacent_ranges_join() {
        assert_eq!(range(0, 8).join(range(8, 4)), Some(range(0, 12)));
        assert_eq!(range(8, 4).join(range(0, 8)), None);
        assert_eq!(range(0, 8).join(range(9, 4)), None);
        // Both ranges end before the last address, but the sum of their sizes overflows.
        assert_eq!(range(u64::MAX, 1).join(range(0, 1)), None);
        assert_eq!(range(1, u64::MAX - 1).join(range(u64::MAX, 2)), None);
    }
}
