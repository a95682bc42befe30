// SPDX-License-Identifier: MIT OR Apache-2.0

//! The error states: work that was begun and work that is still in the queues ends, unfinished and in order.

use std::time::Duration;

use super::Context;
use super::qp::{Qp, Step};
use super::requester::Progress;
use crate::attributes::{ReceiveFrom, Service};
use crate::host::{Event, Fetched};
use crate::work::{Queue, ReceiveWork, Received, SendOp, Status};

/// Work requests flushed in one step and direction.
const TURN_WORKS: usize = 64;
/// The time until a queue pair in the error state is first checked for new receives, which cause no event. The time doubles
/// each time that there is none.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// The longest time between two looks.
const LOOK_AT_LEAST: Duration = Duration::from_millis(16);

impl Qp {
    /// A step in the error state.
    pub(super) fn flush(&mut self, cx: &mut Context<'_>) -> Step {
        let mut step = self.flush_send(cx, Step::Blocked);
        if let Some(receive) = self.responder.receive.take() {
            self.complete_receive(cx, &receive, Status::Flushed, Received::Send, false, None);
        }
        if self.config.receive == ReceiveFrom::Own && self.config.service != Service::Xrc {
            let mut wait = (self.flush_wait * 2).clamp(LOOK_AGAIN, LOOK_AT_LEAST);
            for left in (0..TURN_WORKS).rev() {
                let work = match cx.host.next_receive(Queue::Own(self.number)) {
                    Fetched::Work(work) => work,
                    Fetched::Bad { id, .. } => ReceiveWork {
                        id,
                        pieces: Default::default(),
                        left: 0,
                    },
                    Fetched::Empty | Fetched::Broken => break,
                };
                wait = LOOK_AGAIN;
                let receive = self.own_receive(work);
                self.complete_receive(cx, &receive, Status::Flushed, Received::Send, false, None);
                if left == 0 {
                    step = Step::More;
                }
            }
            self.flush_wait = wait;
            self.flush_again = Some(cx.now() + wait);
        }
        if step == Step::Blocked && !self.last_work_told {
            self.last_work_told = true;
            if self.shares_receives() {
                cx.host.event(Event::LastWorkReached { qpn: self.number });
            }
        }
        step
    }

    /// Flushes the send queue, in the error states.
    pub(super) fn flush_send(&mut self, cx: &mut Context<'_>, step: Step) -> Step {
        let mut left = TURN_WORKS;
        while let Some(work) = self.requester.works.pop_front() {
            // What had succeeded before stays a success.
            let (status, length) = match work.progress {
                Progress::Ended(Status::Success) if !work.signaled => continue,
                Progress::Ended(Status::Success) => (Status::Success, work.answered_length()),
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
