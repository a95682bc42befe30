// SPDX-License-Identifier: MIT OR Apache-2.0

//! The memory that a test's payload is in: host memory, or a p2pmem buffer near the NIC.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use anyhow::{bail, Context, Result};
use p2pmem::{human_size, Buffer, Client, Device, Provider, Request};

use crate::cli::Kind;
use crate::sys::verbs::{BufferMemory, Domain, HostMemory, Segment};
use crate::sys::Span;
use crate::wire::Window;

/// Where a side's payload may be: its kind of memory, and how to get at it.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The kind of memory.
    pub kind: Kind,
    /// The provider to take it from.
    pub provider: Option<&'a str>,
    /// The module's device.
    pub device: &'a Path,
}

/// Registered memory. The program reaches it as a [`Span`], the NIC by its keys.
pub struct Memory {
    // Dropped in this order: the registration before the memory.
    registered: Registered,
    span: Span,
    provider: Option<Provider>,
}

enum Registered {
    Host(HostMemory),
    Buffer(BufferMemory, Buffer),
}

impl Memory {
    /// Gets and registers memory.
    ///
    /// # Errors
    ///
    /// There is no such memory, or the NIC cannot have it; with what to do.
    pub fn new(place: Place<'_>, domain: &Arc<Domain>, bytes: u64) -> Result<Self> {
        let source = Source::new(place, domain.nic().name(), bytes)?;
        source.register(domain)
    }

    /// What the program reads and writes it by.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// The provider that it is a part of; none for host memory.
    pub fn provider(&self) -> Option<&Provider> {
        self.provider.as_ref()
    }

    /// How it was registered.
    pub fn method(&self) -> String {
        match &self.registered {
            Registered::Host(_) => "reg-mr".into(),
            Registered::Buffer(memory, _) => memory.registration().method().to_string(),
        }
    }

    /// The address of its first byte, and its keys: (address, local, remote).
    fn keys(&self) -> (u64, u32, u32) {
        match &self.registered {
            Registered::Host(memory) => {
                let (local, remote) = memory.keys();
                (self.span.address(), local, remote)
            }
            Registered::Buffer(memory, _) => {
                let registration = memory.registration();
                (registration.addr(), registration.lkey(), registration.rkey())
            }
        }
    }

    /// `bytes` from byte `at` on, for this side's work requests.
    pub fn piece(&self, at: u64, bytes: u64) -> Segment {
        let (address, lkey, _) = self.keys();
        Segment {
            address: address + at,
            // Messages are 1 GiB at most.
            bytes: bytes as u32,
            lkey,
        }
    }

    /// `bytes` from byte `at` on, for the other side.
    pub fn window(&self, at: u64, bytes: u64) -> Window {
        let (address, _, rkey) = self.keys();
        Window {
            address: address + at,
            rkey,
            bytes,
        }
    }

    /// Ends the registration and gives the memory back, to be registered again.
    ///
    /// # Errors
    ///
    /// The NIC does not let go.
    pub fn deregister(self) -> Result<Source> {
        let buffer = match self.registered {
            Registered::Host(memory) => {
                memory.deregister().context("ending the registration of host memory")?;
                None
            }
            Registered::Buffer(memory, buffer) => {
                memory.deregister()?;
                Some(buffer)
            }
        };
        Ok(Source {
            span: self.span,
            buffer,
            provider: self.provider,
        })
    }
}

/// Memory that is not registered.
pub struct Source {
    span: Span,
    buffer: Option<Buffer>,
    provider: Option<Provider>,
}

