// SPDX-License-Identifier: MIT OR Apache-2.0

//! Event queue commands.

use super::{Outcome, refuse};
use crate::caps::limit;
use crate::eq::{Eq, EventType};
use crate::layout::{constants, ifc::*, wire};
use crate::model::Model;
use crate::registers::VECTORS;
use crate::ring::{Pages, Ring};

/// Logarithm of the EQE size in bytes.
const LOG_ENTRY: u32 = wire::eqe::BYTES.ilog2();

pub(super) fn create(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    let context = create_eq_in::EQ_CONTEXT_ENTRY.of(input);
    let log_size = eqc::LOG_EQ_SIZE.get32(context);
    let vector = eqc::INTR.get32(context);
    let uar = eqc::UAR_PAGE.get32(context);
    if log_size > limit::LOG_EQ_SIZE || vector >= u32::from(VECTORS) || model.hca.objects.uars.get(uar).is_none() {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    let pages = Pages::new(
        create_eq_in::PAS.of(input),
        eqc::LOG_PAGE_SIZE.get32(context),
        eqc::PAGE_OFFSET.get32(context),
        1 << (log_size + LOG_ENTRY),
    );
    let ring = pages.and_then(|pages| Ring::new(pages, 0, log_size, LOG_ENTRY));
    let ring = ring.ok_or(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR))?;
    let mut mask = [0; 4];
    for (i, word) in mask.iter_mut().enumerate() {
        *word = create_eq_in::EVENT_BITMASK.at(i).get(input);
    }
    // At most one EQ may subscribe to an event type.
    let taken = model.hca.objects.eqs.iter();
    if taken
        .into_iter()
        .any(|(_, eq)| eq.mask.iter().zip(&mask).any(|(a, b)| a & b != 0))
    {
        return Err(refuse!(MLX5_CMD_STAT_RES_BUSY));
    }
    // Not truncated: below VECTORS.
    let eq = Eq::new(ring, vector as u16, uar, mask, context.to_vec());
    let faults = eq.subscribes_to(EventType::PAGE_FAULT);
    let eqn = model.hca.objects.eqs.add(eq).ok_or(refuse!(MLX5_CMD_STAT_NO_RES_ERR))?;
    if faults {
        model.hca.objects.mkeys.enable_page_faults(true);
    }
    create_eq_out::EQ_NUMBER.set(output, eqn);
    Ok(())
}

pub(super) fn destroy(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let eqn = destroy_eq_in::EQ_NUMBER.get32(input);
    if model.hca.objects.cqs.iter().any(|(_, cq)| cq.eqn == eqn) {
        return Err(refuse!(MLX5_CMD_STAT_RES_BUSY));
    }
    let eq = model
        .hca
        .objects
        .eqs
        .remove(eqn)
        .ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))?;
    if eq.subscribes_to(EventType::PAGE_FAULT) {
        // No page fault can be resumed without an EQ.
        model.fail_page_faults();
    }
    Ok(())
}

pub(super) fn query(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    let eqn = query_eq_in::EQ_NUMBER.get32(input);
    let eq = model
        .hca
        .objects
        .eqs
        .get(eqn)
        .ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))?;
    let context = query_eq_out::EQ_CONTEXT_ENTRY.of_mut(output);
    context.copy_from_slice(&eq.context);
    let (producer, consumer) = eq.indices();
    eqc::PRODUCER_COUNTER.set(context, producer);
    eqc::CONSUMER_COUNTER.set(context, consumer);
    let state = if eq.armed() {
        constants::MLX5_CQ_STATE_ARMED
    } else {
        constants::MLX5_CQ_STATE_FIRED
    };
    eqc::ST.set(context, state);
    query_eq_out::EVENT_BITMASK.set(output, eq.mask[0]);
    Ok(())
}
