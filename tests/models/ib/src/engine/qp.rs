// SPDX-License-Identifier: MIT OR Apache-2.0

//! Queue pairs: attributes, state machine, and the template of outgoing packets.

use std::sync::Arc;
use std::time::Duration;

use tracing::debug;

use super::Context;
use super::requester::Requester;
use super::responder::Responder;
use crate::attributes::{
    AccessFlags, Modify, ModifyError, Mtu, PortAttributes, QpAttributes, QpConfig, ReceiveFrom, Service, State,
};
use crate::host::{Event, Fault};
use crate::packet::{Extended, Gid, GlobalRoute, Packet, Slice, service};
use crate::psn;
use crate::work::{Grh, Path, Status};

/// The queue pair that receives management datagrams.
pub(super) const GSI_QPN: u32 = 1;

/// Result of a step of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The queue pair can do more work now.
    More,
    /// The queue pair waits for an event.
    Blocked,
}

/// Page fault state of the memory accesses in one direction of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PageWait {
    /// No page fault.
    #[default]
    None,
    /// An access waits for a page. The value is the token of the page fault.
    Pending(u64),
    /// The page cannot be provided. The repeated access fails.
    Failed,
}

impl PageWait {
    pub(super) fn is_pending(self) -> bool {
        matches!(self, PageWait::Pending(_))
    }

    fn resume(&mut self, token: u64, ok: bool) {
        if *self == PageWait::Pending(token) {
            *self = if ok { PageWait::None } else { PageWait::Failed };
        }
    }

    /// Does an access, or fails it if its page cannot be provided. Records a page fault of the access.
    pub(super) fn access<T>(
        &mut self,
        cx: &mut Context<'_>,
        qpn: u32,
        access: impl FnOnce(&mut Context<'_>) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        if *self == PageWait::Failed {
            *self = PageWait::None;
            return Err(Fault::Rights);
        }
        let result = access(cx);
        if let Err(Fault::Page(token)) = result {
            *self = PageWait::Pending(token);
            cx.shared.wait_for_page(token, qpn);
        }
        result
    }
}

#[derive(Debug)]
pub(super) struct Qp {
    pub(super) number: u32,
    pub(super) config: QpConfig,
    pub(super) state: State,
    pub(super) access: AccessFlags,
    pub(super) pkey_index: u16,
    pub(super) qkey: u32,
    pub(super) mtu: Mtu,
    pub(super) remote_qpn: u32,
    pub(super) path: Option<Path>,
    /// The path's global route header, shared by all packets.
    route: Option<Arc<GlobalRoute>>,
    pub(super) min_rnr_timer: u8,
    pub(super) rnr_retry: u8,
    pub(super) retry_count: u8,
    pub(super) ack_timeout: u8,
    pub(super) max_initiated: u8,
    pub(super) max_served: u8,
    /// In SQD: raise an event when the send queue is drained.
    drained_event: bool,
    /// In SQD: the send queue is drained.
    drained: bool,
    /// A packet arrived in RTR.
    established: bool,
    /// The queue pair is in the engine's list of queue pairs with pending work.
    pub(super) scheduled: bool,
    /// The queue pair's entry in the engine's timers.
    pub(super) timer: Option<Duration>,
    /// In ERR: when to check for newly posted receives.
    pub(super) flush_at: Option<Duration>,
    /// In ERR: interval between the last check and the next.
    pub(super) flush_interval: Duration,
    /// In ERR: the flush is complete, and the last-work-reached event was raised if it applies.
    pub(super) last_work_reported: bool,
    pub(super) requester: Requester,
    pub(super) responder: Responder,
}

/// Builds a global route header from the sender's address attributes.
pub(super) fn route(port: &PortAttributes, grh: &Grh) -> GlobalRoute {
    GlobalRoute {
        flow_label: grh.flow_label & 0xf_ffff,
        traffic_class: grh.traffic_class,
        hop_limit: grh.hop_limit,
        sgid: port
            .gids
            .get(usize::from(grh.sgid_index))
            .copied()
            .unwrap_or(Gid([0; 16])),
        dgid: grh.dgid,
    }
}

impl Qp {
    pub(super) fn new(number: u32, config: QpConfig) -> Self {
        Self {
            number,
            config,
            state: State::Reset,
            access: AccessFlags::default(),
            pkey_index: 0,
            qkey: 0,
            mtu: Mtu::default(),
            remote_qpn: 0,
            path: None,
            route: None,
            min_rnr_timer: 0,
            rnr_retry: 0,
            retry_count: 0,
            ack_timeout: 0,
            max_initiated: 1,
            max_served: 1,
            drained_event: false,
            drained: false,
            established: false,
            scheduled: false,
            timer: None,
            flush_at: None,
            flush_interval: Duration::ZERO,
            last_work_reported: false,
            requester: Requester::default(),
            responder: Responder::default(),
        }
    }

