// SPDX-License-Identifier: MIT OR Apache-2.0

//! Attributes of queue pairs, shared receive queues and the port.

use crate::packet::Gid;
use crate::work::Path;

/// Path MTU: maximum payload of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mtu {
    /// 256 bytes.
    B256,
    /// 512 bytes.
    B512,
    /// 1024 bytes.
    B1024,
    /// 2048 bytes.
    B2048,
    /// 4096 bytes.
    #[default]
    B4096,
}

impl Mtu {
    /// From the code that headers and verbs use: 1 (256) to 5 (4096).
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::B256,
            2 => Self::B512,
            3 => Self::B1024,
            4 => Self::B2048,
            5 => Self::B4096,
            _ => return None,
        })
    }

    /// The code that headers and verbs use.
    pub const fn code(self) -> u8 {
        self as u8 + 1
    }

    /// Bytes.
    pub const fn bytes(self) -> u32 {
        256 << self as u8
    }
}

/// Transport service of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// The general services interface (GSI), queue pair 1: management datagrams. One per port. It receives packets to queue
    /// pair 1, whatever its own number is.
    Gsi,
    /// Extended reliable connection, as initiator, target or both.
    Xrc,
}

/// The source of a queue pair's receive work requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReceiveFrom {
    /// None: the queue pair cannot receive messages (or is XRC, where each message names the queue).
    None,
    /// Its own receive queue.
    Own,
    /// A shared receive queue, by number.
    Shared(u32),
}

/// Attributes for the creation of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpConfig {
    /// Transport service.
    pub service: Service,
    /// Protection domain.
    pub pd: u32,
    /// Completion queue of the send queue.
    pub send_cqn: u32,
    /// Completion queue of the receive queue.
    pub receive_cqn: u32,
    /// The source of receive work requests.
    pub receive: ReceiveFrom,
    /// XRC: the domain whose shared receive queues messages may name.
    pub xrcd: u32,
    /// The source queue pair in datagrams, instead of the real one (for helpers of queue pair 1).
    pub source_qpn: Option<u32>,
    /// The queue pair does not receive its own multicast packets; other queue pairs of its port do.
    pub deaf_to_itself: bool,
}

/// Attributes for the creation of a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqConfig {
    /// Protection domain of its buffers.
    pub pd: u32,
    /// For XRC: the domain and the completion queue.
    pub xrc: Option<(u32, u32)>,
    /// Limit event: reported when fewer work requests are left; 0: never.
    pub limit: u32,
}

/// State of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum State {
    /// No work is processed; all earlier work was dropped.
    #[default]
    Reset,
    /// Receives may be posted.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send.
    Rts,
    /// The send queue is being drained, or is drained.
    Sqd,
    /// The send queue failed (not for reliable services); the receive queue still works.
    Sqe,
    /// Everything is flushed.
    Err,
}

/// The access that the remote side of a connection has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessFlags {
    /// Write.
    pub write: bool,
    /// Read.
    pub read: bool,
    /// Atomics.
    pub atomic: bool,
}

/// A change of a queue pair. Attributes that are `None` stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Modify {
    /// New state.
    pub state: Option<State>,
    /// Access of the remote side.
    pub access: Option<AccessFlags>,
    /// Index into the port's table of P_Keys.
    pub pkey_index: Option<u16>,
    /// Q_Key that datagrams have to carry.
    pub qkey: Option<u32>,
    /// Path MTU.
    pub mtu: Option<Mtu>,
    /// First packet sequence number expected, 24 bits.
    pub receive_psn: Option<u32>,
    /// First packet sequence number sent, 24 bits.
    pub send_psn: Option<u32>,
    /// Remote queue pair.
    pub remote_qpn: Option<u32>,
    /// The path to the remote queue pair.
    pub path: Option<Path>,
    /// Code of the minimum RNR NAK timer, 0 to 31: how long the remote side waits if there is no receive.
    pub min_rnr_timer: Option<u8>,
    /// Retries after an RNR NAK, 0 to 7; 7: without a limit.
    pub rnr_retry: Option<u8>,
    /// Retries without an acknowledgement, 0 to 7.
    pub retry_count: Option<u8>,
    /// Code of the acknowledgement timeout, 0 to 31: 4.096 us times 2 to the power of the code; 0: without a limit.
    pub ack_timeout: Option<u8>,
    /// Maximum outstanding reads and atomics as requester.
    pub max_initiated: Option<u8>,
    /// Maximum outstanding reads and atomics as responder. They are processed one after the other. The results of this many
    /// atomics (at least 16) are kept for duplicate requests.
    pub max_served: Option<u8>,
    /// With a change to SQD: requests [`Event::SendQueueDrained`](crate::Event::SendQueueDrained).
    pub drained_event: bool,
}

/// The reason why a change was refused. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModifyError {
    /// No queue pair or shared receive queue of this number.
    #[error("no queue of this number")]
    NoQueue,
    /// The number is in use.
    #[error("the number is in use")]
    InUse,
    /// The present state does not allow this change.
    #[error("a queue pair cannot go from {from:?} to {to:?}")]
    Transition {
        /// Present state.
        from: State,
        /// The requested state.
        to: State,
    },
    /// A value is outside of its range.
    #[error("attribute out of range: {0}")]
    Range(&'static str),
    /// A queue pair uses the shared receive queue.
    #[error("queue pairs use the shared receive queue")]
    Busy,
}

/// The attributes of a queue pair in a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpView {
    /// State.
    pub state: State,
    /// In SQD: the send queue is not drained yet.
    pub draining: bool,
    /// Next packet sequence number sent.
    pub send_psn: u32,
    /// Next packet sequence number expected.
    pub receive_psn: u32,
    /// Oldest packet sequence number sent and not acknowledged.
    pub unacknowledged_psn: u32,
    /// Message sequence number: messages completed as responder.
    pub msn: u32,
    /// Access of the remote side.
    pub access: AccessFlags,
    /// The path to the remote queue pair, once known.
    pub path: Option<Path>,
    /// Remote queue pair.
    pub remote_qpn: u32,
    /// Q_Key.
    pub qkey: u32,
    /// Path MTU.
    pub mtu: Mtu,
}

/// Attributes of the engine's port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortAttributes {
    /// Base LID; 0 until the subnet assigns one.
    pub lid: u16,
    /// LMC: number of low bits of the LID that select paths.
    pub lmc: u8,
    /// GIDs; the first is the port's own.
    pub gids: Vec<Gid>,
    /// P_Keys; 0 is an invalid entry.
    pub pkeys: Vec<u16>,
}
