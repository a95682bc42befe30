// SPDX-License-Identifier: MIT OR Apache-2.0

//! Registered memory: host memory, and buffers of p2pmem.

use std::io;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use p2pmem::{Access, Buffer, Pd, Registration};
use rdma_mummy_sys as ffi;

use super::errno;
use super::nic::Domain;
use super::span::Span;

/// Host memory that is registered with a NIC.
///
/// # Invariants
///
/// `raw` is registered until this is dropped, and `span` is mapped for at least that time.
pub struct HostMemory {
    raw: NonNull<ffi::ibv_mr>,
    span: Span,
    _domain: Arc<Domain>,
}

// SAFETY: as for `Nic`.
unsafe impl Send for HostMemory {}
// SAFETY: as for `Nic`.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Registers memory by `ibv_reg_mr()`. `access` limits what the NIC may do with the memory: nothing but what the program
    /// needs, so that the other side can access only what it is meant to.
    ///
    /// # Errors
    ///
    /// ENOMEM (more than `ulimit -l` permits), EFAULT (not memory that can be pinned), EINVAL (remote writes without
    /// [`Access::LOCAL_WRITE`]).
    pub fn register(domain: &Arc<Domain>, span: &Span, access: Access) -> io::Result<Self> {
        let access = access.bits() as libc::c_int;
        let start = span.address() as *mut libc::c_void;
        // SAFETY: the span is mapped, and this object keeps a clone, so it stays mapped while it is registered. No
        // references to the memory exist, so the NIC may change it.
        let raw = unsafe { ffi::ibv_reg_mr(domain.raw.as_ptr(), start, span.len(), access) };
        // INVARIANT: registered above.
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self {
            raw,
            span: span.clone(),
            _domain: domain.clone(),
        })
    }

    /// Returns the memory.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Returns (local key, remote key).
    pub fn keys(&self) -> (u32, u32) {
        // SAFETY: registered by the invariant.
        let raw = unsafe { self.raw.as_ref() };
        (raw.lkey, raw.rkey)
    }

    /// Deregisters the memory, like a drop, and returns errors.
    ///
    /// # Errors
    ///
    /// EBUSY if memory windows are bound to the region.
    pub fn deregister(self) -> io::Result<()> {
        let this = mem::ManuallyDrop::new(self);
        // SAFETY: registered by the invariant, and not used after this; each field of `this` is read once.
        unsafe {
            let ended = errno(ffi::ibv_dereg_mr(this.raw.as_ptr()));
            drop(ptr::read(&this.span));
            drop(ptr::read(&this._domain));
            ended
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: registered by the invariant. The fields, and so the memory, are dropped after this.
        unsafe { ffi::ibv_dereg_mr(self.raw.as_ptr()) };
    }
}

/// A buffer that is registered with a NIC.
pub struct BufferMemory {
    // Fields are dropped in this order: the registration before its domain.
    registration: Registration,
    _domain: Arc<Domain>,
}

impl BufferMemory {
    /// Registers a whole buffer, by the method that the kernel offers. `access` is as for [`HostMemory::register`].
    ///
    /// # Errors
    ///
    /// Those of [`Buffer::register`].
    pub fn register(domain: &Arc<Domain>, buffer: &Buffer, access: Access) -> p2pmem::Result<Self> {
        // SAFETY: the domain came from ibv_alloc_pd(). It lives at least as long as the clone in the returned object,
        // which is dropped after the registration.
        let pd = unsafe { Pd::from_raw(domain.raw.cast()) }?;
        Ok(Self {
            registration: buffer.register(&pd, access)?,
            _domain: domain.clone(),
        })
    }

    /// Returns the registration.
    pub fn registration(&self) -> &Registration {
        &self.registration
    }

    /// Deregisters the buffer, like a drop, and returns errors.
    ///
    /// # Errors
    ///
    /// Those of [`Registration::deregister`].
    pub fn deregister(self) -> p2pmem::Result<()> {
        self.registration.deregister()
    }
}
