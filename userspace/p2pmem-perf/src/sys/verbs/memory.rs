// SPDX-License-Identifier: MIT OR Apache-2.0

//! Registered memory: host memory, and buffers of p2pmem.

use std::io;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use p2pmem::{Access, Buffer, Pd, Registration};
use rdma_mummy_sys as ffi;

use super::{errno, Domain, ACCESS};
use crate::sys::Span;

/// Host memory that a NIC may use.
///
/// # Invariants
///
/// `raw` is registered until this is dropped, and so long `span` is mapped.
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
    /// Registers memory by `ibv_reg_mr()`.
    ///
    /// # Errors
    ///
    /// ENOMEM (more than `ulimit -l` allows to be pinned), EFAULT (not the kind of memory that this method takes).
    pub fn register(domain: &Arc<Domain>, span: &Span) -> io::Result<Self> {
        let access = ACCESS as libc::c_int;
        let start = span.address() as *mut libc::c_void;
        // SAFETY: the span is mapped, and stays so while it is registered because we keep a clone. Nobody has references
        // into it, so that the NIC may change it.
        let raw = unsafe { ffi::ibv_reg_mr(domain.raw.as_ptr(), start, span.len(), access) };
        // INVARIANT: just registered.
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self {
            raw,
            span: span.clone(),
            _domain: domain.clone(),
        })
    }

    /// The memory.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Keys to it: (local, remote).
    pub fn keys(&self) -> (u32, u32) {
        // SAFETY: registered by the invariant.
        let raw = unsafe { self.raw.as_ref() };
        (raw.lkey, raw.rkey)
    }

    /// Ends the registration, as dropping does, and says whether that worked.
    ///
    /// # Errors
    ///
    /// EBUSY.
    pub fn deregister(self) -> io::Result<()> {
        let this = mem::ManuallyDrop::new(self);
        // SAFETY: registered by the invariant, and not used again; fields of `this` are read once each.
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
        // SAFETY: registered by the invariant. Only then, as fields are dropped later, the memory goes.
        unsafe { ffi::ibv_dereg_mr(self.raw.as_ptr()) };
    }
}

/// A buffer that a NIC may use.
pub struct BufferMemory {
    // Dropped in this order: the registration before the domain it was made in.
    registration: Registration,
    _domain: Arc<Domain>,
}

impl BufferMemory {
    /// Registers all of a buffer, by whichever method the kernel offers.
    ///
    /// # Errors
    ///
    /// Those of [`Buffer::register`].
    pub fn register(domain: &Arc<Domain>, buffer: &Buffer) -> p2pmem::Result<Self> {
        // SAFETY: the domain came from ibv_alloc_pd() and lives as long as this function's reference to it, and then as
        // long as the clone in what is returned, which is dropped after the registration.
        let pd = unsafe { Pd::from_raw(domain.raw.cast()) }?;
        Ok(Self {
            registration: buffer.register(&pd, Access::from_bits_retain(ACCESS))?,
            _domain: domain.clone(),
        })
    }

    /// The registration.
    pub fn registration(&self) -> &Registration {
        &self.registration
    }

    /// Ends the registration, as dropping does, and says whether that worked.
    ///
    /// # Errors
    ///
    /// Those of [`Registration::deregister`].
    pub fn deregister(self) -> p2pmem::Result<()> {
        self.registration.deregister()
    }
}
