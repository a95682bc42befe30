// SPDX-License-Identifier: MIT OR Apache-2.0

//! The replacement functions, the real libibverbs functions, and the device file: the only module with `unsafe`.
#![allow(unsafe_code)]

pub(crate) mod mapping;

use std::ffi::{c_int, c_uint, c_void, CStr};
use std::fmt;

use p2pmem_near::Registered;
use p2pmem_sys as abi;
use p2pmem_verbs_sys as ibv;

use crate::line::MAX_LINE;
use crate::{explain_failure, register, rereg_is_refused, summary, Call};

/// A positive errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) c_int);

impl Errno {
    /// Returns the errno of the last system or library call of this thread.
    fn last() -> Self {
        // SAFETY: the address of errno is valid in every thread.
        Self(unsafe { *libc::__errno_location() })
    }

    fn set(self) {
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = self.0 }
    }
}

/// Returns the page size in bytes.
pub(crate) fn page_size() -> u64 {
    // SAFETY: sysconf() reads a constant of the process.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Writes to standard error by one call; ignores a short write.
pub(crate) fn write_stderr(bytes: &[u8]) {
    // SAFETY: the bytes are read only. An error means that standard error is closed, and cannot be reported.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
}

/// Returns an environment variable.
pub(crate) fn environment(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: the name is NUL-terminated. The value is valid until the program changes the variable. A program must not
    // do so while a thread registers memory, because libibverbs reads its environment, too.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value))
    }
}

/// A file descriptor that is closed on drop.
pub(crate) struct Fd(c_int);

impl Drop for Fd {
    fn drop(&mut self) {
        let errno = Errno::last();
        // SAFETY: this object owns the descriptor.
        unsafe { libc::close(self.0) };
        errno.set();
    }
}

/// An open /dev/p2pmem.
pub(crate) struct Device(Fd);

impl Device {
    pub(crate) fn open() -> Result<Self, Errno> {
        // SAFETY: the path is NUL-terminated.
        match unsafe { libc::open(c"/dev/p2pmem".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) } {
            -1 => Err(Errno::last()),
            fd => Ok(Self(Fd(fd))),
        }
    }

    /// # Safety
    ///
    /// `request` must be an ioctl of p2pmem for a `T`, and addresses in `argument` must be valid for this ioctl.
    unsafe fn ioctl<T>(&self, request: u32, argument: &mut T) -> Result<(), Errno> {
        loop {
            // SAFETY: the caller guarantees the argument.
            match unsafe { libc::ioctl(self.0 .0, request as _, std::ptr::from_mut(argument)) } {
                0.. => return Ok(()),
                _ if Errno::last() == Errno(libc::EINTR) => {}
                _ => return Err(Errno::last()),
            }
        }
    }

    /// Exports whole pages of this process as a dma-buf.
    pub(crate) fn export(&self, start: u64, size: u64) -> Result<Fd, Errno> {
        let range = abi::p2pmem_range { offset: start, size };
        let mut export = abi::p2pmem_export {
            ranges: std::ptr::from_ref(&range) as u64,
            nr_ranges: 1,
            flags: abi::P2PMEM_EXPORT_MAPPED,
            fd: -1,
            range_size: size_of::<abi::p2pmem_range>() as u32,
            ..Default::default()
        };
        // SAFETY: the only address is that of one range, which the module reads.
        unsafe { self.ioctl(abi::P2PMEM_IOC_EXPORT_DMABUF, &mut export) }?;
        Ok(Fd(export.fd))
    }

    /// Returns the errno of the last refusal through this file, and the length of its message in `text`.
    fn last(&self, text: &mut [u8]) -> Option<(Errno, usize)> {
        let mut explain = abi::p2pmem_explain {
            text: text.as_mut_ptr() as u64,
            text_len: u32::try_from(text.len()).ok()?,
            flags: abi::P2PMEM_EXPLAIN_LAST,
            ..Default::default()
        };
        // SAFETY: the module writes at most `text_len` bytes of the text, and no verdicts, as their number is 0.
        unsafe { self.ioctl(abi::P2PMEM_IOC_EXPLAIN, &mut explain) }.ok()?;
        let end = text.iter().position(|byte| *byte == 0)?;
        Some((Errno(i32::try_from(explain.error).ok()?), end))
    }

