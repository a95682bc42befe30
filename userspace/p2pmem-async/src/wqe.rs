// SPDX-License-Identifier: MIT OR Apache-2.0

//! Encoding of work requests as mlx5 work queue entries (WQEs). Formats: `struct mlx5_wqe_*` and `struct mlx5_av` of
//! `include/linux/mlx5/qp.h`, opcodes of `include/linux/mlx5/device.h`. All fields are big-endian.

use crate::error::{Error, Result};

/// Bytes of a basic block (WQEBB): send WQEs are multiples of this (`MLX5_SEND_WQE_BB`).
pub const BLOCK: usize = 64;
/// Largest number of bytes of a send WQE. `MLX5_SEND_WQE_MAX_SIZE` is 1024, but the length, in units of 16 bytes, has 6 bits
/// (`MLX5_WQE_CTRL_DS_MASK`).
pub const MAX_BYTES: usize = 63 * UNIT;
/// Bytes of a receive WQE: four data segments.
pub const RECEIVE_STRIDE: usize = 64;
/// Largest number of data segments of a receive WQE.
pub const RECEIVE_SEGMENTS: usize = RECEIVE_STRIDE / UNIT;

/// The length of a WQE is in units of this (`MLX5_SEND_WQE_DS`).
const UNIT: usize = 16;
/// Largest number of bytes of an inline segment (`MLX5_WQE_INLINE_SEG_BYTE_COUNT_MASK`).
const MAX_INLINE: usize = 0x3ff;
/// Bit of an inline segment's byte count (`MLX5_INLINE_SEG`).
const INLINE: u32 = 0x8000_0000;
/// Bit of an address vector's QP number: the vector has 48 bytes (`MLX5_EXTENDED_UD_AV`).
const EXTENDED_AV: u32 = 0x8000_0000;
/// Bit of an address vector's GRH word: the vector has a GRH.
const AV_GRH: u32 = 1 << 30;
/// Key that ends a short scatter list (`MLX5_TERMINATE_SCATTER_LIST_LKEY`).
const TERMINATE_KEY: u32 = 0x100;
/// Flags of a control segment (`MLX5_WQE_CTRL_*`, `MLX5_FENCE_MODE_FENCE`).
const CQ_UPDATE: u8 = 2 << 2;
const SOLICITED: u8 = 1 << 1;
const FENCE: u8 = 2 << 5;
/// Largest message of InfiniBand.
const MAX_MESSAGE: u64 = 1 << 31;

/// Bytes before the payload of a received datagram, for its route. The NIC may not change them.
pub const ROUTE_BYTES: u32 = 40;

/// Transport of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "verbs", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable datagrams.
    Ud,
}

impl Transport {
    /// Returns the bytes before the payload of a received message.
    pub const fn route_bytes(self) -> u32 {
        match self {
            Self::Rc => 0,
            Self::Ud => ROUTE_BYTES,
        }
    }
}

/// A range of registered memory of this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Address, as registered.
    pub address: u64,
    /// Bytes.
    pub bytes: u32,
    /// Local key.
    pub lkey: u32,
}

/// A place in registered memory of the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Remote {
    /// Address, as registered.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
}

/// The bytes of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Payload {
    /// Registered memory. The NIC reads it when it executes the work request.
    Memory(Vec<Segment>),
    /// Bytes that are copied into the work request.
    Inline(Vec<u8>),
}

/// The operation of a work request for the send queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendOperation {
    /// SEND.
    Send,
    /// SEND with immediate data.
    SendImm(u32),
    /// RDMA WRITE.
    Write(Remote),
    /// RDMA WRITE with immediate data, which consumes a receive of the other side.
    WriteImm(Remote, u32),
    /// RDMA READ.
    Read(Remote),
    /// Atomic compare and swap of 8 bytes. The payload is 8 bytes of memory for the old value.
    CompareSwap {
        /// The 8 bytes, aligned to 8.
        remote: Remote,
        /// The expected value.
        compare: u64,
        /// The new value.
        swap: u64,
    },
    /// Atomic fetch and add of 8 bytes. The payload is 8 bytes of memory for the old value.
    FetchAdd {
        /// The 8 bytes, aligned to 8.
        remote: Remote,
        /// The number to add.
        add: u64,
    },
}

