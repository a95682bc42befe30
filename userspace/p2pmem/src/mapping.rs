// SPDX-License-Identifier: MIT OR Apache-2.0

//! Mappings of buffers: volatile access, and direct file I/O.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use p2pmem_access_sys::{load_fence, store_fence};

use crate::backend::Capability;
use crate::direct::require_direct;
use crate::error::{Error, Operation, Result};
use crate::export::{DmaBuf, ExportOptions};
use crate::origin::Origin;
use crate::register::{Access, Handle, RegisterOptions, Registration};
use crate::sys::verbs::ProtectionDomain;
use crate::sys::Region;

/// Largest single read or write in bytes: the kernel cuts longer ones just below 2 GiB, which is not a multiple of a
/// block.
const MAX_TRANSFER: usize = 1 << 30;

/// A mapped buffer.
///
/// There is deliberately no method that returns `&[u8]` or `&mut [u8]`. The memory is behind a PCI BAR: devices change
/// it while the program reads, which Rust's references rule out, and the compiler may turn ordinary copies into
/// accesses (wide vectors, repeated or overlapping reads) that a BAR answers slowly or not at all. So every access is
/// volatile, is done once, and is as wide as its alignment permits, up to 8 bytes. A value is one access if its size is
/// 1, 2, 4 or 8 bytes and its offset is a multiple of its size. Other values can be torn if a device writes at the same
/// time.
///
/// Reads from a BAR cross the bus one by one, and take microseconds each. Let devices move bulk data, or read files
/// with [`Mapping::read_from`].
///
/// After the provider is removed, an access raises SIGBUS. [`Device::events`](crate::Device::events) reports the
/// removal.
///
/// ```
/// # let device = p2pmem::fake::Fake::example().device();
/// use p2pmem::Request;
///
/// let mapping = device.alloc(&Request::new(4096))?.map()?;
/// mapping.write(16, 0x1234_5678_u32)?;
/// assert_eq!(mapping.read::<u16>(16)?, u16::from_ne_bytes(0x1234_5678_u32.to_ne_bytes()[..2].try_into().unwrap()));
/// assert!(mapping.read::<u64>(4090).is_err());
/// # Ok::<(), p2pmem::Error>(())
/// ```
pub struct Mapping {
    origin: Origin,
    region: Arc<Region>,
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("start", &self.as_ptr())
            .field("len", &self.len())
            .finish()
    }
}

impl Mapping {
    pub(crate) fn new(origin: Origin, region: Arc<Region>) -> Self {
        Self { origin, region }
    }

    /// Returns the length of the mapping in bytes.
    #[allow(clippy::len_without_is_empty)] // no buffer is empty
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// Returns the address of the mapping, for I/O that the caller issues (io_uring, libaio, verbs). Access through the
    /// pointer must be volatile. The address is valid until the mapping is dropped.
    pub fn as_ptr(&self) -> *mut u8 {
        self.region.as_ptr()
    }

