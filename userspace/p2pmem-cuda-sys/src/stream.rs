// SPDX-License-Identifier: MIT OR Apache-2.0

//! A stream: operations that a GPU executes in order, without the CPU.

use std::error::Error;
use std::ffi::{c_uint, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::functions::{Address, Handle, StreamFunctions};
use crate::gpu::{Context, Gpu};
use crate::memory::{missing, HostMemory, HostMemoryError, Memory, OutOfRange, Place};
use crate::operation::{Condition, Operation, StreamOperation, ENTRY};
use crate::CudaError;

/// The kernels in PTX, the GPU's assembly language, with the terminating zero that CUDA expects.
const KERNELS: &str = concat!(include_str!("interpreter.ptx"), "\0");

/// `CU_STREAM_NON_BLOCKING`: the stream does not wait for the default stream.
const NON_BLOCKING: c_uint = 1;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: i32 = 600;
/// CUDA accepts fewer than 256 operations in a batch.
const BATCH: usize = 255;
/// Threads of a block of the kernel `add`.
const THREADS: u32 = 256;
/// Size of the memory for kernels' entries and states.
const ARENA: usize = 4 << 20;
/// Offset of the first state or entry in the arena. The word at offset 0 stops all kernels of the stream.
const FIRST: usize = 64;
/// Bytes that a kernel's state takes up.
const STATE: usize = 16;
/// How long a drop waits for the GPU.
const DROP_LIMIT: Duration = Duration::from_secs(10);

/// Why a list of operations ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// A wait was not fulfilled within its limit.
    Late,
    /// [`Stream::stop`] ended a wait.
    Stopped,
}

/// An error of a stream.
#[derive(Debug)]
pub enum StreamError {
    /// A call of CUDA failed.
    Cuda(CudaError),
    /// An operation is out of range.
    Range {
        /// Index of the operation.
        index: usize,
        /// The range.
        range: OutOfRange,
    },
    /// The stream has no space for a list before [`Stream::finish`].
    Full,
    /// A list of [`Stream::execute`] ended early. The stream has executed nothing after it.
    Ended {
        /// Number of the list since the last `finish()`, from 0.
        list: usize,
        /// Index of the operation in its list.
        index: usize,
        /// The reason.
        why: Ended,
    },
    /// A wait of [`Stream::enqueue`] is not fulfilled. The GPU cannot take it back: the stream and its memory stay in use
    /// until the wait is fulfilled or the process ends.
    Stuck {
        /// Index of the wait among all enqueued operations since the last `finish()`, if it is for host memory.
        index: Option<usize>,
    },
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(error) => error.fmt(f),
            Self::Range { index, range } => write!(f, "operation {index}: {range}"),
            Self::Full => write!(f, "the stream has no space for more lists: call finish() first"),
            Self::Ended { list, index, why } => {
                let why = match why {
                    Ended::Late => "was not fulfilled within its limit",
                    Ended::Stopped => "was stopped",
                };
                write!(f, "operation {index} of list {list} {why}")
            }
            Self::Stuck { index: Some(index) } => write!(f, "operation {index} was not fulfilled within its limit"),
            Self::Stuck { index: None } => write!(f, "an operation was not fulfilled within its limit"),
        }
    }
}

impl Error for StreamError {}

impl From<CudaError> for StreamError {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}

/// The kernels, loaded.
///
/// # Invariants
///
/// `execute` and `add` are the functions of interpreter.ptx in `module`, which is loaded in `context` and belongs to this
/// value.
struct Kernels {
    context: Arc<Context>,
    module: Handle,
    execute: Handle,
    add: Handle,
}

impl Kernels {
    fn load(context: &Arc<Context>, streams: &StreamFunctions) -> Result<Self, CudaError> {
        let functions = context.functions();
        let mut module = ptr::null_mut();
        // SAFETY: `module` is valid for a CUmodule, and the text ends with a zero.
        let code = unsafe { (streams.load_module)(&mut module, KERNELS.as_ptr().cast()) };
        functions.check("cuModuleLoadData", code)?;
        // INVARIANT: the module was just loaded. The functions are set below, before anyone uses the value.
        let mut kernels = Self {
            context: context.clone(),
            module,
            execute: ptr::null_mut(),
            add: ptr::null_mut(),
        };
        for (function, name) in [(&mut kernels.execute, c"execute"), (&mut kernels.add, c"add")] {
            // SAFETY: `function` is valid for a CUfunction, and the module is loaded.
            let code = unsafe { (streams.function)(function, module, name.as_ptr()) };
            functions.check("cuModuleGetFunction", code)?;
        }
        Ok(kernels)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if let Some((_, streams)) = self.context.to_free().zip(self.context.load_streams().ok()) {
            // SAFETY: the module belongs to this value (type invariant); `Stream` drops it when no kernel runs. A drop cannot
            // report an error.
            unsafe { (streams.unload_module)(self.module) };
        }
    }
}

