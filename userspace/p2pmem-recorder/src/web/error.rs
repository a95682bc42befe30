// SPDX-License-Identifier: MIT OR Apache-2.0

//! The answers to requests that the store refused.

use std::io::ErrorKind;

use axum::http::StatusCode;
use p2pmem_web::ApiError;

use crate::store;

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
