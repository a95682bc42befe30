// SPDX-License-Identifier: GPL-2.0

//! User mappings that page faults fill, and the address space that contains all of them.
//!
//! All mappings of all files are in one address space, whose inode p2pmem owns, so one call of `unmap_mapping_range()`
//! removes the mappings of a buffer. A mapping (VMA, here *area*) owns a reference to its object, a [`Mappable`].
//!
//! Contexts: [`NewMapping`] in `mmap()`, with the mmap lock held for writing; [`Fault`] in a page fault, with the area locked
//! (the VMA lock or the mmap lock for reading). Unmapping takes the address space's `i_mmap` lock. This file has no locks
//! of its own.
//!
//! C headers: [`include/linux/mm.h`](srctree/include/linux/mm.h), [`include/linux/fs.h`](srctree/include/linux/fs.h)

use crate::sys;
use core::{marker::PhantomData, ptr::NonNull};
use kernel::{
    bindings,
    error::from_err_ptr,
    ffi,
    mm::virt::{flags, VmaRef},
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    sync::{Arc, ArcBorrow},
};

/// An object that can be mapped. Each of its areas keeps a reference to it.
pub(crate) trait Mappable: Send + Sync + Sized + 'static {
    /// One more area maps the object: after a fork, or as an area was split. Called with the mmap lock held for writing.
    fn opened(this: ArcBorrow<'_, Self>);
    /// One area less maps the object. Called with the mmap lock held.
    fn closed(this: ArcBorrow<'_, Self>);
    /// Returns whether a fault can be handled at once. If not, [`Self::make_ready`] is called first. Called with the area
    /// locked.
    fn is_ready(this: ArcBorrow<'_, Self>) -> bool;
    /// Makes the object ready for faults. Called by the faulting task without any lock; may sleep for long.
    ///
    /// Errors show when the fault is repeated.
    fn make_ready(this: &Arc<Self>);
    /// Maps the memory at the fault's address; for a large fault, at all addresses of its page table as one entry. Called with
    /// the area locked.
    ///
    /// The object may not be ready if the core does not let the fault drop its lock. Errors: `ENOMEM`; any other error of a
    /// large fault repeats it as one that is not, and of another fault raises SIGBUS.
    fn fault(this: ArcBorrow<'_, Self>, fault: &Fault<'_>) -> Result;
}

/// The largest alignment of a mapping, in bytes. No page table has larger entries.
pub(crate) const LARGEST: usize = 1 << 30;

/// Returns the alignment of a mapping of `bytes` bytes, in bytes: a power of two from a page to [`LARGEST`].
///
/// The address, the file offset and the memory of a mapping are the same modulo this, so that page tables of processes and
/// of adapters can use the largest entries.
pub(crate) fn step(bytes: usize) -> usize {
    bytes.min(LARGEST).next_power_of_two().max(PAGE_SIZE)
}

/// An area that `mmap()` is setting up, for an object of type `T`.
///
/// # Invariants
///
/// `vma` is valid for `'a`, and only the current call of `mmap()` uses it.
pub(crate) struct NewMapping<'a, T> {
    vma: NonNull<bindings::vm_area_struct>,
    _lifetime: PhantomData<(&'a bindings::vm_area_struct, Arc<T>)>,
}

impl<T: Mappable> NewMapping<'_, T> {
    /// Wraps the area of an `mmap` file operation.
    ///
    /// # Safety
    ///
    /// `vma` must be the area that the current `mmap` file operation was called with, for the lifetime of the result.
    pub(super) unsafe fn from_raw(vma: *mut bindings::vm_area_struct) -> Self {
        Self {
            // INVARIANT: The caller guarantees the area of the current call.
            // SAFETY: The caller guarantees a valid pointer.
            vma: unsafe { NonNull::new_unchecked(vma) },
            _lifetime: PhantomData,
        }
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> u64 {
        // SAFETY: By the type invariant the area is valid and nobody else uses it.
        let vma = unsafe { self.vma.as_ref() };
        // SAFETY: The core always sets these members of the unions.
        unsafe {
            (vma.__bindgen_anon_1.__bindgen_anon_1.vm_end - vma.__bindgen_anon_1.__bindgen_anon_1.vm_start) as u64
        }
    }

    /// Returns the file offset in pages.
    pub(crate) fn page_offset(&self) -> u64 {
        // SAFETY: By the type invariant the area is valid and nobody else uses it.
        unsafe { self.vma.as_ref() }.vm_pgoff as u64
    }

    /// Returns whether the mapping is shared or could become so, not copy-on-write.
    pub(crate) fn is_shared(&self) -> bool {
        // SAFETY: By the type invariant the area is valid, and `mmap()` holds the mmap lock.
        let flags = unsafe { VmaRef::from_raw(self.vma.as_ptr()) }.flags();
        // Only a private mapping is not shared and may become writable.
        flags & (flags::SHARED | flags::MAYWRITE) != flags::MAYWRITE
    }

    /// Makes the area a mapping of `object`, from page `page_offset` of the common address space on.
    ///
    /// With `pages` the area maps pages, otherwise page frames. `combine` selects write-combining. An offset at which the
    /// area would exceed the address space is lowered to the last possible one, where nothing is mapped.
    pub(crate) fn attach(mut self, object: Arc<T>, page_offset: u64, combine: bool, pages: bool) {
        // The kernel adds offset and length without an overflow check.
        let page_offset = page_offset.min((u64::MAX - self.len()) >> PAGE_SHIFT);
        // SAFETY: By the type invariant the area is valid and nobody else uses it.
        unsafe { sys::p2pmem_vma_prepare(self.vma.as_ptr(), combine, pages) };
        // SAFETY: By the type invariant the area is valid and nobody else uses it, so there is no other reference to it.
        // The area gets a reference to `object`, as [`Operations`] require of `vm_private_data`.
        let vma = unsafe { self.vma.as_mut() };
        vma.vm_pgoff = page_offset as usize;
        vma.vm_private_data = Arc::into_raw(object).cast_mut().cast();
        vma.vm_ops = &Operations::<T>::TABLE;
    }
}

/// A page fault in an area that [`NewMapping::attach`] set up. A *large* fault is for one entry for a whole page table.
///
/// # Invariants
///
/// The pointer is a valid `struct vm_fault` for `'a`. Its area has the operations [`Operations`] and is locked for `'a`.
/// The core may write to fields other than the first anonymous structure. If `large` is set, the area contains all addresses
/// of the faulting page table.
pub(crate) struct Fault<'a> {
    vmf: NonNull<bindings::vm_fault>,
    large: bool,
    _lifetime: PhantomData<&'a ()>,
}

impl Fault<'_> {
    /// Wraps a fault. `None` if a large one is wanted and the area does not contain all of the page table.
    ///
    /// # Safety
    ///
    /// `vmf` must be the fault that the core called an operation of such an area with, for the lifetime of the result.
    unsafe fn new(vmf: *mut bindings::vm_fault, large: bool) -> Option<Self> {
        // INVARIANT: The caller guarantees a fault of such an area, which the core has locked. For a large fault, the lines
        // below check the area.
        let fault = Self {
            // SAFETY: The caller guarantees a valid pointer.
            vmf: unsafe { NonNull::new_unchecked(vmf) },
            large,
            _lifetime: PhantomData,
        };
        // SAFETY: The area is valid and locked.
        let start = unsafe { (*fault.vma_raw()).__bindgen_anon_1.__bindgen_anon_1.vm_start };
        let fits = start <= fault.address() && fault.room() == Self::TABLE >> PAGE_SHIFT;
        (!large || fits).then_some(fault)
    }

    /// Returns the constant fields: area, address and page offset.
    fn about(&self) -> bindings::vm_fault__bindgen_ty_1 {
        // SAFETY: By the type invariant the fault is valid, and nobody writes to these fields.
        unsafe { (*self.vmf.as_ptr()).__bindgen_anon_1 }
    }

    /// Returns the fault, which is valid as long as `self`.
    pub(super) fn as_raw(&self) -> *mut bindings::vm_fault {
        self.vmf.as_ptr()
    }

    /// Returns the area, which is valid and locked as long as `self`.
    fn vma_raw(&self) -> *mut bindings::vm_area_struct {
        self.about().vma
    }

    /// Returns whether the fault is for one entry for a whole page table.
    pub(super) fn is_large(&self) -> bool {
        self.large
    }

    /// Returns the faulting address, rounded down to a page, or to the page table of a large fault.
    fn address(&self) -> usize {
        let unit = if self.large { Self::TABLE } else { PAGE_SIZE };
        self.about().address & !(unit - 1)
    }

    /// Returns whether the area belongs to the address space `space`.
    pub(super) fn is_in(&self, space: &Space) -> bool {
        // SAFETY: By the type invariant the area is valid and locked, and an area of a file keeps its file.
        unsafe { (*(*self.vma_raw()).vm_file).f_mapping == space.mapping() }
    }

    /// Returns the page of the common address space at [`Self::address`].
    pub(crate) fn page_offset(&self) -> u64 {
        let about = self.about();
        (about.pgoff - ((about.address - self.address()) >> PAGE_SHIFT)) as u64
    }

    /// Bytes that one page table maps (`PMD_SIZE`). `rust/sys/helpers.c` asserts the value.
    pub(super) const TABLE: usize = PAGE_SIZE << (PAGE_SHIFT - 3);

    /// Returns the number of pages from [`Self::address`] to the end of its page table or of the area, whichever is first.
    pub(super) fn room(&self) -> usize {
        let address = self.address();
        // SAFETY: By the type invariant the area is valid and locked.
        let end = unsafe { (*self.vma_raw()).__bindgen_anon_1.__bindgen_anon_1.vm_end };
        (end - address).min(Self::TABLE - address % Self::TABLE) >> PAGE_SHIFT
    }
}

