// SPDX-License-Identifier: MIT OR Apache-2.0

//! CUDA, and a GPU with its primary context.

use std::ffi::{c_char, c_int, CStr};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use libloading::Library;

use crate::error::LoadError;
use crate::functions::{Functions, Handle, StreamFunctions};
use crate::Result;

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
/// `CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS`.
const STREAM_OPERATIONS_64: c_int = 122;
/// `CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR`.
const STREAM_WAIT_NOR: c_int = 123;
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const DMA_BUF_SUPPORTED: c_int = 124;

/// CUDA, initialized.
#[derive(Clone)]
pub struct Cuda {
    shared: Arc<Shared>,
}

/// # Invariants
///
/// `functions` and `streams` are those of `library`, and `cuInit()` has succeeded.
struct Shared {
    functions: Functions,
    streams: OnceLock<StreamFunctions>,
    library: Library,
}

impl Cuda {
    /// Loads libcuda.so.1, which is part of NVIDIA's driver, and initializes CUDA.
    ///
    /// # Errors
    ///
    /// The library or a function is missing, or the machine has no GPU.
    pub fn load() -> std::result::Result<Self, LoadError> {
        // SAFETY: the code that runs when libcuda.so.1 is loaded has no precondition.
        let library = unsafe { Library::new("libcuda.so.1") }.map_err(LoadError::NotInstalled)?;
        // SAFETY: the library is libcuda, and `Shared` keeps the library loaded as long as the functions can be called.
        let functions = unsafe { Functions::load(&library) }.map_err(LoadError::TooOld)?;
        // SAFETY: cuInit() has no precondition.
        let code = unsafe { (functions.init)(0) };
        functions.check("cuInit", code).map_err(LoadError::Init)?;
        // INVARIANT: both were just loaded, and cuInit() has succeeded.
        let shared = Shared {
            functions,
            streams: OnceLock::new(),
            library,
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Opens the first GPU that CUDA shows to the program; `CUDA_VISIBLE_DEVICES` selects the GPU.
    ///
    /// # Errors
    ///
    /// There is no GPU, or no context can be created.
    pub fn first_gpu(&self) -> Result<Gpu> {
        let functions = &self.shared.functions;
        let mut device = 0;
        // SAFETY: `device` is valid for a CUdevice.
        let code = unsafe { (functions.device)(&mut device, 0) };
        functions.check("cuDeviceGet", code)?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is valid for a CUcontext, and CUDA returned the device.
        let code = unsafe { (functions.retain_context)(&mut handle, device) };
        functions.check("cuDevicePrimaryCtxRetain", code)?;
        // INVARIANT: the context was just retained.
        let gpu = Gpu {
            context: Arc::new(Context {
                cuda: self.clone(),
                device,
                handle,
                abandoned: AtomicBool::new(false),
            }),
        };
        gpu.context.make_current()?;
        Ok(gpu)
    }
}

/// A reference to the primary context of a GPU.
///
/// # Invariants
///
/// CUDA returned `device` and `handle`, and this value holds a reference to the context.
pub(crate) struct Context {
    cuda: Cuda,
    /// `CUdevice`.
    device: c_int,
    handle: Handle,
    /// Whether a stream waits without a limit. CUDA's calls that free something wait for the GPU, and are not made any more.
    abandoned: AtomicBool,
}

// SAFETY: CUDA's contexts can be used from every thread, after `make_current()` on that thread.
unsafe impl Send for Context {}
// SAFETY: CUDA's functions may be called by several threads at the same time.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn functions(&self) -> &Functions {
        &self.cuda.shared.functions
    }

    /// Loads the functions for streams on the first call.
    pub(crate) fn load_streams(&self) -> std::result::Result<&StreamFunctions, LoadError> {
        let shared = &self.cuda.shared;
        if let Some(streams) = shared.streams.get() {
            return Ok(streams);
        }
        // SAFETY: the library is libcuda, and `Shared` keeps the library loaded as long as the functions can be called.
        let streams = unsafe { StreamFunctions::load(&shared.library) }.map_err(LoadError::TooOld)?;
        // INVARIANT: the functions were just loaded from the library.
        Ok(shared.streams.get_or_init(|| streams))
    }

    /// Makes the context current for this thread.
    pub(crate) fn make_current(&self) -> Result<()> {
        // SAFETY: the context is valid (type invariant).
        let code = unsafe { (self.functions().set_context)(self.handle) };
        self.functions().check("cuCtxSetCurrent", code)
    }

    /// Makes the context current to free something. Returns `None` if that could wait without a limit, or fails; the driver then
    /// frees it with the process.
    pub(crate) fn to_free(&self) -> Option<&Functions> {
        let usable = !self.abandoned.load(Ordering::Acquire) && self.make_current().is_ok();
        usable.then(|| self.functions())
    }

    /// States that a stream waits without a limit.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
    }

    fn attribute(&self, attribute: c_int) -> Result<c_int> {
        let mut value = 0;
        // SAFETY: `value` is valid for an int, and CUDA returned the device.
        let code = unsafe { (self.functions().device_attribute)(&mut value, attribute, self.device) };
        self.functions().check("cuDeviceGetAttribute", code)?;
        Ok(value)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some(functions) = self.to_free() {
            // SAFETY: the value holds a reference to the context (type invariant). A drop cannot report an error; the
            // driver ends the context with the process.
            unsafe { (functions.release_context)(self.device) };
        }
    }
}

/// A GPU.
#[derive(Clone)]
pub struct Gpu {
    pub(crate) context: Arc<Context>,
}

impl Gpu {
    /// Calls a function that stores a text.
    fn text(
        &self,
        call: &'static str,
        function: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
    ) -> Result<String> {
        let mut text: [c_char; 256] = [0; 256];
        // SAFETY: `function` stores a string of at most the stated length, and `text` is valid for that length.
        let code = unsafe { function(text.as_mut_ptr(), text.len() as c_int, self.context.device) };
        self.context.functions().check(call, code)?;
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
        self.text("cuDeviceGetName", self.context.functions().device_name)
    }

    /// Returns the PCI address of the GPU, such as `0000:03:00.0`.
    ///
    /// # Errors
    ///
    /// The call of CUDA failed.
    pub fn pci_addr(&self) -> Result<String> {
        self.text("cuDeviceGetPCIBusId", self.context.functions().device_pci_addr)
    }

    /// Returns whether the driver exports memory of the GPU as dma-bufs.
    ///
    /// # Errors
    ///
    /// The call of CUDA failed.
    pub fn supports_dma_bufs(&self) -> Result<bool> {
        Ok(self.context.attribute(DMA_BUF_SUPPORTED)? != 0)
    }

    /// Returns whether streams of the GPU can store 64-bit values.
    ///
    /// # Errors
    ///
    /// The call of CUDA failed.
    pub fn supports_64_bit_stores(&self) -> Result<bool> {
        Ok(self.context.attribute(STREAM_OPERATIONS_64)? != 0)
    }

    /// Returns whether streams of the GPU can wait with [`Condition::Nor`](crate::Condition::Nor).
    ///
    /// # Errors
    ///
    /// The call of CUDA failed.
    pub fn supports_nor(&self) -> Result<bool> {
        Ok(self.context.attribute(STREAM_WAIT_NOR)? != 0)
    }

    /// Returns whether the GPU can run this crate's kernels, which need compute capability 7.0.
    ///
    /// # Errors
    ///
    /// The call of CUDA failed.
    pub fn supports_kernels(&self) -> Result<bool> {
        Ok(self.context.attribute(COMPUTE_CAPABILITY_MAJOR)? >= 7)
    }
}
