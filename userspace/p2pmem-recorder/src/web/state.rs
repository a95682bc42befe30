// SPDX-License-Identifier: MIT OR Apache-2.0

//! The state of the node, as the pages and programs see it.

use std::sync::Arc;
use std::time::Instant;

use p2pmem_web::State;
use serde::Serialize;

use crate::node::{Node, Observer};
use crate::status::Status;

/// The version of the members of the state.
const SCHEMA: u32 = 1;

#[derive(Serialize)]
struct Snapshot {
    schema: u32,
    /// Milliseconds, for rates.
    elapsed: u64,
    #[serde(flatten)]
    status: Status,
}

/// The state of a node.
pub(super) struct NodeState {
    pub(super) node: Arc<Node>,
    pub(super) started: Instant,
    /// Exists as long as the state: the node has no other reference.
    pub(super) _observer: Arc<Observer>,
}

impl State for NodeState {
    /// Reads files of the drives.
    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(&Snapshot {
            schema: SCHEMA,
            status: self.node.status(),
            elapsed: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        })
    }
}
