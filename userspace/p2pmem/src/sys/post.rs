// SPDX-License-Identifier: MIT OR Apache-2.0

//! Posting a work request.

use std::fmt;

use sideway::ibverbs::queue_pair::{
    BasicQueuePair, PostSendError, PostSendGuard, QueuePair, SetScatterGatherEntry, WorkRequestFlags,
};

use super::verbs::RawMr;

/// What a work request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Write,
    Read,
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Write => "RDMA WRITE",
            Self::Read => "RDMA READ",
        })
    }
}

/// Posts one signalled work request between `len` bytes of a registration, from the address `start` on, and remote memory.
#[allow(clippy::too_many_arguments)] // a work request has so many
pub(crate) fn post(
    qp: &mut BasicQueuePair,
    id: u64,
    verb: Verb,
    local: &RawMr,
    start: u64,
    len: u32,
    rkey: u32,
    remote: u64,
) -> Result<(), PostSendError> {
    let mut guard = qp.start_post_send();
    let request = guard.construct_wr(id, WorkRequestFlags::Signaled);
    let request = match verb {
        Verb::Write => request.setup_write(rkey, remote),
        Verb::Read => request.setup_read(rkey, remote),
    };
    // SAFETY: the key is that of a registration, so the NIC touches no other memory than what that covers, whatever the
    // address; and that memory is none that Rust has references to. When the registration ends so does the NIC's access.
    unsafe { request.setup_sge(local.lkey, start, len) };
    guard.post()
}
