// SPDX-License-Identifier: MIT OR Apache-2.0

//! Work with the credentials of another user, in a separate thread.

use std::io;

use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

/// Runs `work` in a thread with the ids of another user, and returns its result. The thread calls the kernel directly,
/// which changes the calling thread only; the C library's functions change the whole process.
///
/// # Errors
///
/// EINVAL for the id `u32::MAX`, which is invalid; EPERM if the process may not change its ids.
pub(crate) fn as_user<T: Send>(uid: u32, gid: u32, groups: &[u32], work: impl FnOnce() -> T + Send) -> io::Result<T> {
    // For the kernel, the largest number means that an id does not change.
    if [uid, gid].iter().chain(groups).any(|id| *id == u32::MAX) {
        return Err(rustix::io::Errno::INVAL.into());
    }
    let groups: Vec<Gid> = groups.iter().copied().map(Gid::from_raw).collect();
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            set_thread_groups(&groups)?;
            set_thread_res_gid(gid, gid, gid)?;
            set_thread_res_uid(uid, uid, uid)?;
            Ok(work())
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
