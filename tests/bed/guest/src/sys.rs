// SPDX-License-Identifier: MIT OR Apache-2.0

//! Raw calls of the test programs: ioctls with any argument that a test needs, mappings, signals.
//!
//! The functions are safe to call: user memory goes to the kernel as slices with counts that fit, and bad pointers only as
//! addresses at which no program has memory.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use p2pmem_sys as abi;
use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::memory_region::MemoryRegion;
use sideway::ibverbs::protection_domain::ProtectionDomain;
use sideway::ibverbs::queue_pair::{BasicQueuePair, PostSendGuard, QueuePair, SetScatterGatherEntry, WorkRequestFlags};

use crate::limits::scaled;

pub mod uverbs;

/// The time limit for the kernel to remove a thread that has ended.
const THREAD_END: Duration = Duration::from_secs(10);

/// An errno, or success.
pub type Answer = Result<(), i32>;

/// Addresses at which no program has memory: null, one above the user half, one of the kernel, one that is not canonical.
pub const BAD_POINTERS: [u64; 4] = [0, 0x7fff_ffff_f000, 0xffff_ffff_ffff_f000, 0xdead_0000_0000_0000];

fn result(value: i64) -> Answer {
    if value < 0 {
        Err(io::Error::last_os_error().raw_os_error().unwrap_or(0))
    } else {
        Ok(())
    }
}

/// Memory for the kernel to read or write, or an address without memory.
#[derive(Debug)]
pub enum Memory<'a, T> {
    /// Elements to fill or read.
    Slice(&'a mut [T]),
    /// One of [`BAD_POINTERS`], by index.
    Bad(usize),
}

impl<T> Memory<'_, T> {
    fn address(&mut self, count: u64) -> u64 {
        match self {
            Memory::Slice(slice) => {
                assert!(count <= slice.len() as u64, "more elements claimed than there are");
                slice.as_mut_ptr() as u64
            }
            Memory::Bad(index) => BAD_POINTERS[*index],
        }
    }
}

thread_local! {
    /// Bits of [`RECORDED`], [`BY_32_BIT`], and [`READ_ONLY`]. One variable: the benchmark counts the instructions of a plain call.
    static MODE: Cell<u8> = const { Cell::new(0) };
    /// The ioctls that this thread has made while [`RECORDED`] was set: a bit for each number.
    static CALLED: Cell<u32> = const { Cell::new(0) };
}

/// Bit of [`MODE`]: this thread's ioctls are recorded.
const RECORDED: u8 = 1;
/// Bit of [`MODE`]: this thread's ioctls use the kernel's entry for 32-bit programs.
const BY_32_BIT: u8 = 2;
/// Bit of [`MODE`]: the structures of this thread's ioctls are in read-only memory.
const READ_ONLY: u8 = 4;

/// Calls `work` with the bit set in this thread's mode.
fn in_mode<T>(bit: u8, work: impl FnOnce() -> T) -> T {
    let before = MODE.replace(MODE.get() | bit);
    let answer = work();
    MODE.set(before);
    answer
}

/// Calls `work`, whose ioctls with a structure use the kernel's entry for 32-bit programs. Arrays have to be in memory that
/// such a program can address: [`Low`].
pub fn by_32_bit<T>(work: impl FnOnce() -> T) -> T {
    in_mode(BY_32_BIT, work)
}

/// Calls `work`. The kernel can read the structures of its ioctls, and cannot write them.
pub fn from_read_only<T>(work: impl FnOnce() -> T) -> T {
    in_mode(READ_ONLY, work)
}

/// Calls `work`. Returns its answer and the ioctls that this thread made in it: a bit for each number.
pub fn calls_in<T>(work: impl FnOnce() -> T) -> (T, u32) {
    let before = CALLED.replace(0);
    let answer = in_mode(RECORDED, work);
    (answer, CALLED.replace(before))
}

fn direct<T>(fd: BorrowedFd<'_>, request: u32, argument: &mut T) -> Answer {
    // SAFETY: the kernel touches as many bytes at the argument as the request's number says, and `raw` has checked that they
    // are there. Memory::address made the pointers in it.
    result(unsafe { libc::ioctl(fd.as_raw_fd(), u64::from(request), ptr::from_mut(argument)) }.into())
}

fn raw<T>(fd: BorrowedFd<'_>, request: u32, argument: &mut T) -> Answer {
    assert!(
        abi::ioc_size(request) as usize <= size_of::<T>(),
        "the argument is smaller than the call says"
    );
    if MODE.get() != 0 {
        return by_mode(fd, request, argument);
    }
    direct(fd, request, argument)
}

