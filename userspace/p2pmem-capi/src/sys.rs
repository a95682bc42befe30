// SPDX-License-Identifier: MIT OR Apache-2.0

//! The C interface, and the only module with `unsafe`. cbindgen generates p2pmem.h from this file, so its doc comments
//! are for readers of p2pmem.h.
#![allow(unsafe_code, non_camel_case_types)]

use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr::NonNull;

use p2pmem::{
    Access, Buffer, Device, DmaBuf, ExportOptions, Mapping, Pd, RegisterOptions, Registration, RegistrationMethod,
};
use p2pmem_c_sys::{copy_text, count, elements, input, last, output, run, store_all, take, text, Failure};
use p2pmem_verbs_sys::{ibv_mr, ibv_pd};

use crate::call::{self, providers, Want};

/// An open /dev/p2pmem, or another backend.
pub struct p2pmem_dev(Device);

/// A buffer.
pub struct p2pmem_buf(Buffer);

/// A buffer in the program's address space.
pub struct p2pmem_mapping(Mapping);

/// A buffer or a dma-buf registered with an RDMA NIC.
pub struct p2pmem_reg(Registration);

/// A dma-buf of any driver.
pub struct p2pmem_dmabuf(DmaBuf);

/// A request for an allocation. Set all fields to 0 first, then the needed ones.
#[repr(C)]
pub struct p2pmem_want {
    /// Size in bytes, rounded up to pages.
    pub size: u64,
    /// Alignment in the BAR in bytes: 0 (a page) or a power of two up to 1 GiB.
    pub align: u64,
    /// Names of the devices that will do DMA to the buffer: "mlx5_0", "nvme0", "0000:03:00.0".
    pub near_devices: *const *const c_char,
    /// Number of names, at most 64.
    pub nr_near: usize,
    /// Id of the required provider, or 0 for any.
    pub provider: u32,
    /// P2PMEM_WANT_* bits.
    pub flags: u32,
    /// The farthest path class allowed, P2PMEM_CLASS_*, or 0 for any.
    pub max_class: u32,
    /// For p2pmem_alloc_stripe() and p2pmem_explain(): 0 for one buffer, the number of providers that share the request
    /// (at most 16), or P2PMEM_PARTS_ALL. Must be 0 for p2pmem_alloc().
    pub parts: u32,
}

/// The provider is preferred, not required: another provider serves the request if this one cannot.
pub const P2PMEM_WANT_PREFER: u32 = 1;
/// The kernel's pci_p2pmem_find_many() chooses the provider.
pub const P2PMEM_WANT_UPSTREAM: u32 = 2;

/// As many parts as there are providers that can hold one.
pub const P2PMEM_PARTS_ALL: u32 = u32::MAX;

/// The same device.
pub const P2PMEM_CLASS_DEVICE: u32 = 1;
/// Below one PCIe switch.
pub const P2PMEM_CLASS_SWITCH: u32 = 2;
/// Below one root port.
pub const P2PMEM_CLASS_SWITCHES: u32 = 3;
/// Below one host bridge.
pub const P2PMEM_CLASS_HOST_BRIDGE: u32 = 4;
/// In one NUMA node.
pub const P2PMEM_CLASS_NUMA_NODE: u32 = 5;
/// Any path by which the devices can reach the provider.
pub const P2PMEM_CLASS_SYSTEM: u32 = 6;

/// A provider: a device with published memory.
#[repr(C)]
pub struct p2pmem_provider_info {
    /// Id of the provider, never 0.
    pub id: u32,
    /// P2PMEM_KIND_IS_*, or 0 if this library does not know the kind.
    pub kind: u32,
    /// P2PMEM_PROVIDER_IS_* bits.
    pub flags: u32,
    /// Number of live buffers in the provider.
    pub buffers: u32,
    /// Number of the BAR, or -1 if it is not known.
    pub bar: i32,
    /// NUMA node, or -1 if it is not known.
    pub numa_node: i32,
    /// Bytes that p2pmem manages.
    pub size: u64,
    /// Free bytes.
    pub free: u64,
    /// Size in bytes of a piece that one allocation can get now: `free` if one can get all of it, otherwise a lower bound.
    pub largest: u64,
    /// PCI address, such as "0000:03:00.0".
    pub address: [c_char; 24],
    /// Driver of the device, or "" if the device has none.
    pub driver: [c_char; 32],
}

