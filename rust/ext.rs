// SPDX-License-Identifier: GPL-2.0

//! Safe wrappers, in the shape of the kernel crate's own, of what p2pmem needs and the kernel crate lacks.
//!
//! This module and [`crate::sys`] are the only ones that contain `unsafe`.

pub(crate) mod abi;
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
pub(crate) mod free_hint;
pub(crate) mod global;
pub(crate) mod log;
pub(crate) mod p2pdma;
pub(crate) mod pci;
#[cfg(p2pmem_peer)]
pub(crate) mod peer_mem;
pub(crate) mod power;
pub(crate) mod publisher;
pub(crate) mod refusal;
pub(crate) mod task;
pub(crate) mod trace;
pub(crate) mod vma;
pub(crate) mod window;
pub(crate) mod workqueue;

use kernel::sync::atomic::{AtomicFlag, Relaxed};

/// Initialises the static locks. The first thing that the module does.
pub(crate) fn init() {
    static BEGUN: AtomicFlag = AtomicFlag::new(false);
    if BEGUN.xchg(true, Relaxed) {
        return;
    }
    // SAFETY: Each is called once, as `BEGUN` ensures, and before `set_initialised()`.
    unsafe {
        global::init_lock();
        bus::init_lock();
        driver::init_lock();
        publisher::init_lock();
        workqueue::init_lock();
        #[cfg(p2pmem_peer)]
        peer_mem::init_lock();
    }
    global::set_initialised();
}
