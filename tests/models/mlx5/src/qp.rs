// SPDX-License-Identifier: MIT OR Apache-2.0

//! Queue pairs (QPs) in the driver's memory: send queue, receive queue and doorbell record. Crate `p2pmem-ib`
//! implements the transport.

use std::collections::VecDeque;

use p2pmem_ib::{Fetched, Gid, ReceiveWork, SendWork, Service, Status};
use p2pmem_vfio_user::Dma;

use super::layout::{constants, wire};
use super::ring::{DoorbellRecord, Ring};
use super::wqe::{self, Decoded, LocalOp};

/// Mask of the queue counters (16 bits).
const COUNTER: u32 = 0xffff;
/// Indexes of the words in the doorbell record.
const RECEIVE_WORD: u64 = constants::MLX5_RCV_DBR as u64;
const SEND_WORD: u64 = constants::MLX5_SND_DBR as u64;
/// Bytes of a send WQE basic block (WQEBB).
const WQEBB: usize = constants::MLX5_SEND_WQE_BB as usize;
/// Maximum bytes of a send WQE.
const MAX_WQE: usize = constants::MLX5_SEND_WQE_MAX_WQEBBS as usize * WQEBB;

/// A queue pair.
#[derive(Debug)]
pub(super) struct Qp {
    send: Option<Ring>,
    receive: Option<Ring>,
    doorbell_record: DoorbellRecord,
    pub(super) service: Service,
    /// Whether the service type is REG_UMR: the driver changes memory keys with this QP.
    pub(super) reg_umr: bool,
    pub(super) pd: u32,
    pub(super) uar: u32,
    pub(super) xrcd: Option<u32>,
    pub(super) send_cqn: u32,
    pub(super) receive_cqn: u32,
    /// Multicast groups that the QP is attached to.
    pub(super) groups: Vec<Gid>,
    /// QP context, as created and modified.
    pub(super) context: Vec<u8>,
    /// Number of WQEBBs fetched from the send queue, and of WQEs fetched from the receive queue (modulo 2^16).
    sq_wqebb_counter: u32,
    rq_counter: u32,
    /// Local work requests (NOP, UMR) that were fetched and are not executed yet.
    local: VecDeque<(u64, LocalOp)>,
}

impl Qp {
    pub(super) fn new(
        send: Option<Ring>,
        receive: Option<Ring>,
        doorbell_record: DoorbellRecord,
        context: Vec<u8>,
    ) -> Self {
        Self {
            send,
            receive,
            doorbell_record,
            service: Service::Rc,
            reg_umr: false,
            pd: 0,
            uar: 0,
            xrcd: None,
            send_cqn: 0,
            receive_cqn: 0,
            groups: Vec::new(),
            context,
            sq_wqebb_counter: 0,
            rq_counter: 0,
            local: VecDeque::new(),
        }
    }

    /// Resets the queues, on a transition to state RST.
    pub(super) fn reset(&mut self) {
        self.sq_wqebb_counter = 0;
        self.rq_counter = 0;
        self.local.clear();
    }

    /// Returns the number of WQEBBs fetched from the send queue and of WQEs fetched from the receive queue.
    pub(super) fn counters(&self) -> (u32, u32) {
        (self.sq_wqebb_counter, self.rq_counter)
    }

    /// Removes local work request `id` and all earlier ones. Returns `None` if `id` is unknown.
    pub(super) fn take_local(&mut self, id: u64) -> Option<LocalOp> {
        // Earlier work requests were flushed; the transport does not execute them.
        while let Some((first, local)) = self.local.pop_front() {
            if first == id {
                return Some(local);
            }
        }
        None
    }

    /// Fetches the next WQE of the send queue.
    pub(super) fn next_send(&mut self, dma: &Dma, qpn: u32) -> Fetched<SendWork> {
        let Some(ring) = &self.send else {
            return Fetched::Empty;
        };
        let Ok(posted) = self.doorbell_record.word(dma, SEND_WORD) else {
            return Fetched::Broken;
        };
        let blocks = posted.wrapping_sub(self.sq_wqebb_counter) & COUNTER;
        if blocks == 0 {
            return Fetched::Empty;
        }
        if blocks > ring.entries() {
            return Fetched::Broken;
        }
        let mut bytes = [0; MAX_WQE];
        let index = self.sq_wqebb_counter & COUNTER;
        let (head, _) = bytes.split_at_mut(wire::wqe_ctrl_seg::BYTES);
        if ring.read(dma, index, head).is_err() {
            return Fetched::Broken;
        }
        let control = wqe::ControlSegment::new(head);
        let id = control.id();
        let len = control.len;
        let taken = len.div_ceil(WQEBB) as u32;
        // If index or QP number mismatch, or the length exceeds the posted WQEBBs, the position of the next WQE is
        // unknown.
        if u32::from(control.index) != index || control.qpn != qpn || taken == 0 || taken > blocks || len > bytes.len()
        {
            return Fetched::Broken;
        }
        let bytes = &mut bytes[..len];
        if ring.read(dma, index, bytes).is_err() {
            return Fetched::Broken;
        }
        self.sq_wqebb_counter = self.sq_wqebb_counter.wrapping_add(taken) & COUNTER;
        match wqe::decode(&control, bytes, self.service) {
            Ok(Decoded { work, local }) => {
                if let Some(local) = local {
                    self.local.push_back((id, local));
                }
                Fetched::Work(work)
            }
            Err(wqe::Malformed) => Fetched::Bad {
                id,
                status: Status::LocalQpOperation,
            },
        }
    }

    /// Fetches the next WQE of the receive queue.
    pub(super) fn next_receive(&mut self, dma: &Dma) -> Fetched<ReceiveWork> {
        let Some(ring) = &self.receive else {
            return Fetched::Empty;
        };
        let Ok(posted) = self.doorbell_record.word(dma, RECEIVE_WORD) else {
            return Fetched::Broken;
        };
        let left = posted.wrapping_sub(self.rq_counter) & COUNTER;
        if left == 0 {
            return Fetched::Empty;
        }
        if left > ring.entries() {
            return Fetched::Broken;
        }
        let index = self.rq_counter & COUNTER;
        let mut bytes = vec![0; ring.stride()];
        if ring.read(dma, index, &mut bytes).is_err() {
            return Fetched::Broken;
        }
        self.rq_counter = self.rq_counter.wrapping_add(1) & COUNTER;
        let id = u64::from(index);
        match wqe::scatter(&bytes) {
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
