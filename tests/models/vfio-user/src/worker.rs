// SPDX-License-Identifier: MIT OR Apache-2.0

//! The thread of a device. A panic of the thread ends the device, and no other device.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use tracing::error;

use crate::device::Bus;

/// Records whether a thread of a device has panicked. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Health(Arc<AtomicBool>);

impl Health {
    /// True as long as no thread has panicked.
    pub fn is_good(&self) -> bool {
        !self.0.load(Ordering::SeqCst)
    }
}

/// The thread of a device. If it panics, the client is disconnected and sees the device disappear.
#[derive(Debug)]
pub struct Worker {
    thread: Option<JoinHandle<()>>,
    health: Health,
}

impl Worker {
    /// Runs `body` on a thread with the name `name`.
    ///
    /// # Errors
    ///
    /// The thread cannot be created.
    pub fn spawn(name: &str, bus: Bus, body: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        Self::spawn_with(name, bus, Health::default(), body)
    }

    /// As [`Worker::spawn`], for one of several threads of a device that share `health`.
    ///
    /// # Errors
    ///
    /// The thread cannot be created.
    pub fn spawn_with(name: &str, bus: Bus, health: Health, body: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn({
            let (health, name) = (health.clone(), name.to_owned());
            move || {
                // Unwind safety: only the device has state that the panic can make inconsistent, and the device is only
                // torn down.
                if catch_unwind(AssertUnwindSafe(body)).is_err() {
                    error!(name, "a device thread panicked; the device is disconnected");
                    health.0.store(true, Ordering::SeqCst);
                    bus.disconnect_client();
                }
            }
        })?;
        Ok(Self {
            thread: Some(thread),
            health,
        })
    }

    /// Returns the health of the device, which reports whether one of its threads has panicked.
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Waits for the thread to end. The caller must have requested the end before.
    pub fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // The thread catches panics, so there is no result.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_is_recorded() {
        let mut good = Worker::spawn("good", Bus::new(1), || {}).unwrap();
        let mut bad = Worker::spawn("bad", Bus::new(1), || panic!("on purpose")).unwrap();
        good.join();
        bad.join();
        assert!(good.health().is_good());
        assert!(!bad.health().is_good());
    }
}
