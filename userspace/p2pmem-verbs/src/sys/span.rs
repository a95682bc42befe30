// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory that devices access concurrently.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use p2pmem::Mapping;
use p2pmem_access_sys as access;
use rustix::mm::{madvise, mmap, mmap_anonymous, munmap, Advice, MapFlags, ProtFlags};

/// Bytes that [`Span::try_copy_to`] copies at once.
const COPY_BLOCK: usize = 16384;

/// Owner of the memory of a [`Span`].
#[derive(Debug)]
enum Owner {
    /// A mapping of this module, anonymous or of a file.
    Own,
    /// A mapping of a buffer.
    Buffer(Mapping),
}

/// Memory that devices may read and write at any time: host memory or a mapped buffer.
///
/// No reference to the memory exists. Every access is volatile, happens once, and is as wide as the alignment allows,
/// up to 8 bytes. Clones refer to the same memory.
///
/// # Invariants
///
/// `start` is page-aligned, and `len` bytes from `start` are mapped readable and writable while `owner` lives.
#[derive(Clone)]
pub struct Span {
    inner: Arc<Inner>,
}

struct Inner {
    start: NonNull<u8>,
    len: usize,
    owner: Owner,
}

// SAFETY: by the type's invariant the memory is mapped for the whole process. All accesses are volatile and no
// reference exists, so threads may race on the memory as devices do: a racing read returns an arbitrary value.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Span({:?}, {:#x} bytes)", self.inner.start, self.inner.len)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if matches!(self.owner, Owner::Own) {
            // SAFETY: by the invariant this is a mapping of this module, and the last user of the mapping is dropped
            // here.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

impl Span {
    /// Maps host memory, zeroed and populated.
    ///
    /// # Errors
    ///
    /// ENOMEM.
    pub fn host(len: usize) -> io::Result<Self> {
        Self::map(len, MapFlags::PRIVATE | MapFlags::POPULATE, None)
    }

    /// Maps the first bytes of a file, shared.
    ///
    /// # Errors
    ///
    /// The errors of `mmap()`.
    pub fn file(file: &File, len: usize) -> io::Result<Self> {
        Self::map(len, MapFlags::SHARED, Some(file))
    }

