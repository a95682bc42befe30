// SPDX-License-Identifier: MIT OR Apache-2.0

//! Dma-bufs: of buffers, and of other drivers.

use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::convert::{address, client, descriptor, result};
use crate::error::raise;
use crate::held::Held;

/// Memory as a dma-buf: a file descriptor by which drivers and other processes reach the memory.
///
/// ``Buffer.share()`` and ``Buffer.export()`` make dma-bufs of a buffer. ``DmaBuf(fd)`` accepts a dma-buf of any driver: of a
/// GPU (CUDA's ``cuMemGetHandleForAddressRange()``), vfio-pci, or a heap. ``fd`` is a file descriptor, or an object with
/// ``fileno()``. The object has its own duplicate of the descriptor, so the program may close ``fd``. The kernel does not
/// report which device has the memory: ``device`` is its PCI address, or a Provider or Client, and ``path_to()`` needs it.
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
    #[new]
    #[pyo3(signature = (fd, *, device = None))]
    fn from_fd(py: Python<'_>, fd: &Bound<'_, PyAny>, device: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let device = device.map(address).transpose()?;
        let fd = descriptor(fd)?;
        let dmabuf = py.detach(|| p2pmem::DmaBuf::from_fd(fd)).map_err(raise)?;
        Ok(Self::new(match device {
            Some(addr) => dmabuf.of_device(addr),
            None => dmabuf,
        }))
    }

    /// The name of the driver that exported the memory, such as ``nv_dmabuf`` or ``p2pmem``. None if the kernel does not report
    /// a name.
    #[getter]
    fn exporter(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let dmabuf = self.held.get()?;
        Ok(py.detach(|| dmabuf.exporter()))
    }

    /// The PCI address of the device that has the memory, if known.
    #[getter]
    fn device(&self) -> PyResult<Option<String>> {
        Ok(self.held.get()?.device().map(|addr| addr.to_string()))
    }

    /// Returns the path between the memory and a client or its name, computed from sysfs. ``provider`` and ``client`` of the path
    /// are 0. A path through the root complex counts as reachable: if the client cannot use the path, the registration fails.
    #[pyo3(signature = (client))]
    fn path_to<'py>(&self, py: Python<'py>, client: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let dmabuf = self.held.get()?;
        let client = self::client(client)?;
        let path = py.detach(|| dmabuf.path_to(&client)).map_err(raise)?;
        result(py, "path", &path)
    }

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

    /// The parts of the buffer, in order: pairs of the first byte and the one after the last. A dma-buf of another driver is one
    /// part.
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
