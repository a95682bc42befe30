// SPDX-License-Identifier: MIT OR Apache-2.0

//! The part of CUDA's driver API that the example needs, loaded at run time: the one module with `unsafe`.
#![allow(unsafe_code)]

use std::error::Error;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void, CStr};
use std::fmt;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::ptr;

use libloading::Library;

/// `CUdeviceptr`: an address in the GPU's address space.
type Address = c_ulonglong;
/// `CUcontext`.
type Context = *mut c_void;

/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const DMA_BUF_SUPPORTED: c_int = 124;
/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
const SYNC_MEMOPS: c_int = 6;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUF_FD: c_int = 1;

/// A call that failed.
#[derive(Debug)]
pub struct CudaError {
    call: &'static str,
    /// `CUresult`.
    code: c_int,
    /// CUDA's description of the code.
    text: String,
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}() failed: {} (CUDA error {})", self.call, self.text, self.code)
    }
}

impl Error for CudaError {}

type Result<T> = std::result::Result<T, CudaError>;

/// Declares the functions of `cuda.h` that [`Cuda`] loads.
///
/// The caller of [`Functions::load`] guarantees that the library stays loaded.
macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// Functions of libcuda. All of them return a `CUresult`.
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            /// # Safety
            ///
            /// The library is libcuda, and stays loaded as long as the functions are called.
            unsafe fn load(library: &Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the library is libcuda (this function's contract), whose functions have the types in cuda.h.
                // The suffix _v2 of a symbol stands for the current type.
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
    init = "cuInit" (c_uint);
    error_string = "cuGetErrorString" (c_int, *mut *const c_char);
    device = "cuDeviceGet" (*mut c_int, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_pci_addr = "cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    retain_context = "cuDevicePrimaryCtxRetain" (*mut Context, c_int);
    release_context = "cuDevicePrimaryCtxRelease_v2" (c_int);
    set_context = "cuCtxSetCurrent" (Context);
    alloc = "cuMemAlloc_v2" (*mut Address, usize);
    free = "cuMemFree_v2" (Address);
    set_pointer_attribute = "cuPointerSetAttribute" (*const c_void, c_int, Address);
    handle_for_range = "cuMemGetHandleForAddressRange" (*mut c_void, Address, usize, c_int, c_ulonglong);
}

impl Functions {
    /// Converts the `CUresult` of a call.
    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
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

/// CUDA, initialized.
///
/// # Invariants
///
/// `functions` are those of `_library`, and `cuInit()` has succeeded.
pub struct Cuda {
    functions: Functions,
    _library: Library,
}

impl Cuda {
    /// Loads libcuda.so.1, which is part of NVIDIA's driver, and initializes CUDA.
    ///
    /// # Errors
    ///
    /// The library or a function is missing, or the machine has no GPU.
    pub fn load() -> std::result::Result<Self, Box<dyn Error>> {
        // SAFETY: the code that runs when libcuda.so.1 is loaded has no precondition.
        let library = unsafe { Library::new("libcuda.so.1") }
            .map_err(|error| format!("CUDA is not installed: {error}; install NVIDIA's driver"))?;
        // SAFETY: the library is libcuda, and `Cuda` keeps the library loaded as long as the functions can be called.
        let functions = unsafe { Functions::load(&library) }
            .map_err(|error| format!("{error}; update NVIDIA's driver to 515 (CUDA 11.7) or later"))?;
        // SAFETY: cuInit() has no precondition.
        let code = unsafe { (functions.init)(0) };
        functions.check("cuInit", code)?;
        // INVARIANT: both were just loaded, and cuInit() has succeeded.
        Ok(Self {
            functions,
            _library: library,
        })
    }

    /// Opens the first GPU that CUDA shows to the program.
    ///
    /// # Errors
    ///
    /// There is no GPU, or no context can be created.
    pub fn first_gpu(&self) -> Result<Gpu<'_>> {
        let mut device = 0;
        // SAFETY: `device` is valid for a CUdevice.
        let code = unsafe { (self.functions.device)(&mut device, 0) };
        self.functions.check("cuDeviceGet", code)?;
        let mut context = ptr::null_mut();
        // SAFETY: `context` is valid for a CUcontext, and CUDA returned the device.
        let code = unsafe { (self.functions.retain_context)(&mut context, device) };
        self.functions.check("cuDevicePrimaryCtxRetain", code)?;
        // INVARIANT: the context was just retained.
        let gpu = Gpu {
            cuda: self,
            device,
            context,
        };
        gpu.make_current()?;
        Ok(gpu)
    }
}

/// A GPU with its primary context.
///
/// # Invariants
///
/// CUDA returned `device` and `context`, and this value holds a reference to the context.
pub struct Gpu<'a> {
    cuda: &'a Cuda,
    /// `CUdevice`.
    device: c_int,
    context: Context,
}

impl Gpu<'_> {
    /// Makes the context current for this thread.
    fn make_current(&self) -> Result<()> {
        // SAFETY: the context is valid (type invariant).
        let code = unsafe { (self.cuda.functions.set_context)(self.context) };
        self.cuda.functions.check("cuCtxSetCurrent", code)
    }

    /// Calls a function that stores a text.
    fn text(
        &self,
        call: &'static str,
        function: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
    ) -> Result<String> {
        let mut text: [c_char; 256] = [0; 256];
        // SAFETY: `function` stores a string of at most the stated length, and `text` is valid for that length.
        let code = unsafe { function(text.as_mut_ptr(), text.len() as c_int, self.device) };
        self.cuda.functions.check(call, code)?;
        // SAFETY: `function` has succeeded, so `text` has a string.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        Ok(text.to_string_lossy().into_owned())
    }

    /// Returns the model of the GPU.
    ///
    /// # Errors
    ///
    /// The call of CUDA failed.
    pub fn name(&self) -> Result<String> {
        self.text("cuDeviceGetName", self.cuda.functions.device_name)
    }

    /// Returns the PCI address of the GPU, such as `0000:03:00.0`.
    ///
    /// # Errors
    ///
    /// The call of CUDA failed.
    pub fn pci_addr(&self) -> Result<String> {
        self.text("cuDeviceGetPCIBusId", self.cuda.functions.device_pci_addr)
    }

    /// Returns whether the driver exports memory of the GPU as dma-bufs.
    ///
    /// # Errors
    ///
    /// The call of CUDA failed.
    pub fn supports_dma_bufs(&self) -> Result<bool> {
        let mut value = 0;
        // SAFETY: `value` is valid for an int.
        let code = unsafe { (self.cuda.functions.device_attribute)(&mut value, DMA_BUF_SUPPORTED, self.device) };
        self.cuda.functions.check("cuDeviceGetAttribute", code)?;
        Ok(value != 0)
    }

    /// Allocates memory.
    ///
    /// CUDA's asynchronous copies to and from the memory become synchronous. Otherwise a copy could still be in progress
    /// when a NIC accesses the memory.
    ///
    /// # Errors
    ///
    /// The GPU does not have enough free memory.
    pub fn alloc(&self, size: usize) -> Result<Memory<'_>> {
        self.make_current()?;
        let mut address = 0;
        // SAFETY: `address` is valid for a CUdeviceptr.
        let code = unsafe { (self.cuda.functions.alloc)(&mut address, size) };
        self.cuda.functions.check("cuMemAlloc", code)?;
        // INVARIANT: the memory was just allocated.
        let memory = Memory {
            gpu: self,
            address,
            size,
        };
        let yes: c_uint = 1;
        // SAFETY: the value of this attribute is an unsigned int, and the address is that of live memory.
        let code =
            unsafe { (self.cuda.functions.set_pointer_attribute)(ptr::from_ref(&yes).cast(), SYNC_MEMOPS, address) };
        self.cuda.functions.check("cuPointerSetAttribute", code)?;
        Ok(memory)
    }
}

