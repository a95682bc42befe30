// SPDX-License-Identifier: GPL-2.0

//! A misc character device with an owner, a mode, and the file operations read, poll, ioctl and mmap.
//!
//! [`kernel::miscdevice`] does not cover these: it sets no owner, so the module could be unloaded while a file is open; it sets no
//! mode, has no poll operation, and gives mappings no operations of their own.
//!
//! All file operations are called in process context and may sleep. This file takes no locks.
//!
//! C headers: [`include/linux/miscdevice.h`](srctree/include/linux/miscdevice.h),
//! [`include/linux/fs.h`](srctree/include/linux/fs.h)

use crate::ext::{
    global,
    vma::{
        step,
        AddressSpace,
        Mappable,
        NewMapping, //
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

/// The events that [`Operations::poll`] returns for a file with data to read.
pub(crate) const READABLE: u32 = bindings::POLLIN | bindings::POLLRDNORM;

/// The state of one open file, and the operations on the file. All are called in process context and may sleep.
pub(crate) trait Operations: Send + Sync + Sized + 'static {
    /// Returns the table of file operations: a static of the implementor.
    fn table() -> &'static Table<Self>;
    /// The type of the objects that `mmap()` maps.
    type Object: Mappable;
    /// Opens a file. The open file keeps the module loaded.
    fn open() -> Result<Arc<Self>>;
    /// Returns the address space of all mappings of all files. Every open file must return the same one: otherwise the
    /// removal of a mapping misses the mappings of other files.
    fn address_space(&self) -> &AddressSpace<Self::Object>;
    /// Closes the file: no descriptor and no mapping refers to the file any more.
    fn close(this: Arc<Self>);
    /// Handles an ioctl. `cmd` and `arg` are the unchecked arguments of the system call.
    fn ioctl(this: ArcBorrow<'_, Self>, cmd: u32, arg: UserPtr) -> Result;
    /// Reads into `out` and returns the number of bytes. Does not wait for data if `nonblock` is true.
    fn read(this: ArcBorrow<'_, Self>, out: UserSliceWriter, nonblock: bool) -> Result<usize>;
    /// Registers a wait queue with `table` and returns the events that are pending now ([`READABLE`] or 0).
    fn poll(this: ArcBorrow<'_, Self>, file: &File, table: PollTable<'_>) -> u32;
    /// Sets up a mapping. On success `area` must have been attached to an object.
    fn mmap(this: ArcBorrow<'_, Self>, area: NewMapping<'_, Self::Object>) -> Result;
}

/// The file operations of a character device, as a static.
///
/// Open files refer to the table and keep the module loaded; the registration may end before the last file is closed.
///
/// # Invariants
///
/// `operations` is written only by the caller that sets `owned`, before any file refers to the table.
pub(crate) struct Table<T> {
    operations: UnsafeCell<bindings::file_operations>,
    /// True once [`Self::of`] has set the owner.
    owned: AtomicFlag,
    _files: PhantomData<fn() -> T>,
}

// SAFETY: By the type invariant the one write comes before all reads: the core sees the address after [`Table::of`]
// returns.
unsafe impl<T> Sync for Table<T> {}

impl<T: Operations> Table<T> {
    /// Creates the value of the static that [`Operations::table`] returns.
    pub(crate) const fn new() -> Self {
        // INVARIANT: `owned` is false and nothing refers to the table.
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

    /// Sets the owner and returns the operations.
    ///
    /// Errors: `EBUSY` if the owner is set already.
    fn of(&self, module: &'static ThisModule) -> Result<*const bindings::file_operations> {
        if self.owned.xchg(true, Relaxed) {
            return Err(EBUSY);
        }
        let operations = self.operations.get();
        // INVARIANT: This caller set `owned`.
        // SAFETY: By the type invariant nobody else writes, and nobody reads yet: this is the first call that returns the
        // address.
        unsafe { (*operations).owner = module.as_ptr() };
        Ok(operations)
    }
}

/// A registered character device. The device node exists until the registration is dropped.
///
/// # Invariants
///
/// `device` is registered with the misc core.
#[pin_data(PinnedDrop)]
pub(crate) struct CharDeviceRegistration<T: Operations> {
    #[pin]
    device: Opaque<bindings::miscdevice>,
    _files: PhantomData<T>,
}

// SAFETY: `misc_deregister()` can be called from any thread.
unsafe impl<T: Operations> Send for CharDeviceRegistration<T> {}
// SAFETY: There are no methods on a shared reference.
unsafe impl<T: Operations> Sync for CharDeviceRegistration<T> {}

impl<T: Operations> CharDeviceRegistration<T> {
    /// Registers a device named `name` with a dynamic minor number and the permission bits `mode` of the node.
    ///
    /// May sleep. Errors: `EBUSY` if a device with this table was registered before; those of `misc_register()`.
    pub(crate) fn new(name: &'static CStr, mode: u16, module: &'static ThisModule) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            device <- Opaque::try_ffi_init(move |slot: *mut bindings::miscdevice| {
                let fops = T::table().of(module)?;
                // SAFETY: `slot` is valid for writes and pinned; the name and the operations are statics.
                to_result(unsafe {
                    slot.write(bindings::miscdevice {
                        minor: bindings::MISC_DYNAMIC_MINOR as ffi::c_int,
                        name: name.as_char_ptr(),
                        fops,
                        mode,
                        ..pin_init::zeroed()
                    });
                    // INVARIANT: The device is registered if the call succeeds; otherwise there is no
                    // `CharDeviceRegistration`.
                    bindings::misc_register(slot)
                })
            }),
            _files: PhantomData,
        }? Error)
    }

    /// Borrows the state of an open file.
    ///
    /// # Safety
    ///
    /// `file` must be a file of this device, after its `open` and before its `release`, for the lifetime `'a`.
    unsafe fn object<'a>(file: *mut bindings::file) -> ArcBorrow<'a, T> {
        // SAFETY: `open` stored a pointer from `Arc::into_raw()`, whose reference `release` takes back. The caller
        // guarantees that `release` was not called.
        unsafe { ArcBorrow::from_raw((*file).private_data.cast::<T>()) }
    }

    /// `open` of `struct file_operations`.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls with a file of this device that is being opened, and its inode.
    unsafe extern "C" fn open(inode: *mut bindings::inode, file: *mut bindings::file) -> ffi::c_int {
        from_result(|| {
            // The kernel frees the module if its initialisation fails, even with a file open: refuse until the module is
            // loaded.
            global::ready()?;
            // SAFETY: The caller guarantees that both are valid during the call.
            to_result(unsafe { bindings::nonseekable_open(inode, file) })?;
            let object = T::open()?;
            // SAFETY: No other thread refers to a file that is being opened. The address space is borrowed from the object,
            // so it lives as long as the object, which the file owns until `release`. The core does not use `f_mapping`
            // after `release`, and a mapping keeps its file.
            unsafe {
                (*file).f_mapping = object.address_space().mapping();
                (*file).private_data = Arc::into_raw(object).cast_mut().cast();
            }
            Ok(0)
        })
    }

    /// `release` of `struct file_operations`.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls once, when the last reference to an open file of this device is gone.
    unsafe extern "C" fn release(_inode: *mut bindings::inode, file: *mut bindings::file) -> ffi::c_int {
        // SAFETY: `open` stored a pointer from `Arc::into_raw()`. The core does not call another operation of the file
        // after `release`.
        T::close(unsafe { Arc::from_raw((*file).private_data.cast::<T>()) });
        0
    }

    /// `read` of `struct file_operations`.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls with an open file of this device.
    unsafe extern "C" fn read(
        file: *mut bindings::file,
        buf: *mut ffi::c_char,
        len: usize,
        _pos: *mut bindings::loff_t,
    ) -> isize {
        // SAFETY: The caller guarantees an open file of this device, and the borrow ends with this call.
        let (object, flags) = unsafe { (Self::object(file), (*file).f_flags) };
        let out = UserSlice::new(UserPtr::from_ptr(buf.cast()), len).writer();
        match T::read(object, out, flags & bindings::O_NONBLOCK != 0) {
            Ok(n) => n as isize,
            Err(e) => e.to_errno() as isize,
        }
    }

    /// `poll` of `struct file_operations`.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls with an open file of this device and a poll table that is null or valid for the call.
    unsafe extern "C" fn poll(file: *mut bindings::file, table: *mut bindings::poll_table_struct) -> u32 {
        // SAFETY: The caller guarantees an open file of this device. `poll()` does not use `fdget_pos()`, so this thread
        // has no active call of it.
        let (object, file) = unsafe { (Self::object(file), File::from_raw_file(file)) };
        // SAFETY: The caller guarantees that the table is null or valid for the call.
        T::poll(object, file, unsafe { PollTable::from_raw(table) })
    }

    /// `unlocked_ioctl` of `struct file_operations`.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls with an open file of this device.
    unsafe extern "C" fn ioctl(file: *mut bindings::file, cmd: ffi::c_uint, arg: ffi::c_ulong) -> ffi::c_long {
        // SAFETY: The caller guarantees an open file of this device, and the borrow ends with this call.
        let object = unsafe { Self::object(file) };
        match T::ioctl(object, cmd, UserPtr::from_addr(arg)) {
            Ok(()) => 0,
            Err(e) => e.to_errno() as ffi::c_long,
        }
    }

    /// `mmap` of `struct file_operations`. The mmap lock is held for writing.
    ///
    /// # Safety
    ///
    /// Only for the core, which calls with an open file of this device and the area that is being set up.
    unsafe extern "C" fn mmap(file: *mut bindings::file, vma: *mut bindings::vm_area_struct) -> ffi::c_int {
        // SAFETY: The caller guarantees an open file of this device, and the borrow ends with this call.
        let object = unsafe { Self::object(file) };
        from_result(|| {
            // SAFETY: The caller guarantees that this call sets up `vma`, which no other thread can reach yet.
            T::mmap(object, unsafe { NewMapping::from_raw(vma) })?;
            Ok(0)
        })
    }
}

#[pinned_drop]
impl<T: Operations> PinnedDrop for CharDeviceRegistration<T> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant the device is registered, and it is deregistered only here.
        unsafe { bindings::misc_deregister(self.device.get()) };
    }
}

