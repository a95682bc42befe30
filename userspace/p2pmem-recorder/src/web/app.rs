// SPDX-License-Identifier: MIT OR Apache-2.0

//! What all requests share, and their limits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{watch, Mutex, Semaphore};

use super::auth::Auth;
use super::topology::Machine;
use crate::node::Node;

/// The latest state as JSON.
pub(super) type Snapshots = watch::Receiver<Arc<str>>;

/// The shortest token, in bytes.
pub const MIN_TOKEN: usize = 16;

/// Bytes of the body of a request.
pub(super) const MAX_BODY: usize = 16 << 10;
/// Event streams at the same time.
pub(super) const MAX_STREAMS: usize = 32;
/// Changes at the same time. Each occupies a thread, see `BLOCKING_THREADS` of the server.
pub(super) const MAX_CHANGES: usize = 4;

/// How the management works.
#[derive(Clone)]
pub struct WebOptions {
    pub(super) token: String,
    pub(super) login: Duration,
    /// After so long, an address may fail to log in once more.
    pub(super) interval: Duration,
    pub(super) machine: Machine,
}

impl std::fmt::Debug for WebOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WebOptions")
            .field("login", &self.login)
            .finish_non_exhaustive()
    }
}

impl WebOptions {
    /// Returns options with the token that gives access, at least [`MIN_TOKEN`] bytes. A login lasts 12 hours.
    pub fn new(token: impl Into<String>) -> Self {
        Self {
            token: token.into(),
            login: Duration::from_secs(12 * 60 * 60),
            interval: Duration::from_secs(6),
            machine: Machine::default(),
        }
    }

    /// Sets how long a login in the browser lasts.
    #[must_use]
    pub fn login_lasts(mut self, time: Duration) -> Self {
        self.login = time;
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
    pub(super) auth: Auth,
    pub(super) started: Instant,
    pub(super) snapshots: Snapshots,
    pub(super) streams: Arc<Semaphore>,
    pub(super) changes: Arc<Semaphore>,
    pub(super) machine: Machine,
    /// Locked while a topology is read.
    pub(super) topology: Arc<Mutex<()>>,
}

impl App {
    pub(super) fn new(node: Arc<Node>, options: &WebOptions, snapshots: Snapshots) -> Arc<Self> {
        Arc::new(Self {
            node,
            auth: Auth::new(&options.token, options.login, options.interval),
            started: Instant::now(),
            snapshots,
            streams: Arc::new(Semaphore::new(MAX_STREAMS)),
            changes: Arc::new(Semaphore::new(MAX_CHANGES)),
            machine: options.machine.clone(),
            topology: Arc::default(),
        })
    }
}
