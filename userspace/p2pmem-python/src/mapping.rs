// SPDX-License-Identifier: MIT OR Apache-2.0

//! Buffers in the address space of the program.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::Int;
use crate::held::Held;
use crate::memory;

/// A buffer in the program's address space, from ``Buffer.map()``.
///
/// The methods copy. A mapping gives no view of the memory, because devices change the memory at any time, and because
/// ordinary copies may use accesses that a BAR answers slowly or not at all. Each access happens once and is 8, 4, 2, or 1
/// bytes wide: the widest access that the alignment of the address in the mapping allows. Reads from a BAR take microseconds
/// per access. Let devices move bulk data: ``read_from()`` and ``write_to()`` for drives, a dma-buf for RDMA.
///
/// If the provider of the buffer is removed, the methods raise ``RemovedError``. Use a mapping in a ``with`` statement, or
/// close it. A mapping may be used after its buffer was closed, by several threads, and by forks of the process.
#[pyclass(module = "p2pmem", frozen)]
pub(crate) struct Mapping {
    held: Held<p2pmem::Mapping>,
    size: usize,
}

impl Mapping {
    pub(crate) fn new(mapping: p2pmem::Mapping) -> Self {
        Self {
            size: mapping.len(),
            held: Held::inherited("mapping", mapping),
        }
    }
}

#[pymethods]
impl Mapping {
    /// The address of the first byte, for I/O that the program does itself (io_uring, libaio, verbs). The address is valid
    /// until the mapping is closed.
    #[getter]
    pub(crate) fn address(&self) -> PyResult<usize> {
        Ok(self.held.get()?.as_ptr() as usize)
    }

    /// The length in bytes.
    #[getter]
    fn size(&self) -> usize {
        self.size
    }

    fn __len__(&self) -> usize {
        self.size
    }

    /// Returns a copy of ``size`` bytes from ``offset`` on; by default of all bytes to the end.
    #[pyo3(signature = (size = None, offset = Int(0)), text_signature = "($self, size=None, offset=0)")]
    pub(crate) fn read<'py>(
        &self,
        py: Python<'py>,
        size: Option<Int<usize>>,
        offset: Int<usize>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        memory::read(py, &*self.held.get()?, size.map(|size| size.0), offset.0)
    }

    /// Fills ``out``, an object with the buffer protocol such as a NumPy array, with the bytes from ``offset`` on. Returns the
    /// number of bytes.
    #[pyo3(signature = (out, offset = Int(0)), text_signature = "($self, out, offset=0)")]
    pub(crate) fn readinto(&self, py: Python<'_>, out: &Bound<'_, PyAny>, offset: Int<usize>) -> PyResult<usize> {
        memory::read_into(py, &*self.held.get()?, out, offset.0)
    }

    /// Copies ``data``, an object with the buffer protocol such as bytes or a NumPy array, to ``offset``. Returns the number of
    /// bytes. ``flush()`` makes the bytes visible to devices.
    #[pyo3(signature = (data, offset = Int(0)), text_signature = "($self, data, offset=0)")]
    pub(crate) fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>, offset: Int<usize>) -> PyResult<usize> {
        memory::write(py, &*self.held.get()?, data, offset.0)
    }

    /// Sets ``size`` bytes from ``offset`` on to ``byte``; by default all bytes to the end.
    #[pyo3(signature = (byte = Int(0), offset = Int(0), size = None), text_signature = "($self, byte=0, offset=0, size=None)")]
    pub(crate) fn fill(
        &self,
        py: Python<'_>,
        byte: Int<u8>,
        offset: Int<usize>,
        size: Option<Int<usize>>,
    ) -> PyResult<()> {
        memory::fill(py, &*self.held.get()?, byte.0, offset.0, size.map(|size| size.0))
    }

    /// Makes earlier writes visible to devices before anything that follows, such as ringing a doorbell.
    pub(crate) fn flush(&self) -> PyResult<()> {
        self.held.get()?.flush();
        Ok(())
    }

    /// Reads ``size`` bytes of a file from ``file_offset`` on straight into the memory at ``offset``, from device to device.
    /// Returns the number of bytes, which is smaller if the file ends before.
    ///
    /// ``file`` is a path, or a file or descriptor that is open with ``os.O_DIRECT``. Offsets and sizes are multiples of the
    /// drive's block size.
    #[pyo3(signature = (file, file_offset = Int(0), offset = Int(0), size = None), text_signature = "($self, file, file_offset=0, offset=0, size=None)")]
    pub(crate) fn read_from(
        &self,
        py: Python<'_>,
        file: &Bound<'_, PyAny>,
        file_offset: Int<u64>,
        offset: Int<usize>,
        size: Option<Int<usize>>,
    ) -> PyResult<usize> {
        let size = size.map(|size| size.0);
        memory::read_from(py, &*self.held.get()?, file, file_offset.0, offset.0, size)
    }

    /// Writes ``size`` bytes of the memory from ``offset`` on straight to an existing file at ``file_offset``, from device to
    /// device. Returns the number of bytes. The arguments are those of ``read_from()``.
    #[pyo3(signature = (file, file_offset = Int(0), offset = Int(0), size = None), text_signature = "($self, file, file_offset=0, offset=0, size=None)")]
    pub(crate) fn write_to(
        &self,
        py: Python<'_>,
        file: &Bound<'_, PyAny>,
        file_offset: Int<u64>,
        offset: Int<usize>,
        size: Option<Int<usize>>,
    ) -> PyResult<usize> {
        let size = size.map(|size| size.0);
        memory::write_to(py, &*self.held.get()?, file, file_offset.0, offset.0, size)
    }

    /// Unmaps the buffer, when calls of other threads have returned. Further calls raise ``ValueError``.
    pub(crate) fn close(&self, py: Python<'_>) {
        let mapping = self.held.take();
        py.detach(|| drop(mapping));
    }

    /// Whether the mapping was closed.
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
        match self.held.get() {
            Ok(mapping) => format!("<p2pmem.Mapping of {} bytes at {:?}>", self.size, mapping.as_ptr()),
            Err(_) => "<p2pmem.Mapping, closed>".into(),
        }
    }
}
