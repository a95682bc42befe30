// SPDX-License-Identifier: GPL-2.0

//! Takes memory back and clears it: the scrubber, a work item of each provider.
//!
//! Freed memory is *dirty* until it is cleared, and *pinned* while another user still refers to its pages, as O_DIRECT does
//! that is in flight when the mapping ends. Dirty memory is cleared in steps of [`STEP`] bytes, by the scrubber and by
//! allocations that find too little free memory. After each step the cleared part goes back to the buddy allocator; a chunk of
//! another driver's pool goes back when all of it is cleared. Pinned memory becomes dirty when the last reference is gone.
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
            Counted,
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

impl<B: Counted> Provider<B> {
    /// Takes back the memory of a buffer that ended. `buffer` is its number, if it was ever added to the books.
    pub(crate) fn give_back(self: &Arc<Self>, buffer: Option<u64>, mut memory: KBox<Memory>) {
        self.counters.frees.fetch_add(1, Relaxed);
        self.counters.free_bytes.fetch_add(memory.size, Relaxed);
        match buffer {
            // Pinned memory stays charged to its last owner until nobody refers to its pages.
            Some(id) if memory.is_clear() && memory.busy() > 0 => {
                let mut inner = self.inner.lock();
                if let Some(node) = inner.buffers.remove_node(&id) {
                    inner.count -= 1;
                    inner.pinned_buffers.insert(node);
                    memory.pinned_buffer = Some(id);
                }
            }
            _ => {
                memory.cgroup_charge = None;
                buffer.into_iter().for_each(|id| self.uncharge(id));
            }
        }
        self.return_memory(memory);
    }

    /// Puts outstanding memory on the dirty list. Memory that was not cleared goes back to its allocator at once: nobody reached
    /// it, so its contents are what the allocator expects.
    pub(super) fn return_memory(&self, mut memory: KBox<Memory>) {
        let taken = memory.footprint();
        let dirty = if memory.is_clear() {
            memory.set_used();
            Some(memory)
        } else {
            drop(memory);
            None
        };
        let mut inner = self.inner.lock();
        match dirty {
            Some(memory) => inner.dirty.push(memory),
            None => inner.unreserve(taken),
        }
        inner.put_outstanding();
        self.update_hint(&inner);
        let work = inner.source.is_some() && !inner.dirty.is_empty();
        drop(inner);
        self.returned.notify_all();
        if work {
            // Waking a worker for each buffer would cost more than the rest of a free.
            workqueue::run_at_next_tick();
        }
    }

    /// Queues the scrubber if it has work to do.
    pub(crate) fn send_scrubber(self: &Arc<Self>) {
        let inner = self.inner.lock();
        let work = !inner.dirty.is_empty();
        drop(inner);
        if work {
            workqueue::enqueue(self.clone());
        }
    }

    /// Takes dirty memory that nobody refers to. The memory is outstanding until the caller puts it back. Memory that somebody
    /// refers to moves to the pinned list. Returns `None` if there is none, or the provider is being removed.
    fn take_dirty(&self) -> Option<KBox<Memory>> {
        loop {
            let mut inner = self.inner.lock();
            inner.source.as_ref()?;
            let mut memory = inner.dirty.pop()?;
            inner.outstanding += 1;
            inner.clearing += memory.footprint();
            drop(inner);
            if memory.busy() == 0 {
                // A large memory comes here for each step; its pages are counted only once.
                self.forget_owner(&mut memory);
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

    /// Clears up to [`STEP`] bytes of dirty memory and gives them back to their allocator. Returns their number, 0 if no memory is
    /// dirty or the provider is being removed.
    ///
    /// Errors: `EINTR` (the task was killed). The memory is still dirty then.
    pub(super) fn scrub_step(&self) -> Result<u64> {
        self.with_dirty(|memory| {
            let cleared = memory.scrub_step(STEP)?;
            self.counters.scrubbed_bytes.fetch_add(cleared, Relaxed);
            Ok(cleared)
        })
    }

    /// Gives dirty memory back to its allocator without clearing it. Returns as [`Self::scrub_step`]. A chunk of another driver's
    /// pool is cleared by a step.
    pub(super) fn release_step(&self) -> Result<u64> {
        self.with_dirty(|memory| Ok(memory.release_step(STEP)))
    }

    /// Calls `step` for dirty memory, and makes what is left of the memory dirty again. Returns 0 if there is none.
    fn with_dirty(&self, step: impl FnOnce(&mut Memory) -> Result<u64>) -> Result<u64> {
        let Some(mut memory) = self.take_dirty() else {
            return Ok(0);
        };
        let taken = memory.footprint();
        let done = step(&mut memory);
        // What the step gave back is free before `clearing` excludes it, so that no decision misses it.
        let rest = if memory.is_clear() {
            drop(memory);
            None
        } else {
            Some(memory)
        };
        let mut inner = self.inner.lock();
        inner.put_outstanding();
        inner.clearing -= taken;
        match rest {
            Some(rest) => inner.dirty.push(rest),
            None => {
                inner.unreserve(taken);
                if let Some(Source::Adopted { ceiling, .. }) = &mut inner.source {
                    *ceiling = self.size;
                }
            }
        }
        self.update_hint(&inner);
        drop(inner);
        self.returned.notify_all();
        done
    }

    /// Moves pinned memory that nobody refers to any more to the dirty list. Returns whether there was any.
    pub(super) fn take_unpinned(&self) -> bool {
        let mut inner = self.inner.lock();
        // Memory that becomes pinned meanwhile is looked at in the next call.
        let mut looked_at = MemoryList::EMPTY;
        core::mem::swap(&mut looked_at, &mut inner.pinned);
        let (count, bytes) = (looked_at.len(), looked_at.bytes);
        inner.outstanding += count;
        inner.looked_at += bytes;
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
        inner.looked_at -= bytes;
        self.update_hint(&inner);
        drop(inner);
        self.returned.notify_all();
        any
    }

    /// Clears allocated memory if it is not clear yet.
    ///
    /// Errors: `ENODEV` (the provider is being removed), `EINTR` (the task was killed). The memory is not clear then.
    pub(crate) fn clear_for_use(&self, memory: &mut Memory) -> Result {
        while !memory.is_clear() {
            if self.being_removed.load(Relaxed) {
                return Err(ENODEV);
            }
            if is_killed() {
                return Err(EINTR);
            }
            let cleared = memory.clear_step(STEP);
            self.counters.scrubbed_bytes.fetch_add(cleared, Relaxed);
        }
        Ok(())
    }
}

impl<B: Counted> WorkItem for Provider<B> {
    type Pointer = Arc<Self>;

    /// Runs the scrubber until no memory is dirty or pinned, or the provider is being removed.
    fn run(this: Arc<Self>) {
        let mut pause = 10;
        loop {
            this.take_unpinned();
            while matches!(this.scrub_step(), Ok(1..)) {
                pause = 10;
            }
            let mut inner = this.inner.lock();
            if inner.source.is_none() || (inner.pinned_bytes() == 0 && inner.dirty.is_empty()) {
                return;
            }
            if inner.dirty.is_empty() {
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
