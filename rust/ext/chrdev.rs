// SPDX-License-Identifier: GPL-2.0

//! A character device with an owner, read, poll, ioctl and mmap.
//!
//! C headers: [`include/linux/miscdevice.h`](srctree/include/linux/miscdevice.h),
//! [`include/linux/fs.h`](srctree/include/linux/fs.h)
//!
//! [`kernel::miscdevice`] sets no owner, so that unloading the module with a file open would free its code; it has no
//! mode, no poll, and its areas have no operations.

use crate::ext::{
    global,
    vma::{
        step,
        AddressSpace,
        Mappable,
        NewArea, //
    }, //
};
use crate::sys;
use core::{cell::UnsafeCell, marker::PhantomData};
use kernel::{
    bindings,
    error::{from_result, to_result},
    ffi,
    fs::File,
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    sync::{
        atomic::{AtomicFlag, Relaxed},
        poll::PollTable,
        Arc, ArcBorrow,
    },
    types::Opaque,
    uaccess::{UserPtr, UserSlice, UserSliceWriter},
};

/// What `poll` answers.
pub(crate) const READABLE: u32 = bindings::POLLIN | bindings::POLLRDNORM;

/// One open file of a character device.
pub(crate) trait Operations: Send + Sync + Sized + 'static {
    /// What the kernel calls for such files: a static of the implementor.
    fn table() -> &'static Table<Self>;
    /// What is mapped through it.
    type Object: Mappable;
    /// A file is opened, which keeps the module. Also tells the address space its mappings belong to.
    fn open() -> Result<Arc<Self>>;
    /// The address space that all mappings of all files belong to.
    fn address_space(&self) -> &AddressSpace<Self::Object>;
    /// Its last descriptor and its last mapping are gone.
    fn close(this: Arc<Self>);
    /// An ioctl; `arg` is its argument as it came.
    fn ioctl(this: ArcBorrow<'_, Self>, cmd: u32, arg: UserPtr) -> Result;
    /// Reads up to the room in `out`; returns bytes read.
    fn read(this: ArcBorrow<'_, Self>, out: UserSliceWriter, nonblock: bool) -> Result<usize>;
    /// Registers with `table` and tells what can be done now.
    fn poll(this: ArcBorrow<'_, Self>, file: &File, table: PollTable<'_>) -> u32;
    /// Maps.
    fn mmap(this: ArcBorrow<'_, Self>, area: NewArea<'_, Self::Object>) -> Result;
}

/// What the kernel calls for the files of a character device. Open files refer to it, and keep the module, of which it is a
/// static, and not the registration.
pub(crate) struct Table<T> {
    operations: UnsafeCell<bindings::file_operations>,
    /// Whether a registration has set the owner: after that nothing is written.
    owned: AtomicFlag,
    _files: PhantomData<fn() -> T>,
}

// SAFETY: The operations are written once, by the one that sets `owned`, before anybody else refers to them.
unsafe impl<T> Sync for Table<T> {}

impl<T: Operations> Table<T> {
    /// For the static that [`Operations::table`] returns.
    pub(crate) const fn new() -> Self {
        Self {
            operations: UnsafeCell::new(bindings::file_operations {
                open: Some(CharDeviceRegistration::<T>::open),
                release: Some(CharDeviceRegistration::<T>::release),
                read: Some(CharDeviceRegistration::<T>::read),
                poll: Some(CharDeviceRegistration::<T>::poll),
                unlocked_ioctl: Some(CharDeviceRegistration::<T>::ioctl),
                compat_ioctl: bindings::compat_ptr_ioctl,
                mmap: Some(CharDeviceRegistration::<T>::mmap),
                get_unmapped_area: Some(unmapped_area),
                llseek: Some(bindings::noop_llseek),
                ..pin_init::zeroed()
            }),
            owned: AtomicFlag::new(false),
            _files: PhantomData,
        }
    }

    /// The operations of files that keep `module`. Errors: `EBUSY` the second time.
    fn of(&self, module: &'static ThisModule) -> Result<*const bindings::file_operations> {
        if self.owned.xchg(true, Relaxed) {
            return Err(EBUSY);
        }
        let operations = self.operations.get();
        // SAFETY: This is the first time, so that nobody else has the address.
        unsafe { (*operations).owner = module.as_ptr() };
        Ok(operations)
    }
}

/// A registered character device; its node is there until this is dropped.
///
/// # Invariants
///
/// `device` is registered.
#[pin_data(PinnedDrop)]
pub(crate) struct CharDeviceRegistration<T: Operations> {
    #[pin]
    device: Opaque<bindings::miscdevice>,
    _files: PhantomData<T>,
}

// SAFETY: The device can be deregistered from any thread.
unsafe impl<T: Operations> Send for CharDeviceRegistration<T> {}
// SAFETY: There are no methods on a shared reference.
unsafe impl<T: Operations> Sync for CharDeviceRegistration<T> {}

impl<T: Operations> CharDeviceRegistration<T> {
    /// Registers a device node of the given name and mode. Errors: `EBUSY` the second time, and those of the kernel.
    pub(crate) fn new(name: &'static CStr, mode: u16, module: &'static ThisModule) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            device <- Opaque::try_ffi_init(move |slot: *mut bindings::miscdevice| {
                let fops = T::table().of(module)?;
                // SAFETY: `slot` is ours to initialise, and pinned; the operations are a static.
                to_result(unsafe {
                    slot.write(bindings::miscdevice {
                        minor: bindings::MISC_DYNAMIC_MINOR as ffi::c_int,
                        name: name.as_char_ptr(),
                        fops,
                        mode,
                        ..pin_init::zeroed()
                    });
                    // INVARIANT: Registered where this succeeds.
                    bindings::misc_register(slot)
                })
            }),
            _files: PhantomData,
        }? Error)
    }

    /// # Safety
    ///
    /// `file` must be a file of this device between its `open` and its `release`.
    unsafe fn object<'a>(file: *mut bindings::file) -> ArcBorrow<'a, T> {
        // SAFETY: `open` stored the pointer of an `Arc` that `release` takes back.
        unsafe { ArcBorrow::from_raw((*file).private_data.cast::<T>()) }
    }

    /// # Safety
    ///
    /// Called by the core for a file that is being opened.
    unsafe extern "C" fn open(inode: *mut bindings::inode, file: *mut bindings::file) -> ffi::c_int {
        from_result(|| {
            // The file keeps the module only where nothing unloads that all the same.
            global::ready()?;
            // SAFETY: Both are valid for the call.
            to_result(unsafe { bindings::nonseekable_open(inode, file) })?;
            let object = T::open()?;
            // SAFETY: The file is being opened, its fields are ours to set. The mapping lives as long as the device is
            // registered, which an open file's reference to the module ensures.
            unsafe {
                (*file).f_mapping = object.address_space().mapping();
                (*file).private_data = Arc::into_raw(object).cast_mut().cast();
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// Called by the core when the last reference to a file of this device is gone.
    unsafe extern "C" fn release(_inode: *mut bindings::inode, file: *mut bindings::file) -> ffi::c_int {
        // SAFETY: `open` stored this pointer, and nothing uses it after this call.
        T::close(unsafe { Arc::from_raw((*file).private_data.cast::<T>()) });
        0
    }

    /// # Safety
    ///
    /// Called by the core for an open file of this device, with a buffer of user space.
    unsafe extern "C" fn read(
        file: *mut bindings::file,
        buf: *mut ffi::c_char,
        len: usize,
        _pos: *mut bindings::loff_t,
    ) -> isize {
        // SAFETY: The file is open.
        let (object, flags) = unsafe { (Self::object(file), (*file).f_flags) };
        let out = UserSlice::new(UserPtr::from_ptr(buf.cast()), len).writer();
        match T::read(object, out, flags & bindings::O_NONBLOCK != 0) {
            Ok(n) => n as isize,
            Err(e) => e.to_errno() as isize,
        }
    }

    /// # Safety
    ///
    /// Called by the core for an open file of this device.
    unsafe extern "C" fn poll(file: *mut bindings::file, table: *mut bindings::poll_table_struct) -> u32 {
        // SAFETY: The file is open, and nobody holds its position.
        let (object, file) = unsafe { (Self::object(file), File::from_raw_file(file)) };
        // SAFETY: The table is null or valid for the call.
        T::poll(object, file, unsafe { PollTable::from_raw(table) })
    }

    /// # Safety
    ///
    /// Called by the core for an open file of this device.
    unsafe extern "C" fn ioctl(file: *mut bindings::file, cmd: ffi::c_uint, arg: ffi::c_ulong) -> ffi::c_long {
        // SAFETY: The file is open.
        let object = unsafe { Self::object(file) };
        match T::ioctl(object, cmd, UserPtr::from_addr(arg)) {
            Ok(()) => 0,
            Err(e) => e.to_errno() as ffi::c_long,
        }
    }

    /// # Safety
    ///
    /// Called by the core for an open file of this device, with an area that is being set up.
    unsafe extern "C" fn mmap(file: *mut bindings::file, vma: *mut bindings::vm_area_struct) -> ffi::c_int {
        // SAFETY: The file is open.
        let object = unsafe { Self::object(file) };
        from_result(|| {
            // SAFETY: The area is being set up by this call.
            T::mmap(object, unsafe { NewArea::from_raw(vma) })?;
            Ok(0)
        })
    }
}

#[pinned_drop]
impl<T: Operations> PinnedDrop for CharDeviceRegistration<T> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant the device is registered.
        unsafe { bindings::misc_deregister(self.device.get()) };
    }
}

/// Chooses the addresses of a new mapping, in step with its offset as far as its length goes.
///
/// # Safety
///
/// Called by the core for a process that maps a part of `file`.
unsafe extern "C" fn unmapped_area(
    file: *mut bindings::file,
    addr: usize,
    len: usize,
    pgoff: usize,
    flags: usize,
) -> usize {
    let step = step(len);
    // Addresses that the program named are its own business.
    let free = addr == 0 && flags & sys::P2PMEM_MAP_FIXED as usize == 0;
    if let Some(more) = len.checked_add(step - PAGE_SIZE).filter(|_| free) {
        // SAFETY: By the requirements of this function.
        let at = unsafe { bindings::mm_get_unmapped_area(file, 0, more, pgoff, flags) };
        // An error is no multiple of the page size.
        if at % PAGE_SIZE == 0 {
            return at + ((pgoff << PAGE_SHIFT).wrapping_sub(at) & (step - 1));
        }
    }
    // SAFETY: By the requirements of this function.
    unsafe { bindings::mm_get_unmapped_area(file, addr, len, pgoff, flags) }
}
