// SPDX-License-Identifier: MIT OR Apache-2.0

//! The requester: converts work requests to packets, and sends and retransmits the packets.
//!
//! A work request has four stages. The engine *fetches* the request from the host. *Starting* the request assigns its
//! packet sequence numbers. The request is *segmented* into packets, chunk by chunk, as far as the send window allows.
//! The request *ends* when all packets are acknowledged (on reliable services) or sent. Packets stay in `unacked` until
//! then, so a retransmission does not read the memory again, which may have changed.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tracing::debug;

use super::Context;
use super::datagram;
use super::pool::CHUNK;
use super::qp::{PageWait, Qp, Step};
use crate::attributes::State;
use crate::host::{Access, Fault, Fetched, Rights};
use crate::packet::{AtomicEth, Chunk, Extended, MULTICAST_LID, Packet, Reth, Slice, operation};
use crate::psn;
use crate::work::{AddressVector, Completion, Fence, Payload, Segment, SendOp, SendWork, Sge, Status};

/// Number of packets in `unacked` at which the send window is full.
const WINDOW_PACKETS: usize = 1024;
/// Number of payload bytes in `unacked` at which the send window is full.
const WINDOW_BYTES: usize = 1 << 20;
/// Number of started and not completed work requests at which the send window is full.
const WINDOW_WORKS: usize = 1024;
/// Number of packet sequence numbers in use at which the send window is full; less than half of the PSN range.
const WINDOW_PSN: i32 = 1 << 22;
/// Most packets that one step sends.
const PACKET_BUDGET: usize = 256;
/// Payload bytes after which one step sends no further packet.
const BYTE_BUDGET: usize = 128 << 10;
/// Most work requests that one step starts.
const REQUEST_BUDGET: usize = 64;
/// Packets whose PSN is a multiple of this value request an acknowledgement.
const ACK_EVERY: u32 = 32;
/// Longest message.
const MAX_MESSAGE: u64 = 1 << 31;
/// Shortest acknowledgement timeout. Shorter configured timeouts are increased, because other threads must run
/// meanwhile.
const MIN_TIMEOUT: Duration = Duration::from_micros(500);

/// Progress of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Packets are not acknowledged or responses are missing.
    Outstanding,
    /// The request ended with this status.
    Ended(Status),
}

/// A work request that was started.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) id: u64,
    /// `None` if the request could not be decoded.
    pub(super) op: Option<SendOp>,
    pub(super) signaled: bool,
    solicited: bool,
    pub(super) pieces: SmallVec<[Sge; 4]>,
    inline: Option<Chunk>,
    /// Mixed payload. If not empty, `pieces` and `inline` are empty.
    mixed: Vec<Segment>,
    to: Option<AddressVector>,
    srqn: u32,
    pub(super) length: u32,
    first: u32,
    last: u32,
    /// READs and atomic operations: number of responses received.
    pub(super) responses: u32,
    pub(super) progress: Progress,
}

impl Work {
    pub(super) fn is_rd_atomic(&self) -> bool {
        matches!(
            self.op,
            Some(SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. })
        )
    }

    /// Returns the PSN of the next response to a READ or an atomic operation.
    pub(super) fn next_response_psn(&self) -> u32 {
        psn::add(self.first, self.responses)
    }

    /// Returns whether all responses to a READ or an atomic operation arrived.
    pub(super) fn has_all_responses(&self) -> bool {
        self.responses > 0 && psn::diff(self.next_response_psn(), self.last) > 0
    }

    pub(super) fn last(&self) -> u32 {
        self.last
    }

    /// Returns the number of bytes that a READ or an atomic operation returned.
    pub(super) fn response_length(&self) -> u32 {
        if self.is_rd_atomic() { self.length } else { 0 }
    }

    fn ended(id: u64, op: Option<SendOp>, signaled: bool, psn: u32, status: Status) -> Self {
        Self {
            id,
            op,
            signaled,
            solicited: false,
            pieces: SmallVec::new(),
            inline: None,
            mixed: Vec::new(),
            to: None,
            srqn: 0,
            length: 0,
            first: psn,
            last: psn::add(psn, psn::MASK),
            responses: 0,
            progress: Progress::Ended(status),
        }
    }
}

/// A packet that may have to be retransmitted.
#[derive(Debug)]
struct Unacked {
    packet: Packet,
    last: u32,
    sent: bool,
}

