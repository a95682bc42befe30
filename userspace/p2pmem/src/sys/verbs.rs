// SPDX-License-Identifier: MIT OR Apache-2.0

//! libibverbs, which is loaded at run time, and protection domains of any crate or library.
//!
//! The trait [`Verbs`] has all calls to libibverbs and is safe to implement and to call. [`Library`] calls the real
//! library, `crate::fake` has a fake one.

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

/// The bytes to register, and their address and access.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    /// Offset of the first byte in the dma-buf or mapping.
    pub(crate) offset: u64,
    /// Length in bytes.
    pub(crate) len: usize,
    /// Address of the first byte in work requests.
    pub(crate) iova: u64,
    /// `IBV_ACCESS_*` bits.
    pub(crate) access: u32,
}

/// Calls to libibverbs. Errors are errnos.
pub(crate) trait Verbs: Send + Sync {
    /// Returns the name of the domain's NIC.
    fn nic(&self, pd: RawPd) -> String;
    fn reg_dmabuf(&self, pd: RawPd, dmabuf: BorrowedFd<'_>, part: Part) -> io::Result<RawMr>;
    /// Registers mapped memory by its addresses. A stock kernel refuses this for device memory.
    fn reg_mapped(&self, pd: RawPd, region: &Region, part: Part) -> io::Result<RawMr>;
    fn dereg(&self, mr: &RawMr) -> io::Result<()>;
}

/// A `struct ibv_pd *`.
///
/// # Invariants
///
/// The domain is valid as long as anything is registered in it, or the value is a fake one, which is never
/// dereferenced.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawPd(NonNull<c_void>);

// SAFETY: every function of libibverbs accepts a protection domain from any thread.
unsafe impl Send for RawPd {}
// SAFETY: as above, also from several threads at the same time.
unsafe impl Sync for RawPd {}

/// A `struct ibv_mr *` and its keys.
///
/// # Invariants
///
/// `mr` was returned by the [`Verbs`] that deregisters it, and is not deregistered yet.
#[derive(Debug)]
pub(crate) struct RawMr {
    mr: NonNull<c_void>,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

// SAFETY: every function of libibverbs accepts a memory region from any thread.
unsafe impl Send for RawMr {}
// SAFETY: as above; only libibverbs accesses memory through the pointer.
unsafe impl Sync for RawMr {}

impl RawMr {
    pub(crate) fn as_ptr(&self) -> *mut c_void {
        self.mr.as_ptr()
    }

    /// A region of a fake [`Verbs`], which identifies its regions by `key`.
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
    /// A domain of a fake [`Verbs`].
    #[cfg(any(test, feature = "fake"))]
    pub(crate) fn fake() -> Self {
        // INVARIANT: a fake one.
        Self(NonNull::dangling())
    }

    /// Returns the pointer in the type of libibverbs.
    fn as_ptr(self) -> *mut ibv::ibv_pd {
        self.0.as_ptr().cast()
    }
}

/// A protection domain of a NIC. [`Pd::from_raw`] accepts the domains of any crate or library.
#[derive(Clone)]
pub struct Pd {
    raw: RawPd,
    /// The library that the domain belongs to.
    verbs: Arc<dyn Verbs>,
    /// The value that keeps the domain alive.
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

