// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory for queues and payload: host memory, or a buffer of p2pmem in an accelerator.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use p2pmem::{Access, Buffer, Client, Device, ExportOptions, Mapping, Registration, Request};
use sideway::ibverbs::protection_domain::ProtectionDomain;

use crate::error::Result;
use crate::region::{Memory, Region, RegionKind};
use crate::sys::uverbs::{HostRegistration, Place};
use crate::sys::{HostMemory, PAGE};
use crate::wqe::{Remote, Segment};

/// A mapped buffer of p2pmem. If its provider is removed, accesses raise SIGBUS. Queues in the memory delay the removal,
/// because the kernel pins them; payload does not.
struct PeerMemory {
    mapping: Mapping,
    bar_offset: Option<u64>,
}

impl PeerMemory {
    fn new(buffer: &Buffer) -> Result<Self> {
        Ok(Self {
            mapping: buffer.map()?,
            bar_offset: buffer.bar_offset(),
        })
    }
}

impl fmt::Debug for PeerMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} bytes of peer memory", self.mapping.len())
    }
}

impl PeerMemory {
    /// Every caller of [`Memory`] stays inside, or accepts the panic.
    fn inside<T>(&self, at: usize, access: p2pmem::Result<T>) -> T {
        access.unwrap_or_else(|error| panic!("access at {at} of {self:?}: {error}"))
    }
}

impl Memory for PeerMemory {
    fn len(&self) -> usize {
        self.mapping.len()
    }

    fn address(&self) -> u64 {
        self.mapping.as_ptr() as u64
    }

    fn bar_offset(&self) -> Option<u64> {
        self.bar_offset
    }

    fn load_dword(&self, at: usize) -> u32 {
        assert!(at % 4 == 0, "{at} is not aligned to 4 bytes");
        u32::from_le(self.inside(at, self.mapping.read(at)))
    }

    fn store_dword(&self, at: usize, value: u32) {
        assert!(at % 4 == 0, "{at} is not aligned to 4 bytes");
        self.inside(at, self.mapping.write(at, value.to_le()));
    }

    fn store_qword(&self, at: usize, value: u64) {
        assert!(at % 8 == 0, "{at} is not aligned to 8 bytes");
        self.inside(at, self.mapping.write(at, value.to_le()));
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        self.inside(at, self.mapping.copy_to_slice(at, out));
    }

    fn write(&self, at: usize, data: &[u8]) {
        self.inside(at, self.mapping.copy_from_slice(at, data));
    }

    fn fence(&self) {
        self.mapping.flush();
    }
}

/// Where memory is allocated.
#[derive(Debug, Clone)]
pub enum MemorySource {
    /// Memory of the host.
    Host,
    /// Buffers of p2pmem near a NIC. Queues need a provider whose administrator allows pinned exports.
    Accelerator {
        /// The open device of p2pmem.
        device: Device,
        /// The NIC.
        near: Client,
        /// Id of the provider, which the executor is part of; `None` for any provider near the NIC.
        provider: Option<u32>,
    },
}

impl MemorySource {
    fn buffer(device: &Device, near: &Client, provider: Option<u32>, len: usize) -> Result<Buffer> {
        let mut request = Request::new(len as u64).near([near.clone()]);
        if let Some(provider) = provider {
            request = request.provider(provider);
        }
        Ok(device.alloc(&request)?)
    }

    /// Allocates memory for queues.
    ///
    /// # Errors
    ///
    /// Those of an allocation, and of a pinned export: EPERM if the administrator does not allow them for the provider.
    pub fn queue_memory(&self, len: usize) -> Result<QueueMemory> {
        let len = len.next_multiple_of(PAGE);
        Ok(match self {
            Self::Host => {
                let memory = Arc::new(HostMemory::new(len)?);
                QueueMemory {
                    memory: memory.clone(),
                    source: Source::Host(memory),
                    used: 0,
                }
            }
            Self::Accelerator { device, near, provider } => {
                let buffer = Self::buffer(device, near, *provider, len)?;
                let dmabuf = buffer.export(&ExportOptions::new().pinned(true))?;
                QueueMemory {
                    memory: Arc::new(PeerMemory::new(&buffer)?),
                    source: Source::DmaBuf(Arc::new(OwnedFd::from(dmabuf))),
                    used: 0,
                }
            }
        })
    }

