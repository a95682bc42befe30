// SPDX-License-Identifier: GPL-2.0

//! Buffers: allocations and those who hold them.
//!
//! Holders are handles of files, user mappings, and dma-bufs. A buffer is Live until its last holder lets
//! go or its provider leaves, whichever is first. When the provider leaves it is Revoking while its mappings are taken
//! down, and then Gone: whoever still has a handle, a mapping or a dma-buf has one of nothing. See Documentation/design/lifecycle.md.

use crate::{
    ext::{
        abi::consts,
        completion::Completion,
        cred::Who,
        log::Owner,
        p2pdma::Target,
        refusal::{
            refuse,
            Answer, //
        },
        trace,
        vma::{
            self,
            Fault,
            Mappable, //
        }, //
    },
    mem::{
        memory::Memory,
        provider,
        traits::Revocable,
        walk, //
    },
    policy::{
        life::{
            Hold,
            Life, //
        },
        rule::Subject as _, //
    }, //
};
use kernel::{
    new_mutex,
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, ArcBorrow, Mutex, MutexGuard,
    },
};

/// A provider of buffers.
pub(crate) type Provider = provider::Provider<Buffer>;
/// Memory of a provider that did not answer when it was removed.
pub(crate) type Lost = provider::removal::Lost<Buffer>;

impl State {
    /// The number the ABI has for it.
    pub(crate) fn as_raw(self) -> u32 {
        match self {
            Self::Live => consts::BUFFER_LIVE,
            Self::Revoking => consts::BUFFER_REVOKING,
            Self::Gone => consts::BUFFER_GONE,
        }
    }
}

struct Inner {
    life: Life,
    /// dma-bufs that are not closed yet.
    exports: RBTree<u64, Arc<dyn Revocable>>,
    /// What RDMA adapters have registered of it by way of its mappings.
    registrations: RBTree<u64, Arc<dyn Revocable>>,
    /// There while the buffer is Live or Revoking, except while it is being cleared ([`Buffer::usable`]).
    memory: Option<KBox<Memory>>,
    /// Files that have handles of it, other than the one it was allocated through: their numbers and how many.
    others: RBTree<u64, u32>,
}

/// An allocation.
#[pin_data]
pub(crate) struct Buffer {
    /// Its number, never used twice.
    pub(crate) id: u64,
    pub(crate) provider: Arc<Provider>,
    /// Where it is mapped in the address space that all mappings share, in pages; never used twice.
    pub(crate) page_offset: u64,
    /// Bytes, a multiple of the page size.
    pub(crate) size: u64,
    /// Its first byte in the BAR, if that is known.
    pub(crate) bar_offset: Option<u64>,
    /// Its address on the provider's bus.
    pub(crate) bus_addr: u64,
    /// The file it was allocated through.
    pub(crate) file: u64,
    pub(crate) owner: Owner,
    /// His credentials: what rules go by.
    pub(crate) who: Who,
    #[pin]
    inner: Mutex<Inner>,
    /// Its memory was cleared, where that was left for later.
    #[pin]
    cleared: Completion,
}

pub(crate) use crate::policy::life::State;

/// Who holds a buffer that is being revoked: nobody joins them any more.
pub(crate) struct Held {
    pub(crate) mappings: u32,
    /// Whether it was exported, or registered with an RDMA adapter.
    pub(crate) by_devices: bool,
}

