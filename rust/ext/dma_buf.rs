// SPDX-License-Identifier: GPL-2.0

//! An exporter of dma-bufs, whose importers can be revoked.
//!
//! The driver implements [`Exporter`] for the object behind a dma-buf. A [`Link`] in the object leads back to the dma-buf,
//! to invalidate the importers' mappings and to wait for their DMA.
//!
//! All functions are for process context and may sleep. Lock order: the link's mutex, then the dma-buf's reservation lock.
//! The callbacks of [`Exporter`] say which of them are called with the reservation locked.
//!
//! C headers: [`include/linux/dma-buf.h`](srctree/include/linux/dma-buf.h),
//! [`include/linux/dma-buf-mapping.h`](srctree/include/linux/dma-buf-mapping.h)

mod importer;

use crate::{
    ext::{
        device_name::write_ascii,
        p2pdma::Target, //
    },
    sys, //
};
use core::{
    cell::UnsafeCell,
    marker::PhantomData,
    ptr::{self, NonNull},
};
use kernel::{
    bindings,
    error::{from_err_ptr, from_result},
    ffi, fmt,
    fs::File,
    new_mutex,
    prelude::*,
    sync::{aref::ARef, Arc, ArcBorrow, Mutex},
    time::msecs_to_jiffies,
};

pub(crate) use importer::Importer;

/// A range of physical memory, as one part of a dma-buf or of a peer-memory registration. C: `struct phys_vec`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct PhysRange(bindings::phys_vec);

impl PhysRange {
    /// Creates a range of `size` bytes from the physical address `phys` on.
    ///
    /// The numbers are not checked: code that maps a range must ask [`Self::is_in`] first.
    pub(crate) fn new(phys: u64, size: u64) -> Result<Self> {
        Ok(Self(bindings::phys_vec {
            paddr: phys,
            len: usize::try_from(size)?,
        }))
    }

    /// Returns whether `target` keeps all of the range's memory.
    pub(super) fn is_in(&self, target: &Target) -> bool {
        target.covers(self.0.paddr, self.0.len as u64)
    }
}

/// The memory that an importer is to map. `target` keeps the memory of all `pieces`.
pub(crate) struct MapSource<'a> {
    /// Keeps the memory of the pieces.
    pub(crate) target: Target,
    /// The ranges to map, in the order of the dma-buf's offsets.
    pub(crate) pieces: &'a [PhysRange],
}

