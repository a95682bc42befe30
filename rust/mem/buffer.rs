// SPDX-License-Identifier: GPL-2.0

//! Buffers: allocations, their holders and their states.
//!
//! A holder is a handle of a file, a user mapping, a dma-buf or a registration with an RDMA NIC. A buffer is Live until its
//! last holder lets go or its provider is removed, whichever comes first. A removal makes the buffer Revoking while
//! mappings are taken down, and then Gone; handles, mappings and dma-bufs that still exist refer to no memory then. The
//! states are those of Documentation/design/lifecycle.md, and [`crate::policy::life`] implements them.
//!
//! Context: process context, may sleep. `Buffer::inner` is a mutex. While a thread holds `Buffer::inner` it may take the
//! page table locks of the mm and no lock of p2pmem: `inner` is released before the provider's books change. The callbacks
//! of [`Mappable`] run as [`crate::ext::vma`] says, mostly with the mmap lock or the VMA lock held.

use crate::{
    ext::{
        abi::consts,
        completion::Completion,
        cred::Credentials,
        log::Owner,
        p2pdma::Target,
        refusal::{
            refuse,
            Answer,
            Refusal, //
        },
        trace,
        vma::{
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
    page::PAGE_SIZE,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, ArcBorrow, Mutex, MutexGuard,
    },
};

/// A provider whose buffers are [`Buffer`]s.
pub(crate) type Provider = provider::Provider<Buffer>;
/// Memory of a provider that was removed while its device did not answer.
pub(crate) type Lost = provider::removal::Lost<Buffer>;

impl State {
    /// Returns the ABI's number of the state, one of `P2PMEM_BUFFER_*`.
    pub(crate) fn as_raw(self) -> u32 {
        match self {
            Self::Live => consts::BUFFER_LIVE,
            Self::Revoking => consts::BUFFER_REVOKING,
            Self::Gone => consts::BUFFER_GONE,
        }
    }
}

/// Everything that `Buffer::inner` protects.
struct Inner {
    life: Life,
    /// The dma-bufs that are not released yet, by their numbers.
    exports: RBTree<u64, Arc<dyn Revocable>>,
    /// The registrations through the peer-memory interface, by their numbers.
    registrations: RBTree<u64, Arc<dyn Revocable>>,
    /// `Some` while the buffer is Live or Revoking, except while a thread clears the memory ([`Buffer::usable`]).
    memory: Option<KBox<Memory>>,
    /// The number of handles of each file other than [`Buffer::file`], by the file's number.
    others: RBTree<u64, u32>,
}

/// An allocation.
///
/// The memory is taken from the buffer exactly once, at the step to Gone, and never comes back.
#[pin_data]
pub(crate) struct Buffer {
    /// The buffer's number, never used twice.
    pub(crate) id: u64,
    pub(crate) provider: Arc<Provider>,
    /// The buffer's offset in the address space that all mappings of the module share, in pages. No other buffer with memory has
    /// these pages.
    pub(crate) page_offset: u64,
    /// Bytes, a multiple of the page size.
    pub(crate) size: u64,
    /// Offset of the first byte in the BAR of the provider, or all ones if the memory is in another BAR.
    pub(crate) bar_offset: u64,
    /// Whether user mappings are write-combining.
    pub(crate) combine: bool,
    /// Bus address of the first byte, on the provider's bus.
    pub(crate) bus_addr: u64,
    /// The number of the file that allocated the buffer.
    pub(crate) file: u64,
    pub(crate) owner: Owner,
    /// Credentials of the task that allocated the buffer. Rules apply to them.
    pub(crate) cred: Credentials,
    #[pin]
    inner: Mutex<Inner>,
    /// Completed when the memory is clear. Only an allocation through `mmap()` postpones clearing.
    #[pin]
    cleared: Completion,
}

pub(crate) use crate::policy::life::State;

/// The holders at the time of [`Buffer::revoke`]. None can be added afterwards.
pub(crate) struct HolderCounts {
    pub(crate) mappings: u32,
    /// Whether a dma-buf or a registration holds the buffer.
    pub(crate) by_devices: bool,
}

/// Returns a count in the width of the ABI, saturated at `u32::MAX`.
fn narrow(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

static NEXT_ID: Atomic<u64> = Atomic::<u64>::new(1);

impl Buffer {
    /// Creates a Live buffer of `size` bytes that holds `memory`, and returns its first handle, which belongs to `file`.
    /// The current task becomes the owner. The caller registers the buffer with the provider.
    ///
    /// Context: process context, may sleep. `mmap()` at offset 0 calls this with the mmap lock held.
    ///
    /// Errors: `ENOMEM`; the memory goes back to the provider then.
    pub(crate) fn create(provider: Arc<Provider>, memory: KBox<Memory>, size: u64, file: u64) -> Result<Holder> {
        let page_offset = provider.page_offset_of(&memory);
        let (bar, offset) = memory.place();
        // A driver may have published several BARs, of which the provider names one. An offset in another one would be taken for one
        // in that BAR.
        let bar_offset = if bar == provider.bar { offset } else { u64::MAX };
        let (bus_addr, combine) = (memory.bus_addr(), memory.combine());
        let for_buffer = provider.clone();
        let buffer = Arc::pin_init(
            pin_init!(Self {
                id: NEXT_ID.fetch_add(1, Relaxed),
                page_offset,
                provider: for_buffer,
                size,
                bar_offset,
                combine,
                bus_addr,
                file,
                owner: Owner::current(),
                cred: Credentials::current(),
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
        trace::alloc(|| (buffer.about(), buffer.bar_offset, file, buffer.cred.uid()));
        Ok(Holder { buffer, file })
    }

    /// Returns the fields that trace events print.
    pub(crate) fn about(&self) -> trace::BufferFields {
        trace::BufferFields {
            buffer: self.id,
            size: self.size,
            provider: self.provider.id,
            function: self.provider.addr,
        }
    }

    /// Adds a handle of `file`. Dropping the result removes the handle.
    ///
    /// Errors: `ENODEV` if the buffer is not Live, `ENOMEM`.
    pub(crate) fn hold(self: &Arc<Self>, file: u64) -> Result<Holder> {
        let node = if file == self.file {
            None
        } else {
            Some(RBTreeNode::new(file, 0, GFP_KERNEL_ACCOUNT)?)
        };
        let mut inner = self.inner.lock();
        if !inner.life.add(Hold::Handle) {
            drop(inner);
            drop(node);
            return Err(ENODEV);
        }
        // The node is not needed if the file has a handle already. It is dropped without the lock.
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

    /// Removes a handle of `file`.
    fn drop_handle(&self, file: u64) {
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

    /// Calls `f` with the number of each file that has a handle, and of the file that allocated the buffer, whether or not
    /// that one still has a handle. `f` runs without a lock.
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

    /// Returns the number of handles of all files.
    pub(crate) fn handles(&self) -> u32 {
        narrow(self.inner.lock().life.count(Hold::Handle))
    }

    /// Returns the state and the number of user mappings.
    pub(crate) fn status(&self) -> (State, u32) {
        let inner = self.inner.lock();
        (inner.life.state(), narrow(inner.life.count(Hold::Mapping)))
    }

    /// Returns the number of dma-bufs and the number of importers attached to them.
    pub(crate) fn exports(&self) -> (u32, u32) {
        let exports = narrow(self.inner.lock().life.count(Hold::Export));
        let mut attachments = 0;
        self.for_each_export(|export| attachments += export.attachments());
        (exports, attachments)
    }

    /// Adds a user mapping. Errors: `ENODEV` if the buffer is not Live.
    pub(crate) fn map(&self) -> Result {
        if self.inner.lock().life.add(Hold::Mapping) {
            Ok(())
        } else {
            Err(ENODEV)
        }
    }

    /// Returns the refusal (`ENODEV`) of an operation on the buffer after its provider was removed.
    pub(crate) fn revoked(&self) -> Refusal {
        refuse!(
            ENODEV,
            "the buffer is revoked: provider {} was removed",
            self.provider.addr
        )
    }

    /// Returns the target for DMA mappings of the buffer and the buffer's physical address. Clears the memory before if
    /// necessary.
    ///
    /// Context: process context, may sleep.
    ///
    /// Errors: `ENODEV` if the buffer is not Live, `EINTR` if the task was killed.
    pub(crate) fn target(&self) -> Answer<(Target, u64)> {
        let inner = self.usable().map_err(|e| match e {
            e if e == ENODEV => self.revoked(),
            e => e.into(),
        })?;
        let memory = inner.memory.as_ref().ok_or(ENODEV)?;
        Ok((memory.target(), memory.phys()))
    }

    /// Locks a Live buffer whose memory is clear. Memory that is not clear yet is cleared here, without the lock, by the
    /// first caller; other callers wait for that one. The result has `memory`.
    ///
    /// Context: process context, may sleep.
    ///
    /// Errors: `ENODEV` if the buffer is not Live, `EINTR` if the task was killed.
    fn usable(&self) -> Result<MutexGuard<'_, Inner>> {
        loop {
            let mut inner = self.inner.lock();
            if !inner.life.is_live() {
                return Err(ENODEV);
            }
            match inner.memory.take_if(|memory| !memory.is_clear()) {
                Some(memory) => {
                    // Clearing may take long and runs without the lock.
                    drop(inner);
                    self.clear(memory)?;
                }
                None if inner.memory.is_some() => return Ok(inner),
                None => {
                    // Another task clears the memory. If that task is killed, the next one takes over, so the wait has a
                    // timeout of 20 ms.
                    drop(inner);
                    self.cleared.wait_killable(20)?;
                }
            }
        }
    }

    /// Clears `memory`, which the caller took out of `inner`, and puts it back. A buffer that became Gone meanwhile returns
    /// the memory to its provider instead.
    ///
    /// Errors: `ENODEV` if the buffer is Gone or the provider is being removed, `EINTR` if the task was killed.
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

    /// Returns the buffer's memory to the provider. `inner` is not held.
    fn give_back(&self, memory: KBox<Memory>) {
        trace::free(|| self.about());
        self.provider.give_back(Some(self.id), memory);
    }

    /// Adds a dma-buf; the key of `node` is the dma-buf's number. Errors: `ENODEV` if the buffer is not Live.
    pub(crate) fn add_export(&self, node: RBTreeNode<u64, Arc<dyn Revocable>>) -> Result {
        let mut inner = self.inner.lock();
        if !inner.life.add(Hold::Export) {
            drop(inner);
            drop(node);
            return Err(ENODEV);
        }
        inner.exports.insert(node);
        drop(inner);
        self.provider.exported();
        Ok(())
    }

    /// Removes the dma-buf `id`, which was released.
    pub(crate) fn end_export(&self, id: u64) {
        let ended = self.inner.lock().exports.remove(&id);
        drop(ended);
        self.provider.unexported();
        self.release(Hold::Export);
    }

    /// Calls `f` with each dma-buf, without a lock. May miss dma-bufs that are added meanwhile.
    pub(crate) fn for_each_export(&self, f: impl FnMut(&Arc<dyn Revocable>)) {
        walk::one_by_one(|from| walk::at_or_after(&self.inner.lock().exports, from), f);
    }

    /// Adds a registration; the key of `node` is the registration's number. Errors: `ENODEV` if the buffer is not Live.
    pub(crate) fn add_registration(&self, node: RBTreeNode<u64, Arc<dyn Revocable>>) -> Result {
        let mut inner = self.inner.lock();
        if !inner.life.add(Hold::Registration) {
            drop(inner);
            drop(node);
            return Err(ENODEV);
        }
        inner.registrations.insert(node);
        Ok(())
    }

    /// Removes the registration `id`, which has ended.
    pub(crate) fn end_registration(&self, id: u64) {
        let ended = self.inner.lock().registrations.remove(&id);
        drop(ended);
        self.release(Hold::Registration);
    }

    /// Calls `f` with each dma-buf and then with each registration, as [`Self::for_each_export`] does.
    pub(crate) fn for_each_revocable(&self, mut f: impl FnMut(&Arc<dyn Revocable>)) {
        self.for_each_export(&mut f);
        walk::one_by_one(|from| walk::at_or_after(&self.inner.lock().registrations, from), f);
    }

    /// Takes p2pmem's own references on the pages of a Live buffer, so that the RDMA core may refer to them.
    ///
    /// Errors: `ENODEV` if the buffer is not Live, `EINTR` if the task was killed.
    pub(crate) fn hold_pages(&self) -> Result {
        self.usable()?.memory.as_mut().ok_or(ENODEV)?.hold();
        Ok(())
    }

    /// Removes a holder. The last one makes a Live buffer Gone.
    fn release(&self, hold: Hold) {
        self.end(|life| life.remove(hold));
    }

    /// Runs a step of the state machine. If `step` returns true the buffer has just become Gone, and its memory goes back
    /// to the provider, without `inner` held.
    fn end(&self, step: impl FnOnce(&mut Life) -> bool) {
        let mut inner = self.inner.lock();
        if !step(&mut inner.life) {
            return;
        }
        let memory = inner.memory.take();
        drop(inner);
        // `None` if a task clears the memory at the moment: that task returns it ([`Self::clear`]).
        if let Some(memory) = memory {
            self.give_back(memory);
        }
    }

    /// First part of a revocation: Live becomes Revoking, so that no mapping, export or registration can be added. Returns
    /// the holders, or `None` if the buffer was not Live.
    pub(crate) fn revoke(&self) -> Option<HolderCounts> {
        let mut inner = self.inner.lock();
        inner.life.revoke().then(|| HolderCounts {
            mappings: narrow(inner.life.count(Hold::Mapping)),
            by_devices: inner.life.count(Hold::Export) > 0 || inner.life.count(Hold::Registration) > 0,
        })
    }

    /// Last part of a revocation, when no mapping of any kind is left: the buffer becomes Gone and its memory goes back.
    pub(crate) fn finish_revoke(&self) {
        self.end(Life::finish);
    }
}

/// A handle. Dropping it removes the handle.
pub(crate) struct Holder {
    buffer: Arc<Buffer>,
    /// The number of the file that has the handle.
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
        self.buffer.drop_handle(self.file);
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
        // A buffer that is not Live is ready: the fault ends in SIGBUS at once.
        !inner.life.is_live() || inner.memory.as_ref().is_some_and(|memory| memory.is_clear())
    }

    fn make_ready(this: &Arc<Self>) {
        // The fault is repeated afterwards and reports the error.
        let _ = this.usable();
    }

    fn fault(this: ArcBorrow<'_, Self>, fault: &Fault<'_>) -> Result {
        let page = fault.page_offset().checked_sub(this.page_offset).ok_or(EFAULT)?;
        let offset = page * PAGE_SIZE as u64;
        // `inner` stays locked until the pages are inserted. A revocation takes `inner` to set Revoking and unmaps
        // afterwards, so it takes these pages down again.
        this.usable()?.memory.as_mut().ok_or(ENODEV)?.map(fault, offset)
    }
}
