// SPDX-License-Identifier: MIT OR Apache-2.0

//! Errors of the library as Python exceptions.

use std::borrow::Cow;

use p2pmem::Error;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use pythonize::pythonize;

/// Converts an error to an exception of the class in `p2pmem._errors` that has its kind.
pub(crate) fn raise(error: Error) -> PyErr {
    exception(|py| {
        let details = PyDict::new(py);
        details.set_item("reason", error.reason())?;
        details.set_item("remedy", error.remedy().map(in_python))?;
        if let Error::NoSpace { full, .. } = &error {
            details.set_item("full", pythonize(py, full)?)?;
        }
        make(
            &pythonize(py, &error.kind())?,
            error.errno_or_nearest(),
            &error.to_string(),
            &details,
        )
    })
}

/// An error for a wrong use of a value that the library cannot know of.
pub(crate) fn other(errno: i32, message: &str, remedy: Option<&str>) -> PyErr {
    exception(|py| {
        let details = PyDict::new(py);
        details.set_item("remedy", remedy)?;
        make(PyString::new(py, "other").as_any(), errno, message, &details)
    })
}

/// Calls `p2pmem._errors.make()`.
fn make<'py>(
    kind: &Bound<'py, PyAny>,
    errno: i32,
    message: &str,
    details: &Bound<'py, PyDict>,
) -> PyResult<Bound<'py, PyAny>> {
    let make = kind.py().import("p2pmem._errors")?.getattr("make")?;
    make.call((kind, errno, message), Some(details))
}

/// The exception that a function makes, or the one that the function fails with.
fn exception(make: impl for<'py> FnOnce(Python<'py>) -> PyResult<Bound<'py, PyAny>>) -> PyErr {
    Python::attach(|py| make(py).map_or_else(|error| error, PyErr::from_value))
}

/// The names of Python in a remedy of the library.
fn in_python(remedy: &'static str) -> Cow<'static, str> {
    match remedy {
        "open the file with p2pmem::DirectOptions or open_direct()" => {
            "open the file with os.open(path, os.O_RDWR | os.O_DIRECT), or pass its path".into()
        }
        "pass the descriptor that Buffer::share() returned" => {
            "pass the descriptor that Buffer.share() returned".into()
        }
        "set the device that has the memory: DmaBuf::of_device()" => {
            "pass the device that has the memory: DmaBuf(fd, device=\"0000:03:00.0\")".into()
        }
        other => other.into(),
    }
}
