// SPDX-License-Identifier: GPL-2.0

//! A slot: the place of a registration's single DMA mapping.
//!
//! Context: process context, may sleep. Lock: `Slot::state` is a mutex that is held while a mapping is made and ended. It is
//! not taken under another lock of this interface, and not held when the core is called. [`Slot::invalidate`] calls back
//! into the client: its caller must not hold a lock that the client's callbacks take.
//!
//! C header: `rust/sys/peer_mem.h`

use crate::{
    ext::{
        dma_buf::PhysRange,
        p2pdma::Target,
        peer_mem::{
            adapter::Adapter,
            gate::{
                self,
                CoreContext,
                Form, //
            },
        },
    },
    sys, //
};
use core::ptr::{self, NonNull};
use kernel::{
    bindings,
    error::from_err_ptr,
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    },
};

/// A DMA mapping, and the reference that keeps the mapped memory.
///
/// # Invariants
///
/// `raw` is a mapping from `p2pmem_peer_map()` that this object owns. `raw` is for `device` and holds a reference to it.
/// While `live` is set, `target` keeps the mapped memory, except for a mapping without a target, whose entries nothing
/// uses.
struct PeerMapping {
    raw: NonNull<sys::p2pmem_peer_map>,
    /// Null for a virtual adapter.
    device: *mut bindings::device,
    target: Option<Target>,
    /// Whether the mapping may be in use: false after `p2pmem_peer_unmap()`.
    live: bool,
}

// SAFETY: Nothing in the C object depends on the thread that created it. `device` is only compared.
unsafe impl Send for PeerMapping {}

impl Drop for PeerMapping {
    fn drop(&mut self) {
        // SAFETY: By the type invariant this object owns the mapping, so it is freed here only. `target` is dropped
        // afterwards.
        unsafe { sys::p2pmem_peer_free(self.raw.as_ptr()) };
    }
}

/// The object that contains a slot, which the slot keeps alive.
pub(super) trait Keep: Send + Sync {}

impl<C: Send + Sync> Keep for C {}

struct SlotState {
    mapped: Option<PeerMapping>,
    closed: bool,
    /// The registration's number, and the core's identifier of the registration.
    owner: Option<(u64, CoreContext)>,
    /// A reference to the object that contains the slot, from [`Slot::keep`] until [`Slot::release`].
    keep: Option<Arc<dyn Keep>>,
}

/// The place of a registration's single mapping.
///
/// The core gets a view of the list of addresses, which stays valid until the slot is dropped. The addresses themselves
/// are valid until the mapping ends.
#[pin_data]
pub(crate) struct Slot {
    /// Held while a mapping is made and ended, but never while the core is called.
    #[pin]
    state: Mutex<SlotState>,
}

