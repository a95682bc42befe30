// SPDX-License-Identifier: MIT OR Apache-2.0

//! Registration of buffers with RDMA NICs.

use std::ffi::c_void;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

use bitflags::bitflags;
use p2pmem_verbs_sys::access;

use crate::error::{errno_text, Error, Result, ENOTSUPP};
use crate::export::{DmaBuf, ExportOptions};
use crate::origin::Origin;
use crate::sys::verbs::{Part, Pd, ProtectionDomain, RawMr};
use crate::sys::{page_size, Region};
use crate::types::{human_size, RegistrationMethod};

/// Permitted access to registered memory; local reads are always permitted. The bits are those of `enum
/// ibv_access_flags`. [`Access::from_bits_retain`] passes flags without a name here to libibverbs.
///
/// ```
/// use p2pmem::Access;
///
/// let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
/// assert!(access.contains(Access::REMOTE_WRITE) && !access.contains(Access::REMOTE_READ));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[must_use]
pub struct Access(u32);

bitflags! {
    impl Access: u32 {
        /// The local NIC may write: receives, responses to RDMA READ.
        const LOCAL_WRITE = access::LOCAL_WRITE;
        /// The remote side may RDMA WRITE. Needs [`Access::LOCAL_WRITE`] too.
        const REMOTE_WRITE = access::REMOTE_WRITE;
        /// The remote side may RDMA READ.
        const REMOTE_READ = access::REMOTE_READ;
        /// The remote side may use atomics. Needs [`Access::LOCAL_WRITE`] too.
        const REMOTE_ATOMIC = access::REMOTE_ATOMIC;
        /// Writes may arrive in another order than they were sent in, which is faster on some machines.
        const RELAXED_ORDERING = access::RELAXED_ORDERING;
    }
}

impl Access {
    /// The local NIC may only read, for its own work requests: no flag is set.
    pub const LOCAL_READ: Self = Self::empty();
    /// All access by both sides, in order: every named flag except [`Access::RELAXED_ORDERING`].
    pub const ALL: Self = Self::LOCAL_WRITE
        .union(Self::REMOTE_WRITE)
        .union(Self::REMOTE_READ)
        .union(Self::REMOTE_ATOMIC);
}

/// Whether the handle of a buffer is known to exist. The handle of a mapping's buffer may be gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Handle {
    Lives,
    MayBeGone,
}

/// Options of a registration: bytes, access, and method.
///
/// ```
/// # let fake = p2pmem::fake::Fake::example();
/// # let device = fake.device();
/// # let pd = p2pmem::fake::FakeNic::new("mlx5_0").pd();
/// use p2pmem::{Access, RegisterOptions, Request};
///
/// let buffer = device.alloc(&Request::new(1 << 20))?;
/// // The remote side accesses 64 KiB from the middle of the buffer by addresses that start at 0.
/// let part = RegisterOptions::new(Access::REMOTE_READ).range(512 << 10..576 << 10).iova(0);
/// let registration = buffer.register_with(&pd, &part)?;
/// assert_eq!((registration.addr(), registration.len()), (0, 64 << 10));
/// # Ok::<(), p2pmem::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct RegisterOptions {
    access: Access,
    range: Option<Range<u64>>,
    iova: Option<u64>,
    pinned: bool,
    method: Option<RegistrationMethod>,
}

impl RegisterOptions {
    /// The whole buffer or mapping, by any method that the kernel offers. The dma-buf method is tried first.
    pub fn new(access: Access) -> Self {
        Self {
            access,
            range: None,
            iova: None,
            pinned: false,
            method: None,
        }
    }

    /// Registers these bytes only, counted from the start of the buffer or mapping. They need not be whole pages.
    pub fn range(mut self, range: Range<u64>) -> Self {
        self.range = Some(range);
        self
    }

    /// Sets the address of the first byte in work requests of both sides. Its offset in its page must be that of the
    /// first byte. Default: the byte's address in the program if the buffer is mapped, else its offset in the buffer.
    pub fn iova(mut self, iova: u64) -> Self {
        self.iova = Some(iova);
        self
    }

    /// As [`ExportOptions::pinned`]: allows NICs whose registrations cannot be revoked.
    pub fn pinned(mut self, pinned: bool) -> Self {
        self.pinned = pinned;
        self
    }

    /// Uses this method and no other.
    pub fn method(mut self, method: RegistrationMethod) -> Self {
        self.method = Some(method);
        self
    }

