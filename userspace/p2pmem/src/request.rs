// SPDX-License-Identifier: MIT OR Apache-2.0

//! What a buffer has to be.

use p2pmem_sys as abi;

use crate::error::{Error, Result};
use crate::pci::Client;
use crate::types::PathClass;

/// Who chooses among the providers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Strategy {
    /// The module: path class, hops, bandwidth, NUMA, load.
    #[default]
    Nearest,
    /// The kernel's own `pci_p2pmem_find_many()`.
    Upstream,
    /// The least loaded provider that can serve, however far it is; [`Request::max_class`] keeps it near.
    Spread,
    /// The most loaded provider that can serve, so that others stay empty.
    Pack,
    /// Several providers, each with an equal part: for [`Device::alloc_stripe`](crate::Device::alloc_stripe).
    Stripe,
}

/// What a buffer has to be.
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
    align: u64,
    clients: Vec<Client>,
    pub(crate) strategy: Strategy,
    provider: Option<u32>,
    prefer: bool,
    max_class: Option<PathClass>,
    parts: u32,
}

impl Request {
    /// Asks for `size` bytes (rounded up to pages) near nothing in particular.
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

    /// Alignment in the BAR in bytes: a power of two up to 1 GiB. Default: a page.
    pub fn align(mut self, align: u64) -> Self {
        self.align = align;
        self
    }

    /// Adds devices that will do DMA with the buffer, 64 at most in all.
    pub fn near(mut self, clients: impl IntoIterator<Item = impl Into<Client>>) -> Self {
        self.clients.extend(clients.into_iter().map(Into::into));
        self
    }

    /// Says who chooses.
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Takes the provider with this id and no other; see [`Request::prefer`].
    pub fn provider(mut self, id: u32) -> Self {
        self.provider = Some(id);
        self.prefer = false;
        self
    }

    /// Takes the provider with this id if it can serve, else another one.
    pub fn prefer(mut self, id: u32) -> Self {
        self.provider = Some(id);
        self.prefer = true;
        self
    }

    /// The farthest path class allowed. Default: any that is reachable.
    pub fn max_class(mut self, class: PathClass) -> Self {
        self.max_class = Some(class);
        self
    }

    /// How many providers a stripe is divided among, 16 at most. Default: as many as can hold a part.
    pub fn parts(mut self, parts: u32) -> Self {
        self.parts = parts;
        self
    }

    /// What it wants of one provider, 0 where only the module knows: verdicts speak of that.
    pub(crate) fn size_of_one(&self) -> u64 {
        match self.strategy {
            Strategy::Stripe => 0,
            _ => self.size,
        }
    }

    /// The requested clients.
    pub fn clients(&self) -> &[Client] {
        &self.clients
    }

    /// The ABI's form, without the clients. What can be known to be wrong is refused here in words.
    pub(crate) fn raw(&self) -> Result<abi::p2pmem_request> {
        let bad = |why: String| Err(Error::Request(why));
        let most = abi::P2PMEM_MAX_CLIENTS as usize;
        if self.size == 0 {
            return bad("a buffer of 0 bytes".into());
        }
        if self.align != 0 && !self.align.is_power_of_two() {
            return bad(format!(
                "an alignment of {} bytes, which is not a power of two",
                self.align
            ));
        }
        if self.align > u64::from(abi::P2PMEM_MAX_ALIGN) {
            return bad(format!(
                "an alignment of {} bytes, at most {} are allowed",
                self.align,
                abi::P2PMEM_MAX_ALIGN
            ));
        }
        if self.clients.len() > most {
            return bad(format!("{} clients, at most {most} are possible", self.clients.len()));
        }
        if self.provider == Some(0) {
            return bad("provider 0, but ids start at 1".into());
        }
        if self.strategy != Strategy::Stripe && self.parts != 0 {
            return bad(format!("{} parts without Strategy::Stripe", self.parts));
        }
        if self.parts > abi::P2PMEM_MAX_PARTS {
            let most = abi::P2PMEM_MAX_PARTS;
            return bad(format!("{} parts, at most {most} are possible", self.parts));
        }
        if u64::from(self.parts) > self.size.div_ceil(4096) {
            return bad(format!("{} bytes in {} parts of whole pages", self.size, self.parts));
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

/// The ABI's form of clients.
pub(crate) fn addresses(clients: &[Client]) -> Vec<abi::p2pmem_pci_addr> {
    clients.iter().map(|c| c.addr().into()).collect()
}
