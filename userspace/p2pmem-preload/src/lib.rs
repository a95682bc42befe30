// SPDX-License-Identifier: MIT OR Apache-2.0

//! `libp2pmem_preload.so`: a preloaded library that lets unmodified RDMA programs register mapped p2pmem memory, and that
//! places the mappings of unmodified programs near devices.
//!
//! ```text
//! LD_PRELOAD=libp2pmem_preload.so ib_write_bw --mmap=/dev/p2pmem
//! ```
//!
//! A stock kernel's RDMA core does not register device memory by its addresses: `ibv_reg_mr()` on a mapping of
//! /dev/p2pmem fails. This library replaces `ibv_reg_mr()`, `ibv_reg_mr_iova()`, and `ibv_reg_mr_iova2()`. The module
//! exports the memory at these addresses as a dma-buf, and the library registers the dma-buf with
//! `ibv_reg_dmabuf_mr()`. The program sees a successful call. For memory that is not p2pmem memory, the library calls
//! the real function with the same arguments. `ibv_rereg_mr()` of p2pmem memory fails; `ibv_dereg_mr()` works.
//!
//! With `P2PMEM_NEAR` in the environment, a mapping of /dev/p2pmem at offset 0 gets memory near the devices in this
//! variable, and fails if there is none. `p2pmemctl run` sets this variable, and `P2PMEM_REPORT` to learn what its command
//! took.
//!
//! Besides these variables and the counters that `p2pmemctl run` reads, the library has no state: no list of regions, no open
//! file, no lock. The dma-buf lives as long as the region. So any number of threads may map and register, and a child after
//! `fork()` starts like any other process. After the start of the program, the library allocates memory only to find the
//! reason of an error. The dynamic loader may allocate memory when the library asks which libibverbs a call belongs to.
//!
//! If registering p2pmem memory fails, the library writes the reason to standard error, in one line, and keeps the errno of
//! the module or of the NIC's driver. With `P2PMEM_PRELOAD_LOG=1` in the environment it also reports successful
//! registrations and mappings.
//!
//! It has no effect on programs that find libibverbs' functions by `dlsym()` on the library itself, or that are statically
//! linked to libibverbs.

mod clients;
mod line;
mod place;
mod summary;
mod sys;

use p2pmem_near::{Refused, Registered};
use p2pmem_verbs_sys::access::{
    LOCAL_WRITE, OPTIONAL_RANGE, RELAXED_ORDERING, REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE,
};

use crate::line::say;
use crate::sys::{Device, Domain, Errno, Region};

/// Access flags that the kernel accepts for dma-bufs.
const POSSIBLE: u32 = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC | RELAXED_ORDERING;

/// Arguments of a registration by the program.
#[derive(Debug, Clone, Copy)]
struct Call {
    /// Name of the function.
    name: &'static str,
    addr: u64,
    length: usize,
    /// Address of the first byte in work requests.
    iova: u64,
    access: u32,
}

/// Returns the pages that contain `length` bytes at `addr`: start and size. `None` for zero bytes, and for a range that
/// exceeds the address space, such as a program's request for all memory.
fn pages(addr: u64, length: usize, page: u64) -> Option<(u64, u64)> {
    let length = u64::try_from(length).ok().filter(|length| *length > 0)?;
    let start = addr - addr % page;
    let end = addr.checked_add(length)?.checked_next_multiple_of(page)?;
    Some((start, end - start))
}

/// Registers p2pmem memory, and counts the registration for the summary. Returns `None` for other memory, which the caller
/// passes to the real function.
fn register(call: &Call, domain: Domain) -> Option<Result<Region, Errno>> {
    let result = register_p2pmem(call, domain);
    match &result {
        Some(Ok(_)) => summary::registration(Registered::Dmabuf, call.length),
        Some(Err(_)) => summary::refused(Refused::Registration),
        None => {}
    }
    result
}

