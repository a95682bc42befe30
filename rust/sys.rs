// SPDX-License-Identifier: GPL-2.0

//! Generated bindings of what [`kernel::bindings`] lacks: the uapi structures and the C helpers.
//!
//! C headers: `include/uapi/linux/p2pmem.h`, `rust/sys/helpers.h`
//!
//! Only [`crate::ext`] uses this module.

#![allow(
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    non_snake_case,
    improper_ctypes,
    unreachable_pub,
    unsafe_op_in_unsafe_fn,
    dead_code
)]

use kernel::{
    bindings::{bus_type, inode, pci_dev, vm_area_struct},
    ffi,
};

type __u8 = u8;
type __u16 = u16;
type __u32 = u32;
type __s32 = i32;
type __u64 = u64;

include!(concat!(env!("P2PMEM_OBJ"), "/rust/sys/bindings_generated.rs"));
