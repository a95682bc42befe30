// SPDX-License-Identifier: GPL-2.0

//! Tracepoints: events of buffers and decisions for `trace-cmd` and `perf`, group `p2pmem`.
//!
//! C header: `rust/sys/p2pmem_trace.h`
//!
//! [`kernel::tracepoint`] declares those of the kernel itself, as it looks for them in its own bindings. These work in the
//! same way: while an event is off, its place in the code is an instruction that does nothing. What an event would say is
//! therefore handed over as a function, which is called only while it is on.

use crate::{
    policy::path::PciAddr,
    sys, //
};
use kernel::{prelude::*, str::CStr};

/// What every event about a buffer says of it.
pub(crate) struct About {
    /// The buffer's number.
    pub(crate) buffer: u64,
    /// Its bytes.
    pub(crate) size: u64,
    /// Its provider's number.
    pub(crate) provider: u32,
    /// Its provider's function.
    pub(crate) function: PciAddr,
}

impl About {
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

/// What the event of a decision says.
pub(crate) struct DecisionEvent {
    pub(crate) size: u64,
    pub(crate) align: u64,
    pub(crate) file: u64,
    pub(crate) clients: usize,
    pub(crate) providers: usize,
    pub(crate) strategy: u32,
    /// The provider's number, 0 for none.
    pub(crate) chosen: u32,
    /// The errno, 0 where one was chosen.
    pub(crate) error: u32,
    /// Whether nothing was to be allocated.
    pub(crate) dry: bool,
}

/// Whether an event is on, by its tracepoint.
macro_rules! is_on {
    ($tracepoint:ident) => {{
        #[cfg(CONFIG_TRACEPOINTS)]
        let on = {
            use kernel::{bindings::tracepoint, jump_label::static_branch_unlikely};
            // SAFETY: The tracepoint is defined by `rust/sys/trace.c`, its key by the kernel's own macros.
            unsafe { static_branch_unlikely!(sys::$tracepoint, tracepoint, key) }
        };
        #[cfg(not(CONFIG_TRACEPOINTS))]
        let on = false;
        on
    }};
}

/// A buffer has memory: what it is, where in the BAR it begins, the number of its file, and its owner's uid.
#[inline(always)]
pub(crate) fn alloc(event: impl FnOnce() -> (About, u64, u64, u32)) {
    if is_on!(__tracepoint_p2pmem_alloc) {
        let (about, bar_offset, file, uid) = event();
        // SAFETY: The structure is read before the call returns.
        unsafe { sys::p2pmem_trace_alloc(&about.raw(), bar_offset, file, uid) };
    }
}

/// A buffer's memory goes back.
#[inline(always)]
pub(crate) fn free(event: impl FnOnce() -> About) {
    if is_on!(__tracepoint_p2pmem_free) {
        // SAFETY: The structure is read before the call returns.
        unsafe { sys::p2pmem_trace_free(&event().raw()) };
    }
}

/// A part of a buffer was mapped by a program: where the part begins, and its bytes.
#[inline(always)]
pub(crate) fn map(event: impl FnOnce() -> (About, u64, u64)) {
    if is_on!(__tracepoint_p2pmem_map) {
        let (about, offset, length) = event();
        // SAFETY: The structure is read before the call returns.
        unsafe { sys::p2pmem_trace_map(&about.raw(), offset, length) };
    }
}

/// What made a device able to reach a buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RegistrationMethod {
    DmaBuf,
    #[cfg_attr(not(p2pmem_peer), allow(dead_code))]
    PeerMemory,
}

/// A device attached to a dma-buf of a buffer, or registered it: the number of the dma-buf or registration, its bytes, and
/// the device's name.
#[inline(always)]
pub(crate) fn register<'a>(method: RegistrationMethod, event: impl FnOnce() -> (About, u64, u64, &'a CStr)) {
    if is_on!(__tracepoint_p2pmem_register) {
        let (about, id, length, device) = event();
        let peer = method == RegistrationMethod::PeerMemory;
        // SAFETY: The structure and the string are read before the call returns.
        unsafe { sys::p2pmem_trace_register(&about.raw(), id, length, device.as_char_ptr(), peer) };
    }
}

/// A buffer is taken from those who hold it: its mappings and dma-bufs.
#[inline(always)]
pub(crate) fn revoke(event: impl FnOnce() -> (About, u32, u32)) {
    if is_on!(__tracepoint_p2pmem_revoke) {
        let (about, mappings, exports) = event();
        // SAFETY: The structure is read before the call returns.
        unsafe { sys::p2pmem_trace_revoke(&about.raw(), mappings, exports) };
    }
}

/// Something was decided.
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
        // SAFETY: The structure is read before the call returns.
        unsafe { sys::p2pmem_trace_decision(&raw) };
    }
}
