// SPDX-License-Identifier: MIT OR Apache-2.0

//! Dma-bufs of other drivers: their exporter, the path to them, and registration with NICs.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{fstatfs, seek, SeekFrom};

use crate::addr::PciAddr;
use crate::error::{Error, Result};
use crate::export::DmaBuf;
use crate::pci::Client;
use crate::register::{Access, RegisterOptions, Registration};
use crate::sys::verbs::ProtectionDomain;
use crate::topology::path_between;
use crate::types::{human_size, Path};

/// `DMA_BUF_MAGIC` (`include/uapi/linux/magic.h`): the type of the file system of dma-bufs.
const DMA_BUF_MAGIC: i64 = 0x444d_4142;

impl DmaBuf {
    /// Accepts any dma-buf: from a GPU driver (CUDA's `cuMemGetHandleForAddressRange()`), vfio-pci, a heap, or a buffer
    /// of another process.
    ///
    /// The kernel does not report which device has the memory. [`DmaBuf::path_to`] needs the device, and the texts of
    /// errors name the device: pass the device to [`DmaBuf::of_device`].
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::os::fd::OwnedFd;
    /// use p2pmem::{Access, DmaBuf};
    ///
    /// # let buffer = p2pmem::fake::Fake::example().device().alloc(&p2pmem::Request::new(1 << 20))?;
    /// # let received = OwnedFd::from(buffer.share()?);
    /// # let pd = p2pmem::fake::FakeNic::new("mlx5_0").pd();
    /// // The descriptor is from a call of the driver, or from another process.
    /// let fd: OwnedFd = received;
    /// let dmabuf = DmaBuf::from_fd(fd)?.of_device("0000:03:00.0".parse()?);
    /// let registration = dmabuf.register(&pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    /// assert_eq!((registration.addr(), registration.len()), (0, 1 << 20));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::DmaBuf`] if the descriptor is not a dma-buf; [`Error::State`] if the exporter does not report a size.
    pub fn from_fd(fd: impl Into<OwnedFd>) -> Result<Self> {
        let fd = fd.into();
        if !is_dma_buf(fd.as_fd()) {
            return Err(Error::DmaBuf {
                why: format!("descriptor {}{} is not a dma-buf", fd.as_raw_fd(), file_of(fd.as_fd())),
                remedy: "pass the descriptor that the driver's dma-buf export returned, such as CUDA's \
                         cuMemGetHandleForAddressRange(); cuMemExportToShareableHandle() and memfd_create() return other \
                         descriptors",
            });
        }
        let size = seek(&fd, SeekFrom::End(0)).map_err(|error| {
            Error::State(format!(
                "cannot read the size of the dma-buf: {}",
                std::io::Error::from(error)
            ))
        })?;
        Ok(Self::of_size(fd, size, None, None))
    }

    /// Sets the PCI function that has the memory. The library does not check the function.
    #[must_use]
    pub fn of_device(mut self, addr: PciAddr) -> Self {
        self.function = Some(addr);
        self
    }

    /// Returns the PCI function that has the memory, if [`DmaBuf::of_device`] or the backend set the function.
    pub fn device(&self) -> Option<PciAddr> {
        self.function
    }

    /// Returns the name of the driver that exported the memory; `None` if `/proc` does not report a name.
    pub fn exporter(&self) -> Option<String> {
        let text = std::fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", self.as_fd().as_raw_fd())).ok()?;
        let name = text.lines().find_map(|line| line.strip_prefix("exp_name:"))?;
        Some(name.trim().to_owned())
    }

    /// Returns the path between the memory and a client. See [`path_between`] for what sysfs does not report.
    ///
    /// # Errors
    ///
    /// [`Error::DmaBuf`] if the device that has the memory is not known; [`Error::Client`] if a PCI function does not
    /// exist.
    pub fn path_to(&self, client: &Client) -> Result<Path> {
        let function = self.function.ok_or_else(|| Error::DmaBuf {
            why: format!("the path from the dma-buf to {client}: the device that has the memory is not known"),
            remedy: "set the device that has the memory: DmaBuf::of_device()",
        })?;
        path_between(function, client)
    }

    /// Registers the whole dma-buf with the NIC of a protection domain. The first byte has the address 0. The
    /// registration holds the dma-buf.
    ///
    /// # Errors
    ///
    /// [`Error::Register`], which names exporter, device, path and NIC, with EOPNOTSUPP (the NIC's driver does not
    /// register dma-bufs, or the exporter refuses importers that it cannot revoke), EHOSTUNREACH or EREMOTEIO (the NIC
    /// cannot reach the memory), ENODEV (the memory was revoked), EINVAL (invalid access), or ENOMEM; [`Error::Verbs`]
    /// if libibverbs is not installed.
    pub fn register(&self, pd: &impl ProtectionDomain, access: Access) -> Result<Registration> {
        self.register_with(pd, &RegisterOptions::new(access))
    }

    /// As [`DmaBuf::register`], with options for the bytes and the address.
    ///
    /// # Errors
    ///
    /// Those of [`DmaBuf::register`]; [`Error::Request`] for bytes that are not inside the dma-buf, an address whose
    /// offset in its page is not that of the first byte, and options that only buffers have: peer memory, pinning.
    pub fn register_with(&self, pd: &impl ProtectionDomain, what: &RegisterOptions) -> Result<Registration> {
        what.run_dmabuf(pd, self, |bytes, nic| self.describe(bytes, nic))
    }

