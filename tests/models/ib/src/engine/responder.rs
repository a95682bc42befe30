// SPDX-License-Identifier: MIT OR Apache-2.0

//! The responder of a connected queue pair: checks requests, executes them in order and acknowledges them.
//!
//! The responder executes one request at a time. While READ responses are being sent, or an access waits for a page,
//! arriving packets are queued in `backlog`. Data of consecutive packets in one buffer is joined and written at once,
//! before the responder acknowledges or completes the packets.

mod message;
mod rd_atomic;

use std::collections::VecDeque;

use tracing::debug;

use super::qp::{PageWait, Qp, Step};
use super::receive::Receive;
use super::responses::syndrome;
use super::{Context, MAX_BACKLOG};
use crate::attributes::Service;
use crate::fabric::BusyGuard;
use crate::host::{Access, Event, Fault, Rights};
use crate::packet::{Aeth, Extended, Packet, Reth, Slice, operation};
use crate::psn;
use crate::work::{MAX_MESSAGE, Received, Status};
use message::{Message, Target};
use rd_atomic::ActiveRead;

/// Most packets of the backlog that one step handles.
const PACKET_BUDGET: usize = 256;

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
                if reth.length > MAX_MESSAGE || !psn::is_repeated(packet.psn, count, self.responder.expected) {
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