/// An ioctl of a thread whose [`MODE`] has a bit set.
fn by_mode<T>(fd: BorrowedFd<'_>, request: u32, argument: &mut T) -> Answer {
    if MODE.get() & RECORDED != 0 && abi::P2PMEM_IOCS.contains(&request) {
        CALLED.set(CALLED.get() | (1 << abi::ioc_nr(request)));
    }
    if MODE.get() & READ_ONLY != 0 {
        return read_only(fd, request, argument);
    }
    if MODE.get() & BY_32_BIT == 0 {
        return direct(fd, request, argument);
    }
    // SAFETY: as in `direct`; the argument is copied to a place that is as large, and back.
    unsafe { int_0x80(fd, request, ptr::from_mut(argument).cast(), size_of::<T>()) }
}

/// An ioctl with a copy of the argument that the kernel cannot write.
fn read_only<T>(fd: BorrowedFd<'_>, request: u32, argument: &T) -> Answer {
    const PAGE: usize = 4096;
    assert!(size_of::<T>() <= PAGE, "the argument is larger than a page");
    // SAFETY: a new mapping, in which the argument fits. The kernel touches as many bytes of it as the request's number says.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let page = libc::mmap(ptr::null_mut(), PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        if page == libc::MAP_FAILED {
            return Err(libc::ENOMEM);
        }
        page.cast::<T>().copy_from_nonoverlapping(argument, 1);
        result(libc::mprotect(page, PAGE, libc::PROT_READ).into())?;
        let answer = result(libc::ioctl(fd.as_raw_fd(), u64::from(request), page).into());
        libc::munmap(page, PAGE);
        answer
    }
}

/// A call whose argument holds no pointers: `INFO`, `FREE`, `BUFFER`, `STATS`.
pub trait Plain {}
impl Plain for abi::p2pmem_info {}
impl Plain for abi::p2pmem_free {}
impl Plain for abi::p2pmem_buffer {}
impl Plain for abi::p2pmem_stats {}
impl Plain for abi::p2pmem_import {}
impl Plain for abi::p2pmem_detach {}
/// Argument of calls that do not exist.
impl Plain for [u64; 32] {}

/// Makes a call whose argument holds no pointers.
pub fn plain<T: Plain>(fd: BorrowedFd<'_>, request: u32, argument: &mut T) -> Answer {
    raw(fd, request, argument)
}

/// Makes a call with a bad pointer as its argument.
pub fn bad_argument(fd: BorrowedFd<'_>, request: u32, bad: usize) -> Answer {
    // SAFETY: there is no memory of this program at the address.
    result(unsafe { libc::ioctl(fd.as_raw_fd(), u64::from(request), BAD_POINTERS[bad]) }.into())
}

/// Makes a call with a structure of `size` bytes, whatever its size in the header: for calls whose argument has no pointers, or
/// only null pointers.
pub fn sized(fd: BorrowedFd<'_>, request: u32, size: u32, argument: &mut [u64; 32]) -> Answer {
    assert!(size as usize <= size_of_val(argument), "more than there is");
    let request = (request & !(0x3fff << 16)) | (size << 16);
    // SAFETY: the kernel touches as many bytes as the number says, which are there.
    result(unsafe { libc::ioctl(fd.as_raw_fd(), u64::from(request), argument.as_mut_ptr()) }.into())
}

/// Calls `LIST` with elements of a stated size. Returns the number of providers.
///
/// # Errors
///
/// The errno.
pub fn list_sized(fd: BorrowedFd<'_>, size: u32, count: u32, out: &mut [u8]) -> Result<u32, i32> {
    assert!(
        u64::from(size) * u64::from(count) <= out.len() as u64,
        "more than there is"
    );
    let mut list = abi::p2pmem_list {
        providers: out.as_mut_ptr() as u64,
        count,
        provider_size: size,
        ..Default::default()
    };
    raw(fd, abi::P2PMEM_IOC_LIST, &mut list)?;
    Ok(list.count)
}

/// Calls `ALLOC` near one client, which is an element of `size` bytes.
///
/// # Errors
///
/// The errno.
pub fn alloc_clients(fd: BorrowedFd<'_>, alloc: &mut abi::p2pmem_alloc, client: &[u64], size: u32) -> Answer {
    assert!(size as usize <= size_of_val(client), "more than there is");
    alloc.req.clients = client.as_ptr() as u64;
    (alloc.req.nr_clients, alloc.req.client_size) = (1, size);
    raw(fd, abi::P2PMEM_IOC_ALLOC, alloc)
}

/// Makes a call as a 32-bit program does, see [`by_32_bit`]. The argument holds no pointers.
pub fn compat(fd: BorrowedFd<'_>, request: u32, argument: &mut [u64; 32]) -> Answer {
    assert!(
        abi::ioc_size(request) as usize <= size_of_val(argument),
        "more than there is"
    );
    // SAFETY: the kernel touches as many bytes as the number says, which are there.
    unsafe { int_0x80(fd, request, argument.as_mut_ptr().cast(), size_of_val(argument)) }
}

/// Elements in memory below 4 GiB, which a 32-bit program can address.
#[derive(Debug)]
pub struct Low<T: Copy> {
    base: *mut T,
    len: usize,
}

