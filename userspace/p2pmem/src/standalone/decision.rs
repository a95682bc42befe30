// SPDX-License-Identifier: MIT OR Apache-2.0

//! The choice of memory in a backend without the module: the strategy nearest, without rules.

use std::cmp::Reverse;

use p2pmem_sys as abi;

use crate::addr::PciAddr;
use crate::sys::page_size;
use crate::types::{human_size, Path, PathClass};

/// Memory that could serve a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) id: u32,
    pub(crate) addr: PciAddr,
    pub(crate) size: u64,
    pub(crate) free: u64,
    /// Size of the largest piece, as in `Found` of a source.
    pub(crate) largest: u64,
    /// The path to each client.
    pub(crate) paths: Vec<Path>,
}

/// A decision, in the form of the module's explanation.
#[derive(Debug, Clone, Default)]
pub(crate) struct Decision {
    pub(crate) verdicts: Vec<abi::p2pmem_verdict>,
    pub(crate) text: String,
    pub(crate) error: i32,
    pub(crate) chosen: u32,
}

impl Decision {
    /// Returns the decision for an error that is not about memory: no verdicts.
    pub(crate) fn refusal(error: i32, text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            error,
            ..Self::default()
        }
    }

    /// Returns the class of the path between the chosen memory and its farthest client; 0 without clients.
    pub(crate) fn class(&self) -> u32 {
        let chosen = self.verdicts.iter().find(|verdict| verdict.provider == self.chosen);
        chosen.map_or(0, |verdict| verdict.class)
    }
}

/// The criteria of the module's strategy nearest, the most important first. The smallest value is chosen.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    class: Option<PathClass>,
    hops: u32,
    bandwidth: Reverse<u32>,
    /// The largest distance, the maximum if unknown.
    numa: u32,
    /// The used part of the memory, in permille.
    load: u64,
    /// Size of the largest piece.
    largest: Reverse<u64>,
    id: u32,
}

impl Rank {
    /// Returns the code of the criterion by which the rank differs from that of the chosen candidate.
    fn lost(&self, chosen: &Self) -> u32 {
        match () {
            () if self.class != chosen.class => abi::P2PMEM_VERDICT_CLASS,
            () if self.hops != chosen.hops => abi::P2PMEM_VERDICT_HOPS,
            () if self.bandwidth != chosen.bandwidth => abi::P2PMEM_VERDICT_BANDWIDTH,
            () if self.numa != chosen.numa => abi::P2PMEM_VERDICT_NUMA,
            () if self.load != chosen.load => abi::P2PMEM_VERDICT_LOAD,
            () if self.largest != chosen.largest => abi::P2PMEM_VERDICT_SPACE,
            () => abi::P2PMEM_VERDICT_ORDER,
        }
    }
}

/// The distance between a candidate and all clients.
struct Reach {
    worst: Option<(PathClass, usize)>,
    hops: u32,
    /// The narrowest link, 0 if unknown.
    bandwidth: u32,
    /// The largest distance, 0 if unknown.
    numa: u32,
}

impl Reach {
    fn of(candidate: &Candidate) -> Self {
        let paths = || candidate.paths.iter();
        let farthest = paths()
            .enumerate()
            .max_by_key(|(client, path)| (path.class, path.hops, Reverse(*client)));
        Self {
            worst: farthest.map(|(client, path)| (path.class, client)),
            hops: paths().map(|path| path.hops).fold(0, u32::saturating_add),
            bandwidth: paths().filter_map(|path| path.bandwidth).min().unwrap_or(0),
            numa: paths().filter_map(|path| path.numa_distance).max().unwrap_or(0),
        }
    }

    fn rank(&self, candidate: &Candidate) -> Rank {
        let used = u128::from(candidate.size.saturating_sub(candidate.free));
        let load = (used * 1000).checked_div(u128::from(candidate.size)).unwrap_or(0);
        Rank {
            class: self.worst.map(|(class, _)| class),
            hops: self.hops,
            bandwidth: Reverse(self.bandwidth),
            numa: if self.numa == 0 { u32::MAX } else { self.numa },
            load: u64::try_from(load).unwrap_or(1000),
            largest: Reverse(candidate.largest),
            id: candidate.id,
        }
    }
}

