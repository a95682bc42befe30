// SPDX-License-Identifier: MIT OR Apache-2.0

//! The requester: converts work requests to packets, and sends and retransmits the packets.
//!
//! A work request has four stages. The engine *fetches* the request from the host. *Starting* the request assigns its
//! packet sequence numbers. The request is *segmented* into packets, chunk by chunk, as far as the send window allows.
//! The request *ends* when all packets are acknowledged (on reliable services) or sent. Packets stay in `unacked` until
//! then, so a retransmission does not read the memory again, which may have changed.

mod complete;
mod segment;
mod work;

use std::collections::VecDeque;
use std::time::Duration;

use tracing::debug;

use super::Context;
use super::qp::{PageWait, Qp, Step};
use crate::packet::{Extended, MULTICAST_LID, Packet, Slice};
use crate::psn;
use crate::work::{SendWork, Status};
pub(super) use work::{Progress, Work};

/// Number of packets in `unacked` at which the send window is full.
const WINDOW_PACKETS: usize = 1024;
/// Number of payload bytes in `unacked` at which the send window is full.
const WINDOW_BYTES: usize = 4 << 20;
/// Number of started and not completed work requests at which the send window is full.
const WINDOW_WORKS: usize = 1024;
/// Largest number of PSNs that several work requests may have outstanding. A request that is alone may have more: up to
/// [`psn::MAX_OUTSTANDING`], which the longest message needs with the smallest MTU.
const WINDOW_PSN: u32 = 1 << 22;
/// Most packets that one step sends.
const PACKET_BUDGET: usize = 256;
/// Payload bytes after which one step sends no further packet.
const BYTE_BUDGET: usize = 128 << 10;
/// Most work requests that one step starts.
const REQUEST_BUDGET: usize = 64;
/// Shortest acknowledgement timeout. Shorter configured timeouts are increased, because other threads must run
/// meanwhile.
const MIN_TIMEOUT: Duration = Duration::from_micros(500);

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

    /// Returns whether a work request of `count` packets may start: its PSNs and the outstanding ones fit the window.
    /// With more than half of all PSNs outstanding, [`psn::diff`] would have the wrong sign.
    fn has_psns(&self, count: u32) -> bool {
        match psn::count(self.unacknowledged, self.next) {
            _ if count == 0 => true,
            0 => count <= psn::MAX_OUTSTANDING,
            outstanding => outstanding + count <= WINDOW_PSN,
        }
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
