// SPDX-License-Identifier: MIT OR Apache-2.0

//! Buffers.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use p2pmem::{human_size, ExportOptions};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::{ranges, result, Int};
use crate::dmabuf::DmaBuf;
use crate::error::raise;
use crate::held::Held;
use crate::mapping::Mapping;

/// Objects that a buffer creates at first use and keeps until it is closed.
#[derive(Default)]
struct Kept {
    mapping: Option<Py<Mapping>>,
    dmabuf: Option<Py<DmaBuf>>,
}

/// Memory of a provider, from ``Device.alloc()``.
///
/// The buffer maps itself at the first access of the program, and exports itself as a dma-buf at the first ``fileno()``. Use a
/// buffer in a ``with`` statement, or close it. The memory is free when the buffer, its mappings, and its dma-bufs are closed,
/// in any order, and no driver or other process uses it.
#[pyclass(module = "p2pmem", frozen)]
pub(crate) struct Buffer {
    held: Held<p2pmem::Buffer>,
    /// Locked for moments, like [`Held`].
    kept: Mutex<Kept>,
    handle: u32,
    provider: u32,
    size: u64,
    bar_offset: Option<u64>,
    class: Option<p2pmem::PathClass>,
}

impl Buffer {
    pub(crate) fn new(buffer: p2pmem::Buffer) -> Self {
        Self {
            handle: buffer.handle(),
            provider: buffer.provider(),
            size: buffer.size(),
            bar_offset: buffer.bar_offset(),
            class: buffer.class(),
            held: Held::new("buffer", buffer),
            kept: Mutex::default(),
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The buffer's own dma-buf.
    fn dmabuf(&self, py: Python<'_>) -> PyResult<Py<DmaBuf>> {
        let buffer = self.held.get()?;
        if let Some(dmabuf) = &self.kept().dmabuf {
            return Ok(dmabuf.clone_ref(py));
        }
        let dmabuf = py.detach(|| buffer.share()).map_err(raise)?;
        let dmabuf = Py::new(py, DmaBuf::new(dmabuf))?;
        // Another thread may have been faster, or have closed the buffer meanwhile.
        self.held.get()?;
        Ok(self.kept().dmabuf.get_or_insert(dmabuf).clone_ref(py))
    }
}

#[pymethods]
impl Buffer {
    /// The handle on the open file of the device, as in events: never 0, never used twice.
    #[getter]
    fn handle(&self) -> u32 {
        self.handle
    }

    /// The id of the provider.
    #[getter]
    fn provider(&self) -> u32 {
        self.provider
    }

    /// The size in bytes: the requested size, rounded up to pages.
    #[getter]
    fn size(&self) -> u64 {
        self.size
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.size)?)
    }

    /// The offset of the first byte in the provider's BAR, if the BAR is known.
    #[getter]
    fn bar_offset(&self) -> Option<u64> {
        self.bar_offset
    }

