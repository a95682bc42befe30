// SPDX-License-Identifier: GPL-2.0

//! What a decision says of each provider, and how the decision ended.
//!
//! The file is pure: it needs nothing but `core` and the other pure files, allocates nothing, cannot panic, and holds no `unsafe`.
//! The same source is compiled into the module and into the host tests of tests/suites/pure.

use crate::policy::{
    path::PathClass,
    rule_effect::RuleRef, //
};

/// What became of a candidate. The values are those of `enum p2pmem_verdict_code`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum VerdictCode {
    /// It was chosen.
    Chosen = 1,
    /// A client cannot reach it.
    Unreachable = 2,
    /// A path is farther than allowed.
    TooFar = 3,
    /// It could not hold the buffer were it empty.
    TooSmall = 4,
    /// It has not enough free bytes.
    Full = 5,
    /// It has the bytes, but not in one piece with that alignment.
    Fragmented = 6,
    /// It is being revoked.
    Leaving = 7,
    /// The request names another one.
    NotNamed = 8,
    /// The chosen one's worst path class is nearer.
    Class = 9,
    /// The chosen one is fewer hops away, all clients taken together.
    Hops = 10,
    /// The chosen one's narrowest link is wider, or the only one known.
    Bandwidth = 11,
    /// The chosen one is nearer in NUMA distance, or the only one whose distance is known.
    Numa = 12,
    /// The chosen one is less loaded.
    Load = 13,
    /// The chosen one has a larger contiguous piece.
    Space = 14,
    /// Equal in everything to the chosen one, which came earlier.
    Order = 15,
    /// The kernel did not choose it.
    Upstream = 16,
    /// A rule denies it.
    Denied = 17,
    /// The buffer would break a quota.
    Quota = 18,
    /// Rules set aside for others what is free.
    Reserved = 19,
    /// A rule prefers the chosen one, or avoids this one.
    Preference = 20,
    /// The chosen one is more loaded, and memory was to be packed.
    Packed = 21,
    /// The buffer would break a limit of the dmem controller.
    Cgroup = 22,
    /// It could hold a part, but too few others can.
    Alone = 23,
}

impl VerdictCode {
    /// The number the ABI has for it.
    pub(crate) fn as_raw(self) -> u32 {
        self as u32
    }
}

/// What a decision says of one candidate, and the numbers it says it from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// [`Candidate::id`].
    pub(crate) provider: u32,
    /// What became of it.
    pub(crate) code: VerdictCode,
    /// The rule that decided it, where a rule did.
    pub(crate) rule: Option<RuleRef>,
    /// Index of the client with the farthest path, 0 without clients.
    pub(crate) worst_client: u32,
    /// Class of that path, `None` without clients.
    pub(crate) class: Option<PathClass>,
    /// Sum of the hops to all clients.
    pub(crate) hops: u32,
    /// Narrowest link on any of the paths, MB/s, 0 where none tells.
    pub(crate) bandwidth: u32,
    /// Largest NUMA distance to a client, 0 where none is known.
    pub(crate) numa_distance: u32,
    /// [`Candidate::size`].
    pub(crate) size: u64,
    /// [`Candidate::free`].
    pub(crate) free: u64,
    /// [`Candidate::largest`].
    pub(crate) largest: u64,
}

impl Verdict {
    /// Fills an array before [`decide`] overwrites it; it says nothing of any provider.
    pub(crate) const EMPTY: Self = Self {
        provider: 0,
        code: VerdictCode::NotNamed,
        rule: None,
        worst_client: 0,
        class: None,
        hops: 0,
        bandwidth: 0,
        numa_distance: 0,
        size: 0,
        free: 0,
        largest: 0,
    };

    /// The number the ABI has for the class: 0 without clients.
    pub(crate) fn class_raw(&self) -> u32 {
        self.class.map_or(0, PathClass::as_raw)
    }
}

/// How a decision ended. Where no provider was chosen, the candidate that came nearest to being
/// eligible gives the reason: the variants are in that order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// There is no provider.
    NoProvider,
    /// The required provider is not there.
    NoSuchProvider,
    /// The kernel chose none, or one that is not a candidate.
    NotUpstream,
    /// All are leaving.
    Leaving,
    /// None can be reached by every client.
    Unreachable,
    /// Rules deny all that can be reached.
    Denied,
    /// None is near enough.
    TooFar,
    /// None is large enough.
    TooSmall,
    /// The buffer would break a quota wherever it were.
    Quota,
    /// The buffer would break a limit of the cgroup wherever it were.
    Cgroup,
    /// Those that could serve have not enough free bytes.
    Full,
    /// Those that could serve have the bytes, but set aside for others.
    Reserved,
    /// Those that could serve have the bytes, but not in one piece.
    Fragmented,
    /// A provider was chosen.
    Chosen,
}

impl Outcome {
    /// Whether the same request may succeed once memory has been freed (`ENOSPC`). For the other
    /// failures something has to change in the machine or in the request (`ENODEV`).
    pub(crate) fn is_out_of_space(self) -> bool {
        matches!(self, Self::Full | Self::Reserved | Self::Fragmented)
    }
}

/// What was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    /// Index of the chosen candidate; `Some` exactly where `outcome` is [`Outcome::Chosen`].
    pub(crate) chosen: Option<usize>,
    /// How it ended.
    pub(crate) outcome: Outcome,
}
