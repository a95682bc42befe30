// SPDX-License-Identifier: MIT OR Apache-2.0

//! All unsafe code of this crate: memory that devices access (here), and system calls of the RDMA core ([`uverbs`]).

#![allow(unsafe_code)]

#[cfg(feature = "verbs")]
pub mod uverbs;

use std::fmt;
#[cfg(feature = "verbs")]
use std::io;
#[cfg(feature = "verbs")]
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use p2pmem_access_sys as access;
#[cfg(feature = "verbs")]
use rustix::mm::mmap;
use rustix::mm::{madvise, mmap_anonymous, munmap, Advice, MapFlags, ProtFlags};

use crate::error::{Error, Result};
use crate::region::Memory;

/// Bytes of a page, and of a doorbell register page.
pub const PAGE: usize = 4096;

/// A mapping of this module.
///
/// # Invariants
///
/// `len` bytes from the page-aligned address `start` are mapped until this is dropped, writable, and readable unless the
/// mapping is a doorbell register page.
struct Mapped {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: by the invariant the memory is mapped for the whole process. All accesses are volatile and no reference to the
// memory exists, so threads may race on it as devices do: a racing read returns an arbitrary value.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: by the invariant this is a mapping of this module, and nothing uses it after this.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl Mapped {
    /// Returns the address of byte `at`, after it checked that `size` bytes are mapped there.
    fn at(&self, at: usize, size: usize, alignment: usize) -> *mut u8 {
        let inside = at.checked_add(size).is_some_and(|end| end <= self.len);
        assert!(
            inside && at % alignment == 0,
            "{size} bytes at {at} are not inside {} bytes, or not aligned",
            self.len
        );
        // SAFETY: the assertion above checks that `at` is inside the mapping.
        unsafe { self.start.as_ptr().add(at) }
    }

    fn store_qword(&self, at: usize, value: u64) {
        let to = self.at(at, 8, 8).cast::<u64>();
        // SAFETY: `at()` checked range and alignment, and the mapping is page-aligned and writable by the invariant.
        unsafe { to.write_volatile(value.to_le()) }
    }

    fn store_dword(&self, at: usize, value: u32) {
        let to = self.at(at, 4, 4).cast::<u32>();
        // SAFETY: as above.
        unsafe { to.write_volatile(value.to_le()) }
    }

    fn write(&self, at: usize, data: &[u8]) {
        let to = self.at(at, data.len(), 1);
        // SAFETY: `at()` checked the range.
        unsafe { access::write(to, data) }
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} bytes at {:?}", self.len, self.start)
    }
}

/// Memory of the host, zeroed. A child process does not inherit it.
#[derive(Debug)]
pub struct HostMemory {
    mapped: Mapped,
}

impl HostMemory {
    /// Maps at least `len` bytes, in whole pages.
    ///
    /// # Errors
    ///
    /// [`Error::Kernel`] with ENOMEM.
    pub fn new(len: usize) -> Result<Self> {
        let failed = |error: rustix::io::Errno| Error::Kernel {
            what: format!("mapping {len} bytes of host memory"),
            error: error.into(),
        };
        let len = len.max(1).checked_next_multiple_of(PAGE);
        let len = len.ok_or_else(|| failed(rustix::io::Errno::NOMEM))?;
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: a new mapping, at an address that the kernel chooses, replaces no other mapping.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags) };
        let start = start.map_err(failed)?;
        let start = NonNull::new(start.cast()).ok_or_else(|| failed(rustix::io::Errno::NOMEM))?;
        // INVARIANT: mapped above.
        let mapped = Mapped { start, len };
        // A fork would share the pages copy-on-write, and NIC and process could then use different pages.
        // SAFETY: the range is the mapping created above; the advice changes nothing for this process.
        let _ = unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxDontFork) };
        Ok(Self { mapped })
    }
}

impl Memory for HostMemory {
    fn len(&self) -> usize {
        self.mapped.len
    }

