// SPDX-License-Identifier: MIT OR Apache-2.0

//! The fake device.

use p2pmem::PathClass;
use pyo3::prelude::*;

use crate::convert::{address, path_class, provider, Int};
use crate::device::Device;

/// A machine without the module, for tests of programs: providers, paths, and failures are what the test sets, and buffers are
/// host memory. ``Fake()`` has no providers, ``Fake.example()`` has three.
///
/// A removed provider revokes its buffers, but their mappings stay accessible. A dma-buf has the size of its buffer and no
/// content.
#[pyclass(module = "p2pmem.fake", frozen)]
pub(crate) struct Fake {
    inner: p2pmem::fake::Fake,
}

#[pymethods]
impl Fake {
    #[new]
    fn new() -> Self {
        Self {
            inner: p2pmem::fake::Fake::new(),
        }
    }

    /// A small machine. Below one switch: an accelerator (provider 1 at 0000:03:00.0, 256 MiB), a drive at 0000:04:00.0, and a
    /// drive with a controller memory buffer (provider 3 at 0000:05:00.0, 32 MiB, adopted). On another root port: an accelerator
    /// (provider 2 at 0000:08:00.0, 64 MiB). A NIC at 0000:0a:00.0 reaches none of them.
    #[staticmethod]
    fn example() -> Self {
        Self {
            inner: p2pmem::fake::Fake::example(),
        }
    }

    /// Opens the device, as ``Device()`` opens the real one.
    fn device(&self) -> Device {
        Device::of(self.inner.device())
    }

    /// Adds a provider of ``size`` bytes. With ``driver``, the provider is an adopted one that this driver published.
    #[pyo3(signature = (addr, size, driver = None))]
    fn add_provider(&self, addr: &Bound<'_, PyAny>, size: Int<u64>, driver: Option<&str>) -> PyResult<()> {
        let addr = address(addr)?;
        match driver {
            Some(driver) => drop(self.inner.clone().adopted(addr, size.0, driver)),
            None => drop(self.inner.clone().provider(addr, size.0)),
        }
        Ok(())
    }

    /// Sets the path between a provider and a client. Without ``path_class``, the client cannot reach the provider.
    #[pyo3(signature = (provider, client, path_class = None, hops = Int(0)), text_signature = "($self, provider, client, path_class=None, hops=0)")]
    fn set_path(
        &self,
        provider: &Bound<'_, PyAny>,
        client: &Bound<'_, PyAny>,
        path_class: Option<&Bound<'_, PyAny>>,
        hops: Int<u32>,
    ) -> PyResult<()> {
        let class = path_class.map(self::path_class).transpose()?;
        let class = class.unwrap_or(PathClass::Unreachable);
        drop(
            self.inner
                .clone()
                .path(address(provider)?, address(client)?, class, hops.0),
        );
        Ok(())
    }

    /// Removes a provider, by its id: its buffers are revoked, and all open devices get an event.
    fn remove_provider(&self, provider: &Bound<'_, PyAny>) -> PyResult<()> {
        self.inner.remove_provider(self::provider(provider)?);
        Ok(())
    }

    /// Makes the next call fail with an errno.
    fn fail_next(&self, errno: Int<i32>) {
        self.inner.fail_next(errno.0);
    }

    /// Allows exports of a provider's memory to importers that cannot be revoked.
    fn allow_pinned(&self, provider: &Bound<'_, PyAny>) -> PyResult<()> {
        self.inner.allow_pinned(self::provider(provider)?);
        Ok(())
    }

    /// Sets the module's list of buffers, which root reads: a line of column names, with ``function``, ``size``, and at the end
    /// ``owner``, and a line for each buffer. None: the program is not root.
    #[pyo3(signature = (table))]
    fn set_holders(&self, table: Option<&str>) {
        self.inner.holders(table);
    }
}
