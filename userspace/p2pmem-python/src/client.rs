// SPDX-License-Identifier: MIT OR Apache-2.0

//! Devices that do DMA.

use pyo3::prelude::*;

use crate::error::raise;

/// A device that will do DMA to or from a buffer.
///
/// The name is a PCI address (``0000:03:00.0``), an RDMA device (``mlx5_0``), an NVMe drive (``nvme0``, ``nvme0n1``,
/// ``/dev/nvme0n1``), a network interface, or a folder of a device in ``/sys``.
#[pyclass(module = "p2pmem", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Client {
    pub(crate) inner: p2pmem::Client,
}

#[pymethods]
impl Client {
    #[new]
    fn new(py: Python<'_>, name: &str) -> PyResult<Self> {
        let inner = py.detach(|| p2pmem::Client::resolve(name)).map_err(raise)?;
        Ok(Self { inner })
    }

    /// The name that the program used for the device.
    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    /// The address of the PCI function, such as ``0000:03:00.0``.
    #[getter]
    fn addr(&self) -> String {
        self.inner.addr().to_string()
    }

    fn __repr__(&self) -> String {
        format!("<p2pmem.Client {} at {}>", self.inner.name(), self.inner.addr())
    }
}
