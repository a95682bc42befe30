// SPDX-License-Identifier: MIT OR Apache-2.0

//! Waiting for several things at once.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{poll, PollFd, PollFlags, Timespec};

/// The most time between two looks at what has no event, such as a request to stop.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Waits until a file descriptor is readable or has failed, at most for `limit`.
pub(crate) fn wait(fds: &[BorrowedFd<'_>], limit: Duration) -> io::Result<()> {
    let mut fds: Vec<PollFd<'_>> = fds
        .iter()
        .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN))
        .collect();
    let limit = Timespec::try_from(limit).ok();
    match poll(&mut fds, limit.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
