// SPDX-License-Identifier: MIT OR Apache-2.0

//! Connections to other nodes, and transfers.

use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicI8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::abi::{
    EpParams, ErrorHandler, Handle, RequestParam, Status, StatusPointer, Zeroed, EP_CLOSE_FLAG_FORCE,
    EP_PARAM_ERR_HANDLER, EP_PARAM_ERR_HANDLING_MODE, EP_PARAM_REMOTE_ADDRESS, ERR_HANDLING_MODE_PEER, ERR_LAST,
    IN_PROGRESS, OK, OP_ATTR_FLAGS, OP_ATTR_MEMH,
};
use crate::functions::Functions;
use crate::memory::Memory;
use crate::packed::{unpack, Kind};
use crate::worker::{Worker, WorkerInner};
use crate::{Result, UcxError};

/// Longest time that the end of a connection takes. What UCX has not ended by then, the end of the worker ends.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// The connection to a worker of another node. Clones are the same connection.
#[derive(Clone)]
pub struct Endpoint {
    inner: Arc<EndpointInner>,
}

/// # Invariants
///
/// `raw` is an endpoint of `worker` until this is dropped. `keys` are keys of the endpoint, which are valid until then.
/// `worker` keeps `failure`.
struct EndpointInner {
    raw: Handle,
    failure: Arc<AtomicI8>,
    keys: Mutex<Vec<Handle>>,
    worker: Arc<WorkerInner>,
}

// SAFETY: as for the context, whose lock all calls of UCX hold.
unsafe impl Send for EndpointInner {}
// SAFETY: as above.
unsafe impl Sync for EndpointInner {}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({:?})", self.inner.raw)
    }
}

/// Stores the error of an endpoint. `argument` points to an `AtomicI8`.
unsafe extern "C" fn on_error(argument: *mut c_void, _endpoint: Handle, status: Status) {
    // SAFETY: the endpoint passed a pointer to a number that its worker keeps, and UCX calls this only while the worker exists.
    let failure = unsafe { &*argument.cast::<AtomicI8>() };
    failure.store(status, Ordering::Relaxed);
}

impl Endpoint {
    /// Begins to connect to the worker of another node, by its [`Worker::address`]. Both workers must make progress until the
    /// connection exists. An error of the connection ends its transfers ([`Endpoint::failure`]).
    ///
    /// # Safety
    ///
    /// UCX parses the address without a length. An address that has the right kind, version and checksum is one that
    /// [`Worker::address`] returned in some process: nobody has forged it.
    ///
    /// # Errors
    ///
    /// The address is damaged, or of another version of UCX, or no transport of this worker reaches it.
    pub unsafe fn new(worker: &Worker, address: &[u8]) -> Result<Self> {
        let (worker, context) = (&worker.inner, &worker.inner.context);
        let address = unpack(context.functions, Kind::Address, address)?;
        let failure = Arc::new(AtomicI8::new(OK));
        worker.keep_failure(&failure);
        let params = EpParams {
            field_mask: EP_PARAM_REMOTE_ADDRESS | EP_PARAM_ERR_HANDLING_MODE | EP_PARAM_ERR_HANDLER,
            address: address.as_ptr().cast(),
            err_mode: ERR_HANDLING_MODE_PEER,
            err_handler: ErrorHandler {
                cb: Some(on_error),
                arg: Arc::as_ptr(&failure).cast_mut().cast(),
            },
            ..EpParams::zeroed()
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the worker is valid by its invariant, and keeps the argument of the callback. The address is one that UCX
        // packed: it is not damaged, since its kind, version, and checksum were checked, and nobody has forged it, by this function's
        // contract. UCX keeps neither parameters nor address.
        let status = context.call(|functions| unsafe { (functions.create_endpoint)(worker.raw, &params, &mut raw) });
        context.functions.check("ucp_ep_create", status)?;
        // INVARIANT: created above.
        Ok(Self {
            inner: Arc::new(EndpointInner {
                raw,
                failure,
                keys: Mutex::default(),
                worker: worker.clone(),
            }),
        })
    }

    /// Returns the error that ended the connection.
    pub fn failure(&self) -> Option<UcxError> {
        let status = self.inner.failure.load(Ordering::Relaxed);
        (status != OK).then(|| UcxError::Connection {
            status,
            text: self.inner.functions().text(status),
        })
    }

    /// Returns the other node's memory, by its [`Memory::key`].
    ///
    /// # Safety
    ///
    /// UCX parses the key without a length. A key that has the right kind, version and checksum is one that [`Memory::key`]
    /// returned in some process: nobody has forged it.
    ///
    /// # Errors
    ///
    /// The key is damaged, or of another version of UCX, or the connection cannot access the memory.
    pub unsafe fn key(&self, key: &[u8]) -> Result<RemoteKey> {
        let (endpoint, context) = (&self.inner, &self.inner.worker.context);
        let key = unpack(context.functions, Kind::Key, key)?;
        let mut raw = ptr::null_mut();
        let status =
            // SAFETY: the endpoint is valid by its invariant, and `raw` is valid for a handle. The key is one that UCX packed: it is
            // not damaged, since it was checked, and nobody has forged it, by this function's contract.
            context.call(|functions| unsafe { (functions.unpack_key)(endpoint.raw, key.as_ptr().cast(), &mut raw) });
        context.functions.check("ucp_ep_rkey_unpack", status)?;
        endpoint.keys().push(raw);
        // INVARIANT: unpacked above for this endpoint, which destroys the key when it is dropped.
        Ok(RemoteKey {
            raw,
            endpoint: endpoint.clone(),
        })
    }

    /// Begins a flush: the request is done when all transfers that were begun before are complete at the other node.
    pub fn flush(&self) -> Request {
        let param = RequestParam::zeroed();
        let endpoint = &self.inner;
        let status = endpoint
            .worker
            .context
            // SAFETY: the endpoint is valid by its invariant, and UCX does not keep the parameters.
            .call(|functions| unsafe { (functions.flush)(endpoint.raw, &param) });
        Request::new("ucp_ep_flush_nbx", status, endpoint)
    }
}

impl EndpointInner {
    fn functions(&self) -> &'static Functions {
        self.worker.context.functions
    }

