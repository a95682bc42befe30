// SPDX-License-Identifier: MIT OR Apache-2.0

//! The NIC and the accelerator of a node, and memory of this accelerator.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use p2pmem::rdma::Nic;
use p2pmem::{Buffer, Client, Device, Mapping, Request};
use p2pmem_accel_regs::driver::{self, Accel, RingMemory};
use p2pmem_async::memory::MemorySource;

/// The time limit for the end of a ring's entry in progress.
const RING_LIMIT: Duration = Duration::from_secs(10);

/// The devices of a node.
#[derive(Debug)]
pub struct Hardware {
    /// The NIC.
    pub nic: Nic,
    /// Its name.
    pub name: String,
    /// The accelerator.
    pub accel: Arc<Accel>,
    /// The open device of p2pmem.
    pub device: Device,
    /// The NIC as a client of memory.
    pub near: Client,
    /// The provider whose memory is the accelerator's.
    pub provider: u32,
}

impl Hardware {
    /// Opens a NIC by its name, and an accelerator by its PCI address. Disables rings of the accelerator that killed programs
    /// left running.
    ///
    /// # Errors
    ///
    /// One of them cannot be opened, or the accelerator's memory is not published.
    pub fn open(name: &str, accel: &str) -> Result<Self> {
        let nic = Nic::open(name)?;
        let near = nic.client().clone();
        let device = Device::open()?;
        let providers = device.providers()?;
        let provider = providers.iter().find(|provider| provider.addr.to_string() == accel);
        let provider = provider
            .with_context(|| format!("the memory of {accel} is not published"))?
            .id;
        let accel = Arc::new(Accel::open(accel)?);
        accel.disable_abandoned_rings(RING_LIMIT)?;
        Ok(Self {
            nic,
            name: name.to_owned(),
            accel,
            device,
            near,
            provider,
        })
    }

    /// Returns the accelerator's memory, for queues and payload.
    pub fn source(&self) -> MemorySource {
        MemorySource::Accelerator {
            device: self.device.clone(),
            near: self.near.clone(),
            provider: Some(self.provider),
        }
    }

    /// Allocates memory of the accelerator.
    ///
    /// # Errors
    ///
    /// Those of the allocation.
    pub fn memory(&self, bytes: u64) -> Result<AccelMemory> {
        let request = Request::new(bytes).near([self.near.clone()]).provider(self.provider);
        let buffer = self.device.alloc(&request)?;
        let offset = buffer.bar_offset().context("the buffer's place is unknown")?;
        Ok(AccelMemory {
            mapping: buffer.map()?,
            buffer,
            offset,
        })
    }

    /// Allocates memory of the accelerator with `bytes` bytes of the value 1.0.
    ///
    /// # Errors
    ///
    /// Those of the allocation.
    pub fn ones(&self, bytes: u32) -> Result<AccelMemory> {
        let memory = self.memory(bytes.into())?;
        memory.mapping.copy_from_slice(0, &vec![1_f32; bytes as usize / 4])?;
        Ok(memory)
    }
}

/// Memory of the accelerator, mapped.
#[derive(Debug)]
pub struct AccelMemory {
    /// The mapping.
    pub mapping: Mapping,
    /// The buffer.
    pub buffer: Buffer,
    /// Offset in the accelerator's memory.
    pub offset: u64,
}

impl AccelMemory {
    fn at(&self, offset: u64) -> Result<usize, driver::Error> {
        let at = offset.checked_sub(self.offset).ok_or(driver::Error::OutOfBounds)?;
        usize::try_from(at).map_err(|_| driver::Error::OutOfBounds)
    }
}

impl RingMemory for AccelMemory {
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), driver::Error> {
        let written = self.mapping.copy_from_slice(self.at(offset)?, data);
        written.map_err(|_| driver::Error::OutOfBounds)
    }

    fn load64(&self, offset: u64) -> Result<u64, driver::Error> {
        let word = self.mapping.read(self.at(offset)?);
        word.map(u64::from_le).map_err(|_| driver::Error::OutOfBounds)
    }
}
