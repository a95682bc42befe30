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

/// A wait without a limit, of which the log tells now and then: after 1, 10 and 60 seconds, and every 5 minutes from then on.
pub(crate) struct LoggedWait {
    began: u64,
    told: u64,
}

impl LoggedWait {
    /// A wait that begins now.
    pub(crate) fn new() -> Self {
        Self {
            began: now_ns(),
            told: 0,
        }
    }

    /// Whole seconds since it began.
    pub(crate) fn seconds(&self) -> u64 {
        now_ns().saturating_sub(self.began) / 1_000_000_000
    }

    /// The seconds since it began, if they are worth a line now.
    pub(crate) fn due(&mut self) -> Option<u64> {
        let seconds = self.seconds();
        self.is_due(seconds).then_some(seconds)
    }

    /// Whether it is worth a line after so many seconds: once for each moment, however late somebody looks.
    pub(crate) fn is_due(&mut self, seconds: u64) -> bool {
        let before = core::mem::replace(&mut self.told, seconds);
        let passed = |moment| before < moment && moment <= seconds;
        [1, 10, 60].into_iter().any(passed) || seconds / 300 > before / 300
    }
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

#[kunit_tests(p2pmem_log)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_told_of_once_for_each_moment() {
        let mut wait = LoggedWait::new();
        let told = [0, 0, 1, 1, 2, 9, 11, 12, 59, 75, 299, 301, 302, 1000].map(|seconds| wait.is_due(seconds));
        let wanted = [2, 6, 9, 11, 13];
        for (at, told) in told.into_iter().enumerate() {
            assert_eq!(told, wanted.contains(&at));
        }
    }
}