    fn keys(&self) -> std::sync::MutexGuard<'_, Vec<Handle>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for EndpointInner {
    fn drop(&mut self) {
        let context = &self.worker.context;
        let param = RequestParam {
            op_attr_mask: OP_ATTR_FLAGS,
            flags: EP_CLOSE_FLAG_FORCE,
            ..RequestParam::zeroed()
        };
        // SAFETY: the endpoint is valid by its invariant, and is not used after this.
        let status = context.call(|functions| unsafe { (functions.close_endpoint)(self.raw, &param) });
        let mut closed = true;
        if is_request(status) {
            let deadline = Instant::now() + CLOSE_LIMIT;
            loop {
                self.worker.progress();
                // SAFETY: the request is valid until it is freed below.
                closed = context.call(|functions| unsafe { (functions.request_status)(status) }) != IN_PROGRESS;
                if closed || Instant::now() >= deadline {
                    break;
                }
            }
            // SAFETY: the request is valid, and is not used after this.
            context.call(|functions| unsafe { (functions.free_request)(status) });
        }
        if closed {
            // Transfers use keys, so the keys of a connection that is not closed stay until the worker is destroyed.
            for key in self.keys().drain(..) {
                // SAFETY: a key of this endpoint by the invariant, which no transfer uses, and which is not used after this.
                context.call(|functions| unsafe { (functions.destroy_key)(key) });
            }
        }
    }
}

/// Memory of another node.
///
/// # Invariants
///
/// `raw` is a key of `endpoint`.
pub struct RemoteKey {
    raw: Handle,
    endpoint: Arc<EndpointInner>,
}

// SAFETY: as for the context, whose lock all calls of UCX hold.
unsafe impl Send for RemoteKey {}
// SAFETY: as above.
unsafe impl Sync for RemoteKey {}

impl fmt::Debug for RemoteKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteKey({:?})", self.raw)
    }
}

