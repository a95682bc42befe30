// SPDX-License-Identifier: MIT OR Apache-2.0

//! The transport of one adapter: its queue pairs, and what happens to them.

use std::time::Duration;

use serde::Serialize;

use crate::attributes::{Modify, ModifyError, PortAttributes, QpConfig, QpView, SrqConfig};
use crate::fabric::Burst;
use crate::host::Host;
use crate::packet::Gid;

/// What [`Engine::run`] has left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// More at once: look at the inbox without waiting, and call it again.
    More,
    /// Something at this time, on the clock of [`Host::now`].
    At(Duration),
    /// Nothing until something happens.
    Idle,
}

/// What the transport has done, since the engine was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Packets sent.
    pub packets_sent: u64,
    /// Packets received.
    pub packets_received: u64,
    /// Payload bytes sent, retransmissions included.
    pub bytes_sent: u64,
    /// Payload bytes received and accepted.
    pub bytes_received: u64,
    /// Packets sent again.
    pub retransmissions: u64,
    /// Acknowledgement timers that ran out.
    pub timeouts: u64,
    /// Sequence error NAKs sent.
    pub sequence_naks_sent: u64,
    /// Sequence error NAKs received.
    pub sequence_naks_received: u64,
    /// Receiver-not-ready NAKs sent.
    pub rnr_naks_sent: u64,
    /// Receiver-not-ready NAKs received.
    pub rnr_naks_received: u64,
    /// Requests that had arrived before.
    pub duplicates: u64,
    /// Requests refused as invalid.
    pub invalid_requests: u64,
    /// Requests refused for their access rights.
    pub remote_access_errors: u64,
    /// Requests that failed here.
    pub remote_operation_errors: u64,
    /// Accesses that waited for a page.
    pub page_faults: u64,
    /// Datagrams dropped for want of a receive.
    pub datagrams_dropped: u64,
    /// Packets dropped for a wrong P_Key.
    pub pkey_violations: u64,
    /// Packets dropped for a wrong Q_Key.
    pub qkey_violations: u64,
    /// Packets dropped for other reasons: no such queue pair, wrong state, malformed.
    pub packets_dropped: u64,
    /// Completions other than success, flushes not counted.
    pub error_completions: u64,
    /// Work requests flushed.
    pub flushed: u64,
}

/// The transport of one adapter.
///
/// Only [`packets`](Self::packets), [`modify`](Self::modify) and [`run`](Self::run) call the host; the other methods
/// note what happened, and `run` acts on it.
#[derive(Debug, Default)]
pub struct Engine {}

#[allow(unused_variables)]
impl Engine {
    /// An engine without queue pairs.
    pub fn new(port: PortAttributes) -> Self {
        todo!("the engine")
    }

    /// Changes what the engine knows of its port.
    pub fn set_port(&mut self, port: PortAttributes) {
        todo!("the engine")
    }

    /// Makes a queue pair, in the state RESET. Numbers 0 and 1 and those above 0xfffffe cannot be given.
    ///
    /// # Errors
    ///
    /// The number is in use or out of range, or there is no such shared receive queue.
    pub fn create_qp(&mut self, qpn: u32, config: QpConfig) -> Result<(), ModifyError> {
        todo!("the engine")
    }

    /// Changes attributes and state of a queue pair. Going to ERR flushes its work (in [`run`](Self::run)), going to RESET
    /// forgets it without completions.
    ///
    /// # Errors
    ///
    /// Why the change is refused; then nothing was changed.
    pub fn modify(&mut self, host: &mut dyn Host, qpn: u32, change: &Modify) -> Result<(), ModifyError> {
        todo!("the engine")
    }

    /// A queue pair's state and attributes.
    pub fn query(&self, qpn: u32) -> Option<QpView> {
        todo!("the engine")
    }

    /// Ends a queue pair. Its work makes no completions any more.
    ///
    /// # Errors
    ///
    /// There is none of this number.
    pub fn destroy_qp(&mut self, qpn: u32) -> Result<(), ModifyError> {
        todo!("the engine")
    }

    /// Makes a shared receive queue.
    ///
    /// # Errors
    ///
    /// The number is in use.
    pub fn create_srq(&mut self, srqn: u32, config: SrqConfig) -> Result<(), ModifyError> {
        todo!("the engine")
    }

    /// Sets the limit of a shared receive queue: the event comes once, when a request is taken and fewer are left.
    ///
    /// # Errors
    ///
    /// There is none of this number.
    pub fn arm_srq(&mut self, srqn: u32, limit: u32) -> Result<(), ModifyError> {
        todo!("the engine")
    }

    /// The limit of a shared receive queue; 0 if it is off.
    pub fn srq_limit(&self, srqn: u32) -> Option<u32> {
        todo!("the engine")
    }

    /// Ends a shared receive queue.
    ///
    /// # Errors
    ///
    /// There is none of this number, or a queue pair uses it.
    pub fn destroy_srq(&mut self, srqn: u32) -> Result<(), ModifyError> {
        todo!("the engine")
    }

    /// A datagram queue pair receives what is sent to a multicast group. (Its port joins the group by subnet
    /// administration.)
    ///
    /// # Errors
    ///
    /// There is no such queue pair.
    pub fn attach(&mut self, qpn: u32, group: Gid) -> Result<(), ModifyError> {
        todo!("the engine")
    }

    /// Ends what [`attach`](Self::attach) began.
    ///
    /// # Errors
    ///
    /// It is not attached.
    pub fn detach(&mut self, qpn: u32, group: Gid) -> Result<(), ModifyError> {
        todo!("the engine")
    }

    /// There is work in a send queue. Unknown numbers are ignored.
    pub fn doorbell(&mut self, qpn: u32) {
        todo!("the engine")
    }

    /// Packets arrived.
    pub fn packets(&mut self, host: &mut dyn Host, burst: Burst) {
        todo!("the engine")
    }

    /// Accesses that wait for this page are to be repeated, or (`ok` is false) fail. Unknown tokens are ignored.
    pub fn resume(&mut self, token: u64, ok: bool) {
        todo!("the engine")
    }

    /// There is room again on a way that had none.
    pub fn room(&mut self) {
        todo!("the engine")
    }

    /// Goes on with what there is to do, for a bounded time.
    pub fn run(&mut self, host: &mut dyn Host) -> Next {
        todo!("the engine")
    }

    /// What was done so far.
    pub fn counters(&self) -> Counters {
        todo!("the engine")
    }
}
