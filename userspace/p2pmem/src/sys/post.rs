// SPDX-License-Identifier: MIT OR Apache-2.0

//! Posting of work requests.

use std::fmt;

use sideway::ibverbs::queue_pair::{
    BasicQueuePair, PostSendError, PostSendGuard, QueuePair, SetScatterGatherEntry, WorkRequestFlags,
};

use super::verbs::RawMr;

/// Operation of a work request.
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

/// Posts one signaled work request between remote memory and `len` bytes of a registration, from the address `start`
/// on.
#[allow(clippy::too_many_arguments)] // the fields of a work request
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
    // SAFETY: the key is that of a registration, so the NIC accesses only memory that the registration covers, for any
    // address, and Rust has no references to this memory. The NIC's access ends with the registration.
    unsafe { request.setup_sge(local.lkey, start, len) };
    guard.post()
}
