// SPDX-License-Identifier: MIT OR Apache-2.0

//! Raw system calls of the test programs: ioctls with arbitrary arguments, mappings, signals.
//!
//! The functions are safe to call. Memory of the program is passed to the kernel as slices, with counts that fit.
//! Invalid pointers are only addresses at which no program has memory.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use std::sync::Arc;

use p2pmem_sys as abi;
use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::memory_region::MemoryRegion;
use sideway::ibverbs::protection_domain::ProtectionDomain;
use sideway::ibverbs::queue_pair::{BasicQueuePair, PostSendGuard, QueuePair, SetScatterGatherEntry, WorkRequestFlags};

/// Success, or an errno.
pub type SysResult = Result<(), i32>;

/// Addresses at which no program has memory: null, above the user half, in the kernel half, and noncanonical.
pub const BAD_POINTERS: [u64; 4] = [0, 0x7fff_ffff_f000, 0xffff_ffff_ffff_f000, 0xdead_0000_0000_0000];

fn result(value: i64) -> SysResult {
    if value < 0 {
        Err(io::Error::last_os_error().raw_os_error().unwrap_or(0))
    } else {
        Ok(())
    }
}

/// Memory that the kernel reads or writes, or an invalid address.
#[derive(Debug)]
pub enum Memory<'a, T> {
    /// Elements to read or fill.
    Slice(&'a mut [T]),
    /// An index into [`BAD_POINTERS`].
    Bad(usize),
}

impl<T> Memory<'_, T> {
    fn address(&mut self, count: u64) -> u64 {
        match self {
            Memory::Slice(slice) => {
                assert!(count <= slice.len() as u64, "the count exceeds the slice");
                slice.as_mut_ptr() as u64
            }
            Memory::Bad(index) => BAD_POINTERS[*index],
        }
    }
}

