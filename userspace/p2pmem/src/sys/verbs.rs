// SPDX-License-Identifier: MIT OR Apache-2.0

//! libibverbs, found at run time, and protection domains of whichever crate or language.
//!
//! What the rest of the crate asks of it stands in the trait [`Verbs`], which is safe to implement and to call:
//! [`Library`] asks the real one, `crate::fake` plays it.

use std::any::Any;
use std::ffi::{c_int, c_void, CStr, OsStr};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use libloading::os::unix::{Library as DynamicLibrary, RTLD_LOCAL, RTLD_NOW};
use p2pmem_verbs_sys as ibv;

use crate::error::{errno_text, Error, Result};

use super::Region;

/// What of some memory to register, and as what.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    /// First byte in the dma-buf or mapping.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: usize,
    /// What work requests call the first byte.
    pub(crate) iova: u64,
    /// `IBV_ACCESS_*`
    pub(crate) access: u32,
}

/// The functions of libibverbs that the library uses. Errors are errnos.
pub(crate) trait Verbs: Send + Sync {
    /// Name of the NIC that the domain belongs to.
    fn nic(&self, pd: RawPd) -> String;
    fn reg_dmabuf(&self, pd: RawPd, dmabuf: BorrowedFd<'_>, part: Part) -> io::Result<RawMr>;
    /// Registers mapped memory by its addresses, which a stock kernel refuses for device memory.
    fn reg_mapped(&self, pd: RawPd, region: &Region, part: Part) -> io::Result<RawMr>;
    fn dereg(&self, mr: &RawMr) -> io::Result<()>;
}

/// A `struct ibv_pd *`.
///
/// # Invariants
///
/// It was made by [`Pd::from_raw`], whose caller promised that it stays valid as long as what was registered in it, or it
/// is a fake one's and never dereferenced.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawPd(NonNull<c_void>);

// SAFETY: libibverbs allows every function on a protection domain from any thread.
unsafe impl Send for RawPd {}
// SAFETY: as above, and at the same time from several.
unsafe impl Sync for RawPd {}

/// A `struct ibv_mr *` and its keys.
///
/// # Invariants
///
/// `mr` was returned by the [`Verbs`] that it is given back to, and was not deregistered.
#[derive(Debug)]
pub(crate) struct RawMr {
    mr: NonNull<c_void>,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

// SAFETY: libibverbs allows every function on a memory region from any thread.
unsafe impl Send for RawMr {}
// SAFETY: as above; nothing is read or written through the pointer but by libibverbs.
unsafe impl Sync for RawMr {}

impl RawMr {
    pub(crate) fn as_ptr(&self) -> *mut c_void {
        self.mr.as_ptr()
    }

    /// A region without libibverbs, for the fake [`Verbs`], which identifies its regions by `key`.
    #[cfg(any(test, feature = "fake"))]
    pub(crate) fn fake(key: u32) -> Self {
        Self {
            mr: NonNull::dangling(),
            lkey: key,
            rkey: key | (1 << 31),
        }
    }
}

impl RawPd {
    /// A domain for a [`Verbs`] that plays libibverbs.
    #[cfg(any(test, feature = "fake"))]
    pub(crate) fn fake() -> Self {
        // INVARIANT: a fake one's.
        Self(NonNull::dangling())
    }

    /// As libibverbs takes it.
    fn as_ptr(self) -> *mut ibv::ibv_pd {
        self.0.as_ptr().cast()
    }
}

/// A protection domain of a NIC. [`Pd::from_raw`] takes those of any crate or library.
#[derive(Clone)]
pub struct Pd {
    raw: RawPd,
    /// Whose functions work on it.
    verbs: Arc<dyn Verbs>,
    /// What keeps the domain alive.
    _keep: Option<Arc<dyn Any + Send + Sync>>,
}

impl fmt::Debug for Pd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pd").field("nic", &self.nic()).finish_non_exhaustive()
    }
}

impl Pd {
    pub(crate) fn new(raw: RawPd, verbs: Arc<dyn Verbs>, keep: Option<Arc<dyn Any + Send + Sync>>) -> Self {
        Self {
            raw,
            verbs,
            _keep: keep,
        }
    }

    pub(crate) fn raw(&self) -> RawPd {
        self.raw
    }

    pub(crate) fn verbs(&self) -> &dyn Verbs {
        &*self.verbs
    }

