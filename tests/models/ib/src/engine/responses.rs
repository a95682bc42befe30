// SPDX-License-Identifier: MIT OR Apache-2.0

//! Responses to the requester: acknowledgements, NAKs, and the data of READs and atomic operations.

use std::sync::Arc;
use std::time::Duration;

use tracing::debug;

use super::qp::{Qp, Step};
use super::requester::Progress;
use super::scatter_gather::parts;
use super::{Context, MAX_BACKLOG};
use crate::host::{Access, Fault, Rights};
use crate::packet::{Aeth, Extended, Packet, Slice, operation};
use crate::psn;
use crate::work::{SendOp, Sge, Status};

/// Most queued responses that one step handles.
const RESPONSE_BUDGET: usize = 256;

/// Types of acknowledgements: the upper three bits of an AETH syndrome.
pub(super) mod syndrome {
    pub(in crate::engine) const ACK: u8 = 0x00;
    pub(in crate::engine) const RNR: u8 = 0x20;
    pub(in crate::engine) const NAK: u8 = 0x60;
    pub(in crate::engine) const KIND: u8 = 0xe0;
    /// Invalid credit count: the number of requests is not limited.
    pub(in crate::engine) const NO_CREDITS: u8 = 0x1f;
    pub(in crate::engine) const SEQUENCE: u8 = 0;
    pub(in crate::engine) const INVALID_REQUEST: u8 = 1;
    pub(in crate::engine) const REMOTE_ACCESS: u8 = 2;
    pub(in crate::engine) const REMOTE_OPERATION: u8 = 3;
}

/// Returns the duration of an RNR NAK timer code, 0 to 31.
pub(super) fn rnr_time(code: u8) -> Duration {
    // In units of 10 us. Code 0 is the longest. From code 2 on, the duration doubles every second code.
    const UNITS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
        4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(10) * UNITS[usize::from(code & 31)]
}

impl Qp {
    /// Handles a response packet, or queues it if an access waits for a page.
    pub(super) fn receive_response(&mut self, cx: &mut Context<'_>, packet: Packet) {
        if self.requester.is_unsettled() {
            self.settle_responses(cx);
        }
        if !self.sends() || !self.is_reliable() {
            cx.shared.counters.packets_dropped += 1;
            return;
        }
        if self.requester.write_wait.is_pending() || !self.requester.pending_responses.is_empty() {
            // A dropped response counts as lost: the requester then repeats its request.
            if self.requester.pending_responses.len() < MAX_BACKLOG {
                self.requester.pending_responses.push_back(packet);
                cx.keep_busy(&mut self.requester.busy_guard);
            } else {
                cx.shared.counters.packets_dropped += 1;
            }
            return;
        }
        self.handle_response(cx, &packet);
    }

    /// Handles responses that were queued because an access waited for a page.
    pub(super) fn step_responses(&mut self, cx: &mut Context<'_>) -> Step {
        self.settle_responses(cx);
        for _ in 0..RESPONSE_BUDGET {
            if self.requester.write_wait.is_pending() {
                return Step::Blocked;
            }
            let Some(packet) = self.requester.pending_responses.pop_front() else {
                self.settle_responses(cx);
                if let Some(guard) = self.requester.busy_guard.take() {
                    cx.shared.released.push(guard);
                }
                return Step::Blocked;
            };
            self.handle_response(cx, &packet);
            if !self.sends() {
                return Step::Blocked;
            }
        }
        Step::More
    }

    /// Writes response data and completes the work requests that waited for it.
    pub(super) fn settle_responses(&mut self, cx: &mut Context<'_>) {
        if self.write_response_data(cx) && self.sends() {
            self.complete_sends(cx);
        }
    }

