// SPDX-License-Identifier: MIT OR Apache-2.0

//! Shared receive queue commands. Drivers create three object types (SRQ, XRC SRQ, RMP); the model implements each as a
//! linked list of entries.

use p2pmem_ib::{ModifyError, SrqConfig};

use super::{CommandError, Outcome, refuse};
use crate::caps::limit;
use crate::layout::{constants, ifc::*};
use crate::model::Model;
use crate::ring::{DoorbellRecord, Pages, Ring};
use crate::srq::Srq;

/// Logarithm of the smallest stride in bytes. Stride fields count from this size.
pub(super) const LOG_MIN_STRIDE: u32 = 4;

/// Attributes of a new SRQ, independent of the object type.
struct SrqAttributes<'a> {
    kind: SrqKind,
    context: &'a [u8],
    list: &'a [u8],
    log_size: u32,
    log_stride: u32,
    log_page_size: u32,
    page_offset: u32,
    pd: u32,
    record: u64,
    limit: u32,
    /// XRC domain and CQ of an XRC SRQ.
    xrc: Option<(u32, u32)>,
}

/// Object type of an SRQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SrqKind {
    Basic,
    Xrc,
    Rmp,
}

fn create_srq(model: &mut Model<'_>, attributes: &SrqAttributes<'_>) -> Result<u32, CommandError> {
    let entry = 1 << attributes.log_stride.min(31);
    if attributes.log_size > limit::LOG_SRQ_SIZE || entry > limit::RECEIVE_ENTRY {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    if model.hca.objects.pds.get(attributes.pd).is_none() {
        return Err(refuse!(MLX5_CMD_STAT_BAD_RES_ERR));
    }
    if let Some((xrcd, cqn)) = attributes.xrc {
        if model.hca.objects.xrcds.get(xrcd).is_none() || model.hca.objects.cqs.get(cqn).is_none() {
            return Err(refuse!(MLX5_CMD_STAT_BAD_RES_ERR));
        }
    }
    let pages = Pages::new(
        attributes.list,
        attributes.log_page_size,
        attributes.page_offset,
        1 << (attributes.log_size + attributes.log_stride),
    );
    let ring = pages
        .and_then(|pages| Ring::new(pages, 0, attributes.log_size, attributes.log_stride))
        .ok_or(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR))?;
    let srq = Srq::new(
        attributes.kind,
        ring,
        DoorbellRecord(attributes.record),
        attributes.pd,
        attributes.xrc,
        attributes.context.to_vec(),
    );
    let srqn = model
        .hca
        .objects
        .srqs
        .add(srq)
        .ok_or(refuse!(MLX5_CMD_STAT_NO_RES_ERR))?;
    let config = SrqConfig {
        pd: attributes.pd,
        xrc: attributes.xrc,
        limit: attributes.limit,
    };
    if model.engine.create_srq(srqn, config).is_err() {
        model.hca.objects.srqs.remove(srqn);
        return Err(refuse!(MLX5_CMD_STAT_INT_ERR));
    }
    Ok(srqn)
}

/// Returns the SRQ with this number if it has this object type.
fn find<'m>(model: &'m mut Model<'_>, srqn: u32, kind: SrqKind) -> Result<&'m mut Srq, CommandError> {
    let srq = model.hca.objects.srqs.get_mut(srqn).filter(|srq| srq.kind == kind);
    srq.ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))
}

fn destroy_srq(model: &mut Model<'_>, srqn: u32, kind: SrqKind) -> Outcome {
    find(model, srqn, kind)?;
    match model.engine.destroy_srq(srqn) {
        Ok(()) => {
            model.hca.objects.srqs.remove(srqn);
            Ok(())
        }
        Err(ModifyError::Busy) => Err(refuse!(MLX5_CMD_STAT_RES_BUSY)),
        Err(_) => Err(refuse!(MLX5_CMD_STAT_BAD_RES_ERR)),
    }
}

