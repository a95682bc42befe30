// SPDX-License-Identifier: GPL-2.0

//! Generated bindings that supplement [`kernel::bindings`]: the uapi structures and the C helpers.
//!
//! Only [`crate::ext`] uses this module. The C helpers document their own context and locks.
//!
//! C headers: `include/uapi/linux/p2pmem.h`, `rust/sys/helpers.h`

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
    bindings::{
        cred, device, dma_buf_attachment, dma_data_direction, file, gpu_buddy, inode, list_head, notifier_block,
        p2pdma_provider, pci_dev, phys_vec, sg_table, tracepoint, vm_area_struct, vm_fault,
    },
    ffi,
};

include!(concat!(env!("P2PMEM_OBJ"), "/rust/sys/bindings_generated.rs"));
