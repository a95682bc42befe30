// SPDX-License-Identifier: GPL-2.0

//! User mappings whose pages come by fault, and the one address space that all of them are found in.
//!
//! C headers: [`include/linux/mm.h`](srctree/include/linux/mm.h), [`include/linux/fs.h`](srctree/include/linux/fs.h)

use crate::sys;
use core::{marker::PhantomData, ptr::NonNull};
use kernel::{
    bindings,
    error::{from_err_ptr, to_result},
    ffi,
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    sync::{Arc, ArcBorrow},
};

/// What can be mapped: an object that lives as long as its mappings do.
pub(crate) trait Mappable: Send + Sync + Sized + 'static {
    /// One more area maps the object (a fork, or one area that became two).
    fn opened(this: ArcBorrow<'_, Self>);
    /// One area less maps it.
    fn closed(this: ArcBorrow<'_, Self>);
    /// Whether a fault can be served at once. Where not, [`Self::make_ready`] comes first.
    fn is_ready(this: ArcBorrow<'_, Self>) -> bool;
    /// Makes the object ready for faults, which may take long: called without any lock, by the task that faults. What goes wrong
    /// shows when the fault comes again.
    fn make_ready(this: &Arc<Self>);
    /// Maps what belongs at the fault's address. Where the kernel does not let it wait without its locks, the object may not be
    /// ready.
    ///
    /// `EBUSY` means that another thread has just done so; all errors but that and `ENOMEM` end in SIGBUS.
    fn fault(this: ArcBorrow<'_, Self>, fault: &Fault<'_>) -> Result;
    /// Maps what belongs at all addresses of the fault's page table, as one entry.
    ///
    /// `EAGAIN` means that it has to be done page by page; else as for [`Self::fault`].
    fn fault_table(this: ArcBorrow<'_, Self>, fault: &Fault<'_>) -> Result;
}

/// What addresses of a mapping of so many bytes are in step with, in bytes: mapping, memory and offset are the same modulo
/// this, so that page tables of processes and of adapters can have the largest entries there are. More than a gigabyte
/// would help nobody.
pub(crate) fn step(bytes: usize) -> usize {
    const LARGEST: usize = 1 << 30;
    bytes.min(LARGEST).next_power_of_two().max(PAGE_SIZE)
}

/// An area that `mmap()` is setting up, of objects of one type.
pub(crate) struct NewArea<'a, T> {
    vma: NonNull<bindings::vm_area_struct>,
    _lifetime: PhantomData<(&'a bindings::vm_area_struct, Arc<T>)>,
}

impl<T: Mappable> NewArea<'_, T> {
    /// # Safety
    ///
    /// `vma` must be the area that the current `mmap` file operation was called with, for the lifetime of the result.
    pub(super) unsafe fn from_raw(vma: *mut bindings::vm_area_struct) -> Self {
        Self {
            // SAFETY: The caller promises a valid pointer.
            vma: unsafe { NonNull::new_unchecked(vma) },
            _lifetime: PhantomData,
        }
    }

    /// Bytes.
    pub(crate) fn len(&self) -> u64 {
        // SAFETY: The area is valid and ours while it is being set up.
        let vma = unsafe { self.vma.as_ref() };
        // SAFETY: As above; the members of the union are always set.
        unsafe {
            (vma.__bindgen_anon_1.__bindgen_anon_1.vm_end - vma.__bindgen_anon_1.__bindgen_anon_1.vm_start) as u64
        }
    }

    /// The file offset asked for, in pages.
    pub(crate) fn page_offset(&self) -> u64 {
        // SAFETY: The area is valid and ours while it is being set up.
        unsafe { self.vma.as_ref() }.vm_pgoff as u64
    }

    /// Whether the mapping is shared (or could become so), not copy-on-write.
    pub(crate) fn is_shared(&self) -> bool {
        // SAFETY: The area is valid and ours while it is being set up.
        unsafe { sys::p2pmem_vma_may_share(self.vma.as_ptr()) }
    }

    /// Makes the area a mapping of `object` from page `page_offset` of the common address space on: of its struct
    /// pages, or where it has none, of page frames. No page of it is behind the last one that there can be.
    pub(crate) fn attach(mut self, object: Arc<T>, page_offset: u64, combine: bool, pages: bool) {
        // The kernel adds the two without looking. Wherever the area is instead, nothing is mapped there.
        let page_offset = page_offset.min((u64::MAX - self.len()) >> PAGE_SHIFT);
        // SAFETY: The area is valid and ours while it is being set up.
        unsafe { sys::p2pmem_vma_prepare(self.vma.as_ptr(), combine, pages) };
        // SAFETY: As above.
        let vma = unsafe { self.vma.as_mut() };
        vma.vm_pgoff = page_offset as usize;
        vma.vm_private_data = Arc::into_raw(object).cast_mut().cast();
        vma.vm_ops = &Operations::<T>::TABLE;
    }
}

/// A page fault in an area that [`NewArea::attach`] set up.
///
/// # Invariants
///
/// The pointer is such a fault, whose area is locked for `'a`. The core may write to its other fields meanwhile.
pub(crate) struct Fault<'a>(NonNull<bindings::vm_fault>, PhantomData<&'a ()>);

