// SPDX-License-Identifier: MIT OR Apache-2.0

//! System calls and accesses through raw pointers: the only module with `unsafe`.
//!
//! The trait [`Kernel`] has all calls to the kernel module and is safe to implement and to call. [`CharDevice`] calls
//! the real module, `crate::fake` is a fake one. [`Region`] is mapped memory; it returns no references, only
//! bounds-checked volatile copies.
#![allow(unsafe_code)]

mod guard;
#[cfg(feature = "verbs")]
pub(crate) mod post;
pub(crate) mod user;
pub(crate) mod verbs;
pub(crate) mod vfio;

use std::any::Any;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use p2pmem_access_sys as access;
use p2pmem_sys as abi;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::io::{retry_on_intr, Errno};
use rustix::ioctl::{ioctl, Updater};
use rustix::mm::{mmap, munmap, MapFlags, ProtFlags};

use crate::addr::PciAddr;
use crate::backend::Backend;

/// Calls to a backend: one method for each ioctl of the kernel module, with slices in place of the ABI's pointers.
///
/// Errors are the kernel's errnos (`io::Error::raw_os_error()`). Backends without the module also return errors of this
/// crate (`io::Error::downcast()`).
pub(crate) trait Kernel: Send + Sync {
    /// Returns the backend that serves the calls.
    fn backend(&self) -> Backend {
        Backend::Module
    }
    fn info(&self) -> io::Result<abi::p2pmem_info>;
    /// Fills `out` and returns the number of providers, which can be larger than `out`.
    fn list(&self, out: &mut [abi::p2pmem_provider]) -> io::Result<usize>;
    /// Fills `out` and returns the number of paths, which can be larger than `out`.
    fn paths(&self, clients: &[abi::p2pmem_pci_addr], out: &mut [abi::p2pmem_path], rescan: bool) -> io::Result<usize>;
    /// Allocates a buffer. The slice has the clients; the client fields of `request` are ignored.
    fn alloc(&self, request: &abi::p2pmem_request, clients: &[abi::p2pmem_pci_addr]) -> io::Result<abi::p2pmem_alloc>;
    fn free(&self, handle: u32) -> io::Result<()>;
    fn buffer(&self, handle: u32) -> io::Result<abi::p2pmem_buffer>;
    /// Explains a request as a dry run, or, for `None`, the last decision. The counts in the answer can be larger than
    /// the slices.
    fn explain(
        &self,
        request: Option<(&abi::p2pmem_request, &[abi::p2pmem_pci_addr])>,
        verdicts: &mut [abi::p2pmem_verdict],
        text: &mut [u8],
    ) -> io::Result<abi::p2pmem_explain>;
    fn stats(&self, provider: u32) -> io::Result<abi::p2pmem_stats>;
    fn set_rules(&self, rules: &[abi::p2pmem_rule]) -> io::Result<()>;
    /// Maps the whole buffer `handle`: `len` bytes, from `offset` in the device's file if the backend has a file.
    fn map(&self, handle: u32, offset: u64, len: usize) -> io::Result<Arc<Region>>;
    /// Creates a dma-buf of `ranges` of the buffer `handle`, or of addresses if `flags` has `P2PMEM_EXPORT_MAPPED`.
    fn export(&self, handle: u32, ranges: &[abi::p2pmem_range], flags: u32) -> io::Result<Exported>;
    /// Creates a handle from a dma-buf of a whole buffer.
    fn import(&self, fd: BorrowedFd<'_>) -> io::Result<abi::p2pmem_import>;
    /// Allocates a stripe: fills `parts` and returns their number.
    fn stripe(
        &self,
        request: &abi::p2pmem_request,
        clients: &[abi::p2pmem_pci_addr],
        parts: &mut [abi::p2pmem_part],
    ) -> io::Result<usize>;
    /// Attaches the function of a provider to a dma-buf. Fills `ranges`; the number of ranges in the answer can be
    /// larger.
    fn attach(
        &self,
        _fd: BorrowedFd<'_>,
        _provider: u32,
        _flags: u32,
        _ranges: &mut [abi::p2pmem_dma_range],
    ) -> io::Result<abi::p2pmem_attach> {
        Err(Errno::OPNOTSUPP.into())
    }
    /// Returns the state of an attachment. Fills `ranges`; the number of ranges in the answer can be larger.
    fn attachment(&self, _handle: u32, _ranges: &mut [abi::p2pmem_dma_range]) -> io::Result<abi::p2pmem_attachment> {
        Err(Errno::OPNOTSUPP.into())
    }
    /// Closes the handle of an attachment.
    fn detach(&self, _handle: u32) -> io::Result<()> {
        Err(Errno::OPNOTSUPP.into())
    }
    /// Returns the module's list of buffers and their owners, which only root can read.
    fn holders(&self) -> io::Result<String>;
    /// Reads events without waiting. Fails with `EAGAIN` if there is none.
    fn read_events(&self, out: &mut [abi::p2pmem_event]) -> io::Result<usize>;
    /// Waits until there are events to read. Returns false after `timeout`; `None` waits without a limit.
    fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        wait_readable(self.event_fd(), timeout)
    }
    fn fd(&self) -> BorrowedFd<'_>;
    /// Returns the descriptor that is readable while there are events.
    fn event_fd(&self) -> BorrowedFd<'_>;
}