    fn check(&self, offset: usize, len: usize) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => Ok(()),
            _ => Err(Error::OutOfBounds {
                offset,
                len,
                size: self.len(),
            }),
        }
    }

    /// Reads a value at a byte offset.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if the value is not inside the mapping.
    pub fn read<T: AnyBitPattern + NoUninit>(&self, offset: usize) -> Result<T> {
        self.check(offset, size_of::<T>())?;
        let mut value = T::zeroed();
        self.region.read(offset, bytemuck::bytes_of_mut(&mut value));
        Ok(value)
    }

    /// Writes a value at a byte offset.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if the value is not inside the mapping.
    pub fn write<T: NoUninit>(&self, offset: usize, value: T) -> Result<()> {
        self.check(offset, size_of::<T>())?;
        self.region.write(offset, bytemuck::bytes_of(&value));
        Ok(())
    }

    /// Copies memory from byte `offset` on to `out`.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if the range is not inside the mapping.
    pub fn copy_to_slice<T: AnyBitPattern + NoUninit>(&self, offset: usize, out: &mut [T]) -> Result<()> {
        let bytes = bytemuck::cast_slice_mut(out);
        self.check(offset, bytes.len())?;
        self.region.read(offset, bytes);
        Ok(())
    }

    /// Copies `data` to the memory from byte `offset` on.
    ///
    /// ```
    /// # let device = p2pmem::fake::Fake::example().device();
    /// use p2pmem::Request;
    ///
    /// let mapping = device.alloc(&Request::new(4096))?.map()?;
    /// mapping.copy_from_slice(0, &[1.5f32, 2.5])?;
    /// mapping.flush();
    /// let mut back = [0f32; 2];
    /// mapping.copy_to_slice(0, &mut back)?;
    /// assert_eq!(back, [1.5, 2.5]);
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if the range is not inside the mapping.
    pub fn copy_from_slice<T: NoUninit>(&self, offset: usize, data: &[T]) -> Result<()> {
        let bytes = bytemuck::cast_slice(data);
        self.check(offset, bytes.len())?;
        self.region.write(offset, bytes);
        Ok(())
    }

    /// Sets the bytes of `range` to `byte`.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if the range is not inside the mapping.
    pub fn fill(&self, range: Range<usize>, byte: u8) -> Result<()> {
        let len = self.length_of(&range)?;
        self.region.fill(range.start, len, byte);
        Ok(())
    }

    /// Copies as [`Mapping::copy_to_slice`] does, and returns an error if an access raises SIGBUS because the provider was
    /// removed. For programs that must not end then, such as interpreters of other languages. The first call installs a
    /// handler of SIGBUS, which passes on signals of other origins. On processors other than x86-64, the program receives
    /// SIGBUS.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if the access reaches past the mapping; [`Error::Refused`] with ENODEV if the buffer was
    /// revoked: `out` then has a part of the bytes.
    pub fn try_copy_to_slice(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.check(offset, out.len())?;
        self.region.try_read(offset, out).map_err(|error| gone(&error))
    }

    /// Copies as [`Mapping::copy_from_slice`] does, and returns an error if an access raises SIGBUS, see
    /// [`Mapping::try_copy_to_slice`].
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::try_copy_to_slice`]; a part of `data` may be written then.
    pub fn try_copy_from_slice(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.check(offset, data.len())?;
        self.region.try_write(offset, data).map_err(|error| gone(&error))
    }

    /// Fills as [`Mapping::fill`] does, and returns an error if an access raises SIGBUS, see [`Mapping::try_copy_to_slice`].
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::try_copy_to_slice`].
    pub fn try_fill(&self, range: Range<usize>, byte: u8) -> Result<()> {
        let len = self.length_of(&range)?;
        self.region
            .try_fill(range.start, len, byte)
            .map_err(|error| gone(&error))
    }

    /// Makes writes through this mapping visible to devices before any later operation, such as ringing a doorbell.
    /// Stores to a BAR can stay in the processor's write-combining buffers until then.
    pub fn flush(&self) {
        store_fence();
    }

    /// Orders loads: what is read through this mapping after the call is what the memory has after the loads before the call. For
    /// data that a device writes before a word that says so: read the word, call this, then read the data. Loads from a BAR that is
    /// mapped write-combining have no order without it.
    pub fn order_loads(&self) {
        load_fence();
    }

    /// Exports the mapped memory, or parts of it, as a dma-buf. Works also after the [`Buffer`](crate::Buffer) is
    /// dropped.
    ///
    /// # Errors
    ///
    /// Those of [`Buffer::export`](crate::Buffer::export).
    pub fn export(&self, parts: &ExportOptions) -> Result<DmaBuf> {
        parts.of_addresses(&self.origin.device, self.as_ptr() as u64, self.len() as u64)
    }

    /// Registers the whole mapping with the NIC of a protection domain. Work requests address bytes by their addresses
    /// in the program. Works also after the [`Buffer`](crate::Buffer) is dropped.
    ///
    /// # Errors
    ///
    /// Those of [`Buffer::register`](crate::Buffer::register).
    pub fn register(&self, pd: &impl ProtectionDomain, access: Access) -> Result<Registration> {
        self.register_with(pd, &RegisterOptions::new(access))
    }

    /// As [`Mapping::register`], with a choice of bytes, addresses and method.
    ///
    /// # Errors
    ///
    /// Those of [`Buffer::register_with`](crate::Buffer::register_with).
    pub fn register_with(&self, pd: &impl ProtectionDomain, what: &RegisterOptions) -> Result<Registration> {
        what.run(pd, &self.origin, Some(&self.region), Handle::MayBeGone)
    }

    fn length_of(&self, range: &Range<usize>) -> Result<usize> {
        let len = range.end.saturating_sub(range.start);
        self.check(range.start, len)?;
        Ok(len)
    }

    /// Reads `file` from byte `file_offset` on into `range` of the mapping, device to device, until the range is full
    /// or the file ends. Returns the number of bytes read.
    ///
    /// The file must be open with O_DIRECT ([`DirectOptions`](crate::DirectOptions)), and offset and length must be
    /// multiples of its block size. The range can extend beyond the end of the file.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if the range is not inside the mapping; [`Error::NotDirect`] for a file without O_DIRECT;
    /// [`Error::NotSupported`] with the backend vfio; [`Error::Io`] with EINVAL (offset or length are not whole
    /// blocks), EREMOTEIO (the file's device does not accept peer-to-peer memory), EFAULT (the buffer was revoked, or
    /// the driver does not accept device memory), EIO (the drive cannot reach the provider), or EBADF (the file is not
    /// open for reading).
    pub fn read_from(&self, file: &File, file_offset: u64, range: Range<usize>) -> Result<usize> {
        let len = self.length_of(&range)?;
        self.origin.device.require(Capability::DirectIo)?;
        require_direct(file)?;
        // If the file does not end at a block boundary, the last read is short, and a further read from there would
        // fail because of its offset. For anything but a regular file (size 0), an empty read marks the end.
        let end = file.metadata().ok().filter(std::fs::Metadata::is_file).map(|m| m.len());
        let mut done = 0;
        while done < len && end.is_none_or(|end| file_offset.saturating_add(done as u64) < end) {
            let at = file_offset.saturating_add(done as u64);
            let some = (len - done).min(MAX_TRANSFER);
            match self.region.pread(range.start + done, some, file, at) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(Error::Io {
                        what: "reading",
                        offset: at,
                        error,
                    })
                }
            }
        }
        Ok(done)
    }

    /// Writes `range` of the mapping to `file` from byte `file_offset` on, device to device. The data is on the drive
    /// after [`File::sync_data`].
    ///
    /// The file must be open with O_DIRECT ([`DirectOptions`](crate::DirectOptions)), and offset and length must be
    /// multiples of its block size.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if the range is not inside the mapping; [`Error::NotDirect`] for a file without O_DIRECT;
    /// [`Error::NotSupported`] with the backend vfio; [`Error::Io`] with EINVAL (offset or length are not whole
    /// blocks), EREMOTEIO (the file's device does not accept peer-to-peer memory), EFAULT (the buffer was revoked, or
    /// the driver does not accept device memory), EIO (the drive cannot reach the provider), or EBADF (the file is not
    /// open for writing); [`Error::ShortWrite`] if the file's device is full.
    pub fn write_to(&self, file: &File, file_offset: u64, range: Range<usize>) -> Result<()> {
        let len = self.length_of(&range)?;
        self.origin.device.require(Capability::DirectIo)?;
        require_direct(file)?;
        self.flush();
        let mut done = 0;
        while done < len {
            let at = file_offset.saturating_add(done as u64);
            let some = (len - done).min(MAX_TRANSFER);
            match self.region.pwrite(range.start + done, some, file, at) {
                Ok(0) => return Err(Error::ShortWrite { written: done, len }),
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(Error::Io {
                        what: "writing",
                        offset: at,
                        error,
                    })
                }
            }
        }
        Ok(())
    }
}