    fn address(&self) -> u64 {
        self.mapped.start.as_ptr() as u64
    }

    fn load_dword(&self, at: usize) -> u32 {
        let from = self.mapped.at(at, 4, 4).cast::<u32>();
        // SAFETY: `at()` checked range and alignment, and host memory is readable.
        u32::from_le(unsafe { from.read_volatile() })
    }

    fn store_dword(&self, at: usize, value: u32) {
        self.mapped.store_dword(at, value);
    }

    fn store_qword(&self, at: usize, value: u64) {
        self.mapped.store_qword(at, value);
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        let from = self.mapped.at(at, out.len(), 1);
        // SAFETY: `at()` checked the range, and host memory is readable.
        unsafe { access::read(from, out) }
    }

    fn write(&self, at: usize, data: &[u8]) {
        self.mapped.write(at, data);
    }

    fn fence(&self) {
        access::store_fence();
    }
}

/// A doorbell register page (UAR) of a NIC. It is write-only: reads return zeros and do not reach the NIC.
#[cfg(feature = "verbs")]
#[derive(Debug)]
pub struct DoorbellPage {
    mapped: Mapped,
}

#[cfg(feature = "verbs")]
impl DoorbellPage {
    /// Maps the page at `offset` of a NIC's device file.
    fn new(file: BorrowedFd<'_>, offset: u64) -> io::Result<Self> {
        // SAFETY: a new mapping, at an address that the kernel chooses, replaces no other mapping. The kernel maps
        // registers of the NIC there, and after the NIC's removal a page of zeros.
        let start = unsafe { mmap(ptr::null_mut(), PAGE, ProtFlags::WRITE, MapFlags::SHARED, file, offset) }?;
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mmap() mapped address zero"))?;
        // INVARIANT: mapped above.
        Ok(Self {
            mapped: Mapped { start, len: PAGE },
        })
    }
}

#[cfg(feature = "verbs")]
impl Memory for DoorbellPage {
    fn len(&self) -> usize {
        PAGE
    }

    fn address(&self) -> u64 {
        self.mapped.start.as_ptr() as u64
    }

    fn load_dword(&self, at: usize) -> u32 {
        let _ = self.mapped.at(at, 4, 4);
        0
    }

    fn store_dword(&self, at: usize, value: u32) {
        self.mapped.store_dword(at, value);
    }

    fn store_qword(&self, at: usize, value: u64) {
        self.mapped.store_qword(at, value);
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        let _ = self.mapped.at(at, out.len(), 1);
        out.fill(0);
    }

    fn write(&self, at: usize, data: &[u8]) {
        self.mapped.write(at, data);
    }

    fn fence(&self) {
        access::store_fence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_values_are_little_endian() {
        let memory = HostMemory::new(1).unwrap();
        assert_eq!((memory.len(), memory.address() % 4096), (PAGE, 0));
        memory.store_qword(8, 0x0807_0605_0403_0201);
        memory.store_dword(16, 0x0c0b_0a09);
        let mut bytes = [0; 12];
        memory.read(8, &mut bytes);
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!(memory.load_dword(12), 0x0807_0605);
        memory.write(PAGE - 3, &[7; 3]);
        memory.fence();
        assert_eq!(memory.load_dword(PAGE - 4), 0x0707_0700);
    }

    #[test]
    #[should_panic(expected = "not inside")]
    fn an_access_outside_of_the_memory_panics() {
        HostMemory::new(1).unwrap().store_qword(PAGE, 0);
    }

    #[test]
    #[should_panic(expected = "not aligned")]
    fn an_unaligned_access_panics() {
        HostMemory::new(1).unwrap().load_dword(2);
    }

    #[test]
    fn too_much_memory_is_an_error() {
        assert!(HostMemory::new(usize::MAX).is_err());
        assert!(HostMemory::new(usize::MAX / 2).is_err());
    }
}
