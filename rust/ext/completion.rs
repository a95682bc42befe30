// SPDX-License-Identifier: GPL-2.0

//! A completion that can be waited for with a time limit.
//!
//! [`kernel::sync::Completion`] has no wait with a time limit. That of [`kernel::sync::CondVar`] is interruptible: a
//! pending signal ends it at once. Callers renew a wait of a second or less, so the hung task detector does not report
//! them.
//!
//! Waiting sleeps: process context, no spinlock held. Completing does not sleep.
//!
//! C header: [`include/linux/completion.h`](srctree/include/linux/completion.h)

use kernel::{bindings, prelude::*, time::msecs_to_jiffies, types::Opaque};

/// A completion for an event that happens once. It stays complete.
///
/// # Invariants
///
/// `inner` is an initialised `struct completion`.
#[pin_data]
pub(crate) struct Completion {
    #[pin]
    inner: Opaque<bindings::completion>,
}

// SAFETY: A `struct completion` is not bound to a thread.
unsafe impl Send for Completion {}
// SAFETY: All methods use the completion's functions, which serialise with its own lock.
unsafe impl Sync for Completion {}

impl Completion {
    /// Returns an initialiser of a completion that is not complete.
    pub(crate) fn new() -> impl PinInit<Self> {
        // INVARIANT: `init_completion()` initialises `inner`.
        pin_init!(Self {
            inner <- Opaque::ffi_init(|slot: *mut bindings::completion| {
                // SAFETY: `slot` is valid for writes and pinned.
                unsafe { bindings::init_completion(slot) };
            }),
        })
    }

    /// Completes: wakes all waiters, and all later waits return at once. Does not sleep.
    pub(crate) fn complete(&self) {
        // SAFETY: By the type invariant the completion is initialised.
        unsafe { bindings::complete_all(self.inner.get()) };
    }

    /// Waits like [`Self::wait`], but a fatal signal ends the wait.
    ///
    /// Errors: `EINTR` if the task was killed.
    pub(crate) fn wait_killable(&self, ms: u32) -> Result<bool> {
        // SAFETY: By the type invariant the completion is initialised.
        let left = unsafe { bindings::wait_for_completion_killable_timeout(self.inner.get(), msecs_to_jiffies(ms)) };
        if left < 0 {
            return Err(EINTR);
        }
        Ok(left > 0)
    }

    /// Waits at most `ms` milliseconds for the completion, uninterruptibly. Returns whether it is complete. Sleeps.
    pub(crate) fn wait(&self, ms: u32) -> bool {
        // SAFETY: By the type invariant the completion is initialised.
        unsafe { bindings::wait_for_completion_timeout(self.inner.get(), msecs_to_jiffies(ms)) > 0 }
    }
}

#[kunit_tests(p2pmem_completion)]
mod tests {
    use super::*;

    use kernel::sync::Arc;

    #[test]
    fn wait_times_out_until_completed() -> Result {
        let done = KBox::pin_init(Completion::new(), GFP_KERNEL)?;
        assert!(!done.wait(0));
        assert!(!done.wait(5));
        assert!(!done.wait_killable(5)?);
        done.complete();
        // A complete completion never makes a wait wait.
        for _ in 0..3 {
            assert!(done.wait(0) && done.wait(1_000));
            assert!(done.wait_killable(0)? && done.wait_killable(1_000)?);
        }
        done.complete();
        assert!(done.wait(0));
        Ok(())
    }

    #[test]
    fn completion_by_worker_ends_wait() -> Result {
        let done = Arc::pin_init(Completion::new(), GFP_KERNEL)?;
        let other = done.clone();
        kernel::workqueue::system().try_spawn(GFP_KERNEL, move || other.complete())?;
        assert!(done.wait(60_000));
        Ok(())
    }
}
