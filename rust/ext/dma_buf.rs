// SPDX-License-Identifier: GPL-2.0

//! dma-bufs: descriptors by which other drivers get at a provider's memory, and can be made to let go of it.
//!
//! C headers: [`include/linux/dma-buf.h`](srctree/include/linux/dma-buf.h),
//! [`include/linux/dma-buf-mapping.h`](srctree/include/linux/dma-buf-mapping.h)

use crate::ext::{
    p2pdma::{
        self,
        Target, //
    },
    pci::Function, //
};
use crate::sys;
use core::{
    cell::UnsafeCell,
    marker::PhantomData,
    ptr::{self, NonNull},
};
use kernel::{
    bindings,
    error::{from_err_ptr, from_result},
    ffi,
    fmt::{self, Write},
    fs::File,
    new_mutex,
    prelude::*,
    sync::{aref::ARef, Arc, ArcBorrow, Mutex},
    time::msecs_to_jiffies,
};

/// A piece of a dma-buf: where it is in physical memory.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct PhysRange(bindings::phys_vec);

impl PhysRange {
    /// `size` bytes at a physical address.
    pub(crate) fn new(phys: u64, size: u64) -> Result<Self> {
        Ok(Self(bindings::phys_vec {
            paddr: phys,
            len: usize::try_from(size)?,
        }))
    }

    /// Whether the target keeps all of it. Whatever maps pieces asks this: the numbers alone prove nothing.
    pub(super) fn is_in(&self, target: &Target) -> bool {
        target.covers(self.0.paddr, self.0.len as u64)
    }
}

/// What an importer is to map: pieces of memory, which is there as long as the target is.
pub(crate) struct MapSource<'a> {
    pub(crate) target: Target,
    pub(crate) pieces: &'a [PhysRange],
}

