// SPDX-License-Identifier: GPL-2.0

//! Parts of log messages: the time, the process, and the rate limits.
//!
//! Nothing here sleeps or takes a lock. [`capable_admin`] and [`Owner::current`] are for process context, where the current
//! task is the caller.
//!
//! C headers: [`include/linux/ratelimit.h`](srctree/include/linux/ratelimit.h),
//! [`include/linux/timekeeping.h`](srctree/include/linux/timekeeping.h),
//! [`include/linux/capability.h`](srctree/include/linux/capability.h)

use crate::sys;
use kernel::{
    bindings,
    fmt::{self, Write},
    prelude::*,
    task::Task,
    time::{
        ClockSource,
        Monotonic, //
    }, //
};

/// Returns whether the rate limit admits another message about a refused request. C: `__ratelimit()`.
pub(crate) fn allowed() -> bool {
    // SAFETY: The function has no arguments and can be called in any context.
    unsafe { sys::p2pmem_log_allowed() }
}

/// Returns `CLOCK_MONOTONIC` in nanoseconds. C: `ktime_get_ns()`.
pub(crate) fn now_ns() -> u64 {
    Monotonic::ktime_get() as u64
}

/// The schedule of log messages for a wait without a time limit: after 1, 10 and 60 seconds, then every 5 minutes.
pub(crate) struct LoggedWait {
    began: u64,
    logged: u64,
}

impl LoggedWait {
    /// Starts the schedule now.
    pub(crate) fn new() -> Self {
        Self {
            began: now_ns(),
            logged: 0,
        }
    }

    /// Returns the whole seconds since the start.
    pub(crate) fn seconds(&self) -> u64 {
        now_ns().saturating_sub(self.began) / 1_000_000_000
    }

    /// Returns the whole seconds since the start if a message is due, else `None`.
    pub(crate) fn due(&mut self) -> Option<u64> {
        let seconds = self.seconds();
        self.should_log(seconds).then_some(seconds)
    }

    /// Returns whether a message is due after `seconds`. Each time of the schedule is due once, even if the caller asks
    /// late.
    pub(crate) fn should_log(&mut self, seconds: u64) -> bool {
        let before = core::mem::replace(&mut self.logged, seconds);
        let passed = |moment| before < moment && moment <= seconds;
        [1, 10, 60].into_iter().any(passed) || seconds / 300 > before / 300
    }
}

/// Returns whether the current task has `CAP_SYS_ADMIN`. Meaningful in process context alone.
pub(crate) fn capable_admin() -> bool {
    // SAFETY: The call reads the credentials of the current task, which always exists. The capability is a valid one.
    unsafe { bindings::capable(bindings::CAP_SYS_ADMIN as i32) }
}

/// The process that allocated a buffer, for messages: its process id and command name.
#[derive(Clone, Copy)]
pub(crate) struct Owner {
    pid: i32,
    comm: [u8; 16],
}

impl Owner {
    /// Returns the process of the current task.
    pub(crate) fn current() -> Self {
        Self {
            pid: current!().group_leader().pid(),
            // SAFETY: The current task always exists. Other threads may write its name meanwhile, and then the bytes may be of
            // both names.
            comm: unsafe { (&raw const (*Task::current_raw()).comm).read_volatile() },
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
    fn long_wait_is_logged_once_per_threshold() {
        let mut wait = LoggedWait::new();
        let logged = [0, 0, 1, 1, 2, 9, 11, 12, 59, 75, 299, 301, 302, 1000].map(|seconds| wait.should_log(seconds));
        let wanted = [2, 6, 9, 11, 13];
        for (at, logged) in logged.into_iter().enumerate() {
            assert_eq!(logged, wanted.contains(&at));
        }
    }
}
