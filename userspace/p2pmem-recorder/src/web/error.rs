// SPDX-License-Identifier: MIT OR Apache-2.0

//! The answer to a request that failed: an HTTP status, and JSON with the reason and the remedy.

use std::io::ErrorKind;
use std::time::Duration;

use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};

use crate::store;

/// An error of the interface for programs.
#[derive(Debug)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    pub(super) message: String,
    pub(super) retry_after: Option<Duration>,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            retry_after: None,
        }
    }

    /// The server cannot do this now.
    pub(super) fn busy(message: impl Into<String>) -> Self {
        Self {
            retry_after: Some(Duration::from_secs(5)),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
        }
    }

    /// A task of the server panicked or was cancelled.
    pub(super) fn internal(error: impl std::fmt::Display) -> Self {
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("the program failed inside: {error}; report it with the program's output"),
        )
    }
}

impl From<store::Error> for ApiError {
    fn from(error: store::Error) -> Self {
        use store::Error;
        let status = match &error {
            Error::InvalidName { .. } | Error::InvalidValue { .. } => StatusCode::BAD_REQUEST,
            Error::NotFound { .. } => StatusCode::NOT_FOUND,
            Error::Exists { .. }
            | Error::Unfinished { .. }
            | Error::HasWriter { .. }
            | Error::InUse { .. }
            | Error::Busy { .. } => StatusCode::CONFLICT,
            Error::Full { .. } => StatusCode::INSUFFICIENT_STORAGE,
            Error::Io { source, .. } if matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                StatusCode::INSUFFICIENT_STORAGE
            }
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string())
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
pub(super) fn seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}
