// SPDX-License-Identifier: MIT OR Apache-2.0

//! The memory for the payload: host memory, or a p2pmem buffer near the NIC.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use p2pmem::{human_size, Buffer, Client, Device, Provider, Request};
use p2pmem_verbs::{Access, BufferMemory, Domain, HostMemory, Segment, Span};
use serde::{Deserialize, Serialize};

use crate::kind::MemoryKind;

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

/// Bytes of the smallest buffer of a test.
const SMALLEST_BUFFER: u64 = 5 * 4096;
/// Time between two queries whether freed memory is cleared.
const CLEARING_POLL: Duration = Duration::from_millis(5);

/// Memory that the peer may access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Address of the first byte, as in a work request.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
    /// Length in bytes.
    pub bytes: u64,
}

impl Window {
    /// Returns the address of byte `at`. `bytes` bytes from there must be inside the window.
    ///
    /// # Errors
    ///
    /// The bytes are not inside the window.
    pub fn at(&self, at: u64, bytes: u64) -> Result<u64> {
        match at.checked_add(bytes) {
            Some(end) if end <= self.bytes => self.address.checked_add(at).context("the address exceeds 64 bits"),
            _ => bail!(
                "{bytes} bytes at {at} exceed the {} bytes that the other side offers",
                self.bytes
            ),
        }
    }
}

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
                    "cannot allocate {} of host memory: use a smaller payload, such as by --size",
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

/// Returns the bytes that the host's memory has for tests: a third of the available bytes, since both sides may be on one
/// machine, and others need some too.
fn host_space() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("reading /proc/meminfo")?;
    available(&text).map(|bytes| bytes / 3)
}

fn available(meminfo: &str) -> Result<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let number = line.and_then(|line| line.trim().strip_suffix("kB"));
    let kib: Option<u64> = number.and_then(|number| number.trim().parse().ok());
    kib.and_then(|kib| kib.checked_mul(1024))
        .context("/proc/meminfo has no line MemAvailable")
}

/// Fails if the caller must not wait longer.
pub type Proceed<'a> = &'a dyn Fn() -> Result<()>;

/// Memory that a test wants.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// Bytes for each NIC.
    pub bytes: u64,
    /// End of the wait until freed memory is cleared, if less is free.
    pub deadline: Instant,
}

/// Returns the bytes of memory that a test can have for each NIC. If several NICs use one provider, they share its memory.
///
/// # Errors
///
/// No such memory exists; the message says what to do. Those of `proceed`, which is called during the wait.
pub fn space(options: MemoryOptions<'_>, nics: &[&str], wanted: Wanted, proceed: Proceed<'_>) -> Result<u64> {
    if options.kind == MemoryKind::Cpu {
        return Ok(host_space()? / nics.len().max(1) as u64);
    }
    space_of(options, &Device::open_path(options.device)?, nics, wanted, proceed)
}

fn space_of(
    options: MemoryOptions<'_>,
    device: &Device,
    nics: &[&str],
    wanted: Wanted,
    proceed: Proceed<'_>,
) -> Result<u64> {
    // Some of the NICs, or all, may use one provider.
    let wanted = Wanted {
        bytes: wanted.bytes.saturating_mul(nics.len() as u64),
        ..wanted
    };
    let mut largest = BTreeMap::<u32, (u64, u64)>::new();
    for nic in nics {
        let (id, bytes) = largest_near(options, device, nic, wanted, proceed)?;
        let (_, count) = largest.entry(id).or_insert((bytes, 0));
        *count += 1;
    }
    let shares = largest.values().map(|(bytes, nics)| bytes / nics);
    Ok(shares.min().unwrap_or(0))
}

