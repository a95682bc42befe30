// SPDX-License-Identifier: MIT OR Apache-2.0

//! Open devices.

use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;

use p2pmem::{Backend, FileRule};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::buffer::Buffer;
use crate::convert::{address, attribute, clients, descriptor, int, path_class, provider, result, results, word, Int};
use crate::error::raise;
use crate::events::Events;
use crate::held::Held;
use crate::request::RequestArguments;

/// An open ``/dev/p2pmem``. Without the module, memory that a driver published, or BARs of devices that are bound to vfio-pci.
///
/// ``backend`` selects one of them: ``module``, ``sysfs``, or ``vfio``. ``path`` is another file of the module's device. An
/// operation that the backend does not support raises ``UnsupportedError``.
///
/// Use a device in a ``with`` statement, or close it. Buffers keep the device open. Several threads may use a device. After a
/// fork, the child opens a device of its own: calls of the parent's device and buffers raise in the child, and the child's end
/// does not free them.
#[pyclass(module = "p2pmem", frozen)]
pub(crate) struct Device {
    held: Held<p2pmem::Device>,
}

impl Device {
    pub(crate) fn of(device: p2pmem::Device) -> Self {
        Self {
            held: Held::new("device", device),
        }
    }
}

/// The address of a provider, and a process that holds buffers in it.
type Holding<'py> = (String, Bound<'py, PyAny>);

/// A FileRule of Python.
fn file_rule(rule: &Bound<'_, PyAny>) -> PyResult<FileRule> {
    Ok(FileRule {
        provider: attribute(rule, "provider", |v| address(&v))?,
        client: attribute(rule, "client", |v| address(&v))?,
        action: attribute(rule, "action", word)?,
        max_class: attribute(rule, "max_class", |v| path_class(&v))?,
        quota: attribute(rule, "quota", int)?,
        ..FileRule::new(rule.getattr("name")?.extract::<String>()?)
    })
}

#[pymethods]
impl Device {
    #[new]
    #[pyo3(signature = (path = None, *, backend = None))]
    fn new(py: Python<'_>, path: Option<PathBuf>, backend: Option<&str>) -> PyResult<Self> {
        let named = |name: &str| {
            let found = Backend::OF_DEVICES.into_iter().find(|known| known.to_string() == name);
            found.ok_or_else(|| PyValueError::new_err(format!("{name:?} is no backend: module, sysfs, or vfio")))
        };
        let backend = backend.map(named).transpose()?;
        let opened = py.detach(|| match (path, backend) {
            (Some(path), None | Some(Backend::Module)) => Ok(p2pmem::Device::open_path(path)),
            (Some(_), Some(_)) => Err(PyValueError::new_err("only the backend module has a path")),
            (None, Some(backend)) => Ok(p2pmem::Device::open_backend(backend)),
            (None, None) => Ok(p2pmem::Device::open()),
        });
        opened?.map(Self::of).map_err(raise)
    }

    /// The interface that provides the memory: ``module``, ``sysfs``, or ``vfio``.
    #[getter]
    fn backend(&self) -> PyResult<String> {
        Ok(self.held.get()?.backend().to_string())
    }

