// SPDX-License-Identifier: MIT OR Apache-2.0

//! The part of the ABI of `libpmix.so.2` that the crate uses. A test compares it with `pmix.h`.

use std::ffi::{c_char, c_int, c_void};

use libloading::Library;

/// `PMIX_MAX_NSLEN`: most bytes of a namespace.
pub(crate) const MAX_NAMESPACE: usize = 255;
/// `PMIX_MAX_KEYLEN`: most bytes of a key.
pub(crate) const MAX_KEY: usize = 511;
/// `PMIX_RANK_WILDCARD`: all ranks of a namespace, or the job itself.
pub(crate) const RANK_WILDCARD: u32 = u32::MAX - 1;
/// `PMIX_GLOBAL`: a value is for the ranks of all nodes.
pub(crate) const GLOBAL: u8 = 3;
/// `PMIX_SUCCESS`.
pub(crate) const SUCCESS: c_int = 0;
/// `PMIX_OPERATION_SUCCEEDED`: the operation is complete, and the callback is not called.
pub(crate) const OPERATION_SUCCEEDED: c_int = -157;
/// `PMIX_BOOL`.
pub(crate) const BOOL: u16 = 1;
/// `PMIX_UINT32`.
pub(crate) const UINT32: u16 = 14;
/// `PMIX_BYTE_OBJECT`.
pub(crate) const BYTE_OBJECT: u16 = 27;
/// `PMIX_JOB_SIZE`.
pub(crate) const JOB_SIZE: &str = "pmix.job.size";
/// `PMIX_COLLECT_DATA`.
pub(crate) const COLLECT_DATA: &str = "pmix.collect";

/// `pmix_proc_t`.
#[repr(C)]
#[derive(Clone)]
pub(crate) struct Proc {
    pub(crate) namespace: [c_char; MAX_NAMESPACE + 1],
    pub(crate) rank: u32,
}

/// `pmix_byte_object_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ByteObject {
    pub(crate) bytes: *mut c_char,
    pub(crate) size: usize,
}

/// The union of `pmix_value_t`, with the members that the crate uses, and one of the size of the largest member.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union Data {
    pub(crate) flag: bool,
    pub(crate) uint32: u32,
    pub(crate) bytes: ByteObject,
    pub(crate) largest: [u64; 3],
}

/// `pmix_value_t`.
#[repr(C)]
pub(crate) struct Value {
    pub(crate) kind: u16,
    pub(crate) data: Data,
}

/// `pmix_info_t`.
#[repr(C)]
pub(crate) struct Info {
    pub(crate) key: [c_char; MAX_KEY + 1],
    pub(crate) flags: u32,
    pub(crate) value: Value,
}

/// `pmix_op_cbfunc_t`.
pub(crate) type OperationCallback = unsafe extern "C" fn(status: c_int, context: *mut c_void);
/// `pmix_value_cbfunc_t`. The value belongs to PMIx.
pub(crate) type ValueCallback = unsafe extern "C" fn(status: c_int, value: *mut Value, context: *mut c_void);

/// Declares functions of `pmix.h`.
macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of PMIx.
        pub(crate) struct Functions {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// # Safety
            ///
            /// The library is `libpmix.so.2`, and stays loaded as long as the functions are called.
            pub(crate) unsafe fn load(library: &Library) -> Result<Self, libloading::Error> {
                // SAFETY: the library is libpmix (this function's contract), whose functions have the types in pmix.h.
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
    init = "PMIx_Init" (*mut Proc, *mut Info, usize) -> c_int;
    finalize = "PMIx_Finalize" (*const Info, usize) -> c_int;
    put = "PMIx_Put" (u8, *const c_char, *mut Value) -> c_int;
    commit = "PMIx_Commit" () -> c_int;
    fence = "PMIx_Fence_nb" (*const Proc, usize, *const Info, usize, OperationCallback, *mut c_void) -> c_int;
    get = "PMIx_Get_nb" (*const Proc, *const c_char, *const Info, usize, ValueCallback, *mut c_void) -> c_int;
    error_string = "PMIx_Error_string" (c_int) -> *const c_char;
}
