// SPDX-License-Identifier: MIT OR Apache-2.0

//! SEND and WRITE messages: joins the data of packets, writes the data, and completes the messages.

use tracing::debug;

use super::{Disposition, RequestError};
use crate::engine::Context;
use crate::engine::qp::Qp;
use crate::engine::responses::syndrome;
use crate::host::{Access, Fault, Rights};
use crate::packet::{Extended, Packet, Reth, Slice, operation};
use crate::psn;
use crate::work::{MAX_MESSAGE, Received, Status};

/// A message of which more packets are expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// SEND; the number of bytes received.
    Send(u64),
    /// WRITE; the number of bytes received.
    Write(Reth, u32),
}

/// Destination of received bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// The current receive, at this offset.
    Receive(u64),
    /// Memory: address, key and protection domain.
    Memory(u64, u32, u32),
}

/// Result of looking for a receive.
enum ReceiveLookup {
    Found,
    /// No receive is posted. Reliable services have sent an RNR NAK.
    NotReady,
    /// Unknown yet: the packet waits for a page.
    Deferred,
}

impl Qp {
    pub(super) fn send_request(
        &mut self,
        cx: &mut Context<'_>,
        packet: &Packet,
        operation: u8,
    ) -> Result<Disposition, RequestError> {
        use operation::*;
        let offset = match self.responder.message {
            Some(Message::Send(offset)) => offset,
            _ => 0,
        };
        if !self.prepare_append(cx, Target::Receive(offset), &packet.payload)? {
            return Ok(Disposition::Deferred);
        }
        match self.ensure_receive(cx, packet)? {
            ReceiveLookup::Found => {}
            ReceiveLookup::NotReady => return Ok(Disposition::Consumed),
            ReceiveLookup::Deferred => return Ok(Disposition::Deferred),
        }
        let total = offset + packet.payload.len() as u64;
        if let Some(receive) = &mut self.responder.receive {
            if total > receive.capacity() {
                return Err(RequestError::TooLong);
            }
            // Not truncated: `total` is at most the capacity, which is at most `MAX_MESSAGE`.
            receive.length = total as u32;
        }
        let is_last = !matches!(operation, SEND_FIRST | SEND_MIDDLE);
        self.responder.message = (!is_last).then_some(Message::Send(total));
        self.accept(cx, Target::Receive(offset), packet, is_last);
        Ok(Disposition::Consumed)
    }

    pub(super) fn write_request(
        &mut self,
        cx: &mut Context<'_>,
        packet: &Packet,
        operation: u8,
    ) -> Result<Disposition, RequestError> {
        use operation::*;
        let (reth, offset) = match (self.responder.message, packet.extended) {
            (Some(Message::Write(reth, offset)), _) => (reth, offset),
            (_, Extended::Reth(reth)) => (reth, 0),
            _ => return Err(RequestError::InvalidRequest),
        };
        let pd = self.protection_domain(cx, packet.srqn);
        let target = Target::Memory(reth.address.wrapping_add(offset.into()), reth.key, pd);
        if !self.prepare_append(cx, target, &packet.payload)? {
            return Ok(Disposition::Deferred);
        }
        if offset == 0 && self.responder.message.is_none() {
            if !self.access.write || reth.length > MAX_MESSAGE {
                return Err(RequestError::InvalidRequest);
            }
            self.check_range(cx, reth, Rights::RemoteWrite, pd)?;
        }
        let is_last = !matches!(operation, WRITE_FIRST | WRITE_MIDDLE);
        // No overflow: at most one path MTU is added to at most `MAX_MESSAGE`.
        let total = offset + packet.payload.len() as u32;
        if if is_last {
            total != reth.length
        } else {
            total >= reth.length
        } {
            return Err(RequestError::InvalidRequest);
        }
        if matches!(operation, WRITE_LAST_IMM | WRITE_ONLY_IMM) {
            match self.ensure_receive(cx, packet)? {
                ReceiveLookup::Found => {}
                ReceiveLookup::NotReady => return Ok(Disposition::Consumed),
                ReceiveLookup::Deferred => return Ok(Disposition::Deferred),
            }
            if let Some(receive) = &mut self.responder.receive {
                receive.length = total;
            }
        }
        self.responder.message = (!is_last).then_some(Message::Write(reth, total));
        self.accept(cx, target, packet, is_last);
        Ok(Disposition::Consumed)
    }

