// SPDX-License-Identifier: MIT OR Apache-2.0

//! Lists of ranges: each kind of fault, and random lists against a count of pages.

use crate::ranges::{Fault, Range, check};
use proptest::prelude::*;

const PAGE: u64 = 4096;

fn list(pages: &[(u64, u64)]) -> Vec<Range> {
    let range = |&(offset, size)| Range {
        offset: offset * PAGE,
        size: size * PAGE,
    };
    pages.iter().map(range).collect()
}

#[test]
fn each_fault_names_its_range() {
    let size = 16 * PAGE;
    let top = u64::MAX / PAGE * PAGE;
    let range = |offset, size| Range { offset, size };
    let cases = [
        (vec![], Err(Fault::None)),
        (list(&[(0, 16)]), Ok(size)),
        (list(&[(3, 2), (0, 3)]), Ok(5 * PAGE)),
        (list(&[(0, 1), (1, 0)]), Err(Fault::Empty(1))),
        (vec![range(0, PAGE), range(PAGE + 1, PAGE)], Err(Fault::Unaligned(1))),
        (vec![range(0, PAGE - 1)], Err(Fault::Unaligned(0))),
        (list(&[(15, 1), (16, 1)]), Err(Fault::Outside(1))),
        (list(&[(0, 17)]), Err(Fault::Outside(0))),
        (vec![range(top, PAGE)], Err(Fault::Outside(0))),
        (vec![range(top, top)], Err(Fault::Outside(0))),
        (vec![range(PAGE, top)], Err(Fault::Outside(0))),
        (list(&[(0, 4), (8, 1), (3, 2)]), Err(Fault::Overlap(2, 0))),
        (list(&[(0, 1), (4, 1), (4, 1)]), Err(Fault::Overlap(2, 1))),
    ];
    for (ranges, answer) in cases {
        assert_eq!(check(&ranges, size, PAGE), answer, "{ranges:?}");
    }
}

#[test]
fn a_page_of_no_bytes_aligns_nothing() {
    assert_eq!(check(&list(&[(0, 1)]), PAGE, 0), Err(Fault::Unaligned(0)));
}

#[test]
fn ranges_join_at_a_common_end() {
    let range = |offset, size| Range { offset, size };
    assert_eq!(range(0, 8).join(range(8, 4)), Some(range(0, 12)));
    assert_eq!(range(8, 4).join(range(0, 8)), None);
    assert_eq!(range(0, 8).join(range(9, 4)), None);
    // Both end before the last address, but are together longer than there are addresses.
    assert_eq!(range(u64::MAX, 1).join(range(0, 1)), None);
    assert_eq!(range(1, u64::MAX - 1).join(range(u64::MAX, 2)), None);
}

proptest! {
    #[test]
    fn a_list_is_fine_where_no_page_is_counted_twice(
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
    fn numbers_of_any_size_have_an_answer(
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
    fn a_join_has_the_bytes_of_both(a: (u64, u64), b: (u64, u64)) {
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