impl Slot {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            state <- new_mutex!(SlotState {
                mapped: None,
                closed: false,
                owner: None,
                keep: None,
            }),
        })
    }

    /// Maps pieces of `target` for an adapter: as DMA addresses, or for a virtual adapter as pages. Returns the number of
    /// entries.
    ///
    /// May sleep. Errors: `ENODEV` if the slot is closed; `EBUSY` if the slot has or had a mapping; `EINVAL` if a piece
    /// does not lie in the target's memory, or the adapter is virtual and the target has no pages; those of the DMA mapping.
    pub(crate) fn map(&self, adapter: &Adapter<'_>, target: Target, pieces: &[PhysRange]) -> Result<u32> {
        let serves = adapter.device().is_some() || target.has_pages();
        if !serves || !pieces.iter().all(|piece| piece.is_in(&target)) {
            return Err(EINVAL);
        }
        // SAFETY: The checks above are the requirements.
        unsafe { self.map_unchecked(adapter, Some(target), pieces) }
    }

    /// Maps as [`Self::map`], without checks.
    ///
    /// # Safety
    ///
    /// All pieces must lie in the memory of `target`, which must have pages for a virtual adapter. Without a target, the adapter must be virtual, and nothing may use the entries.
    unsafe fn map_unchecked(&self, adapter: &Adapter<'_>, target: Option<Target>, pieces: &[PhysRange]) -> Result<u32> {
        let provider = target
            .as_ref()
            .filter(|_| adapter.device().is_some())
            .map(|target| target.provider());
        let provider = provider.map_or(ptr::null_mut(), NonNull::as_ptr);
        let count = u32::try_from(pieces.len())?;
        let mut state = self.state.lock();
        if state.closed {
            return Err(ENODEV);
        }
        if state.mapped.is_some() {
            return Err(EBUSY);
        }
        // SAFETY: By the invariant of `Adapter` the device is null or valid; the mapping takes a reference to it. The
        // caller guarantees that `target` keeps all pieces; `target` also keeps the provider and is stored next to the
        // mapping. `PhysRange` is a transparent wrapper of `struct phys_vec`, and `count` is the slice's length.
        let raw = unsafe { sys::p2pmem_peer_map(adapter.as_raw(), provider, pieces.as_ptr().cast(), count) };
        let raw = NonNull::new(from_err_ptr(raw)?).ok_or(ENOMEM)?;
        // INVARIANT: `p2pmem_peer_map()` returned a new mapping for this device. `target` keeps its memory.
        let mapped = state.mapped.insert(PeerMapping {
            raw,
            device: adapter.as_raw(),
            target,
            live: true,
        });
        // SAFETY: By the type invariant the object owns the mapping, so it is valid.
        Ok(unsafe { sys::p2pmem_peer_nents(mapped.raw.as_ptr()) })
    }

    /// Assigns the slot to a registration. Errors: `EBUSY` if the slot belongs to another registration.
    pub(super) fn give_to(&self, number: u64, core: CoreContext) -> Result {
        let mut state = self.state.lock();
        if state.owner.is_some_and(|(owner, _)| owner != number) {
            return Err(EBUSY);
        }
        state.owner = Some((number, core));
        Ok(())
    }

    pub(super) fn is_of(&self, number: u64) -> bool {
        self.state.lock().owner.is_some_and(|(owner, _)| owner == number)
    }

    /// Keeps the object that contains the slot, until [`Self::release`].
    ///
    /// Errors: `EINVAL` if the slot does not belong to the registration, or has no mapping for this adapter; `ENODEV` if
    /// the mapping has ended.
    pub(super) fn keep(&self, number: u64, adapter: &Adapter<'_>, whole: Arc<dyn Keep>) -> Result {
        if !self.is_of(number) {
            return Err(EINVAL);
        }
        let mut state = self.state.lock();
        match state.mapped.as_ref().filter(|mapped| mapped.device == adapter.as_raw()) {
            None => return Err(EINVAL),
            Some(mapped) if !mapped.live => return Err(ENODEV),
            Some(_) => {}
        }
        let old = state.keep.replace(whole);
        drop(state);
        drop(old);
        Ok(())
    }

    /// Drops the reference from [`Self::keep`]. The core no longer reads the list of addresses.
    pub(super) fn release(&self) {
        let keep = self.state.lock().keep.take();
        drop(keep);
    }

    /// Ends the mapping of a registration if the slot belongs to it. The caller knows that no adapter uses the mapping.
    pub(super) fn unmap_for(&self, number: u64) {
        if self.is_of(number) {
            self.unmap();
        }
    }

    /// Closes the slot and makes the core invalidate the registration.
    ///
    /// Returns true if the core was called: the adapter no longer uses the memory. With [`Form::Ex`] the mapping has
    /// ended. With [`Form::Legacy`] the core calls `dma_unmap` meanwhile, which ends the mapping; check
    /// [`Self::is_mapped`]. Returns false if nothing is mapped, or if the adapter may still use the memory: the client cannot invalidate,
    /// or the core reports an error.
    ///
    /// May sleep. The caller must not hold a lock that the client's `get_pages`, `dma_map`, `dma_unmap` or `put_pages`
    /// take.
    pub(crate) fn invalidate(&self) -> bool {
        let mut state = self.state.lock();
        state.closed = true;
        let owner = state
            .owner
            .filter(|_| state.mapped.as_ref().is_some_and(|mapped| mapped.live));
        drop(state);
        let Some((_, core)) = owner else {
            return false;
        };
        let Some(gate) = gate::current().filter(|gate| gate.invalidate(core)) else {
            return false;
        };
        if gate.form == Form::Ex {
            self.unmap();
        }
        true
    }

    /// Ends the mapping, which no adapter may use any more. Returns whether there was one.
    fn unmap(&self) -> bool {
        let mut state = self.state.lock();
        let Some(mapped) = state.mapped.as_mut().filter(|mapped| mapped.live) else {
            return false;
        };
        mapped.live = false;
        // SAFETY: By the type invariant the object owns the mapping. `live` was set, so this is the only call.
        unsafe { sys::p2pmem_peer_unmap(mapped.raw.as_ptr()) };
        let target = mapped.target.take();
        drop(state);
        // Dropped outside the lock: the drop may free the provider's memory.
        drop(target);
        true
    }

    /// Closes the slot: no mapping can be made any more. Returns whether one exists.
    pub(crate) fn close(&self) -> bool {
        self.state.lock().closed = true;
        self.is_mapped()
    }

    /// Returns whether the adapter uses the memory until the program deregisters it, because the client cannot invalidate.
    pub(crate) fn outlasts_invalidation(&self) -> bool {
        self.is_mapped() && gate::current().is_none_or(|gate| gate.form == Form::Persistent)
    }

    pub(crate) fn is_mapped(&self) -> bool {
        self.state.lock().mapped.as_ref().is_some_and(|mapped| mapped.live)
    }

    /// Writes a view of the entries to a table of the core. Returns the number of entries. Errors: `EINVAL` without a
    /// mapping.
    ///
    /// # Safety
    ///
    /// `sg_head` must be valid for writes. The table must not be used after the slot is dropped.
    pub(super) unsafe fn show(&self, sg_head: *mut bindings::sg_table) -> Result<u32> {
        let state = self.state.lock();
        let mapped = state.mapped.as_ref().ok_or(EINVAL)?;
        // SAFETY: By the type invariant of `PeerMapping` the mapping is valid. It stays in the slot until the slot is
        // dropped, and so do the entries. The caller guarantees that `sg_head` is valid, and that the view is not used for
        // longer.
        unsafe {
            sys::p2pmem_peer_entries(mapped.raw.as_ptr(), sg_head);
            Ok(sys::p2pmem_peer_nents(mapped.raw.as_ptr()))
        }
    }
}

