// SPDX-License-Identifier: MIT OR Apache-2.0

//! Server-sent events: the state of the program each second, and at once after a change.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use tokio::sync::{watch, OwnedSemaphorePermit};

use crate::auth::Login;
use crate::error::ApiError;
use crate::site::{App, Changed, Snapshots};

/// The time between two events without a change.
const PERIOD: Duration = Duration::from_secs(1);
/// The shortest time between two events.
const GAP: Duration = Duration::from_millis(100);

impl App {
    /// Returns the state as JSON. Runs on a thread for work that blocks.
    pub(crate) async fn snapshot(self: &Arc<Self>) -> Result<Arc<str>, ApiError> {
        let app = Arc::clone(self);
        let json = tokio::task::spawn_blocking(move || app.state.json());
        let json = json.await.map_err(ApiError::internal)?;
        json.map(Arc::from).map_err(ApiError::internal)
    }
}

/// Publishes the state to all event streams.
pub(crate) struct Publisher {
    sender: watch::Sender<Arc<str>>,
    changed: Changed,
}

impl Publisher {
    pub(crate) fn new(changed: Changed) -> (Self, Snapshots) {
        let (sender, snapshots) = watch::channel(Arc::from(""));
        (Self { sender, changed }, snapshots)
    }

    /// Publishes until the future is dropped, which ends the event streams.
    pub(crate) async fn run(self, app: Arc<App>) {
        loop {
            // After a second without a change, the state is published too.
            drop(tokio::time::timeout(PERIOD - GAP, self.changed.wait()).await);
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
pub(crate) async fn events(
    State(app): State<Arc<App>>,
    Extension(login): Extension<Login>,
) -> Result<Response, ApiError> {
    let permit = Arc::clone(&app.streams).try_acquire_owned();
    let permit =
        permit.map_err(|_| ApiError::busy("too many event streams are open; close other pages of this server"))?;
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
pub(crate) async fn status(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let json = app.snapshot().await?;
    Ok(([(CONTENT_TYPE, "application/json")], json.to_string()).into_response())
}
