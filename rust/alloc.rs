// SPDX-License-Identifier: GPL-2.0

//! Allocation: the topology, the rules in force, the choice of providers, and the explanation of a choice.
//!
//! The choice itself is pure ([`crate::policy`]). The files here collect its input and act on the result.

pub(crate) mod explanation;
pub(crate) mod orchestrator;
pub(crate) mod request;
pub(crate) mod rules;
pub(crate) mod snapshot;
pub(crate) mod topology;
