// SPDX-License-Identifier: MIT OR Apache-2.0

//! The options of the management, and what all requests share.

use std::sync::Arc;
use std::time::Duration;

use p2pmem_web::{Access, Changes};
use tokio::sync::Mutex;

use super::topology::Machine;
use crate::node::Node;

/// How the management works.
#[derive(Clone)]
pub struct WebOptions {
    pub(super) access: Access,
    pub(super) machine: Machine,
}

impl std::fmt::Debug for WebOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WebOptions")
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

impl WebOptions {
    /// Returns options with the token that gives access, at least [`MIN_TOKEN`](super::MIN_TOKEN) bytes. A login lasts 12 hours.
    pub fn new(token: impl Into<String>) -> Self {
        Self {
            access: Access::new(token),
            machine: Machine::default(),
        }
    }

    /// Sets how long a login in the browser lasts.
    #[must_use]
    pub fn login_lasts(mut self, time: Duration) -> Self {
        self.access = self.access.login_lasts(time);
        self
    }

    /// Sets the machine whose PCI tree the pages show, for tests. Without this call, it is the machine of the program.
    #[must_use]
    pub fn machine(mut self, machine: Machine) -> Self {
        self.machine = machine;
        self
    }
}

/// What all requests share.
pub(super) struct App {
    pub(super) node: Arc<Node>,
    pub(super) changes: Changes,
    pub(super) machine: Machine,
    /// Locked while a topology is read.
    pub(super) topology: Arc<Mutex<()>>,
}
