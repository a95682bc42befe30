// SPDX-License-Identifier: MIT OR Apache-2.0

//! Shared receive queues (SRQs): linked lists of entries, so that the driver can reuse entries in any order.

use p2pmem_ib::{Fetched, ReceiveWork, Status};
use p2pmem_vfio_user::Dma;

use super::command::SrqKind;
use super::layout::wire::wqe_srq_next_seg;
use super::ring::{DoorbellRecord, Ring};
use super::wqe;

/// Mask of the counter in the doorbell record (16 bits).
const COUNTER: u32 = 0xffff;

/// A shared receive queue.
#[derive(Debug)]
pub(super) struct Srq {
    pub(super) kind: SrqKind,
    pub(super) ring: Ring,
    doorbell_record: DoorbellRecord,
    pub(super) pd: u32,
    pub(super) xrcd: Option<u32>,
    pub(super) cqn: Option<u32>,
    /// SRQ context, as created.
    pub(super) context: Vec<u8>,
    /// Whether the SRQ is in the error state because an entry could not be read.
    pub(super) broken: bool,
    /// Index of the next entry, and number of entries fetched (modulo 2^16).
    head: u32,
    rq_counter: u32,
}

impl Srq {
    pub(super) fn new(
        kind: SrqKind,
        ring: Ring,
        doorbell_record: DoorbellRecord,
        pd: u32,
        xrc: Option<(u32, u32)>,
        context: Vec<u8>,
    ) -> Self {
        Self {
            kind,
            ring,
            doorbell_record,
            pd,
            xrcd: xrc.map(|(xrcd, _)| xrcd),
            cqn: xrc.map(|(_, cqn)| cqn),
            context,
            broken: false,
            head: 0,
            rq_counter: 0,
        }
    }

    /// Fetches the next entry.
    pub(super) fn next(&mut self, dma: &Dma) -> Fetched<ReceiveWork> {
        if self.broken {
            return Fetched::Broken;
        }
        let Ok(posted) = self.doorbell_record.word(dma, 0) else {
            self.broken = true;
            return Fetched::Broken;
        };
        let left = posted.wrapping_sub(self.rq_counter) & COUNTER;
        if left == 0 {
            return Fetched::Empty;
        }
        let mut bytes = vec![0; self.ring.stride()];
        if left > self.ring.entries() || self.ring.read(dma, self.head, &mut bytes).is_err() {
            self.broken = true;
            return Fetched::Broken;
        }
        let id = u64::from(self.head);
        self.head = wqe_srq_next_seg::NEXT_WQE_INDEX.get32(&bytes) & (self.ring.entries() - 1);
        self.rq_counter = self.rq_counter.wrapping_add(1) & COUNTER;
        let entries = bytes.get(wqe_srq_next_seg::BYTES..).unwrap_or(&[]);
        match wqe::scatter(entries) {
            Ok(sges) => Fetched::Work(ReceiveWork {
                id,
                sges,
                left: left - 1,
            }),
            Err(wqe::Malformed) => Fetched::Bad {
                id,
                status: Status::LocalQpOperation,
            },
        }
    }
}