/// The object behind a dma-buf.
///
/// The object chooses a number for each attachment, by which later callbacks name the importer. All callbacks are called in
/// process context and may sleep.
pub(crate) trait Exporter: Send + Sync + Sized + 'static {
    /// Returns the operations of all dma-bufs of this type: a static of the implementor.
    fn operations() -> &'static Operations<Self>;
    /// Returns the object's link to its dma-buf. Called once for each new dma-buf.
    fn link(&self) -> &Link;
    /// An importer attaches. Returns a number for the attachment, or an error to refuse the importer. Called without the
    /// reservation lock.
    fn attach(this: ArcBorrow<'_, Self>, importer: &Importer<'_>) -> Result<u64>;
    /// The importer detaches. It has no mapping and no pin any more. Called without the reservation lock.
    fn detach(this: ArcBorrow<'_, Self>, importer: u64);
    /// The importer pins the memory. Called with the reservation locked.
    fn pin(this: ArcBorrow<'_, Self>, importer: u64) -> Result;
    /// The importer unpins the memory. Called with the reservation locked.
    fn unpin(this: ArcBorrow<'_, Self>, importer: u64);
    /// The importer maps the memory. Called with the reservation locked.
    ///
    /// [`Self::unmapped`] follows each successful call: when the mapping ends, or at once if the DMA mapping fails.
    fn map(&self, importer: u64) -> Result<MapSource<'_>>;
    /// One mapping of the importer ended. Called with the reservation locked.
    fn unmapped(this: ArcBorrow<'_, Self>, importer: u64);
    /// A program calls `mmap()` on the dma-buf. Returns the error for the program: such mappings are not supported.
    fn mmap(this: ArcBorrow<'_, Self>) -> Error;
    /// The last reference to the dma-buf is gone; no importer is attached. Called without the reservation lock.
    fn released(this: Arc<Self>);
}

/// The link from an exporter's object to its dma-buf, while the dma-buf exists.
#[pin_data]
pub(crate) struct Link {
    /// Held while the dma-buf is used. The dma-buf's release clears the pointer under this lock, so it waits for all users.
    #[pin]
    raw: Mutex<Raw>,
}

/// The pointer of a [`Link`].
///
/// # Invariants
///
/// The pointer, if any, is a dma-buf whose release has not returned.
struct Raw(Option<NonNull<bindings::dma_buf>>);

// SAFETY: A dma-buf can be used and released on any thread.
unsafe impl Send for Raw {}

impl Link {
    /// Returns an initialiser of a link without a dma-buf.
    pub(crate) fn new() -> impl PinInit<Self> {
        // INVARIANT: There is no pointer.
        pin_init!(Self { raw <- new_mutex!(Raw(None)) })
    }

    /// Calls `mark` with the reservation locked, and invalidates all importers' mappings.
    ///
    /// Without a dma-buf, only calls `mark`, under the link's lock. Importers may end their mappings later: see
    /// [`Self::wait_fences`]. May sleep; takes the link's lock and the reservation lock.
    pub(crate) fn invalidate(&self, mark: impl FnOnce()) {
        let raw = self.raw.lock();
        let Some(dma_buf) = raw.0 else {
            mark();
            return;
        };
        // SAFETY: By the type invariant of `Raw` the dma-buf is valid while `raw` is locked, and so is its reservation
        // object. The reservation is locked for `dma_buf_invalidate_mappings()`, which requires that.
        unsafe {
            let resv = (*dma_buf.as_ptr()).resv;
            // Without an acquire context, locking cannot fail.
            bindings::dma_resv_lock(resv, ptr::null_mut());
            mark();
            bindings::dma_buf_invalidate_mappings(dma_buf.as_ptr());
            bindings::dma_resv_unlock(resv);
        }
    }

    /// Waits at most `ms` milliseconds for the fences of the importers' DMA. Returns whether all of them have signalled.
    ///
    /// Sleeps with the link's lock held: the release of the dma-buf waits meanwhile.
    pub(crate) fn wait_fences(&self, ms: u32) -> bool {
        let raw = self.raw.lock();
        let Some(dma_buf) = raw.0 else {
            return true;
        };
        // SAFETY: By the type invariant of `Raw` the dma-buf is valid while `raw` is locked, and so is its reservation
        // object.
        unsafe {
            bindings::dma_resv_wait_timeout(
                (*dma_buf.as_ptr()).resv,
                bindings::dma_resv_usage_DMA_RESV_USAGE_BOOKKEEP,
                false,
                msecs_to_jiffies(ms),
            ) > 0
        }
    }
}

/// The name of an exporter, from `struct dma_buf.exp_name`, cut to 32 bytes.
#[derive(Clone, Copy)]
pub(crate) struct ExporterName([u8; 32]);

impl fmt::Display for ExporterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_ascii(f, &self.0)
    }
}

/// A reference to a dma-buf of any exporter.
///
/// # Invariants
///
/// The pointer is a dma-buf, and this object owns one reference to it.
pub(crate) struct AnyDmaBuf(NonNull<bindings::dma_buf>);

// SAFETY: A dma-buf can be used and released on any thread.
unsafe impl Send for AnyDmaBuf {}
// SAFETY: All methods read fields that do not change.
unsafe impl Sync for AnyDmaBuf {}

impl AnyDmaBuf {
    /// Looks up a descriptor of the current process.
    ///
    /// Process context. Errors: `EBADF` if there is no such descriptor, `EINVAL` if it is no dma-buf.
    pub(crate) fn get(fd: i32) -> Result<Self> {
        // SAFETY: The call has no requirements. It returns an error pointer, or a dma-buf with a reference for the caller.
        let found = from_err_ptr(unsafe { bindings::dma_buf_get(fd) })?;
        // INVARIANT: The reference from `dma_buf_get()` goes to the result.
        Ok(Self(NonNull::new(found).ok_or(EINVAL)?))
    }

    /// Returns the raw pointer, which is valid as long as `self`.
    pub(super) fn as_raw(&self) -> *mut bindings::dma_buf {
        self.0.as_ptr()
    }

    /// Returns the size in bytes.
    pub(crate) fn size(&self) -> u64 {
        // SAFETY: By the type invariant the dma-buf is valid. Its size does not change.
        unsafe { (*self.as_raw()).size as u64 }
    }

    /// Returns the name of the exporter.
    pub(crate) fn exporter_name(&self) -> ExporterName {
        let mut name = [0; 32];
        // SAFETY: By the type invariant the dma-buf is valid. The core requires a name, which lives as long as the
        // exporter's module, and the dma-buf keeps that module loaded.
        let said = unsafe { CStr::from_char_ptr((*self.as_raw()).exp_name) };
        for (to, from) in name.iter_mut().zip(said.to_bytes()) {
            *to = *from;
        }
        ExporterName(name)
    }

    /// Returns the object behind the dma-buf, if the dma-buf is of the exporter `T`.
    pub(crate) fn object_of<T: Exporter>(&self) -> Option<ArcBorrow<'_, T>> {
        // SAFETY: By the type invariant the dma-buf is valid, and its operations do not change.
        if !ptr::eq(unsafe { (*self.as_raw()).ops }, DmaBuf::<T>::table()) {
            return None;
        }
        // SAFETY: The dma-buf has the operations of `T`, and `self`'s reference keeps it from being released for the
        // lifetime of the borrow.
        Some(unsafe { DmaBuf::<T>::object(self.as_raw()) })
    }
}

impl Drop for AnyDmaBuf {
    fn drop(&mut self) {
        // SAFETY: By the type invariant this object owns a reference to the dma-buf, which is dropped once.
        unsafe { bindings::dma_buf_put(self.as_raw()) };
    }
}

/// The data that `priv` of a dma-buf owns.
///
/// # Invariants
///
/// `link` is the link of `object`, which keeps it.
struct PrivateData<T> {
    object: Arc<T>,
    link: NonNull<Link>,
}

/// The operations of the dma-bufs of an exporter.
///
/// `priv` of such a dma-buf owns an [`PrivateData<T>`], and `priv` of its attachments is the number from [`Exporter::attach`].
/// The address of the operations identifies such dma-bufs.
///
/// # Invariants
///
/// No other object has the same address. A constant could have several addresses or share one with an equal constant; the
/// `UnsafeCell` keeps the compiler from placing this as a constant.
pub(crate) struct Operations<T>(UnsafeCell<bindings::dma_buf_ops>, PhantomData<fn() -> T>);

// SAFETY: The operations are never written after their creation.
unsafe impl<T> Sync for Operations<T> {}

impl<T: Exporter> Operations<T> {
    /// Creates the value of the static that [`Exporter::operations`] returns.
    pub(crate) const fn new() -> Self {
        // INVARIANT: A static that contains an `UnsafeCell` has an address of its own.
        Self(UnsafeCell::new(DmaBuf::<T>::TABLE), PhantomData)
    }
}

/// A reference to a dma-buf of an exporter.
///
/// # Invariants
///
/// The pointer is a dma-buf with the operations of `T`, and this object owns one reference to the dma-buf.
pub(crate) struct DmaBuf<T: Exporter>(NonNull<bindings::dma_buf>, PhantomData<Arc<T>>);

impl<T: Exporter> DmaBuf<T> {
    /// The callbacks of [`Operations`].
    const TABLE: bindings::dma_buf_ops = bindings::dma_buf_ops {
        attach: Some(Self::attach),
        detach: Some(Self::detach),
        pin: Some(Self::pin),
        unpin: Some(Self::unpin),
        map_dma_buf: Some(Self::map),
        unmap_dma_buf: Some(Self::unmap),
        mmap: Some(Self::mmap),
        release: Some(Self::release),
        ..pin_init::zeroed()
    };

    /// Returns the address of the operations, which the core reads.
    fn table() -> *const bindings::dma_buf_ops {
        T::operations().0.get()
    }

    /// Exports `object` as a dma-buf of `size` bytes with the owner `module`. May sleep; takes the link's lock.
    ///
    /// Errors: `EBUSY` if the object's link already has a dma-buf; `ENOMEM`; those of `dma_buf_export()`.
    pub(crate) fn new(object: Arc<T>, size: u64, module: &'static ThisModule) -> Result<Self> {
        let size = usize::try_from(size)?;
        let link = NonNull::from(object.link());
        // INVARIANT: The link is the object's. `object` is moved into the box, but the `Arc`'s contents stay in place.
        let owned = KBox::into_raw(KBox::new(PrivateData { object, link }, GFP_KERNEL_ACCOUNT)?);
        let info = bindings::dma_buf_export_info {
            exp_name: c"p2pmem".as_char_ptr(),
            owner: module.as_ptr(),
            ops: Self::table(),
            size,
            flags: bindings::O_RDWR as ffi::c_int,
            priv_: owned.cast(),
            ..pin_init::zeroed()
        };
        // SAFETY: By the type invariant of `PrivateData`, the box keeps the link. The box lives until the dma-buf is released or
        // the box is dropped below; `raw` is not used after either.
        let raw = &unsafe { link.as_ref() }.raw;
        // SAFETY: All required fields are set. The name and the operations are statics, and the dma-buf owns the box.
        let made = unsafe { bindings::dma_buf_export(&info) };
        match from_err_ptr(made).and_then(|made| NonNull::new(made).ok_or(ENOMEM)) {
            Ok(made) => {
                // INVARIANT: `dma_buf_export()` returned a dma-buf with these operations and one reference for the caller.
                let made = Self(made, PhantomData);
                let mut linked = raw.lock();
                if linked.0.is_some() {
                    // Unlock first: dropping `made` releases the new dma-buf, whose release takes the lock.
                    drop(linked);
                    return Err(EBUSY);
                }
                // INVARIANT: `made` owns a reference, so the dma-buf was not released; its release clears this pointer.
                linked.0 = Some(made.0);
                drop(linked);
                Ok(made)
            }
            Err(e) => {
                // SAFETY: The pointer came from `KBox::into_raw()`, and no dma-buf was made that would own the box.
                drop(unsafe { KBox::from_raw(owned) });
                Err(e)
            }
        }
    }

    /// Returns the dma-buf's file, with the reference of `self`.
    pub(crate) fn into_file(self) -> ARef<File> {
        // SAFETY: By the type invariant the dma-buf is valid. Its file does not change.
        let file = unsafe { (*self.0.as_ptr()).file };
        // The reference moves to the result.
        core::mem::forget(self);
        // SAFETY: A dma-buf's file is never null, and a reference to the dma-buf is a reference to the file, which moves to
        // the `ARef`. The file operations of dma-bufs never use `f_pos`, so calls of `fdget_pos()` on other threads do no
        // harm.
        unsafe { ARef::from_raw(NonNull::new_unchecked(file.cast::<File>())) }
    }

    /// Borrows the object behind a dma-buf.
    ///
    /// # Safety
    ///
    /// `dma_buf` must have the operations of `T`, and its release must not have begun to free `priv`, for the lifetime
    /// `'a`.
    unsafe fn object<'a>(dma_buf: *mut bindings::dma_buf) -> ArcBorrow<'a, T> {
        // SAFETY: `priv` of such a dma-buf points to an `PrivateData<T>` that is not written to and lives until `release` frees
        // it.
        unsafe { (*(*dma_buf).priv_.cast::<PrivateData<T>>()).object.as_arc_borrow() }
    }

    /// Returns the object behind an attachment's dma-buf, and the number of the attachment.
    ///
    /// # Safety
    ///
    /// `attachment` must be attached, or just being detached, to a dma-buf with the operations of `T` for the lifetime
    /// `'a`.
    unsafe fn parts<'a>(attachment: *mut bindings::dma_buf_attachment) -> (ArcBorrow<'a, T>, u64) {
        // SAFETY: An attachment keeps its dma-buf, which has the operations of `T`. `attach` stored a number in `priv`.
        unsafe { (Self::object((*attachment).dmabuf), (*attachment).priv_ as u64) }
    }

    /// `attach` of `struct dma_buf_ops`. The reservation is not locked.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls with a dma-buf of `T` and a new attachment to it.
    unsafe extern "C" fn attach(
        dma_buf: *mut bindings::dma_buf,
        attachment: *mut bindings::dma_buf_attachment,
    ) -> ffi::c_int {
        from_result(|| {
            // SAFETY: The caller guarantees that both are valid during the call.
            let (object, attachment_ptr) = unsafe { (Self::object(dma_buf), NonNull::new_unchecked(attachment)) };
            // INVARIANT: The core has set `dev` and the flags, and the attachment is valid until this call returns.
            let importer = Importer(attachment_ptr, PhantomData);
            let number = T::attach(object, &importer)?;
            // SAFETY: The attachment is valid, and `priv` is the exporter's field. No other thread uses the attachment yet.
            unsafe { (*attachment).priv_ = number as *mut ffi::c_void };
            Ok(0)
        })
    }

    /// `detach` of `struct dma_buf_ops`. The reservation is not locked.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls once for each attachment of a dma-buf of `T`.
    unsafe extern "C" fn detach(_dma_buf: *mut bindings::dma_buf, attachment: *mut bindings::dma_buf_attachment) {
        // SAFETY: The caller guarantees an attachment that `attach` accepted.
        let (object, importer) = unsafe { Self::parts(attachment) };
        T::detach(object, importer);
    }

    /// `pin` of `struct dma_buf_ops`. The reservation is locked.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls with an attachment to a dma-buf of `T`.
    unsafe extern "C" fn pin(attachment: *mut bindings::dma_buf_attachment) -> ffi::c_int {
        // SAFETY: The caller guarantees an attachment that `attach` accepted.
        let (object, importer) = unsafe { Self::parts(attachment) };
        from_result(|| T::pin(object, importer).map(|()| 0))
    }

    /// `unpin` of `struct dma_buf_ops`. The reservation is locked.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls with a pinned attachment to a dma-buf of `T`.
    unsafe extern "C" fn unpin(attachment: *mut bindings::dma_buf_attachment) {
        // SAFETY: The caller guarantees an attachment that `attach` accepted.
        let (object, importer) = unsafe { Self::parts(attachment) };
        T::unpin(object, importer);
    }

    /// `map_dma_buf` of `struct dma_buf_ops`. The reservation is locked.
    ///
    /// Returns an error pointer: the errors of [`Exporter::map`]; `EINVAL` if there is no piece, or one is not the
    /// target's memory; `ENOMEM`; those of the DMA mapping.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls with an attachment to a dma-buf of `T`.
    unsafe extern "C" fn map(
        attachment: *mut bindings::dma_buf_attachment,
        direction: bindings::dma_data_direction,
    ) -> *mut bindings::sg_table {
        // SAFETY: The caller guarantees an attachment that `attach` accepted.
        let (object, importer) = unsafe { Self::parts(attachment) };
        let MapSource { target, pieces } = match object.map(importer) {
            Ok(what) => what,
            Err(e) => return e.to_ptr(),
        };
        let count = u32::try_from(pieces.len()).unwrap_or(0);
        if count == 0 || !pieces.iter().all(|piece| piece.is_in(&target)) {
            drop(target);
            T::unmapped(object, importer);
            return EINVAL.to_ptr();
        }
        let provider = target.provider();
        let keep = Arc::into_raw(target).cast_mut();
        // SAFETY: The attachment is valid and its reservation locked. `count` is the length of `pieces`, of which each was
        // just checked to be the target's memory. By the type invariant of `Backing` the provider and the memory are valid
        // while the target lives, and the mapping owns the target from here on.
        let table = unsafe {
            sys::p2pmem_dma_buf_map(
                attachment,
                provider.as_ptr(),
                pieces.as_ptr().cast(),
                count,
                direction,
                keep.cast(),
            )
        };
        if from_err_ptr(table).is_err() {
            // SAFETY: The pointer came from `Arc::into_raw()`, and no mapping was made that would own the reference.
            drop(unsafe { Target::from_raw(keep) });
            T::unmapped(object, importer);
        }
        table
    }

    /// `unmap_dma_buf` of `struct dma_buf_ops`. The reservation is locked.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls once with each table that `map` returned, with the attachment and direction of that
    /// call.
    unsafe extern "C" fn unmap(
        attachment: *mut bindings::dma_buf_attachment,
        table: *mut bindings::sg_table,
        direction: bindings::dma_data_direction,
    ) {
        // SAFETY: `map` made the table for this attachment, and the core does not use it after this call.
        let keep = unsafe { sys::p2pmem_dma_buf_unmap(attachment, table, direction) };
        // SAFETY: `map` gave each mapping a target from `Arc::into_raw()`, which the mapping's end returns.
        drop(unsafe { Target::from_raw(keep.cast()) });
        // SAFETY: The caller guarantees an attachment that `attach` accepted.
        let (object, importer) = unsafe { Self::parts(attachment) };
        T::unmapped(object, importer);
    }

    /// `mmap` of `struct dma_buf_ops`: always an error.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls with a dma-buf of `T`.
    unsafe extern "C" fn mmap(dma_buf: *mut bindings::dma_buf, _vma: *mut bindings::vm_area_struct) -> ffi::c_int {
        // SAFETY: The caller guarantees that the dma-buf is valid during the call.
        T::mmap(unsafe { Self::object(dma_buf) }).to_errno()
    }

    /// `release` of `struct dma_buf_ops`. The reservation is not locked; takes the link's lock.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls once, when the last reference to a dma-buf of `T` is gone.
    unsafe extern "C" fn release(dma_buf: *mut bindings::dma_buf) {
        // SAFETY: `priv` came from `KBox::into_raw()`, and the core calls `release` once, with no attachment left.
        let owned = unsafe { KBox::from_raw((*dma_buf).priv_.cast::<PrivateData<T>>()) };
        // SAFETY: By the type invariant of `PrivateData` the object keeps the link.
        let mut linked = unsafe { owned.link.as_ref() }.raw.lock();
        // The link is that of another dma-buf if `new` refused this one with `EBUSY`.
        if linked.0.is_some_and(|linked| ptr::eq(linked.as_ptr(), dma_buf)) {
            // INVARIANT: The pointer goes before the dma-buf. Taking the lock has waited for all users.
            linked.0 = None;
        }
        drop(linked);
        T::released(KBox::into_inner(owned).object);
    }
}

impl<T: Exporter> Drop for DmaBuf<T> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant this object owns a reference to the dma-buf, which is dropped once.
        unsafe { bindings::dma_buf_put(self.0.as_ptr()) };
    }
}
