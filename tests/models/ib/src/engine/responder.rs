// SPDX-License-Identifier: MIT OR Apache-2.0

//! The responder of a connected queue pair: checks requests, executes them in order and acknowledges them.
//!
//! The responder executes one request at a time. While READ responses are being sent, or an access waits for a page,
//! arriving packets are queued in `backlog`. Data of consecutive packets in one buffer is joined and written at once,
//! before the responder acknowledges or completes the packets.

use std::collections::VecDeque;

use tracing::debug;

use super::pool::CHUNK;
use super::qp::{PageWait, Qp, Step};
use super::receive::Receive;
use super::responses::syndrome;
use super::{Context, MAX_BACKLOG};
use crate::attributes::Service;
use crate::fabric::BusyGuard;
use crate::host::{Access, Atomic, Event, Fault, Rights};
use crate::packet::{Aeth, Extended, Packet, Reth, Slice, operation};
use crate::psn;
use crate::work::{Received, Status};

/// Most packets of the backlog that one step handles.
const PACKET_BUDGET: usize = 256;
/// Minimum number of atomic results that are kept for duplicate requests.
const MIN_ATOMIC_RESULTS: usize = 16;
/// Longest message.
const MAX_MESSAGE: u32 = 1 << 31;

/// A message of which more packets are expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    /// SEND; the number of bytes received.
    Send(u64),
    /// WRITE; the number of bytes received.
    Write(Reth, u32),
}

/// Destination of received bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// The current receive, at this offset.
    Receive(u64),
    /// Memory: address, key and protection domain.
    Memory(u64, u32, u32),
}

/// A READ request whose responses are being sent.
#[derive(Clone, Copy, Debug)]
struct ActiveRead {
    /// PSN of the next response.
    psn: u32,
    address: u64,
    key: u32,
    pd: u32,
    left: u32,
    is_first: bool,
}

/// The reason for which a request fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestError {
    /// The request is invalid.
    InvalidRequest,
    /// The message is longer than the receive.
    TooLong,
    /// The key does not allow the access.
    RemoteAccess,
    /// The request failed locally. The receive, if any, completes with the status.
    RemoteOperation(Status),
}

/// Result of looking for a receive.
enum ReceiveLookup {
    Found,
    /// No receive is posted. Reliable services have sent an RNR NAK.
    NotReady,
    /// Unknown yet: the packet waits for a page.
    Deferred,
}

/// Result of handling a packet.
pub(super) enum Disposition {
    /// The packet was handled or dropped.
    Consumed,
    /// The packet must wait, at the head of the backlog.
    Deferred,
}

#[derive(Debug, Default)]
pub(super) struct Responder {
    expected: u32,
    msn: u32,
    /// A sequence error NAK or RNR NAK was sent, and the expected packet did not arrive yet.
    nak_sent: bool,
    message: Option<Message>,
    /// The receive of the current message.
    pub(super) receive: Option<Receive>,
    active_read: Option<ActiveRead>,
    /// PSN and result of the last atomic operations, for duplicate requests.
    atomic_results: VecDeque<(u32, u64)>,
    pub(super) backlog: VecDeque<Packet>,
    pub(super) page_wait: PageWait,
    /// Received bytes that are not written yet.
    unwritten: Option<(Target, Slice)>,
    /// The last packet of a message whose bytes are not all written.
    last_packet: Option<Packet>,
    /// An acknowledgement is pending.
    ack_due: bool,
    /// Keeps the path busy while packets are in the backlog or a READ is active.
    pub(super) busy_guard: Option<BusyGuard>,
}

impl Responder {
    pub(super) fn expected(&self) -> u32 {
        self.expected
    }

    pub(super) fn msn(&self) -> u32 {
        self.msn
    }

    pub(super) fn set_expected(&mut self, psn: u32) {
        self.expected = psn;
    }

    /// Returns whether the next packet must wait in the backlog.
    fn is_busy(&self) -> bool {
        self.page_wait.is_pending() || self.active_read.is_some() || self.last_packet.is_some()
    }

