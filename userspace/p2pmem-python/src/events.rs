// SPDX-License-Identifier: MIT OR Apache-2.0

//! Events of a device.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pythonize::pythonize;

use crate::error::raise;
use crate::held::Held;

/// The events of a device, from ``Device.events()``: providers that were added or removed, buffers of the device that were
/// revoked.
///
/// As an iterator, waits for each event, and ends when no event came within the timeout of ``Device.events()``. A device has
/// one sequence of events: several of these objects take the events from each other.
#[pyclass(module = "p2pmem", frozen)]
pub(crate) struct Events {
    held: Held<Mutex<p2pmem::Events>>,
    timeout: Option<Duration>,
}

/// A time in seconds; none waits without a limit.
fn duration(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let limit = seconds.map(Duration::try_from_secs_f64).transpose();
    limit.map_err(|error| PyValueError::new_err(format!("the timeout is no number of seconds: {error}")))
}

/// An event as an Event of Python.
fn object<'py>(py: Python<'py>, event: &p2pmem::Event) -> PyResult<Bound<'py, PyAny>> {
    let make = py.import("p2pmem._types")?.getattr("event")?;
    make.call1((pythonize(py, event)?, event.to_string()))
}

impl Events {
    pub(crate) fn new(events: p2pmem::Events, timeout: Option<f64>) -> PyResult<Self> {
        Ok(Self {
            timeout: duration(timeout)?,
            held: Held::new("sequence of events", Mutex::new(events)),
        })
    }

    fn take<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let events = self.held.get()?;
        let event = py
            .detach(|| events.lock().unwrap_or_else(PoisonError::into_inner).try_next())
            .map_err(raise)?;
        event.map(|event| object(py, &event)).transpose()
    }

    /// Waits with Python's own poll(), which lets signal handlers run, so that Ctrl-C works.
    fn wait_for<'py>(&self, py: Python<'py>, timeout: Option<Duration>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let poll = py.import("select")?.call_method0("poll")?;
        // Keeps the descriptor open, if another thread closes the object.
        let events = self.held.get()?;
        poll.call_method1("register", (self.fileno()?, libc::POLLIN))?;
        loop {
            if let Some(event) = self.take(py)? {
                return Ok(Some(event));
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            // Whole milliseconds, rounded up, of a C int.
            let left = left.map(|left| left.as_nanos().div_ceil(1_000_000).min(1 << 30));
            let ready: Vec<(RawFd, i16)> = poll.call_method1("poll", (left,))?.extract()?;
            if ready.iter().any(|(_, found)| found & libc::POLLIN == 0) {
                // Never readable again: the library returns the error for that.
                let mut events = events.lock().unwrap_or_else(PoisonError::into_inner);
                let event = events.next_within(Some(Duration::ZERO)).map_err(raise)?;
                return event.map(|event| object(py, &event)).transpose();
            }
        }
    }
}

#[pymethods]
impl Events {
    /// Waits up to ``timeout`` seconds for an event, by default without a limit. Returns None after the timeout.
    #[pyo3(signature = (timeout = None))]
    fn wait<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.wait_for(py, duration(timeout)?)
    }

    /// Returns an event if there is one. Never waits.
    fn poll<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py)
    }

    /// A file descriptor that is readable while there are events, for event loops: call ``poll()`` until it returns None.
    fn fileno(&self) -> PyResult<RawFd> {
        let events = self.held.get()?;
        let events = events.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(events.as_fd().as_raw_fd())
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.wait_for(py, self.timeout)
    }

    /// Ends the use of the events. Further calls raise ``ValueError``.
    fn close(&self, py: Python<'_>) {
        let events = self.held.take();
        py.detach(|| drop(events));
    }

    /// Whether the events were closed.
    #[getter]
    fn closed(&self) -> bool {
        self.held.is_closed()
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().held.get()?;
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }
}
