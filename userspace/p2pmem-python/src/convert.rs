// SPDX-License-Identifier: MIT OR Apache-2.0

//! Python values as values of the library, and results of the library as Python objects.

use std::fmt::Display;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{OwnedFd, RawFd};
use std::path::PathBuf;
use std::str::FromStr;

use p2pmem::{open_direct, DirectOptions, PathClass, PciAddr};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyString};
use pythonize::pythonize;
use serde::Serialize;

use crate::client::Client;
use crate::error::{other, raise};
use crate::sys::duplicate;

/// An integer argument. A value outside of the type's range is a ValueError.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Int<T>(pub(crate) T);

impl<'a, 'py, T: FromPyObject<'a, 'py>> FromPyObject<'a, 'py> for Int<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        match object.extract::<T>().map_err(Into::into) {
            Ok(value) => Ok(Self(value)),
            Err(error) if error.is_instance_of::<PyOverflowError>(py) => {
                Err(PyValueError::new_err(format!("{} is out of range", object.repr()?)))
            }
            Err(error) => Err(error),
        }
    }
}

/// Returns a result as the Python object that a function of `p2pmem._types` makes of its fields.
pub(crate) fn result<'py, T: Serialize>(py: Python<'py>, function: &str, value: &T) -> PyResult<Bound<'py, PyAny>> {
    let fields = pythonize(py, value)?;
    py.import("p2pmem._types")?.getattr(function)?.call1((fields,))
}

/// As [`result`], for each of a list.
pub(crate) fn results<'py, T: Serialize>(
    py: Python<'py>,
    function: &str,
    values: &[T],
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    values.iter().map(|value| result(py, function, value)).collect()
}

/// The clients of a request: a client, a name, or several of both.
pub(crate) fn clients(near: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<p2pmem::Client>> {
    let Some(near) = near else { return Ok(Vec::new()) };
    if near.is_instance_of::<PyString>() || near.cast::<Client>().is_ok() {
        return Ok(vec![client(near)?]);
    }
    let each = near
        .try_iter()
        .map_err(|_| not_a("a Client, a name, or several", near))?;
    each.map(|item| client(&item?)).collect()
}

/// A client, or its name.
pub(crate) fn client(object: &Bound<'_, PyAny>) -> PyResult<p2pmem::Client> {
    if let Ok(client) = object.cast::<Client>() {
        return Ok(client.get().inner.clone());
    }
    let name: String = object.extract().map_err(|_| not_a("a Client or a name", object))?;
    object.py().detach(|| p2pmem::Client::resolve(&name)).map_err(raise)
}

/// A PCI address: a text, or an object that has one as `addr`, such as a Provider or a Client.
pub(crate) fn address(object: &Bound<'_, PyAny>) -> PyResult<PciAddr> {
    let text = match object.extract::<String>() {
        Ok(text) => text,
        Err(_) => {
            let addr = object.getattr("addr").and_then(|addr| addr.extract());
            addr.map_err(|_| not_a("a PCI address, a Provider or a Client", object))?
        }
    };
    text.parse().map_err(raise)
}

/// A provider: its id, or an object that has one.
pub(crate) fn provider(object: &Bound<'_, PyAny>) -> PyResult<u32> {
    let id = if object.is_instance_of::<PyInt>() {
        object.clone()
    } else {
        object
            .getattr("id")
            .map_err(|_| not_a("a Provider or its id", object))?
    };
    Ok(id.extract::<Int<u32>>()?.0)
}

/// A path class: `same-switch` or `SW`, or a member of the enumeration, which is such a text.
pub(crate) fn path_class(object: &Bound<'_, PyAny>) -> PyResult<PathClass> {
    let word: String = object.extract().map_err(|_| not_a("a PathClass or its name", object))?;
    for class in PathClass::ALL {
        if pythonize(object.py(), &class)?.eq(&word)? && class != PathClass::Unreachable {
            return Ok(class);
        }
    }
    word.parse().map_err(PyValueError::new_err)
}

/// The attribute of an object, converted; none if the attribute is None.
pub(crate) fn attribute<'py, T>(
    object: &Bound<'py, PyAny>,
    name: &str,
    convert: impl FnOnce(Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Option<T>> {
    let value = object.getattr(name)?;
    if value.is_none() {
        return Ok(None);
    }
    convert(value).map(Some)
}

/// A value of the library that has a text form, from its text.
pub(crate) fn word<T: FromStr<Err = E>, E: Display>(value: Bound<'_, PyAny>) -> PyResult<T> {
    let text: String = value.extract()?;
    text.parse()
        .map_err(|error: E| PyValueError::new_err(error.to_string()))
}

/// An integer, as [`Int`].
pub(crate) fn int<'py, T>(value: Bound<'py, PyAny>) -> PyResult<T>
where
    Int<T>: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    Ok(value.extract::<Int<T>>()?.0)
}

/// The TypeError for an argument.
pub(crate) fn not_a(expected: &str, object: &Bound<'_, PyAny>) -> PyErr {
    let name = object.get_type().name();
    PyTypeError::new_err(match name {
        Ok(name) => format!("expected {expected}, and not {name}"),
        Err(_) => format!("expected {expected}"),
    })
}

/// A descriptor of its own for a number, or for an object with `fileno()`.
pub(crate) fn descriptor(object: &Bound<'_, PyAny>) -> PyResult<OwnedFd> {
    let number = if object.is_instance_of::<PyInt>() {
        object.clone()
    } else {
        match object.getattr("fileno") {
            Ok(fileno) => fileno.call0()?,
            Err(_) => return Err(not_a("a file descriptor, or an object with fileno()", object)),
        }
    };
    let Int(fd) = number.extract::<Int<RawFd>>()?;
    duplicate(fd).map_err(|error| {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        match errno {
            libc::EBADF => other(errno, &format!("{fd} is not an open file descriptor"), None),
            _ => other(
                errno,
                &format!("the file descriptor {fd} cannot be duplicated: {error}"),
                Some("close files, or raise the limit (ulimit -n)"),
            ),
        }
    })
}

/// A file for direct I/O.
pub(crate) enum DirectFile {
    /// It is to be opened.
    Path(PathBuf),
    /// The program opened it.
    Open(OwnedFd),
}

impl DirectFile {
    /// A path, a descriptor, or an object with `fileno()`.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<PyInt>() || object.hasattr("fileno")? {
            return Ok(Self::Open(descriptor(object)?));
        }
        let path = object
            .extract()
            .map_err(|_| not_a("a path, a file descriptor, or an object with fileno()", object))?;
        Ok(Self::Path(path))
    }

    /// Returns the file, opened for reading, or for reading and writing.
    pub(crate) fn open(self, write: bool) -> p2pmem::Result<File> {
        match self {
            Self::Open(fd) => Ok(File::from(fd)),
            Self::Path(path) if write => DirectOptions::new().write(true).open(path),
            Self::Path(path) => open_direct(path),
        }
    }
}

/// Ranges of bytes: pairs of the first byte and the one after the last.
pub(crate) fn ranges(pairs: Vec<(Int<u64>, Int<u64>)>) -> impl Iterator<Item = Range<u64>> {
    pairs.into_iter().map(|(Int(start), Int(end))| start..end)
}
