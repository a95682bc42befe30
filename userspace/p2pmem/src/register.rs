// SPDX-License-Identifier: MIT OR Apache-2.0

//! Buffers registered with RDMA NICs.

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
use crate::sys::Region;
use crate::types::{human_size, RegistrationMethod};

/// What may be done with registered memory; local reading always may. The bits are those of `enum ibv_access_flags`; flags
/// without a name here are passed on to libibverbs, from [`Access::from_bits_retain`].
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
        /// The NIC may write it for its own side: receives, answers to RDMA READ.
        const LOCAL_WRITE = access::LOCAL_WRITE;
        /// The other side may RDMA WRITE; it needs [`Access::LOCAL_WRITE`] too.
        const REMOTE_WRITE = access::REMOTE_WRITE;
        /// The other side may RDMA READ.
        const REMOTE_READ = access::REMOTE_READ;
        /// The other side may use atomics; it needs [`Access::LOCAL_WRITE`] too.
        const REMOTE_ATOMIC = access::REMOTE_ATOMIC;
        /// Writes may arrive in another order than they were sent in, which some machines do faster.
        const RELAXED_ORDERING = access::RELAXED_ORDERING;
    }
}

impl Access {
    /// The NIC may only read it, for its own side's work requests: no flag is set.
    pub const LOCAL_READ: Self = Self::empty();
    /// All that both sides can do, in order: every named flag but [`Access::RELAXED_ORDERING`].
    pub const ALL: Self = Self::LOCAL_WRITE
        .union(Self::REMOTE_WRITE)
        .union(Self::REMOTE_READ)
        .union(Self::REMOTE_ATOMIC);
}

/// Whether a buffer can be named by its handle: that of a mapping may be gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Handle {
    Lives,
    MayBeGone,
}

/// What to register of a buffer or mapping, and how.
///
/// ```
/// # let fake = p2pmem::fake::Fake::example();
/// # let device = fake.device();
/// # let pd = p2pmem::fake::FakeNic::new("mlx5_0").pd();
/// use p2pmem::{Access, RegisterOptions, Request};
///
/// let buffer = device.alloc(&Request::new(1 << 20))?;
/// // The other side sees 64 KiB from the middle of the buffer, as addresses from 0 on.
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
    /// All of it, by whichever method the kernel offers.
    pub fn new(access: Access) -> Self {
        Self {
            access,
            range: None,
            iova: None,
            pinned: false,
            method: None,
        }
    }

    /// These bytes only, counted from the start of the buffer or mapping. They need not be whole pages.
    pub fn range(mut self, range: Range<u64>) -> Self {
        self.range = Some(range);
        self
    }

    /// What work requests and the other side call the first byte. It has to be as far from a page's start as the byte
    /// itself. Default: the byte's address in the program where it is mapped, else its offset in the buffer.
    pub fn iova(mut self, iova: u64) -> Self {
        self.iova = Some(iova);
        self
    }

    /// As [`ExportOptions::pinned`]: for NICs whose registrations cannot be revoked.
    pub fn pinned(mut self, pinned: bool) -> Self {
        self.pinned = pinned;
        self
    }

    /// This method and no other.
    pub fn method(mut self, method: RegistrationMethod) -> Self {
        self.method = Some(method);
        self
    }

    /// Registers memory of `origin`: all of the buffer, or of a mapping of it.
    pub(crate) fn run(
        &self,
        pd: &impl ProtectionDomain,
        origin: &Origin,
        mapping: Option<&Arc<Region>>,
        handle: Handle,
    ) -> Result<Registration> {
        let pd = pd.to_pd()?;
        let range = self.range.clone().unwrap_or(0..origin.size);
        if range.start >= range.end || range.end > origin.size {
            return Err(Error::Request(format!(
                "the range {range:?} is empty, or not inside the {} bytes of the buffer",
                origin.size
            )));
        }
        let info = origin.device.constant()?;
        let page = u64::from(info.page_size).max(1);
        let start = mapping.map_or(0, |region| region.as_ptr() as u64);
        let iova = self.iova.unwrap_or(start + range.start);
        if iova % page != range.start % page {
            return Err(Error::Request(format!(
                "an iova of {iova:#x} for byte {:#x}: both have to be as far from the start of a page",
                range.start
            )));
        }
        let attempt = Attempt {
            pd: &pd,
            origin,
            mapping,
            handle,
            range: &range,
            page,
            part: Part {
                offset: range.start,
                len: usize::try_from(range.end - range.start)
                    .map_err(|_| Error::Request(format!("{range:?} is more than this program can address")))?,
                iova,
                access: self.access.bits(),
            },
        };
        let peer_memory = mapping.is_some() && info.peer_memory();
        match self.method {
            Some(RegistrationMethod::DmaBuf) => attempt.by_dmabuf(self.pinned),
            Some(RegistrationMethod::PeerMemory) => attempt.by_addresses(),
            None => match attempt.by_dmabuf(self.pinned) {
                // A driver without dma-buf support, in an RDMA core with the peer-memory interface.
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

/// One registration being made.
struct Attempt<'a> {
    pd: &'a Pd,
    origin: &'a Origin,
    mapping: Option<&'a Arc<Region>>,
    handle: Handle,
    /// Bytes of the buffer or mapping.
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
                "registration by addresses of a buffer that is not mapped: map it first".into(),
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

/// A memory region that ends with this value.
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
        // drop() cannot report an error; the kernel ends the region with the device's file.
        let _ = self.end();
    }
}

/// Registered memory as the other side of a connection names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RemoteMemory {
    /// What work requests call its first byte.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The key that opens it.
    pub rkey: u32,
}

