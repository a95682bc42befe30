// SPDX-License-Identifier: MIT OR Apache-2.0

//! The creation of a LUN, which takes long, and its progress.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::status::Creation;
use crate::store::{Error, Result};

#[derive(Debug)]
struct Current {
    lun: String,
    total: u64,
    written: AtomicU64,
    begun: AtomicBool,
    running: AtomicBool,
    error: Mutex<Option<String>>,
}

/// The LUN that is being created, or the last one whose creation failed.
#[derive(Debug, Default)]
pub(super) struct Creations {
    current: Mutex<Option<Arc<Current>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The end of a creation, also by a panic.
struct Running<'a>(&'a Current);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.store(false, Ordering::Release);
    }
}

impl Creations {
    /// Fails if a LUN is being created.
    pub(super) fn check_idle(&self) -> Result<()> {
        match &*locked(&self.current) {
            Some(current) if current.running.load(Ordering::Acquire) => Err(Error::Busy {
                name: current.lun.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Runs `create`, which reports the number of bytes that are written. An error before the first report is not in the
    /// status: the caller has it at once.
    pub(super) fn run(&self, lun: &str, total: u64, create: impl FnOnce(&dyn Fn(u64)) -> Result<()>) -> Result<()> {
        let current = Arc::new(Current {
            lun: lun.to_owned(),
            total,
            written: AtomicU64::new(0),
            begun: AtomicBool::new(false),
            running: AtomicBool::new(true),
            error: Mutex::new(None),
        });
        let before = {
            let mut slot = locked(&self.current);
            if let Some(other) = slot.as_ref().filter(|other| other.running.load(Ordering::Acquire)) {
                return Err(Error::Busy {
                    name: other.lun.clone(),
                });
            }
            slot.replace(Arc::clone(&current))
        };
        let running = Running(&current);
        let result = create(&|written| {
            current.written.store(written, Ordering::Relaxed);
            current.begun.store(true, Ordering::Relaxed);
        });
        match &result {
            Err(error) if current.begun.load(Ordering::Relaxed) => *locked(&current.error) = Some(error.to_string()),
            Err(_) => *locked(&self.current) = before,
            Ok(()) => *locked(&self.current) = None,
        }
        drop(running);
        result
    }

    /// Returns the creation that runs, or that failed last.
    pub(super) fn status(&self) -> Option<Creation> {
        let current = locked(&self.current).clone()?;
        if !current.begun.load(Ordering::Relaxed) {
            return None;
        }
        let error = locked(&current.error).clone();
        Some(Creation {
            lun: current.lun.clone(),
            total: current.total,
            written: current.written.load(Ordering::Relaxed),
            error,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure() -> Error {
        Error::Full { lun: "a".into() }
    }

    #[test]
    fn one_creation_runs_at_a_time_and_shows_its_progress() {
        let creations = Creations::default();
        let result = creations.run("a", 100, |progress| {
            assert_eq!(creations.status(), None);
            progress(40);
            let status = creations.status().unwrap();
            assert_eq!((status.written, status.total, status.error), (40, 100, None));
            assert!(matches!(creations.check_idle(), Err(Error::Busy { name }) if name == "a"));
            assert!(matches!(creations.run("b", 1, |_| unreachable!()), Err(Error::Busy { name }) if name == "a"));
            Ok(())
        });
        result.unwrap();
        assert_eq!(creations.status(), None);
        creations.check_idle().unwrap();
    }

    #[test]
    fn a_late_failure_stays_in_the_status_until_the_next_creation() {
        let creations = Creations::default();
        creations
            .run("a", 100, |progress| {
                progress(40);
                Err(failure())
            })
            .unwrap_err();
        assert!(creations.status().unwrap().error.unwrap().contains("is full"));
        creations.check_idle().unwrap();
        creations.run("b", 100, |_| Err(failure())).unwrap_err();
        assert_eq!(
            creations.status().unwrap().lun,
            "a",
            "an error before the first byte changes nothing"
        );
        creations
            .run("b", 100, |progress| {
                progress(0);
                Ok(())
            })
            .unwrap();
        assert_eq!(creations.status(), None);
    }

    #[test]
    fn a_panic_ends_the_creation() {
        let creations = Creations::default();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            creations.run("a", 1, |_| panic!("planned"))
        }));
        assert!(result.is_err());
        creations.check_idle().unwrap();
    }
}