    /// Name of its NIC, as `mlx5_0`.
    pub fn nic(&self) -> String {
        self.verbs.nic(self.raw)
    }
}

/// What memory can be registered in: [`Pd`], and with the feature `verbs` the protection domains of the crate sideway.
pub trait ProtectionDomain {
    /// The domain in this crate's form.
    ///
    /// # Errors
    ///
    /// [`Error::Verbs`] where libibverbs is not installed.
    fn to_pd(&self) -> Result<Pd>;
}

impl ProtectionDomain for Pd {
    fn to_pd(&self) -> Result<Pd> {
        Ok(self.clone())
    }
}

impl Pd {
    /// A protection domain made by another crate or library: a `struct ibv_pd *`.
    ///
    /// ```no_run
    /// # fn domain_of_some_library() -> *mut std::ffi::c_void { unimplemented!() }
    /// use p2pmem::{Access, Device, Pd, Request};
    ///
    /// let buffer = Device::open()?.alloc(&Request::new(1 << 20))?;
    /// let ibv_pd = std::ptr::NonNull::new(domain_of_some_library()).expect("ibv_alloc_pd() failed");
    /// // SAFETY: the library keeps the domain until the end of the program.
    /// let pd = unsafe { Pd::from_raw(ibv_pd) }?;
    /// let registration = buffer.register(&pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    /// println!("rkey {:#x}", registration.rkey());
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Verbs`] where libibverbs is not installed.
    ///
    /// # Safety
    ///
    /// `pd` must come from `ibv_alloc_pd()` (or `ibv_alloc_parent_domain()`) of the libibverbs.so.1 of this process, and
    /// must not be deallocated, nor its device closed, before this value, its clones and all that was registered with
    /// them are dropped.
    pub unsafe fn from_raw(pd: NonNull<c_void>) -> Result<Self> {
        let verbs = Library::load()?;
        // INVARIANT: the caller's promise.
        Ok(Self::new(RawPd(pd), verbs, None))
    }
}

impl Pd {
    /// Opens the NIC `name`, as `mlx5_0`, and makes a protection domain of it, for a program that has none of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Verbs`] where libibverbs is not installed; [`Error::Client`] where there is no such NIC;
    /// [`Error::Rdma`] where it cannot be opened.
    pub fn open(name: &str) -> Result<Self> {
        let library = Library::load()?;
        let nic = Arc::new(library.open_nic(name)?);
        // INVARIANT: the domain goes with the last `Arc`, and what is registered holds one.
        Ok(Self::new(RawPd(nic.pd), library, Some(nic)))
    }
}

/// An open NIC with one protection domain.
///
/// # Invariants
///
/// `pd` and `context` are valid, belong to this value alone, and `pd` is a domain of `context`.
struct OpenNic {
    library: Arc<Library>,
    context: NonNull<ibv::ibv_context>,
    pd: NonNull<c_void>,
}

// SAFETY: libibverbs allows every function on an open NIC and its domains from any thread.
unsafe impl Send for OpenNic {}
// SAFETY: as above, and at the same time from several.
unsafe impl Sync for OpenNic {}

impl Drop for OpenNic {
    fn drop(&mut self) {
        // SAFETY: both are valid and ours alone (type invariant), and no registration is left, as each holds this value.
        // drop() cannot report an error; the kernel ends both with the process.
        unsafe {
            (self.library.dealloc_pd)(self.pd.as_ptr().cast());
            (self.library.close_device)(self.context.as_ptr());
        }
    }
}

#[cfg(feature = "verbs")]
impl ProtectionDomain for Arc<sideway::ibverbs::protection_domain::ProtectionDomain> {
    fn to_pd(&self) -> Result<Pd> {
        let verbs = Library::load()?;
        // SAFETY: the pointer is only used while the clone below keeps the domain.
        let pd = unsafe { self.pd() };
        // INVARIANT: the domain goes when its last `Arc` does, and what is registered holds the clone.
        Ok(Pd::new(RawPd(pd.cast()), verbs, Some(self.clone())))
    }
}

/// The functions of the real libibverbs, which stays loaded permanently.
pub(crate) struct Library {
    get_device_list: ibv::ibv_get_device_list,
    free_device_list: ibv::ibv_free_device_list,
    get_device_name: ibv::ibv_get_device_name,
    open_device: ibv::ibv_open_device,
    close_device: ibv::ibv_close_device,
    alloc_pd: ibv::ibv_alloc_pd,
    dealloc_pd: ibv::ibv_dealloc_pd,
    reg_mr: ibv::ibv_reg_mr,
    /// From rdma-core 28 on.
    reg_mr_iova2: Option<ibv::ibv_reg_mr_iova2>,
    /// From rdma-core 34 on.
    reg_dmabuf_mr: Option<ibv::ibv_reg_dmabuf_mr>,
    dereg_mr: ibv::ibv_dereg_mr,
}

