// SPDX-License-Identifier: MIT OR Apache-2.0

//! Queue pairs as the driver's memory has them: two rings and a doorbell record. What happens on the wire is the
//! transport's business.

use std::collections::VecDeque;

use p2pmem_ib::{Fetched, Gid, ReceiveWork, SendWork, Service, Status};
use p2pmem_vfio_user::Dma;

use super::layout::{constants, wire};
use super::ring::{Record, Ring};
use super::wqe::{self, Decoded, Local};

/// Counters of queues have 16 bits.
const COUNTER: u32 = 0xffff;
/// The words of the doorbell record.
const RECEIVE_WORD: u64 = constants::MLX5_RCV_DBR as u64;
const SEND_WORD: u64 = constants::MLX5_SND_DBR as u64;
/// Bytes of a send queue's basic block.
const BLOCK: usize = constants::MLX5_SEND_WQE_BB as usize;
/// Most bytes of a send queue's entry.
const MAX_ENTRY: usize = constants::MLX5_SEND_WQE_MAX_WQEBBS as usize * BLOCK;

/// A queue pair.
#[derive(Debug)]
pub(super) struct Qp {
    send: Option<Ring>,
    receive: Option<Ring>,
    record: Record,
    pub(super) service: Service,
    /// It is the driver's own, for changes of memory keys.
    pub(super) driver: bool,
    pub(super) pd: u32,
    pub(super) uar: u32,
    pub(super) xrcd: Option<u32>,
    pub(super) send_cqn: u32,
    pub(super) receive_cqn: u32,
    /// Multicast groups it is attached to.
    pub(super) groups: Vec<Gid>,
    /// The context as it was created and modified.
    pub(super) context: Vec<u8>,
    /// Basic blocks taken from the send queue, and entries from the receive queue.
    sent: u32,
    received: u32,
    /// Work that the adapter does itself, until its turn comes.
    local: VecDeque<(u64, Local)>,
}

impl Qp {
    pub(super) fn new(send: Option<Ring>, receive: Option<Ring>, record: Record, context: Vec<u8>) -> Self {
        Self {
            send,
            receive,
            record,
            service: Service::Rc,
            driver: false,
            pd: 0,
            uar: 0,
            xrcd: None,
            send_cqn: 0,
            receive_cqn: 0,
            groups: Vec::new(),
            context,
            sent: 0,
            received: 0,
            local: VecDeque::new(),
        }
    }

    /// Forgets how far the queues were worked off, as going back to the first state does.
    pub(super) fn rewind(&mut self) {
        self.sent = 0;
        self.received = 0;
        self.local.clear();
    }

    /// How far the send and the receive queue are worked off.
    pub(super) fn progress(&self) -> (u32, u32) {
        (self.sent, self.received)
    }

    /// Takes the local work of the request `id`, and drops that of earlier requests.
    pub(super) fn take_local(&mut self, id: u64) -> Option<Local> {
        // Earlier work requests were flushed and get no completion.
        while let Some((first, local)) = self.local.pop_front() {
            if first == id {
                return Some(local);
            }
        }
        None
    }

    /// Takes the next entry of the send queue.
    pub(super) fn next_send(&mut self, dma: &Dma, qpn: u32) -> Fetched<SendWork> {
        let Some(ring) = &self.send else {
            return Fetched::Empty;
        };
        let Ok(posted) = self.record.word(dma, SEND_WORD) else {
            return Fetched::Broken;
        };
        let blocks = posted.wrapping_sub(self.sent) & COUNTER;
        if blocks == 0 {
            return Fetched::Empty;
        }
        if blocks > ring.entries() {
            return Fetched::Broken;
        }
        let mut bytes = [0; MAX_ENTRY];
        let index = self.sent & COUNTER;
        let (head, _) = bytes.split_at_mut(wire::wqe_ctrl_seg::BYTES);
        if ring.read(dma, index, head).is_err() {
            return Fetched::Broken;
        }
        let control = wqe::Control::new(head);
        let id = control.id();
        let len = control.len;
        let taken = len.div_ceil(BLOCK) as u32;
        // An entry that is not what was posted there, or longer than what was posted: where the next one is, is unknown.
        if u32::from(control.index) != index || control.qpn != qpn || taken == 0 || taken > blocks || len > bytes.len()
        {
            return Fetched::Broken;
        }
        let bytes = &mut bytes[..len];
        if ring.read(dma, index, bytes).is_err() {
            return Fetched::Broken;
        }
        self.sent = self.sent.wrapping_add(taken) & COUNTER;
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

    /// Takes the next entry of the receive queue.
    pub(super) fn next_receive(&mut self, dma: &Dma) -> Fetched<ReceiveWork> {
        let Some(ring) = &self.receive else {
            return Fetched::Empty;
        };
        let Ok(posted) = self.record.word(dma, RECEIVE_WORD) else {
            return Fetched::Broken;
        };
        let left = posted.wrapping_sub(self.received) & COUNTER;
        if left == 0 {
            return Fetched::Empty;
        }
        if left > ring.entries() {
            return Fetched::Broken;
        }
        let index = self.received & COUNTER;
        let mut bytes = vec![0; ring.stride()];
        if ring.read(dma, index, &mut bytes).is_err() {
            return Fetched::Broken;
        }
        self.received = self.received.wrapping_add(1) & COUNTER;
        let id = u64::from(index);
        match wqe::scatter(&bytes) {
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
