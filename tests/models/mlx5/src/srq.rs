// SPDX-License-Identifier: MIT OR Apache-2.0

//! Shared receive queues: entries that name the next one, so that the driver can give them back in any order.

use p2pmem_ib::{Fetched, ReceiveWork, Status};
use p2pmem_vfio_user::Dma;

use super::command::SrqKind;
use super::layout::wire::wqe_srq_next_seg;
use super::ring::{Record, Ring};
use super::wqe;

/// The doorbell record's counter has 16 bits.
const COUNTER: u32 = 0xffff;

/// A shared receive queue.
#[derive(Debug)]
pub(super) struct Srq {
    pub(super) kind: SrqKind,
    pub(super) ring: Ring,
    record: Record,
    pub(super) pd: u32,
    pub(super) xrcd: Option<u32>,
    pub(super) cqn: Option<u32>,
    /// The context as it was created.
    pub(super) context: Vec<u8>,
    /// Entries cannot be read any more.
    pub(super) broken: bool,
    /// The entry that is next, and how many were taken.
    head: u32,
    taken: u32,
}

impl Srq {
    pub(super) fn new(
        kind: SrqKind,
        ring: Ring,
        record: Record,
        pd: u32,
        xrc: Option<(u32, u32)>,
        context: Vec<u8>,
    ) -> Self {
        Self {
            kind,
            ring,
            record,
            pd,
            xrcd: xrc.map(|(xrcd, _)| xrcd),
            cqn: xrc.map(|(_, cqn)| cqn),
            context,
            broken: false,
            head: 0,
            taken: 0,
        }
    }

    /// Takes the next entry.
    pub(super) fn next(&mut self, dma: &Dma) -> Fetched<ReceiveWork> {
        if self.broken {
            return Fetched::Broken;
        }
        let Ok(posted) = self.record.word(dma, 0) else {
            self.broken = true;
            return Fetched::Broken;
        };
        let left = posted.wrapping_sub(self.taken) & COUNTER;
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
        self.taken = self.taken.wrapping_add(1) & COUNTER;
        let pieces = bytes.get(wqe_srq_next_seg::BYTES..).unwrap_or(&[]);
        match wqe::scatter(pieces) {
            Ok(pieces) => Fetched::Work(ReceiveWork {
                id,
                pieces,
                left: left - 1,
            }),
            Err(wqe::Malformed) => Fetched::Bad {
                id,
                status: Status::LocalQpOperation,
            },
        }
    }
}
