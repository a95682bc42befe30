// SPDX-License-Identifier: MIT OR Apache-2.0

//! Export of buffers as dma-bufs, by which the kernel's drivers share memory.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use p2pmem_sys as abi;

use crate::addr::PciAddr;
use crate::backend::Capability;
use crate::device::Device;
use crate::error::{Error, Operation, Result};
use crate::sys::{Exported, Hold};

/// Options of an export: the parts of the buffer, and the importers that are allowed.
///
/// ```
/// # let device = p2pmem::fake::Fake::example().device();
/// use p2pmem::{ExportOptions, Request};
///
/// let buffer = device.alloc(&Request::new(1 << 20))?;
/// // The second half first, then the first page.
/// let parts = ExportOptions::new().range(512 << 10..1 << 20).range(0..4096);
/// let dmabuf = buffer.export(&parts)?;
/// assert_eq!(dmabuf.size(), (512 << 10) + 4096);
/// # Ok::<(), p2pmem::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct ExportOptions {
    ranges: Vec<Range<u64>>,
    pinned: bool,
}

impl ExportOptions {
    /// The whole buffer, for importers that can be revoked.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a part: whole pages, in bytes from the start of the buffer or mapping. The dma-buf consists of the parts in
    /// the order in which they are added, at most 64. Without parts, the dma-buf is the whole buffer or mapping.
    pub fn range(mut self, range: Range<u64>) -> Self {
        self.ranges.push(range);
        self
    }

    /// Allows importers that cannot be revoked. The module refuses such an export unless the administrator allows it
    /// for the provider, because the importer can delay the provider's removal indefinitely.
    pub fn pinned(mut self, pinned: bool) -> Self {
        self.pinned = pinned;
        self
    }

    /// Returns the ranges, of `size` bytes that start at `start`, in the ABI's form and as they are. Fails with
    /// [`Error::Request`] for ranges that the module would refuse in any case.
    fn ranges_of(&self, start: u64, size: u64) -> Result<(Vec<abi::p2pmem_range>, Vec<Range<u64>>)> {
        let bad = |why: String| Err(Error::Request(why));
        let most = abi::P2PMEM_MAX_RANGES as usize;
        if self.ranges.len() > most {
            return bad(format!(
                "a dma-buf of {} ranges: at most {most} are possible",
                self.ranges.len()
            ));
        }
        let whole = || std::iter::once(0..size).collect();
        let ranges: Vec<_> = if self.ranges.is_empty() {
            whole()
        } else {
            self.ranges.clone()
        };
        if let Some(range) = ranges.iter().find(|r| r.start >= r.end || r.end > size) {
            return bad(format!("the range {range:?} is empty, or not inside {size} bytes"));
        }
        let raw = ranges.iter().map(|r| abi::p2pmem_range {
            offset: start + r.start,
            size: r.end - r.start,
        });
        Ok((raw.collect(), ranges))
    }

    fn flags(&self) -> u32 {
        if self.pinned {
            abi::P2PMEM_EXPORT_PINNED
        } else {
            0
        }
    }

    /// Creates the dma-buf of the buffer `handle`, which has `size` bytes.
    pub(crate) fn of_buffer(&self, device: &Device, handle: u32, size: u64) -> Result<DmaBuf> {
        device.require(Capability::DmaBuf)?;
        let (raw, ranges) = self.ranges_of(0, size)?;
        let exported = device.call(Operation::Export, |k| k.export(handle, &raw, self.flags()))?;
        Ok(DmaBuf::of_device_buffer(exported, ranges, self.pinned))
    }

    /// Creates the dma-buf of a mapping of a buffer: `size` bytes from the address `start` on.
    pub(crate) fn of_addresses(&self, device: &Device, start: u64, size: u64) -> Result<DmaBuf> {
        device.require(Capability::DmaBuf)?;
        let (raw, ranges) = self.ranges_of(start, size)?;
        let flags = self.flags() | abi::P2PMEM_EXPORT_MAPPED;
        let exported = device.call(Operation::Export, |k| k.export(0, &raw, flags))?;
        Ok(DmaBuf::of_device_buffer(exported, ranges, self.pinned))
    }
}

/// A buffer, or parts of it, exported as a dma-buf: a descriptor that a driver imports.
///
/// The dma-buf holds the memory as a mapping does: the dma-buf and imports of it can outlive the
/// [`Buffer`](crate::Buffer). When the provider is removed, importers are notified and lose the memory. The descriptor
/// stays open, and further imports fail with ENODEV.
///
/// [`DmaBuf::from_fd`] accepts dma-bufs of other drivers too.
///
/// With the backend vfio, this value holds the memory. A descriptor that the program took out of it (`OwnedFd::from`)
/// or passed to another process does not: after the last buffer, mapping, dma-buf and registration of a device is
/// dropped, the library closes the device, and the kernel revokes the memory of all descriptors. While the device is
/// open, memory of an open descriptor is not allocated again.
#[derive(Debug)]
pub struct DmaBuf {
    fd: OwnedFd,
    ranges: Vec<Range<u64>>,
    pinned: bool,
    /// The PCI function that has the memory, if the program or the backend set the function.
    pub(crate) function: Option<PciAddr>,
    /// Keeps the memory allocated, for a backend whose memory the kernel does not keep.
    hold: Option<Hold>,
}

