// SPDX-License-Identifier: MIT OR Apache-2.0

//! The structures and constants of `ucp/api/ucp.h` that the crate passes to UCX, as of UCX 1.18.
//!
//! UCX reads only the members that a structure's mask names, so members that later versions append change nothing.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `ucs_status_t`: an enumeration of one byte.
pub(crate) type Status = i8;
/// `UCS_OK`.
pub(crate) const OK: Status = 0;
/// `UCS_INPROGRESS`.
pub(crate) const IN_PROGRESS: Status = 1;
/// `UCS_ERR_BUSY`.
pub(crate) const ERR_BUSY: Status = -15;
/// `UCS_ERR_LAST`: the smallest status.
pub(crate) const ERR_LAST: Status = -100;

/// `ucs_status_ptr_t`: null for success, a status, or a request.
pub(crate) type StatusPointer = *mut c_void;
/// `ucp_context_h`, `ucp_worker_h`, `ucp_ep_h`, `ucp_mem_h`, `ucp_rkey_h`, `ucp_config_t *`, `ucp_address_t *`.
pub(crate) type Handle = *mut c_void;

pub(crate) const PARAM_FEATURES: u64 = 1;
pub(crate) const FEATURE_RMA: u64 = 1 << 1;
pub(crate) const FEATURE_WAKEUP: u64 = 1 << 4;
pub(crate) const WORKER_PARAM_THREAD_MODE: u64 = 1;
/// `UCS_THREAD_MODE_SERIALIZED`: one thread at a time.
pub(crate) const THREAD_MODE_SERIALIZED: c_int = 1;
pub(crate) const MEM_MAP_PARAM_ADDRESS: u64 = 1;
pub(crate) const MEM_MAP_PARAM_LENGTH: u64 = 1 << 1;
pub(crate) const MEM_MAP_PARAM_MEMORY_TYPE: u64 = 1 << 4;
/// `UCS_MEMORY_TYPE_HOST`: memory that the processor can access by its address.
pub(crate) const MEMORY_TYPE_HOST: c_int = 0;
pub(crate) const EP_PARAM_REMOTE_ADDRESS: u64 = 1;
pub(crate) const EP_PARAM_ERR_HANDLING_MODE: u64 = 1 << 1;
pub(crate) const EP_PARAM_ERR_HANDLER: u64 = 1 << 2;
/// `UCP_ERR_HANDLING_MODE_PEER`: errors of the other node end its endpoint, not the process.
pub(crate) const ERR_HANDLING_MODE_PEER: c_int = 1;
pub(crate) const EP_CLOSE_FLAG_FORCE: u32 = 1;
pub(crate) const OP_ATTR_FLAGS: u32 = 1 << 4;
pub(crate) const OP_ATTR_MEMH: u32 = 1 << 8;

/// `ucp_params_t`.
#[repr(C)]
pub(crate) struct Params {
    pub(crate) field_mask: u64,
    pub(crate) features: u64,
    pub(crate) request_size: usize,
    pub(crate) request_init: *const c_void,
    pub(crate) request_cleanup: *const c_void,
    pub(crate) tag_sender_mask: u64,
    pub(crate) mt_workers_shared: c_int,
    pub(crate) estimated_num_eps: usize,
    pub(crate) estimated_num_ppn: usize,
    pub(crate) name: *const c_char,
}

/// `ucp_worker_params_t`.
#[repr(C)]
pub(crate) struct WorkerParams {
    pub(crate) field_mask: u64,
    pub(crate) thread_mode: c_int,
    pub(crate) cpu_mask: [u64; 16],
    pub(crate) events: c_uint,
    pub(crate) user_data: *mut c_void,
    pub(crate) event_fd: c_int,
    pub(crate) flags: u64,
    pub(crate) name: *const c_char,
    pub(crate) am_alignment: usize,
    pub(crate) client_id: u64,
}

/// `ucp_mem_map_params_t`.
#[repr(C)]
pub(crate) struct MemMapParams {
    pub(crate) field_mask: u64,
    pub(crate) address: *mut c_void,
    pub(crate) length: usize,
    pub(crate) flags: c_uint,
    pub(crate) prot: c_uint,
    pub(crate) memory_type: c_int,
    pub(crate) exported_memh_buffer: *const c_void,
}

/// `ucp_err_handler_cb_t`.
pub(crate) type ErrorCallback = unsafe extern "C" fn(argument: *mut c_void, endpoint: Handle, status: Status);

/// `ucp_err_handler_t`.
#[repr(C)]
pub(crate) struct ErrorHandler {
    pub(crate) cb: Option<ErrorCallback>,
    pub(crate) arg: *mut c_void,
}

/// `ucs_sock_addr_t`.
#[repr(C)]
pub(crate) struct SocketAddress {
    pub(crate) addr: *const c_void,
    pub(crate) addrlen: u32,
}

/// `ucp_ep_params_t`.
#[repr(C)]
pub(crate) struct EpParams {
    pub(crate) field_mask: u64,
    pub(crate) address: *const c_void,
    pub(crate) err_mode: c_int,
    pub(crate) err_handler: ErrorHandler,
    pub(crate) user_data: *mut c_void,
    pub(crate) flags: c_uint,
    pub(crate) sockaddr: SocketAddress,
    pub(crate) conn_request: *mut c_void,
    pub(crate) name: *const c_char,
    pub(crate) local_sockaddr: SocketAddress,
}

/// `ucp_request_param_t`.
#[repr(C)]
pub(crate) struct RequestParam {
    pub(crate) op_attr_mask: u32,
    pub(crate) flags: u32,
    pub(crate) request: *mut c_void,
    pub(crate) cb: *const c_void,
    pub(crate) datatype: u64,
    pub(crate) user_data: *mut c_void,
    pub(crate) reply_buffer: *mut c_void,
    pub(crate) memory_type: c_int,
    pub(crate) recv_info: *mut c_void,
    pub(crate) memh: Handle,
}

/// Structures of integers, nullable pointers, and an optional function.
///
/// # Safety
///
/// All bytes 0 are a valid value of the type.
pub(crate) unsafe trait Zeroed: Sized {
    /// Returns the value whose bytes are 0.
    fn zeroed() -> Self {
        // SAFETY: all bytes 0 are a valid value, by the contract of the trait.
        unsafe { std::mem::zeroed() }
    }
}

// SAFETY: integers and pointers.
unsafe impl Zeroed for Params {}
// SAFETY: integers and pointers.
unsafe impl Zeroed for WorkerParams {}
// SAFETY: integers and pointers.
unsafe impl Zeroed for MemMapParams {}
// SAFETY: integers, pointers, and an optional function, of which null is none.
unsafe impl Zeroed for EpParams {}
// SAFETY: integers and pointers.
unsafe impl Zeroed for RequestParam {}
