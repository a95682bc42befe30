// SPDX-License-Identifier: MIT OR Apache-2.0

//! Decoding of work queue entries (WQEs): a control segment, followed by segments that depend on the opcode.

use p2pmem_ib::{
    AddressVector, Fence, Gid, Grh, Path, Payload, Remote, Segment, SendFlags, SendOp, SendWork, Service, Sge,
};
use smallvec::SmallVec;

use super::layout::{constants, wire};
use super::mkey::Umr;

/// Segment sizes are multiples of this number of bytes.
const UNIT: usize = constants::MLX5_SEND_WQE_DS as usize;
/// lkey that terminates a scatter list that is shorter than its entry (`MLX5_TERMINATE_SCATTER_LIST_LKEY` in `qp.h`).
const TERMINATE_SCATTER_LIST_LKEY: u32 = 0x100;
/// Bit of `byte_count`: inline data follows.
const INLINE: u32 = constants::MLX5_INLINE_SEG;
/// Mask of the inline data length.
const INLINE_LENGTH: u32 = constants::MLX5_WQE_INLINE_SEG_BYTE_COUNT_MASK;
/// Bit of `dqp_dct`: the address vector has 48 bytes. Otherwise it has 16.
const EXTENDED_AV: u32 = constants::MLX5_EXTENDED_UD_AV;
/// Bytes of a short address vector.
const BASE_AV_SIZE: usize = wire::base_av::BYTES;
/// Bit of `grh_gid_fl`: the address vector contains a GRH.
const AV_GRH: u32 = 1 << 30;

/// The WQE is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// Control segment of a send WQE.
#[derive(Clone, Copy, Debug)]
pub(super) struct ControlSegment {
    pub(super) opcode: u8,
    pub(super) index: u16,
    pub(super) qpn: u32,
    /// Bytes of the whole WQE.
    pub(super) len: usize,
    flags: u32,
    immediate: u32,
}

impl ControlSegment {
    /// Decodes a control segment. `bytes` has at least 16 bytes.
    pub(super) fn new(bytes: &[u8]) -> Self {
        use wire::wqe_ctrl_seg as seg;
        let first = seg::OPMOD_IDX_OPCODE.get32(bytes);
        let second = seg::QPN_DS.get32(bytes);
        Self {
            // Truncated: the opcode is the lowest byte.
            opcode: first as u8,
            index: (first >> constants::MLX5_WQE_CTRL_WQE_INDEX_SHIFT) as u16,
            qpn: second >> constants::MLX5_WQE_CTRL_QPN_SHIFT,
            len: (second & constants::MLX5_WQE_CTRL_DS_MASK) as usize * UNIT,
            flags: seg::FM_CE_SE.get32(bytes),
            immediate: seg::IMM.get32(bytes),
        }
    }

    /// Returns the work request ID: opcode and WQE index.
    pub(super) fn id(&self) -> u64 {
        (u64::from(self.opcode) << 16) | u64::from(self.index)
    }

    /// Returns WQE index and opcode of a work request ID.
    pub(super) fn from_id(id: u64) -> (u16, u8) {
        // Truncated: the inverse of `id`.
        (id as u16, (id >> 16) as u8)
    }

    fn send_flags(&self) -> SendFlags {
        let fence = match self.flags & 0xe0 {
            constants::MLX5_FENCE_MODE_NONE => Fence::None,
            // The small fence orders UMRs before work requests that use the mkey. The model executes them in order
            // anyway.
            constants::MLX5_FENCE_MODE_INITIATOR_SMALL => Fence::None,
            constants::MLX5_FENCE_MODE_STRONG_ORDERING => Fence::All,
            _ => Fence::Reads,
        };
        SendFlags {
            signaled: self.flags & constants::MLX5_WQE_CTRL_CQ_UPDATE != 0,
            solicited: self.flags & constants::MLX5_WQE_CTRL_SOLICITED != 0,
            fence,
        }
    }
}

/// A local work request: the adapter executes it without the transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LocalOp {
    /// NOP.
    Nop,
    /// UMR: changes a memory key.
    Umr(Box<Umr>),
}

/// A decoded send WQE.
#[derive(Debug)]
pub(super) struct Decoded {
    pub(super) work: SendWork,
    /// The local work request, if `work.op` is local.
    pub(super) local: Option<LocalOp>,
}

/// Parser that takes segments from the front of a WQE.
struct Segments<'a>(&'a [u8]);