impl Library {
    /// Loads it, once.
    pub(crate) fn load() -> Result<Arc<Self>> {
        static LIBRARY: OnceLock<std::result::Result<Arc<Library>, String>> = OnceLock::new();
        let library = LIBRARY.get_or_init(|| Self::open().map(Arc::new));
        library.clone().map_err(Error::Verbs)
    }

    fn open() -> std::result::Result<Self, String> {
        // SAFETY: the library's constructors are those that every RDMA program runs.
        let library =
            unsafe { DynamicLibrary::open(Some(OsStr::from_bytes(ibv::LIBRARY.to_bytes())), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|error| error.to_string())?;
        /// The function of that name, as `ibv::$type`.
        macro_rules! function {
            ($type:ident, $name:expr) => {
                // SAFETY: the symbol is the function of that name, whose type is that of the library's own header (a test
                // of p2pmem-verbs-sys compares them).
                unsafe { library.get::<ibv::$type>($name.to_bytes_with_nul()) }
                    .map(|function| *function)
                    .map_err(|_| format!("{} has no {}", ibv::LIBRARY.to_string_lossy(), $name.to_string_lossy()))
            };
        }
        let functions = Self {
            get_device_list: function!(ibv_get_device_list, ibv::name::GET_DEVICE_LIST)?,
            free_device_list: function!(ibv_free_device_list, ibv::name::FREE_DEVICE_LIST)?,
            get_device_name: function!(ibv_get_device_name, ibv::name::GET_DEVICE_NAME)?,
            open_device: function!(ibv_open_device, ibv::name::OPEN_DEVICE)?,
            close_device: function!(ibv_close_device, ibv::name::CLOSE_DEVICE)?,
            alloc_pd: function!(ibv_alloc_pd, ibv::name::ALLOC_PD)?,
            dealloc_pd: function!(ibv_dealloc_pd, ibv::name::DEALLOC_PD)?,
            reg_mr: function!(ibv_reg_mr, ibv::name::REG_MR)?,
            reg_mr_iova2: function!(ibv_reg_mr_iova2, ibv::name::REG_MR_IOVA2).ok(),
            reg_dmabuf_mr: function!(ibv_reg_dmabuf_mr, ibv::name::REG_DMABUF_MR).ok(),
            dereg_mr: function!(ibv_dereg_mr, ibv::name::DEREG_MR)?,
        };
        // Its functions are called until the process ends.
        std::mem::forget(library);
        Ok(functions)
    }

    /// Name of a device.
    ///
    /// # Safety
    ///
    /// `device` must be of the list of devices, or that of an open NIC.
    unsafe fn name_of(&self, device: *mut c_void) -> String {
        // SAFETY: the caller's promise. The name is a NUL-terminated string that lives as long as the device.
        unsafe {
            let name = (self.get_device_name)(device);
            if name.is_null() {
                return "an unnamed NIC".into();
            }
            CStr::from_ptr(name).to_string_lossy().into_owned()
        }
    }

    fn open_nic(self: &Arc<Self>, wanted: &str) -> Result<OpenNic> {
        let failed = |what: String| Error::Rdma {
            what,
            why: errno_text(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)),
        };
        let mut number = 0;
        // SAFETY: the number lives across the call.
        let list = unsafe { (self.get_device_list)(&mut number) };
        let list = NonNull::new(list).ok_or_else(|| failed("listing RDMA devices".into()))?;
        let mut names = Vec::new();
        let mut context = None;
        for at in 0..usize::try_from(number).unwrap_or(0) {
            // SAFETY: the list has that many devices, and is given back below.
            unsafe {
                let device = *list.as_ptr().add(at);
                let name = self.name_of(device);
                if name == wanted {
                    let opened = NonNull::new((self.open_device)(device));
                    context = Some(opened.ok_or_else(|| failed(format!("opening {wanted}"))));
                }
                names.push(name);
            }
        }
        // SAFETY: it is not used after this.
        unsafe { (self.free_device_list)(list.as_ptr()) };
        let context = context.ok_or_else(|| Error::Client {
            name: wanted.to_owned(),
            why: match names.as_slice() {
                [] => "there is no RDMA device".into(),
                names => format!("the RDMA devices are {}", names.join(", ")),
            },
        })??;
        // SAFETY: the NIC is open.
        let pd = NonNull::new(unsafe { (self.alloc_pd)(context.as_ptr()) });
        let Some(pd) = pd else {
            let error = failed(format!("a protection domain of {wanted}"));
            // SAFETY: it is open, and nothing was made of it.
            unsafe { (self.close_device)(context.as_ptr()) };
            return Err(error);
        };
        // INVARIANT: both were just made, and nobody else knows of them.
        Ok(OpenNic {
            library: self.clone(),
            context,
            pd: pd.cast(),
        })
    }

