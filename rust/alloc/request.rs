// SPDX-License-Identifier: GPL-2.0

//! A request for memory, with all fields checked.

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
            self,
            Named,
            Strategy, //
        }, //
    }, //
};
use kernel::sync::Arc;

/// What is asked for, with all fields checked.
pub(crate) struct AllocRequest {
    pub(crate) size: u64,
    pub(crate) align: u64,
    /// The clients, and what there is to choose from.
    pub(crate) snapshot: Arc<TopologySnapshot>,
    pub(crate) named: Named,
    pub(crate) strategy: u32,
    pub(crate) max_class: Option<PathClass>,
    /// How many providers a stripe is divided among; 0 for as many as can serve.
    pub(crate) parts: usize,
    /// The rules of the file itself.
    pub(crate) own: Option<Arc<RuleSet>>,
    pub(crate) clearing: Clearing,
}

impl AllocRequest {
    pub(crate) fn request(&self, strategy: Strategy) -> placement::Request {
        placement::Request {
            size: self.size,
            align: self.align,
            clients: self.snapshot.clients.len(),
            named: self.named,
            strategy,
            max_class: self.max_class,
        }
    }

    /// Whether the nearest is wanted.
    pub(crate) fn is_quick(&self) -> bool {
        self.named == Named::Any && self.strategy == consts::STRATEGY_NEAREST
    }
}
