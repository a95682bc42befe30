// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory that devices and the kernel access: host memory, and mapped buffers of devices.

use std::fmt;
use std::io;
use std::ptr::NonNull;

use p2pmem::Mapping;
use p2pmem_access_sys as access;
use p2pmem_verbs::Span;

/// Memory that devices and the kernel may read and write at any time: host memory, or a mapped buffer of a device.
///
/// No reference to the memory exists. All access is by copies with volatile loads and stores.
///
/// # Invariants
///
/// `start` is page-aligned, and `len` bytes from `start` are mapped readable and writable by `owner` until the value is
/// dropped. If a device's memory is revoked, the addresses stay reserved: the kernel's access to them fails with EFAULT.
pub struct Memory {
    start: NonNull<u8>,
    len: usize,
    owner: Owner,
}

enum Owner {
    /// Host memory.
    Host(Span),
    /// A mapped buffer.
    Device(Mapping),
}

// SAFETY: by the invariant the memory is mapped for the whole process. All accesses are volatile and no reference exists, so
// threads may race on the memory as devices do: a racing read returns an arbitrary value.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self.owner {
            Owner::Host(_) => "host",
            Owner::Device(_) => "device",
        };
        write!(f, "Memory({place}, {:?}, {:#x} bytes)", self.start, self.len)
    }
}

impl Memory {
    /// Maps host memory, zeroed and populated. A forked process does not inherit it.
    ///
    /// # Errors
    ///
    /// ENOMEM, or EINVAL if `len` is 0.
    pub fn host(len: usize) -> io::Result<Self> {
        let span = Span::host(len)?;
        let start = NonNull::new(span.address() as *mut u8);
        let start = start.ok_or_else(|| io::Error::other("host memory at address zero"))?;
        // INVARIANT: the span is mapped as long as it lives, and this value owns a clone of it.
        Ok(Self {
            start,
            len,
            owner: Owner::Host(span),
        })
    }

    /// Wraps a mapped buffer.
    pub fn device(mapping: Mapping) -> Self {
        // INVARIANT: the mapping keeps its address and length until it is dropped, and this value owns the mapping.
        Self {
            start: NonNull::new(mapping.as_ptr()).unwrap_or(NonNull::dangling()),
            len: mapping.len(),
            owner: Owner::Device(mapping),
        }
    }

    /// Returns host memory, to register it with a NIC. `None` for the memory of a device.
    pub fn host_span(&self) -> Option<&Span> {
        match &self.owner {
            Owner::Host(span) => Some(span),
            Owner::Device(_) => None,
        }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of the first byte.
    pub fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Returns the address of `len` bytes at `at`, or an error if they are not inside the memory.
    pub(super) fn at(&self, at: usize, len: usize) -> io::Result<*mut u8> {
        match at.checked_add(len) {
            // SAFETY: the sum is inside the mapping, by the invariant and this check.
            Some(end) if end <= self.len => Ok(unsafe { self.start.as_ptr().add(at) }),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{len} bytes at {at} are outside of {} bytes of memory", self.len),
            )),
        }
    }

    /// Copies memory from byte `at` on to `to`.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if the bytes are not inside the memory; ENODEV if the device's memory was revoked.
    pub fn read(&self, at: usize, to: &mut [u8]) -> io::Result<()> {
        let from = self.at(at, to.len())?;
        match &self.owner {
            Owner::Device(mapping) => mapping.try_copy_to_slice(at, to).map_err(into_io),
            Owner::Host(_) => {
                // SAFETY: `at()` checked that the source is inside the mapping.
                unsafe { access::read(from, to) };
                Ok(())
            }
        }
    }

    /// Copies `from` to the memory from byte `at` on, and makes it visible to devices.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read).
    pub fn write(&self, at: usize, from: &[u8]) -> io::Result<()> {
        let to = self.at(at, from.len())?;
        match &self.owner {
            Owner::Device(mapping) => mapping.try_copy_from_slice(at, from).map_err(into_io)?,
            // SAFETY: `at()` checked that the target is inside the mapping.
            Owner::Host(_) => unsafe { access::write(to, from) },
        }
        access::store_fence();
        Ok(())
    }
}

fn into_io(error: p2pmem::Error) -> io::Error {
    match error.errno() {
        Some(errno) => io::Error::from_raw_os_error(errno),
        None => io::Error::other(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_bytes_are_read() {
        let device = p2pmem::fake::Fake::example().device();
        let mapping = device.alloc(&p2pmem::Request::new(8192)).unwrap().map().unwrap();
        for memory in [Memory::host(8192).unwrap(), Memory::device(mapping)] {
            assert_eq!((memory.len(), memory.address() % 4096), (8192, 0));
            let bytes: Vec<u8> = (0..=255).collect();
            for at in [0, 3, 4000, 8192 - 256] {
                memory.write(at, &bytes).unwrap();
                let mut back = [0; 256];
                memory.read(at, &mut back).unwrap();
                assert_eq!(back[..], bytes, "{memory:?} {at}");
            }
        }
    }

    #[test]
    fn access_outside_of_the_memory_is_an_error() {
        let memory = Memory::host(4096).unwrap();
        for at in [4089, 4097, usize::MAX] {
            let error = memory.read(at, &mut [0; 8]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{at}");
            assert!(memory.write(at, &[0; 8]).is_err(), "{at}");
        }
        memory.write(4088, &[1; 8]).unwrap();
    }

    #[test]
    fn memory_that_cannot_be_mapped_is_an_error() {
        assert!(Memory::host(usize::MAX / 2).is_err());
        assert!(Memory::host(0).is_err());
    }
}