    fn map(len: usize, flags: MapFlags, file: Option<&File>) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses, replaces no other mapping.
        let start = unsafe {
            match file {
                Some(file) => mmap(ptr::null_mut(), len, access, flags, file, 0),
                None => mmap_anonymous(ptr::null_mut(), len, access, flags),
            }
        }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| io::Error::other("mmap() mapped address zero"))?;
        // Without this, a fork would share the pages copy-on-write, and the NIC and the process could use different
        // pages.
        // SAFETY: the range is the mapping created above; the advice changes nothing for this process.
        let _ = unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxDontFork) };
        // INVARIANT: mapped above, and unmapped by `drop`.
        let owner = Owner::Own;
        Ok(Self {
            inner: Arc::new(Inner { start, len, owner }),
        })
    }

    /// Wraps a mapped buffer.
    pub fn buffer(mapping: Mapping) -> Self {
        let start = NonNull::new(mapping.as_ptr()).unwrap_or(NonNull::dangling());
        let len = mapping.len();
        // INVARIANT: the mapping keeps its length until it is dropped, and this type owns the mapping.
        let owner = Owner::Buffer(mapping);
        Self {
            inner: Arc::new(Inner { start, len, owner }),
        }
    }

    /// Returns the mapping of a buffer; `None` for host memory and files.
    pub fn mapping(&self) -> Option<&Mapping> {
        match &self.inner.owner {
            Owner::Buffer(mapping) => Some(mapping),
            Owner::Own => None,
        }
    }

    /// Returns the length in bytes.
    #[allow(clippy::len_without_is_empty)] // no mapping is empty
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// Returns the address, for registration.
    pub fn address(&self) -> u64 {
        self.inner.start.as_ptr() as u64
    }

    fn at(&self, at: usize, len: usize) -> *mut u8 {
        let inside = at.checked_add(len).is_some_and(|end| end <= self.inner.len);
        assert!(inside, "{len} bytes at {at} are not inside {self:?}");
        // SAFETY: the assertion above checks that `at` is inside the mapping.
        unsafe { self.inner.start.as_ptr().add(at) }
    }

    /// Reads bytes, from byte `at`.
    ///
    /// # Panics
    ///
    /// The bytes are not inside the span.
    pub fn read(&self, at: usize, to: &mut [u8]) {
        let from = self.at(at, to.len());
        // SAFETY: `at()` checked that the source is inside the mapping.
        unsafe { access::read(from, to) }
    }

    /// Writes bytes, from byte `at`.
    ///
    /// # Panics
    ///
    /// The bytes are not inside the span.
    pub fn write(&self, at: usize, from: &[u8]) {
        let to = self.at(at, from.len());
        // SAFETY: `at()` checked that the target is inside the mapping.
        unsafe { access::write(to, from) }
    }

    /// Reads bytes as [`Span::read`] does. If the memory is a buffer whose provider was removed, returns an error, and does
    /// not raise SIGBUS.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::try_copy_to_slice`].
    pub fn try_read(&self, at: usize, to: &mut [u8]) -> p2pmem::Result<()> {
        match &self.inner.owner {
            Owner::Own => self.read(at, to),
            Owner::Buffer(mapping) => mapping.try_copy_to_slice(at, to)?,
        }
        Ok(())
    }

    /// Writes bytes as [`Span::write`] does. If the memory is a buffer whose provider was removed, returns an error, and
    /// does not raise SIGBUS.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::try_copy_from_slice`].
    pub fn try_write(&self, at: usize, from: &[u8]) -> p2pmem::Result<()> {
        match &self.inner.owner {
            Owner::Own => self.write(at, from),
            Owner::Buffer(mapping) => mapping.try_copy_from_slice(at, from)?,
        }
        Ok(())
    }

    /// Copies `len` bytes to another span.
    ///
    /// # Panics
    ///
    /// The bytes are not inside one of the two spans.
    pub fn copy_to(&self, at: usize, other: &Self, other_at: usize, len: usize) {
        let (from, to) = (self.at(at, len), other.at(other_at, len));
        // SAFETY: `at()` checked both ranges.
        unsafe { access::copy(from, to, len) }
    }

    /// Copies bytes as [`Span::copy_to`] does. If one of the two memories is a buffer whose provider was removed, returns an
    /// error, and does not raise SIGBUS; a part of the bytes may be copied then.
    ///
    /// # Errors
    ///
    /// Those of [`Span::try_read`] and [`Span::try_write`].
    ///
    /// # Panics
    ///
    /// The bytes are not inside one of the two spans.
    pub fn try_copy_to(&self, at: usize, other: &Self, other_at: usize, len: usize) -> p2pmem::Result<()> {
        if matches!((&self.inner.owner, &other.inner.owner), (Owner::Own, Owner::Own)) {
            self.copy_to(at, other, other_at, len);
            return Ok(());
        }
        self.at(at, len);
        other.at(other_at, len);
        // Stays in the processor's cache.
        let mut block = [0; COPY_BLOCK];
        for start in (0..len).step_by(COPY_BLOCK) {
            let part = &mut block[..COPY_BLOCK.min(len - start)];
            self.try_read(at + start, part)?;
            other.try_write(other_at + start, part)?;
        }
        Ok(())
    }

    /// Sends bytes from byte `at` to a socket: the kernel copies from this memory. Returns the number of bytes sent, which
    /// can be smaller than `len`.
    ///
    /// # Errors
    ///
    /// The errors of `send()`; EPIPE causes no signal. EFAULT if the memory's provider was removed.
    ///
    /// # Panics
    ///
    /// The bytes are not inside the span.
    pub fn send(&self, at: usize, len: usize, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let from = self.at(at, len);
        // SAFETY: `at()` checked that the source is inside the mapping. The kernel reports inaccessible pages as EFAULT.
        let sent = unsafe { libc::send(socket.as_raw_fd(), from.cast(), len, libc::MSG_NOSIGNAL) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Receives up to `len` bytes from a socket to byte `at`: the kernel copies to this memory. Returns the number of bytes
    /// received: 0 if the peer ended the connection.
    ///
    /// # Errors
    ///
    /// The errors of `recv()`. EFAULT if the memory's provider was removed.
    ///
    /// # Panics
    ///
    /// The bytes are not inside the span.
    pub fn receive(&self, at: usize, len: usize, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let to = self.at(at, len);
        // SAFETY: `at()` checked that the target is inside the mapping, to which no reference exists. The kernel reports
        // inaccessible pages as EFAULT.
        let received = unsafe { libc::recv(socket.as_raw_fd(), to.cast(), len, 0) };
        usize::try_from(received).map_err(|_| io::Error::last_os_error())
    }

    /// Orders preceding writes before subsequent accesses, as devices see them.
    pub fn flush(&self) {
        access::store_fence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_bytes_are_read() {
        let span = Span::host(8192).unwrap();
        let bytes: Vec<u8> = (0..=255).collect();
        for at in [0, 8, 3, 4096 - 1, 8192 - 256] {
            span.write(at, &bytes);
            let mut back = vec![0; 256];
            span.read(at, &mut back);
            assert_eq!(back, bytes, "{at}");
        }
        let other = Span::host(4096).unwrap();
        span.copy_to(8192 - 256, &other, 5, 256);
        let mut back = vec![0; 256];
        other.read(5, &mut back);
        assert_eq!(back, bytes);
        other.flush();
        let same = other.clone();
        drop(other);
        assert_eq!(same.len(), 4096);
    }

    #[test]
    fn a_mapped_buffer_is_a_span() {
        let device = p2pmem::fake::Fake::example().device();
        let mapping = device.alloc(&p2pmem::Request::new(4096)).unwrap().map().unwrap();
        let span = Span::buffer(mapping);
        span.write(4088, &7u64.to_le_bytes());
        let mut word = [0; 8];
        span.read(4088, &mut word);
        assert_eq!(u64::from_le_bytes(word), 7);
        assert_eq!(span.len(), 4096);
    }

    #[test]
    fn guarded_copies_are_those_of_the_other_functions() {
        let device = p2pmem::fake::Fake::example().device();
        let mapping = device.alloc(&p2pmem::Request::new(65536)).unwrap().map().unwrap();
        let (buffer, host) = (Span::buffer(mapping), Span::host(65536).unwrap());
        // More than two blocks, and not a whole number of them.
        let bytes: Vec<u8> = (0..2 * COPY_BLOCK + 13).map(|i| (i % 251) as u8).collect();
        let back_of = |span: &Span, at| {
            let mut back = vec![0; bytes.len()];
            span.try_read(at, &mut back).unwrap();
            back
        };
        host.write(5, &bytes);
        host.try_copy_to(5, &buffer, 16, bytes.len()).unwrap();
        assert!(back_of(&buffer, 16) == bytes);
        buffer.try_copy_to(16, &host, 1000, bytes.len()).unwrap();
        assert!(back_of(&host, 1000) == bytes);
        let other = Span::host(65536).unwrap();
        host.try_copy_to(1000, &other, 0, bytes.len()).unwrap();
        assert!(back_of(&other, 0) == bytes);
    }

    /// Replaces the pages of a buffer by those of an empty file: as of a provider that was removed, accesses raise SIGBUS.
    fn revoke(span: &Span) {
        // SAFETY: the name is a string that ends with NUL.
        let file = unsafe { libc::memfd_create(c"revoked".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(file >= 0);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: replaces exactly the pages of the span's mapping, to which no reference exists.
        let at = unsafe { libc::mmap(span.inner.start.as_ptr().cast(), span.len(), access, flags, file, 0) };
        assert_eq!(at as u64, span.address());
    }

    #[test]
    fn copies_of_a_revoked_buffer_are_errors() {
        let device = p2pmem::fake::Fake::example().device();
        let mapping = device.alloc(&p2pmem::Request::new(65536)).unwrap().map().unwrap();
        let (buffer, host) = (Span::buffer(mapping), Span::host(65536).unwrap());
        host.try_copy_to(0, &buffer, 0, 65536).unwrap();
        revoke(&buffer);
        let results = [
            host.try_copy_to(0, &buffer, 0, 65536),
            buffer.try_copy_to(0, &host, 0, 65536),
            buffer.try_read(8, &mut [0; 8]),
            buffer.try_write(8, &[0; 8]),
        ];
        for result in results {
            assert_eq!(result.unwrap_err().kind(), p2pmem::ErrorKind::Removed);
        }
    }

    #[test]
    #[should_panic(expected = "not inside")]
    fn guarded_copies_outside_the_span_panic() {
        let device = p2pmem::fake::Fake::example().device();
        let mapping = device.alloc(&p2pmem::Request::new(4096)).unwrap().map().unwrap();
        let _ = Span::host(8192)
            .unwrap()
            .try_copy_to(0, &Span::buffer(mapping), 0, 8192);
    }

    #[test]
    fn sockets_move_bytes_between_spans() {
        use std::os::fd::AsFd;
        use std::os::unix::net::UnixStream;
        let (one, other) = UnixStream::pair().unwrap();
        let (from, to) = (Span::host(4096).unwrap(), Span::host(4096).unwrap());
        from.write(8, b"payload");
        assert_eq!(from.send(8, 7, one.as_fd()).unwrap(), 7);
        assert_eq!(to.receive(16, 4080, other.as_fd()).unwrap(), 7);
        let mut back = [0; 7];
        to.read(16, &mut back);
        assert_eq!(&back, b"payload");
        drop(other);
        let error = from.send(0, 8, one.as_fd()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPIPE));
        assert_eq!(to.receive(0, 8, one.as_fd()).unwrap(), 0);
    }

    #[test]
    #[should_panic(expected = "not inside")]
    fn a_socket_cannot_read_outside_the_span() {
        use std::os::fd::AsFd;
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let _ = Span::host(4096).unwrap().send(4090, 8, one.as_fd());
    }

    #[test]
    #[should_panic(expected = "not inside")]
    fn reads_outside_the_span_panic() {
        Span::host(4096).unwrap().read(4090, &mut [0; 8]);
    }

    #[test]
    #[should_panic(expected = "not inside")]
    fn an_overflowing_range_panics() {
        Span::host(4096).unwrap().write(usize::MAX, &[0; 8]);
    }

    #[test]
    fn too_much_memory_is_an_error() {
        assert!(Span::host(usize::MAX / 2).is_err());
    }
}
