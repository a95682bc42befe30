// SPDX-License-Identifier: MIT OR Apache-2.0

//! Requests for allocations.

use p2pmem_sys as abi;

use crate::error::{Error, Result};
use crate::pci::Client;
use crate::types::PathClass;

/// The order in which providers are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Strategy {
    /// The nearest provider: by path class, hops, bandwidth, NUMA distance, and load.
    #[default]
    Nearest,
    /// The provider that the kernel's `pci_p2pmem_find_many()` returns.
    Upstream,
    /// The least loaded provider that can serve the request, at any distance; [`Request::max_class`] limits the
    /// distance.
    Spread,
    /// The most loaded provider that can serve the request, so that others stay empty.
    Pack,
    /// Several providers, each with an equal part. Only for [`Device::alloc_stripe`](crate::Device::alloc_stripe).
    Stripe,
}

/// A request for an allocation: size, alignment, clients, strategy, and limits.
///
/// ```
/// use p2pmem::{Client, PathClass, PciAddr, Request};
///
/// let drive: PciAddr = "0000:03:00.0".parse()?;
/// let request = Request::new(16 << 20).align(2 << 20).near([drive]).max_class(PathClass::SameSwitch);
/// # let _ = request;
/// # Ok::<(), p2pmem::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Request {
    size: u64,
    pub(crate) align: u64,
    clients: Vec<Client>,
    pub(crate) strategy: Strategy,
    provider: Option<u32>,
    prefer: bool,
    max_class: Option<PathClass>,
    parts: u32,
}

impl Request {
    /// A request for `size` bytes, rounded up to pages, without clients.
    pub fn new(size: u64) -> Self {
        Self {
            size,
            align: 0,
            clients: Vec::new(),
            strategy: Strategy::default(),
            provider: None,
            prefer: false,
            max_class: None,
            parts: 0,
        }
    }

    /// Sets the alignment in the BAR in bytes: a power of two, at most 1 GiB. Default: a page.
    pub fn align(mut self, align: u64) -> Self {
        self.align = align;
        self
    }

    /// Adds devices that will do DMA to the buffer, at most 64 in total.
    pub fn near(mut self, clients: impl IntoIterator<Item = impl Into<Client>>) -> Self {
        self.clients.extend(clients.into_iter().map(Into::into));
        self
    }

    /// Sets the strategy. Default: [`Strategy::Nearest`].
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Requires the provider with this id; see also [`Request::prefer`].
    pub fn provider(mut self, id: u32) -> Self {
        self.provider = Some(id);
        self.prefer = false;
        self
    }

    /// Prefers the provider with this id; another provider serves the request if this one cannot.
    pub fn prefer(mut self, id: u32) -> Self {
        self.provider = Some(id);
        self.prefer = true;
        self
    }

    /// Sets the farthest path class that is allowed. Default: any class except unreachable.
    pub fn max_class(mut self, class: PathClass) -> Self {
        self.max_class = Some(class);
        self
    }

    /// Sets the number of providers of a stripe, at most 16. Default: as many as can hold a part.
    pub fn parts(mut self, parts: u32) -> Self {
        self.parts = parts;
        self
    }

    /// Returns the bytes requested from one provider, to which verdicts refer; 0 if only the module knows them.
    pub(crate) fn size_of_one(&self) -> u64 {
        match self.strategy {
            Strategy::Stripe => 0,
            _ => self.size,
        }
    }

    /// Returns the clients.
    pub fn clients(&self) -> &[Client] {
        &self.clients
    }

    /// Returns the request in the ABI's form, without the clients. Fails with [`Error::Request`] for a request that
    /// every module refuses.
    pub(crate) fn raw(&self) -> Result<abi::p2pmem_request> {
        let bad = |why: String| Err(Error::Request(why));
        let most = abi::P2PMEM_MAX_CLIENTS as usize;
        if self.size == 0 {
            return bad("a buffer of 0 bytes".into());
        }
        if self.align != 0 && !self.align.is_power_of_two() {
            return bad(format!("an alignment of {} bytes: use a power of two", self.align));
        }
        if self.align > u64::from(abi::P2PMEM_MAX_ALIGN) {
            return bad(format!(
                "an alignment of {} bytes: at most {} are allowed",
                self.align,
                abi::P2PMEM_MAX_ALIGN
            ));
        }
        if self.clients.len() > most {
            return bad(format!("{} clients: at most {most} are possible", self.clients.len()));
        }
        if self.provider == Some(0) {
            return bad("provider 0: ids start at 1".into());
        }
        if self.strategy != Strategy::Stripe && self.parts != 0 {
            return bad(format!("{} parts without Strategy::Stripe", self.parts));
        }
        if self.parts > abi::P2PMEM_MAX_PARTS {
            let most = abi::P2PMEM_MAX_PARTS;
            return bad(format!("{} parts: at most {most} are possible", self.parts));
        }
        if u64::from(self.parts) > self.size.div_ceil(4096) {
            return bad(format!(
                "{} bytes in {} parts: each part needs a page",
                self.size, self.parts
            ));
        }
        if self.strategy == Strategy::Stripe && self.provider.is_some() && !self.prefer {
            return bad("a stripe spans several providers: prefer one, but do not require it".into());
        }
        Ok(abi::p2pmem_request {
            size: self.size,
            align: self.align,
            flags: if self.prefer { abi::P2PMEM_ALLOC_PREFER } else { 0 },
            strategy: match self.strategy {
                Strategy::Nearest => abi::P2PMEM_STRATEGY_NEAREST,
                Strategy::Upstream => abi::P2PMEM_STRATEGY_UPSTREAM,
                Strategy::Spread => abi::P2PMEM_STRATEGY_SPREAD,
                Strategy::Pack => abi::P2PMEM_STRATEGY_PACK,
                Strategy::Stripe => abi::P2PMEM_STRATEGY_STRIPE,
            },
            provider: self.provider.unwrap_or(0),
            max_class: self.max_class.map_or(0, PathClass::to_raw),
            parts: self.parts,
            ..Default::default()
        })
    }
}

/// Returns clients in the ABI's form.
pub(crate) fn addresses(clients: &[Client]) -> Vec<abi::p2pmem_pci_addr> {
    clients.iter().map(|c| c.addr().into()).collect()
}
