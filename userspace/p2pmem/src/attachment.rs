// SPDX-License-Identifier: MIT OR Apache-2.0

//! Attachments: the PCI function of a provider does DMA to a dma-buf, such as the doorbell page of a NIC.

use std::os::fd::AsFd;

use p2pmem_sys as abi;

use crate::backend::Capability;
use crate::device::Device;
use crate::error::{Operation, Result};

/// A part of an attached dma-buf, as the function addresses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct DmaRange {
    /// Address for the function's DMA: a bus address, or an I/O address that an IOMMU translates.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
}

impl From<&abi::p2pmem_dma_range> for DmaRange {
    fn from(raw: &abi::p2pmem_dma_range) -> Self {
        Self {
            address: raw.address,
            size: raw.size,
        }
    }
}

/// The state of an [`Attachment`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum AttachmentState {
    /// The function can do DMA to the ranges.
    Live,
    /// The ranges are valid, but the function can do no DMA: another attachment of the function ended while the function
    /// may still have used it, and nobody has confirmed yet that the function has stopped.
    Stopped,
    /// The exporter took the memory back. There are no ranges any more.
    Revoked,
    /// The provider was removed. There are no ranges any more.
    Gone,
    /// A state that this version of the library does not know.
    Unknown,
}

/// Options of [`Device::attach`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use]
pub struct AttachOptions {
    quiesced: bool,
}

impl AttachOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Confirms that the function uses no address of an attachment that has ended. The module then lets the function do
    /// DMA and be attached again. Needed after a process ended without dropping its attachments.
    pub fn quiesced(mut self, quiesced: bool) -> Self {
        self.quiesced = quiesced;
        self
    }
}

/// An attachment of a provider's function to a dma-buf. While it exists, the function can do DMA to [`Self::ranges`].
///
/// Dropping the value detaches, and confirms that the function does not use the addresses any more: stop the function
/// before.
///
/// The exporter can take the memory back at any time: [`EventKind::AttachmentRevoked`](crate::EventKind) arrives, and
/// [`Self::is_revoked`] is true. If no IOMMU ends the function's access ([`Self::is_translated`]), the module then
/// disables the function's DMA until this value is dropped.
///
/// ```
/// # let device = p2pmem::fake::Fake::example().device();
/// use p2pmem::{AttachOptions, Request};
///
/// let target = device.alloc(&Request::new(1 << 20).provider(1))?.share()?;
/// let attachment = device.attach(2, &target, AttachOptions::new())?;
/// let address = attachment.address(4096, 8);
/// assert_eq!(address, Some(attachment.ranges()[0].address + 4096));
/// attachment.detach()?;
/// # Ok::<(), p2pmem::Error>(())
/// ```
#[derive(Debug)]
pub struct Attachment {
    device: Device,
    handle: u32,
    provider: u32,
    size: u64,
    ranges: Vec<DmaRange>,
    translated: bool,
    /// Whether the handle is closed.
    closed: bool,
}

impl Device {
    /// Attaches the PCI function of the provider `provider` to a dma-buf of any exporter, and maps the dma-buf for the
    /// function's DMA. Requires CAP_SYS_ADMIN, or membership in the group of the provider's attribute `attach_gid`.
    ///
    /// # Errors
    ///
    /// [`Error::NotSupported`](crate::Error::NotSupported) without the module.
    /// [`Error::Refused`](crate::Error::Refused), among others with EPERM if the program may not attach the function,
    /// EOPNOTSUPP if the function is bound to its own driver, and EBUSY if the function may still use the memory of an
    /// attachment that has ended.
    pub fn attach(&self, provider: u32, dmabuf: &impl AsFd, options: AttachOptions) -> Result<Attachment> {
        self.require(Capability::Attach)?;
        let flags = if options.quiesced {
            abi::P2PMEM_ATTACH_QUIESCED
        } else {
            0
        };
        let fd = dmabuf.as_fd();
        // Almost all dma-bufs have a single range.
        let mut ranges = vec![abi::p2pmem_dma_range::default(); 16];
        let made = self.call(Operation::Attach, |k| k.attach(fd, provider, flags, &mut ranges))?;
        let mut attachment = Attachment {
            device: self.clone(),
            handle: made.handle,
            provider,
            size: made.size,
            ranges: Vec::new(),
            translated: made.info & abi::P2PMEM_ATTACHMENT_TRANSLATED != 0,
            closed: false,
        };
        let all = made.nr_ranges as usize;
        if all > ranges.len() {
            ranges.resize(all, abi::p2pmem_dma_range::default());
            attachment.query(&mut ranges)?;
        }
        attachment.ranges = ranges.iter().take(all).map(DmaRange::from).collect();
        Ok(attachment)
    }
}

impl Attachment {
    /// Returns the handle of the attachment on the device's open file, as in events.
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// Returns the id of the provider whose function is attached.
    pub fn provider(&self) -> u32 {
        self.provider
    }

    /// Returns the size of the dma-buf in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the ranges at the time of the attachment, in the order of the dma-buf's offsets. They are valid as long as
    /// the attachment is not revoked.
    pub fn ranges(&self) -> &[DmaRange] {
        &self.ranges
    }

    /// Returns whether an IOMMU ends the function's access when the mapping ends.
    pub fn is_translated(&self) -> bool {
        self.translated
    }

