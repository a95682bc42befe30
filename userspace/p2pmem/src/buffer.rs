// SPDX-License-Identifier: MIT OR Apache-2.0

//! A buffer: memory of a provider that this program holds.

use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use p2pmem_sys as abi;

use crate::device::{failure_without_message, Device};
use crate::error::{Error, Operation, Result};
use crate::export::{DmaBuf, ExportOptions};
use crate::mapping::Mapping;
use crate::origin::Origin;
use crate::register::{Access, Handle, RegisterOptions, Registration};
use crate::sys::verbs::ProtectionDomain;
use crate::sys::Region;
use crate::types::{known_offset, BufferInfo, PathClass};

/// An allocation. Dropping the value ends its handle; the memory is free after the last mapping, dma-buf and
/// registration are gone too.
#[derive(Debug)]
pub struct Buffer {
    origin: Origin,
    /// The last mapping, whose addresses a registration uses.
    mapped: Mutex<Weak<Region>>,
    mmap_offset: u64,
    bar_offset: Option<u64>,
    class: Option<PathClass>,
    /// [`Buffer::free`] ended the handle, so dropping must not end it again.
    freed: bool,
}

impl Buffer {
    /// Creates the buffer of a part of a stripe.
    pub(crate) fn of_part(device: Device, part: &abi::p2pmem_part) -> Self {
        let got = abi::p2pmem_alloc {
            handle: part.handle,
            provider: part.provider,
            size: part.size,
            mmap_offset: part.mmap_offset,
            bar_offset: part.bar_offset,
            class: part.class,
            ..Default::default()
        };
        Self::new(device, &got)
    }

    /// Creates the buffer of an imported handle.
    pub(crate) fn imported(device: Device, got: &abi::p2pmem_import) -> Self {
        let got = abi::p2pmem_alloc {
            handle: got.handle,
            provider: got.provider,
            size: got.size,
            mmap_offset: got.mmap_offset,
            bar_offset: got.bar_offset,
            ..Default::default()
        };
        Self::new(device, &got)
    }

    pub(crate) fn new(device: Device, got: &abi::p2pmem_alloc) -> Self {
        Self {
            origin: Origin {
                device,
                handle: got.handle,
                provider: got.provider,
                size: got.size,
            },
            mapped: Mutex::default(),
            mmap_offset: got.mmap_offset,
            bar_offset: known_offset(got.bar_offset),
            class: PathClass::from_raw(got.class),
            freed: false,
        }
    }

    /// Returns the handle in the device's open file: never 0, never used again.
    pub fn handle(&self) -> u32 {
        self.origin.handle
    }

    /// Returns the id of the provider that has the memory.
    pub fn provider(&self) -> u32 {
        self.origin.provider
    }

    /// Returns the size in bytes: the requested size, rounded up to pages.
    pub fn size(&self) -> u64 {
        self.origin.size
    }

    /// Returns the offset of the first byte in the provider's BAR, if the BAR is known. Commands to the provider's DMA
    /// engine use this offset.
    pub fn bar_offset(&self) -> Option<u64> {
        self.bar_offset
    }

    /// Returns the class of the path to the farthest client; `None` if the request had no clients, and for an imported
    /// buffer.
    pub fn class(&self) -> Option<PathClass> {
        self.class
    }

    /// Returns the offset at which `mmap()` of the device's file maps the buffer, for programs that call `mmap()`
    /// themselves; 0 if the backend is not [`Backend::Module`](crate::Backend::Module): other backends have no file.
    pub fn mmap_offset(&self) -> u64 {
        self.mmap_offset
    }

    /// Returns the device through which the buffer was allocated or imported.
    pub fn device(&self) -> &Device {
        &self.origin.device
    }

