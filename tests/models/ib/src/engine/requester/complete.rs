// SPDX-License-Identifier: MIT OR Apache-2.0

//! Acknowledgement and completion of work requests.

use tracing::debug;

use super::Progress;
use crate::attributes::State;
use crate::engine::Context;
use crate::engine::qp::Qp;
use crate::psn;
use crate::work::{Completion, SendOp, Status};

impl Qp {
    /// Records that everything before `psn` is acknowledged (or sent, on unreliable services).
    pub(in crate::engine) fn acknowledge_before(&mut self, cx: &mut Context<'_>, psn: u32) {
        let requester = &mut self.requester;
        let outstanding = psn::count(requester.unacknowledged, requester.next);
        if !(1..=outstanding).contains(&psn::count(requester.unacknowledged, psn)) {
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
    pub(in crate::engine) fn acknowledge_response(&mut self, cx: &mut Context<'_>, psn: u32) {
        self.acknowledge_before(cx, psn::add(psn, 1));
        self.requester.shorten_read(self.mtu.bytes());
    }

    /// Ends the work requests whose packets are all acknowledged and that wait for no response.
    pub(super) fn end_acknowledged(&mut self) {
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
    pub(in crate::engine) fn complete_sends(&mut self, cx: &mut Context<'_>) {
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

    pub(in crate::engine) fn complete_send(
        &self,
        cx: &mut Context<'_>,
        id: u64,
        op: Option<SendOp>,
        status: Status,
        length: u32,
    ) {
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
    pub(in crate::engine) fn fail_oldest(&mut self, cx: &mut Context<'_>, status: Status) {
        self.complete_sends(cx);
        if let Some(work) = self.requester.works.front_mut() {
            debug!(qpn = self.number, id = work.id, ?status, "send work request failed");
            work.progress = Progress::Ended(status);
            self.complete_sends(cx);
        }
    }
}
