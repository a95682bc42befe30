// SPDX-License-Identifier: GPL-2.0

//! Allocates memory of a provider.
//!
//! An allocation that finds too little free memory takes memory that waits for the scrubber and clears its own part itself.
//!
//! Context: process context, may sleep, no locks held. `Provider::inner` is taken for each step and never held while memory is
//! cleared or another driver's pool is called.

use crate::{
    ext::{
        buddy::Buddy,
        free_hint::padded,
        p2pdma::{
            Backing,
            Pool, //
        },
        task::is_killed,
        workqueue, //
    },
    mem::{
        memory::{
            Clearing,
            Memory,
            MemorySource, //
        },
        provider::{
            Provider,
            Source, //
        }, //
    }, //
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::{atomic::Relaxed, Arc, CondVarTimeoutResult},
    time::msecs_to_jiffies,
};

impl<B: Send + Sync + 'static> Provider<B> {
    /// How often an allocation waits for memory that other tasks are clearing, in case others take the memory each time.
    const WAITS: u32 = 16;

    /// Allocates `size` bytes of zeroed memory, aligned to `align` bytes. With [`Clearing::AtFirstUse`] the caller calls
    /// [`Self::clear_for_use`] before anybody can read the memory.
    ///
    /// Errors: `ENOSPC`, `ENODEV` (the provider is being removed), `ENOMEM`, `EINTR` (the task was killed), `ERESTARTSYS` (a
    /// signal came while the allocation waited for memory to be cleared).
    pub(crate) fn alloc(self: &Arc<Self>, size: u64, align: u64, clearing: Clearing) -> Result<KBox<Memory>> {
        let memory = match self.alloc_once(size, align, clearing) {
            Err(e) if e == ENOSPC => {
                self.starved.fetch_add(1, Relaxed);
                let memory = self.alloc_dirty(size, align, clearing);
                self.starved.fetch_sub(1, Relaxed);
                // The scrubber waits while an allocation is starved.
                self.returned.notify_all();
                memory?
            }
            done => done?,
        };
        self.counters.allocs.fetch_add(1, Relaxed);
        self.counters.alloc_bytes.fetch_add(memory.size, Relaxed);
        Ok(memory)
    }

    /// The part of [`Self::alloc`] for too little free memory. Memory that waits for the scrubber counts as free, so an
    /// allocation must be able to have it.
    fn alloc_dirty(self: &Arc<Self>, size: u64, align: u64, clearing: Clearing) -> Result<KBox<Memory>> {
        let mut waits = 0;
        // Other allocations may take the memory that this one releases. Releasing twice the provider's size is the bound.
        let mut released = 0;
        loop {
            let returns = self.inner.lock().returns;
            match self.alloc_once(size, align, clearing) {
                Err(e) if e == ENOSPC => {}
                done => return done,
            }
            let more = self.release_dirty(size)?;
            released += more;
            if more == 0 || released > 2 * self.size {
                if waits == Self::WAITS || !self.await_others(returns)? {
                    return Err(ENOSPC);
                }
                waits += 1;
            }
        }
    }

    /// Allocates from the memory that is free now.
    fn alloc_once(self: &Arc<Self>, size: u64, align: u64, clearing: Clearing) -> Result<KBox<Memory>> {
        let mut inner = self.inner.lock();
        let own = match inner.source.as_mut().ok_or(ENODEV)? {
            Source::Own { backing, buddy } => Ok((backing.clone(), buddy.clone())),
            Source::Adopted { pool, allocated, .. } => {
                let taken = padded(size, align);
                if self.size - *allocated < taken {
                    return Err(ENOSPC);
                }
                *allocated += taken;
                Err(pool.clone())
            }
        };
        inner.outstanding += 1;
        self.update_hint(&inner);
        drop(inner);
        let memory = match own {
            Ok((backing, buddy)) => self.alloc_own(backing, &buddy, size, align),
            Err(pool) => self.alloc_adopted(&pool, size, align),
        };
        let memory = memory.and_then(|mut memory| match clearing {
            Clearing::Now => {
                let taken = memory.footprint();
                self.clear_for_use(&mut memory)
                    .map(|()| memory)
                    .inspect_err(|_| self.unreserve(taken))
            }
            Clearing::AtFirstUse => Ok(memory),
        });
        if let Err(e) = &memory {
            let mut inner = self.inner.lock();
            if *e == ENOSPC {
                // No memory was taken.
                inner.outstanding -= 1;
            } else {
                // The memory went back uncleared. A chunk of another driver's pool was in nobody's use and needs no clearing.
                inner.put_outstanding();
                inner.unscrubbed |= matches!(inner.source, Some(Source::Own { .. }));
            }
            let scrub = inner.unscrubbed;
            drop(inner);
            self.returned.notify_all();
            if scrub {
                workqueue::run_at_next_tick();
            }
        }
        memory
    }

    /// Takes `taken` bytes of another driver's pool out of the provider's account: the chunk has gone back to the pool.
    fn unreserve(&self, taken: u64) {
        let mut inner = self.inner.lock();
        if let Some(Source::Adopted { allocated, .. }) = &mut inner.source {
            *allocated -= taken;
        }
        self.update_hint(&inner);
    }

    /// Allocates from the provider's own buddy allocator.
    fn alloc_own(&self, backing: Arc<Backing>, buddy: &Arc<Buddy>, size: u64, align: u64) -> Result<KBox<Memory>> {
        let mut extent = buddy.alloc(size, align)?;
        let clear = extent.is_clear();
        // From here on the memory has an owner, who may write to it.
        extent.set_clear(false);
        let start = self.start;
        Memory::new(MemorySource::Own { extent, backing, start }, size, clear)
    }

    /// Allocates a chunk from another driver's pool, large enough for the alignment.
    fn alloc_adopted(&self, pool: &Pool, size: u64, align: u64) -> Result<KBox<Memory>> {
        let taken = padded(size, align);
        let memory = pool.take(taken).ok_or(ENOSPC).and_then(|chunk| {
            let at = chunk.phys() - self.bar_start();
            let align_skip = at.next_multiple_of(align) - at;
            let backing = Arc::new(Backing::Pages(chunk), GFP_KERNEL_ACCOUNT)?;
            Memory::new(MemorySource::Adopted { backing, align_skip }, size, false)
        });
        if let Err(e) = memory.as_ref() {
            let full = *e == ENOSPC;
            let mut inner = self.inner.lock();
            if let Some(Source::Adopted { allocated, ceiling, .. }) = &mut inner.source {
                *allocated -= taken;
                if full {
                    // The other driver itself uses part of the pool.
                    *ceiling = (*ceiling).min(taken - PAGE_SIZE as u64);
                }
            }
            self.update_hint(&inner);
        }
        memory
    }

    /// Makes space for a request of `size` bytes. Returns the number of bytes released.
    ///
    /// In an own provider, memory that waits for the scrubber goes to the buddy allocator uncleared until `size` bytes are free;
    /// the allocation clears the memory that it gets, and the scrubber the rest. A chunk of another driver's pool is cleared
    /// before it goes back.
    ///
    /// Errors: `EINTR` (the task was killed), `ENODEV` (the provider is being removed).
    fn release_dirty(self: &Arc<Self>, size: u64) -> Result<u64> {
        self.take_unpinned();
        let buddy = match &self.inner.lock().source {
            None => return Err(ENODEV),
            Some(Source::Own { buddy, .. }) => Some(buddy.clone()),
            Some(Source::Adopted { .. }) => None,
        };
        let Some(buddy) = buddy else {
            return self.scrub_one(|| if is_killed() { Err(EINTR) } else { Ok(()) });
        };
        let mut released = 0;
        while let Some(memory) = self.take_dirty() {
            let taken = memory.footprint();
            drop(memory);
            self.finish_scrub(taken, |inner| inner.unscrubbed = true);
            released += taken;
            if is_killed() || buddy.free() >= size {
                break;
            }
        }
        if released > 0 {
            workqueue::enqueue(self.clone());
        }
        if is_killed() {
            return Err(EINTR);
        }
        Ok(released)
    }

    /// Waits up to 100 ms for memory that other tasks are clearing. `returns` is the value of [`Inner::returns`] before the caller
    /// looked for memory, so that memory returned since then ends the wait. Returns false if no memory came back and none is
    /// outstanding.
    ///
    /// Errors: `ERESTARTSYS`, `ENODEV` (the provider is being removed).
    fn await_others(&self, returns: u64) -> Result<bool> {
        let mut inner = self.inner.lock();
        if inner.source.is_none() {
            return Err(ENODEV);
        }
        if !inner.dirty.is_empty() || inner.returns != returns {
            return Ok(true);
        }
        if inner.outstanding <= inner.count {
            return Ok(false);
        }
        match self
            .returned
            .wait_interruptible_timeout(&mut inner, msecs_to_jiffies(100))
        {
            CondVarTimeoutResult::Signal { .. } => Err(ERESTARTSYS),
            _ => Ok(true),
        }
    }
}