    /// Registers a dma-buf of any driver, without a [`Device`](crate::Device). On an error, `describe` returns the text
    /// about the memory, from the number of bytes and the NIC's name.
    pub(crate) fn run_dmabuf(
        &self,
        pd: &impl ProtectionDomain,
        dmabuf: &DmaBuf,
        describe: impl FnOnce(u64, &str) -> String,
    ) -> Result<Registration> {
        let pd = pd.to_pd()?;
        if self.method == Some(RegistrationMethod::PeerMemory) {
            return Err(Error::Request(
                "registration of a dma-buf by addresses: a dma-buf that is not mapped has none".into(),
            ));
        }
        if self.pinned {
            return Err(Error::Request(
                "a pinned registration of a dma-buf: its exporter decides whether importers can be revoked".into(),
            ));
        }
        let range = self.range.clone().unwrap_or(0..dmabuf.size());
        let part = self.part(&range, dmabuf.size(), "dma-buf", range.start, page_size())?;
        // The registration has its own descriptor, so that the program can drop the dma-buf.
        let own = dmabuf.try_clone()?;
        match pd.verbs().reg_dmabuf(pd.raw(), own.as_fd(), part) {
            Ok(mr) => Ok(Registration {
                mr: Mr { mr, pd, ended: false },
                dmabuf: Some(own),
                _mapping: None,
                addr: part.iova,
                len: part.len,
            }),
            Err(error) => {
                let nic = pd.nic();
                Err(Error::Register {
                    what: describe(part.len as u64, &nic),
                    nic,
                    method: RegistrationMethod::DmaBuf,
                    errno: error.raw_os_error().unwrap_or(libc::EIO),
                    reason: None,
                })
            }
        }
    }

    /// Checks the range and the address of a registration. `size` is the size of the memory, which messages call `of`.
    /// `default` is the address of the first byte if the options have none.
    fn part(&self, range: &Range<u64>, size: u64, of: &str, default: u64, page: u64) -> Result<Part> {
        if range.start >= range.end || range.end > size {
            return Err(Error::Request(format!(
                "the range {range:?} is empty, or not inside the {size} bytes of the {of}"
            )));
        }
        let iova = self.iova.unwrap_or(default);
        if iova % page != range.start % page {
            return Err(Error::Request(format!(
                "an iova of {iova:#x} for byte {:#x}: both must have the same offset in their page",
                range.start
            )));
        }
        Ok(Part {
            offset: range.start,
            len: usize::try_from(range.end - range.start)
                .map_err(|_| Error::Request(format!("{range:?} exceeds the address space of this program")))?,
            iova,
            access: self.access.bits(),
        })
    }

    /// Registers memory of `origin`, by its handle or by a mapping of it.
    pub(crate) fn run(
        &self,
        pd: &impl ProtectionDomain,
        origin: &Origin,
        mapping: Option<&Arc<Region>>,
        handle: Handle,
    ) -> Result<Registration> {
        let pd = pd.to_pd()?;
        let range = self.range.clone().unwrap_or(0..origin.size);
        let info = origin.device.constant()?;
        let page = u64::from(info.page_size).max(1);
        let start = mapping.map_or(0, |region| region.as_ptr() as u64);
        let part = self.part(&range, origin.size, "buffer", start.saturating_add(range.start), page)?;
        let attempt = Attempt {
            pd: &pd,
            origin,
            mapping,
            handle,
            range: &range,
            page,
            part,
        };
        let peer_memory = mapping.is_some() && info.peer_memory();
        match self.method {
            Some(RegistrationMethod::DmaBuf) => attempt.by_dmabuf(self.pinned),
            Some(RegistrationMethod::PeerMemory) => attempt.by_addresses(),
            None => match attempt.by_dmabuf(self.pinned) {
                // The driver does not support dma-bufs, and the RDMA core has the peer-memory interface.
                Err(error)
                    if peer_memory && matches!(error.errno(), Some(libc::EOPNOTSUPP | libc::ENOSYS | ENOTSUPP)) =>
                {
                    attempt.by_addresses()
                }
                result => result,
            },
        }
    }
}

/// A registration in progress.
struct Attempt<'a> {
    pd: &'a Pd,
    origin: &'a Origin,
    mapping: Option<&'a Arc<Region>>,
    handle: Handle,
    /// Bytes to register, in the buffer or mapping.
    range: &'a Range<u64>,
    page: u64,
    part: Part,
}

