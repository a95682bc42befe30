// SPDX-License-Identifier: MIT OR Apache-2.0

//! The replacements of `mmap()` and `mmap64()`, allocation through a program's own file, and the start of the library.

use std::ffi::{c_int, c_void, CStr};
use std::fs::OpenOptions;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use p2pmem_near::{SIZE, WORDS};
use p2pmem_sys as abi;

use super::{Device, Errno, Fd};
use crate::line::MAX_LINE;
use crate::{place, summary};

/// A descriptor of the program, which the shim does not close.
pub(crate) struct OpenFile(ManuallyDrop<Device>);

/// A descriptor of the program that was open on p2pmem's device when [`OpenFile::p2pmem`] examined it. If the program has
/// replaced the file since, the ioctls here reach another driver, which rejects them by their type.
pub(crate) struct P2pmemFile(ManuallyDrop<Device>);

/// Returns the device number of a character device; `None` for other files.
fn device_number(stat: impl FnOnce(*mut libc::stat) -> c_int) -> Option<libc::dev_t> {
    let mut found = std::mem::MaybeUninit::<libc::stat>::uninit();
    if stat(found.as_mut_ptr()) != 0 {
        return None;
    }
    // SAFETY: the call succeeded, so it has filled the structure.
    let found = unsafe { found.assume_init() };
    (found.st_mode & libc::S_IFMT == libc::S_IFCHR).then_some(found.st_rdev)
}

impl OpenFile {
    fn new(fd: c_int) -> Self {
        Self(ManuallyDrop::new(Device(Fd(fd))))
    }

    /// Returns the file if it is open on p2pmem's device, at any path.
    pub(crate) fn p2pmem(self) -> Option<P2pmemFile> {
        self.is_p2pmem().then_some(P2pmemFile(self.0))
    }

    fn is_p2pmem(&self) -> bool {
        /// The major number of misc devices (`include/uapi/linux/major.h`).
        const MISC_MAJOR: u32 = 10;
        // SAFETY: fstat() writes one structure, and fails for a descriptor that is not open.
        let Some(number) = device_number(|stat| unsafe { libc::fstat(self.0 .0 .0, stat) }) else {
            return false;
        };
        if libc::major(number) as u32 != MISC_MAJOR {
            return false;
        }
        let mut info = abi::p2pmem_info::default();
        // SAFETY: the module writes one structure, which contains no addresses. Drivers of other misc devices reject the call,
        // because they do not have the type of p2pmem's ioctls.
        if unsafe { self.0.ioctl(abi::P2PMEM_IOC_INFO, &mut info) }.is_ok() {
            return true;
        }
        // A filter of system calls may reject the ioctl. The allocation then fails, and does not go to other memory.
        // SAFETY: as above; the path is NUL-terminated.
        device_number(|stat| unsafe { libc::stat(c"/dev/p2pmem".as_ptr(), stat) }) == Some(number)
    }
}

impl P2pmemFile {
    /// Allocates a buffer near `clients`.
    pub(crate) fn allocate(&self, size: u64, clients: &[abi::p2pmem_pci_addr]) -> Result<Allocated, Errno> {
        let mut alloc = abi::p2pmem_alloc {
            req: abi::p2pmem_request {
                size,
                clients: clients.as_ptr() as u64,
                nr_clients: u32::try_from(clients.len()).map_err(|_| Errno(libc::E2BIG))?,
                client_size: size_of::<abi::p2pmem_pci_addr>() as u32,
                strategy: abi::P2PMEM_STRATEGY_NEAREST,
                ..Default::default()
            },
            ..Default::default()
        };
        // SAFETY: the file is p2pmem's (see the type), whose module only reads the clients at the one address in the
        // structure. `clients` is borrowed until the call returns.
        unsafe { self.0.ioctl(abi::P2PMEM_IOC_ALLOC, &mut alloc) }?;
        Ok(Allocated {
            file: Self(ManuallyDrop::new(Device(Fd(self.0 .0 .0)))),
            alloc,
        })
    }

    /// As [`Device::reason`].
    pub(crate) fn reason<'a>(&self, errno: Errno, capacity: &'a mut [u8; MAX_LINE]) -> &'a str {
        self.0.reason(errno, capacity)
    }
}

/// A buffer that a handle of the program's file holds. Dropping it closes the handle.
pub(crate) struct Allocated {
    file: P2pmemFile,
    alloc: abi::p2pmem_alloc,
}

impl Allocated {
    /// Returns the offset at which the file maps the buffer.
    pub(crate) fn mmap_offset(&self) -> u64 {
        self.alloc.mmap_offset
    }

    /// Returns the provider's id, the number of the path class, and the size of the buffer.
    pub(crate) fn place(&self) -> (u32, u32, u64) {
        (self.alloc.provider, self.alloc.class, self.alloc.size)
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        let errno = Errno::last();
        let mut free = abi::p2pmem_free {
            handle: self.alloc.handle,
            flags: 0,
        };
        // Fails only if another thread of the program has closed the descriptor during the call. The handle then ends with
        // the file.
        // SAFETY: the structure contains no addresses.
        let _ = unsafe { self.file.0.ioctl(abi::P2PMEM_IOC_FREE, &mut free) };
        errno.set();
    }
}