/// A BAR that the administrator published.
pub const P2PMEM_KIND_IS_OWN: u32 = 1;
/// Memory that the device's own driver published in the kernel's pool.
pub const P2PMEM_KIND_IS_ADOPTED: u32 = 2;
/// Memory that the device's own driver registered with p2pmem.
pub const P2PMEM_KIND_IS_REGISTERED: u32 = 3;
/// A BAR of a device that is bound to vfio-pci.
pub const P2PMEM_KIND_IS_VFIO: u32 = 4;

/// The p2pmem module: all capabilities.
pub const P2PMEM_BACKEND_MODULE: c_uint = 1;
/// Memory that a driver published: the kernel's sysfs file p2pmem/allocate.
pub const P2PMEM_BACKEND_SYSFS: c_uint = 2;
/// BARs of devices that are bound to vfio-pci.
pub const P2PMEM_BACKEND_VFIO: c_uint = 3;

/// Buffers can be mapped.
pub const P2PMEM_CAN_MAP: c_uint = 1;
/// Direct I/O (O_DIRECT) between files and mappings.
pub const P2PMEM_CAN_DIRECT_IO: c_uint = 2;
/// Buffers can be exported as dma-bufs and registered with NICs.
pub const P2PMEM_CAN_DMABUF: c_uint = 4;
/// Rules of the administrator and of the program.
pub const P2PMEM_CAN_RULES: c_uint = 8;
/// Quotas.
pub const P2PMEM_CAN_QUOTAS: c_uint = 16;
/// Removing a provider does not wait for programs, and causes an event.
pub const P2PMEM_CAN_REVOKE: c_uint = 32;
/// Strategies other than nearest, and stripes.
pub const P2PMEM_CAN_PLACE: c_uint = 64;
/// Buffers can be passed to other processes, which can map them.
pub const P2PMEM_CAN_SHARE: c_uint = 128;
/// Memory is cleared before it gets a new owner.
pub const P2PMEM_CAN_CLEAR: c_uint = 256;

/// Buffers in the provider can be exported and registered.
pub const P2PMEM_PROVIDER_IS_EXPORTABLE: u32 = 1;
/// The memory has no struct pages: direct I/O does not work.
pub const P2PMEM_PROVIDER_IS_PAGELESS: u32 = 2;
/// The provider is being removed.
pub const P2PMEM_PROVIDER_IS_REMOVING: u32 = 4;

/// Importers that cannot be revoked are allowed too. The administrator must permit this for the provider.
pub const P2PMEM_EXPORT_IS_PINNED: c_uint = 1;

/// Registered as a dma-buf.
pub const P2PMEM_METHOD_DMABUF: c_int = 1;
/// Registered by its addresses with ibv_reg_mr(), through the kernel's peer-memory interface.
pub const P2PMEM_METHOD_PEER_MEMORY: c_int = 2;