    /// Returns the message of the last refusal through this file, after a colon. Empty if the refusal had another errno than
    /// `errno`, so that the message belongs to another call, or if there is none.
    pub(crate) fn reason<'a>(&self, errno: Errno, capacity: &'a mut [u8; MAX_LINE]) -> &'a str {
        capacity[..2].copy_from_slice(b": ");
        match self.last(&mut capacity[2..]) {
            Some((last, len)) if last == errno && len > 0 => {
                std::str::from_utf8(&capacity[..2 + len]).unwrap_or_default()
            }
            _ => "",
        }
    }
}

/// Returns whether an address is in a mapping of /dev/p2pmem, by /proc/self/maps. Slow; only for error messages.
pub(crate) fn is_p2pmem_mapping(address: u64) -> bool {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else {
        return false;
    };
    maps.lines().filter(|line| line.ends_with("/dev/p2pmem")).any(|line| {
        let mut ends = line.split([' ', '-']).map(|end| u64::from_str_radix(end, 16));
        matches!((ends.next(), ends.next()), (Some(Ok(start)), Some(Ok(end))) if (start..end).contains(&address))
    })
}

/// The protection domain of a program's call.
///
/// # Invariants
///
/// The pointer is the argument of a libibverbs function, which must be a valid domain.
#[derive(Clone, Copy)]
pub(crate) struct Domain(*mut ibv::ibv_pd);

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(name) = real::<ibv::ibv_get_device_name>(&GET_DEVICE_NAME, *self) else {
            return f.write_str("a NIC");
        };
        // SAFETY: the domain is valid (type invariant), so it has an open device, whose name is a NUL-terminated string.
        let name = unsafe { CStr::from_ptr(name((*(*self.0).context).device)) };
        f.write_str(name.to_str().unwrap_or("a NIC"))
    }
}

/// A new memory region.
pub(crate) struct Region(*mut ibv::ibv_mr);

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: the region is valid, and the program has not received it yet.
        let (lkey, rkey) = unsafe { ((*self.0).lkey, (*self.0).rkey) };
        write!(f, "lkey {lkey:#x}, rkey {rkey:#x}")
    }
}

impl Domain {
    /// Returns the library of the NIC's driver, which is linked to the libibverbs that has the domain.
    fn driver(self) -> Option<Library> {
        // SAFETY: the domain is valid (type invariant), so it has an open device.
        let function = unsafe { (*(*self.0).context).poll_cq };
        let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
        // SAFETY: the call only compares the address with those of loaded libraries, and fills the structure if it returns
        // another value than 0.
        if function.is_null() || unsafe { libc::dladdr(function, info.as_mut_ptr()) } == 0 {
            return None;
        }
        // SAFETY: filled by the call. The file name is a NUL-terminated string while the library is loaded, and the library
        // has functions of an open device.
        loaded(unsafe { CStr::from_ptr(info.assume_init().dli_fname) })
    }

    /// Registers the bytes of a call; they start at `offset` of the dma-buf.
    pub(crate) fn reg_dmabuf(self, dmabuf: &Fd, offset: u64, call: &Call, access: u32) -> Result<Region, Errno> {
        let reg = real::<ibv::ibv_reg_dmabuf_mr>(&REG_DMABUF_MR, self).ok_or(Errno(libc::ENOSYS))?;
        Errno(0).set();
        // SAFETY: the domain is valid (type invariant), and the descriptor is open. The flags fit: bit 29 is the highest.
        let mr = unsafe { reg(self.0, offset, call.length, call.iova, dmabuf.0, access as c_int) };
        if mr.is_null() {
            return Err(match Errno::last() {
                Errno(0) => Errno(libc::EIO),
                errno => errno,
            });
        }
        // SAFETY: libibverbs created the region above. Programs expect the registered address in this field.
        unsafe { (*mr).addr = call.addr as *mut c_void };
        Ok(Region(mr))
    }
}

