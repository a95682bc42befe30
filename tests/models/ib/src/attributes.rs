// SPDX-License-Identifier: MIT OR Apache-2.0

//! Attributes of queue pairs, shared receive queues and the port.

use crate::packet::Gid;
use crate::work::Path;

/// Path MTU: the maximum payload of a packet.
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
    /// Converts from the encoding of headers and verbs: 1 (256 bytes) to 5 (4096 bytes).
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

    /// Returns the encoding of headers and verbs.
    pub const fn code(self) -> u8 {
        self as u8 + 1
    }

    /// Returns the MTU in bytes.
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
    /// The general services interface (GSI), queue pair 1: management datagrams. One per port. The queue pair receives
    /// the packets to queue pair 1, whatever its own number is.
    Gsi,
    /// Extended reliable connection, as initiator, target or both.
    Xrc,
}

/// Source of a queue pair's receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReceiveFrom {
    /// No receive queue. A message that needs a receive is an error, except for XRC, where each message names a shared
    /// receive queue.
    None,
    /// The queue pair's own receive queue.
    Own,
    /// The shared receive queue with this number.
    Shared(u32),
}

/// Parameters of a new queue pair.
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
    /// Source of receives.
    pub receive: ReceiveFrom,
    /// XRC domain: messages may name the shared receive queues of this domain.
    pub xrcd: u32,
    /// The source queue pair in datagrams, instead of the queue pair's own number (for helpers of queue pair 1).
    pub source_qpn: Option<u32>,
    /// Blocks multicast loopback: the queue pair does not receive its own multicast packets. Other queue pairs on the
    /// port do.
    pub deaf_to_itself: bool,
}

/// Parameters of a new shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqConfig {
    /// Protection domain of the buffers.
    pub pd: u32,
    /// XRC domain and completion queue, for XRC.
    pub xrc: Option<(u32, u32)>,
    /// The limit event is raised when fewer requests remain. 0 disarms the limit.
    pub limit: u32,
}

/// State of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum State {
    /// RESET: the queue pair is inactive. All earlier work requests were discarded.
    #[default]
    Reset,
    /// INIT: receives may be posted.
    Init,
    /// RTR: ready to receive.
    Rtr,
    /// RTS: ready to send.
    Rts,
    /// SQD: the send queue is being drained, or is drained.
    Sqd,
    /// SQE: the send queue failed (not for reliable services). The receive queue still works.
    Sqe,
    /// ERR: all work requests are flushed.
    Err,
}

/// Operations that the remote queue pair may request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessFlags {
    /// RDMA WRITE.
    pub write: bool,
    /// RDMA READ.
    pub read: bool,
    /// Atomic operations.
    pub atomic: bool,
}

/// A modification of a queue pair. `None` keeps an attribute unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Modify {
    /// New state.
    pub state: Option<State>,
    /// Operations that the remote queue pair may request.
    pub access: Option<AccessFlags>,
    /// Index into the port's P_Key table.
    pub pkey_index: Option<u16>,
    /// Q_Key that received datagrams must carry.
    pub qkey: Option<u32>,
    /// Path MTU.
    pub mtu: Option<Mtu>,
    /// First expected packet sequence number, 24 bits.
    pub receive_psn: Option<u32>,
    /// First packet sequence number to send, 24 bits.
    pub send_psn: Option<u32>,
    /// Remote queue pair.
    pub remote_qpn: Option<u32>,
    /// Path to the remote queue pair.
    pub path: Option<Path>,
    /// Code of the minimum RNR NAK timer, 0 to 31: the time that the remote node waits after an RNR NAK.
    pub min_rnr_timer: Option<u8>,
    /// RNR retry count, 0 to 7. 7 means unlimited retries.
    pub rnr_retry: Option<u8>,
    /// Retry count for missing acknowledgements, 0 to 7.
    pub retry_count: Option<u8>,
    /// Code of the acknowledgement timeout, 0 to 31: 4.096 us times 2 to the power of the code. 0 disables the timeout.
    pub ack_timeout: Option<u8>,
    /// Maximum number of outstanding READs and atomic operations as requester.
    pub max_initiated: Option<u8>,
    /// Maximum number of outstanding READs and atomic operations as responder. The responder executes them one at a
    /// time, and keeps the results of this number of atomic operations (at least 16) for duplicate requests.
    pub max_served: Option<u8>,
    /// On the transition to SQD: raise [`Event::SendQueueDrained`](crate::Event::SendQueueDrained).
    pub drained_event: bool,
}

/// The reason for which a change was rejected. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModifyError {
    /// No queue pair or shared receive queue with this number.
    #[error("no queue pair or shared receive queue with this number")]
    NoQueue,
    /// The number is in use, the port already has a general services interface, or the queue pair is already attached
    /// to the group.
    #[error("the number, the general services interface or the group membership is in use")]
    InUse,
    /// The state machine does not allow the transition.
    #[error("a queue pair cannot go from {from:?} to {to:?}")]
    Transition {
        /// Current state.
        from: State,
        /// Requested state.
        to: State,
    },
    /// An attribute is out of range.
    #[error("attribute out of range: {0}")]
    Range(&'static str),
    /// A queue pair uses the shared receive queue.
    #[error("a queue pair uses the shared receive queue")]
    Busy,
}

/// State and attributes of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpAttributes {
    /// State.
    pub state: State,
    /// In SQD: the send queue is not drained yet.
    pub draining: bool,
    /// Next packet sequence number to send.
    pub send_psn: u32,
    /// Next expected packet sequence number.
    pub receive_psn: u32,
    /// Oldest unacknowledged packet sequence number.
    pub unacknowledged_psn: u32,
    /// Message sequence number: messages completed as responder.
    pub msn: u32,
    /// Operations that the remote queue pair may request.
    pub access: AccessFlags,
    /// Path to the remote queue pair, if set.
    pub path: Option<Path>,
    /// Remote queue pair.
    pub remote_qpn: u32,
    /// Q_Key.
    pub qkey: u32,
    /// Path MTU.
    pub mtu: Mtu,
}

/// Attributes of the port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortAttributes {
    /// Base LID; 0 until the subnet assigns one.
    pub lid: u16,
    /// LID mask control: number of low LID bits that select a path.
    pub lmc: u8,
    /// GID table. The first entry is the port's own GID.
    pub gids: Vec<Gid>,
    /// P_Key table. 0 is an invalid entry.
    pub pkeys: Vec<u16>,
}