/// The object behind a dma-buf. An importer that attached is known by a number that the object chose.
pub(crate) trait Exporter: Send + Sync + Sized + 'static {
    /// The operations of all its dma-bufs: a static of the implementor.
    fn operations() -> &'static Operations<Self>;
    /// The way from the object to its dma-buf. Asked once, for a new dma-buf.
    fn link(&self) -> &Link;
    /// An importer wants to attach. Called without the reservation locked.
    fn attach(this: ArcBorrow<'_, Self>, importer: &Importer<'_>) -> Result<u64>;
    /// It detaches; it has neither mappings nor pins any more. Called without the reservation locked.
    fn detach(this: ArcBorrow<'_, Self>, importer: u64);
    /// It asks for the memory to stay where it is. Called with the reservation locked.
    fn pin(this: ArcBorrow<'_, Self>, importer: u64) -> Result;
    /// It takes that back. Called with the reservation locked.
    fn unpin(this: ArcBorrow<'_, Self>, importer: u64);
    /// It wants to map. Called with the reservation locked, and followed by [`Self::unmapped`], at once where mapping
    /// fails.
    fn map(&self, importer: u64) -> Result<MapSource<'_>>;
    /// One of its mappings is gone. Called with the reservation locked.
    fn unmapped(this: ArcBorrow<'_, Self>, importer: u64);
    /// A program wants to map the descriptor. Why it cannot.
    fn mmap(this: ArcBorrow<'_, Self>) -> Error;
    /// The last reference to the dma-buf is gone, and with it all importers.
    fn released(this: Arc<Self>);
}

/// Device and driver, as the log names them.
#[derive(Clone, Copy)]
pub(crate) struct DeviceName {
    name: [u8; 32],
    driver: [u8; 32],
}

impl DeviceName {
    /// # Safety
    ///
    /// `device` must be valid.
    pub(super) unsafe fn of(device: *mut bindings::device) -> Self {
        let mut name = Self {
            name: [0; 32],
            driver: [0; 32],
        };
        // SAFETY: The caller promises a valid device, and the buffers are as long as the call is told.
        unsafe {
            sys::p2pmem_dev_names(
                device,
                name.name.as_mut_ptr(),
                name.name.len(),
                name.driver.as_mut_ptr(),
                name.driver.len(),
            )
        };
        name
    }
}

impl DeviceName {
    /// The device's name alone, as the kernel cut it.
    pub(crate) fn device(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.name).unwrap_or_default()
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        text(f, &self.name)?;
        f.write_str(" (")?;
        text(f, &self.driver)?;
        f.write_char(')')
    }
}

/// An importer that wants to attach.
///
/// # Invariants
///
/// The pointer is an attachment that is being made, for `'a`.
pub(crate) struct Importer<'a>(NonNull<bindings::dma_buf_attachment>, PhantomData<&'a ()>);

impl Importer<'_> {
    fn device(&self) -> *mut bindings::device {
        // SAFETY: By the type invariant; the device does not change.
        unsafe { (*self.0.as_ptr()).dev }
    }

    pub(crate) fn name(&self) -> DeviceName {
        // SAFETY: The importer's device is valid while it attaches.
        unsafe { DeviceName::of(self.device()) }
    }

    /// Whether its driver can do DMA to memory of other devices, which has no struct pages.
    pub(crate) fn peer_to_peer(&self) -> bool {
        // SAFETY: By the type invariant; the core has set the field before.
        unsafe { (*self.0.as_ptr()).peer2peer }
    }

    /// Whether it lets go of its mappings when it is told. C: `dma_buf_attach_revocable()`.
    pub(crate) fn revocable(&self) -> bool {
        // SAFETY: By the type invariant the attachment is valid; the call only reads it.
        unsafe { bindings::dma_buf_attach_revocable(self.0.as_ptr()) }
    }

    /// The PCI function that does its DMA, if it is one.
    pub(crate) fn function(&self) -> Option<Function> {
        // SAFETY: The importer's device is valid while it attaches, and keeps those above it.
        let pdev = NonNull::new(unsafe { sys::p2pmem_dev_pci(self.device()) })?;
        // SAFETY: `pdev` is kept by the importer's device until we have a reference of our own.
        Some(unsafe { Function::of_raw(pdev) })
    }

    /// Whether the kernel says that it reaches the provider. C: `pci_p2pdma_distance_many()`.
    pub(crate) fn reaches(&self, provider: &Function) -> bool {
        self.function()
            .is_some_and(|client| p2pdma::distance(provider, &client).is_some())
    }
}

/// The way from an exporter's object to its dma-buf, for as long as there is one.
#[pin_data]
pub(crate) struct Link {
    /// Held while the dma-buf is used. Its release takes the pointer away first, and so waits for whoever uses it.
    #[pin]
    raw: Mutex<Raw>,
}

/// # Invariants
///
/// The pointer, where there is one, is a dma-buf that was not released.
struct Raw(Option<NonNull<bindings::dma_buf>>);

// SAFETY: A dma-buf is not bound to a thread.
unsafe impl Send for Raw {}

impl Link {
    pub(crate) fn new() -> impl PinInit<Self> {
        // INVARIANT: There is no pointer.
        pin_init!(Self { raw <- new_mutex!(Raw(None)) })
    }

    /// Locks the reservation, calls `mark`, and tells all importers to let go if that says so. What they do not do at once they
    /// do in a while.
    pub(crate) fn invalidate(&self, mark: impl FnOnce() -> bool) {
        let raw = self.raw.lock();
        let Some(dma_buf) = raw.0 else {
            mark();
            return;
        };
        // SAFETY: By the type invariant the dma-buf is valid, and `raw` is locked. Its reservation is valid with it.
        unsafe {
            let resv = (*dma_buf.as_ptr()).resv;
            // Without a context it cannot fail.
            bindings::dma_resv_lock(resv, ptr::null_mut());
            if mark() {
                bindings::dma_buf_invalidate_mappings(dma_buf.as_ptr());
            }
            bindings::dma_resv_unlock(resv);
        }
    }

    /// Waits `ms` milliseconds at most for the DMA that importers said was under way. Whether none is left.
    pub(crate) fn wait_fences(&self, ms: u32) -> bool {
        let raw = self.raw.lock();
        let Some(dma_buf) = raw.0 else {
            return true;
        };
        // SAFETY: By the type invariant the dma-buf is valid, and `raw` is locked. Its reservation is valid with it.
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

/// Whose dma-buf a descriptor is.
pub(crate) enum Got<T: Exporter> {
    Ours(DmaBuf<T>),
    Foreign(ExporterName),
}

/// What another driver calls the dma-bufs that it exports.
pub(crate) struct ExporterName([u8; 32]);

impl fmt::Display for ExporterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        text(f, &self.0)
    }
}

/// Writes text up to its NUL; a character that is not visible ASCII becomes a question mark.
fn text(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    for &c in bytes.split(|&c| c == 0).next().unwrap_or_default() {
        f.write_char(if c.is_ascii_graphic() { char::from(c) } else { '?' })?;
    }
    Ok(())
}

/// What `priv` of a dma-buf owns.
///
/// # Invariants
///
/// `object` keeps what `link` points to.
struct Owned<T> {
    object: Arc<T>,
    link: NonNull<Link>,
}

/// The operations of dma-bufs whose `priv` owns an [`Owned`] with a `T`, and whose attachments' `priv` is the number that
/// [`Exporter::attach`] returned. Their address tells such dma-bufs from others.
///
/// # Invariants
///
/// No other object has its address. A constant could be at several addresses, or share one with another constant of the same
/// bytes; the cell keeps the compiler from making a constant of this.
pub(crate) struct Operations<T>(UnsafeCell<bindings::dma_buf_ops>, PhantomData<fn() -> T>);

// SAFETY: The operations are never written.
unsafe impl<T> Sync for Operations<T> {}

impl<T: Exporter> Operations<T> {
    /// For the static that [`Exporter::operations`] returns.
    pub(crate) const fn new() -> Self {
        // INVARIANT: See there.
        Self(UnsafeCell::new(DmaBuf::<T>::TABLE), PhantomData)
    }
}

/// A reference to a dma-buf.
///
/// # Invariants
///
/// The pointer is a dma-buf with these operations, and one reference to it is ours.
pub(crate) struct DmaBuf<T: Exporter>(NonNull<bindings::dma_buf>, PhantomData<Arc<T>>);

impl<T: Exporter> DmaBuf<T> {
    /// What [`Operations`] consists of.
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

    /// The address of the operations.
    fn table() -> *const bindings::dma_buf_ops {
        T::operations().0.get()
    }

    /// The dma-buf that a descriptor of the caller's is.
    ///
    /// Errors: `EBADF` (no such descriptor), `EINVAL` (no dma-buf).
    pub(crate) fn get(fd: i32) -> Result<Got<T>> {
        // SAFETY: No requirements; the result is an error pointer or a dma-buf with a reference that is ours.
        let found = from_err_ptr(unsafe { bindings::dma_buf_get(fd) })?;
        let found = NonNull::new(found).ok_or(EINVAL)?;
        // SAFETY: The reference to it is ours; its operations do not change.
        if ptr::eq(unsafe { (*found.as_ptr()).ops }, Self::table()) {
            // INVARIANT: It has these operations, and the reference is ours.
            return Ok(Got::Ours(Self(found, PhantomData)));
        }
        let mut name = [0; 32];
        // SAFETY: The reference to it is ours. Exporters give a string that outlives the dma-buf.
        let said = unsafe { CStr::from_char_ptr((*found.as_ptr()).exp_name) };
        for (to, from) in name.iter_mut().zip(said.to_bytes()) {
            *to = *from;
        }
        // SAFETY: The reference is ours, and not used any more.
        unsafe { bindings::dma_buf_put(found.as_ptr()) };
        Ok(Got::Foreign(ExporterName(name)))
    }

    /// The object behind it.
    pub(crate) fn exporter(&self) -> ArcBorrow<'_, T> {
        // SAFETY: By the type invariant it has these operations, and is not released as long as `self` is there.
        unsafe { Self::object(self.0.as_ptr()) }
    }

    /// Makes a dma-buf of `size` bytes. Errors: `EBUSY` when the object's link is that of another one, and those of the kernel.
    pub(crate) fn new(object: Arc<T>, size: u64, module: &'static ThisModule) -> Result<Self> {
        let size = usize::try_from(size)?;
        let link = NonNull::from(object.link());
        let owned = KBox::into_raw(KBox::new(Owned { object, link }, GFP_KERNEL_ACCOUNT)?);
        let info = bindings::dma_buf_export_info {
            exp_name: c"p2pmem".as_char_ptr(),
            owner: module.as_ptr(),
            ops: Self::table(),
            size,
            flags: bindings::O_RDWR as ffi::c_int,
            priv_: owned.cast(),
            ..pin_init::zeroed()
        };
        // SAFETY: What the box owns keeps the link, and is there until the dma-buf is released.
        let raw = &unsafe { link.as_ref() }.raw;
        // SAFETY: The information is complete, and what it points to lives as long as the dma-buf.
        let made = unsafe { bindings::dma_buf_export(&info) };
        match from_err_ptr(made).and_then(|made| NonNull::new(made).ok_or(ENOMEM)) {
            Ok(made) => {
                // INVARIANT: Made just now, with these operations.
                let made = Self(made, PhantomData);
                let mut linked = raw.lock();
                if linked.0.is_some() {
                    // Unlocked first: the release of the new one looks at the link.
                    drop(linked);
                    return Err(EBUSY);
                }
                // INVARIANT: The dma-buf is not released, as a reference to it is ours.
                linked.0 = Some(made.0);
                drop(linked);
                Ok(made)
            }
            Err(e) => {
                // SAFETY: There is no dma-buf that would own the box.
                drop(unsafe { KBox::from_raw(owned) });
                Err(e)
            }
        }
    }

    /// The file that is the dma-buf.
    pub(crate) fn into_file(self) -> ARef<File> {
        // SAFETY: By the type invariant the dma-buf is valid, and has a file as long as it is.
        let file = unsafe { (*self.0.as_ptr()).file };
        // The reference goes with the result.
        core::mem::forget(self);
        // SAFETY: References to a dma-buf are references to its file; ours goes with the result. A dma-buf's operations
        // never use the file's position without its lock.
        unsafe { ARef::from_raw(NonNull::new_unchecked(file.cast::<File>())) }
    }

    /// # Safety
    ///
    /// `dma_buf` must be one with these operations that is not released, and the result must not outlive it.
    unsafe fn object<'a>(dma_buf: *mut bindings::dma_buf) -> ArcBorrow<'a, T> {
        // SAFETY: The dma-buf owns the box, which is not written to.
        unsafe { (*(*dma_buf).priv_.cast::<Owned<T>>()).object.as_arc_borrow() }
    }

    /// The object and the importer of an attachment.
    ///
    /// # Safety
    ///
    /// `attachment` must be one that was attached to a dma-buf with these operations, and the result must not outlive
    /// it.
    unsafe fn parts<'a>(attachment: *mut bindings::dma_buf_attachment) -> (ArcBorrow<'a, T>, u64) {
        // SAFETY: An attachment keeps its dma-buf, and its private field is a number, not a pointer.
        unsafe { (Self::object((*attachment).dmabuf), (*attachment).priv_ as u64) }
    }

    /// # Safety
    ///
    /// Called by the core for a new attachment to a dma-buf with these operations.
    unsafe extern "C" fn attach(
        dma_buf: *mut bindings::dma_buf,
        attachment: *mut bindings::dma_buf_attachment,
    ) -> ffi::c_int {
        from_result(|| {
            // SAFETY: Both are valid for the call.
            let (object, attachment_ptr) = unsafe { (Self::object(dma_buf), NonNull::new_unchecked(attachment)) };
            // INVARIANT: The attachment is being made by this call.
            let importer = Importer(attachment_ptr, PhantomData);
            let number = T::attach(object, &importer)?;
            // SAFETY: The field is the exporter's.
            unsafe { (*attachment).priv_ = number as *mut ffi::c_void };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// Called by the core, once, for an attachment that ends.
    unsafe extern "C" fn detach(_dma_buf: *mut bindings::dma_buf, attachment: *mut bindings::dma_buf_attachment) {
        // SAFETY: It was attached.
        let (object, importer) = unsafe { Self::parts(attachment) };
        T::detach(object, importer);
    }

    /// # Safety
    ///
    /// Called by the core for an attachment, with the reservation locked.
    unsafe extern "C" fn pin(attachment: *mut bindings::dma_buf_attachment) -> ffi::c_int {
        // SAFETY: It was attached.
        let (object, importer) = unsafe { Self::parts(attachment) };
        from_result(|| T::pin(object, importer).map(|()| 0))
    }

    /// # Safety
    ///
    /// Called by the core for an attachment that was pinned, with the reservation locked.
    unsafe extern "C" fn unpin(attachment: *mut bindings::dma_buf_attachment) {
        // SAFETY: It was attached.
        let (object, importer) = unsafe { Self::parts(attachment) };
        T::unpin(object, importer);
    }

    /// # Safety
    ///
    /// Called by the core for an attachment, with the reservation locked.
    unsafe extern "C" fn map(
        attachment: *mut bindings::dma_buf_attachment,
        direction: bindings::dma_data_direction,
    ) -> *mut bindings::sg_table {
        // SAFETY: It was attached.
        let (object, importer) = unsafe { Self::parts(attachment) };
        let MapSource { target, pieces } = match object.map(importer) {
            Ok(what) => what,
            Err(e) => return e.to_ptr(),
        };
        let count = u32::try_from(pieces.len()).unwrap_or(0);
        let provider = target.provider().filter(|_| count > 0);
        let (Some(provider), true) = (provider, pieces.iter().all(|piece| piece.is_in(&target))) else {
            drop(target);
            T::unmapped(object, importer);
            return EINVAL.to_ptr();
        };
        let keep = match KBox::new(target, GFP_KERNEL_ACCOUNT) {
            Ok(keep) => KBox::into_raw(keep),
            // The target is dropped.
            Err(e) => {
                T::unmapped(object, importer);
                return Error::from(e).to_ptr();
            }
        };
        // SAFETY: The attachment is valid and its reservation locked; the target keeps the provider and the memory, which all
        // pieces are in, as was just seen, and the mapping keeps the target; the slice has as many pieces as the call is told.
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
            // SAFETY: It came from a box, and there is no mapping that would have it.
            drop(unsafe { KBox::from_raw(keep) });
            T::unmapped(object, importer);
        }
        table
    }

    /// # Safety
    ///
    /// Called by the core for a table that `map` returned, with the reservation locked.
    unsafe extern "C" fn unmap(
        attachment: *mut bindings::dma_buf_attachment,
        table: *mut bindings::sg_table,
        direction: bindings::dma_data_direction,
    ) {
        // SAFETY: The table is one of `map`'s, of this attachment, and not used any more.
        let keep = unsafe { sys::p2pmem_dma_buf_unmap(attachment, table, direction) };
        // SAFETY: Each table of `map`'s had a box of its own, which is given back with the mapping.
        drop(unsafe { KBox::from_raw(keep.cast::<Target>()) });
        // SAFETY: It was attached.
        let (object, importer) = unsafe { Self::parts(attachment) };
        T::unmapped(object, importer);
    }

    /// # Safety
    ///
    /// Called by the core for a dma-buf with these operations.
    unsafe extern "C" fn mmap(dma_buf: *mut bindings::dma_buf, _vma: *mut bindings::vm_area_struct) -> ffi::c_int {
        // SAFETY: The dma-buf is valid for the call.
        T::mmap(unsafe { Self::object(dma_buf) }).to_errno()
    }

    /// # Safety
    ///
    /// Called by the core, once, when the last reference to a dma-buf with these operations is gone.
    unsafe extern "C" fn release(dma_buf: *mut bindings::dma_buf) {
        // SAFETY: The dma-buf owns the box, which this takes over.
        let owned = unsafe { KBox::from_raw((*dma_buf).priv_.cast::<Owned<T>>()) };
        // SAFETY: By the type invariant the object keeps it.
        let mut linked = unsafe { owned.link.as_ref() }.raw.lock();
        // It is that of another dma-buf where this one was refused for it.
        if linked.0.is_some_and(|linked| ptr::eq(linked.as_ptr(), dma_buf)) {
            // The lock waited for whoever uses it.
            linked.0 = None;
        }
        drop(linked);
        T::released(KBox::into_inner(owned).object);
    }
}

impl<T: Exporter> Drop for DmaBuf<T> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the reference is ours.
        unsafe { bindings::dma_buf_put(self.0.as_ptr()) };
    }
}