impl<'a> Segments<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (segment, rest) = self.0.split_at_checked(len).ok_or(Malformed)?;
        self.0 = rest;
        Ok(segment)
    }

    fn remote(&mut self) -> Result<Remote, Malformed> {
        let segment = self.take(wire::wqe_raddr_seg::BYTES)?;
        Ok(Remote {
            address: wire::wqe_raddr_seg::RADDR.get(segment),
            key: wire::wqe_raddr_seg::RKEY.get32(segment),
        })
    }

    /// Takes the address vector of a datagram.
    fn address_vector(&mut self) -> Result<AddressVector, Malformed> {
        use wire::{av, base_av};
        let destination = base_av::DQP_DCT.get32(self.0);
        let extended = destination & EXTENDED_AV != 0;
        let segment = self.take(if extended { av::BYTES } else { BASE_AV_SIZE })?;
        let route = av::GRH_GID_FL.get32(segment);
        let grh = (extended && route & AV_GRH != 0).then(|| {
            let mut dgid = Gid::default();
            dgid.0.copy_from_slice(av::RGID.of(segment));
            Grh {
                sgid_index: (route >> 20) as u16 & 0xff,
                dgid,
                flow_label: route & 0xf_ffff,
                traffic_class: av::TCLASS.get32(segment) as u8,
                hop_limit: av::HOP_LIMIT.get32(segment) as u8,
            }
        });
        Ok(AddressVector {
            path: Path {
                dlid: base_av::RLID.get32(segment) as u16,
                path_bits: base_av::FL_MLID.get32(segment) as u8 & 0x7f,
                sl: base_av::STAT_RATE_SL.get32(segment) as u8 & 0xf,
                grh,
            },
            qpn: destination & 0x00ff_ffff,
            qkey: base_av::KEY_QKEY_QKEY.get32(segment),
        })
    }

    /// Takes the remaining data segments: inline, by reference, or both in any order.
    fn payload(&mut self) -> Result<Payload, Malformed> {
        let mut payload = Payload::Memory(SmallVec::new());
        while !self.0.is_empty() {
            let count = wire::wqe_data_seg::BYTE_COUNT.get32(self.0);
            payload = payload.with(if count & INLINE != 0 {
                let head = wire::wqe_inline_seg::BYTES;
                let len = (count & INLINE_LENGTH) as usize;
                let segment = self.take((head + len).next_multiple_of(UNIT))?;
                Segment::Inline(segment[head..head + len].to_vec())
            } else {
                Segment::Memory(sge(self.take(wire::wqe_data_seg::BYTES)?))
            });
        }
        Ok(payload)
    }
}

fn sge(segment: &[u8]) -> Sge {
    Sge {
        key: wire::wqe_data_seg::LKEY.get32(segment),
        address: wire::wqe_data_seg::ADDR.get(segment),
        length: wire::wqe_data_seg::BYTE_COUNT.get32(segment),
    }
}

/// Decodes the scatter list of a receive WQE.
pub(super) fn scatter(entry: &[u8]) -> Result<SmallVec<[Sge; 4]>, Malformed> {
    let mut sges = SmallVec::new();
    for segment in entry.chunks_exact(wire::wqe_data_seg::BYTES) {
        let sge = sge(segment);
        if sge.key == TERMINATE_SCATTER_LIST_LKEY {
            break;
        }
        if sge.length & INLINE != 0 {
            return Err(Malformed);
        }
        if sge.length != 0 {
            sges.push(sge);
        }
    }
    Ok(sges)
}

/// Decodes a complete send WQE.
pub(super) fn decode(control: &ControlSegment, entry: &[u8], service: Service) -> Result<Decoded, Malformed> {
    let mut segments = Segments(entry.get(wire::wqe_ctrl_seg::BYTES..).ok_or(Malformed)?);
    let opcode = u32::from(control.opcode);
    let local = match opcode {
        constants::MLX5_OPCODE_NOP => Some(LocalOp::Nop),
        constants::MLX5_OPCODE_UMR => {
            // The WQEs of an XRC QP have an XRC segment first, for UMR too.
            if service == Service::Xrc {
                segments.take(wire::wqe_xrc_seg::BYTES)?;
            }
            let umr = Umr::read(control.immediate, segments.0).map_err(|error| {
                tracing::debug!(%error, "malformed UMR work request");
                Malformed
            })?;
            Some(LocalOp::Umr(Box::new(umr)))
        }
        _ => None,
    };
    let mut work = SendWork {
        id: control.id(),
        op: SendOp::Local,
        flags: control.send_flags(),
        payload: Payload::Memory(SmallVec::new()),
        to: None,
        remote_srqn: 0,
    };
    if local.is_some() {
        return Ok(Decoded { work, local });
    }
    if service == Service::Xrc {
        let segment = segments.take(wire::wqe_xrc_seg::BYTES)?;
        work.remote_srqn = wire::wqe_xrc_seg::XRC_SRQN.get32(segment);
    }
    let datagram = matches!(service, Service::Ud | Service::Gsi);
    if datagram {
        work.to = Some(segments.address_vector()?);
    }
    let imm = Some(control.immediate);
    let send = matches!(opcode, constants::MLX5_OPCODE_SEND | constants::MLX5_OPCODE_SEND_IMM);
    work.op = match opcode {
        _ if datagram && !send => return Err(Malformed),
        constants::MLX5_OPCODE_SEND => SendOp::Send { imm: None },
        constants::MLX5_OPCODE_SEND_IMM => SendOp::Send { imm },
        constants::MLX5_OPCODE_SEND_INVAL => SendOp::SendInvalidate { key: control.immediate },
        constants::MLX5_OPCODE_RDMA_WRITE => SendOp::Write {
            remote: segments.remote()?,
            imm: None,
        },
        constants::MLX5_OPCODE_RDMA_WRITE_IMM => SendOp::Write {
            remote: segments.remote()?,
            imm,
        },
        constants::MLX5_OPCODE_RDMA_READ => SendOp::Read {
            remote: segments.remote()?,
        },
        constants::MLX5_OPCODE_ATOMIC_CS | constants::MLX5_OPCODE_ATOMIC_FA => {
            use wire::wqe_atomic_seg as seg;
            let remote = segments.remote()?;
            let segment = segments.take(seg::BYTES)?;
            let swap = seg::SWAP_ADD.get(segment);
            if opcode == constants::MLX5_OPCODE_ATOMIC_FA {
                SendOp::FetchAdd { remote, add: swap }
            } else {
                let compare = seg::COMPARE.get(segment);
                SendOp::CompareSwap { remote, compare, swap }
            }
        }
        _ => return Err(Malformed),
    };
    work.payload = segments.payload()?;
    let takes_data = matches!(
        work.op,
        SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }
    );
    if takes_data && !matches!(work.payload, Payload::Memory(_)) {
        return Err(Malformed);
    }
    Ok(Decoded { work, local: None })
}
