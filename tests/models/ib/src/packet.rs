// SPDX-License-Identifier: MIT OR Apache-2.0

//! Packets: headers as fields, payload as a range of a shared buffer.
//!
//! Packets have no invariant CRC and no padding, because no bytes are corrupted between threads of a process. The
//! receiver still checks the headers of a packet against its opcode.

use std::fmt;
use std::sync::Arc;

/// A global identifier: 64 bits of subnet prefix and 64 bits of port GUID, or a multicast group.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The default subnet prefix.
    pub const DEFAULT_PREFIX: u64 = 0xfe80_0000_0000_0000;

    /// Returns the GID of a port.
    pub fn new(prefix: u64, guid: u64) -> Self {
        Self(((u128::from(prefix) << 64) | u128::from(guid)).to_be_bytes())
    }

    /// Returns whether the GID names a multicast group.
    pub fn is_multicast(&self) -> bool {
        self.0[0] == 0xff
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::net::Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Transport services, the upper three bits of an opcode.
pub(crate) mod service {
    pub(crate) const RC: u8 = 0x00;
    pub(crate) const UC: u8 = 0x20;
    pub(crate) const UD: u8 = 0x60;
    pub(crate) const XRC: u8 = 0xa0;
    pub(crate) const MASK: u8 = 0xe0;
}

/// Operations, the lower five bits of an opcode.
pub(crate) mod operation {
    pub(crate) const SEND_FIRST: u8 = 0x00;
    pub(crate) const SEND_MIDDLE: u8 = 0x01;
    pub(crate) const SEND_LAST: u8 = 0x02;
    pub(crate) const SEND_LAST_IMM: u8 = 0x03;
    pub(crate) const SEND_ONLY: u8 = 0x04;
    pub(crate) const SEND_ONLY_IMM: u8 = 0x05;
    pub(crate) const WRITE_FIRST: u8 = 0x06;
    pub(crate) const WRITE_MIDDLE: u8 = 0x07;
    pub(crate) const WRITE_LAST: u8 = 0x08;
    pub(crate) const WRITE_LAST_IMM: u8 = 0x09;
    pub(crate) const WRITE_ONLY: u8 = 0x0a;
    pub(crate) const WRITE_ONLY_IMM: u8 = 0x0b;
    pub(crate) const READ_REQUEST: u8 = 0x0c;
    pub(crate) const READ_RESPONSE_FIRST: u8 = 0x0d;
    pub(crate) const READ_RESPONSE_MIDDLE: u8 = 0x0e;
    pub(crate) const READ_RESPONSE_LAST: u8 = 0x0f;
    pub(crate) const READ_RESPONSE_ONLY: u8 = 0x10;
    pub(crate) const ACKNOWLEDGE: u8 = 0x11;
    pub(crate) const ATOMIC_ACKNOWLEDGE: u8 = 0x12;
    pub(crate) const COMPARE_SWAP: u8 = 0x13;
    pub(crate) const FETCH_ADD: u8 = 0x14;
    pub(crate) const SEND_LAST_INVALIDATE: u8 = 0x16;
    pub(crate) const SEND_ONLY_INVALIDATE: u8 = 0x17;
    pub(crate) const MASK: u8 = 0x1f;
}

/// The destination queue pair of multicast packets.
pub(crate) const MULTICAST_QPN: u32 = 0xff_ffff;
/// First LID of the multicast range.
pub(crate) const MULTICAST_LID: u16 = 0xc000;
/// The permissive LID: the port that receives the packet.
pub(crate) const PERMISSIVE_LID: u16 = 0xffff;

/// Shared bytes. Packets refer to ranges of them.
pub(crate) type Chunk = Arc<Vec<u8>>;

/// A packet's payload.
#[derive(Clone, Default)]
pub(crate) struct Slice {
    chunk: Option<Chunk>,
    start: u32,
    len: u32,
}

impl Slice {
    /// Returns `len` bytes of `chunk` from `start` on, limited to the end of `chunk`.
    pub(crate) fn new(chunk: &Chunk, start: usize, len: usize) -> Self {
        let start = start.min(chunk.len());
        let len = len.min(chunk.len() - start);
        // Not truncated: chunks are far smaller than 4 GiB.
        Self {
            chunk: Some(chunk.clone()),
            start: start as u32,
            len: len as u32,
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        let start = self.start as usize;
        self.chunk
            .as_ref()
            .map_or(&[], |chunk| &chunk[start..start + self.len as usize])
    }

    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns this range and `next` as one range if `next` starts where this range ends in the same chunk.
    pub(crate) fn joined(&self, next: &Slice) -> Option<Slice> {
        match (&self.chunk, &next.chunk) {
            (Some(a), Some(b)) if Arc::ptr_eq(a, b) && self.start + self.len == next.start => Some(Self {
                chunk: self.chunk.clone(),
                start: self.start,
                len: self.len + next.len,
            }),
            _ => None,
        }
    }
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {}", self.len, self.start)
    }
}

/// RDMA extended transport header (RETH).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reth {
    pub(crate) address: u64,
    pub(crate) key: u32,
    pub(crate) length: u32,
}

