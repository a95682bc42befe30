// SPDX-License-Identifier: MIT OR Apache-2.0

//! The answer to a request that failed: an HTTP status, and JSON with the reason and the remedy.

use std::time::Duration;

use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};

/// An error of the interface for programs.
#[derive(Debug)]
pub struct ApiError {
    /// The status of the answer.
    pub status: StatusCode,
    /// The reason, and what to do.
    pub message: String,
    /// When the same request may succeed.
    pub retry_after: Option<Duration>,
}

impl ApiError {
    /// Creates an error.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            retry_after: None,
        }
    }

    /// The server cannot do this now.
    pub fn busy(message: impl Into<String>) -> Self {
        Self {
            retry_after: Some(Duration::from_secs(5)),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
        }
    }

    /// A task of the server panicked or was cancelled.
    pub fn internal(error: impl std::fmt::Display) -> Self {
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("the program failed inside: {error}; report it with the program's output"),
        )
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = serde_json::json!({ "error": self.message }).to_string();
        let mut response = (self.status, [(CONTENT_TYPE, "application/json")], body).into_response();
        let headers = response.headers_mut();
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(time) = self.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds(time)));
        }
        response
    }
}

/// Returns a time in seconds, rounded up.
pub(crate) fn seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}
