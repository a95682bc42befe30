// SPDX-License-Identifier: MIT OR Apache-2.0

//! What all requests share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use p2pmem_web::{Access, Asset, Changed, Changes, Server, Service, Site, SCRIPT, STYLE};
use tokio::sync::Mutex;

use super::api;
use super::state::NodeState;
use super::topology::Machine;
use crate::node::{Node, Observer};

const SITE: Site = Site {
    name: "p2pmem-recorder",
    title: "p2pmem recorder",
    token_hint: "The token that this storage node was started with.",
    guide: "Documentation/recorder.md",
    index: include_str!("../../web/index.html"),
    assets: &[
        Asset {
            path: "/assets/app.js",
            kind: SCRIPT,
            content: include_str!("../../web/app.js"),
        },
        Asset {
            path: "/assets/style.css",
            kind: STYLE,
            content: include_str!("../../web/style.css"),
        },
    ],
};

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

/// Serves the management of `node` to the clients that connect to `listener`, on a thread of its own.
///
/// # Errors
///
/// `InvalidInput` if the token has fewer than [`MIN_TOKEN`](super::MIN_TOKEN) bytes; the error of the system call if no thread
/// or no runtime can be created.
pub fn serve(node: Arc<Node>, listener: std::net::TcpListener, options: &WebOptions) -> std::io::Result<Server> {
    let changed = Changed::default();
    let notify = changed.clone();
    let observer: Arc<Observer> = Arc::new(move || notify.notify());
    node.observe(&observer);
    let state = NodeState {
        node: Arc::clone(&node),
        started: Instant::now(),
        _observer: observer,
    };
    let app = Arc::new(App {
        node,
        changes: Changes::default(),
        machine: options.machine.clone(),
        topology: Arc::default(),
    });
    let service = Service {
        site: &SITE,
        state: Arc::new(state),
        changed,
        api: api::routes(app),
    };
    p2pmem_web::serve(service, listener, &options.access)
}

/// What all requests share.
pub(super) struct App {
    pub(super) node: Arc<Node>,
    pub(super) changes: Changes,
    pub(super) machine: Machine,
    /// Locked while a topology is read.
    pub(super) topology: Arc<Mutex<()>>,
}
