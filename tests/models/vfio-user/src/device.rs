// SPDX-License-Identifier: MIT OR Apache-2.0

//! What a device model implements, and what it is given.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::config::ConfigSpace;
use crate::dma::Dma;
use crate::irq::Irqs;
use crate::memory::Memory;
use crate::peers::{NameTaken, Offer, Peers};

/// What a device does by itself: DMA and interrupts. It outlives connections; clones stand for the same bus.
#[derive(Clone, Debug)]
pub struct Bus {
    /// Access to bus addresses.
    pub dma: Dma,
    /// MSI-X.
    pub irqs: Irqs,
    /// Memory of this device that others reach directly.
    offers: Arc<Mutex<Vec<Offer>>>,
    peers: Option<Peers>,
}

impl Bus {
    /// A bus for a device with `vectors` MSI-X vectors; nothing is connected to it yet.
    pub fn new(vectors: u16) -> Self {
        Self::make(vectors, None)
    }

    /// As [`Bus::new`], for a device that reaches the memory of `peers` directly.
    pub fn among(vectors: u16, peers: &Peers) -> Self {
        Self::make(vectors, Some(peers.clone()))
    }

    fn make(vectors: u16, peers: Option<Peers>) -> Self {
        Self {
            dma: Dma::new(peers.clone()),
            irqs: Irqs::new(vectors),
            offers: Arc::default(),
            peers,
        }
    }

    /// Lets the peers of this device, if it has any, reach `memory`, which is all of BAR `region`, wherever the guest puts
    /// that BAR. It ends with the last clone of this bus. `name` is what the bytes are counted under.
    ///
    /// # Errors
    ///
    /// [`NameTaken`].
    pub fn offer(&self, region: u32, name: &str, memory: &Arc<Memory>) -> Result<(), NameTaken> {
        if let Some(peers) = &self.peers {
            let offer = peers.offer(region, name, Arc::clone(memory))?;
            self.offers.lock().unwrap_or_else(PoisonError::into_inner).push(offer);
        }
        Ok(())
    }

    /// Ends the connection to the client, which sees the device vanish; for a device that cannot go on. Its serving
    /// thread returns soon after.
    pub fn sever(&self) {
        self.place(&[None; 6]);
        self.dma.sever();
    }

    /// Follows the addresses that the BARs have now.
    pub(crate) fn place(&self, bars: &[Option<u64>; 6]) {
        for offer in &*self.offers.lock().unwrap_or_else(PoisonError::into_inner) {
            offer.place(bars.get(offer.region() as usize).copied().flatten());
        }
    }
}

/// A BAR as the client sees it.
#[derive(Clone, Debug)]
pub struct Region {
    size: u64,
    memory: Option<Arc<Memory>>,
    mapped: Vec<Range<u64>>,
}

impl Region {
    /// A region every access to which is trapped and becomes a call of the device.
    pub fn registers(size: u64) -> Self {
        Self {
            size,
            memory: None,
            mapped: Vec::new(),
        }
    }

    /// A region that is memory throughout, mapped by the client.
    pub fn memory(memory: Arc<Memory>) -> Self {
        let all = 0..memory.len();
        Self {
            size: all.end,
            memory: Some(memory),
            mapped: Vec::from([all]),
        }
    }

    /// A region of `memory`'s size of which the client maps only the ranges `mapped`, which must be whole pages; the rest
    /// is trapped.
    ///
    /// # Panics
    ///
    /// If a range is empty, not of whole pages, or outside of the memory, which is the device's mistake.
    pub fn mixed(memory: Arc<Memory>, mapped: Vec<Range<u64>>) -> Self {
        for range in &mapped {
            assert!(
                range.start < range.end && range.end <= memory.len() && (range.start | range.end) % 4096 == 0,
                "mapped ranges are whole pages of the region: {range:?}"
            );
        }
        Self {
            size: memory.len(),
            memory: Some(memory),
            mapped,
        }
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The memory behind the region and the ranges of it that the client maps, if any.
    pub fn mapped(&self) -> Option<(&Arc<Memory>, &[Range<u64>])> {
        self.memory.as_ref().map(|memory| (memory, self.mapped.as_slice()))
    }

    /// The memory that an access reaches without a call of the device.
    pub(crate) fn direct(&self, offset: u64, len: u64) -> Option<&Memory> {
        let end = offset.checked_add(len)?;
        self.mapped
            .iter()
            .any(|range| range.start <= offset && end <= range.end)
            .then_some(self.memory.as_deref())
            .flatten()
    }
}

/// A PCI device. All methods are called on the thread that serves the connection, and must not wait for DMA.
pub trait Device {
    /// The bus the device was made with.
    fn bus(&self) -> &Bus;

    /// The configuration space.
    fn config(&mut self) -> &mut ConfigSpace;

    /// BAR `index`, 0 to 5. Its size must be that of the BAR in the configuration space.
    fn region(&self, index: u32) -> Option<&Region>;

    /// A trapped read of a region. It lies inside of the region; any length and alignment is possible. `data` is zeros.
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]);

    /// A trapped write to a region. It lies inside of the region; any length and alignment is possible.
    fn write(&mut self, region: u32, offset: u64, data: &[u8]);

    /// Brings the device's own state to what it is after power-on. Configuration space, DMA and interrupts are reset by
    /// the caller. Memory keeps its bytes.
    fn reset(&mut self);

    /// A read of the configuration space, for devices whose capabilities do something when read.
    fn config_read(&mut self, offset: usize, data: &mut [u8]) {
        self.config().read(offset, data);
    }

    /// A write to the configuration space, for devices whose capabilities do something when written.
    fn config_write(&mut self, offset: usize, data: &[u8]) {
        self.config().write(offset, data);
    }

    /// An access that the client made by message to memory it could have mapped; for statistics.
    fn direct_access(&mut self, _region: u32, _len: u64, _write: bool) {}

    /// The client is gone. State is kept, another client may come.
    fn disconnected(&mut self) {}
}
