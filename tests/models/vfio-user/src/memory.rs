// SPDX-License-Identifier: MIT OR Apache-2.0

//! Device memory: a memfd that this process, the client and the guest share.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};

use crate::sys::SharedMapping;

/// A range exceeds the memory, or a write goes to read-only memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("range exceeds the memory, or the memory is read-only")]
pub struct OutOfBounds;

/// Identity of a file, the same for all its file descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub(crate) fn from_stat(stat: &rustix::fs::Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }
}

/// Memory of a device: a sealed memfd and a mapping of it. Initially zero.
#[derive(Debug)]
pub struct Memory {
    fd: OwnedFd,
    file: FileId,
    mapping: SharedMapping,
}

impl Memory {
    /// Creates `size` bytes of memory. `name` is the memfd's name in /proc, for debugging.
    ///
    /// # Errors
    ///
    /// Those of memfd_create, ftruncate and mmap.
    pub fn new(name: &str, size: u64) -> io::Result<Self> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, size)?;
        // The client gets the file descriptor. Without the seals, it could truncate the file, and accesses to the
        // mapping in this process would raise SIGBUS.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mapping = SharedMapping::map(fd.as_fd(), 0, size, true)?;
        let file = FileId::from_stat(&rustix::fs::fstat(&fd)?);
        Ok(Self { fd, file, mapping })
    }

    /// Size in bytes; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.mapping.len()
    }

    /// The file descriptor that is sent to the client.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Copies from the memory. An aligned access of 2, 4 or 8 bytes is atomic.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`]; nothing is copied.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), OutOfBounds> {
        self.mapping.read(offset, data)
    }

    /// Copies to the memory. An aligned access of 2, 4 or 8 bytes is atomic.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`]; nothing is copied.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), OutOfBounds> {
        self.mapping.write(offset, data)
    }

    /// Copies `len` bytes within the memory. The ranges may overlap.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`]; nothing is copied.
    pub fn copy_within(&self, from: u64, to: u64, len: u64) -> Result<(), OutOfBounds> {
        SharedMapping::copy(&self.mapping, from, &self.mapping, to, len)
    }

    pub(crate) fn file_id(&self) -> FileId {
        self.file
    }

    pub(crate) fn mapping(&self) -> &SharedMapping {
        &self.mapping
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_bounds_access_is_rejected() {
        let memory = Memory::new("bounds", 8192).unwrap();
        let mut data = [1; 16];
        memory.read(8176, &mut data).unwrap();
        assert_eq!(data, [0; 16]);
        assert_eq!(memory.read(8177, &mut data), Err(OutOfBounds));
        assert_eq!(memory.write(u64::MAX, &data), Err(OutOfBounds));
        assert_eq!(memory.write(u64::MAX - 7, &data), Err(OutOfBounds));
        assert_eq!(memory.copy_within(0, 1, 8192), Err(OutOfBounds));
        assert_eq!(memory.copy_within(u64::MAX, 0, 2), Err(OutOfBounds));
    }

    #[test]
    fn every_width_reads_back() {
        let memory = Memory::new("widths", 4096).unwrap();
        for width in 1..=17_usize {
            for at in 0..9 {
                let data: Vec<u8> = (0..width as u8).map(|i| i ^ at as u8 ^ 0x5a).collect();
                let mut back = vec![0; width];
                memory.write(at, &data).unwrap();
                memory.read(at, &mut back).unwrap();
                assert_eq!(back, data, "width {width} at {at}");
            }
        }
        memory.write(0, b"abcdef").unwrap();
        memory.copy_within(0, 2, 6).unwrap();
        let mut back = [0; 8];
        memory.read(0, &mut back).unwrap();
        assert_eq!(&back, b"ababcdef");
    }

    #[test]
    fn memory_cannot_be_resized() {
        let memory = Memory::new("sealed", 4096).unwrap();
        assert!(rustix::fs::ftruncate(memory.fd(), 0).is_err());
        assert!(rustix::fs::ftruncate(memory.fd(), 8192).is_err());
        assert!(Memory::new("empty", 0).is_err());
    }
}
