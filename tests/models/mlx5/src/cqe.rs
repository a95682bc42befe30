// SPDX-License-Identifier: MIT OR Apache-2.0

//! Encoding of completion queue entries (CQEs).

use p2pmem_ib::{Completion, Queue, Received, SendOp, Status};

use super::layout::wire::{cqe64, err_cqe};
use super::layout::{Field, constants};
use super::wqe::ControlSegment;

/// A CQE. [`super::cq::Cq::post`] sets the owner bit.
pub(super) type Cqe = [u8; cqe64::BYTES];

/// Shifts and values of the `flags_rqpn` field, which describes the source of a datagram.
const SOURCE_SL_SHIFT: u32 = 24;
const SOURCE_GRH_SHIFT: u32 = 28;
const GRH_UNICAST: u32 = 1;
const GRH_MULTICAST: u32 = 2;

/// Returns the CQE syndrome of a completion status. The vendor syndrome has the same value.
fn syndrome(status: Status) -> u32 {
    match status {
        Status::Success => 0,
        Status::LocalLength => constants::MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR,
        Status::LocalQpOperation => constants::MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR,
        Status::LocalProtection => constants::MLX5_CQE_SYNDROME_LOCAL_PROT_ERR,
        Status::Flushed => constants::MLX5_CQE_SYNDROME_WR_FLUSH_ERR,
        Status::MwBind => constants::MLX5_CQE_SYNDROME_MW_BIND_ERR,
        Status::BadResponse => constants::MLX5_CQE_SYNDROME_BAD_RESP_ERR,
        Status::LocalAccess => constants::MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR,
        Status::RemoteInvalidRequest => constants::MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR,
        Status::RemoteAccess => constants::MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR,
        Status::RemoteOperation => constants::MLX5_CQE_SYNDROME_REMOTE_OP_ERR,
        Status::RetryExceeded => constants::MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR,
        Status::RnrRetryExceeded => constants::MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR,
    }
}

fn set_opcode(entry: &mut Cqe, opcode: u32) {
    cqe64::OP_OWN.set(entry, opcode << 4);
}

/// Encodes a completion. `pkey` returns the P_Key at an index of the port's P_Key table. `clock` is the adapter's time
/// in nanoseconds.
pub(super) fn encode(completion: &Completion, pkey: impl Fn(u16) -> u16, clock: u64) -> Cqe {
    let mut entry = [0; cqe64::BYTES];
    // timestamp_h and timestamp_l are adjacent. In an error CQE, the syndrome is in this place.
    Field::new(cqe64::TIMESTAMP_H.offset(), 64).set(&mut entry, clock);
    match *completion {
        Completion::Send {
            qpn,
            id,
            op,
            status,
            length,
            ..
        } => {
            let (index, opcode) = ControlSegment::from_id(id);
            cqe64::SOP_DROP_QPN.set(&mut entry, (u32::from(opcode) << 24) | qpn);
            cqe64::WQE_COUNTER.set(&mut entry, index);
            if status == Status::Success {
                let reads = matches!(
                    op,
                    Some(SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. })
                );
                if reads {
                    cqe64::BYTE_CNT.set(&mut entry, length);
                }
                set_opcode(&mut entry, constants::MLX5_CQE_REQ);
            } else {
                set_error(&mut entry, status);
                set_opcode(&mut entry, constants::MLX5_CQE_REQ_ERR);
            }
        }
        Completion::Receive {
            qpn,
            queue,
            id,
            status,
            length,
            what,
            source,
            ..
        } => {
            cqe64::SOP_DROP_QPN.set(&mut entry, qpn);
            // Not truncated: the index of an RQ or SRQ entry.
            cqe64::WQE_COUNTER.set(&mut entry, id);
            if let Queue::Shared(srqn) = queue {
                cqe64::SRQN.set(&mut entry, srqn);
            }
            if status != Status::Success {
                set_error(&mut entry, status);
                set_opcode(&mut entry, constants::MLX5_CQE_RESP_ERR);
                return entry;
            }
            cqe64::BYTE_CNT.set(&mut entry, length);
            if let Some(source) = source {
                let route = match (source.grh, source.multicast) {
                    (false, _) => 0,
                    (true, false) => GRH_UNICAST,
                    (true, true) => GRH_MULTICAST,
                };
                let flags = (route << SOURCE_GRH_SHIFT) | (u32::from(source.sl) << SOURCE_SL_SHIFT);
                cqe64::FLAGS_RQPN.set(&mut entry, flags | source.qpn);
                cqe64::SLID.set(&mut entry, source.lid);
                cqe64::ML_PATH.set(&mut entry, source.path_bits);
                cqe64::PKEY.set(&mut entry, pkey(source.pkey_index));
            }
            let opcode = match what {
                Received::Send => constants::MLX5_CQE_RESP_SEND,
                Received::SendImm(imm) => {
                    cqe64::IMMEDIATE.set(&mut entry, imm);
                    constants::MLX5_CQE_RESP_SEND_IMM
                }
                Received::SendInvalidate(key) => {
                    cqe64::INVAL_RKEY.set(&mut entry, key);
                    constants::MLX5_CQE_RESP_SEND_INV
                }
                Received::WriteImm(imm) => {
                    cqe64::IMMEDIATE.set(&mut entry, imm);
                    constants::MLX5_CQE_RESP_WR_IMM
                }
            };
            set_opcode(&mut entry, opcode);
        }
    }
    entry
}

/// Turns a CQE into an error CQE. The vendor syndrome repeats the syndrome, because the model has no further cause.
fn set_error(entry: &mut Cqe, status: Status) {
    let syndrome = syndrome(status);
    Field::new(cqe64::TIMESTAMP_H.offset(), 64).set(entry, 0_u64);
    err_cqe::SYNDROME.set(entry, syndrome);
    err_cqe::VENDOR_ERR_SYND.set(entry, syndrome);
}

/// Returns whether a completion counts as solicited. Errors do.
pub(super) fn solicited(completion: &Completion) -> bool {
    match completion {
        Completion::Send { status, .. } => *status != Status::Success,
        Completion::Receive { status, solicited, .. } => *solicited || *status != Status::Success,
    }
}
