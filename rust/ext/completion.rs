// SPDX-License-Identifier: GPL-2.0

//! Waiting for something with a time limit, whatever signals the waiting process gets.
//!
//! C header: [`include/linux/completion.h`](srctree/include/linux/completion.h)
//!
//! [`kernel::sync::Completion`] can only be waited for without a limit, and [`kernel::sync::CondVar`] with one only in
//! such a way that a pending signal ends the wait at once. A wait that is renewed every second is none that the kernel
//! takes for a hang.

use kernel::{bindings, prelude::*, time::msecs_to_jiffies, types::Opaque};

/// Something that happens once.
///
/// # Invariants
///
/// `inner` is an initialised `struct completion`.
#[pin_data]
pub(crate) struct Completion {
    #[pin]
    inner: Opaque<bindings::completion>,
}

// SAFETY: Completions are made for use from any thread.
unsafe impl Send for Completion {}
// SAFETY: As above.
unsafe impl Sync for Completion {}

impl Completion {
    pub(crate) fn new() -> impl PinInit<Self> {
        // INVARIANT: Initialised here.
        pin_init!(Self {
            inner <- Opaque::ffi_init(|slot: *mut bindings::completion| {
                // SAFETY: `slot` is ours to initialise.
                unsafe { bindings::init_completion(slot) };
            }),
        })
    }

    /// It happened: all who wait go on, and nobody waits any more.
    pub(crate) fn complete(&self) {
        // SAFETY: By the type invariant the completion is initialised.
        unsafe { bindings::complete_all(self.inner.get()) };
    }

    /// As [`Self::wait`], unless the task is killed meanwhile (`EINTR`).
    pub(crate) fn wait_killable(&self, ms: u32) -> Result<bool> {
        // SAFETY: By the type invariant the completion is initialised. The caller can sleep.
        let left = unsafe { bindings::wait_for_completion_killable_timeout(self.inner.get(), msecs_to_jiffies(ms)) };
        if left < 0 {
            return Err(EINTR);
        }
        Ok(left > 0)
    }

    /// Waits for it, `ms` milliseconds at most. Whether it happened.
    pub(crate) fn wait(&self, ms: u32) -> bool {
        // SAFETY: By the type invariant the completion is initialised. The caller can sleep.
        unsafe { bindings::wait_for_completion_timeout(self.inner.get(), msecs_to_jiffies(ms)) > 0 }
    }
}

#[kunit_tests(p2pmem_completion)]
mod tests {
    use super::*;

    use kernel::sync::Arc;

    #[test]
    fn a_wait_ends_in_time_and_then_no_more() -> Result {
        let done = KBox::pin_init(Completion::new(), GFP_KERNEL)?;
        assert!(!done.wait(0));
        assert!(!done.wait(5));
        assert!(!done.wait_killable(5)?);
        done.complete();
        // However often and by whom.
        for _ in 0..3 {
            assert!(done.wait(0) && done.wait(1_000));
            assert!(done.wait_killable(0)? && done.wait_killable(1_000)?);
        }
        done.complete();
        assert!(done.wait(0));
        Ok(())
    }

    #[test]
    fn a_worker_ends_the_wait() -> Result {
        let done = Arc::pin_init(Completion::new(), GFP_KERNEL)?;
        let other = done.clone();
        kernel::workqueue::system().try_spawn(GFP_KERNEL, move || other.complete())?;
        assert!(done.wait(60_000));
        Ok(())
    }
}
