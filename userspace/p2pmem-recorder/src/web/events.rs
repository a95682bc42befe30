// SPDX-License-Identifier: MIT OR Apache-2.0

//! Server-sent events: the state of the node each second, and at once after a change.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tokio::sync::{watch, Notify, OwnedSemaphorePermit};

use super::app::{App, Snapshots};
use super::auth::Login;
use super::error::ApiError;
use crate::node::{Node, Observer};
use crate::status::Status;

/// The time between two events without a change.
const PERIOD: Duration = Duration::from_secs(1);
/// The shortest time between two events.
const GAP: Duration = Duration::from_millis(100);

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

impl App {
    /// Returns the state as JSON. Reads files, so it runs on a thread for this.
    pub(super) async fn snapshot(self: &Arc<Self>) -> Result<Arc<str>, ApiError> {
        let app = Arc::clone(self);
        let json = tokio::task::spawn_blocking(move || {
            serde_json::to_string(&Snapshot {
                schema: SCHEMA,
                status: app.node.status(),
                elapsed: u64::try_from(app.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            })
        });
        let json = json.await.map_err(ApiError::internal)?;
        json.map(Arc::from).map_err(ApiError::internal)
    }
}

/// Publishes the state to all event streams.
pub(super) struct Publisher {
    sender: watch::Sender<Arc<str>>,
    changed: Arc<Notify>,
    /// Exists as long as the publisher: the node has no other reference.
    _observer: Arc<Observer>,
}

impl Publisher {
    pub(super) fn new(node: &Node) -> (Self, Snapshots) {
        let (sender, snapshots) = watch::channel(Arc::from(""));
        let changed = Arc::new(Notify::new());
        let notify = Arc::clone(&changed);
        let observer: Arc<Observer> = Arc::new(move || notify.notify_one());
        node.observe(&observer);
        let publisher = Self {
            sender,
            changed,
            _observer: observer,
        };
        (publisher, snapshots)
    }

    /// Publishes until the future is dropped, which ends the event streams.
    pub(super) async fn run(self, app: Arc<App>) {
        loop {
            // After a second without a change, the state is published too.
            drop(tokio::time::timeout(PERIOD - GAP, self.changed.notified()).await);
            // The first receiver is that of `app`.
            if self.sender.receiver_count() > 1 {
                if let Ok(json) = app.snapshot().await {
                    self.sender.send_replace(json);
                }
            }
            tokio::time::sleep(GAP).await;
        }
    }
}

/// A stream of events to one client.
struct Stream {
    app: Arc<App>,
    login: Login,
    first: Option<Arc<str>>,
    snapshots: Snapshots,
    _permit: OwnedSemaphorePermit,
}

impl Stream {
    /// Returns the next event. The stream ends with the login, and with the server.
    async fn next(mut self) -> Option<(Result<String, std::convert::Infallible>, Self)> {
        let json = match self.first.take() {
            Some(json) => json,
            None => {
                self.snapshots.changed().await.ok()?;
                self.snapshots.borrow_and_update().clone()
            }
        };
        if !self.app.auth.is_valid(&self.login, Instant::now()) {
            return None;
        }
        Some((Ok(format!("event: status\ndata: {json}\n\n")), self))
    }
}

/// `GET /api/events`.
pub(super) async fn events(
    State(app): State<Arc<App>>,
    Extension(login): Extension<Login>,
) -> Result<Response, ApiError> {
    let permit = Arc::clone(&app.streams).try_acquire_owned();
    let permit =
        permit.map_err(|_| ApiError::busy("too many event streams are open; close other pages of this node"))?;
    let mut snapshots = app.snapshots.clone();
    snapshots.mark_unchanged();
    let stream = Stream {
        first: Some(app.snapshot().await?),
        app,
        login,
        snapshots,
        _permit: permit,
    };
    let body = Body::from_stream(futures_util::stream::unfold(stream, Stream::next));
    Ok(([(CONTENT_TYPE, "text/event-stream")], body).into_response())
}

/// `GET /api/status`.
pub(super) async fn status(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let json = app.snapshot().await?;
    Ok(([(CONTENT_TYPE, "application/json")], json.to_string()).into_response())
}