thread_local! {
    /// The ioctls of this thread within [`calls_in`]: one bit per ioctl number.
    static CALLED: Cell<u32> = const { Cell::new(0) };
    /// Whether ioctls of this thread use the kernel's entry for 32-bit programs.
    static BY_32_BIT: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`. Within `work`, ioctls whose argument is a structure use the kernel's entry for 32-bit programs. Arrays
/// must be in memory below 4 GiB: [`Low`].
pub fn by_32_bit<T>(work: impl FnOnce() -> T) -> T {
    let before = BY_32_BIT.replace(true);
    let answer = work();
    BY_32_BIT.set(before);
    answer
}

/// Runs `work`. Returns its result and the ioctls that this thread made within it: one bit per ioctl number.
pub fn calls_in<T>(work: impl FnOnce() -> T) -> (T, u32) {
    let before = CALLED.replace(0);
    let answer = work();
    (answer, CALLED.replace(before))
}

fn raw<T>(fd: BorrowedFd<'_>, request: u32, argument: &mut T) -> SysResult {
    assert!(
        abi::ioc_size(request) as usize <= size_of::<T>(),
        "the argument is smaller than the ioctl states"
    );
    if abi::P2PMEM_IOCS.contains(&request) {
        CALLED.set(CALLED.get() | (1 << abi::ioc_nr(request)));
    }
    if BY_32_BIT.get() {
        // SAFETY: as for `ioctl` below. The argument has `size_of::<T>()` bytes, and at least as many as `request`
        // states.
        return unsafe { int_0x80(fd, request, ptr::from_mut(argument).cast(), size_of::<T>()) };
    }
    // SAFETY: the kernel accesses as many bytes of the argument as `request` states, and `argument` has them. Pointers
    // in the argument come from Memory::address.
    result(unsafe { libc::ioctl(fd.as_raw_fd(), u64::from(request), ptr::from_mut(argument)) }.into())
}

/// An ioctl argument without pointers: `INFO`, `FREE`, `BUFFER`, `STATS`, `IMPORT`.
pub trait Plain {}
impl Plain for abi::p2pmem_info {}
impl Plain for abi::p2pmem_free {}
impl Plain for abi::p2pmem_buffer {}
impl Plain for abi::p2pmem_stats {}
impl Plain for abi::p2pmem_import {}
/// The argument of ioctls that do not exist.
impl Plain for [u64; 32] {}

/// Makes an ioctl whose argument has no pointers.
pub fn plain<T: Plain>(fd: BorrowedFd<'_>, request: u32, argument: &mut T) -> SysResult {
    raw(fd, request, argument)
}

/// Makes an ioctl whose argument is an invalid pointer: the element `bad` of [`BAD_POINTERS`].
pub fn bad_argument(fd: BorrowedFd<'_>, request: u32, bad: usize) -> SysResult {
    // SAFETY: the program has no memory at the address.
    result(unsafe { libc::ioctl(fd.as_raw_fd(), u64::from(request), BAD_POINTERS[bad]) }.into())
}

/// Makes an ioctl whose number states `size` bytes, whatever the size in the header. All pointers in the argument must
/// be null.
pub fn sized(fd: BorrowedFd<'_>, request: u32, size: u32, argument: &mut [u64; 32]) -> SysResult {
    assert!(
        size as usize <= size_of_val(argument),
        "the kernel would access memory beyond the argument"
    );
    let request = (request & !(0x3fff << 16)) | (size << 16);
    // SAFETY: the kernel accesses as many bytes of the argument as `request` states, and `argument` has them.
    result(unsafe { libc::ioctl(fd.as_raw_fd(), u64::from(request), argument.as_mut_ptr()) }.into())
}

/// `LIST` with elements of `size` bytes. Returns the number of providers.
///
/// # Errors
///
/// The errno.
pub fn list_sized(fd: BorrowedFd<'_>, size: u32, count: u32, out: &mut [u8]) -> Result<u32, i32> {
    assert!(
        u64::from(size) * u64::from(count) <= out.len() as u64,
        "the kernel would access memory beyond the argument"
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

/// `ALLOC` with one client, as an element of `size` bytes.
///
/// # Errors
///
/// The errno.
pub fn alloc_clients(fd: BorrowedFd<'_>, alloc: &mut abi::p2pmem_alloc, client: &[u64], size: u32) -> SysResult {
    assert!(
        size as usize <= size_of_val(client),
        "the kernel would access memory beyond the argument"
    );
    alloc.req.clients = client.as_ptr() as u64;
    (alloc.req.nr_clients, alloc.req.client_size) = (1, size);
    raw(fd, abi::P2PMEM_IOC_ALLOC, alloc)
}

/// Makes an ioctl by the kernel's entry for 32-bit programs. The argument has no pointers.
pub fn compat(fd: BorrowedFd<'_>, request: u32, argument: &mut [u64; 32]) -> SysResult {
    assert!(
        abi::ioc_size(request) as usize <= size_of_val(argument),
        "the kernel would access memory beyond the argument"
    );
    // SAFETY: the kernel accesses as many bytes of the argument as `request` states, and `argument` has them.
    unsafe { int_0x80(fd, request, argument.as_mut_ptr().cast(), size_of_val(argument)) }
}

/// Elements in memory below 4 GiB, which 32-bit programs can address.
#[derive(Debug)]
pub struct Low<T: Copy> {
    base: *mut T,
    len: usize,
}

impl<T: Copy> Low<T> {
    /// Maps `len` elements and sets each to `value`.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn new(len: usize, value: T) -> Result<Low<T>, i32> {
        // SAFETY: a new mapping at an address that the kernel chooses.
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
            // SAFETY: the address is within the mapping, which is aligned to a page.
            unsafe { low.base.add(at).write(value) };
        }
        Ok(low)
    }
}

impl<T: Copy> Deref for Low<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: all elements were written, and this value owns the mapping.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }
}

impl<T: Copy> DerefMut for Low<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `deref`.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }
}

impl<T: Copy> Drop for Low<T> {
    fn drop(&mut self) {
        // SAFETY: this value owns the pages, and no reference to them is left.
        unsafe { libc::munmap(self.base.cast(), (self.len * size_of::<T>()).max(1)) };
    }
}

/// `ioctl` by `int 0x80`, the kernel's entry for 32-bit programs, which a 64-bit program can use too. The argument is
/// copied to memory below 4 GiB and back.
///
/// # Safety
///
/// `argument` must have `len` bytes, and at least as many as `request` states. Memory to which the argument points must
/// be valid for the kernel's accesses.
unsafe fn int_0x80(fd: BorrowedFd<'_>, request: u32, argument: *mut u8, len: usize) -> SysResult {
    /// The number of `ioctl` in the 32-bit system call table.
    const IOCTL: u64 = 54;
    let mut low = Low::new(len, 0u8)?;
    let mut answer = IOCTL;
    // SAFETY: both have `len` bytes and do not overlap.
    unsafe { ptr::copy_nonoverlapping(argument, low.as_mut_ptr(), len) };
    // SAFETY: the kernel accesses the bytes of the argument that `request` states, and memory that the caller vouches
    // for. The call preserves all registers but rax, and on some kernels r8 to r11. Inline assembly cannot name rbx, so
    // rbx is swapped before and after the call.
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
    // SAFETY: both have `len` bytes and do not overlap.
    unsafe { ptr::copy_nonoverlapping(low.as_ptr(), argument, len) };
    match answer as i32 {
        0.. => Ok(()),
        error => Err(-error),
    }
}

/// An ioctl argument with an array whose element size the caller states, and possibly an array of clients.
pub trait Elements {
    /// The ioctl's number.
    const CALL: u32;
    /// Sets address, count and element size of the array, and those of the clients. Further arrays are set to null.
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

impl Elements for abi::p2pmem_export {
    const CALL: u32 = abi::P2PMEM_IOC_EXPORT_DMABUF;
    fn set(&mut self, elements: (u64, u32, u32), _: (u64, u32, u32)) {
        (self.ranges, self.nr_ranges, self.range_size) = elements;
    }
}

/// Makes an ioctl with `count` elements of `size` bytes.
pub fn with_elements<T: Elements>(
    fd: BorrowedFd<'_>,
    arg: &mut T,
    clients: &mut [abi::p2pmem_pci_addr],
    (size, count): (u32, u32),
    elements: &mut [u8],
) -> SysResult {
    assert!(
        u64::from(size) * u64::from(count) <= elements.len() as u64,
        "the kernel would access memory beyond the argument"
    );
    let known = size_of::<abi::p2pmem_pci_addr>() as u32;
    let clients = (clients.as_mut_ptr() as u64, clients.len() as u32, known);
    arg.set((elements.as_mut_ptr() as u64, count, size), clients);
    raw(fd, T::CALL, arg)
}

/// `EXPORT_DMABUF` with ranges as elements of `size` bytes.
///
/// # Errors
///
/// The errno.
pub fn export_sized(fd: BorrowedFd<'_>, handle: u32, size: u32, ranges: &mut [u8]) -> Result<OwnedFd, i32> {
    let mut arg = abi::p2pmem_export {
        handle,
        ..Default::default()
    };
    let count = ranges.len() as u32 / size.max(1);
    with_elements(fd, &mut arg, &mut [], (size, count), ranges)?;
    // SAFETY: the kernel created the descriptor for this call, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(arg.fd) })
}

/// The bytes of a rule. `struct p2pmem_rule` has no padding.
pub fn rule_bytes(rule: &abi::p2pmem_rule) -> [u8; size_of::<abi::p2pmem_rule>()] {
    // SAFETY: both types have the same size, and the structure has no padding.
    unsafe { std::mem::transmute_copy(rule) }
}

/// `read()` of events with a length of `len` bytes, of which only the first `writable` are writable memory.
///
/// # Errors
///
/// The errno.
pub fn read_guarded(fd: BorrowedFd<'_>, writable: usize, len: usize) -> Result<Vec<abi::p2pmem_event>, i32> {
    const PAGE: usize = 4096;
    assert!(
        writable <= len && len <= PAGE,
        "the kernel would access memory beyond the argument"
    );
    // SAFETY: a new mapping, whose second page is inaccessible; `len` bytes from `at` lie within the mapping. Only the
    // bytes that the kernel wrote into the first page are read as events, and any bytes are a valid event.
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
        let n = libc::read(fd.as_raw_fd(), at, len);
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
pub fn list(fd: BorrowedFd<'_>, list: &mut abi::p2pmem_list, mut out: Memory<'_, abi::p2pmem_provider>) -> SysResult {
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
) -> SysResult {
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
) -> SysResult {
    alloc.req.client_size = size_of::<abi::p2pmem_pci_addr>() as u32;
    alloc.req.clients = clients.address(alloc.req.nr_clients.into());
    raw(fd, abi::P2PMEM_IOC_ALLOC, alloc)
}

/// `RULES`.
pub fn rules(fd: BorrowedFd<'_>, arg: &mut abi::p2pmem_rules, mut rules: Memory<'_, abi::p2pmem_rule>) -> SysResult {
    arg.rule_size = size_of::<abi::p2pmem_rule>() as u32;
    arg.rules = rules.address(arg.count.into());
    raw(fd, abi::P2PMEM_IOC_RULES, arg)
}

/// `STRIPE`.
pub fn stripe(
    fd: BorrowedFd<'_>,
    arg: &mut abi::p2pmem_stripe,
    mut clients: Memory<'_, abi::p2pmem_pci_addr>,
    mut parts: Memory<'_, abi::p2pmem_part>,
) -> SysResult {
    arg.req.client_size = size_of::<abi::p2pmem_pci_addr>() as u32;
    arg.part_size = size_of::<abi::p2pmem_part>() as u32;
    arg.req.clients = clients.address(arg.req.nr_clients.into());
    arg.parts = parts.address(arg.nr_parts.into());
    raw(fd, abi::P2PMEM_IOC_STRIPE, arg)
}

/// Creates a dma-buf of host memory: a udmabuf of a memfd.
///
/// # Errors
///
/// The kernel has no udmabuf, or memory is short.
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
    let mut arg = Create {
        memfd: memory.as_raw_fd() as u32,
        flags: CLOEXEC,
        offset: 0,
        size: len,
    };
    // SAFETY: `Create` is the argument of UDMABUF_CREATE, and has no pointers.
    let answer = unsafe { libc::ioctl(node.as_raw_fd(), CREATE, ptr::from_mut(&mut arg)) };
    result(answer.into()).map_err(io::Error::from_raw_os_error)?;
    // SAFETY: the kernel created the descriptor for this call, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(answer) })
}

/// Runs `work` in a thread with the ids of another user. The raw system calls change the ids of the calling thread
/// alone.
///
/// # Errors
///
/// The errno of the call that failed.
pub fn as_user<T: Send>(uid: u32, gid: u32, groups: &[u32], work: impl FnOnce() -> T + Send) -> Result<T, i32> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: the kernel reads `groups.len()` groups; the other calls take numbers only.
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

/// Moves the calling process, which must have one thread, into a new user namespace.
///
/// # Errors
///
/// The errno.
pub fn enter_user_namespace() -> Result<(), i32> {
    // SAFETY: NEWUSER does not unshare the descriptor table, so descriptors stay the same in all threads.
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
    // SAFETY: the kernel created the descriptor for this call, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(export.fd) })
}

/// `EXPLAIN`.
pub fn explain(
    fd: BorrowedFd<'_>,
    explain: &mut abi::p2pmem_explain,
    mut clients: Memory<'_, abi::p2pmem_pci_addr>,
    mut verdicts: Memory<'_, abi::p2pmem_verdict>,
    mut text: Memory<'_, u8>,
) -> SysResult {
    explain.req.client_size = size_of::<abi::p2pmem_pci_addr>() as u32;
    explain.verdict_size = size_of::<abi::p2pmem_verdict>() as u32;
    explain.req.clients = clients.address(explain.req.nr_clients.into());
    explain.verdicts = verdicts.address(explain.nr_verdicts.into());
    explain.text = text.address(explain.text_len.into());
    raw(fd, abi::P2PMEM_IOC_EXPLAIN, explain)
}

/// `read()` of events with a length of `len` bytes. Returns the events.
///
/// # Errors
///
/// The errno.
pub fn read_events(fd: BorrowedFd<'_>, len: usize) -> Result<Vec<abi::p2pmem_event>, i32> {
    let size = size_of::<abi::p2pmem_event>();
    let mut events = vec![abi::p2pmem_event::default(); len.div_ceil(size)];
    // SAFETY: `events` has at least `len` bytes, and any bytes are a valid event.
    let n = unsafe { libc::read(fd.as_raw_fd(), events.as_mut_ptr().cast(), len) };
    result(n as i64)?;
    events.truncate(n as usize / size);
    Ok(events)
}

/// A mapping, which is unmapped when it is dropped.
#[derive(Debug)]
pub struct Mapping {
    base: *mut u8,
    len: usize,
}

// SAFETY: devices and other processes share the memory anyway, so all accesses are volatile.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of a file at `offset`. `flags` are those of mmap, without `MAP_FIXED`.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn new(fd: BorrowedFd<'_>, offset: u64, len: usize, prot: i32, flags: i32) -> Result<Mapping, i32> {
        assert_eq!(flags & libc::MAP_FIXED, 0);
        // SAFETY: without `MAP_FIXED` the kernel chooses unused addresses.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, fd.as_raw_fd(), offset as i64) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
        }
        Ok(Mapping { base: base.cast(), len })
    }

    /// Maps `len` bytes of a file at `offset` with `MAP_SHARED`, for reading and writing.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn shared(fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Mapping, i32> {
        Mapping::new(fd, offset, len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED)
    }

    /// The start address.
    pub fn address(&self) -> u64 {
        self.base as u64
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether all of the mapping was unmapped.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads the 64-bit word at offset `at`, which must be a multiple of 8.
    pub fn get(&self, at: usize) -> u64 {
        assert!(at % 8 == 0 && at < self.len);
        // SAFETY: the address is within the mapping and aligned.
        unsafe { self.base.add(at).cast::<u64>().read_volatile() }
    }

    /// Writes the 64-bit word at offset `at`, which must be a multiple of 8.
    pub fn set(&self, at: usize, value: u64) {
        assert!(at % 8 == 0 && at < self.len);
        // SAFETY: the address is within the mapping and aligned.
        unsafe { self.base.add(at).cast::<u64>().write_volatile(value) }
    }

    /// Unmaps `len` bytes at offset `at`, which must be the start or the end of the mapping.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn unmap_part(&mut self, at: usize, len: usize) -> SysResult {
        assert!(at % 4096 == 0 && (at == 0 || at + len == self.len) && len <= self.len);
        // SAFETY: the pages belong to this mapping, which no longer covers them after the call.
        result(unsafe { libc::munmap(self.base.add(at).cast(), len) }.into())?;
        if at == 0 {
            // SAFETY: the address is within the mapping, or at its end.
            self.base = unsafe { self.base.add(len) };
        }
        self.len -= len;
        Ok(())
    }

    /// Replaces the mapping with inaccessible anonymous memory: the file is no longer mapped, and the addresses stay in
    /// use.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn vacate(&self) -> SysResult {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: only pages of this mapping are replaced.
        let base = unsafe { libc::mmap(self.base.cast(), self.len, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
        }
        Ok(())
    }

    /// Moves or resizes the mapping by mremap.
    ///
    /// # Errors
    ///
    /// The errno; the mapping is then unchanged.
    pub fn remap(&mut self, len: usize, flags: i32) -> SysResult {
        // SAFETY: the pages belong to this mapping, which covers the new address range after the call.
        let base = unsafe { libc::mremap(self.base.cast(), self.len, len, flags) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
        }
        (self.base, self.len) = (base.cast(), len);
        Ok(())
    }

    /// Changes the protection of the whole mapping.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn protect(&self, prot: i32) -> SysResult {
        self.protect_part(0, self.len, prot)
    }

    /// Changes the protection of `len` bytes at offset `at`.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn protect_part(&self, at: usize, len: usize, prot: i32) -> SysResult {
        assert!(at % 4096 == 0 && at + len <= self.len);
        // SAFETY: the pages belong to this mapping.
        result(unsafe { libc::mprotect(self.base.add(at).cast(), len, prot) }.into())
    }

    /// Replaces `len` bytes at offset `at` with a mapping of a file at `offset`.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn replace_part(&self, at: usize, len: usize, fd: BorrowedFd<'_>, offset: u64) -> SysResult {
        assert!(at % 4096 == 0 && at + len <= self.len);
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: only pages of this mapping are replaced, with the same number of pages.
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

    /// Reads `len` bytes of a file at `offset` into the mapping at offset `at`, by pread.
    ///
    /// # Errors
    ///
    /// Those of pread.
    pub fn fill_from(&self, file: &File, offset: u64, at: usize, len: usize) -> io::Result<usize> {
        assert!(at + len <= self.len);
        // SAFETY: the range is within the mapping.
        let n = unsafe { libc::pread(file.as_raw_fd(), self.base.add(at).cast(), len, offset as i64) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    /// Writes `len` bytes of the mapping at offset `at` to a file at `offset`, by pwrite.
    ///
    /// # Errors
    ///
    /// Those of pwrite.
    pub fn drain_to(&self, file: &File, offset: u64, at: usize, len: usize) -> io::Result<usize> {
        assert!(at + len <= self.len);
        // SAFETY: the range is within the mapping.
        let n = unsafe { libc::pwrite(file.as_raw_fd(), self.base.add(at).cast(), len, offset as i64) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the pages belong to this mapping, and no reference to them is left.
            unsafe { libc::munmap(self.base.cast(), self.len) };
        }
    }
}

/// `ibv_reg_mr()` of any address range, with local write, remote write and remote read access.
///
/// # Errors
///
/// The errno.
pub fn register(pd: &Arc<ProtectionDomain>, address: u64, len: usize) -> Result<Arc<MemoryRegion>, i32> {
    let access = AccessFlags::LocalWrite | AccessFlags::RemoteWrite | AccessFlags::RemoteRead;
    // SAFETY: the registration itself does not access memory of the program. RDMA NICs later write device memory only,
    // which tests access with volatile accesses; no test sends to a registration of other memory.
    unsafe { pd.reg_mr(address as usize, len, access) }
        .map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

/// Posts an RDMA WRITE of `len` bytes at `address`, which must be in the registration with key `lkey`.
///
/// # Errors
///
/// The work request cannot be posted.
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
    // SAFETY: `lkey` is the key of a registration, so the RDMA NIC reads memory of that registration only.
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
    // SAFETY: the kernel passes a valid structure, and SIGBUS has an address.
    let page = (unsafe { (*info).si_addr() } as usize & !4095) as *mut libc::c_void;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: only the page that raised SIGBUS is replaced; mmap is a system call, which a signal handler may make.
    let put = unsafe { libc::mmap(page, 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if put == libc::MAP_FAILED {
        // SAFETY: _exit ends the process, because the access would fault again without end.
        unsafe { libc::_exit(99) };
    }
}

/// Installs a handler of SIGBUS, which counts the signal and replaces the page with a page of zeros.
///
/// # Errors
///
/// Those of sigaction.
pub fn survive_bus_errors() -> io::Result<()> {
    // SAFETY: a sigaction of zeros is valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_bus_error as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler makes only calls that a signal handler may make.
    match unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Forks a child that runs `child` and exits with its result. Returns the wait status of the child.
///
/// # Errors
///
/// Those of fork and waitpid.
pub fn in_child(child: impl FnOnce() -> i32) -> io::Result<i32> {
    spawn_child(child)?.wait()
}

/// Sets `RLIMIT_CPU`: the kernel kills the calling process after `seconds` of processor time.
///
/// # Errors
///
/// Those of setrlimit.
pub fn limit_processor_time(seconds: u64) -> io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: seconds,
        rlim_max: seconds,
    };
    // SAFETY: `limit` is a valid structure.
    match unsafe { libc::setrlimit(libc::RLIMIT_CPU, &limit) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A forked child process. The parent must wait for it.
#[must_use]
pub struct ForkedChild(libc::pid_t);

impl ForkedChild {
    /// Waits until the child ends. Returns its wait status.
    ///
    /// # Errors
    ///
    /// Those of waitpid.
    pub fn wait(self) -> io::Result<i32> {
        let mut status = 0;
        // SAFETY: `status` is valid for writes.
        if unsafe { libc::waitpid(self.0, &mut status, 0) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(status)
    }
}

/// Forks a child that runs `child` and exits with its result. The parent drops `child` and the values it owns.
///
/// # Errors
///
/// Those of fork.
pub fn spawn_child(child: impl FnOnce() -> i32) -> io::Result<ForkedChild> {
    // SAFETY: callers are single-threaded when they fork, so the child may call any function.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let code = child();
            // SAFETY: _exit ends the child without the destructors of the parent.
            unsafe { libc::_exit(code) }
        }
        pid => Ok(ForkedChild(pid)),
    }
}
