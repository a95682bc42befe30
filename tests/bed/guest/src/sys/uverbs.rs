// SPDX-License-Identifier: MIT OR Apache-2.0

//! The ioctl interface of RDMA adapters (`rdma/rdma_user_ioctl_cmds.h`), for what libibverbs does not wrap: doorbell pages
//! (UARs) of mlx5, and their dma-bufs.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use sideway::ibverbs::protection_domain::ProtectionDomain;

use super::{Answer, duplicate, result};

/// `RDMA_VERBS_IOCTL`
const VERBS_IOCTL: u64 = 0xc018_1b01;
/// `UVERBS_ATTR_F_MANDATORY`
const MANDATORY: u16 = 1;
/// `RDMA_DRIVER_MLX5`
const MLX5: u32 = 1;
/// The first number of a driver's own objects, methods and attributes.
const DRIVER: u16 = 1 << 12;
/// `MLX5_IB_OBJECT_UAR`
const UAR: u16 = DRIVER + 8;
/// `UVERBS_OBJECT_DMABUF`
const DMA_BUF: u16 = 18;
/// `MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC`: not write-combining.
const NC: u64 = 1;

/// `struct ib_uverbs_attr`
#[repr(C)]
#[derive(Clone, Copy)]
struct Attribute {
    id: u16,
    len: u16,
    flags: u16,
    reserved: u16,
    data: u64,
}

/// `struct ib_uverbs_ioctl_hdr` with its attributes.
#[repr(C)]
struct Call<const N: usize> {
    length: u16,
    object: u16,
    method: u16,
    count: u16,
    reserved1: u64,
    driver: u32,
    reserved2: u32,
    attributes: [Attribute; N],
}

/// An attribute whose value is in `data`: a number of up to eight bytes, or with `len` 0 an object.
fn value(id: u16, len: u16, data: u64) -> Attribute {
    Attribute {
        id,
        len,
        flags: MANDATORY,
        reserved: 0,
        data,
    }
}

/// An attribute that the kernel writes.
fn output<T>(id: u16, to: &mut T) -> Attribute {
    value(id, size_of::<T>() as u16, ptr::from_mut(to) as u64)
}

/// An open adapter.
#[derive(Debug)]
pub struct Uverbs(OwnedFd);

/// A doorbell page.
#[derive(Debug)]
pub struct Uar {
    handle: u32,
    /// The offset at which the page is mapped.
    mmap_offset: u64,
}

impl Uverbs {
    /// Uses the descriptor of an open adapter.
    ///
    /// # Errors
    ///
    /// The errno, if the process has no free descriptor.
    pub fn of(pd: &ProtectionDomain) -> Result<Uverbs, i32> {
        // SAFETY: the domain lives during the call, and keeps its context open.
        let fd = unsafe { (*pd.pd().as_ref().context).cmd_fd };
        duplicate(fd).map(Uverbs)
    }

    /// Calls a method. The attributes hold the outputs afterwards.
    fn call<const N: usize>(
        &self,
        object: u16,
        method: u16,
        attributes: [Attribute; N],
    ) -> Result<[Attribute; N], i32> {
        let mut call = Call {
            length: size_of::<Call<N>>() as u16,
            object,
            method,
            count: N as u16,
            reserved1: 0,
            driver: MLX5,
            reserved2: 0,
            attributes,
        };
        // SAFETY: the kernel touches as many bytes as `length` says, and those of outputs, which `output` made of references.
        result(unsafe { libc::ioctl(self.0.as_raw_fd(), VERBS_IOCTL, ptr::from_mut(&mut call)) }.into())?;
        Ok(call.attributes)
    }

    /// Allocates a doorbell page.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn alloc_uar(&self) -> Result<Uar, i32> {
        let (mut mmap_offset, mut length, mut page) = (0_u64, 0_u32, 0_u32);
        let attributes = [
            value(DRIVER, 0, 0),
            value(DRIVER + 1, 8, NC),
            output(DRIVER + 2, &mut mmap_offset),
            output(DRIVER + 3, &mut length),
            output(DRIVER + 4, &mut page),
        ];
        let [object, ..] = self.call(UAR, DRIVER, attributes)?;
        Ok(Uar {
            handle: object.data as u32,
            mmap_offset,
        })
    }

    /// Destroys a doorbell page. The kernel revokes its dma-bufs.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn destroy_uar(&self, uar: &Uar) -> Answer {
        self.call(UAR, DRIVER + 1, [value(DRIVER, 0, uar.handle.into())])
            .map(drop)
    }

    /// Returns a dma-buf of a doorbell page.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn dma_buf(&self, uar: &Uar) -> Result<OwnedFd, i32> {
        let attributes = [value(0, 0, 0), value(1, 8, uar.mmap_offset)];
        let [made, _] = self.call(DMA_BUF, 0, attributes)?;
        // SAFETY: the kernel made this descriptor for this call alone.
        Ok(unsafe { OwnedFd::from_raw_fd(made.data as RawFd) })
    }
}
