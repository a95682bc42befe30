// SPDX-License-Identifier: MIT OR Apache-2.0

//! The functions of libucp that the crate calls, and how the library is loaded.

use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::mem::{self, MaybeUninit};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

use crate::abi::{EpParams, Handle, MemMapParams, Params, RequestParam, Status, StatusPointer, WorkerParams, OK};
use crate::{Result, UcxError};

/// File name of the library.
const LIBRARY: &str = "libucp.so.0";
/// The version of the API that the crate uses, and the oldest version that has all of it.
pub(crate) const VERSION: (c_uint, c_uint) = (1, 16);
/// Signals for which UCX sets handlers when it is loaded.
const SIGNALS: [c_int; 4] = [libc::SIGILL, libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE];

/// Declares functions of UCX.
macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Functions of libucp, and of libucs, which libucp depends on. The library is never unloaded.
        pub(crate) struct Functions {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// `(major, minor, release)`.
            pub(crate) version: (c_uint, c_uint, c_uint),
        }

        impl Functions {
            /// # Safety
            ///
            /// The library is libucp, and is never unloaded.
            unsafe fn load(library: &Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the library is libucp (this function's contract), whose functions have the types in ucp.h and
                // status.h.
                Ok(unsafe {
                    Self {
                        $($field: *library.get(concat!($symbol, "\0").as_bytes())?,)*
                        version: (0, 0, 0),
                    }
                })
            }
        }
    };
}

functions! {
    get_version = "ucp_get_version" (*mut c_uint, *mut c_uint, *mut c_uint);
    status_string = "ucs_status_string" (Status) -> *const c_char;
    set_option = "ucs_global_opts_set_value" (*const c_char, *const c_char) -> Status;
    read_config = "ucp_config_read" (*const c_char, *const c_char, *mut Handle) -> Status;
    modify_config = "ucp_config_modify" (Handle, *const c_char, *const c_char) -> Status;
    release_config = "ucp_config_release" (Handle);
    init = "ucp_init_version" (c_uint, c_uint, *const Params, Handle, *mut Handle) -> Status;
    cleanup = "ucp_cleanup" (Handle);
    create_worker = "ucp_worker_create" (Handle, *const WorkerParams, *mut Handle) -> Status;
    destroy_worker = "ucp_worker_destroy" (Handle);
    worker_address = "ucp_worker_get_address" (Handle, *mut Handle, *mut usize) -> Status;
    release_address = "ucp_worker_release_address" (Handle, Handle);
    progress = "ucp_worker_progress" (Handle) -> c_uint;
    worker_file = "ucp_worker_get_efd" (Handle, *mut c_int) -> Status;
    arm = "ucp_worker_arm" (Handle) -> Status;
    map = "ucp_mem_map" (Handle, *const MemMapParams, *mut Handle) -> Status;
    unmap = "ucp_mem_unmap" (Handle, Handle) -> Status;
    pack_key = "ucp_rkey_pack" (Handle, Handle, *mut *mut c_void, *mut usize) -> Status;
    release_key = "ucp_rkey_buffer_release" (*mut c_void);
    create_endpoint = "ucp_ep_create" (Handle, *const EpParams, *mut Handle) -> Status;
    close_endpoint = "ucp_ep_close_nbx" (Handle, *const RequestParam) -> StatusPointer;
    flush = "ucp_ep_flush_nbx" (Handle, *const RequestParam) -> StatusPointer;
    unpack_key = "ucp_ep_rkey_unpack" (Handle, *const c_void, *mut Handle) -> Status;
    destroy_key = "ucp_rkey_destroy" (Handle);
    put = "ucp_put_nbx" (Handle, *const c_void, usize, u64, Handle, *const RequestParam) -> StatusPointer;
    get = "ucp_get_nbx" (Handle, *mut c_void, usize, u64, Handle, *const RequestParam) -> StatusPointer;
    request_status = "ucp_request_check_status" (*mut c_void) -> Status;
    free_request = "ucp_request_free" (*mut c_void);
}

impl Functions {
    /// Returns the functions. The first call loads the library.
    ///
    /// # Errors
    ///
    /// The library is not installed, or too old.
    pub(crate) fn get() -> Result<&'static Self> {
        static FUNCTIONS: OnceLock<Result<Functions>> = OnceLock::new();
        FUNCTIONS.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self> {
        let handlers = Handlers::save();
        // SAFETY: the code that runs when libucp is loaded has no precondition; it reads the environment, and sets handlers of
        // signals, which are restored below.
        let library = unsafe { Library::new(LIBRARY) };
        handlers.restore();
        let library = library.map_err(|error| UcxError::NotInstalled(error.to_string()))?;
        // SAFETY: the library is libucp, and is forgotten below.
        let functions = unsafe { Self::load(&library) };
        // UCX has threads, and functions for the end of the process: it cannot be unloaded.
        mem::forget(library);
        let mut functions = functions.map_err(|error| UcxError::TooOld(error.to_string()))?;
        let (mut major, mut minor, mut release) = (0, 0, 0);
        // SAFETY: the three pointers are valid for integers.
        unsafe { (functions.get_version)(&mut major, &mut minor, &mut release) };
        functions.version = (major, minor, release);
        if major != VERSION.0 || minor < VERSION.1 {
            return Err(UcxError::TooOld(format!("it has version {major}.{minor}.{release}")));
        }
        if std::env::var_os("UCX_LOG_LEVEL").is_none() {
            // UCX prints its messages on standard output, where they would be between those of the program.
            // SAFETY: the arguments are strings that end with NUL.
            unsafe { (functions.set_option)(c"LOG_LEVEL".as_ptr(), c"fatal".as_ptr()) };
        }
        Ok(functions)
    }

    /// Converts the status of a call.
    pub(crate) fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == OK {
            return Ok(());
        }
        Err(UcxError::Call {
            call,
            status,
            text: self.text(status),
        })
    }

    /// Returns UCX's description of a status.
    pub(crate) fn text(&self, status: Status) -> String {
        // SAFETY: the function returns a string with static lifetime, also for an unknown status.
        let text = unsafe { CStr::from_ptr((self.status_string)(status)) };
        text.to_string_lossy().into_owned()
    }
}

/// What the process does on the signals for which UCX sets handlers. A handler of UCX would print a backtrace and end the
/// process for faults that the program handles, such as an access to memory of a device that was removed.
struct Handlers([Option<libc::sigaction>; SIGNALS.len()]);

impl Handlers {
    fn save() -> Self {
        Self(SIGNALS.map(|signal| {
            let mut action = MaybeUninit::uninit();
            // SAFETY: with the null pointer, the call changes nothing, and `action` is valid for writing.
            let returned = unsafe { libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) };
            // SAFETY: sigaction() has succeeded, and so has initialized `action`.
            (returned == 0).then(|| unsafe { action.assume_init() })
        }))
    }

    fn restore(self) {
        for (signal, action) in SIGNALS.into_iter().zip(self.0) {
            if let Some(action) = action {
                // SAFETY: sigaction() returned this action, so its handler was valid for this signal.
                unsafe { libc::sigaction(signal, &action, ptr::null_mut()) };
            }
        }
    }
}