impl SendOperation {
    /// Returns the opcode (`MLX5_OPCODE_*`).
    fn opcode(&self) -> u8 {
        match self {
            Self::Write(_) => 0x08,
            Self::WriteImm(..) => 0x09,
            Self::Send => 0x0a,
            Self::SendImm(_) => 0x0b,
            Self::Read(_) => 0x10,
            Self::CompareSwap { .. } => 0x11,
            Self::FetchAdd { .. } => 0x12,
        }
    }

    fn is_atomic(&self) -> bool {
        matches!(self, Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }
}

/// Global route of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grh {
    /// GID of the other side.
    pub dgid: [u8; 16],
    /// Index of this side's GID.
    pub sgid_index: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
}

/// The receiver of a datagram. InfiniBand only: on Ethernet, the vector needs the MAC address of the next hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressVector {
    /// Local identifier (LID) of the other side's port.
    pub dlid: u16,
    /// Service level.
    pub sl: u8,
    /// Low bits of this side's LID.
    pub path_bits: u8,
    /// Number of the other side's queue pair.
    pub qpn: u32,
    /// Queue key.
    pub qkey: u32,
    /// Global route, if any.
    pub grh: Option<Grh>,
}

/// A work request for the send queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SendRequest {
    /// ID that the completion returns.
    pub id: u64,
    /// The operation.
    pub operation: SendOperation,
    /// The payload: source of a SEND or WRITE, destination of a READ or atomic.
    pub payload: Payload,
    /// Whether success causes a completion. Failures always cause one.
    pub signaled: bool,
    /// Whether the receiver's completion counts as solicited.
    pub solicited: bool,
    /// Whether the request waits for earlier READs and atomics.
    pub fence: bool,
    /// The receiver of a datagram.
    pub to: Option<AddressVector>,
}

impl SendRequest {
    /// Creates a signaled request without options.
    pub fn new(id: u64, operation: SendOperation, payload: Payload) -> Self {
        Self {
            id,
            operation,
            payload,
            signaled: true,
            solicited: false,
            fence: false,
            to: None,
        }
    }

    /// Sets whether success causes a completion.
    #[must_use]
    pub fn signaled(mut self, signaled: bool) -> Self {
        self.signaled = signaled;
        self
    }

    /// Sets the receiver of a datagram.
    #[must_use]
    pub fn to(mut self, to: AddressVector) -> Self {
        self.to = Some(to);
        self
    }

    /// Returns why the request is invalid; `None` if it is valid.
    fn invalid(&self, transport: Transport) -> Option<String> {
        let datagram = transport == Transport::Ud;
        if datagram != self.to.is_some() {
            return Some(if datagram {
                "a datagram needs the address of its receiver".into()
            } else {
                "a connected queue pair has one receiver: the request must have no address".into()
            });
        }
        if datagram && !matches!(self.operation, SendOperation::Send | SendOperation::SendImm(_)) {
            return Some("datagrams support SEND only".into());
        }
        if self.to.is_some_and(|to| to.qpn > 0xff_ffff) {
            return Some("queue pair numbers have 24 bits".into());
        }
        let reads = self.operation.is_atomic() || matches!(self.operation, SendOperation::Read(_));
        match &self.payload {
            Payload::Inline(_) if reads => return Some("the data that returns needs memory, not inline data".into()),
            Payload::Inline(data) if data.len() > MAX_INLINE => {
                return Some(format!(
                    "{} bytes of inline data: at most {MAX_INLINE} are possible",
                    data.len()
                ));
            }
            Payload::Memory(segments) => {
                if let Some(why) = too_long(segments) {
                    return Some(why);
                }
                let total: u64 = segments.iter().map(|segment| u64::from(segment.bytes)).sum();
                if total > MAX_MESSAGE {
                    return Some(format!(
                        "a message of {total} bytes: at most {MAX_MESSAGE} are possible"
                    ));
                }
                if self.operation.is_atomic() && (segments.len() != 1 || total != 8) {
                    return Some("an atomic returns 8 bytes: the payload must be one segment of 8 bytes".into());
                }
            }
            Payload::Inline(_) => {}
        }
        match self.operation {
            SendOperation::CompareSwap { remote, .. } | SendOperation::FetchAdd { remote, .. }
                if remote.address % 8 != 0 =>
            {
                Some("the address of an atomic must be a multiple of 8".into())
            }
            _ => None,
        }
    }

