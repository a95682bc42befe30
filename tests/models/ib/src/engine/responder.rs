// SPDX-License-Identifier: MIT OR Apache-2.0

//! The receiving half of a connected queue pair: requests are checked, carried out in order, and acknowledged.
//!
//! One request is carried out at a time. While a read is being answered, or an access waits for a page, the packets that
//! arrive wait in `backlog`. Data of consecutive packets that lies in one buffer is put together and written at once;
//! that has happened before anything is acknowledged or completed because of it.

use std::collections::VecDeque;

use tracing::debug;

use super::answers::syndrome;
use super::pool::CHUNK;
use super::qp::{Gate, Qp, Step};
use super::receive::Receive;
use super::{BACKLOG, Context};
use crate::attributes::Service;
use crate::fabric::Hold;
use crate::host::{Access, Atomic, Event, Fault, Rights};
use crate::packet::{Aeth, Extended, Packet, Reth, Slice, operation};
use crate::psn;
use crate::work::{Received, Status};

/// Packets of the backlog looked at in one step.
const TURN_PACKETS: usize = 256;
/// Results of atomics kept for repetitions, at least.
const MIN_ATOMICS: usize = 16;
/// Longest message.
const MAX_MESSAGE: u32 = 1 << 31;

/// A message of which more packets are to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    /// For a receive; so many bytes came.
    Send(u64),
    /// For memory; so many bytes came.
    Write(Reth, u32),
}

/// Where bytes that arrived go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// The current receive, at this offset.
    Receive(u64),
    /// Memory at this address, by this key, in this protection domain.
    Memory(u64, u32, u32),
}

/// A read that is being answered.
#[derive(Clone, Copy, Debug)]
struct Reading {
    /// Number of the next response.
    psn: u32,
    address: u64,
    key: u32,
    pd: u32,
    left: u32,
    is_first: bool,
}

/// A refusal, with what it leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// The request makes no sense.
    Invalid,
    /// The message is longer than the receive.
    TooLong,
    /// The key or the queue pair does not allow it.
    Access,
    /// It failed here; the receive, if there is one, ends with the status.
    Operation(Status),
}

/// Whether there is a receive.
enum Ready {
    Yes,
    No,
    /// It cannot be said yet: the packet waits.
    Waits,
}

/// What became of a packet.
pub(super) enum Done {
    /// It was dealt with.
    Yes,
    /// It waits: first of the backlog again.
    Waits,
}

#[derive(Debug, Default)]
pub(super) struct Responder {
    expected: u32,
    msn: u32,
    /// A NAK was sent, and what it asks for has not come.
    nak_sent: bool,
    message: Option<Message>,
    /// The receive that the current message goes to.
    pub(super) receive: Option<Receive>,
    reading: Option<Reading>,
    /// Results of the last atomics, for repetitions.
    atomics: VecDeque<(u32, u64)>,
    pub(super) backlog: VecDeque<Packet>,
    pub(super) gate: Gate,
    /// Bytes that arrived and were not written.
    arriving: Option<(Target, Slice)>,
    /// The last packet of a message, whose bytes are among them.
    finishing: Option<Packet>,
    /// An acknowledgement is to be sent.
    ack_due: bool,
    /// While there is a backlog or a read, the packets that brought it count as in flight.
    pub(super) hold: Option<Hold>,
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

    /// Something has to happen before the next packet is looked at.
    fn is_busy(&self) -> bool {
        self.gate.is_waiting() || self.reading.is_some() || self.finishing.is_some()
    }

    /// Gives up what keeps other packets waiting.
    pub(super) fn release(&mut self, cx: &mut Context<'_>) {
        self.backlog.clear();
        if let Some(hold) = self.hold.take() {
            cx.shared.released.push(hold);
        }
    }

    /// Nothing is received any more. The current receive stays, to be flushed.
    pub(super) fn stop(&mut self, cx: &mut Context<'_>) {
        self.release(cx);
        self.message = None;
        self.reading = None;
        self.arriving = None;
        self.finishing = None;
        self.ack_due = false;
        self.gate = Gate::Open;
    }
}

impl Qp {
    /// A request arrived.
    pub(super) fn take_request(&mut self, cx: &mut Context<'_>, packet: Packet) {
        if self.responder.is_busy() || !self.responder.backlog.is_empty() {
            if self.responder.backlog.len() < BACKLOG {
                self.responder.backlog.push_back(packet);
                cx.hold(&mut self.responder.hold);
            } else {
                // As if the packet had been lost.
                cx.shared.counters.packets_dropped += 1;
            }
            return;
        }
        self.attend(cx, packet);
    }

