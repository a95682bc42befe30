// SPDX-License-Identifier: MIT OR Apache-2.0

//! What a backend without the module consists of: a source of memory, and pieces of memory.

use std::io;
use std::path::Path as FsPath;
use std::sync::Arc;

use crate::addr::PciAddr;
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::pci::PciDevice;
use crate::sys::{Exported, Region};

/// Memory of a device: the function, and the BAR if it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) addr: PciAddr,
    pub(super) bar: Option<u8>,
}

/// Memory that a source has at the moment.
pub(super) struct Found {
    pub(super) place: Place,
    pub(super) size: u64,
    pub(super) free: u64,
    /// The largest piece, as far as it is known.
    pub(super) largest: u64,
    /// Bytes that were freed and that others still use.
    pub(super) pinned: u64,
    pub(super) device: PciDevice,
}

/// Why memory could not be taken.
pub(super) enum Refusal {
    /// It has not enough free bytes in one piece.
    Full,
    /// The program cannot use it at all.
    Unusable(Error),
}

/// An interface of the kernel that hands out memory.
pub(super) trait Source: Send + Sync {
    fn backend(&self) -> Backend;
    /// The root of the machine's file system.
    fn root(&self) -> &FsPath;
    /// Lists the memory there is.
    fn survey(&self) -> Result<Vec<Found>>;
    /// Takes `len` bytes, whole pages.
    fn take(&self, place: Place, len: u64, align: u64) -> std::result::Result<Arc<dyn Piece>, Refusal>;
}

/// Memory that was taken. It is free again when the last reference is gone.
pub(super) trait Piece: Send + Sync {
    /// The first byte in the BAR, if it is known.
    fn bar_offset(&self) -> Option<u64>;
    /// Whether the device still has the memory.
    fn is_live(&self) -> bool;
    /// Mappings that the program has.
    fn mappings(&self) -> u32;
    /// Dma-bufs that are in use.
    fn exports(&self) -> u32;
    fn map(self: Arc<Self>) -> io::Result<Arc<Region>>;
    /// Makes a dma-buf of a part of the memory.
    fn export(self: Arc<Self>, offset: u64, len: u64) -> io::Result<Exported>;
}