    /// Returns state, place and holders of the buffer.
    ///
    /// ```
    /// # let fake = p2pmem::fake::Fake::example();
    /// # let device = fake.device();
    /// use p2pmem::{BufferState, Request};
    ///
    /// let buffer = device.alloc(&Request::new(4096).provider(2))?;
    /// # fake.remove_provider(2);
    /// // ... after provider 2 was removed:
    /// assert_eq!(buffer.info()?.state, BufferState::Gone);
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with ENOENT if the handle does not exist, which safe use of this crate cannot cause.
    pub fn info(&self) -> Result<BufferInfo> {
        self.origin
            .device
            .call(Operation::Buffer, |k| k.buffer(self.handle()))
            .map(BufferInfo::from)
    }

    /// Maps the whole buffer for reading and writing. A buffer can be mapped several times, and a mapping outlives the
    /// buffer.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with ENODEV (the buffer was revoked) or ENOMEM (the address space or the limit of mappings is
    /// exhausted).
    pub fn map(&self) -> Result<Mapping> {
        let failed = |error| -> Error { failure_without_message(Operation::Map, error) };
        let len = usize::try_from(self.size()).map_err(|_| failed(io::Error::from_raw_os_error(libc::ENOMEM)))?;
        // mmap() records no message, so none is read.
        let map = self.origin.device.kernel().map(self.handle(), self.mmap_offset, len);
        let region = map.map_err(failed)?;
        *self.mapped.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&region);
        Ok(Mapping::new(self.origin.clone(), region))
    }

    /// Creates a descriptor of the buffer for another process. The process receives the descriptor, by `SCM_RIGHTS` or
    /// by inheritance, and imports the buffer with [`Device::import`]. The descriptor is a dma-buf of the whole buffer,
    /// which drivers can import too.
    ///
    /// The descriptor and imported buffers hold the memory as a handle does: the memory is free after the last holder
    /// is gone, in any order. The bytes stay charged to the user, the file and the cgroup that allocated the buffer.
    ///
    /// ```
    /// # let fake = p2pmem::fake::Fake::example();
    /// # let device = fake.device();
    /// use p2pmem::Request;
    ///
    /// let buffer = device.alloc(&Request::new(1 << 20))?;
    /// buffer.map()?.write(0, 42u64)?;
    /// let shared = buffer.share()?;
    ///
    /// // In another process, which opened the device itself and received the descriptor.
    /// # let device = fake.device();
    /// let same = device.import(&shared)?;
    /// assert_eq!(same.map()?.read::<u64>(0)?, 42);
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Buffer::export`].
    pub fn share(&self) -> Result<DmaBuf> {
        self.export(&ExportOptions::new())
    }

    /// Exports the buffer, or parts of it, as a dma-buf.
    ///
    /// ```
    /// # let device = p2pmem::fake::Fake::example().device();
    /// use p2pmem::{ExportOptions, Request};
    ///
    /// let buffer = device.alloc(&Request::new(1 << 20))?;
    /// let dmabuf = buffer.export(&ExportOptions::new().range(0..4096))?;
    /// assert_eq!(dmabuf.ranges(), [0..4096]);
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Request`] for ranges that are empty, too many, or not inside the buffer; [`Error::Refused`] with EINVAL
    /// (not whole pages, or overlapping ranges), EPERM (pinned, which the administrator does not allow), ENODEV (the
    /// buffer was revoked), EOPNOTSUPP (memory of another driver whose BAR is not known), or EMFILE.
    pub fn export(&self, parts: &ExportOptions) -> Result<DmaBuf> {
        parts.of_buffer(&self.origin.device, self.handle(), self.size())
    }

    /// Registers the whole buffer with the NIC of a protection domain. If the buffer is mapped, work requests use the
    /// program's addresses of its bytes; otherwise the first byte has the address 0.
    ///
    /// ```
    /// # let fake = p2pmem::fake::Fake::example();
    /// # let device = fake.device();
    /// # let pd = p2pmem::fake::FakeNic::new("mlx5_0").pd();
    /// use p2pmem::{Access, Request, RegistrationMethod};
    ///
    /// let buffer = device.alloc(&Request::new(1 << 20))?;
    /// let memory = buffer.map()?;
    /// let registration = buffer.register(&pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    /// assert_eq!(registration.method(), RegistrationMethod::DmaBuf);
    /// assert_eq!(registration.addr(), memory.as_ptr() as u64);
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Register`], which names the buffer, the NIC and the method: EOPNOTSUPP (the NIC's driver does not
    /// register dma-bufs, or no revocable ones), EHOSTUNREACH (the NIC cannot reach the provider), ENODEV (the buffer
    /// was revoked), EINVAL (an invalid access), ENOMEM (no memory for another registration), ENOSYS (libibverbs is
    /// older than rdma-core 34); [`Error::Verbs`] if libibverbs is not installed; those of [`Buffer::export`].
    pub fn register(&self, pd: &impl ProtectionDomain, access: Access) -> Result<Registration> {
        self.register_with(pd, &RegisterOptions::new(access))
    }

    /// As [`Buffer::register`], with a choice of bytes, addresses and method.
    ///
    /// # Errors
    ///
    /// Those of [`Buffer::register`]; [`Error::Request`] for bytes that are not inside the buffer, or an iova whose
    /// offset in its page differs from that of the first byte.
    pub fn register_with(&self, pd: &impl ProtectionDomain, what: &RegisterOptions) -> Result<Registration> {
        let mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        what.run(pd, &self.origin, mapped.as_ref(), Handle::Lives)
    }

    /// Ends the handle of the buffer as dropping does, and reports errors.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with ENOENT if the handle does not exist, which safe use of this crate cannot cause.
    pub fn free(mut self) -> Result<()> {
        self.freed = true;
        let handle = self.handle();
        self.origin.device.call(Operation::Free, |k| k.free(handle))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if !self.freed {
            // A drop cannot report an error. Closing the device's file frees the buffer in any case.
            let handle = self.handle();
            let _ = self.origin.device.call(Operation::Free, |k| k.free(handle));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::fake::Fake;
    use crate::{BufferState, Request};

    #[test]
    fn a_buffer_is_freed_once_by_drop_or_by_free() {
        let device = Fake::example().device();
        let first = device.alloc(&Request::new(5000)).unwrap();
        assert_eq!(first.size(), 8192, "rounded up to pages");
        assert_eq!(first.info().unwrap().state, BufferState::Live);
        let second = device.alloc(&Request::new(4096)).unwrap();
        assert_ne!(first.handle(), second.handle());
        assert_eq!(device.info().unwrap().buffers, 2);
        drop(first);
        second.free().unwrap();
        assert_eq!(device.info().unwrap().buffers, 0);
        let stats = device.stats(None).unwrap();
        assert_eq!(
            (stats.allocs, stats.frees, stats.alloc_bytes, stats.free_bytes),
            (2, 2, 12288, 12288)
        );
    }

    #[test]
    fn refused_free_returns_error() {
        let fake = Fake::example();
        let device = fake.device();
        let buffer = device.alloc(&Request::new(4096)).unwrap();
        fake.fail_next(libc::ENOENT);
        assert_eq!(buffer.free().unwrap_err().errno(), Some(libc::ENOENT));
    }

    #[test]
    fn a_buffer_keeps_its_device_and_a_mapping_outlives_its_buffer() {
        let device = Fake::example().device();
        let buffer = device.alloc(&Request::new(4096)).unwrap();
        drop(device);
        let mapping = buffer.map().unwrap();
        drop(buffer);
        mapping.write(0, 7u32).unwrap();
        assert_eq!(mapping.read::<u32>(0).unwrap(), 7);
    }

    #[test]
    fn a_revoked_buffer_cannot_be_mapped() {
        let fake = Fake::example();
        let device = fake.device();
        let buffer = device.alloc(&Request::new(4096).provider(2)).unwrap();
        fake.remove_provider(2);
        assert_eq!(buffer.info().unwrap().state, BufferState::Gone);
        let error = buffer.map().unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENODEV));
        assert!(error.remedy().unwrap().contains("allocate again"));
    }
}
