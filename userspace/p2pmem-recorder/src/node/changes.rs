// SPDX-License-Identifier: MIT OR Apache-2.0

//! Notifies observers of changes of a node.

use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What is called after a change. It must not block, and must not call the node.
pub type Observer = dyn Fn() + Send + Sync;

/// The observers of a node.
#[derive(Default)]
pub(super) struct Changes {
    observers: Mutex<Vec<Weak<Observer>>>,
}

impl std::fmt::Debug for Changes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Changes").finish_non_exhaustive()
    }
}

impl Changes {
    /// Adds an observer, which is called as long as it exists.
    pub(super) fn observe(&self, observer: &Arc<Observer>) {
        let mut observers = self.observers.lock().unwrap_or_else(PoisonError::into_inner);
        observers.retain(|other| other.strong_count() > 0);
        observers.push(Arc::downgrade(observer));
    }

    /// Calls the observers.
    pub(super) fn notify(&self) {
        let observers = self.observers.lock().unwrap_or_else(PoisonError::into_inner);
        for observer in observers.iter().filter_map(Weak::upgrade) {
            observer();
        }
    }
}