impl Fault<'_> {
    /// # Safety
    ///
    /// `vmf` must be what the core calls the operations of such an area with, for the lifetime of the result.
    unsafe fn new(vmf: *mut bindings::vm_fault) -> Self {
        // SAFETY: By the requirement it is not null.
        // INVARIANT: By the requirement.
        Self(unsafe { NonNull::new_unchecked(vmf) }, PhantomData)
    }

    /// What does not change during the fault.
    fn about(&self) -> bindings::vm_fault__bindgen_ty_1 {
        // SAFETY: By the type invariant.
        unsafe { (*self.0.as_ptr()).__bindgen_anon_1 }
    }

    pub(super) fn vma_raw(&self) -> *mut bindings::vm_area_struct {
        self.about().vma
    }

    /// The address, rounded down to a page.
    pub(super) fn address(&self) -> usize {
        self.about().address & !(PAGE_SIZE - 1)
    }

    /// Whether what is mapped for the fault is found in an address space.
    pub(super) fn is_in(&self, space: &Space) -> bool {
        // SAFETY: The area is valid, and locked, for the duration of the fault; it keeps its file.
        unsafe { (*(*self.vma_raw()).vm_file).f_mapping == space.mapping() }
    }

    /// The page that faulted, counted in the common address space.
    pub(crate) fn page_offset(&self) -> u64 {
        self.about().pgoff as u64
    }

    /// What one page table maps, bytes: `PMD_SIZE`, of which `rust/sys/helpers.c` asserts that it is this.
    pub(crate) const TABLE: usize = PAGE_SIZE << (PAGE_SHIFT - 3);

    /// Where the page table of the address begins, as a page of the common address space. None where the area does not
    /// have all of it.
    pub(crate) fn table_offset(&self) -> Option<u64> {
        let first = self.address() / Self::TABLE * Self::TABLE;
        // SAFETY: The area is valid, and locked, for the duration of the fault.
        let area = unsafe { (*self.vma_raw()).__bindgen_anon_1.__bindgen_anon_1 };
        if first < area.vm_start || area.vm_end - first < Self::TABLE {
            return None;
        }
        Some(self.page_offset() - ((self.address() - first) >> PAGE_SHIFT) as u64)
    }

    /// Maps a page table's worth of page frames, from an aligned one on, as one entry. Errors: `EAGAIN` where that cannot
    /// be, as in an area that is not for page frames or does not have all of the page table.
    ///
    /// # Safety
    ///
    /// The page frames must be the caller's.
    pub(super) unsafe fn insert_table(&self, pfn: usize) -> Result {
        // SAFETY: The area is valid, and locked, for the duration of the fault.
        if self.table_offset().is_none() || !unsafe { sys::p2pmem_vma_takes_pfns(self.vma_raw()) } {
            return Err(EAGAIN);
        }
        let vmf = self.0.as_ptr();
        // A write needs a writable entry, even where the area makes new entries read-only: once the soft-dirty bits of a
        // process were cleared, its new entries are, and without the flag the write would fault again, forever.
        // SAFETY: By the type invariant.
        let write = unsafe { (*vmf).flags } & bindings::fault_flag_FAULT_FLAG_WRITE != 0;
        // SAFETY: The fault is valid, and as was just seen its area has room for the entry and takes page frames. The caller
        // promises that they are its own.
        #[cfg(CONFIG_TRANSPARENT_HUGEPAGE)]
        let answer = unsafe { bindings::vmf_insert_pfn_pmd(vmf, pfn, write) };
        // Never asked for: such a kernel has no large entries.
        #[cfg(not(CONFIG_TRANSPARENT_HUGEPAGE))]
        let answer = {
            let _ = (vmf, pfn, write);
            bindings::vm_fault_reason_VM_FAULT_FALLBACK
        };
        match answer {
            bindings::vm_fault_reason_VM_FAULT_NOPAGE => Ok(()),
            bindings::vm_fault_reason_VM_FAULT_OOM => Err(ENOMEM),
            _ => Err(EAGAIN),
        }
    }

    /// Pages from the address to the end of its page table or of the area, whichever comes first.
    pub(super) fn room(&self) -> usize {
        let address = self.address();
        // SAFETY: The area is valid, and locked, for the duration of the fault.
        let end = unsafe { (*self.vma_raw()).__bindgen_anon_1.__bindgen_anon_1.vm_end };
        (end - address).min(Self::TABLE - address % Self::TABLE) >> PAGE_SHIFT
    }
}