impl<T: Copy> Low<T> {
    /// Returns that many elements, all equal to `value`.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn new(len: usize, value: T) -> Result<Low<T>, i32> {
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                (len * size_of::<T>()).max(1),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
        }
        let low: Low<T> = Low { base: base.cast(), len };
        assert!(
            (low.base as u64) + (len * size_of::<T>()) as u64 <= 1 << 32,
            "not below 4 GiB"
        );
        for at in 0..len {
            // SAFETY: within the mapping, which is aligned to a page.
            unsafe { low.base.add(at).write(value) };
        }
        Ok(low)
    }
}

impl<T: Copy> Deref for Low<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: all elements were written, and the mapping is this value's alone.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }
}

impl<T: Copy> DerefMut for Low<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }
}

impl<T: Copy> Drop for Low<T> {
    fn drop(&mut self) {
        // SAFETY: only this value's own pages, which nobody uses any more.
        unsafe { libc::munmap(self.base.cast(), (self.len * size_of::<T>()).max(1)) };
    }
}

/// `ioctl` through `int 0x80`, which is the kernel's entry for 32-bit programs also where a 64-bit program uses it. The argument
/// travels through memory below 4 GiB.
///
/// # Safety
///
/// `argument` must have `len` bytes, and at least as many as the number says. What the kernel reads and writes by pointers in it
/// must be there.
unsafe fn int_0x80(fd: BorrowedFd<'_>, request: u32, argument: *mut u8, len: usize) -> Answer {
    /// `ioctl` in the 32-bit table.
    const IOCTL: u64 = 54;
    let mut low = Low::new(len, 0u8)?;
    let mut answer = IOCTL;
    // SAFETY: both have that many bytes, and are not the same memory.
    unsafe { ptr::copy_nonoverlapping(argument, low.as_mut_ptr(), len) };
    // SAFETY: the kernel touches as many bytes of the argument as the number says, and what the caller promises. It keeps all
    // registers but rax, and on some kernels r8 to r11; rbx, which inline assembly may not name, is exchanged before and after.
    unsafe {
        std::arch::asm!(
            "xchg {fd}, rbx",
            "int 0x80",
            "xchg {fd}, rbx",
            fd = inout(reg) fd.as_raw_fd() as u64 => _,
            inout("rax") answer,
            in("rcx") u64::from(request),
            in("rdx") low.as_mut_ptr() as u64,
            out("r8") _,
            out("r9") _,
            out("r10") _,
            out("r11") _,
        );
    }
    // SAFETY: as above.
    unsafe { ptr::copy_nonoverlapping(low.as_ptr(), argument, len) };
    match answer as i32 {
        0.. => Ok(()),
        error => Err(-error),
    }
}

/// A call with one array whose element size the caller states, besides the clients.
pub trait Elements {
    /// The call.
    const CALL: u32;
    /// Sets the array's address, count and size of elements, and those of the clients; there are no other arrays then.
    fn set(&mut self, elements: (u64, u32, u32), clients: (u64, u32, u32));
}

impl Elements for abi::p2pmem_list {
    const CALL: u32 = abi::P2PMEM_IOC_LIST;
    fn set(&mut self, elements: (u64, u32, u32), _: (u64, u32, u32)) {
        (self.providers, self.count, self.provider_size) = elements;
    }
}

impl Elements for abi::p2pmem_paths {
    const CALL: u32 = abi::P2PMEM_IOC_PATHS;
    fn set(&mut self, elements: (u64, u32, u32), clients: (u64, u32, u32)) {
        (self.paths, self.nr_paths, self.path_size) = elements;
        (self.clients, self.nr_clients, self.client_size) = clients;
    }
}

impl Elements for abi::p2pmem_explain {
    const CALL: u32 = abi::P2PMEM_IOC_EXPLAIN;
    fn set(&mut self, elements: (u64, u32, u32), clients: (u64, u32, u32)) {
        (self.verdicts, self.nr_verdicts, self.verdict_size) = elements;
        (self.req.clients, self.req.nr_clients, self.req.client_size) = clients;
        (self.text, self.text_len) = (0, 0);
    }
}

impl Elements for abi::p2pmem_stripe {
    const CALL: u32 = abi::P2PMEM_IOC_STRIPE;
    fn set(&mut self, elements: (u64, u32, u32), clients: (u64, u32, u32)) {
        (self.parts, self.nr_parts, self.part_size) = elements;
        (self.req.clients, self.req.nr_clients, self.req.client_size) = clients;
    }
}

impl Elements for abi::p2pmem_rules {
    const CALL: u32 = abi::P2PMEM_IOC_RULES;
    fn set(&mut self, elements: (u64, u32, u32), _: (u64, u32, u32)) {
        (self.rules, self.count, self.rule_size) = elements;
    }
}

