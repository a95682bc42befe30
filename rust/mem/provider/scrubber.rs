// SPDX-License-Identifier: GPL-2.0

//! Takes memory back and clears it: the scrubber, a work item of each provider.
//!
//! Freed memory is *dirty* until it is cleared, and *pinned* while another user still refers to its pages, as O_DIRECT does
//! that is in flight when the mapping ends. The scrubber clears dirty memory and gives it back to the buddy allocator or to the
//! other driver's pool; pinned memory becomes dirty when the last reference is gone.
//!
//! Memory is cleared in steps of [`STEP`] bytes. Between two steps, clearing stops if the provider is being removed, if the
//! task of an allocation was killed, and, in the scrubber, if an allocation is starved.
//!
//! Context: a work item or process context; may sleep, no locks held.

use crate::{
    ext::{
        task::is_killed,
        workqueue, //
    },
    mem::{
        memory::{
            Memory,
            MemoryList, //
        },
        provider::{
            Inner,
            Provider,
            Source,
            STEP, //
        }, //
    }, //
};
use kernel::{
    prelude::*,
    sync::{atomic::Relaxed, Arc},
    time::msecs_to_jiffies,
    workqueue::WorkItem,
};

impl<B: Send + Sync + 'static> Provider<B> {
    /// Takes back the memory of a buffer that ended. `buffer` is the number under which [`Self::register`] has it, if it has.
    pub(crate) fn give_back(self: &Arc<Self>, buffer: Option<u64>, mut memory: KBox<Memory>) {
        self.counters.frees.fetch_add(1, Relaxed);
        self.counters.free_bytes.fetch_add(memory.size, Relaxed);
        // Pinned memory stays charged to its last owner until it is free.
        if memory.busy() == 0 {
            memory.charge = None;
        }
        let mut inner = self.inner.lock();
        let ended = buffer.and_then(|id| inner.buffers.remove(&id));
        inner.count -= u32::from(ended.is_some());
        inner.dirty.push(memory);
        inner.put_outstanding();
        self.update_hint(&inner);
        let live = inner.source.is_some();
        drop(inner);
        drop(ended);
        self.returned.notify_all();
        if live {
            // Waking a worker for each buffer would cost more than the rest of a free.
            workqueue::run_at_next_tick();
        }
    }

    /// Queues the scrubber if it has work to do.
    pub(crate) fn send_scrubber(self: &Arc<Self>) {
        let inner = self.inner.lock();
        let work = !inner.dirty.is_empty() || inner.unscrubbed;
        drop(inner);
        if work {
            workqueue::enqueue(self.clone());
        }
    }

    /// Takes dirty memory that nobody refers to. The memory is outstanding until the caller calls [`Self::finish_scrub`]. Memory
    /// that somebody refers to moves to the pinned list. Returns `None` if there is none, or the provider is being removed.
    pub(super) fn take_dirty(&self) -> Option<KBox<Memory>> {
        loop {
            let mut inner = self.inner.lock();
            inner.source.as_ref()?;
            let memory = inner.dirty.pop()?;
            inner.outstanding += 1;
            inner.clearing += memory.footprint();
            drop(inner);
            if memory.busy() == 0 {
                return Some(memory);
            }
            let mut inner = self.inner.lock();
            inner.outstanding -= 1;
            inner.clearing -= memory.footprint();
            inner.pinned.push(memory);
            self.update_hint(&inner);
            drop(inner);
            self.returned.notify_all();
            self.counters.pinned.fetch_add(1, Relaxed);
        }
    }

    /// Ends what [`Self::take_dirty`] began for `taken` bytes: `then` updates the accounting with the lock held.
    pub(super) fn finish_scrub(&self, taken: u64, then: impl FnOnce(&mut Inner<B>)) {
        let mut inner = self.inner.lock();
        inner.put_outstanding();
        inner.clearing -= taken;
        then(&mut inner);
        self.update_hint(&inner);
        drop(inner);
        self.returned.notify_all();
    }

    /// Clears the memory of one freed buffer and gives it back to its allocator. Returns its size in bytes, 0 if there was none.
    ///
    /// Errors: those of `go_on`, and `ENODEV` (the provider is being removed). The memory is still dirty then.
    pub(super) fn scrub_one(&self, go_on: impl Fn() -> Result) -> Result<u64> {
        let Some(mut memory) = self.take_dirty() else {
            return Ok(0);
        };
        let taken = memory.footprint();
        if let Err(e) = self.clear_by_steps(&mut memory, go_on) {
            self.finish_scrub(taken, |inner| inner.dirty.push(memory));
            return Err(e);
        }
        memory.mark_cleared();
        drop(memory);
        self.finish_scrub(taken, |inner| {
            if let Some(Source::Adopted { allocated, ceiling, .. }) = &mut inner.source {
                *allocated -= taken;
                *ceiling = self.size;
            }
        });
        Ok(taken)
    }

    /// Moves pinned memory that nobody refers to any more to the dirty list. Returns whether there was any.
    pub(super) fn take_unpinned(&self) -> bool {
        let mut inner = self.inner.lock();
        // Memory that becomes pinned meanwhile is looked at in the next call.
        let mut looked_at = MemoryList::EMPTY;
        core::mem::swap(&mut looked_at, &mut inner.pinned);
        let count = looked_at.len();
        inner.outstanding += count;
        drop(inner);
        let (mut still, mut idle) = (MemoryList::EMPTY, MemoryList::EMPTY);
        while let Some(memory) = looked_at.pop() {
            if memory.busy() > 0 {
                still.push(memory);
            } else {
                idle.push(memory);
            }
        }
        let any = !idle.is_empty();
        let mut inner = self.inner.lock();
        inner.pinned.append(still);
        inner.dirty.append(idle);
        inner.outstanding -= count;
        self.update_hint(&inner);
        drop(inner);
        self.returned.notify_all();
        any
    }

    /// Clears up to [`STEP`] bytes of free memory that [`Self::release_dirty`] gave to the buddy allocator uncleared. Returns
    /// whether there may be more.
    fn scrub_free(&self) -> bool {
        let mut inner = self.inner.lock();
        let (backing, buddy) = match &inner.source {
            Some(Source::Own { backing, buddy }) if inner.unscrubbed => (backing.clone(), buddy.clone()),
            _ => return false,
        };
        // A release from here on sets the flag again.
        inner.unscrubbed = false;
        inner.outstanding += 1;
        // Counted before the memory is taken, so that no capacity() misses it.
        inner.clearing += STEP;
        self.update_hint(&inner);
        drop(inner);
        let taken = match buddy.take_unclear(STEP) {
            Ok(Some(mut extent)) => {
                let size = extent.size();
                // The allocator gave `size` bytes of the `STEP` that were counted.
                self.inner.lock().clearing -= STEP - size;
                backing.clear(extent.offset() - self.start, size, self.combine);
                extent.set_clear(true);
                self.counters.scrubbed_bytes.fetch_add(size, Relaxed);
                Ok(size)
            }
            other => other.map(|_| 0),
        };
        drop(backing);
        let missing = match taken {
            Ok(size @ 1..) => size,
            _ => STEP,
        };
        self.finish_scrub(missing, |inner| inner.unscrubbed |= taken != Ok(0));
        matches!(taken, Ok(1..))
    }

    /// Clears all dirty memory, unless the provider is being removed or an allocation is starved. Returns whether any was cleared.
    fn scrub(&self) -> bool {
        let go_on = || {
            if self.starved.load(Relaxed) > 0 {
                Err(EAGAIN)
            } else {
                Ok(())
            }
        };
        self.take_unpinned();
        let mut done = false;
        while go_on().is_ok() && matches!(self.scrub_one(go_on), Ok(1..)) {
            done = true;
        }
        while go_on().is_ok() && self.scrub_free() {
            done = true;
        }
        done
    }

    /// Clears allocated memory if it is not clear yet.
    ///
    /// Errors: `ENODEV` (the provider is being removed), `EINTR` (the task was killed). The memory is not clear then.
    pub(crate) fn clear_for_use(&self, memory: &mut Memory) -> Result {
        if memory.is_clear() {
            return Ok(());
        }
        self.clear_by_steps(memory, || if is_killed() { Err(EINTR) } else { Ok(()) })
    }

    /// Clears memory step by step. Errors: `ENODEV` (the provider is being removed), and those of `go_on`, called before each step.
    fn clear_by_steps(&self, memory: &mut Memory, go_on: impl Fn() -> Result) -> Result {
        memory.clear(self.combine, STEP, || {
            if self.being_removed.load(Relaxed) {
                return Err(ENODEV);
            }
            go_on()
        })?;
        self.counters.scrubbed_bytes.fetch_add(memory.footprint(), Relaxed);
        Ok(())
    }
}

impl<B: Send + Sync + 'static> WorkItem for Provider<B> {
    type Pointer = Arc<Self>;

    /// Runs the scrubber until no memory is dirty or pinned, or the provider is being removed.
    fn run(this: Arc<Self>) {
        let mut pause = 10;
        loop {
            if this.scrub() {
                pause = 10;
            }
            let mut inner = this.inner.lock();
            if inner.source.is_none() || (inner.pinned.is_empty() && inner.dirty.is_empty() && !inner.unscrubbed) {
                return;
            }
            if inner.dirty.is_empty() || this.starved.load(Relaxed) > 0 {
                // Nothing notifies when the last other reference to a page is dropped, so the scrubber polls: after 10 ms, then
                // at intervals that double up to 500 ms.
                let _ = this
                    .returned
                    .wait_interruptible_timeout(&mut inner, msecs_to_jiffies(pause));
                pause = (pause * 2).min(500);
            }
        }
    }
}