    /// Ensures that the message has a receive. Sends an RNR NAK if none is posted.
    fn ensure_receive(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Result<ReceiveLookup, RequestError> {
        if self.responder.receive.is_some() {
            return Ok(ReceiveLookup::Found);
        }
        match self.fetch_receive(cx, packet.srqn) {
            Ok(Some(receive)) => {
                self.responder.receive = Some(receive);
                Ok(ReceiveLookup::Found)
            }
            Ok(None) if self.is_reliable() => {
                // The NAK acknowledges all earlier packets, so their data must be written.
                if !self.try_write_request_data(cx)? {
                    return Ok(ReceiveLookup::Deferred);
                }
                self.responder.nak_sent = true;
                self.responder.ack_due = false;
                cx.shared.counters.rnr_naks_sent += 1;
                self.send_ack(cx, packet.psn, syndrome::RNR | self.min_rnr_timer & 31);
                Ok(ReceiveLookup::NotReady)
            }
            Ok(None) => Ok(ReceiveLookup::NotReady),
            // The queue does not exist; a queue with an error has another status.
            Err(Status::RemoteInvalidRequest) => Err(RequestError::InvalidRequest),
            Err(status) => Err(RequestError::RemoteOperation(status)),
        }
    }

    /// Writes the unwritten bytes unless `payload` continues them. Returns whether `payload` can be appended: false if
    /// the write waits for a page.
    fn prepare_append(&mut self, cx: &mut Context<'_>, target: Target, payload: &Slice) -> Result<bool, RequestError> {
        let joins = match &self.responder.unwritten {
            None => true,
            Some((at, slice)) => is_contiguous(*at, slice.len(), target) && slice.joined(payload).is_some(),
        };
        if joins {
            Ok(true)
        } else {
            self.try_write_request_data(cx)
        }
    }

    /// Takes the bytes of a packet. The last packet completes the message.
    fn accept(&mut self, cx: &mut Context<'_>, target: Target, packet: &Packet, is_last: bool) {
        cx.shared.counters.bytes_received += packet.payload.len() as u64;
        if !packet.payload.is_empty() {
            self.responder.unwritten = match self.responder.unwritten.take() {
                // `prepare_append` ensures that the packet continues the unwritten bytes.
                Some((at, slice)) => slice.joined(&packet.payload).map(|slice| (at, slice)),
                None => Some((target, packet.payload.clone())),
            };
        }
        self.responder.expected = psn::add(packet.psn, 1);
        if is_last {
            self.responder.last_packet = Some(packet.clone());
        }
        self.responder.ack_due |= packet.ack_request && self.is_reliable();
        if (is_last || packet.ack_request) && self.write_request_data(cx) {
            if let Some(packet) = self.responder.last_packet.take() {
                self.complete_message(cx, &packet);
            }
        }
    }

    /// Writes the unwritten bytes. Returns whether they are written: false if the write waits for a page, or if it
    /// failed and the failure was handled.
    pub(super) fn write_request_data(&mut self, cx: &mut Context<'_>) -> bool {
        match self.try_write_request_data(cx) {
            Ok(written) => written,
            Err(error) => {
                let psn = psn::add(self.responder.expected, psn::MASK);
                self.fail_request(cx, psn, error);
                false
            }
        }
    }

    pub(super) fn try_write_request_data(&mut self, cx: &mut Context<'_>) -> Result<bool, RequestError> {
        if self.responder.page_wait.is_pending() {
            return Ok(false);
        }
        let Some((target, slice)) = self.responder.unwritten.take() else {
            return Ok(true);
        };
        let mut page_wait = self.responder.page_wait;
        let qpn = self.number;
        let result = match target {
            Target::Receive(offset) => match &self.responder.receive {
                Some(receive) => page_wait
                    .access(cx, qpn, |cx| receive.scatter(cx, qpn, offset, slice.bytes()))
                    .map_err(|fault| (fault, RequestError::RemoteOperation(Self::local_status(fault)))),
                None => Ok(()),
            },
            Target::Memory(address, key, pd) => {
                let access = Access {
                    key,
                    address,
                    length: slice.len() as u64,
                    rights: Rights::RemoteWrite,
                    pd,
                    qpn,
                };
                page_wait
                    .access(cx, qpn, |cx| cx.host.write(&access, slice.bytes()))
                    .map_err(|fault| (fault, self.access_error(fault, &access)))
            }
        };
        self.responder.page_wait = page_wait;
        match result {
            Ok(()) => Ok(true),
            Err((Fault::Page(_), _)) => {
                self.responder.unwritten = Some((target, slice));
                Ok(false)
            }
            Err((_, error)) => Err(error),
        }
    }

    /// Completes a message whose bytes are written.
    pub(super) fn complete_message(&mut self, cx: &mut Context<'_>, packet: &Packet) {
        use operation::*;
        let what = match packet.opcode & MASK {
            SEND_LAST_IMM | SEND_ONLY_IMM => Received::SendImm(packet.imm),
            WRITE_LAST_IMM | WRITE_ONLY_IMM => Received::WriteImm(packet.imm),
            SEND_LAST_INVALIDATE | SEND_ONLY_INVALIDATE => Received::SendInvalidate(packet.imm),
            _ => Received::Send,
        };
        if let Received::SendInvalidate(key) = what {
            let pd = self.protection_domain(cx, packet.srqn);
            if let Err(fault) = cx.host.invalidate(self.number, pd, key) {
                debug!(qpn = self.number, key, %fault, "remote invalidation refused");
                // The message itself arrived, but the queue pairs of both nodes enter the error state.
                return self.fail_request(
                    cx,
                    packet.psn,
                    RequestError::RemoteOperation(Status::RemoteInvalidRequest),
                );
            }
        }
        self.responder.msn = psn::add(self.responder.msn, 1);
        if let Some(receive) = self.responder.receive.take() {
            self.complete_receive(cx, &receive, Status::Success, what, packet.solicited, None);
        }
    }
}

/// Returns whether `next` directly follows `len` bytes at `at`.
fn is_contiguous(at: Target, len: usize, next: Target) -> bool {
    match (at, next) {
        (Target::Receive(offset), Target::Receive(next)) => offset + len as u64 == next,
        (Target::Memory(address, key, pd), Target::Memory(next, next_key, next_pd)) => {
            address.wrapping_add(len as u64) == next && (key, pd) == (next_key, next_pd)
        }
        _ => false,
    }
}
