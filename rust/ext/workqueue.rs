// SPDX-License-Identifier: GPL-2.0

//! A workqueue of the module's own, so that unloading can wait for what is queued.
//!
//! C header: [`include/linux/workqueue.h`](srctree/include/linux/workqueue.h)

use crate::ext::global::initialised;
use core::ptr::NonNull;
use kernel::{
    bindings, new_delayed_work,
    prelude::*,
    sync::Arc,
    workqueue::{impl_has_delayed_work, DelayedWork, Queue, RawWorkItem, WorkItem},
};

/// A workqueue; dropping it runs what is queued to its end first.
///
/// # Invariants
///
/// The pointer is a workqueue that is ours. Of delayed work it is only ever given `later`.
pub(crate) struct OwnQueue {
    queue: NonNull<bindings::workqueue_struct>,
    later: Arc<Later>,
}

// SAFETY: Workqueues are made for use from any thread.
unsafe impl Send for OwnQueue {}
// SAFETY: As above.
unsafe impl Sync for OwnQueue {}

/// What a queue does a moment after it was asked to.
#[pin_data]
struct Later {
    run: fn(),
    #[pin]
    work: DelayedWork<Later>,
}

impl_has_delayed_work! {
    impl HasDelayedWork<Later> for Later { self.work }
}

impl WorkItem for Later {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        (this.run)();
    }
}

impl OwnQueue {
    /// An unbound queue of the given name; `later` is what [`Self::run_later`] runs.
    pub(crate) fn new(name: &'static CStr, later: fn()) -> Result<Self> {
        let later = Arc::pin_init(
            pin_init!(Later {
                run: later,
                work <- new_delayed_work!("p2pmem_later"),
            }),
            GFP_KERNEL,
        )?;
        // SAFETY: The format takes one string, which lives for ever.
        let queue = unsafe {
            bindings::alloc_workqueue_noprof(
                c"%s".as_char_ptr(),
                bindings::wq_flags_WQ_UNBOUND,
                0,
                name.as_char_ptr(),
            )
        };
        let queue = NonNull::new(queue).ok_or(ENOMEM)?;
        // INVARIANT: Made just now.
        Ok(Self { queue, later })
    }

    /// The queue, for work without a delay alone.
    fn queue(&self) -> &Queue {
        // SAFETY: By the type invariant the queue is valid while `self` is.
        unsafe { Queue::from_raw(self.queue.as_ptr()) }
    }

    /// Queues work. An error, and it is handed back, where that cannot be.
    pub(crate) fn enqueue<W, const ID: u64>(&self, work: W) -> W::EnqueueOutput
    where
        W: RawWorkItem<ID> + Send + 'static,
    {
        self.queue().enqueue(work)
    }

    /// Queues a closure, for tests.
    #[cfg(CONFIG_KUNIT = "y")]
    pub(crate) fn try_spawn(&self, run: impl FnOnce() + Send + 'static) -> Result {
        Ok(self.queue().try_spawn(GFP_KERNEL, run)?)
    }

    /// Has what is to be done later done at the next tick of the timer: once, however often it is asked for until then.
    pub(crate) fn run_later(&self) {
        // It is on its way already where this fails.
        let _ = self.queue().enqueue_delayed(self.later.clone(), 1);
    }
}

impl Drop for OwnQueue {
    fn drop(&mut self) {
        let later = (&raw const self.later.work).cast_mut();
        // SAFETY: `DelayedWork` is transparent, and `later` lives as long as `self`. By the type invariant the queue is ours, and
        // after the first call no timer is left that would put anything into it: it has only ever been given `later`.
        unsafe {
            bindings::flush_delayed_work(later.cast());
            bindings::destroy_workqueue(self.queue.as_ptr());
        }
    }
}

kernel::sync::global_lock! {
    // SAFETY: `init_lock()` initialises it, and all that uses it calls `initialised()` first.
    unsafe(uninit) static QUEUE: Mutex<Option<OwnQueue>> = None;
}

/// # Safety
///
/// Called once, before the static locks are said to be initialised.
pub(super) unsafe fn init_lock() {
    // SAFETY: By the requirement, as all that uses the lock calls `initialised()` first.
    unsafe { QUEUE.init() };
}

/// Sets the queue that work is done on; with `None`, waits until all that was queued is done.
pub(crate) fn set_queue(queue: Option<OwnQueue>) {
    initialised();
    let old = core::mem::replace(&mut *QUEUE.lock(), queue);
    // Outside the lock, as it waits for work that may want to queue more.
    drop(old);
}

/// Queues work. False, and it is dropped, when there is no queue any more.
pub(crate) fn enqueue<W, const ID: u64>(work: W) -> bool
where
    W: RawWorkItem<ID> + Send + 'static,
{
    initialised();
    let queue = QUEUE.lock();
    let Some(queue) = &*queue else {
        return false;
    };
    let _ = queue.enqueue(work);
    true
}

/// Has the queue do at the next tick of the timer what it does later ([`OwnQueue::run_later`]).
pub(crate) fn run_later() {
    initialised();
    if let Some(queue) = &*QUEUE.lock() {
        queue.run_later();
    }
}

#[kunit_tests(p2pmem_workqueue)]
mod tests {
    use super::*;

    use kernel::sync::atomic::{Atomic, Relaxed};

    static LATER: Atomic<u32> = Atomic::<u32>::new(0);

    #[test]
    fn dropping_it_does_now_what_was_for_later() -> Result {
        for round in 0..8 {
            let queue = OwnQueue::new(c"p2pmem-kunit", || {
                LATER.fetch_add(1, Relaxed);
            })?;
            assert_eq!(LATER.load(Relaxed), round);
            queue.run_later();
            drop(queue);
            assert_eq!(LATER.load(Relaxed), round + 1);
        }
        Ok(())
    }

    #[test]
    fn dropping_it_runs_what_is_queued() -> Result {
        const ITEMS: u32 = 64;
        let queue = OwnQueue::new(c"p2pmem-kunit", || {})?;
        let ran = Arc::new(Atomic::<u32>::new(0), GFP_KERNEL)?;
        for _ in 0..ITEMS {
            let ran = ran.clone();
            queue.try_spawn(move || {
                ran.fetch_add(1, Relaxed);
            })?;
        }
        drop(queue);
        assert_eq!(ran.load(Relaxed), ITEMS);
        Ok(())
    }
}
