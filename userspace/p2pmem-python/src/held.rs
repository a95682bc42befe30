// SPDX-License-Identifier: MIT OR Apache-2.0

//! Values that can be closed, and that know which process made them.

use std::mem::forget;
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::other;

/// A value of the library inside a Python object, until the object is closed.
///
/// A call clones the `Arc`, so that a value is alive until the last call that uses it has returned, even if another thread
/// closes the object meanwhile.
///
/// A fork copies the object and shares the open file of the device. If the child dropped a buffer, the parent would lose the
/// buffer. So the child cannot use values of its parent, and forgets them.
pub(crate) struct Held<T> {
    what: &'static str,
    /// The process that made the value; none if every process that inherits the value may use it.
    owner: Option<u32>,
    /// Locked for moments, never while the interpreter's lock is released: a thread that forks holds the interpreter's lock,
    /// so this lock is free in the child.
    value: Mutex<Option<Arc<T>>>,
}

impl<T> Held<T> {
    /// A value that only this process may use. `what` names the value in messages.
    pub(crate) fn new(what: &'static str, value: T) -> Self {
        Self::with(what, Some(process::id()), value)
    }

    /// A value that forks of this process may use too.
    pub(crate) fn inherited(what: &'static str, value: T) -> Self {
        Self::with(what, None, value)
    }

    fn with(what: &'static str, owner: Option<u32>, value: T) -> Self {
        Self {
            what,
            owner,
            value: Mutex::new(Some(Arc::new(value))),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<T>>> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_foreign(&self) -> bool {
        self.owner.is_some_and(|owner| owner != process::id())
    }

    /// Returns the value.
    ///
    /// # Errors
    ///
    /// ValueError if the object was closed; EPERM in another process than the one that made the value.
    pub(crate) fn get(&self) -> PyResult<Arc<T>> {
        if let (true, Some(owner)) = (self.is_foreign(), self.owner) {
            return Err(other(
                libc::EPERM,
                &format!(
                    "the {} belongs to process {owner}, and this is process {}, a fork of it",
                    self.what,
                    process::id()
                ),
                Some("open the device in this process too, and import what Buffer.share() made there"),
            ));
        }
        let value = self.lock().clone();
        value.ok_or_else(|| PyValueError::new_err(format!("the {} is closed", self.what)))
    }

    /// Takes the value out. None if the object was closed before, or in another process.
    pub(crate) fn take(&self) -> Option<Arc<T>> {
        let value = self.lock().take();
        if self.is_foreign() {
            forget(value);
            return None;
        }
        value
    }

    /// Whether the object was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().is_none()
    }
}

impl<T> Drop for Held<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}