/// A count as the ABI has it.
fn narrow(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// The next free place in the address space of all mappings, in pages. It starts behind 4 GiB: offset 0 means "a new
/// buffer", and small offsets are more likely mistakes than buffers.
static NEXT_PAGE: Atomic<u64> = Atomic::<u64>::new(1 << (32 - PAGE_SHIFT));
static NEXT_ID: Atomic<u64> = Atomic::<u64>::new(1);

impl Buffer {
    /// A Live buffer with one holder, which the result is.
    pub(crate) fn create(provider: Arc<Provider>, memory: KBox<Memory>, size: u64, file: u64) -> Result<Holder> {
        // One page of distance, so that no mapping can run from one buffer into the next.
        let pages = (size >> PAGE_SHIFT) + 1;
        let frame = memory.phys() >> PAGE_SHIFT;
        let step = (vma::step(size as usize) >> PAGE_SHIFT) as u64;
        let page = NEXT_PAGE.fetch_add(pages + step, Relaxed);
        let page_offset = page + (frame.wrapping_sub(page) & (step - 1));
        let bar_offset = provider.bar_offset_of(&memory);
        let bus_addr = memory.bus_addr();
        let for_buffer = provider.clone();
        let buffer = Arc::pin_init(
            pin_init!(Self {
                id: NEXT_ID.fetch_add(1, Relaxed),
                page_offset,
                provider: for_buffer,
                size,
                bar_offset,
                bus_addr,
                file,
                owner: Owner::current(),
                who: Who::current(),
                inner <- new_mutex!(Inner {
                    life: Life::new(),
                    exports: RBTree::new(),
                    registrations: RBTree::new(),
                    memory: None,
                    others: RBTree::new(),
                }),
                cleared <- Completion::new(),
            }),
            GFP_KERNEL_ACCOUNT,
        );
        let buffer: Arc<Self> = match buffer {
            Ok(buffer) => buffer,
            Err(e) => {
                provider.give_back(None, memory);
                return Err(e);
            }
        };
        if memory.is_clear() {
            buffer.cleared.complete();
        }
        buffer.inner.lock().memory = Some(memory);
        trace::alloc(|| {
            let offset = buffer.bar_offset.unwrap_or(u64::MAX);
            (buffer.about(), offset, file, buffer.who.uid())
        });
        let holder = Holder { buffer, file };
        holder.provider.register(holder.buffer.id, &holder.buffer)?;
        Ok(holder)
    }

    /// What events say of it.
    pub(crate) fn about(&self) -> trace::About {
        trace::About {
            buffer: self.id,
            size: self.size,
            provider: self.provider.id,
            function: self.provider.addr,
        }
    }

    /// One more handle of a Live buffer, of a file. Errors: `ENODEV` when it was revoked or has ended, `ENOMEM`.
    pub(crate) fn hold(self: &Arc<Self>, file: u64) -> Result<Holder> {
        let node = if file == self.file {
            None
        } else {
            Some(RBTreeNode::new(file, 0, GFP_KERNEL_ACCOUNT)?)
        };
        let mut inner = self.inner.lock();
        if !inner.life.join(Hold::Handle) {
            drop(inner);
            drop(node);
            return Err(ENODEV);
        }
        // One that the file has already is not needed.
        let mut spare = None;
        if let Some(node) = node {
            if inner.others.get(&file).is_some() {
                spare = Some(node);
            } else {
                inner.others.insert(node);
            }
            if let Some(count) = inner.others.get_mut(&file) {
                *count = count.saturating_add(1);
            }
        }
        drop(inner);
        drop(spare);
        Ok(Holder {
            buffer: self.clone(),
            file,
        })
    }

    /// A file has one handle less.
    fn unhold(&self, file: u64) {
        let mut ended = None;
        if file != self.file {
            let mut inner = self.inner.lock();
            if let Some(count) = inner.others.get_mut(&file) {
                *count -= 1;
                if *count == 0 {
                    ended = inner.others.remove_node(&file);
                }
            }
        }
        drop(ended);
        self.release(Hold::Handle);
    }

    /// Calls `f` with the number of each file that has handles of it, or had: the one that it was allocated through.
    pub(crate) fn for_each_file(&self, mut f: impl FnMut(u64)) {
        f(self.file);
        let next = |from| {
            let inner = self.inner.lock();
            let cursor = inner.others.cursor_lower_bound(&from)?;
            let (&file, _) = cursor.current();
            Some((file, file))
        };
        walk::one_by_one(next, |&file| f(file));
    }

    /// Handles of it, of all files.
    pub(crate) fn handles(&self) -> u32 {
        narrow(self.inner.lock().life.count(Hold::Handle))
    }

    /// State and number of mappings.
    pub(crate) fn status(&self) -> (State, u32) {
        let inner = self.inner.lock();
        (inner.life.state(), narrow(inner.life.count(Hold::Mapping)))
    }

    /// Number of dma-bufs, and of importers that are attached to them.
    pub(crate) fn exports(&self) -> (u32, u32) {
        let exports = narrow(self.inner.lock().life.count(Hold::Export));
        let mut attachments = 0;
        self.for_each_export(|export| attachments += export.attachments());
        (exports, attachments)
    }

    /// One more mapping of a Live buffer. Errors: `ENODEV` when it was revoked.
    pub(crate) fn map(&self) -> Result {
        if self.inner.lock().life.join(Hold::Mapping) {
            Ok(())
        } else {
            Err(ENODEV)
        }
    }

    /// What mappings of a Live buffer for devices are made with, and its physical address.
    pub(crate) fn target(&self) -> Answer<(Target, u64)> {
        let inner = self.usable().map_err(|e| match e {
            e if e == ENODEV => refuse!(e, "the buffer was revoked: its provider {} left", self.provider.addr),
            e => e.into(),
        })?;
        let memory = inner.memory.as_ref().ok_or(ENODEV)?;
        Ok((memory.target(), memory.phys()))
    }

    /// What a Live buffer has, all zeroes but for what its holders wrote: memory that is still to be cleared is cleared first,
    /// by the one who comes first.
    ///
    /// Errors: `ENODEV` (revoked), `EINTR` (the task was killed).
    fn usable(&self) -> Result<MutexGuard<'_, Inner>> {
        loop {
            let mut inner = self.inner.lock();
            if !inner.life.is_live() {
                return Err(ENODEV);
            }
            match inner.memory.take_if(|memory| !memory.is_clear()) {
                Some(memory) => {
                    // Without the lock: it may take long.
                    drop(inner);
                    self.clear(memory)?;
                }
                None if inner.memory.is_some() => return Ok(inner),
                None => {
                    // Another one clears it. One that is killed meanwhile leaves that to the next.
                    drop(inner);
                    self.cleared.wait_killable(20)?;
                }
            }
        }
    }

    /// Clears the memory, which the caller has taken out, and puts it back.
    fn clear(&self, mut memory: KBox<Memory>) -> Result {
        let done = self.provider.clear_for_use(&mut memory);
        let mut inner = self.inner.lock();
        if inner.life.state() == State::Gone {
            drop(inner);
            self.give_back(memory);
            return Err(ENODEV);
        }
        inner.memory = Some(memory);
        drop(inner);
        if done.is_ok() {
            self.cleared.complete();
        }
        done
    }

    fn give_back(&self, memory: KBox<Memory>) {
        trace::free(|| self.about());
        self.provider.give_back(Some(self.id), memory);
    }

    /// One more dma-buf of a Live buffer, by its number. Errors: `ENODEV` when it was revoked.
    pub(crate) fn add_export(&self, node: RBTreeNode<u64, Arc<dyn Revocable>>) -> Result {
        let mut inner = self.inner.lock();
        if !inner.life.join(Hold::Export) {
            drop(inner);
            drop(node);
            return Err(ENODEV);
        }
        inner.exports.insert(node);
        drop(inner);
        self.provider.exported();
        Ok(())
    }

    /// A dma-buf was closed.
    pub(crate) fn end_export(&self, id: u64) {
        let ended = self.inner.lock().exports.remove(&id);
        drop(ended);
        self.provider.unexported();
        self.release(Hold::Export);
    }

    /// Calls `f` with each dma-buf, one after the other and without a lock. Those that come meanwhile may be missed.
    pub(crate) fn for_each_export(&self, f: impl FnMut(&Arc<dyn Revocable>)) {
        walk::one_by_one(|from| walk::at_or_after(&self.inner.lock().exports, from), f);
    }

    /// One more registration of a Live buffer, by its number. Errors: `ENODEV` when it was revoked or has ended.
    #[cfg(p2pmem_peer)]
    pub(crate) fn add_registration(&self, node: RBTreeNode<u64, Arc<dyn Revocable>>) -> Result {
        let mut inner = self.inner.lock();
        if !inner.life.join(Hold::Registration) {
            drop(inner);
            drop(node);
            return Err(ENODEV);
        }
        inner.registrations.insert(node);
        Ok(())
    }

    /// A registration was ended.
    #[cfg(p2pmem_peer)]
    pub(crate) fn end_registration(&self, id: u64) {
        let ended = self.inner.lock().registrations.remove(&id);
        drop(ended);
        self.release(Hold::Registration);
    }

    /// Calls `f` with each dma-buf, and then with each registration, as [`Self::for_each_export`] does.
    pub(crate) fn for_each_revocable(&self, mut f: impl FnMut(&Arc<dyn Revocable>)) {
        self.for_each_export(&mut f);
        walk::one_by_one(|from| walk::at_or_after(&self.inner.lock().registrations, from), f);
    }

    /// Prepares the pages of a Live buffer for others' references. Errors: `ENODEV` when it was revoked.
    #[cfg(p2pmem_peer)]
    pub(crate) fn hold_pages(&self) -> Result {
        self.usable()?.memory.as_mut().ok_or(ENODEV)?.hold();
        Ok(())
    }

    /// One holder less; the last one ends the buffer.
    fn release(&self, hold: Hold) {
        self.end(|life| life.leave(hold));
    }

    /// A step that may be the one to Gone, at which the memory goes back.
    fn end(&self, step: impl FnOnce(&mut Life) -> bool) {
        let mut inner = self.inner.lock();
        if !step(&mut inner.life) {
            return;
        }
        let memory = inner.memory.take();
        drop(inner);
        // Whoever clears it at this moment gives it back.
        if let Some(memory) = memory {
            self.give_back(memory);
        }
    }

    /// First part of a revocation: from here on nothing new can be mapped or exported. Returns who holds it, none when the
    /// buffer had ended already.
    pub(crate) fn revoke(&self) -> Option<Held> {
        let mut inner = self.inner.lock();
        inner.life.revoke().then(|| Held {
            mappings: narrow(inner.life.count(Hold::Mapping)),
            by_devices: inner.life.count(Hold::Export) > 0 || inner.life.count(Hold::Registration) > 0,
        })
    }

    /// Last part, when no mapping of any kind is left: gives the memory back.
    pub(crate) fn finish_revoke(&self) {
        self.end(Life::finish);
    }
}