/// Duplicates a descriptor of the program. Fails with EBADF for a number that is not a descriptor.
fn duplicate(fd: c_int) -> Result<OwnedFd, Failure> {
    // SAFETY: the call accepts every number, and accesses no memory of the program.
    let new = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if new < 0 {
        return Err(call::no_descriptor(fd, &io::Error::last_os_error()));
    }
    // SAFETY: the call succeeded, so the descriptor is open and new, and no other code knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}

/// Converts a request to its Rust form.
///
/// # Safety
///
/// The pointer must be null or valid. `near_devices` must have `nr_near` pointers, each null or a NUL-terminated
/// string.
unsafe fn want(want: *const p2pmem_want) -> Result<Want, Failure> {
    // SAFETY: the caller guarantees that the pointer is null or valid.
    let raw = unsafe { input(want, "want") }?;
    // SAFETY: the caller guarantees that there are `nr_near` names.
    let names = unsafe { elements(raw.near_devices, raw.nr_near, 64, "near_devices") }?;
    let mut near = Vec::new();
    for (n, name) in names.iter().enumerate() {
        // SAFETY: the caller guarantees that the name is null or a NUL-terminated string.
        let name = unsafe { text(*name) };
        near.push(name.ok_or_else(|| Failure::argument(format!("name {n} of near_devices is NULL")))?);
    }
    Ok(Want {
        size: raw.size,
        align: raw.align,
        provider: raw.provider,
        flags: raw.flags,
        max_class: raw.max_class,
        parts: raw.parts,
        near,
    })
}

/// Returns the version of the library, such as "0.1.0".
#[no_mangle]
pub extern "C" fn p2pmem_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Returns the message of the calling thread's last failed call: the operation, the errno, and the reason. Returns ""
/// before the first failure. The string is valid until the thread's next failed call.
#[no_mangle]
pub extern "C" fn p2pmem_last_error() -> *const c_char {
    last(false)
}

/// Returns the remedy for the calling thread's last failure, or "" if none is known. The string is valid until the
/// thread's next failed call.
#[no_mangle]
pub extern "C" fn p2pmem_last_remedy() -> *const c_char {
    last(true)
}

/// Opens the module's device at path. If path is NULL, opens /dev/p2pmem or, if the module is not loaded, another
/// backend that has memory on this machine. p2pmem_backend() returns the backend. A call that the backend does not
/// support fails with -EOPNOTSUPP.
///
/// Errors: -ENOENT (the module is not loaded, and no other backend has memory), -EACCES, -EPROTO (module and library
/// are of incompatible versions), -ENOTTY (the file is no p2pmem device).
///
/// # Safety
///
/// path must be NULL or a string, out valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_open(path: *const c_char, out: *mut *mut p2pmem_dev) -> c_int {
    run("p2pmem_open", || {
        // SAFETY: this function's contract.
        let out = unsafe { output(out, "out") }?;
        let device = if path.is_null() {
            Device::open()
        } else {
            // SAFETY: the path is not null, so it is a string (this function's contract).
            let path = unsafe { CStr::from_ptr(path) };
            Device::open_path(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(
                path.to_bytes(),
            ))
        };
        *out = Box::into_raw(Box::new(p2pmem_dev(device?)));
        Ok(0)
    })
}

/// Opens a backend, P2PMEM_BACKEND_*.
///
/// Errors: -EINVAL (no such backend), -ENODEV (the backend has no memory on this machine; p2pmem_last_remedy() returns
/// what the backend needs), -EACCES, -EBUSY, and the errors of p2pmem_open().
///
/// # Safety
///
/// out must be valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_open_backend(backend: c_uint, out: *mut *mut p2pmem_dev) -> c_int {
    run("p2pmem_open_backend", || {
        // SAFETY: this function's contract.
        let out = unsafe { output(out, "out") }?;
        *out = Box::into_raw(Box::new(p2pmem_dev(Device::open_backend(call::backend(backend)?)?)));
        Ok(0)
    })
}

/// Returns the backend of the device, P2PMEM_BACKEND_*.
///
/// # Safety
///
/// dev must be open.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_backend(dev: *const p2pmem_dev) -> c_int {
    run("p2pmem_backend", || {
        // SAFETY: this function's contract.
        Ok(call::backend_number(unsafe { input(dev, "dev") }?.0.backend()))
    })
}

/// Returns the capabilities of a backend, P2PMEM_CAN_* bits.
///
/// Errors: -EINVAL (no such backend).
#[no_mangle]
pub extern "C" fn p2pmem_capabilities(backend: c_uint) -> c_int {
    run("p2pmem_capabilities", || {
        Ok(call::capabilities(call::backend(backend)?))
    })
}

/// Closes the device. Buffers that are not freed yet keep the file open. NULL is allowed.
///
/// # Safety
///
/// dev must be NULL, or open and not in use.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_close(dev: *mut p2pmem_dev) {
    run("p2pmem_close", || {
        // SAFETY: this function's contract.
        drop(unsafe { take(dev) });
        Ok(0)
    });
}

/// Returns the device's file descriptor, which is readable while there are events. The device owns the descriptor.
///
/// Errors: -EINVAL (dev is NULL).
///
/// # Safety
///
/// dev must be open.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_fd(dev: *const p2pmem_dev) -> c_int {
    // SAFETY: this function's contract.
    run("p2pmem_fd", || Ok(unsafe { input(dev, "dev") }?.0.as_fd().as_raw_fd()))
}

