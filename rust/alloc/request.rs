// SPDX-License-Identifier: GPL-2.0

//! An allocation request whose fields have been validated.
//!
//! Context: any; the file has data only.

use crate::{
    alloc::{
        rules::RuleSet,
        snapshot::TopologySnapshot, //
    },
    ext::abi::consts,
    mem::memory::Clearing,
    policy::{
        path::PathClass,
        placement::{
            Named,
            Request,
            Strategy, //
        }, //
    }, //
};
use kernel::sync::Arc;

/// An allocation request. `uapi::request` makes it of the ioctl's structure and checks all fields.
pub(crate) struct AllocRequest {
    /// Bytes, a multiple of the page size.
    pub(crate) size: u64,
    /// Alignment of the first byte in bytes, a power of two.
    pub(crate) align: u64,
    /// The clients, and the providers with their paths to the clients.
    pub(crate) snapshot: Arc<TopologySnapshot>,
    pub(crate) named: Named,
    pub(crate) strategy: u32,
    pub(crate) max_class: Option<PathClass>,
    /// Number of parts of a stripe; 0 means as many as can be served.
    pub(crate) parts: usize,
    /// The file's own rules.
    pub(crate) own: Option<Arc<RuleSet>>,
    pub(crate) clearing: Clearing,
}

impl AllocRequest {
    /// Returns the request in the form of the pure choice.
    pub(crate) fn request(&self, strategy: Strategy) -> Request {
        Request {
            size: self.size,
            align: self.align,
            clients: self.snapshot.clients.len(),
            named: self.named,
            strategy,
            max_class: self.max_class,
        }
    }

    /// Whether several providers serve the request with one buffer each.
    pub(crate) fn is_stripe(&self) -> bool {
        self.strategy == consts::STRATEGY_STRIPE
    }
}
