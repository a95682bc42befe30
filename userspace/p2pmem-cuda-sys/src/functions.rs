// SPDX-License-Identifier: MIT OR Apache-2.0

//! The functions of libcuda that the crate calls.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void, CStr};
use std::ptr;

use libloading::Library;

use crate::operation::StreamOperation;
use crate::{CudaError, Result};

/// `CUdeviceptr`: an address in the GPU's address space.
pub(crate) type Address = c_ulonglong;
/// `CUcontext`, `CUstream`, `CUmodule`, `CUfunction`.
pub(crate) type Handle = *mut c_void;

/// Declares functions of `cuda.h`.
macro_rules! functions {
    ($(#[$attribute:meta])* $table:ident: $($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        $(#[$attribute])*
        pub(crate) struct $table {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl $table {
            /// # Safety
            ///
            /// The library is libcuda, and stays loaded as long as the functions are called.
            pub(crate) unsafe fn load(library: &Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the library is libcuda (this function's contract), whose functions have the types in cuda.h.
                // A suffix such as _v2 of a symbol stands for the current type.
                Ok(unsafe {
                    Self {
                        $($field: *library.get(concat!($symbol, "\0").as_bytes())?,)*
                    }
                })
            }
        }
    };
}

functions! {
    /// Functions for GPUs and their memory. All of them return a `CUresult`.
    Functions:
    init = "cuInit" (c_uint);
    error_string = "cuGetErrorString" (c_int, *mut *const c_char);
    device = "cuDeviceGet" (*mut c_int, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_pci_addr = "cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    retain_context = "cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    release_context = "cuDevicePrimaryCtxRelease_v2" (c_int);
    set_context = "cuCtxSetCurrent" (Handle);
    alloc = "cuMemAlloc_v2" (*mut Address, usize);
    free = "cuMemFree_v2" (Address);
    set_pointer_attribute = "cuPointerSetAttribute" (*const c_void, c_int, Address);
    handle_for_range = "cuMemGetHandleForAddressRange" (*mut c_void, Address, usize, c_int, c_ulonglong);
}

functions! {
    /// Functions for streams. All of them return a `CUresult`.
    StreamFunctions:
    register_host = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    unregister_host = "cuMemHostUnregister" (*mut c_void);
    host_address = "cuMemHostGetDevicePointer_v2" (*mut Address, *mut c_void, c_uint);
    copy_to_gpu = "cuMemcpyHtoD_v2" (Address, *const c_void, usize);
    copy_to_host = "cuMemcpyDtoH_v2" (*mut c_void, Address, usize);
    create_stream = "cuStreamCreate" (*mut Handle, c_uint);
    destroy_stream = "cuStreamDestroy_v2" (Handle);
    query_stream = "cuStreamQuery" (Handle);
    batch = "cuStreamBatchMemOp_v2" (Handle, c_uint, *mut StreamOperation, c_uint);
    copy = "cuMemcpyAsync" (Address, Address, usize, Handle);
    load_module = "cuModuleLoadData" (*mut Handle, *const c_void);
    unload_module = "cuModuleUnload" (Handle);
    function = "cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    launch = "cuLaunchKernel" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
}

impl Functions {
    /// Converts the `CUresult` of a call.
    pub(crate) fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: `text` is valid for a pointer. For an unknown code, CUDA stores a null pointer.
        unsafe { (self.error_string)(code, &mut text) };
        let text = if text.is_null() {
            "unknown error".into()
        } else {
            // SAFETY: the pointer is to a string with static lifetime.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(CudaError { call, code, text })
    }
}
