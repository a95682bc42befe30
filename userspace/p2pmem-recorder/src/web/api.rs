// SPDX-License-Identifier: MIT OR Apache-2.0

//! The interface for programs, which the pages use too: paths below `/api`, with JSON.

use std::path::PathBuf;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::Router;
use serde::de::DeserializeOwned;
use serde::Deserialize;
use tokio::sync::{oneshot, OwnedSemaphorePermit};

use super::app::App;
use super::error::ApiError;
use super::{events, guard, topology};
use crate::node::Node;
use crate::store::{self, ChannelName, LunOptions, StreamOptions};

type Answer = Result<Response, ApiError>;

pub(super) fn routes(app: &Arc<App>) -> Router<Arc<App>> {
    let recording = "/luns/{lun}/streams/{stream}/channels/{channel}/recordings/{recording}";
    Router::new()
        .route("/status", get(events::status))
        .route("/events", get(events::events))
        .route("/luns", post(create_lun))
        .route("/luns/{lun}", delete(delete_lun))
        .route("/luns/{lun}/streams", post(create_stream))
        .route("/luns/{lun}/streams/{stream}", delete(delete_stream))
        .route(recording, delete(delete_recording))
        .route("/sessions/{session}/stop", post(stop_session))
        .route("/drives/{drive}/errors/{session}", delete(acknowledge_error))
        .route("/topology", get(topology))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(app), guard::require_login))
}

async fn unknown() -> ApiError {
    ApiError::new(
        StatusCode::NOT_FOUND,
        "there is no such path; see the table in Documentation/recorder.md",
    )
}

async fn wrong_method() -> ApiError {
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "the path does not have this method; see the table in Documentation/recorder.md",
    )
}

/// The body of a request, as JSON.
struct Json<T>(T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let kind = request
            .headers()
            .get(CONTENT_TYPE)
            .and_then(|value| value.to_str().ok());
        let kind = kind.and_then(|value| value.split(';').next()).map(str::trim);
        if kind.is_none_or(|kind| !kind.eq_ignore_ascii_case("application/json")) {
            return Err(ApiError::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "the body of the request is no JSON; send the header Content-Type: application/json",
            ));
        }
        let invalid = |error: &dyn std::fmt::Display| {
            ApiError::new(
                StatusCode::BAD_REQUEST,
                format!("the body of the request is not valid: {error}"),
            )
        };
        let bytes = Bytes::from_request(request, state)
            .await
            .map_err(|error| invalid(&error))?;
        serde_json::from_slice(&bytes)
            .map(Json)
            .map_err(|error| invalid(&error))
    }
}

/// The parts of the path.
struct Named<T>(T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Named<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = Path::<T>::from_request_parts(parts, state).await;
        path.map(|Path(parts)| Self(parts))
            .map_err(|error| ApiError::new(StatusCode::BAD_REQUEST, format!("the path is not valid: {error}")))
    }
}

impl App {
    /// Returns permission for a change, which occupies a thread.
    fn change_permit(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let permit = Arc::clone(&self.changes).try_acquire_owned();
        permit.map_err(|_| ApiError::busy("too many changes are in progress; try again when one is complete"))
    }

    /// Runs a change on a thread that may block.
    async fn change(&self, change: impl FnOnce(&Node) -> store::Result<()> + Send + 'static) -> Result<(), ApiError> {
        let (permit, node) = (self.change_permit()?, Arc::clone(&self.node));
        let task = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            change(&node)
        });
        Ok(task.await.map_err(ApiError::internal)??)
    }
}

/// A new LUN.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewLun {
    name: String,
    drives: Vec<PathBuf>,
    segment_size: u64,
    segments: u64,
}

/// Begins to create a LUN, and answers when all is valid and writing begins. The state has the progress.
async fn create_lun(State(app): State<Arc<App>>, Json(lun): Json<NewLun>) -> Answer {
    let (permit, node) = (app.change_permit()?, Arc::clone(&app.node));
    let (begun, has_begun) = oneshot::channel();
    let task = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        let options = LunOptions::new(lun.drives)
            .segment_size(lun.segment_size)
            .segments(lun.segments);
        // Sending fails if the client has gone, which does not concern the creation.
        node.create_lun_with(&lun.name, &options, || begun.send(()).unwrap_or_default())
    });
    // The sender is dropped unused after an error.
    if has_begun.await.is_err() {
        task.await.map_err(ApiError::internal)??;
    }
    Ok(StatusCode::ACCEPTED.into_response())
}

async fn delete_lun(State(app): State<Arc<App>>, Named(lun): Named<String>) -> Answer {
    app.change(move |node| node.delete_lun(&lun)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// A new stream.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewStream {
    name: String,
    block_size: u64,
    channels: u32,
}

async fn create_stream(
    State(app): State<Arc<App>>,
    Named(lun): Named<String>,
    Json(stream): Json<NewStream>,
) -> Answer {
    let options = StreamOptions::new(stream.block_size).channels(stream.channels);
    app.change(move |node| node.create_stream(&lun, &stream.name, &options))
        .await?;
    Ok(StatusCode::CREATED.into_response())
}

async fn delete_stream(State(app): State<Arc<App>>, Named((lun, stream)): Named<(String, String)>) -> Answer {
    app.change(move |node| node.delete_stream(&lun, &stream)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn delete_recording(
    State(app): State<Arc<App>>,
    Named((lun, stream, channel, recording)): Named<(String, String, u32, u64)>,
) -> Answer {
    let channel = ChannelName::new(&lun, &stream, channel);
    app.change(move |node| node.delete_recording(&channel, recording))
        .await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn stop_session(State(app): State<Arc<App>>, Named(session): Named<u64>) -> Answer {
    if app.node.stop_session(session) {
        Ok(StatusCode::NO_CONTENT.into_response())
    } else {
        Err(ApiError::new(
            StatusCode::NOT_FOUND,
            format!("no session {session} runs; it may have ended already"),
        ))
    }
}

/// Removes the error of a session with a drive from the state, because a person knows it.
async fn acknowledge_error(State(app): State<Arc<App>>, Named((drive, session)): Named<(usize, u64)>) -> Answer {
    if app.node.acknowledge_drive_error(drive, session) {
        Ok(StatusCode::NO_CONTENT.into_response())
    } else {
        Err(ApiError::new(
            StatusCode::NOT_FOUND,
            format!(
                "drive {drive} has no error of session {session} any more; a later session may have used the drive"
            ),
        ))
    }
}

/// Returns the topology. One request at a time reads it.
async fn topology(State(app): State<Arc<App>>) -> Answer {
    let turn = Arc::clone(&app.topology).lock_owned().await;
    let task = tokio::task::spawn_blocking(move || {
        let drawn = topology::draw(&app.machine, &app.node);
        // Not when the client has gone: the thread is busy until here.
        drop(turn);
        drawn
    });
    let json = task.await.map_err(ApiError::internal)??;
    Ok(([(CONTENT_TYPE, "application/json")], json).into_response())
}