    fn handle_response(&mut self, cx: &mut Context<'_>, packet: &Packet) {
        use operation::*;
        match (packet.opcode & MASK, packet.extended) {
            (ACKNOWLEDGE, Extended::Aeth(aeth)) => self.handle_ack(cx, packet.psn, aeth),
            (READ_RESPONSE_FIRST | READ_RESPONSE_MIDDLE | READ_RESPONSE_LAST | READ_RESPONSE_ONLY, _) => {
                self.handle_read_response(cx, packet);
            }
            (ATOMIC_ACKNOWLEDGE, Extended::AtomicAck(_, original)) => {
                self.handle_atomic_response(cx, packet.psn, original)
            }
            _ => cx.shared.counters.packets_dropped += 1,
        }
    }

    fn handle_ack(&mut self, cx: &mut Context<'_>, psn: u32, aeth: Aeth) {
        if !self.requester.is_outstanding(psn) {
            return;
        }
        let kind = aeth.syndrome & syndrome::KIND;
        let code = aeth.syndrome & !syndrome::KIND;
        let until = if kind == syndrome::ACK { psn::add(psn, 1) } else { psn };
        // An acknowledgement of a later request does not replace the response to a READ or an atomic operation: the
        // response was lost.
        let next_response = self.requester.oldest_rd_atomic().map(|work| work.next_response_psn());
        let lost = next_response.filter(|response| psn::diff(*response, until) < 0);
        self.acknowledge_before(cx, lost.unwrap_or(until));
        self.complete_sends(cx);
        if !self.sends() {
            return;
        }
        if lost.is_some() {
            return self.recover(cx);
        }
        match kind {
            syndrome::ACK => {}
            syndrome::RNR => {
                cx.shared.counters.rnr_naks_received += 1;
                self.start_rnr_wait(cx, rnr_time(code));
            }
            syndrome::NAK => match code {
                syndrome::SEQUENCE => {
                    cx.shared.counters.sequence_naks_received += 1;
                    self.recover(cx);
                }
                syndrome::INVALID_REQUEST => self.fail_oldest(cx, Status::RemoteInvalidRequest),
                syndrome::REMOTE_ACCESS => self.fail_oldest(cx, Status::RemoteAccess),
                syndrome::REMOTE_OPERATION => self.fail_oldest(cx, Status::RemoteOperation),
                _ => self.fail_oldest(cx, Status::BadResponse),
            },
            _ => debug!(
                qpn = self.number,
                syndrome = aeth.syndrome,
                "acknowledgement with a reserved syndrome"
            ),
        }
    }

    /// Returns whether `psn` is the PSN of the next expected response. A later PSN means that a response was lost.
    fn is_next_response(&mut self, cx: &mut Context<'_>, psn: u32) -> bool {
        if !self.requester.is_outstanding(psn) {
            return false;
        }
        let Some(expected) = self.requester.oldest_rd_atomic().map(|work| work.next_response_psn()) else {
            return false;
        };
        let ahead = psn::diff(psn, expected);
        if ahead > 0 {
            self.acknowledge_before(cx, expected);
            self.complete_sends(cx);
            if self.sends() {
                self.recover(cx);
            }
        }
        ahead == 0
    }

    fn handle_read_response(&mut self, cx: &mut Context<'_>, packet: &Packet) {
        use operation::*;
        if !self.is_next_response(cx, packet.psn) || !self.prepare_append_response(cx, packet) {
            return;
        }
        self.acknowledge_before(cx, packet.psn);
        let mtu = self.mtu.bytes();
        let Some(work) = self.requester.oldest_rd_atomic() else {
            return;
        };
        let offset = work.responses * mtu;
        let left = work.length.saturating_sub(offset);
        let operation = packet.opcode & MASK;
        let is_last = left <= mtu;
        let fits = matches!(work.op, Some(SendOp::Read { .. }))
            && packet.payload.len() == left.min(mtu) as usize
            && matches!(operation, READ_RESPONSE_LAST | READ_RESPONSE_ONLY) == is_last;
        if !fits {
            return self.fail_oldest(cx, Status::BadResponse);
        }
        work.responses += 1;
        cx.shared.counters.bytes_received += packet.payload.len() as u64;
        let start = self.requester.unwritten.take();
        self.requester.unwritten = match start {
            // `prepare_append_response` ensures that the packet continues the unwritten bytes.
            Some((start, slice)) => slice.joined(&packet.payload).map(|slice| (start, slice)),
            None if packet.payload.is_empty() => None,
            None => Some((offset, packet.payload.clone())),
        };
        if is_last {
            self.settle_responses(cx);
        } else {
            self.acknowledge_response(cx, packet.psn);
        }
    }

