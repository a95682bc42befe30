// SPDX-License-Identifier: MIT OR Apache-2.0

//! The part of libibverbs' ABI for registering memory: the first fields of three structures, function types, and access
//! flags.
//!
//! The crate does not link to libibverbs. Its users look the functions up at run time by the names in [`name`]. So a
//! program that does not use RDMA runs without libibverbs, and a preload shim can call the functions that it replaces.
//!
//! All of this is the stable ABI of `libibverbs.so.1`, symbol versions `IBVERBS_1.1` to `IBVERBS_1.12`. A test compares
//! the crate with `infiniband/verbs.h`.
//!
//! ```
//! let mask = p2pmem_verbs_sys::access::LOCAL_WRITE | p2pmem_verbs_sys::access::REMOTE_READ;
//! assert_eq!(mask, 5);
//! ```
#![no_std]
#![allow(non_camel_case_types)]

use core::ffi::{c_char, c_int, c_uint, c_void, CStr};

/// File name of the library, for `dlopen()`.
pub const LIBRARY: &CStr = c"libibverbs.so.1";

/// An open NIC. Only the first fields are here.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_context {
    /// `struct ibv_device *`
    pub device: *mut c_void,
    /// Functions that calls of a program do not use.
    unused: [*mut c_void; 11],
    /// The function that polls a completion queue, in the library of the NIC's driver.
    pub poll_cq: *mut c_void,
}

/// A protection domain.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_pd {
    /// The NIC.
    pub context: *mut ibv_context,
    /// Number of the object in the kernel.
    pub handle: u32,
}

/// A memory region: registered memory.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_mr {
    /// The NIC.
    pub context: *mut ibv_context,
    /// The protection domain.
    pub pd: *mut ibv_pd,
    /// Address of the memory in the program.
    pub addr: *mut c_void,
    /// Length in bytes.
    pub length: usize,
    /// Number of the object in the kernel.
    pub handle: u32,
    /// Key for local work requests.
    pub lkey: u32,
    /// Key for work requests of the remote side.
    pub rkey: u32,
}

/// Flags of `enum ibv_access_flags`.
pub mod access {
    /// The local NIC may write: receives, responses to RDMA READ.
    pub const LOCAL_WRITE: u32 = 1;
    /// The remote side may RDMA WRITE.
    pub const REMOTE_WRITE: u32 = 1 << 1;
    /// The remote side may RDMA READ.
    pub const REMOTE_READ: u32 = 1 << 2;
    /// The remote side may use atomics.
    pub const REMOTE_ATOMIC: u32 = 1 << 3;
    /// Memory windows may be bound to the region.
    pub const MW_BIND: u32 = 1 << 4;
    /// Writes may arrive in another order than they were sent in.
    pub const RELAXED_ORDERING: u32 = 1 << 20;
    /// Mask of optional flags. A NIC may ignore them, so a kernel that does not know them can accept the rest.
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

/// Returns the name of a NIC, such as `mlx5_0`.
pub type ibv_get_device_name = unsafe extern "C" fn(device: *mut c_void) -> *const c_char;
/// Returns all NICs and sets their number. Returns null and sets `errno` on failure.
pub type ibv_get_device_list = unsafe extern "C" fn(number: *mut c_int) -> *mut *mut c_void;
/// Frees the list. NICs that were opened from it stay open.
pub type ibv_free_device_list = unsafe extern "C" fn(list: *mut *mut c_void);
/// Opens a NIC of the list. Returns null and sets `errno` on failure.
pub type ibv_open_device = unsafe extern "C" fn(device: *mut c_void) -> *mut ibv_context;
/// Closes a NIC. Returns 0, or -1 and sets `errno`.
pub type ibv_close_device = unsafe extern "C" fn(context: *mut ibv_context) -> c_int;
/// Creates a protection domain. Returns null and sets `errno` on failure.
pub type ibv_alloc_pd = unsafe extern "C" fn(context: *mut ibv_context) -> *mut ibv_pd;
/// Deallocates a protection domain. Returns 0 or an errno.
pub type ibv_dealloc_pd = unsafe extern "C" fn(pd: *mut ibv_pd) -> c_int;
/// Registers memory of the program. Returns null and sets `errno` on failure.
pub type ibv_reg_mr =
    unsafe extern "C" fn(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr;
/// As [`ibv_reg_mr`], with the address `iova` of the first byte in work requests.
pub type ibv_reg_mr_iova =
    unsafe extern "C" fn(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_int) -> *mut ibv_mr;
/// As [`ibv_reg_mr_iova`]. Drops optional access flags that the kernel does not know.
pub type ibv_reg_mr_iova2 =
    unsafe extern "C" fn(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_uint) -> *mut ibv_mr;
/// Registers `length` bytes of a dma-buf from `offset` on. Returns null and sets `errno` on failure.
pub type ibv_reg_dmabuf_mr = unsafe extern "C" fn(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr;
/// Changes a registration. Returns 0, or a negative `IBV_REREG_MR_ERR_*`.
pub type ibv_rereg_mr = unsafe extern "C" fn(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int;
/// Deregisters memory. Returns 0 or an errno.
pub type ibv_dereg_mr = unsafe extern "C" fn(mr: *mut ibv_mr) -> c_int;

/// `IBV_REREG_MR_ERR_INPUT`: the call was refused before anything was changed.
pub const IBV_REREG_MR_ERR_INPUT: c_int = -1;