/// Datagram extended transport header (DETH).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Deth {
    pub(crate) qkey: u32,
    pub(crate) source_qpn: u32,
}

/// Atomic extended transport header (AtomicETH).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AtomicEth {
    pub(crate) address: u64,
    pub(crate) key: u32,
    /// Value to swap or to add.
    pub(crate) swap_add: u64,
    pub(crate) compare: u64,
}

/// Acknowledgement extended transport header (AETH).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Aeth {
    pub(crate) syndrome: u8,
    pub(crate) msn: u32,
}

/// The extended transport header of the operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Extended {
    #[default]
    None,
    Reth(Reth),
    Deth(Deth),
    Atomic(AtomicEth),
    Aeth(Aeth),
    AtomicAck(Aeth, u64),
}

/// Global route header (GRH).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GlobalRoute {
    pub(crate) flow_label: u32,
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
    pub(crate) sgid: Gid,
    pub(crate) dgid: Gid,
}

/// A packet. Only engines and the fabric access the contents.
#[derive(Clone)]
pub struct Packet {
    pub(crate) dlid: u16,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) opcode: u8,
    pub(crate) solicited: bool,
    pub(crate) ack_request: bool,
    pub(crate) pkey: u16,
    pub(crate) dest_qpn: u32,
    pub(crate) psn: u32,
    pub(crate) grh: Option<Arc<GlobalRoute>>,
    pub(crate) extended: Extended,
    /// XRC: the shared receive queue at the destination.
    pub(crate) srqn: u32,
    /// Immediate data, or the key to invalidate.
    pub(crate) imm: u32,
    pub(crate) payload: Slice,
}

impl Packet {
    /// Returns the size of the packet on a wire: headers, payload with padding, and CRCs.
    pub fn wire_bytes(&self) -> u64 {
        use operation::*;
        let mut bytes = 8 + 12 + 4 + 2;
        if self.grh.is_some() {
            bytes += 40;
        }
        bytes += match self.extended {
            Extended::None => 0,
            Extended::Reth(_) => 16,
            Extended::Deth(_) => 8,
            Extended::Atomic(_) => 28,
            Extended::Aeth(_) => 4,
            Extended::AtomicAck(..) => 12,
        };
        if self.opcode & service::MASK == service::XRC && self.opcode & operation::MASK < READ_RESPONSE_FIRST {
            bytes += 4;
        }
        if matches!(
            self.opcode & operation::MASK,
            SEND_LAST_IMM
                | SEND_ONLY_IMM
                | WRITE_LAST_IMM
                | WRITE_ONLY_IMM
                | SEND_LAST_INVALIDATE
                | SEND_ONLY_INVALIDATE
        ) {
            bytes += 4;
        }
        bytes + (self.payload.len() as u64).next_multiple_of(4)
    }
}

impl fmt::Debug for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packet")
            .field("slid", &self.slid)
            .field("dlid", &self.dlid)
            .field("opcode", &format_args!("{:#04x}", self.opcode))
            .field("qpn", &format_args!("{:#x}", self.dest_qpn))
            .field("psn", &format_args!("{:#x}", self.psn))
            .field("extended", &self.extended)
            .field("bytes", &self.payload.len())
            .finish_non_exhaustive()
    }
}