    pub(super) fn is_reliable(&self) -> bool {
        matches!(self.config.service, Service::Rc | Service::Xrc)
    }

    pub(super) fn is_datagram(&self) -> bool {
        matches!(self.config.service, Service::Ud | Service::Gsi)
    }

    /// Returns whether the state allows the processing of requests.
    pub(super) fn receives(&self) -> bool {
        matches!(self.state, State::Rtr | State::Rts | State::Sqd | State::Sqe)
    }

    /// Returns whether the state allows the processing of responses and the completion of started work.
    pub(super) fn sends(&self) -> bool {
        matches!(self.state, State::Rts | State::Sqd)
    }

    pub(super) fn attributes(&self) -> QpAttributes {
        QpAttributes {
            state: self.state,
            draining: self.state == State::Sqd && !self.drained,
            send_psn: self.requester.next_psn(),
            receive_psn: self.responder.expected(),
            unacknowledged_psn: self.requester.unacknowledged(),
            msn: self.responder.msn(),
            access: self.access,
            path: self.path,
            remote_qpn: self.remote_qpn,
            qkey: self.qkey,
            mtu: self.mtu,
        }
    }

    /// Checks the state transition and the ranges of all attributes. The port's tables limit the indexes.
    fn check(&self, change: &Modify, port: &PortAttributes) -> Result<(), ModifyError> {
        use State::*;
        if let Some(to) = change.state {
            let allowed = matches!(
                (self.state, to),
                (_, Reset | Err) | (Reset | Init, Init) | (Init, Rtr) | (Rtr | Rts | Sqe | Sqd, Rts) | (Rts | Sqd, Sqd)
            );
            if !allowed {
                return Result::Err(ModifyError::Transition { from: self.state, to });
            }
        }
        let ranges = [
            ("PSN", change.send_psn.max(change.receive_psn), psn::MASK),
            ("queue pair", change.remote_qpn, psn::MASK),
            ("RNR timer", change.min_rnr_timer.map(u32::from), 31),
            ("RNR retries", change.rnr_retry.map(u32::from), 7),
            ("retries", change.retry_count.map(u32::from), 7),
            ("acknowledgement timeout", change.ack_timeout.map(u32::from), 31),
            ("service level", change.path.map(|path| u32::from(path.sl)), 15),
        ];
        for (name, value, max) in ranges {
            if value.is_some_and(|value| value > max) {
                return Result::Err(ModifyError::Range(name));
            }
        }
        let sgid_index = change.path.and_then(|path| path.grh).map(|grh| grh.sgid_index);
        for (name, index, entries) in [
            ("P_Key index", change.pkey_index, port.pkeys.len()),
            ("source GID index", sgid_index, port.gids.len()),
        ] {
            if index.is_some_and(|index| usize::from(index) >= entries) {
                return Result::Err(ModifyError::Range(name));
            }
        }
        Ok(())
    }

    pub(super) fn modify(&mut self, cx: &mut Context<'_>, change: &Modify) -> Result<(), ModifyError> {
        self.check(change, &cx.shared.port)?;
        if change.state == Some(State::Reset) {
            self.reset(cx);
            return Ok(());
        }
        macro_rules! take {
            ($($field:ident),*) => {$( if let Some(value) = change.$field { self.$field = value; } )*};
        }
        take!(
            access,
            pkey_index,
            qkey,
            mtu,
            remote_qpn,
            min_rnr_timer,
            rnr_retry,
            retry_count,
            ack_timeout
        );
        take!(max_initiated, max_served);
        if let Some(path) = change.path {
            self.path = Some(path);
            self.set_route(&cx.shared.port);
        }
        if let Some(psn) = change.receive_psn {
            self.responder.set_expected(psn);
        }
        if let Some(psn) = change.send_psn {
            self.requester.set_psn(psn);
        }
        if let Some(state) = change.state {
            debug!(qpn = self.number, from = ?self.state, to = ?state, "queue pair changes state");
            if state == State::Sqd && self.state != State::Sqd {
                self.drained = false;
            }
            if state == State::Sqd {
                self.drained_event = change.drained_event;
            }
            if state == State::Err {
                self.enter_error(cx);
            }
            self.state = state;
        }
        Ok(())
    }

    pub(super) fn set_route(&mut self, port: &PortAttributes) {
        self.route = self
            .path
            .and_then(|path| path.grh)
            .map(|grh| Arc::new(route(port, &grh)));
    }

    /// Resets the queue pair. Work requests are discarded without completions.
    fn reset(&mut self, cx: &mut Context<'_>) {
        self.responder.release(cx);
        let (number, config) = (self.number, self.config);
        let (scheduled, timer) = (self.scheduled, self.timer);
        *self = Self {
            scheduled,
            timer,
            ..Self::new(number, config)
        };
    }

