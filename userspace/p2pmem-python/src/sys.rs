// SPDX-License-Identifier: MIT OR Apache-2.0

//! Descriptors that Python names by their numbers: the one module with `unsafe`.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// Duplicates a descriptor of this process.
///
/// # Errors
///
/// EBADF where the number is no open descriptor; EMFILE.
pub(crate) fn duplicate(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the call accepts every number, and reads and writes no memory of the program.
    let new = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if new < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the descriptor is open and new, and no other code knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}