    /// Returns the memory of a failed registration, as part of a message.
    fn describe(&self, bytes: u64, nic: &str) -> String {
        let exporter = self.exporter().unwrap_or_else(|| "an unknown driver".into());
        let place = self.function.map(|function| {
            let path = Client::resolve(nic).and_then(|client| path_between(function, &client));
            match path {
                Ok(path) => format!(" in {function}, {} {nic}", path.class.relation()),
                Err(_) => format!(" in {function}"),
            }
        });
        format!(
            "{} of a dma-buf of {exporter} ({}{})",
            human_size(bytes),
            human_size(self.size()),
            place.unwrap_or_default()
        )
    }
}

/// Returns the file of a descriptor in parentheses, after a space, as part of a message; "" if `/proc` does not report one.
fn file_of(fd: BorrowedFd<'_>) -> String {
    std::fs::read_link(format!("/proc/thread-self/fd/{}", fd.as_raw_fd()))
        .map(|file| format!(" ({})", file.display()))
        .unwrap_or_default()
}

/// Returns whether a descriptor is a dma-buf.
fn is_dma_buf(fd: BorrowedFd<'_>) -> bool {
    #[cfg(any(test, feature = "fake"))]
    {
        // A file that stands for a dma-buf in tests.
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap_or_default();
        let name = format!("/memfd:{}", crate::sys::FAKE_DMABUF.to_string_lossy());
        if link.to_string_lossy().starts_with(&name) {
            return true;
        }
    }
    #[allow(clippy::unnecessary_cast)] // the type depends on the architecture
    fstatfs(fd).is_ok_and(|stat| stat.f_type as i64 == DMA_BUF_MAGIC)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Fake, FakeNic};
    use crate::{ExportOptions, RegistrationMethod, Request};
    use std::fs::File;

    fn dmabuf(size: u64) -> DmaBuf {
        let buffer = Fake::example().device().alloc(&Request::new(size)).unwrap();
        let exported = buffer.export(&ExportOptions::new()).unwrap();
        DmaBuf::from_fd(exported).unwrap()
    }

    #[test]
    fn other_descriptors_are_refused() {
        let error = DmaBuf::from_fd(File::open("/dev/null").unwrap()).unwrap_err();
        assert!(error.to_string().ends_with(" (/dev/null) is not a dma-buf"), "{error}");
        assert!(
            error.remedy().unwrap().contains("cuMemGetHandleForAddressRange()"),
            "{error}"
        );
        let memory = crate::sys::memory_file(c"other", 4096).unwrap();
        let error = DmaBuf::from_fd(memory).unwrap_err();
        assert!(matches!(error, Error::DmaBuf { .. }), "{error}");
        assert_eq!(error.kind(), crate::ErrorKind::InvalidRequest);
    }

    #[test]
    fn dma_buf_is_registered_whole_and_in_part() {
        let nic = FakeNic::new("mlx5_0");
        let dmabuf = dmabuf(16 * 4096);
        assert_eq!((dmabuf.size(), dmabuf.device()), (16 * 4096, None));
        let whole = dmabuf.register(&nic.pd(), Access::ALL).unwrap();
        assert_eq!((whole.addr(), whole.len()), (0, 16 * 4096));
        assert_eq!(whole.method(), RegistrationMethod::DmaBuf);
        let part = RegisterOptions::new(Access::ALL)
            .range(5000..9000)
            .iova(0x7000_0000 + 904);
        let part = dmabuf.register_with(&nic.pd(), &part).unwrap();
        assert_eq!((part.addr(), part.len()), (0x7000_0388, 4000));
        // Each registration has its own descriptor.
        drop(dmabuf);
        assert_eq!(nic.regions(), 2);
        assert_eq!(whole.dmabuf().unwrap().size(), 16 * 4096);
        drop((whole, part));
        assert_eq!(nic.regions(), 0);
    }

    #[test]
    fn invalid_options_are_refused_with_message() {
        let nic = FakeNic::new("mlx5_0");
        let dmabuf = dmabuf(8192);
        let options = || RegisterOptions::new(Access::ALL);
        for (what, wanted) in [
            (options().range(0..8193), "not inside the 8192 bytes"),
            (options().range(4096..4096), "is empty"),
            (options().range(1..2).iova(0), "same offset in their page"),
            (options().pinned(true), "exporter decides"),
            (options().method(RegistrationMethod::PeerMemory), "by addresses"),
        ] {
            let error = dmabuf.register_with(&nic.pd(), &what).unwrap_err();
            assert!(
                matches!(error, Error::Request(_)) && error.to_string().contains(wanted),
                "{error}"
            );
        }
        assert_eq!(nic.regions(), 0);
    }

    #[test]
    fn register_error_names_exporter_device_and_nic() {
        let nic = FakeNic::new("no-such-nic");
        nic.fail_next(libc::EOPNOTSUPP);
        let dmabuf = dmabuf(8192).of_device("0000:03:00.0".parse().unwrap());
        let error = dmabuf.register(&nic.pd(), Access::ALL).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EOPNOTSUPP));
        let text = error.to_string();
        assert!(
            text.contains(
                "8 KiB of a dma-buf of an unknown driver (8 KiB in 0000:03:00.0) with no-such-nic by dma-buf"
            ),
            "{text}"
        );
        assert!(error.remedy().is_some());
        let missing = dmabuf
            .path_to(&Client::new("ffff:ff:1f.7".parse().unwrap()))
            .unwrap_err();
        assert!(matches!(missing, Error::Client { .. }), "{missing}");
        let unknown = self::dmabuf(4096).path_to(&Client::new("0000:03:00.0".parse().unwrap()));
        let unknown = unknown.unwrap_err();
        assert_eq!(
            unknown.to_string(),
            "the path from the dma-buf to 0000:03:00.0: the device that has the memory is not known"
        );
        assert!(unknown.remedy().unwrap().contains("of_device"), "{unknown}");
    }
}
