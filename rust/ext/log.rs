// SPDX-License-Identifier: GPL-2.0

//! What belongs to a line in the log: the time, who is asking, and the limit of their rate.

use crate::sys;
use kernel::{
    fmt::{self, Write},
    prelude::*, //
};

/// Whether one more line about a refused request may go to the log now (C: `__ratelimit()`).
pub(crate) fn allowed() -> bool {
    // SAFETY: The function takes no arguments and can be called from any context.
    unsafe { sys::p2pmem_log_allowed() }
}

/// `CLOCK_MONOTONIC` in nanoseconds.
pub(crate) fn now_ns() -> u64 {
    // SAFETY: The function takes no arguments and can be called from any context.
    unsafe { sys::p2pmem_now_ns() }
}

/// Whether the calling task has `CAP_SYS_ADMIN`.
pub(crate) fn capable_admin() -> bool {
    // SAFETY: Called in process context by the handlers of system calls, where `current` is the caller.
    unsafe { sys::p2pmem_capable_admin() }
}

/// Who a buffer belongs to, as the log names him.
#[derive(Clone, Copy)]
pub(crate) struct Owner {
    pid: i32,
    comm: [u8; 16],
}

impl Owner {
    /// The calling process.
    pub(crate) fn current() -> Self {
        let mut comm = [0u8; 16];
        // SAFETY: The buffer is as long as the call is told.
        unsafe { sys::p2pmem_current_comm(comm.as_mut_ptr(), comm.len()) };
        Self {
            pid: current!().group_leader().pid(),
            comm,
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let comm = self.comm.split(|&c| c == 0).next().unwrap_or_default();
        write!(f, "pid {} (", self.pid)?;
        for &c in comm {
            f.write_char(if c.is_ascii_graphic() { char::from(c) } else { '?' })?;
        }
        f.write_char(')')
    }
}
