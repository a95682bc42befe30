// SPDX-License-Identifier: GPL-2.0

//! A workqueue of the module's own, so that unloading can wait for what is queued.
//!
//! C header: [`include/linux/workqueue.h`](srctree/include/linux/workqueue.h)

use core::{ops::Deref, ptr::NonNull};
use kernel::{bindings, prelude::*, workqueue::Queue};

/// A workqueue; dropping it runs what is queued to its end first.
///
/// # Invariants
///
/// The pointer is a workqueue that is ours.
pub(crate) struct OwnQueue(NonNull<bindings::workqueue_struct>);

// SAFETY: Workqueues are made for use from any thread.
unsafe impl Send for OwnQueue {}
// SAFETY: As above.
unsafe impl Sync for OwnQueue {}

impl OwnQueue {
    /// An unbound queue of the given name.
    pub(crate) fn new(name: &'static CStr) -> Result<Self> {
        // SAFETY: The format takes one string, which lives for ever.
        let queue = unsafe {
            bindings::alloc_workqueue_noprof(
                c"%s".as_char_ptr(),
                bindings::wq_flags_WQ_UNBOUND,
                0,
                name.as_char_ptr(),
            )
        };
        // INVARIANT: Made just now.
        NonNull::new(queue).map(Self).ok_or(ENOMEM)
    }
}

impl Deref for OwnQueue {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        // SAFETY: By the type invariant the queue is valid while `self` is.
        unsafe { Queue::from_raw(self.0.as_ptr()) }
    }
}

impl Drop for OwnQueue {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the queue is ours.
        unsafe { bindings::destroy_workqueue(self.0.as_ptr()) };
    }
}

#[kunit_tests(p2pmem_workqueue)]
mod tests {
    use super::*;

    use kernel::sync::{
        atomic::{Atomic, Relaxed},
        Arc,
    };

    #[test]
    fn dropping_it_runs_what_is_queued() -> Result {
        const ITEMS: u32 = 64;
        let queue = OwnQueue::new(c"p2pmem-kunit")?;
        let ran = Arc::new(Atomic::<u32>::new(0), GFP_KERNEL)?;
        for _ in 0..ITEMS {
            let ran = ran.clone();
            queue.try_spawn(GFP_KERNEL, move || {
                ran.fetch_add(1, Relaxed);
            })?;
        }
        drop(queue);
        assert_eq!(ran.load(Relaxed), ITEMS);
        Ok(())
    }
}