/// Writes at most capacity providers to out. Returns the number of all providers, which can be
/// larger.
///
/// Errors: -EINVAL (dev or out is NULL), -ENOMEM.
///
/// # Safety
///
/// dev must be open, out valid for capacity elements (NULL if capacity is 0).
#[no_mangle]
pub unsafe extern "C" fn p2pmem_list(dev: *const p2pmem_dev, out: *mut p2pmem_provider_info, capacity: usize) -> c_int {
    run("p2pmem_list", || {
        // SAFETY: this function's contract.
        let all = providers(&unsafe { input(dev, "dev") }?.0)?;
        // SAFETY: this function's contract.
        unsafe { store_all(all, out, capacity, "out") }
    })
}

/// Allocates a buffer.
///
/// Errors: -EINVAL (an invalid request), -ENODEV (no provider can ever serve the request, or no such device), -ENOSPC
/// (the providers that could serve the request are full; the message names the users of their memory), -EACCES (rules
/// deny the memory), -EDQUOT (a quota or a limit of the cgroup would be exceeded), -EMFILE (too many buffers), -ENOMEM.
///
/// # Safety
///
/// dev must be open, want and its names valid, out valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_alloc(
    dev: *const p2pmem_dev,
    want: *const p2pmem_want,
    out: *mut *mut p2pmem_buf,
) -> c_int {
    run("p2pmem_alloc", || {
        // SAFETY: this function's contract.
        let (dev, want, out) = unsafe { (input(dev, "dev")?, self::want(want)?, output(out, "out")?) };
        *out = Box::into_raw(Box::new(p2pmem_buf(dev.0.alloc(&want.request()?)?)));
        Ok(0)
    })
}

/// Allocates a stripe: one buffer in each of want.parts providers, want.size bytes in total. The parts are equal,
/// except for the last one, which can be smaller. Their order is that of out. Allocates all parts or none. Each part is
/// freed, mapped, exported and registered separately. Returns the number of parts, at most capacity.
///
/// Errors: those of p2pmem_alloc(), if a part has no provider; -EINVAL also if want.parts is 0 or more than capacity.
///
/// # Safety
///
/// dev must be open, want and its names valid, out valid for capacity elements.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_alloc_stripe(
    dev: *const p2pmem_dev,
    want: *const p2pmem_want,
    out: *mut *mut p2pmem_buf,
    capacity: usize,
) -> c_int {
    run("p2pmem_alloc_stripe", || {
        // SAFETY: this function's contract.
        let (dev, want) = unsafe { (input(dev, "dev")?, self::want(want)?) };
        if out.is_null() {
            return Err(Failure::argument("out is NULL"));
        }
        let parts = dev.0.alloc_stripe(&want.stripe(capacity)?)?.into_parts();
        let there = parts.len();
        for (n, part) in parts.into_iter().enumerate() {
            // SAFETY: there are at most `capacity` parts, for which `out` is valid (this function's contract).
            unsafe { out.add(n).write(Box::into_raw(Box::new(p2pmem_buf(part)))) };
        }
        Ok(count(there))
    })
}

/// Creates a descriptor of a buffer for another process. The process receives the descriptor (SCM_RIGHTS) and imports
/// the buffer with p2pmem_import(). The descriptor is close-on-exec. The caller closes it; it holds the buffer until
/// then.
///
/// Errors: those of p2pmem_export().
///
/// # Safety
///
/// buf must be a buffer.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_share(buf: *const p2pmem_buf) -> c_int {
    run("p2pmem_share", || {
        // SAFETY: this function's contract.
        let shared = unsafe { input(buf, "buf") }?.0.share()?;
        Ok(OwnedFd::from(shared).into_raw_fd())
    })
}

/// Imports the buffer of a descriptor of p2pmem_share(). The caller still closes the descriptor. The memory is free
/// after all processes have freed the buffer.
///
/// Errors: -EBADF, -EINVAL (not a dma-buf), -EXDEV (another driver's dma-buf), -EACCES (a dma-buf of parts of a
/// buffer), -ENODEV (the buffer was revoked), -EMFILE (too many buffers), -ENOMEM.
///
/// # Safety
///
/// dev must be open, out valid. If fd is a descriptor, it must stay open during the call.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_import(dev: *const p2pmem_dev, fd: c_int, out: *mut *mut p2pmem_buf) -> c_int {
    run("p2pmem_import", || {
        // SAFETY: this function's contract.
        let (dev, out) = unsafe { (input(dev, "dev")?, output(out, "out")?) };
        let fd = duplicate(fd)?;
        *out = Box::into_raw(Box::new(p2pmem_buf(dev.0.import(fd.as_fd())?)));
        Ok(0)
    })
}

