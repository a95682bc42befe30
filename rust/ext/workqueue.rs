// SPDX-License-Identifier: GPL-2.0

//! The module's own workqueue, so that unloading waits for all queued work.
//!
//! Queueing work takes no lock of p2pmem and does not sleep. Dropping a queue waits for its work, in process context.
//!
//! C header: [`include/linux/workqueue.h`](srctree/include/linux/workqueue.h)

use core::ptr::{self, NonNull};
use kernel::{
    bindings, new_delayed_work,
    prelude::*,
    sync::{
        atomic::{Acquire, Atomic, Full},
        rcu, Arc,
    },
    workqueue::{impl_has_delayed_work, DelayedWork, Queue, RawWorkItem, WorkItem},
};

/// An unbound workqueue. Dropping it runs all queued work first, including delayed work, and sleeps meanwhile.
///
/// # Invariants
///
/// `queue` is a workqueue that this object owns. The only delayed work that it ever gets is `later`.
pub(crate) struct OwnQueue {
    queue: NonNull<bindings::workqueue_struct>,
    later: Arc<Later>,
}

// SAFETY: A workqueue is not bound to a thread, and `Later` is `Send` and `Sync`: its function is called in a worker
// thread.
unsafe impl Send for OwnQueue {}
// SAFETY: A shared reference only queues work, which the workqueue core serialises.
unsafe impl Sync for OwnQueue {}

/// The delayed work of a queue: calls `run` in a worker thread.
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
    /// Creates an unbound queue named `name`, with `later` as the function of [`Self::run_at_next_tick`]. May sleep.
    ///
    /// Errors: `ENOMEM`.
    pub(crate) fn new(name: &'static CStr, later: fn()) -> Result<Self> {
        let later = Arc::pin_init(
            pin_init!(Later {
                run: later,
                work <- new_delayed_work!("p2pmem_later"),
            }),
            GFP_KERNEL,
        )?;
        // SAFETY: The format takes one string argument, which is a static.
        let queue = unsafe {
            bindings::alloc_workqueue_noprof(
                c"%s".as_char_ptr(),
                bindings::wq_flags_WQ_UNBOUND,
                0,
                name.as_char_ptr(),
            )
        };
        let queue = NonNull::new(queue).ok_or(ENOMEM)?;
        // INVARIANT: The queue was allocated for this object and has no work.
        Ok(Self { queue, later })
    }

    /// Returns the queue of the kernel crate, to queue work without a delay.
    fn queue(&self) -> &Queue {
        // SAFETY: By the type invariant the queue is valid as long as `self`, which outlives the result.
        unsafe { Queue::from_raw(self.queue.as_ptr()) }
    }

    /// Queues work. The result is that of the work's pointer type: the work item is returned if it is queued already.
    pub(crate) fn enqueue<W, const ID: u64>(&self, work: W) -> W::EnqueueOutput
    where
        W: RawWorkItem<ID> + Send + 'static,
    {
        self.queue().enqueue(work)
    }

    /// Queues a closure, for tests. Errors: `ENOMEM`.
    #[cfg(CONFIG_KUNIT = "y")]
    pub(crate) fn try_spawn(&self, run: impl FnOnce() + Send + 'static) -> Result {
        Ok(self.queue().try_spawn(GFP_KERNEL, run)?)
    }

    /// Runs the function `later` of [`Self::new`] in a worker thread at the next timer tick.
    ///
    /// Does nothing if that is pending already, so calls until then are combined. Does not sleep.
    pub(crate) fn run_at_next_tick(&self) {
        // Fails only if the work is pending already.
        let _ = self.queue().enqueue_delayed(self.later.clone(), 1);
    }
}

impl Drop for OwnQueue {
    fn drop(&mut self) {
        let later = (&raw const self.later.work).cast_mut();
        // SAFETY: `DelayedWork` is a transparent wrapper of `struct delayed_work`, and `later` lives as long as `self`. By
        // the type invariant this object owns the queue. No other reference to the queue exists, and after the flush no
        // timer is pending that would queue `later`, the only delayed work.
        unsafe {
            bindings::flush_delayed_work(later.cast());
            bindings::destroy_workqueue(self.queue.as_ptr());
        }
    }
}

/// The module's queue, or null. The pointer is from `KBox::into_raw()`. Readers hold the RCU read lock; [`set_queue`] waits for
/// them before it frees the queue.
static QUEUE: Atomic<*mut OwnQueue> = Atomic::new(ptr::null_mut());

/// Sets the module's queue. Drops the former one, which waits for all its work. Sleeps. Errors: `ENOMEM`; nothing has changed
/// then.
pub(crate) fn set_queue(queue: Option<OwnQueue>) -> Result {
    let new = match queue {
        Some(queue) => KBox::into_raw(KBox::new(queue, GFP_KERNEL)?),
        None => ptr::null_mut(),
    };
    let old = QUEUE.xchg(new, Full);
    if !old.is_null() {
        // SAFETY: No argument. Waits for all readers that may have loaded `old`.
        unsafe { bindings::synchronize_rcu() };
        // SAFETY: `QUEUE` had a pointer from `KBox::into_raw()`, and only this call took that pointer out. After the grace
        // period no reader uses the object.
        drop(unsafe { KBox::from_raw(old) });
    }
    Ok(())
}

/// Calls `f` with the module's queue, unless there is none. `f` must not sleep, and is dropped without the RCU read lock.
fn with_queue<T>(f: impl FnOnce(&OwnQueue) -> T) -> Option<T> {
    // Declared in the body, so it is dropped before `f`, which is an argument.
    let _guard = rcu::read_lock();
    // SAFETY: The pointer is null or that of a queue, which `set_queue` does not free while the guard exists.
    let queue = unsafe { QUEUE.load(Acquire).as_ref() }?;
    Some(f(queue))
}

/// Queues work on the module's queue. Returns false, and drops the work, if there is no queue.
pub(crate) fn enqueue<W, const ID: u64>(work: W) -> bool
where
    W: RawWorkItem<ID> + Send + 'static,
{
    // Work that is queued already is returned, and dropped without the RCU read lock.
    with_queue(|queue| queue.enqueue(work)).is_some()
}

/// Calls [`OwnQueue::run_at_next_tick`] of the module's queue. Does nothing if there is no queue.
pub(crate) fn run_at_next_tick() {
    with_queue(OwnQueue::run_at_next_tick);
}

#[kunit_tests(p2pmem_workqueue)]
mod tests {
    use super::*;

    use kernel::sync::atomic::{Atomic, Relaxed};

    static LATER: Atomic<u32> = Atomic::<u32>::new(0);

    #[test]
    fn drop_runs_delayed_work_at_once() -> Result {
        for round in 0..8 {
            let queue = OwnQueue::new(c"p2pmem-kunit", || {
                LATER.fetch_add(1, Relaxed);
            })?;
            assert_eq!(LATER.load(Relaxed), round);
            queue.run_at_next_tick();
            drop(queue);
            assert_eq!(LATER.load(Relaxed), round + 1);
        }
        Ok(())
    }

    #[test]
    fn drop_runs_queued_work() -> Result {
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
