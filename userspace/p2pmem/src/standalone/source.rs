// SPDX-License-Identifier: MIT OR Apache-2.0

//! The parts of a backend without the module: a source of memory, and pieces of memory.

use std::io;
use std::path::Path as FsPath;
use std::sync::Arc;

use crate::addr::PciAddr;
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::pci::PciDevice;
use crate::sys::{Exported, Region};

/// Place of memory: the PCI function, and the BAR if it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) addr: PciAddr,
    pub(super) bar: Option<u8>,
}

/// Memory that a source has, and its state at the time of the call.
pub(super) struct Found {
    pub(super) place: Place,
    pub(super) size: u64,
    pub(super) free: u64,
    /// Size of the largest piece, or of all free bytes if the source does not know their places.
    pub(super) largest: u64,
    /// Freed bytes that are still in use.
    pub(super) pinned: u64,
    pub(super) device: PciDevice,
}

/// The reason why memory was not taken.
pub(super) enum Refusal {
    /// The memory does not have enough free bytes in one piece.
    Full,
    /// The program cannot use the memory.
    Unusable(Error),
}

/// An interface of the kernel that provides memory.
pub(super) trait Source: Send + Sync {
    fn backend(&self) -> Backend;
    /// Returns the root of the machine's file system.
    fn root(&self) -> &FsPath;
    /// Lists the memory that the source has.
    fn survey(&self) -> Result<Vec<Found>>;
    /// Takes `len` bytes at a place. `len` is a number of whole pages.
    fn take(&self, place: Place, len: u64, align: u64) -> std::result::Result<Arc<dyn Piece>, Refusal>;
}

/// Memory that was taken. The memory is freed when the last reference is dropped.
pub(super) trait Piece: Send + Sync {
    /// Returns the offset of the first byte in the BAR, if it is known.
    fn bar_offset(&self) -> Option<u64>;
    /// Returns whether the device still has the memory.
    fn is_live(&self) -> bool;
    /// Returns the number of the program's mappings.
    fn mappings(&self) -> u32;
    /// Returns the number of dma-bufs that are in use.
    fn exports(&self) -> u32;
    /// Maps all of the memory.
    fn map(self: Arc<Self>) -> io::Result<Arc<Region>>;
    /// Creates a dma-buf of a part of the memory.
    fn export(self: Arc<Self>, offset: u64, len: u64) -> io::Result<Exported>;
}
