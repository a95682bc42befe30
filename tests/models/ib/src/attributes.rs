// SPDX-License-Identifier: MIT OR Apache-2.0

//! Attributes of queue pairs, shared receive queues and the port.

use crate::packet::Gid;
use crate::work::Path;

/// Path MTU: most payload bytes of a packet.
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
    /// The general services interface, queue pair 1: datagrams to and from managers. One per port; it gets what is sent to
    /// queue pair 1, whatever its own number.
    Gsi,
    /// Extended reliable connection, as initiator, target or both.
    Xrc,
}

/// Where a queue pair's receives come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReceiveFrom {
    /// Nowhere: it cannot receive messages (or is XRC, where each message names the queue).
    None,
    /// Its own receive queue.
    Own,
    /// A shared receive queue, by number.
    Shared(u32),
}

/// What a queue pair is created with.
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
    /// Where receives come from.
    pub receive: ReceiveFrom,
    /// XRC: the domain whose shared receive queues messages may name.
    pub xrcd: u32,
    /// Datagrams name this queue pair as their source (queue pair 1's helpers), in place of the real one.
    pub source_qpn: Option<u32>,
    /// What it sends to a multicast group it does not receive itself; others on its port do.
    pub deaf_to_itself: bool,
}

/// What a shared receive queue is created with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqConfig {
    /// Protection domain of its buffers.
    pub pd: u32,
    /// For XRC: the domain and the completion queue.
    pub xrc: Option<(u32, u32)>,
    /// The event is wanted when fewer requests are left; 0: never.
    pub limit: u32,
}

/// State of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum State {
    /// Nothing happens; all was forgotten.
    #[default]
    Reset,
    /// Receives may be posted.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send.
    Rts,
    /// The send queue comes to rest, or has.
    Sqd,
    /// The send queue failed (not on reliable services); receiving goes on.
    Sqe,
    /// Everything is flushed.
    Err,
}

/// What the other side of a connection may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessFlags {
    /// Write.
    pub write: bool,
    /// Read.
    pub read: bool,
    /// Atomics.
    pub atomic: bool,
}

/// A change of a queue pair: what is `None` stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Modify {
    /// New state.
    pub state: Option<State>,
    /// What the other side may do.
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
    /// Queue pair on the other side.
    pub remote_qpn: Option<u32>,
    /// The way to the other side.
    pub path: Option<Path>,
    /// Code of the shortest time that the other side is told to wait when there is no receive, 0 to 31.
    pub min_rnr_timer: Option<u8>,
    /// How often to try again when the other side has no receive, 0 to 7; 7: without end.
    pub rnr_retry: Option<u8>,
    /// How often to try again without acknowledgement, 0 to 7.
    pub retry_count: Option<u8>,
    /// Code of the time to wait for an acknowledgement, 0 to 31: 4.096 us times 2 to the power of it; 0: without end.
    pub ack_timeout: Option<u8>,
    /// Reads and atomics of this side that may be outstanding.
    pub max_initiated: Option<u8>,
    /// Reads and atomics of the other side that may be outstanding. They are served one after the other; the results of
    /// this many atomics (and of 16 at least) are kept for repetitions.
    pub max_served: Option<u8>,
    /// Going to SQD: [`Event::SendQueueDrained`](crate::Event::SendQueueDrained) is wanted.
    pub drained_event: bool,
}

/// Why a change was refused. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModifyError {
    /// No queue pair or shared receive queue of this number.
    #[error("no queue pair or shared receive queue with this number")]
    NoQueue,
    /// The number is in use.
    #[error("the number of the queue is in use")]
    InUse,
    /// The state cannot follow the present one.
    #[error("a queue pair cannot go from {from:?} to {to:?}")]
    Transition {
        /// Present state.
        from: State,
        /// State asked for.
        to: State,
    },
    /// A value is outside of its range.
    #[error("attribute out of range: {0}")]
    Range(&'static str),
    /// A queue pair uses the shared receive queue.
    #[error("a queue pair uses the shared receive queue")]
    Busy,
}

/// A queue pair as a query shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpAttributes {
    /// State.
    pub state: State,
    /// In SQD: the send queue has not come to rest yet.
    pub draining: bool,
    /// Next packet sequence number sent.
    pub send_psn: u32,
    /// Next packet sequence number expected.
    pub receive_psn: u32,
    /// Oldest packet sequence number sent and not acknowledged.
    pub unacknowledged_psn: u32,
    /// Message sequence number: messages completed as responder.
    pub msn: u32,
    /// What the other side may do.
    pub access: AccessFlags,
    /// The way to the other side, once known.
    pub path: Option<Path>,
    /// Queue pair on the other side.
    pub remote_qpn: u32,
    /// Q_Key.
    pub qkey: u32,
    /// Path MTU.
    pub mtu: Mtu,
}

/// What the engine has to know of its port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortAttributes {
    /// Base LID; 0 until the subnet gave one.
    pub lid: u16,
    /// Number of low bits of the LID that name paths.
    pub lmc: u8,
    /// GIDs; the first is the port's own.
    pub gids: Vec<Gid>,
    /// P_Keys; 0 is an invalid entry.
    pub pkeys: Vec<u16>,
}