/// The error of an access to memory that is gone.
fn gone(error: &io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::EFAULT) | None => Error::Refused {
            operation: Operation::Access,
            errno: libc::ENODEV,
            reason: None,
        },
        // The handler of SIGBUS could not be installed.
        Some(errno) => Error::Refused {
            operation: Operation::Access,
            errno,
            reason: None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::direct::{open_direct, DirectOptions};
    use crate::fake::Fake;
    use crate::Request;

    fn mapping(len: u64) -> Mapping {
        Fake::example()
            .device()
            .alloc(&Request::new(len))
            .unwrap()
            .map()
            .unwrap()
    }

    /// Creates a file in the build directory, because /tmp can be a file system without direct I/O. Returns `None` if
    /// the build directory has no direct I/O either.
    fn direct_file(name: &str, content: &[u8]) -> Option<(tempfile::TempDir, File)> {
        let dir = tempfile::tempdir_in(std::env::var_os("CARGO_TARGET_TMPDIR").map_or_else(
            || std::env::current_exe().unwrap().parent().unwrap().to_owned(),
            std::path::PathBuf::from,
        ))
        .unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        match DirectOptions::new().read(true).write(true).open(&path) {
            Ok(file) => Some((dir, file)),
            Err(error) if error.errno() == Some(libc::EINVAL) => {
                eprintln!("skipped: no direct I/O in {}", dir.path().display());
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn out_of_bounds_access_is_rejected() {
        let mapping = mapping(4096);
        assert_eq!(mapping.len(), 4096);
        mapping.write(4088, 1u64).unwrap();
        assert!(matches!(
            mapping.write(4089, 1u64),
            Err(Error::OutOfBounds {
                offset: 4089,
                len: 8,
                size: 4096
            })
        ));
        assert!(mapping.read::<u8>(usize::MAX).is_err());
        assert!(mapping.copy_from_slice(4000, &[0u32; 25]).is_err());
        assert!(mapping.copy_to_slice(4097, &mut [0u8; 0]).is_err());
        mapping.copy_to_slice(4096, &mut [0u8; 0]).unwrap();
        assert!(mapping.fill(0..4097, 1).is_err());
        #[allow(clippy::reversed_empty_ranges)]
        mapping.fill(8..4, 1).unwrap();
    }

    #[test]
    fn guarded_copies_are_bounded_and_complete() {
        let mapping = mapping(4096);
        mapping.try_copy_from_slice(4090, b"abcdef").unwrap();
        let mut back = [0; 6];
        mapping.try_copy_to_slice(4090, &mut back).unwrap();
        assert_eq!(&back, b"abcdef");
        mapping.try_fill(4090..4093, b'x').unwrap();
        assert_eq!(&mapping.read::<[u8; 6]>(4090).unwrap(), b"xxxdef");
        assert!(matches!(
            mapping.try_copy_to_slice(4091, &mut back),
            Err(Error::OutOfBounds { .. })
        ));
        assert!(mapping.try_copy_from_slice(usize::MAX, b"a").is_err());
        assert!(mapping.try_fill(0..4097, 0).is_err());
        let error = gone(&io::Error::from_raw_os_error(libc::EFAULT));
        assert_eq!(
            (error.errno(), error.kind()),
            (Some(libc::ENODEV), crate::ErrorKind::Removed)
        );
        assert!(error.remedy().unwrap().contains("allocate again"));
    }

    #[test]
    fn typed_copies_round_trip() {
        let mapping = mapping(4096);
        let data = [1.5f32, -2.25, 3.0];
        mapping.copy_from_slice(12, &data).unwrap();
        let mut back = [0f32; 3];
        mapping.copy_to_slice(12, &mut back).unwrap();
        assert_eq!(back, data);
        assert_eq!(mapping.read::<f32>(16).unwrap(), -2.25);
        mapping.fill(16..20, 0xff).unwrap();
        assert_eq!(mapping.read::<[u8; 6]>(15).unwrap()[1..5], [0xff; 4]);
    }

    #[test]
    fn file_io_is_complete_and_stops_at_end_of_file() {
        // 3 blocks and 100 bytes, so that the last read is short.
        let content: Vec<u8> = (0..3 * 4096 + 100).map(|i| (i % 251) as u8).collect();
        let Some((_dir, file)) = direct_file("data", &content) else {
            return;
        };
        let mapping = mapping(8 * 4096);
        assert_eq!(mapping.read_from(&file, 0, 4096..mapping.len()).unwrap(), content.len());
        let mut back = vec![0; content.len()];
        mapping.copy_to_slice(4096, &mut back).unwrap();
        assert!(back == content);
        assert_eq!(mapping.read_from(&file, 1 << 20, 0..4096).unwrap(), 0, "past the end");
        mapping.write_to(&file, 4 * 4096, 4096..2 * 4096).unwrap();
        assert_eq!(mapping.read_from(&file, 4 * 4096, 0..4096).unwrap(), 4096);
        assert_eq!(mapping.read::<[u8; 8]>(0).unwrap(), content[..8]);
    }

    #[test]
    fn unaligned_and_indirect_io_is_refused_with_a_remedy() {
        let Some((dir, file)) = direct_file("data", &[1; 8192]) else {
            return;
        };
        let mapping = mapping(8192);
        let error = mapping.read_from(&file, 3, 0..4096);
        // Some file systems accept any offset. For the others, the error must have a remedy.
        if let Err(error) = error {
            assert!(
                matches!(
                    error,
                    Error::Io {
                        what: "reading",
                        offset: 3,
                        ..
                    }
                ),
                "{error}"
            );
            assert!(error.remedy().unwrap().contains("blocks"));
        }
        let buffered = File::open(dir.path().join("data")).unwrap();
        assert!(matches!(
            mapping.read_from(&buffered, 0, 0..4096),
            Err(Error::NotDirect)
        ));
        assert!(matches!(mapping.write_to(&buffered, 0, 0..4096), Err(Error::NotDirect)));
        assert!(matches!(
            mapping.read_from(&file, 0, 0..8193),
            Err(Error::OutOfBounds { .. })
        ));
        let read_only = open_direct(dir.path().join("data")).unwrap();
        let error = mapping.write_to(&read_only, 0, 0..4096).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EBADF));
    }
}