/// A function of the real libibverbs: name and symbol version.
struct Symbol {
    name: &'static CStr,
    version: &'static CStr,
}

impl Symbol {
    const fn new(name: &'static CStr, version: &'static CStr) -> Self {
        Self { name, version }
    }

    /// Returns the function of the libibverbs that has the domain. A process can have several, because wheels contain their
    /// own copy with a changed file name. Objects of one copy must not be passed to another.
    fn find(&self, domain: Domain) -> *mut c_void {
        let found = domain.driver().map(|driver| self.find_in(driver));
        if let Some(found) = found.filter(|found| !found.is_null()) {
            return found;
        }
        // SAFETY: names are NUL-terminated.
        let next = unsafe { libc::dlvsym(libc::RTLD_NEXT, self.name.as_ptr(), self.version.as_ptr()) };
        if next.is_null() {
            // The program is not linked to libibverbs; a plugin of the program has loaded libibverbs.
            return loaded(ibv::LIBRARY).map_or(next, |library| self.find_in(library));
        }
        next
    }

    /// Returns the function of this name in a library or in the libraries that it is linked to; null if there is none.
    fn find_in(&self, library: Library) -> *mut c_void {
        // SAFETY: names are NUL-terminated, and the handle is never closed (type invariant).
        unsafe { libc::dlvsym(library.0, self.name.as_ptr(), self.version.as_ptr()) }
    }
}

/// A loaded library.
///
/// # Invariants
///
/// The handle is one of dlopen(), and is never closed.
#[derive(Clone, Copy)]
struct Library(*mut c_void);

/// Returns the library of this file name if it is loaded.
fn loaded(name: &CStr) -> Option<Library> {
    // SAFETY: the name is NUL-terminated. The call runs no code of a library, because it loads none.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    // INVARIANT: a handle of dlopen().
    (!handle.is_null()).then_some(Library(handle))
}

static GET_DEVICE_NAME: Symbol = Symbol::new(ibv::name::GET_DEVICE_NAME, c"IBVERBS_1.1");
static REG_MR: Symbol = Symbol::new(ibv::name::REG_MR, c"IBVERBS_1.1");
static REG_MR_IOVA: Symbol = Symbol::new(ibv::name::REG_MR_IOVA, c"IBVERBS_1.7");
static REG_MR_IOVA2: Symbol = Symbol::new(ibv::name::REG_MR_IOVA2, c"IBVERBS_1.8");
static REG_DMABUF_MR: Symbol = Symbol::new(ibv::name::REG_DMABUF_MR, c"IBVERBS_1.12");
static REREG_MR: Symbol = Symbol::new(ibv::name::REREG_MR, c"IBVERBS_1.1");

/// Returns the real function for objects of the domain. `F` must be its type: each static above is used with the type of the
/// same name.
fn real<F: Copy>(symbol: &Symbol, domain: Domain) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let found = symbol.find(domain);
    // SAFETY: not null, so this is the function of that name and version, whose type is `F` (a test of p2pmem-verbs-sys
    // compares the types with the header). All function pointers have the same size.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy(&found) })
}