/// Frees a buffer. The memory is free once the buffer's mappings, dma-bufs and registrations have ended too. NULL is
/// allowed.
///
/// # Safety
///
/// buf must be NULL, or a buffer that is not in use.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_free(buf: *mut p2pmem_buf) {
    run("p2pmem_free", || {
        // SAFETY: this function's contract.
        drop(unsafe { take(buf) });
        Ok(0)
    });
}

/// Returns the buffer's size in bytes; 0 for NULL.
///
/// # Safety
///
/// buf must be NULL or a buffer.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_buf_size(buf: *const p2pmem_buf) -> u64 {
    // SAFETY: this function's contract.
    unsafe { buf.as_ref() }.map_or(0, |buf| buf.0.size())
}

/// Returns the id of the buffer's provider; 0 for NULL.
///
/// # Safety
///
/// buf must be NULL or a buffer.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_buf_provider(buf: *const p2pmem_buf) -> u32 {
    // SAFETY: this function's contract.
    unsafe { buf.as_ref() }.map_or(0, |buf| buf.0.provider())
}

/// Returns the offset in bytes of the buffer's first byte in the provider's BAR, for commands to the provider's DMA
/// engine; UINT64_MAX if the BAR is not known, and for NULL.
///
/// # Safety
///
/// buf must be NULL or a buffer.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_buf_bar_offset(buf: *const p2pmem_buf) -> u64 {
    // SAFETY: this function's contract.
    unsafe { buf.as_ref() }
        .and_then(|buf| buf.0.bar_offset())
        .unwrap_or(u64::MAX)
}

/// Maps a whole buffer for reading and writing. The mapping can outlive the buffer.
///
/// Errors: -EINVAL, -ENODEV (the buffer was revoked), -ENOMEM.
///
/// # Safety
///
/// buf must be a buffer, out valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_map(buf: *const p2pmem_buf, out: *mut *mut p2pmem_mapping) -> c_int {
    run("p2pmem_map", || {
        // SAFETY: this function's contract.
        let (buf, out) = unsafe { (input(buf, "buf")?, output(out, "out")?) };
        *out = Box::into_raw(Box::new(p2pmem_mapping(buf.0.map()?)));
        Ok(0)
    })
}

/// Unmaps a buffer. Registrations that use the mapping's addresses keep the memory mapped. NULL is allowed.
///
/// # Safety
///
/// map must be NULL, or a mapping that is not in use.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_unmap(map: *mut p2pmem_mapping) {
    run("p2pmem_unmap", || {
        // SAFETY: this function's contract.
        drop(unsafe { take(map) });
        Ok(0)
    });
}

/// Returns the address of the first byte; NULL for NULL. Use volatile pointers: devices change the memory at any time.
/// After the provider is removed, an access raises SIGBUS.
///
/// # Safety
///
/// map must be NULL or a mapping.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_map_addr(map: *const p2pmem_mapping) -> *mut c_void {
    // SAFETY: this function's contract.
    unsafe { map.as_ref() }.map_or(std::ptr::null_mut(), |map| map.0.as_ptr().cast())
}

/// Returns the length in bytes; 0 for NULL.
///
/// # Safety
///
/// map must be NULL or a mapping.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_map_len(map: *const p2pmem_mapping) -> usize {
    // SAFETY: this function's contract.
    unsafe { map.as_ref() }.map_or(0, |map| map.0.len())
}

/// Makes earlier writes through mappings visible to devices before any later access.
///
/// Errors: -EINVAL (map is NULL).
///
/// # Safety
///
/// map must be a mapping.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_flush(map: *const p2pmem_mapping) -> c_int {
    run("p2pmem_flush", || {
        // SAFETY: this function's contract.
        unsafe { input(map, "map") }?.0.flush();
        Ok(0)
    })
}

