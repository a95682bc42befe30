// SPDX-License-Identifier: MIT OR Apache-2.0

//! Progress of transfers.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::slice;
use std::sync::atomic::AtomicI8;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::abi::{Handle, WorkerParams, Zeroed, ERR_BUSY, THREAD_MODE_SERIALIZED, WORKER_PARAM_THREAD_MODE};
use crate::context::{Context, ContextInner};
use crate::memory::MemoryInner;
use crate::packed::{pack, Kind};
use crate::{Result, UcxError};

/// The progress of all transfers of its endpoints, and of those that other nodes have to it. Clones are the same worker.
#[derive(Clone)]
pub struct Worker {
    pub(crate) inner: Arc<WorkerInner>,
}

/// # Invariants
///
/// `raw` is a worker of `context` until this is dropped, and `file` its file descriptor.
pub(crate) struct WorkerInner {
    pub(crate) raw: Handle,
    file: i32,
    kept: Mutex<Kept>,
    pub(crate) context: Arc<ContextInner>,
}

/// What UCX may use until the worker is destroyed.
#[derive(Default)]
struct Kept {
    /// Memory of transfers, also of transfers whose requests were dropped.
    memory: Vec<Arc<MemoryInner>>,
    /// Where callbacks store the errors of endpoints.
    failures: Vec<Arc<AtomicI8>>,
}

// SAFETY: as for the context, whose lock all calls of UCX hold.
unsafe impl Send for WorkerInner {}
// SAFETY: as above.
unsafe impl Sync for WorkerInner {}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Worker({:?})", self.inner.raw)
    }
}

impl Worker {
    /// Creates a worker.
    ///
    /// # Errors
    ///
    /// No device or transport of the context is usable.
    pub fn new(context: &Context) -> Result<Self> {
        let context = &context.inner;
        let params = WorkerParams {
            field_mask: WORKER_PARAM_THREAD_MODE,
            thread_mode: THREAD_MODE_SERIALIZED,
            ..WorkerParams::zeroed()
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the context is valid by its invariant, the parameters are valid, and `raw` is valid for a handle.
        let status = context.call(|functions| unsafe { (functions.create_worker)(context.raw, &params, &mut raw) });
        context.functions.check("ucp_worker_create", status)?;
        // INVARIANT: created above, and the file descriptor is set below.
        let mut inner = WorkerInner {
            raw,
            file: -1,
            kept: Mutex::default(),
            context: context.clone(),
        };
        let mut file = -1;
        // SAFETY: a worker by the invariant, and `file` is valid for an integer.
        let status = context.call(|functions| unsafe { (functions.worker_file)(raw, &mut file) });
        context.functions.check("ucp_worker_get_efd", status)?;
        inner.file = file;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Returns the address for another node, see [`Endpoint::new`](crate::Endpoint::new).
    ///
    /// # Errors
    ///
    /// Memory is exhausted, or the address is larger than another node accepts.
    pub fn address(&self) -> Result<Vec<u8>> {
        let (context, raw) = (&self.inner.context, self.inner.raw);
        let (mut bytes, mut len) = (ptr::null_mut(), 0);
        // SAFETY: a worker by the invariant, and the pointers are valid for the results.
        let status = context.call(|functions| unsafe { (functions.worker_address)(raw, &mut bytes, &mut len) });
        context.functions.check("ucp_worker_get_address", status)?;
        // SAFETY: UCX returned `len` bytes at `bytes`, which stay until they are released below.
        let packed = pack(context.functions, Kind::Address, unsafe {
            slice::from_raw_parts(bytes.cast::<u8>(), len)
        });
        // SAFETY: returned by ucp_worker_get_address() for this worker, and not used after this.
        context.call(|functions| unsafe { (functions.release_address)(raw, bytes) });
        packed
    }

    /// Makes progress with all transfers and connections, without waiting. Returns whether there was any.
    pub fn progress(&self) -> bool {
        self.inner.progress()
    }

    /// Waits until there may be progress, no longer than `limit`. Call this after [`Worker::progress`] has returned `false`.
    ///
    /// # Errors
    ///
    /// UCX or the operating system cannot wait.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        let (context, raw) = (&self.inner.context, self.inner.raw);
        // SAFETY: a worker by the invariant.
        match context.call(|functions| unsafe { (functions.arm)(raw) }) {
            // There is progress to make.
            ERR_BUSY => return Ok(()),
            status => context.functions.check("ucp_worker_arm", status)?,
        }
        // SAFETY: by the invariant, the file is open as long as this worker exists.
        let file = unsafe { BorrowedFd::borrow_raw(self.inner.file) };
        let limit = Timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&file, PollFlags::IN)], Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(UcxError::Wait(error.to_string())),
        }
    }
}

impl WorkerInner {
    pub(crate) fn progress(&self) -> bool {
        // SAFETY: a worker by the invariant. The callbacks are those of endpoints, which only store a number.
        self.context.call(|functions| unsafe { (functions.progress)(self.raw) }) > 0
    }

    /// Keeps memory that a transfer uses.
    pub(crate) fn keep_memory(&self, memory: &Arc<MemoryInner>) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if !kept.memory.iter().any(|one| Arc::ptr_eq(one, memory)) {
            kept.memory.push(memory.clone());
        }
    }

    /// Keeps the number to which the callback of an endpoint writes.
    pub(crate) fn keep_failure(&self, failure: &Arc<AtomicI8>) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.failures.push(failure.clone());
    }
}

impl Drop for WorkerInner {
    fn drop(&mut self) {
        self.context
            // SAFETY: a worker by the invariant; endpoints keep it alive, so none is used after this. UCX ends all transfers, and
            // what they use is dropped after this.
            .call(|functions| unsafe { (functions.destroy_worker)(self.raw) });
    }
}