fn register_p2pmem(call: &Call, domain: Domain) -> Option<Result<Region, Errno>> {
    let (start, size) = pages(call.addr, call.length, sys::page_size())?;
    // Without access to the device file, the process either has no p2pmem mapping, or received one from another
    // process. A stock kernel rejects this mapping, and explain_failure() then reports the reason.
    let device = Device::open().ok()?;
    let dmabuf = match device.export(start, size) {
        Ok(dmabuf) => dmabuf,
        // Not p2pmem memory, or a module without this export.
        Err(Errno(libc::ENOENT | libc::ENOTTY)) => return None,
        Err(errno) => {
            let mut reason = [0; line::MAX_LINE];
            let reason = device.reason(errno, &mut reason);
            say!("{call} on {domain}: cannot be exported: {errno}{reason}");
            return Some(Err(errno));
        }
    };
    let access = call.access & !(OPTIONAL_RANGE & !RELAXED_ORDERING);
    if access & !POSSIBLE != 0 {
        let impossible = access & !POSSIBLE;
        say!("{call} on {domain}: access flags {impossible:#x} are not possible for device memory");
        return Some(Err(Errno(libc::EINVAL)));
    }
    match domain.reg_dmabuf(&dmabuf, call.addr - start, call, access) {
        Ok(region) => {
            if line::log_success() {
                say!("{call} on {domain}: registered as a dma-buf, {region}");
            }
            Some(Ok(region))
        }
        Err(errno) => {
            let mut reason = [0; line::MAX_LINE];
            let reason = match (device.reason(errno, &mut reason), errno) {
                ("", Errno(libc::EOPNOTSUPP | line::ENOTSUPP)) => ": the NIC's driver cannot register dma-bufs",
                ("", Errno(libc::ENOSYS)) => ": libibverbs does not support dma-bufs: install rdma-core 34 or later",
                (reason, _) => reason,
            };
            say!("{call} on {domain}: dma-buf registration failed: {errno}{reason}");
            Some(Err(errno))
        }
    }
}

/// Reports why the real function failed, if the reason concerns p2pmem memory.
fn explain_failure(call: &Call, domain: Domain) {
    let page = sys::page_size();
    let Some((start, _)) = pages(call.addr, call.length, page) else {
        return;
    };
    match Device::open() {
        Ok(device) if device.export(start, page).is_ok() => {
            say!("{call} on {domain}: the range starts in p2pmem memory and ends in other memory");
        }
        Err(Errno(libc::EACCES | libc::EPERM)) if sys::is_p2pmem_mapping(start) => {
            say!("{call} on {domain}: this user has no access to /dev/p2pmem");
        }
        _ => {}
    }
}

/// Returns whether a range is p2pmem memory.
fn is_p2pmem(addr: u64, length: usize) -> bool {
    let Some((start, size)) = pages(addr, length, sys::page_size()) else {
        return false;
    };
    Device::open().is_ok_and(|device| device.export(start, size).is_ok())
}

/// Reports and returns whether ibv_rereg_mr() is rejected: for a region of p2pmem memory, or a move to p2pmem memory.
fn rereg_is_refused(old: (u64, usize), new: Option<(u64, usize)>, domain: Domain) -> bool {
    let ours = [Some(old), new]
        .into_iter()
        .flatten()
        .find(|(addr, length)| is_p2pmem(*addr, *length));
    let Some((addr, length)) = ours else {
        return false;
    };
    say!(
        "ibv_rereg_mr() on {domain}: {length} bytes at {addr:#x} are p2pmem memory, and its regions cannot be changed: \
         deregister the region, and register the memory again"
    );
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_cover_the_bytes_and_never_wrap() {
        assert_eq!(pages(0x1000, 1, 4096), Some((0x1000, 4096)));
        assert_eq!(pages(0x1fff, 1, 4096), Some((0x1000, 4096)));
        assert_eq!(pages(0x1fff, 2, 4096), Some((0x1000, 8192)));
        assert_eq!(pages(0x1000, 8192, 4096), Some((0x1000, 8192)));
        assert_eq!(pages(0x1000, 0, 4096), None);
        assert_eq!(pages(0, usize::MAX, 4096), None, "all memory");
        assert_eq!(pages(u64::MAX - 4096, 4097, 4096), None);
        assert_eq!(pages(u64::MAX - 8191, 4096, 4096), Some((u64::MAX - 8191, 4096)));
    }
}