impl RemoteKey {
    /// Begins to write `len` bytes from byte `at` of `memory` to the address `to` of the other node. The request is done when
    /// `memory` may change; a flush says when the bytes are there. The other node's device refuses an address for which this
    /// is not the key, which ends the connection.
    ///
    /// # Errors
    ///
    /// Memory is exhausted, or the connection has ended.
    ///
    /// # Panics
    ///
    /// The bytes are not inside the memory, or the memory is of another context.
    pub fn put(&self, memory: &Memory, at: usize, len: usize, to: u64) -> Result<Request> {
        let (from, param) = self.local(memory, at, len);
        let (endpoint, key) = (&self.endpoint, self.raw);
        let status = endpoint
            .worker
            .context
            // SAFETY: endpoint and key are valid by their invariants. `from` is registered memory of `len` bytes, which the worker
            // keeps, and to which no reference exists. UCX does not keep the parameters.
            .call(|functions| unsafe { (functions.put)(endpoint.raw, from.cast_const(), len, to, key, &param) });
        Request::new("ucp_put_nbx", status, endpoint).begun()
    }

    /// Begins to read `len` bytes from the address `from` of the other node to byte `at` of `memory`. The request is done when
    /// the bytes are there.
    ///
    /// # Errors
    ///
    /// Those of [`RemoteKey::put`].
    ///
    /// # Panics
    ///
    /// As [`RemoteKey::put`].
    pub fn get(&self, memory: &Memory, at: usize, len: usize, from: u64) -> Result<Request> {
        let (to, param) = self.local(memory, at, len);
        let (endpoint, key) = (&self.endpoint, self.raw);
        let status = endpoint
            .worker
            .context
            // SAFETY: as in `put`; devices and UCX may change the memory, as no reference to it exists.
            .call(|functions| unsafe { (functions.get)(endpoint.raw, to, len, from, key, &param) });
        Request::new("ucp_get_nbx", status, endpoint).begun()
    }

    /// Returns the address of bytes of the own memory, and the parameters of a transfer.
    fn local(&self, memory: &Memory, at: usize, len: usize) -> (*mut c_void, RequestParam) {
        let worker = &self.endpoint.worker;
        assert!(
            Arc::ptr_eq(&memory.inner.context, &worker.context),
            "{memory:?} is of another context"
        );
        let address = memory.inner.at(at, len);
        worker.keep_memory(&memory.inner);
        let param = RequestParam {
            op_attr_mask: OP_ATTR_MEMH,
            memh: memory.inner.raw,
            ..RequestParam::zeroed()
        };
        (address, param)
    }
}

/// Returns whether UCX returned a request, and not null or a status.
fn is_request(status: StatusPointer) -> bool {
    let limit = isize::from(ERR_LAST) as usize;
    (status as usize).wrapping_sub(1) < limit - 1
}

/// A put, get, or flush. Dropping it does not end the transfer.
///
/// # Invariants
///
/// `raw` is null, a status, or a request of UCX until this is dropped.
pub struct Request {
    call: &'static str,
    raw: StatusPointer,
    endpoint: Arc<EndpointInner>,
}

// SAFETY: as for the context, whose lock all calls of UCX hold.
unsafe impl Send for Request {}
// SAFETY: as above.
unsafe impl Sync for Request {}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Request({}, {:?})", self.call, self.raw)
    }
}

impl Request {
    fn new(call: &'static str, raw: StatusPointer, endpoint: &Arc<EndpointInner>) -> Self {
        // INVARIANT: UCX returned `raw`.
        Self {
            call,
            raw,
            endpoint: endpoint.clone(),
        }
    }

    /// Returns the request, or the error if the transfer did not begin.
    fn begun(self) -> Result<Self> {
        match self.result() {
            Some(Err(error)) => Err(error),
            _ => Ok(self),
        }
    }

    fn status(&self) -> Status {
        if is_request(self.raw) {
            self.endpoint
                .worker
                .context
                // SAFETY: a request by the invariant.
                .call(|functions| unsafe { (functions.request_status)(self.raw) })
        } else {
            // A status is the lowest byte of the pointer.
            self.raw as usize as Status
        }
    }

    /// Returns the result; `None` while the transfer is in progress.
    pub fn result(&self) -> Option<Result<()>> {
        match self.status() {
            IN_PROGRESS => None,
            status => Some(self.endpoint.functions().check(self.call, status)),
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if is_request(self.raw) {
            self.endpoint
                .worker
                .context
                // SAFETY: a request by the invariant, which is not used after this. UCX completes the transfer also without it, and
                // the worker keeps the memory.
                .call(|functions| unsafe { (functions.free_request)(self.raw) });
        }
    }
}
