// SPDX-License-Identifier: GPL-2.0

//! The calling task.
//!
//! C header: [`include/linux/sched/signal.h`](srctree/include/linux/sched/signal.h)

use crate::sys;

/// Whether the calling task was killed: what it waits for is of no use to anybody. A kernel thread never was.
pub(crate) fn is_killed() -> bool {
    // SAFETY: The function takes no arguments and can be called from any context.
    unsafe { sys::p2pmem_is_killed() }
}
