// SPDX-License-Identifier: MIT OR Apache-2.0

//! Completion queue commands.

use std::time::Duration;

use super::{CommandError, Outcome, refuse};
use crate::caps::limit;
use crate::cq::{Cq, Moderation};
use crate::layout::{constants, ifc::*, wire};
use crate::model::Model;
use crate::ring::{DoorbellRecord, Pages, Ring};

/// CQ status: overflow.
const OVERFLOW: u32 = 0x9;

/// Returns the logarithm of the CQE size in bytes.
fn log_entry(context: &[u8]) -> Result<u32, CommandError> {
    match cqc::CQE_SZ.get32(context) {
        constants::CQE_STRIDE_64 => Ok(wire::cqe64::BYTES.ilog2()),
        constants::CQE_STRIDE_128 => Ok(wire::cqe64::BYTES.ilog2() + 1),
        _ => Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR)),
    }
}

fn ring(context: &[u8], list: &[u8], log_entry: u32) -> Result<Ring, CommandError> {
    let log_size = cqc::LOG_CQ_SIZE.get32(context);
    if log_size > limit::LOG_CQ_SIZE {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    let pages = Pages::new(
        list,
        cqc::LOG_PAGE_SIZE.get32(context),
        cqc::PAGE_OFFSET.get32(context),
        1 << (log_size + log_entry),
    );
    pages
        .and_then(|pages| Ring::new(pages, 0, log_size, log_entry))
        .ok_or(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR))
}

fn moderation(context: &[u8]) -> Moderation {
    Moderation {
        period: Duration::from_micros(cqc::CQ_PERIOD.get(context)),
        count: cqc::CQ_MAX_COUNT.get32(context),
    }
}

pub(super) fn create(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    let context = create_cq_in::CQ_CONTEXT.of(input);
    // The capabilities exclude these features.
    if cqc::CQE_COMP_EN.is_set(context) || cqc::APU_CQ.is_set(context) || create_cq_in::CQ_UMEM_VALID.is_set(input) {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    let eqn = cqc::C_EQN_OR_APU_ELEMENT.get32(context);
    let uar = cqc::UAR_PAGE.get32(context);
    if model.hca.objects.eqs.get(eqn).is_none() || model.hca.objects.uars.get(uar).is_none() {
        return Err(refuse!(MLX5_CMD_STAT_BAD_RES_ERR));
    }
    let ring = ring(context, create_cq_in::PAS.of(input), log_entry(context)?)?;
    let record = DoorbellRecord(cqc::DBR_ADDR.get(context));
    let mut cq = Cq::new(ring, record, eqn, uar, context.to_vec());
    cq.ignore_overrun = cqc::OI.is_set(context);
    cq.moderation = moderation(context);
    let cqn = model.hca.objects.cqs.add(cq).ok_or(refuse!(MLX5_CMD_STAT_NO_RES_ERR))?;
    create_cq_out::CQN.set(output, cqn);
    Ok(())
}

pub(super) fn destroy(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let cqn = destroy_cq_in::CQN.get32(input);
    let used = model
        .hca
        .objects
        .qps
        .iter()
        .any(|(_, qp)| qp.send_cqn == cqn || qp.receive_cqn == cqn)
        || model.hca.objects.srqs.iter().any(|(_, srq)| srq.cqn == Some(cqn));
    if used {
        return Err(refuse!(MLX5_CMD_STAT_RES_BUSY));
    }
    model
        .hca
        .objects
        .cqs
        .remove(cqn)
        .map(drop)
        .ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))
}

pub(super) fn query(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    let cqn = query_cq_in::CQN.get32(input);
    let cq = model
        .hca
        .objects
        .cqs
        .get(cqn)
        .ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))?;
    let context = query_cq_out::CQ_CONTEXT.of_mut(output);
    context.copy_from_slice(&cq.context);
    let (producer, consumer) = cq.indices();
    cqc::PRODUCER_COUNTER.set(context, producer);
    cqc::CONSUMER_COUNTER.set(context, consumer);
    cqc::STATUS.set(context, if cq.broken() { OVERFLOW } else { 0 });
    cqc::ST.set(context, cq.arm_state());
    Ok(())
}

pub(super) fn modify(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let cqn = modify_cq_in::CQN.get32(input);
    let context = modify_cq_in::CQ_CONTEXT.of(input);
    let select = modify_cq_in::MODIFY_FIELD_SELECT_RESIZE_FIELD_SELECT.of(input);
    let dma = model.hca.dma.clone();
    let cq = model
        .hca
        .objects
        .cqs
        .get_mut(cqn)
        .ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))?;
    if modify_cq_in::OP_MOD.get32(input) == constants::MLX5_CQ_OPMOD_RESIZE {
        let select = resize_field_select::RESIZE_FIELD_SELECT.get32(select);
        let needed = constants::MLX5_MODIFY_CQ_MASK_LOG_SIZE
            | constants::MLX5_MODIFY_CQ_MASK_PG_OFFSET
            | constants::MLX5_MODIFY_CQ_MASK_PG_SIZE;
        if select != needed {
            return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
        }
        let ring = ring(context, modify_cq_in::PAS.of(input), log_entry(context)?)?;
        cq.resize(&dma, ring)
            .map_err(|_| refuse!(MLX5_CMD_STAT_BAD_SIZE_OUTS_CQES_ERR))?;
        for field in [cqc::LOG_CQ_SIZE, cqc::CQE_SZ, cqc::LOG_PAGE_SIZE, cqc::PAGE_OFFSET] {
            field.set(&mut cq.context, field.get(context));
        }
        return Ok(());
    }
    let select = modify_field_select::MODIFY_FIELD_SELECT.get32(select);
    let moderation = moderation(context);
    let known = constants::MLX5_CQ_MODIFY_PERIOD
        | constants::MLX5_CQ_MODIFY_COUNT
        | constants::MLX5_CQ_MODIFY_OVERRUN
        | constants::MLX5_CQ_MODIFY_PERIOD_MODE;
    if select & !known != 0 {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    if select & constants::MLX5_CQ_MODIFY_PERIOD != 0 {
        cq.moderation.period = moderation.period;
        cqc::CQ_PERIOD.set(&mut cq.context, cqc::CQ_PERIOD.get(context));
    }
    if select & constants::MLX5_CQ_MODIFY_COUNT != 0 {
        cq.moderation.count = moderation.count;
        cqc::CQ_MAX_COUNT.set(&mut cq.context, cqc::CQ_MAX_COUNT.get(context));
    }
    if select & constants::MLX5_CQ_MODIFY_OVERRUN != 0 {
        cq.ignore_overrun = cqc::OI.is_set(context);
        cqc::OI.set(&mut cq.context, cqc::OI.get(context));
    }
    Ok(())
}