#[kunit_tests(p2pmem_peer_slot)]
mod tests {
    use super::*;

    const PAGE: u64 = kernel::page::PAGE_SIZE as u64;
    /// The largest length of an entry in whole pages.
    const MOST: u64 = (u32::MAX as u64) & !(PAGE - 1);
    // SAFETY: A null pointer is a virtual adapter.
    const CPU: Adapter<'static> = unsafe { Adapter::from_raw(ptr::null_mut()) };

    #[test]
    fn range_is_split_at_maximum_entry_length() -> Result {
        // Nothing accesses these addresses, so no memory is needed there.
        let at = 1 << 38;
        for (size, lengths) in [
            (PAGE, &[PAGE] as &[u64]),
            (MOST, &[MOST]),
            (MOST + PAGE, &[MOST, PAGE]),
            (2 * MOST, &[MOST, MOST]),
            (2 * MOST + 3 * PAGE, &[MOST, MOST, 3 * PAGE]),
        ] {
            let entries = mapped(&[(at, size)])?;
            assert_eq!(entries.len(), lengths.len());
            let mut next = None;
            for (&(address, length), &expected) in entries.iter().zip(lengths) {
                assert_eq!(length, expected);
                assert!(next.is_none_or(|next| next == address));
                next = Some(address + length);
            }
        }
        Ok(())
    }

    #[test]
    fn entries_keep_order_and_offsets() -> Result {
        let at = 1 << 38;
        let entries = mapped(&[(at + 9 * PAGE, PAGE), (at, 2 * PAGE), (at + 2 * PAGE, PAGE)])?;
        assert_eq!(entries.len(), 3);
        let first = entries.first().map_or(0, |entry| entry.0);
        for (&(address, length), (from, size)) in entries.iter().zip([(0, 1), (-9, 2), (-7, 1)]) {
            assert_eq!(address, first.wrapping_add_signed(from * PAGE as i64));
            assert_eq!(length, size * PAGE);
        }
        Ok(())
    }

    #[test]
    fn chained_scatterlist_has_all_entries() -> Result {
        // The kernel chains scatterlists page by page.
        let mut pieces = KVec::new();
        for at in 0..1_000 {
            pieces.push(((1 << 38) + 2 * at * PAGE, PAGE), GFP_KERNEL)?;
        }
        let entries = mapped(&pieces)?;
        assert_eq!(entries.len(), 1_000);
        let first = entries.first().map_or(0, |entry| entry.0);
        assert!(entries
            .last()
            .is_some_and(|&(address, length)| address == first + 2 * 999 * PAGE && length == PAGE));
        Ok(())
    }

