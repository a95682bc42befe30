// SPDX-License-Identifier: MIT OR Apache-2.0

//! Work in the name of another user, in a thread of its own.

use std::io;

fn result(value: libc::c_long) -> io::Result<()> {
    if value < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Runs `work` in a thread that has the ids of another user, and returns what it returns. The calls go to the kernel
/// directly: there they change the calling thread alone, while the C library's would change the whole process.
pub(crate) fn as_user<T: Send>(
    uid: libc::uid_t,
    gid: libc::gid_t,
    groups: &[libc::gid_t],
    work: impl FnOnce() -> T + Send,
) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: the kernel reads as many groups as the slice has, and keeps no pointer to them.
            result(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) })?;
            // SAFETY: the call takes numbers.
            result(unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) })?;
            // SAFETY: the call takes numbers.
            result(unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) })?;
            Ok(work())
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
