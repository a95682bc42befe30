// SPDX-License-Identifier: MIT OR Apache-2.0

//! The parts of an [`Inventory`](super::Inventory).

use std::fmt;

use crate::backend::{Backend, Capability};
use crate::pci::PciDevice;

/// A base address register (BAR) that maps memory.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Bar {
    /// Number of the BAR, 0 to 5.
    pub index: u8,
    /// Size in bytes.
    pub size: u64,
    /// Whether the BAR can be above 4 GiB.
    pub is_64bit: bool,
    /// Whether reads have no side effects. Registers are usually in BARs that are not prefetchable.
    pub prefetchable: bool,
    /// The largest size in bytes to which the device can resize the BAR; none without the capability Resizable BAR.
    pub resizable_to: Option<u64>,
}

impl Bar {
    /// Whether `p2pmemctl publish` selects the BAR without `--bar`: 64-bit and prefetchable.
    pub fn is_memory(&self) -> bool {
        self.is_64bit && self.prefetchable
    }
}

/// Memory of a device that its driver has published to the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Pool {
    /// Size in bytes.
    pub size: u64,
    /// Bytes that are free.
    pub available: u64,
    /// Whether other drivers, such as nvmet, can allocate from the kernel's pool.
    pub published: bool,
}

/// A device with memory, and the sources from which a program can get it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct MemoryDevice {
    /// The PCI function.
    #[serde(flatten)]
    pub device: PciDevice,
    /// The memory BARs, by number.
    pub bars: Vec<Bar>,
    /// The memory that the driver has published, if any.
    pub pool: Option<Pool>,
    /// One entry for each [`Backend`], in the order in which the library prefers them.
    pub sources: Vec<Source>,
}

impl MemoryDevice {
    /// The BAR that `p2pmemctl publish` selects: the largest BAR that is 64-bit and prefetchable.
    pub fn memory_bar(&self) -> Option<&Bar> {
        let candidates = self.bars.iter().filter(|bar| bar.is_memory());
        candidates.max_by_key(|bar| (bar.size, std::cmp::Reverse(bar.index)))
    }

    /// The BAR that has the memory: [`MemoryDevice::memory_bar`], or else the largest BAR.
    pub fn main_bar(&self) -> Option<&Bar> {
        let largest = || self.bars.iter().max_by_key(|bar| bar.size);
        self.memory_bar().or_else(largest)
    }

    /// Size of the published memory, or else of [`MemoryDevice::main_bar`].
    pub fn size(&self) -> Option<u64> {
        let published = self.pool.map(|pool| pool.size);
        published.or_else(|| self.main_bar().map(|bar| bar.size))
    }

    /// The source to use first: the best availability, then the order of [`Backend`].
    pub fn best(&self) -> Option<&Source> {
        self.sources.iter().min_by_key(|source| source.availability)
    }
}

/// A device that can do DMA to memory of other devices.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct DmaClient {
    /// The PCI function.
    #[serde(flatten)]
    pub device: PciDevice,
    /// For RDMA devices: how the driver registers dma-bufs.
    pub dma_bufs: Option<DmaBufSupport>,
}

/// How an RDMA driver registers dma-bufs (`ibv_reg_dmabuf_mr()`), in Linux 7.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum DmaBufSupport {
    /// The driver ends its access when the exporter revokes the memory.
    Revocable,
    /// The driver keeps its access until the program deregisters the memory.
    Pinned,
    /// It is not known whether the driver registers dma-bufs.
    Unknown,
}

impl DmaBufSupport {
    /// Looks a PCI driver up by name.
    pub fn of_driver(driver: &str) -> Self {
        match driver {
            "mlx5_core" | "ice" | "i40e" | "idpf" => Self::Revocable,
            "efa" | "bnxt_en" | "mana" | "ionic" => Self::Pinned,
            _ => Self::Unknown,
        }
    }
}

/// Whether a source can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Availability {
    /// Now.
    Ready,
    /// After a step of the administrator, which [`Source::detail`] names.
    Possible,
    /// Not on this machine, for the reason in [`Source::detail`].
    Unavailable,
}

impl fmt::Display for Availability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ready => "ready",
            Self::Possible => "possible",
            Self::Unavailable => "no",
        })
    }
}

/// A source of a device's memory.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Source {
    /// The interface.
    pub backend: Backend,
    /// Whether the source can be used.
    pub availability: Availability,
    /// The capabilities that the interface does not have.
    pub missing: Vec<Capability>,
    /// How to use the source, what it needs, or why it cannot be used.
    pub detail: String,
}
