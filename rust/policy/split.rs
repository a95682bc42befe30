// SPDX-License-Identifier: GPL-2.0

//! Division of a stripe into parts.
//!
//! The file is pure: it needs nothing but `core`, allocates nothing, cannot panic, takes no lock, and has no `unsafe`. The
//! module and the host tests of tests/suites/pure compile the same source.

/// A size in equal parts, of which the last one may be smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Split {
    size: u64,
    parts: u64,
    share: u64,
}

impl Split {
    /// Divides `size` bytes into `parts`. `page` is the page size in bytes, and `size` is a multiple of it. Boundaries are
    /// multiples of `align` if a part is that large and no part becomes empty, else of `page`. `None` if a part would be
    /// empty even so. A single part has the whole size.
    pub(crate) fn new(size: u64, parts: u64, page: u64, align: u64) -> Option<Self> {
        if parts == 1 && size > 0 {
            return Some(Self {
                size,
                parts,
                share: size,
            });
        }
        let even = size.div_ceil(parts.max(1));
        let unit = if even >= align { align.max(page) } else { page };
        [unit, page].into_iter().find_map(|unit| {
            let share = even.checked_next_multiple_of(unit.max(1))?;
            let before = share.checked_mul(parts.checked_sub(1)?)?;
            (before < size).then_some(Self { size, parts, share })
        })
    }

    /// Returns the size of all parts but the last, which is not larger.
    pub(crate) fn share(&self) -> u64 {
        self.share
    }

    /// Returns offset and size of a part, in bytes.
    pub(crate) fn part(&self, at: usize) -> (u64, u64) {
        let offset = self.share.saturating_mul(at as u64).min(self.size);
        (offset, self.share.min(self.size.saturating_sub(offset)))
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_split))]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    #[test]
    fn parts_are_equal_but_for_the_last() {
        let split = Split::new(10 * PAGE, 4, PAGE, PAGE).map(|split| [0, 1, 2, 3].map(|at| split.part(at)));
        let want = [(0, 3), (3, 3), (6, 3), (9, 1)].map(|(at, pages)| (at * PAGE, pages * PAGE));
        assert_eq!(split, Some(want));
        let whole = Split::new(3 * PAGE, 1, PAGE, PAGE).map(|split| (split.share(), split.part(0)));
        assert_eq!(whole, Some((3 * PAGE, (0, 3 * PAGE))));
    }

    #[test]
    fn boundaries_are_aligned_if_no_part_becomes_empty() {
        let share = |pages, parts, align| Split::new(pages * PAGE, parts, PAGE, align * PAGE).map(|s| s.share() / PAGE);
        assert_eq!(share(1024, 2, 512), Some(512));
        assert_eq!(share(1025, 2, 512), Some(1024));
        assert_eq!(share(100, 2, 512), Some(50));
        // With alignment the last part would be empty; in whole pages it is not.
        assert_eq!(share(1030, 3, 256), Some(512));
        assert_eq!(share(1024, 3, 341), Some(342));
    }

    #[test]
    fn split_with_empty_part_is_rejected() {
        assert_eq!(Split::new(5 * PAGE, 4, PAGE, PAGE), None);
        assert_eq!(Split::new(PAGE, 2, PAGE, PAGE), None);
        assert_eq!(Split::new(PAGE, 0, PAGE, PAGE), None);
        assert_eq!(Split::new(0, 1, PAGE, PAGE), None);
        assert!(Split::new(u64::MAX / PAGE * PAGE, 3, PAGE, 1 << 30).is_some());
    }
}