/// Performs a registration: p2pmem memory as a dma-buf, other memory by the real function.
///
/// # Safety
///
/// `pd` must be a valid domain of libibverbs.
unsafe fn register_or_forward(
    pd: *mut ibv::ibv_pd,
    call: &Call,
    original: impl FnOnce(Domain) -> *mut ibv::ibv_mr,
) -> *mut ibv::ibv_mr {
    let before = Errno::last();
    // INVARIANT: the caller guarantees a valid domain.
    let domain = Domain(pd);
    match register(call, domain) {
        Some(Ok(region)) => {
            before.set();
            region.0
        }
        Some(Err(errno)) => {
            errno.set();
            std::ptr::null_mut()
        }
        None => {
            before.set();
            let mr = original(domain);
            if mr.is_null() {
                let errno = Errno::last();
                explain_failure(call, domain);
                errno.set();
            } else {
                summary::registration(Registered::OtherMemory, call.length);
            }
            mr
        }
    }
}

/// Result if the real function does not exist. A program linked to such a libibverbs cannot call the function.
fn missing() -> *mut ibv::ibv_mr {
    Errno(libc::ENOSYS).set();
    std::ptr::null_mut()
}

/// Replacement for the libibverbs function of this name.
///
/// # Safety
///
/// As for the libibverbs function.
#[no_mangle]
pub unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv::ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv::ibv_mr {
    let call = Call {
        name: "ibv_reg_mr",
        addr: addr as u64,
        length,
        iova: addr as u64,
        access: access as u32,
    };
    // SAFETY: the caller's guarantee covers the same arguments.
    unsafe {
        register_or_forward(pd, &call, |domain| {
            real::<ibv::ibv_reg_mr>(&REG_MR, domain).map_or_else(missing, |real| real(pd, addr, length, access))
        })
    }
}

/// Replacement for the libibverbs function of this name.
///
/// # Safety
///
/// As for the libibverbs function.
#[no_mangle]
pub unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv::ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv::ibv_mr {
    let call = Call {
        name: "ibv_reg_mr_iova",
        addr: addr as u64,
        length,
        iova,
        access: access as u32,
    };
    // SAFETY: the caller's guarantee covers the same arguments.
    unsafe {
        register_or_forward(pd, &call, |domain| {
            real::<ibv::ibv_reg_mr_iova>(&REG_MR_IOVA, domain)
                .map_or_else(missing, |real| real(pd, addr, length, iova, access))
        })
    }
}

/// Replacement for the libibverbs function of this name.
///
/// # Safety
///
/// As for the libibverbs function.
#[no_mangle]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv::ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv::ibv_mr {
    let call = Call {
        name: "ibv_reg_mr_iova2",
        addr: addr as u64,
        length,
        iova,
        access,
    };
    // SAFETY: the caller's guarantee covers the same arguments.
    unsafe {
        register_or_forward(pd, &call, |domain| {
            real::<ibv::ibv_reg_mr_iova2>(&REG_MR_IOVA2, domain)
                .map_or_else(missing, |real| real(pd, addr, length, iova, access))
        })
    }
}

/// Replacement for the libibverbs function of this name.
///
/// # Safety
///
/// As for the libibverbs function.
#[no_mangle]
pub unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv::ibv_mr,
    flags: c_int,
    pd: *mut ibv::ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    /// `IBV_REREG_MR_CHANGE_TRANSLATION`
    const TRANSLATION: c_int = 1;
    let before = Errno::last();
    // SAFETY: the caller guarantees a valid region, and a valid region has a valid domain.
    let (old, domain) = unsafe { (((*mr).addr as u64, (*mr).length), Domain((*mr).pd)) };
    let new = (flags & TRANSLATION != 0).then_some((addr as u64, length));
    if rereg_is_refused(old, new, domain) {
        Errno(libc::EOPNOTSUPP).set();
        return ibv::IBV_REREG_MR_ERR_INPUT;
    }
    before.set();
    match real::<ibv::ibv_rereg_mr>(&REREG_MR, domain) {
        // SAFETY: the caller's guarantee covers the same arguments.
        Some(real) => unsafe { real(mr, flags, pd, addr, length, access) },
        None => {
            Errno(libc::ENOSYS).set();
            ibv::IBV_REREG_MR_ERR_INPUT
        }
    }
}