/// Returns the provider that a small buffer near the NIC would use, and the bytes of its largest free piece.
fn largest_near(
    options: MemoryOptions<'_>,
    device: &Device,
    nic: &str,
    wanted: Wanted,
    proceed: Proceed<'_>,
) -> Result<(u32, u64)> {
    let request = request(options, device, nic, SMALLEST_BUFFER)?;
    let explanation = device.explain(&request)?;
    let id = explanation.chosen_verdict().map(|verdict| verdict.provider);
    let Some(id) = id else {
        bail!(
            "no memory of the kind {} near {nic}: {}",
            options.kind.name(),
            explanation.text
        );
    };
    loop {
        proceed()?;
        let providers = device.providers()?;
        let provider = providers.iter().find(|provider| provider.id == id);
        let provider = provider.with_context(|| format!("provider {id} was removed"))?;
        // The buffers of an earlier test are free as soon as they are cleared.
        let grows = provider.scrubbing > 0 && provider.largest < wanted.bytes;
        if !grows || Instant::now() >= wanted.deadline {
            return Ok((id, provider.largest));
        }
        thread::sleep(CLEARING_POLL);
    }
}

/// Returns the providers that have memory of the kind; only the one that `options` names, if it names one.
///
/// # Errors
///
/// No provider has such memory, or the named one does not exist or has memory of another kind. The message says what to do.
pub fn providers(options: MemoryOptions<'_>, device: &Device) -> Result<Vec<Provider>> {
    let name = options.kind.name();
    let mut providers = device.providers()?;
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
        return Ok(vec![found.clone()]);
    }
    providers.retain(|provider| has_kind(provider, options.kind));
    if providers.is_empty() {
        bail!(
            "no provider has memory of the kind {name}: {}",
            how_to_get(options.kind)
        );
    }
    Ok(providers)
}

/// Returns the request for a buffer of the kind, near the NIC.
fn request(options: MemoryOptions<'_>, device: &Device, nic: &str, bytes: u64) -> Result<Request> {
    let near = Request::new(bytes).near([Client::resolve(nic)?]);
    let kind = providers(options, device)?;
    if options.provider.is_some() {
        return Ok(near.provider(kind[0].id));
    }
    // The module does not choose by kind, so it can choose only if all providers are of this kind.
    if kind.len() == device.providers()?.len() {
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
    fn the_space_is_the_largest_free_piece_of_the_nearest_provider() {
        let fake = machine();
        let device = fake.device();
        let options = |kind| MemoryOptions {
            kind,
            provider: None,
            device: Path::new("/nonexistent"),
        };
        let wanted = Wanted {
            bytes: 1 << 40,
            deadline: Instant::now() + Duration::from_secs(60),
        };
        let space = |kind, nics: &[&str]| {
            space_of(options(kind), &device, nics, wanted, &|| Ok(())).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(space(MemoryKind::Cmb, &[NIC]), Ok(16 << 20));
        assert_eq!(space(MemoryKind::Accelerator, &[NIC]), Ok(64 << 20));
        // Two NICs share the provider.
        assert_eq!(space(MemoryKind::Fpga, &[NIC, NIC]), Ok(32 << 20));
        let error = space(MemoryKind::Pageless, &[NIC]).unwrap_err();
        assert!(error.contains("--mode pageless"), "{error}");
        let stopped = space_of(options(MemoryKind::Cmb), &device, &[NIC], wanted, &|| bail!("stopped"));
        assert_eq!(stopped.unwrap_err().to_string(), "stopped");
        // A provider without space is not the nearest one.
        let held = device.alloc(&Request::new(64 << 20).provider(2)).unwrap();
        assert_eq!(space(MemoryKind::Accelerator, &[NIC]), Ok(256 << 20));
        drop(held);
    }

    #[test]
    fn the_hosts_space_is_a_part_of_the_available_memory() {
        assert_eq!(
            available("MemFree: 1 kB\nMemAvailable:     300 kB\n").unwrap(),
            300 << 10
        );
        for text in ["", "MemAvailable: x kB", "MemAvailable: 3"] {
            assert!(available(text).is_err(), "{text}");
        }
        assert!(host_space().unwrap() > 0);
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
