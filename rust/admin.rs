// SPDX-License-Identifier: GPL-2.0

//! The administrator's interfaces: configfs for providers and rules, debugfs for inspection.

pub(crate) mod debugfs;
pub(crate) mod providers;
pub(crate) mod rules;
