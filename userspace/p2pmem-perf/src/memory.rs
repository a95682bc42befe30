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

/// First and last PCI class of mass storage controllers for non-volatile memory.
const DRIVE: u32 = 0x01_0800;
const DRIVE_END: u32 = 0x01_08ff;
/// First and last PCI class of signal processing controllers, which FPGAs have.
const SIGNAL: u32 = 0x11_0000;
const SIGNAL_END: u32 = 0x11_ffff;

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

    /// Returns the offset of a buffer in the BAR of its provider, if it is known; `None` for host memory.
    pub fn bar_offset(&self) -> Option<u64> {
        match &self.registered {
            Registered::Host(_) => None,
            Registered::Buffer(_, buffer) => buffer.bar_offset(),
        }
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

/// Returns the kind of memory of a provider, by the PCI class of its device.
fn kind_of(provider: &Provider) -> MemoryKind {
    match provider.class {
        DRIVE..=DRIVE_END => MemoryKind::Cmb,
        SIGNAL..=SIGNAL_END => MemoryKind::Fpga,
        _ => MemoryKind::Accelerator,
    }
}

/// Returns whether a provider has memory of the kind. Memory of a drive or an FPGA is never memory of an accelerator.
fn has_kind(provider: &Provider, kind: MemoryKind) -> bool {
    match kind {
        MemoryKind::Cpu => false,
        MemoryKind::Pageless => provider.pageless,
        MemoryKind::Accelerator => kind_of(provider) == kind && !provider.pageless,
        MemoryKind::Cmb | MemoryKind::Fpga => kind_of(provider) == kind,
    }
}

/// Returns what to do if no provider has memory of the kind.
fn how_to_get(kind: MemoryKind) -> &'static str {
    match kind {
        MemoryKind::Cpu | MemoryKind::Accelerator => "publish a device (p2pmemctl publish <device>)",
        MemoryKind::Cmb => "use a drive with a controller memory buffer, which p2pmem adopts (p2pmemctl list)",
        MemoryKind::Fpga => "publish an FPGA, a device of PCI class 11 (p2pmemctl publish <device>)",
        MemoryKind::Pageless => "publish a device (p2pmemctl publish <device> --mode pageless)",
    }
}