    /// Returns the address of `len` bytes at `offset` of the dma-buf. `None` if the bytes exceed the dma-buf, or are not
    /// contiguous for the function.
    pub fn address(&self, offset: u64, len: u64) -> Option<u64> {
        let mut start = 0;
        for range in &self.ranges {
            let end = start + range.size;
            if offset < end {
                let fits = offset.checked_add(len).is_some_and(|last| last <= end);
                return fits.then(|| range.address + (offset - start));
            }
            start = end;
        }
        None
    }

    fn query(&self, ranges: &mut [abi::p2pmem_dma_range]) -> Result<abi::p2pmem_attachment> {
        self.device
            .call(Operation::Attach, |k| k.attachment(self.handle, ranges))
    }

    /// Returns the present state.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`](crate::Error::Refused).
    pub fn state(&self) -> Result<AttachmentState> {
        Ok(match self.query(&mut [])?.state {
            abi::P2PMEM_ATTACHMENT_LIVE => AttachmentState::Live,
            abi::P2PMEM_ATTACHMENT_STOPPED => AttachmentState::Stopped,
            abi::P2PMEM_ATTACHMENT_REVOKED => AttachmentState::Revoked,
            abi::P2PMEM_ATTACHMENT_GONE => AttachmentState::Gone,
            _ => AttachmentState::Unknown,
        })
    }

    /// Returns whether the ranges are not valid any more: the exporter took the memory back, or the provider was removed.
    ///
    /// # Errors
    ///
    /// As [`Self::state`].
    pub fn is_revoked(&self) -> Result<bool> {
        Ok(!matches!(
            self.state()?,
            AttachmentState::Live | AttachmentState::Stopped
        ))
    }

    /// Detaches, as dropping the value does, and returns the error. The function must not use the addresses any more.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`](crate::Error::Refused).
    pub fn detach(mut self) -> Result<()> {
        self.closed = true;
        self.device.call(Operation::Detach, |k| k.detach(self.handle))
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        if !self.closed {
            // Fails only for a handle that does not exist, which this value's does.
            let _ = self.device.call(Operation::Detach, |k| k.detach(self.handle));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Fake;
    use crate::{Backend, Error, EventKind, Request};

    #[test]
    fn address_is_within_one_range() {
        let fake = Fake::example();
        let device = fake.device();
        let buffer = device.alloc(&Request::new(8 * 4096).provider(1)).unwrap();
        let parts = crate::ExportOptions::new().range(16384..20480).range(0..8192);
        let dmabuf = buffer.export(&parts).unwrap();
        let attachment = device.attach(2, &dmabuf, AttachOptions::new()).unwrap();
        assert_eq!((attachment.size(), attachment.ranges().len()), (12288, 2));
        let [first, second] = [0, 1].map(|at| attachment.ranges()[at].address);
        assert_eq!(attachment.address(0, 4096), Some(first));
        assert_eq!(attachment.address(4088, 8), Some(first + 4088));
        assert_eq!(attachment.address(4096, 8192), Some(second));
        for (offset, len) in [(0, 4097), (4092, 8), (12288, 1), (12280, 16), (8, u64::MAX)] {
            assert_eq!(attachment.address(offset, len), None, "{len} bytes at {offset}");
        }
        assert_eq!(attachment.state().unwrap(), AttachmentState::Live);
        attachment.detach().unwrap();
    }

    #[test]
    fn revocation_is_reported_and_blocks_until_drop() {
        let fake = Fake::example();
        let device = fake.device();
        let target = device.alloc(&Request::new(4096).provider(1)).unwrap().share().unwrap();
        let other = device.alloc(&Request::new(4096).provider(1)).unwrap().share().unwrap();
        let mut events = device.events();
        let attachment = device.attach(2, &target, AttachOptions::new()).unwrap();
        let bystander = device.attach(2, &other, AttachOptions::new()).unwrap();
        assert!(!attachment.is_revoked().unwrap());
        fake.revoke_attachment(attachment.handle());
        assert_eq!(attachment.state().unwrap(), AttachmentState::Revoked);
        assert!(attachment.is_revoked().unwrap());
        let kind = events.next().unwrap().unwrap().kind;
        let handle = attachment.handle();
        assert_eq!(kind, EventKind::AttachmentRevoked { provider: 2, handle });
        assert_eq!(bystander.state().unwrap(), AttachmentState::Stopped);
        let kind = events.next().unwrap().unwrap().kind;
        let handle = bystander.handle();
        assert_eq!(kind, EventKind::AttachmentStopped { provider: 2, handle });
        let error = device.attach(2, &other, AttachOptions::new()).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EBUSY), "{error}");
        assert!(error.remedy().unwrap().contains("AttachOptions::quiesced"), "{error}");
        drop(attachment);
        assert_eq!(bystander.state().unwrap(), AttachmentState::Live);
    }

    #[test]
    fn refusals_say_what_to_do() {
        let fake = Fake::example();
        let device = fake.device();
        let target = device.alloc(&Request::new(4096).provider(1)).unwrap().share().unwrap();
        let error = device.attach(3, &target, AttachOptions::new()).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EOPNOTSUPP), "adopted: {error}");
        fake.fail_next(libc::EPERM);
        let error = device.attach(2, &target, AttachOptions::new()).unwrap_err();
        assert!(error.remedy().unwrap().contains("attach_gid"), "{error}");
        let null = std::fs::File::open("/dev/null").unwrap();
        let error = device.attach(2, &null, AttachOptions::new()).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EINVAL), "{error}");
        for backend in [Backend::Sysfs, Backend::Vfio] {
            let device = fake.device_of(backend);
            let error = device.attach(2, &target, AttachOptions::new()).unwrap_err();
            assert!(matches!(error, Error::NotSupported { .. }), "{error}");
        }
    }
}
