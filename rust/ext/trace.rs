// SPDX-License-Identifier: GPL-2.0

//! Tracepoints of the group `p2pmem`: events of buffers and decisions, for `trace-cmd` and `perf`.
//!
//! [`kernel::tracepoint`] declares tracepoints of the kernel itself, in whose bindings it looks for them. The tracepoints
//! here work in the same manner: while an event is disabled, its place in the code is a no-op instruction. The arguments are
//! closures that are called only while the event is enabled.
//!
//! The functions do not sleep and take no locks, but the closures may.
//!
//! C header: `rust/sys/p2pmem_trace.h`

use crate::{
    policy::path::PciAddr,
    sys, //
};
use kernel::{prelude::*, str::CStr};

/// The fields of every event of a buffer.
pub(crate) struct BufferFields {
    /// Number of the buffer.
    pub(crate) buffer: u64,
    /// Size of the buffer in bytes.
    pub(crate) size: u64,
    /// Id of the buffer's provider.
    pub(crate) provider: u32,
    /// Address of the provider's PCI function.
    pub(crate) function: PciAddr,
}

impl BufferFields {
    /// Returns the fields in C layout.
    fn raw(&self) -> sys::p2pmem_trace_buffer {
        sys::p2pmem_trace_buffer {
            buffer: self.buffer,
            size: self.size,
            provider: self.provider,
            domain: self.function.domain,
            bus: self.function.bus,
            devfn: self.function.devfn,
            ..Default::default()
        }
    }
}

/// The fields of a decision's event.
pub(crate) struct DecisionEvent {
    pub(crate) size: u64,
    pub(crate) align: u64,
    pub(crate) file: u64,
    pub(crate) clients: usize,
    pub(crate) providers: usize,
    pub(crate) strategy: u32,
    /// Id of the chosen provider, 0 for none.
    pub(crate) chosen: u32,
    /// The errno (positive), 0 if a provider was chosen.
    pub(crate) error: u32,
    /// True for a dry run, which allocates nothing.
    pub(crate) dry: bool,
}

/// Evaluates to whether the event of a tracepoint is enabled, by the tracepoint's static key.
macro_rules! is_on {
    ($tracepoint:ident) => {{
        #[cfg(CONFIG_TRACEPOINTS)]
        let on = {
            use kernel::{bindings::tracepoint, jump_label::static_branch_unlikely};
            // SAFETY: `rust/sys/trace.c` defines the tracepoint, a static, and the kernel's macros initialise its key.
            unsafe { static_branch_unlikely!(sys::$tracepoint, tracepoint, key) }
        };
        #[cfg(not(CONFIG_TRACEPOINTS))]
        let on = false;
        on
    }};
}

/// Traces an allocation: the buffer, its first byte in the BAR, the number of the file and the owner's uid.
#[inline(always)]
pub(crate) fn alloc(event: impl FnOnce() -> (BufferFields, u64, u64, u32)) {
    if is_on!(__tracepoint_p2pmem_alloc) {
        let (about, bar_offset, file, uid) = event();
        // SAFETY: The pointer is to a temporary that lives until the call returns; the tracepoint copies the fields.
        unsafe { sys::p2pmem_trace_alloc(&about.raw(), bar_offset, file, uid) };
    }
}

/// Traces the return of a buffer's memory.
#[inline(always)]
pub(crate) fn free(event: impl FnOnce() -> BufferFields) {
    if is_on!(__tracepoint_p2pmem_free) {
        // SAFETY: The pointer is to a temporary that lives until the call returns; the tracepoint copies the fields.
        unsafe { sys::p2pmem_trace_free(&event().raw()) };
    }
}

/// Traces a user mapping: the buffer, and offset and length of the mapped part in bytes.
#[inline(always)]
pub(crate) fn map(event: impl FnOnce() -> (BufferFields, u64, u64)) {
    if is_on!(__tracepoint_p2pmem_map) {
        let (about, offset, length) = event();
        // SAFETY: The pointer is to a temporary that lives until the call returns; the tracepoint copies the fields.
        unsafe { sys::p2pmem_trace_map(&about.raw(), offset, length) };
    }
}

/// How a device got access to a buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RegistrationMethod {
    /// As an attachment to a dma-buf.
    DmaBuf,
    /// Through the peer-memory interface.
    PeerMemory,
}

/// Traces a registration: the buffer, the number of the dma-buf or registration, its length in bytes and the device's name.
#[inline(always)]
pub(crate) fn register<'a>(method: RegistrationMethod, event: impl FnOnce() -> (BufferFields, u64, u64, &'a CStr)) {
    if is_on!(__tracepoint_p2pmem_register) {
        let (about, id, length, device) = event();
        let peer = method == RegistrationMethod::PeerMemory;
        // SAFETY: The pointers are to a temporary and a string that live until the call returns; the tracepoint copies
        // both.
        unsafe { sys::p2pmem_trace_register(&about.raw(), id, length, device.as_char_ptr(), peer) };
    }
}

/// Traces the revocation of a buffer: its user mappings and dma-bufs.
#[inline(always)]
pub(crate) fn revoke(event: impl FnOnce() -> (BufferFields, u32, u32)) {
    if is_on!(__tracepoint_p2pmem_revoke) {
        let (about, mappings, exports) = event();
        // SAFETY: The pointer is to a temporary that lives until the call returns; the tracepoint copies the fields.
        unsafe { sys::p2pmem_trace_revoke(&about.raw(), mappings, exports) };
    }
}

/// Traces a decision.
#[inline(always)]
pub(crate) fn decision(event: impl FnOnce() -> DecisionEvent) {
    if is_on!(__tracepoint_p2pmem_decision) {
        let of = event();
        let raw = sys::p2pmem_trace_decision {
            size: of.size,
            align: of.align,
            file: of.file,
            clients: of.clients as u32,
            providers: of.providers as u32,
            strategy: of.strategy,
            chosen: of.chosen,
            error: of.error,
            dry: of.dry,
            ..Default::default()
        };
        // SAFETY: The pointer is to a temporary that lives until the call returns; the tracepoint copies the fields.
        unsafe { sys::p2pmem_trace_decision(&raw) };
    }
}
