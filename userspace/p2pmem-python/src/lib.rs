// SPDX-License-Identifier: MIT OR Apache-2.0

//! The extension module `p2pmem._native` of the Python package p2pmem.
//!
//! Each class here wraps a type of the crate p2pmem. The Python files in `python/p2pmem` have what needs no call: the
//! exceptions, and the results as dataclasses. All calls release the interpreter's lock while they run in the library or the
//! kernel.
//!
//! Two rules keep the interpreter alive for any program:
//!
//! - Objects that are closed, or that were made by the process of which this one is a fork, raise: see `held.rs`.
//! - Copies from and to a mapping raise if the provider was removed, instead of SIGBUS (`Mapping::try_copy_to_slice()`).

mod buffer;
mod client;
mod convert;
mod device;
mod dmabuf;
mod error;
mod events;
mod fake;
mod held;
mod mapping;
mod memory;
mod request;
mod rules;
mod sys;

/// The classes that the Python files import.
#[pyo3::pymodule(name = "_native")]
mod native {
    #[pymodule_export]
    use crate::buffer::Buffer;
    #[pymodule_export]
    use crate::client::Client;
    #[pymodule_export]
    use crate::device::Device;
    #[pymodule_export]
    use crate::dmabuf::DmaBuf;
    #[pymodule_export]
    use crate::events::Events;
    #[pymodule_export]
    use crate::fake::Fake;
    #[pymodule_export]
    use crate::mapping::Mapping;
    #[pymodule_export]
    use crate::rules::Rules;
}
