// SPDX-License-Identifier: MIT OR Apache-2.0

//! HCA vport commands: context, GIDs, P_Keys, state.

use p2pmem_ib::Fabric;

use super::{Outcome, refuse};
use crate::layout::ifc::*;
use crate::model::Model;

/// Index that selects all entries of a table.
const ALL: u32 = 0xffff;
/// Logical port states, with the values of the InfiniBand specification.
mod state {
    pub(super) const DOWN: u32 = 1;
    pub(super) const ACTIVE: u32 = 4;
}
/// Physical port states.
mod physical {
    pub(super) const POLLING: u32 = 2;
    pub(super) const LINK_UP: u32 = 5;
}
/// Port capability mask (PortInfo:CapabilityMask).
pub(crate) mod capability {
    /// System image GUID, extended speeds.
    const FIXED: u32 = (1 << 11) | (1 << 14);
    /// A communication manager is present. The driver sets this bit.
    pub(crate) const COMMUNICATION_MANAGEMENT: u32 = 1 << 16;
    /// Bits that the driver may set.
    pub(crate) const SETTABLE: u32 = COMMUNICATION_MANAGEMENT;
    /// Initial value.
    pub(crate) const INITIAL: u32 = FIXED;
}
/// Subnet timeout: 4.096 us * 2^18.
const SUBNET_TIMEOUT: u32 = 18;

pub(super) fn query_context(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    if query_hca_vport_context_in::OTHER_VPORT.is_set(input) {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    let hca = &*model.hca;
    let up = hca.port_up();
    let context = query_hca_vport_context_out::HCA_VPORT_CONTEXT.of_mut(output);
    use hca_vport_context as context_field;
    let logical = if up { state::ACTIVE } else { state::DOWN };
    context_field::PORT_STATE.set(context, logical);
    context_field::VPORT_STATE.set(context, logical);
    let physical = if up { physical::LINK_UP } else { physical::POLLING };
    context_field::PORT_PHYSICAL_STATE.set(context, physical);
    context_field::SYSTEM_IMAGE_GUID.set(context, hca.identity.node_guid);
    context_field::NODE_GUID.set(context, hca.identity.node_guid);
    context_field::PORT_GUID.set(context, hca.identity.port_guid);
    context_field::CAP_MASK1.set(context, hca.objects.port_capabilities);
    context_field::CAP_MASK1_FIELD_SELECT.set(context, capability::SETTABLE);
    context_field::LID.set(context, hca.attributes.lid);
    context_field::LMC.set(context, hca.attributes.lmc);
    context_field::SM_LID.set(context, Fabric::SM_LID);
    context_field::SUBNET_TIMEOUT.set(context, SUBNET_TIMEOUT);
    let counters = model.engine.counters();
    context_field::PKEY_VIOLATION_COUNTER.set(context, counters.pkey_violations.min(0xffff));
    context_field::QKEY_VIOLATION_COUNTER.set(context, counters.qkey_violations.min(0xffff));
    Ok(())
}

pub(super) fn modify_context(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let context = modify_hca_vport_context_in::HCA_VPORT_CONTEXT.of(input);
    // The driver may change only the capability bits, which have their own field select mask.
    let mask = hca_vport_context::CAP_MASK1_FIELD_SELECT.get32(context);
    if modify_hca_vport_context_in::OTHER_VPORT.is_set(input) || mask & !capability::SETTABLE != 0 {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    let value = hca_vport_context::CAP_MASK1.get32(context);
    let now = &mut model.hca.objects.port_capabilities;
    *now = *now & !mask | value & mask;
    Ok(())
}

/// Copies one or all entries of a table to the output, from offset `start` on.
fn table<T: AsRef<[u8]>>(index: u32, output: &mut [u8], start: usize, entries: &[T]) -> Outcome {
    let chosen = if index == ALL {
        entries
    } else {
        let entry = entries.get(index as usize..index as usize + 1);
        entry.ok_or(refuse!(MLX5_CMD_STAT_IX_ERR))?
    };
    let mut rest = output.get_mut(start..).unwrap_or(&mut []);
    for entry in chosen {
        let entry = entry.as_ref();
        let Some((to, after)) = rest.split_at_mut_checked(entry.len()) else {
            return Err(refuse!(MLX5_CMD_STAT_BAD_OUTP_LEN_ERR));
        };
        to.copy_from_slice(entry);
        rest = after;
    }
    Ok(())
}

pub(super) fn query_gid(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    let gids: Vec<[u8; 16]> = model.hca.attributes.gids.iter().map(|gid| gid.0).collect();
    let index = query_hca_vport_gid_in::GID_INDEX.get32(input);
    let number = if index == ALL { gids.len() as u64 } else { 1 };
    query_hca_vport_gid_out::GIDS_NUM.set(output, number);
    table(index, output, query_hca_vport_gid_out::GID.offset(), &gids)
}

pub(super) fn query_pkey(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    let entry = |value: &u16| {
        let mut entry = [0; pkey::BYTES];
        pkey::PKEY.set(&mut entry, *value);
        entry
    };
    let pkeys: Vec<_> = model.hca.attributes.pkeys.iter().map(entry).collect();
    let index = query_hca_vport_pkey_in::PKEY_INDEX.get32(input);
    table(index, output, query_hca_vport_pkey_out::PKEY.offset(), &pkeys)
}

pub(super) fn query_state(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    const UP: u32 = 1;
    if query_vport_state_in::OTHER_VPORT.is_set(input) {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    query_vport_state_out::ADMIN_STATE.set(output, UP);
    let state = if model.hca.port_up() { UP } else { 0 };
    query_vport_state_out::STATE.set(output, state);
    Ok(())
}