/// A stream of a GPU.
///
/// # Invariants
///
/// `handle` is a stream of `context` that belongs to this value. `in_use` has all memory that operations access which the
/// GPU may not have finished.
pub struct Stream {
    context: Arc<Context>,
    handle: Handle,
    kernels: Option<Kernels>,
    arena: Arc<HostMemory>,
    /// End of the part of the arena that is in use.
    used: usize,
    /// Offset in the arena of the state of each list.
    states: Vec<usize>,
    /// Waits of `enqueue()`, with their index.
    waits: Vec<(usize, Place, Condition, u32)>,
    enqueued: usize,
    in_use: Vec<Memory>,
}

// SAFETY: CUDA's streams can be used from every thread, after `make_current()` on that thread.
unsafe impl Send for Stream {}

impl Gpu {
    /// Creates a stream.
    ///
    /// # Errors
    ///
    /// libcuda does not have a function, or CUDA or the kernel refuses memory.
    pub fn stream(&self) -> Result<Stream, HostMemoryError> {
        let streams = self.context.load_streams().map_err(|error| missing(&error))?;
        let arena = Arc::new(self.alloc_host(ARENA)?);
        self.context.make_current()?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is valid for a CUstream.
        let code = unsafe { (streams.create_stream)(&mut handle, NON_BLOCKING) };
        self.context.functions().check("cuStreamCreate", code)?;
        // INVARIANT: the stream was just created, and has no operations.
        Ok(Stream {
            context: self.context.clone(),
            handle,
            kernels: None,
            arena,
            used: FIRST,
            states: Vec::new(),
            waits: Vec::new(),
            enqueued: 0,
            in_use: Vec::new(),
        })
    }
}

impl Stream {
    fn streams(&self) -> Result<&StreamFunctions, CudaError> {
        self.context.load_streams().map_err(|error| missing(&error))
    }

    fn check(&self, call: &'static str, code: i32) -> Result<(), CudaError> {
        self.context.functions().check(call, code)
    }