impl Elements for abi::p2pmem_attach {
    const CALL: u32 = abi::P2PMEM_IOC_ATTACH_DMABUF;
    fn set(&mut self, elements: (u64, u32, u32), _: (u64, u32, u32)) {
        (self.ranges, self.nr_ranges, self.range_size) = elements;
    }
}

impl Elements for abi::p2pmem_attachment {
    const CALL: u32 = abi::P2PMEM_IOC_ATTACHMENT;
    fn set(&mut self, elements: (u64, u32, u32), _: (u64, u32, u32)) {
        (self.ranges, self.nr_ranges, self.range_size) = elements;
    }
}

impl Elements for abi::p2pmem_export {
    const CALL: u32 = abi::P2PMEM_IOC_EXPORT_DMABUF;
    fn set(&mut self, elements: (u64, u32, u32), _: (u64, u32, u32)) {
        (self.ranges, self.nr_ranges, self.range_size) = elements;
    }
}

/// Makes a call with `count` elements of `size` bytes each.
pub fn with_elements<T: Elements>(
    fd: BorrowedFd<'_>,
    ask: &mut T,
    clients: &mut [abi::p2pmem_pci_addr],
    (size, count): (u32, u32),
    elements: &mut [u8],
) -> Answer {
    assert!(
        u64::from(size) * u64::from(count) <= elements.len() as u64,
        "more than there is"
    );
    let known = size_of::<abi::p2pmem_pci_addr>() as u32;
    let clients = (clients.as_mut_ptr() as u64, clients.len() as u32, known);
    ask.set((elements.as_mut_ptr() as u64, count, size), clients);
    raw(fd, T::CALL, ask)
}

/// `EXPORT_DMABUF` of ranges that are elements of a stated size.
///
/// # Errors
///
/// The errno.
pub fn export_sized(fd: BorrowedFd<'_>, handle: u32, size: u32, ranges: &mut [u8]) -> Result<OwnedFd, i32> {
    let mut ask = abi::p2pmem_export {
        handle,
        ..Default::default()
    };
    let count = ranges.len() as u32 / size.max(1);
    with_elements(fd, &mut ask, &mut [], (size, count), ranges)?;
    // SAFETY: the kernel made this descriptor for this call alone.
    Ok(unsafe { OwnedFd::from_raw_fd(ask.fd) })
}

/// Returns the bytes of a rule, which has no padding.
pub fn rule_bytes(rule: &abi::p2pmem_rule) -> [u8; size_of::<abi::p2pmem_rule>()] {
    // SAFETY: the structure has as many bytes, none of them padding.
    unsafe { std::mem::transmute_copy(rule) }
}

/// Calls `read()` for events, with memory of `room` bytes of which only the first `writable` are accessible.
///
/// # Errors
///
/// The errno.
pub fn read_guarded(fd: BorrowedFd<'_>, writable: usize, room: usize) -> Result<Vec<abi::p2pmem_event>, i32> {
    const PAGE: usize = 4096;
    assert!(writable <= room && room <= PAGE, "more than there is");
    // SAFETY: a new mapping, of which the second half is taken from everyone; `room` bytes from `at` lie in it. What the
    // kernel wrote into the first half is read as events, of which any bytes are valid ones.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let base = libc::mmap(
            ptr::null_mut(),
            2 * PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        );
        if base == libc::MAP_FAILED {
            return Err(libc::ENOMEM);
        }
        result(libc::mprotect(base.byte_add(PAGE), PAGE, libc::PROT_NONE).into())?;
        let at = base.byte_add(PAGE - writable);
        let n = libc::read(fd.as_raw_fd(), at, room);
        let answer = result(n as i64).map(|()| {
            let events = at.cast::<abi::p2pmem_event>();
            let count = n as usize / size_of::<abi::p2pmem_event>();
            (0..count).map(|i| events.add(i).read_unaligned()).collect()
        });
        libc::munmap(base, 2 * PAGE);
        answer
    }
}

/// `LIST`.
pub fn list(fd: BorrowedFd<'_>, list: &mut abi::p2pmem_list, mut out: Memory<'_, abi::p2pmem_provider>) -> Answer {
    list.provider_size = size_of::<abi::p2pmem_provider>() as u32;
    list.providers = out.address(list.count.into());
    raw(fd, abi::P2PMEM_IOC_LIST, list)
}

/// `PATHS`.
pub fn paths(
    fd: BorrowedFd<'_>,
    paths: &mut abi::p2pmem_paths,
    mut clients: Memory<'_, abi::p2pmem_pci_addr>,
    mut out: Memory<'_, abi::p2pmem_path>,
) -> Answer {
    paths.client_size = size_of::<abi::p2pmem_pci_addr>() as u32;
    paths.path_size = size_of::<abi::p2pmem_path>() as u32;
    paths.clients = clients.address(paths.nr_clients.into());
    paths.paths = out.address(paths.nr_paths.into());
    raw(fd, abi::P2PMEM_IOC_PATHS, paths)
}