    /// Allocates memory for payload, and registers it.
    ///
    /// # Errors
    ///
    /// Those of an allocation and of a registration.
    pub fn data_memory(&self, domain: &Arc<ProtectionDomain>, len: usize) -> Result<DataMemory> {
        let len = len.max(1).next_multiple_of(PAGE);
        let (region, keys, start, registered) = match self {
            Self::Host => {
                let memory = Arc::new(HostMemory::new(len)?);
                let registered = HostRegistration::new(domain, &memory)?;
                let (keys, start) = ((registered.lkey(), registered.rkey()), memory.address());
                (
                    Region::new(RegionKind::Data, memory),
                    keys,
                    start,
                    Registered::Host(registered),
                )
            }
            Self::Accelerator { device, near, provider } => {
                let buffer = Self::buffer(device, near, *provider, len)?;
                let memory = PeerMemory::new(&buffer)?;
                let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
                let registered = buffer.register(domain, access)?;
                let (keys, start) = ((registered.lkey(), registered.rkey()), registered.addr());
                let region = Region::new(RegionKind::Data, Arc::new(memory));
                (region, keys, start, Registered::Peer(registered))
            }
        };
        Ok(DataMemory {
            _registered: registered,
            region,
            start,
            lkey: keys.0,
            rkey: keys.1,
        })
    }
}

#[derive(Debug)]
enum Source {
    Host(Arc<HostMemory>),
    DmaBuf(Arc<OwnedFd>),
}

/// Memory that is divided into queues and records.
#[derive(Debug)]
pub struct QueueMemory {
    memory: Arc<dyn Memory>,
    source: Source,
    used: usize,
}

impl QueueMemory {
    /// Takes `len` bytes that start at a page. Returns them for the program and for the kernel.
    ///
    /// # Panics
    ///
    /// The memory is used up.
    pub fn take(&mut self, kind: RegionKind, len: usize) -> (Region, Place) {
        let start = self.used.next_multiple_of(PAGE);
        self.used = start + len;
        let region = Region::part(kind, self.memory.clone(), start, len);
        let place = match &self.source {
            Source::Host(memory) => Place::host(memory, start, len),
            Source::DmaBuf(fd) => Place::dmabuf(fd, start, len),
        };
        (region, place)
    }
}

/// The registration ends before the memory is freed.
#[derive(Debug)]
enum Registered {
    Host(#[allow(dead_code)] HostRegistration),
    Peer(#[allow(dead_code)] Registration),
}

/// Registered memory for payload, signals, and counters.
#[derive(Debug)]
pub struct DataMemory {
    // Fields are dropped in this order: the registration before the memory.
    _registered: Registered,
    region: Region,
    start: u64,
    lkey: u32,
    rkey: u32,
}

impl DataMemory {
    /// Returns the region, for byte code and for access by the CPU.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns a range for work requests of this side.
    pub fn segment(&self, at: usize, bytes: u32) -> Segment {
        Segment {
            address: self.start + at as u64,
            bytes,
            lkey: self.lkey,
        }
    }

    /// Returns a place for work requests of the other side.
    pub fn remote(&self, at: usize) -> Remote {
        Remote {
            address: self.start + at as u64,
            rkey: self.rkey,
        }
    }
}

#[cfg(test)]
mod tests {
    use p2pmem::fake::Fake;

    use super::*;

    fn accelerator(pinned: bool) -> MemorySource {
        let fake = Fake::example();
        let device = fake.device();
        let provider = device.alloc(&Request::new(4096).near([near()])).unwrap().provider();
        if pinned {
            fake.allow_pinned(provider);
        }
        MemorySource::Accelerator {
            device,
            near: near(),
            provider: None,
        }
    }

    fn near() -> Client {
        "0000:04:00.0".parse::<p2pmem::PciAddr>().unwrap().into()
    }

    #[test]
    fn parts_start_at_pages_and_do_not_overlap() {
        let mut memory = MemorySource::Host.queue_memory(3 * PAGE).unwrap();
        for (number, len) in [320, PAGE + 1].into_iter().enumerate() {
            let (region, _) = memory.take(RegionKind::WorkQueue, len);
            assert_eq!((region.start(), region.len()), (number * PAGE, len));
        }
    }

    #[test]
    fn host_memory_has_no_bar_offset() {
        let mut memory = MemorySource::Host.queue_memory(PAGE).unwrap();
        assert_eq!(memory.take(RegionKind::WorkQueue, PAGE).0.bar_offset(), None);
    }

    #[test]
    #[should_panic(expected = "no region of")]
    fn more_than_the_memory_panics() {
        let mut memory = MemorySource::Host.queue_memory(PAGE).unwrap();
        memory.take(RegionKind::WorkQueue, PAGE + 1);
    }

    #[test]
    fn queues_in_an_accelerator_need_a_pinned_export() {
        let error = accelerator(false).queue_memory(PAGE).unwrap_err();
        assert!(error.to_string().contains("export"), "{error}");
        let mut memory = accelerator(true).queue_memory(PAGE).unwrap();
        let (region, _) = memory.take(RegionKind::Completions, 64);
        assert!(region.bar_offset().is_some());
        region.store_qword(8, 0x1122_3344_5566_7788);
        region.store_dword(16, 7);
        region.fence();
        assert_eq!((region.load_dword(12), region.load_dword(16)), (0x1122_3344, 7));
        let mut bytes = [0; 3];
        region.write(20, &[1, 2, 3]);
        region.read(20, &mut bytes);
        assert_eq!(bytes, [1, 2, 3]);
    }
}
