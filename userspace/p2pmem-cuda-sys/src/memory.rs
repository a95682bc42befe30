// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory that a GPU accesses: its own, and host memory.

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::Arc;

use p2pmem_access_sys as access;
use rustix::fs::{fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create, MemfdFlags, SealFlags};
use rustix::mm::{mmap, munmap, MapFlags, ProtFlags};

use crate::error::LoadError;
use crate::functions::{Address, StreamFunctions};
use crate::gpu::{Context, Gpu};
use crate::{CudaError, Result};

/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
const SYNC_MEMOPS: c_int = 6;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUF_FD: c_int = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`.
const PORTABLE_AND_MAPPED: c_uint = 1 | 2;

/// A range that is not in the memory, or that is not aligned to the width of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfRange {
    /// Offset of the range.
    pub offset: usize,
    /// Length of the range.
    pub len: usize,
}

impl fmt::Display for OutOfRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, len } = self;
        write!(
            f,
            "{len} bytes at offset {offset} are not in the memory, or not aligned"
        )
    }
}

impl std::error::Error for OutOfRange {}

/// Fails unless the range is in a memory of `size` bytes.
fn check_range(size: usize, offset: usize, len: usize) -> std::result::Result<(), OutOfRange> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(OutOfRange { offset, len }),
    }
}

/// Memory of a GPU.
///
/// # Invariants
///
/// The `size` bytes at `address` are allocated and belong to this value alone.
pub struct GpuMemory {
    context: Arc<Context>,
    address: Address,
    size: usize,
}

impl Gpu {
    /// Allocates memory. Its contents are undefined.
    ///
    /// CUDA's asynchronous copies to and from the memory become synchronous. Otherwise a copy could still be in progress
    /// when a NIC accesses the memory.
    ///
    /// # Errors
    ///
    /// The GPU does not have enough free memory.
    pub fn alloc(&self, size: usize) -> Result<GpuMemory> {
        self.context.make_current()?;
        let functions = self.context.functions();
        let mut address = 0;
        // SAFETY: `address` is valid for a CUdeviceptr.
        let code = unsafe { (functions.alloc)(&mut address, size) };
        functions.check("cuMemAlloc", code)?;
        // INVARIANT: the memory was just allocated.
        let memory = GpuMemory {
            context: self.context.clone(),
            address,
            size,
        };
        let yes: c_uint = 1;
        // SAFETY: the value of this attribute is an unsigned int, and the address is that of live memory.
        let code = unsafe { (functions.set_pointer_attribute)(ptr::from_ref(&yes).cast(), SYNC_MEMOPS, address) };
        functions.check("cuPointerSetAttribute", code)?;
        Ok(memory)
    }
}

impl GpuMemory {
    /// Exports the memory as a dma-buf.
    ///
    /// # Errors
    ///
    /// The driver does not export the memory.
    pub fn export(&self) -> Result<OwnedFd> {
        self.context.make_current()?;
        let functions = self.context.functions();
        let mut fd: RawFd = -1;
        // SAFETY: the memory is allocated (type invariant), and `fd` is valid for the int that a handle of this type is.
        let code = unsafe {
            (functions.handle_for_range)(ptr::from_mut(&mut fd).cast(), self.address, self.size, DMA_BUF_FD, 0)
        };
        functions.check("cuMemGetHandleForAddressRange", code)?;
        // SAFETY: the call has succeeded, so the descriptor is open, and CUDA gave it to the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn streams(&self) -> Result<&StreamFunctions> {
        self.context.load_streams().map_err(|error| missing(&error))
    }

    /// Copies bytes to the memory, and waits for the copy.
    ///
    /// # Errors
    ///
    /// The copy failed.
    ///
    /// # Panics
    ///
    /// The range is not in the memory.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        check_range(self.size, offset, data.len()).unwrap_or_else(|error| panic!("{error}"));
        let streams = self.streams()?;
        self.context.make_current()?;
        // SAFETY: both ranges are valid for the length (checked above, type invariant).
        let code = unsafe { (streams.copy_to_gpu)(self.address + offset as Address, data.as_ptr().cast(), data.len()) };
        self.context.functions().check("cuMemcpyHtoD", code)
    }

    /// Copies bytes from the memory, and waits for the copy.
    ///
    /// # Errors
    ///
    /// The copy failed.
    ///
    /// # Panics
    ///
    /// The range is not in the memory.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        check_range(self.size, offset, out.len()).unwrap_or_else(|error| panic!("{error}"));
        let streams = self.streams()?;
        self.context.make_current()?;
        // SAFETY: both ranges are valid for the length (checked above, type invariant).
        let code =
            unsafe { (streams.copy_to_host)(out.as_mut_ptr().cast(), self.address + offset as Address, out.len()) };
        self.context.functions().check("cuMemcpyDtoH", code)
    }
}

/// Converts an error of loading functions after CUDA was initialized.
pub(crate) fn missing(error: &LoadError) -> CudaError {
    CudaError {
        call: "dlsym",
        code: 0,
        text: error.to_string(),
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        if let Some(functions) = self.context.to_free() {
            // SAFETY: the memory belongs to this value alone (type invariant). The driver keeps memory of open dma-bufs. A
            // drop cannot report an error.
            unsafe { (functions.free)(self.address) };
        }
    }
}

/// Host memory that a GPU accesses. It is a memfd, so that others can map the same memory.
///
/// # Invariants
///
/// `start` is a shared mapping of the `size` bytes of `file`, which cannot shrink. The mapping belongs to this value and is
/// registered with CUDA; the GPU finds it at `address`. There is no reference to its bytes.
pub struct HostMemory {
    context: Arc<Context>,
    file: OwnedFd,
    start: *mut c_void,
    address: Address,
    size: usize,
}

// SAFETY: the mapping belongs to the value, and all accesses are volatile.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

/// No host memory can be allocated for a GPU.
#[derive(Debug)]
pub enum HostMemoryError {
    /// The kernel refuses the memory.
    Kernel(io::Error),
    /// CUDA refuses the memory.
    Cuda(CudaError),
}

impl fmt::Display for HostMemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(error) => write!(f, "cannot allocate host memory: {error}"),
            Self::Cuda(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for HostMemoryError {}

impl From<CudaError> for HostMemoryError {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}

/// A shared mapping of a file, until it is registered with CUDA.
///
/// # Invariants
///
/// `start` is a mapping of `size` bytes that belongs to this value.
struct Mapping {
    start: *mut c_void,
    size: usize,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value (type invariant).
        let _ = unsafe { munmap(self.start, self.size) };
    }
}

impl Gpu {
    /// Allocates host memory that the GPU accesses, filled with zeros.
    ///
    /// # Errors
    ///
    /// The kernel or CUDA refuses the memory.
    pub fn alloc_host(&self, size: usize) -> std::result::Result<HostMemory, HostMemoryError> {
        let kernel = |error: rustix::io::Errno| HostMemoryError::Kernel(error.into());
        let file = memfd_create("p2pmem-cuda", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(kernel)?;
        ftruncate(&file, size as u64).map_err(kernel)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(kernel)?;
        self.map_host(file)
    }

    /// Maps host memory that others have mapped, too, and makes it accessible to the GPU.
    ///
    /// # Errors
    ///
    /// The file is not a memfd that is sealed against shrinking, or the kernel or CUDA refuses the memory.
    pub fn map_host(&self, file: OwnedFd) -> std::result::Result<HostMemory, HostMemoryError> {
        let kernel = |error: rustix::io::Errno| HostMemoryError::Kernel(error.into());
        let streams = self.context.load_streams().map_err(|error| missing(&error))?;
        self.context.make_current()?;
        // Accesses beyond the end of a file that has shrunk would raise SIGBUS.
        if !fcntl_get_seals(&file).map_err(kernel)?.contains(SealFlags::SHRINK) {
            return Err(HostMemoryError::Kernel(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the memfd is not sealed against shrinking (F_SEAL_SHRINK)",
            )));
        }
        let size = fstat(&file).map_err(kernel)?.st_size;
        let size = usize::try_from(size).map_err(|_| kernel(rustix::io::Errno::FBIG))?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address that the kernel selects affects no other memory.
        let start = unsafe { mmap(ptr::null_mut(), size, protection, flags, &file, 0) }.map_err(kernel)?;
        // INVARIANT: the mapping is new.
        let mapping = Mapping { start, size };
        let functions = self.context.functions();
        // SAFETY: the range was just mapped.
        let code = unsafe { (streams.register_host)(start, size, PORTABLE_AND_MAPPED) };
        functions.check("cuMemHostRegister", code)?;
        let mut address = 0;
        // SAFETY: `address` is valid for a CUdeviceptr, and the memory is registered.
        let code = unsafe { (streams.host_address)(&mut address, start, 0) };
        let found = functions.check("cuMemHostGetDevicePointer", code);
        if found.is_err() {
            // SAFETY: the memory was registered above, and no operation uses it.
            unsafe { (streams.unregister_host)(start) };
        }
        found?;
        std::mem::forget(mapping);
        // INVARIANT: the mapping is registered, and now belongs to this value. The file is sealed.
        Ok(HostMemory {
            context: self.context.clone(),
            file,
            start,
            address,
            size,
        })
    }
}

impl AsFd for HostMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl HostMemory {
    /// The size in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The address in this process.
    pub fn address(&self) -> usize {
        self.start as usize
    }

    /// Writes bytes. An aligned group of 8, 4, or 2 bytes is one store.
    ///
    /// # Panics
    ///
    /// The range is not in the memory.
    pub fn write(&self, offset: usize, data: &[u8]) {
        check_range(self.size, offset, data.len()).unwrap_or_else(|error| panic!("{error}"));
        // SAFETY: the range is mapped (checked above, type invariant).
        unsafe { access::write(self.start.cast::<u8>().add(offset), data) };
    }

    /// Reads bytes. An aligned group of 8, 4, or 2 bytes is one load.
    ///
    /// # Panics
    ///
    /// The range is not in the memory.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        check_range(self.size, offset, out.len()).unwrap_or_else(|error| panic!("{error}"));
        // SAFETY: the range is mapped (checked above, type invariant).
        unsafe { access::read(self.start.cast::<u8>().add(offset), out) };
    }

    /// Reads a 32-bit little-endian word.
    ///
    /// # Panics
    ///
    /// The word is not in the memory.
    pub fn word(&self, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let Some((_, streams)) = self.context.to_free().zip(self.context.load_streams().ok()) else {
            return;
        };
        // SAFETY: the mapping is registered (type invariant), and no operation of a GPU uses it: `Stream` keeps a reference
        // to the memory of its operations. A drop cannot report an error.
        unsafe { (streams.unregister_host)(self.start) };
        // SAFETY: the mapping belongs to this value (type invariant), and CUDA does not use it any more.
        let _ = unsafe { munmap(self.start, self.size) };
    }
}

/// Memory that operations of a GPU access.
#[derive(Clone)]
pub enum Memory {
    /// Memory of the GPU.
    Gpu(Arc<GpuMemory>),
    /// Host memory.
    Host(Arc<HostMemory>),
}

impl Memory {
    /// The size in bytes.
    pub fn size(&self) -> usize {
        match self {
            Self::Gpu(memory) => memory.size,
            Self::Host(memory) => memory.size,
        }
    }

    fn address(&self) -> Address {
        match self {
            Self::Gpu(memory) => memory.address,
            Self::Host(memory) => memory.address,
        }
    }
}

/// A place in memory.
#[derive(Clone)]
pub struct Place {
    /// The memory.
    pub memory: Memory,
    /// Offset in bytes.
    pub offset: usize,
}

impl Place {
    /// Returns the address for the GPU of `len` bytes, aligned to `align`.
    pub(crate) fn address(&self, len: usize, align: usize) -> std::result::Result<Address, OutOfRange> {
        check_range(self.memory.size(), self.offset, len)?;
        let address = self.memory.address() + self.offset as Address;
        if address % align as Address != 0 {
            let offset = self.offset;
            return Err(OutOfRange { offset, len });
        }
        Ok(address)
    }
}