impl Attempt<'_> {
    fn by_dmabuf(&self, pinned: bool) -> Result<Registration> {
        let pages = self.range.start / self.page * self.page..self.range.end.next_multiple_of(self.page);
        let part = Part {
            offset: self.range.start - pages.start,
            ..self.part
        };
        let export = ExportOptions::new().range(pages).pinned(pinned);
        let Origin {
            device, handle, size, ..
        } = self.origin;
        let dmabuf = match (self.handle, self.mapping) {
            (Handle::MayBeGone, Some(region)) => export.of_addresses(device, region.as_ptr() as u64, *size),
            _ => export.of_buffer(device, *handle, *size),
        }?;
        let result = self
            .origin
            .device
            .with_importer(|| self.pd.verbs().reg_dmabuf(self.pd.raw(), dmabuf.as_fd(), part));
        match result {
            Ok(mr) => Ok(self.done(mr, Some(dmabuf))),
            Err((error, reason)) => Err(self.failed(RegistrationMethod::DmaBuf, &error, reason)),
        }
    }

    fn by_addresses(&self) -> Result<Registration> {
        let Some(region) = self.mapping else {
            return Err(Error::Request(
                "registration by addresses of a buffer that is not mapped: map the buffer first".into(),
            ));
        };
        match self.pd.verbs().reg_mapped(self.pd.raw(), region, self.part) {
            Ok(mr) => Ok(self.done(mr, None)),
            Err(error) => Err(self.failed(RegistrationMethod::PeerMemory, &error, None)),
        }
    }

    fn done(&self, mr: RawMr, dmabuf: Option<DmaBuf>) -> Registration {
        Registration {
            mr: Mr {
                mr,
                pd: self.pd.clone(),
                ended: false,
            },
            dmabuf,
            _mapping: self.mapping.cloned(),
            addr: self.part.iova,
            len: self.part.len,
        }
    }

    fn failed(&self, method: RegistrationMethod, error: &io::Error, reason: Option<String>) -> Error {
        Error::Register {
            what: format!("{} of {}", human_size(self.part.len as u64), self.origin.describe()),
            nic: self.pd.nic(),
            method,
            errno: error.raw_os_error().unwrap_or(libc::EIO),
            reason,
        }
    }
}

/// A memory region that is deregistered when this value is dropped.
struct Mr {
    mr: RawMr,
    pd: Pd,
    ended: bool,
}

impl Mr {
    fn end(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        self.pd.verbs().dereg(&self.mr)
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // A drop cannot report an error. The kernel ends the region when the NIC's file is closed.
        let _ = self.end();
    }
}

/// Registered memory, as the remote side of a connection addresses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RemoteMemory {
    /// Address of the first byte in work requests.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Remote key.
    pub rkey: u32,
}

/// Memory registered with a NIC. Work requests of this side use [`Registration::lkey`], those of the remote side
/// [`Registration::rkey`].
///
/// A registration holds the dma-buf, the mapping whose addresses it uses, and the protection domain. So nobody else
/// gets the memory while a NIC can access it, even if the [`Buffer`](crate::Buffer) is dropped.
///
/// The removal of the provider revokes the registration: work requests that use it end with a remote access error, or
/// on the local side with a local protection error, and write no byte. The value can still be dropped.
pub struct Registration {
    // Fields are dropped in this order: the region before the memory that it refers to.
    mr: Mr,
    dmabuf: Option<DmaBuf>,
    _mapping: Option<Arc<Region>>,
    addr: u64,
    len: usize,
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration")
            .field("nic", &self.nic())
            .field("method", &self.method())
            .field("addr", &self.addr)
            .field("len", &self.len)
            .field("lkey", &self.lkey())
            .field("rkey", &self.rkey())
            .finish()
    }
}

impl Registration {
    /// Returns the key for local work requests.
    pub fn lkey(&self) -> u32 {
        self.mr.mr.lkey
    }

    /// Returns the key for work requests of the remote side.
    pub fn rkey(&self) -> u32 {
        self.mr.mr.rkey
    }

    /// Returns address, length and key, which the remote side needs.
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory {
            addr: self.addr,
            len: self.len as u64,
            rkey: self.rkey(),
        }
    }

    /// Returns the address of the first byte in work requests: its address in the program if the memory is mapped, else
    /// its offset in the buffer, unless [`RegisterOptions::iova`] set another one.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Returns the length in bytes.
    #[allow(clippy::len_without_is_empty)] // nothing empty can be registered
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the memory region.
    #[cfg(feature = "verbs")]
    pub(crate) fn region(&self) -> &RawMr {
        &self.mr.mr
    }

    /// Returns the method by which the memory was registered.
    pub fn method(&self) -> RegistrationMethod {
        if self.dmabuf.is_some() {
            RegistrationMethod::DmaBuf
        } else {
            RegistrationMethod::PeerMemory
        }
    }

    /// Returns the dma-buf, if the method is [`RegistrationMethod::DmaBuf`].
    pub fn dmabuf(&self) -> Option<&DmaBuf> {
        self.dmabuf.as_ref()
    }

    /// Returns the name of the NIC.
    pub fn nic(&self) -> String {
        self.mr.pd.nic()
    }

    /// Returns the `struct ibv_mr *`, for functions of libibverbs. The pointer is valid until this value is dropped. Do
    /// not deregister it.
    pub fn as_ptr(&self) -> *mut c_void {
        self.mr.mr.as_ptr()
    }

    /// Ends the registration as dropping does, and reports errors.
    ///
    /// # Errors
    ///
    /// [`Error::Deregister`]: EBUSY if memory windows are bound to the region.
    pub fn deregister(mut self) -> Result<()> {
        self.mr.end().map_err(|error| Error::Deregister {
            nic: self.nic(),
            why: errno_text(error.raw_os_error().unwrap_or(libc::EIO)),
        })
    }
}

#[cfg(test)]
mod tests;