/// The operations of areas that map a `T`.
///
/// `vm_private_data` of such an area owns a reference to its object: [`NewMapping::attach`] or `open` gave it up with
/// `Arc::into_raw()`, and `close` takes it back.
struct Operations<T>(PhantomData<T>);

impl<T: Mappable> Operations<T> {
    const TABLE: bindings::vm_operations_struct = bindings::vm_operations_struct {
        open: Some(Self::open),
        close: Some(Self::close),
        fault: Some(Self::fault),
        huge_fault: Some(Self::huge_fault),
        ..pin_init::zeroed()
    };

    /// Borrows the object of an area.
    ///
    /// # Safety
    ///
    /// `vma` must be a valid area with these operations for the lifetime `'a`.
    unsafe fn object<'a>(vma: *mut bindings::vm_area_struct) -> ArcBorrow<'a, T> {
        // SAFETY: `vm_private_data` of such an area is a pointer from `Arc::into_raw()`, whose reference the area owns
        // until `close`.
        unsafe { ArcBorrow::from_raw((*vma).vm_private_data.cast::<T>()) }
    }

    /// `open` of `struct vm_operations_struct`. The mmap lock is held for writing.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls with a new copy of an area with these operations.
    unsafe extern "C" fn open(vma: *mut bindings::vm_area_struct) {
        // SAFETY: The copy has the pointer of the original area, which owns a reference during this call.
        let object = unsafe { Self::object(vma) };
        // Take the copy's own reference.
        let _ = Arc::into_raw(Arc::from(object));
        T::opened(object);
    }

