// SPDX-License-Identifier: MIT OR Apache-2.0

//! Work in the name of another user, in a thread of its own.

use std::io;

use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

/// Runs `work` in a thread that has the ids of another user, and returns what it returns. The calls go to the kernel
/// directly: there they change the calling thread alone, while the C library's would change the whole process.
///
/// # Errors
///
/// EINVAL for an id that is none (`u32::MAX`); EPERM where the process may not take on other ids.
pub(crate) fn as_user<T: Send>(uid: u32, gid: u32, groups: &[u32], work: impl FnOnce() -> T + Send) -> io::Result<T> {
    // For the kernel the largest number means "do not change the id".
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
