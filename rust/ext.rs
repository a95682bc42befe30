// SPDX-License-Identifier: GPL-2.0

//! Safe wrappers, in the shape of the kernel crate's own, of what p2pmem needs and the kernel crate lacks.
//!
//! This module and [`crate::sys`] are the only ones that contain `unsafe`.

pub(crate) mod buddy;
pub(crate) mod bus;
pub(crate) mod chrdev;
pub(crate) mod compat;
pub(crate) mod completion;
pub(crate) mod configfs;
pub(crate) mod cred;
pub(crate) mod dma_buf;
pub(crate) mod dmem;
pub(crate) mod driver;
pub(crate) mod gauge;
pub(crate) mod global;
pub(crate) mod log;
pub(crate) mod p2pdma;
pub(crate) mod pci;
#[cfg(p2pmem_peer)]
pub(crate) mod peer_mem;
pub(crate) mod power;
pub(crate) mod publisher;
pub(crate) mod task;
pub(crate) mod trace;
pub(crate) mod uapi;
pub(crate) mod vma;
pub(crate) mod window;
pub(crate) mod workqueue;