/// `ALLOC`.
pub fn alloc(
    fd: BorrowedFd<'_>,
    alloc: &mut abi::p2pmem_alloc,
    mut clients: Memory<'_, abi::p2pmem_pci_addr>,
) -> Answer {
    alloc.req.client_size = size_of::<abi::p2pmem_pci_addr>() as u32;
    alloc.req.clients = clients.address(alloc.req.nr_clients.into());
    raw(fd, abi::P2PMEM_IOC_ALLOC, alloc)
}

/// `RULES`.
pub fn rules(fd: BorrowedFd<'_>, ask: &mut abi::p2pmem_rules, mut rules: Memory<'_, abi::p2pmem_rule>) -> Answer {
    ask.rule_size = size_of::<abi::p2pmem_rule>() as u32;
    ask.rules = rules.address(ask.count.into());
    raw(fd, abi::P2PMEM_IOC_RULES, ask)
}

/// `STRIPE`.
pub fn stripe(
    fd: BorrowedFd<'_>,
    ask: &mut abi::p2pmem_stripe,
    mut clients: Memory<'_, abi::p2pmem_pci_addr>,
    mut parts: Memory<'_, abi::p2pmem_part>,
) -> Answer {
    ask.req.client_size = size_of::<abi::p2pmem_pci_addr>() as u32;
    ask.part_size = size_of::<abi::p2pmem_part>() as u32;
    ask.req.clients = clients.address(ask.req.nr_clients.into());
    ask.parts = parts.address(ask.nr_parts.into());
    raw(fd, abi::P2PMEM_IOC_STRIPE, ask)
}

/// Returns a dma-buf of host memory, which udmabuf makes of a memory file.
///
/// # Errors
///
/// The kernel has no udmabuf, or there is no memory.
pub fn host_dma_buf(len: u64) -> io::Result<OwnedFd> {
    /// `struct udmabuf_create` of `linux/udmabuf.h`.
    #[repr(C)]
    struct Create {
        memfd: u32,
        flags: u32,
        offset: u64,
        size: u64,
    }
    /// `UDMABUF_CREATE`.
    const CREATE: u64 = 0x4018_7542;
    /// `UDMABUF_FLAGS_CLOEXEC`.
    const CLOEXEC: u32 = 1;
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let memory = rustix::fs::memfd_create("host-dma-buf", flags)?;
    rustix::fs::ftruncate(&memory, len)?;
    rustix::fs::fcntl_add_seals(&memory, rustix::fs::SealFlags::SHRINK)?;
    let node = File::options().read(true).write(true).open("/dev/udmabuf")?;
    let mut ask = Create {
        memfd: memory.as_raw_fd() as u32,
        flags: CLOEXEC,
        offset: 0,
        size: len,
    };
    // SAFETY: the structure is the one the call's number speaks of, and holds no pointers.
    let answer = unsafe { libc::ioctl(node.as_raw_fd(), CREATE, ptr::from_mut(&mut ask)) };
    result(answer.into()).map_err(io::Error::from_raw_os_error)?;
    // SAFETY: the kernel made this descriptor for this call alone.
    Ok(unsafe { OwnedFd::from_raw_fd(answer) })
}

/// `_IO(VFIO_TYPE, VFIO_BASE + 8)`
const VFIO_DEVICE_GET_REGION_INFO: u64 = 0x3b6c;
/// `_IO(VFIO_TYPE, VFIO_BASE + 11)`
const VFIO_DEVICE_RESET: u64 = 0x3b6f;
/// `VFIO_PCI_CONFIG_REGION_INDEX`
const VFIO_CONFIG_REGION: u32 = 7;

/// Returns the offset of the configuration space in the VFIO file of a function.
///
/// # Errors
///
/// The errno.
pub fn vfio_config(function: BorrowedFd<'_>) -> Result<u64, i32> {
    /// `struct vfio_region_info`
    #[repr(C)]
    #[derive(Default)]
    struct RegionInfo {
        argsz: u32,
        flags: u32,
        index: u32,
        cap_offset: u32,
        size: u64,
        offset: u64,
    }
    let mut info = RegionInfo {
        argsz: size_of::<RegionInfo>() as u32,
        index: VFIO_CONFIG_REGION,
        ..Default::default()
    };
    let at = ptr::from_mut(&mut info);
    // SAFETY: the kernel reads and writes a structure of `argsz` bytes.
    result(unsafe { libc::ioctl(function.as_raw_fd(), VFIO_DEVICE_GET_REGION_INFO, at) }.into())?;
    Ok(info.offset)
}

/// Resets a function that is open by VFIO.
///
/// # Errors
///
/// The errno.
pub fn vfio_reset(function: BorrowedFd<'_>) -> Answer {
    // SAFETY: the call has no argument. Mappings of the function's BARs fault until the reset is done.
    result(unsafe { libc::ioctl(function.as_raw_fd(), VFIO_DEVICE_RESET) }.into())
}