#[derive(Debug, Default)]
pub(super) struct Requester {
    /// PSN of the next packet.
    next: u32,
    /// Oldest unacknowledged PSN.
    unacknowledged: u32,
    /// Started and not completed work requests, in order.
    pub(super) works: VecDeque<Work>,
    /// A fetched work request that waits for a fence or for the limit of outstanding READs and atomic operations.
    fetched: Option<SendWork>,
    /// Segmented bytes of the last of `works`, while segmentation is incomplete.
    segmenting: Option<u32>,
    /// A work request failed: no more requests are fetched. The failed request completes after the earlier requests.
    failed: bool,
    /// The host may have more work requests.
    doorbell: bool,
    unacked: VecDeque<Unacked>,
    unacked_bytes: usize,
    /// Index of the first packet in `unacked` to send or retransmit.
    cursor: usize,
    /// Packets are being retransmitted after a loss, and nothing was acknowledged since.
    recovering: bool,
    retries: u8,
    rnr_retries: u8,
    /// End of the wait after an RNR NAK.
    rnr_until: Option<Duration>,
    /// Expiry of the acknowledgement timer.
    ack_due: Option<Duration>,
    /// Page fault state of reads of local memory, for the data to send.
    pub(super) read_wait: PageWait,
    /// Page fault state of writes of response data to local memory.
    pub(super) write_wait: PageWait,
    /// Responses that arrived and were not handled.
    pub(super) pending_responses: VecDeque<Packet>,
    /// Response data not written yet: the offset in the work request's memory, and the bytes.
    pub(super) unwritten: Option<(u32, Slice)>,
    /// Keeps the path busy while responses are queued here.
    pub(super) busy_guard: Option<crate::fabric::BusyGuard>,
}

impl Requester {
    pub(super) fn next_psn(&self) -> u32 {
        self.next
    }

    pub(super) fn unacknowledged(&self) -> u32 {
        self.unacknowledged
    }

    pub(super) fn set_psn(&mut self, psn: u32) {
        self.next = psn;
        self.unacknowledged = psn;
    }

    pub(super) fn ring(&mut self) {
        self.doorbell = true;
    }

    /// Returns whether all started work requests are completed.
    pub(super) fn is_idle(&self) -> bool {
        self.works.is_empty()
    }

    /// Stops sending. Started work requests stay in `works` to be flushed.
    pub(super) fn stop(&mut self) {
        self.unacked.clear();
        self.unacked_bytes = 0;
        self.cursor = 0;
        self.segmenting = None;
        self.rnr_until = None;
        self.ack_due = None;
        self.pending_responses.clear();
        self.unwritten = None;
        self.busy_guard = None;
        self.read_wait = PageWait::None;
        self.write_wait = PageWait::None;
        self.doorbell = true;
    }

    pub(super) fn take_fetched(&mut self) -> Option<SendWork> {
        self.fetched.take()
    }

    /// Returns whether the doorbell was rung since the queue was last found empty.
    pub(super) fn may_have_work(&self) -> bool {
        self.doorbell
    }

    /// Returns whether the requester may be able to continue after an acknowledgement.
    pub(super) fn wants_step(&self) -> bool {
        self.doorbell || self.fetched.is_some() || !self.works.is_empty()
    }

    /// Clears the failure, after the send queue is flushed.
    pub(super) fn clear_failure(&mut self) {
        self.failed = false;
        self.doorbell = false;
        self.unacknowledged = self.next;
    }

    pub(super) fn deadline(&self) -> Option<Duration> {
        self.rnr_until.or(self.ack_due)
    }

    /// Returns whether `psn` is assigned and not acknowledged.
    pub(super) fn is_outstanding(&self, psn: u32) -> bool {
        psn::diff(psn, self.unacknowledged) >= 0 && psn::diff(psn, self.next) < 0
    }

    /// Returns the oldest READ or atomic operation with missing responses or unwritten response data.
    pub(super) fn oldest_rd_atomic(&mut self) -> Option<&mut Work> {
        self.works
            .iter_mut()
            .find(|work| work.is_rd_atomic() && work.progress == Progress::Outstanding)
    }

    /// Returns whether the oldest READ or atomic operation has all its responses but is not ended: the request waits
    /// for a page, or the page is available and the queue pair had no step since. The next response belongs to another
    /// request.
    pub(super) fn is_unsettled(&mut self) -> bool {
        self.unwritten.is_some() && self.oldest_rd_atomic().is_some_and(|work| work.has_all_responses())
    }

    fn outstanding_rd_atomics(&self) -> usize {
        self.works
            .iter()
            .filter(|work| work.is_rd_atomic() && work.progress == Progress::Outstanding)
            .count()
    }