/// Exports length bytes of a buffer from offset as a dma-buf. Returns the descriptor, which is close-on-exec and which
/// the caller closes. offset and length are multiples of the page size; a length of 0 means the rest of the buffer.
/// flags: P2PMEM_EXPORT_IS_PINNED or 0.
///
/// Errors: -EINVAL, -ENODEV (the buffer was revoked), -EPERM (pinned, which the administrator does not allow),
/// -EOPNOTSUPP (memory of another driver whose BAR is not known), -EMFILE.
///
/// # Safety
///
/// buf must be a buffer.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_export(buf: *const p2pmem_buf, offset: u64, length: u64, flags: c_uint) -> c_int {
    run("p2pmem_export", || {
        // SAFETY: this function's contract.
        let buf = &unsafe { input(buf, "buf") }?.0;
        if flags & !P2PMEM_EXPORT_IS_PINNED != 0 {
            return Err(Failure::argument(format!("unknown flags {flags:#x}")));
        }
        let range = range(buf.size(), offset, length);
        let dmabuf = buf.export(
            &ExportOptions::new()
                .range(range)
                .pinned(flags & P2PMEM_EXPORT_IS_PINNED != 0),
        )?;
        Ok(OwnedFd::from(dmabuf).into_raw_fd())
    })
}

/// Returns a range of a buffer, in bytes. A length of 0 means up to the end of the buffer.
fn range(size: u64, offset: u64, length: u64) -> std::ops::Range<u64> {
    let end = if length == 0 {
        size
    } else {
        offset.saturating_add(length)
    };
    offset..end
}

/// Registers length bytes of a buffer from offset with the NIC of a protection domain. A length of 0 means up to the
/// end of the buffer. access: IBV_ACCESS_* bits.
///
/// On a stock kernel this exports the buffer as a dma-buf and registers the dma-buf. If the buffer is mapped, work
/// requests use the program's addresses of its bytes; otherwise the buffer's first byte has the address 0. The
/// registration holds the memory, even if the buffer is freed. The registration must end before the protection domain
/// does.
///
/// Errors: -EINVAL, -EOPNOTSUPP (the NIC's driver does not register dma-bufs, or no revocable ones), -EHOSTUNREACH (the
/// NIC cannot reach the provider), -ENODEV (the buffer was revoked), -ENOMEM, -ENOSYS (libibverbs is missing or too
/// old).
///
/// # Safety
///
/// buf must be a buffer, pd a protection domain of libibverbs.so.1, out valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_register(
    buf: *const p2pmem_buf,
    pd: *mut ibv_pd,
    offset: u64,
    length: u64,
    access: c_uint,
    out: *mut *mut p2pmem_reg,
) -> c_int {
    run("p2pmem_register", || {
        // SAFETY: this function's contract.
        let (buf, out) = unsafe { (input(buf, "buf")?, output(out, "out")?) };
        let pd = NonNull::new(pd).ok_or_else(|| Failure::argument("pd is NULL"))?;
        // SAFETY: the domain lives until the registration is ended (this function's contract).
        let pd = unsafe { Pd::from_raw(pd.cast()) }?;
        let what = RegisterOptions::new(Access::from_bits_retain(access)).range(range(buf.0.size(), offset, length));
        *out = Box::into_raw(Box::new(p2pmem_reg(buf.0.register_with(&pd, &what)?)));
        Ok(0)
    })
}

/// Accepts a dma-buf of any driver: from a GPU driver (CUDA's cuMemGetHandleForAddressRange()), vfio-pci, a heap, or a
/// buffer of another process. The caller still closes fd. device is the PCI address of the device that has the memory.
/// It can be NULL; p2pmem_dmabuf_path() then fails.
///
/// Errors: -EBADF, -EINVAL (fd is not a dma-buf, or device is not a PCI address), -EMFILE.
///
/// # Safety
///
/// device must be NULL or a string, out valid. If fd is a descriptor, it must stay open during the call.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_dmabuf_open(fd: c_int, device: *const c_char, out: *mut *mut p2pmem_dmabuf) -> c_int {
    run("p2pmem_dmabuf_open", || {
        // SAFETY: this function's contract.
        let out = unsafe { output(out, "out") }?;
        let fd = duplicate(fd)?;
        // SAFETY: this function's contract.
        let device = unsafe { text(device) };
        *out = Box::into_raw(Box::new(p2pmem_dmabuf(call::dmabuf(fd, device.as_deref())?)));
        Ok(0)
    })
}

