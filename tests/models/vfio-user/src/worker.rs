// SPDX-License-Identifier: MIT OR Apache-2.0

//! A device's own thread, whose end by a panic is the end of the device, and of no other.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use tracing::error;

use crate::device::Bus;

/// Whether a device's thread has panicked. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Health(Arc<AtomicBool>);

impl Health {
    /// Whether the device can go on.
    pub fn is_good(&self) -> bool {
        !self.0.load(Ordering::SeqCst)
    }
}

/// A device's own thread. If it panics, the device is cut off from its client, which sees it vanish.
#[derive(Debug)]
pub struct Worker {
    thread: Option<JoinHandle<()>>,
    health: Health,
}

impl Worker {
    /// Runs `body` on a thread called `name`.
    ///
    /// # Errors
    ///
    /// If there can be no thread.
    pub fn spawn(name: &str, bus: Bus, body: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        Self::spawn_with(name, bus, Health::default(), body)
    }

    /// As [`Worker::spawn`], for one of several threads of a device, which have their health in common.
    ///
    /// # Errors
    ///
    /// If there can be no thread.
    pub fn spawn_with(name: &str, bus: Bus, health: Health, body: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn({
            let (health, name) = (health.clone(), name.to_owned());
            move || {
                // Only the device has state that the panic may make inconsistent, and the device is only taken down afterwards.
                if catch_unwind(AssertUnwindSafe(body)).is_err() {
                    error!(name, "the worker panicked; its device is dead");
                    health.0.store(true, Ordering::SeqCst);
                    bus.sever();
                }
            }
        })?;
        Ok(Self {
            thread: Some(thread),
            health,
        })
    }

    /// Returns a handle that reports whether the thread has panicked.
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Waits for the end of the thread, which the caller must have requested.
    pub fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic was caught in the thread.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_remembered() {
        let mut good = Worker::spawn("good", Bus::new(1), || {}).unwrap();
        let mut bad = Worker::spawn("bad", Bus::new(1), || panic!("on purpose")).unwrap();
        good.join();
        bad.join();
        assert!(good.health().is_good());
        assert!(!bad.health().is_good());
    }
}