    /// `close` of `struct vm_operations_struct`. The mmap lock is held.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls once for each area with these operations, before it frees the area.
    unsafe extern "C" fn close(vma: *mut bindings::vm_area_struct) {
        // SAFETY: The area owns a reference from `Arc::into_raw()`, and is not used after this call.
        let object = unsafe { Arc::from_raw((*vma).vm_private_data.cast::<T>()) };
        T::closed(object.as_arc_borrow());
    }

    /// Makes the object of a fault ready, if it is not, without the lock of the fault, for which others may wait.
    ///
    /// Returns the result of the fault, or `None` to handle the fault now, with the lock held. May sleep.
    ///
    /// # Safety
    ///
    /// `vmf` must be a fault in an area with these operations, which is locked. If this returns a result, the area is not locked
    /// any more and may be freed.
    unsafe fn prepare(vmf: *mut bindings::vm_fault) -> Option<bindings::vm_fault_t> {
        let again = bindings::vm_fault_reason_VM_FAULT_RETRY;
        // SAFETY: The caller guarantees that the fault and its area are valid while the area is locked. The borrow is not
        // used after the unlock.
        let borrowed = unsafe { Self::object((*vmf).__bindgen_anon_1.vma) };
        if T::is_ready(borrowed) {
            return None;
        }
        // The area and its reference may go as soon as the area is unlocked: take another reference.
        let object = Arc::from(borrowed);
        // SAFETY: The caller guarantees a valid fault with the area locked.
        let file = match from_err_ptr(unsafe { sys::p2pmem_fault_unlock(vmf) }) {
            Ok(file) => file,
            Err(e) if e == EAGAIN => return Some(again),
            Err(_) => return None,
        };
        T::make_ready(&object);
        drop(object);
        // SAFETY: `p2pmem_fault_unlock()` took the reference to the file for this caller. The file keeps the module loaded
        // until this function has returned, even if the reference is the last one because the area is gone: the task is not
        // a kernel thread and is not exiting, so `fput()` defers the release to a task work, which runs when the task
        // returns to user space.
        unsafe { bindings::fput(file) };
        Some(again)
    }