fn set_limit(model: &mut Model<'_>, srqn: u32, kind: SrqKind, limit: u32) -> Outcome {
    let srq = find(model, srqn, kind)?;
    if limit >= srq.ring.entries() {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    model
        .engine
        .arm_srq(srqn, limit)
        .map_err(|_| refuse!(MLX5_CMD_STAT_BAD_RES_ERR))
}

pub(super) fn create(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    let context = create_srq_in::SRQ_CONTEXT_ENTRY.of(input);
    if srqc::WQ_SIGNATURE.is_set(context) || srqc::RLKY.is_set(context) {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    // CREATE_SRQ can create XRC SRQs too: an SRQ is basic unless both its XRC domain and its CQ exist.
    let xrcd = srqc::XRCD.get32(context);
    let cqn = srqc::CQN.get32(context);
    let xrc = (model.hca.objects.xrcds.get(xrcd).is_some() && model.hca.objects.cqs.get(cqn).is_some())
        .then_some((xrcd, cqn));
    let attributes = SrqAttributes {
        kind: SrqKind::Basic,
        context,
        list: create_srq_in::PAS.of(input),
        log_size: srqc::LOG_SRQ_SIZE.get32(context),
        log_stride: srqc::LOG_RQ_STRIDE.get32(context) + LOG_MIN_STRIDE,
        log_page_size: srqc::LOG_PAGE_SIZE.get32(context),
        page_offset: srqc::PAGE_OFFSET.get32(context),
        pd: srqc::PD.get32(context),
        record: srqc::DBR_ADDR.get(context),
        limit: srqc::LWM.get32(context),
        xrc,
    };
    let srqn = create_srq(model, &attributes)?;
    create_srq_out::SRQN.set(output, srqn);
    Ok(())
}

pub(super) fn destroy(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    destroy_srq(model, destroy_srq_in::SRQN.get32(input), SrqKind::Basic)
}

pub(super) fn query(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    let srqn = query_srq_in::SRQN.get32(input);
    let limit = model.engine.srq_limit(srqn).unwrap_or(0);
    let srq = find(model, srqn, SrqKind::Basic)?;
    let context = query_srq_out::SRQ_CONTEXT_ENTRY.of_mut(output);
    context.copy_from_slice(&srq.context);
    srqc::LWM.set(context, limit);
    if srq.broken {
        srqc::STATE.set(context, constants::MLX5_SRQC_STATE_ERROR);
    }
    Ok(())
}

pub(super) fn arm(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let (srqn, limit) = (arm_rq_in::SRQ_NUMBER.get32(input), arm_rq_in::LWM.get32(input));
    set_limit(model, srqn, SrqKind::Basic, limit)
}

pub(super) fn create_xrc(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    let context = create_xrc_srq_in::XRC_SRQ_CONTEXT_ENTRY.of(input);
    let refused = xrc_srqc::WQ_SIGNATURE.is_set(context)
        || xrc_srqc::RLKY.is_set(context)
        || xrc_srqc::BASIC_CYCLIC_RCV_WQE.is_set(context)
        || create_xrc_srq_in::XRC_SRQ_UMEM_VALID.is_set(input);
    if refused {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    let record = (xrc_srqc::DB_RECORD_ADDR_H.get(context) << 32) | (xrc_srqc::DB_RECORD_ADDR_L.get(context) << 2);
    let attributes = SrqAttributes {
        kind: SrqKind::Xrc,
        context,
        list: create_xrc_srq_in::PAS.of(input),
        log_size: xrc_srqc::LOG_XRC_SRQ_SIZE.get32(context),
        log_stride: xrc_srqc::LOG_RQ_STRIDE.get32(context) + LOG_MIN_STRIDE,
        log_page_size: xrc_srqc::LOG_PAGE_SIZE.get32(context),
        page_offset: xrc_srqc::PAGE_OFFSET.get32(context),
        pd: xrc_srqc::PD.get32(context),
        record,
        limit: xrc_srqc::LWM.get32(context),
        xrc: Some((xrc_srqc::XRCD.get32(context), xrc_srqc::CQN.get32(context))),
    };
    let srqn = create_srq(model, &attributes)?;
    create_xrc_srq_out::XRC_SRQN.set(output, srqn);
    Ok(())
}

pub(super) fn destroy_xrc(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    destroy_srq(model, destroy_xrc_srq_in::XRC_SRQN.get32(input), SrqKind::Xrc)
}

pub(super) fn query_xrc(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    let srqn = query_xrc_srq_in::XRC_SRQN.get32(input);
    let limit = model.engine.srq_limit(srqn).unwrap_or(0);
    let srq = find(model, srqn, SrqKind::Xrc)?;
    let context = query_xrc_srq_out::XRC_SRQ_CONTEXT_ENTRY.of_mut(output);
    context.copy_from_slice(&srq.context);
    xrc_srqc::LWM.set(context, limit);
    if srq.broken {
        xrc_srqc::STATE.set(context, constants::MLX5_XRC_SRQC_STATE_ERROR);
    }
    Ok(())
}

pub(super) fn arm_xrc(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let (srqn, limit) = (arm_xrc_srq_in::XRC_SRQN.get32(input), arm_xrc_srq_in::LWM.get32(input));
    set_limit(model, srqn, SrqKind::Xrc, limit)
}

pub(super) fn create_rmp(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    const LINKED: u32 = 0;
    let context = create_rmp_in::CTX.of(input);
    let queue = rmpc::WQ.of(context);
    let refused = rmpc::BASIC_CYCLIC_RCV_WQE.is_set(context)
        || wq::WQ_TYPE.get32(queue) != LINKED
        || wq::WQ_SIGNATURE.is_set(queue)
        || wq::WQ_UMEM_VALID.is_set(queue);
    if refused {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    // The page list follows the context, at the end of the fixed part of the command.
    let list = create_rmp_in::CTX.offset() + rmpc::WQ.offset() + wq::PAS.offset();
    let attributes = SrqAttributes {
        kind: SrqKind::Rmp,
        context,
        list: input.get(list..).unwrap_or(&[]),
        log_size: wq::LOG_WQ_SZ.get32(queue),
        log_stride: wq::LOG_WQ_STRIDE.get32(queue),
        log_page_size: wq::LOG_WQ_PG_SZ.get32(queue),
        page_offset: wq::PAGE_OFFSET.get32(queue),
        pd: wq::PD.get32(queue),
        record: wq::DBR_ADDR.get(queue),
        limit: wq::LWM.get32(queue),
        xrc: None,
    };
    let rmpn = create_srq(model, &attributes)?;
    create_rmp_out::RMPN.set(output, rmpn);
    Ok(())
}

pub(super) fn destroy_rmp(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    destroy_srq(model, destroy_rmp_in::RMPN.get32(input), SrqKind::Rmp)
}

pub(super) fn query_rmp(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    let rmpn = query_rmp_in::RMPN.get32(input);
    let limit = model.engine.srq_limit(rmpn).unwrap_or(0);
    let srq = find(model, rmpn, SrqKind::Rmp)?;
    let context = query_rmp_out::RMP_CONTEXT.of_mut(output);
    context.copy_from_slice(&srq.context);
    wq::LWM.set(rmpc::WQ.of_mut(context), limit);
    Ok(())
}

/// Executes MODIFY_RMP. Only the limit can change.
pub(super) fn modify_rmp(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let rmpn = modify_rmp_in::RMPN.get32(input);
    let bitmask = modify_rmp_in::BITMASK.of(input);
    if !rmp_bitmask::LWM.is_set(bitmask) {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    let limit = wq::LWM.get32(rmpc::WQ.of(modify_rmp_in::CTX.of(input)));
    set_limit(model, rmpn, SrqKind::Rmp, limit)
}