/// The area operations of mappings of a `T`.
///
/// `vm_private_data` of such an area owns a reference to the object: it came from `Arc::into_raw()` in
/// [`NewArea::attach`] or in `open`, and `close` takes it back.
struct Operations<T>(PhantomData<T>);

impl<T: Mappable> Operations<T> {
    const TABLE: bindings::vm_operations_struct = bindings::vm_operations_struct {
        open: Some(Self::open),
        close: Some(Self::close),
        fault: Some(Self::fault),
        huge_fault: Some(Self::huge_fault),
        ..pin_init::zeroed()
    };

    /// # Safety
    ///
    /// `vma` must be a valid area with these operations, and the result must not outlive it.
    unsafe fn object<'a>(vma: *mut bindings::vm_area_struct) -> ArcBorrow<'a, T> {
        // SAFETY: The area owns a reference to the object.
        unsafe { ArcBorrow::from_raw((*vma).vm_private_data.cast::<T>()) }
    }

    /// # Safety
    ///
    /// Called by the core for a new copy of an area with these operations.
    unsafe extern "C" fn open(vma: *mut bindings::vm_area_struct) {
        // SAFETY: The copy has the pointer of its origin, which owns a reference while it is being copied.
        let object = unsafe { Self::object(vma) };
        // The copy's own reference.
        let _ = Arc::into_raw(Arc::from(object));
        T::opened(object);
    }

    /// # Safety
    ///
    /// Called by the core, once, before an area with these operations goes away.
    unsafe extern "C" fn close(vma: *mut bindings::vm_area_struct) {
        // SAFETY: The area owns a reference and is not used again.
        let object = unsafe { Arc::from_raw((*vma).vm_private_data.cast::<T>()) };
        T::closed(object.as_arc_borrow());
    }

    /// Makes the object of a fault ready where it is not, without the lock that the fault came with: whoever looks at the process
    /// waits for that. Returns the fault's answer then; none where the fault is to be served now, with the lock.
    ///
    /// # Safety
    ///
    /// The fault is in an area with these operations, which is locked. With an answer it is not locked any more, and may be gone.
    unsafe fn prepare(vmf: *mut bindings::vm_fault) -> Option<bindings::vm_fault_t> {
        let again = bindings::vm_fault_reason_VM_FAULT_RETRY;
        // SAFETY: The fault and its area are valid.
        let borrowed = unsafe { Self::object((*vmf).__bindgen_anon_1.vma) };
        if T::is_ready(borrowed) {
            return None;
        }
        // The area, and with it its reference, may go as soon as it is not locked.
        let object = Arc::from(borrowed);
        // SAFETY: The fault is valid and its area locked.
        let file = match from_err_ptr(unsafe { sys::p2pmem_fault_unlock(vmf) }) {
            Ok(file) => file,
            Err(e) if e == EAGAIN => return Some(again),
            Err(_) => return None,
        };
        T::make_ready(&object);
        drop(object);
        // SAFETY: The reference to the file, which kept the module loaded meanwhile, is ours. Where it is the last one, as the
        // area is gone already, it is put for good when this task, which is no kernel thread and does not exit, is about to return
        // to its program (`fput()` adds a task work): the module stays loaded until this function has returned.
        unsafe { bindings::fput(file) };
        Some(again)
    }

    /// # Safety
    ///
    /// Called by the core for a fault in an area with these operations, which is locked.
    unsafe extern "C" fn fault(vmf: *mut bindings::vm_fault) -> bindings::vm_fault_t {
        // SAFETY: The core's promise.
        if let Some(answer) = unsafe { Self::prepare(vmf) } {
            return answer;
        }
        // SAFETY: The core's promise.
        let fault = unsafe { Fault::new(vmf) };
        // SAFETY: The area is valid for the duration of the call.
        let object = unsafe { Self::object(fault.vma_raw()) };
        Self::reason(T::fault(object, &fault))
    }