    /// Encodes the request for queue pair `qpn`. `index` is the number of basic blocks that were posted before.
    ///
    /// # Errors
    ///
    /// [`Error::Request`] if the transport does not support the request, or if it is too long.
    pub fn encode(&self, transport: Transport, qpn: u32, index: u16) -> Result<Wqe> {
        let refuse = |why: String| Error::Request { id: self.id, why };
        if let Some(why) = self.invalid(transport) {
            return Err(refuse(why));
        }
        // Enough for all but long inline data.
        let mut bytes = Vec::with_capacity(2 * BLOCK);
        bytes.resize(UNIT, 0);
        if let Some(to) = &self.to {
            address_vector(&mut bytes, to);
        }
        match self.operation {
            SendOperation::Send | SendOperation::SendImm(_) => {}
            SendOperation::Write(remote) | SendOperation::WriteImm(remote, _) | SendOperation::Read(remote) => {
                remote_segment(&mut bytes, remote);
            }
            SendOperation::CompareSwap { remote, compare, swap } => {
                remote_segment(&mut bytes, remote);
                bytes.extend_from_slice(&swap.to_be_bytes());
                bytes.extend_from_slice(&compare.to_be_bytes());
            }
            SendOperation::FetchAdd { remote, add } => {
                remote_segment(&mut bytes, remote);
                bytes.extend_from_slice(&add.to_be_bytes());
                bytes.extend_from_slice(&[0; 8]);
            }
        }
        match &self.payload {
            // A byte count of 0 means 2 GiB.
            Payload::Memory(segments) => {
                for segment in segments.iter().filter(|segment| segment.bytes > 0) {
                    data_segment(&mut bytes, *segment);
                }
            }
            Payload::Inline(data) if data.is_empty() => {}
            Payload::Inline(data) => {
                // Not truncated: at most MAX_INLINE.
                bytes.extend_from_slice(&(INLINE | data.len() as u32).to_be_bytes());
                bytes.extend_from_slice(data);
                bytes.resize(bytes.len().next_multiple_of(UNIT), 0);
            }
        }
        if bytes.len() > MAX_BYTES {
            return Err(refuse(format!(
                "it has {} bytes in the send queue: at most {MAX_BYTES} are possible",
                bytes.len()
            )));
        }
        // Not truncated: at most 63 units.
        let units = (bytes.len() / UNIT) as u32;
        let first = (u32::from(index) << 8) | u32::from(self.operation.opcode());
        let immediate = match self.operation {
            SendOperation::SendImm(immediate) | SendOperation::WriteImm(_, immediate) => immediate,
            _ => 0,
        };
        bytes[..4].copy_from_slice(&first.to_be_bytes());
        bytes[4..8].copy_from_slice(&((qpn << 8) | units).to_be_bytes());
        for (set, flag) in [
            (self.signaled, CQ_UPDATE),
            (self.solicited, SOLICITED),
            (self.fence, FENCE),
        ] {
            bytes[11] |= if set { flag } else { 0 };
        }
        bytes[12..16].copy_from_slice(&immediate.to_be_bytes());
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        Ok(Wqe { bytes })
    }
}

fn remote_segment(bytes: &mut Vec<u8>, remote: Remote) {
    bytes.extend_from_slice(&remote.address.to_be_bytes());
    bytes.extend_from_slice(&remote.rkey.to_be_bytes());
    bytes.extend_from_slice(&[0; 4]);
}

