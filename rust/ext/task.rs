// SPDX-License-Identifier: GPL-2.0

//! The current task. Nothing here sleeps or takes a lock.
//!
//! C headers: [`include/linux/sched/signal.h`](srctree/include/linux/sched/signal.h),
//! [`include/linux/oom.h`](srctree/include/linux/oom.h)

use crate::sys;
use kernel::task::Task;

/// Returns whether a fatal signal is pending for the current task, so that its result is of no use. False for kernel
/// threads.
pub(crate) fn is_killed() -> bool {
    // SAFETY: The function has no arguments and reads only the current task, which always exists.
    unsafe { sys::p2pmem_is_killed() }
}

/// Returns whether the OOM killer chose the current task, so that small allocations may have failed.
pub(crate) fn is_oom_victim() -> bool {
    // SAFETY: The current task always exists and has its `signal` until it has exited. The OOM killer may write the field
    // meanwhile, a pointer that is only compared.
    unsafe {
        !(&raw const (*(*Task::current_raw()).signal).oom_mm)
            .read_volatile()
            .is_null()
    }
}