    /// # Safety
    ///
    /// Called by the core for a fault in an area with these operations, which is locked, where nothing is mapped in a
    /// range of `1 << order` pages.
    unsafe extern "C" fn huge_fault(vmf: *mut bindings::vm_fault, order: ffi::c_uint) -> bindings::vm_fault_t {
        if PAGE_SIZE << order != Fault::TABLE {
            return bindings::vm_fault_reason_VM_FAULT_FALLBACK;
        }
        // SAFETY: The core's promise.
        if let Some(answer) = unsafe { Self::prepare(vmf) } {
            return answer;
        }
        // SAFETY: The core's promise.
        let fault = unsafe { Fault::new(vmf) };
        // SAFETY: The area is valid for the duration of the call.
        let object = unsafe { Self::object(fault.vma_raw()) };
        match T::fault_table(object, &fault) {
            Err(e) if e == EAGAIN => bindings::vm_fault_reason_VM_FAULT_FALLBACK,
            answer => Self::reason(answer),
        }
    }

    fn reason(answer: Result) -> bindings::vm_fault_t {
        match answer {
            Ok(()) => bindings::vm_fault_reason_VM_FAULT_NOPAGE,
            Err(e) if e == EBUSY => bindings::vm_fault_reason_VM_FAULT_NOPAGE,
            Err(e) if e == ENOMEM => bindings::vm_fault_reason_VM_FAULT_OOM,
            Err(_) => bindings::vm_fault_reason_VM_FAULT_SIGBUS,
        }
    }
}

/// An address space, whatever is mapped in it.
///
/// # Invariants
///
/// The pointer is an inode from `p2pmem_mapping_inode()`, and one reference to it is ours.
pub(super) struct Space(NonNull<bindings::inode>);

// SAFETY: An inode is not bound to a thread.
unsafe impl Send for Space {}
// SAFETY: What is done with the inode is synchronised by the core.
unsafe impl Sync for Space {}

impl Space {
    fn new() -> Result<Self> {
        // SAFETY: No requirements; the result is an error pointer or an inode that is ours.
        let inode = from_err_ptr(unsafe { sys::p2pmem_mapping_inode() })?;
        // INVARIANT: See above.
        Ok(Self(NonNull::new(inode).ok_or(ENOMEM)?))
    }

    fn hold(&self) -> Result<Self> {
        // SAFETY: By the type invariant it is such an inode, with a reference.
        to_result(unsafe { sys::p2pmem_mapping_inode_hold(self.0.as_ptr()) })?;
        // INVARIANT: The reference was taken just now.
        Ok(Self(self.0))
    }

    pub(super) fn mapping(&self) -> *mut bindings::address_space {
        // SAFETY: By the type invariant the inode is valid; its mapping does not change.
        unsafe { (*self.0.as_ptr()).i_mapping }
    }

    /// Takes down all user mappings of a page range. Later touches fault again.
    pub(super) fn unmap(&self, page_offset: u64, pages: u64) {
        // SAFETY: By the type invariant the mapping is valid.
        unsafe {
            bindings::unmap_mapping_range(
                self.mapping(),
                (page_offset << PAGE_SHIFT) as i64,
                (pages << PAGE_SHIFT) as i64,
                1,
            )
        };
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the reference is ours.
        unsafe { sys::p2pmem_mapping_inode_put(self.0.as_ptr()) };
    }
}

/// The address space in which every mapping of every file is found, whatever node the file was opened through.
///
/// # Invariants
///
/// Whatever is mapped in it is a `T`: its areas were set up by [`NewArea::attach`], or not at all.
pub(crate) struct AddressSpace<T>(Space, PhantomData<Arc<T>>);

// SAFETY: What is mapped is not bound to a thread.
unsafe impl<T: Mappable> Send for AddressSpace<T> {}
// SAFETY: What is done with the inode is synchronised by the core.
unsafe impl<T: Mappable> Sync for AddressSpace<T> {}

/// Part of a mapping of the calling process.
pub(crate) struct MappedPart<T> {
    pub(crate) object: Arc<T>,
    /// The first byte's place in the common address space.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) size: u64,
    /// Whether the mapping is writable or could be made so.
    pub(crate) may_write: bool,
}

