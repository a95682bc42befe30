// SPDX-License-Identifier: MIT OR Apache-2.0

//! The trait of a device model, and the types that the library provides for it.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::config::ConfigSpace;
use crate::dma::Dma;
use crate::irq::Irqs;
use crate::memory::Memory;
use crate::peers::{NameTaken, PeerHandle, Peers};

/// DMA and interrupts of a device. A bus outlives connections. Clones refer to the same bus.
#[derive(Clone, Debug)]
pub struct Bus {
    /// Access to bus addresses.
    pub dma: Dma,
    /// MSI-X.
    pub irqs: Irqs,
    /// Memory of this device that peers access directly.
    peer_handles: Arc<Mutex<Vec<PeerHandle>>>,
    peers: Option<Peers>,
}

impl Bus {
    /// A bus for a device with `vectors` MSI-X vectors, without a client.
    pub fn new(vectors: u16) -> Self {
        Self::with_peers(vectors, None)
    }

    /// As [`Bus::new`], for a device that accesses the memory of `peers` directly.
    pub fn among(vectors: u16, peers: &Peers) -> Self {
        Self::with_peers(vectors, Some(peers.clone()))
    }

    fn with_peers(vectors: u16, peers: Option<Peers>) -> Self {
        Self {
            dma: Dma::new(peers.clone()),
            irqs: Irqs::new(vectors),
            peer_handles: Arc::default(),
            peers,
        }
    }

    /// Gives the peers of this device direct access to the memory of BAR `index`, at the address that the guest assigns to
    /// that BAR. Does nothing without peers. Access ends when the last clone of this bus is dropped. Peers count the bytes
    /// under `name`.
    ///
    /// # Errors
    ///
    /// [`NameTaken`] if another peer has this name.
    ///
    /// # Panics
    ///
    /// If the region has no memory.
    pub fn offer(&self, index: u32, name: &str, region: &Region) -> Result<(), NameTaken> {
        if let Some(peers) = &self.peers {
            let memory = region.memory.as_ref().expect("peers access memory only");
            let handle = peers.add(index, name, Arc::clone(memory), !region.delayed)?;
            self.peer_handles
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(handle);
        }
        Ok(())
    }

    /// Ends the connection to the client, which sees the device disappear. For a device that cannot continue. The
    /// serving thread returns soon after.
    pub fn disconnect_client(&self) {
        self.set_bar_addresses(&[None; 6]);
        self.dma.shutdown();
    }

    /// Sets the bus address of each BAR; `None` if the BAR is not decoded.
    pub(crate) fn set_bar_addresses(&self, bars: &[Option<u64>; 6]) {
        for handle in &*self.peer_handles.lock().unwrap_or_else(PoisonError::into_inner) {
            handle.set_address(bars.get(handle.region() as usize).copied().flatten());
        }
    }
}

/// A BAR as the client sees it.
#[derive(Clone, Debug)]
pub struct Region {
    size: u64,
    memory: Option<Arc<Memory>>,
    mapped: Vec<Range<u64>>,
    delayed: bool,
}

impl Region {
    /// A region that the client cannot map: each access is a call of the device.
    pub fn registers(size: u64) -> Self {
        Self {
            size,
            memory: None,
            mapped: Vec::new(),
            delayed: false,
        }
    }

    /// A region that is memory, all of which the client can map.
    pub fn memory(memory: Arc<Memory>) -> Self {
        let all = 0..memory.len();
        Self {
            size: all.end,
            memory: Some(memory),
            mapped: Vec::from([all]),
            delayed: false,
        }
    }

    /// A region that is memory, none of which the client can map. Writes of the processor are posted and arrive late: with
    /// the processor's next access of the device that does not pass them. Peers access the memory without a delay.
    pub fn delayed(memory: Arc<Memory>) -> Self {
        Self {
            size: memory.len(),
            memory: Some(memory),
            mapped: Vec::new(),
            delayed: true,
        }
    }

    /// A region of the size of `memory`, of which the client can map only the ranges `mapped` (whole pages). Accesses
    /// to the rest are calls of the device.
    ///
    /// # Panics
    ///
    /// If a range is empty, is not made of whole pages, or exceeds the memory.
    pub fn mixed(memory: Arc<Memory>, mapped: Vec<Range<u64>>) -> Self {
        for range in &mapped {
            assert!(
                range.start < range.end && range.end <= memory.len() && (range.start | range.end) % 4096 == 0,
                "a mapped range is not made of whole pages of the region: {range:?}"
            );
        }
        Self {
            size: memory.len(),
            memory: Some(memory),
            mapped,
            delayed: false,
        }
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The memory of the region and the ranges that the client can map, if any.
    pub fn mapped(&self) -> Option<(&Arc<Memory>, &[Range<u64>])> {
        let memory = self.memory.as_ref().filter(|_| !self.delayed)?;
        Some((memory, self.mapped.as_slice()))
    }

    /// The memory, if writes to it are delayed.
    pub(crate) fn delayed_memory(&self) -> Option<&Arc<Memory>> {
        self.memory.as_ref().filter(|_| self.delayed)
    }

    /// The memory, if the access needs no call of the device: it lies in a range that the client can map, or in a delayed region.
    pub(crate) fn direct(&self, offset: u64, len: u64) -> Option<&Memory> {
        let end = offset.checked_add(len)?;
        let mapped = |range: &Range<u64>| range.start <= offset && end <= range.end;
        self.memory
            .as_deref()
            .filter(|_| self.delayed || self.mapped.iter().any(mapped))
    }
}

/// A PCI device. The library calls all methods on the serving thread. They must not wait for DMA.
pub trait Device {
    /// The bus of the device.
    fn bus(&self) -> &Bus;

    /// The configuration space.
    fn config(&mut self) -> &mut ConfigSpace;

    /// BAR `index`, 0 to 5. Its size must be that of the BAR in the configuration space.
    fn region(&self, index: u32) -> Option<&Region>;

    /// Reads from a region, outside of the memory that the library serves. The access lies in the region and has any
    /// length and alignment. `data` is initially zero.
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]);

    /// Writes to a region, outside of the memory that the library serves. The access lies in the region and has any
    /// length and alignment.
    fn write(&mut self, region: u32, offset: u64, data: &[u8]);

    /// Resets the device's own state to that after power-on. The caller resets configuration space, DMA and interrupts.
    /// Memory keeps its bytes.
    fn reset(&mut self);

    /// Reads from the configuration space. For devices with capabilities whose reads have an effect.
    fn config_read(&mut self, offset: usize, data: &mut [u8]) {
        self.config().read(offset, data);
    }

    /// Writes to the configuration space. For devices with capabilities whose writes have an effect.
    fn config_write(&mut self, offset: usize, data: &[u8]) {
        self.config().write(offset, data);
    }

    /// Called after a REGION_READ or REGION_WRITE of memory that the library serves: memory that the client can map, and delayed
    /// regions. For statistics.
    fn direct_access(&mut self, _region: u32, _len: u64, _write: bool) {}

    /// Called when the client has disconnected. The device keeps its state; another client may connect.
    fn disconnected(&mut self) {}
}