    fn use_memory<'a>(&mut self, places: impl Iterator<Item = &'a Place>) {
        for place in places {
            let is_same = |memory: &Memory| match (memory, &place.memory) {
                (Memory::Gpu(a), Memory::Gpu(b)) => Arc::ptr_eq(a, b),
                (Memory::Host(a), Memory::Host(b)) => Arc::ptr_eq(a, b),
                _ => false,
            };
            if !self.in_use.iter().any(is_same) {
                self.in_use.push(place.memory.clone());
            }
        }
    }

    /// Enqueues operations as stream memory operations: the GPU's front end executes them, without a kernel.
    ///
    /// A wait has no limit; see [`StreamError::Stuck`].
    ///
    /// # Errors
    ///
    /// An operation is out of range, in which case none was enqueued, or CUDA refuses the operations.
    pub fn enqueue(&mut self, operations: &[Operation]) -> Result<(), StreamError> {
        let convert = |(index, operation): (usize, &Operation)| {
            operation
                .for_stream()
                .map_err(|range| StreamError::Range { index, range })
        };
        let converted: Vec<_> = operations.iter().enumerate().map(convert).collect::<Result<_, _>>()?;
        self.context.make_current()?;
        self.use_memory(operations.iter().flat_map(Operation::places));
        let mut batch = Vec::new();
        for (operation, converted) in operations.iter().zip(converted) {
            if let Operation::Wait(at, condition, value) = operation {
                self.waits.push((self.enqueued, at.clone(), *condition, *value));
            }
            self.enqueued += 1;
            batch.extend(converted);
            if batch.len() == BATCH {
                self.flush(&mut batch)?;
            }
            if let Operation::Copy(from, to, len) = operation {
                self.flush(&mut batch)?;
                self.copy(from, to, *len as usize)?;
            }
        }
        self.flush(&mut batch)
    }

    fn copy(&mut self, from: &Place, to: &Place, len: usize) -> Result<(), StreamError> {
        let range = |range| StreamError::Range {
            index: self.enqueued - 1,
            range,
        };
        let (source, target) = (from.address(len, 4).map_err(range)?, to.address(len, 4).map_err(range)?);
        // SAFETY: both ranges are in memory that stays allocated until the stream has finished (type invariant).
        let code = unsafe { (self.streams()?.copy)(target, source, len, self.handle) };
        Ok(self.check("cuMemcpyAsync", code)?)
    }

    fn flush(&mut self, batch: &mut Vec<StreamOperation>) -> Result<(), StreamError> {
        if batch.is_empty() {
            return Ok(());
        }
        // SAFETY: `batch` has operations on memory that stays allocated until the stream has finished (type invariant), and
        // at most as many as CUDA accepts.
        let code = unsafe { (self.streams()?.batch)(self.handle, batch.len() as c_uint, batch.as_mut_ptr(), 0) };
        self.check("cuStreamBatchMemOp", code)?;
        batch.clear();
        Ok(())
    }

    fn kernels(&mut self) -> Result<&Kernels, CudaError> {
        if self.kernels.is_none() {
            let kernels = Kernels::load(&self.context, self.streams()?)?;
            self.kernels = Some(kernels);
        }
        Ok(self.kernels.as_ref().expect("loaded above"))
    }

    /// Enqueues a kernel that executes the operations with one thread.
    ///
    /// Each wait ends after `limit`; see [`StreamError::Ended`].
    ///
    /// # Errors
    ///
    /// An operation is out of range, the stream has no space, or CUDA refuses the kernel.
    pub fn execute(&mut self, operations: &[Operation], limit: Duration) -> Result<(), StreamError> {
        let convert = |(index, operation): (usize, &Operation)| {
            operation
                .for_kernel()
                .map_err(|range| StreamError::Range { index, range })
        };
        let entries: Vec<_> = operations.iter().enumerate().map(convert).collect::<Result<_, _>>()?;
        let state = self.used;
        let first = state + STATE;
        let end = (first + entries.len() * ENTRY).next_multiple_of(ENTRY);
        if end > ARENA {
            return Err(StreamError::Full);
        }
        self.context.make_current()?;
        self.kernels()?;
        self.use_memory(operations.iter().flat_map(Operation::places));
        self.arena.write(state, &[0; STATE]);
        for (i, entry) in entries.iter().enumerate() {
            self.arena.write(first + i * ENTRY, entry);
        }
        let base = self.arena_address();
        // Not truncated: the arena has space for the entries.
        let count = entries.len() as u32;
        let nanoseconds = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let (entries, of_state) = (base + first as Address, base + state as Address);
        let mut arguments = [
            ptr::from_ref(&entries).cast::<c_void>().cast_mut(),
            ptr::from_ref(&count).cast::<c_void>().cast_mut(),
            ptr::from_ref(&nanoseconds).cast::<c_void>().cast_mut(),
            ptr::from_ref(&of_state).cast::<c_void>().cast_mut(),
            ptr::from_ref(&base).cast::<c_void>().cast_mut(),
        ];
        let execute = self.kernels()?.execute;
        // SAFETY: the arguments have the number and types of the kernel's parameters. The entries and the state are in the
        // arena, which belongs to the stream, and the entries name memory that stays allocated until the stream has
        // finished (type invariant).
        let code = unsafe { self.launch(execute, 1, 1, &mut arguments) }?;
        self.check("cuLaunchKernel", code)?;
        self.used = end;
        self.states.push(state);
        Ok(())
    }

    fn arena_address(&self) -> Address {
        let place = Place {
            memory: Memory::Host(self.arena.clone()),
            offset: 0,
        };
        place.address(ARENA, 8).expect("the arena is page aligned")
    }

    /// Enqueues a kernel that adds `value` to each of `words` 32-bit words.
    ///
    /// # Errors
    ///
    /// The words are out of range, or CUDA refuses the kernel.
    pub fn add(&mut self, at: &Place, words: u32, value: u32) -> Result<(), StreamError> {
        let address = at.address(words as usize * 4, 4);
        let address = address.map_err(|range| StreamError::Range { index: 0, range })?;
        self.context.make_current()?;
        self.kernels()?;
        self.use_memory(std::iter::once(at));
        let mut arguments = [
            ptr::from_ref(&address).cast::<c_void>().cast_mut(),
            ptr::from_ref(&words).cast::<c_void>().cast_mut(),
            ptr::from_ref(&value).cast::<c_void>().cast_mut(),
        ];
        let add = self.kernels()?.add;
        // SAFETY: the arguments have the number and types of the kernel's parameters, and the words are in memory that
        // stays allocated until the stream has finished (type invariant).
        let code = unsafe { self.launch(add, words.div_ceil(THREADS).max(1), THREADS, &mut arguments) }?;
        Ok(self.check("cuLaunchKernel", code)?)
    }

    /// Launches a kernel. Returns the `CUresult`.
    ///
    /// # Safety
    ///
    /// The function is one of `self.kernels`, the arguments are those of its parameters, and the memory that it accesses is
    /// in `in_use` or the arena.
    unsafe fn launch(
        &self,
        function: Handle,
        blocks: u32,
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<i32, CudaError> {
        let (arguments, extra) = (arguments.as_mut_ptr(), ptr::null_mut());
        let launch = self.streams()?.launch;
        // SAFETY: the caller guarantees the function and the arguments; CUDA copies the arguments during the call.
        Ok(unsafe { launch(function, blocks, 1, 1, threads, 1, 1, 0, self.handle, arguments, extra) })
    }

    /// Ends the waits of all lists of [`Stream::execute`], also of those that have not begun.
    pub fn stop(&self) {
        self.arena.write(0, &1_u32.to_le_bytes());
    }

    /// Returns whether the GPU has finished all operations.
    ///
    /// # Errors
    ///
    /// An operation failed.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        self.context.make_current()?;
        // SAFETY: the stream is valid (type invariant).
        let code = unsafe { (self.streams()?.query_stream)(self.handle) };
        if code == NOT_READY {
            return Ok(false);
        }
        self.check("cuStreamQuery", code)?;
        Ok(true)
    }

    /// Waits until the GPU has finished all operations.
    ///
    /// # Errors
    ///
    /// A list ended early, an operation failed, or the GPU has not finished within the limit. After the last of these, a
    /// later call can wait again.
    pub fn finish(&mut self, limit: Duration) -> Result<(), StreamError> {
        let deadline = Instant::now() + limit;
        while !self.is_idle()? {
            if Instant::now() >= deadline {
                return Err(StreamError::Stuck { index: self.stuck() });
            }
            std::thread::yield_now();
        }
        let states = std::mem::take(&mut self.states);
        self.used = FIRST;
        self.waits.clear();
        self.enqueued = 0;
        self.in_use.clear();
        self.arena.write(0, &[0; 4]);
        for (list, state) in states.into_iter().enumerate() {
            let why = match self.arena.word(state) {
                1 => continue,
                2 => Ended::Late,
                _ => Ended::Stopped,
            };
            let index = self.arena.word(state + 4) as usize;
            return Err(StreamError::Ended { list, index, why });
        }
        Ok(())
    }

    /// Returns the index of the first wait for host memory that is not fulfilled.
    fn stuck(&self) -> Option<usize> {
        let unfulfilled = |(_, at, condition, value): &&(usize, Place, Condition, u32)| match &at.memory {
            Memory::Host(memory) => !condition.holds(memory.word(at.offset), *value),
            // Reading the GPU's memory would wait for the GPU.
            Memory::Gpu(_) => false,
        };
        self.waits.iter().find(unfulfilled).map(|(index, ..)| *index)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stop();
        let deadline = Instant::now() + DROP_LIMIT;
        loop {
            match self.is_idle() {
                Ok(false) if Instant::now() < deadline => std::thread::yield_now(),
                Ok(false) => {
                    // The GPU may still access the memory: keep it until the process ends.
                    self.context.abandon();
                    std::mem::forget(std::mem::take(&mut self.in_use));
                    std::mem::forget((self.arena.clone(), self.kernels.take()));
                    return;
                }
                // After an error of the context, the GPU executes nothing more.
                Ok(true) | Err(_) => break,
            }
        }
        if let Ok(streams) = self.streams() {
            // SAFETY: the stream belongs to this value (type invariant).
            unsafe { (streams.destroy_stream)(self.handle) };
        }
    }
}
