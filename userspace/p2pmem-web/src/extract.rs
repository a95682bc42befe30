// SPDX-License-Identifier: MIT OR Apache-2.0

//! The body and the path of a request. What is not valid is answered with JSON.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::StatusCode;
use serde::de::DeserializeOwned;

use crate::error::ApiError;

/// The body of a request, as JSON.
#[derive(Debug)]
pub struct Json<T>(pub T);

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
#[derive(Debug)]
pub struct PathParts<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathParts<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = Path::<T>::from_request_parts(parts, state).await;
        path.map(|Path(parts)| Self(parts))
            .map_err(|error| ApiError::new(StatusCode::BAD_REQUEST, format!("the path is not valid: {error}")))
    }
}
