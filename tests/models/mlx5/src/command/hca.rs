// SPDX-License-Identifier: MIT OR Apache-2.0

//! Commands about the adapter as a whole.

use super::{Outcome, Phase, refuse};
use crate::caps::{Caps, Kind};
use crate::layout::ifc::*;
use crate::model::Model;

/// Mellanox' number among the IEEE's vendors.
const IEEE_VENDOR: u32 = 0x02c9;
/// What the driver shows as the board's name. Of a kind that no board maker uses.
const BOARD: &[u8] = b"P2PMEM_MODEL";
/// The key of physical addresses that the driver may use in its own requests; not one that is handed out.
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

/// Interface revision 0 only: with revision 1, shared receive queues would be made of other objects.
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

/// The model needs none of the driver's memory.
pub(super) fn query_pages(_: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    query_pages_out::FUNCTION_ID.set(output, query_pages_in::FUNCTION_ID.get(input));
    query_pages_out::NUM_PAGES.set(output, 0_u32);
    Ok(())
}

/// The adapter requests no pages: it ignores pages that the driver gives, and has none to return.
pub(super) fn manage_pages(_: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    const CANNOT_GIVE: u64 = 0;
    const TAKE: u64 = 2;
    match manage_pages_in::OP_MOD.get(input) {
        CANNOT_GIVE => Ok(()),
        TAKE => {
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
    let Some(kind) = Kind::new(op_mod >> 1) else {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    };
    let to = query_hca_cap_out::CAPABILITY.of_mut(output);
    // The lowest bit asks for the present values.
    if op_mod & 1 != 0 {
        to.copy_from_slice(model.hca.objects.caps.current(kind));
    } else {
        to.copy_from_slice(&Caps::largest(kind));
    }
    Ok(())
}

pub(super) fn set_cap(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    if model.hca.objects.phase != Phase::Enabled {
        return Err(refuse!(MLX5_CMD_STAT_BAD_SYS_STATE_ERR));
    }
    let kind = Kind::new(set_hca_cap_in::OP_MOD.get32(input) >> 1);
    let Some(kind) = kind.filter(|_| !set_hca_cap_in::OTHER_FUNCTION.is_set(input)) else {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    };
    if !model.hca.objects.caps.set(kind, set_hca_cap_in::CAPABILITY.of(input)) {
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
    tracing::info!(version = text.trim_end_matches('\0'), "driver");
    Ok(())
}

pub(super) fn nop(_: &mut Model<'_>, _: &[u8], _: &mut [u8]) -> Outcome {
    Ok(())
}

pub(super) fn special_contexts(_: &mut Model<'_>, _: &[u8], output: &mut [u8]) -> Outcome {
    query_special_contexts_out::RESD_LKEY.set(output, RESERVED_LKEY);
    Ok(())
}