    fn push(&mut self, packet: Packet, last: u32) {
        self.unacked_bytes += packet.payload.len();
        self.unacked.push_back(Unacked {
            packet,
            last,
            sent: false,
        });
    }

    fn pop(&mut self) {
        if let Some(gone) = self.unacked.pop_front() {
            self.unacked_bytes -= gone.packet.payload.len();
            self.cursor = self.cursor.saturating_sub(1);
        }
    }

    /// Shortens the READ at the front of `unacked` after a response arrived, so that a retransmission requests only the
    /// remaining data.
    fn shorten_read(&mut self, mtu: u32) {
        if let Some(Unacked { packet, .. }) = self.unacked.front_mut() {
            if let Extended::Reth(reth) = &mut packet.extended {
                packet.psn = psn::add(packet.psn, 1);
                reth.address = reth.address.wrapping_add(mtu.into());
                reth.length = reth.length.saturating_sub(mtu);
            }
        }
    }
}

/// Returns the length of a payload in bytes.
fn total(payload: &Payload) -> u64 {
    match payload {
        Payload::Memory(pieces) => pieces.iter().map(|piece| u64::from(piece.length)).sum(),
        Payload::Inline(bytes) => bytes.len() as u64,
        Payload::Mixed(pieces) => pieces.iter().map(Segment::len).sum(),
    }
}

/// Returns the pieces that overlap `len` bytes from `offset` on. Each item has the range within the piece, and the
/// position of the range within the `len` bytes.
fn overlap<'a, T>(
    pieces: &'a [T],
    length: impl Fn(&T) -> u64 + 'a,
    offset: u64,
    len: usize,
) -> impl Iterator<Item = (&'a T, Range<u64>, usize)> + 'a {
    let end = offset + len as u64;
    let mut at = 0_u64;
    pieces.iter().filter_map(move |piece| {
        let (start, stop) = (at, at + length(piece));
        at = stop;
        let (from, to) = (start.max(offset), stop.min(end));
        (from < to).then(|| (piece, from - start..to - start, (from - offset) as usize))
    })
}

/// Returns the part `range` of a scatter/gather entry.
fn part(piece: &Sge, range: &Range<u64>) -> Sge {
    Sge {
        key: piece.key,
        address: piece.address.wrapping_add(range.start),
        // Not truncated: at most the length of the entry.
        length: (range.end - range.start) as u32,
    }
}

/// Returns the parts of a scatter/gather list that cover `len` bytes from `offset` on, each with its position in these
/// bytes.
pub(super) fn parts(pieces: &[Sge], offset: u64, len: usize) -> impl Iterator<Item = (Sge, usize)> + '_ {
    overlap(pieces, |piece| piece.length.into(), offset, len).map(|(piece, range, at)| (part(piece, &range), at))
}

impl Qp {
    /// Fetches, segments and sends work requests, as far as the windows, fences and budgets allow.
    pub(super) fn step_requester(&mut self, cx: &mut Context<'_>) -> Step {
        let mut works = REQUEST_BUDGET;
        let mut packets = PACKET_BUDGET;
        let mut bytes = BYTE_BUDGET;
        loop {
            if let Some(until) = self.requester.rnr_until {
                if cx.now() < until {
                    return Step::Blocked;
                }
                self.requester.rnr_until = None;
            }
            match self.send_pending(cx, &mut packets, &mut bytes) {
                SendOutcome::All => {}
                SendOutcome::PathFull => {
                    cx.shared.blocked.push(self.number);
                    return Step::Blocked;
                }
                SendOutcome::BudgetSpent => return Step::More,
            }
            self.complete_sends(cx);
            if !self.sends() || self.requester.read_wait.is_pending() || self.window_is_full() {
                return Step::Blocked;
            }
            if let Some(offset) = self.requester.segmenting {
                self.segment_chunk(cx, offset);
            } else {
                if works == 0 {
                    return Step::More;
                }
                works -= 1;
                if !self.start_next(cx) {
                    return Step::Blocked;
                }
            }
        }
    }

    fn window_is_full(&self) -> bool {
        let requester = &self.requester;
        requester.unacked.len() >= WINDOW_PACKETS
            || requester.unacked_bytes >= WINDOW_BYTES
            || requester.works.len() >= WINDOW_WORKS
            || psn::diff(requester.next, requester.unacknowledged) >= WINDOW_PSN
    }

