// SPDX-License-Identifier: MIT OR Apache-2.0

//! Buffers as dma-bufs.

use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::held::Held;

/// A buffer, or parts of a buffer, as a dma-buf: a file descriptor by which drivers and other processes reach the memory.
///
/// The dma-buf holds the memory: drivers may use it after the buffer was closed. Use a dma-buf in a ``with`` statement, or
/// close it.
#[pyclass(module = "p2pmem", frozen)]
pub(crate) struct DmaBuf {
    held: Held<p2pmem::DmaBuf>,
    size: u64,
    ranges: Vec<(u64, u64)>,
    pinned: bool,
}

impl DmaBuf {
    pub(crate) fn new(dmabuf: p2pmem::DmaBuf) -> Self {
        Self {
            size: dmabuf.size(),
            ranges: dmabuf.ranges().iter().map(|range| (range.start, range.end)).collect(),
            pinned: dmabuf.is_pinned(),
            held: Held::inherited("dma-buf", dmabuf),
        }
    }
}

#[pymethods]
impl DmaBuf {
    /// The file descriptor, which belongs to this object.
    pub(crate) fn fileno(&self) -> PyResult<RawFd> {
        Ok(self.held.get()?.as_fd().as_raw_fd())
    }

    /// Returns the file descriptor, and closes the object without closing the descriptor: the caller does that.
    fn detach(&self) -> PyResult<RawFd> {
        self.held.get()?;
        match self.held.take().map(Arc::try_unwrap) {
            Some(Ok(dmabuf)) => Ok(OwnedFd::from(dmabuf).into_raw_fd()),
            _ => Err(PyValueError::new_err("another thread uses the dma-buf")),
        }
    }

    /// The size in bytes, of all ranges.
    #[getter]
    fn size(&self) -> u64 {
        self.size
    }

    /// The parts of the buffer, in order: pairs of the first byte and the one after the last.
    #[getter]
    fn ranges(&self) -> Vec<(u64, u64)> {
        self.ranges.clone()
    }

    /// Whether importers that cannot be revoked are allowed.
    #[getter]
    fn pinned(&self) -> bool {
        self.pinned
    }

    /// Closes the file descriptor.
    pub(crate) fn close(&self, py: Python<'_>) {
        let dmabuf = self.held.take();
        py.detach(|| drop(dmabuf));
    }

    /// Whether the dma-buf was closed.
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

    fn __repr__(&self) -> String {
        match self.fileno() {
            Ok(fd) => format!("<p2pmem.DmaBuf of {} bytes, descriptor {fd}>", self.size),
            Err(_) => "<p2pmem.DmaBuf, closed>".into(),
        }
    }
}
