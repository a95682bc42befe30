// SPDX-License-Identifier: GPL-2.0

//! The device node `/dev/p2pmem`: open files, their ioctls, handles, events, rules and mappings.

mod argument;
#[cfg_attr(not(p2pmem_attach), path = "uapi/absent.rs")]
mod attachments;
mod events;
pub(crate) mod file;
mod file_operations;
mod file_rules;
mod handles;
mod ioctl;
mod mmap;
mod request;
