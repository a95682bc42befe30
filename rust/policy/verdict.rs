// SPDX-License-Identifier: GPL-2.0

//! The result of a decision: a verdict for each provider, and the outcome.
//!
//! The file is pure: it needs nothing but `core` and the other pure files, allocates nothing, cannot panic, and holds no `unsafe`.
//! The same source is compiled into the module and into the host tests of tests/suites/pure.

use crate::policy::{
    path::PathClass,
    rule_effect::RuleRef, //
};

/// The result of a decision for one candidate. The values are those of `enum p2pmem_verdict_code`.
///
/// "Winner" is the chosen provider, "clients" are those of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum VerdictCode {
    /// The provider was chosen.
    Chosen = 1,
    /// A client cannot reach the provider.
    Unreachable = 2,
    /// A path is farther than the request or a rule allows.
    TooFar = 3,
    /// The provider could not hold the buffer even if it were empty.
    TooSmall = 4,
    /// The provider has too few free bytes.
    Full = 5,
    /// The provider has enough free bytes, but no piece of that size and alignment.
    Fragmented = 6,
    /// The provider is being removed.
    Removing = 7,
    /// The request names another provider.
    NotNamed = 8,
    /// The winner's farthest path has a nearer class.
    Class = 9,
    /// The winner's paths have fewer hops in total.
    Hops = 10,
    /// The winner's narrowest link has more bandwidth, or only the winner's bandwidth is known.
    Bandwidth = 11,
    /// The winner has the smaller NUMA distance, or only the winner's distance is known.
    Numa = 12,
    /// The winner is less loaded.
    Load = 13,
    /// The winner has a larger contiguous piece.
    Space = 14,
    /// The winner is equal in all criteria, and was published earlier.
    Order = 15,
    /// The kernel did not choose the provider.
    Upstream = 16,
    /// A rule denies the provider.
    Denied = 17,
    /// The buffer would exceed a quota.
    Quota = 18,
    /// Rules reserve the free memory for others.
    Reserved = 19,
    /// A rule prefers the winner, or avoids this provider.
    Preference = 20,
    /// The winner is more loaded, and the strategy is to pack.
    Packed = 21,
    /// The buffer would exceed a limit of the dmem cgroup controller.
    Cgroup = 22,
    /// The provider could hold a part of the buffer, but too few others can hold the other parts.
    TooFew = 23,
}

impl VerdictCode {
    /// Returns the value in the ABI.
    pub(crate) fn as_raw(self) -> u32 {
        self as u32
    }
}

/// The verdict for one candidate, with the numbers that led to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// [`Candidate::id`](super::placement::Candidate::id).
    pub(crate) provider: u32,
    /// The result.
    pub(crate) code: VerdictCode,
    /// The rule that decided, if a rule did.
    pub(crate) rule: Option<RuleRef>,
    /// Index of the client with the farthest path; 0 without clients.
    pub(crate) worst_client: u32,
    /// Class of the farthest path; `None` without clients.
    pub(crate) class: Option<PathClass>,
    /// Sum of the hops to all clients.
    pub(crate) hops: u32,
    /// Bandwidth of the narrowest link of all paths in MB/s; 0 if no bandwidth is known.
    pub(crate) bandwidth: u32,
    /// Largest NUMA distance to a client; 0 if no distance is known.
    pub(crate) numa_distance: u32,
    /// [`Candidate::size`](super::placement::Candidate::size), in bytes.
    pub(crate) size: u64,
    /// [`Candidate::free`](super::placement::Candidate::free), in bytes.
    pub(crate) free: u64,
    /// [`Candidate::largest`](super::placement::Candidate::largest), in bytes.
    pub(crate) largest: u64,
}

impl Verdict {
    /// The initial value of an array that [`explain`](super::placement::explain) overwrites.
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

    /// Returns the value of the class in the ABI; 0 without clients.
    pub(crate) fn class_raw(&self) -> u32 {
        self.class.map_or(0, PathClass::as_raw)
    }
}

/// The outcome of a decision.
///
/// If no provider was chosen, the outcome is the reason of the candidate that came closest to being eligible. The variants
/// are in that order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// There is no provider.
    NoProvider,
    /// The required provider does not exist.
    NoSuchProvider,
    /// The kernel chose no provider, or one that is not a candidate.
    NotUpstream,
    /// All providers are being removed.
    Removing,
    /// No provider can be reached by every client.
    Unreachable,
    /// Rules deny all reachable providers.
    Denied,
    /// All reachable providers are too far.
    TooFar,
    /// No provider is large enough.
    TooSmall,
    /// The buffer would exceed a quota in every provider.
    Quota,
    /// The buffer would exceed a cgroup limit in every provider.
    Cgroup,
    /// The remaining providers have too few free bytes.
    Full,
    /// The remaining providers have enough free bytes, but rules reserve them for others.
    Reserved,
    /// The remaining providers have enough free bytes, but not in one piece.
    Fragmented,
    /// A provider was chosen.
    Chosen,
}

impl Outcome {
    /// Returns whether the same request may succeed after memory was freed (`ENOSPC`). The other failures need a change of
    /// the machine, the rules or the request.
    pub(crate) fn is_out_of_space(self) -> bool {
        matches!(self, Self::Full | Self::Reserved | Self::Fragmented)
    }
}