    #[test]
    fn slot_takes_one_mapping_and_none_after_close() -> Result {
        let slot = KBox::pin_init(Slot::new(), GFP_KERNEL)?;
        let piece = [PhysRange::new(1 << 38, PAGE)?];
        let mut table = bindings::sg_table::default();
        // SAFETY: The table is a local variable, and the slot outlives it.
        assert!(unsafe { slot.show(&mut table) }.is_err_and(|e| e == EINVAL));
        assert!(!slot.unmap() && !slot.is_mapped());
        assert_eq!(untouched(&slot, &piece)?, 1);
        assert!(untouched(&slot, &piece).is_err_and(|e| e == EBUSY));
        // Closing does not end the mapping, but prevents new ones. The entries stay readable after the mapping has ended.
        assert!(slot.close() && slot.is_mapped());
        assert!(slot.unmap() && !slot.close());
        assert!(untouched(&slot, &piece).is_err_and(|e| e == ENODEV));
        assert_eq!(entries(&slot)?.len(), 1);
        Ok(())
    }

    #[test]
    fn slot_belongs_to_one_registration() -> Result {
        let slot = Arc::pin_init(Slot::new(), GFP_KERNEL)?;
        let whole = Arc::new((), GFP_KERNEL)?;
        // The slot belongs to the first registration that uses it, even if that comes several times.
        assert!(slot.keep(1, &CPU, whole.clone()).is_err_and(|e| e == EINVAL));
        slot.give_to(1, CoreContext(11))?;
        slot.give_to(1, CoreContext(12))?;
        assert!(slot.keep(1, &CPU, whole.clone()).is_err_and(|e| e == EINVAL));
        assert!(slot.give_to(2, CoreContext(21)).is_err_and(|e| e == EBUSY));
        assert_eq!(untouched(&slot, &[PhysRange::new(1 << 38, PAGE)?])?, 1);
        assert!(slot.keep(2, &CPU, whole.clone()).is_err_and(|e| e == EINVAL));
        // SAFETY: Nothing dereferences this device.
        let other = unsafe { Adapter::from_raw(NonNull::dangling().as_ptr()) };
        assert!(slot.keep(1, &other, whole.clone()).is_err_and(|e| e == EINVAL));
        slot.keep(1, &CPU, whole.clone())?;
        slot.unmap_for(2);
        assert!(slot.is_mapped());
        slot.unmap_for(1);
        assert!(!slot.is_mapped());
        assert!(slot.keep(1, &CPU, whole.clone()).is_err_and(|e| e == ENODEV));
        slot.release();
        // The test holds the only reference.
        assert!(Arc::into_unique_or_drop(whole).is_some());
        Ok(())
    }

    /// Maps pieces for a virtual adapter, without a target.
    fn untouched(slot: &Slot, pieces: &[PhysRange]) -> Result<u32> {
        // SAFETY: The adapter is virtual, and the tests only compare the entries' numbers.
        unsafe { slot.map_unchecked(&CPU, None, pieces) }
    }

    /// Returns address and length of each entry that a core would get.
    fn entries(slot: &Slot) -> Result<KVec<(u64, u64)>> {
        let mut table = bindings::sg_table::default();
        // SAFETY: The table is a local variable, and the slot outlives it.
        let count = unsafe { slot.show(&mut table) }?;
        let mut list = KVec::new();
        let mut at = table.sgl;
        for _ in 0..count {
            // SAFETY: The table has `count` entries, and `at` is one of them.
            let entry = unsafe { &*at };
            list.push((entry.dma_address, u64::from(entry.dma_length)), GFP_KERNEL)?;
            // SAFETY: `at` is an entry of a valid table, as above.
            at = unsafe { bindings::sg_next(at) };
        }
        // The last entry is marked as the end.
        assert!(at.is_null() && table.nents == count);
        Ok(list)
    }

    /// Returns the entries of pieces at these physical addresses for a virtual adapter.
    fn mapped(pieces: &[(u64, u64)]) -> Result<KVec<(u64, u64)>> {
        let slot = KBox::pin_init(Slot::new(), GFP_KERNEL)?;
        let mut list = KVec::new();
        for &(phys, size) in pieces {
            list.push(PhysRange::new(phys, size)?, GFP_KERNEL)?;
        }
        let count = untouched(&slot, &list)?;
        assert!(slot.is_mapped());
        let entries = entries(&slot)?;
        assert_eq!(entries.len() as u32, count);
        assert!(slot.unmap() && !slot.unmap());
        Ok(entries)
    }
}
