// SPDX-License-Identifier: MIT OR Apache-2.0

//! Work requests as the host decodes them from its queues, and completions that the host encodes.

use smallvec::SmallVec;

use crate::packet::Gid;

/// A range of local memory: an entry of a scatter/gather list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// Local key.
    pub key: u32,
    /// First address, in the key's address space.
    pub address: u64,
    /// Length in bytes. The key of an empty range is not checked.
    pub length: u32,
}

/// The local data of a work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// In memory: gathered from these entries, or scattered to them for READ and atomic operations, in order.
    Memory(SmallVec<[Sge; 4]>),
    /// In the work request itself (inline data).
    Inline(Vec<u8>),
    /// Memory and inline data, concatenated in order. For SEND and WRITE.
    Mixed(Vec<Segment>),
}

impl Payload {
    /// Returns this payload with another segment at its end.
    #[must_use]
    pub fn with(self, segment: Segment) -> Self {
        match (self, segment) {
            (Self::Memory(mut sges), Segment::Memory(sge)) => {
                sges.push(sge);
                Self::Memory(sges)
            }
            (Self::Memory(sges), Segment::Inline(bytes)) if sges.is_empty() => Self::Inline(bytes),
            (Self::Inline(mut bytes), Segment::Inline(more)) => {
                bytes.extend(more);
                Self::Inline(bytes)
            }
            (Self::Memory(sges), segment) => {
                Self::Mixed(sges.into_iter().map(Segment::Memory).chain([segment]).collect())
            }
            (Self::Inline(bytes), segment) => Self::Mixed(vec![Segment::Inline(bytes), segment]),
            (Self::Mixed(mut segments), segment) => {
                segments.push(segment);
                Self::Mixed(segments)
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
            Self::Memory(sge) => sge.length.into(),
            Self::Inline(bytes) => bytes.len() as u64,
        }
    }
}

/// Memory of the remote node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// First address, in the key's address space.
    pub address: u64,
    /// Remote key.
    pub key: u32,
}

/// Operation of a send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp {
    /// SEND: a message into a receive of the remote node.
    Send {
        /// Immediate data.
        imm: Option<u32>,
    },
    /// SEND with invalidate: after the message, the remote node invalidates its key.
    SendInvalidate {
        /// The remote key.
        key: u32,
    },
    /// RDMA WRITE. With immediate data, the WRITE also consumes a receive of the remote node.
    Write {
        /// Destination.
        remote: Remote,
        /// Immediate data.
        imm: Option<u32>,
    },
    /// RDMA READ of as many bytes as the payload describes.
    Read {
        /// Source.
        remote: Remote,
    },
    /// Compare and swap: replaces 8 remote bytes with `swap` if they equal `compare`. The payload receives the original
    /// value.
    CompareSwap {
        /// The 8 bytes, aligned.
        remote: Remote,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Fetch and add: adds `add` to 8 remote bytes. The payload receives the original value.
    FetchAdd {
        /// The 8 bytes, aligned.
        remote: Remote,
        /// Number to add.
        add: u64,
    },
    /// A local operation, which the host executes in order with [`Host::local`](crate::Host::local): registration or
    /// invalidation of a key, or no operation.
    Local,
}

/// Earlier work that a send work request waits for before it starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fence {
    /// No work.
    #[default]
    None,
    /// All earlier READs and atomic operations of the queue (the fence of the verbs).
    Reads,
    /// All earlier work requests of the queue.
    All,
}

/// Flags of a send work request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendFlags {
    /// Signaled: success generates a completion. A failure always generates one.
    pub signaled: bool,
    /// The completion of the remote node is a solicited event.
    pub solicited: bool,
    /// Earlier work to wait for.
    pub fence: Fence,
}

/// Fields of the global route header that the sender chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grh {
    /// Index of the source GID in the port's GID table.
    pub sgid_index: u16,
    /// Destination GID.
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
    /// LID of the destination port or of a multicast group.
    pub dlid: u16,
    /// Added to the port's base LID to form the source LID.
    pub path_bits: u8,
    /// Service level, 4 bits.
    pub sl: u8,
    /// Global route header, if packets carry one.
    pub grh: Option<Grh>,
}

/// Destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressVector {
    /// Path to the destination port.
    pub path: Path,
    /// Destination queue pair; 0xffffff for a multicast group.
    pub qpn: u32,
    /// Q_Key. If the most significant bit is set, the packet carries the Q_Key of the sending queue pair instead.
    pub qkey: u32,
}