/// Closes a dma-buf. Registrations of the dma-buf keep the memory. NULL is allowed.
///
/// # Safety
///
/// dmabuf must be NULL, or a dma-buf that is not in use.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_dmabuf_close(dmabuf: *mut p2pmem_dmabuf) {
    run("p2pmem_dmabuf_close", || {
        // SAFETY: this function's contract.
        drop(unsafe { take(dmabuf) });
        Ok(0)
    });
}

/// Returns the size of the dma-buf in bytes; 0 for NULL.
///
/// # Safety
///
/// dmabuf must be NULL or a dma-buf.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_dmabuf_size(dmabuf: *const p2pmem_dmabuf) -> u64 {
    // SAFETY: this function's contract.
    unsafe { dmabuf.as_ref() }.map_or(0, |dmabuf| dmabuf.0.size())
}

/// Writes the name of the driver that exported the memory, or "" if the name is not known. Writes at most capacity
/// bytes to text, including the NUL, and returns the length of the whole text, as snprintf() does.
///
/// # Safety
///
/// dmabuf must be a dma-buf, text valid for capacity bytes (NULL if capacity is 0).
#[no_mangle]
pub unsafe extern "C" fn p2pmem_dmabuf_exporter(
    dmabuf: *const p2pmem_dmabuf,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    run("p2pmem_dmabuf_exporter", || {
        // SAFETY: this function's contract.
        let exporter = unsafe { input(dmabuf, "dmabuf") }?.0.exporter().unwrap_or_default();
        // SAFETY: this function's contract.
        unsafe { copy_text(&exporter, text, capacity) }
    })
}

/// Returns the class of the path between the memory and a client, P2PMEM_CLASS_*. client is a name as in p2pmem_want. A
/// path through the root complex counts as reachable. If the client cannot reach the memory, the registration fails.
///
/// Errors: -EINVAL (the device that has the memory is not known), -ENODEV (a device does not exist).
///
/// # Safety
///
/// dmabuf must be a dma-buf, client a string.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_dmabuf_path(dmabuf: *const p2pmem_dmabuf, client: *const c_char) -> c_int {
    run("p2pmem_dmabuf_path", || {
        // SAFETY: this function's contract.
        let (dmabuf, client) = unsafe { (input(dmabuf, "dmabuf")?, text(client)) };
        let client = client.ok_or_else(|| Failure::argument("client is NULL"))?;
        call::path_class(&dmabuf.0, &client)
    })
}

/// Registers length bytes of a dma-buf from offset with the NIC of a protection domain; a length of 0 means the rest.
/// Work requests use offset as the address of the first byte. access: IBV_ACCESS_* bits. The registration must end
/// before the protection domain does.
///
/// Errors: -EINVAL, -EOPNOTSUPP (the NIC's driver does not register dma-bufs, or the exporter refuses importers that it
/// cannot revoke), -EHOSTUNREACH or -EREMOTEIO (the NIC cannot reach the memory), -ENODEV (the memory was revoked),
/// -ENOMEM, -ENOSYS (libibverbs is not installed, or too old).
///
/// # Safety
///
/// dmabuf must be a dma-buf, pd a protection domain of libibverbs.so.1, out valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_dmabuf_register(
    dmabuf: *const p2pmem_dmabuf,
    pd: *mut ibv_pd,
    offset: u64,
    length: u64,
    access: c_uint,
    out: *mut *mut p2pmem_reg,
) -> c_int {
    run("p2pmem_dmabuf_register", || {
        // SAFETY: this function's contract.
        let (dmabuf, out) = unsafe { (input(dmabuf, "dmabuf")?, output(out, "out")?) };
        let pd = NonNull::new(pd).ok_or_else(|| Failure::argument("pd is NULL"))?;
        // SAFETY: the domain lives until the registration is ended (this function's contract).
        let pd = unsafe { Pd::from_raw(pd.cast()) }?;
        let range = range(dmabuf.0.size(), offset, length);
        let what = RegisterOptions::new(Access::from_bits_retain(access)).range(range);
        *out = Box::into_raw(Box::new(p2pmem_reg(dmabuf.0.register_with(&pd, &what)?)));
        Ok(0)
    })
}

