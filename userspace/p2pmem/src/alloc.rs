// SPDX-License-Identifier: MIT OR Apache-2.0

//! Allocation and import of buffers and stripes.

use std::os::fd::AsFd;

use p2pmem_sys as abi;

use crate::backend::Capability;
use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::{Error, Operation, Result};
use crate::full::FullProvider;
use crate::request::{addresses, Request, Strategy};
use crate::stripe::Stripe;

impl Device {
    /// Allocates a buffer.
    ///
    /// ```
    /// # let device = p2pmem::fake::Fake::example().device();
    /// use p2pmem::{ErrorKind, Request};
    ///
    /// let buffer = device.alloc(&Request::new(5000))?;
    /// assert_eq!(buffer.size(), 8192, "rounded up to pages");
    /// let error = device.alloc(&Request::new(1 << 50)).unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::NoProvider);
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Request`] for a request that no module could serve; [`Error::NotSupported`] for a strategy or an
    /// alignment that the backend does not support; [`Error::NoSpace`] if providers are too small (ENODEV) or full
    /// (ENOSPC), with their sizes and holders; [`Error::Open`] if a device node of VFIO cannot be opened;
    /// [`Error::Refused`], with the module's message, for EINVAL, ENODEV (no provider can ever serve the request, or a
    /// client does not exist), EACCES (a rule denies the memory), EDQUOT (a quota or the cgroup's limit is exceeded),
    /// ENOMEM, or EMFILE.
    pub fn alloc(&self, request: &Request) -> Result<Buffer> {
        if request.strategy == Strategy::Stripe {
            return Err(Error::Request(
                "a stripe is several buffers: allocate it with Device::alloc_stripe()".into(),
            ));
        }
        let raw = request.raw()?;
        self.require_for(request)?;
        let clients = addresses(request.clients());
        let mut last = self.lock();
        *last = Some(request.clone());
        let got = self.call_locked(Operation::Alloc, |k| k.alloc(&raw, &clients));
        let verdicts = match got {
            Ok(_) => None,
            Err(_) => self.explain_raw(None).ok().map(|(_, verdicts, _)| verdicts),
        };
        drop(last);
        match got {
            Ok(got) => Ok(Buffer::new(self.clone(), &got)),
            Err(error) => Err(self.with_full_providers(error, &verdicts.unwrap_or_default())),
        }
    }

    /// Allocates a stripe: a buffer in each of several providers, which together serve a request with
    /// [`Strategy::Stripe`]. Allocates all parts or none.
    ///
    /// # Errors
    ///
    /// Those of [`Device::alloc`], without [`Error::NoSpace`]; [`Error::Refused`] also if fewer than [`Request::parts`]
    /// providers can hold a part.
    pub fn alloc_stripe(&self, request: &Request) -> Result<Stripe> {
        if request.strategy != Strategy::Stripe {
            let other = request.strategy;
            return Err(Error::Request(format!(
                "a stripe with strategy {other:?}: use Strategy::Stripe"
            )));
        }
        let raw = request.raw()?;
        self.require_for(request)?;
        let clients = addresses(request.clients());
        let mut parts = vec![abi::p2pmem_part::default(); abi::P2PMEM_MAX_PARTS as usize];
        let mut last = self.lock();
        *last = Some(request.clone());
        let there = self.call_locked(Operation::Stripe, |k| k.stripe(&raw, &clients, &mut parts))?;
        drop(last);
        let parts = parts.iter().take(there);
        Ok(Stripe::new(
            parts.map(|part| Buffer::of_part(self.clone(), part)).collect(),
        ))
    }

    /// Imports a buffer from a descriptor that [`Buffer::share`](crate::Buffer::share) created in any process. The
    /// descriptor can be closed afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with EINVAL (not a dma-buf), EXDEV (a dma-buf of another driver), EACCES (a dma-buf of parts
    /// of a buffer), ENODEV (the buffer was revoked), or EMFILE (too many handles); [`Error::NotSupported`] if the
    /// backend is not the module.
    pub fn import(&self, shared: impl AsFd) -> Result<Buffer> {
        self.require(Capability::Sharing)?;
        let got = self.call(Operation::Import, |k| k.import(shared.as_fd()))?;
        Ok(Buffer::imported(self.clone(), &got))
    }

    /// Adds sizes and holders of the providers to an allocation's error, if the providers do not have enough space.
    fn with_full_providers(&self, error: Error, verdicts: &[abi::p2pmem_verdict]) -> Error {
        match error {
            Error::Refused { errno, reason, .. } if [libc::ENOSPC, libc::ENODEV].contains(&errno) => {
                let providers = self.providers().unwrap_or_default();
                let table = self.kernel().holders().ok();
                match FullProvider::of(verdicts, &providers, table.as_deref()) {
                    full if full.is_empty() => Error::Refused {
                        operation: Operation::Alloc,
                        errno,
                        reason,
                    },
                    full => Error::NoSpace { errno, reason, full },
                }
            }
            error => error,
        }
    }
}