    fn handle_atomic_response(&mut self, cx: &mut Context<'_>, psn: u32, original: u64) {
        if !self.is_next_response(cx, psn) {
            return;
        }
        self.acknowledge_before(cx, psn);
        let Some(work) = self.requester.oldest_rd_atomic() else {
            return;
        };
        if matches!(work.op, Some(SendOp::Read { .. })) {
            return self.fail_oldest(cx, Status::BadResponse);
        }
        work.responses = 1;
        let bytes = cx.host.atomic_result(self.number, original);
        let chunk = Arc::new(bytes.to_vec());
        self.requester.unwritten = Some((0, Slice::new(&chunk, 0, bytes.len())));
        self.settle_responses(cx);
    }

    /// Writes the unwritten bytes unless the packet's data continues them. If the write waits for a page, queues the
    /// packet. Returns whether the packet can be handled now.
    fn prepare_append_response(&mut self, cx: &mut Context<'_>, packet: &Packet) -> bool {
        let joins = match &self.requester.unwritten {
            Some((_, slice)) => slice.joined(&packet.payload).is_some(),
            None => true,
        };
        if joins || self.write_response_data(cx) {
            return true;
        }
        if self.sends() {
            self.requester.pending_responses.push_front(packet.clone());
            cx.keep_busy(&mut self.requester.busy_guard);
        }
        false
    }

    /// Writes response data to the memory of the oldest READ or atomic operation, and ends the request if all its data
    /// is written. Returns false if the write waits for a page or failed.
    fn write_response_data(&mut self, cx: &mut Context<'_>) -> bool {
        if self.requester.write_wait.is_pending() {
            return false;
        }
        let mut page_wait = self.requester.write_wait;
        let unwritten = self.requester.unwritten.clone();
        let (pd, qpn) = (self.config.pd, self.number);
        let Some(work) = self.requester.oldest_rd_atomic() else {
            self.requester.unwritten = None;
            return true;
        };
        if let Some((offset, slice)) = &unwritten {
            let bytes = slice.bytes();
            let written = page_wait.access(cx, qpn, |cx| {
                parts(&work.sges, (*offset).into(), bytes.len()).try_for_each(|(sge, at)| {
                    let Sge { key, address, length } = sge;
                    let access = Access {
                        key,
                        address,
                        length: length.into(),
                        rights: Rights::LocalWrite,
                        pd,
                        qpn,
                    };
                    cx.host.write(&access, &bytes[at..at + length as usize])
                })
            });
            let work_last = work.last();
            let complete = work.has_all_responses();
            if written.is_ok() && complete {
                work.progress = Progress::Ended(Status::Success);
            }
            self.requester.write_wait = page_wait;
            match written {
                Ok(()) => {
                    self.requester.unwritten = None;
                    if complete {
                        self.acknowledge_before(cx, psn::add(work_last, 1));
                    }
                }
                Err(Fault::Page(_)) => return false,
                Err(fault) => {
                    self.requester.unwritten = None;
                    self.fail_oldest(cx, Self::local_status(fault));
                    return false;
                }
            }
        } else if work.has_all_responses() {
            work.progress = Progress::Ended(Status::Success);
            let until = psn::add(work.last(), 1);
            self.acknowledge_before(cx, until);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_codes_have_the_times_of_the_specification() {
        let micros = |code| rnr_time(code).as_micros();
        assert_eq!(micros(0), 655_360);
        assert_eq!(micros(1), 10);
        assert_eq!(micros(12), 640);
        assert_eq!(micros(16), 2_560);
        assert_eq!(micros(31), 491_520);
        assert!((1..31).all(|code| micros(code) < micros(code + 1)));
    }
}