/// Returns why a list of segments is invalid; `None` if it is valid.
fn too_long(segments: &[Segment]) -> Option<String> {
    let long = segments.iter().find(|segment| u64::from(segment.bytes) > MAX_MESSAGE)?;
    Some(format!(
        "a segment of {} bytes: at most {MAX_MESSAGE} are possible",
        long.bytes
    ))
}

/// Appends a `struct mlx5_wqe_data_seg`. The highest bit of the byte count would mean inline data; 0 means 2 GiB.
fn data_segment(bytes: &mut Vec<u8>, segment: Segment) {
    bytes.extend_from_slice(&(segment.bytes & !INLINE).to_be_bytes());
    bytes.extend_from_slice(&segment.lkey.to_be_bytes());
    bytes.extend_from_slice(&segment.address.to_be_bytes());
}

/// Appends a `struct mlx5_av`.
fn address_vector(bytes: &mut Vec<u8>, to: &AddressVector) {
    bytes.extend_from_slice(&to.qkey.to_be_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&(to.qpn | EXTENDED_AV).to_be_bytes());
    bytes.push(to.sl & 0xf);
    bytes.push(to.path_bits & 0x7f);
    bytes.extend_from_slice(&to.dlid.to_be_bytes());
    bytes.extend_from_slice(&[0; 10]);
    match &to.grh {
        None => bytes.extend_from_slice(&[0; 22]),
        Some(grh) => {
            bytes.push(grh.traffic_class);
            bytes.push(grh.hop_limit);
            let word = AV_GRH | (u32::from(grh.sgid_index) << 20) | (grh.flow_label & 0xf_ffff);
            bytes.extend_from_slice(&word.to_be_bytes());
            bytes.extend_from_slice(&grh.dgid);
        }
    }
}

/// An encoded work request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wqe {
    bytes: Vec<u8>,
}

impl Wqe {
    /// Returns the bytes, a multiple of [`BLOCK`].
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the number of basic blocks.
    pub fn blocks(&self) -> u16 {
        // Not truncated: at most 16.
        (self.bytes.len() / BLOCK) as u16
    }

    /// Returns the first 8 bytes as the value of an 8-byte store: what a doorbell writes to the UAR.
    pub fn doorbell(&self) -> u64 {
        self.bytes[..8]
            .iter()
            .rev()
            .fold(0, |value, byte| (value << 8) | u64::from(*byte))
    }
}

/// A work request for the receive queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// ID that the completion returns.
    pub id: u64,
    /// Memory for the message. Datagrams place 40 bytes of route before the payload.
    pub segments: Vec<Segment>,
}

impl ReceiveRequest {
    /// Encodes the request.
    ///
    /// # Errors
    ///
    /// [`Error::Request`] for more than [`RECEIVE_SEGMENTS`] segments, or a segment of more than 2 GiB.
    pub fn encode(&self) -> Result<[u8; RECEIVE_STRIDE]> {
        if let Some(why) = too_long(&self.segments) {
            return Err(Error::Request { id: self.id, why });
        }
        let mut bytes = Vec::with_capacity(RECEIVE_STRIDE);
        for segment in self.segments.iter().filter(|segment| segment.bytes > 0) {
            data_segment(&mut bytes, *segment);
        }
        if bytes.len() > RECEIVE_STRIDE {
            return Err(Error::Request {
                id: self.id,
                why: format!(
                    "{} segments: at most {RECEIVE_SEGMENTS} are possible",
                    self.segments.len()
                ),
            });
        }
        if bytes.len() < RECEIVE_STRIDE {
            let end = Segment {
                address: 0,
                bytes: 0,
                lkey: TERMINATE_KEY,
            };
            data_segment(&mut bytes, end);
        }
        let mut entry = [0; RECEIVE_STRIDE];
        entry[..bytes.len()].copy_from_slice(&bytes);
        Ok(entry)
    }
}

#[cfg(test)]
mod tests;