    /// The class of the path to the farthest client. None for a request without clients, and for an imported buffer.
    #[getter]
    fn path_class<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        result(py, "path_class", &self.class)
    }

    /// Returns state, place, and users of the buffer at this moment.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let buffer = self.held.get()?;
        let info = py.detach(|| buffer.info()).map_err(raise)?;
        result(py, "buffer_info", &info)
    }

    /// Maps the buffer. Each call makes a mapping of its own, which may be used after the buffer was closed.
    fn map(&self, py: Python<'_>) -> PyResult<Mapping> {
        let buffer = self.held.get()?;
        Ok(Mapping::new(py.detach(|| buffer.map()).map_err(raise)?))
    }

    /// The buffer's own mapping, which is made at the first use and closed with the buffer.
    #[getter]
    fn memory(&self, py: Python<'_>) -> PyResult<Py<Mapping>> {
        self.held.get()?;
        if let Some(mapping) = &self.kept().mapping {
            return Ok(mapping.clone_ref(py));
        }
        let mapping = Py::new(py, self.map(py)?)?;
        // As in dmabuf().
        self.held.get()?;
        Ok(self.kept().mapping.get_or_insert(mapping).clone_ref(py))
    }

    /// The address of the first byte of ``memory``.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<usize> {
        self.memory(py)?.get().address()
    }

    /// As ``Mapping.read()``, on ``memory``.
    #[pyo3(signature = (size = None, offset = Int(0)), text_signature = "($self, size=None, offset=0)")]
    fn read<'py>(
        &self,
        py: Python<'py>,
        size: Option<Int<usize>>,
        offset: Int<usize>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        self.memory(py)?.get().read(py, size, offset)
    }

    /// As ``Mapping.readinto()``, on ``memory``.
    #[pyo3(signature = (out, offset = Int(0)), text_signature = "($self, out, offset=0)")]
    fn readinto(&self, py: Python<'_>, out: &Bound<'_, PyAny>, offset: Int<usize>) -> PyResult<usize> {
        self.memory(py)?.get().readinto(py, out, offset)
    }

    /// As ``Mapping.write()``, on ``memory``.
    #[pyo3(signature = (data, offset = Int(0)), text_signature = "($self, data, offset=0)")]
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>, offset: Int<usize>) -> PyResult<usize> {
        self.memory(py)?.get().write(py, data, offset)
    }

    /// As ``Mapping.fill()``, on ``memory``.
    #[pyo3(signature = (byte = Int(0), offset = Int(0), size = None), text_signature = "($self, byte=0, offset=0, size=None)")]
    fn fill(&self, py: Python<'_>, byte: Int<u8>, offset: Int<usize>, size: Option<Int<usize>>) -> PyResult<()> {
        self.memory(py)?.get().fill(py, byte, offset, size)
    }

    /// As ``Mapping.flush()``, on ``memory``.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.memory(py)?.get().flush()
    }

    /// As ``Mapping.read_from()``, on ``memory``.
    #[pyo3(signature = (file, file_offset = Int(0), offset = Int(0), size = None), text_signature = "($self, file, file_offset=0, offset=0, size=None)")]
    fn read_from(
        &self,
        py: Python<'_>,
        file: &Bound<'_, PyAny>,
        file_offset: Int<u64>,
        offset: Int<usize>,
        size: Option<Int<usize>>,
    ) -> PyResult<usize> {
        self.memory(py)?.get().read_from(py, file, file_offset, offset, size)
    }

    /// As ``Mapping.write_to()``, on ``memory``.
    #[pyo3(signature = (file, file_offset = Int(0), offset = Int(0), size = None), text_signature = "($self, file, file_offset=0, offset=0, size=None)")]
    fn write_to(
        &self,
        py: Python<'_>,
        file: &Bound<'_, PyAny>,
        file_offset: Int<u64>,
        offset: Int<usize>,
        size: Option<Int<usize>>,
    ) -> PyResult<usize> {
        self.memory(py)?.get().write_to(py, file, file_offset, offset, size)
    }

    /// The file descriptor of a dma-buf of the whole buffer, for drivers such as an RDMA NIC's. The descriptor is made at the
    /// first call and belongs to the buffer.
    fn fileno(&self, py: Python<'_>) -> PyResult<RawFd> {
        self.dmabuf(py)?.get().fileno()
    }

    /// Makes a dma-buf of the buffer, or of parts of it in the order of ``ranges``: pairs of the first byte and the one after
    /// the last, whole pages. ``pinned`` allows importers that cannot be revoked, if the administrator allows them too.
    #[pyo3(signature = (ranges = None, pinned = false))]
    fn export(&self, py: Python<'_>, ranges: Option<Vec<(Int<u64>, Int<u64>)>>, pinned: bool) -> PyResult<DmaBuf> {
        let buffer = self.held.get()?;
        let parts = self::ranges(ranges.unwrap_or_default());
        let parts = parts.fold(ExportOptions::new().pinned(pinned), ExportOptions::range);
        Ok(DmaBuf::new(py.detach(|| buffer.export(&parts)).map_err(raise)?))
    }

    /// Makes a dma-buf of the whole buffer for another process, which imports it with ``Device.import_buffer()``. Send the
    /// descriptor with ``socket.send_fds()``.
    fn share(&self, py: Python<'_>) -> PyResult<DmaBuf> {
        self.export(py, None, false)
    }

    /// Frees the handle, and closes the buffer's own mapping and dma-buf. Further calls raise ``ValueError``.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let buffer = self.held.take();
        let kept = std::mem::take(&mut *self.kept());
        if let Some(mapping) = kept.mapping {
            mapping.get().close(py);
        }
        if let Some(dmabuf) = kept.dmabuf {
            dmabuf.get().close(py);
        }
        // If another thread is in a call of this buffer, that thread frees the handle when the call returns.
        match buffer.map(Arc::try_unwrap) {
            Some(Ok(buffer)) => py.detach(|| buffer.free()).map_err(raise),
            _ => Ok(()),
        }
    }

    /// Whether the buffer was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.held.is_closed()
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().held.get()?;
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        let end = if self.held.is_closed() { ", closed" } else { "" };
        let Self { handle, provider, .. } = self;
        format!(
            "<p2pmem.Buffer {handle}: {} in provider {provider}{end}>",
            human_size(self.size)
        )
    }
}