impl Drop for Gpu<'_> {
    fn drop(&mut self) {
        // SAFETY: the value holds a reference to the context (type invariant). A drop cannot report an error; the driver
        // ends the context with the process.
        unsafe { (self.cuda.functions.release_context)(self.device) };
    }
}

/// Memory of a GPU.
///
/// # Invariants
///
/// The memory at `address` is allocated and belongs to this value alone.
pub struct Memory<'a> {
    gpu: &'a Gpu<'a>,
    address: Address,
    size: usize,
}

impl Memory<'_> {
    /// Exports the memory as a dma-buf.
    ///
    /// # Errors
    ///
    /// The driver does not export the memory.
    pub fn export(&self) -> Result<OwnedFd> {
        self.gpu.make_current()?;
        let handle_for_range = self.gpu.cuda.functions.handle_for_range;
        let mut fd: RawFd = -1;
        // SAFETY: the memory is allocated (type invariant), and `fd` is valid for the int that a handle of this type is.
        let code = unsafe { handle_for_range(ptr::from_mut(&mut fd).cast(), self.address, self.size, DMA_BUF_FD, 0) };
        self.gpu.cuda.functions.check("cuMemGetHandleForAddressRange", code)?;
        // SAFETY: the call has succeeded, so the descriptor is open, and CUDA gave it to the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        // A drop cannot report an error; the driver frees the memory with the context.
        let _ = self.gpu.make_current();
        // SAFETY: the memory belongs to this value alone (type invariant). The driver keeps memory of open dma-bufs.
        unsafe { (self.gpu.cuda.functions.free)(self.address) };
    }
}
