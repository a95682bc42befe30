// SPDX-License-Identifier: MIT OR Apache-2.0

//! HCA commands: enable, initialise, capabilities, pages.

use super::{Outcome, Phase, refuse};
use crate::caps::{CapType, Caps};
use crate::layout::ifc::*;
use crate::model::Model;

/// IEEE vendor ID (OUI) of Mellanox.
const IEEE_VENDOR: u32 = 0x02c9;
/// Board ID (PSID). No vendor uses this value.
const BOARD: &[u8] = b"P2PMEM_MODEL";
/// Reserved lkey of physical addresses for work requests of the kernel. No created mkey has this number.
const RESERVED_LKEY: u32 = 0xff;

pub(super) fn enable(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    if enable_hca_in::FUNCTION_ID.is_set(input) {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    if model.hca.objects.phase == Phase::Initialised {
        return Err(refuse!(MLX5_CMD_STAT_BAD_SYS_STATE_ERR));
    }
    model.hca.objects.phase = Phase::Enabled;
    Ok(())
}

pub(super) fn disable(model: &mut Model<'_>, _: &[u8], _: &mut [u8]) -> Outcome {
    if model.hca.objects.phase == Phase::Initialised {
        return Err(refuse!(MLX5_CMD_STAT_BAD_SYS_STATE_ERR));
    }
    model.clear();
    Ok(())
}

/// Offers ISSI 0 only. With ISSI 1, the driver would create basic SRQs as other objects.
pub(super) fn query_issi(_: &mut Model<'_>, _: &[u8], output: &mut [u8]) -> Outcome {
    query_issi_out::SUPPORTED_ISSI_DW0.set(output, 1_u32);
    Ok(())
}

pub(super) fn set_issi(_: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    if set_issi_in::CURRENT_ISSI.is_set(input) {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    Ok(())
}

/// The model needs no pages of host memory.
pub(super) fn query_pages(_: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    query_pages_out::FUNCTION_ID.set(output, query_pages_in::FUNCTION_ID.get(input));
    query_pages_out::NUM_PAGES.set(output, 0_u32);
    Ok(())
}

/// Refuses pages that the driver gives, because none were requested, and has no pages to return.
pub(super) fn manage_pages(_: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    const PAGES_CANT_GIVE: u64 = 0;
    const PAGES_TAKE: u64 = 2;
    match manage_pages_in::OP_MOD.get(input) {
        PAGES_CANT_GIVE => Ok(()),
        PAGES_TAKE => {
            manage_pages_out::OUTPUT_NUM_ENTRIES.set(output, 0_u32);
            Ok(())
        }
        _ => Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR)),
    }
}

pub(super) fn query_cap(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    if query_hca_cap_in::OTHER_FUNCTION.is_set(input) {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    let op_mod = query_hca_cap_in::OP_MOD.get32(input);
    let Some(cap_type) = CapType::new(op_mod >> 1) else {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    };
    let to = query_hca_cap_out::CAPABILITY.of_mut(output);
    // Bit 0 of op_mod selects the current values instead of the maximum values.
    if op_mod & 1 != 0 {
        to.copy_from_slice(model.hca.objects.caps.current(cap_type));
    } else {
        to.copy_from_slice(&Caps::max(cap_type));
    }
    Ok(())
}

pub(super) fn set_cap(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    if model.hca.objects.phase != Phase::Enabled {
        return Err(refuse!(MLX5_CMD_STAT_BAD_SYS_STATE_ERR));
    }
    let cap_type = CapType::new(set_hca_cap_in::OP_MOD.get32(input) >> 1);
    let Some(cap_type) = cap_type.filter(|_| !set_hca_cap_in::OTHER_FUNCTION.is_set(input)) else {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    };
    if !model
        .hca
        .objects
        .caps
        .set(cap_type, set_hca_cap_in::CAPABILITY.of(input))
    {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    Ok(())
}

pub(super) fn init(model: &mut Model<'_>, _: &[u8], _: &mut [u8]) -> Outcome {
    if model.hca.objects.phase != Phase::Enabled {
        return Err(refuse!(MLX5_CMD_STAT_BAD_SYS_STATE_ERR));
    }
    model.hca.objects.phase = Phase::Initialised;
    Ok(())
}

pub(super) fn teardown(model: &mut Model<'_>, _: &[u8], output: &mut [u8]) -> Outcome {
    if model.hca.objects.phase != Phase::Initialised {
        return Err(refuse!(MLX5_CMD_STAT_BAD_SYS_STATE_ERR));
    }
    model.clear();
    model.hca.objects.phase = Phase::Enabled;
    teardown_hca_out::STATE.set(output, 0_u32);
    Ok(())
}

pub(super) fn query_adapter(_: &mut Model<'_>, _: &[u8], output: &mut [u8]) -> Outcome {
    let block = query_adapter_out::QUERY_ADAPTER_STRUCT.of_mut(output);
    query_adapter_param_block::IEEE_VENDOR_ID.set(block, IEEE_VENDOR);
    let board = query_adapter_param_block::VSD_CONTD_PSID.of_mut(block);
    board[..BOARD.len()].copy_from_slice(BOARD);
    Ok(())
}

pub(super) fn set_driver_version(_: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let version = set_driver_version_in::DRIVER_VERSION.of(input);
    let text = String::from_utf8_lossy(version);
    tracing::info!(version = text.trim_end_matches('\0'), "driver version");
    Ok(())
}

pub(super) fn nop(_: &mut Model<'_>, _: &[u8], _: &mut [u8]) -> Outcome {
    Ok(())
}

pub(super) fn special_contexts(_: &mut Model<'_>, _: &[u8], output: &mut [u8]) -> Outcome {
    query_special_contexts_out::RESD_LKEY.set(output, RESERVED_LKEY);
    Ok(())
}
