// SPDX-License-Identifier: MIT OR Apache-2.0

//! Stripes: choosing several providers equals choosing one after the other, and a division covers all bytes.

use crate::decision::{decide, decide_several};
use crate::oracle::Provider;
use crate::placement_tests::cases;
use crate::policy::rule_effect::Preference;
use crate::policy::split::Split;
use crate::policy::{
    placement::Candidate,
    verdict::{
        Outcome,
        Verdict,
        VerdictCode, //
    }, //
};
use p2pmem_proptest::config;
use proptest::prelude::*;

proptest! {
    #![proptest_config(config(2000))]

    #[test]
    fn several_picks_equal_repeated_decisions((request, providers) in cases(), wanted in 1usize..6, shun: bool) {
        let candidates: Vec<Candidate<'_>> = providers.iter().map(Provider::candidate).collect();
        let mut verdicts = vec![Verdict::EMPTY; providers.len()];
        let mut picks = vec![usize::MAX; wanted];
        let (found, outcome) = decide_several(&request, &candidates, shun, &mut picks, &mut verdicts);
        // The same by choosing one of the remaining candidates, repeatedly.
        let mut left: Vec<usize> = (0..candidates.len()).collect();
        if shun {
            left.retain(|&at| candidates[at].effect.preference != Preference::Avoid);
        }
        let mut expected = Vec::new();
        let mut end = Outcome::NoProvider;
        while expected.len() < wanted {
            let rest: Vec<_> = left.iter().map(|&at| candidates[at]).collect();
            let decision = decide(&request, &rest, &mut []);
            end = decision.outcome;
            let Some(at) = decision.chosen else { break };
            expected.push(left.remove(at));
        }
        prop_assert_eq!(&picks[..found], &expected[..]);
        // With `shun`, the reason may be that of a provider that was not considered.
        prop_assert!(outcome == end || shun && found < wanted);
        let chosen: Vec<usize> = (0..verdicts.len()).filter(|&at| verdicts[at].code == VerdictCode::Chosen).collect();
        if found == wanted {
            expected.sort_unstable();
            prop_assert_eq!(chosen, expected);
        } else {
            prop_assert!(chosen.is_empty());
            prop_assert!(expected.iter().all(|&at| verdicts[at].code == VerdictCode::TooFew));
        }
    }

    #[test]
    fn single_pick_equals_decision((request, providers) in cases()) {
        let candidates: Vec<Candidate<'_>> = providers.iter().map(Provider::candidate).collect();
        let (mut one, mut verdicts) = ([0], vec![Verdict::EMPTY; providers.len()]);
        let (found, outcome) = decide_several(&request, &candidates, false, &mut one, &mut verdicts);
        let mut plain = vec![Verdict::EMPTY; providers.len()];
        let decision = decide(&request, &candidates, &mut plain);
        prop_assert_eq!((found == 1).then_some(one[0]), decision.chosen);
        prop_assert_eq!((outcome, verdicts), (decision.outcome, plain));
    }

    #[test]
    fn split_covers_whole_size(pages in 1u64..5000, parts in 1usize..17, order in 0u32..12) {
        const PAGE: u64 = 4096;
        let align = PAGE << order;
        let size = pages * PAGE;
        let split = Split::new(size, parts as u64, PAGE, align);
        // A division in whole pages exists if no part would be empty.
        let share = pages.div_ceil(parts as u64);
        prop_assert_eq!(split.is_some(), share * (parts as u64 - 1) < pages);
        let Some(split) = split else { return Ok(()) };
        let mut end = 0;
        for part in 0..parts {
            let (offset, size) = split.part(part);
            prop_assert_eq!(offset, end);
            prop_assert!(size > 0 && size % PAGE == 0);
            prop_assert!(size == split.share() || part + 1 == parts && size < split.share());
            end += size;
        }
        prop_assert_eq!(end, size);
        prop_assert_eq!(split.part(parts), (size, 0));
    }
}