impl<T: Mappable> AddressSpace<T> {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self(Space::new()?, PhantomData))
    }

    /// The same address space for those who do not care what is mapped in it.
    pub(super) fn hold(&self) -> Result<Space> {
        self.0.hold()
    }

    pub(super) fn mapping(&self) -> *mut bindings::address_space {
        self.0.mapping()
    }

    /// What of this address space the calling process has mapped at an address, `size` bytes at most. None where there
    /// is no mapping, or one of something else.
    pub(crate) fn mapped_at(&self, address: u64, size: u64) -> Option<MappedPart<T>> {
        let address = usize::try_from(address).ok()?;
        let task = current!();
        let mm = task.mm()?;
        let guard = mm.mmap_read_lock();
        let area = guard.vma_lookup(address)?;
        let vma = area.as_ptr();
        // SAFETY: The area is valid, and does not change while the lock is held.
        let (file, object, first) = unsafe { ((*vma).vm_file, (*vma).vm_private_data, (*vma).vm_pgoff) };
        // SAFETY: An area keeps its file.
        if file.is_null() || object.is_null() || unsafe { (*file).f_mapping } != self.mapping() {
            return None;
        }
        // SAFETY: By the type invariant, and as it has an object, the area owns a reference to a `T`.
        let object = unsafe { ArcBorrow::from_raw(object.cast::<T>().cast_const()) };
        let into = address - area.start();
        Some(MappedPart {
            object: object.into(),
            offset: ((first as u64) << PAGE_SHIFT) + into as u64,
            size: size.min((area.end() - address) as u64),
            // SAFETY: As above.
            may_write: unsafe { sys::p2pmem_vma_may_write(vma) },
        })
    }

    /// Takes down all user mappings of a page range. Later touches fault again.
    pub(crate) fn unmap(&self, page_offset: u64, pages: u64) {
        self.0.unmap(page_offset, pages);
    }
}

#[kunit_tests(p2pmem_vma)]
mod tests {
    use super::*;

    /// Something that nobody maps.
    struct Nothing;

    impl Mappable for Nothing {
        fn opened(_: ArcBorrow<'_, Self>) {}

        fn closed(_: ArcBorrow<'_, Self>) {}

        fn is_ready(_: ArcBorrow<'_, Self>) -> bool {
            true
        }

        fn make_ready(_: &Arc<Self>) {}

        fn fault(_: ArcBorrow<'_, Self>, _: &Fault<'_>) -> Result {
            Err(EFAULT)
        }

        fn fault_table(_: ArcBorrow<'_, Self>, _: &Fault<'_>) -> Result {
            Err(EAGAIN)
        }
    }

    #[test]
    fn a_task_without_memory_has_nothing_mapped() -> Result {
        let space = AddressSpace::<Nothing>::new()?;
        for address in [0, PAGE_SIZE as u64, u64::MAX] {
            assert!(space.mapped_at(address, u64::MAX).is_none());
        }
        space.unmap(1 << 20, 16);
        Ok(())
    }

    #[test]
    fn two_address_spaces_are_two() -> Result {
        let (one, other) = (AddressSpace::<Nothing>::new()?, AddressSpace::<Nothing>::new()?);
        assert!(one.mapping() != other.mapping());
        drop(one);
        assert!(!other.mapping().is_null());
        Ok(())
    }

    #[test]
    fn answers_to_faults() {
        let cases = [
            (Ok(()), bindings::vm_fault_reason_VM_FAULT_NOPAGE),
            (Err(EBUSY), bindings::vm_fault_reason_VM_FAULT_NOPAGE),
            (Err(ENOMEM), bindings::vm_fault_reason_VM_FAULT_OOM),
            (Err(ENODEV), bindings::vm_fault_reason_VM_FAULT_SIGBUS),
            (Err(EFAULT), bindings::vm_fault_reason_VM_FAULT_SIGBUS),
        ];
        for (answer, reason) in cases {
            assert_eq!(Operations::<Nothing>::reason(answer), reason);
        }
    }

    #[test]
    fn steps_are_powers_of_two_and_bounded() {
        for (bytes, expected) in [
            (1, PAGE_SIZE),
            (PAGE_SIZE, PAGE_SIZE),
            (PAGE_SIZE + 1, 2 * PAGE_SIZE),
            (3 << 20, 4 << 20),
            (1 << 30, 1 << 30),
            ((1 << 30) + 1, 1 << 30),
            (usize::MAX, 1 << 30),
        ] {
            let got = step(bytes);
            assert_eq!(got, expected);
        }
    }
}