    /// The result of a function that returns a region, or null and errno.
    fn region(mr: *mut ibv::ibv_mr, part: Part, addr: u64) -> io::Result<RawMr> {
        let error = io::Error::last_os_error();
        let mr = NonNull::new(mr).ok_or(match error.raw_os_error() {
            // A driver library that fails without an errno.
            None | Some(0) => io::Error::from_raw_os_error(libc::EIO),
            Some(_) => error,
        })?;
        // SAFETY: libibverbs returned it just now, so it is valid, and nobody else knows of it.
        let (lkey, rkey) = unsafe {
            let mr = mr.as_ptr();
            (*mr).addr = addr as *mut c_void;
            (*mr).length = part.len;
            ((*mr).lkey, (*mr).rkey)
        };
        // INVARIANT: as above.
        Ok(RawMr {
            mr: mr.cast(),
            lkey,
            rkey,
        })
    }
}

/// All flags fit, as the highest is bit 29.
fn access(part: Part) -> c_int {
    part.access as c_int
}

impl Verbs for Library {
    fn nic(&self, pd: RawPd) -> String {
        // SAFETY: the domain is valid (type invariant), so it has an open device.
        unsafe { self.name_of((*(*pd.as_ptr()).context).device) }
    }

    fn reg_dmabuf(&self, pd: RawPd, dmabuf: BorrowedFd<'_>, part: Part) -> io::Result<RawMr> {
        let reg_dmabuf_mr = self
            .reg_dmabuf_mr
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSYS))?;
        let fd = dmabuf.as_raw_fd();
        // SAFETY: the domain is valid (type invariant) and the descriptor open. No memory of the program is touched.
        let mr = unsafe { reg_dmabuf_mr(pd.as_ptr(), part.offset, part.len, part.iova, fd, access(part)) };
        Self::region(mr, part, part.iova)
    }

    fn reg_mapped(&self, pd: RawPd, region: &Region, part: Part) -> io::Result<RawMr> {
        let offset = usize::try_from(part.offset).unwrap_or(usize::MAX);
        let addr = region.at(offset, part.len);
        // SAFETY: the domain is valid (type invariant), and at() has checked that the bytes are mapped. What a NIC does
        // there later is as any device's DMA, which is what a region is for.
        let mr = unsafe {
            match self.reg_mr_iova2 {
                Some(reg) => reg(pd.as_ptr(), addr.cast(), part.len, part.iova, part.access),
                None if part.iova == addr as u64 => (self.reg_mr)(pd.as_ptr(), addr.cast(), part.len, access(part)),
                None => return Err(io::Error::from_raw_os_error(libc::ENOSYS)),
            }
        };
        Self::region(mr, part, addr as u64)
    }

    fn dereg(&self, mr: &RawMr) -> io::Result<()> {
        // SAFETY: the region is valid (type invariant), and its owner drops it after this.
        match unsafe { (self.dereg_mr)(mr.as_ptr().cast()) } {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_has_what_is_needed_where_it_is_installed() {
        match Library::load() {
            Ok(library) => {
                let again = Library::load().unwrap();
                assert!(Arc::ptr_eq(&library, &again), "loaded once");
                let error = Pd::open("no such NIC").unwrap_err();
                assert!(matches!(error, Error::Client { .. } | Error::Rdma { .. }), "{error}");
            }
            Err(error) => {
                assert!(
                    !std::path::Path::new("/etc/p2pmem-kernel").exists(),
                    "the sandbox has it: {error}"
                );
                assert!(error.remedy().unwrap().contains("libibverbs1"), "{error}");
            }
        }
    }
}
