// SPDX-License-Identifier: MIT OR Apache-2.0

//! Device memory: a memfd that this process, the emulator and the guest share.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};

use crate::sys::Window;

/// A range does not lie in the memory it is meant for, or that memory is read-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("range outside of the memory")]
pub struct OutOfBounds;

/// Which file memory is in, however many descriptors of it there are.
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

/// Memory of a device, as a sealed memfd and a mapping of it. It starts as zeros.
#[derive(Debug)]
pub struct Memory {
    fd: OwnedFd,
    file: FileId,
    window: Window,
}

impl Memory {
    /// Makes `size` bytes of memory; `name` is shown in /proc for debugging.
    ///
    /// # Errors
    ///
    /// Those of memfd_create, ftruncate and mmap.
    pub fn new(name: &str, size: u64) -> io::Result<Self> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, size)?;
        // The process that gets the descriptor must not be able to shrink the file under the mapping here.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let window = Window::map(fd.as_fd(), 0, size, true)?;
        let file = FileId::from_stat(&rustix::fs::fstat(&fd)?);
        Ok(Self { fd, file, window })
    }

    /// Size in bytes; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.window.len()
    }

    /// The descriptor to share.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Copies out of the memory. An aligned access of 2, 4 or 8 bytes is atomic.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`]; then nothing was copied.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), OutOfBounds> {
        self.window.read(offset, data)
    }

    /// Copies into the memory. An aligned access of 2, 4 or 8 bytes is atomic.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`]; then nothing was copied.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), OutOfBounds> {
        self.window.write(offset, data)
    }

    /// Copies `len` bytes within the memory; the ranges may overlap.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`]; then nothing was copied.
    pub fn copy_within(&self, from: u64, to: u64, len: u64) -> Result<(), OutOfBounds> {
        Window::copy(&self.window, from, &self.window, to, len)
    }

    pub(crate) fn file_id(&self) -> FileId {
        self.file
    }

    pub(crate) fn window(&self) -> &Window {
        &self.window
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_kept() {
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
    fn it_cannot_be_resized() {
        let memory = Memory::new("sealed", 4096).unwrap();
        assert!(rustix::fs::ftruncate(memory.fd(), 0).is_err());
        assert!(rustix::fs::ftruncate(memory.fd(), 8192).is_err());
        assert!(Memory::new("empty", 0).is_err());
    }
}