    /// Carries out a request, or puts it at the head of the backlog if it has to wait.
    fn attend(&mut self, cx: &mut Context<'_>, packet: Packet) {
        let done = match self.config.service {
            Service::Rc | Service::Xrc => self.reliable_request(cx, &packet),
            Service::Uc => self.unreliable_request(cx, &packet),
            Service::Ud | Service::Gsi => self.datagram_request(cx, &packet),
        };
        if matches!(done, Done::Waits) {
            self.responder.backlog.push_front(packet);
        }
        if self.responder.is_busy() || !self.responder.backlog.is_empty() {
            cx.hold(&mut self.responder.hold);
            cx.shared.wake.push(self.number);
        }
    }

    /// Goes on with the read that is being answered and with the backlog.
    pub(super) fn respond_step(&mut self, cx: &mut Context<'_>) -> Step {
        let mut left = TURN_PACKETS;
        loop {
            if self.responder.gate.is_waiting() {
                return Step::Blocked;
            }
            if self.responder.finishing.is_some() || self.responder.arriving.is_some() {
                self.settle_requests(cx);
                if self.responder.gate.is_waiting() || !self.receives() {
                    return Step::Blocked;
                }
            }
            if self.responder.reading.is_some() {
                match self.read_chunk(cx) {
                    Step::More => return Step::More,
                    Step::Blocked if self.responder.reading.is_some() || !self.receives() => return Step::Blocked,
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
            self.attend(cx, packet);
            if !self.receives() {
                return Step::Blocked;
            }
        }
    }

    /// Writes what arrived, ends the message it belongs to, and acknowledges.
    pub(super) fn settle_requests(&mut self, cx: &mut Context<'_>) {
        if !self.write_requested(cx) {
            return;
        }
        if let Some(packet) = self.responder.finishing.take() {
            self.finish(cx, &packet);
        }
        if self.responder.ack_due && self.responder.reading.is_none() {
            self.responder.ack_due = false;
            let psn = psn::add(self.responder.expected, psn::MASK);
            self.acknowledge(cx, psn, syndrome::ACK | syndrome::NO_CREDITS);
        }
    }

    fn acknowledge(&mut self, cx: &mut Context<'_>, psn: u32, syndrome: u8) {
        let mut packet = self.packet(&cx.shared.port, operation::ACKNOWLEDGE, psn);
        packet.extended = Extended::Aeth(Aeth {
            syndrome,
            msn: self.responder.msn,
        });
        cx.send(packet);
    }

    fn reliable_request(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Done {
        let ahead = psn::diff(packet.psn, self.responder.expected);
        if ahead > 0 {
            // Something before it was lost. That is said once.
            if !self.responder.nak_sent && self.write_requested(cx) {
                self.responder.nak_sent = true;
                self.responder.ack_due = false;
                cx.shared.counters.sequence_naks_sent += 1;
                let expected = self.responder.expected;
                self.acknowledge(cx, expected, syndrome::NAK | syndrome::SEQUENCE);
            }
            return Done::Yes;
        }
        if ahead < 0 {
            return self.repeated_request(cx, packet);
        }
        match self.request(cx, packet) {
            Ok(done) => {
                if self.responder.expected != packet.psn {
                    self.responder.nak_sent = false;
                }
                done
            }
            Err(refusal) => {
                self.refuse(cx, packet.psn, refusal);
                Done::Yes
            }
        }
    }

    /// A request that was carried out before, or is being. What its answer was is said again.
    fn repeated_request(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Done {
        cx.shared.counters.duplicates += 1;
        match (packet.opcode & operation::MASK, packet.extended) {
            (operation::READ_REQUEST, Extended::Reth(reth)) => {
                let count = psn::packets(reth.length, self.mtu.bytes());
                let end = packet.psn.wrapping_add(count);
                if count > psn::MASK / 2 || psn::diff(end & psn::MASK, self.responder.expected) > 0 {
                    // Not one that was here before.
                    return Done::Yes;
                }
                match self.begin_reading(cx, packet, reth) {
                    Ok(()) => {}
                    Err(refusal) => self.refuse(cx, packet.psn, refusal),
                }
            }
            (operation::COMPARE_SWAP | operation::FETCH_ADD, _) => {
                let saved = self.responder.atomics.iter().find(|(psn, _)| *psn == packet.psn);
                if let Some(&(psn, original)) = saved {
                    self.atomic_answer(cx, psn, original);
                }
            }
            _ => self.responder.ack_due = true,
        }
        Done::Yes
    }

    /// Handles the request with the expected PSN.
    fn request(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Result<Done, Refusal> {
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
            return Err(Refusal::Invalid);
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

    fn send_request(&mut self, cx: &mut Context<'_>, packet: &Packet, operation: u8) -> Result<Done, Refusal> {
        use operation::*;
        let got = match self.responder.message {
            Some(Message::Send(got)) => got,
            _ => 0,
        };
        if !self.make_way_for(cx, Target::Receive(got), &packet.payload)? {
            return Ok(Done::Waits);
        }
        match self.have_receive(cx, packet)? {
            Ready::Yes => {}
            Ready::No => return Ok(Done::Yes),
            Ready::Waits => return Ok(Done::Waits),
        }
        let total = got + packet.payload.len() as u64;
        if let Some(receive) = &mut self.responder.receive {
            if total > receive.space() {
                return Err(Refusal::TooLong);
            }
            // Not truncated: the receive has enough space, and no receive has space for 4 GiB.
            receive.length = total as u32;
        }
        let is_last = !matches!(operation, SEND_FIRST | SEND_MIDDLE);
        self.responder.message = (!is_last).then_some(Message::Send(total));
        self.accept(cx, Target::Receive(got), packet, is_last);
        Ok(Done::Yes)
    }

    fn write_request(&mut self, cx: &mut Context<'_>, packet: &Packet, operation: u8) -> Result<Done, Refusal> {
        use operation::*;
        let (reth, got) = match (self.responder.message, packet.extended) {
            (Some(Message::Write(reth, got)), _) => (reth, got),
            (_, Extended::Reth(reth)) => (reth, 0),
            _ => return Err(Refusal::Invalid),
        };
        let pd = self.domain(cx, packet.srqn);
        let target = Target::Memory(reth.address.wrapping_add(got.into()), reth.key, pd);
        if !self.make_way_for(cx, target, &packet.payload)? {
            return Ok(Done::Waits);
        }
        if got == 0 && self.responder.message.is_none() {
            if !self.access.write || reth.length > MAX_MESSAGE {
                return Err(Refusal::Invalid);
            }
            self.check_range(cx, reth, Rights::RemoteWrite, pd)?;
        }
        let is_last = !matches!(operation, WRITE_FIRST | WRITE_MIDDLE);
        // Not more than the path MTU is added to not more than the longest message.
        let total = got + packet.payload.len() as u32;
        if if is_last {
            total != reth.length
        } else {
            total >= reth.length
        } {
            return Err(Refusal::Invalid);
        }
        if matches!(operation, WRITE_LAST_IMM | WRITE_ONLY_IMM) {
            match self.have_receive(cx, packet)? {
                Ready::Yes => {}
                Ready::No => return Ok(Done::Yes),
                Ready::Waits => return Ok(Done::Waits),
            }
            if let Some(receive) = &mut self.responder.receive {
                receive.length = total;
            }
        }
        self.responder.message = (!is_last).then_some(Message::Write(reth, total));
        self.accept(cx, target, packet, is_last);
        Ok(Done::Yes)
    }

    /// The protection domain that remote keys have to be of: the queue pair's or, with XRC, that of the shared receive
    /// queue which the request names.
    fn domain(&self, cx: &Context<'_>, srqn: u32) -> u32 {
        let named = cx.shared.srqs.get(&srqn).map(|srq| srq.config);
        named
            .filter(|config| {
                self.config.service == Service::Xrc && config.xrc.is_some_and(|(xrcd, _)| xrcd == self.config.xrcd)
            })
            .map_or(self.config.pd, |config| config.pd)
    }

    fn check_range(&self, cx: &mut Context<'_>, reth: Reth, rights: Rights, pd: u32) -> Result<(), Refusal> {
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
            .map_err(|fault| self.access_refusal(fault, &access))
    }

    fn access_refusal(&self, fault: Fault, access: &Access) -> Refusal {
        debug!(qpn = self.number, %fault, ?access, "remote access refused");
        match fault {
            Fault::Bus => Refusal::Operation(Status::LocalProtection),
            _ => Refusal::Access,
        }
    }

    /// Sees to it that there is a receive for the message. Without one, a receiver-not-ready NAK is sent.
    fn have_receive(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Result<Ready, Refusal> {
        if self.responder.receive.is_some() {
            return Ok(Ready::Yes);
        }
        match self.fetch_receive(cx, packet.srqn) {
            Ok(Some(receive)) => {
                self.responder.receive = Some(receive);
                Ok(Ready::Yes)
            }
            Ok(None) if self.is_reliable() => {
                // The NAK acknowledges what came before it.
                if !self.write_arrived_requests(cx)? {
                    return Ok(Ready::Waits);
                }
                self.responder.nak_sent = true;
                self.responder.ack_due = false;
                cx.shared.counters.rnr_naks_sent += 1;
                self.acknowledge(cx, packet.psn, syndrome::RNR | self.min_rnr_timer & 31);
                Ok(Ready::No)
            }
            Ok(None) => Ok(Ready::No),
            // There is no such queue, rather than something wrong with it.
            Err(Status::RemoteInvalidRequest) => Err(Refusal::Invalid),
            Err(status) => Err(Refusal::Operation(status)),
        }
    }

    /// Writes the data that arrived before unless `payload` continues it. Returns whether `payload` can be stored now: false if
    /// the write has to wait for a page.
    fn make_way_for(&mut self, cx: &mut Context<'_>, target: Target, payload: &Slice) -> Result<bool, Refusal> {
        let joins = match &self.responder.arriving {
            None => true,
            Some((at, slice)) => continues(*at, slice.len(), target) && slice.joined(payload).is_some(),
        };
        if joins {
            Ok(true)
        } else {
            self.write_arrived_requests(cx)
        }
    }

    /// Takes the bytes of a packet, and with the last one ends the message.
    fn accept(&mut self, cx: &mut Context<'_>, target: Target, packet: &Packet, is_last: bool) {
        cx.shared.counters.bytes_received += packet.payload.len() as u64;
        if !packet.payload.is_empty() {
            self.responder.arriving = match self.responder.arriving.take() {
                // `make_way_for` left only what this goes on from.
                Some((at, slice)) => slice.joined(&packet.payload).map(|slice| (at, slice)),
                None => Some((target, packet.payload.clone())),
            };
        }
        self.responder.expected = psn::add(packet.psn, 1);
        if is_last {
            self.responder.finishing = Some(packet.clone());
        }
        self.responder.ack_due |= packet.ack_request && self.is_reliable();
        if (is_last || packet.ack_request) && self.write_requested(cx) {
            if let Some(packet) = self.responder.finishing.take() {
                self.finish(cx, &packet);
            }
        }
    }

    /// Writes what arrived. Returns whether it is written: not if it waits for a page, or was refused (which has been
    /// dealt with).
    fn write_requested(&mut self, cx: &mut Context<'_>) -> bool {
        match self.write_arrived_requests(cx) {
            Ok(written) => written,
            Err(refusal) => {
                let psn = psn::add(self.responder.expected, psn::MASK);
                self.refuse(cx, psn, refusal);
                false
            }
        }
    }

    fn write_arrived_requests(&mut self, cx: &mut Context<'_>) -> Result<bool, Refusal> {
        if self.responder.gate.is_waiting() {
            return Ok(false);
        }
        let Some((target, slice)) = self.responder.arriving.take() else {
            return Ok(true);
        };
        let mut gate = self.responder.gate;
        let qpn = self.number;
        let result = match target {
            Target::Receive(offset) => match &self.responder.receive {
                Some(receive) => gate
                    .access(cx, qpn, |cx| receive.scatter(cx, qpn, offset, slice.bytes()))
                    .map_err(|fault| (fault, Refusal::Operation(Self::local_status(fault)))),
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
                gate.access(cx, qpn, |cx| cx.host.write(&access, slice.bytes()))
                    .map_err(|fault| (fault, self.access_refusal(fault, &access)))
            }
        };
        self.responder.gate = gate;
        match result {
            Ok(()) => Ok(true),
            Err((Fault::Page(_), _)) => {
                self.responder.arriving = Some((target, slice));
                Ok(false)
            }
            Err((_, refusal)) => Err(refusal),
        }
    }

    /// A message is complete, and its bytes are written.
    fn finish(&mut self, cx: &mut Context<'_>, packet: &Packet) {
        use operation::*;
        let what = match packet.opcode & MASK {
            SEND_LAST_IMM | SEND_ONLY_IMM => Received::SendImm(packet.imm),
            WRITE_LAST_IMM | WRITE_ONLY_IMM => Received::WriteImm(packet.imm),
            SEND_LAST_INVALIDATE | SEND_ONLY_INVALIDATE => Received::SendInvalidate(packet.imm),
            _ => Received::Send,
        };
        if let Received::SendInvalidate(key) = what {
            let pd = self.domain(cx, packet.srqn);
            if let Err(fault) = cx.host.invalidate(self.number, pd, key) {
                debug!(qpn = self.number, key, %fault, "remote invalidation refused");
                // The message itself has arrived; the queue pairs on both sides end.
                return self.refuse(cx, packet.psn, Refusal::Operation(Status::RemoteInvalidRequest));
            }
        }
        self.responder.msn = psn::add(self.responder.msn, 1);
        if let Some(receive) = self.responder.receive.take() {
            self.complete_receive(cx, &receive, Status::Success, what, packet.solicited, None);
        }
    }

    /// Sends the NAK of the refusal and ends the queue pair if the refusal requires that. Unreliable services send nothing.
    fn refuse(&mut self, cx: &mut Context<'_>, psn: u32, refusal: Refusal) {
        let counters = &mut cx.shared.counters;
        let (code, event, status) = match refusal {
            Refusal::Invalid => {
                counters.invalid_requests += 1;
                let event = Event::InvalidRequest { qpn: self.number };
                (syndrome::INVALID_REQUEST, Some(event), None)
            }
            Refusal::TooLong => {
                counters.invalid_requests += 1;
                (syndrome::INVALID_REQUEST, None, Some(Status::LocalLength))
            }
            Refusal::Access => {
                counters.remote_access_errors += 1;
                let event = Event::AccessViolation { qpn: self.number };
                (syndrome::REMOTE_ACCESS, Some(event), None)
            }
            Refusal::Operation(status) => {
                counters.remote_operation_errors += 1;
                (syndrome::REMOTE_OPERATION, None, Some(status))
            }
        };
        debug!(qpn = self.number, psn, ?refusal, "request refused");
        if self.is_reliable() {
            self.acknowledge(cx, psn, syndrome::NAK | code);
        } else if status.is_none() {
            // An unreliable connection drops the message and goes on with the next.
            self.responder.message = None;
            self.responder.arriving = None;
            self.responder.finishing = None;
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

    fn read_request(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Result<Done, Refusal> {
        let Extended::Reth(reth) = packet.extended else {
            return Err(Refusal::Invalid);
        };
        if !self.access.read || reth.length > MAX_MESSAGE {
            return Err(Refusal::Invalid);
        }
        if !self.write_arrived_requests(cx)? {
            return Ok(Done::Waits);
        }
        self.begin_reading(cx, packet, reth)?;
        self.responder.msn = psn::add(self.responder.msn, 1);
        self.responder.expected = psn::add(packet.psn, psn::packets(reth.length, self.mtu.bytes()));
        Ok(Done::Yes)
    }

    fn begin_reading(&mut self, cx: &mut Context<'_>, packet: &Packet, reth: Reth) -> Result<(), Refusal> {
        if !self.access.read {
            return Err(Refusal::Invalid);
        }
        let pd = self.domain(cx, packet.srqn);
        self.check_range(cx, reth, Rights::RemoteRead, pd)?;
        self.responder.reading = Some(Reading {
            psn: packet.psn,
            address: reth.address,
            key: reth.key,
            pd,
            left: reth.length,
            is_first: true,
        });
        Ok(())
    }

    /// Answers the next part of a read.
    fn read_chunk(&mut self, cx: &mut Context<'_>) -> Step {
        use operation::*;
        let Some(reading) = self.responder.reading else {
            return Step::Blocked;
        };
        if !cx.host.has_space(self.dlid()) {
            cx.shared.blocked.push(self.number);
            return Step::Blocked;
        }
        let len = (reading.left as usize).min(CHUNK);
        let mut chunk = None;
        if len > 0 {
            let access = Access {
                key: reading.key,
                address: reading.address,
                length: len as u64,
                rights: Rights::RemoteRead,
                pd: reading.pd,
                qpn: self.number,
            };
            let mut gate = self.responder.gate;
            let read = gate.access(cx, self.number, |cx| {
                let host = &mut *cx.host;
                cx.shared.pool.fill(len, |bytes| host.read(&access, bytes))
            });
            self.responder.gate = gate;
            match read {
                Ok(bytes) => chunk = Some(bytes),
                Err(Fault::Page(_)) => return Step::Blocked,
                Err(fault) => {
                    self.responder.reading = None;
                    let refusal = self.access_refusal(fault, &access);
                    self.refuse(cx, reading.psn, refusal);
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
        let mut reading = reading;
        let mut at = 0;
        loop {
            let size = mtu.min(len - at);
            let is_last = size as u32 == reading.left;
            let mut packet = template.clone();
            packet.psn = reading.psn;
            packet.opcode |= match (reading.is_first, is_last) {
                (true, true) => READ_RESPONSE_ONLY,
                (true, false) => READ_RESPONSE_FIRST,
                (false, false) => READ_RESPONSE_MIDDLE,
                (false, true) => READ_RESPONSE_LAST,
            };
            if reading.is_first || is_last {
                packet.extended = Extended::Aeth(aeth);
            }
            packet.payload = chunk
                .as_ref()
                .map_or_else(Slice::default, |chunk| Slice::new(chunk, at, size));
            cx.send(packet);
            reading.psn = psn::add(reading.psn, 1);
            reading.left -= size as u32;
            reading.is_first = false;
            at += size;
            if at >= len {
                break;
            }
        }
        if reading.left == 0 {
            self.responder.reading = None;
            return Step::Blocked;
        }
        reading.address = reading.address.wrapping_add(len as u64);
        self.responder.reading = Some(reading);
        Step::More
    }

    fn atomic_request(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Result<Done, Refusal> {
        let Extended::Atomic(eth) = packet.extended else {
            return Err(Refusal::Invalid);
        };
        if !self.access.atomic || eth.address % 8 != 0 {
            return Err(Refusal::Invalid);
        }
        if !self.write_arrived_requests(cx)? {
            return Ok(Done::Waits);
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
            pd: self.domain(cx, packet.srqn),
            qpn: self.number,
        };
        let mut gate = self.responder.gate;
        let result = gate.access(cx, self.number, |cx| cx.host.atomic(&access, operation));
        self.responder.gate = gate;
        let original = match result {
            Ok(original) => original,
            Err(Fault::Page(_)) => return Ok(Done::Waits),
            Err(fault) => return Err(self.access_refusal(fault, &access)),
        };
        self.responder.msn = psn::add(self.responder.msn, 1);
        self.responder.expected = psn::add(packet.psn, 1);
        self.responder.atomics.push_back((packet.psn, original));
        if self.responder.atomics.len() > MIN_ATOMICS.max(self.max_served.into()) {
            self.responder.atomics.pop_front();
        }
        self.atomic_answer(cx, packet.psn, original);
        Ok(Done::Yes)
    }

    fn atomic_answer(&mut self, cx: &mut Context<'_>, psn: u32, original: u64) {
        let mut packet = self.packet(&cx.shared.port, operation::ATOMIC_ACKNOWLEDGE, psn);
        let aeth = Aeth {
            syndrome: syndrome::ACK | syndrome::NO_CREDITS,
            msn: self.responder.msn,
        };
        packet.extended = Extended::AtomicAck(aeth, original);
        cx.send(packet);
    }

    /// Unreliable connections: a message with a gap is dropped; the next one counts.
    fn unreliable_request(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Done {
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
            if !self.write_requested(cx) && self.responder.gate.is_waiting() {
                return Done::Waits;
            }
            // The receive of a message that was cut off serves the next.
            self.responder.message = None;
        }
        if !known || !begins && self.responder.message.is_none() {
            cx.shared.counters.packets_dropped += 1;
            self.responder.expected = psn::add(packet.psn, 1);
            return Done::Yes;
        }
        match self.request(cx, packet) {
            Ok(done) => {
                if self.responder.expected != psn::add(packet.psn, 1) && matches!(done, Done::Yes) {
                    // No receive.
                    cx.shared.counters.packets_dropped += 1;
                    self.responder.expected = psn::add(packet.psn, 1);
                    self.responder.message = None;
                }
                done
            }
            Err(refusal) => {
                self.refuse(cx, packet.psn, refusal);
                self.responder.expected = psn::add(packet.psn, 1);
                Done::Yes
            }
        }
    }
}

/// Whether `next` is where bytes go that follow `len` bytes at `at`.
fn continues(at: Target, len: usize, next: Target) -> bool {
    match (at, next) {
        (Target::Receive(offset), Target::Receive(next)) => offset + len as u64 == next,
        (Target::Memory(address, key, pd), Target::Memory(next, next_key, next_pd)) => {
            address.wrapping_add(len as u64) == next && (key, pd) == (next_key, next_pd)
        }
        _ => false,
    }
}
