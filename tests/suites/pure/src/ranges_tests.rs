// SPDX-License-Identifier: MIT OR Apache-2.0

//! Lists of ranges: random lists compared with a count of pages. Named cases are in `ranges.rs` itself.

use crate::policy::ranges::{
    Range,
    check, //
};
use proptest::prelude::*;

const PAGE: u64 = 4096;

fn list(pages: &[(u64, u64)]) -> Vec<Range> {
    let range = |&(offset, size)| Range {
        offset: offset * PAGE,
        size: size * PAGE,
    };
    pages.iter().map(range).collect()
}

proptest! {
    #[test]
    fn list_is_valid_if_no_page_repeats(
        pages in prop::collection::vec((0_u64..20, 0_u64..6), 0..8),
        size in 0_u64..20,
    ) {
        let ranges = list(&pages);
        let mut counts = vec![0; 32];
        for &(offset, len) in &pages {
            for page in offset..offset + len {
                counts[page as usize] += 1;
            }
        }
        let fine = !pages.is_empty()
            && pages.iter().all(|&(offset, len)| len > 0 && offset + len <= size)
            && counts.iter().all(|&count| count <= 1);
        let answer = check(&ranges, size * PAGE, PAGE);
        prop_assert_eq!(answer.is_ok(), fine, "{:?}", answer);
        if let Ok(sum) = answer {
            prop_assert_eq!(sum, PAGE * counts.iter().sum::<u64>());
        }
    }

    #[test]
    fn arbitrary_values_do_not_overflow(
        ranges in prop::collection::vec((any::<u64>(), any::<u64>()), 0..6),
        size: u64,
        aligned: bool,
    ) {
        let mask = if aligned { !(PAGE - 1) } else { !0 };
        let ranges: Vec<_> = ranges
            .iter()
            .map(|&(offset, size)| Range { offset: offset & mask, size: size & mask })
            .collect();
        if let Ok(sum) = check(&ranges, size, PAGE) {
            prop_assert!(sum <= size && !ranges.is_empty());
        }
    }

    #[test]
    fn join_has_bytes_of_both_ranges(a: (u64, u64), b: (u64, u64)) {
        let range = |(offset, size)| Range { offset, size };
        let touching = (a.0.wrapping_add(a.1), b.1);
        for next in [b, touching] {
            if let Some(both) = range(a).join(range(next)) {
                prop_assert_eq!(both.offset, a.0);
                prop_assert_eq!(u128::from(both.size), u128::from(a.1) + u128::from(next.1));
                prop_assert_eq!(u128::from(a.0) + u128::from(a.1), u128::from(next.0));
            }
        }
    }
}