/// Memory registered with a NIC. Work requests name it by [`Registration::lkey`] on this side and by
/// [`Registration::rkey`] on the remote side.
///
/// A registration keeps the dma-buf, so that no other process gets the memory while a NIC can reach it, even if the
/// [`Buffer`](crate::Buffer) is dropped; the mapping whose addresses it uses; and the protection domain.
///
/// The removal of the provider revokes the registration: work requests that name it end with a remote access error (or a
/// local protection error on this side), and write no byte. The value can still be dropped as usual.
pub struct Registration {
    // Dropped in this order: the region before what it stands on.
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
    /// The key for work requests of this side.
    pub fn lkey(&self) -> u32 {
        self.mr.mr.lkey
    }

    /// The key for work requests of the other side.
    pub fn rkey(&self) -> u32 {
        self.mr.mr.rkey
    }

    /// Returns the data that the remote side needs for its work requests.
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory {
            addr: self.addr,
            len: self.len as u64,
            rkey: self.rkey(),
        }
    }

    /// What work requests call the first byte: its address in the program where it is mapped, unless
    /// [`RegisterOptions::iova`] said otherwise.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Its length in bytes.
    #[allow(clippy::len_without_is_empty)] // nothing empty can be registered
    pub fn len(&self) -> usize {
        self.len
    }

    /// The region that the NIC knows.
    #[cfg(feature = "verbs")]
    pub(crate) fn region(&self) -> &RawMr {
        &self.mr.mr
    }

    /// The method taken.
    pub fn method(&self) -> RegistrationMethod {
        if self.dmabuf.is_some() {
            RegistrationMethod::DmaBuf
        } else {
            RegistrationMethod::PeerMemory
        }
    }

    /// The dma-buf, where that was the method.
    pub fn dmabuf(&self) -> Option<&DmaBuf> {
        self.dmabuf.as_ref()
    }

    /// Name of the NIC.
    pub fn nic(&self) -> String {
        self.mr.pd.nic()
    }

    /// The `struct ibv_mr *`, for functions of libibverbs. It is valid until this value is dropped, and must not be
    /// deregistered.
    pub fn as_ptr(&self) -> *mut c_void {
        self.mr.mr.as_ptr()
    }

    /// Ends it, as dropping does, and says whether that worked.
    ///
    /// # Errors
    ///
    /// [`Error::Deregister`]: EBUSY where memory windows are bound to it.
    pub fn deregister(mut self) -> Result<()> {
        self.mr.end().map_err(|error| Error::Deregister {
            nic: self.nic(),
            why: errno_text(error.raw_os_error().unwrap_or(libc::EIO)),
        })
    }
}

#[cfg(test)]
mod tests;
