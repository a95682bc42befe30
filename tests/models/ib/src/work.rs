// SPDX-License-Identifier: MIT OR Apache-2.0

//! Work requests, decoded by the host from its queues, and completions, which the host encodes.

use smallvec::SmallVec;

use crate::packet::Gid;

/// A range of local memory: an entry of a scatter/gather list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// Local key.
    pub key: u32,
    /// First address, in the key's address space.
    pub address: u64,
    /// Length in bytes. 0 is an empty range, whose key is not checked.
    pub length: u32,
}

/// The data of a work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// In memory: gathered from (or, for reads and atomics, scattered to) these ranges in order.
    Memory(SmallVec<[Sge; 4]>),
    /// In the work request itself.
    Inline(Vec<u8>),
    /// Some of it in memory and some inline, in order. For sends and writes.
    Mixed(Vec<Segment>),
}

impl Payload {
    /// Returns this payload with another segment at its end.
    #[must_use]
    pub fn with(self, piece: Segment) -> Self {
        match (self, piece) {
            (Self::Memory(mut pieces), Segment::Memory(piece)) => {
                pieces.push(piece);
                Self::Memory(pieces)
            }
            (Self::Memory(pieces), Segment::Inline(bytes)) if pieces.is_empty() => Self::Inline(bytes),
            (Self::Inline(mut bytes), Segment::Inline(more)) => {
                bytes.extend(more);
                Self::Inline(bytes)
            }
            (Self::Memory(pieces), piece) => {
                Self::Mixed(pieces.into_iter().map(Segment::Memory).chain([piece]).collect())
            }
            (Self::Inline(bytes), piece) => Self::Mixed(vec![Segment::Inline(bytes), piece]),
            (Self::Mixed(mut pieces), piece) => {
                pieces.push(piece);
                Self::Mixed(pieces)
            }
        }
    }
}

/// A part of [`Payload::Mixed`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// In memory.
    Memory(Sge),
    /// In the work request itself.
    Inline(Vec<u8>),
}

impl Segment {
    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Memory(piece) => piece.length.into(),
            Self::Inline(bytes) => bytes.len() as u64,
        }
    }
}

/// Memory of the remote side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// First address, in the key's address space.
    pub address: u64,
    /// Remote key.
    pub key: u32,
}

/// The operation of a send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp {
    /// SEND: a message to a receive of the remote side.
    Send {
        /// Immediate data.
        imm: Option<u32>,
    },
    /// SEND with invalidate: the remote side then invalidates its key.
    SendInvalidate {
        /// The remote key.
        key: u32,
    },
    /// RDMA WRITE; with immediate data it also takes a receive of the remote side.
    Write {
        /// The target.
        remote: Remote,
        /// Immediate data.
        imm: Option<u32>,
    },
    /// Data from the remote side's memory, as many bytes as the payload has space for.
    Read {
        /// The source.
        remote: Remote,
    },
    /// Compare and swap of 8 remote bytes: they become `swap` if they are `compare`. The payload receives the old value.
    CompareSwap {
        /// The 8 bytes; aligned.
        remote: Remote,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Fetch and add on 8 remote bytes. The payload receives the old value.
    FetchAdd {
        /// The 8 bytes; aligned.
        remote: Remote,
        /// Number to add.
        add: u64,
    },
    /// Work that the host does itself, in order, by [`Host::local`](crate::Host::local): registration or
    /// invalidation of a key, or nothing.
    Local,
}

/// The work that a send work request waits for before it starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fence {
    /// Nothing.
    #[default]
    None,
    /// All earlier reads and atomics of the queue (the fence of verbs).
    Reads,
    /// All earlier work of the queue.
    All,
}

/// Flags of a send work request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendFlags {
    /// Signaled: success makes a completion. An error always does.
    pub signaled: bool,
    /// The remote side's completion is a solicited event.
    pub solicited: bool,
    /// The work to wait for.
    pub fence: Fence,
}

/// Fields of a global route header that a sender chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grh {
    /// Index of the source in the port's table of GIDs.
    pub sgid_index: u16,
    /// Destination.
    pub dgid: Gid,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
}

/// A path through the subnet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// LID of the destination port, or of a multicast group.
    pub dlid: u16,
    /// Added to the port's base LID to make the source LID.
    pub path_bits: u8,
    /// Service level, 4 bits.
    pub sl: u8,
    /// Global route header, if one is to be sent.
    pub grh: Option<Grh>,
}