    /// Discards the backlog. The path stays busy until the pending packets are transmitted.
    pub(super) fn release(&mut self, cx: &mut Context<'_>) {
        self.backlog.clear();
        if let Some(guard) = self.busy_guard.take() {
            cx.shared.released.push(guard);
        }
    }

    /// Stops receiving. The current receive stays to be flushed.
    pub(super) fn stop(&mut self, cx: &mut Context<'_>) {
        self.release(cx);
        self.message = None;
        self.active_read = None;
        self.unwritten = None;
        self.last_packet = None;
        self.ack_due = false;
        self.page_wait = PageWait::None;
    }
}

impl Qp {
    /// Handles a request packet, or queues it if the responder is busy.
    pub(super) fn receive_request(&mut self, cx: &mut Context<'_>, packet: Packet) {
        if self.responder.is_busy() || !self.responder.backlog.is_empty() {
            if self.responder.backlog.len() < MAX_BACKLOG {
                self.responder.backlog.push_back(packet);
                cx.keep_busy(&mut self.responder.busy_guard);
            } else {
                // The requester handles this as a lost packet.
                cx.shared.counters.packets_dropped += 1;
            }
            return;
        }
        self.handle_request(cx, packet);
    }

    /// Handles a request packet, or puts it at the head of the backlog if it must wait.
    fn handle_request(&mut self, cx: &mut Context<'_>, packet: Packet) {
        let disposition = match self.config.service {
            Service::Rc | Service::Xrc => self.reliable_request(cx, &packet),
            Service::Uc => self.unreliable_request(cx, &packet),
            Service::Ud | Service::Gsi => self.datagram_request(cx, &packet),
        };
        if matches!(disposition, Disposition::Deferred) {
            self.responder.backlog.push_front(packet);
        }
        if self.responder.is_busy() || !self.responder.backlog.is_empty() {
            cx.keep_busy(&mut self.responder.busy_guard);
            cx.shared.wake.push(self.number);
        }
    }

    /// Continues the active READ and the backlog.
    pub(super) fn step_responder(&mut self, cx: &mut Context<'_>) -> Step {
        let mut left = PACKET_BUDGET;
        loop {
            if self.responder.page_wait.is_pending() {
                return Step::Blocked;
            }
            if self.responder.last_packet.is_some() || self.responder.unwritten.is_some() {
                self.settle_requests(cx);
                if self.responder.page_wait.is_pending() || !self.receives() {
                    return Step::Blocked;
                }
            }
            if self.responder.active_read.is_some() {
                match self.send_read_responses(cx) {
                    Step::More => return Step::More,
                    Step::Blocked if self.responder.active_read.is_some() || !self.receives() => return Step::Blocked,
                    Step::Blocked => {}
                }
            }
            let Some(packet) = self.responder.backlog.pop_front() else {
                self.settle_requests(cx);
                if !self.responder.is_busy() {
                    self.responder.release(cx);
                }
                return Step::Blocked;
            };
            if left == 0 {
                self.responder.backlog.push_front(packet);
                return Step::More;
            }
            left -= 1;
            self.handle_request(cx, packet);
            if !self.receives() {
                return Step::Blocked;
            }
        }
    }

    /// Writes received bytes, completes their message and sends a pending acknowledgement.
    pub(super) fn settle_requests(&mut self, cx: &mut Context<'_>) {
        if !self.write_request_data(cx) {
            return;
        }
        if let Some(packet) = self.responder.last_packet.take() {
            self.complete_message(cx, &packet);
        }
        if self.responder.ack_due && self.responder.active_read.is_none() {
            self.responder.ack_due = false;
            let psn = psn::add(self.responder.expected, psn::MASK);
            self.send_ack(cx, psn, syndrome::ACK | syndrome::NO_CREDITS);
        }
    }

    fn send_ack(&mut self, cx: &mut Context<'_>, psn: u32, syndrome: u8) {
        let mut packet = self.packet(&cx.shared.port, operation::ACKNOWLEDGE, psn);
        packet.extended = Extended::Aeth(Aeth {
            syndrome,
            msn: self.responder.msn,
        });
        cx.send(packet);
    }

