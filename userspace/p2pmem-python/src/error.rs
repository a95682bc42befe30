// SPDX-License-Identifier: MIT OR Apache-2.0

//! Errors of the library as Python exceptions.

use std::borrow::Cow;

use p2pmem::Error;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use pythonize::pythonize;

/// Converts an error to an exception of the class in `p2pmem._errors` that has its kind.
pub(crate) fn raise(error: Error) -> PyErr {
    let errno = error.errno().unwrap_or(match error {
        Error::Client { .. } => libc::ENODEV,
        Error::Verbs(_) => libc::ENOSYS,
        Error::Abi { .. } => libc::EPROTO,
        Error::Request(_) | Error::OutOfBounds { .. } | Error::NotDirect => libc::EINVAL,
        Error::Missing(_) => libc::ENOENT,
        Error::Exists(_) => libc::EEXIST,
        Error::Bound { .. } => libc::EBUSY,
        _ => libc::EIO,
    });
    let remedy = error.remedy().map(in_python);
    Python::attach(|py| {
        let exception = || {
            let details = PyDict::new(py);
            details.set_item("reason", error.reason())?;
            details.set_item("remedy", remedy)?;
            if let Error::NoSpace { full, .. } = &error {
                details.set_item("full", pythonize(py, full)?)?;
            }
            let kind = pythonize(py, &error.kind())?;
            let make = py.import("p2pmem._errors")?.getattr("make")?;
            make.call((kind, errno, error.to_string()), Some(&details))
        };
        exception().map_or_else(|error| error, PyErr::from_value)
    })
}

/// An error for a wrong use of a value that the library cannot know of.
pub(crate) fn other(errno: i32, message: &str, remedy: Option<&str>) -> PyErr {
    Python::attach(|py| {
        let exception = || {
            let details = PyDict::new(py);
            details.set_item("remedy", remedy)?;
            let make = py.import("p2pmem._errors")?.getattr("make")?;
            make.call(("other", errno, message), Some(&details))
        };
        exception().map_or_else(|error| error, PyErr::from_value)
    })
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
        other => other.into(),
    }
}
