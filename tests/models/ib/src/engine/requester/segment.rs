// SPDX-License-Identifier: MIT OR Apache-2.0

//! Fetching, starting and segmenting of work requests.

use std::sync::Arc;

use smallvec::SmallVec;
use tracing::debug;

use super::{Progress, Work};
use crate::attributes::State;
use crate::engine::pool::CHUNK;
use crate::engine::qp::Qp;
use crate::engine::scatter_gather::{overlap, part, parts, total};
use crate::engine::{Context, datagram};
use crate::host::{Access, Fault, Fetched, Rights};
use crate::packet::{AtomicEth, Extended, Reth, Slice, operation};
use crate::psn;
use crate::work::{Fence, MAX_MESSAGE, Payload, Segment, SendOp, SendWork, Sge, Status};

/// Packets whose PSN is a multiple of this value request an acknowledgement.
const ACK_EVERY: u32 = 32;
// With the smallest MTU, the longest message has as many packets as there may be outstanding PSNs.
const _: () = assert!(MAX_MESSAGE / 256 == psn::MAX_OUTSTANDING);

impl Qp {
    /// Fetches the next work request and starts it. Returns whether the requester can continue.
    pub(super) fn start_next(&mut self, cx: &mut Context<'_>) -> bool {
        if self.requester.failed || self.state != State::Rts {
            return false;
        }
        let work = match self.requester.fetched.take() {
            Some(work) => work,
            None if !self.requester.doorbell => return false,
            None => match cx.host.next_send(self.number) {
                Fetched::Work(work) => work,
                Fetched::Empty => {
                    self.requester.doorbell = false;
                    return false;
                }
                Fetched::Bad { id, status } => {
                    debug!(qpn = self.number, id, ?status, "invalid send work request");
                    self.fail(id, None, status);
                    return true;
                }
                Fetched::Broken => {
                    self.fatal(cx);
                    return false;
                }
            },
        };
        let is_fenced = match work.flags.fence {
            Fence::None => false,
            Fence::Reads => self.requester.outstanding_rd_atomics() > 0,
            Fence::All => !self.requester.works.is_empty(),
        };
        let is_rd_atomic = matches!(
            work.op,
            SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }
        );
        if is_fenced
            || is_rd_atomic && self.requester.outstanding_rd_atomics() >= usize::from(self.max_initiated.max(1))
            || !self.requester.has_psns(self.packet_count(&work))
        {
            self.requester.fetched = Some(work);
            return false;
        }
        self.start(cx, work);
        true
    }

    /// Returns the number of packets of a work request, which is its number of PSNs.
    fn packet_count(&self, work: &SendWork) -> u32 {
        match work.op {
            SendOp::Local => 0,
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => 1,
            _ if self.is_datagram() => 1,
            // Not truncated. A longer message fails before its first packet.
            _ => psn::packets(total(&work.payload).min(MAX_MESSAGE.into()) as u32, self.mtu.bytes()),
        }
    }

    /// Adds a work request that failed before its first packet. It completes after the earlier requests.
    fn fail(&mut self, id: u64, op: Option<SendOp>, status: Status) {
        let work = Work::ended(id, op, true, self.requester.next, status);
        self.requester.works.push_back(work);
        self.requester.failed = true;
    }

    /// Checks that the service supports the operation and that the request is valid.
    fn validate(&self, work: &SendWork, length: u64) -> Result<(), Status> {
        let reliable = self.is_reliable();
        let supported = match work.op {
            SendOp::Local => true,
            SendOp::Send { .. } => true,
            SendOp::Write { .. } => !self.is_datagram(),
            SendOp::SendInvalidate { .. } => reliable,
            SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => reliable,
        };
        if !supported || self.is_datagram() && work.op != SendOp::Local && work.to.is_none() {
            return Err(Status::LocalQpOperation);
        }
        if length > MAX_MESSAGE.into() || self.is_datagram() && length > datagram::MAX_PAYLOAD {
            return Err(Status::LocalLength);
        }
        let inline = !matches!(work.payload, Payload::Memory(_));
        match work.op {
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } if length != 8 => Err(Status::LocalLength),
            SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } if inline => {
                Err(Status::LocalQpOperation)
            }
            _ => Ok(()),
        }
    }

    fn start(&mut self, cx: &mut Context<'_>, work: SendWork) {
        let (id, op, signaled) = (work.id, work.op, work.flags.signaled);
        if op == SendOp::Local {
            match cx.host.local(self.number, id) {
                Ok(()) => {
                    let work = Work::ended(id, Some(op), signaled, self.requester.next, Status::Success);
                    self.requester.works.push_back(work);
                }
                Err(status) => self.fail(id, Some(op), status),
            }
            return;
        }
        let length = total(&work.payload);
        if let Err(status) = self.validate(&work, length) {
            debug!(
                qpn = self.number,
                id,
                ?op,
                length,
                ?status,
                "send work request is invalid, too long or not supported by the service"
            );
            return self.fail(id, Some(op), status);
        }
        let first = self.requester.next;
        let count = self.packet_count(&work);
        // Not truncated: `validate` limits the length.
        let length = length as u32;
        let (mut sges, mut inline, mut mixed) = (SmallVec::new(), None, Vec::new());
        match work.payload {
            Payload::Memory(all) => sges = all,
            Payload::Inline(bytes) => inline = Some(Arc::new(bytes)),
            Payload::Mixed(all) => mixed = all,
        }
        self.requester.next = psn::add(first, count);
        let last = psn::add(first, count - 1);
        self.requester.works.push_back(Work {
            id,
            op: Some(op),
            signaled,
            solicited: work.flags.solicited,
            sges,
            inline,
            mixed,
            to: work.to,
            srqn: work.remote_srqn,
            length,
            first,
            last,
            responses: 0,
            progress: Progress::Outstanding,
        });
        let extended = match op {
            SendOp::Read { remote } => Extended::Reth(Reth {
                address: remote.address,
                key: remote.key,
                length,
            }),
            SendOp::CompareSwap { remote, compare, swap } => Extended::Atomic(AtomicEth {
                address: remote.address,
                key: remote.key,
                swap_add: swap,
                compare,
            }),
            SendOp::FetchAdd { remote, add } => Extended::Atomic(AtomicEth {
                address: remote.address,
                key: remote.key,
                swap_add: add,
                compare: 0,
            }),
            _ => {
                self.requester.segmenting = Some(0);
                return;
            }
        };
        let operation = match op {
            SendOp::Read { .. } => operation::READ_REQUEST,
            SendOp::CompareSwap { .. } => operation::COMPARE_SWAP,
            _ => operation::FETCH_ADD,
        };
        let mut packet = self.packet(&cx.shared.port, operation, first);
        packet.extended = extended;
        packet.ack_request = true;
        packet.srqn = work.remote_srqn;
        self.requester.push(packet, last);
    }

    /// Builds the packets of the next chunk of the last work request.
    pub(super) fn segment_chunk(&mut self, cx: &mut Context<'_>, offset: u32) {
        let Some(work) = self.requester.works.back() else {
            self.requester.segmenting = None;
            return;
        };
        let left = (work.length - offset) as usize;
        let mtu = self.mtu.bytes() as usize;
        let (chunk, start, len) = match &work.inline {
            Some(bytes) => (Some(bytes.clone()), offset as usize, left.min(CHUNK)),
            None if left == 0 => (None, 0, 0),
            None => {
                let len = left.min(CHUNK);
                let (pd, qpn) = (self.config.pd, self.number);
                let mut page_wait = self.requester.read_wait;
                let read = page_wait.access(cx, qpn, |cx| {
                    let host = &mut *cx.host;
                    cx.shared.pool.fill(len, |bytes| {
                        let mut gather = |sge: Sge, to: &mut [u8]| {
                            let access = Access {
                                key: sge.key,
                                address: sge.address,
                                length: sge.length.into(),
                                rights: Rights::LocalRead,
                                pd,
                                qpn,
                            };
                            host.read(&access, to)
                        };
                        for (sge, at) in parts(&work.sges, offset.into(), len) {
                            gather(sge, &mut bytes[at..at + sge.length as usize])?;
                        }
                        for (segment, range, at) in overlap(&work.mixed, Segment::len, offset.into(), len) {
                            // Not truncated: messages are at most 2 GiB long.
                            let (start, end) = (range.start as usize, range.end as usize);
                            let to = &mut bytes[at..at + (end - start)];
                            match segment {
                                Segment::Memory(sge) => gather(part(sge, &range), to)?,
                                Segment::Inline(data) => to.copy_from_slice(&data[start..end]),
                            }
                        }
                        Ok(())
                    })
                });
                self.requester.read_wait = page_wait;
                match read {
                    Ok(chunk) => (Some(chunk), 0, len),
                    Err(Fault::Page(_)) => return,
                    Err(fault) => return self.fail_last(Self::local_status(fault)),
                }
            }
        };
        let slice = |at: usize, len: usize| {
            chunk
                .as_ref()
                .map_or_else(Slice::default, |c| Slice::new(c, start + at, len))
        };
        if self.is_datagram() {
            let payload = slice(0, len);
            self.build_datagram(cx, payload);
            self.requester.segmenting = None;
            return;
        }
        let Some(work) = self.requester.works.back() else {
            return;
        };
        let (op, first, length) = (work.op, work.first, work.length);
        let (srqn, solicited) = (work.srqn, work.solicited);
        let template = self.packet(&cx.shared.port, 0, 0);
        let mut at = 0;
        loop {
            let size = mtu.min(len - at);
            // Not truncated: at most the length of the message.
            let position = offset + at as u32;
            let is_first = position == 0;
            let is_last = position + size as u32 == length;
            let psn = psn::add(first, position / mtu as u32);
            let mut packet = template.clone();
            packet.psn = psn;
            packet.payload = slice(at, size);
            packet.srqn = srqn;
            packet.opcode |= data_operation(op, is_first, is_last);
            packet.ack_request = is_last || psn % ACK_EVERY == 0;
            if is_last {
                packet.solicited = solicited;
                packet.imm = match op {
                    Some(SendOp::Send { imm: Some(imm) } | SendOp::Write { imm: Some(imm), .. }) => imm,
                    Some(SendOp::SendInvalidate { key }) => key,
                    _ => 0,
                };
            }
            if let (true, Some(SendOp::Write { remote, .. })) = (is_first, op) {
                packet.extended = Extended::Reth(Reth {
                    address: remote.address,
                    key: remote.key,
                    length,
                });
            }
            self.requester.push(packet, psn);
            at += size;
            if at >= len {
                break;
            }
        }
        let end = offset + len as u32;
        self.requester.segmenting = (end < length).then_some(end);
    }

    fn build_datagram(&mut self, cx: &mut Context<'_>, payload: Slice) {
        let Some(work) = self.requester.works.back() else {
            return;
        };
        let Some(to) = work.to else { return };
        let mut packet = self.datagram(&cx.shared.port, &to, work.first);
        packet.payload = payload;
        packet.solicited = work.solicited;
        packet.opcode |= data_operation(work.op, true, true);
        if let Some(SendOp::Send { imm: Some(imm) }) = work.op {
            packet.imm = imm;
        }
        let psn = work.first;
        self.requester.push(packet, psn);
    }

    /// Fails the last work request, which completes after the earlier requests.
    fn fail_last(&mut self, status: Status) {
        self.requester.segmenting = None;
        self.requester.failed = true;
        if let Some(work) = self.requester.works.back_mut() {
            work.progress = Progress::Ended(status);
        }
    }
}

/// Returns the operation in the opcode of a SEND or WRITE packet.
fn data_operation(op: Option<SendOp>, is_first: bool, is_last: bool) -> u8 {
    use operation::*;
    let (first, middle, last, only) = match op {
        Some(SendOp::Write { imm: None, .. }) => (WRITE_FIRST, WRITE_MIDDLE, WRITE_LAST, WRITE_ONLY),
        Some(SendOp::Write { .. }) => (WRITE_FIRST, WRITE_MIDDLE, WRITE_LAST_IMM, WRITE_ONLY_IMM),
        Some(SendOp::Send { imm: Some(_) }) => (SEND_FIRST, SEND_MIDDLE, SEND_LAST_IMM, SEND_ONLY_IMM),
        Some(SendOp::SendInvalidate { .. }) => (SEND_FIRST, SEND_MIDDLE, SEND_LAST_INVALIDATE, SEND_ONLY_INVALIDATE),
        _ => (SEND_FIRST, SEND_MIDDLE, SEND_LAST, SEND_ONLY),
    };
    match (is_first, is_last) {
        (true, true) => only,
        (true, false) => first,
        (false, false) => middle,
        (false, true) => last,
    }
}