    /// Returns version, features, and totals of the module.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let device = self.held.get()?;
        let info = py.detach(|| device.info()).map_err(raise)?;
        result(py, "info", &info)
    }

    /// Returns all providers, in the order of their ids.
    fn providers<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let device = self.held.get()?;
        let all = py.detach(|| device.providers()).map_err(raise)?;
        results(py, "provider", &all)
    }

    /// Returns the paths between all providers and the clients. ``rescan`` drops paths that the module has stored, which only
    /// root can.
    #[pyo3(signature = (clients, rescan = false))]
    fn paths<'py>(
        &self,
        py: Python<'py>,
        clients: &Bound<'py, PyAny>,
        rescan: bool,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let device = self.held.get()?;
        let clients = self::clients(Some(clients))?;
        let all = py.detach(|| {
            if rescan {
                device.rescan_paths(&clients)
            } else {
                device.paths(&clients)
            }
        });
        results(py, "path", &all.map_err(raise)?)
    }

    /// Returns the counters of a provider, or the sums of all that ever existed.
    #[pyo3(signature = (provider = None))]
    fn stats<'py>(&self, py: Python<'py>, provider: Option<&Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
        let device = self.held.get()?;
        let id = provider.map(self::provider).transpose()?;
        let stats = py.detach(|| device.stats(id)).map_err(raise)?;
        result(py, "stats", &stats)
    }

    /// Returns the processes that hold buffers, with the address of the provider, those with the most bytes first. None if the
    /// program may not read this: only root can.
    fn holders<'py>(&self, py: Python<'py>) -> PyResult<Option<Vec<Holding<'py>>>> {
        let device = self.held.get()?;
        let Some(all) = py.detach(|| device.holders()) else {
            return Ok(None);
        };
        let all = all
            .iter()
            .map(|(addr, holder)| Ok((addr.to_string(), result(py, "holder", holder)?)));
        all.collect::<PyResult<_>>().map(Some)
    }

    /// Allocates a buffer of ``size`` bytes near the clients ``near``.
    ///
    /// :param near: the devices that will do DMA: a client or its name, or several
    /// :param align: alignment in the BAR: a power of two up to 1 GiB; by default a page
    /// :param strategy: ``nearest``, ``upstream`` (the kernel's own choice), ``spread``, or ``pack``
    /// :param provider: the provider or its id that the buffer has to be in
    /// :param prefer: the provider or its id that is used if it can serve the request
    /// :param max_class: the farthest path class
    #[pyo3(signature = (size, *, near = None, align = None, strategy = "nearest", provider = None, prefer = None,
        max_class = None))]
    #[allow(clippy::too_many_arguments)] // keywords of Python
    fn alloc(
        &self,
        py: Python<'_>,
        size: Int<u64>,
        near: Option<&Bound<'_, PyAny>>,
        align: Option<Int<u64>>,
        strategy: &str,
        provider: Option<&Bound<'_, PyAny>>,
        prefer: Option<&Bound<'_, PyAny>>,
        max_class: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Buffer> {
        let device = self.held.get()?;
        let arguments = RequestArguments {
            size,
            near,
            align,
            strategy,
            provider,
            prefer,
            max_class,
            parts: None,
        };
        let request = arguments.request()?;
        Ok(Buffer::new(py.detach(|| device.alloc(&request)).map_err(raise)?))
    }

    /// Allocates ``size`` bytes as equal parts in ``parts`` providers, all or none, and returns the buffers in the order of
    /// their bytes. With 0 parts, uses as many providers as possible. The other arguments are those of ``alloc()``.
    #[pyo3(signature = (size, parts = Int(0), *, near = None, align = None, prefer = None, max_class = None),
        text_signature = "($self, size, parts=0, *, near=None, align=None, prefer=None, max_class=None)")]
    #[allow(clippy::too_many_arguments)]
    fn alloc_stripe(
        &self,
        py: Python<'_>,
        size: Int<u64>,
        parts: Int<u32>,
        near: Option<&Bound<'_, PyAny>>,
        align: Option<Int<u64>>,
        prefer: Option<&Bound<'_, PyAny>>,
        max_class: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Buffer>> {
        let device = self.held.get()?;
        let arguments = RequestArguments {
            size,
            near,
            align,
            strategy: "nearest",
            provider: None,
            prefer,
            max_class,
            parts: Some(parts),
        };
        let request = arguments.request()?;
        let stripe = py.detach(|| device.alloc_stripe(&request)).map_err(raise)?;
        Ok(stripe.into_parts().into_iter().map(Buffer::new).collect())
    }

    /// Explains what ``alloc()`` would do now with the same arguments, or ``alloc_stripe()`` if ``parts`` is not None. Allocates
    /// nothing. A request that no provider can serve is an answer with an errno, not an exception.
    ///
    /// With ``uid``, ``gid``, and ``groups``, answers for another user; only root can.
    #[pyo3(signature = (size, *, near = None, align = None, strategy = "nearest", provider = None, prefer = None,
        max_class = None, parts = None, uid = None, gid = None, groups = Vec::new()),
        text_signature = "($self, size, *, near=None, align=None, strategy='nearest', provider=None, prefer=None, \
            max_class=None, parts=None, uid=None, gid=None, groups=())")]
    #[allow(clippy::too_many_arguments)]
    fn explain<'py>(
        &self,
        py: Python<'py>,
        size: Int<u64>,
        near: Option<&Bound<'py, PyAny>>,
        align: Option<Int<u64>>,
        strategy: &str,
        provider: Option<&Bound<'py, PyAny>>,
        prefer: Option<&Bound<'py, PyAny>>,
        max_class: Option<&Bound<'py, PyAny>>,
        parts: Option<Int<u32>>,
        uid: Option<Int<u32>>,
        gid: Option<Int<u32>>,
        groups: Vec<Int<u32>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let device = self.held.get()?;
        let arguments = RequestArguments {
            size,
            near,
            align,
            strategy,
            provider,
            prefer,
            max_class,
            parts,
        };
        let request = arguments.request()?;
        let groups: Vec<u32> = groups.into_iter().map(|group| group.0).collect();
        let explanation = match (uid, gid) {
            (Some(Int(uid)), Some(Int(gid))) => py.detach(|| device.explain_as(&request, uid, gid, &groups)),
            (None, None) if groups.is_empty() => py.detach(|| device.explain(&request)),
            _ => return Err(PyValueError::new_err("another user has a uid and a gid")),
        };
        self::explanation(py, &explanation.map_err(raise)?)
    }

    /// Explains the last allocation of this device, or the last refusal since.
    fn explain_last<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let device = self.held.get()?;
        explanation(py, &py.detach(|| device.explain_last()).map_err(raise)?)
    }

    /// Makes a buffer of a dma-buf that ``Buffer.share()`` made, in this or another process: a descriptor, or an object with
    /// ``fileno()``. The descriptor can be closed afterwards.
    fn import_buffer(&self, py: Python<'_>, shared: &Bound<'_, PyAny>) -> PyResult<Buffer> {
        let device = self.held.get()?;
        let fd = descriptor(shared)?;
        Ok(Buffer::new(py.detach(|| device.import(fd)).map_err(raise)?))
    }

    /// Replaces the rules of this open device, a list of ``FileRule``. They can only narrow what the administrator's rules
    /// allow.
    fn set_rules(&self, py: Python<'_>, rules: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        let device = self.held.get()?;
        let rules = rules.iter().map(file_rule).collect::<PyResult<Vec<_>>>()?;
        py.detach(|| device.set_rules(&rules)).map_err(raise)
    }

    /// Returns the events of this device from now on. The iterator ends when no event came within ``timeout`` seconds.
    #[pyo3(signature = (timeout = None))]
    fn events(&self, timeout: Option<f64>) -> PyResult<Events> {
        Events::new(self.held.get()?.events(), timeout)
    }

    /// Closes the device. The open file stays until its buffers, mappings, and events are closed.
    fn close(&self, py: Python<'_>) {
        let device = self.held.take();
        py.detach(|| drop(device));
    }

    /// Whether the device was closed.
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
            Ok(device) => format!("<p2pmem.Device, descriptor {}>", device.as_fd().as_raw_fd()),
            Err(_) => "<p2pmem.Device, closed>".into(),
        }
    }
}

fn explanation<'py>(py: Python<'py>, explanation: &p2pmem::Explanation) -> PyResult<Bound<'py, PyAny>> {
    let make = py.import("p2pmem._types")?.getattr("explanation")?;
    make.call1((pythonize::pythonize(py, explanation)?, explanation.lines()))
}
