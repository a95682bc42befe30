// SPDX-License-Identifier: MIT OR Apache-2.0

//! The service: the page of the node, its state, and its interface for programs.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Instant;

use p2pmem_web::{Asset, Changed, Changes, Server, Service, Site, SCRIPT, STYLE};

use super::api;
use super::app::{App, WebOptions};
use super::state::NodeState;
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

/// Serves the management of `node` to the clients that connect to `listener`, on a thread of its own.
///
/// # Errors
///
/// `InvalidInput` if the token has fewer than [`MIN_TOKEN`](super::MIN_TOKEN) bytes; the error of the system call if no thread
/// or no runtime can be created.
pub fn serve(node: Arc<Node>, listener: TcpListener, options: &WebOptions) -> std::io::Result<Server> {
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
