// SPDX-License-Identifier: MIT OR Apache-2.0

//! Allocating: what a device makes of requests.

use std::os::fd::AsFd;

use p2pmem_sys as abi;

use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::{Error, Operation, Result};
use crate::full::FullProvider;
use crate::request::{addresses, Request, Strategy};
use crate::stripe::Stripe;

impl Device {
    /// Allocates a buffer.
    ///
    /// # Errors
    ///
    /// [`Error::Request`] for a request that no module could serve; [`Error::NoSpace`] where providers are too small
    /// (ENODEV) or full (ENOSPC), with their sizes and who uses them; [`Error::Refused`] with ENODEV (no provider could
    /// ever serve it, or a client is not there) or EINVAL, and with the module's reason.
    pub fn alloc(&self, request: &Request) -> Result<Buffer> {
        if request.strategy == Strategy::Stripe {
            return Err(Error::Request(
                "a stripe is several buffers: allocate it with Device::alloc_stripe()".into(),
            ));
        }
        let raw = request.raw()?;
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
            Err(error) => Err(self.with_rooms(error, &verdicts.unwrap_or_default())),
        }
    }

    /// Allocates a stripe: a buffer in each of several providers, which together serve a request with
    /// [`Strategy::Stripe`]. All parts are allocated, or none.
    ///
    /// # Errors
    ///
    /// As for [`Device::alloc`]; [`Error::Refused`] also where fewer providers than [`Request::parts`] can hold one.
    pub fn alloc_stripe(&self, request: &Request) -> Result<Stripe> {
        if request.strategy != Strategy::Stripe {
            let other = request.strategy;
            return Err(Error::Request(format!(
                "a stripe with strategy {other:?}: it takes Strategy::Stripe"
            )));
        }
        let raw = request.raw()?;
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

    /// Makes a buffer of a descriptor that [`Buffer::share`](crate::Buffer::share) made, in whichever process. The
    /// descriptor can be closed afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with EINVAL (no dma-buf), EXDEV (a dma-buf of another driver's), EACCES (a dma-buf of parts of
    /// a buffer), ENODEV (the buffer was revoked).
    pub fn import(&self, shared: impl AsFd) -> Result<Buffer> {
        let got = self.call(Operation::Import, |k| k.import(shared.as_fd()))?;
        Ok(Buffer::imported(self.clone(), &got))
    }

    /// Adds to a refused allocation who uses the memory, where it was refused for want of it.
    fn with_rooms(&self, error: Error, verdicts: &[abi::p2pmem_verdict]) -> Error {
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
