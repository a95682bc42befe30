// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory that UCX has registered.

use std::ffi::c_void;
use std::fmt;
use std::mem;
use std::ptr;
use std::slice;
use std::sync::Arc;

use p2pmem_verbs::Span;

use crate::abi::{
    Handle, MemMapParams, Zeroed, MEMORY_TYPE_HOST, MEM_MAP_PARAM_ADDRESS, MEM_MAP_PARAM_LENGTH,
    MEM_MAP_PARAM_MEMORY_TYPE, OK,
};
use crate::context::{Context, ContextInner};
use crate::packed::{pack, Kind};
use crate::Result;

/// A part of a span that UCX has registered. Clones are the same registration.
#[derive(Clone)]
pub struct Memory {
    pub(crate) inner: Arc<MemoryInner>,
}

/// # Invariants
///
/// `raw` is the registration of `len` bytes from `address`, which are inside `span`, until this is dropped.
pub(crate) struct MemoryInner {
    pub(crate) raw: Handle,
    pub(crate) address: u64,
    pub(crate) len: usize,
    /// `None` if the registration could not be ended.
    span: Option<Span>,
    pub(crate) context: Arc<ContextInner>,
}

// SAFETY: as for the context, whose lock all calls of UCX hold.
unsafe impl Send for MemoryInner {}
// SAFETY: as above.
unsafe impl Sync for MemoryInner {}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({:#x}, {:#x} bytes)", self.inner.address, self.inner.len)
    }
}

impl Memory {
    /// Registers `len` bytes from byte `at` of a span. Nodes that get the key can read and write these bytes.
    ///
    /// # Errors
    ///
    /// A device of the context cannot access the memory: memory of another device takes the preload shim of p2pmem.
    ///
    /// # Panics
    ///
    /// The bytes are not inside the span, or there are none.
    pub fn map(context: &Context, span: &Span, at: usize, len: usize) -> Result<Self> {
        let inside = at.checked_add(len).is_some_and(|end| end <= span.len());
        assert!(inside && len > 0, "{len} bytes at {at} are not inside {span:?}");
        let context = &context.inner;
        let address = span.address() + at as u64;
        let params = MemMapParams {
            field_mask: MEM_MAP_PARAM_ADDRESS | MEM_MAP_PARAM_LENGTH | MEM_MAP_PARAM_MEMORY_TYPE,
            address: address as *mut c_void,
            length: len,
            memory_type: MEMORY_TYPE_HOST,
            ..MemMapParams::zeroed()
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the context is valid by its invariant, and the parameters describe mapped memory, which the clone of the span
        // keeps mapped. No references to the memory exist, so devices and UCX may change it.
        let status = context.call(|functions| unsafe { (functions.map)(context.raw, &params, &mut raw) });
        context.functions.check("ucp_mem_map", status)?;
        // INVARIANT: registered above.
        Ok(Self {
            inner: Arc::new(MemoryInner {
                raw,
                address,
                len,
                span: Some(span.clone()),
                context: context.clone(),
            }),
        })
    }

    /// Returns the address of the first byte, for the other node.
    pub fn address(&self) -> u64 {
        self.inner.address
    }

    /// Returns the length in bytes.
    #[allow(clippy::len_without_is_empty)] // `map` refuses 0 bytes
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// Returns the key for another node, see [`Endpoint::key`](crate::Endpoint::key).
    ///
    /// # Errors
    ///
    /// Memory is exhausted, or the key is larger than another node accepts.
    pub fn key(&self) -> Result<Vec<u8>> {
        let context = &self.inner.context;
        let (mut bytes, mut len) = (ptr::null_mut(), 0);
        let status = context
            // SAFETY: context and registration are valid by their invariants, and the pointers are valid for the results.
            .call(|functions| unsafe { (functions.pack_key)(context.raw, self.inner.raw, &mut bytes, &mut len) });
        context.functions.check("ucp_rkey_pack", status)?;
        // SAFETY: UCX returned `len` bytes at `bytes`, which stay until they are released below.
        let packed = pack(context.functions, Kind::Key, unsafe {
            slice::from_raw_parts(bytes.cast::<u8>(), len)
        });
        // SAFETY: returned by ucp_rkey_pack(), and not used after this.
        context.call(|functions| unsafe { (functions.release_key)(bytes) });
        packed
    }
}

impl MemoryInner {
    /// Returns the address of `len` bytes from byte `at`.
    ///
    /// # Panics
    ///
    /// The bytes are not inside the memory.
    pub(crate) fn at(&self, at: usize, len: usize) -> *mut c_void {
        let inside = at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "{len} bytes at {at} are not inside {:#x} bytes", self.len);
        (self.address + at as u64) as *mut c_void
    }
}

impl Drop for MemoryInner {
    fn drop(&mut self) {
        let (context, raw) = (&self.context, self.raw);
        // SAFETY: context and registration are valid by their invariants. A worker keeps the memory of its transfers until it
        // is destroyed, so no transfer uses the memory.
        let status = context.call(|functions| unsafe { (functions.unmap)(context.raw, raw) });
        if status != OK {
            // Devices may still access the memory, so it stays mapped.
            mem::forget(self.span.take());
        }
    }
}
