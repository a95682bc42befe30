// SPDX-License-Identifier: GPL-2.0

//! Safe wrappers of C interfaces that the kernel crate does not cover, in the shape of that crate.
//!
//! Only this module and [`crate::sys`] contain `unsafe`. The wrappers contain no decisions of p2pmem: other layers pass
//! them in, as trait implementations or closures. Context and locks are documented in each file.

pub(crate) mod abi;
pub(crate) mod buddy;
pub(crate) mod bus;
pub(crate) mod bus_master;
pub(crate) mod chrdev;
pub(crate) mod compat;
pub(crate) mod completion;
pub(crate) mod configfs;
pub(crate) mod cred;
pub(crate) mod device_name;
#[cfg(p2pmem_attach)]
pub(crate) mod dma_attachment;
pub(crate) mod dma_buf;
pub(crate) mod dma_device;
pub(crate) mod dmem;
pub(crate) mod driver;
pub(crate) mod free_hint;
pub(crate) mod global;
pub(crate) mod log;
pub(crate) mod p2pdma;
pub(crate) mod pci;
#[cfg(p2pmem_peer)]
pub(crate) mod peer_mem;
pub(crate) mod pool;
pub(crate) mod power;
pub(crate) mod publisher;
pub(crate) mod refusal;
pub(crate) mod task;
pub(crate) mod trace;
pub(crate) mod uses;
pub(crate) mod vma;
pub(crate) mod workqueue;

use kernel::sync::atomic::{AtomicFlag, Relaxed};

/// Initialises the static locks. The module's init function calls this before everything else. Further calls do nothing.
pub(crate) fn init() {
    static BEGUN: AtomicFlag = AtomicFlag::new(false);
    if BEGUN.xchg(true, Relaxed) {
        return;
    }
    // SAFETY: `BEGUN` lets only the first call get here, so each function is called once. `set_initialised()` comes after
    // them, and users of the locks check for it, so no lock is in use yet.
    unsafe {
        global::init_lock();
        pool::init_lock();
        driver::init_lock();
        publisher::init_lock();
        #[cfg(p2pmem_peer)]
        peer_mem::gate::init_lock();
    }
    global::set_initialised();
}
