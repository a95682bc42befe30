// SPDX-License-Identifier: MIT OR Apache-2.0

//! The error states: flushes started and queued work requests in order.

use std::time::Duration;

use super::Context;
use super::qp::{Qp, Step};
use super::requester::Progress;
use crate::attributes::{ReceiveFrom, Service};
use crate::host::{Event, Fetched};
use crate::work::{Queue, ReceiveWork, Received, SendOp, Status};

/// Most work requests that one step flushes in each direction.
const REQUEST_BUDGET: usize = 64;
/// First interval at which a queue pair in the error state checks for newly posted receives, because no doorbell
/// announces receives. The interval doubles while none are found.
const MIN_FLUSH_INTERVAL: Duration = Duration::from_millis(1);
/// Longest interval between two checks.
const MAX_FLUSH_INTERVAL: Duration = Duration::from_millis(16);

impl Qp {
    /// Does a step of a queue pair in the error state.
    pub(super) fn flush(&mut self, cx: &mut Context<'_>) -> Step {
        let mut step = self.flush_send(cx, Step::Blocked);
        if let Some(receive) = self.responder.receive.take() {
            self.complete_receive(cx, &receive, Status::Flushed, Received::Send, false, None);
        }
        if self.config.receive == ReceiveFrom::Own && self.config.service != Service::Xrc {
            let mut wait = (self.flush_interval * 2).clamp(MIN_FLUSH_INTERVAL, MAX_FLUSH_INTERVAL);
            for left in (0..REQUEST_BUDGET).rev() {
                let work = match cx.host.next_receive(Queue::Own(self.number)) {
                    Fetched::Work(work) => work,
                    Fetched::Bad { id, .. } => ReceiveWork {
                        id,
                        sges: Default::default(),
                        left: 0,
                    },
                    Fetched::Empty | Fetched::Broken => break,
                };
                wait = MIN_FLUSH_INTERVAL;
                let receive = self.own_receive(work);
                self.complete_receive(cx, &receive, Status::Flushed, Received::Send, false, None);
                if left == 0 {
                    step = Step::More;
                }
            }
            self.flush_interval = wait;
            self.flush_at = Some(cx.now() + wait);
        }
        if step == Step::Blocked && !self.last_work_reported {
            self.last_work_reported = true;
            if self.shares_receives() {
                cx.host.event(Event::LastWorkReached { qpn: self.number });
            }
        }
        step
    }

    /// Flushes the send queue, in SQE and ERR.
    pub(super) fn flush_send(&mut self, cx: &mut Context<'_>, step: Step) -> Step {
        let mut left = REQUEST_BUDGET;
        while let Some(work) = self.requester.works.pop_front() {
            // Work that succeeded before the error completes with success.
            let (status, length) = match work.progress {
                Progress::Ended(Status::Success) if !work.signaled => continue,
                Progress::Ended(Status::Success) => (Status::Success, work.response_length()),
                _ => (Status::Flushed, 0),
            };
            self.complete_send(cx, work.id, work.op, status, length);
        }
        if let Some(work) = self.requester.take_fetched() {
            self.complete_send(cx, work.id, Some(work.op), Status::Flushed, 0);
        }
        while self.requester.may_have_work() {
            if left == 0 {
                return Step::More;
            }
            left -= 1;
            let (id, op): (u64, Option<SendOp>) = match cx.host.next_send(self.number) {
                Fetched::Work(work) => (work.id, Some(work.op)),
                Fetched::Bad { id, .. } => (id, None),
                Fetched::Empty | Fetched::Broken => {
                    self.requester.clear_failure();
                    break;
                }
            };
            self.complete_send(cx, id, op, Status::Flushed, 0);
        }
        step
    }
}