/// Ends a registration. reg is invalid afterwards, also after an error. NULL is allowed.
///
/// Errors: -EIO (memory windows are bound to the region).
///
/// # Safety
///
/// reg must be NULL, or a registration that no outstanding work request uses.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_deregister(reg: *mut p2pmem_reg) -> c_int {
    run("p2pmem_deregister", || {
        // SAFETY: this function's contract.
        if let Some(reg) = unsafe { take(reg) } {
            reg.0.deregister()?;
        }
        Ok(0)
    })
}

/// Returns the local key, for work requests of this side; 0 for NULL.
///
/// # Safety
///
/// reg must be NULL or a registration.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_reg_lkey(reg: *const p2pmem_reg) -> u32 {
    // SAFETY: this function's contract.
    unsafe { reg.as_ref() }.map_or(0, |reg| reg.0.lkey())
}

/// Returns the remote key, for work requests of the remote side; 0 for NULL.
///
/// # Safety
///
/// reg must be NULL or a registration.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_reg_rkey(reg: *const p2pmem_reg) -> u32 {
    // SAFETY: this function's contract.
    unsafe { reg.as_ref() }.map_or(0, |reg| reg.0.rkey())
}

/// Returns the address of the first byte in work requests; 0 for NULL.
///
/// # Safety
///
/// reg must be NULL or a registration.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_reg_addr(reg: *const p2pmem_reg) -> u64 {
    // SAFETY: this function's contract.
    unsafe { reg.as_ref() }.map_or(0, |reg| reg.0.addr())
}

/// Returns the length in bytes; 0 for NULL.
///
/// # Safety
///
/// reg must be NULL or a registration.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_reg_len(reg: *const p2pmem_reg) -> usize {
    // SAFETY: this function's contract.
    unsafe { reg.as_ref() }.map_or(0, |reg| reg.0.len())
}

/// Returns the method of the registration, P2PMEM_METHOD_*; 0 for NULL.
///
/// # Safety
///
/// reg must be NULL or a registration.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_reg_method(reg: *const p2pmem_reg) -> c_int {
    // SAFETY: this function's contract.
    unsafe { reg.as_ref() }.map_or(0, |reg| match reg.0.method() {
        RegistrationMethod::DmaBuf => P2PMEM_METHOD_DMABUF,
        RegistrationMethod::PeerMemory => P2PMEM_METHOD_PEER_MEMORY,
        _ => 0,
    })
}

/// Returns the memory region, which the registration owns: do not deregister it. NULL for NULL.
///
/// # Safety
///
/// reg must be NULL or a registration.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_reg_mr(reg: *const p2pmem_reg) -> *mut ibv_mr {
    // SAFETY: this function's contract.
    unsafe { reg.as_ref() }.map_or(std::ptr::null_mut(), |reg| reg.0.as_ptr().cast())
}

/// Explains which provider p2pmem_alloc() would choose for this request and why, with one line for each provider.
/// Allocates nothing. Writes at most capacity bytes to text, including the NUL, and returns the length of the whole
/// text in bytes without the NUL, as snprintf() does.
///
/// Errors: -EINVAL (an invalid request), -ENODEV (no such device). A request that no provider can serve is not an
/// error.
///
/// # Safety
///
/// dev must be open, want and its names valid, text valid for capacity bytes (NULL if capacity is 0).
#[no_mangle]
pub unsafe extern "C" fn p2pmem_explain(
    dev: *const p2pmem_dev,
    want: *const p2pmem_want,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    run("p2pmem_explain", || {
        // SAFETY: this function's contract.
        let (dev, want) = unsafe { (input(dev, "dev")?, self::want(want)?) };
        let lines = dev.0.explain(&want.request()?)?.lines().join("\n");
        // SAFETY: this function's contract.
        unsafe { copy_text(&lines, text, capacity) }
    })
}

/// Explains the last allocation through this device, or a later failure, as p2pmem_explain() does.
///
/// Errors: -ENODATA (there is none yet).
///
/// # Safety
///
/// dev must be open, text valid for capacity bytes (NULL if capacity is 0).
#[no_mangle]
pub unsafe extern "C" fn p2pmem_explain_last(dev: *const p2pmem_dev, text: *mut c_char, capacity: usize) -> c_int {
    run("p2pmem_explain_last", || {
        // SAFETY: this function's contract.
        let lines = unsafe { input(dev, "dev") }?.0.explain_last()?.lines().join("\n");
        // SAFETY: this function's contract.
        unsafe { copy_text(&lines, text, capacity) }
    })
}
