// SPDX-License-Identifier: MIT OR Apache-2.0

//! Placement: a mapping of /dev/p2pmem at offset 0 gets memory near the devices in `P2PMEM_NEAR`.
//!
//! Without the shim, the module allocates such a mapping without clients. The shim allocates the buffer near the clients
//! by an ioctl on the same file, maps the buffer, and closes its handle. The mapping then holds the buffer, as a mapping
//! at offset 0 does. The shim never falls back to other memory: if the module refuses the request, `mmap()` fails.
//!
//! Nothing here allocates host memory after the start of the program, so that a memory allocator can map p2pmem memory.

use std::fmt;
use std::path::Path;
use std::sync::OnceLock;

use p2pmem_near::{Refused, NEAR};
use p2pmem_sys as abi;

use crate::clients;
use crate::line::{self, say};
use crate::summary;
use crate::sys::mapping::{Allocated, OpenFile};
use crate::sys::Errno;

/// The devices in `P2PMEM_NEAR`.
struct Near {
    /// The value of the variable.
    text: String,
    /// The clients, or why the value is not usable.
    clients: Result<Vec<abi::p2pmem_pci_addr>, String>,
}

impl Near {
    fn from_environment() -> Option<Self> {
        let value = std::env::var_os(NEAR).filter(|value| !value.is_empty())?;
        Some(match value.into_string() {
            Ok(text) => Self {
                clients: clients::resolve(Path::new("/sys"), &text),
                text,
            },
            Err(value) => Self {
                text: value.to_string_lossy().into_owned(),
                clients: Err("the value is not UTF-8".into()),
            },
        })
    }
}

/// Reads the environment. Called when the library is loaded, so that later changes of the environment have no effect.
pub(crate) fn start() {
    near();
}

fn near() -> Option<&'static Near> {
    static FOUND: OnceLock<Option<Near>> = OnceLock::new();
    FOUND.get_or_init(Near::from_environment).as_ref()
}

/// A request to map `length` bytes of new memory, as part of a message.
struct Request {
    length: usize,
    near: &'static str,
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mmap() of {} bytes near {}", self.length, self.near)
    }
}

impl Request {
    /// Reports and counts a failure.
    fn failed(&self, errno: Errno, reason: &str) {
        summary::refused(Refused::Mapping);
        say!("{self}: {}{reason}", Refusal(errno));
    }
}

/// A new buffer that is not mapped yet.
pub(crate) struct Placed {
    buffer: Allocated,
    request: Request,
}

impl Placed {
    /// Returns the offset at which the file maps the buffer.
    pub(crate) fn mmap_offset(&self) -> u64 {
        self.buffer.mmap_offset()
    }

    /// Counts the buffer after it was mapped. The mapping holds the buffer from now on.
    pub(crate) fn mapped(self) {
        let (provider, class, size) = self.buffer.place();
        summary::buffer(provider, class, size);
        if line::log_success() {
            let request = &self.request;
            say!("{request}: {size} bytes in provider {provider}, path class {class}");
        }
    }

    /// Reports that the buffer cannot be mapped, and frees it.
    pub(crate) fn not_mapped(self, errno: Errno) {
        self.request.failed(errno, ": the buffer cannot be mapped");
    }
}

/// Allocates a buffer for a shared mapping of `length` bytes of a file at offset 0. Returns `None` if the mapping is not
/// to be placed: `P2PMEM_NEAR` is not set, or the file is not /dev/p2pmem.
pub(crate) fn place(file: OpenFile, length: usize) -> Option<Result<Placed, Errno>> {
    let near = near()?;
    let file = file.p2pmem()?;
    let request = Request {
        length,
        near: &near.text,
    };
    let clients = match &near.clients {
        Ok(clients) => clients,
        Err(why) => {
            let errno = Errno(libc::ENODEV);
            summary::refused(Refused::Mapping);
            say!("{request}: {NEAR} is not usable (ENODEV): {why}");
            return Some(Err(errno));
        }
    };
    Some(match file.allocate(length as u64, clients) {
        Ok(buffer) => Ok(Placed { buffer, request }),
        Err(errno) => {
            let mut reason = [0; line::MAX_LINE];
            // Another thread may have replaced the message.
            request.failed(errno, file.reason(errno, &mut reason));
            Err(errno)
        }
    })
}

/// An errno of an allocation, for messages.
struct Refusal(Errno);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, text) = match self.0 .0 {
            libc::ENODEV => ("ENODEV", "no provider can serve the request"),
            libc::ENOSPC => ("ENOSPC", "no free memory"),
            libc::EDQUOT => ("EDQUOT", "a quota is exceeded"),
            libc::EACCES => ("EACCES", "not allowed"),
            libc::ENOMEM => ("ENOMEM", "out of memory"),
            _ => return self.0.fmt(f),
        };
        write!(f, "{text} ({name})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errnos_have_a_meaning_for_allocations() {
        assert_eq!(Refusal(Errno(libc::ENOSPC)).to_string(), "no free memory (ENOSPC)");
        assert_eq!(Refusal(Errno(libc::EINVAL)).to_string(), "invalid argument (EINVAL)");
        assert_eq!(Refusal(Errno(9999)).to_string(), "errno 9999");
    }
}
