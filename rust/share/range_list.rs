// SPDX-License-Identifier: GPL-2.0

//! The list of ranges of a dma-buf: its checks, and the messages for a list that fails them.
//!
//! Context: process context; [`append`] may sleep. No locks.

use crate::{
    ext::{
        abi::consts,
        refusal::{
            refuse,
            Answer,
            Refusal, //
        }, //
    },
    policy::ranges::{
        self,
        Range,
        RangeError, //
    }, //
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*, //
};

const PAGE: u64 = PAGE_SIZE as u64;

/// Checks that ranges can form a dma-buf of a buffer of `size` bytes, and returns the sum of their sizes.
///
/// Errors: `EINVAL`, with a message that names the range.
pub(crate) fn check(list: &[Range], size: u64) -> Answer<u64> {
    ranges::check(list, size, PAGE).map_err(|fault| explain(fault, list, size))
}

/// Returns the range of addresses at index `at`, if it is whole pages and does not overflow. Errors: `EINVAL`.
pub(crate) fn check_address(list: &[Range], at: usize) -> Answer<Range> {
    let range = list.get(at).copied().ok_or(EINVAL)?;
    range.check_pages(PAGE, at).map_err(|fault| explain(fault, list, 0))?;
    match range.end() {
        Some(_) => Ok(range),
        None => Err(refuse!(EINVAL, "range {} wraps around the address space", at)),
    }
}

/// Appends a range to the list, or extends the last range if both are adjacent.
///
/// Errors: `E2BIG` if the list has `P2PMEM_MAX_RANGES` ranges; `ENOMEM`.
pub(crate) fn append(list: &mut KVec<Range>, range: Range) -> Answer {
    if let Some(last) = list.last_mut() {
        if let Some(both) = last.join(range) {
            *last = both;
            return Ok(());
        }
    }
    if list.len() >= consts::MAX_RANGES as usize {
        return Err(too_many(list.len() as u64 + 1));
    }
    Ok(list.push(range, GFP_KERNEL_ACCOUNT)?)
}

pub(crate) fn too_many(count: u64) -> Refusal {
    refuse!(
        E2BIG,
        "{} ranges, at most {} are possible in one dma-buf",
        count,
        consts::MAX_RANGES
    )
}

/// Makes the refusal for an error in a list of ranges.
fn explain(fault: RangeError, list: &[Range], size: u64) -> Refusal {
    let of = |at: usize| {
        let none = Range { offset: 0, size: 0 };
        let range = list.get(at).copied().unwrap_or(none);
        (range.offset, range.size)
    };
    match fault {
        RangeError::None => refuse!(EINVAL, "a dma-buf needs a range: nr_ranges is 0"),
        RangeError::Empty(at) => refuse!(EINVAL, "range {} has 0 bytes", at),
        RangeError::Unaligned(at) => {
            let (offset, len) = of(at);
            refuse!(EINVAL, "range {} ({:#x}+{:#x}) is not whole pages", at, offset, len)
        }
        RangeError::Outside(at) => {
            let (offset, len) = of(at);
            refuse!(
                EINVAL,
                "range {} ({:#x}+{:#x}) reaches past the end of a buffer of {} bytes",
                at,
                offset,
                len,
                size
            )
        }
        RangeError::Overlap(at, before) => refuse!(EINVAL, "ranges {} and {} overlap", before, at),
    }
}

#[kunit_tests(p2pmem_range_list)]
mod tests {
    use super::*;

    fn pages(offset: u64, count: u64) -> Range {
        Range {
            offset: offset * PAGE,
            size: count * PAGE,
        }
    }

    #[test]
    fn each_range_error_has_a_message() {
        let size = 4 * PAGE;
        assert!(check(&[pages(1, 2)], size).is_ok_and(|sum| sum == 2 * PAGE));
        let wrong: [(&[Range], &str); 5] = [
            (&[], "a dma-buf needs a range: nr_ranges is 0"),
            (&[pages(0, 1), pages(1, 0)], "range 1 has 0 bytes"),
            (
                &[Range { offset: 1, size: PAGE }],
                "range 0 (0x1+0x1000) is not whole pages",
            ),
            (
                &[pages(3, 2)],
                "range 0 (0x3000+0x2000) reaches past the end of a buffer of 16384 bytes",
            ),
            (&[pages(0, 2), pages(3, 1), pages(1, 1)], "ranges 0 and 2 overlap"),
        ];
        for (list, said) in wrong {
            let refusal = check(list, size).err();
            assert!(refusal.is_some_and(|r| r.error == EINVAL && r.text().as_str() == said));
        }
    }

    #[test]
    fn wrapping_address_ranges_are_rejected() {
        let top = u64::MAX - PAGE + 1;
        assert!(check_address(&[pages(1, 1)], 0).is_ok_and(|r| r == pages(1, 1)));
        assert!(check_address(&[pages(1, 1)], 1).is_err_and(|r| r.error == EINVAL));
        assert!(check_address(&[pages(1, 0)], 0).is_err_and(|r| r.text().as_str() == "range 0 has 0 bytes"));
        let last = Range {
            offset: top,
            size: PAGE,
        };
        let refusal = check_address(&[last], 0).err();
        assert!(refusal.is_some_and(|r| r.text().as_str() == "range 0 wraps around the address space"));
    }

    #[test]
    fn adjacent_ranges_merge_and_count_is_limited() -> Result {
        let mut list = KVec::new();
        for at in 0..4 {
            assert!(append(&mut list, pages(at, 1)).is_ok());
        }
        assert_eq!(list.len(), 1);
        assert!(list.last() == Some(&pages(0, 4)));
        // Ranges in descending order are not joined.
        list.clear();
        let most = u64::from(consts::MAX_RANGES);
        for at in 0..most {
            assert!(append(&mut list, pages(2 * (most - at), 1)).is_ok());
        }
        assert_eq!(list.len() as u64, most);
        let refusal = append(&mut list, pages(4 * most, 1)).err();
        assert!(refusal.is_some_and(|r| r.error == E2BIG));
        assert_eq!(list.len() as u64, most);
        // A range that extends the last one fits into a full list.
        assert!(append(&mut list, pages(3, 7)).is_ok());
        assert!(list.last() == Some(&pages(2, 8)));
        Ok(())
    }
}