    /// Handles a fault.
    ///
    /// # Safety
    ///
    /// `vmf` must be a fault in an area with these operations, which is locked.
    unsafe fn handle(vmf: *mut bindings::vm_fault, large: bool) -> bindings::vm_fault_t {
        // SAFETY: The caller guarantees a fault in such an area, which is locked.
        if let Some(answer) = unsafe { Self::prepare(vmf) } {
            return answer;
        }
        // SAFETY: The caller guarantees a fault in such an area, which is locked.
        let Some(fault) = (unsafe { Fault::new(vmf, large) }) else {
            return bindings::vm_fault_reason_VM_FAULT_FALLBACK;
        };
        // SAFETY: By the type invariant of `Fault` the area is valid during the call and has these operations.
        let object = unsafe { Self::object(fault.vma_raw()) };
        Self::reason(T::fault(object, &fault), large)
    }

    /// `fault` of `struct vm_operations_struct`. The area is locked.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls with a fault in an area with these operations.
    unsafe extern "C" fn fault(vmf: *mut bindings::vm_fault) -> bindings::vm_fault_t {
        // SAFETY: The caller guarantees a fault in such an area, which is locked.
        unsafe { Self::handle(vmf, false) }
    }

    /// `huge_fault` of `struct vm_operations_struct`. The area is locked.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls with a fault in an area with these operations, where nothing is mapped in the range of
    /// `1 << order` pages around the address, or one large entry that is to become writable.
    unsafe extern "C" fn huge_fault(vmf: *mut bindings::vm_fault, order: ffi::c_uint) -> bindings::vm_fault_t {
        if PAGE_SIZE << order != Fault::TABLE {
            return bindings::vm_fault_reason_VM_FAULT_FALLBACK;
        }
        // SAFETY: The caller guarantees a fault in such an area, which is locked.
        unsafe { Self::handle(vmf, true) }
    }

    /// Converts the result of a fault to the core's `vm_fault_t`. The core repeats a large fault that falls back as another
    /// one, which has the error too if it is not about the size.
    fn reason(answer: Result, large: bool) -> bindings::vm_fault_t {
        match answer {
            Ok(()) => bindings::vm_fault_reason_VM_FAULT_NOPAGE,
            Err(e) if e == ENOMEM => bindings::vm_fault_reason_VM_FAULT_OOM,
            Err(_) if large => bindings::vm_fault_reason_VM_FAULT_FALLBACK,
            Err(_) => bindings::vm_fault_reason_VM_FAULT_SIGBUS,
        }
    }
}

/// An address space, without the type of the objects that are mapped in it.
///
/// # Invariants
///
/// The pointer is an inode from `p2pmem_mapping_inode()`, and this object owns its reference.
pub(super) struct Space(NonNull<bindings::inode>);

// SAFETY: An inode is not bound to a thread.
unsafe impl Send for Space {}
// SAFETY: The core serialises all uses of the inode and its mapping.
unsafe impl Sync for Space {}

impl Space {
    /// Creates an address space. May sleep. Errors: `ENOMEM`; `ENFILE`.
    fn new() -> Result<Arc<Self>> {
        // SAFETY: The call has no requirements. It returns an error pointer, or an inode with a reference for the caller.
        let inode = from_err_ptr(unsafe { sys::p2pmem_mapping_inode() })?;
        // INVARIANT: The inode came with a reference for this object.
        Ok(Arc::new(Self(NonNull::new(inode).ok_or(ENOMEM)?), GFP_KERNEL)?)
    }

    /// Returns the C address space, which is valid as long as `self`.
    pub(super) fn mapping(&self) -> *mut bindings::address_space {
        // SAFETY: By the type invariant the inode is valid. `i_mapping` does not change.
        unsafe { (*self.0.as_ptr()).i_mapping }
    }

    /// Removes all user mappings of a range of pages. Later accesses fault again. May sleep.
    pub(super) fn unmap(&self, page_offset: u64, pages: u64) {
        // SAFETY: By the type invariant the inode and its address space are valid.
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
        // SAFETY: By the type invariant this object owns a reference, which is dropped once.
        unsafe { bindings::iput(self.0.as_ptr()) };
    }
}

/// The address space of all mappings of all files, through whatever device node a file was opened.
///
/// # Invariants
///
/// Every area of the address space with `vm_private_data` was set up by [`NewMapping::attach`] for a `T`. Other areas have no
/// `vm_private_data`.
pub(crate) struct AddressSpace<T>(Arc<Space>, PhantomData<Arc<T>>);