    /// Enters the error state. Sending and receiving stop; the next steps flush the work requests.
    pub(super) fn enter_error(&mut self, cx: &mut Context<'_>) {
        if self.state == State::Err {
            return;
        }
        debug!(qpn = self.number, from = ?self.state, "queue pair enters the error state");
        self.state = State::Err;
        self.requester.stop();
        self.responder.stop(cx);
        self.last_work_reported = false;
        cx.shared.wake.push(self.number);
    }

    /// Enters the error state because of an error that no completion reports.
    pub(super) fn fatal(&mut self, cx: &mut Context<'_>) {
        if self.state != State::Err {
            cx.host.event(Event::QpFatal { qpn: self.number });
        }
        self.enter_error(cx);
    }

    /// Raises the communication-established event for the first packet in RTR.
    pub(super) fn note_arrival(&mut self, cx: &mut Context<'_>) {
        if self.state == State::Rtr && !self.established {
            self.established = true;
            if !self.is_datagram() {
                cx.host.event(Event::CommunicationEstablished { qpn: self.number });
            }
        }
    }

    pub(super) fn resume(&mut self, token: u64, ok: bool) {
        self.requester.read_wait.resume(token, ok);
        self.requester.write_wait.resume(token, ok);
        self.responder.page_wait.resume(token, ok);
    }

    /// Does a bounded amount of the pending work.
    pub(super) fn step(&mut self, cx: &mut Context<'_>) -> Step {
        if self.state == State::Err {
            return self.flush(cx);
        }
        let mut step = Step::Blocked;
        if self.receives() && self.step_responder(cx) == Step::More {
            step = Step::More;
        }
        if self.sends() {
            if self.step_responses(cx) == Step::More {
                step = Step::More;
            }
            if self.sends() && self.step_requester(cx) == Step::More {
                step = Step::More;
            }
        }
        if self.state == State::Sqe {
            step = self.flush_send(cx, step);
        }
        if self.state == State::Sqd && !self.drained && self.requester.is_idle() {
            self.drained = true;
            if self.drained_event {
                cx.host.event(Event::SendQueueDrained { qpn: self.number });
            }
        }
        step
    }

    /// Handles the expiry of the timer that [`deadline`](Self::deadline) returned.
    pub(super) fn on_timer(&mut self, cx: &mut Context<'_>, now: Duration) {
        if self.state == State::Err {
            if self.flush_at.is_some_and(|time| time <= now) {
                self.flush_at = None;
                cx.shared.wake.push(self.number);
            }
        } else if self.sends() {
            self.on_requester_timer(cx, now);
        }
    }

    /// Returns the time at which the queue pair must run again if no event arrives earlier.
    pub(super) fn deadline(&self) -> Option<Duration> {
        match self.state {
            State::Err => self.flush_at,
            _ if self.sends() => self.requester.deadline(),
            _ => None,
        }
    }

    /// Returns the P_Key of outgoing packets.
    pub(super) fn pkey(&self, port: &PortAttributes) -> u16 {
        port.pkeys.get(usize::from(self.pkey_index)).copied().unwrap_or(0)
    }

    /// Returns the service bits of the opcodes of outgoing packets.
    pub(super) fn opcode_service(&self) -> u8 {
        match self.config.service {
            Service::Rc => service::RC,
            Service::Uc => service::UC,
            Service::Ud | Service::Gsi => service::UD,
            Service::Xrc => service::XRC,
        }
    }

    /// Builds a packet to the remote queue pair.
    pub(super) fn packet(&self, port: &PortAttributes, operation: u8, psn: u32) -> Packet {
        let (dlid, sl, bits) = self.path.map_or((0, 0, 0), |path| (path.dlid, path.sl, path.path_bits));
        Packet {
            dlid,
            slid: port.lid.wrapping_add(bits.into()),
            sl,
            opcode: self.opcode_service() | operation,
            solicited: false,
            ack_request: false,
            pkey: self.pkey(port),
            dest_qpn: self.remote_qpn,
            psn,
            grh: self.route.clone(),
            extended: Extended::None,
            srqn: 0,
            imm: 0,
            payload: Slice::default(),
        }
    }

    /// Returns the LID of the remote port; 0 if no path is set.
    pub(super) fn dlid(&self) -> u16 {
        self.path.map_or(0, |path| path.dlid)
    }

    /// Returns the completion status for a failed access to local memory.
    pub(super) fn local_status(fault: Fault) -> Status {
        debug!(%fault, "local access failed");
        Status::LocalProtection
    }

    /// Returns whether receives come from a shared receive queue.
    pub(super) fn shares_receives(&self) -> bool {
        matches!(self.config.receive, ReceiveFrom::Shared(_)) || self.config.service == Service::Xrc
    }
}
