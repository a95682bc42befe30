// SPDX-License-Identifier: MIT OR Apache-2.0

//! The processes and connections of a boot.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Stdio;
use std::time::Instant;

use anyhow::{Result, bail};
use p2pmem_guest::in_time;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::process::{Process, Stdin};
use crate::qemu::Paths;

/// Starts the process that serves the sandbox's root file system to the guest, read-only.
pub(super) fn start_virtiofsd(paths: &Paths) -> Result<Process> {
    // virtiofsd gets the listening socket as standard input, so QEMU can connect at any time.
    let listener = UnixListener::bind(paths.root_socket())?;
    let stdin = Stdin(Some(Stdio::from(OwnedFd::from(listener))));
    let argv = [
        "/usr/libexec/virtiofsd",
        "--fd=0",
        "--shared-dir=/",
        "--sandbox=none",
        "--seccomp=none",
        // Otherwise opening a file invalidates the guest's page cache of it, and QEMU's translation of the code in
        // those pages.
        "--cache=always",
        "--readonly",
        "--log-level=warn",
    ];
    let argv = argv.map(String::from);
    Process::start("virtiofsd", &argv, stdin, &paths.dir.join("virtiofsd.log"), false)
}

/// Accepts one connection, unless QEMU ends or the deadline passes.
pub(super) fn accept(listener: &UnixListener, qemu: &mut Process, deadline: Instant) -> Result<UnixStream> {
    let slice = Timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    loop {
        let ready = poll(
            &mut [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)],
            Some(&slice),
        )?;
        if ready > 0 {
            return Ok(listener.accept()?.0);
        }
        if let Some(status) = qemu.ended()? {
            bail!("QEMU ended ({status}): {}", qemu.describe());
        }
        in_time!(
            Instant::now() <= deadline,
            "QEMU did not connect in time: {}",
            qemu.describe()
        );
    }
}
