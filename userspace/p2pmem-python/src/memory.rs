// SPDX-License-Identifier: MIT OR Apache-2.0

//! Copies between mappings and Python's objects, and between mappings and files.
//!
//! The extension module has no pointer to the memory of other Python objects: the buffer protocol is not in the stable ABI of
//! Python 3.9. Copies go through `bytes` objects, whose content never changes, in parts of a megabyte. Accesses to a BAR take
//! much longer than this second copy.

use std::ops::Range;

use p2pmem::{Error, Mapping};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView, PySlice};

use crate::convert::{not_a, DirectFile};
use crate::error::raise;

/// Most bytes that are copied at once.
const PART: usize = 1 << 20;

/// The range of `len` bytes from `offset` on; by default, to the end of the mapping. The range is in the mapping.
fn range(mapping: &Mapping, offset: usize, len: Option<usize>) -> PyResult<Range<usize>> {
    let size = mapping.len();
    let len = len.unwrap_or_else(|| size.saturating_sub(offset));
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(offset..end),
        _ => Err(raise(Error::OutOfBounds { offset, len, size })),
    }
}

/// The bytes of an object with the buffer protocol, as a memoryview of format `B`; none if the object has no bytes.
fn bytes_of<'py>(object: &Bound<'py, PyAny>, writable: bool) -> PyResult<Option<Bound<'py, PyAny>>> {
    let view = PyMemoryView::from(object).map_err(|_| not_a("an object with the buffer protocol", object))?;
    if writable && view.getattr("readonly")?.is_truthy()? {
        return Err(PyTypeError::new_err("the object is read-only"));
    }
    if view.getattr("nbytes")?.eq(0)? {
        return Ok(None);
    }
    if !view.getattr("c_contiguous")?.is_truthy()? {
        return Err(PyValueError::new_err(
            "the object is not contiguous: pass numpy.ascontiguousarray(array)",
        ));
    }
    if let Ok(bytes) = view.call_method1("cast", ("B",)) {
        return Ok(Some(bytes));
    }
    // memoryview knows formats of one character only. Arrays of complex numbers, structures, or another byte order have others.
    let flat = object
        .call_method1("reshape", (-1,))
        .and_then(|flat| flat.call_method1("view", ("u1",)))
        .and_then(|bytes| PyMemoryView::from(&bytes));
    match flat {
        Ok(bytes) => Ok(Some(bytes.into_any())),
        Err(_) => Err(PyValueError::new_err(
            "the object's format cannot be viewed as bytes: pass memoryview(object).cast('B')",
        )),
    }
}

/// The ranges of at most [`PART`] bytes that `len` bytes consist of: first byte and length.
fn parts(len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(PART).map(move |start| (start, PART.min(len - start)))
}

fn slice(py: Python<'_>, start: usize, len: usize) -> Bound<'_, PySlice> {
    // The length of a Python object fits.
    PySlice::new(py, start as isize, (start + len) as isize, 1)
}

/// Returns a copy of the memory.
pub(crate) fn read<'py>(
    py: Python<'py>,
    mapping: &Mapping,
    size: Option<usize>,
    offset: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let range = range(mapping, offset, size)?;
    PyBytes::new_with(py, range.len(), |out| {
        py.detach(|| mapping.try_copy_to_slice(offset, out)).map_err(raise)
    })
}

/// Fills an object from the memory. Returns the number of bytes.
pub(crate) fn read_into(py: Python<'_>, mapping: &Mapping, out: &Bound<'_, PyAny>, offset: usize) -> PyResult<usize> {
    let Some(view) = bytes_of(out, true)? else {
        range(mapping, offset, Some(0))?;
        return Ok(0);
    };
    let len: usize = view.len()?;
    range(mapping, offset, Some(len))?;
    for (start, some) in parts(len) {
        py.check_signals()?;
        let part = read(py, mapping, Some(some), offset + start)?;
        view.set_item(slice(py, start, some), part)?;
    }
    Ok(len)
}

/// Copies an object to the memory. Returns the number of bytes.
pub(crate) fn write(py: Python<'_>, mapping: &Mapping, data: &Bound<'_, PyAny>, offset: usize) -> PyResult<usize> {
    let copy = |bytes: &[u8], at: usize| py.detach(|| mapping.try_copy_from_slice(at, bytes)).map_err(raise);
    let Some(view) = bytes_of(data, false)? else {
        range(mapping, offset, Some(0))?;
        return Ok(0);
    };
    let len: usize = view.len()?;
    range(mapping, offset, Some(len))?;
    for (start, some) in parts(len) {
        py.check_signals()?;
        let part = view.get_item(slice(py, start, some))?.call_method0("tobytes")?;
        copy(part.cast::<PyBytes>()?.as_bytes(), offset + start)?;
    }
    Ok(len)
}

/// Sets bytes of the memory.
pub(crate) fn fill(py: Python<'_>, mapping: &Mapping, byte: u8, offset: usize, size: Option<usize>) -> PyResult<()> {
    let range = range(mapping, offset, size)?;
    py.detach(|| mapping.try_fill(range, byte)).map_err(raise)
}

/// Reads from a file straight into the memory. Returns the number of bytes.
pub(crate) fn read_from(
    py: Python<'_>,
    mapping: &Mapping,
    file: &Bound<'_, PyAny>,
    file_offset: u64,
    offset: usize,
    size: Option<usize>,
) -> PyResult<usize> {
    let range = range(mapping, offset, size)?;
    let file = DirectFile::of(file)?;
    let read = || mapping.read_from(&file.open(false)?, file_offset, range);
    py.detach(read).map_err(raise)
}

/// Writes the memory straight to a file. Returns the number of bytes.
pub(crate) fn write_to(
    py: Python<'_>,
    mapping: &Mapping,
    file: &Bound<'_, PyAny>,
    file_offset: u64,
    offset: usize,
    size: Option<usize>,
) -> PyResult<usize> {
    let range = range(mapping, offset, size)?;
    let size = range.len();
    let file = DirectFile::of(file)?;
    let write = || mapping.write_to(&file.open(true)?, file_offset, range);
    py.detach(write).map_err(raise)?;
    Ok(size)
}