/// Returns the request for a buffer of the kind, near the NIC.
fn request(options: MemoryOptions<'_>, device: &Device, nic: &str, bytes: u64) -> Result<Request> {
    let providers = device.providers()?;
    let name = options.kind.name();
    let near = Request::new(bytes).near([Client::resolve(nic)?]);
    if let Some(chosen) = options.provider {
        let found = providers
            .iter()
            .find(|p| p.id.to_string() == chosen || p.addr.to_string() == chosen);
        let Some(found) = found else {
            bail!("no provider {chosen} exists: `p2pmemctl list` lists all");
        };
        if !has_kind(found, options.kind) {
            bail!("provider {chosen} has no memory of the kind {name}: `p2pmemctl list` shows its device and mode");
        }
        return Ok(near.provider(found.id));
    }
    // The module does not choose by kind, so it can choose only if all providers are of this kind.
    let kind: Vec<_> = providers
        .iter()
        .filter(|provider| has_kind(provider, options.kind))
        .collect();
    if kind.is_empty() {
        bail!(
            "no provider has memory of the kind {name}: {}",
            how_to_get(options.kind)
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

#[cfg(test)]
mod tests {
    use super::*;
    use p2pmem::fake::Fake;
    use p2pmem::{PathClass, PciAddr};

    const NIC: &str = "0000:0b:00.0";

    fn at(bus: u8) -> PciAddr {
        PciAddr {
            domain: 0,
            bus,
            devfn: 0,
        }
    }

    /// Providers: accelerators 1 (far) and 2 (near), a drive 3 (nearest), FPGAs 4 (near) and 5 (far).
    fn machine() -> Fake {
        let nic: PciAddr = NIC.parse().unwrap();
        Fake::new()
            .provider(at(1), 256 << 20)
            .provider(at(2), 64 << 20)
            .adopted(at(3), 16 << 20, "nvme")
            .provider(at(4), 64 << 20)
            .provider(at(5), 256 << 20)
            .class(4, 0x11_8000)
            .class(5, 0x11_0100)
            .path(at(1), nic, PathClass::HostBridge, 8)
            .path(at(2), nic, PathClass::SameSwitch, 4)
            .path(at(3), nic, PathClass::SameSwitch, 2)
            .path(at(4), nic, PathClass::SameSwitch, 4)
            .path(at(5), nic, PathClass::HostBridge, 8)
    }

    /// Returns the provider of a buffer, or the error.
    fn allocated(fake: &Fake, kind: MemoryKind, provider: Option<&str>, bytes: u64) -> Result<u32, String> {
        let device = fake.device();
        let options = MemoryOptions {
            kind,
            provider,
            device: Path::new("/nonexistent"),
        };
        let request = request(options, &device, NIC, bytes).map_err(|error| format!("{error:#}"))?;
        let buffer = device.alloc(&request).map_err(|error| error.to_string())?;
        Ok(buffer.provider())
    }

    #[test]
    fn the_nearest_provider_of_the_kind_is_used() {
        let fake = machine();
        let of = |kind, bytes| allocated(&fake, kind, None, bytes);
        assert_eq!(of(MemoryKind::Accelerator, 1 << 20), Ok(2));
        assert_eq!(of(MemoryKind::Cmb, 1 << 20), Ok(3));
        assert_eq!(of(MemoryKind::Fpga, 1 << 20), Ok(4));
        // The near one is too small.
        assert_eq!(of(MemoryKind::Accelerator, 128 << 20), Ok(1));
        assert_eq!(of(MemoryKind::Fpga, 128 << 20), Ok(5));
    }

    #[test]
    fn a_full_provider_is_not_replaced_by_another_kind() {
        let fake = machine();
        let error = allocated(&fake, MemoryKind::Cmb, None, 32 << 20).unwrap_err();
        assert!(error.contains("0000:03:00.0"), "{error}");
        let error = allocated(&fake, MemoryKind::Accelerator, None, 512 << 20).unwrap_err();
        assert!(!error.contains("0000:03:00.0"), "{error}");
    }

    #[test]
    fn accelerators_are_never_drives_or_fpgas() {
        let fake = Fake::new()
            .adopted(at(3), 16 << 20, "nvme")
            .provider(at(4), 64 << 20)
            .class(2, 0x11_8000);
        let error = allocated(&fake, MemoryKind::Accelerator, None, 4096).unwrap_err();
        assert!(
            error.contains("no provider has memory of the kind accelerator") && error.contains("p2pmemctl publish"),
            "{error}"
        );
        assert_eq!(allocated(&fake, MemoryKind::Fpga, None, 4096), Ok(2));
    }

    #[test]
    fn each_missing_kind_says_what_to_do() {
        let fake = Fake::new();
        for (kind, words) in [
            (MemoryKind::Accelerator, "p2pmemctl publish <device>)"),
            (MemoryKind::Cmb, "controller memory buffer"),
            (MemoryKind::Fpga, "PCI class 11"),
            (MemoryKind::Pageless, "--mode pageless"),
        ] {
            let error = allocated(&fake, kind, None, 4096).unwrap_err();
            assert!(error.contains(kind.name()) && error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_named_provider_must_exist_and_have_the_kind() {
        let fake = machine();
        assert_eq!(allocated(&fake, MemoryKind::Fpga, Some("5"), 4096), Ok(5));
        assert_eq!(allocated(&fake, MemoryKind::Cmb, Some("0000:03:00.0"), 4096), Ok(3));
        for (provider, words) in [
            ("3", "provider 3 has no memory of the kind accelerator"),
            ("9", "no provider 9 exists"),
        ] {
            let error = allocated(&fake, MemoryKind::Accelerator, Some(provider), 4096).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