    /// Sends or retransmits the packets in `unacked` from `cursor` on.
    fn send_pending(&mut self, cx: &mut Context<'_>, packets: &mut usize, bytes: &mut usize) -> SendOutcome {
        let reliable = self.is_reliable();
        let mut checked_dlid = None;
        while let Some(unacked) = self.requester.unacked.get_mut(self.requester.cursor) {
            if *packets == 0 || *bytes == 0 {
                return SendOutcome::BudgetSpent;
            }
            let dlid = unacked.packet.dlid;
            if checked_dlid != Some(dlid) {
                if dlid < MULTICAST_LID && !cx.host.has_space(dlid) {
                    return SendOutcome::PathFull;
                }
                checked_dlid = Some(dlid);
            }
            *packets -= 1;
            *bytes = bytes.saturating_sub(unacked.packet.payload.len());
            if unacked.sent {
                cx.shared.counters.retransmissions += 1;
            }
            unacked.sent = true;
            let last = unacked.last;
            cx.send(unacked.packet.clone());
            self.requester.cursor += 1;
            if reliable {
                self.arm_ack_timer(cx);
            } else {
                self.requester.pop();
                self.requester.unacknowledged = psn::add(last, 1);
                self.end_acknowledged();
            }
        }
        SendOutcome::All
    }

    fn arm_ack_timer(&mut self, cx: &mut Context<'_>) {
        if self.requester.ack_due.is_none() && self.ack_timeout != 0 {
            self.requester.ack_due = Some(cx.now() + self.ack_time());
        }
    }

    fn ack_time(&self) -> Duration {
        Duration::from_nanos(4096 << u32::from(self.ack_timeout).min(31)).max(MIN_TIMEOUT)
    }

