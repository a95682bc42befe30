// SPDX-License-Identifier: MIT OR Apache-2.0

//! Completion queues and completions.

use std::fmt;
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use rdma_mummy_sys as ffi;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::errno;
use super::nic::Nic;

/// Completion of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Id of the work request.
    pub id: u64,
    /// The failure, if the work request failed.
    pub failure: Option<Failure>,
    /// Number of bytes received.
    pub bytes: u32,
    /// The immediate data, if the message has any.
    pub immediate: Option<u32>,
}

/// Failure of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// `enum ibv_wc_status`.
    pub status: u32,
    /// Code of the vendor.
    pub vendor: u32,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use ffi::ibv_wc_status::*;
        let (what, remedy) = match self.status {
            IBV_WC_LOC_LEN_ERR => ("local length error", "a message was longer than its receive"),
            IBV_WC_LOC_PROT_ERR => (
                "local protection error",
                "this side's memory is not registered any more: was its provider unpublished?",
            ),
            IBV_WC_WR_FLUSH_ERR => ("flushed", "an earlier request failed, or the queue pair is in the error state"),
            IBV_WC_REM_INV_REQ_ERR => ("remote invalid request", "the other side's NIC does not support the request"),
            IBV_WC_REM_ACCESS_ERR => (
                "remote access error",
                "the other side's memory is not registered any more: was its provider unpublished, or has the program ended?",
            ),
            IBV_WC_REM_OP_ERR => ("remote operation error", "the other side's NIC could not access its memory"),
            IBV_WC_RETRY_EXC_ERR => (
                "transport retry counter exceeded",
                "the other side's NIC does not respond: is the link up, are LID and GID correct, is its program running?",
            ),
            IBV_WC_RNR_RETRY_EXC_ERR => ("receiver not ready", "the other side posts no receives"),
            _ => ("failed", "see ibv_poll_cq(3)"),
        };
        write!(
            f,
            "{what} (status {}, vendor code {:#x}): {remedy}",
            self.status, self.vendor
        )
    }
}

/// A completion queue with its completion channel.
///
/// A program polls ([`Completions::poll`]), or sleeps until an event arrives: [`Completions::arm`] requests one event,
/// then `poll()` again, because completions before the request cause no event, then [`Completions::wait`].
///
/// # Waiting for several things
///
/// The channel's file descriptor ([`AsFd`]) is readable while an event is pending, so `poll()` or `epoll` can wait for
/// the queue, sockets, and other files at once. If it is readable, call `wait()` with a limit of zero, which consumes the
/// event. Do not call `read()` on the file descriptor: events that only `read()` consumed are never acknowledged, and the
/// drop of the queue waits for them forever.
///
/// ```no_run
/// # fn example(completions: &p2pmem_verbs::Completions, socket: &std::net::TcpStream) -> std::io::Result<()> {
/// use std::os::fd::AsFd;
/// use std::time::Duration;
/// use rustix::event::{poll, PollFd, PollFlags};
///
/// let mut done = Vec::new();
/// completions.arm()?;
/// if completions.poll(&mut done)? == 0 {
///     let mut files = [completions.as_fd(), socket.as_fd()].map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN));
///     poll(&mut files, None)?;
///     if completions.wait(Duration::ZERO)? {
///         completions.poll(&mut done)?;
///     }
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Invariants
///
/// `raw` and `channel` exist until this is dropped; `raw` uses `channel`.
pub struct Completions {
    pub(super) raw: NonNull<ffi::ibv_cq>,
    channel: NonNull<ffi::ibv_comp_channel>,
    _nic: Arc<Nic>,
}

// SAFETY: as for `Nic`.
unsafe impl Send for Completions {}
// SAFETY: as for `Nic`.
unsafe impl Sync for Completions {}

impl Completions {
    /// Creates a queue for `entries` completions.
    ///
    /// # Errors
    ///
    /// EINVAL if the NIC does not support queues of this size, ENOMEM.
    pub fn new(nic: &Arc<Nic>, entries: u32) -> io::Result<Arc<Self>> {
        let entries = libc::c_int::try_from(entries).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        // SAFETY: by its invariant the context is open; the channel is destroyed if the queue cannot be created.
        unsafe {
            let channel = ffi::ibv_create_comp_channel(nic.raw.as_ptr());
            let channel = NonNull::new(channel).ok_or_else(io::Error::last_os_error)?;
            let raw = ffi::ibv_create_cq(nic.raw.as_ptr(), entries, ptr::null_mut(), channel.as_ptr(), 0);
            let Some(raw) = NonNull::new(raw) else {
                let error = io::Error::last_os_error();
                ffi::ibv_destroy_comp_channel(channel.as_ptr());
                return Err(error);
            };
            // INVARIANT: both were created above.
            Ok(Arc::new(Self {
                raw,
                channel,
                _nic: nic.clone(),
            }))
        }
    }

