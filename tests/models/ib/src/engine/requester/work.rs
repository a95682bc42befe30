// SPDX-License-Identifier: MIT OR Apache-2.0

//! Work requests that are started and not completed.

use smallvec::SmallVec;

use crate::packet::Chunk;
use crate::psn;
use crate::work::{AddressVector, Segment, SendOp, Sge, Status};

/// Progress of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Progress {
    /// Packets are not acknowledged or responses are missing.
    Outstanding,
    /// The request ended with this status.
    Ended(Status),
}

/// A work request that was started.
#[derive(Debug)]
pub(in crate::engine) struct Work {
    pub(in crate::engine) id: u64,
    /// `None` if the request could not be decoded.
    pub(in crate::engine) op: Option<SendOp>,
    pub(in crate::engine) signaled: bool,
    pub(super) solicited: bool,
    pub(in crate::engine) sges: SmallVec<[Sge; 4]>,
    pub(super) inline: Option<Chunk>,
    /// Mixed payload. If not empty, `sges` and `inline` are empty.
    pub(super) mixed: Vec<Segment>,
    pub(super) to: Option<AddressVector>,
    pub(super) srqn: u32,
    pub(in crate::engine) length: u32,
    pub(super) first: u32,
    pub(super) last: u32,
    /// READs and atomic operations: number of responses received.
    pub(in crate::engine) responses: u32,
    pub(in crate::engine) progress: Progress,
}

impl Work {
    pub(in crate::engine) fn is_rd_atomic(&self) -> bool {
        matches!(
            self.op,
            Some(SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. })
        )
    }

    /// Returns the PSN of the next response to a READ or an atomic operation.
    pub(in crate::engine) fn next_response_psn(&self) -> u32 {
        psn::add(self.first, self.responses)
    }

    /// Returns whether all responses to a READ or an atomic operation arrived.
    pub(in crate::engine) fn has_all_responses(&self) -> bool {
        self.responses > 0 && psn::diff(self.next_response_psn(), self.last) > 0
    }

    pub(in crate::engine) fn last(&self) -> u32 {
        self.last
    }

    /// Returns the number of bytes that a READ or an atomic operation returned.
    pub(in crate::engine) fn response_length(&self) -> u32 {
        if self.is_rd_atomic() { self.length } else { 0 }
    }

    pub(super) fn ended(id: u64, op: Option<SendOp>, signaled: bool, psn: u32, status: Status) -> Self {
        Self {
            id,
            op,
            signaled,
            solicited: false,
            sges: SmallVec::new(),
            inline: None,
            mixed: Vec::new(),
            to: None,
            srqn: 0,
            length: 0,
            first: psn,
            last: psn::add(psn, psn::MASK),
            responses: 0,
            progress: Progress::Ended(status),
        }
    }
}
