// SPDX-License-Identifier: GPL-2.0

//! Allocates memory of a provider.
//!
//! An allocation that finds too little free memory clears dirty memory until enough is free, or takes dirty memory and clears it
//! at the first use.
//!
//! Context: process context, may sleep, no locks held. `Provider::inner` is taken for each step and never held while memory is
//! cleared or another driver's pool is called.

use crate::{
    ext::{
        free_hint::padded,
        pool::Pool,
        task::is_killed, //
    },
    mem::{
        memory::{
            Clearing,
            Memory,
            MemorySource, //
        },
        own::OwnMemory,
        provider::{
            Counted,
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

impl<B: Counted> Provider<B> {
    /// How often an allocation waits in vain for memory that other tasks are clearing.
    const WAITS: u32 = 16;

    /// Allocates `size` bytes of zeroed memory, aligned to `align` bytes. With [`Clearing::AtFirstUse`] the caller calls
    /// [`Self::clear_for_use`] before anybody can reach the memory.
    ///
    /// Errors: `ENOSPC`, `ENODEV` (the provider is being removed), `ENOMEM`, `EINTR` (the task was killed), `ERESTARTSYS` (a
    /// signal came while the allocation waited for memory to be cleared), `EIO` (the allocator failed).
    pub(crate) fn alloc(self: &Arc<Self>, size: u64, align: u64, clearing: Clearing) -> Result<KBox<Memory>> {
        let memory = match self.alloc_once(size, align, clearing) {
            Err(e) if e == ENOSPC => self.alloc_dirty(size, align, clearing)?,
            done => done?,
        };
        self.counters.allocs.fetch_add(1, Relaxed);
        self.counters.alloc_bytes.fetch_add(memory.size, Relaxed);
        Ok(memory)
    }

    /// The part of [`Self::alloc`] for too little free memory. Dirty memory counts as free, so an allocation must be able to have
    /// it. Each round gives some of it back to the allocator, or waits for others that do.
    fn alloc_dirty(self: &Arc<Self>, size: u64, align: u64, clearing: Clearing) -> Result<KBox<Memory>> {
        self.take_unpinned();
        let scrubbed = || self.counters.scrubbed_bytes.load(Relaxed);
        let (start, mut freed, mut waits) = (scrubbed(), 0, 0);
        loop {
            let (before, returns) = (scrubbed(), self.inner.lock().returns);
            match self.alloc_once(size, align, clearing) {
                Err(e) if e == ENOSPC => {}
                done => return done,
            }
            // Other allocations may take what this one gives back. Twice the provider's size is the bound.
            if freed.max(before - start) > 2 * self.size {
                return Err(ENOSPC);
            }
            if is_killed() {
                return Err(EINTR);
            }
            let now = match clearing {
                Clearing::Now => self.scrub_step()?,
                // The caller holds the mmap lock, so nothing is cleared here.
                Clearing::AtFirstUse => self.release_step()?,
            };
            if now > 0 {
                freed += now;
                continue;
            }
            if waits == Self::WAITS || !self.await_others(returns)? {
                return Err(ENOSPC);
            }
            waits += u32::from(scrubbed() == before);
        }
    }

    /// Allocates from the memory that is free now.
    fn alloc_once(self: &Arc<Self>, size: u64, align: u64, clearing: Clearing) -> Result<KBox<Memory>> {
        let mut inner = self.inner.lock();
        let own = match inner.source.as_mut().ok_or(ENODEV)? {
            Source::Own(own) => Ok(own.clone()),
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
            Ok(own) => alloc_own(own, size, align),
            Err(pool) => self.alloc_adopted(&pool, size, align),
        };
        let mut memory = memory.inspect_err(|_| {
            // No memory was taken.
            self.inner.lock().outstanding -= 1;
            self.returned.notify_all();
        })?;
        if clearing == Clearing::Now {
            if let Err(e) = self.clear_for_use(&mut memory) {
                self.return_memory(memory);
                return Err(e);
            }
        }
        Ok(memory)
    }

    /// Allocates a chunk from another driver's pool, large enough for the alignment.
    fn alloc_adopted(&self, pool: &Pool, size: u64, align: u64) -> Result<KBox<Memory>> {
        let taken = padded(size, align);
        let memory = pool.take(taken).ok_or(ENOSPC).and_then(|chunk| {
            let (_, at) = chunk.place();
            let align_skip = at.next_multiple_of(align) - at;
            let backing = Arc::new(chunk, GFP_KERNEL_ACCOUNT)?;
            Memory::new(MemorySource::Adopted { backing, align_skip }, size)
        });
        if let Err(e) = memory.as_ref() {
            let mut inner = self.inner.lock();
            inner.unreserve(taken);
            if let (Some(Source::Adopted { ceiling, .. }), ENOSPC) = (&mut inner.source, *e) {
                // The other driver itself uses part of the pool.
                *ceiling = (*ceiling).min(taken - PAGE_SIZE as u64);
            }
            self.update_hint(&inner);
        }
        memory
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

/// Allocates from the provider's own memory.
fn alloc_own(own: Arc<OwnMemory>, size: u64, align: u64) -> Result<KBox<Memory>> {
    let extent = own.buddy().alloc(size, align)?;
    Memory::new(MemorySource::Own { extent, own }, size)
}
