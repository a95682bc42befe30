// SPDX-License-Identifier: MIT OR Apache-2.0

//! READ and atomic requests, and their responses.

use super::{Disposition, RequestError};
use crate::engine::Context;
use crate::engine::pool::CHUNK;
use crate::engine::qp::{Qp, Step};
use crate::engine::responses::syndrome;
use crate::host::{Access, Atomic, Fault, Rights};
use crate::packet::{Aeth, Extended, Packet, Reth, Slice, operation};
use crate::psn;
use crate::work::MAX_MESSAGE;

/// Minimum number of atomic results that are kept for duplicate requests.
const MIN_ATOMIC_RESULTS: usize = 16;

/// A READ request whose responses are being sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct ActiveRead {
    /// PSN of the next response.
    psn: u32,
    address: u64,
    key: u32,
    pd: u32,
    left: u32,
    is_first: bool,
}

impl Qp {
    pub(super) fn read_request(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Result<Disposition, RequestError> {
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

    pub(super) fn start_read(&mut self, cx: &mut Context<'_>, packet: &Packet, reth: Reth) -> Result<(), RequestError> {
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
    pub(super) fn send_read_responses(&mut self, cx: &mut Context<'_>) -> Step {
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

    pub(super) fn atomic_request(
        &mut self,
        cx: &mut Context<'_>,
        packet: &Packet,
    ) -> Result<Disposition, RequestError> {
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

    pub(super) fn send_atomic_response(&mut self, cx: &mut Context<'_>, psn: u32, original: u64) {
        let mut packet = self.packet(&cx.shared.port, operation::ATOMIC_ACKNOWLEDGE, psn);
        let aeth = Aeth {
            syndrome: syndrome::ACK | syndrome::NO_CREDITS,
            msn: self.responder.msn,
        };
        packet.extended = Extended::AtomicAck(aeth, original);
        cx.send(packet);
    }
}
