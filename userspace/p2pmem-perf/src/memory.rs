// SPDX-License-Identifier: MIT OR Apache-2.0

//! The memory for the payload: host memory, or a p2pmem buffer near the NIC.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use anyhow::{bail, Context, Result};
use p2pmem::{human_size, Buffer, Client, Device, Provider, Request};
use p2pmem_verbs::{Access, BufferMemory, Domain, HostMemory, Segment, Span};

use crate::cli::MemoryKind;
use crate::wire::Window;

/// Access of all registrations: everything except atomics.
const ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ);

/// Kind and origin of the memory.
#[derive(Debug, Clone, Copy)]
pub struct MemoryOptions<'a> {
    /// The kind of memory.
    pub kind: MemoryKind,
    /// The provider of the buffer; `None` selects one near the NIC.
    pub provider: Option<&'a str>,
    /// Path of the device file of p2pmem.
    pub device: &'a Path,
}

/// Registered memory. The program accesses it by a [`Span`], the NIC by keys.
pub struct Memory {
    // Fields are dropped in this order: the registration before the memory.
    registered: Registered,
    span: Span,
    provider: Option<Provider>,
}

enum Registered {
    Host(HostMemory),
    Buffer(BufferMemory, Buffer),
}

impl Memory {
    /// Allocates and registers memory.
    ///
    /// # Errors
    ///
    /// No such memory is available, or the NIC rejects it. The message says what to do.
    pub fn new(options: MemoryOptions<'_>, domain: &Arc<Domain>, bytes: u64) -> Result<Self> {
        let source = UnregisteredMemory::new(options, domain.nic().name(), bytes)?;
        source.register(domain)
    }

    /// Returns the memory as the program accesses it.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Returns the provider of the memory; `None` for host memory.
    pub fn provider(&self) -> Option<&Provider> {
        self.provider.as_ref()
    }

    /// Returns the registration method.
    pub fn method(&self) -> String {
        match &self.registered {
            Registered::Host(_) => "reg-mr".into(),
            Registered::Buffer(memory, _) => memory.registration().method().to_string(),
        }
    }

    /// Returns (address of the first byte, local key, remote key).
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

    /// Returns `bytes` bytes from byte `at`, for this side's work requests.
    pub fn segment(&self, at: u64, bytes: u64) -> Segment {
        let (address, lkey, _) = self.keys();
        Segment {
            address: address + at,
            // A message has at most 1 GiB.
            bytes: bytes as u32,
            lkey,
        }
    }

    /// Returns `bytes` bytes from byte `at`, for the peer.
    pub fn window(&self, at: u64, bytes: u64) -> Window {
        let (address, _, rkey) = self.keys();
        Window {
            address: address + at,
            rkey,
            bytes,
        }
    }

    /// Ends the registration. Returns the memory, which can be registered again.
    ///
    /// # Errors
    ///
    /// Those of `ibv_dereg_mr()` and [`p2pmem::Registration::deregister`].
    pub fn deregister(self) -> Result<UnregisteredMemory> {
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
        Ok(UnregisteredMemory {
            span: self.span,
            buffer,
            provider: self.provider,
        })
    }
}

/// Memory that is not registered.
pub struct UnregisteredMemory {
    span: Span,
    buffer: Option<Buffer>,
    provider: Option<Provider>,
}

impl UnregisteredMemory {
    /// Allocates memory near a NIC.
    ///
    /// # Errors
    ///
    /// Not enough memory is available. The message says what to do.
    pub fn new(options: MemoryOptions<'_>, nic: &str, bytes: u64) -> Result<Self> {
        if options.kind == MemoryKind::Cpu {
            let len = usize::try_from(bytes).context("the size exceeds the address space")?;
            let span = Span::host(len).with_context(|| {
                format!(
                    "cannot allocate {} of host memory: use fewer or smaller messages (--buffer, --size)",
                    human_size(bytes)
                )
            })?;
            return Ok(Self {
                span,
                buffer: None,
                provider: None,
            });
        }
        let device = Device::open_path(options.device)?;
        let buffer = device
            .alloc(&request(options, &device, nic, bytes)?)
            .with_context(|| format!("allocating {} near {nic}", human_size(bytes)))?;
        let provider = device.providers()?.into_iter().find(|p| p.id == buffer.provider());
        Ok(Self {
            span: Span::buffer(buffer.map()?),
            buffer: Some(buffer),
            provider,
        })
    }

    /// Maps the first bytes of a file or device.
    ///
    /// # Errors
    ///
    /// The file cannot be opened or mapped.
    pub fn mapped(path: &Path, bytes: u64) -> Result<Self> {
        let len = usize::try_from(bytes).context("the size exceeds the address space")?;
        let what = || format!("mapping {} of {}", human_size(bytes), path.display());
        let file = File::options().read(true).write(true).open(path).with_context(what)?;
        Ok(Self {
            span: Span::file(&file, len).with_context(what)?,
            buffer: None,
            provider: None,
        })
    }

    /// Registers the memory.
    ///
    /// # Errors
    ///
    /// The NIC rejects the memory. The message says what to do.
    pub fn register(self, domain: &Arc<Domain>) -> Result<Memory> {
        let registered = match self.buffer {
            Some(buffer) => Registered::Buffer(BufferMemory::register(domain, &buffer, ACCESS)?, buffer),
            None => Registered::Host(HostMemory::register(domain, &self.span, ACCESS).with_context(|| {
                format!(
                    "{} cannot register {} by ibv_reg_mr(): does the limit of pinned memory (ulimit -l) permit this?",
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

/// Returns the request for a buffer of the kind, near the NIC.
fn request(options: MemoryOptions<'_>, device: &Device, nic: &str, bytes: u64) -> Result<Request> {
    let providers = device.providers()?;
    let wanted = |provider: &Provider| provider.pageless == (options.kind == MemoryKind::Pageless);
    let name = options.kind.name();
    let near = Request::new(bytes).near([Client::resolve(nic)?]);
    if let Some(chosen) = options.provider {
        let found = providers
            .iter()
            .find(|p| p.id.to_string() == chosen || p.addr.to_string() == chosen);
        let Some(found) = found else {
            bail!("no provider {chosen} exists: `p2pmemctl list` lists all");
        };
        if !wanted(found) {
            bail!("provider {chosen} has no memory of the kind {name}: `p2pmemctl list` shows its mode");
        }
        return Ok(near.provider(found.id));
    }
    // The module does not choose by kind, so it can choose only if all providers are of this kind.
    let kind: Vec<_> = providers.iter().filter(|provider| wanted(provider)).collect();
    if kind.is_empty() {
        bail!(
            "no provider has memory of the kind {name}: publish a device (p2pmemctl publish <device>{})",
            if options.kind == MemoryKind::Pageless {
                " --mode pageless"
            } else {
                ""
            }
        );
    }
    if kind.len() == providers.len() {
        return Ok(near);
    }
    // Otherwise use the nearest provider of the kind, in the module's order. If none has space, the nearest one reports
    // that.
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