    /// Returns the name of the domain's NIC, such as `mlx5_0`.
    pub fn nic(&self) -> String {
        self.verbs.nic(self.raw)
    }
}

/// A type in which memory can be registered: [`Pd`], and with the feature `verbs` the protection domains of the crate
/// sideway.
pub trait ProtectionDomain {
    /// Returns the domain in this crate's form.
    ///
    /// # Errors
    ///
    /// [`Error::Verbs`] if libibverbs is not installed.
    fn to_pd(&self) -> Result<Pd>;
}

impl ProtectionDomain for Pd {
    fn to_pd(&self) -> Result<Pd> {
        Ok(self.clone())
    }
}

impl Pd {
    /// Uses a protection domain of another crate or library: a `struct ibv_pd *`.
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
    /// [`Error::Verbs`] if libibverbs is not installed.
    ///
    /// # Safety
    ///
    /// `pd` must come from `ibv_alloc_pd()` or `ibv_alloc_parent_domain()` of the libibverbs.so.1 of this process. The
    /// domain must not be deallocated, nor its device closed, before this value, its clones and all their registrations
    /// are dropped.
    pub unsafe fn from_raw(pd: NonNull<c_void>) -> Result<Self> {
        let verbs = Library::load()?;
        // INVARIANT: the caller guarantees this.
        Ok(Self::new(RawPd(pd), verbs, None))
    }
}

impl Pd {
    /// Opens the NIC `name`, such as `mlx5_0`, and creates a protection domain, for a program that has no domain of its
    /// own.
    ///
    /// ```no_run
    /// use p2pmem::{Access, Device, Pd, Request};
    ///
    /// let buffer = Device::open()?.alloc(&Request::new(1 << 20))?;
    /// let registration = buffer.register(&Pd::open("mlx5_0")?, Access::LOCAL_WRITE)?;
    /// println!("{} bytes by {}", registration.len(), registration.method());
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Verbs`] if libibverbs is not installed; [`Error::Client`] if there is no such NIC; [`Error::Rdma`] if
    /// the NIC cannot be opened.
    pub fn open(name: &str) -> Result<Self> {
        let library = Library::load()?;
        let nic = Arc::new(library.open_nic(name)?);
        // INVARIANT: the domain is deallocated with the last `Arc`, and every registration holds one.
        Ok(Self::new(RawPd(nic.pd), library, Some(nic)))
    }
}

/// An open NIC with one protection domain.
///
/// # Invariants
///
/// `pd` and `context` are valid and belong to this value alone, and `pd` is a domain of `context`.
struct OpenNic {
    library: Arc<Library>,
    context: NonNull<ibv::ibv_context>,
    pd: NonNull<c_void>,
}

// SAFETY: every function of libibverbs accepts an open NIC and its domains from any thread.
unsafe impl Send for OpenNic {}
// SAFETY: as above, also from several threads at the same time.
unsafe impl Sync for OpenNic {}

impl Drop for OpenNic {
    fn drop(&mut self) {
        // SAFETY: both are valid and belong to this value alone (type invariant). All registrations are gone, because
        // each holds this value. A drop cannot report an error; the kernel ends both with the process.
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
        // SAFETY: the pointer is only used while the clone below holds the domain.
        let pd = unsafe { self.pd() };
        // INVARIANT: the domain is deallocated with its last `Arc`, and every registration holds the clone.
        Ok(Pd::new(RawPd(pd.cast()), verbs, Some(self.clone())))
    }
}

/// The functions of libibverbs, which is never unloaded.
pub(crate) struct Library {
    get_device_list: ibv::ibv_get_device_list,
    free_device_list: ibv::ibv_free_device_list,
    get_device_name: ibv::ibv_get_device_name,
    open_device: ibv::ibv_open_device,
    close_device: ibv::ibv_close_device,
    alloc_pd: ibv::ibv_alloc_pd,
    dealloc_pd: ibv::ibv_dealloc_pd,
    reg_mr: ibv::ibv_reg_mr,
    /// Since rdma-core 28.
    reg_mr_iova2: Option<ibv::ibv_reg_mr_iova2>,
    /// Since rdma-core 34.
    reg_dmabuf_mr: Option<ibv::ibv_reg_dmabuf_mr>,
    dereg_mr: ibv::ibv_dereg_mr,
}

impl Library {
    /// Loads the library, once in a process.
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
        /// The function of this name, as `ibv::$type`.
        macro_rules! function {
            ($type:ident, $name:expr) => {
                // SAFETY: the symbol is the function of this name, and its type is that of the library's header, which
                // a test of p2pmem-verbs-sys compares.
                unsafe { library.get::<ibv::$type>($name.to_bytes_with_nul()) }
                    .map(|function| *function)
                    .map_err(|_| {
                        format!(
                            "{} has no {}",
                            ibv::LIBRARY.to_string_lossy(),
                            $name.to_string_lossy()
                        )
                    })
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
        // The functions are called until the process ends, so the library must not be unloaded.
        std::mem::forget(library);
        Ok(functions)
    }

    /// Returns the name of a device.
    ///
    /// # Safety
    ///
    /// `device` must be from a list of devices that was not freed yet, or be the device of an open NIC.
    unsafe fn name_of(&self, device: *mut c_void) -> String {
        // SAFETY: the caller guarantees that `device` is valid. The name is a NUL-terminated string that lives as long
        // as the device.
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
        // SAFETY: `number` is valid during the call.
        let list = unsafe { (self.get_device_list)(&mut number) };
        let list = NonNull::new(list).ok_or_else(|| failed("listing RDMA devices".into()))?;
        let mut names = Vec::new();
        let mut context = None;
        for at in 0..usize::try_from(number).unwrap_or(0) {
            // SAFETY: the list has this number of devices, and is freed below.
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
        // SAFETY: the list is not used after this.
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
            let error = failed(format!("creating a protection domain of {wanted}"));
            // SAFETY: the NIC is open, and nothing was created in it.
            unsafe { (self.close_device)(context.as_ptr()) };
            return Err(error);
        };
        // INVARIANT: both are new and have no other owner.
        Ok(OpenNic {
            library: self.clone(),
            context,
            pd: pd.cast(),
        })
    }

    /// Returns the result of a function that returns a region, or null and errno. Sets address and length of the
    /// region.
    fn region(mr: *mut ibv::ibv_mr, part: Part, addr: u64) -> io::Result<RawMr> {
        let error = io::Error::last_os_error();
        let mr = NonNull::new(mr).ok_or(match error.raw_os_error() {
            // A driver library failed without setting errno.
            None | Some(0) => io::Error::from_raw_os_error(libc::EIO),
            Some(_) => error,
        })?;
        // SAFETY: libibverbs just returned the region, so it is valid and has no other owner.
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

/// Returns the access flags in C's type. All flags fit, because the highest is bit 29.
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
        // SAFETY: the domain is valid (type invariant), and the descriptor is open. No memory of the program is
        // accessed.
        let mr = unsafe { reg_dmabuf_mr(pd.as_ptr(), part.offset, part.len, part.iova, fd, access(part)) };
        Self::region(mr, part, part.iova)
    }

    fn reg_mapped(&self, pd: RawPd, region: &Region, part: Part) -> io::Result<RawMr> {
        let offset = usize::try_from(part.offset).unwrap_or(usize::MAX);
        let addr = region.at(offset, part.len);
        // SAFETY: the domain is valid (type invariant), and at() checked that the bytes are mapped. Later accesses by
        // the NIC are DMA like any device's, for which [`Region`] is made.
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
        // SAFETY: the region is valid (type invariant), and the caller drops it after this call.
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
    fn installed_libibverbs_has_the_needed_functions() {
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