impl Source {
    /// Gets memory near a NIC.
    ///
    /// # Errors
    ///
    /// There is not as much; with what to do.
    pub fn new(place: Place<'_>, nic: &str, bytes: u64) -> Result<Self> {
        if place.kind == Kind::Cpu {
            let len = usize::try_from(bytes).context("more memory than there are addresses")?;
            let span = Span::host(len).with_context(|| {
                format!(
                    "{} of host memory are not to be had: try fewer or smaller messages (--buffer, --size)",
                    human_size(bytes)
                )
            })?;
            return Ok(Self {
                span,
                buffer: None,
                provider: None,
            });
        }
        let device = Device::open_path(place.device)?;
        let buffer = device
            .alloc(&request(place, &device, nic, bytes)?)
            .with_context(|| format!("{} near {nic}", human_size(bytes)))?;
        let provider = device.providers()?.into_iter().find(|p| p.id == buffer.provider());
        Ok(Self {
            span: Span::buffer(buffer.map()?),
            buffer: Some(buffer),
            provider,
        })
    }

    /// The first bytes of a file or device that can be mapped.
    ///
    /// # Errors
    ///
    /// It cannot be opened, or mapped.
    pub fn mapped(path: &Path, bytes: u64) -> Result<Self> {
        let len = usize::try_from(bytes).context("more memory than there are addresses")?;
        let what = || format!("mapping {} of {}", human_size(bytes), path.display());
        let file = File::options().read(true).write(true).open(path).with_context(what)?;
        Ok(Self {
            span: Span::file(&file, len).with_context(what)?,
            buffer: None,
            provider: None,
        })
    }

    /// Registers it.
    ///
    /// # Errors
    ///
    /// The NIC cannot have it; with what to do.
    pub fn register(self, domain: &Arc<Domain>) -> Result<Memory> {
        let registered = match self.buffer {
            Some(buffer) => Registered::Buffer(BufferMemory::register(domain, &buffer)?, buffer),
            None => Registered::Host(HostMemory::register(domain, &self.span).with_context(|| {
                format!(
                    "{} does not take {} by ibv_reg_mr(): may this program pin as much (ulimit -l)?",
                    domain.nic().name(),
                    human_size(self.span.len() as u64)
                )
            })?),
        };
        Ok(Memory {
            registered,
            span: self.span,
            provider: self.provider,
        })
    }
}

/// The request for memory of that kind, near the NIC.
fn request(place: Place<'_>, device: &Device, nic: &str, bytes: u64) -> Result<Request> {
    let providers = device.providers()?;
    let wanted = |provider: &Provider| provider.pageless == (place.kind == Kind::Pageless);
    let name = place.kind.name();
    let near = Request::new(bytes).near([Client::resolve(nic)?]);
    if let Some(chosen) = place.provider {
        let found = providers
            .iter()
            .find(|p| p.id.to_string() == chosen || p.addr.to_string() == chosen);
        let Some(found) = found else {
            bail!("there is no provider {chosen}: `p2pmemctl list` has all");
        };
        if !wanted(found) {
            bail!("the memory of provider {chosen} is not of the kind {name}: `p2pmemctl list` shows its mode");
        }
        return Ok(near.provider(found.id));
    }
    // The orchestrator knows the nearest provider but not the wanted kind, so it decides if all providers are of that kind.
    let kind: Vec<_> = providers.iter().filter(|provider| wanted(provider)).collect();
    if kind.is_empty() {
        bail!(
            "no provider has memory of the kind {name}: publish a device's first (p2pmemctl publish <device>{})",
            if place.kind == Kind::Pageless {
                " --mode pageless"
            } else {
                ""
            }
        );
    }
    if kind.len() == providers.len() {
        return Ok(near);
    }
    // Otherwise the nearest provider of the kind, by the orchestrator's order; if none has space, the nearest one reports that.
    let explanation = device.explain(&near)?;
    let best = explanation
        .verdicts
        .iter()
        .filter(|verdict| kind.iter().any(|provider| provider.id == verdict.provider))
        .min_by_key(|verdict| {
            (
                verdict.largest < bytes,
                verdict.class.is_none(),
                verdict.class,
                verdict.hops,
            )
        });
    Ok(near.provider(best.map_or(kind[0].id, |verdict| verdict.provider)))
}
