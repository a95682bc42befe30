// SPDX-License-Identifier: GPL-2.0

//! The administrator's files: configfs for providers and rules, debugfs for looking.

pub(crate) mod debugfs;
pub(crate) mod providers;
pub(crate) mod rules;