    fn reliable_request(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Disposition {
        let ahead = psn::diff(packet.psn, self.responder.expected);
        if ahead > 0 {
            // An earlier packet was lost. Only one NAK is sent until the expected packet arrives.
            if !self.responder.nak_sent && self.write_request_data(cx) {
                self.responder.nak_sent = true;
                self.responder.ack_due = false;
                cx.shared.counters.sequence_naks_sent += 1;
                let expected = self.responder.expected;
                self.send_ack(cx, expected, syndrome::NAK | syndrome::SEQUENCE);
            }
            return Disposition::Consumed;
        }
        if ahead < 0 {
            return self.duplicate_request(cx, packet);
        }
        match self.execute_request(cx, packet) {
            Ok(disposition) => {
                if self.responder.expected != packet.psn {
                    self.responder.nak_sent = false;
                }
                disposition
            }
            Err(error) => {
                self.fail_request(cx, packet.psn, error);
                Disposition::Consumed
            }
        }
    }

    /// Handles a duplicate request: repeats its response or acknowledgement.
    fn duplicate_request(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Disposition {
        cx.shared.counters.duplicates += 1;
        match (packet.opcode & operation::MASK, packet.extended) {
            (operation::READ_REQUEST, Extended::Reth(reth)) => {
                let count = psn::packets(reth.length, self.mtu.bytes());
                let end = packet.psn.wrapping_add(count);
                if count > psn::MASK / 2 || psn::diff(end & psn::MASK, self.responder.expected) > 0 {
                    // The range was never requested before: not a duplicate.
                    return Disposition::Consumed;
                }
                match self.start_read(cx, packet, reth) {
                    Ok(()) => {}
                    Err(error) => self.fail_request(cx, packet.psn, error),
                }
            }
            (operation::COMPARE_SWAP | operation::FETCH_ADD, _) => {
                let saved = self.responder.atomic_results.iter().find(|(psn, _)| *psn == packet.psn);
                if let Some(&(psn, original)) = saved {
                    self.send_atomic_response(cx, psn, original);
                }
            }
            _ => self.responder.ack_due = true,
        }
        Disposition::Consumed
    }

    /// Executes the request with the expected PSN.
    fn execute_request(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Result<Disposition, RequestError> {
        use operation::*;
        let operation = packet.opcode & MASK;
        let in_order = match self.responder.message {
            Some(Message::Send(_)) => {
                matches!(
                    operation,
                    SEND_MIDDLE | SEND_LAST | SEND_LAST_IMM | SEND_LAST_INVALIDATE
                )
            }
            Some(Message::Write(..)) => matches!(operation, WRITE_MIDDLE | WRITE_LAST | WRITE_LAST_IMM),
            None => matches!(
                operation,
                SEND_FIRST
                    | SEND_ONLY
                    | SEND_ONLY_IMM
                    | SEND_ONLY_INVALIDATE
                    | WRITE_FIRST
                    | WRITE_ONLY
                    | WRITE_ONLY_IMM
                    | READ_REQUEST
                    | COMPARE_SWAP
                    | FETCH_ADD
            ),
        };
        let mtu = self.mtu.bytes() as usize;
        let len = packet.payload.len();
        let has_length = match operation {
            SEND_FIRST | SEND_MIDDLE | WRITE_FIRST | WRITE_MIDDLE => len == mtu,
            SEND_LAST | SEND_LAST_IMM | SEND_LAST_INVALIDATE | WRITE_LAST | WRITE_LAST_IMM => (1..=mtu).contains(&len),
            SEND_ONLY | SEND_ONLY_IMM | SEND_ONLY_INVALIDATE | WRITE_ONLY | WRITE_ONLY_IMM => len <= mtu,
            _ => len == 0,
        };
        if !in_order || !has_length {
            return Err(RequestError::InvalidRequest);
        }
        match operation {
            READ_REQUEST => self.read_request(cx, packet),
            COMPARE_SWAP | FETCH_ADD => self.atomic_request(cx, packet),
            WRITE_FIRST | WRITE_MIDDLE | WRITE_LAST | WRITE_LAST_IMM | WRITE_ONLY | WRITE_ONLY_IMM => {
                self.write_request(cx, packet, operation)
            }
            _ => self.send_request(cx, packet, operation),
        }
    }

    fn send_request(
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
            // Not truncated: `total` is at most the capacity, and a capacity is below 4 GiB.
            receive.length = total as u32;
        }
        let is_last = !matches!(operation, SEND_FIRST | SEND_MIDDLE);
        self.responder.message = (!is_last).then_some(Message::Send(total));
        self.accept(cx, Target::Receive(offset), packet, is_last);
        Ok(Disposition::Consumed)
    }

    fn write_request(
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

    /// Returns the protection domain that remote keys must have: the domain of the queue pair or, for XRC, of the
    /// shared receive queue that the request names.
    fn protection_domain(&self, cx: &Context<'_>, srqn: u32) -> u32 {
        let named = cx.shared.srqs.get(&srqn).map(|srq| srq.config);
        named
            .filter(|config| {
                self.config.service == Service::Xrc && config.xrc.is_some_and(|(xrcd, _)| xrcd == self.config.xrcd)
            })
            .map_or(self.config.pd, |config| config.pd)
    }

    fn check_range(&self, cx: &mut Context<'_>, reth: Reth, rights: Rights, pd: u32) -> Result<(), RequestError> {
        if reth.length == 0 {
            return Ok(());
        }
        let access = Access {
            key: reth.key,
            address: reth.address,
            length: reth.length.into(),
            rights,
            pd,
            qpn: self.number,
        };
        cx.host
            .check(&access)
            .map_err(|fault| self.access_error(fault, &access))
    }

    fn access_error(&self, fault: Fault, access: &Access) -> RequestError {
        debug!(qpn = self.number, %fault, ?access, "remote access refused");
        match fault {
            Fault::Bus => RequestError::RemoteOperation(Status::LocalProtection),
            _ => RequestError::RemoteAccess,
        }
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
    fn write_request_data(&mut self, cx: &mut Context<'_>) -> bool {
        match self.try_write_request_data(cx) {
            Ok(written) => written,
            Err(error) => {
                let psn = psn::add(self.responder.expected, psn::MASK);
                self.fail_request(cx, psn, error);
                false
            }
        }
    }

    fn try_write_request_data(&mut self, cx: &mut Context<'_>) -> Result<bool, RequestError> {
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
    fn complete_message(&mut self, cx: &mut Context<'_>, packet: &Packet) {
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

    /// Fails a request: sends a NAK and enters the error state. Unreliable services send no NAK, and enter the error
    /// state only if `error` has a completion status; otherwise they drop the message.
    fn fail_request(&mut self, cx: &mut Context<'_>, psn: u32, error: RequestError) {
        let counters = &mut cx.shared.counters;
        let (code, event, status) = match error {
            RequestError::InvalidRequest => {
                counters.invalid_requests += 1;
                let event = Event::InvalidRequest { qpn: self.number };
                (syndrome::INVALID_REQUEST, Some(event), None)
            }
            RequestError::TooLong => {
                counters.invalid_requests += 1;
                (syndrome::INVALID_REQUEST, None, Some(Status::LocalLength))
            }
            RequestError::RemoteAccess => {
                counters.remote_access_errors += 1;
                let event = Event::AccessViolation { qpn: self.number };
                (syndrome::REMOTE_ACCESS, Some(event), None)
            }
            RequestError::RemoteOperation(status) => {
                counters.remote_operation_errors += 1;
                (syndrome::REMOTE_OPERATION, None, Some(status))
            }
        };
        debug!(qpn = self.number, psn, ?error, "request failed");
        if self.is_reliable() {
            self.send_ack(cx, psn, syndrome::NAK | code);
        } else if status.is_none() {
            // An unreliable connection drops the message and continues with the next one.
            self.responder.message = None;
            self.responder.unwritten = None;
            self.responder.last_packet = None;
            return;
        }
        match (status, self.responder.receive.take()) {
            (Some(status), Some(receive)) => {
                self.complete_receive(cx, &receive, status, Received::Send, false, None);
            }
            (Some(_), None) => cx.host.event(Event::QpFatal { qpn: self.number }),
            (None, receive) => {
                self.responder.receive = receive;
                if let Some(event) = event {
                    cx.host.event(event);
                }
            }
        }
        self.enter_error(cx);
    }

    fn read_request(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Result<Disposition, RequestError> {
        let Extended::Reth(reth) = packet.extended else {
            return Err(RequestError::InvalidRequest);
        };
        if !self.access.read || reth.length > MAX_MESSAGE {
            return Err(RequestError::InvalidRequest);
        }
        if !self.try_write_request_data(cx)? {
            return Ok(Disposition::Deferred);
        }
        self.start_read(cx, packet, reth)?;
        self.responder.msn = psn::add(self.responder.msn, 1);
        self.responder.expected = psn::add(packet.psn, psn::packets(reth.length, self.mtu.bytes()));
        Ok(Disposition::Consumed)
    }

    fn start_read(&mut self, cx: &mut Context<'_>, packet: &Packet, reth: Reth) -> Result<(), RequestError> {
        if !self.access.read {
            return Err(RequestError::InvalidRequest);
        }
        let pd = self.protection_domain(cx, packet.srqn);
        self.check_range(cx, reth, Rights::RemoteRead, pd)?;
        self.responder.active_read = Some(ActiveRead {
            psn: packet.psn,
            address: reth.address,
            key: reth.key,
            pd,
            left: reth.length,
            is_first: true,
        });
        Ok(())
    }

    /// Sends the next part of the READ responses.
    fn send_read_responses(&mut self, cx: &mut Context<'_>) -> Step {
        use operation::*;
        let Some(active_read) = self.responder.active_read else {
            return Step::Blocked;
        };
        if !cx.host.has_space(self.dlid()) {
            cx.shared.blocked.push(self.number);
            return Step::Blocked;
        }
        let len = (active_read.left as usize).min(CHUNK);
        let mut chunk = None;
        if len > 0 {
            let access = Access {
                key: active_read.key,
                address: active_read.address,
                length: len as u64,
                rights: Rights::RemoteRead,
                pd: active_read.pd,
                qpn: self.number,
            };
            let mut page_wait = self.responder.page_wait;
            let read = page_wait.access(cx, self.number, |cx| {
                let host = &mut *cx.host;
                cx.shared.pool.fill(len, |bytes| host.read(&access, bytes))
            });
            self.responder.page_wait = page_wait;
            match read {
                Ok(bytes) => chunk = Some(bytes),
                Err(Fault::Page(_)) => return Step::Blocked,
                Err(fault) => {
                    self.responder.active_read = None;
                    let error = self.access_error(fault, &access);
                    self.fail_request(cx, active_read.psn, error);
                    return Step::Blocked;
                }
            }
        }
        let mtu = self.mtu.bytes() as usize;
        let template = self.packet(&cx.shared.port, 0, 0);
        let aeth = Aeth {
            syndrome: syndrome::ACK | syndrome::NO_CREDITS,
            msn: self.responder.msn,
        };
        let mut active_read = active_read;
        let mut at = 0;
        loop {
            let size = mtu.min(len - at);
            let is_last = size as u32 == active_read.left;
            let mut packet = template.clone();
            packet.psn = active_read.psn;
            packet.opcode |= match (active_read.is_first, is_last) {
                (true, true) => READ_RESPONSE_ONLY,
                (true, false) => READ_RESPONSE_FIRST,
                (false, false) => READ_RESPONSE_MIDDLE,
                (false, true) => READ_RESPONSE_LAST,
            };
            if active_read.is_first || is_last {
                packet.extended = Extended::Aeth(aeth);
            }
            packet.payload = chunk
                .as_ref()
                .map_or_else(Slice::default, |chunk| Slice::new(chunk, at, size));
            cx.send(packet);
            active_read.psn = psn::add(active_read.psn, 1);
            active_read.left -= size as u32;
            active_read.is_first = false;
            at += size;
            if at >= len {
                break;
            }
        }
        if active_read.left == 0 {
            self.responder.active_read = None;
            return Step::Blocked;
        }
        active_read.address = active_read.address.wrapping_add(len as u64);
        self.responder.active_read = Some(active_read);
        Step::More
    }

    fn atomic_request(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Result<Disposition, RequestError> {
        let Extended::Atomic(eth) = packet.extended else {
            return Err(RequestError::InvalidRequest);
        };
        if !self.access.atomic || eth.address % 8 != 0 {
            return Err(RequestError::InvalidRequest);
        }
        if !self.try_write_request_data(cx)? {
            return Ok(Disposition::Deferred);
        }
        let operation = if packet.opcode & operation::MASK == operation::COMPARE_SWAP {
            Atomic::CompareSwap {
                compare: eth.compare,
                swap: eth.swap_add,
            }
        } else {
            Atomic::FetchAdd { add: eth.swap_add }
        };
        let access = Access {
            key: eth.key,
            address: eth.address,
            length: 8,
            rights: Rights::RemoteAtomic,
            pd: self.protection_domain(cx, packet.srqn),
            qpn: self.number,
        };
        let mut page_wait = self.responder.page_wait;
        let result = page_wait.access(cx, self.number, |cx| cx.host.atomic(&access, operation));
        self.responder.page_wait = page_wait;
        let original = match result {
            Ok(original) => original,
            Err(Fault::Page(_)) => return Ok(Disposition::Deferred),
            Err(fault) => return Err(self.access_error(fault, &access)),
        };
        self.responder.msn = psn::add(self.responder.msn, 1);
        self.responder.expected = psn::add(packet.psn, 1);
        self.responder.atomic_results.push_back((packet.psn, original));
        if self.responder.atomic_results.len() > MIN_ATOMIC_RESULTS.max(self.max_served.into()) {
            self.responder.atomic_results.pop_front();
        }
        self.send_atomic_response(cx, packet.psn, original);
        Ok(Disposition::Consumed)
    }

    fn send_atomic_response(&mut self, cx: &mut Context<'_>, psn: u32, original: u64) {
        let mut packet = self.packet(&cx.shared.port, operation::ATOMIC_ACKNOWLEDGE, psn);
        let aeth = Aeth {
            syndrome: syndrome::ACK | syndrome::NO_CREDITS,
            msn: self.responder.msn,
        };
        packet.extended = Extended::AtomicAck(aeth, original);
        cx.send(packet);
    }

    /// Handles a request on an unreliable connection. A message with a missing packet is dropped.
    fn unreliable_request(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Disposition {
        use operation::*;
        let operation = packet.opcode & MASK;
        let begins = matches!(
            operation,
            SEND_FIRST | SEND_ONLY | SEND_ONLY_IMM | WRITE_FIRST | WRITE_ONLY | WRITE_ONLY_IMM
        );
        let known = begins
            || matches!(
                operation,
                SEND_MIDDLE | SEND_LAST | SEND_LAST_IMM | WRITE_MIDDLE | WRITE_LAST | WRITE_LAST_IMM
            );
        if begins && self.responder.message.is_some() || packet.psn != self.responder.expected {
            if !self.write_request_data(cx) && self.responder.page_wait.is_pending() {
                return Disposition::Deferred;
            }
            // The next message uses the receive of the incomplete message.
            self.responder.message = None;
        }
        if !known || !begins && self.responder.message.is_none() {
            cx.shared.counters.packets_dropped += 1;
            self.responder.expected = psn::add(packet.psn, 1);
            return Disposition::Consumed;
        }
        match self.execute_request(cx, packet) {
            Ok(disposition) => {
                if self.responder.expected != psn::add(packet.psn, 1) && matches!(disposition, Disposition::Consumed) {
                    // No receive is posted.
                    cx.shared.counters.packets_dropped += 1;
                    self.responder.expected = psn::add(packet.psn, 1);
                    self.responder.message = None;
                }
                disposition
            }
            Err(error) => {
                self.fail_request(cx, packet.psn, error);
                self.responder.expected = psn::add(packet.psn, 1);
                Disposition::Consumed
            }
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