/// Chooses memory for a request.
pub(crate) fn decide(candidates: &[Candidate], request: &abi::p2pmem_request) -> Decision {
    let size = request.size.checked_next_multiple_of(page_size()).unwrap_or(u64::MAX);
    let prefers = request.flags & abi::P2PMEM_ALLOC_PREFER != 0;
    let reaches: Vec<_> = candidates.iter().map(Reach::of).collect();
    let mut verdicts: Vec<_> = candidates
        .iter()
        .zip(&reaches)
        .map(|(candidate, reach)| verdict(candidate, reach, request, size, prefers))
        .collect();
    let named = |id: u32| prefers && id == request.provider;
    let best = candidates
        .iter()
        .zip(&reaches)
        .zip(&verdicts)
        .filter(|(_, verdict)| verdict.code == 0)
        .map(|((candidate, reach), _)| (!named(candidate.id), reach.rank(candidate)))
        .min();
    let mut chosen = None;
    if let Some((not_named, rank)) = best {
        for ((candidate, reach), verdict) in candidates.iter().zip(&reaches).zip(&mut verdicts) {
            if verdict.code != 0 {
                continue;
            }
            let own = reach.rank(candidate);
            verdict.code = if own.id == rank.id {
                chosen = Some(candidate);
                abi::P2PMEM_VERDICT_CHOSEN
            } else if !not_named {
                abi::P2PMEM_VERDICT_NOT_NAMED
            } else {
                own.lost(&rank)
            };
        }
    }
    let short = verdicts
        .iter()
        .any(|verdict| [abi::P2PMEM_VERDICT_FULL, abi::P2PMEM_VERDICT_FRAGMENTED].contains(&verdict.code));
    let (error, text) = match chosen {
        Some(chosen) => (0, format!("{} was chosen", chosen.addr)),
        None if short => (libc::ENOSPC, format!("no provider has {} free", human_size(size))),
        None => (
            libc::ENODEV,
            format!("no provider could ever serve {}", human_size(size)),
        ),
    };
    Decision {
        verdicts,
        text,
        error,
        chosen: chosen.map_or(0, |chosen| chosen.id),
    }
}

