// SPDX-License-Identifier: MIT OR Apache-2.0

//! The interface for programs, which the pages use too: paths below `/api`, with JSON.

use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::Router;
use p2pmem_web::{ApiError, Json, PathParts};
use serde::Deserialize;
use tokio::sync::oneshot;

use super::app::App;
use super::topology;
use crate::node::Node;
use crate::store::{self, ChannelName, LunOptions, StreamOptions};

type Answer = Result<Response, ApiError>;

pub(super) fn routes(app: Arc<App>) -> Router {
    let recording = "/luns/{lun}/streams/{stream}/channels/{channel}/recordings/{recording}";
    Router::new()
        .route("/luns", post(create_lun))
        .route("/luns/{lun}", delete(delete_lun))
        .route("/luns/{lun}/streams", post(create_stream))
        .route("/luns/{lun}/streams/{stream}", delete(delete_stream))
        .route(recording, delete(delete_recording))
        .route("/sessions/{session}/stop", post(stop_session))
        .route("/drives/{drive}/errors/{session}", delete(acknowledge_error))
        .route("/topology", get(topology))
        .with_state(app)
}

impl App {
    /// Runs a change on a thread that may block.
    async fn change(&self, change: impl FnOnce(&Node) -> store::Result<()> + Send + 'static) -> Result<(), ApiError> {
        let node = Arc::clone(&self.node);
        self.changes.run(move || change(&node)).await
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
    let (permit, node) = (app.changes.permit()?, Arc::clone(&app.node));
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

async fn delete_lun(State(app): State<Arc<App>>, PathParts(lun): PathParts<String>) -> Answer {
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
    PathParts(lun): PathParts<String>,
    Json(stream): Json<NewStream>,
) -> Answer {
    let options = StreamOptions::new(stream.block_size).channels(stream.channels);
    app.change(move |node| node.create_stream(&lun, &stream.name, &options))
        .await?;
    Ok(StatusCode::CREATED.into_response())
}

async fn delete_stream(State(app): State<Arc<App>>, PathParts((lun, stream)): PathParts<(String, String)>) -> Answer {
    app.change(move |node| node.delete_stream(&lun, &stream)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn delete_recording(
    State(app): State<Arc<App>>,
    PathParts((lun, stream, channel, recording)): PathParts<(String, String, u32, u64)>,
) -> Answer {
    let channel = ChannelName::new(&lun, &stream, channel);
    app.change(move |node| node.delete_recording(&channel, recording))
        .await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn stop_session(State(app): State<Arc<App>>, PathParts(session): PathParts<u64>) -> Answer {
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
async fn acknowledge_error(
    State(app): State<Arc<App>>,
    PathParts((drive, session)): PathParts<(usize, u64)>,
) -> Answer {
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
