// SPDX-License-Identifier: MIT OR Apache-2.0

//! The part of libibverbs' ABI that registering memory takes: heads of three structures, types of its functions, and
//! access flags.
//!
//! It links to nothing. Who uses it finds the functions at run time, by the names in [`name`]: so a program that has no
//! use for RDMA runs where libibverbs is not installed, and a shim gets at the functions that it stands before.
//!
//! All of it is the stable ABI of `libibverbs.so.1`, symbol versions `IBVERBS_1.1` to `IBVERBS_1.12`. A test compares it
//! with `infiniband/verbs.h`.
#![no_std]
#![allow(non_camel_case_types)]

use core::ffi::{c_char, c_int, c_uint, c_void, CStr};

/// The library's name for `dlopen()`.
pub const LIBRARY: &CStr = c"libibverbs.so.1";

/// An open NIC. Only its head is here.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_context {
    /// `struct ibv_device *`
    pub device: *mut c_void,
}

/// A protection domain.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_pd {
    /// The NIC it belongs to.
    pub context: *mut ibv_context,
    /// The kernel's number for it.
    pub handle: u32,
}

/// A memory region: registered memory.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_mr {
    /// The NIC it belongs to.
    pub context: *mut ibv_context,
    /// The protection domain it was registered in.
    pub pd: *mut ibv_pd,
    /// What the program called its start.
    pub addr: *mut c_void,
    /// Its length in bytes.
    pub length: usize,
    /// The kernel's number for it.
    pub handle: u32,
    /// Key for work requests of this side.
    pub lkey: u32,
    /// Key for work requests of the other side.
    pub rkey: u32,
}

/// Flags of `enum ibv_access_flags`.
pub mod access {
    /// The NIC may write there (receives, answers to RDMA READ).
    pub const LOCAL_WRITE: u32 = 1;
    /// The other side may RDMA WRITE.
    pub const REMOTE_WRITE: u32 = 1 << 1;
    /// The other side may RDMA READ.
    pub const REMOTE_READ: u32 = 1 << 2;
    /// The other side may use atomics.
    pub const REMOTE_ATOMIC: u32 = 1 << 3;
    /// Memory windows may be bound to it.
    pub const MW_BIND: u32 = 1 << 4;
    /// Writes may arrive in another order than they were sent in.
    pub const RELAXED_ORDERING: u32 = 1 << 20;
    /// Flags that a NIC may ignore, which is why older kernels may never have heard of them.
    pub const OPTIONAL_RANGE: u32 = 0x3ff0_0000;
}

/// Names of the functions, for `dlsym()`.
pub mod name {
    use core::ffi::CStr;

    /// [`ibv_get_device_name`](crate::ibv_get_device_name)
    pub const GET_DEVICE_NAME: &CStr = c"ibv_get_device_name";
    /// [`ibv_get_device_list`](crate::ibv_get_device_list)
    pub const GET_DEVICE_LIST: &CStr = c"ibv_get_device_list";
    /// [`ibv_free_device_list`](crate::ibv_free_device_list)
    pub const FREE_DEVICE_LIST: &CStr = c"ibv_free_device_list";
    /// [`ibv_open_device`](crate::ibv_open_device)
    pub const OPEN_DEVICE: &CStr = c"ibv_open_device";
    /// [`ibv_close_device`](crate::ibv_close_device)
    pub const CLOSE_DEVICE: &CStr = c"ibv_close_device";
    /// [`ibv_alloc_pd`](crate::ibv_alloc_pd)
    pub const ALLOC_PD: &CStr = c"ibv_alloc_pd";
    /// [`ibv_dealloc_pd`](crate::ibv_dealloc_pd)
    pub const DEALLOC_PD: &CStr = c"ibv_dealloc_pd";
    /// [`ibv_reg_mr`](crate::ibv_reg_mr)
    pub const REG_MR: &CStr = c"ibv_reg_mr";
    /// [`ibv_reg_mr_iova`](crate::ibv_reg_mr_iova)
    pub const REG_MR_IOVA: &CStr = c"ibv_reg_mr_iova";
    /// [`ibv_reg_mr_iova2`](crate::ibv_reg_mr_iova2)
    pub const REG_MR_IOVA2: &CStr = c"ibv_reg_mr_iova2";
    /// [`ibv_reg_dmabuf_mr`](crate::ibv_reg_dmabuf_mr)
    pub const REG_DMABUF_MR: &CStr = c"ibv_reg_dmabuf_mr";
    /// [`ibv_rereg_mr`](crate::ibv_rereg_mr)
    pub const REREG_MR: &CStr = c"ibv_rereg_mr";
    /// [`ibv_dereg_mr`](crate::ibv_dereg_mr)
    pub const DEREG_MR: &CStr = c"ibv_dereg_mr";
}

/// Name of a NIC, as `mlx5_0`.
pub type ibv_get_device_name = unsafe extern "C" fn(device: *mut c_void) -> *const c_char;
/// All NICs, and their number. Null and `errno` where it fails.
pub type ibv_get_device_list = unsafe extern "C" fn(number: *mut c_int) -> *mut *mut c_void;
/// Gives the list back; NICs opened from it stay open.
pub type ibv_free_device_list = unsafe extern "C" fn(list: *mut *mut c_void);
/// Opens a NIC of the list. Null and `errno` where it fails.
pub type ibv_open_device = unsafe extern "C" fn(device: *mut c_void) -> *mut ibv_context;
/// Closes a NIC. 0 or -1 and `errno`.
pub type ibv_close_device = unsafe extern "C" fn(context: *mut ibv_context) -> c_int;
/// Makes a protection domain. Null and `errno` where it fails.
pub type ibv_alloc_pd = unsafe extern "C" fn(context: *mut ibv_context) -> *mut ibv_pd;
/// Ends a protection domain. 0 or an errno.
pub type ibv_dealloc_pd = unsafe extern "C" fn(pd: *mut ibv_pd) -> c_int;
/// Registers memory of the program. Null and `errno` where it fails.
pub type ibv_reg_mr =
    unsafe extern "C" fn(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr;
/// As [`ibv_reg_mr`], for work requests to name its start `iova`.
pub type ibv_reg_mr_iova =
    unsafe extern "C" fn(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_int) -> *mut ibv_mr;
/// As [`ibv_reg_mr_iova`]; it drops optional access flags that the kernel does not know.
pub type ibv_reg_mr_iova2 =
    unsafe extern "C" fn(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_uint) -> *mut ibv_mr;
/// Registers `length` bytes of a dma-buf from `offset` on.
pub type ibv_reg_dmabuf_mr = unsafe extern "C" fn(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr;
/// Changes a registration. 0, or one of the negative `IBV_REREG_MR_ERR_*`.
pub type ibv_rereg_mr = unsafe extern "C" fn(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int;
/// Ends a registration. 0 or an errno.
pub type ibv_dereg_mr = unsafe extern "C" fn(mr: *mut ibv_mr) -> c_int;

/// `IBV_REREG_MR_ERR_INPUT`: refused before anything was changed.
pub const IBV_REREG_MR_ERR_INPUT: c_int = -1;