/// Returns the verdict on a candidate. The code is 0 if the candidate can serve the request.
fn verdict(
    candidate: &Candidate,
    reach: &Reach,
    request: &abi::p2pmem_request,
    size: u64,
    prefers: bool,
) -> abi::p2pmem_verdict {
    let class = reach.worst.map_or(0, |(class, _)| class.to_raw());
    let code = if request.provider != 0 && request.provider != candidate.id && !prefers {
        abi::P2PMEM_VERDICT_NOT_NAMED
    } else if class == abi::P2PMEM_PATH_UNREACHABLE {
        abi::P2PMEM_VERDICT_UNREACHABLE
    } else if request.max_class != 0 && class > request.max_class {
        abi::P2PMEM_VERDICT_TOO_FAR
    } else if candidate.size < size {
        abi::P2PMEM_VERDICT_TOO_SMALL
    } else if candidate.free < size {
        abi::P2PMEM_VERDICT_FULL
    } else if candidate.largest < size {
        abi::P2PMEM_VERDICT_FRAGMENTED
    } else {
        0
    };
    abi::p2pmem_verdict {
        provider: candidate.id,
        code,
        addr: candidate.addr.into(),
        worst_client: reach.worst.map_or(0, |(_, client)| client as u32),
        class,
        hops: reach.hops,
        bandwidth: reach.bandwidth,
        numa_distance: reach.numa,
        rule_set: abi::P2PMEM_RULES_NONE,
        size: candidate.size,
        free: candidate.free,
        largest: candidate.largest,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn path(class: PathClass, hops: u32, bandwidth: Option<u32>, numa: Option<u32>) -> Path {
        Path {
            provider: 0,
            client: 0,
            class,
            acs_redirect: false,
            bus_addr: false,
            hops,
            distance: Some(hops),
            bandwidth,
            numa_distance: numa,
            bridge: None,
        }
    }

    fn candidate(id: u32, size: u64, free: u64, paths: Vec<Path>) -> Candidate {
        Candidate {
            id,
            addr: PciAddr {
                domain: 0,
                bus: id as u8,
                devfn: 0,
            },
            size,
            free,
            largest: free,
            paths,
        }
    }

    fn request(size: u64) -> abi::p2pmem_request {
        abi::p2pmem_request {
            size,
            ..Default::default()
        }
    }

    fn codes(decision: &Decision) -> Vec<u32> {
        decision.verdicts.iter().map(|verdict| verdict.code).collect()
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn criteria_decide_in_order() {
        use abi::*;
        let (near, far) = (PathClass::SameSwitch, PathClass::HostBridge);
        let cases = [
            (
                path(near, 6, None, None),
                path(far, 2, Some(9000), Some(10)),
                P2PMEM_VERDICT_CLASS,
            ),
            (
                path(far, 2, None, None),
                path(far, 4, Some(9000), Some(10)),
                P2PMEM_VERDICT_HOPS,
            ),
            (
                path(far, 2, Some(8000), None),
                path(far, 2, None, Some(10)),
                P2PMEM_VERDICT_BANDWIDTH,
            ),
            (
                path(far, 2, Some(1), Some(10)),
                path(far, 2, Some(1), Some(21)),
                P2PMEM_VERDICT_NUMA,
            ),
            (
                path(far, 2, Some(1), Some(10)),
                path(far, 2, Some(1), Some(10)),
                P2PMEM_VERDICT_ORDER,
            ),
        ];
        for (winner, loser, code) in cases {
            let all = [
                candidate(1, MIB, MIB, vec![winner.clone()]),
                candidate(2, MIB, MIB, vec![loser.clone()]),
            ];
            let decision = decide(&all, &request(4096));
            assert_eq!((decision.chosen, decision.error), (1, 0), "{winner:?}");
            assert_eq!(codes(&decision), [P2PMEM_VERDICT_CHOSEN, code], "{winner:?}");
            assert_eq!(decision.class(), winner.class.to_raw());
        }
    }

    /// As in the module, the load decides before the size of the largest piece, and the size before the order.
    #[test]
    fn load_and_space_decide_between_equal_paths() {
        use abi::*;
        let path = || vec![path(PathClass::SameSwitch, 4, None, None)];
        let codes_of = |all: [Candidate; 2]| codes(&decide(&all, &request(4096)));
        assert_eq!(
            codes_of([
                candidate(1, MIB, MIB / 2, path()),
                candidate(2, MIB / 4, MIB / 4, path())
            ]),
            [P2PMEM_VERDICT_LOAD, P2PMEM_VERDICT_CHOSEN]
        );
        assert_eq!(
            codes_of([candidate(1, MIB, MIB, path()), candidate(2, 2 * MIB, 2 * MIB, path())]),
            [P2PMEM_VERDICT_SPACE, P2PMEM_VERDICT_CHOSEN]
        );
    }

    #[test]
    fn farthest_client_decides() {
        let one = |class| path(class, 2, None, None);
        let all = [
            candidate(1, MIB, MIB, vec![one(PathClass::SameDevice), one(PathClass::System)]),
            candidate(
                2,
                MIB,
                MIB,
                vec![one(PathClass::HostBridge), one(PathClass::HostBridge)],
            ),
        ];
        let decision = decide(&all, &request(1));
        assert_eq!(decision.chosen, 2);
        assert_eq!((decision.verdicts[0].worst_client, decision.verdicts[0].hops), (1, 4));
    }

    #[test]
    fn unsuitable_candidates_get_reason_code() {
        use abi::*;
        let near = || vec![path(PathClass::SameSwitch, 4, None, None)];
        let all = [
            candidate(1, 4096, 4096, near()),
            candidate(2, MIB, 4096, near()),
            Candidate {
                largest: 4096,
                ..candidate(3, MIB, MIB, near())
            },
            candidate(4, MIB, MIB, vec![path(PathClass::Unreachable, 0, None, None)]),
            candidate(5, MIB, MIB, vec![path(PathClass::HostBridge, 4, None, None)]),
        ];
        let mut wanted = request(4097);
        wanted.max_class = P2PMEM_PATH_SAME_SWITCH;
        let decision = decide(&all, &wanted);
        assert_eq!(
            codes(&decision),
            [
                P2PMEM_VERDICT_TOO_SMALL,
                P2PMEM_VERDICT_FULL,
                P2PMEM_VERDICT_FRAGMENTED,
                P2PMEM_VERDICT_UNREACHABLE,
                P2PMEM_VERDICT_TOO_FAR
            ]
        );
        assert_eq!((decision.error, decision.chosen), (libc::ENOSPC, 0));
        assert_eq!(decision.text, "no provider has 8 KiB free");
        let decision = decide(&all[..1], &wanted);
        assert_eq!(decision.error, libc::ENODEV);
        assert_eq!(decide(&[], &wanted).error, libc::ENODEV);
        assert_eq!(decide(&all, &request(u64::MAX)).error, libc::ENODEV);
    }

    #[test]
    fn selected_provider_is_required_or_preferred() {
        use abi::*;
        let all = [candidate(1, MIB, MIB, vec![]), candidate(2, MIB, MIB, vec![])];
        let mut wanted = request(4096);
        wanted.provider = 2;
        assert_eq!(
            codes(&decide(&all, &wanted)),
            [P2PMEM_VERDICT_NOT_NAMED, P2PMEM_VERDICT_CHOSEN]
        );
        wanted.flags = P2PMEM_ALLOC_PREFER;
        assert_eq!(
            codes(&decide(&all, &wanted)),
            [P2PMEM_VERDICT_NOT_NAMED, P2PMEM_VERDICT_CHOSEN]
        );
        wanted.provider = 3;
        assert_eq!(
            codes(&decide(&all, &wanted)),
            [P2PMEM_VERDICT_CHOSEN, P2PMEM_VERDICT_ORDER]
        );
        wanted.flags = 0;
        assert_eq!(decide(&all, &wanted).error, libc::ENODEV);
    }

    proptest! {
        /// A suitable candidate is chosen if there is one, no suitable candidate is nearer, and each candidate has a
        /// verdict.
        #[test]
        fn nearest_suitable_candidate_is_chosen(
            all in prop::collection::vec((0u64..8, 0u64..8, 0u64..8, 0usize..7, 0u32..9), 0..8),
            pages in 1u64..8,
            max_class in 0u32..7,
        ) {
            let page = page_size();
            let all: Vec<_> = (1..).zip(all).map(|(id, (size, free, largest, class, hops))| Candidate {
                free: free.min(size) * page,
                largest: largest.min(free).min(size) * page,
                ..candidate(id, size * page, 0, vec![path(PathClass::ALL[class], hops, None, None)])
            }).collect();
            let mut wanted = request(pages * page);
            wanted.max_class = max_class;
            let decision = decide(&all, &wanted);
            prop_assert!(decision.verdicts.iter().all(|verdict| verdict.code != 0));
            let chosen: Vec<_> = decision.verdicts.iter().filter(|v| v.code == abi::P2PMEM_VERDICT_CHOSEN).collect();
            prop_assert_eq!(chosen.len(), usize::from(decision.error == 0));
            let can = |c: &Candidate| {
                let class = c.paths[0].class;
                c.largest >= pages * page && class != PathClass::Unreachable && (max_class == 0 || class.to_raw() <= max_class)
            };
            prop_assert_eq!(all.iter().any(can), decision.error == 0);
            if let Some(chosen) = chosen.first() {
                let winner = all.iter().find(|c| c.id == chosen.provider).unwrap();
                prop_assert!(can(winner));
                prop_assert!(all.iter().filter(|c| can(c)).all(|c| c.paths[0].class >= winner.paths[0].class));
            }
        }
    }
}