/// Maps the first [`WORDS`] words of a file for as long as the process lives.
pub(crate) fn shared_words(path: &Path) -> Result<&'static [AtomicU64; WORDS], Errno> {
    let errno = |error: std::io::Error| Errno(error.raw_os_error().unwrap_or(libc::EIO));
    // The path may name another file by now. Opening it must neither wait nor have another effect.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags)
        .open(path)
        .map_err(errno)?;
    let known = file.metadata().map_err(errno)?;
    if !known.is_file() || known.len() != SIZE as u64 {
        return Err(Errno(libc::EINVAL));
    }
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let found = unsafe {
        kernel_mmap(
            std::ptr::null_mut(),
            SIZE,
            access,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if found == libc::MAP_FAILED {
        return Err(Errno::last());
    }
    // SAFETY: the mapping has the alignment of a page and is never unmapped. `p2pmemctl run` has sealed the file's size; if
    // another file is truncated, an access raises SIGBUS and reads nothing. All programs access the words by atomic
    // operations only.
    Ok(unsafe { &*found.cast() })
}

type Mmap = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, libc::off64_t) -> *mut c_void;

/// The `mmap()` that the program would call without the shim.
struct Next {
    name: &'static CStr,
    /// Null before the library has started: the system call is used.
    found: AtomicPtr<c_void>,
}

static MMAP: Next = Next::new(c"mmap");
static MMAP64: Next = Next::new(c"mmap64");

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self {
            name,
            found: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// Looks the function up. `mmap()` itself does not, because memory allocators call it with their locks held, and
    /// `dlsym()` may allocate.
    fn find(&self) {
        // SAFETY: the name is NUL-terminated.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
    }

    fn get(&self) -> Mmap {
        let found = self.found.load(Ordering::Relaxed);
        if found.is_null() {
            return kernel_mmap;
        }
        // SAFETY: both functions have this type where offsets have 64 bits, and `find()` is called only there.
        unsafe { std::mem::transmute::<*mut c_void, Mmap>(found) }
    }
}

/// The system call.
///
/// # Safety
///
/// As for `mmap()`.
unsafe extern "C" fn kernel_mmap(
    addr: *mut c_void,
    length: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off64_t,
) -> *mut c_void {
    #[cfg(target_pointer_width = "64")]
    // SAFETY: the caller's guarantee covers the same arguments.
    let found = unsafe { libc::syscall(libc::SYS_mmap, addr, length, prot, flags, fd, offset) };
    #[cfg(not(target_pointer_width = "64"))]
    // SAFETY: the caller's guarantee covers the same arguments. The unit of the offset is 4096 bytes.
    let found = unsafe {
        libc::syscall(
            libc::SYS_mmap2,
            addr,
            length,
            prot,
            flags,
            fd,
            (offset / 4096) as libc::c_long,
        )
    };
    found as *mut c_void
}

/// Performs an `mmap()`. A shared mapping of p2pmem's device at offset 0 is placed; all other calls go to `next`.
///
/// # Safety
///
/// As for `mmap()`.
unsafe fn map_or_forward(
    next: &Next,
    addr: *mut c_void,
    length: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off64_t,
) -> *mut c_void {
    let forward = |offset| {
        // SAFETY: the caller's guarantee covers the same arguments. At another offset, p2pmem's device maps memory that the
        // program does not have yet.
        unsafe { next.get()(addr, length, prot, flags, fd, offset) }
    };
    let shared = matches!(flags & libc::MAP_TYPE, libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE);
    if offset != 0 || fd < 0 || length == 0 || !shared || flags & libc::MAP_ANONYMOUS != 0 {
        return forward(offset);
    }
    let before = Errno::last();
    match place::place(OpenFile::new(fd), length) {
        None => {
            before.set();
            forward(offset)
        }
        Some(Err(errno)) => {
            errno.set();
            libc::MAP_FAILED
        }
        Some(Ok(placed)) => {
            // The module's offsets fit: the kernel limits files to the largest signed number.
            let mapped = forward(placed.mmap_offset() as libc::off64_t);
            if mapped == libc::MAP_FAILED {
                let errno = Errno::last();
                placed.not_mapped(errno);
                errno.set();
            } else {
                placed.mapped();
                before.set();
            }
            mapped
        }
    }
}

/// Replacement for the function of the C library.
///
/// # Safety
///
/// As for the function of the C library.
#[no_mangle]
pub unsafe extern "C" fn mmap(
    addr: *mut c_void,
    length: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    // SAFETY: the caller's guarantee covers the same arguments.
    #[allow(clippy::useless_conversion)]
    unsafe {
        map_or_forward(&MMAP, addr, length, prot, flags, fd, offset.into())
    }
}

/// Replacement for the function of the C library.
///
/// # Safety
///
/// As for the function of the C library.
#[no_mangle]
pub unsafe extern "C" fn mmap64(
    addr: *mut c_void,
    length: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off64_t,
) -> *mut c_void {
    // SAFETY: the caller's guarantee covers the same arguments.
    unsafe { map_or_forward(&MMAP64, addr, length, prot, flags, fd, offset) }
}

/// Called by the dynamic linker when the library is loaded, before the program's own code runs.
extern "C" fn start() {
    // With 32-bit offsets, the functions have different types, and the offsets of buffers do not fit. The system call is
    // used there.
    if cfg!(target_pointer_width = "64") {
        MMAP.find();
        MMAP64.find();
    }
    place::start();
    summary::start();
}

#[used]
#[link_section = ".init_array"]
static START: extern "C" fn() = start;
