// SPDX-License-Identifier: GPL-2.0

//! Policy: paths, placement, rules, quotas, ranges and the life cycle of a buffer, as pure functions of their arguments.
//!
//! These files import nothing but `core` and each other. The host tests compile the same files.

pub(crate) mod bus_master;
pub(crate) mod distance;
pub(crate) mod life;
pub(crate) mod path;
pub(crate) mod placement;
pub(crate) mod quota;
pub(crate) mod ranges;
pub(crate) mod ranking;
pub(crate) mod rule;
pub(crate) mod rule_effect;
pub(crate) mod rule_text;
pub(crate) mod split;
pub(crate) mod verdict;
