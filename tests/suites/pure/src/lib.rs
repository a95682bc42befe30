// SPDX-License-Identifier: MIT OR Apache-2.0

//! Host tests of the module's pure parts: path classification, placement, rules, quotas, stripes, and lists of ranges.
//!
//! The files under test are the source files of the module itself. The tests compare them with oracles that use the
//! simplest method: [`tree`] searches a graph for the properties that `path.rs` derives from two walks, and [`oracle`]
//! sorts a list for the choice that [`decision`] makes from a ranking.
#![forbid(unsafe_code)]

// The module formats these files, and the tests do not use all of their items.
#[allow(dead_code)]
#[path = "../../../../rust/policy"]
mod policy {
    #[rustfmt::skip]
    pub(crate) mod bus_master;
    #[rustfmt::skip]
    pub(crate) mod distance;
    #[rustfmt::skip]
    pub(crate) mod life;
    #[rustfmt::skip]
    pub(crate) mod path;
    #[rustfmt::skip]
    pub(crate) mod placement;
    #[rustfmt::skip]
    pub(crate) mod quota;
    #[rustfmt::skip]
    pub(crate) mod ranges;
    #[rustfmt::skip]
    pub(crate) mod ranking;
    #[rustfmt::skip]
    pub(crate) mod rule;
    #[rustfmt::skip]
    pub(crate) mod rule_effect;
    #[rustfmt::skip]
    pub(crate) mod rule_text;
    #[rustfmt::skip]
    pub(crate) mod split;
    #[rustfmt::skip]
    pub(crate) mod verdict;
}

#[cfg(test)]
mod abi;
#[cfg(test)]
mod decision;
#[cfg(test)]
mod no_panic;
#[cfg(test)]
mod oracle;
#[cfg(test)]
mod path_tests;
#[cfg(test)]
mod placement_tests;
#[cfg(test)]
mod policy_tests;
#[cfg(test)]
mod quota_tests;
#[cfg(test)]
mod ranges_tests;
#[cfg(test)]
mod stripe_tests;
#[cfg(test)]
mod tree;