/// The destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressVector {
    /// The path to the destination.
    pub path: Path,
    /// The queue pair there; 0xffffff for a multicast group.
    pub qpn: u32,
    /// Q_Key; with its highest bit set, the sending queue pair's own is sent instead.
    pub qkey: u32,
}

/// A work request of a send queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendWork {
    /// The host's id of the request (such as the index of its first queue slot), which the completion has.
    pub id: u64,
    /// The requested operation.
    pub op: SendOp,
    /// Flags.
    pub flags: SendFlags,
    /// Local data; ignored for [`SendOp::Local`].
    pub payload: Payload,
    /// Datagram services: the destination.
    pub to: Option<AddressVector>,
    /// XRC: number of the remote shared receive queue.
    pub remote_srqn: u32,
}

/// A receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Queue {
    /// The receive queue of a queue pair, by the pair's number.
    Own(u32),
    /// A shared receive queue, by its number.
    Shared(u32),
}

/// A work request of a receive queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceiveWork {
    /// The host's id of the request, which the completion has.
    pub id: u64,
    /// The target of the message.
    pub pieces: SmallVec<[Sge; 4]>,
    /// Number of requests left in the queue without this one. Used for shared queues' limit only.
    pub left: u32,
}

/// The status of a completion, as in verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// As requested.
    Success,
    /// Local length error: a message longer than the receive, or a work request longer than allowed.
    LocalLength,
    /// Local queue pair operation error: the work request is invalid.
    LocalQpOperation,
    /// Local protection error: a local key does not allow the access.
    LocalProtection,
    /// Flushed: the queue pair is in the error state.
    Flushed,
    /// A memory window could not be bound.
    MwBind,
    /// Bad response error: a response that does not fit the request.
    BadResponse,
    /// Local access error: a remote write with immediate data failed on the receiving side.
    LocalAccess,
    /// Remote invalid request error.
    RemoteInvalidRequest,
    /// Remote access error: the remote key does not allow the access.
    RemoteAccess,
    /// Remote operation error.
    RemoteOperation,
    /// Transport retry counter exceeded: no acknowledgement.
    RetryExceeded,
    /// RNR retry counter exceeded: the remote side had no receive.
    RnrRetryExceeded,
}

/// The content of a receive completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// A message.
    Send,
    /// A message with immediate data.
    SendImm(u32),
    /// A message, after which this key of this side was invalidated.
    SendInvalidate(u32),
    /// The immediate data of a remote write.
    WriteImm(u32),
}

/// The source of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdSource {
    /// Sending queue pair.
    pub qpn: u32,
    /// LID of the sending port.
    pub lid: u16,
    /// Service level.
    pub sl: u8,
    /// Low bits of the destination LID, above this port's base LID.
    pub path_bits: u8,
    /// The first 40 bytes of the buffer hold a global route header.
    pub grh: bool,
    /// Index of the packet's P_Key in this port's table.
    pub pkey_index: u16,
    /// The packet was sent to a multicast group.
    pub multicast: bool,
}

/// The completion of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// Of a send queue. Completions of one queue are in the queue's order.
    Send {
        /// The queue pair.
        qpn: u32,
        /// The completion queue.
        cqn: u32,
        /// As in [`SendWork::id`].
        id: u64,
        /// The requested operation; `None` if it could not be decoded.
        op: Option<SendOp>,
        /// The status.
        status: Status,
        /// Bytes that a read or an atomic returned.
        length: u32,
    },
    /// Of a receive queue. Completions of a queue pair's own receive queue are in the queue's order.
    Receive {
        /// The queue pair that received.
        qpn: u32,
        /// The completion queue: the queue pair's, or an XRC receive queue's.
        cqn: u32,
        /// The queue that the work request was taken from.
        queue: Queue,
        /// As in [`ReceiveWork::id`].
        id: u64,
        /// The status; the following fields are valid on success only.
        status: Status,
        /// Bytes received (for datagrams with the 40 bytes for a global route header; for a write with immediate data,
        /// the bytes written).
        length: u32,
        /// The content.
        what: Received,
        /// The sender requested a solicited event.
        solicited: bool,
        /// Datagram services: the source.
        source: Option<UdSource>,
    },
}