    /// Fetches the next work request and starts it. Returns whether the requester can continue.
    fn start_next(&mut self, cx: &mut Context<'_>) -> bool {
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
        {
            self.requester.fetched = Some(work);
            return false;
        }
        self.start(cx, work);
        true
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
        if length > MAX_MESSAGE || self.is_datagram() && length > datagram::MAX_PAYLOAD {
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
        // Not truncated: `validate` limits the length.
        let length = length as u32;
        let (mut pieces, mut inline, mut mixed) = (SmallVec::new(), None, Vec::new());
        match work.payload {
            Payload::Memory(all) => pieces = all,
            Payload::Inline(bytes) => inline = Some(Arc::new(bytes)),
            Payload::Mixed(all) => mixed = all,
        }
        let count = match op {
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => 1,
            _ if self.is_datagram() => 1,
            _ => psn::packets(length, self.mtu.bytes()),
        };
        self.requester.next = psn::add(first, count);
        let last = psn::add(first, count - 1);
        self.requester.works.push_back(Work {
            id,
            op: Some(op),
            signaled,
            solicited: work.flags.solicited,
            pieces,
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
    fn segment_chunk(&mut self, cx: &mut Context<'_>, offset: u32) {
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
                        let mut gather = |piece: Sge, to: &mut [u8]| {
                            let access = Access {
                                key: piece.key,
                                address: piece.address,
                                length: piece.length.into(),
                                rights: Rights::LocalRead,
                                pd,
                                qpn,
                            };
                            host.read(&access, to)
                        };
                        for (piece, at) in parts(&work.pieces, offset.into(), len) {
                            gather(piece, &mut bytes[at..at + piece.length as usize])?;
                        }
                        for (piece, range, at) in overlap(&work.mixed, Segment::len, offset.into(), len) {
                            // Not truncated: messages are at most 2 GiB long.
                            let (start, end) = (range.start as usize, range.end as usize);
                            let to = &mut bytes[at..at + (end - start)];
                            match piece {
                                Segment::Memory(piece) => gather(part(piece, &range), to)?,
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

    /// Records that everything before `psn` is acknowledged (or sent, on unreliable services).
    pub(super) fn acknowledge_before(&mut self, cx: &mut Context<'_>, psn: u32) {
        let requester = &mut self.requester;
        if psn::diff(psn, requester.unacknowledged) <= 0 {
            return;
        }
        while requester
            .unacked
            .front()
            .is_some_and(|unacked| psn::diff(unacked.last, psn) < 0)
        {
            requester.pop();
        }
        requester.unacknowledged = psn;
        requester.recovering = false;
        requester.retries = 0;
        requester.rnr_retries = 0;
        requester.ack_due = None;
        if requester.cursor > 0 {
            self.arm_ack_timer(cx);
        }
        self.end_acknowledged();
    }

    /// Records a response to the oldest READ that is not the last one.
    pub(super) fn acknowledge_response(&mut self, cx: &mut Context<'_>, psn: u32) {
        self.acknowledge_before(cx, psn::add(psn, 1));
        self.requester.shorten_read(self.mtu.bytes());
    }

    /// Ends the work requests whose packets are all acknowledged and that wait for no response.
    fn end_acknowledged(&mut self) {
        let unacknowledged = self.requester.unacknowledged;
        for work in &mut self.requester.works {
            if psn::diff(work.last, unacknowledged) >= 0 {
                break;
            }
            if work.progress == Progress::Outstanding && !work.is_rd_atomic() {
                work.progress = Progress::Ended(Status::Success);
            }
        }
    }

    /// Completes ended work requests in order. A failure stops the send queue.
    pub(super) fn complete_sends(&mut self, cx: &mut Context<'_>) {
        while let Some(work) = self.requester.works.front() {
            let Progress::Ended(status) = work.progress else { break };
            if status == Status::Success && work.signaled || status != Status::Success {
                let length = if status == Status::Success {
                    work.response_length()
                } else {
                    0
                };
                let (id, op) = (work.id, work.op);
                self.complete_send(cx, id, op, status, length);
            }
            self.requester.works.pop_front();
            if status != Status::Success {
                if self.is_reliable() {
                    self.enter_error(cx);
                } else {
                    self.state = State::Sqe;
                    self.requester.stop();
                    cx.shared.wake.push(self.number);
                }
                break;
            }
        }
    }

    pub(super) fn complete_send(&self, cx: &mut Context<'_>, id: u64, op: Option<SendOp>, status: Status, length: u32) {
        cx.count_completion(status);
        let (qpn, cqn) = (self.number, self.config.send_cqn);
        cx.host.complete(Completion::Send {
            qpn,
            cqn,
            id,
            op,
            status,
            length,
        });
    }

    /// Fails the oldest work request that is not completed.
    pub(super) fn fail_oldest(&mut self, cx: &mut Context<'_>, status: Status) {
        self.complete_sends(cx);
        if let Some(work) = self.requester.works.front_mut() {
            debug!(qpn = self.number, id = work.id, ?status, "send work request failed");
            work.progress = Progress::Ended(status);
            self.complete_sends(cx);
        }
    }

    /// Handles the loss of a packet or a response. Retransmits from the oldest unacknowledged PSN, unless a
    /// retransmission is in progress.
    pub(super) fn recover(&mut self, cx: &mut Context<'_>) {
        if !self.requester.recovering {
            self.retry(cx);
        }
    }

    fn retry(&mut self, cx: &mut Context<'_>) {
        if self.requester.retries >= self.retry_count {
            return self.fail_oldest(cx, Status::RetryExceeded);
        }
        self.requester.retries += 1;
        self.requester.recovering = true;
        self.requester.cursor = 0;
        self.requester.ack_due = None;
        cx.shared.wake.push(self.number);
    }

    /// Handles an RNR NAK: the remote node has no receive for the oldest message.
    pub(super) fn start_rnr_wait(&mut self, cx: &mut Context<'_>, time: Duration) {
        if self.rnr_retry != 7 {
            if self.requester.rnr_retries >= self.rnr_retry {
                return self.fail_oldest(cx, Status::RnrRetryExceeded);
            }
            self.requester.rnr_retries += 1;
        }
        // The NAK proves that the remote node is reachable.
        self.requester.retries = 0;
        self.requester.cursor = 0;
        self.requester.ack_due = None;
        self.requester.rnr_until = Some(cx.now() + time);
    }

    pub(super) fn on_requester_timer(&mut self, cx: &mut Context<'_>, now: Duration) {
        if self.requester.rnr_until.is_some_and(|time| time <= now) {
            self.requester.rnr_until = None;
            cx.shared.wake.push(self.number);
        }
        if self.requester.ack_due.is_none_or(|time| time > now) {
            return;
        }
        let busy = self.requester.write_wait.is_pending() || !self.requester.pending_responses.is_empty();
        if busy || cx.host.in_flight(self.dlid()) {
            // Not a loss: the request or its response is still being processed.
            self.requester.ack_due = Some(now + self.ack_time());
            return;
        }
        cx.shared.counters.timeouts += 1;
        debug!(
            qpn = self.number,
            psn = self.requester.unacknowledged,
            "acknowledgement timer expired"
        );
        self.retry(cx);
    }
}

/// Result of [`Qp::send_pending`].
enum SendOutcome {
    All,
    PathFull,
    BudgetSpent,
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