/// Duplicates a descriptor by its number.
///
/// # Errors
///
/// The errno.
pub fn duplicate(fd: i32) -> Result<OwnedFd, i32> {
    // SAFETY: the arguments are numbers.
    let answer = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    result(answer.into())?;
    // SAFETY: the call succeeded, so the descriptor is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(answer) })
}

/// Runs `work` in a thread with another user's ids. The raw calls change the ids of the calling thread only.
///
/// # Errors
///
/// The errno of the call that failed.
pub fn as_user<T: Send>(uid: u32, gid: u32, groups: &[u32], work: impl FnOnce() -> T + Send) -> Result<T, i32> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: the kernel reads as many groups as there are; the others take numbers.
            unsafe {
                result(libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()))?;
                result(libc::syscall(libc::SYS_setresgid, gid, gid, gid))?;
                result(libc::syscall(libc::SYS_setresuid, uid, uid, uid))?;
            }
            Ok(work())
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Puts the calling process, which has one thread, into a user namespace of its own.
///
/// # Errors
///
/// The errno.
pub fn enter_user_namespace() -> Result<(), i32> {
    // SAFETY: no descriptors are unshared, which somebody might rely on to be the same in all threads.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWUSER) }
        .map_err(rustix::io::Errno::raw_os_error)
}

/// `EXPORT_DMABUF`.
///
/// # Errors
///
/// The errno.
pub fn export(
    fd: BorrowedFd<'_>,
    export: &mut abi::p2pmem_export,
    mut ranges: Memory<'_, abi::p2pmem_range>,
) -> Result<OwnedFd, i32> {
    export.range_size = size_of::<abi::p2pmem_range>() as u32;
    export.ranges = ranges.address(export.nr_ranges.into());
    raw(fd, abi::P2PMEM_IOC_EXPORT_DMABUF, export)?;
    // SAFETY: the kernel made this descriptor for this call alone.
    Ok(unsafe { OwnedFd::from_raw_fd(export.fd) })
}

/// `ATTACH_DMABUF`.
pub fn attach(
    fd: BorrowedFd<'_>,
    ask: &mut abi::p2pmem_attach,
    mut ranges: Memory<'_, abi::p2pmem_dma_range>,
) -> Answer {
    ask.range_size = size_of::<abi::p2pmem_dma_range>() as u32;
    ask.ranges = ranges.address(ask.nr_ranges.into());
    raw(fd, abi::P2PMEM_IOC_ATTACH_DMABUF, ask)
}

/// `ATTACHMENT`.
pub fn attachment(
    fd: BorrowedFd<'_>,
    ask: &mut abi::p2pmem_attachment,
    mut ranges: Memory<'_, abi::p2pmem_dma_range>,
) -> Answer {
    ask.range_size = size_of::<abi::p2pmem_dma_range>() as u32;
    ask.ranges = ranges.address(ask.nr_ranges.into());
    raw(fd, abi::P2PMEM_IOC_ATTACHMENT, ask)
}

/// `EXPLAIN`.
pub fn explain(
    fd: BorrowedFd<'_>,
    explain: &mut abi::p2pmem_explain,
    mut clients: Memory<'_, abi::p2pmem_pci_addr>,
    mut verdicts: Memory<'_, abi::p2pmem_verdict>,
    mut text: Memory<'_, u8>,
) -> Answer {
    explain.req.client_size = size_of::<abi::p2pmem_pci_addr>() as u32;
    explain.verdict_size = size_of::<abi::p2pmem_verdict>() as u32;
    explain.req.clients = clients.address(explain.req.nr_clients.into());
    explain.verdicts = verdicts.address(explain.nr_verdicts.into());
    explain.text = text.address(explain.text_len.into());
    raw(fd, abi::P2PMEM_IOC_EXPLAIN, explain)
}

/// `read()` of events; returns those read.
///
/// # Errors
///
/// The errno.
pub fn read_events(fd: BorrowedFd<'_>, room: usize) -> Result<Vec<abi::p2pmem_event>, i32> {
    let size = size_of::<abi::p2pmem_event>();
    let mut events = vec![abi::p2pmem_event::default(); room.div_ceil(size)];
    // SAFETY: the buffer has at least that many bytes, and any bytes are a valid event.
    let n = unsafe { libc::read(fd.as_raw_fd(), events.as_mut_ptr().cast(), room) };
    result(n as i64)?;
    events.truncate(n as usize / size);
    Ok(events)
}

/// A mapping, unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    base: *mut u8,
    len: usize,
}