    /// Polls completions, at most 64, and appends them to `into`. Returns their number.
    ///
    /// # Errors
    ///
    /// EIO if the queue is in error.
    pub fn poll(&self, into: &mut Vec<Completion>) -> io::Result<usize> {
        const MAX: usize = 64;
        let mut list = [const { mem::MaybeUninit::<ffi::ibv_wc>::zeroed() }; MAX];
        // SAFETY: the queue exists by the invariant; the list has as many entries as the call may write.
        let count = unsafe { ffi::ibv_poll_cq(self.raw.as_ptr(), MAX as i32, list.as_mut_ptr().cast()) };
        let count = usize::try_from(count).map_err(|_| io::Error::from_raw_os_error(libc::EIO))?;
        for done in &list[..count] {
            // SAFETY: all zeros, the initial value, is valid for the structure, and ibv_poll_cq() wrote the first
            // `count` entries.
            let done = unsafe { &*done.as_ptr() };
            let failed = done.status != ffi::ibv_wc_status::IBV_WC_SUCCESS;
            let with_immediate = done.wc_flags & ffi::ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
            // SAFETY: both fields of the union are integers of the same size.
            let immediate = u32::from_be(unsafe { done.imm_data_invalidated_rkey_union.imm_data });
            into.push(Completion {
                id: done.wr_id,
                failure: failed.then_some(Failure {
                    status: done.status,
                    vendor: done.vendor_err,
                }),
                bytes: done.byte_len,
                immediate: (!failed && with_immediate).then_some(immediate),
            });
        }
        Ok(count)
    }

    /// Requests an event for the next completion. Completions before the call cause no event: poll again after it.
    ///
    /// # Errors
    ///
    /// The queue is in error.
    pub fn arm(&self) -> io::Result<()> {
        // SAFETY: the queue exists by the invariant.
        errno(unsafe { ffi::ibv_req_notify_cq(self.raw.as_ptr(), 0) })
    }

    /// Waits for a requested event, at most for `limit`, and consumes it. Returns whether an event arrived. Only one
    /// thread may wait at a time: of two threads, one may wait longer than its limit.
    ///
    /// # Errors
    ///
    /// The completion channel failed.
    pub fn wait(&self, limit: Duration) -> io::Result<bool> {
        let mut fds = [PollFd::from_borrowed_fd(self.as_fd(), PollFlags::IN)];
        // A duration that the kernel's type cannot represent means no limit.
        let limit = Timespec::try_from(limit).ok();
        match poll(&mut fds, limit.as_ref()) {
            Ok(0) | Err(Errno::INTR) => return Ok(false),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel exists by the invariant, and only this queue uses it, so the event is one of this queue.
        // The event is acknowledged to its queue.
        unsafe {
            errno(ffi::ibv_get_cq_event(self.channel.as_ptr(), &mut queue, &mut context))?;
            ffi::ibv_ack_cq_events(queue, 1);
        }
        Ok(true)
    }
}

impl AsFd for Completions {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel exists by the invariant, and so its file descriptor is open for the lifetime of the borrow.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: both exist by the invariant. Queue pairs hold an `Arc` of this and are already dropped. All events
        // were acknowledged in `wait()`. The queue is destroyed before its channel.
        unsafe {
            ffi::ibv_destroy_cq(self.raw.as_ptr());
            ffi::ibv_destroy_comp_channel(self.channel.as_ptr());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_have_a_hint() {
        for status in 1..24 {
            let text = Failure { status, vendor: 0x51 }.to_string();
            assert!(text.contains("0x51") && text.contains(": "), "{text}");
        }
        let gone = Failure {
            status: ffi::ibv_wc_status::IBV_WC_REM_ACCESS_ERR,
            vendor: 0,
        };
        assert!(gone.to_string().starts_with("remote access error (status 10"), "{gone}");
    }
}