/// A handle: keeps the buffer until it is dropped.
pub(crate) struct Holder {
    buffer: Arc<Buffer>,
    /// The file whose handle it is.
    file: u64,
}

impl Holder {
    pub(crate) fn buffer(&self) -> &Arc<Buffer> {
        &self.buffer
    }
}

impl core::ops::Deref for Holder {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        &self.buffer
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.buffer.unhold(self.file);
    }
}

impl Mappable for Buffer {
    fn opened(this: ArcBorrow<'_, Self>) {
        this.inner.lock().life.copy(Hold::Mapping);
    }

    fn closed(this: ArcBorrow<'_, Self>) {
        this.release(Hold::Mapping);
    }

    fn is_ready(this: ArcBorrow<'_, Self>) -> bool {
        let inner = this.inner.lock();
        // One that has ended is ready to say so.
        !inner.life.is_live() || inner.memory.as_ref().is_some_and(|memory| memory.is_clear())
    }

    fn make_ready(this: &Arc<Self>) {
        // The fault that comes next finds out what went wrong.
        let _ = this.usable();
    }

    fn fault(this: ArcBorrow<'_, Self>, fault: &Fault<'_>) -> Result {
        let page = fault.page_offset().checked_sub(this.page_offset).ok_or(EFAULT)?;
        let offset = page * PAGE_SIZE as u64;
        let left = this.size.checked_sub(offset).ok_or(EFAULT)?;
        // The lock is held until the pages are mapped: a revocation that comes now takes them down again, as it takes
        // this lock first and unmaps afterwards.
        this.usable()?.memory.as_mut().ok_or(ENODEV)?.map(fault, offset, left)
    }

    fn fault_table(this: ArcBorrow<'_, Self>, fault: &Fault<'_>) -> Result {
        let first = fault.table_offset().and_then(|page| page.checked_sub(this.page_offset));
        let offset = first.ok_or(EAGAIN)? * PAGE_SIZE as u64;
        // As above.
        let inner = this.usable()?;
        inner.memory.as_ref().ok_or(ENODEV)?.map_table(fault, offset)
    }
}