/// `get_unmapped_area` of `struct file_operations`: aligns a new mapping like its offset.
///
/// The address and the file offset are the same modulo [`step`] of the length, so that page tables can use large entries.
/// An address that the program chose is left alone.
///
/// # Safety
///
/// Only for the core, which calls for an `mmap()` of `file` by the current process, with the mmap lock held for writing.
unsafe extern "C" fn unmapped_area(
    file: *mut bindings::file,
    addr: usize,
    len: usize,
    pgoff: usize,
    flags: usize,
) -> usize {
    let step = step(len);
    // An address hint or `MAP_FIXED` is the program's choice.
    let free = addr == 0 && flags & sys::P2PMEM_MAP_FIXED as usize == 0;
    if let Some(more) = len.checked_add(step - PAGE_SIZE).filter(|_| free) {
        // SAFETY: The caller guarantees what the core requires here: a file that the current process maps, and the mmap
        // lock.
        let at = unsafe { bindings::mm_get_unmapped_area(file, 0, more, pgoff, flags) };
        // An error value is not a multiple of the page size.
        if at % PAGE_SIZE == 0 {
            return at + ((pgoff << PAGE_SHIFT).wrapping_sub(at) & (step - 1));
        }
    }
    // SAFETY: The caller guarantees what the core requires here: a file that the current process maps, and the mmap lock.
    unsafe { bindings::mm_get_unmapped_area(file, addr, len, pgoff, flags) }
}