impl DmaBuf {
    fn of_device_buffer(exported: Exported, ranges: Vec<Range<u64>>, pinned: bool) -> Self {
        Self {
            fd: exported.fd,
            ranges,
            pinned,
            function: exported.function,
            hold: exported.hold,
        }
    }

    /// Returns a dma-buf of another driver.
    pub(crate) fn of_size(fd: OwnedFd, size: u64, function: Option<PciAddr>, hold: Option<Hold>) -> Self {
        Self {
            fd,
            ranges: std::iter::once(0..size).collect(),
            pinned: false,
            function,
            hold,
        }
    }

    /// Returns the same dma-buf with another descriptor.
    ///
    /// # Errors
    ///
    /// [`Error::State`] if the limit of open files is reached.
    pub fn try_clone(&self) -> Result<Self> {
        let fd = self.fd.try_clone();
        Ok(Self {
            fd: fd.map_err(|error| Error::State(format!("cannot duplicate the descriptor of a dma-buf: {error}")))?,
            ranges: self.ranges.clone(),
            pinned: self.pinned,
            function: self.function,
            hold: self.hold.clone(),
        })
    }

    /// Returns the size in bytes of all parts.
    pub fn size(&self) -> u64 {
        self.ranges.iter().map(|r| r.end - r.start).sum()
    }

    /// Returns the parts in order, in bytes from the start of the buffer or mapping.
    pub fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }

    /// Returns whether importers that cannot be revoked are allowed.
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }
}

impl AsFd for DmaBuf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<DmaBuf> for OwnedFd {
    fn from(dmabuf: DmaBuf) -> Self {
        dmabuf.fd
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Fake;
    use crate::{BufferState, Request};

    #[test]
    fn ranges_keep_the_requested_order() {
        let device = Fake::example().device();
        let buffer = device.alloc(&Request::new(4 * 4096)).unwrap();
        let whole = buffer.export(&ExportOptions::new()).unwrap();
        assert_eq!(whole.size(), 4 * 4096);
        assert!(whole.ranges().iter().eq(std::iter::once(&(0..4 * 4096))));
        assert!(!whole.is_pinned());
        let parts = ExportOptions::new().range(8192..16384).range(0..4096);
        let parts = buffer.export(&parts).unwrap();
        assert_eq!((parts.size(), parts.ranges()), (3 * 4096, &[8192..16384, 0..4096][..]));
        let fd = OwnedFd::from(parts);
        assert_eq!(device.stats(None).unwrap().exports, 2);
        drop((whole, fd));
    }

    #[test]
    fn invalid_exports_are_refused_with_message() {
        let fake = Fake::example();
        let device = fake.device();
        let buffer = device.alloc(&Request::new(8192).provider(2)).unwrap();
        #[allow(clippy::reversed_empty_ranges)]
        for range in [0..0, 8192..4096, 4096..12288] {
            let error = buffer.export(&ExportOptions::new().range(range)).unwrap_err();
            assert!(error.to_string().contains("not inside 8192 bytes"), "{error}");
        }
        let many = (0..65).fold(ExportOptions::new(), |e, _| e.range(0..4096));
        assert!(matches!(buffer.export(&many), Err(Error::Request(_))));

        let error = buffer.export(&ExportOptions::new().range(0..100)).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EINVAL), "no whole page: {error}");
        let twice = ExportOptions::new().range(0..8192).range(4096..8192);
        assert_eq!(buffer.export(&twice).unwrap_err().errno(), Some(libc::EINVAL));

        let error = buffer.export(&ExportOptions::new().pinned(true)).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EPERM));
        assert!(error.remedy().unwrap().contains("pinned_exports"), "{error}");
        fake.allow_pinned(2);
        assert!(buffer.export(&ExportOptions::new().pinned(true)).unwrap().is_pinned());

        fake.remove_provider(2);
        assert_eq!(buffer.info().unwrap().state, BufferState::Gone);
        let error = buffer.export(&ExportOptions::new()).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENODEV));
        assert!(error.remedy().unwrap().contains("allocate again"), "{error}");
    }

    #[test]
    fn mapping_is_exported_by_its_addresses() {
        let device = Fake::example().device();
        let buffer = device.alloc(&Request::new(8192)).unwrap();
        let mapping = buffer.map().unwrap();
        assert_eq!(mapping.export(&ExportOptions::new()).unwrap().size(), 8192);
        let second = mapping.export(&ExportOptions::new().range(4096..8192)).unwrap();
        assert_eq!(second.size(), 4096);
    }
}
