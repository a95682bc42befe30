// SPDX-License-Identifier: MIT OR Apache-2.0

//! Changes that block: a limited number at the same time, each on a thread.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;

/// Changes at the same time. Each occupies a thread, see `BLOCKING_THREADS` of the server.
pub const MAX_CHANGES: usize = 4;

/// The changes of a program.
#[derive(Debug, Clone)]
pub struct Changes(Arc<Semaphore>);

impl Default for Changes {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_CHANGES)))
    }
}

impl Changes {
    /// Returns permission for a change, which occupies a thread.
    ///
    /// # Errors
    ///
    /// Too many changes are in progress.
    pub fn permit(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let permit = Arc::clone(&self.0).try_acquire_owned();
        permit.map_err(|_| ApiError::busy("too many changes are in progress; try again when one is complete"))
    }

    /// Runs a change on a thread that may block.
    ///
    /// # Errors
    ///
    /// Those of the change; too many changes are in progress.
    pub async fn run<T, E>(&self, change: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, ApiError>
    where
        T: Send + 'static,
        E: Into<ApiError> + Send + 'static,
    {
        let permit = self.permit()?;
        let task = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            change()
        });
        task.await.map_err(ApiError::internal)?.map_err(Into::into)
    }
}