// SAFETY: the memory is shared with devices and other processes anyway, and only touched by volatile accesses.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of a file at an offset. `flags` as for mmap, without `MAP_FIXED`.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn new(fd: BorrowedFd<'_>, offset: u64, len: usize, prot: i32, flags: i32) -> Result<Mapping, i32> {
        assert_eq!(flags & libc::MAP_FIXED, 0);
        // SAFETY: the kernel chooses an unused place.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, fd.as_raw_fd(), offset as i64) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
        }
        Ok(Mapping { base: base.cast(), len })
    }

    /// Maps shared, for reading and writing.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn shared(fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Mapping, i32> {
        Mapping::new(fd, offset, len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED)
    }

    /// Returns the address of the first byte.
    pub fn address(&self) -> u64 {
        self.base as u64
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads the word at an offset that is a multiple of 8.
    pub fn get(&self, at: usize) -> u64 {
        assert!(at % 8 == 0 && at < self.len);
        // SAFETY: inside the mapping and aligned.
        unsafe { self.base.add(at).cast::<u64>().read_volatile() }
    }

    /// Writes the word at an offset that is a multiple of 8.
    pub fn set(&self, at: usize, value: u64) {
        assert!(at % 8 == 0 && at < self.len);
        // SAFETY: inside the mapping and aligned.
        unsafe { self.base.add(at).cast::<u64>().write_volatile(value) }
    }

    /// Unmaps `len` bytes at an offset. What remains is the front (offset > 0) or the back.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn unmap_part(&mut self, at: usize, len: usize) -> Answer {
        assert!(at % 4096 == 0 && (at == 0 || at + len == self.len) && len <= self.len);
        // SAFETY: only this mapping's own pages, which it gives up below.
        result(unsafe { libc::munmap(self.base.add(at).cast(), len) }.into())?;
        if at == 0 {
            // SAFETY: within the mapping.
            self.base = unsafe { self.base.add(len) };
        }
        self.len -= len;
        Ok(())
    }

    /// Replaces the mapping by inaccessible memory: the file is no longer mapped, and no other mapping gets the addresses.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn vacate(&self) -> Answer {
        self.vacate_part(0, self.len)
    }

    /// Replaces a part of the mapping by inaccessible memory.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn vacate_part(&self, at: usize, len: usize) -> Answer {
        assert!(at % 4096 == 0 && at + len <= self.len);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: only this mapping's own pages are replaced.
        let base = unsafe { libc::mmap(self.base.add(at).cast(), len, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
        }
        Ok(())
    }

    /// Calls `madvise()` for a part of the mapping.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn advise_part(&self, at: usize, len: usize, advice: i32) -> Answer {
        assert!(at % 4096 == 0 && at + len <= self.len);
        // SAFETY: only this mapping's own pages, which are a file's: no advice changes what they contain.
        result(unsafe { libc::madvise(self.base.add(at).cast(), len, advice) }.into())
    }

    /// Moves or resizes the mapping by mremap.
    ///
    /// # Errors
    ///
    /// The errno; the mapping is unchanged then.
    pub fn remap(&mut self, len: usize, flags: i32) -> Answer {
        // SAFETY: only this mapping's own pages; it takes the new place over.
        let base = unsafe { libc::mremap(self.base.cast(), self.len, len, flags) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
        }
        (self.base, self.len) = (base.cast(), len);
        Ok(())
    }

    /// Changes the protection of the mapping.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn protect(&self, prot: i32) -> Answer {
        self.protect_part(0, self.len, prot)
    }

    /// Changes the protection of a part of the mapping.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn protect_part(&self, at: usize, len: usize, prot: i32) -> Answer {
        assert!(at % 4096 == 0 && at + len <= self.len);
        // SAFETY: only this mapping's own pages.
        result(unsafe { libc::mprotect(self.base.add(at).cast(), len, prot) }.into())
    }

    /// Replaces a part of the mapping by `len` bytes of a file at an offset.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn replace_part(&self, at: usize, len: usize, fd: BorrowedFd<'_>, offset: u64) -> Answer {
        assert!(at % 4096 == 0 && at + len <= self.len);
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: only this mapping's own pages are replaced, and by as many.
        let base = unsafe {
            libc::mmap(
                self.base.add(at).cast(),
                len,
                prot,
                flags,
                fd.as_raw_fd(),
                offset as i64,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
        }
        Ok(())
    }

    /// Reads from a file into the mapping.
    ///
    /// # Errors
    ///
    /// Those of pread.
    pub fn fill_from(&self, file: &File, offset: u64, at: usize, len: usize) -> io::Result<usize> {
        assert!(at + len <= self.len);
        // SAFETY: inside the mapping.
        let n = unsafe { libc::pread(file.as_raw_fd(), self.base.add(at).cast(), len, offset as i64) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    /// Writes from the mapping to a file.
    ///
    /// # Errors
    ///
    /// Those of pwrite.
    pub fn drain_to(&self, file: &File, offset: u64, at: usize, len: usize) -> io::Result<usize> {
        assert!(at + len <= self.len);
        // SAFETY: inside the mapping.
        let n = unsafe { libc::pwrite(file.as_raw_fd(), self.base.add(at).cast(), len, offset as i64) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: only this mapping's own pages, which nobody uses any more.
            unsafe { libc::munmap(self.base.cast(), self.len) };
        }
    }
}

/// Calls `ibv_reg_mr()` for any range, with all access rights of an adapter.
///
/// # Errors
///
/// The errno.
pub fn register(pd: &Arc<ProtectionDomain>, address: u64, len: usize) -> Result<Arc<MemoryRegion>, i32> {
    let access = AccessFlags::LocalWrite | AccessFlags::RemoteWrite | AccessFlags::RemoteRead;
    // SAFETY: registration itself touches no memory of the program. What an adapter writes later is device memory, which
    // tests only look at by volatile accesses: nothing is ever sent to a registration of other memory.
    unsafe { pd.reg_mr(address as usize, len, access) }
        .map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

/// Posts an RDMA WRITE of `len` bytes at `address`, with the local key `lkey`.
///
/// # Errors
///
/// It cannot be posted.
pub fn post_write(
    qp: &mut BasicQueuePair,
    id: u64,
    (lkey, address, len): (u32, u64, u32),
    (rkey, remote): (u32, u64),
) -> io::Result<()> {
    let mut guard = qp.start_post_send();
    let request = guard
        .construct_wr(id, WorkRequestFlags::Signaled)
        .setup_write(rkey, remote);
    // SAFETY: the key is that of a registration, so the adapter reads no other memory than what that covers.
    unsafe { request.setup_sge(lkey, address, len) };
    guard.post().map_err(io::Error::other)
}

static BUS_ERRORS: AtomicU64 = AtomicU64::new(0);

/// The number of SIGBUS signals since [`survive_bus_errors`].
pub fn bus_errors() -> u64 {
    BUS_ERRORS.load(Ordering::SeqCst)
}

extern "C" fn on_bus_error(_signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    BUS_ERRORS.fetch_add(1, Ordering::SeqCst);
    // SAFETY: the kernel passes a valid structure; SIGBUS has an address.
    let page = (unsafe { (*info).si_addr() } as usize & !4095) as *mut libc::c_void;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: replaces the page whose memory is gone; mmap is a plain system call, allowed in a handler.
    let put = unsafe { libc::mmap(page, 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if put == libc::MAP_FAILED {
        // SAFETY: ends the process; otherwise the access would fault indefinitely.
        unsafe { libc::_exit(99) };
    }
}

/// Installs a handler of SIGBUS that replaces a page without memory by a page of zeroes, and counts the signal.
///
/// # Errors
///
/// Those of sigaction.
pub fn survive_bus_errors() -> io::Result<()> {
    // SAFETY: all-zero is a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_bus_error as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler only makes calls that are allowed in one.
    match unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Forks; the child runs `child` and exits with its result. Returns the child's status, as wait does.
///
/// # Errors
///
/// Those of fork and waitpid.
pub fn in_child(child: impl FnOnce() -> i32) -> io::Result<i32> {
    spawn_child(child)?.wait()
}

/// Makes the kernel kill the calling process after so many seconds of processor time.
///
/// # Errors
///
/// Those of setrlimit.
pub fn limit_processor_time(seconds: u64) -> io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: seconds,
        rlim_max: seconds,
    };
    // SAFETY: the limit is a valid one.
    match unsafe { libc::setrlimit(libc::RLIMIT_CPU, &limit) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the number of page faults of the calling process that needed no I/O.
///
/// # Errors
///
/// Those of getrusage.
pub fn minor_faults() -> io::Result<u64> {
    // SAFETY: all-zero is a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the result is a valid place.
    match unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) } {
        0 => Ok(usage.ru_minflt as u64),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A forked child. The caller must wait for it.
#[must_use]
pub struct ForkedChild(libc::pid_t);

impl ForkedChild {
    /// Waits for the child. Returns its status, as wait does.
    ///
    /// # Errors
    ///
    /// Those of waitpid.
    pub fn wait(self) -> io::Result<i32> {
        let mut status = 0;
        // SAFETY: the status is a valid place.
        if unsafe { libc::waitpid(self.0, &mut status, 0) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(status)
    }
}

/// Forks; the child runs `child` and exits with its result. In the parent, the values that `child` owns are dropped.
///
/// # Errors
///
/// Those of fork.
///
/// # Panics
///
/// If the process has more than one thread.
pub fn spawn_child(child: impl FnOnce() -> i32) -> io::Result<ForkedChild> {
    // A thread is listed until the kernel has removed it, which may be shortly after join() has returned.
    let deadline = Instant::now() + scaled(THREAD_END);
    while std::fs::read_dir("/proc/self/task")?.count() > 1 {
        assert!(Instant::now() < deadline, "only a process with one thread may fork");
        std::thread::yield_now();
    }
    // SAFETY: The process has one thread, so no lock is held by a thread that the child does not have, and the child may run
    // any code.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let code = child();
            // SAFETY: ends the child without running the parent's destructors.
            unsafe { libc::_exit(code) }
        }
        pid => Ok(ForkedChild(pid)),
    }
}