/// An object that keeps memory allocated, for a backend whose memory the kernel does not keep.
pub(crate) type Hold = Arc<dyn Any + Send + Sync>;

/// A new dma-buf.
pub(crate) struct Exported {
    pub(crate) fd: OwnedFd,
    /// Keeps the memory allocated.
    pub(crate) hold: Option<Hold>,
    /// The PCI function that has the memory, if the backend knows it.
    pub(crate) function: Option<PciAddr>,
}

impl From<OwnedFd> for Exported {
    fn from(fd: OwnedFd) -> Self {
        Self {
            fd,
            hold: None,
            function: None,
        }
    }
}

/// Waits until a descriptor is readable. Returns false after `timeout`; `None` waits without a limit. Fails with ENODEV
/// if the descriptor has an error and never becomes readable.
pub(crate) fn wait_readable(fd: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<bool> {
    let deadline = timeout.map(|t| Instant::now() + t);
    loop {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        // A timeout that exceeds the kernel's type is no limit.
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match poll(&mut fds, left.as_ref()) {
            Ok(0) => return Ok(false),
            Ok(_) if fds[0].revents().contains(PollFlags::IN) => return Ok(true),
            Ok(_) => return Err(Errno::NODEV.into()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// An open `/dev/p2pmem`.
pub(crate) struct CharDevice(File);

/// Converts the length of a slice. The conversion never saturates: the crate's slices are far shorter than `u32::MAX`.
fn count(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// Returns the size of one element in bytes, for a field `*_size` of the ABI.
fn element<T>(_: &[T]) -> u32 {
    count(size_of::<T>())
}

fn address<T>(slice: &[T]) -> u64 {
    if slice.is_empty() {
        0
    } else {
        slice.as_ptr() as u64
    }
}

fn address_mut<T>(slice: &mut [T]) -> u64 {
    if slice.is_empty() {
        0
    } else {
        slice.as_mut_ptr() as u64
    }
}

impl CharDevice {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        // O_NONBLOCK: if two threads poll for events, the slower one must not sleep in read().
        OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map(Self)
    }

    /// Issues an ioctl. The compiler checks that its number was made from the type of `argument`.
    ///
    /// # Safety
    ///
    /// Addresses in `argument` must be zero, or valid for the ioctl's reads and writes.
    unsafe fn ioctl<const NUMBER: u32, T>(&self, argument: &mut T) -> io::Result<()> {
        const {
            assert!(
                abi::ioc_size(NUMBER) as usize == size_of::<T>(),
                "the ioctl's argument is another structure"
            )
        };
        retry_on_intr(|| {
            // SAFETY: the kernel reads and writes size_of::<T>() bytes at `argument`, because the assertion above ties
            // the number to the type. The caller guarantees the addresses in it. All structures are plain integers, so
            // any bytes that the kernel writes are valid.
            unsafe { ioctl(&self.0, Updater::<NUMBER, T>::new(argument)) }
        })?;
        Ok(())
    }
}

/// Divides the bytes of a `read()` into events by the size in each event. Ignores the unknown rest of a longer event,
/// and sets the missing fields of a shorter one to zero. Fails with `InvalidData` if the bytes end inside an event.
fn split_events(mut bytes: &[u8], out: &mut [abi::p2pmem_event]) -> io::Result<usize> {
    const KNOWN: usize = size_of::<abi::p2pmem_event>();
    let mut filled = 0;
    for event in out {
        let Some(head) = bytes.first_chunk() else { break };
        let size = u32::from_ne_bytes(*head) as usize;
        let whole = bytes.get(..size).filter(|whole| whole.len() >= head.len());
        let Some(whole) = whole else { break };
        let mut raw = [0u8; KNOWN];
        let len = size.min(KNOWN);
        raw[..len].copy_from_slice(&whole[..len]);
        // SAFETY: the structure consists of plain integers without padding, of which any bytes are valid values.
        *event = unsafe { std::mem::transmute::<[u8; KNOWN], abi::p2pmem_event>(raw) };
        bytes = &bytes[size..];
        filled += 1;
    }
    if bytes.is_empty() {
        Ok(filled)
    } else {
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the module returned part of an event",
        ))
    }
}

fn with_clients(request: &abi::p2pmem_request, clients: &[abi::p2pmem_pci_addr]) -> abi::p2pmem_request {
    abi::p2pmem_request {
        clients: address(clients),
        nr_clients: count(clients.len()),
        client_size: element(clients),
        ..*request
    }
}

impl Kernel for CharDevice {
    fn info(&self) -> io::Result<abi::p2pmem_info> {
        let mut info = abi::p2pmem_info::default();
        // SAFETY: the structure holds no addresses.
        unsafe { self.ioctl::<{ abi::P2PMEM_IOC_INFO }, _>(&mut info) }?;
        Ok(info)
    }

    fn list(&self, out: &mut [abi::p2pmem_provider]) -> io::Result<usize> {
        let mut list = abi::p2pmem_list {
            providers: address_mut(out),
            count: count(out.len()),
            provider_size: element(out),
            ..Default::default()
        };
        // SAFETY: the kernel writes at most `count` elements at `providers`, a slice of this length.
        unsafe { self.ioctl::<{ abi::P2PMEM_IOC_LIST }, _>(&mut list) }?;
        Ok(list.count as usize)
    }

    fn paths(&self, clients: &[abi::p2pmem_pci_addr], out: &mut [abi::p2pmem_path], rescan: bool) -> io::Result<usize> {
        let mut paths = abi::p2pmem_paths {
            clients: address(clients),
            paths: address_mut(out),
            nr_clients: count(clients.len()),
            nr_paths: count(out.len()),
            flags: if rescan { abi::P2PMEM_PATHS_RESCAN } else { 0 },
            client_size: element(clients),
            path_size: element(out),
            ..Default::default()
        };
        // SAFETY: the kernel reads `nr_clients` elements at `clients` and writes at most `nr_paths` at `paths`, slices
        // of these lengths.
        unsafe { self.ioctl::<{ abi::P2PMEM_IOC_PATHS }, _>(&mut paths) }?;
        Ok(paths.nr_paths as usize)
    }

    fn alloc(&self, request: &abi::p2pmem_request, clients: &[abi::p2pmem_pci_addr]) -> io::Result<abi::p2pmem_alloc> {
        let mut alloc = abi::p2pmem_alloc {
            req: with_clients(request, clients),
            ..Default::default()
        };
        // SAFETY: the only address is that of the clients, a slice of `nr_clients` elements.
        unsafe { self.ioctl::<{ abi::P2PMEM_IOC_ALLOC }, _>(&mut alloc) }?;
        Ok(alloc)
    }

    fn free(&self, handle: u32) -> io::Result<()> {
        let mut free = abi::p2pmem_free { handle, flags: 0 };
        // SAFETY: the structure holds no addresses. Mappings of the buffer stay valid, because the kernel keeps the
        // memory until the last one is gone.
        unsafe { self.ioctl::<{ abi::P2PMEM_IOC_FREE }, _>(&mut free) }
    }

    fn buffer(&self, handle: u32) -> io::Result<abi::p2pmem_buffer> {
        let mut buffer = abi::p2pmem_buffer {
            handle,
            ..Default::default()
        };
        // SAFETY: the structure holds no addresses of this process.
        unsafe { self.ioctl::<{ abi::P2PMEM_IOC_BUFFER }, _>(&mut buffer) }?;
        Ok(buffer)
    }

    fn explain(
        &self,
        request: Option<(&abi::p2pmem_request, &[abi::p2pmem_pci_addr])>,
        verdicts: &mut [abi::p2pmem_verdict],
        text: &mut [u8],
    ) -> io::Result<abi::p2pmem_explain> {
        let mut explain = abi::p2pmem_explain {
            req: request
                .map(|(request, clients)| with_clients(request, clients))
                .unwrap_or_default(),
            verdicts: address_mut(verdicts),
            text: address_mut(text),
            nr_verdicts: count(verdicts.len()),
            text_len: count(text.len()),
            verdict_size: element(verdicts),
            flags: if request.is_none() { abi::P2PMEM_EXPLAIN_LAST } else { 0 },
            ..Default::default()
        };
        // SAFETY: the kernel reads the clients and writes at most `nr_verdicts` elements and `text_len` bytes, slices
        // of these lengths.
        unsafe { self.ioctl::<{ abi::P2PMEM_IOC_EXPLAIN }, _>(&mut explain) }?;
        Ok(explain)
    }

    fn stats(&self, provider: u32) -> io::Result<abi::p2pmem_stats> {
        let mut stats = abi::p2pmem_stats {
            provider,
            ..Default::default()
        };
        // SAFETY: the structure holds no addresses.
        unsafe { self.ioctl::<{ abi::P2PMEM_IOC_STATS }, _>(&mut stats) }?;
        Ok(stats)
    }

    fn set_rules(&self, rules: &[abi::p2pmem_rule]) -> io::Result<()> {
        let mut argument = abi::p2pmem_rules {
            rules: address(rules),
            count: count(rules.len()),
            rule_size: element(rules),
            ..Default::default()
        };
        // SAFETY: the kernel reads the rules, a slice of `count` elements.
        unsafe { self.ioctl::<{ abi::P2PMEM_IOC_RULES }, _>(&mut argument) }
    }

    fn map(&self, _handle: u32, offset: u64, len: usize) -> io::Result<Arc<Region>> {
        Region::map(&self.0, offset, len).map(Arc::new)
    }

    fn export(&self, handle: u32, ranges: &[abi::p2pmem_range], flags: u32) -> io::Result<Exported> {
        let mut export = abi::p2pmem_export {
            ranges: address(ranges),
            nr_ranges: count(ranges.len()),
            handle,
            flags,
            fd: -1,
            range_size: element(ranges),
            ..Default::default()
        };
        // SAFETY: the kernel reads the ranges, a slice of `nr_ranges` elements. The kernel checks the addresses in the
        // ranges and accesses no memory there.
        unsafe { self.ioctl::<{ abi::P2PMEM_IOC_EXPORT_DMABUF }, _>(&mut export) }?;
        // SAFETY: the ioctl succeeded, so the descriptor is new and has no other owner.
        Ok(unsafe { OwnedFd::from_raw_fd(export.fd) }.into())
    }

    fn import(&self, fd: BorrowedFd<'_>) -> io::Result<abi::p2pmem_import> {
        let mut import = abi::p2pmem_import {
            fd: fd.as_raw_fd(),
            ..Default::default()
        };
        // SAFETY: the structure holds no addresses.
        unsafe { self.ioctl::<{ abi::P2PMEM_IOC_IMPORT }, _>(&mut import) }?;
        Ok(import)
    }

    fn stripe(
        &self,
        request: &abi::p2pmem_request,
        clients: &[abi::p2pmem_pci_addr],
        parts: &mut [abi::p2pmem_part],
    ) -> io::Result<usize> {
        let mut stripe = abi::p2pmem_stripe {
            req: with_clients(request, clients),
            parts: address_mut(parts),
            nr_parts: count(parts.len()),
            part_size: element(parts),
            ..Default::default()
        };
        // SAFETY: the kernel reads the clients and writes at most `nr_parts` elements at `parts`, slices of these
        // lengths.
        unsafe { self.ioctl::<{ abi::P2PMEM_IOC_STRIPE }, _>(&mut stripe) }?;
        Ok(stripe.nr_parts as usize)
    }

    fn attach(
        &self,
        fd: BorrowedFd<'_>,
        provider: u32,
        flags: u32,
        ranges: &mut [abi::p2pmem_dma_range],
    ) -> io::Result<abi::p2pmem_attach> {
        let mut attach = abi::p2pmem_attach {
            fd: fd.as_raw_fd(),
            provider,
            flags,
            ranges: address_mut(ranges),
            nr_ranges: count(ranges.len()),
            range_size: element(ranges),
            ..Default::default()
        };
        // SAFETY: the kernel writes at most `nr_ranges` elements at `ranges`, a slice of this length.
        unsafe { self.ioctl::<{ abi::P2PMEM_IOC_ATTACH_DMABUF }, _>(&mut attach) }?;
        Ok(attach)
    }

    fn attachment(&self, handle: u32, ranges: &mut [abi::p2pmem_dma_range]) -> io::Result<abi::p2pmem_attachment> {
        let mut query = abi::p2pmem_attachment {
            handle,
            ranges: address_mut(ranges),
            nr_ranges: count(ranges.len()),
            range_size: element(ranges),
            ..Default::default()
        };
        // SAFETY: the kernel writes at most `nr_ranges` elements at `ranges`, a slice of this length.
        unsafe { self.ioctl::<{ abi::P2PMEM_IOC_ATTACHMENT }, _>(&mut query) }?;
        Ok(query)
    }

    fn detach(&self, handle: u32) -> io::Result<()> {
        let mut detach = abi::p2pmem_detach { handle, flags: 0 };
        // SAFETY: the structure holds no addresses.
        unsafe { self.ioctl::<{ abi::P2PMEM_IOC_DETACH_DMABUF }, _>(&mut detach) }
    }

    fn holders(&self) -> io::Result<String> {
        std::fs::read_to_string("/sys/kernel/debug/p2pmem/buffers")
    }

    fn read_events(&self, out: &mut [abi::p2pmem_event]) -> io::Result<usize> {
        // A newer module's events can be larger. The buffer has space for one event of any version, and `read()` gets
        // at most the bytes of `out`, so that `out` has space for all events of the known size.
        const CAPACITY: usize = 2048;
        const _: () = assert!(CAPACITY >= abi::P2PMEM_MAX_EVENT as usize);
        let mut bytes = [0u8; CAPACITY];
        let known = size_of::<abi::p2pmem_event>();
        let least = abi::P2PMEM_MAX_EVENT as usize / known;
        if out.len() < least {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let capacity = CAPACITY.min(size_of_val(out));
        let n = rustix::io::read(&self.0, &mut bytes[..capacity])?;
        split_events(&bytes[..n], out)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Mapped memory that others change at any time: devices by DMA, other processes, other mappings.
///
/// # Invariants
///
/// `start` is the start of a shared mapping of `len` bytes that this value owns and unmaps when dropped. No reference
/// to the memory exists: only volatile accesses inside the bounds, and system calls, access it.
pub(crate) struct Region {
    start: NonNull<u8>,
    len: usize,
    /// Dropped after the memory is unmapped.
    _hold: Option<Hold>,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for Region {}
// SAFETY: all access is by volatile reads and writes of plain integers, as for memory that is shared with devices that
// write at any time. For a reader, a writing thread does not differ from such a device. Values can be torn, which the
// documentation of `Mapping` says.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len` bytes of `file` from `offset` on, shared, for reading and writing.
    pub(crate) fn map(file: &File, offset: u64, len: usize) -> io::Result<Self> {
        if i64::try_from(offset).is_err() {
            return Err(Errno::OVERFLOW.into());
        }
        // SAFETY: a new mapping at an address that the kernel chooses changes no memory of the program.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                offset,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mmap() mapped address zero"))?;
        // INVARIANT: the mapping is new and has no other owner.
        Ok(Self {
            start,
            len,
            _hold: None,
        })
    }

    /// Keeps an object until the region is unmapped.
    pub(crate) fn holding(mut self, hold: Hold) -> Self {
        self._hold = Some(hold);
        self
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the address of `offset`. Panics unless `len` bytes from `offset` on are in the region, which callers
    /// have checked.
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "access past the end of a mapping"
        );
        // SAFETY: `offset` is at most `len`, so the result is in the mapping or at its end.
        unsafe { self.start.as_ptr().add(offset) }
    }

    /// Copies from the memory. Each aligned group of 8, 4 or 2 bytes is one access of this width.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) {
        let from = self.at(offset, out.len());
        // SAFETY: at() checked that the bytes are in the mapping (type invariant).
        unsafe { access::read(from, out) }
    }

    /// Copies to the memory, with accesses as in [`Region::read`].
    pub(crate) fn write(&self, offset: usize, data: &[u8]) {
        let to = self.at(offset, data.len());
        // SAFETY: as in read().
        unsafe { access::write(to, data) }
    }

    /// Sets `len` bytes to `byte`, with accesses as in [`Region::read`].
    pub(crate) fn fill(&self, offset: usize, len: usize, byte: u8) {
        let to = self.at(offset, len);
        // SAFETY: as in read().
        unsafe { access::fill(to, len, byte) }
    }

    /// Copies as [`Region::read`] does, and returns EFAULT if an access raises SIGBUS.
    pub(crate) fn try_read(&self, offset: usize, out: &mut [u8]) -> io::Result<()> {
        let from = self.at(offset, out.len());
        // SAFETY: as in read().
        unsafe { guard::read(from, out) }
    }

    /// Copies as [`Region::write`] does, and returns EFAULT if an access raises SIGBUS.
    pub(crate) fn try_write(&self, offset: usize, data: &[u8]) -> io::Result<()> {
        let to = self.at(offset, data.len());
        // SAFETY: as in read().
        unsafe { guard::write(to, data) }
    }

    /// Fills as [`Region::fill`] does, and returns EFAULT if an access raises SIGBUS.
    pub(crate) fn try_fill(&self, offset: usize, len: usize, byte: u8) -> io::Result<()> {
        let to = self.at(offset, len);
        // SAFETY: as in read().
        unsafe { guard::fill(to, len, byte) }
    }

    /// Calls `pread()` once for at most `len` bytes of `file`, into the memory at `offset`. Returns the number of
    /// bytes.
    pub(crate) fn pread(&self, offset: usize, len: usize, file: &File, file_offset: u64) -> io::Result<usize> {
        let to = self.at(offset, len);
        let at = libc::off64_t::try_from(file_offset).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        // SAFETY: the kernel, or a device on its behalf, writes at most `len` bytes, which at() checked.
        let n = unsafe { libc::pread64(file.as_raw_fd(), to.cast(), len, at) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    /// Calls `pwrite()` once for at most `len` bytes of the memory at `offset`, into `file`. Returns the number of
    /// bytes.
    pub(crate) fn pwrite(&self, offset: usize, len: usize, file: &File, file_offset: u64) -> io::Result<usize> {
        let from = self.at(offset, len);
        let at = libc::off64_t::try_from(file_offset).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        // SAFETY: the kernel, or a device on its behalf, reads at most `len` bytes, which at() checked.
        let n = unsafe { libc::pwrite64(file.as_raw_fd(), from.cast(), len, at) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value (type invariant), which is being dropped.
        let result = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert_eq!(result, Ok(()), "munmap");
    }
}

/// Fails unless the program may read and write a file.
pub(crate) fn may_use(path: &Path) -> io::Result<()> {
    use rustix::fs::{accessat, Access, AtFlags, CWD};
    Ok(accessat(
        CWD,
        path,
        Access::READ_OK | Access::WRITE_OK,
        AtFlags::EACCESS,
    )?)
}

/// Returns the size of a page in bytes.
pub(crate) fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// Returns whether a file is open with O_DIRECT.
pub(crate) fn is_direct(file: &File) -> io::Result<bool> {
    Ok(rustix::fs::fcntl_getfl(file)?.contains(OFlags::DIRECT))
}

/// Name of the files that stand for dma-bufs in tests.
#[cfg(any(test, feature = "fake"))]
pub(crate) const FAKE_DMABUF: &std::ffi::CStr = c"p2pmem-fake-dmabuf";

/// Creates a zeroed file of `len` bytes in memory (memfd).
#[cfg(any(test, feature = "fake"))]
pub(crate) fn memory_file(name: &std::ffi::CStr, len: u64) -> io::Result<File> {
    let file = File::from(rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?);
    file.set_len(len)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn region(len: usize) -> Region {
        Region::map(&memory_file(c"test", len as u64).unwrap(), 0, len).unwrap()
    }

    #[test]
    #[should_panic(expected = "past the end")]
    fn access_past_the_end_panics() {
        region(4096).read(4090, &mut [0; 7]);
    }

    #[test]
    fn ioctl_and_mmap_on_other_device_fail() {
        let device = CharDevice::open(Path::new("/dev/null")).unwrap();
        assert_eq!(device.info().unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(
            device.map(0, 0, 4096).err().and_then(|e| e.raw_os_error()),
            Some(libc::ENODEV)
        );
    }

    /// Returns an event of `size` bytes. All bytes after the known fields are ones.
    fn event_bytes(size: usize, provider: u32) -> Vec<u8> {
        let mut bytes = vec![0xff; size];
        let fields = [size as u32, abi::P2PMEM_EVENT_PROVIDER_ADDED, provider, 0, 0, 0];
        for (field, at) in fields.iter().zip((0..).step_by(4)) {
            if let Some(place) = bytes.get_mut(at..at + 4) {
                place.copy_from_slice(&field.to_ne_bytes());
            }
        }
        bytes
    }

    #[test]
    fn events_are_split_by_their_size_field() {
        let known = size_of::<abi::p2pmem_event>();
        let sizes = [known, known + 8, 12, abi::P2PMEM_MAX_EVENT as usize, known];
        let bytes: Vec<u8> = (0..).zip(sizes).flat_map(|(n, size)| event_bytes(size, n)).collect();
        let mut out = [abi::p2pmem_event::default(); 8];
        assert_eq!(split_events(&bytes, &mut out).unwrap(), sizes.len());
        for ((n, size), event) in (0..).zip(sizes).zip(&out) {
            assert_eq!((event.size as usize, event.provider), (size, n));
            assert_eq!(event.type_, abi::P2PMEM_EVENT_PROVIDER_ADDED);
            // Missing fields are zero.
            assert_eq!(event.time_ns, if size < known { 0 } else { u64::MAX });
        }
        assert_eq!(out[sizes.len()].size, 0, "more events than there are");
    }

    #[test]
    fn truncated_events_are_an_error() {
        let known = size_of::<abi::p2pmem_event>();
        let mut out = [abi::p2pmem_event::default(); 8];
        let mut cut = event_bytes(known + 8, 1);
        cut.truncate(known);
        // An event of its size field only, and an event of size zero, at which a reader would not advance.
        let without = event_bytes(known, 0)[..4].to_vec();
        let mut endless = event_bytes(known, 1);
        endless[..4].copy_from_slice(&0u32.to_ne_bytes());
        for bytes in [cut, without, endless, vec![1], event_bytes(known, 1)[..3].to_vec()] {
            let error = split_events(&bytes, &mut out).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{bytes:?}");
        }
        assert_eq!(split_events(&[], &mut out).unwrap(), 0);
    }

    proptest! {
        /// Copies and fills at any offset and length equal the same operations on a vector.
        #[test]
        fn copies_match_a_vector(ops in prop::collection::vec((0usize..300, 0usize..200, any::<u8>(), any::<bool>()), 1..40)) {
            let region = region(4096);
            let mut model = vec![0u8; 512];
            for (offset, len, byte, fill) in ops {
                if fill {
                    region.fill(offset, len, byte);
                    model[offset..offset + len].fill(byte);
                } else {
                    let data: Vec<u8> = (0..len).map(|i| byte.wrapping_add(i as u8)).collect();
                    region.write(offset, &data);
                    model[offset..offset + len].copy_from_slice(&data);
                }
                let mut all = vec![0; 512];
                region.read(0, &mut all);
                prop_assert_eq!(&all, &model);
                let mut part = vec![0; len];
                region.read(offset, &mut part);
                prop_assert_eq!(&part[..], &model[offset..offset + len]);
            }
        }
    }
}
