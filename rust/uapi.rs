// SPDX-License-Identifier: GPL-2.0

//! The device node `/dev/p2pmem`: open files, their ioctls, handles, events, rules and mappings.

pub(crate) mod file;
pub(crate) mod file_rules;
pub(crate) mod handles;
pub(crate) mod request;