/// A work request of a send queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendWork {
    /// The host's identifier of the request, such as the index of its first queue slot. The completion returns the
    /// identifier.
    pub id: u64,
    /// Operation.
    pub op: SendOp,
    /// Flags.
    pub flags: SendFlags,
    /// Local data; ignored for [`SendOp::Local`].
    pub payload: Payload,
    /// Destination, for datagram services.
    pub to: Option<AddressVector>,
    /// XRC: number of the remote shared receive queue.
    pub remote_srqn: u32,
}

/// A receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Queue {
    /// The receive queue of the queue pair with this number.
    Own(u32),
    /// The shared receive queue with this number.
    Shared(u32),
}

/// A work request of a receive queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceiveWork {
    /// The host's identifier of the request. The completion returns the identifier.
    pub id: u64,
    /// Scatter list for the message.
    pub sges: SmallVec<[Sge; 4]>,
    /// Number of requests that remain in the queue after this one. Used only for the limit of shared receive queues.
    pub left: u32,
}

/// Length of the longest message in bytes.
pub(crate) const MAX_MESSAGE: u32 = 1 << 31;

/// Status of a completion, as in the verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Success.
    Success,
    /// Local length error: a message is longer than the receive, or a work request is longer than the maximum.
    LocalLength,
    /// Local QP operation error: the work request is invalid.
    LocalQpOperation,
    /// Local protection error: a local key does not allow the access.
    LocalProtection,
    /// Work request flushed error: not executed, because the queue pair is in the error state.
    Flushed,
    /// Memory window bind error.
    MwBind,
    /// Bad response error: a response does not match the request.
    BadResponse,
    /// Local access error: an RDMA WRITE with immediate data failed at the responder.
    LocalAccess,
    /// Remote invalid request error: the responder rejected the request as invalid.
    RemoteInvalidRequest,
    /// Remote access error: the remote key does not allow the access.
    RemoteAccess,
    /// Remote operation error: the responder could not execute the request.
    RemoteOperation,
    /// Transport retry counter exceeded: no acknowledgement after the configured number of retries.
    RetryExceeded,
    /// RNR retry counter exceeded: no receive at the responder after the configured number of retries.
    RnrRetryExceeded,
}

/// The operation that consumed a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// SEND.
    Send,
    /// SEND with immediate data.
    SendImm(u32),
    /// SEND with invalidate. This local key was invalidated.
    SendInvalidate(u32),
    /// RDMA WRITE with immediate data.
    WriteImm(u32),
}

/// Source of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdSource {
    /// Sending queue pair.
    pub qpn: u32,
    /// LID of the sending port.
    pub lid: u16,
    /// Service level.
    pub sl: u8,
    /// Low bits of the destination LID, relative to this port's base LID.
    pub path_bits: u8,
    /// The first 40 bytes of the buffer hold a global route header.
    pub grh: bool,
    /// Index of the packet's P_Key in this port's P_Key table.
    pub pkey_index: u16,
    /// The datagram was sent to a multicast group.
    pub multicast: bool,
}

/// Completion of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// Completion of a send queue. Completions of one queue are in the order of its work requests.
    Send {
        /// The queue pair.
        qpn: u32,
        /// The completion queue.
        cqn: u32,
        /// As in [`SendWork::id`].
        id: u64,
        /// Operation; `None` if the work request could not be decoded.
        op: Option<SendOp>,
        /// Completion status.
        status: Status,
        /// Bytes that a READ or an atomic operation returned.
        length: u32,
    },
    /// Completion of a receive queue. Completions of a queue pair's own receive queue are in the order of its work
    /// requests.
    Receive {
        /// The receiving queue pair.
        qpn: u32,
        /// The completion queue of the queue pair or of an XRC shared receive queue.
        cqn: u32,
        /// The queue of the work request.
        queue: Queue,
        /// As in [`ReceiveWork::id`].
        id: u64,
        /// Completion status. The following fields are valid only on success.
        status: Status,
        /// Bytes received. For datagrams, this includes the 40 bytes that are reserved for a global route header. For a
        /// WRITE with immediate data, this is the number of bytes written.
        length: u32,
        /// The operation that consumed the receive.
        what: Received,
        /// The sender requested a solicited event.
        solicited: bool,
        /// Source, for datagram services.
        source: Option<UdSource>,
    },
}