// SAFETY: `Space` is `Send`, and so are the objects that are mapped.
unsafe impl<T: Mappable> Send for AddressSpace<T> {}
// SAFETY: `Space` is `Sync`, and so are the objects that are mapped.
unsafe impl<T: Mappable> Sync for AddressSpace<T> {}

/// Part of a mapping of the current process.
pub(crate) struct MappedPart<T> {
    /// The mapped object.
    pub(crate) object: Arc<T>,
    /// Offset of the first byte in the common address space.
    pub(crate) offset: u64,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Whether the mapping is writable or could be made writable by `mprotect()`.
    pub(crate) may_write: bool,
}

impl<T: Mappable> AddressSpace<T> {
    /// Creates an address space. May sleep. Errors: `ENOMEM`; `ENFILE`.
    pub(crate) fn new() -> Result<Self> {
        // INVARIANT: Nothing is mapped in a new address space.
        Ok(Self(Space::new()?, PhantomData))
    }

    /// Returns another reference to the address space, without the type of its objects.
    pub(super) fn hold(&self) -> Arc<Space> {
        self.0.clone()
    }

    /// Returns the C address space, which is valid as long as `self`.
    pub(super) fn mapping(&self) -> *mut bindings::address_space {
        self.0.mapping()
    }

    /// Looks up an address of the current process: the object mapped there, and at most `size` bytes from the address to
    /// the end of the area.
    ///
    /// Returns `None` if no area of this address space is there. May sleep; takes the mmap lock for reading.
    pub(crate) fn mapped_at(&self, address: u64, size: u64) -> Option<MappedPart<T>> {
        let address = usize::try_from(address).ok()?;
        let task = current!();
        let mm = task.mm()?;
        let guard = mm.mmap_read_lock();
        let area = guard.vma_lookup(address)?;
        let vma = area.as_ptr();
        // SAFETY: The mmap lock is held for reading, so the area is valid and these fields do not change.
        let (file, object, first) = unsafe { ((*vma).vm_file, (*vma).vm_private_data, (*vma).vm_pgoff) };
        // SAFETY: An area keeps its file, which is not null.
        if file.is_null() || object.is_null() || unsafe { (*file).f_mapping } != self.mapping() {
            return None;
        }
        // SAFETY: By the type invariant the private data of an area of this address space is a `T`, to which the area owns
        // a reference while the mmap lock is held.
        let object = unsafe { ArcBorrow::from_raw(object.cast::<T>().cast_const()) };
        let into = address - area.start();
        Some(MappedPart {
            object: object.into(),
            offset: ((first as u64) << PAGE_SHIFT) + into as u64,
            size: size.min((area.end() - address) as u64),
            may_write: area.flags() & flags::MAYWRITE != 0,
        })
    }

    /// Removes all user mappings of a range of pages. Later accesses fault again. May sleep.
    pub(crate) fn unmap(&self, page_offset: u64, pages: u64) {
        self.0.unmap(page_offset, pages);
    }
}

#[kunit_tests(p2pmem_vma)]
mod tests {
    use super::*;

    /// An object that is never mapped.
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
    }

    #[test]
    fn kernel_thread_has_no_mappings() -> Result {
        let space = AddressSpace::<Nothing>::new()?;
        for address in [0, PAGE_SIZE as u64, u64::MAX] {
            assert!(space.mapped_at(address, u64::MAX).is_none());
        }
        space.unmap(1 << 20, 16);
        Ok(())
    }

    #[test]
    fn address_spaces_have_separate_mappings() -> Result {
        let (one, other) = (AddressSpace::<Nothing>::new()?, AddressSpace::<Nothing>::new()?);
        assert!(one.mapping() != other.mapping());
        drop(one);
        assert!(!other.mapping().is_null());
        Ok(())
    }

    #[test]
    fn errors_map_to_fault_codes() {
        let sigbus = bindings::vm_fault_reason_VM_FAULT_SIGBUS;
        let fallback = bindings::vm_fault_reason_VM_FAULT_FALLBACK;
        for (large, other) in [(false, sigbus), (true, fallback)] {
            let cases = [
                (Ok(()), bindings::vm_fault_reason_VM_FAULT_NOPAGE),
                (Err(ENOMEM), bindings::vm_fault_reason_VM_FAULT_OOM),
                (Err(ENODEV), other),
                (Err(EFAULT), other),
            ];
            for (answer, reason) in cases {
                assert_eq!(Operations::<Nothing>::reason(answer, large), reason);
            }
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
