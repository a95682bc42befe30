// SPDX-License-Identifier: MIT OR Apache-2.0

//! Ioctl numbers, computed from the argument types as in `<linux/ioctl.h>`.

use crate::{
    p2pmem_alloc, p2pmem_attach, p2pmem_attachment, p2pmem_buffer, p2pmem_detach, p2pmem_explain, p2pmem_export,
    p2pmem_free, p2pmem_import, p2pmem_info, p2pmem_list, p2pmem_paths, p2pmem_rules, p2pmem_stats, p2pmem_stripe,
    P2PMEM_IOC_MAGIC,
};

/// Layout of an ioctl number: widths of its fields, and codes of its directions.
///
/// Most architectures share one layout. These architectures have a layout of their own, in
/// `arch/*/include/uapi/asm/ioctl.h`.
#[cfg(any(
    target_arch = "mips",
    target_arch = "mips64",
    target_arch = "powerpc",
    target_arch = "powerpc64",
    target_arch = "sparc",
    target_arch = "sparc64"
))]
mod arch {
    pub const SIZE_BITS: u32 = 13;
    pub const READ: u32 = 2;
    pub const WRITE: u32 = 4;
}

#[cfg(not(any(
    target_arch = "mips",
    target_arch = "mips64",
    target_arch = "powerpc",
    target_arch = "powerpc64",
    target_arch = "sparc",
    target_arch = "sparc64"
)))]
mod arch {
    pub const SIZE_BITS: u32 = 14;
    pub const READ: u32 = 2;
    pub const WRITE: u32 = 1;
}

const TYPE_SHIFT: u32 = 8;
const SIZE_SHIFT: u32 = 16;
const DIR_SHIFT: u32 = SIZE_SHIFT + arch::SIZE_BITS;
const SIZE_MASK: u32 = (1 << arch::SIZE_BITS) - 1;

/// Returns the number of an ioctl with an argument of type `T`. Does not compile for a size that does not fit.
const fn ioc<T>(dir: u32, nr: u32) -> u32 {
    let size = size_of::<T>();
    assert!(
        size > 0 && size <= SIZE_MASK as usize,
        "argument does not fit into an ioctl number"
    );
    assert!(nr < 1 << TYPE_SHIFT, "ioctl number out of range");
    (dir << DIR_SHIFT) | ((size as u32) << SIZE_SHIFT) | (P2PMEM_IOC_MAGIC << TYPE_SHIFT) | nr
}

/// Returns the size of the argument in bytes, from the ioctl number `request`.
pub const fn ioc_size(request: u32) -> u32 {
    (request >> SIZE_SHIFT) & SIZE_MASK
}

/// Returns the number of `request` among this device's ioctls.
pub const fn ioc_nr(request: u32) -> u32 {
    request & 0xff
}

/// Returns whether the kernel reads the caller's structure of `request`, and not only writes it.
pub const fn ioc_reads(request: u32) -> bool {
    (request >> DIR_SHIFT) & arch::WRITE != 0
}

/// Get version, features and totals of the module: [`p2pmem_info`].
pub const P2PMEM_IOC_INFO: u32 = ioc::<p2pmem_info>(arch::READ, 0x00);
/// List the providers: [`p2pmem_list`].
pub const P2PMEM_IOC_LIST: u32 = ioc::<p2pmem_list>(arch::READ | arch::WRITE, 0x01);
/// Get the matrix of paths between providers and clients: [`p2pmem_paths`].
pub const P2PMEM_IOC_PATHS: u32 = ioc::<p2pmem_paths>(arch::READ | arch::WRITE, 0x02);
/// Allocate a buffer: [`p2pmem_alloc`].
pub const P2PMEM_IOC_ALLOC: u32 = ioc::<p2pmem_alloc>(arch::READ | arch::WRITE, 0x03);
/// End a buffer's handle: [`p2pmem_free`].
pub const P2PMEM_IOC_FREE: u32 = ioc::<p2pmem_free>(arch::WRITE, 0x04);
/// Get the state of a buffer: [`p2pmem_buffer`].
pub const P2PMEM_IOC_BUFFER: u32 = ioc::<p2pmem_buffer>(arch::READ | arch::WRITE, 0x05);
/// Explain a decision: [`p2pmem_explain`].
pub const P2PMEM_IOC_EXPLAIN: u32 = ioc::<p2pmem_explain>(arch::READ | arch::WRITE, 0x06);
/// Get counters: [`p2pmem_stats`].
pub const P2PMEM_IOC_STATS: u32 = ioc::<p2pmem_stats>(arch::READ | arch::WRITE, 0x07);
/// Export parts of a buffer as a dma-buf: [`p2pmem_export`].
pub const P2PMEM_IOC_EXPORT_DMABUF: u32 = ioc::<p2pmem_export>(arch::READ | arch::WRITE, 0x08);
/// Replace the file's own rules: [`p2pmem_rules`].
pub const P2PMEM_IOC_RULES: u32 = ioc::<p2pmem_rules>(arch::WRITE, 0x09);
/// Create a handle from a dma-buf of a whole buffer: [`p2pmem_import`].
pub const P2PMEM_IOC_IMPORT: u32 = ioc::<p2pmem_import>(arch::READ | arch::WRITE, 0x0a);
/// Allocate a stripe over several providers: [`p2pmem_stripe`].
pub const P2PMEM_IOC_STRIPE: u32 = ioc::<p2pmem_stripe>(arch::READ | arch::WRITE, 0x0b);
/// Attach the function of an own provider to a dma-buf: [`p2pmem_attach`].
pub const P2PMEM_IOC_ATTACH_DMABUF: u32 = ioc::<p2pmem_attach>(arch::READ | arch::WRITE, 0x0c);
/// End an attachment: [`p2pmem_detach`].
pub const P2PMEM_IOC_DETACH_DMABUF: u32 = ioc::<p2pmem_detach>(arch::WRITE, 0x0d);
/// Get the state of an attachment: [`p2pmem_attachment`].
pub const P2PMEM_IOC_ATTACHMENT: u32 = ioc::<p2pmem_attachment>(arch::READ | arch::WRITE, 0x0e);

/// All ioctl numbers, in ascending order of [`ioc_nr`].
pub const P2PMEM_IOCS: [u32; 15] = [
    P2PMEM_IOC_INFO,
    P2PMEM_IOC_LIST,
    P2PMEM_IOC_PATHS,
    P2PMEM_IOC_ALLOC,
    P2PMEM_IOC_FREE,
    P2PMEM_IOC_BUFFER,
    P2PMEM_IOC_EXPLAIN,
    P2PMEM_IOC_STATS,
    P2PMEM_IOC_EXPORT_DMABUF,
    P2PMEM_IOC_RULES,
    P2PMEM_IOC_IMPORT,
    P2PMEM_IOC_STRIPE,
    P2PMEM_IOC_ATTACH_DMABUF,
    P2PMEM_IOC_DETACH_DMABUF,
    P2PMEM_IOC_ATTACHMENT,
];

const _: () = {
    let mut i = 0;
    while i < P2PMEM_IOCS.len() {
        assert!(ioc_nr(P2PMEM_IOCS[i]) as usize == i, "ioctl numbers are not contiguous");
        i += 1;
    }
};
